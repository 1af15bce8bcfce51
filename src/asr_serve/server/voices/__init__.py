"""Cloned voices of a server: the queue of clonings, and the routes."""
