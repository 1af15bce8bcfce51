"""Request bodies, parsed while they arrive."""
