"""Speeches: what becomes of a text that somebody wants to hear, and who takes it. No ASGI app here."""
