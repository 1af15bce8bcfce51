"""Has teachers read sentences until each has spoken for so many minutes; goes on where a run before it stopped."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from asr_serve.train.voice.recorded import Voice
from asr_serve.train.voice.sentences import readings, sentences
from asr_serve.train.voice.teachers import Heart, Kokoro, Reader, Teacher, line

AS_IS = 0.6
"""Of the sentences, so many are read at the teacher's own pace; the others a little faster or slower."""
PACES, PACE_DEVIATION = (0.85, 1.18), 0.06
LONGEST_PHONEMES = 400
TOLD_EVERY_S = 30.0


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be read by whom."""

    texts: tuple[Path, ...]
    """Any texts in UTF-8."""
    folder: Path
    """Where the speech goes (train/voice/recorded)."""
    heart_minutes: float = 300.0
    """Of hibari's voice, which reads in a hundredth of the time that it speaks: most sentences are learnt from
    it."""
    minutes: float = 20.0
    """Of each of the others."""
    voices: tuple[str, ...]
    """Kokoro's."""
    processes: int = 1
    heart_characters: int = 150
    characters: int = 100
    """Of the longest sentence, for hibari's voice and for Kokoro's."""


def record(job: Recording, say: Callable[[str], None]) -> None:
    """Raises OptionError, WeightsMissing."""
    _read(job, (), say)
    shares = [job.voices[at :: job.processes] for at in range(job.processes)]
    if job.processes == 1:
        _read(job, job.voices, say)
        return
    # A process each: the graphs hold the interpreter for long.
    with multiprocessing.get_context("spawn").Pool(job.processes) as pool:
        for _ in pool.starmap(_read, [(job, share, print) for share in shares if share]):
            pass


def _read(job: Recording, names: Sequence[str], say: Callable[[str], None]) -> None:
    """By these voices of Kokoro's; by hibari's where there are none."""
    longest = job.characters if names else job.heart_characters
    texts, reader = sentences(job.texts, longest), Reader()
    teachers: list[Teacher] = [] if names else [Heart()]
    shared = None
    for name in names:
        kokoro = Kokoro(name, shared)
        shared = kokoro.session
        teachers.append(kokoro)
    wanted = job.minutes if names else job.heart_minutes
    files = {teacher.name: Voice(job.folder, teacher.name, write=True) for teacher in teachers}
    reading = {teacher.name: readings(texts, seed=sum(map(ord, teacher.name))) for teacher in teachers}
    paces = {teacher.name: random.Random(sum(map(ord, teacher.name)) + 1) for teacher in teachers}
    for teacher in teachers:  # what was read before is not read again
        for _ in files[teacher.name].lines:
            next(reading[teacher.name])
    told = time.monotonic()
    while busy := [teacher for teacher in teachers if files[teacher.name].minutes < wanted]:
        for teacher in busy:
            text, chance = next(reading[teacher.name]), paces[teacher.name]
            phonemes = reader.phonemes(text)
            if phonemes and len(phonemes) <= LONGEST_PHONEMES:
                pace = (
                    1.0 if chance.random() < AS_IS else float(np.exp(chance.gauss(0, PACE_DEVIATION)).clip(*PACES))
                )
                read = line(text, reader.spoken(phonemes), teacher.read(reader.ids(phonemes), pace))
                if read is not None:
                    files[teacher.name].add(*read)
        if time.monotonic() - told > TOLD_EVERY_S:
            told = time.monotonic()
            least = min(files[teacher.name].minutes for teacher in teachers)
            say(f"{', '.join(files)}: {least:.1f} of {wanted:g} minutes each")
