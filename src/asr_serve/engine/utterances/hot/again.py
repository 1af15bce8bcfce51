"""What a model makes of other tokens in an answer that has ended: many in a pass, each on pages of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from asr_serve.decoding.rules import Rule
from asr_serve.engine.utterances.ends.aligning import Ended
from asr_serve.native import PAGE

if TYPE_CHECKING:
    from asr_serve.engine.utterances.runner import DecodeRunner
    from asr_serve.engine.utterances.seats import Positions

AT_ONCE = 256
"""Positions of a pass: enough to fill its products, few enough that nobody waits long for it."""


class Feed(NamedTuple):
    """`tokens` from position `first` of an answer on, -1 being what comes before it; `asked`: behind each of them,
    the tokens whose natural-log probabilities are wanted."""

    each: Ended
    first: int
    tokens: tuple[int, ...]
    asked: Sequence[Sequence[int]]

    @property
    def position(self) -> int:
        return len(self.each.row.start) + self.first

    @property
    def pages(self) -> range:
        """Of its row's table, those that it writes to."""
        return range(self.position // PAGE, (self.position + len(self.tokens) - 1) // PAGE + 1)


class SaidAgain:
    """Over the pages of a runner: those that rows had for a longer answer, then others that nobody has, not even
    the cache. Where they are too few for a feed, what its row has said from there on is no longer in its pages.
    """

    def __init__(self, runner: DecodeRunner) -> None:
        self._runner = runner

    def logprobs(self, feeds: Sequence[Feed]) -> list[list[list[float]]]:
        """Of each feed and each of its tokens, what is asked."""
        found: list[list[list[float]]] = []
        left = self._left({id(feed.each): feed.each for feed in feeds}.values())
        for batch in self._batches(feeds, len(left) + self._unused):
            found += self._pass(batch, left)
        return found

    def room(self, ended: Iterable[Ended]) -> bool:
        """Whether there is a page at all for what is said of these."""
        return bool(self._left(ended)) or self._unused > 0

    @staticmethod
    def _left(ended: Iterable[Ended]) -> list[int]:
        """Pages of these that their answers did not need: theirs, however many others there are."""
        return [
            page
            for each in ended
            for page in each.row.table[-(-(len(each.row.start) + len(each.answer.tokens)) // PAGE) :]
        ]

    @property
    def _unused(self) -> int:
        return self._runner.pages.free - self._runner.pages.reclaimable

    def _batches(self, feeds: Sequence[Feed], most: int) -> Iterator[list[Feed]]:
        """`most`: pages of a pass."""
        batch, positions, pages = list[Feed](), 0, 0
        for feed in feeds:
            positions, pages = positions + len(feed.tokens), pages + len(feed.pages)
            if batch and (positions > AT_ONCE or pages > most):
                yield batch
                batch, positions, pages = [], len(feed.tokens), len(feed.pages)
            batch.append(feed)
        if batch:
            yield batch

    def likeliest(self, each: Ended, count: int) -> list[dict[int, float]]:
        """What could have been said in place of each token of its answer, which is in its pages from then on."""
        feed = Feed(each, -1, (each.row.start[-1], *each.answer.tokens[:-1]), ())
        found: list[dict[int, float]] = []
        for first in range(0, len(feed.tokens), AT_ONCE):
            part = feed._replace(first=first - 1, tokens=feed.tokens[first : first + AT_ONCE])
            logits = self._runner.logits(self._at([part]), self._rules([part])).float()
            best = logits.topk(min(count, logits.shape[1]), dim=1)
            scores = best.values - logits.logsumexp(1, keepdim=True)
            rows = zip(best.indices.tolist(), scores.tolist(), strict=True)
            found += [dict(zip(*row, strict=True)) for row in rows]
        return found

    def _at(self, batch: Sequence[Feed]) -> Positions:
        return self._runner.seats.behind(
            [feed.each.row for feed in batch],
            [feed.tokens for feed in batch],
            [feed.position + 1 for feed in batch],
        )

    def _rules(self, batch: Sequence[Feed]) -> list[Rule]:
        """For what comes behind each position, as when it was decoded."""
        starts, found = self._runner.starts, list[Rule]()
        for feed in batch:
            row = feed.each.row
            said = [*feed.each.answer.tokens[: max(0, feed.first)], *feed.tokens[feed.first < 0 :]]
            known = len(said) - len(feed.tokens) + 1
            ends = range(known, known + len(feed.tokens))
            found += [starts.rule(row, said[:end]) for end in ends]
        return found

    def _pass(self, batch: Sequence[Feed], left: Sequence[int]) -> list[list[list[float]]]:
        """`left`: pages for it, before any are taken."""
        runner, at = self._runner, self._at(batch)
        wanted = sum(len(feed.pages) for feed in batch)
        more = max(0, wanted - len(left))
        fits = more <= self._unused
        taken = runner.pages.take(more) if fits else []
        try:
            if fits:
                self._lend(batch, at.own, [*left[:wanted], *taken])
            logits = runner.logits(at, self._rules(batch)).float()
        finally:
            runner.pages.give(taken)
        counts = [len(asked) for feed in batch for asked in feed.asked]
        where = torch.arange(len(logits)).repeat_interleave(torch.tensor(counts)).to(logits.device)
        told = [token for feed in batch for asked in feed.asked for token in asked]
        tokens = torch.tensor(told, dtype=torch.int64, device=logits.device)
        scores = (logits[where, tokens] - logits.logsumexp(1)[where]).tolist()
        found: list[list[list[float]]] = []
        first = 0
        for feed in batch:
            found.append([])
            for asked in feed.asked:
                found[-1].append(scores[first : first + len(asked)])
                first += len(asked)
        return found

    def _lend(self, batch: Sequence[Feed], own: torch.Tensor, pages: Sequence[int]) -> None:
        """Each writes to pages of its own, the first of which begins as its row's does."""
        position, used, copies = 0, 0, []
        for feed in batch:
            its, end = feed.pages, position + len(feed.tokens)
            lent = pages[used : used + len(its)]
            own[position:end, its.start : its.stop] = torch.tensor(lent, dtype=own.dtype)
            copies.append((feed.each.row.table[its.start], lent[0]))
            position, used = end, used + len(its)
        pool = self._runner.pool
        sources, into = torch.tensor(copies, device=pool.device).T
        pool[into] = pool[sources]
