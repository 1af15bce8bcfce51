"""What `asr-serve speak` is made of: who speaks, where the sound goes, what is told of it."""
