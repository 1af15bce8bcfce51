"""Chain models of Kaldi."""
