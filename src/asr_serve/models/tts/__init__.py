"""Voice models, one file each; see models/card.py."""
