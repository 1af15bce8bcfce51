"""Sentences said chunk by chunk, many in a step: frames of the voice model, and sound of them by its codec.

What either remembers of a sentence lies in its row of StateCacheManager. A step gives each sentence in it one
chunk, wherever it stands. The codec hears `delay` frames ahead, so that a sentence goes on for a while after its
last frame; what lies before its first sample and after its last is cut here, and so is its lead.
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

VOICE, CODEC = "voice", "codec"
"""Whose state a tensor is."""
FADE_IN_SAMPLES = 128
"""Samples at a sentence's start that grow out of silence: cut out of a breath, it would begin with a tick."""


class ChunkedTtsSequence:
    """A sentence under way."""

    def __init__(self, encoded: EncodedSentence, slot: StateSlot, seed: int) -> None:
        self.encoded, self.slot, self.seed = encoded, slot, seed
        self.ends = encoded.phoneme_ends_samples
        self.generated_frames = 0
        """Frames that were stepped over."""


class ChunkedTtsRunner:
    """See engine/tts/runner.TtsRunner."""

    def __init__(
        self,
        model: StreamingTtsModel[Any],
        codec: Vocoder,
        voices: CustomVoiceLoader,
        device: Device,
        *,
        rows: int,
        step_rows: int,
        kv_bytes: int | None = None,
        poison: bool = False,
    ) -> None:
        """`rows`: sentences at once, fewer where `kv_bytes` of memory are not enough for their state; `step_rows`:
        of a step. `poison`: see StateCacheManager."""
        self._model, self._codec, self._voices, self._device = model, codec, voices, device
        self.rate_hz, self._chunk, self._hop = codec.rate_hz, model.chunk_frames, codec.hop_samples
        specs = {f"{VOICE}.{name}": spec for name, spec in model.state_specs().items()}
        specs |= {f"{CODEC}.{name}": spec for name, spec in codec.state_specs(model.chunk_frames).items()}
        if kv_bytes is not None:
            rows = max(1, min(rows, kv_bytes // max(1, state_row_bytes(specs))))
        self.rows, self.step_rows = rows, min(rows, step_rows)
        self.states = StateCacheManager(specs, rows, device.torch_device, poison=poison)
        self._voice_state, self._codec_state = self._state_of(VOICE), self._state_of(CODEC)
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
        made = [
            ChunkedTtsSequence(each, self.states.allocate(), sentence.seed)
            for each, sentence in zip(encoded, sentences, strict=True)
        ]
        self._active.update(made)
        return made

    @torch.inference_mode()
    def step(self, rows: Sequence[ChunkedTtsSequence]) -> list[TtsStepOutput]:
        where = self._device.torch_device
        places = self.states.prepare_rows([row.slot for row in rows])
        seen = torch.tensor([row.generated_frames for row in rows], device=where)
        ends = torch.tensor([row.encoded.frames for row in rows], device=where)
        seeds = torch.tensor([row.seed for row in rows], device=where)
        frames = self._frames(rows, places, seen)
        sound = self._codec.step(frames, places, seen, ends, seeds, self._codec_state).float().cpu().numpy()
        return [self._trim_samples(row, each) for row, each in zip(rows, sound, strict=True)]

    def _frames(self, rows: Sequence[ChunkedTtsSequence], places: Tensor, seen: Tensor) -> Tensor:
        """(n, chunk, width). Of those that have no more, while the codec says the rest, nothing is asked."""
        going = [at for at, row in enumerate(rows) if row.generated_frames < row.encoded.frames]
        encoded = [rows[at].encoded for at in going]
        if len(going) == len(rows):
            return self._model.step(encoded, places, seen, self._voice_state)
        frames = torch.zeros(len(rows), self._chunk, self._model.frame_width, device=self._device.torch_device)
        if going:
            index = torch.tensor(going, device=self._device.torch_device)
            frames[index] = self._model.step(encoded, places[index], seen[index], self._voice_state)
        return frames

    def _trim_samples(self, row: ChunkedTtsSequence, sound: np.ndarray) -> TtsStepOutput:
        """What of a step's (chunk * hop,) samples is the sentence's."""
        first = (row.generated_frames - self._codec.delay_frames - row.encoded.lead_frames) * self._hop
        left = (row.encoded.frames - row.encoded.lead_frames) * self._hop - first
        row.generated_frames += self._chunk
        heard = sound[max(0, -first) : max(0, left)]
        return TtsStepOutput(fade_in(heard, max(0, first)), finished=left <= len(sound))

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
    """(n,), of a sentence from its sample `at` on: its start grows out of silence."""
    if at >= FADE_IN_SAMPLES:
        return pcm
    ramp = np.ones(len(pcm), np.float32)
    ramp[: FADE_IN_SAMPLES - at] = ((np.arange(at, FADE_IN_SAMPLES, dtype=np.float32) + 0.5) / FADE_IN_SAMPLES)[
        : len(pcm)
    ]
    return pcm * ramp
