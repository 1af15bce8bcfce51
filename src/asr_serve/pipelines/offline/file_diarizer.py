"""Speakers of a file: its audio is diarized alongside recognition, window after window.

Only one window of audio is buffered. Each window leaves the local speaker activity and an embedding for each
voice: 1.2 MB for an hour with two voices in each window.
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
from asr_serve.diarization.overlapped_speech import OVERLAP_SAMPLES
from asr_serve.diarization.speaker_groups import DiarizationWindow
from asr_serve.diarization.windowing import DENSE, plan_windows
from asr_serve.diarization.word_speakers import TurnIndex, split_by_speaker
from asr_serve.engine.client import EngineClient
from asr_serve.errors import AudioError, AudioTooLong, OptionError
from asr_serve.pipelines.offline.audio_reader import AudioReader
from asr_serve.pipelines.options import KnownSpeaker, TranscribeOptions
from asr_serve.types import Segment, Span, SpeakerTurn
from asr_serve.units import s_to_samples

MIN_REFERENCE_S, MAX_REFERENCE_S = 2, 10
"""Length of a known speaker's reference audio."""
KNOWN_SPEAKERS_FIELD = "known_speakers"
MAX_PENDING_WINDOWS = 16
"""Limit of one file's windows waiting for the engine, as many as a step takes."""


class PendingSpeakerWindow(NamedTuple):
    start_samples: int
    samples: int
    answer: Future[LocalSpeakers]


class KnownSpeakerVoices:
    """Embeddings of known speakers, computed once for all files."""

    def __init__(
        self,
        client: EngineClient,
        speakers: Sequence[KnownSpeaker],
        wake: Callable[[Future[Any]], None],
        check: Callable[[], None],
    ) -> None:
        """Raises OptionError for reference audio that cannot be decoded, is too short or too long, and what
        EngineClient.diarize_window raises."""
        clips = {speaker.name: _clip(speaker) for speaker in speakers}
        self._pending = {
            name: client.diarize_window(clip, budget_samples=DENSE.budget_samples, wait=True, check=check)
            for name, clip in clips.items()
        }
        for answer in self._pending.values():
            answer.add_done_callback(wake)

    def voices(self) -> dict[str, np.ndarray] | None:
        """Returns each speaker's embedding; None until all are known. Raises OptionError for audio without
        speech, and what the futures of EngineClient.diarize_window raise."""
        if not all(answer.done() for answer in self._pending.values()):
            return None
        embeddings = {}
        for name, answer in self._pending.items():
            embedding = dominant_embedding(answer.result())
            if embedding is None:
                raise OptionError(
                    f"there is no speech in the audio of {name!r}",
                    "a few seconds of this speaker, alone",
                    param=KNOWN_SPEAKERS_FIELD,
                )
            embeddings[name] = embedding
        return embeddings


def _clip(speaker: KnownSpeaker) -> np.ndarray:
    """Decodes reference audio to (samples,) float32."""
    try:
        pcm = read_audio(speaker.audio, limits=AudioLimits(max_duration_s=MAX_REFERENCE_S))
    except AudioTooLong:
        pcm = np.zeros(0, np.float32)
    except AudioError as error:
        raise OptionError(
            f"the audio of {speaker.name!r} cannot be read: {error.came}", param=KNOWN_SPEAKERS_FIELD
        ) from None
    if len(pcm) < s_to_samples(MIN_REFERENCE_S):
        raise OptionError(
            f"the audio of {speaker.name!r} is too short or too long",
            f"{MIN_REFERENCE_S} to {MAX_REFERENCE_S} s of this speaker, alone",
            param=KNOWN_SPEAKERS_FIELD,
        )
    return pcm[:WINDOW_SAMPLES]


