"""Wyoming on a TCP port of its own."""
