"""wenet."""
