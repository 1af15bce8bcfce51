"""Silero VAD: speech probability of each 32 ms of audio, for many callers at once.

A window of 512 samples, with the last 64 of the window before it, becomes four short spectra; four convolutions
reduce those to one vector; an LSTM carries state from window to window. Only the LSTM is recurrent, so everything
before it runs over the windows of all rows at once, a block of them for each thread.

Source   silero-vad 6.2.3 (Silero Team, MIT), its `silero_vad.jit`, 16 kHz half: shapes read from its
         parameters, behaviour checked against its outputs in tests/models/test_silero.py.
Weights  `silero.safetensors` beside this file: those same parameters, renamed by `rename`. Not the
         package's own `silero_vad_16k.safetensors`, which holds an older training whose probabilities
         differ by up to 0.7 from the model the package runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve import kernels
from asr_serve.errors import WeightsCorrupt, WeightsMissing
from asr_serve.models.interfaces import StateSpec
from asr_serve.models.packing import PackedBatch

WINDOW_SAMPLES = 512
CONTEXT_SAMPLES = 64
WIDTH = 128

WEIGHTS = Path(__file__).with_name("silero.safetensors")
WEIGHTS_SHA256 = "98ad88be41e0e8728f3ac3e66dd927cbf94ff853953f1bc970a4dcae384aafb4"


class SileroState(NamedTuple):
    """State of each row between windows, float32."""

    context: Tensor
    """(rows, 64): the last samples of the window before; zeros at the start."""
    h: Tensor
    """(rows, 128): LSTM output."""
    c: Tensor
    """(rows, 128): LSTM cell."""


class Silero:
    """Speech probability of every 512-sample window, on the CPU.

    In      pcm (rows, n * 512) float32 in -1..1, 16 kHz; windows (rows,) int64: how many of a row's n
            windows are live. The rest is padding: never read, so it may hold anything.
    Out     probabilities (rows, n) float32, 0 past a row's live windows; the new state
    State   SileroState; a row without live windows keeps its state bit for bit
    Source  see the top of this file
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """Packs `weights`, float32 by their names in `silero.safetensors`, for the kernels of this process."""
        native = kernels.kernels()
        convs = [f"convs.{number}" for number in range(4)]
        self._encoder: Any = native.VoiceActivityEncoder(
            [weights[f"{conv}.weight"] for conv in convs],
            [weights[f"{conv}.bias"] for conv in convs],
            weights["lstm.weight_ih_l0"],
            weights["lstm.bias_ih_l0"] + weights["lstm.bias_hh_l0"],
        )
        self._lstm: Any = native.lstm
        self._lstm_weight = weights["lstm.weight_hh_l0"].t().contiguous()
        self._head_weight, self._head_bias = weights["head.weight"], weights["head.bias"]

    def state_specs(self) -> dict[str, StateSpec]:
        """Returns the state of a row, by its name in SileroState."""
        return {name: StateSpec(tuple(tensor.shape[1:])) for name, tensor in self.state(1)._asdict().items()}

    def state(self, rows: int) -> SileroState:
        """Returns a fresh state: silence before the first sample."""
        return SileroState(*(torch.zeros(rows, width) for width in (CONTEXT_SAMPLES, WIDTH, WIDTH)))

    @torch.no_grad()
    def step(self, pcm: Tensor, state: SileroState, windows: Tensor) -> tuple[Tensor, SileroState]:
        """Advances row r by windows[r] windows. The state passed in is left unchanged."""
        rows, samples = pcm.shape
        assert samples % WINDOW_SAMPLES == 0, f"{samples} samples are no multiple of {WINDOW_SAMPLES}"
        live = windows.tolist()
        assert len(live) == rows, f"{len(live)} window counts for {rows} rows"
        assert all(0 <= count <= samples // WINDOW_SAMPLES for count in live), live
        probabilities = torch.zeros(rows, samples // WINDOW_SAMPLES)
        after = SileroState(state.context.clone(), state.h.clone(), state.c.clone())
        if not any(live):
            return probabilities, after
        packing = PackedBatch(live, sum(live))  # windows of all rows end to end
        offsets = torch.tensor(packing.offsets)
        gates = torch.empty(packing.total, 4 * WIDTH)
        self._encoder.run(pcm.contiguous(), after.context, windows, offsets, gates)
        ends = windows[:, None] * WINDOW_SAMPLES + torch.arange(-CONTEXT_SAMPLES, 0)
        last_samples = pcm.gather(1, ends.clamp(min=0))
        after.context.copy_(torch.where(windows[:, None] > 0, last_samples, after.context))
        out = torch.zeros(packing.total, WIDTH)
        self._lstm(gates, self._lstm_weight, offsets, windows, after.h, after.c, out)
        is_live = torch.arange(samples // WINDOW_SAMPLES) < windows[:, None]
        probabilities[is_live] = F.linear(out.relu_(), self._head_weight, self._head_bias).sigmoid_()[:, 0]
        return probabilities, after


def load() -> Silero:
    """Returns the network with its weights, ready to step. Raises WeightsMissing, WeightsCorrupt."""
    try:
        raw = WEIGHTS.read_bytes()
    except FileNotFoundError as error:
        raise WeightsMissing(
            f"{WEIGHTS} is not there", "it is part of the asr-serve package", "reinstall asr-serve"
        ) from error
    digest = hashlib.sha256(raw).hexdigest()
    if digest != WEIGHTS_SHA256:
        raise WeightsCorrupt(f"{WEIGHTS} has sha256 {digest}", f"it must be {WEIGHTS_SHA256}", "reinstall asr-serve")
    return Silero(safetensors.torch.load(raw))


def rename(key: str) -> str | None:
    """Converts a parameter name in `silero_vad.jit` to ours; None for those of the 8 kHz half, which is unused."""
    match key.split("."):
        case ["_model", "encoder", layer, "reparam_conv", kind]:
            return f"convs.{layer}.{kind}"
        case ["_model", "decoder", "rnn", name]:
            return f"lstm.{name}_l0"
        case ["_model", "decoder", "decoder", "2", kind]:
            return f"head.{kind}"
    return None
