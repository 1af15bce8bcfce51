"""Samples to G.711, without a container as telephony takes them, or in WAV."""

from __future__ import annotations

import numpy as np

from asr_serve.audio.encode.stream_encoder import AudioEncoder
from asr_serve.audio.pcm import alaw_table, companding_codes, mulaw_table, wav_header

WAV_TAGS = {"mulaw": 7, "alaw": 6}
"""Encoding -> format tag of a WAV header."""
WAV_SUFFIX = "-wav"
COMPANDED_FORMATS = (*WAV_TAGS, *(f"{encoding}{WAV_SUFFIX}" for encoding in WAV_TAGS))


class CompandedEncoder(AudioEncoder):
    """Encoder of mono samples to one byte each. As AudioEncoder, for COMPANDED_FORMATS."""

    def __init__(self, form: str, rate_hz: int) -> None:
        super().__init__("pcm", rate_hz)
        encoding = form.removesuffix(WAV_SUFFIX)
        self.form, self.content_type = form, "audio/basic" if encoding == "mulaw" else "audio/x-alaw-basic"
        self._file_header = b""
        """Header of the file, until it is written."""
        if encoding != form:
            self.content_type = "audio/wav"
            self._file_header = wav_header(rate_hz, format_tag=WAV_TAGS[encoding], sample_bytes=1)
        self._codes = companding_codes(mulaw_table() if encoding == "mulaw" else alaw_table())

    def encode(self, pcm: np.ndarray) -> bytes:
        return self._compand(super().encode(pcm))

    def finish(self) -> bytes:
        return self._compand(super().finish())

    def _compand(self, pcm: bytes) -> bytes:
        coded: np.ndarray = self._codes[np.frombuffer(pcm, "<u2")]
        header, self._file_header = self._file_header, b""
        return header + coded.tobytes()


def create_audio_encoder(form: str, rate_hz: int) -> AudioEncoder:
    """Encoder of any format. Raises as AudioEncoder does."""
    return CompandedEncoder(form, rate_hz) if form in COMPANDED_FORMATS else AudioEncoder(form, rate_hz)
