"""Who speaks in a file: its audio, heard beside what recognises it, window after window.

Nothing of the audio is kept but a window; of each that was heard there is left who of a few speaks when, and a
direction for each voice: 1.2 MB of an hour with two in each window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from asr_serve.audio.reader import AudioLimits, read_audio
from asr_serve.diarization.clustering import SpeakerCount
from asr_serve.diarization.diarize import diarize
from asr_serve.diarization.enrollment import dominant_embedding, rename_enrolled
from asr_serve.diarization.local_speakers import WINDOW_SAMPLES, LocalSpeakers
from asr_serve.diarization.speaker_groups import DiarizationWindow
from asr_serve.diarization.windowing import DENSE, plan_windows
from asr_serve.diarization.word_speakers import TurnIndex, split_by_speaker
from asr_serve.engine.client import EngineClient
from asr_serve.errors import AudioError, AudioTooLong, OptionError
from asr_serve.pipelines.offline.audio_reader import AudioReader
from asr_serve.pipelines.options import KnownSpeaker, TranscribeOptions
from asr_serve.types import Segment, SpeakerTurn
from asr_serve.units import s_to_samples

MIN_REFERENCE_S, MAX_REFERENCE_S = 2, 10
"""Of the audio by which a speaker is known."""
KNOWN_SPEAKERS_FIELD = "known_speakers"
MAX_PENDING_WINDOWS = 16
"""Of a file that may wait to be heard: a step of the engine."""


class PendingSpeakerWindow(NamedTuple):
    start_samples: int
    samples: int
    answer: Future[LocalSpeakers]


class KnownSpeakerVoices:
    """Speakers who are known by their voices, heard once for all files."""

    def __init__(
        self,
        client: EngineClient,
        speakers: Sequence[KnownSpeaker],
        wake: Callable[[Future[Any]], None],
        check: Callable[[], None],
    ) -> None:
        """Raises OptionError for what is no audio, too short or too long; and what EngineClient.voices does."""
        clips = {each.name: _clip(each) for each in speakers}
        self._pending = {
            name: client.diarize_window(clip, budget_samples=DENSE.budget_samples, wait=True, check=check)
            for name, clip in clips.items()
        }
        for answer in self._pending.values():
            answer.add_done_callback(wake)

    def voices(self) -> dict[str, np.ndarray] | None:
        """The direction of each; None while they are heard. Raises OptionError where nobody speaks; and what
        `EngineClient.voices` says of its futures."""
        if not all(answer.done() for answer in self._pending.values()):
            return None
        found = {}
        for name, answer in self._pending.items():
            direction = dominant_embedding(answer.result())
            if direction is None:
                raise OptionError(
                    f"nobody is heard in the audio of {name!r}",
                    "a few seconds of this speaker, alone",
                    param=KNOWN_SPEAKERS_FIELD,
                )
            found[name] = direction
        return found


def _clip(speaker: KnownSpeaker) -> np.ndarray:
    """(samples,) float32."""
    try:
        pcm = read_audio(speaker.audio, limits=AudioLimits(max_duration_s=MAX_REFERENCE_S))
    except AudioTooLong:
        pcm = np.zeros(0, np.float32)
    except AudioError as error:
        raise OptionError(
            f"the audio of {speaker.name!r} cannot be heard: {error.came}", param=KNOWN_SPEAKERS_FIELD
        ) from None
    if len(pcm) < s_to_samples(MIN_REFERENCE_S):
        raise OptionError(
            f"the audio of {speaker.name!r} is too short or too long",
            f"{MIN_REFERENCE_S} to {MAX_REFERENCE_S} s of this speaker, alone",
            param=KNOWN_SPEAKERS_FIELD,
        )
    return pcm[:WINDOW_SAMPLES]


class FileDiarizer:
    """One file. Nothing in it waits, but for room in the engine."""

    def __init__(
        self,
        client: EngineClient,
        options: TranscribeOptions,
        known: KnownSpeakerVoices,
        wake: Callable[[Future[Any]], None],
        check: Callable[[], None],
    ) -> None:
        self._known = known
        self._names: dict[str, np.ndarray] | None = None
        """Directions of those who are known, once they were heard."""
        self._client, self._wake, self._check = client, wake, check
        self._words = options.words
        self._how_many = SpeakerCount.of(options.num_speakers, options.min_speakers, options.max_speakers)
        self._chunks: list[np.ndarray] = []
        self._audio_from = self._samples = self._next_start = 0
        """Where the chunks begin and end in the file, and where the next window begins."""
        self._pending: deque[PendingSpeakerWindow] = deque()
        self._windows_done: list[DiarizationWindow] = []
        self._ended = False
        self._total_samples: int | None = None
        self._windows = 0

    def set_duration(self, samples: int | None) -> None:
        """How long the recording is, before any of it is put. None: nobody knows."""
        self._total_samples = samples

    @property
    def has_room(self) -> bool:
        """More may be put."""
        return len(self._pending) < MAX_PENDING_WINDOWS

    @property
    def finished(self) -> bool:
        """All was heard."""
        return self._ended and not self._pending and self._names is not None

    def append_audio(self, pcm: np.ndarray) -> None:
        """`pcm` (n,) float32 at 16 kHz, any n. Raises AtCapacity never, EngineClosed."""
        self._chunks.append(pcm)
        self._samples += len(pcm)
        while self._samples - self._next_start > WINDOW_SAMPLES:  # not when they are as long: it may be the last
            close = plan_windows(self._next_start, self._total_samples)
            self._submit_window(self._next_start, 0 if self._windows % close.every else close.budget_samples)
            self._next_start += close.step_samples

    def finish(self) -> None:
        """No more will come. Idempotent."""
        if not self._ended:
            self._ended = True
            if self._samples:
                last = max(0, self._samples - WINDOW_SAMPLES)
                self._submit_window(last, plan_windows(last, self._total_samples).budget_samples)

    def advance(self) -> bool:
        """Take what was answered; whether there was anything. Raises WeightsMissing, WeightsCorrupt, StepFailed,
        EngineClosed; OptionError for speakers who are known, and not by their voices."""
        moved = False
        if self._names is None:
            self._names = self._known.voices()
            moved = self._names is not None
        while self._pending and self._pending[0].answer.done():
            start, samples, answer = self._pending.popleft()
            self._windows_done.append(DiarizationWindow(start, samples, answer.result()))
            moved = True
        return moved

    def turns(self) -> tuple[SpeakerTurn, ...]:
        """Once it is over."""
        assert self._names is not None
        return rename_enrolled(diarize(self._windows_done, self._how_many), self._names).turns

    def split_by_speaker(self, segment: Segment, turns: TurnIndex) -> list[Segment]:
        """The segment by who says it: a part for each change of speaker."""
        return split_by_speaker(segment, turns, self._words)

    def _submit_window(self, start: int, budget_samples: int) -> None:
        audio = np.concatenate(self._chunks) if len(self._chunks) > 1 else self._chunks[0]
        pcm = np.ascontiguousarray(audio[start - self._audio_from : start - self._audio_from + WINDOW_SAMPLES])
        kept = max(self._audio_from, self._samples - WINDOW_SAMPLES)  # the last window reaches back so far
        kept = min(kept, start + plan_windows(start, self._total_samples).step_samples)
        self._chunks, self._audio_from = [audio[kept - self._audio_from :]], kept
        answer = self._client.diarize_window(pcm, budget_samples=budget_samples, wait=True, check=self._check)
        self._windows += 1
        self._pending.append(PendingSpeakerWindow(start, len(pcm), answer))
        answer.add_done_callback(self._wake)


class DiarizedReader:
    """A Reading whose chunks are heard for speakers too, as they are taken."""

    def __init__(self, source: AudioReader, diarizing: FileDiarizer) -> None:
        self._source, self._diarizing = source, diarizing
        self.hint_samples = source.hint_samples
        diarizing.set_duration(source.hint_samples)

    @property
    def ended(self) -> bool:
        return self._source.ended

    def next_chunk(self) -> np.ndarray | None:
        chunk = self._source.next_chunk()
        if chunk is not None:
            self._diarizing.append_audio(chunk)
        elif self._source.ended:
            self._diarizing.finish()
        return chunk

    def close(self) -> None:
        self._source.close()
