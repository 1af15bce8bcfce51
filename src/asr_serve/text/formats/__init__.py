"""A transcript as text, JSON, subtitles, and as tables for other programs."""
