"""Recorded files to transcripts."""
