"""Training of models that are not published elsewhere: voices, vocoders, streaming encoders. Commands: `asr-serve
train`, and `python -m asr_serve_tools.train.NAME --help` for streaming_encoder and speaker_similarities."""
