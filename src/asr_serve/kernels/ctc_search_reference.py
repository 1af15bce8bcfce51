"""The native CTC search again in plain Python: the oracle of its tests, and its fallback.

The state of a session is a row of each of these tensors, all on the CPU; a row of zeros in `counts` is a new
session, and nothing else of it is read then:

    counts  (slots, 3) int64           entries, nodes, 1 + the last fixed token (0: none yet)
    heads   (slots, beam) int64        each entry's last node; -1: everything it says is fixed
    scores  (slots, beam, 2) float64   log-probability of the entry ending in a blank, and in its last token
    nodes   (slots, arena, 3) int64    parent (before the node itself; -1: what is fixed), token, frame
    peaks   (slots, arena, 2) float64  how likely the node was at that frame, and the token's log-probability

With hot words two more, and an entry's place is by its log-probability and gain together:

    spots   (slots, beam) int64        the node of the graph that each entry is at
    gains   (slots, beam) float64      what hot words are worth so far

Entries are sorted, best first. Both sides do the same operations on doubles in the same order, so what they
leave in memory is the same to the last bit where their libraries' exp and log1p are.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

NONE = -math.inf
_NO_PARENT = -2

Item = tuple[int, int, float]
"""Token, frame, natural-log probability."""


class CtcSearchOptions(NamedTuple):
    """What `step` is told besides tensors."""

    vocab: int
    blank: int
    top: int
    """At most so many tokens of a frame open new prefixes."""
    min_logprob: float
    """Nor do less likely ones."""
    max_gap: float
    """Entries this much less likely than the best are dropped."""


class CtcBiasing(NamedTuple):
    """Hot words: two tensors of state, and a graph as `decoding/biasing_list.py` lays it out."""

    nodes: Tensor
    gains: Tensor
    firsts: Tensor
    """(nodes + 1,) int64: where the arcs of each node begin."""
    tokens: Tensor
    """Of the arcs, int64, rising within a node."""
    nexts: Tensor
    """Where they lead."""
    fails: Tensor
    """(nodes,) int64: where a part that does not go on goes back to."""
    pending: Tensor
    """(nodes,) float64, and `gives` too: see decoding/biasing.BiasingGraph."""
    refunds: Tensor
    word_starts: Tensor
    """(vocab,) uint8: behind this token a word may begin that has no space of its own."""
    boost: float

    def step(self, node: int, token: int) -> tuple[int, float]:
        """The node after `token`, and what that is worth."""
        then = self._go(node, token)
        gain = (float(self.refunds[then]) + float(self.pending[then]) - float(self.pending[node])) * self.boost
        return (1 if then == 0 and self.word_starts[token] else then), gain

    def _go(self, node: int, token: int) -> int:
        while True:
            first, end = self.firsts[node : node + 2].tolist()
            at = first + bisect_left(self.tokens[first:end].tolist(), token)
            if at < end and int(self.tokens[at]) == token:
                return int(self.nexts[at])
            if node == 0:
                return 0
            node = int(self.fails[node])


class _PrefixNode:
    __slots__ = ("frame", "logprob", "parent", "peak", "token")

    def __init__(self, parent: int, token: int, frame: int, peak: float, logprob: float) -> None:
        self.parent, self.token, self.frame, self.peak, self.logprob = parent, token, frame, peak, logprob


class _Entry(NamedTuple):
    node: int
    blank: float
    token: float
    spot: int = 0
    gain: float = 0.0


class _Candidate(NamedTuple):
    score: float
    entry: int
    token: int
    """-1: the entry goes on as it is."""
    blank: float
    nonblank: float
    spot: int
    gain: float


def address(logprobs: Tensor) -> int:
    """Where `step` reads a tensor: it is never copied. Raises TypeError unless float32, contiguous, on the CPU."""
    if logprobs.dtype != torch.float32 or not logprobs.is_contiguous() or logprobs.device.type != "cpu":
        raise TypeError("logprobs must be float32, contiguous and on the CPU")
    return logprobs.data_ptr()


def step(
    logprobs: Tensor,
    rows: Tensor,
    seen: Tensor,
    frames: Tensor,
    counts: Tensor,
    heads: Tensor,
    scores: Tensor,
    nodes: Tensor,
    peaks: Tensor,
    blank: int,
    top: int,
    min_logprob: float,
    max_gap: float,
    threads: int,
    bias: Sequence[Any] | None = None,
) -> list[tuple[list[Item], list[Item]]]:
    """One chunk of many sessions: what was fixed by it, and the rest of the best entry, of each.

    logprobs (n, frames, vocab) float32; rows, seen, frames (n,) int64 as in `models.streaming.Chunk`. Rows that
    point at the last row of the state are left out.
    `bias`: a Bias, of all of them. Raises ValueError for shapes and rows that do not fit.
    """
    address(logprobs)
    n, width, vocab = logprobs.shape
    options = CtcSearchOptions(vocab, blank, top, min_logprob, max_gap)
    state = (counts, heads, scores, nodes, peaks)
    slots, taken = counts.shape[0], rows.tolist()
    live = [row for row in taken if row != slots - 1]
    if not (n == len(taken) == len(seen) == len(frames)) or len(set(live)) < len(live):
        raise ValueError("rows, seen and frames: one for each row of logprobs, and no row twice")
    if any(not 0 <= row < slots for row in taken) or any(not 0 <= f <= width for f in frames.tolist()):
        raise ValueError("a row or its frames are out of range")
    if not 0 <= blank < vocab or top < 1:
        raise ValueError("blank or top is out of range")
    hot = None if bias is None else CtcBiasing(*bias)
    found: list[tuple[list[Item], list[Item]]] = []
    for i, (row, first, count) in enumerate(zip(taken, seen.tolist(), frames.tolist(), strict=True)):
        if row == slots - 1:
            found.append(([], []))
            continue
        beam = _Beam(row, state, options, hot)
        for frame in range(count):
            beam.advance(logprobs[i, frame].tolist(), first + frame)
        beam.save(row, state)
        found.append((beam.fixed, beam.path(beam.entries[0].node)))
    return found


def nbest(
    row: int, state: tuple[Tensor, ...], bias: Sequence[Any] | None = None
) -> list[tuple[list[Item], float, float]]:
    """Of one session, best first: what each entry says after what is fixed, its log-probability, and what its hot
    words are worth: a part that has not become a word is worth nothing.

    `state`: counts, heads, scores, nodes, peaks.
    """
    hot = None if bias is None else CtcBiasing(*bias)
    beam = _Beam(row, state, CtcSearchOptions(1 << 62, 0, 0, 0.0, 0.0), hot)
    found = []
    for e in beam.entries:
        gain = 0.0 if hot is None else e.gain - hot.boost * float(hot.pending[e.spot])
        found.append((beam.path(e.node), _add(e.blank, e.token), gain))
    return found if hot is None else sorted(found, key=lambda each: -(each[1] + each[2]))


def _add(a: float, b: float) -> float:
    """log(exp(a) + exp(b))"""
    low, high = (a, b) if a < b else (b, a)
    return high if low == NONE else high + math.log1p(math.exp(low - high))


class _Beam:
    """One session's search, taken out of its row."""

    def __init__(
        self, row: int, state: tuple[Tensor, ...], options: CtcSearchOptions, bias: CtcBiasing | None
    ) -> None:
        self.bias = bias
        counts, heads, scores, nodes, peaks = state
        self.options, self.size, self.arena = options, heads.shape[1], nodes.shape[1]
        entries, used, last = counts[row].tolist()
        if not (0 <= entries <= self.size and 0 <= used <= self.arena):
            raise ValueError(f"row {row} of the state is corrupt")
        self.last = last - 1
        self.fixed: list[Item] = []
        links: list[Any] = nodes[row, :used].tolist()
        marks: list[Any] = peaks[row, :used].tolist()
        self.nodes = [_PrefixNode(*link, *mark) for link, mark in zip(links, marks, strict=True)]
        where: list[Any] = heads[row, :entries].tolist()
        said: list[Any] = scores[row, :entries].tolist()
        self.entries = [_Entry(head, *pair) for head, pair in zip(where, said, strict=True)]
        if bias is not None:
            spots, gains = bias.nodes[row, :entries].tolist(), bias.gains[row, :entries].tolist()
            if any(not 0 <= spot < len(bias.fails) for spot in spots):
                raise ValueError(f"row {row} of the state is corrupt")
            self.entries = [
                e._replace(spot=spot, gain=gain) for e, spot, gain in zip(self.entries, spots, gains, strict=True)
            ]
        sound = -1 <= self.last < options.vocab and all(-1 <= entry.node < used for entry in self.entries)
        if not sound or any(
            not (-1 <= node.parent < i and 0 <= node.token < options.vocab) for i, node in enumerate(self.nodes)
        ):
            raise ValueError(f"row {row} of the state is corrupt")
        if not self.entries:
            self.entries = [_Entry(-1, 0.0, NONE, 1)]

    def save(self, row: int, state: tuple[Tensor, ...]) -> None:
        counts, heads, scores, nodes, peaks = state
        entries, used = len(self.entries), len(self.nodes)
        counts[row] = torch.tensor([entries, used, self.last + 1])
        heads[row, :entries] = torch.tensor([e.node for e in self.entries])
        scores[row, :entries] = torch.tensor([[e.blank, e.token] for e in self.entries], dtype=torch.float64)
        if self.bias is not None:
            self.bias.nodes[row, :entries] = torch.tensor([e.spot for e in self.entries])
            self.bias.gains[row, :entries] = torch.tensor([e.gain for e in self.entries], dtype=torch.float64)
        if used:
            nodes[row, :used] = torch.tensor([[n.parent, n.token, n.frame] for n in self.nodes])
            peaks[row, :used] = torch.tensor([[n.peak, n.logprob] for n in self.nodes], dtype=torch.float64)

    def path(self, node: int) -> list[Item]:
        """What an entry says after what is fixed. A token's frame is before the next one's."""
        said: list[Item] = []
        limit = math.inf
        while node >= 0:
            it = self.nodes[node]
            limit = min(limit - 1, it.frame)
            said.append((it.token, int(limit), it.logprob))
            node = it.parent
        return said[::-1]

    def advance(self, heard: list[float], frame: int) -> None:
        """One frame."""
        logprobs = [x if math.isfinite(x) else NONE for x in heard]
        kept = self._rank(logprobs)
        if not kept:
            return  # nothing that could have been said here: the frame says nothing
        best = kept[0].score
        kept = [k for k in kept if k.score >= best - self.options.max_gap]
        entries = []
        for k in kept:
            node = self.entries[k.entry].node
            if k.token >= 0:
                node = self._child(node, k.token, frame)
            peak = k.nonblank + k.gain - best
            if node >= 0 and peak > self.nodes[node].peak:
                it = self.nodes[node]
                it.peak, it.frame, it.logprob = peak, frame, logprobs[it.token]
            entries.append(_Entry(node, k.blank, k.nonblank, k.spot, k.gain))
        self.entries = entries
        self._compact()

    def _rank(self, logprobs: list[float]) -> list[_Candidate]:
        """The entries after a frame, best first; of equals the one that is named first."""
        options = self.options
        tokens = [
            t for t, x in enumerate(logprobs) if t != options.blank and x >= options.min_logprob and x > NONE
        ]
        tokens = sorted(tokens, key=lambda t: -logprobs[t])[: options.top]
        totals = [_add(e.blank, e.token) for e in self.entries]
        lasts = [self.nodes[e.node].token if e.node >= 0 else self.last for e in self.entries]
        above = [self.nodes[e.node].parent if e.node >= 0 else _NO_PARENT for e in self.entries]
        at = {e.node: i for i, e in enumerate(self.entries)}
        ranked: list[_Candidate] = []
        for i, entry in enumerate(self.entries):
            blank = totals[i] + logprobs[options.blank]
            nonblank = entry.token + logprobs[lasts[i]] if lasts[i] >= 0 else NONE
            parent = at.get(above[i], -1)
            if parent >= 0:
                # A token said twice needs a blank between.
                mass = self.entries[parent].blank if lasts[parent] == lasts[i] else totals[parent]
                nonblank = _add(nonblank, mass + logprobs[lasts[i]])
            total = _add(blank, nonblank) + entry.gain
            ranked.append(_Candidate(total, i, -1, blank, nonblank, entry.spot, entry.gain))
        there = {(at[above[i]], lasts[i]) for i in range(len(self.entries)) if above[i] in at}
        for i, entry in enumerate(self.entries):
            for token in tokens:
                if (i, token) not in there:
                    score = (entry.blank if token == lasts[i] else totals[i]) + logprobs[token]
                    spot, gain = entry.spot, entry.gain
                    if self.bias is not None:
                        spot, more = self.bias.step(spot, token)
                        gain += more
                    ranked.append(_Candidate(score + gain, i, token, NONE, score, spot, gain))
        return sorted((k for k in ranked if k.score > NONE), key=lambda k: -k.score)[: self.size]

    def _child(self, parent: int, token: int, frame: int) -> int:
        for i in range(parent + 1, len(self.nodes)):
            if self.nodes[i].parent == parent and self.nodes[i].token == token:
                return i
        self.nodes.append(_PrefixNode(parent, token, frame, NONE, NONE))
        return len(self.nodes) - 1

    def _compact(self) -> None:
        """Fix what all entries say, and drop nodes that none says, until the rest fits into the arena."""
        live = self._live()
        while True:
            while sum(live) and all(e.node >= 0 for e in self.entries):
                first = live.index(True)  # parents come first, so this one follows what is fixed
                if any(n.parent == -1 for i, n in enumerate(self.nodes) if live[i] and i > first):
                    break
                self._fix(first, live)
            if sum(live) <= self.arena:
                break
            self._force()
            live = self._live()
        index, nodes = -1, []
        moved = {-1: -1}
        for i, node in enumerate(self.nodes):
            if live[i]:
                moved[i] = index = index + 1
                node.parent = moved[node.parent]
                nodes.append(node)
        self.nodes = nodes
        self.entries = [e._replace(node=moved[e.node]) for e in self.entries]

    def _live(self) -> list[bool]:
        live = [False] * len(self.nodes)
        for entry in self.entries:
            at = entry.node
            while at >= 0 and not live[at]:
                live[at] = True
                at = self.nodes[at].parent
        return live

    def _fix(self, first: int, live: list[bool]) -> None:
        """Everything live follows node `first`: what it says is fixed."""
        # Later than none of what follows it, or a token fixed after it could have been said before it.
        latest = [node.frame for node in self.nodes]
        for i in range(len(self.nodes) - 1, first, -1):
            if live[i]:
                parent = self.nodes[i].parent
                latest[parent] = min(latest[parent], latest[i] - 1)
        self.last = self.nodes[first].token
        self.fixed.append((self.last, latest[first], self.nodes[first].logprob))
        live[first] = False
        for node in self.nodes:
            if node.parent == first:
                node.parent = -1
        self.entries = [e._replace(node=-1) if e.node == first else e for e in self.entries]

    def _force(self) -> None:
        """Drop the entries that do not begin as the best does; if all do and it has no more to say, the worst."""
        oldest = self._oldest(self.entries[0].node)
        if oldest < 0:
            self.entries.pop()
        else:
            self.entries = [e for e in self.entries if self._oldest(e.node) == oldest]

    def _oldest(self, node: int) -> int:
        while node >= 0 and self.nodes[node].parent >= 0:
            node = self.nodes[node].parent
        return node
