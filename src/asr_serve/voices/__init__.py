"""Cloned voices on disk: cards, consent, store, and the messages of cloning."""
