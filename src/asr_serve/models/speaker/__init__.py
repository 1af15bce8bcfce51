"""Speaker models, one file each: 16 kHz samples in, whose voice it is out."""
