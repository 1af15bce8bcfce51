"""Windows that wait to be heard for speakers: a few in a step of the loop, on its thread.

Not beside it: the same cores would have to be shared with recognition. While somebody is on line a step is one
window, for they wait behind it; otherwise windows wait for as many as go together. Who is on line comes first.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from asr_serve import units
from asr_serve.devices.interface import Device
from asr_serve.diarization.local_speakers import BUDGET_SAMPLES, LocalSpeakers
from asr_serve.engine.executor import StepGuard
from asr_serve.engine.stats import EngineStats
from asr_serve.errors import AsrServeError, WeightsCorrupt, WeightsMissing
from asr_serve.models.auxiliary import eres2net, pyannote
from asr_serve.models.checkpoints import store
from asr_serve.models.interfaces import SpeakerEmbedder, SpeakerSegmentationModel

CLIP_LENGTHS_SAMPLES = tuple(units.ms_to_samples(each) for each in (1_000, 1_500, 2_000, 2_500, 3_000, 5_000))
"""Of what is embedded."""
MIN_CLIP_SAMPLES = units.ms_to_samples(250)
"""Less says nothing of a voice."""
MIN_SOLO_SAMPLES = units.ms_to_samples(500)
"""With less of somebody alone, what is heard through others is taken too."""
BATCH_SAMPLES = units.s_to_samples(5)
"""Of clips that go through the network together on one thread. Of 4, 8 and 16 s none was faster than the others by
more than this machine's noise (16 windows, bf16: 2.2, 2.3, 2.2 ms a second of audio); threads end together when
there are more of them."""

_BITS = (1 << np.arange(pyannote.SPEAKERS)).astype(np.uint8)


def models_available() -> bool:
    """Whether the models' weights are."""
    return all(store.locate(each.CARDS[0]) is not None for each in (pyannote, eres2net))


class SpeakerClip(NamedTuple):
    """What one local speaker is known by."""

    window: int
    speaker: int
    clean_samples: int
    heard_samples: int
    pcm: np.ndarray
    """One of LENGTHS."""


