"""Stretches of recorded speech for a vocoder to learn from: what it is given, and what it should say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr_serve.errors import OptionError
from asr_serve.features.slaney_mel import AROUND_SAMPLES, SlaneyMel
from asr_serve.train.voice.recorded import FULL_SCALE, HOP, Recording, voices
from asr_serve.train.voice.sentences import held_out

GAINS_DB = (-12.0, 6.0)
"""Of a crop: speech is recorded as loud as all other, and asked for louder and softer."""


class Batch(NamedTuple):
    frames: Tensor
    """(n, T, 81): mel, F0."""
    pcm: Tensor
    """(n, 256 T)"""


class Speech:
    """Recordings of several voices in a folder, but for those that nothing is learnt from."""

    def __init__(self, folder: Path, frames: int) -> None:
        """`frames`: of a crop. Raises OptionError where no recording is so long, or none is held out."""
        self.frames = frames
        self.mel = SlaneyMel()
        self.learning: list[list[Recording]] = []
        kept: list[list[Recording]] = []
        self.minutes: dict[str, float] = {}
        for voice in voices(folder):
            recordings = [each for each in voice if len(each.f0) >= frames]
            learning = [each for each in recordings if not held_out(each.line.text)]
            kept.append([each for each in recordings if held_out(each.line.text)])
            if learning:
                self.learning.append(learning)
                self.minutes[voice.name] = round(voice.minutes, 1)
        self.held = [each for turn in zip_longest(*kept) for each in turn if each is not None]
        if not self.learning or not self.held:
            count = sum(map(len, self.learning))
            raise OptionError(
                f"{folder}: {count} recordings to learn from, {len(self.held)} to test with",
                f"some of each, {frames} frames long at least",
                param="speech",
            )
        # A voice with much speech is heard more often, but not by as much more.
        self._weights = [sum(len(each.f0) for each in some) ** 0.5 for some in self.learning]

    def batch(self, size: int, chance: random.Random) -> Batch:
        found = []
        for some in chance.choices(self.learning, self._weights, k=size):
            recording = chance.choices(some, [len(each.f0) for each in some])[0]
            first = chance.randint(0, len(recording.f0) - self.frames)
            gain = 10 ** (chance.uniform(*GAINS_DB) / 20)
            found.append(self.crop(recording, first, self.frames, gain))
        return Batch(*(torch.cat(each) for each in zip(*found, strict=True)))

    def crop(self, recording: Recording, first: int, count: int, gain: float = 1.0) -> Batch:
        """As the mel of the whole recording has it."""
        total = len(recording.pcm)
        place = np.arange(first * HOP - AROUND_SAMPLES, (first + count) * HOP + AROUND_SAMPLES)
        place = np.abs(place)
        place = np.where(place < total, place, 2 * (total - 1) - place)
        pcm = torch.from_numpy(recording.pcm[place].astype(np.float32) * (gain / FULL_SCALE)).clamp_(-1, 1)[None]
        f0 = torch.from_numpy(np.array(recording.f0[first : first + count]))[None, :, None]
        frames = torch.cat([self.mel.within(pcm), f0], 2)
        return Batch(frames, pcm[:, AROUND_SAMPLES:-AROUND_SAMPLES])

    def tests(self, count: int) -> Sequence[Recording]:
        """Recordings that nothing is learnt from: one of each voice, then another of each."""
        return list(islice(self.held, count))

    def whole(self, recording: Recording) -> Batch:
        return self.crop(recording, 0, len(recording.f0))
