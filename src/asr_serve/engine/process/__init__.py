"""Engine in a process of its own: messages (messages), the engine's side (main), the server's side (client,
supervisor, in_flight, process)."""
