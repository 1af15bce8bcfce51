"""Riva's gRPC services on a port of their own. `packages` loads the rest, which needs the extra `riva`."""
