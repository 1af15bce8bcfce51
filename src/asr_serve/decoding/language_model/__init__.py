"""N-gram language models: files, training, and queries of all hypotheses of a search at once."""
