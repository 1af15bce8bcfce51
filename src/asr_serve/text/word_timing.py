"""A segment's tokens, and when each was said, to its words.

A word is what stands between spaces; of a script that has none, a character. Marks stand with the word that they
touch and take no time. Whatever the times of the tokens are, those of the words are in order and inside the
segment, and none lies where nobody speaks: silence is taken out of the segment's clock, words are put in order
on what is left, and the clock is put back. A word that then spans a pause keeps its longer part.

Source  characters with what belongs to them: extended grapheme clusters of Unicode's annex 29, as far as scripts
        without spaces need them
"""

from __future__ import annotations

import math
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from asr_serve import units
from asr_serve.text.tokenizers import token_texts
from asr_serve.types import Span, Word

MIN_WORD_SAMPLES = units.ms_to_samples(40)
"""Of a word, where there is room: the shortest of a voice whose phonemes are known ("a", "the") last so long."""
SIGNS = "%&#@*‰§†"
"""They count as marks, and are read aloud."""
CLOSING = "\u0e33\u0eb3"
"""Letters of Thai and Lao that belong to the character before them."""
_UNSPACED = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0xFF66, 0xFF9D),  # katakana of half the width
)
_HANGUL = ((0x1100, 0x11FF), (0x3130, 0x318F), (0xA960, 0xA97F), (0xAC00, 0xD7FF))

TOKEN_SOUND_SAMPLES = units.ms_to_samples(160)
"""So long a token of a streaming model sounds, if no other follows: it is told in a frame or two of that."""
Times = Sequence[tuple[int, int]]
"""Start and end of each, in samples."""


class _TimedCharacter(NamedTuple):
    """One character of the text."""

    start: float
    end: float
    tokens: Sequence[int]
    """Places of those that say it."""


def align_words(
    text: str,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    times: Times,
    spell: Callable[[list[int]], str],
    span: Span,
    quiet: Sequence[Span] = (),
) -> tuple[Word, ...]:
    """The words of `text`, which is what `spell` makes of `tokens`.

    `logprobs`: of each token, natural; without any, words have a confidence of 0. `times`: of each token, in the
    same samples as `span`, in which the words are to lie. `quiet`: where nobody speaks, in order, not overlapping.
    """
    ranges = split_words(text)
    if not ranges:
        return ()
    said = _characters(text, tokens, times, spell)
    raw, confidences = [], []
    for first, behind in ranges:
        own = [each for each in said[first:behind] if each is not None]
        if own:
            raw.append((round(own[0].start), round(own[-1].end)))
            held = sorted({token for each in own for token in each.tokens})
        else:  # marks alone
            raw.append((span.start_samples, span.end_samples))
            held = list(range(len(tokens)))
        likely = [logprobs[token] for token in held] if logprobs else []
        confidences.append(min(1.0, math.exp(sum(likely) / len(likely))) if likely else 0.0)
    placed = fit_word_times(raw, span, quiet)
    return tuple(
        Word(text[first:behind], start, end, confidence)
        for (first, behind), (start, end), confidence in zip(ranges, placed, confidences, strict=True)
    )


def token_times_from_frames(runs: Times, frame_samples: int, samples: int) -> list[tuple[int, int]]:
    """The times of tokens of which the frames are known in which a streaming model told them: until the next one,
    SOUNDS_SAMPLES at most, and inside the `samples` that it heard."""
    starts = [min(first * frame_samples, samples) for first, _ in runs]
    latest = [*starts[1:], samples][: len(starts)]
    ends = [
        max(behind * frame_samples, start + TOKEN_SOUND_SAMPLES)
        for start, (_, behind) in zip(starts, runs, strict=True)
    ]
    return [(start, max(start, min(end, most))) for start, end, most in zip(starts, ends, latest, strict=True)]


def split_words(text: str) -> list[tuple[int, int]]:
    """Where each word of `text` begins and ends. Marks that touch none stand with the word before them, or with
    the first."""
    found: list[tuple[int, int]] = []
    lead: int | None = None
    """Where marks began that wait for the first word."""
    for first, behind in _chunks(text):
        if any(is_spoken_character(letter) for letter in text[first:behind]):
            cuts = _cuts(text, first, behind)
            if lead is not None:
                cuts[0], lead = lead, None
            found += pairwise([*cuts, behind])
        elif found:
            found[-1] = found[-1][0], behind
        elif lead is None:
            lead = first
    if lead is not None:
        found.append((lead, len(text.rstrip())))
    return found


def locate_words(text: str, said: Sequence[Word]) -> list[tuple[int, int]]:
    """Where each of the words of a segment lies in its text: what is between two is a space, or nothing."""
    found, at = [], 0
    for word in said:
        at = text.index(word.text, at)
        found.append((at, at + len(word.text)))
        at += len(word.text)
    return found


def is_spoken_character(letter: str) -> bool:
    """Whether a character is spoken: no space, no mark, nothing that only changes the one before it."""
    return unicodedata.category(letter)[0] in "LNS" or letter in SIGNS


def is_unspaced(letter: str) -> bool:
    """Whether the words of its script stand without spaces, so that every character counts as one."""
    if unicodedata.category(letter)[0] not in "LN":
        return False
    code = ord(letter)
    if any(low <= code <= high for low, high in _UNSPACED):
        return True
    wide = unicodedata.east_asian_width(letter) == "W"
    return wide and not any(low <= code <= high for low, high in _HANGUL)


def _chunks(text: str) -> Iterator[tuple[int, int]]:
    """Between spaces."""
    first: int | None = None
    for at, letter in enumerate(text):
        if letter.isspace():
            if first is not None:
                yield first, at
            first = None
        elif first is None:
            first = at
    if first is not None:
        yield first, len(text)


