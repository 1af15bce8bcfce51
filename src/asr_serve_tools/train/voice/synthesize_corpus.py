"""Has teachers read sentences until each has spoken for so many minutes; goes on where a run before it stopped."""

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
"""Of the sentences, so many are read at the teacher's own pace; the others a little faster or slower."""
PACES, PACE_DEVIATION = (0.85, 1.18), 0.06
LONGEST_PHONEMES = 400
TOLD_EVERY_S = 30.0


class SynthesisJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be read by whom."""

    texts: tuple[Path, ...]
    """Any texts in UTF-8."""
    folder: Path
    """Where the speech goes (cloning/voice_corpus)."""
    heart_minutes: float = 300.0
    """Of hibari's voice, which reads fastest: most sentences are learnt from
    it."""
    minutes: float = 20.0
    """Of each of the others."""
    voices: tuple[str, ...]
    """Kokoro's."""
    processes: int = 1
    heart_characters: int = 150
    characters: int = 100
    """Of the longest sentence, for hibari's voice and for Kokoro's."""


def synthesize_corpus(job: SynthesisJob, say: Callable[[str], None]) -> None:
    """Raises OptionError, WeightsMissing."""
    _read(job, (), say)
    shares = [job.voices[at :: job.processes] for at in range(job.processes)]
    if job.processes == 1:
        _read(job, job.voices, say)
        return
    # A process each: the graphs hold the interpreter for long.
    with multiprocessing.get_context("spawn").Pool(job.processes) as pool:
        pool.starmap(_read, [(job, share, _aloud) for share in shares if share])


def _aloud(line: str) -> None:
    """Of a process of its own: stdout is for the result."""
    print(line, file=sys.stderr, flush=True)


def _read(job: SynthesisJob, names: Sequence[str], say: Callable[[str], None]) -> None:
    """By these voices of Kokoro's; by hibari's where there are none."""
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
    for teacher in teachers:  # what was read before is not read again
        for _ in files[teacher.name].lines:
            next(reading[teacher.name])
    progress = SynthesisProgress(list(files.values()), wanted, say)
    while busy := [teacher for teacher in teachers if files[teacher.name].minutes < wanted]:
        for teacher in busy:
            text, chance = next(reading[teacher.name]), paces[teacher.name]
            phonemes = reader.phonemes(text)
            if phonemes and len(phonemes) <= LONGEST_PHONEMES:
                pace = (
                    1.0 if chance.random() < AS_IS else float(np.exp(chance.gauss(0, PACE_DEVIATION)).clip(*PACES))
                )
                read = corpus_utterance(text, reader.spoken(phonemes), teacher.read(reader.ids(phonemes), pace))
                if read is not None:
                    files[teacher.name].append(*read)
            progress.report()
    progress.finish()


class SynthesisProgress:
    """How much has been read, and when all of it will be."""

    def __init__(
        self,
        files: Sequence[VoiceCorpus],
        wanted: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wanted`: minutes of each."""
        self._files, self._wanted, self._say, self._clock = files, wanted, say, clock
        self._who = files[0].name if len(files) == 1 else f"{len(files)} voices"
        self._began_s = self._told_s = clock()
        self._before = self._minutes

    @property
    def _minutes(self) -> float:
        """Of what is wanted: a voice's last sentence may be more."""
        return sum(min(each.minutes, self._wanted) for each in self._files)

    def report(self) -> None:
        """Now and then."""
        now_s = self._clock()
        if now_s - self._told_s < TOLD_EVERY_S:
            return
        self._told_s, minutes, whole = now_s, self._minutes, self._wanted * len(self._files)
        if made := minutes - self._before:
            left_s = (whole - minutes) / made * (now_s - self._began_s)
            left = f"about {left_s / 60:.0f} min left" if left_s >= 60 else f"about {left_s:.0f} s left"
            self._say(f"{self._who}: {minutes:.1f} of {whole:g} minutes of speech, {left}")

    def finish(self) -> None:
        self._say(f"{self._who}: {sum(each.minutes for each in self._files):.1f} minutes of speech")
