"""`/v1/stream`: sessions that outlive their connections, over WebSocket and HTTP."""
