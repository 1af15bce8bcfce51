"""Chunked synthesis, many sentences in a step: frames from the acoustic model, and audio from its vocoder.

State of a sentence is in its row of StateCacheManager. A step generates one chunk of each sentence in it, at
whatever position. The vocoder looks `delay_frames` ahead, so a sentence continues for a while after its last
frame; samples before its first and after its last are cut here, and so is its lead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr_serve.devices.interface import Device
from asr_serve.engine.state_cache import StateCacheManager, StateSlot, state_row_bytes
from asr_serve.engine.tts.custom_voices import CustomVoiceLoader
from asr_serve.engine.tts.runner import TtsStepOutput
from asr_serve.models.interfaces import EncodedSentence, StreamingTtsModel, Vocoder
from asr_serve.types import Sentence

VOICE, VOCODER = "voice", "vocoder"
"""Prefixes of state tensors: acoustic model, vocoder."""
FADE_IN_SAMPLES = 128
"""Samples over which a sentence fades in: cut out of a breath, it would begin with a click."""


class ChunkedTtsSequence:
    """Sentence in progress."""

    def __init__(self, encoded: EncodedSentence, slot: StateSlot, seed: int) -> None:
        self.encoded, self.slot, self.seed = encoded, slot, seed
        self.ends = encoded.phoneme_ends_samples
        self.generated_frames = 0
        """Frames processed so far."""


class ChunkedTtsRunner:
    """TTS runner that generates chunk by chunk. See engine/tts/runner.TtsRunner."""

    def __init__(
        self,
        model: StreamingTtsModel[Any],
        vocoder: Vocoder,
        voices: CustomVoiceLoader,
        device: Device,
        *,
        rows: int,
        step_rows: int,
        kv_bytes: int | None = None,
        poison: bool = False,
    ) -> None:
        """`rows`: most sentences in progress, fewer where `kv_bytes` cannot hold their state; `step_rows`: most in
        one step. `poison`: see StateCacheManager."""
        self._model, self._vocoder, self._voices, self._device = model, vocoder, voices, device
        self.rate_hz, self._chunk, self._hop = vocoder.rate_hz, model.chunk_frames, vocoder.hop_samples
        specs = {f"{VOICE}.{name}": spec for name, spec in model.state_specs().items()}
        specs |= {f"{VOCODER}.{name}": spec for name, spec in vocoder.state_specs(model.chunk_frames).items()}
        if kv_bytes is not None:
            rows = max(1, min(rows, kv_bytes // max(1, state_row_bytes(specs))))
        self.rows, self.step_rows = rows, min(rows, step_rows)
        self.states = StateCacheManager(specs, rows, device.torch_device, poison=poison)
        self._voice_state, self._vocoder_state = self._state_of(VOICE), self._state_of(VOCODER)
        self._active: set[ChunkedTtsSequence] = set()

    def _state_of(self, whose: str) -> dict[str, Tensor]:
        prefix = f"{whose}."
        tensors = self.states.tensors
        return {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}

    @property
    def used(self) -> int:
        return self.states.used

    def validate(self, sentence: Sentence) -> None:
        self._voices.ensure_for_sentence(sentence)

    @torch.inference_mode()
    def start_sequences(self, sentences: Sequence[Sentence]) -> list[ChunkedTtsSequence]:
        for sentence in sentences:
            self._voices.load_voice(sentence.voice)
        encoded = self._model.encode(sentences)
        sequences = [
            ChunkedTtsSequence(state, self.states.allocate(), sentence.seed)
            for state, sentence in zip(encoded, sentences, strict=True)
        ]
        self._active.update(sequences)
        return sequences

    @torch.inference_mode()
    def step(self, rows: Sequence[ChunkedTtsSequence]) -> list[TtsStepOutput]:
        device = self._device.torch_device
        state_rows = self.states.prepare_rows([row.slot for row in rows])
        seen = torch.tensor([row.generated_frames for row in rows], device=device)
        ends = torch.tensor([row.encoded.frames for row in rows], device=device)
        seeds = torch.tensor([row.seed for row in rows], device=device)
        frames = self._frames(rows, state_rows, seen)
        sound = self._vocoder.step(frames, state_rows, seen, ends, seeds, self._vocoder_state).float().cpu().numpy()
        return [self._trim_samples(row, pcm) for row, pcm in zip(rows, sound, strict=True)]

    def _frames(self, rows: Sequence[ChunkedTtsSequence], state_rows: Tensor, seen: Tensor) -> Tensor:
        """Returns (n, chunk, width) frames; zeros for sentences past their last frame, while the vocoder
        finishes."""
        active = [at for at, row in enumerate(rows) if row.generated_frames < row.encoded.frames]
        encoded = [rows[at].encoded for at in active]
        if len(active) == len(rows):
            return self._model.step(encoded, state_rows, seen, self._voice_state)
        frames = torch.zeros(len(rows), self._chunk, self._model.frame_width, device=self._device.torch_device)
        if active:
            index = torch.tensor(active, device=self._device.torch_device)
            frames[index] = self._model.step(encoded, state_rows[index], seen[index], self._voice_state)
        return frames

    def _trim_samples(self, row: ChunkedTtsSequence, sound: np.ndarray) -> TtsStepOutput:
        """Returns the part of a step's (chunk * hop,) samples that belongs to the sentence."""
        first = (row.generated_frames - self._vocoder.delay_frames - row.encoded.lead_frames) * self._hop
        remaining = (row.encoded.frames - row.encoded.lead_frames) * self._hop - first
        row.generated_frames += self._chunk
        pcm = sound[max(0, -first) : max(0, remaining)]
        return TtsStepOutput(fade_in(pcm, max(0, first)), finished=remaining <= len(sound))

    def free_sequence(self, row: ChunkedTtsSequence) -> None:
        self._active.remove(row)
        self.states.free(row.slot)

    def check_invariants(self) -> None:
        self.states.check()
        slots = {row.slot.row for row in self._active}
        assert len(slots) == len(self._active) == self.states.used, "a row has two holders, or none"
        for row in self._active:
            self.states.check_lease(row.slot)


def fade_in(pcm: np.ndarray, at: int = 0) -> np.ndarray:
    """Fades in `pcm` (n,), the samples of a sentence from `at` on."""
    if at >= FADE_IN_SAMPLES:
        return pcm
    ramp = np.ones(len(pcm), np.float32)
    ramp[: FADE_IN_SAMPLES - at] = ((np.arange(at, FADE_IN_SAMPLES, dtype=np.float32) + 0.5) / FADE_IN_SAMPLES)[
        : len(pcm)
    ]
    return pcm * ramp
