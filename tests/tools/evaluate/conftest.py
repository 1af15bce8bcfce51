"""Fixtures of a server of ours, which evaluations ask like any other."""

from running_server import ingress_host, parts, serve, server, shared_server  # noqa: F401
