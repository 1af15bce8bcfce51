"""Reference of the native layers before the LSTM of voice activity (models/auxiliary/silero)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

WINDOW_SAMPLES, CONTEXT_SAMPLES, FFT_SAMPLES, HOP_SAMPLES = 512, 64, 256, 128
STRIDES = (1, 2, 2, 1)
BLOCK_WINDOWS = 256
"""Windows of a block: enough to fill matrix products, few enough to stay in cache."""


class VoiceActivityEncoder:
    """Layers before the LSTM: spectra, convolutions and the LSTM's input gates."""

    def __init__(self, convs: Sequence[Tensor], biases: Sequence[Tensor], gates: Tensor, gates_bias: Tensor) -> None:
        """`convs`: weights (outputs, inputs, 3) of four convolutions with `biases` (outputs,); `gates` (512, 128) and
        `gates_bias` (512,): the LSTM's input, both of its biases added up. float32."""
        self._convs, self._biases, self._gates, self._gates_bias = convs, biases, gates, gates_bias
        self._hann = torch.hann_window(FFT_SAMPLES, device=gates.device)

    def run(self, pcm: Tensor, context: Tensor, counts: Tensor, offsets: Tensor, gates: Tensor) -> None:
        """Writes the gate inputs of row r's first counts[r] windows to `gates` (steps, 512) from step offsets[r].

        pcm (rows, samples) float32, whole windows of 512, past a row's own never read; context (rows, 64): the samples
        before them; counts, offsets (rows,) int64.
        """
        with_context = torch.cat([context, pcm], 1).unfold(1, CONTEXT_SAMPLES + WINDOW_SAMPLES, WINDOW_SAMPLES)
        number = torch.arange(pcm.shape[1] // WINDOW_SAMPLES, device=pcm.device)
        is_live = number < counts.to(pcm.device)[:, None]
        steps = (offsets.to(pcm.device)[:, None] + number)[is_live]
        blocks = with_context[is_live]
        for at in range(0, len(blocks), BLOCK_WINDOWS):
            gates[steps[at : at + BLOCK_WINDOWS]] = self._block(blocks[at : at + BLOCK_WINDOWS])

    def _block(self, windows: Tensor) -> Tensor:
        """Gate inputs (n, 512) of windows with their context (n, 64 + 512)."""
        # The fourth spectrum runs 64 samples past the window; the model mirrors the window's own end there (the
        # last sample is not repeated) instead of waiting for the next window.
        mirrored = F.pad(windows, (0, CONTEXT_SAMPLES), mode="reflect")
        frames = mirrored.unfold(1, FFT_SAMPLES, HOP_SAMPLES) * self._hann
        spectrum = torch.view_as_real(torch.fft.rfft(frames)).square_()
        x = (spectrum[..., 0] + spectrum[..., 1]).sqrt_().transpose(1, 2)
        for weight, bias, stride in zip(self._convs, self._biases, STRIDES, strict=True):
            x = F.conv1d(x, weight, bias, stride, padding=1).relu_()
        return F.linear(x[:, :, 0], self._gates, self._gates_bias)
