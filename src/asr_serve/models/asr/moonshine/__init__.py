"""Moonshine and Moonshine Streaming."""
