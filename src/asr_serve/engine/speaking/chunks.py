"""Sentences said chunk by chunk, many in a step: frames of the voice model, and sound of them by its codec.

What either remembers of a sentence lies in its row of StateCacheManager. A step gives each sentence in it one
chunk, wherever it stands. The codec hears `delay` frames ahead, so that a sentence goes on for a while after its
last frame; what lies before its first sample and after its last is cut here, and so is its lead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from asr_serve.devices.base import Device
from asr_serve.engine.speaking.runner import Piece
from asr_serve.engine.speaking.voices import Voices
from asr_serve.engine.states import Slot, StateCacheManager, row_bytes
from asr_serve.models.speaking import Codec, Encoded, Incremental
from asr_serve.types import Sentence

VOICE, CODEC = "voice", "codec"
"""Whose state a tensor is."""
RISE = 128
"""Samples at a sentence's start that grow out of silence: cut out of a breath, it would begin with a tick."""


class ChunkRow:
    """A sentence under way."""

    def __init__(self, encoded: Encoded, slot: Slot, seed: int) -> None:
        self.encoded, self.slot, self.seed = encoded, slot, seed
        self.ends = encoded.ends
        self.seen = 0
        """Frames that were stepped over."""


class ChunkRunner:
    """See engine/speaking/runner.Runner."""

    def __init__(
        self,
        model: Incremental,
        codec: Codec,
        voices: Voices,
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
        self.rate_hz, self._chunk, self._hop = codec.rate_hz, model.chunk, codec.hop
        specs = {f"{VOICE}.{name}": spec for name, spec in model.state().items()}
        specs |= {f"{CODEC}.{name}": spec for name, spec in codec.state(model.chunk).items()}
        if kv_bytes is not None:
            rows = max(1, min(rows, kv_bytes // max(1, row_bytes(specs))))
        self.rows, self.step_rows = rows, min(rows, step_rows)
        self.states = StateCacheManager(specs, rows, device.torch_device, poison=poison)
        self._voice_state, self._codec_state = self._part(VOICE), self._part(CODEC)
        self._held: set[ChunkRow] = set()

    def _part(self, whose: str) -> dict[str, Tensor]:
        prefix = f"{whose}."
        tensors = self.states.tensors
        return {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}

    @property
    def used(self) -> int:
        return self.states.used

    def expect(self, sentence: Sentence) -> None:
        self._voices.expect(sentence)

    @torch.inference_mode()
    def begin(self, sentences: Sequence[Sentence]) -> list[ChunkRow]:
        for sentence in sentences:
            self._voices.ensure(sentence.voice)
        encoded = self._model.encode(sentences)
        made = [
            ChunkRow(each, self.states.take(), sentence.seed)
            for each, sentence in zip(encoded, sentences, strict=True)
        ]
        self._held.update(made)
        return made

    @torch.inference_mode()
    def step(self, rows: Sequence[ChunkRow]) -> list[Piece]:
        where = self._device.torch_device
        places = self.states.begin([row.slot for row in rows])
        seen = torch.tensor([row.seen for row in rows], device=where)
        ends = torch.tensor([row.encoded.frames for row in rows], device=where)
        seeds = torch.tensor([row.seed for row in rows], device=where)
        frames = self._frames(rows, places, seen)
        sound = self._codec.step(frames, places, seen, ends, seeds, self._codec_state).float().cpu().numpy()
        return [self._cut(row, each) for row, each in zip(rows, sound, strict=True)]

    def _frames(self, rows: Sequence[ChunkRow], places: Tensor, seen: Tensor) -> Tensor:
        """(n, chunk, width). Of those that have no more, while the codec says the rest, nothing is asked."""
        going = [at for at, row in enumerate(rows) if row.seen < row.encoded.frames]
        encoded = [rows[at].encoded for at in going]
        if len(going) == len(rows):
            return self._model.step(encoded, places, seen, self._voice_state)
        frames = torch.zeros(len(rows), self._chunk, self._model.width, device=self._device.torch_device)
        if going:
            index = torch.tensor(going, device=self._device.torch_device)
            frames[index] = self._model.step(encoded, places[index], seen[index], self._voice_state)
        return frames

    def _cut(self, row: ChunkRow, sound: np.ndarray) -> Piece:
        """What of a step's (chunk * hop,) samples is the sentence's."""
        first = (row.seen - self._codec.delay - row.encoded.lead) * self._hop
        left = (row.encoded.frames - row.encoded.lead) * self._hop - first
        row.seen += self._chunk
        heard = sound[max(0, -first) : max(0, left)]
        return Piece(risen(heard, max(0, first)), over=left <= len(sound))

    def leave(self, row: ChunkRow) -> None:
        self._held.remove(row)
        self.states.give(row.slot)

    def check(self) -> None:
        self.states.check()
        slots = {row.slot.row for row in self._held}
        assert len(slots) == len(self._held) == self.states.used, "a row has two holders, or none"
        for row in self._held:
            self.states.expect(row.slot)


def risen(pcm: np.ndarray, at: int = 0) -> np.ndarray:
    """(n,), of a sentence from its sample `at` on: its start grows out of silence."""
    if at >= RISE:
        return pcm
    ramp = np.ones(len(pcm), np.float32)
    ramp[: RISE - at] = ((np.arange(at, RISE, dtype=np.float32) + 0.5) / RISE)[: len(pcm)]
    return pcm * ramp
