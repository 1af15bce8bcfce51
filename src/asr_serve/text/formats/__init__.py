"""Output formats of transcripts: text, JSON, subtitles, and tables for other programs."""
