"""Words of a segment with times, from its tokens and their times.

A word is a run of characters between spaces, or a character of a script without spaces. Punctuation belongs to the
adjacent word and takes no time. Whatever the times of the tokens are, those of the words are in order, inside the
segment and outside silence: silence is removed from the time axis, words are ordered on the remaining axis, and
their times are mapped back. A word that then spans a pause keeps its longer part.

Source  combining characters: extended grapheme clusters of Unicode's annex 29, as far as scripts without spaces
        need them
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
"""Least duration of a word, where there is room: the shortest words ("a", "the") of a voice with known phoneme
times."""
SIGNS = "%&#@*‰§†"
"""Signs that Unicode classes as punctuation, but that are read aloud."""
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
"""Duration of a streaming model's token if no other follows sooner; the model emits it within a frame or two of
that."""
Times = Sequence[tuple[int, int]]
"""Start and end of each token or word, in samples or in frames."""


class _TimedCharacter(NamedTuple):
    """One character of the text, with its times in samples."""

    start: float
    end: float
    tokens: Sequence[int]
    """Indices of the tokens that spell it."""


def align_words(
    text: str,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    times: Times,
    spell: Callable[[list[int]], str],
    span: Span,
    quiet: Sequence[Span] = (),
) -> tuple[Word, ...]:
    """Words of `text`, the text that `spell` makes of `tokens`, with times and confidences.

    `logprobs`: natural-log probability of each token; if empty, words have a confidence of 0. `times`: of each
    token, in the same samples as `span`, the range of the words. `quiet`: spans of silence, in order, not
    overlapping.
    """
    ranges = split_words(text)
    if not ranges:
        return ()
    characters = _characters(text, tokens, times, spell)
    raw, confidences = [], []
    for first, stop in ranges:
        own = [character for character in characters[first:stop] if character is not None]
        if own:
            raw.append((round(own[0].start), round(own[-1].end)))
            indices = sorted({token for character in own for token in character.tokens})
        else:  # marks alone
            raw.append((span.start_samples, span.end_samples))
            indices = list(range(len(tokens)))
        selected = [logprobs[token] for token in indices] if logprobs else []
        confidences.append(min(1.0, math.exp(sum(selected) / len(selected))) if selected else 0.0)
    placed = fit_word_times(raw, span, quiet)
    return tuple(
        Word(text[first:stop], start, end, confidence)
        for (first, stop), (start, end), confidence in zip(ranges, placed, confidences, strict=True)
    )


def token_times_from_frames(runs: Times, frame_samples: int, samples: int) -> list[tuple[int, int]]:
    """Times in samples of a streaming model's tokens, from the frames in which it emitted them: until the next
    token, or until the later of the token's last frame and TOKEN_SOUND_SAMPLES, and inside the `samples` of the
    audio."""
    starts = [min(first * frame_samples, samples) for first, _ in runs]
    latest = [*starts[1:], samples][: len(starts)]
    ends = [
        max(behind * frame_samples, start + TOKEN_SOUND_SAMPLES)
        for start, (_, behind) in zip(starts, runs, strict=True)
    ]
    return [(start, max(start, min(end, most))) for start, end, most in zip(starts, ends, latest, strict=True)]


def split_words(text: str) -> list[tuple[int, int]]:
    """Character range of each word of `text`. Detached punctuation belongs to the word before it, or to the
    first."""
    ranges: list[tuple[int, int]] = []
    lead: int | None = None
    """Start of punctuation before the first word."""
    for first, behind in _chunks(text):
        if any(is_spoken_character(letter) for letter in text[first:behind]):
            cuts = [first, *(cut for _, cut in _cuts(text, first, behind))]
            if lead is not None:
                cuts[0], lead = lead, None
            ranges += pairwise([*cuts, behind])
        elif ranges:
            ranges[-1] = ranges[-1][0], behind
        elif lead is None:
            lead = first
    if lead is not None:
        ranges.append((lead, len(text.rstrip())))
    return ranges


def word_openings(text: str) -> list[int]:
    """Position of the character with which each word of `text` begins to count: a beginning of `text` has as many
    words, by `split_words`, as of these positions lie in it."""
    openings: list[int] = []
    for first, behind in _chunks(text):
        spoken = next((at for at in range(first, behind) if is_spoken_character(text[at])), None)
        if spoken is not None:
            openings += [spoken, *(at for at, _ in _cuts(text, first, behind))]
    if text.strip():  # the first word begins with whatever comes first
        openings[:1] = [len(text) - len(text.lstrip())]
    return openings


def locate_words(text: str, words: Sequence[Word]) -> list[tuple[int, int]]:
    """Character range of each word in a segment's text; between two words is a space, or nothing."""
    found, at = [], 0
    for word in words:
        at = text.index(word.text, at)
        found.append((at, at + len(word.text)))
        at += len(word.text)
    return found


def is_spoken_character(letter: str) -> bool:
    """Returns whether a character is spoken: no space, no punctuation, no combining mark."""
    return unicodedata.category(letter)[0] in "LNS" or letter in SIGNS


