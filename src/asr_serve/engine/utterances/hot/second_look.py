"""Hot words that were not heard: an answer is said otherwise where one may stand, and the model is asked how
likely that is.

Source  rescoring of alternatives that sound alike, as in spelling correction for speech (arXiv:1902.07178), with
        the recogniser itself for a judge. The numbers were chosen on LibriSpeech's train speech, half of it in
        noise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from asr_serve.engine.utterances.ends.aligning import Ended
from asr_serve.engine.utterances.hot.again import Feed, SaidAgain
from asr_serve.engine.utterances.hot.biasing import REMEMBERED
from asr_serve.engine.utterances.hot.listed import Listed
from asr_serve.engine.utterances.hot.proposing import LEAST, THE_SAME, Heard, Places, Proposed, Span
from asr_serve.text.tokens import texts

if TYPE_CHECKING:
    from asr_serve.engine.utterances.runner import DecodeRunner

MOST_LOOKS = 24
"""At an answer of up to so many words; of a longer one, as many as it has words."""
SPELT = 3
"""Times as many that are cut into tokens to see whether they are worth a look."""
BEHIND = 4
"""Tokens behind the place that tell whether it fits."""
GIVEN, A_CHANGE = 7.2, 4.0
"""What a hot word of weight 1 may be less likely than what was heard, in natural-log probability; and by how much
less where all of its sounds are changed."""
SAME_STEM = 1.0
"""By how much less where it is what was heard with another ending: a model tells such words apart."""
OF_MANY, MANY = 1.0, 1_000
"""By how much less where it is one of so many more: 0.7 for a thousand, 2.4 for ten thousand."""
BY_WEIGHT = 2.0
"""For a weight e times as great: ten times is 4.6 more, and no weight makes a word of what sounds otherwise."""
RANK = 4.0
"""How much a change of all of its sounds puts a word behind others, of those that are looked at."""
PARTS = re.compile(r"[\W_]+")


class Look(NamedTuple):
    """An answer otherwise: `tokens` in place of those from `first` to `end`. `allowed`: how much less likely
    than what was heard it may be."""

    first: int
    end: int
    tokens: tuple[int, ...]
    allowed: float


def worth(weight: float, far: float, *, same_stem: bool = False, words: int = 1) -> float:
    """How much less likely than what was heard a hot word may be, which is one of so many."""
    if far == THE_SAME:
        return math.inf
    given = GIVEN + BY_WEIGHT * math.log(weight) - OF_MANY * math.log1p(words / MANY)
    return given - A_CHANGE * far - SAME_STEM * same_stem


def same_stem(one: str, other: str) -> bool:
    """Whether two words differ in their endings only: in up to three letters behind three or more."""
    one, other = one.casefold(), other.casefold()
    alike = 0
    while alike < min(len(one), len(other)) and one[alike] == other[alike]:
        alike += 1
    return max(len(one), len(other)) - alike <= 3 and alike >= 3


class Found(NamedTuple):
    """How much better it is than it must be, and the natural-log probabilities of its tokens."""

    better: float
    look: Look
    logprobs: list[float]


class SecondLook:
    """Over the pages of a runner: those of a row that has ended may be written anew."""

    def __init__(self, runner: DecodeRunner, text: Callable[[list[int]], str]) -> None:
        self._runner, self._text, self._again = runner, text, SaidAgain(runner)

    @torch.inference_mode()
    def looked(self, ended: Sequence[Ended]) -> list[Ended]:
        """The same, with the hot words that the model finds about as likely."""
        told = list(ended)
        asked = [i for i, each in enumerate(ended) if self.asks(each)]
        if not asked:
            return told
        for each in (ended[i] for i in asked):
            if each.row.hypothesis.beam > 1:  # of what beams said, the row's own pages hold the beginning only
                each.row.likeliest = dict(enumerate(self._again.likeliest(each, REMEMBERED)))
        places = [Places(ended[i], self._words(ended[i].answer.tokens)) for i in asked]
        looks = [self._looks(*each) for each in zip(places, self._proposed(places), strict=True)]
        batch = [(which, look) for which, found in enumerate(looks) for look in found]
        # From the end on: where a row's own pages must do, what comes before a place is still in them.
        batch.sort(key=lambda pair: -pair[1].first)
        judged: list[list[Found]] = [[] for _ in asked]
        scores = self._score([(places[which].each, look) for which, look in batch])
        for (which, look), (gain, logprobs) in zip(batch, scores, strict=True):
            if gain > -math.inf:  # what the model never says is no better for any allowance
                judged[which].append(Found(gain + look.allowed, look, logprobs))
        for i, found in zip(asked, judged, strict=True):
            told[i] = self._said(ended[i], found)
        return told

    def asks(self, each: Ended) -> bool:
        """It has hot words, and this is what its pages hold."""
        hypothesis, tokens = each.row.hypothesis, each.answer.tokens
        return isinstance(hypothesis.hotwords, Listed) and bool(tokens) and tokens == tuple(hypothesis.tokens)

    # --- what to look at ----------------------------------------------------------------------------------

    def _words(self, tokens: Sequence[int]) -> list[Heard]:
        special = self._runner.starts.special
        found: list[Heard] = []
        said = texts(list(tokens), self._text)
        for at, (token, text) in enumerate(zip(tokens, said, strict=True)):
            if special is not None and token >= special.eot:
                found.append(Heard(at, at, ""))
            elif not found or text[:1].isspace() or found[-1].first == found[-1].end:
                found.append(Heard(at, at + 1, text.strip()))
            else:
                found[-1] = Heard(found[-1].first, at + 1, found[-1].text + text)
        return found

    def _proposed(self, places: Sequence[Places]) -> list[list[Proposed]]:
        """First tokens are tried on pages of their own, where there are some: what rows said is needed yet."""
        room = self._again.room(each.each for each in places)
        probes = [each.probes() if room else [] for each in places]
        feeds = [each.feed(probe) for each, found in zip(places, probes, strict=True) for probe in found]
        scores = iter(self._again.logprobs(feeds))
        return [
            each.proposed([(probe, next(scores)[0]) for probe in found])
            for each, found in zip(places, probes, strict=True)
        ]

    def _looks(self, places: Places, proposed: Sequence[Proposed]) -> list[Look]:
        hot, each = places.hot, places.each
        room = min(self._runner.model.max_tokens, len(each.row.table) * 16) - len(each.row.start)
        room -= len(each.answer.tokens)
        wanted = [Proposed(span, word, text, THE_SAME, 0.0) for span, text, word in places.same]
        ways: list[tuple[float, Proposed, float]] = []
        for way in (*wanted, *proposed):
            if way.far != THE_SAME and way.text.casefold() in PARTS.split(way.span.text.casefold()):
                continue  # it is there, beside others
            stem = same_stem(way.text, way.span.text)
            allowed = worth(hot.words[way.word].weight, way.far, same_stem=stem, words=len(hot.words))
            hope = (0.0 if way.span.before else way.score) - self._heard(each, way.span) + allowed
            if hope > 0:
                ways.append((hope - RANK * max(0.0, way.far), way, allowed))
        most = max(MOST_LOOKS, len(places.heard))
        found: dict[tuple[int, int, tuple[int, ...]], tuple[float, Look]] = {}
        for _, way, allowed in sorted(ways, key=lambda each: -each[0])[: SPELT * most]:
            span = way.span
            look = Look(span.first, span.end, hot.spell(f" {span.before}{way.text}{span.behind}"), allowed)
            if len(look.tokens) - (span.end - span.first) < room and (hope := self._hope(each, look)) > 0:
                found.setdefault(look[:3], (hope - RANK * max(0.0, way.far), look))
        return [look for _, look in sorted(found.values(), key=lambda pair: -pair[0])[:most]]

    def _heard(self, each: Ended, span: Span | Look) -> float:
        """Natural-log probability of what was heard there, with what stands behind."""
        return sum(each.row.hypothesis.logprobs[span.first : span.end + BEHIND])

    def _whole(self, each: Ended) -> tuple[int, ...]:
        """With end-of-text, where it was said."""
        ended = len(each.row.hypothesis.logprobs) > len(each.answer.tokens)
        return (*each.answer.tokens, *[self._runner.model.eos] * ended)

    def _hope(self, each: Ended, look: Look) -> float:
        """How much better than it must be it is at most: as likely as its first token that was not said."""
        said = self._whole(each)[look.first :]
        behind = (*look.tokens, *said[look.end - look.first :])
        same = next((i for i, (a, b) in enumerate(zip(behind, said, strict=False)) if a != b), -1)
        if same < 0:
            return 0.0
        new = each.row.likeliest.get(look.first + same, {}).get(behind[same], LEAST)
        before = sum(each.row.hypothesis.logprobs[look.first : look.first + same])
        return before + new - self._heard(each, look) + look.allowed

    # --- what the model says ------------------------------------------------------------------------------

    def _score(self, looks: Sequence[tuple[Ended, Look]]) -> list[tuple[float, list[float]]]:
        """How much likelier the answer is with it, in natural-log probability; and that of each of its tokens."""
        feeds = []
        for each, look in looks:
            said = (*look.tokens, *self._whole(each)[look.end : look.end + BEHIND])
            before = each.answer.tokens[look.first - 1] if look.first else each.row.start[-1]
            feeds.append(Feed(each, look.first - 1, (before, *said[:-1]), [(token,) for token in said]))
        found = []
        for (each, look), scores in zip(looks, self._again.logprobs(feeds), strict=True):
            new = [score for (score,) in scores]
            found.append((sum(new) - self._heard(each, look), new[: len(look.tokens)]))
        return found

    def _said(self, each: Ended, found: list[Found]) -> Ended:
        taken: list[Found] = []
        for better in sorted(found, key=lambda each: -each.better):
            first, end = better.look.first, better.look.end
            if better.better > 0 and all(end <= o.look.first or o.look.end <= first for o in taken):
                taken.append(better)
        if not taken:
            return each
        tokens, logprobs = [*each.answer.tokens], [*each.answer.logprobs]
        for _, look, new in sorted(taken, key=lambda each: -each.look.first):
            tokens[look.first : look.end], logprobs[look.first : look.end] = look.tokens, new
        answer = msgspec.structs.replace(each.answer, tokens=tuple(tokens), logprobs=tuple(logprobs))
        return each._replace(answer=answer)
