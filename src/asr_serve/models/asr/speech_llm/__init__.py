"""Speech LLMs: an audio encoder, an adaptor and a causal language model."""
