"""FunASR's API: the form of `POST /asr` and the messages of its WebSocket."""
