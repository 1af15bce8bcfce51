"""English phonemes by espeak-ng, for voices with its IPA alphabet. It runs as a separate process over pipes and is
never linked, because its licence (GPL 3) is not ours.

It reads a whole clause, so that `the` depends on the next word, and each word by itself, to locate the words in
the clause's phonemes.
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
"""Language switches in espeak-ng's output, and ties."""
_stress = str.maketrans("", "", "ˈˌː")
STEPS = ((1, 1), (2, 1), (3, 1), (4, 1), *((1, many) for many in range(7) if many != 1))
"""Allowed alignments of words and tokens: several words in one token, or one word in several tokens or in none."""


class EspeakPronouncer:
    """Grapheme-to-phoneme conversion that starts the program for each sentence: some 15 ms."""

    def __init__(self, british: bool = False, program: str = PROGRAM) -> None:
        """Raises ProgramMissing."""
        found = shutil.which(program)
        if found is None:
            raise ProgramMissing(
                f"{program} is not on this machine", "voices of this kind read by it", "apt install espeak-ng, or brew"
            )
        self._command = [found, "-q", "--ipa", "-v", "en-gb" if british else "en-us"]
        self.letters = frozenset(ESPEAK_LETTERS)

    def pronounce(self, chunks: Sequence[Chunk]) -> list[str]:
        """Phonemes of each chunk of a sentence, with its trailing space if it has one: espeak-ng joins words that
        are spoken as one. Raises ProgramFailed."""
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
        spoken = [""] * len(parts)
        for run in runs:
            whole = next(answers)
            for at, phonemes in zip(run, _shared(whole, [next(answers) for _ in run]), strict=True):
                spoken[at] = phonemes
        for at, (_, core, _) in enumerate(parts):
            if isinstance(core, PhonemeOverride):  # it was read only as context for its neighbours
                spoken[at] = f"{core.phonemes} "
        return [_pointed(front, core, end) for (front, _, end), core in zip(parts, spoken, strict=True)]

    def _phonemize_lines(self, lines: list[str]) -> list[str]:
        """One line of phonemes for each line of text."""
        if not lines:
            return []
        found = self._run("\n".join(lines))
        # If the program split a line in two, all following lines would shift.
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


def _parts(chunk: Chunk) -> tuple[str, str | PhonemeOverride, str]:
    """Leading punctuation, spoken part, trailing punctuation."""
    if any(isinstance(part, PhonemeOverride) for part in chunk):
        at = next(at for at, part in enumerate(chunk) if isinstance(part, PhonemeOverride))
        front, end = ("".join(map(str, chunk[:at])), "".join(part for part in chunk[at + 1 :] if isinstance(part, str)))
        return front, chunk[at], end
    found = _split.fullmatch("".join(map(str, chunk)))
    assert found, "any text is some punctuation, something, and some punctuation"
    return found[1], found[2], found[3]


def _pointed(front: str, core: str, end: str) -> str:
    blank = " " if core.endswith(" ") or end else ""
    points = "".join(letter for letter in end if letter in PUNCTUATION)
    return f"{''.join(letter for letter in front if letter in PUNCTUATION)}{core.rstrip()}{points}{blank}"


def _shared(whole: str, alone: list[str]) -> list[str]:
    """The clause's phonemes of each word, with a trailing space, located by the phonemes of the words alone."""
    tokens = whole.split()
    if len(tokens) == len(alone):
        return [f"{token} " for token in tokens]
    bare = [phonemes.translate(_stress).replace(" ", "") for phonemes in alone]
    found: list[str] = []
    at = 0
    for words, count in _matched(bare, [token.translate(_stress) for token in tokens]):
        joined, at = " ".join(tokens[at : at + count]), at + count
        found += _divided(f"{joined} " if joined else "", bare[len(found) : len(found) + words])
    return found


def _matched(words: list[str], tokens: list[str]) -> list[tuple[int, int]]:
    """Alignment of words and tokens as pairs (words, tokens) of lengths, with the least number of differing
    letters."""
    best: dict[tuple[int, int], tuple[int, list[tuple[int, int]]]] = {(0, 0): (0, [])}
    for i, j in product(range(len(words) + 1), range(len(tokens) + 1)):
        if (i, j) not in best:
            continue
        cost, steps = best[i, j]
        for step in STEPS:
            target = i + step[0], j + step[1]
            if target[0] > len(words) or target[1] > len(tokens):
                continue
            word_letters, token_letters = (
                Counter("".join(words[i : target[0]])),
                Counter("".join(tokens[j : target[1]])),
            )
            total = cost + (word_letters - token_letters).total() + (token_letters - word_letters).total()
            if target not in best or total < best[target][0]:
                best[target] = total, [*steps, step]
    whole = len(words), len(tokens)
    return best[whole][1] if whole in best else [whole]


def _divided(phonemes: str, words: list[str]) -> list[str]:
    """Phonemes of several joined words divided among them: each cut is at the next word's first phoneme, if it
    occurs near the proportional position."""
    found: list[str] = []
    for at, word in enumerate(words[:-1]):
        remaining = sum(map(len, words[at:])) or 1
        proportional = round(len(phonemes) * len(word) / remaining)
        first = words[at + 1][:1]
        near = [
            place
            for place, letter in enumerate(phonemes)
            if letter == first and abs(place - proportional) < 4 and place
        ]
        cut = min(near, key=lambda place: abs(place - proportional)) if near else proportional
        cut -= cut > 0 and phonemes[cut - 1 : cut] in ("ˈ", "ˌ")
        found.append(phonemes[:cut])
        phonemes = phonemes[cut:]
    return [*found, phonemes]
