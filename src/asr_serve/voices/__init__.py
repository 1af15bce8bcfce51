"""Cloned voices, on disk: what each is, whose it is, and who agreed to it."""
