"""The engine in a process of its own: what the two say (wire), who serves (host), who asks (link, child)."""
