"""Streaming sentence splitter: cuts text at the ends of sentences, and earlier where latency matters.

A cut is made between two words and is final: it does not depend on how the text was divided on arrival. The buffer
holds at most one sentence, so the work is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

BreakKind = Literal["none", "clause", "sentence", "paragraph"]
"""Break between two pieces. `none`: an ordinary space."""

MAX_SENTENCE_CHARACTERS = 400
"""Most characters of a piece. A longer word is cut."""
_titles = """
mr mrs ms dr prof st mt ft gen gov sen rep capt lt col sgt cmdr rev hon pres supt cpl maj adm fr msgr messrs mme
mlle vs e.g i.e cf viz approx al ave blvd fig figs vol ch pp p nos sec eq ed eds jan feb mar apr jun jul aug sep
sept oct nov dec mon tue tues wed thu thurs fri sat ext
"""
_endings = """
etc inc ltd co corp jr sr bros a.m p.m ph.d m.d b.a m.a u.s u.k u.s.a u.n e.u d.c st ave blvd rd no
"""
_starters = """
the a an it its he she they we i you this that these those there then here but and or so if when while what who why
how where which however in on at for from with as after before since although because my his her their our your let
one all some many most no not now once please yes do does did is are was were can could will would should
"""
_units = "in ft yd mi oz lb lbs hr hrs min sec tsp tbsp qt gal"
TITLES = frozenset(_titles.split())
"""Abbreviations that do not end a sentence."""
ENDINGS = frozenset(_endings.split())
"""Abbreviations after which a sentence may end."""
UNITS = frozenset(_units.split())
"""Abbreviations after a number, at which a sentence may end."""
STARTERS = frozenset(_starters.split())
"""Words that often begin sentences, and seldom names."""
CLOSERS, OPENERS = "\"'”’)]", "\"'“‘(["
STOPS, CLAUSES, BULLETS = (*".!?…",), (*",;:—–",), (*"-*•–#0123456789",)
_word, _blanks, _letters = re.compile(r"\s*(\S+)"), re.compile(r"\s+"), re.compile(r"[^A-Za-z]")
_initials = re.compile(r"[a-z]|(?:[a-z]\.)+[a-z]")
_bullet = re.compile(r"(?:[-*•–]|\d{1,3}[.)]|#{1,6})\s")


class SplitSentence(NamedTuple):
    start: int
    """Position of its first character in the whole text."""
    text: str
    after: BreakKind
    """Break before it, at the end of the previous piece."""


class SplitPolicy(NamedTuple):
    """Lengths in characters at which a sentence is cut before its end."""

    first: int
    """Length of the first sentence of a text above which its first clause is a piece by itself."""
    shortest: int
    """Least length of such a first clause."""
    clause: int
    """Length from which on a later piece is cut at the end of a clause."""
    word: int
    """Length from which on any piece is cut at the end of a plain word."""


OFFLINE_SPLIT_POLICY = SplitPolicy(first=80, shortest=15, clause=MAX_SENTENCE_CHARACTERS, word=MAX_SENTENCE_CHARACTERS)
"""Policy for a complete text."""
LIVE_SPLIT_POLICY = SplitPolicy(first=12, shortest=12, clause=48, word=160)
"""Policy for a text that is still being written."""


class SentenceSplitter:
    """Cuts a stream of text into sentences."""

    def __init__(self, hurry: SplitPolicy = OFFLINE_SPLIT_POLICY, *, abbreviations: bool = True) -> None:
        """`abbreviations`: False for phonemes, where any full stop ends a sentence."""
        self.hurry, self._abbreviations = hurry, abbreviations
        self._begin()

    def _begin(self) -> None:
        self._buffer, self._offset, self._newlines = "", 0, 0
        self._after: BreakKind = "none"
        self._first = True
        self._forget()

    def _forget(self) -> None:
        """Reset the state of the piece at the start of the buffer."""
        self._at = self._plain = self._previous = 0
        self._clauses: list[int] = []

    def append_text(self, text: str) -> Iterator[SplitSentence]:
        """Append text; return the pieces that are complete."""
        self._buffer += text
        yield from self._pieces(final=False)

    def finish(self) -> Iterator[SplitSentence]:
        """Remaining pieces. Text appended afterwards is a new text."""
        yield from self._pieces(final=True)
        self._begin()

    def _pieces(self, final: bool) -> Iterator[SplitSentence]:
        while True:
            if self._at == 0:
                blanks = _run_of_blanks(self._buffer, 0)
                self._newlines += self._buffer.count("\n", 0, blanks)
                self._drop(blanks)
            cut = self._cut(final)
            if cut is None:
                return
            end, before = cut
            after: BreakKind = "paragraph" if self._newlines > 1 and not self._first else self._after
            piece = SplitSentence(self._offset, self._buffer[:end], after)
            self._first, self._after, self._newlines = False, before, 0
            self._drop(end)
            yield piece

    def _drop(self, characters: int) -> None:
        self._buffer = self._buffer[characters:]
        self._offset += characters
        self._forget()

    def _cut(self, final: bool) -> tuple[int, BreakKind] | None:
        """End of the first piece and its kind; None while more text is needed. Continues from the last call's
        position."""
        buffer = self._buffer
        while word := _word.match(buffer, self._at):
            if word.end() > MAX_SENTENCE_CHARACTERS:
                return self._forced()
            if word.end() == len(buffer) and not final:
                return None
            kind = self._kind(word, final)
            if kind is None:
                return None
            if kind in ("sentence", "paragraph"):
                return word.end(), kind
            cut = self._hurried(word.end(), kind, _plain(word[1], buffer[_run_of_blanks(buffer, word.end()) :][:1]))
            if cut:
                return cut
            self._at = self._previous = word.end()
        return (len(buffer.rstrip()), "sentence") if final and buffer else None

    def _hurried(self, end: int, kind: BreakKind, plain: bool) -> tuple[int, BreakKind] | None:
        """Cut before the end of a sentence, by the policy; None if there is none."""
        hurry = self.hurry
        if kind == "clause":
            self._clauses.append(end)
            if not self._first and end >= hurry.clause:
                return end, "clause"
        if self._first and end > hurry.first:
            early = next((cut for cut in self._clauses if cut >= hurry.shortest), 0)
            if early:
                return early, "clause"
        if plain:
            self._plain = end
        if end >= hurry.word and self._plain >= hurry.word // 2:
            return self._plain, "none"
        return None

    def _forced(self) -> tuple[int, BreakKind]:
        """Cut at MAX_SENTENCE_CHARACTERS or before."""
        if self._clauses and self._clauses[-1] >= MAX_SENTENCE_CHARACTERS // 4:
            return self._clauses[-1], "clause"
        if self._plain >= MAX_SENTENCE_CHARACTERS // 4:
            return self._plain, "none"
        return self._previous or MAX_SENTENCE_CHARACTERS, "none"

    def _kind(self, word: re.Match[str], final: bool) -> BreakKind | None:
        """Kind of break after this word; None where it depends on text that has not come yet."""
        buffer, left = self._buffer, word[1]
        begins = _run_of_blanks(buffer, word.end())
        right = _word.match(buffer, begins)
        complete = final or (right is not None and right.end() < len(buffer))
        core = left.rstrip(CLOSERS)
        if core[-1:] in STOPS and len(core) == len(left) and not core.endswith(".."):
            if core[-1] != "." or not self._abbreviations or not self._abbreviated(core, word.start(1)):
                return "sentence"
            if not complete:
                return None
            if self._over(core, right[1] if right else ""):
                return "sentence"
            core = ""
        if right is None and not final:
            return None
        newlines, next_word = buffer.count("\n", word.end(), begins), right[1] if right else ""
        if newlines > 1:
            return "paragraph"
        if newlines and next_word[:1] in BULLETS and not complete:
            return None
        if newlines and _bullet.match(f"{next_word} "):
            return "sentence"
        if core[-1:] in STOPS:
            return "clause" if next_word[:1].islower() else "sentence"
        if core[-1:] in CLAUSES and not (core[-1] == "," and next_word[:1].isdigit()):
            return "clause"
        return "clause" if left == "-" else "none"

    def _abbreviated(self, core: str, at: int) -> bool:
        """Returns whether the word's full stop may not end a sentence: an abbreviation, or the number of a list item at
        the beginning."""
        stem = core[:-1].lstrip(OPENERS).lower()
        if at == 0 and stem.isdigit() and len(stem) < 4:
            return True
        if core == "sat.":
            return False
        if stem in UNITS and self._buffer[:at].rstrip()[-1:].isdigit():
            return True
        return stem in TITLES or stem in ENDINGS or bool(_initials.fullmatch(stem))

    def _over(self, core: str, next_word: str) -> bool:
        """Returns whether a sentence ends with this abbreviation, given the next word."""
        stem = core[:-1].lstrip(OPENERS).lower()
        if not next_word:
            return True
        if stem == "no":
            return not next_word[0].isdigit()
        if (stem in TITLES and stem not in ENDINGS) or stem.isdigit():
            return False
        return next_word[0].isupper() and _letters.sub("", next_word).lower() in STARTERS


def _run_of_blanks(text: str, at: int) -> int:
    """End of the white space that starts at `at`."""
    found = _blanks.match(text, at)
    return found.end() if found else at


def _plain(left: str, right: str) -> bool:
    """Returns whether both words are ordinary, so that a cut between them separates no number, unit, name or
    abbreviation."""
    return left.isalpha() and left.islower() and right.islower()
