"""whisper.cpp: wire format of its server."""
