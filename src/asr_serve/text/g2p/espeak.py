"""English by espeak-ng, for voices that speak its IPA. A program of its own, asked by pipe and never linked: its
licence (GPL 3) is not ours.

It reads a whole clause, so that `the` knows what follows, and each word by itself, which tells where in the
clause's phonemes the words lie.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from itertools import product

from asr_serve.errors import ProgramFailed, ProgramMissing
from asr_serve.text.g2p.phoneme_alphabets import ESPEAK_LETTERS, PUNCTUATION
from asr_serve.text.hibari_english import Chunk, PhonemeOverride

PROGRAM = "espeak-ng"
TIMEOUT_S = 10.0
_points = "".join(re.escape(point) for point in sorted(PUNCTUATION - {" "}))
_split = re.compile(rf"([{_points}]*)(.*?)([{_points}]*)", re.DOTALL)
_silent = re.compile(r"\([a-z-]+\)|[_\u200d͜͡]")
"""What it says of other languages, and ties."""
_stress = str.maketrans("", "", "ˈˌː")
STEPS = ((1, 1), (2, 1), (3, 1), (4, 1), *((1, many) for many in range(7) if many != 1))
"""Words, and tokens: words that are said in one; one that is said in several, or in none."""


class EspeakPronouncer:
    """Asks the program anew for each sentence: some 15 ms."""

    def __init__(self, british: bool = False, program: str = PROGRAM) -> None:
        """Raises ProgramMissing."""
        found = shutil.which(program)
        if found is None:
            raise ProgramMissing(
                f"{program} is not on this machine",
                "voices of this kind read by it",
                "apt install espeak-ng, or brew",
            )
        self._command = [found, "-q", "--ipa", "-v", "en-gb" if british else "en-us"]
        self.letters = frozenset(ESPEAK_LETTERS)

    def pronounce(self, chunks: Sequence[Chunk]) -> list[str]:
        """Phonemes of each chunk of a sentence, with the blank behind it, if there is one: espeak-ng joins words
        that are said in one. Raises ProgramFailed."""
        parts = [_parts(chunk) for chunk in chunks]
        cores = [core if isinstance(core, str) else core.written for _, core, _ in parts]
        runs: list[list[int]] = [[]]
        for at, (_, _, end) in enumerate(parts):
            if cores[at]:
                runs[-1].append(at)
            if end:
                runs.append([])
        runs = [run for run in runs if run]
        lines = [line for run in runs for line in (" ".join(cores[at] for at in run), *(cores[at] for at in run))]
        answers = iter(self._phonemize_lines(lines))
        said = [""] * len(parts)
        for run in runs:
            whole = next(answers)
            for at, phonemes in zip(run, _shared(whole, [next(answers) for _ in run]), strict=True):
                said[at] = phonemes
        for at, (_, core, _) in enumerate(parts):
            if isinstance(core, PhonemeOverride):  # it was read only for what is around it
                said[at] = f"{core.phonemes} "
        return [_pointed(front, core, end) for (front, _, end), core in zip(parts, said, strict=True)]

    def _phonemize_lines(self, lines: list[str]) -> list[str]:
        """A line of phonemes for each line of text."""
        if not lines:
            return []
        found = self._run("\n".join(lines))
        # A line that it cuts in two would move all that follow.
        return found if len(found) == len(lines) else [" ".join(self._run(line)) for line in lines]

    def _run(self, text: str) -> list[str]:
        try:
            done = subprocess.run(
                self._command,
                input=f"{text}\n",
                capture_output=True,
                timeout=TIMEOUT_S,
                check=True,
                encoding="utf-8",
            )
        except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as failure:
            raise ProgramFailed(f"{PROGRAM}: {failure}") from failure
        return [
            "".join(letter for letter in " ".join(_silent.sub("", line).split()) if letter in self.letters)
            for line in done.stdout.splitlines()
        ]


def _parts(chunk: Chunk) -> tuple[str, str | PhonemeOverride, str]:
    """Punctuation before, what is said, punctuation after."""
    if any(isinstance(part, PhonemeOverride) for part in chunk):
        at = next(at for at, part in enumerate(chunk) if isinstance(part, PhonemeOverride))
        front, end = (
            "".join(map(str, chunk[:at])),
            "".join(part for part in chunk[at + 1 :] if isinstance(part, str)),
        )
        return front, chunk[at], end
    found = _split.fullmatch("".join(map(str, chunk)))
    assert found, "any text is some punctuation, something, and some punctuation"
    return found[1], found[2], found[3]


def _pointed(front: str, core: str, end: str) -> str:
    blank = " " if core.endswith(" ") or end else ""
    kept = "".join(letter for letter in end if letter in PUNCTUATION)
    return f"{''.join(letter for letter in front if letter in PUNCTUATION)}{core.rstrip()}{kept}{blank}"


def _shared(whole: str, alone: list[str]) -> list[str]:
    """The clause's phonemes for each word, with the blank behind it, found by what the words sound like by
    themselves."""
    tokens = whole.split()
    if len(tokens) == len(alone):
        return [f"{token} " for token in tokens]
    bare = [phonemes.translate(_stress).replace(" ", "") for phonemes in alone]
    found: list[str] = []
    at = 0
    for words, some in _matched(bare, [token.translate(_stress) for token in tokens]):
        said, at = " ".join(tokens[at : at + some]), at + some
        found += _divided(f"{said} " if said else "", bare[len(found) : len(found) + words])
    return found


def _matched(words: list[str], tokens: list[str]) -> list[tuple[int, int]]:
    """How many words, and how many tokens, are one another's: the cheapest way through both, where what differs is
    counted in letters."""
    best: dict[tuple[int, int], tuple[int, list[tuple[int, int]]]] = {(0, 0): (0, [])}
    for i, j in product(range(len(words) + 1), range(len(tokens) + 1)):
        if (i, j) not in best:
            continue
        cost, way = best[i, j]
        for step in STEPS:
            there = i + step[0], j + step[1]
            if there[0] > len(words) or there[1] > len(tokens):
                continue
            one, other = Counter("".join(words[i : there[0]])), Counter("".join(tokens[j : there[1]]))
            more = cost + (one - other).total() + (other - one).total()
            if there not in best or more < best[there][0]:
                best[there] = more, [*way, step]
    whole = len(words), len(tokens)
    return best[whole][1] if whole in best else [whole]


def _divided(said: str, words: list[str]) -> list[str]:
    """What is said in one for several words, cut where the next one's first letter is, near where it should be."""
    found: list[str] = []
    for at, word in enumerate(words[:-1]):
        left = sum(map(len, words[at:])) or 1
        even = round(len(said) * len(word) / left)
        first = words[at + 1][:1]
        near = [place for place, letter in enumerate(said) if letter == first and abs(place - even) < 4 and place]
        cut = min(near, key=lambda place: abs(place - even)) if near else even
        cut -= cut > 0 and said[cut - 1 : cut] in ("ˈ", "ˌ")
        found.append(said[:cut])
        said = said[cut:]
    return [*found, said]
