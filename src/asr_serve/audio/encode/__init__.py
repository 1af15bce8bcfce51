"""Samples in, bytes of an audio format out, while they are made. START HERE: encoder. framing: what is around
packets; codec: FFmpeg's encoders."""

from asr_serve.audio.encode.encoder import FORMATS, MARK, Encoder, content_type

__all__ = ["FORMATS", "MARK", "Encoder", "content_type"]
