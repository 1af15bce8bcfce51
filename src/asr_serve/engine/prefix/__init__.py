"""What was heard and said before, for whoever brings the same again."""
