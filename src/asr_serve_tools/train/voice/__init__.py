"""Training of our own voices: speech synthesized by other voices, or read by a person, and models trained on
it."""
