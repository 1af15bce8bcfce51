"""Text normalization: spoken words to written numbers, dates and money (`inverse*`), and the reverse
(`verbalize*`)."""
