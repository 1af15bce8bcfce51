"""Hot words that were not heard: what sounds like one in an answer is said otherwise, and the model is asked how
likely that is.

Source  rescoring of alternatives that sound alike, as in spelling correction for speech (arXiv:1902.07178) with the
        recogniser itself for a judge; the weights were chosen on LibriSpeech's train-clean speech (bench/rich_hotwords.py)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from asr_serve.decoding.bias import written
from asr_serve.decoding.rules import PLAIN
from asr_serve.engine.utterances.ends.aligning import Ended
from asr_serve.text.tokens import texts

if TYPE_CHECKING:
    from asr_serve.engine.utterances.biasing import Listed
    from asr_serve.engine.utterances.runner import DecodeRunner

MOST_WORDS = 3
"""Of an answer that one hot word may have been heard as."""
MOST_LOOKS = 12
"""At an answer."""
OF_A_PLACE = 6
"""Hot words that a stretch of an answer is compared with."""
FURTHEST = 0.5
"""From what was heard, in changes for each sound."""
BEHIND = 4
"""Tokens behind the place that tell whether it fits."""
LEAST = -12.0
"""Natural-log probability at most of what is not among the likeliest of a place."""
AT_ONCE = 256
"""Positions of a pass."""
GIVEN, A_CHANGE = 6.0, 8.0
"""What a hot word of weight 1 may be less likely than what was heard, in natural-log probability; less by so much for
each change for each sound."""
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
    return weight * (GIVEN - A_CHANGE * far)


class SecondLook:
    """Over the pages of a runner: those of the tokens of a row that has ended are written anew."""

    def __init__(self, runner: DecodeRunner, listed: Listed) -> None:
        self._runner, self._listed = runner, listed

    @torch.inference_mode()
    def looked(self, ended: Sequence[Ended]) -> list[Ended]:
        """The same, with the hot words that the model finds about as likely."""
        told = list(ended)
        asked = {
            i: looks
            for i, each in enumerate(ended)
            if each.row.hotwords is not None and each.answer.tokens and (looks := self._looks(each))
        }
        gains: dict[int, list[tuple[float, Look]]] = {i: [] for i in asked}
        waiting = {i: list(looks) for i, looks in asked.items()}
        while any(waiting.values()):
            batch: list[tuple[int, Look]] = []
            positions = 0
            for i, looks in waiting.items():
                if looks and positions < AT_ONCE:
                    batch.append((i, looks.pop(0)))
                    positions += len(batch[-1][1].tokens) + BEHIND + 1
            for (i, look), gain in zip(batch, self._score([(ended[i], look) for i, look in batch]), strict=True):
                gains[i].append((gain, look))
        for i, found in gains.items():
            told[i] = self._said(ended[i], found)
        return told

    # --- what to look at ----------------------------------------------------------------------------------

    def _words(self, tokens: Sequence[int]) -> list[Heard]:
        special = self._runner.starts.special
        found: list[Heard] = []
        said = texts(list(tokens), self._listed.text)
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
            for count in range(1, max(MOST_WORDS, hot.longest) + 1)
            if i + count <= len(heard)
        ]
        spans = [span for span in spans if all(word.text for word in span)]
        parts = [EDGES.match(" ".join(word.text for word in span)) for span in spans]
        near = hot.sounds.near([part[2] if part else "" for part in parts], OF_A_PLACE, FURTHEST)
        room = min(self._runner.model.max_tokens, len(each.row.table) * 16) - len(each.row.start)
        found: list[tuple[float, Look]] = []
        for span, part, words in zip(spans, parts, near, strict=True):
            assert part is not None
            if any((inner := EDGES.match(word.text)) and inner[2].casefold() in hot.known for word in span):
                continue
            first, end = span[0].first, span[-1].end
            for word, far in words:
                for form in self._forms(hot.words[word].text, part[2]):
                    look = Look(first, end, hot.spell(f" {part[1]}{form}{part[3]}"), word, far)
                    more = len(look.tokens) - (end - first)
                    if len(each.answer.tokens) + more < room and (hope := self._hope(each, look)) > 0:
                        found.append((hope, look))
        found = sorted(found, key=lambda pair: -pair[0])[:MOST_LOOKS]
        return sorted((look for _, look in found), key=lambda look: -look.first)

    def _forms(self, word: str, heard: str) -> list[str]:
        """What is not written with a capital begins with none, unless the caller says so."""
        forms = written(word)
        return [form for form in forms if form == word or form[:1].isupper() <= heard[:1].isupper()]

    def _hope(self, each: Ended, look: Look) -> float:
        """How much better than it must be it is at most: as likely as its first token that was not said."""
        hot, said = each.row.hotwords, (*each.answer.tokens[look.first :], self._runner.model.eos)
        assert hot is not None
        behind = (*look.tokens, *said[look.end - look.first :])
        same = next((i for i, (a, b) in enumerate(zip(behind, said, strict=False)) if a != b), -1)
        if same < 0:
            return 0.0
        old = sum(each.row.hypothesis.logprobs[look.first + same : look.end + BEHIND])
        new = each.row.likeliest.get(look.first + same, {}).get(behind[same], LEAST)
        return new - old + worth(hot.words[look.word].weight, look.far)

    # --- what the model says ------------------------------------------------------------------------------

    def _score(self, looks: Sequence[tuple[Ended, Look]]) -> list[float]:
        """How much likelier the answer is with it, in natural-log probability."""
        runner = self._runner
        feeds, firsts, wanted = [], [], []
        for each, look in looks:
            tokens, eos = each.answer.tokens, runner.model.eos
            behind = (*tokens, eos)[look.end : look.end + BEHIND]
            said = (*look.tokens, *behind)
            before = tokens[look.first - 1] if look.first else each.row.start[-1]
            feeds.append((before, *said[:-1]))
            firsts.append(len(each.row.start) + look.first)
            wanted.append(said)
        at = runner.seats.ahead([each.row for each, _ in looks], feeds, firsts)
        passed = runner._pass(at, [PLAIN] * sum(map(len, feeds)))
        told = torch.tensor([token for said in wanted for token in said], device=passed.logits.device)
        logits = passed.logits[: len(told)].float()
        logprobs = (logits.gather(1, told[:, None])[:, 0] - logits.logsumexp(1)).tolist()
        found, first = [], 0
        for (each, look), said in zip(looks, wanted, strict=True):
            new = sum(logprobs[first : first + len(said)])
            old = sum(each.row.hypothesis.logprobs[look.first : look.end + BEHIND])
            found.append(new - old)
            first += len(said)
        return found

    def _said(self, each: Ended, found: list[tuple[float, Look]]) -> Ended:
        hot = each.row.hotwords
        assert hot is not None
        worth = [
            (gain + worth(hot.words[look.word].weight, look.far), look) for gain, look in found
        ]
        taken: list[Look] = []
        for better, look in sorted(worth, key=lambda pair: -pair[0]):
            if better > 0 and all(look.end <= other.first or other.end <= look.first for other in taken):
                taken.append(look)
        tokens, logprobs = [*each.answer.tokens], [*each.answer.logprobs]
        for look in sorted(taken, key=lambda look: -look.first):
            tokens[look.first : look.end] = look.tokens
            old = logprobs[look.first : look.end]
            logprobs[look.first : look.end] = [sum(old) / max(1, len(old))] * len(look.tokens)
        if not taken:
            return each
        return each._replace(
            answer=msgspec.structs.replace(each.answer, tokens=tuple(tokens), logprobs=tuple(logprobs))
        )
