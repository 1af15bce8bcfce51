"""Streaming models: many sessions, a chunk of each in every step."""
