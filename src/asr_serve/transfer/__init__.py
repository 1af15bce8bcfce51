"""Transfer of bytes between processes, engines and disk. `ring`: PCM to the engine's process by shared memory."""