def is_unspaced(letter: str) -> bool:
    """Returns whether a letter's script has no spaces between words, so that every character counts as a word."""
    if unicodedata.category(letter)[0] not in "LN":
        return False
    code = ord(letter)
    if any(low <= code <= high for low, high in _UNSPACED):
        return True
    wide = unicodedata.east_asian_width(letter) == "W"
    return wide and not any(low <= code <= high for low, high in _HANGUL)


def _chunks(text: str) -> Iterator[tuple[int, int]]:
    """Ranges between spaces."""
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


def _cuts(text: str, first: int, behind: int) -> list[tuple[int, int]]:
    """Starts of further words between two spaces: at and after an unspaced character, and after wide punctuation. Each
    with the spoken character that shows it, before which its opening brackets stand: (spoken, start)."""
    cuts: list[tuple[int, int]] = []
    last: str | None = None
    """Previous spoken character."""
    behind_last = first
    for at in range(first, behind):
        letter = text[at]
        if not is_spoken_character(letter) or letter in CLOSING:
            continue
        parted = any(unicodedata.east_asian_width(mark) in "WF" for mark in text[behind_last:at])
        if last is not None and (parted or is_unspaced(letter) or is_unspaced(last)):
            cut = at
            while unicodedata.category(text[cut - 1]) in ("Ps", "Pi"):
                cut -= 1  # an opening bracket or quote belongs to the next word
            cuts.append((at, cut))
        last, behind_last = letter, at + 1
    return cuts


def _characters(
    text: str, tokens: Sequence[int], times: Times, spell: Callable[[list[int]], str]
) -> list[_TimedCharacter | None]:
    """Times of the characters of `text`; None for characters that are not spoken."""
    characters: list[_TimedCharacter | None] = []
    first = 0
    """First of the tokens that spell the next characters: a character may take several, with some bytes in
    each."""
    for token, part in enumerate(_parts(text, token_texts(tokens, spell))):
        if not part:
            continue
        own: Sequence[int] = range(first, token + 1)
        first = token + 1
        spoken = sum(map(is_spoken_character, part))
        if len(own) > 1:  # those before the last are bytes of a character; or spaces, which are not spoken
            own = [index for index in own if index == token or any(map(is_spoken_character, spell([tokens[index]])))]
        start, end = times[own[0]][0], max(times[index][1] for index in own)
        step = (end - start) / max(1, spoken)
        at = 0
        for letter in part:
            if is_spoken_character(letter):
                characters.append(_TimedCharacter(start + at * step, start + (at + 1) * step, own))
                at += 1
            else:
                characters.append(None)
    return characters


def _parts(text: str, token_texts: Sequence[str]) -> Iterator[str]:
    """Part of `text` that each token spells, by `token_texts`. Incomplete bytes and spaces at the end may have
    another length there than in `text`: then the last token gets the rest."""
    at = 0
    last = max((i for i, part in enumerate(token_texts) if part), default=len(token_texts) - 1)
    for token, part in enumerate(token_texts):
        behind = len(text) if token == last else min(len(text), at + len(part))
        yield text[at:behind]
        at = behind


def fit_word_times(raw: Times, span: Span, quiet: Sequence[Span]) -> list[tuple[int, int]]:
    """Times of words as close to `raw` as possible, in order, inside `span` and outside `quiet`. If all of `span`
    is quiet, `quiet` is ignored."""
    clock = _SpeechClock(span, quiet)
    starts = list(accumulate((clock.elapsed_samples(start) for start, _ in raw), max))
    ends = [max(start, clock.elapsed_samples(end)) for start, (_, end) in zip(starts, raw, strict=True)]
    ends[:-1] = [min(end, after) for end, after in zip(ends[:-1], starts[1:], strict=True)]
    _lengthen(starts, ends, clock.total)
    return [clock.sample_range(start, end) for start, end in zip(starts, ends, strict=True)]


def _lengthen(starts: list[int], ends: list[int], total: int) -> None:
    """Lengthen words in place to MIN_WORD_SAMPLES, or to an equal share where there is less time. A word takes
    free time after it, then before it, and then moves the next."""
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
    """Time axis of a segment without its silence, in samples."""

    def __init__(self, span: Span, quiet: Sequence[Span]) -> None:
        self._loud: list[Span] = []
        at = span.start_samples
        for part in quiet:
            if (end := min(part.start_samples, span.end_samples)) > at:
                self._loud.append(Span(at, end))
            at = max(at, part.end_samples)
        if at < span.end_samples:
            self._loud.append(Span(at, span.end_samples))
        self._loud = self._loud or [span]
        self._before = [0, *accumulate(part.samples for part in self._loud)]
        self._starts = [part.start_samples for part in self._loud]
        self.total = self._before[-1]

    def elapsed_samples(self, sample: int) -> int:
        """Position on this axis of a sample of the segment."""
        index = bisect_right(self._starts, sample) - 1
        if index < 0:
            return 0
        return self._before[index] + min(sample - self._starts[index], self._loud[index].samples)

    def sample_range(self, start: int, end: int) -> tuple[int, int]:
        """Samples between two positions on this axis; with a pause between them, those on its longer side."""
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
