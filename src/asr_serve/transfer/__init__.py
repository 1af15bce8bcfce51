"""Roads between processes. `ring`: PCM from the server's process to the engine's, through shared memory."""
