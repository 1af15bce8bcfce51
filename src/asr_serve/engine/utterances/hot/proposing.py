"""Which hot words may stand in an answer: those that sound like a word of it, and those that the model itself
holds for possible where a word begins, by their first two tokens.

Source  a prefix tree of words that is walked with a model's own scores: keyword search in lattices and beams, here
        one level deep from each word of the best answer. The numbers were chosen on LibriSpeech's train speech,
        half of it in noise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from asr_serve.decoding.bias import written
from asr_serve.engine.utterances.ends.aligning import Ended
from asr_serve.engine.utterances.hot.again import Feed
from asr_serve.engine.utterances.hot.listed import Form, Listed

MOST_WORDS = 3
"""Of an answer that one hot word may have been heard as."""
LONGEST_PHRASE = 6
"""Words of a hot word, as far as they were said one by one."""
OF_A_PLACE = 6
"""Hot words that a stretch of an answer is compared with by their sounds."""
FURTHEST = 0.5
"""From what was heard, in changes for each sound, of those that nothing but their sounds speaks for."""
FURTHEST_OF_LIKELY = 0.7
"""Of those that the model holds for possible."""
BEGINS = -6.5
"""Natural-log probability of a first token, from which it may begin a hot word."""
OF_A_WORD = 4
"""First tokens beside the one that was said that are tried in a word's place, on the average."""
MOST_POSSIBLE = 32
"""Hot words that the model holds for possible in a word's place, on the average; of more, the likeliest. Of ten
thousand words Whisper and Moonshine held up to 6 for possible on LJSpeech, some of it in noise. Where thousands
begin with the same two tokens, as numbers of parts do, to compare the sounds of all took seconds of the loop."""
THE_SAME = float("-inf")
"""As far from what was heard: only written otherwise."""
LEAST = -12.0
"""Natural-log probability at most of what is not among the likeliest of a place."""
EDGES = re.compile(r"^(\W*)(.*?)((?:['\u2019]s)?\W*)$", re.DOTALL)
"""What stands around a word."""


class Heard(NamedTuple):
    """A word of an answer: its tokens, from and to, and how it is written."""

    first: int
    end: int
    text: str


class Span(NamedTuple):
    """Words of an answer together: its tokens, from and to, what stands before and behind, and the words."""

    first: int
    end: int
    before: str
    text: str
    behind: str


class Proposed(NamedTuple):
    """In place of a span. `far`: see SoundIndex.near; `score`: natural-log probability at most."""

    span: Span
    word: int
    text: str
    far: float
    score: float


class Probe(NamedTuple):
    """A first token that was not said, in place of the word that begins there."""

    at: int
    token: int
    logprob: float


