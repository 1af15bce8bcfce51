"""Several replicas of an engine behind one client: connections (remote_engine), choice (routing), work in flight
(backend)."""
