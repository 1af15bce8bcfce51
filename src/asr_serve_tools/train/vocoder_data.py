"""Training data of a vocoder: crops of recorded speech with their input frames."""

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
"""Range of the gain of a crop: recordings are equally loud, but speech is requested louder and softer."""
PREDICTED = 0.5
"""Share of the crops with spectra predicted by the acoustic model, if there is one."""
PREDICTED_MINUTES = 6.0
"""Most speech of each voice with predicted spectra."""


class VocoderBatch(NamedTuple):
    frames: Tensor
    """Input frames (n, T, 81): log-mel and F0."""
    pcm: Tensor
    """Target samples (n, 256 T)."""


class VocoderCorpus:
    """Recordings of several voices in a folder, divided into training and held-out recordings."""

    def __init__(self, folder: Path, frames: int, acoustic: MelPredictor | None = None) -> None:
        """`frames`: length of a crop. `acoustic`: model whose predicted spectra are used too. Raises OptionError
        if no training or no held-out recording is as long as a crop."""
        self.frames = frames
        self.mel = SlaneyMel()
        self.learning: list[list[VoiceRecording]] = []
        held_out_by_voice: list[list[VoiceRecording]] = []
        self.minutes: dict[str, float] = {}
        for voice in open_voice_corpora(folder):
            recordings = [recording for recording in voice if len(recording.f0) >= frames]
            learning = [recording for recording in recordings if not held_out(recording.line.text)]
            held_out_by_voice.append([recording for recording in recordings if held_out(recording.line.text)])
            if learning:
                self.learning.append(learning)
                self.minutes[voice.name] = round(voice.minutes, 1)
        self.held_out_recordings = [
            recording for turn in zip_longest(*held_out_by_voice) for recording in turn if recording is not None
        ]
        if not self.learning or not self.held_out_recordings:
            count = sum(map(len, self.learning))
            raise OptionError(
                f"{folder}: {count} recordings to learn from, {len(self.held_out_recordings)} to test with",
                f"some of each, {frames} frames long at least",
                param="speech",
            )
        # Voices are drawn by the square root of their length, so that one with much speech does not dominate.
        self._weights = [
            sum(len(recording.f0) for recording in voice_recordings) ** 0.5 for voice_recordings in self.learning
        ]
        self._predicted = (
            [acoustic.frames(voice_recordings) for voice_recordings in map(first_minutes, self.learning)]
            if acoustic
            else []
        )

    def batch(self, size: int, chance: random.Random) -> VocoderBatch:
        crops = []
        for voice in chance.choices(range(len(self.learning)), self._weights, k=size):
            recordings = self.learning[voice]
            predicted = bool(self._predicted) and chance.random() < PREDICTED
            if predicted:
                recordings = recordings[: len(self._predicted[voice])]
            at = chance.choices(range(len(recordings)), [len(each.f0) for each in recordings])[0]
            first = chance.randint(0, len(recordings[at].f0) - self.frames)
            gain = 10 ** (chance.uniform(*GAINS_DB) / 20)
            crop = self.crop(recordings[at], first, self.frames, gain)
            if predicted:
                mel = self._predicted[voice][at][first : first + self.frames].astype(np.float32)
                crop.frames[0, :, :-1] = torch.from_numpy(mel + math.log(gain)).clamp(min=math.log(FLOOR))
            crops.append(crop)
        return VocoderBatch(*(torch.cat(each) for each in zip(*crops, strict=True)))

    def crop(self, recording: VoiceRecording, first: int, count: int, gain: float = 1.0) -> VocoderBatch:
        """Crop with the same mel frames as the whole recording, whose ends are mirrored."""
        total = len(recording.pcm)
        index = np.arange(first * HOP - AROUND_SAMPLES, (first + count) * HOP + AROUND_SAMPLES)
        index = np.abs(index)
        index = np.where(index < total, index, 2 * (total - 1) - index)
        pcm = torch.from_numpy(recording.pcm[index].astype(np.float32) * (gain / FULL_SCALE)).clamp_(-1, 1)[None]
        f0 = torch.from_numpy(np.array(recording.f0[first : first + count]))[None, :, None]
        frames = torch.cat([self.mel.within(pcm), f0], 2)
        return VocoderBatch(frames, pcm[:, AROUND_SAMPLES:-AROUND_SAMPLES])

    def test_recordings(self, count: int) -> Sequence[VoiceRecording]:
        """Up to `count` held-out recordings: one of each voice, then another of each."""
        return list(islice(self.held_out_recordings, count))

    def whole(self, recording: VoiceRecording) -> VocoderBatch:
        return self.crop(recording, 0, len(recording.f0))


def first_minutes(recordings: Sequence[VoiceRecording]) -> list[VoiceRecording]:
    """First recordings of together about PREDICTED_MINUTES, at least one."""
    frames, found = 0, list[VoiceRecording]()
    for recording in recordings:
        if frames < PREDICTED_MINUTES * 60 * RATE_HZ / HOP:
            found.append(recording)
            frames += len(recording.f0)
    return found