class Places:
    """Of one answer that has hot words: where one may stand."""

    def __init__(self, each: Ended, heard: Sequence[Heard]) -> None:
        hot, fixed = each.row.hotwords, each.row.hypothesis.fixed
        assert isinstance(hot, Listed)
        self.each, self.hot, self.heard = each, hot, heard
        self.same: list[tuple[Span, str, int]] = []
        """Hot words that are there, but written otherwise."""
        self.spans: list[list[Span]] = [[] for _ in heard]
        """By the word they begin with."""
        held = [(match[2].casefold() if (match := EDGES.match(word.text)) else "") in hot.known for word in heard]
        most = min(max(MOST_WORDS, hot.longest), LONGEST_PHRASE)
        for i in range(len(heard)):
            for j in range(i + 1, min(i + most, len(heard)) + 1):
                if not heard[j - 1].text:
                    break
                match = EDGES.match(" ".join(word.text for word in heard[i:j]))
                if match is None or heard[i].first < fixed:
                    continue
                span = Span(heard[i].first, heard[j - 1].end, *match.groups())
                if (known := hot.known.get(span.text.casefold())) is not None:
                    if len(written(known.text)) == 1 and known.text != span.text:
                        self.same.append((span, known.text, hot.words.index(known)))
                elif not any(held[i:j]):
                    self.spans[i].append(span)

    def probes(self) -> list[Probe]:
        """Of the whole answer, likeliest first."""
        tokens, likeliest = self.each.answer.tokens, self.each.row.likeliest
        found = [
            Probe(i, token, logprob)
            for i, spans in enumerate(self.spans)
            if spans
            for token, logprob in likeliest.get(self.heard[i].first, {}).items()
            if logprob > BEGINS and token in self.hot.beginning and token != tokens[self.heard[i].first]
        ]
        found.sort(key=lambda probe: -probe.logprob)
        return found[: OF_A_WORD * len(self.heard)]

    def feed(self, probe: Probe) -> Feed:
        return Feed(self.each, self.heard[probe.at].first, (probe.token,), (self._seconds(probe),))

    def _seconds(self, probe: Probe) -> list[int]:
        return [form.tokens[1] for form in self.hot.beginning[probe.token] if len(form.tokens) > 1]

    def proposed(self, probes: Sequence[tuple[Probe, Sequence[float]]]) -> list[Proposed]:
        """`probes`: with the natural-log probability of each second token. Each word and place once, in the
        place whose sounds fit best."""
        possible: list[tuple[int, Form, float]] = []
        for probe, seconds in probes:
            scores = iter(seconds)
            for form in self.hot.beginning[probe.token]:
                score = probe.logprob + (next(scores) if len(form.tokens) > 1 else 0.0)
                possible.append((probe.at, form, score))
        for i, spans in enumerate(self.spans):
            first = self.heard[i].first
            for form in self.hot.beginning.get(self.each.answer.tokens[first], ()) if spans else ():
                possible.append((i, form, self._score(first, form.tokens)))
        possible = [each for each in possible if each[2] > LEAST]
        if len(possible) > (most := MOST_POSSIBLE * len(self.heard)):
            possible = sorted(possible, key=lambda each: -each[2])[:most]
        return self._fitting(possible) + self._sounding()

    def _score(self, first: int, tokens: Sequence[int]) -> float:
        """Natural-log probability at most, there, of what begins with these."""
        likeliest = self.each.row.likeliest
        score = likeliest.get(first, {}).get(tokens[0], LEAST)
        if len(tokens) > 1 and tokens[0] == self.each.answer.tokens[first]:
            score += likeliest.get(first + 1, {}).get(tokens[1], LEAST)
        return score

    def _fitting(self, possible: Sequence[tuple[int, Form, float]]) -> list[Proposed]:
        spans = [span for spans in self.spans for span in spans]
        number = {span: i for i, span in enumerate(spans)}
        pairs = sorted({(number[span], form.word) for i, form, _ in possible for span in self.spans[i]})
        far = dict(zip(pairs, self.hot.sounds.far([span.text for span in spans], pairs), strict=True))
        found = []
        for i, form, score in possible:
            near = min(self.spans[i], key=lambda span: far[number[span], form.word])
            for span in dict.fromkeys((near, self.spans[i][0])):
                if (distance := far[number[span], form.word]) <= FURTHEST_OF_LIKELY:
                    found.append(Proposed(span, form.word, form.text, distance, score))
        return found

    def _sounding(self) -> list[Proposed]:
        spans = [span for spans in self.spans for span in spans]
        near = self.hot.sounds.near([span.text for span in spans], OF_A_PLACE, FURTHEST)
        return [
            Proposed(span, word, form, far, self._score(span.first, self.hot.tokens[form]))
            for span, words in zip(spans, near, strict=True)
            for word, far in words
            for form in self._forms(self.hot.words[word].text, span.text)
        ]

    def _forms(self, word: str, heard: str) -> list[str]:
        """What is not written with a capital begins with none, unless the caller says so."""
        return [form for form in written(word) if form == word or form[:1].isupper() <= heard[:1].isupper()]
