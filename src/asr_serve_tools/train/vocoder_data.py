"""Stretches of recorded speech for a vocoder to learn from: what it is given, and what it should say."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr_serve.audio.features.slaney_mel import AROUND_SAMPLES, FLOOR, SlaneyMel
from asr_serve.cloning.voice_corpus import FULL_SCALE, HOP, RATE_HZ, VoiceRecording, open_voice_corpora
from asr_serve.errors import OptionError
from asr_serve_tools.train.predicted_mels import MelPredictor
from asr_serve_tools.train.voice.sentences import held_out

GAINS_DB = (-12.0, 6.0)
"""Of a crop: speech is recorded as loud as all other, and asked for louder and softer."""
PREDICTED = 0.5
"""Share of the crops whose spectra an acoustic model made, where there is one."""
PREDICTED_MINUTES = 6.0
"""Of each voice that it is asked for, at most."""


class VocoderBatch(NamedTuple):
    frames: Tensor
    """(n, T, 81): mel, F0."""
    pcm: Tensor
    """(n, 256 T)"""


class VocoderCorpus:
    """Recordings of several voices in a folder, but for those that nothing is learnt from."""

    def __init__(self, folder: Path, frames: int, acoustic: MelPredictor | None = None) -> None:
        """`frames`: of a crop. `acoustic`: whose spectra are learnt from too. Raises OptionError where no
        recording is so long, or none is held out."""
        self.frames = frames
        self.mel = SlaneyMel()
        self.learning: list[list[VoiceRecording]] = []
        kept: list[list[VoiceRecording]] = []
        self.minutes: dict[str, float] = {}
        for voice in open_voice_corpora(folder):
            recordings = [each for each in voice if len(each.f0) >= frames]
            learning = [each for each in recordings if not held_out(each.line.text)]
            kept.append([each for each in recordings if held_out(each.line.text)])
            if learning:
                self.learning.append(learning)
                self.minutes[voice.name] = round(voice.minutes, 1)
        self.held_out_recordings = [each for turn in zip_longest(*kept) for each in turn if each is not None]
        if not self.learning or not self.held_out_recordings:
            count = sum(map(len, self.learning))
            raise OptionError(
                f"{folder}: {count} recordings to learn from, {len(self.held_out_recordings)} to test with",
                f"some of each, {frames} frames long at least",
                param="speech",
            )
        # A voice with much speech is heard more often, but not by as much more.
        self._weights = [sum(len(each.f0) for each in some) ** 0.5 for some in self.learning]
        self._predicted = [acoustic.frames(some) for some in map(first_minutes, self.learning)] if acoustic else []

    def batch(self, size: int, chance: random.Random) -> VocoderBatch:
        found = []
        for voice in chance.choices(range(len(self.learning)), self._weights, k=size):
            some = self.learning[voice]
            predicted = bool(self._predicted) and chance.random() < PREDICTED
            if predicted:
                some = some[: len(self._predicted[voice])]
            at = chance.choices(range(len(some)), [len(each.f0) for each in some])[0]
            first = chance.randint(0, len(some[at].f0) - self.frames)
            gain = 10 ** (chance.uniform(*GAINS_DB) / 20)
            crop = self.crop(some[at], first, self.frames, gain)
            if predicted:
                mel = self._predicted[voice][at][first : first + self.frames].astype(np.float32)
                crop.frames[0, :, :-1] = torch.from_numpy(mel + math.log(gain)).clamp(min=math.log(FLOOR))
            found.append(crop)
        return VocoderBatch(*(torch.cat(each) for each in zip(*found, strict=True)))

    def crop(self, recording: VoiceRecording, first: int, count: int, gain: float = 1.0) -> VocoderBatch:
        """As the mel of the whole recording has it."""
        total = len(recording.pcm)
        place = np.arange(first * HOP - AROUND_SAMPLES, (first + count) * HOP + AROUND_SAMPLES)
        place = np.abs(place)
        place = np.where(place < total, place, 2 * (total - 1) - place)
        pcm = torch.from_numpy(recording.pcm[place].astype(np.float32) * (gain / FULL_SCALE)).clamp_(-1, 1)[None]
        f0 = torch.from_numpy(np.array(recording.f0[first : first + count]))[None, :, None]
        frames = torch.cat([self.mel.within(pcm), f0], 2)
        return VocoderBatch(frames, pcm[:, AROUND_SAMPLES:-AROUND_SAMPLES])

    def test_recordings(self, count: int) -> Sequence[VoiceRecording]:
        """Recordings that nothing is learnt from: one of each voice, then another of each."""
        return list(islice(self.held_out_recordings, count))

    def whole(self, recording: VoiceRecording) -> VocoderBatch:
        return self.crop(recording, 0, len(recording.f0))


def first_minutes(recordings: Sequence[VoiceRecording]) -> list[VoiceRecording]:
    """The first PREDICTED_MINUTES of them, and one at least."""
    frames, found = 0, list[VoiceRecording]()
    for each in recordings:
        if frames < PREDICTED_MINUTES * 60 * RATE_HZ / HOP:
            found.append(each)
            frames += len(each.f0)
    return found
