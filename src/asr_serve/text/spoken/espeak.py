"""English by espeak-ng, for voices that speak its IPA. A program of its own, asked by pipe and never linked: its licence
(GPL 3) is not ours.

It reads a whole clause, so that `the` knows what follows, and each word by itself, which tells where in the clause's phonemes
the words lie.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from difflib import SequenceMatcher

from asr_serve.errors import ProgramFailed, ProgramMissing
from asr_serve.text.spoken.alphabets import ESPEAK, POINTS
from asr_serve.text.spoken.english import Chunk, Preset

PROGRAM = "espeak-ng"
TIMEOUT_S = 10.0
_points = "".join(re.escape(point) for point in sorted(POINTS - {" "}))
_split = re.compile(rf"([{_points}]*)(.*?)([{_points}]*)", re.DOTALL)
_silent = re.compile(r"\([a-z-]+\)|[_\u200d͜͡]")
"""What it says of other languages, and ties."""


class Espeak:
    """Asks the program anew for each sentence: some 15 ms."""

    def __init__(self, british: bool = False, program: str = PROGRAM) -> None:
        """Raises ProgramMissing."""
        found = shutil.which(program)
        if found is None:
            raise ProgramMissing(
                f"{program} is not on this machine", "voices of this kind read by it", "apt install espeak-ng, or brew"
            )
        self._command = [found, "-q", "--ipa", "-v", "en-gb" if british else "en-us"]
        self.letters = frozenset(ESPEAK)

    def pronounce(self, chunks: Sequence[Chunk]) -> list[str]:
        """Phonemes of each chunk of a sentence, with the blank behind it, if there is one: espeak-ng joins words that
        are said in one. Raises ProgramFailed."""
        parts = [_parts(chunk) for chunk in chunks]
        lines: list[str] = []
        runs: list[list[int]] = [[]]
        for at, (_, core, end) in enumerate(parts):
            if isinstance(core, str) and core:
                runs[-1].append(at)
            if end or not isinstance(core, str):
                runs.append([])
        runs = [run for run in runs if run]
        for run in runs:
            words = [str(parts[at][1]) for at in run]
            lines += [" ".join(words), *words]
        answers = iter(self._ask(lines))
        said = ["" if isinstance(core, str) else f"{core.phonemes} " for _, core, _ in parts]
        for run in runs:
            whole = next(answers)
            for at, phonemes in zip(run, _shared(whole, [next(answers) for _ in run]), strict=True):
                said[at] = phonemes
        return [_pointed(front, core, end) for (front, _, end), core in zip(parts, said, strict=True)]

    def _ask(self, lines: list[str]) -> list[str]:
        """A line of phonemes for each line of text."""
        if not lines:
            return []
        found = self._run("\n".join(lines))
        # A line that it cuts in two would move all that follow.
        return found if len(found) == len(lines) else [" ".join(self._run(line)) for line in lines]

    def _run(self, text: str) -> list[str]:
        try:
            done = subprocess.run(
                self._command, input=f"{text}\n", capture_output=True, timeout=TIMEOUT_S, check=True, encoding="utf-8"
            )
        except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as failure:
            raise ProgramFailed(f"{PROGRAM}: {failure}") from failure
        return [
            "".join(letter for letter in " ".join(_silent.sub("", line).split()) if letter in self.letters)
            for line in done.stdout.splitlines()
        ]


def _parts(chunk: Chunk) -> tuple[str, str | Preset, str]:
    """Punctuation before, what is said, punctuation after."""
    if any(isinstance(part, Preset) for part in chunk):
        at = next(at for at, part in enumerate(chunk) if isinstance(part, Preset))
        front, end = "".join(map(str, chunk[:at])), "".join(part for part in chunk[at + 1 :] if isinstance(part, str))
        return front, chunk[at], end
    found = _split.fullmatch("".join(map(str, chunk)))
    assert found, "any text is some punctuation, something, and some punctuation"
    return found[1], found[2], found[3]


def _pointed(front: str, core: str, end: str) -> str:
    blank = " " if core.endswith(" ") or end else ""
    kept = "".join(letter for letter in end if letter in POINTS)
    return f"{''.join(letter for letter in front if letter in POINTS)}{core.rstrip()}{kept}{blank}"


def _shared(whole: str, alone: list[str]) -> list[str]:
    """The clause's phonemes cut where its words end, found by what the words sound like by themselves."""
    bare = [phonemes.replace(" ", "") for phonemes in alone]
    joined = "".join(bare)
    matcher = SequenceMatcher(None, joined, whole, autojunk=False)
    moved = [0] * (len(joined) + 1)
    for _, first, end, there, there_end in matcher.get_opcodes():
        for at in range(first, end + 1):
            moved[at] = min(there + at - first, there_end)
    cuts, at = [0], 0
    for phonemes in bare[:-1]:
        at += len(phonemes)
        cut = max(moved[at], cuts[-1])
        blank = _nearest_blank(whole, cut)
        cuts.append(max(blank + 1 if blank is not None else cut, cuts[-1]))
    cuts.append(len(whole))
    pieces = [whole[first:end] for first, end in zip(cuts, cuts[1:], strict=False)]
    return [*pieces[:-1], f"{pieces[-1]} "] if pieces[-1] else pieces


def _nearest_blank(whole: str, cut: int) -> int | None:
    """A blank at most two letters away: most words end at one."""
    near = [at for at in range(max(cut - 2, 0), min(cut + 3, len(whole))) if whole[at] == " "]
    return min(near, key=lambda at: abs(at - cut)) if near else None