def _cuts(text: str, first: int, behind: int) -> list[int]:
    """Where words begin between two spaces: at a character that is one, behind one, and behind a wide mark."""
    cuts = [first]
    last: str | None = None
    """What was spoken before."""
    behind_last = first
    for at in range(first, behind):
        letter = text[at]
        if not is_spoken_character(letter) or letter in CLOSING:
            continue
        parted = any(unicodedata.east_asian_width(mark) in "WF" for mark in text[behind_last:at])
        if last is not None and (parted or is_unspaced(letter) or is_unspaced(last)):
            cut = at
            while unicodedata.category(text[cut - 1]) in ("Ps", "Pi"):
                cut -= 1  # what opens belongs to what comes
            cuts.append(cut)
        last, behind_last = letter, at + 1
    return cuts


def _characters(
    text: str, tokens: Sequence[int], times: Times, spell: Callable[[list[int]], str]
) -> list[_TimedCharacter | None]:
    """When each character of `text` was said; None of one that is not."""
    said: list[_TimedCharacter | None] = []
    first = 0
    """Of the tokens that say the next characters: one may take several, which hold some of its bytes each."""
    for token, part in enumerate(_parts(text, token_texts(tokens, spell))):
        if not part:
            continue
        own: Sequence[int] = range(first, token + 1)
        first = token + 1
        spoken = sum(map(is_spoken_character, part))
        if len(own) > 1:  # those before the last are bytes of a character; or spaces, which nobody says
            own = [each for each in own if each == token or any(map(is_spoken_character, spell([tokens[each]])))]
        start, end = times[own[0]][0], max(times[each][1] for each in own)
        step = (end - start) / max(1, spoken)
        at = 0
        for letter in part:
            if is_spoken_character(letter):
                said.append(_TimedCharacter(start + at * step, start + (at + 1) * step, own))
                at += 1
            else:
                said.append(None)
    return said


def _parts(text: str, told: Sequence[str]) -> Iterator[str]:
    """Of `text` what each token says. Bytes that are no characters, and spaces at its end, may be `told` of longer
    or shorter than they come to stand in it: then the last have what is left."""
    at = 0
    last = max((i for i, part in enumerate(told) if part), default=len(told) - 1)
    for token, part in enumerate(told):
        behind = len(text) if token == last else min(len(text), at + len(part))
        yield text[at:behind]
        at = behind


def fit_word_times(raw: Times, span: Span, quiet: Sequence[Span]) -> list[tuple[int, int]]:
    """Times of words as near to `raw` as may be, in order, inside `span` and outside `quiet`. Where all of it is
    quiet, nothing counts as such."""
    clock = _SpeechClock(span, quiet)
    starts = list(accumulate((clock.elapsed_samples(start) for start, _ in raw), max))
    ends = [max(start, clock.elapsed_samples(end)) for start, (_, end) in zip(starts, raw, strict=True)]
    ends[:-1] = [min(end, after) for end, after in zip(ends[:-1], starts[1:], strict=True)]
    _lengthen(starts, ends, clock.total)
    return [clock.sample_range(start, end) for start, end in zip(starts, ends, strict=True)]


def _lengthen(starts: list[int], ends: list[int], total: int) -> None:
    """In place: no word is shorter than LEAST_SAMPLES, or than its share where there is less. It takes what is
    free behind it, then before it, and then pushes the next."""
    least = min(MIN_WORD_SAMPLES, total // len(starts))
    for i in range(len(starts)):
        behind = starts[i + 1] if i + 1 < len(starts) else total
        before = ends[i - 1] if i else 0
        ends[i] = max(ends[i], min(starts[i] + least, behind))
        starts[i] = min(starts[i], max(ends[i] - least, before))
        ends[i] = max(ends[i], starts[i] + least)
        if i + 1 < len(starts):
            starts[i + 1] = max(starts[i + 1], ends[i])
            ends[i + 1] = max(ends[i + 1], starts[i + 1])
    for i in reversed(range(len(starts))):
        ends[i] = min(ends[i], total)
        starts[i] = min(starts[i], ends[i] - least)
        total = starts[i]


class _SpeechClock:
    """Counts the samples of a segment in which somebody may speak."""

    def __init__(self, span: Span, quiet: Sequence[Span]) -> None:
        self._loud: list[Span] = []
        at = span.start_samples
        for each in quiet:
            if (end := min(each.start_samples, span.end_samples)) > at:
                self._loud.append(Span(at, end))
            at = max(at, each.end_samples)
        if at < span.end_samples:
            self._loud.append(Span(at, span.end_samples))
        self._loud = self._loud or [span]
        self._before = [0, *accumulate(each.samples for each in self._loud)]
        self._starts = [each.start_samples for each in self._loud]
        self.total = self._before[-1]

    def elapsed_samples(self, sample: int) -> int:
        """What it shows there."""
        index = bisect_right(self._starts, sample) - 1
        if index < 0:
            return 0
        return self._before[index] + min(sample - self._starts[index], self._loud[index].samples)

    def sample_range(self, start: int, end: int) -> tuple[int, int]:
        """The samples between two of its times; where a pause lies between them, those on its longer side."""
        first = bisect_right(self._before, start, hi=len(self._loud)) - 1
        longest = (0, 0)
        for index in range(first, len(self._loud)):
            if self._before[index] >= end and index > first:
                break
            offset = self._starts[index] - self._before[index]
            part = max(start, self._before[index]) + offset, min(end, self._before[index + 1]) + offset
            if index == first or part[1] - part[0] > longest[1] - longest[0]:
                longest = part
        return longest
