"""Voice cloning: selects training material from a speaker's recordings, and fine-tunes a model on it."""
