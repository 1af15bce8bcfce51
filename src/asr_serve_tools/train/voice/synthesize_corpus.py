"""Synthesis of a training corpus: teacher voices read sentences up to a number of minutes each; resumable."""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from asr_serve.cloning.voice_corpus import VoiceCorpus
from asr_serve_tools.train.voice.sentences import reading_order, sentences
from asr_serve_tools.train.voice.teacher_voices import (
    HeartTeacher,
    KokoroTeacher,
    TeacherPhonemizer,
    TeacherVoice,
    corpus_utterance,
)

AS_IS = 0.6
"""Share of the sentences read at the teacher's own pace; the others are a little faster or slower."""
PACES, PACE_DEVIATION = (0.85, 1.18), 0.06
LONGEST_PHONEMES = 400
TOLD_EVERY_S = 30.0


class SynthesisJob(msgspec.Struct, frozen=True, kw_only=True):
    """Texts, voices and lengths of a corpus."""

    texts: tuple[Path, ...]
    """Text files in UTF-8."""
    folder: Path
    """Folder of the speech (cloning/voice_corpus)."""
    heart_minutes: float = 300.0
    """Minutes of hibari's voice, which is the fastest to synthesize, so that most sentences are its."""
    minutes: float = 20.0
    """Minutes of each other voice."""
    voices: tuple[str, ...]
    """Names of Kokoro's voices."""
    processes: int = 1
    heart_characters: int = 150
    characters: int = 100
    """Characters of the longest sentence for Kokoro's voices; `heart_characters` for hibari's."""


def synthesize_corpus(job: SynthesisJob, say: Callable[[str], None]) -> None:
    """Synthesize all speech of a job that is not on disk yet. Raises OptionError, WeightsMissing."""
    _read(job, (), say)
    shares = [job.voices[at :: job.processes] for at in range(job.processes)]
    if job.processes == 1:
        _read(job, job.voices, say)
        return
    # One process for each share, because the graphs hold the interpreter's lock for long.
    with multiprocessing.get_context("spawn").Pool(job.processes) as pool:
        pool.starmap(_read, [(job, share, _aloud) for share in shares if share])


def _aloud(line: str) -> None:
    """Report progress from a worker process; stdout is for the result."""
    print(line, file=sys.stderr, flush=True)


def _read(job: SynthesisJob, names: Sequence[str], say: Callable[[str], None]) -> None:
    """Synthesize with these voices of Kokoro's; with hibari's voice if there are none."""
    longest = job.characters if names else job.heart_characters
    texts, reader = sentences(job.texts, longest), TeacherPhonemizer()
    teachers: list[TeacherVoice] = [] if names else [HeartTeacher()]
    shared = None
    for name in names:
        kokoro = KokoroTeacher(name, shared)
        shared = kokoro.session
        teachers.append(kokoro)
    wanted = job.minutes if names else job.heart_minutes
    files = {teacher.name: VoiceCorpus(job.folder, teacher.name, write=True) for teacher in teachers}
    reading = {teacher.name: reading_order(texts, seed=sum(map(ord, teacher.name))) for teacher in teachers}
    paces = {teacher.name: random.Random(sum(map(ord, teacher.name)) + 1) for teacher in teachers}
    for teacher in teachers:  # skip sentences of an earlier run
        for _ in files[teacher.name].lines:
            next(reading[teacher.name])
    progress = SynthesisProgress(list(files.values()), wanted, say)
    while busy := [teacher for teacher in teachers if files[teacher.name].minutes < wanted]:
        for teacher in busy:
            text, chance = next(reading[teacher.name]), paces[teacher.name]
            phonemes = reader.phonemes(text)
            if phonemes and len(phonemes) <= LONGEST_PHONEMES:
                pace = 1.0 if chance.random() < AS_IS else float(np.exp(chance.gauss(0, PACE_DEVIATION)).clip(*PACES))
                read = corpus_utterance(text, reader.spoken(phonemes), teacher.read(reader.ids(phonemes), pace))
                if read is not None:
                    files[teacher.name].append(*read)
            progress.report()
    progress.finish()


class SynthesisProgress:
    """Progress of synthesis: minutes so far, and the remaining time."""

    def __init__(
        self,
        files: Sequence[VoiceCorpus],
        wanted: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wanted`: minutes of each voice."""
        self._files, self._wanted, self._say, self._clock = files, wanted, say, clock
        self._who = files[0].name if len(files) == 1 else f"{len(files)} voices"
        self._began_s = self._told_s = clock()
        self._before = self._minutes

    @property
    def _minutes(self) -> float:
        """Minutes so far, without the excess of a voice's last sentence."""
        return sum(min(corpus.minutes, self._wanted) for corpus in self._files)

    def report(self) -> None:
        """Report at most once in TOLD_EVERY_S seconds."""
        now_s = self._clock()
        if now_s - self._told_s < TOLD_EVERY_S:
            return
        self._told_s, minutes, whole = now_s, self._minutes, self._wanted * len(self._files)
        if progress := minutes - self._before:
            remaining_s = (whole - minutes) / progress * (now_s - self._began_s)
            remaining = (
                f"about {remaining_s / 60:.0f} min left" if remaining_s >= 60 else f"about {remaining_s:.0f} s left"
            )
            self._say(f"{self._who}: {minutes:.1f} of {whole:g} minutes of speech, {remaining}")

    def finish(self) -> None:
        self._say(f"{self._who}: {sum(corpus.minutes for corpus in self._files):.1f} minutes of speech")
