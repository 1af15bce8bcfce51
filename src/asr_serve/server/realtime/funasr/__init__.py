"""FunASR's WebSocket protocol: `/` and `/ws`."""
