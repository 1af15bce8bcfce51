"""Building blocks of NeMo models, and the reader of their archives."""
