"""Messages of `/v1/stream` and `/v1/audio/speech/stream`."""
