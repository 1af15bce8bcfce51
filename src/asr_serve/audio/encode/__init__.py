"""Samples to the bytes of an audio format, as a stream. Start with `stream_encoder`; `container_writers` writes
what surrounds packets, `packet_encoder` runs FFmpeg's encoders."""

from asr_serve.audio.encode.stream_encoder import (
    FORMATS,
    SYNTHETIC_SPEECH_COMMENT,
    AudioEncoder,
    content_type,
    encoded_file,
)

__all__ = ["FORMATS", "SYNTHETIC_SPEECH_COMMENT", "AudioEncoder", "content_type", "encoded_file"]
