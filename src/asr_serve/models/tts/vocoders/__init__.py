"""Vocoders, one file each: mel frames and pitch in, samples out, a chunk of many sentences at a time."""
