"""Voice models, one file each; see models/registry.py."""
