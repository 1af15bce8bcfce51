"""Text-to-speech models, one file each; see models/registry.py."""
