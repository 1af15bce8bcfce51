"""What decodes: a row, which is one answer in the making, or several that are one request's beams."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asr_serve.decoding.attention import Finish, Hypothesis
from asr_serve.decoding.beam import BeamSearch
from asr_serve.decoding.bias import OPEN
from asr_serve.decoding.hotwords import BOOST, HotWords
from asr_serve.engine.utterances.pages import PagePool
from asr_serve.native import PAGE

REACH = 4
"""Tokens of a draft among which the next one is looked for when another was said."""
AFTER_A_MISS = 8
"""Tokens of a draft that are verified at once when it was wrong before."""


class Row:
    """One decoding sequence: its pages and its hypothesis."""

    def __init__(self, request_id: int, pages: list[int], hypothesis: Hypothesis) -> None:
        """`pages`: those that it gives back."""
        self.request_id, self.pages, self.hypothesis = request_id, pages, hypothesis
        self.table: list[int] = []
        """Pages of its tokens, in order; those before its first own may be others' too."""
        self.root, self.audio, self.frames = b"", list[int](), 0
        """What it hears: the name of that, where it is kept; its pages, and how many frames they hold."""
        self.start: tuple[int, ...] = ()
        """What comes before the answer; empty while the language is to be heard."""
        self.begun = False
        """Whether the keys and values of all that, but the last, are in its pages."""
        self.known = 0
        """How many of them are there before it begins."""
        self.beams: Beams | None = None
        """Those it is one of, and which."""
        self.lane = 0
        self.finish: Finish | None = None
        self.asked: list[Tensor] = []
        """What its alignment heads asked of the audio for each token of the hypothesis and its end, (heads,
        head_dim) each, where it is to be told when each was said."""
        self.left = hypothesis.draft.tokens
        """Of the draft, what may still be said."""
        self.skip = 0
        """Tokens at its start that something else was said for."""
        self.trusted = hypothesis.max_tokens
        """How many tokens of the draft are verified at once: fewer once it was wrong."""
        self.likeliest: dict[int, dict[int, float]] = {}
        """Of a row with hot words: what could have been said in place of each token, and how likely that was."""
        self.generator = torch.Generator().manual_seed(hypothesis.options.seed)

    @property
    def tokens(self) -> Sequence[int]:
        """What it has said."""
        fixed = self.hypothesis.tokens
        return fixed if self.beams is None else (*fixed, *self.beams.search.live[self.lane].tokens)

    @property
    def hotwords(self) -> HotWords | None:
        return self.hypothesis.hotwords

    @property
    def last(self) -> int:
        """What it is to go on after."""
        said = self.tokens
        return said[-1] if said else self.start[-1]

    @property
    def length(self) -> int:
        """Positions it has, that of `last` among them."""
        return len(self.start) + len(self.tokens)

    @property
    def proposal(self) -> tuple[int, ...]:
        """What is to be verified next."""
        room = self.hypothesis.max_tokens - 1 - len(self.hypothesis.tokens)
        return self.left[self.skip : self.skip + min(room, self.trusted)]

    @property
    def bound(self) -> bool:
        """The next token is fixed."""
        return len(self.hypothesis.tokens) < self.hypothesis.fixed

    @property
    def due(self) -> bool:
        """It has to begin, or its draft fixes what comes next, or has more to propose than a step would tell."""
        return not self.begun or bool(self.left and (self.bound or len(self.proposal) > 1))

    def feed(self) -> tuple[int, ...]:
        """What a pass that verifies the proposal is given, after what is in its pages."""
        return (*(self.start[self.known :] if not self.begun else (self.last,)), *self.proposal)

    def said(self, token: int, held: int) -> None:
        """`held` tokens of the proposal, and then this one: what may come after it? Most often it stands for one
        of the draft's, or for none of them, or the draft goes on a little later."""
        if held:
            self.left, self.skip = self.left[self.skip + held :], 0
        self.trusted = AFTER_A_MISS
        near = self.left[:REACH]
        if token in near:
            self.left, self.skip = self.left[near.index(token) + 1 :], 0
        elif self.skip < REACH:
            self.skip += 1
        else:
            self.left = ()


class Beams:
    """Rows that follow several ways through one request's answer: full pages are shared, and each has the page it
    writes to itself.

    What all of them could ever need is theirs from the start, so that they never run short.
    """

    def __init__(self, row: Row, begun: int, own: list[int], audio: list[int]) -> None:
        """`begun`: positions before the first token that is searched; `own`: pages for the tokens of every way;
        `audio`: those of what was heard, if they are to be given back."""
        hypothesis = row.hypothesis
        self.rows, self.width = [row], hypothesis.beam
        graph = hypothesis.hotwords.graph if hypothesis.hotwords is not None else None
        node = graph.walk(hypothesis.draft.tokens[: hypothesis.fixed]) if graph else OPEN
        left = hypothesis.max_tokens - hypothesis.fixed
        self.search = BeamSearch(self.width, hypothesis.eos, left, graph=graph, node=node, boost=BOOST)
        self.pages = own + audio
        """That all of them hold."""
        self._own, self._audio = own, audio
        self._pool = PagePool(1 + len(own))
        """Page p of it is `own[p - 1]`."""
        self._tables = [self._pool.take(pages_of(begun))]
        row.beams, row.pages = self, []

    def table(self, lane: int) -> list[int]:
        return [self._own[page - 1] for page in self._tables[lane]]

    def fork(self, sources: list[int]) -> list[tuple[int, int]]:
        """Way i goes on from where way `sources[i]` was, and writes to its next position. Pages to copy before
        that, from and to."""
        position = self.rows[0].length - 1
        old, self._tables = self._tables, [list(self._tables[source]) for source in sources]
        for table in self._tables:
            self._pool.share(table)
        for table in old:
            self._pool.give(table)
        copies = []
        for table in self._tables:
            if position // PAGE == len(table):
                table += self._pool.take(1)
                continue
            table[-1], shared = self._pool.own(table, len(table) - 1)
            if shared is not None:
                copies.append((self._own[shared - 1], self._own[table[-1] - 1]))
        return copies

    def another(self) -> Row:
        """One more row, for the way that has none."""
        first = self.rows[0]
        row = Row(first.request_id, [], first.hypothesis)
        row.start, row.begun, row.left = first.start, True, ()
        row.beams, row.lane = self, len(self.rows)
        self.rows.append(row)
        return row

    def alone(self) -> tuple[list[int], list[int]]:
        """The first row goes on by itself, with pages for whatever it may say: first those that hold what all ways
        began with. Its table, and the pages that nobody needs any more."""
        (row,) = self.rows
        table = self.table(0)
        spare = [page for page in self._own if page not in table]
        wanted = len(self._own) // self.width - len(table)
        table += spare[:wanted]
        row.beams, row.pages = None, table + self._audio
        return table, spare[wanted:]


def pages_of(positions: int) -> int:
    return -(-positions // PAGE)
