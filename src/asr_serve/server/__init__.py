"""HTTP and WebSocket server: the APIs of OpenAI and FunASR, and its own."""
