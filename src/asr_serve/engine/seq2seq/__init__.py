"""Models that hear an utterance as a whole: encoded in batches, decoded together."""
