"""Voice activity networks, one file each: 16 kHz samples in, speech probabilities out."""