class WindowDiarizer:
    """The models on a device."""

    def __init__(self, segmentation: SpeakerSegmentationModel, network: SpeakerEmbedder, device: Device) -> None:
        self._segmentation, self._network = segmentation, network
        self._parts = device.threads if device.name == "cpu" else 1
        self._threads = ThreadPoolExecutor(self._parts, "speakers", lambda: device.set_threads(1))
        """Threads that open no parallel region, as encoders have (decision 0011), while the loop waits for them.
        Segmentation takes 4,700 short steps one after the other, and threads that share a step wait for each
        other after each: 8 windows took 0.97 ms a second of audio on two threads together, 0.60 with 4 on each;
        16 windows 1.01 and 0.50 (bf16, two cores of an EPYC)."""

    @classmethod
    def load(cls, device: Device) -> WindowDiarizer:
        """Raises WeightsMissing, with the command that gets them, WeightsCorrupt."""
        voices = eres2net.Eres2NetEmbedder(eres2net.load(), device.torch_device, device.dtype)
        return cls(pyannote.Segmentation(pyannote.load(), device), voices, device)

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    def diarize(self, asked: Sequence[tuple[np.ndarray, int]]) -> list[LocalSpeakers]:
        """Each (samples,) float32, 16 kHz, and of how many of these the voices are taken; 0: they are not."""
        windows, budgets = [pcm for pcm, _ in asked], [budget for _, budget in asked]
        chances: list[np.ndarray] = [np.zeros((0, pyannote.SPEAKERS), np.uint8)] * len(windows)
        together: dict[int, list[int]] = defaultdict(list)
        for index, pcm in enumerate(windows):
            together[len(pcm)].append(index)
        for indices in together.values():
            for index, likely in zip(indices, self._segment([windows[each] for each in indices]), strict=True):
                chances[index] = likely
        sets = [(each > 127).astype(np.uint8) @ _BITS for each in chances]
        clips = [
            clip
            for index, pcm in enumerate(windows)
            if budgets[index]
            for clip in extract_clips(index, pcm, sets[index], budgets[index])
        ]
        voices = self._embed(clips)
        found = []
        for index in range(len(windows)):
            mine = [number for number, clip in enumerate(clips) if clip.window == index]
            found.append(
                LocalSpeakers(
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

    def _segment(self, windows: Sequence[np.ndarray]) -> np.ndarray:
        """See pyannote.Segmentation.heard. All of one length."""
        parts = min(self._parts, len(windows))
        if parts == 1:
            return self._segmentation.speaker_probabilities(np.stack(windows))
        batches = np.array_split(windows, parts)
        return np.concatenate(list(self._threads.map(self._segmentation.speaker_probabilities, batches)))

    def _embed(self, clips: list[SpeakerClip]) -> list[np.ndarray]:
        """The voice of each: those of one length together, as many as leave something for every thread."""
        voices: list[np.ndarray] = [np.zeros(0, np.float32)] * len(clips)
        most = min(BATCH_SAMPLES, sum(len(clip.pcm) for clip in clips) // self._parts)
        batches = []
        for length in sorted(CLIP_LENGTHS_SAMPLES, reverse=True):
            these = [number for number, clip in enumerate(clips) if len(clip.pcm) == length]
            rows = max(1, round(most / length))
            batches += [these[start : start + rows] for start in range(0, len(these), rows)]

        def heard(batch: list[int]) -> np.ndarray:
            return self._network.embed(np.stack([clips[each].pcm for each in batch]))

        each_heard = (
            self._threads.map(heard, batches) if self._parts > 1 and len(batches) > 1 else map(heard, batches)
        )
        for batch, found in zip(batches, each_heard, strict=True):
            for number, voice in zip(batch, found, strict=True):
                voices[number] = voice.astype(np.float32, copy=False)
        return voices


def extract_clips(
    window: int, pcm: np.ndarray, sets: np.ndarray, budget: int = BUDGET_SAMPLES
) -> list[SpeakerClip]:
    """`sets` (frames,) uint8, a bit for each speaker."""
    speaking: list[tuple[int, int, list[tuple[int, int]]]] = []
    for speaker in range(pyannote.SPEAKERS):
        runs = active_runs(sets == 1 << speaker, len(pcm))
        clean = _length(runs)
        if clean < MIN_SOLO_SAMPLES:
            clean, runs = 0, active_runs(sets >> speaker & 1 > 0, len(pcm))
        if _length(runs) >= MIN_CLIP_SAMPLES:
            speaking.append((speaker, clean, runs))
    found = []
    for speaker, clean, runs in speaking:
        taken = longest_runs(runs, max(CLIP_LENGTHS_SAMPLES[0], budget // len(speaking)))
        heard = np.concatenate([pcm[start:end] for start, end in taken])
        # Of what is just longer than a length, the rest is left out: it costs more than it tells.
        length = max(
            (each for each in CLIP_LENGTHS_SAMPLES if each <= len(heard)), default=CLIP_LENGTHS_SAMPLES[0]
        )
        found.append(SpeakerClip(window, speaker, clean, min(length, len(heard)), np.resize(heard, length)))
    return found


def active_runs(frames: np.ndarray, samples: int) -> list[tuple[int, int]]:
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


def longest_runs(runs: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """The longest of them, `most` samples together, in the order of time."""
    taken, left = [], most
    for start, end in sorted(runs, key=lambda run: run[0] - run[1]):
        if left <= 0:
            break
        taken.append((start, min(end, start + left)))
        left -= min(end - start, left)
    return sorted(taken)


MAX_STEP_WINDOWS, STEP_BUDGET_SAMPLES = 16, units.s_to_samples(120)
"""In a step while nobody is on line, and how much of them may be listened to. 16 windows of which 2.5 s are took
2.2 ms a second of audio, 8 at a time 2.6, so a step takes 0.35 s (bf16, two cores of a busy EPYC)."""
LIVE_STEP_WINDOWS = 1
MAX_WAIT_S = 0.5
"""So long a window waits for company while there is other work."""


class DiarizationRequest(NamedTuple):
    pcm: np.ndarray
    budget_samples: int
    live: bool
    """Of somebody who is on line."""
    future: Future[LocalSpeakers]
    """Nobody cancels it."""
    due_s: float = 0.0
    """When it is to be heard without company."""


class DiarizationRunner:
    """Only the loop touches it. How many may wait is for EngineClient to bound."""

    def __init__(self, device: Device, stats: EngineStats) -> None:
        self._device, self._stats = device, stats
        self._waiting: deque[DiarizationRequest] = deque()
        self._live: deque[DiarizationRequest] = deque()
        self._model: WindowDiarizer | None = None
        """Loaded when it is first wanted."""

    def submit(self, question: DiarizationRequest) -> None:
        (self._live if question.live else self._waiting).append(
            question._replace(due_s=time.monotonic() + MAX_WAIT_S)
        )

    def step(self, *, live: bool, idle: bool) -> bool:
        """Hear some; False when none are heard. `live`: somebody is on line. `idle`: there is nothing else to do;
        if there is, windows wait for as many as go together, for they come one by one as files are read."""
        batch: list[DiarizationRequest] = []
        queue = self._live or self._waiting
        waits = not (live or idle or self._live or len(queue) >= MAX_STEP_WINDOWS)
        if waits and (not queue or time.monotonic() < queue[0].due_s):
            return False
        most, budget = LIVE_STEP_WINDOWS if live else MAX_STEP_WINDOWS, STEP_BUDGET_SAMPLES
        while queue and len(batch) < most and (not batch or queue[0].budget_samples <= budget):
            batch.append(queue.popleft())
            budget -= batch[-1].budget_samples
        if not batch:
            return False
        started = time.perf_counter()

        def fail(error: AsrServeError) -> None:
            for question in batch:
                question.future.set_exception(error)

        if self._model is None:
            with StepGuard(self._stats, "speakers", "loading what hears speakers", fail):
                try:
                    self._model = WindowDiarizer.load(self._device)
                except (WeightsMissing, WeightsCorrupt) as failure:  # the next one may find them
                    fail(failure)
        if self._model is None:
            return True
        with StepGuard(self._stats, "speakers", "hearing who speaks", fail):
            heard = self._model.diarize([(each.pcm, each.budget_samples) for each in batch])
            for question, voices in zip(batch, heard, strict=True):
                question.future.set_result(voices)
        self._stats.record_step(
            "speakers", time.perf_counter() - started, len(batch), len(batch) / MAX_STEP_WINDOWS
        )
        return True

    def close(self, error: AsrServeError) -> None:
        for queue in (self._live, self._waiting):
            while queue:
                queue.popleft().future.set_exception(error)
        if self._model is not None:
            self._model.close()
