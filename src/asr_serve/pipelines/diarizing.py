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

from asr_serve.audio.io import AudioLimits, read_audio
from asr_serve.engine.client import EngineClient
from asr_serve.errors import AudioError, AudioTooLong, OptionError
from asr_serve.pipelines.options import KnownSpeaker, TranscribeOptions
from asr_serve.pipelines.reading import Reading
from asr_serve.speaker.assigning import Turns, told
from asr_serve.speaker.clustering import HowMany
from asr_serve.speaker.grouping import Window
from asr_serve.speaker.knowing import called, voice
from asr_serve.speaker.listening import CLOSE, closeness
from asr_serve.speaker.local import WINDOW_SAMPLES, LocalVoices
from asr_serve.speaker.stitching import diarize
from asr_serve.types import Segment, SpeakerTurn
from asr_serve.units import s_to_samples

LEAST_KNOWN_S, LONGEST_KNOWN_S = 2, 10
"""Of the audio by which a speaker is known."""
KNOWN = "known_speakers"
WINDOWS_AHEAD = 16
"""Of a file that may wait to be heard: a step of the engine."""


class Asked(NamedTuple):
    start_samples: int
    samples: int
    answer: Future[LocalVoices]


class Known:
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
        self._asked = {
            name: client.voices(clip, budget_samples=CLOSE.budget_samples, wait=True, check=check)
            for name, clip in clips.items()
        }
        for answer in self._asked.values():
            answer.add_done_callback(wake)

    def voices(self) -> dict[str, np.ndarray] | None:
        """The direction of each; None while they are heard. Raises OptionError where nobody speaks; and what
        `EngineClient.voices` says of its futures."""
        if not all(answer.done() for answer in self._asked.values()):
            return None
        found = {}
        for name, answer in self._asked.items():
            direction = voice(answer.result())
            if direction is None:
                raise OptionError(
                    f"nobody is heard in the audio of {name!r}",
                    "a few seconds of this speaker, alone",
                    param=KNOWN,
                )
            found[name] = direction
        return found


def _clip(speaker: KnownSpeaker) -> np.ndarray:
    """(samples,) float32."""
    try:
        pcm = read_audio(speaker.audio, limits=AudioLimits(max_duration_s=LONGEST_KNOWN_S))
    except AudioTooLong:
        pcm = np.zeros(0, np.float32)
    except AudioError as error:
        raise OptionError(f"the audio of {speaker.name!r} cannot be heard: {error.came}", param=KNOWN) from None
    if len(pcm) < s_to_samples(LEAST_KNOWN_S):
        raise OptionError(
            f"the audio of {speaker.name!r} is too short or too long",
            f"{LEAST_KNOWN_S} to {LONGEST_KNOWN_S} s of this speaker, alone",
            param=KNOWN,
        )
    return pcm[:WINDOW_SAMPLES]


class Diarizing:
    """One file. Nothing in it waits, but for room in the engine."""

    def __init__(
        self,
        client: EngineClient,
        options: TranscribeOptions,
        known: Known,
        wake: Callable[[Future[Any]], None],
        check: Callable[[], None],
    ) -> None:
        self._known = known
        self._names: dict[str, np.ndarray] | None = None
        """Directions of those who are known, once they were heard."""
        self._client, self._wake, self._check = client, wake, check
        self._words = options.words
        self._how_many = HowMany.of(options.num_speakers, options.min_speakers, options.max_speakers)
        self._chunks: list[np.ndarray] = []
        self._from = self._samples = self._next = 0
        """Where the chunks begin and end in the file, and where the next window begins."""
        self._asked: deque[Asked] = deque()
        self._heard: list[Window] = []
        self._ended = False
        self._whole: int | None = None
        self._windows = 0

    def expect(self, samples: int | None) -> None:
        """How long the recording is, before any of it is put. None: nobody knows."""
        self._whole = samples

    @property
    def room(self) -> bool:
        """More may be put."""
        return len(self._asked) < WINDOWS_AHEAD

    @property
    def over(self) -> bool:
        """All was heard."""
        return self._ended and not self._asked and self._names is not None

    def put(self, pcm: np.ndarray) -> None:
        """`pcm` (n,) float32 at 16 kHz, any n. Raises AtCapacity never, EngineClosed."""
        self._chunks.append(pcm)
        self._samples += len(pcm)
        while self._samples - self._next > WINDOW_SAMPLES:  # not when they are as long: it may be the last
            close = closeness(self._next, self._whole)
            self._ask(self._next, 0 if self._windows % close.every else close.budget_samples)
            self._next += close.step_samples

    def finish(self) -> None:
        """No more will come. Idempotent."""
        if not self._ended:
            self._ended = True
            if self._samples:
                last = max(0, self._samples - WINDOW_SAMPLES)
                self._ask(last, closeness(last, self._whole).budget_samples)

    def advance(self) -> bool:
        """Take what was answered; whether there was anything. Raises WeightsMissing, WeightsCorrupt, StepFailed,
        EngineClosed; OptionError for speakers who are known, and not by their voices."""
        moved = False
        if self._names is None:
            self._names = self._known.voices()
            moved = self._names is not None
        while self._asked and self._asked[0].answer.done():
            start, samples, answer = self._asked.popleft()
            self._heard.append(Window(start, samples, answer.result()))
            moved = True
        return moved

    def turns(self) -> tuple[SpeakerTurn, ...]:
        """Once it is over."""
        assert self._names is not None
        return called(diarize(self._heard, self._how_many), self._names).turns

    def told(self, segment: Segment, turns: Turns) -> list[Segment]:
        """The segment by who says it: a part for each change of speaker."""
        return told(segment, turns, self._words)

    def _ask(self, start: int, budget_samples: int) -> None:
        audio = np.concatenate(self._chunks) if len(self._chunks) > 1 else self._chunks[0]
        pcm = np.ascontiguousarray(audio[start - self._from : start - self._from + WINDOW_SAMPLES])
        kept = max(self._from, self._samples - WINDOW_SAMPLES)  # the last window reaches back so far
        kept = min(kept, start + closeness(start, self._whole).step_samples)
        self._chunks, self._from = [audio[kept - self._from :]], kept
        answer = self._client.voices(pcm, budget_samples=budget_samples, wait=True, check=self._check)
        self._windows += 1
        self._asked.append(Asked(start, len(pcm), answer))
        answer.add_done_callback(self._wake)


class Overheard:
    """A Reading whose chunks are heard for speakers too, as they are taken."""

    def __init__(self, source: Reading, diarizing: Diarizing) -> None:
        self._source, self._diarizing = source, diarizing
        self.hint_samples = source.hint_samples
        diarizing.expect(source.hint_samples)

    @property
    def ended(self) -> bool:
        return self._source.ended

    def take(self) -> np.ndarray | None:
        chunk = self._source.take()
        if chunk is not None:
            self._diarizing.put(chunk)
        elif self._source.ended:
            self._diarizing.finish()
        return chunk

    def close(self) -> None:
        self._source.close()
