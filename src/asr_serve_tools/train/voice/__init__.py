"""Voices of our own: speech that other voices make, or that somebody has read, and what is taught with it."""
