"""Speaker segmentation and embedding of waiting audio windows: a few windows in a step of the loop, on its thread.

The models do not run beside the loop, because they would share the same cores with recognition. While live callers
are connected, a step is one window, because the callers wait for the step; otherwise windows wait until a full
batch is ready. Windows of live callers come first.
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
"""Lengths of clips from which embeddings are computed."""
MIN_CLIP_SAMPLES = units.ms_to_samples(250)
"""Minimum speech of a speaker for an embedding; less does not characterize a voice."""
MIN_SOLO_SAMPLES = units.ms_to_samples(500)
"""Minimum speech without overlap; with less, overlapped speech is used too."""
BATCH_SAMPLES = units.s_to_samples(5)
"""Samples of clips that one thread embeds in a batch. Of 4, 8 and 16 s none was faster than the others by more
than this machine's noise (16 windows, bf16: 2.2, 2.3, 2.2 ms a second of audio); with more batches the threads
finish closer together."""

_BITS = (1 << np.arange(pyannote.SPEAKERS)).astype(np.uint8)


def models_available() -> bool:
    """Returns whether the weights of both models are on this machine."""
    return all(store.locate(module.CARDS[0]) is not None for module in (pyannote, eres2net))


class SpeakerClip(NamedTuple):
    """Audio from which the embedding of one local speaker is computed."""

    window: int
    speaker: int
    clean_samples: int
    heard_samples: int
    pcm: np.ndarray
    """(samples,) float32, of a length in CLIP_LENGTHS_SAMPLES."""


class WindowDiarizer:
    """Segmentation and embedding models on one device."""

    def __init__(self, segmentation: SpeakerSegmentationModel, network: SpeakerEmbedder, device: Device) -> None:
        self._segmentation, self._network = segmentation, network
        self._parts = device.threads if device.name == "cpu" else 1
        self._threads = ThreadPoolExecutor(self._parts, "speakers", lambda: device.set_threads(1))
        """Single-threaded workers, as encoders use (decision 0011), while the loop waits for them. Segmentation
        takes 4,700 short steps in sequence, and threads that share a step synchronize after each: 8 windows took
        0.97 ms a second of audio on two threads together, 0.60 with 4 on each; 16 windows 1.01 and 0.50 (bf16, two
        cores of an EPYC)."""

    @classmethod
    def load(cls, device: Device) -> WindowDiarizer:
        """Loads both models. Raises WeightsMissing, with the command that downloads them, WeightsCorrupt."""
        embedder = eres2net.Eres2NetEmbedder(eres2net.load(), device.torch_device, device.dtype)
        return cls(pyannote.Segmentation(pyannote.load(), device), embedder, device)

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    def diarize(self, windows_and_budgets: Sequence[tuple[np.ndarray, int]]) -> list[LocalSpeakers]:
        """Diarizes windows: each (samples,) float32, 16 kHz, with the number of samples to compute embeddings
        from; 0: none."""
        windows, budgets = [pcm for pcm, _ in windows_and_budgets], [budget for _, budget in windows_and_budgets]
        chances: list[np.ndarray] = [np.zeros((0, pyannote.SPEAKERS), np.uint8)] * len(windows)
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, pcm in enumerate(windows):
            by_length[len(pcm)].append(index)
        for indices in by_length.values():
            for index, probabilities in zip(indices, self._segment([windows[i] for i in indices]), strict=True):
                chances[index] = probabilities
        sets = [(i > 127).astype(np.uint8) @ _BITS for i in chances]
        clips = [
            clip
            for index, pcm in enumerate(windows)
            if budgets[index]
            for clip in extract_clips(index, pcm, sets[index], budgets[index])
        ]
        embeddings = self._embed(clips)
        speakers = []
        for index in range(len(windows)):
            own = [number for number, clip in enumerate(clips) if clip.window == index]
            speakers.append(
                LocalSpeakers(
                    first_samples=(pyannote.FIELD_SAMPLES - pyannote.STEP_SAMPLES) // 2,
                    step_samples=pyannote.STEP_SAMPLES,
                    speakers=pyannote.SPEAKERS,
                    chances=chances[index].tobytes(),
                    who=tuple(clips[i].speaker for i in own),
                    clean_samples=tuple(clips[i].clean_samples for i in own),
                    heard_samples=tuple(clips[i].heard_samples for i in own),
                    voices=b"".join(embeddings[i].tobytes() for i in own),
                )
            )
        return speakers

    def _segment(self, windows: Sequence[np.ndarray]) -> np.ndarray:
        """Speaker probabilities of windows of one length, see pyannote.Segmentation.speaker_probabilities."""
        parts = min(self._parts, len(windows))
        if parts == 1:
            return self._segmentation.speaker_probabilities(np.stack(windows))
        batches = np.array_split(windows, parts)
        return np.concatenate(list(self._threads.map(self._segmentation.speaker_probabilities, batches)))

    def _embed(self, clips: list[SpeakerClip]) -> list[np.ndarray]:
        """Embeddings of the clips, in batches of one length, sized so that every thread has work."""
        embeddings: list[np.ndarray] = [np.zeros(0, np.float32)] * len(clips)
        most = min(BATCH_SAMPLES, sum(len(clip.pcm) for clip in clips) // self._parts)
        batches = []
        for length in sorted(CLIP_LENGTHS_SAMPLES, reverse=True):
            same_length = [number for number, clip in enumerate(clips) if len(clip.pcm) == length]
            rows = max(1, round(most / length))
            batches += [same_length[start : start + rows] for start in range(0, len(same_length), rows)]

        def embed(batch: list[int]) -> np.ndarray:
            return self._network.embed(np.stack([clips[each].pcm for each in batch]))

        results = self._threads.map(embed, batches) if self._parts > 1 and len(batches) > 1 else map(embed, batches)
        for batch, vectors in zip(batches, results, strict=True):
            for number, vector in zip(batch, vectors, strict=True):
                embeddings[number] = vector.astype(np.float32, copy=False)
        return embeddings


def extract_clips(window: int, pcm: np.ndarray, sets: np.ndarray, budget: int = BUDGET_SAMPLES) -> list[SpeakerClip]:
    """Clips of the speakers of one window. `sets` (frames,) uint8, a bit for each active speaker; `budget`:
    samples of all speakers together."""
    speaking: list[tuple[int, int, list[tuple[int, int]]]] = []
    for speaker in range(pyannote.SPEAKERS):
        runs = active_runs(sets == 1 << speaker, len(pcm))
        clean = _length(runs)
        if clean < MIN_SOLO_SAMPLES:
            clean, runs = 0, active_runs(sets >> speaker & 1 > 0, len(pcm))
        if _length(runs) >= MIN_CLIP_SAMPLES:
            speaking.append((speaker, clean, runs))
    clips = []
    for speaker, clean, runs in speaking:
        ranges = longest_runs(runs, max(CLIP_LENGTHS_SAMPLES[0], budget // len(speaking)))
        speech = np.concatenate([pcm[start:end] for start, end in ranges])
        # Speech beyond the longest fitting length is dropped: it costs more than it contributes.
        length = max((size for size in CLIP_LENGTHS_SAMPLES if size <= len(speech)), default=CLIP_LENGTHS_SAMPLES[0])
        clips.append(SpeakerClip(window, speaker, clean, min(length, len(speech)), np.resize(speech, length)))
    return clips


def active_runs(frames: np.ndarray, samples: int) -> list[tuple[int, int]]:
    """Runs of true frames as sample ranges of the window. Samples before the first frame belong to the first
    frame, samples after the last to the last."""
    edges = np.flatnonzero(np.diff(frames.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    first, step = (pyannote.FIELD_SAMPLES - pyannote.STEP_SAMPLES) // 2, pyannote.STEP_SAMPLES
    return [
        (0 if start == 0 else first + int(start) * step, samples if end == len(frames) else first + int(end) * step)
        for start, end in edges
    ]


def _length(runs: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in runs)


def longest_runs(runs: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """The longest runs, up to `most` samples together, in order of time."""
    ranges, remaining = [], most
    for start, end in sorted(runs, key=lambda run: run[0] - run[1]):
        if remaining <= 0:
            break
        ranges.append((start, min(end, start + remaining)))
        remaining -= min(end - start, remaining)
    return sorted(ranges)


MAX_STEP_WINDOWS, STEP_BUDGET_SAMPLES = 16, units.s_to_samples(120)
"""Maximum windows of a step without live callers, and maximum samples for embeddings in it. 16 windows with 2.5 s
each took 2.2 ms a second of audio, 8 at a time 2.6, so a step takes 0.35 s (bf16, two cores of a busy EPYC)."""
LIVE_STEP_WINDOWS = 1
MAX_WAIT_S = 0.5
"""Maximum time that a window waits for a full batch while there is other work."""


class DiarizationRequest(NamedTuple):
    pcm: np.ndarray
    budget_samples: int
    live: bool
    """Whether the window belongs to a live caller."""
    future: Future[LocalSpeakers]
    """Never cancelled."""
    due_s: float = 0.0
    """Time on the monotonic clock at which it runs without waiting for others."""


class DiarizationRunner:
    """Queue of windows and their batched steps. Belongs to the loop's thread; EngineClient limits how many
    wait."""

    def __init__(self, device: Device, stats: EngineStats) -> None:
        self._device, self._stats = device, stats
        self._waiting: deque[DiarizationRequest] = deque()
        self._live: deque[DiarizationRequest] = deque()
        self._model: WindowDiarizer | None = None
        """Loaded with the first window."""

    def submit(self, question: DiarizationRequest) -> None:
        (self._live if question.live else self._waiting).append(question._replace(due_s=time.monotonic() + MAX_WAIT_S))

    def step(self, *, live: bool, idle: bool) -> bool:
        """Diarizes a batch; returns False when none was due. `live`: live callers are connected. `idle`: there is no
        other work; while there is, windows wait for a full batch, because they arrive one by one as files are read."""
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
                except (WeightsMissing, WeightsCorrupt) as failure:  # a later window may find them
                    fail(failure)
        if self._model is None:
            return True
        with StepGuard(self._stats, "speakers", "hearing who speaks", fail):
            results = self._model.diarize([(request.pcm, request.budget_samples) for request in batch])
            for question, speakers in zip(batch, results, strict=True):
                question.future.set_result(speakers)
        self._stats.record_step("speakers", time.perf_counter() - started, len(batch), len(batch) / MAX_STEP_WINDOWS)
        return True

    def close(self, error: AsrServeError) -> None:
        for queue in (self._live, self._waiting):
            while queue:
                queue.popleft().future.set_exception(error)
        if self._model is not None:
            self._model.close()
