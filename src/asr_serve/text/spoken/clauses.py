"""A sentence to clauses: rewritten, read, cut to what a voice can say in one breath, with the place of each
word."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple, Protocol

from asr_serve.text.spoken.alignment import STROKES, align
from asr_serve.text.spoken.characters import speakable
from asr_serve.text.spoken.normal import normalise
from asr_serve.text.spoken.passages import PLAIN, PRESET, Clause, Manner, Said, Word
from asr_serve.text.spoken.sounds.alphabets import POINTS, Lexicon
from asr_serve.text.spoken.sounds.english import Chunk, Preset
from asr_serve.text.spoken.sounds.names import possessive
from asr_serve.text.spoken.splitting import STOPS, Break
from asr_serve.types import Stretch

LONGEST = 200
"""Phonemes of a clause, where it can be cut."""
_chunks = re.compile(rf"{PRESET}(?:'s\b)?[^\w\s]*|\S+?(?={PRESET})|\S+")
_ends = (",", ";", ":", "—", ".", "!", "?", "…", ")")


class Voice(Protocol):
    """Knows how words sound."""

    def pronounce(self, chunks: Sequence[Chunk]) -> list[str]: ...


class _Bit(NamedTuple):
    """What cannot be cut: phonemes with the blank behind them."""

    phonemes: str
    word: int
    """Which written word, or words, it is of."""


class _Written(NamedTuple):
    text: str
    manner: Manner


class Clauses:
    """Safe for any number of threads."""

    def __init__(self, voice: Voice, lexicon: Lexicon, british: bool, max_phonemes: int) -> None:
        self._voice, self._lexicon = voice, lexicon
        self._language = "en-gb" if british else "en"
        self._most, self._longest = max_phonemes, min(LONGEST, max_phonemes)

    def written(
        self, text: str, said: Iterator[Said], manners: Sequence[tuple[int, Manner]], start: int
    ) -> Iterator[tuple[Break, Clause]]:
        """Clauses of a cleaned piece of text, each with what lies before it. `said`: for its PRESETs, of which it
        takes as many as it has. `start`: where the piece lies in the text that `manners` is about."""
        chunks, shown, given, places = [], [], [], [at for at, _ in manners]
        for found in _chunks.finditer(text):
            chunk, show = found[0], found[0]
            if PRESET in chunk:
                one = next(said)
                show = chunk.replace(PRESET, one.written)
                given.append(one)
            elif self._lexicon and (known := self._looked_up(chunk)):
                chunk = known[0]
                given.append(known[1])
            else:
                show = chunk.strip("*`") if speakable(chunk) else ""  # a dash is no word
            manner = manners[bisect_right(places, start + found.start()) - 1][1]
            chunks.append(chunk)
            shown.append(_Written(show, manner))
        if speakable(text):
            yield from self._read(chunks, shown, given)

    def given(self, phonemes: str) -> Iterator[tuple[Break, Clause]]:
        """Clauses of phonemes with blanks between words."""
        words = phonemes.split()
        bits = [_Bit(f"{word} ", at) for at, word in enumerate(words)]
        yield from self._composed(bits, [_Written(word, PLAIN) for word in words])

    def _looked_up(self, chunk: str) -> tuple[str, Said] | None:
        bare = chunk.strip(STROKES)
        for word in (chunk, bare):
            if phonemes := self._lexicon.get(word):
                return chunk.replace(word, PRESET, 1), Said(word, phonemes=phonemes)
        return None

    def _read(self, chunks: list[str], shown: list[_Written], given: list[Said]) -> Iterator[tuple[Break, Clause]]:
        spoken = self._normalised(" ".join(chunks)).split()
        if sum(chunk.count(PRESET) for chunk in spoken) != len(given):
            spoken = list(chunks)
        groups, words = align(chunks, spoken, self._normalised), []
        sounds: list[Chunk] = []
        owners: list[int] = []
        said = iter(given)
        for at, group in enumerate(groups):
            members = shown[group.first : group.end]
            words.append(
                _Written(
                    " ".join(one.text for one in members if one.text), members[0].manner if members else PLAIN
                )
            )
            for chunk in spoken[group.spoken_first : group.spoken_end]:
                found = _sounds(chunk, said)
                sounds += found
                owners += [at] * len(found)
        read = self._voice.pronounce(sounds)
        stop = chunks[-1].rstrip("\"'”)]")[-1:]
        if stop in STOPS and read and not read[-1].rstrip().endswith(STOPS):
            read[-1] = f"{read[-1].rstrip()}{stop} "  # that of an abbreviation ends the sentence too
        yield from self._composed([_Bit(*bit) for bit in zip(read, owners, strict=True) if bit[0]], words)

    def _normalised(self, text: str) -> str:
        return normalise(text, self._language)

    def _composed(self, bits: list[_Bit], words: Sequence[_Written]) -> Iterator[tuple[Break, Clause]]:
        before: Break = "none"
        said: set[int] = set()
        for part, ends in _fitting(bits, self._longest, self._most):
            clause = _clause(part, words, said)
            if clause:
                yield before, clause
                before = "none"
            if ends == "clause":
                before = ends


def _sounds(chunk: str, said: Iterator[Said]) -> list[Chunk]:
    """A chunk as what reads it takes it, its PRESET replaced: by phonemes, or by words, which are chunks
    themselves."""
    if PRESET not in chunk:
        return [(chunk,)]
    front, _, end = chunk.partition(PRESET)
    one = next(said)
    if one.phonemes and end.startswith("'s"):
        one, end = one._replace(phonemes=possessive(one.phonemes)), end[2:]
    if one.phonemes:
        return [tuple(part for part in (front, Preset(one.written, one.phonemes), end) if part)]
    return [(word,) for word in f"{front}{one.words}{end}".split()]


def _fitting(bits: list[_Bit], longest: int, most: int) -> Iterator[tuple[list[_Bit], Break]]:
    """Parts of at most `longest` phonemes, cut where a clause ends, else evenly; with what each ends with. Of a
    bit that is longer than `most`, there are several."""
    bits = [
        _Bit(bit.phonemes[at : at + most], bit.word) for bit in bits for at in range(0, len(bit.phonemes), most)
    ]
    while bits:
        ends = list(accumulate(len(bit.phonemes) for bit in bits))
        if ends[-1] - 1 <= longest:
            yield bits, "none"
            return
        fit = max(bisect_right(ends, longest + 1), 1)
        cuts = [at for at in range(1, fit + 1) if bits[at - 1].phonemes.rstrip().endswith(_ends)]
        if cuts and ends[cuts[-1] - 1] >= longest // 4:
            cut, kind = cuts[-1], "clause"
        else:
            even = ends[-1] / -(-ends[-1] // longest)
            cut, kind = min(range(1, fit + 1), key=lambda at: abs(ends[at - 1] - even)), "none"
        yield bits[:cut], "clause" if kind == "clause" else "none"
        bits = bits[cut:]


def _clause(bits: list[_Bit], written: Sequence[_Written], said: set[int]) -> Clause | None:
    """None where nothing in it has a sound. `said`: words that an earlier clause began with, and this one."""
    text = "".join(bit.phonemes for bit in bits)
    if not set(text) - POINTS:
        return None
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    stretches: list[Stretch] = []
    words: list[Word] = []
    at = 0
    for manner, run in groupby(bits, key=lambda bit: written[bit.word].manner):
        begin = at
        for word, parts in groupby(run, key=lambda bit: bit.word):
            first, at = at, at + sum(len(bit.phonemes) for bit in parts)
            inside = [place for place in range(max(first, start), min(at, end)) if text[place] not in POINTS]
            if inside and word not in said and written[word].text:
                words.append(Word(written[word].text, inside[0] - start, inside[-1] - start))
                said.add(word)
        stretches.append(Stretch(text[max(begin, start) : min(at, end)], *manner))
    return Clause(tuple(stretch for stretch in stretches if stretch.phonemes), tuple(words))
