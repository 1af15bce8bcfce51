"""Training of a speech LLM: an adaptor between an encoder of Whisper and a causal language model."""
