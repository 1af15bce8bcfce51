"""Training of our own voices: speech of other voices, or of a person, and models trained on it."""
