"""vLLM as the engine of a speech LLM's language model, in a process and a Python environment of its own."""
