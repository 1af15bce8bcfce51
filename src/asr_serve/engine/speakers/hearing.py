"""Windows of audio to who of a few speaks when, and what each of them sounds like.

A voice is taken from where its speaker is alone: two at once sound like neither. A few seconds tell as much as
ten, at a fraction of the cost; so the longest stretches are taken, and brought to one of few lengths by being
repeated, for what goes through the network together has one length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np

from asr_serve import units
from asr_serve.devices.base import Device
from asr_serve.models import weights
from asr_serve.models.segmentation import pyannote
from asr_serve.models.speaker import eres2net
from asr_serve.speaker.local import BUDGET_SAMPLES, LocalVoices

LENGTHS = tuple(units.ms_to_samples(each) for each in (1_000, 1_500, 2_000, 2_500, 3_000, 5_000))
"""Of what is embedded."""
LEAST_SAMPLES = units.ms_to_samples(250)
"""Less says nothing of a voice."""
ALONE_SAMPLES = units.ms_to_samples(500)
"""With less of somebody alone, what is heard through others is taken too."""
BATCH_SAMPLES = units.s_to_samples(5)
"""Of clips that go through the network together on one thread. Of 4, 8 and 16 s none was faster than the others by
more than this machine's noise (16 windows, bf16: 2.2, 2.3, 2.2 ms a second of audio); threads end together when
there are more of them."""

_BITS = (1 << np.arange(pyannote.SPEAKERS)).astype(np.uint8)


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
    heard_samples: int
    pcm: np.ndarray
    """One of LENGTHS."""


class Hearing:
    """The models on a device."""

    def __init__(self, segmentation: Any, network: Network, device: Device) -> None:
        self._segmentation, self._network = segmentation, network
        self._parts = device.threads if device.name == "cpu" else 1
        self._alone = ThreadPoolExecutor(self._parts, "speakers", lambda: device.share(1))
        """Threads that open no parallel region, as encoders have (decision 0011), while the loop waits for them.
        Segmentation takes 4,700 short steps one after the other, and threads that share a step wait for each
        other after each: 8 windows took 0.97 ms a second of audio on two threads together, 0.60 with 4 on each;
        16 windows 1.01 and 0.50 (bf16, two cores of an EPYC)."""

    @classmethod
    def load(cls, device: Device) -> Hearing:
        """Raises WeightsMissing, with the command that gets them, WeightsCorrupt."""
        voices = eres2net.Voices(eres2net.load(), device.torch_device, device.dtype)
        return cls(pyannote.Segmentation(pyannote.load(), device), voices, device)

    def close(self) -> None:
        self._alone.shutdown(wait=False)

    def hear(self, asked: Sequence[tuple[np.ndarray, int]]) -> list[LocalVoices]:
        """Each (samples,) float32, 16 kHz, and of how many of these the voices are taken; 0: they are not."""
        windows, budgets = [pcm for pcm, _ in asked], [budget for _, budget in asked]
        chances: list[np.ndarray] = [np.zeros((0, pyannote.SPEAKERS), np.uint8)] * len(windows)
        together: dict[int, list[int]] = defaultdict(list)
        for index, pcm in enumerate(windows):
            together[len(pcm)].append(index)
        for indices in together.values():
            for index, likely in zip(indices, self._segmented([windows[each] for each in indices]), strict=True):
                chances[index] = likely
        sets = [(each > 127).astype(np.uint8) @ _BITS for each in chances]
        clips = [
            clip
            for index, pcm in enumerate(windows)
            if budgets[index]
            for clip in clips_of(index, pcm, sets[index], budgets[index])
        ]
        voices = self._embed(clips)
        found = []
        for index in range(len(windows)):
            mine = [number for number, clip in enumerate(clips) if clip.window == index]
            found.append(
                LocalVoices(
                    first_samples=(pyannote.FIELD_SAMPLES - pyannote.STEP_SAMPLES) // 2,
                    step_samples=pyannote.STEP_SAMPLES,
                    speakers=pyannote.SPEAKERS,
                    chances=chances[index].tobytes(),
                    who=tuple(clips[each].speaker for each in mine),
                    clean_samples=tuple(clips[each].clean_samples for each in mine),
                    heard_samples=tuple(clips[each].heard_samples for each in mine),
                    voices=b"".join(voices[each].tobytes() for each in mine),
                )
            )
        return found

    def _segmented(self, windows: Sequence[np.ndarray]) -> np.ndarray:
        """See pyannote.Segmentation.heard. All of one length."""
        parts = min(self._parts, len(windows))
        if parts == 1:
            found: np.ndarray = self._segmentation.heard(np.stack(windows))
            return found
        return np.concatenate(list(self._alone.map(self._segmentation.heard, np.array_split(windows, parts))))

    def _embed(self, clips: list[Clip]) -> list[np.ndarray]:
        """The voice of each: those of one length together, as many as leave something for every thread."""
        voices: list[np.ndarray] = [np.zeros(0, np.float32)] * len(clips)
        most = min(BATCH_SAMPLES, sum(len(clip.pcm) for clip in clips) // self._parts)
        batches = []
        for length in sorted(LENGTHS, reverse=True):
            these = [number for number, clip in enumerate(clips) if len(clip.pcm) == length]
            rows = max(1, round(most / length))
            batches += [these[start : start + rows] for start in range(0, len(these), rows)]

        def heard(batch: list[int]) -> np.ndarray:
            return self._network.embed(np.stack([clips[each].pcm for each in batch]))

        each_heard = (
            self._alone.map(heard, batches) if self._parts > 1 and len(batches) > 1 else map(heard, batches)
        )
        for batch, found in zip(batches, each_heard, strict=True):
            for number, voice in zip(batch, found, strict=True):
                voices[number] = voice.astype(np.float32, copy=False)
        return voices


def clips_of(window: int, pcm: np.ndarray, sets: np.ndarray, budget: int = BUDGET_SAMPLES) -> list[Clip]:
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
        taken = longest(runs, max(LENGTHS[0], budget // len(speaking)))
        heard = np.concatenate([pcm[start:end] for start, end in taken])
        # Of what is just longer than a length, the rest is left out: it costs more than it tells.
        length = max((each for each in LENGTHS if each <= len(heard)), default=LENGTHS[0])
        found.append(Clip(window, speaker, clean, min(length, len(heard)), np.resize(heard, length)))
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
