"""whisper-asr-webservice: wire format of its routes."""
