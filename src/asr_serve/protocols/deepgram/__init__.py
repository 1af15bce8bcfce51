"""Deepgram's protocols: `/v1/listen` and `/v1/speak`, over HTTP and WebSockets."""