class FileDiarizer:
    """Diarization of one file. Methods do not block, except for capacity in the engine."""

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
        """Embeddings of known speakers, once computed."""
        self._client, self._wake, self._check = client, wake, check
        self._words = options.words is not False
        self._how_many = SpeakerCount.of(options.num_speakers, options.min_speakers, options.max_speakers)
        self._chunks: list[np.ndarray] = []
        self._audio_from = self._samples = self._next_start = 0
        """Start and end of the kept chunks in the file, and start of the next window."""
        self._pending: deque[PendingSpeakerWindow] = deque()
        self._windows_done: list[DiarizationWindow] = []
        self._overlaps: deque[tuple[int, int]] = deque()
        """(start, end) of stretches in which a window has two speakers at once, by windows."""
        self._ended = False
        self._total_samples: int | None = None
        self._windows = 0

    def set_duration(self, samples: int | None) -> None:
        """Sets the duration of the recording, before any audio is appended. None: unknown."""
        self._total_samples = samples

    @property
    def has_room(self) -> bool:
        """Returns whether more audio may be appended."""
        return len(self._pending) < MAX_PENDING_WINDOWS

    @property
    def finished(self) -> bool:
        """Returns whether all windows are done."""
        return self._ended and not self._pending and self._names is not None

    def append_audio(self, pcm: np.ndarray) -> None:
        """Appends `pcm` (n,) float32 at 16 kHz, any n. Waits for capacity, and so never raises AtCapacity.
        Raises EngineClosed."""
        self._chunks.append(pcm)
        self._samples += len(pcm)
        while self._samples - self._next_start > WINDOW_SAMPLES:  # not at equality: that window may be the last
            plan = plan_windows(self._next_start, self._total_samples)
            self._submit_window(self._next_start, 0 if self._windows % plan.every else plan.budget_samples)
            self._next_start += plan.step_samples

    def finish(self) -> None:
        """Ends the audio. Idempotent."""
        if not self._ended:
            self._ended = True
            if self._samples:
                last = max(0, self._samples - WINDOW_SAMPLES)
                self._submit_window(last, plan_windows(last, self._total_samples).budget_samples)

    def advance(self) -> bool:
        """Collects results and returns whether there were any. Raises WeightsMissing, WeightsCorrupt,
        StepFailed, EngineClosed; OptionError for reference audio without speech."""
        progressed = False
        if self._names is None:
            self._names = self._known.voices()
            progressed = self._names is not None
        while self._pending and self._pending[0].answer.done():
            start, samples, answer = self._pending.popleft()
            speakers = answer.result()
            self._windows_done.append(DiarizationWindow(start, samples, speakers))
            self._overlaps += [(start + first, start + end) for first, end in speakers.overlaps()]
            progressed = True
        return progressed

    def turns(self) -> tuple[SpeakerTurn, ...]:
        """Returns the turns of all speakers, once finished."""
        assert self._names is not None
        return rename_enrolled(diarize(self._windows_done, self._how_many), self._names).turns

    @property
    def known_samples(self) -> int:
        """Audio from the start of which all windows are done."""
        if self._pending:
            return self._pending[0].start_samples
        return self._samples if self._ended else self._next_start

    def may_overlap(self, span: Span) -> bool:
        """Returns whether windows have two speakers at once in the span, for half of OVERLAP_SAMPLES together. Spans
        are asked for in order, once known."""
        while self._overlaps and self._overlaps[0][1] <= span.start_samples:
            self._overlaps.popleft()
        common = (min(end, span.end_samples) - max(start, span.start_samples) for start, end in self._overlaps)
        return 2 * sum(max(0, each) for each in common) >= OVERLAP_SAMPLES

    def split_by_speaker(self, segment: Segment, turns: TurnIndex) -> list[Segment]:
        """Splits the segment at each change of speaker."""
        return split_by_speaker(segment, turns, self._words)

    def _submit_window(self, start: int, budget_samples: int) -> None:
        audio = np.concatenate(self._chunks) if len(self._chunks) > 1 else self._chunks[0]
        pcm = np.ascontiguousarray(audio[start - self._audio_from : start - self._audio_from + WINDOW_SAMPLES])
        keep_from = max(self._audio_from, self._samples - WINDOW_SAMPLES)  # the last window reaches back so far
        keep_from = min(keep_from, start + plan_windows(start, self._total_samples).step_samples)
        self._chunks, self._audio_from = [audio[keep_from - self._audio_from :]], keep_from
        answer = self._client.diarize_window(pcm, budget_samples=budget_samples, wait=True, check=self._check)
        self._windows += 1
        self._pending.append(PendingSpeakerWindow(start, len(pcm), answer))
        answer.add_done_callback(self._wake)


class DiarizedReader:
    """AudioReader that also passes its chunks to the diarizer."""

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
