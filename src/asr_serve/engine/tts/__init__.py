"""Sentences said, whole or chunk by chunk, for many callers at once."""
