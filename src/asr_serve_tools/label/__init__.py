"""Pseudo-labels for untranscribed speech, from the agreement of two models."""
