"""A recording or a speaker in, text while it comes: what `Model.stream` returns."""
