"""NeMo's log-mel spectrogram, 100 frames a second, for windows of streaming sessions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asr_serve import units
from asr_serve.audio.features.whisper_log_mel import mel_filters
from asr_serve.errors import WeightsCorrupt

WINDOW_SAMPLES = 400
HOP_SAMPLES = 160
FFT_SAMPLES = 512
PREEMPHASIS = 0.97
GUARD = 2.0**-24
"""Added to the power, before the logarithm."""
BEFORE_SAMPLES = WINDOW_SAMPLES // 2 + 1
"""Samples from the first that a frame needs to its centre: half a window, and one for the preemphasis."""

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "sample_rate": (units.RATE_HZ,),
    "window_size": (WINDOW_SAMPLES / units.RATE_HZ,),
    "window_stride": (HOP_SAMPLES / units.RATE_HZ,),
    "window": ("hann",),
    "n_fft": (FFT_SAMPLES, None),
    "preemph": (PREEMPHASIS,),
    "lowfreq": (0,),
    "highfreq": (None, units.RATE_HZ // 2),
    "log": (True,),
    "log_zero_guard_type": ("add",),
    "log_zero_guard_value": (GUARD,),
    "mag_power": (2.0,),
    "frame_splicing": (1,),
    "exact_pad": (False,),
    "pad_value": (0,),
    "mel_norm": ("slaney",),
}
"""Values that a checkpoint may set for the settings that change the numbers. The default is the first value,
except for the two settings in `_DEFAULTS`."""
_DEFAULTS: dict[str, Any] = {"normalize": "per_feature", "window_size": 0.02}


def check(settings: dict[str, Any]) -> None:
    """Raise WeightsCorrupt unless a checkpoint's section `preprocessor` describes what NemoMel computes."""
    settings = _DEFAULTS | settings
    if settings["normalize"] not in ("NA", None, False, ""):
        raise WeightsCorrupt(
            f"preprocessor.normalize={settings['normalize']!r}",
            "NA: other kinds need the end of the audio before its start can be heard",
            "use a checkpoint that was trained for streaming",
        )
    for name, allowed in _ALLOWED.items():
        if name in settings and settings[name] not in allowed:
            raise WeightsCorrupt(f"preprocessor.{name}={settings[name]!r}", f"{allowed[0]!r}")


class NemoMel:
    """Log-mel frames of a window of each session, at any position.

    In      pcm (rows, samples) float32 in -1..1, 16 kHz, zero outside the session: from BEFORE_SAMPLES before the
            centre of the first frame on, to half a window after the last one's
            first (rows,) int64: index of that first frame in the session, below zero before its start
            ends (rows,) int64: samples of the session
    Out     (rows, frames, mels) float32, natural logarithm of power; frame t is centred on sample 160 t, and there
            are ends // 160 of them: others are zero
    Source  numbers match NeMo's AudioToMelSpectrogramPreprocessor; tests/audio/features/test_nemo_mel.py
    """

    def __init__(self, mels: int, device: torch.device) -> None:
        # A symmetric window: its first and last samples are zero.
        self.hann = torch.hann_window(WINDOW_SAMPLES, periodic=False, device=device)
        self.filters = mel_filters(mels, FFT_SAMPLES).float().T.contiguous().to(device)

    def __call__(self, pcm: Tensor, first: Tensor, ends: Tensor) -> Tensor:
        at = torch.arange(1, pcm.shape[1], device=pcm.device) + (first[:, None] * HOP_SAMPLES - BEFORE_SAMPLES)
        emphasised = pcm[:, 1:] - PREEMPHASIS * pcm[:, :-1]
        # Without this, preemphasis would put an echo of the last sample after it.
        emphasised.masked_fill_(at >= ends[:, None], 0.0)
        windows = emphasised.unfold(1, WINDOW_SAMPLES, HOP_SAMPLES) * self.hann
        # Padded with zeros only after the window, where NeMo pads both sides: that changes phases, not power.
        power = torch.view_as_real(torch.fft.rfft(windows, n=FFT_SAMPLES)).square().sum(-1)
        mels = (power @ self.filters).add_(GUARD).log_()
        frame = first[:, None] + torch.arange(mels.shape[1], device=pcm.device)
        outside = (frame < 0) | (frame >= ends[:, None] // HOP_SAMPLES)
        return mels.masked_fill_(outside[:, :, None], 0.0)
