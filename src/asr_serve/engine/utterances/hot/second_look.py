"""Hot words that were not heard: what sounds like one in an answer is said otherwise, and the model is asked how
likely that is.

Source  rescoring of alternatives that sound alike, as in spelling correction for speech (arXiv:1902.07178), with
        the recogniser itself for a judge. The numbers were chosen on LibriSpeech's train speech.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from asr_serve.decoding.bias import written
from asr_serve.engine.utterances.ends.aligning import Ended
from asr_serve.text.tokens import texts

if TYPE_CHECKING:
    from asr_serve.engine.utterances.runner import DecodeRunner

MOST_WORDS = 3
"""Of an answer that one hot word may have been heard as."""
MOST_LOOKS = 12
"""At an answer."""
LONGEST_PHRASE = 6
"""Words of a hot word, as far as they were said one by one."""
OF_A_PLACE = 6
"""Hot words that a stretch of an answer is compared with."""
FURTHEST = 0.5
"""From what was heard, in changes for each sound."""
BEHIND = 4
"""Tokens behind the place that tell whether it fits."""
THE_SAME = float("-inf")
"""As far from what was heard: only written otherwise."""
LEAST = -12.0
"""Natural-log probability at most of what is not among the likeliest of a place."""
AT_ONCE = 256
"""Positions of a pass."""
GIVEN, A_CHANGE = 6.0, 8.0
"""What a hot word of weight 1 may be less likely than what was heard, in natural-log probability; and by how much
less where all of its sounds are changed."""
BY_WEIGHT = 2.0
"""For a weight e times as great: ten times is 4.6 more, and no weight makes a word of what sounds otherwise."""
EDGES = re.compile(r"^(\W*)(.*?)((?:['\u2019]s)?\W*)$", re.DOTALL)
"""What stands around a word."""


class Heard(NamedTuple):
    """A word of an answer: its tokens, from and to, and how it is written."""

    first: int
    end: int
    text: str


class Look(NamedTuple):
    """An answer otherwise: `tokens` in place of those from `first` to `end`. `far`: see SoundIndex.near."""

    first: int
    end: int
    tokens: tuple[int, ...]
    word: int
    far: float


def worth(weight: float, far: float) -> float:
    """How much less likely than what was heard a hot word may be."""
    return GIVEN + BY_WEIGHT * math.log(weight) - A_CHANGE * far


class Found(NamedTuple):
    """How much better it is than it must be, and the natural-log probabilities of its tokens."""

    better: float
    look: Look
    logprobs: list[float]


class SecondLook:
    """Over the pages of a runner: those of the tokens of a row that has ended are written anew."""

    def __init__(self, runner: DecodeRunner, text: Callable[[list[int]], str]) -> None:
        self._runner, self._text = runner, text

    @torch.inference_mode()
    def looked(self, ended: Sequence[Ended]) -> list[Ended]:
        """The same, with the hot words that the model finds about as likely."""
        told = list(ended)
        asked = {i: self._looks(each) for i, each in enumerate(ended) if self._asks(each)}
        if several := [ended[i] for i, looks in asked.items() if looks and ended[i].row.hypothesis.beam > 1]:
            for each in several:  # of what beams said, the row's own pages hold the beginning only
                self._score([(each, Look(0, len(each.answer.tokens), each.answer.tokens, -1, 0.0))])
        found: dict[int, list[Found]] = {i: [] for i in asked}
        waiting = {i: list(looks) for i, looks in asked.items()}
        while any(waiting.values()):
            batch: list[tuple[int, Look]] = []
            positions = 0
            for i, looks in waiting.items():
                if looks and positions < AT_ONCE:
                    batch.append((i, looks.pop(0)))
                    positions += len(batch[-1][1].tokens) + BEHIND + 1
            scores = self._score([(ended[i], look) for i, look in batch])
            for (i, look), (gain, logprobs) in zip(batch, scores, strict=True):
                hot = ended[i].row.hotwords
                assert hot is not None
                found[i].append(Found(gain + worth(hot.words[look.word].weight, look.far), look, logprobs))
        for i, judged in found.items():
            told[i] = self._said(ended[i], judged)
        return told

    def _asks(self, each: Ended) -> bool:
        """It has hot words, and this is what its pages hold."""
        hypothesis, tokens = each.row.hypothesis, each.answer.tokens
        return hypothesis.hotwords is not None and bool(tokens) and tokens == tuple(hypothesis.tokens)

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

    def _looks(self, each: Ended) -> list[Look]:
        hot = each.row.hotwords
        assert hot is not None
        heard = self._words(each.answer.tokens)
        spans = [
            heard[i : i + count]
            for i in range(len(heard))
            for count in range(1, min(max(MOST_WORDS, hot.longest), LONGEST_PHRASE) + 1)
            if i + count <= len(heard)
        ]
        spans = [span for span in spans if all(word.text for word in span)]
        parts = [EDGES.match(" ".join(word.text for word in span)) for span in spans]
        near = hot.sounds.near([part[2] if part else "" for part in parts], OF_A_PLACE, FURTHEST)
        room = min(self._runner.model.max_tokens, len(each.row.table) * 16) - len(each.row.start)
        found: list[tuple[float, Look]] = []
        for span, part, words in zip(spans, parts, near, strict=True):
            assert part is not None
            first, end = span[0].first, span[-1].end
            if (known := hot.known.get(part[2].casefold())) is not None and first >= each.row.hypothesis.fixed:
                if len(written(known.text)) == 1 and known.text != part[2]:
                    tokens = hot.spell(f" {part[1]}{known.text}{part[3]}")
                    found.append((0.0, Look(first, end, tokens, hot.words.index(known), THE_SAME)))
                continue
            if first < each.row.hypothesis.fixed or any(
                (inner := EDGES.match(word.text)) and inner[2].casefold() in hot.known for word in span
            ):
                continue
            for word, far in words:
                for form in self._forms(hot.words[word].text, part[2]):
                    look = Look(first, end, hot.spell(f" {part[1]}{form}{part[3]}"), word, far)
                    more = len(look.tokens) - (end - first)
                    if len(each.answer.tokens) + more < room and (hope := self._hope(each, look)) > 0:
                        found.append((hope, look))
        found = sorted(found, key=lambda pair: -pair[0])[:MOST_LOOKS]
        return sorted((look for _, look in found), key=lambda look: -look.first)

    def _whole(self, each: Ended) -> tuple[int, ...]:
        """With end-of-text, where it was said."""
        ended = len(each.row.hypothesis.logprobs) > len(each.answer.tokens)
        return (*each.answer.tokens, *[self._runner.model.eos] * ended)

    def _forms(self, word: str, heard: str) -> list[str]:
        """What is not written with a capital begins with none, unless the caller says so."""
        forms = written(word)
        return [form for form in forms if form == word or form[:1].isupper() <= heard[:1].isupper()]

    def _hope(self, each: Ended, look: Look) -> float:
        """How much better than it must be it is at most: as likely as its first token that was not said."""
        hot, said = each.row.hotwords, self._whole(each)[look.first :]
        assert hot is not None
        behind = (*look.tokens, *said[look.end - look.first :])
        same = next((i for i, (a, b) in enumerate(zip(behind, said, strict=False)) if a != b), -1)
        if same < 0:
            return 0.0
        old = sum(each.row.hypothesis.logprobs[look.first + same : look.end + BEHIND])
        new = each.row.likeliest.get(look.first + same, {}).get(behind[same], LEAST)
        return new - old + worth(hot.words[look.word].weight, look.far)

    # --- what the model says ------------------------------------------------------------------------------

    def _score(self, looks: Sequence[tuple[Ended, Look]]) -> list[tuple[float, list[float]]]:
        """How much likelier the answer is with it, in natural-log probability; and that of each of its tokens."""
        runner = self._runner
        feeds, firsts, wanted = [], [], []
        for each, look in looks:
            tokens = each.answer.tokens
            behind = self._whole(each)[look.end : look.end + BEHIND]
            said = (*look.tokens, *behind)
            before = tokens[look.first - 1] if look.first else each.row.start[-1]
            feeds.append((before, *said[:-1]))
            firsts.append(len(each.row.start) + look.first)
            wanted.append(said)
        at = runner.seats.ahead([each.row for each, _ in looks], feeds, firsts)
        logits = runner.logits(at, sum(map(len, feeds))).float()
        told = torch.tensor([token for said in wanted for token in said], device=logits.device)
        logprobs = (logits.gather(1, told[:, None])[:, 0] - logits.logsumexp(1)).tolist()
        found, first = [], 0
        for (each, look), said in zip(looks, wanted, strict=True):
            new = logprobs[first : first + len(said)]
            old = sum(each.row.hypothesis.logprobs[look.first : look.end + BEHIND])
            found.append((sum(new) - old, new[: len(look.tokens)]))
            first += len(said)
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
