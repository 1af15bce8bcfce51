"""Fixtures of the edge tests: the servers of the server tests."""

from running_server import cities, parts, serve, server, shared_server  # noqa: F401
