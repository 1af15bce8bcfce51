"""WeNet models."""
