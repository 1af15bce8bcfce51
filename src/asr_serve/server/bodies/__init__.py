"""Request bodies, read as they arrive."""
