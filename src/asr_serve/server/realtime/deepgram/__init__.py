"""Deepgram's live transcription: the WebSocket `/v1/listen`."""
