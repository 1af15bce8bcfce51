"""Samples to G.711 without a container, as telephony takes them."""

from __future__ import annotations

import numpy as np

from asr_serve.audio.encode.stream_encoder import AudioEncoder
from asr_serve.audio.pcm import alaw_table, companding_codes, mulaw_table

COMPANDED_FORMATS = ("mulaw", "alaw")


class CompandedEncoder(AudioEncoder):
    """Encoder of mono samples to one byte each. As AudioEncoder, for COMPANDED_FORMATS."""

    def __init__(self, form: str, rate_hz: int) -> None:
        super().__init__("pcm", rate_hz)
        self.form, self.content_type = form, "audio/basic" if form == "mulaw" else "audio/x-alaw-basic"
        self._codes = companding_codes(mulaw_table() if form == "mulaw" else alaw_table())

    def encode(self, pcm: np.ndarray) -> bytes:
        return self._compand(super().encode(pcm))

    def finish(self) -> bytes:
        return self._compand(super().finish())

    def _compand(self, pcm: bytes) -> bytes:
        coded: np.ndarray = self._codes[np.frombuffer(pcm, "<u2")]
        return coded.tobytes()


def create_audio_encoder(form: str, rate_hz: int) -> AudioEncoder:
    """Encoder of any format. Raises as AudioEncoder does."""
    return CompandedEncoder(form, rate_hz) if form in COMPANDED_FORMATS else AudioEncoder(form, rate_hz)
