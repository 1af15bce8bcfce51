"""Samples in, bytes of an audio format out, while they are made. START HERE: encoder. framing: what is around
packets; codec: FFmpeg's encoders."""

from asr_serve.audio.encode.stream_encoder import FORMATS, SYNTHETIC_SPEECH_COMMENT, AudioEncoder, content_type

__all__ = ["FORMATS", "SYNTHETIC_SPEECH_COMMENT", "AudioEncoder", "content_type"]
