"""Transfer of bytes between processes, engines and disk. `ring`: PCM from the server's process to the engine's,
through shared memory."""
