"""Windows of audio to who of a few speaks when, and what each of them sounds like.

A voice is taken from where its speaker is alone: two at once sound like neither. A few seconds tell as much as
ten, at a fraction of the cost; so the longest stretches are taken, and brought to one of few lengths by being
repeated, for what goes through the network together has one length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from asr_serve import units
from asr_serve.devices.base import Device
from asr_serve.models import weights
from asr_serve.models.segmentation import pyannote
from asr_serve.models.speaker import eres2net
from asr_serve.speaker.local import LocalVoices

LENGTHS = tuple(units.ms_to_samples(each) for each in (1_000, 1_500, 2_000, 3_000))
"""Of what is embedded."""
BUDGET_SAMPLES = LENGTHS[-1]
"""Of a window, over all its speakers: who is alone in it is heard for so long, of three each for a third. Three
seconds of each would cost twice as much; on bench/meetings.py the time that is wrong then fell by less than 1
%."""
LEAST_SAMPLES = units.ms_to_samples(250)
"""Less says nothing of a voice."""
ALONE_SAMPLES = units.ms_to_samples(500)
"""With less of somebody alone, what is heard through others is taken too."""
ROWS = 8
"""Clips that go through the network together: with more it is no faster, its activations leave the cache."""

_MASKS = np.array([sum(1 << each for each in who) for who in pyannote.SETS], np.uint8)


def on_this_machine() -> bool:
    """Whether the models' weights are."""
    return all(weights.locate(each.CARDS[0]) is not None for each in (pyannote, eres2net))


class Network(Protocol):
    """Voices in clips (rows, samples): (rows, width) float32, each of length 1."""

    def embed(self, clips: np.ndarray) -> np.ndarray: ...


class Clip(NamedTuple):
    """What one local speaker is known by."""

    window: int
    speaker: int
    clean_samples: int
    pcm: np.ndarray
    """One of LENGTHS."""


class Hearing:
    """The models on a device."""

    def __init__(self, segmentation: Any, network: Network) -> None:
        self._segmentation, self._network = segmentation, network

    @classmethod
    def load(cls, device: Device) -> Hearing:
        """Raises WeightsMissing, with the command that gets them, WeightsCorrupt."""
        where = device.torch_device
        segmentation = pyannote.load().to(where)
        return cls(segmentation, eres2net.Voices(eres2net.load(), where, device.dtype))

    def hear(self, windows: Sequence[np.ndarray]) -> list[LocalVoices]:
        """Each (samples,) float32, 16 kHz."""
        sets: list[np.ndarray] = [np.zeros(0, np.uint8)] * len(windows)
        together: dict[int, list[int]] = defaultdict(list)
        for index, pcm in enumerate(windows):
            together[len(pcm)].append(index)
        for indices in together.values():
            heard = self._segmentation.heard(np.stack([windows[each] for each in indices]))
            for index, classes in zip(indices, heard, strict=True):
                sets[index] = _MASKS[classes]
        clips = [clip for index, pcm in enumerate(windows) for clip in clips_of(index, pcm, sets[index])]
        voices = self._embed(clips)
        found = []
        for index in range(len(windows)):
            mine = [number for number, clip in enumerate(clips) if clip.window == index]
            found.append(
                LocalVoices(
                    first_samples=(pyannote.FIELD_SAMPLES - pyannote.STEP_SAMPLES) // 2,
                    step_samples=pyannote.STEP_SAMPLES,
                    speakers=pyannote.SPEAKERS,
                    sets=sets[index].tobytes(),
                    who=tuple(clips[each].speaker for each in mine),
                    clean_samples=tuple(clips[each].clean_samples for each in mine),
                    voices=b"".join(voices[each].tobytes() for each in mine),
                )
            )
        return found

    def _embed(self, clips: list[Clip]) -> list[np.ndarray]:
        voices: list[np.ndarray] = [np.zeros(0, np.float32)] * len(clips)
        for length in LENGTHS:
            these = [number for number, clip in enumerate(clips) if len(clip.pcm) == length]
            for start in range(0, len(these), ROWS):
                batch = these[start : start + ROWS]
                heard = self._network.embed(np.stack([clips[each].pcm for each in batch]))
                for number, voice in zip(batch, heard, strict=True):
                    voices[number] = voice.astype(np.float32, copy=False)
        return voices


def clips_of(window: int, pcm: np.ndarray, sets: np.ndarray) -> list[Clip]:
    """`sets` (frames,) uint8, a bit for each speaker."""
    speaking: list[tuple[int, int, list[tuple[int, int]]]] = []
    for speaker in range(pyannote.SPEAKERS):
        runs = stretches(sets == 1 << speaker, len(pcm))
        clean = _length(runs)
        if clean < ALONE_SAMPLES:
            clean, runs = 0, stretches(sets >> speaker & 1 > 0, len(pcm))
        if _length(runs) >= LEAST_SAMPLES:
            speaking.append((speaker, clean, runs))
    found = []
    for speaker, clean, runs in speaking:
        taken = longest(runs, max(LENGTHS[0], BUDGET_SAMPLES // len(speaking)))
        heard = np.concatenate([pcm[start:end] for start, end in taken])
        # Of what is just longer than a length, the rest is left out: it costs more than it tells.
        length = max((each for each in LENGTHS if each <= len(heard)), default=LENGTHS[0])
        found.append(Clip(window, speaker, clean, np.resize(heard, length)))
    return found


def stretches(frames: np.ndarray, samples: int) -> list[tuple[int, int]]:
    """Runs of true frames, as samples of the window. What is before the first frame belongs to it, as what is
    after the last belongs to that."""
    edges = np.flatnonzero(np.diff(frames.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    first, step = (pyannote.FIELD_SAMPLES - pyannote.STEP_SAMPLES) // 2, pyannote.STEP_SAMPLES
    return [
        (
            0 if start == 0 else first + int(start) * step,
            samples if end == len(frames) else first + int(end) * step,
        )
        for start, end in edges
    ]


def _length(runs: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in runs)


def longest(runs: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """The longest of them, `most` samples together, in the order of time."""
    taken, left = [], most
    for start, end in sorted(runs, key=lambda run: run[0] - run[1]):
        if left <= 0:
            break
        taken.append((start, min(end, start + left)))
        left -= min(end - start, left)
    return sorted(taken)
