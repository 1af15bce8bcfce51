"""Clauses of a sentence: verbalized, converted to phonemes, and cut to a voice's limit, with the position of each
word."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple, Protocol

from asr_serve.text.g2p.character_folding import has_speech
from asr_serve.text.g2p.clauses import (
    NEUTRAL_PROSODY,
    OVERRIDE_PLACEHOLDER,
    Clause,
    ClauseWord,
    PronunciationOverride,
    ProsodySettings,
)
from asr_serve.text.g2p.phoneme_alphabets import PUNCTUATION, Lexicon
from asr_serve.text.g2p.sentence_splitter import STOPS, BreakKind
from asr_serve.text.g2p.word_alignment import STROKES, align_spoken_words
from asr_serve.text.hibari_english import Chunk, PhonemeOverride
from asr_serve.text.name_pronunciations import possessive
from asr_serve.text.normalization.verbalize import verbalize
from asr_serve.types import PhonemeSpan

MAX_CLAUSE_CHARACTERS = 200
"""Most phonemes of a clause that can be cut."""
_chunks = re.compile(rf"{OVERRIDE_PLACEHOLDER}(?:'s\b)?[^\w\s]*|\S+?(?={OVERRIDE_PLACEHOLDER})|\S+")
_ends = (",", ";", ":", "—", ".", "!", "?", "…", ")")


class Pronouncer(Protocol):
    """Grapheme-to-phoneme converter."""

    def pronounce(self, chunks: Sequence[Chunk]) -> list[str]: ...


class _PhonemeGroup(NamedTuple):
    """Phonemes that cannot be cut, with their trailing space."""

    phonemes: str
    word: int
    """Index of the written word, or words, that they belong to."""


class _DisplayedChunk(NamedTuple):
    text: str
    manner: ProsodySettings


class ClauseBuilder:
    """Builder of clauses from text or phonemes. Thread-safe."""

    def __init__(self, voice: Pronouncer, lexicon: Lexicon, british: bool, max_phonemes: int) -> None:
        self._voice, self._lexicon = voice, lexicon
        self._language = "en-gb" if british else "en"
        self._most, self._longest = max_phonemes, min(MAX_CLAUSE_CHARACTERS, max_phonemes)

    def clauses_of_text(
        self,
        text: str,
        text_overrides: Iterator[PronunciationOverride],
        manners: Sequence[tuple[int, ProsodySettings]],
        start: int,
    ) -> Iterator[tuple[BreakKind, Clause]]:
        """Clauses of a cleaned piece of text, each with the break before it. `text_overrides`: overrides for its
        placeholders, consumed in order. `start`: position of the piece in the text to which `manners` refers."""
        chunks, shown, overrides, manner_starts = [], [], [], [at for at, _ in manners]
        for found in _chunks.finditer(text):
            chunk, show = found[0], found[0]
            if OVERRIDE_PLACEHOLDER in chunk:
                override = next(text_overrides)
                show = chunk.replace(OVERRIDE_PLACEHOLDER, override.written)
                overrides.append(override)
            elif self._lexicon and (lexicon_entry := self._lexicon_override(chunk)):
                chunk = lexicon_entry[0]
                overrides.append(lexicon_entry[1])
            else:
                show = chunk.strip("*`") if has_speech(chunk) else ""  # a dash is not a word
            manner = manners[bisect_right(manner_starts, start + found.start()) - 1][1]
            chunks.append(chunk)
            shown.append(_DisplayedChunk(show, manner))
        if has_speech(text):
            yield from self._read(chunks, shown, overrides)

    def clauses_of_phonemes(self, phonemes: str) -> Iterator[tuple[BreakKind, Clause]]:
        """Clauses of phonemes with spaces between words."""
        words = phonemes.split()
        bits = [_PhonemeGroup(f"{word} ", at) for at, word in enumerate(words)]
        yield from self._composed(bits, [_DisplayedChunk(word, NEUTRAL_PROSODY) for word in words])

    def _lexicon_override(self, chunk: str) -> tuple[str, PronunciationOverride] | None:
        bare = chunk.strip(STROKES)
        for word in (chunk, bare):
            if phonemes := self._lexicon.get(word):
                return chunk.replace(word, OVERRIDE_PLACEHOLDER, 1), PronunciationOverride(word, phonemes=phonemes)
        return None

    def _read(
        self, chunks: list[str], shown: list[_DisplayedChunk], overrides: list[PronunciationOverride]
    ) -> Iterator[tuple[BreakKind, Clause]]:
        spoken = self._normalised(" ".join(chunks)).split()
        if sum(chunk.count(OVERRIDE_PLACEHOLDER) for chunk in spoken) != len(overrides):
            spoken = list(chunks)
        groups, words = align_spoken_words(chunks, spoken, self._normalised), []
        sounds: list[Chunk] = []
        owners: list[int] = []
        remaining_overrides = iter(overrides)
        for at, group in enumerate(groups):
            members = shown[group.first : group.end]
            words.append(
                _DisplayedChunk(
                    " ".join(member.text for member in members if member.text),
                    members[0].manner if members else NEUTRAL_PROSODY,
                )
            )
            for chunk in spoken[group.spoken_first : group.spoken_end]:
                found = _sounds(chunk, remaining_overrides)
                sounds += found
                owners += [at] * len(found)
        read = self._voice.pronounce(sounds)
        stop = chunks[-1].rstrip("\"'”)]")[-1:]
        if stop in STOPS and read and not read[-1].rstrip().endswith(STOPS):
            read[-1] = f"{read[-1].rstrip()}{stop} "  # the full stop of an abbreviation ends the sentence too
        yield from self._composed([_PhonemeGroup(*bit) for bit in zip(read, owners, strict=True) if bit[0]], words)

    def _normalised(self, text: str) -> str:
        return verbalize(text, self._language)

    def _composed(
        self, bits: list[_PhonemeGroup], words: Sequence[_DisplayedChunk]
    ) -> Iterator[tuple[BreakKind, Clause]]:
        before: BreakKind = "none"
        started: set[int] = set()
        for part, ends in _fitting(bits, self._longest, self._most):
            clause = _clause(part, words, started)
            if clause:
                yield before, clause
                before = "none"
            if ends == "clause":
                before = ends


def _sounds(chunk: str, overrides: Iterator[PronunciationOverride]) -> list[Chunk]:
    """Chunks for the pronouncer, with the placeholder replaced by phonemes, or by words, which become chunks of
    their own."""
    if OVERRIDE_PLACEHOLDER not in chunk:
        return [(chunk,)]
    front, _, end = chunk.partition(OVERRIDE_PLACEHOLDER)
    override = next(overrides)
    if override.phonemes and end.startswith("'s"):
        override, end = override._replace(phonemes=possessive(override.phonemes)), end[2:]
    if override.phonemes:
        return [tuple(part for part in (front, PhonemeOverride(override.written, override.phonemes), end) if part)]
    return [(word,) for word in f"{front}{override.words}{end}".split()]


def _fitting(bits: list[_PhonemeGroup], longest: int, most: int) -> Iterator[tuple[list[_PhonemeGroup], BreakKind]]:
    """Parts of at most `longest` phonemes, cut at the end of a clause, else evenly; each with the kind of its
    end. A group longer than `most` is split."""
    bits = [
        _PhonemeGroup(bit.phonemes[at : at + most], bit.word)
        for bit in bits
        for at in range(0, len(bit.phonemes), most)
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


def _clause(bits: list[_PhonemeGroup], written: Sequence[_DisplayedChunk], listed_words: set[int]) -> Clause | None:
    """Clause of phoneme groups; None where none has a sound. `listed_words`: indices of words that a clause
    lists already; those of this one are added."""
    text = "".join(bit.phonemes for bit in bits)
    if not set(text) - PUNCTUATION:
        return None
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    spans: list[PhonemeSpan] = []
    words: list[ClauseWord] = []
    at = 0
    for manner, run in groupby(bits, key=lambda bit: written[bit.word].manner):
        begin = at
        for word, parts in groupby(run, key=lambda bit: bit.word):
            first, at = at, at + sum(len(bit.phonemes) for bit in parts)
            inside = [place for place in range(max(first, start), min(at, end)) if text[place] not in PUNCTUATION]
            if inside and word not in listed_words and written[word].text:
                words.append(ClauseWord(written[word].text, inside[0] - start, inside[-1] - start))
                listed_words.add(word)
        spans.append(PhonemeSpan(text[max(begin, start) : min(at, end)], *manner))
    return Clause(tuple(span for span in spans if span.phonemes), tuple(words))
