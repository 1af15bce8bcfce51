"""CTC prefix beam search in plain Python: the oracle of the native search, and its fallback.

The state of a session is a row of each of these tensors, all on the CPU; a row of zeros in `counts` is a new
session, whose other tensors are not read:

    counts  (slots, 3) int64           entries, nodes, 1 + the last fixed token (0: none yet)
    heads   (slots, beam) int64        last node of each entry; -1: all of its tokens are fixed
    scores  (slots, beam, 2) float64   log-probability of the entry ending in a blank, and in its last token
    nodes   (slots, arena, 3) int64    parent (before the node itself; -1: the fixed tokens), token, frame
    peaks   (slots, arena, 2) float64  how likely the node was at that frame, and the token's log-probability

With hotwords or a language model there are more, and entries are ranked by the sum of log-probability and gain:

    spots   (slots, beam) int64        with hotwords: node of each entry in the biasing graph
    contexts (slots, beam) int64       with a language model: its state after each entry
    gains   (slots, beam) float64      bonuses of hotwords and weighted log-probabilities of the language model so far

An entry is a hypothesis of the beam; entries are sorted, best first. Both implementations do the same operations
on doubles in the same order, so their state is bit-identical where their libraries' exp and log1p are.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

NONE = -math.inf
_NO_PARENT = -2

Item = tuple[int, int, float]
"""Token, frame, natural-log probability."""


class CtcSearchOptions(NamedTuple):
    """Options of a search."""

    vocab: int
    blank: int
    top: int
    """Most tokens of a frame that open new prefixes."""
    min_logprob: float
    """Log-probability below which a token opens no new prefix."""
    max_gap: float
    """Entries this much less likely than the best are dropped."""


class CtcBiasing(NamedTuple):
    """Hotwords: two state tensors, and a graph as laid out by `decoding/biasing_list.py`."""

    nodes: Tensor
    gains: Tensor
    firsts: Tensor
    """(nodes + 1,) int64: index of the first arc of each node."""
    tokens: Tensor
    """(arcs,) int64: token of each arc, rising within a node."""
    nexts: Tensor
    """(arcs,) int64: target node of each arc."""
    fails: Tensor
    """(nodes,) int64: failure link of each node."""
    partial_bonuses: Tensor
    """(nodes,) float64, as is `word_bonuses`: see decoding/biasing_graph.BiasingArrays."""
    word_bonuses: Tensor
    word_starts: Tensor
    """(vocab,) uint8: whether a word without its own space may begin after this token."""
    boost: float

    def step(self, node: int, token: int) -> tuple[int, float]:
        """Returns the node after `token`, and its gain."""
        target = self._go(node, token)
        partial, word = self.partial_bonuses, self.word_bonuses
        gain = (float(word[target]) + float(partial[target]) - float(partial[node])) * self.boost
        return (1 if target == 0 and self.word_starts[token] else target), gain

    def _go(self, node: int, token: int) -> int:
        while True:
            first, end = self.firsts[node : node + 2].tolist()
            at = first + bisect_left(self.tokens[first:end].tolist(), token)
            if at < end and int(self.tokens[at]) == token:
                return int(self.nexts[at])
            if node == 0:
                return 0
            node = int(self.fails[node])


class CtcLanguageModel(NamedTuple):
    """N-gram model: two state tensors, the fields of models/ngram.NgramModel as arrays, and its weights."""

    contexts: Tensor
    gains: Tensor
    arc_offsets: np.ndarray
    arc_words: np.ndarray
    arc_logprobs: np.ndarray
    arc_states: np.ndarray
    backoff_states: np.ndarray
    backoff_logprobs: np.ndarray
    final_logprobs: np.ndarray
    start_state: int
    weight: float
    token_bonus: float
    """Bonus of each token."""

    def step(self, context: int, token: int, gain: float) -> tuple[int, float]:
        """Returns the state after `token`, and the gain with that of the token."""
        logprob = 0.0
        while context >= 0:
            first, end = self.arc_offsets[context : context + 2]
            arc = first + np.searchsorted(self.arc_words[first:end], token)
            if arc < end and self.arc_words[arc] == token:
                logprob += float(self.arc_logprobs[arc])
                return int(self.arc_states[arc]), gain + self.weight * logprob + self.token_bonus
            logprob += float(self.backoff_logprobs[context])
            context = int(self.backoff_states[context])
        return 0, NONE


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
    context: int = 0


class _Candidate(NamedTuple):
    score: float
    entry: int
    token: int
    """-1: the entry is not extended."""
    blank: float
    nonblank: float
    spot: int
    gain: float
    context: int


def address(logprobs: Tensor) -> int:
    """Returns a tensor's address, where `step` reads it. Raises TypeError unless float32, contiguous, on the CPU."""
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
    language: Sequence[Any] | None = None,
) -> list[tuple[list[Item], list[Item]]]:
    """Searches one chunk of many sessions; returns the newly fixed tokens and the rest of the best entry of each.

    logprobs (n, frames, vocab) float32; rows, seen, frames (n,) int64 as in `models.interfaces.StreamingChunk`.
    Rows that point at the last row of the state are skipped. `bias`, `language`: fields of a
    CtcBiasing and of a CtcLanguageModel, for all sessions.
    Raises ValueError for shapes and rows that do not fit.
    """
    address(logprobs)
    n, width, vocab = logprobs.shape
    options = CtcSearchOptions(vocab, blank, top, min_logprob, max_gap)
    state = (counts, heads, scores, nodes, peaks)
    slots, indices = counts.shape[0], rows.tolist()
    live = [row for row in indices if row != slots - 1]
    if not (n == len(indices) == len(seen) == len(frames)) or len(set(live)) < len(live):
        raise ValueError("rows, seen and frames: one for each row of logprobs, and no row twice")
    if any(not 0 <= row < slots for row in indices) or any(not 0 <= f <= width for f in frames.tolist()):
        raise ValueError("a row or its frames are out of range")
    if not 0 <= blank < vocab or top < 1:
        raise ValueError("blank or top is out of range")
    hot = None if bias is None else CtcBiasing(*bias)
    fused = None if language is None else CtcLanguageModel(*language)
    results: list[tuple[list[Item], list[Item]]] = []
    for i, (row, first, count) in enumerate(zip(indices, seen.tolist(), frames.tolist(), strict=True)):
        if row == slots - 1:
            results.append(([], []))
            continue
        beam = _Beam(row, state, options, hot, fused)
        for frame in range(count):
            beam.advance(logprobs[i, frame].tolist(), first + frame)
        beam.save(row, state)
        results.append((beam.fixed, beam.path(beam.entries[0].node)))
    return results


def nbest(
    row: int, state: tuple[Tensor, ...], bias: Sequence[Any] | None = None, language: Sequence[Any] | None = None
) -> list[tuple[list[Item], float, float]]:
    """Returns the n-best list of one session, best first: tokens after the fixed ones, log-probability, and gain of
    hotwords, of which an incomplete one has none, and of the language model, the end of the sentence included.

    `state`: counts, heads, scores, nodes, peaks.
    """
    hot = None if bias is None else CtcBiasing(*bias)
    fused = None if language is None else CtcLanguageModel(*language)
    beam = _Beam(row, state, CtcSearchOptions(1 << 62, 0, 0, 0.0, 0.0), hot, fused)
    results = []
    for e in beam.entries:
        gain = e.gain
        if hot is not None:
            gain -= hot.boost * float(hot.partial_bonuses[e.spot])
        if fused is not None:
            gain += fused.weight * float(fused.final_logprobs[e.context])
        results.append((beam.path(e.node), _add(e.blank, e.token), gain))
    plain = hot is None and fused is None
    return results if plain else sorted(results, key=lambda item: -(item[1] + item[2]))


def _add(a: float, b: float) -> float:
    """log(exp(a) + exp(b))"""
    low, high = (a, b) if a < b else (b, a)
    return high if low == NONE else high + math.log1p(math.exp(low - high))


class _Beam:
    """Search of one session, loaded from its row."""

    def __init__(
        self,
        row: int,
        state: tuple[Tensor, ...],
        options: CtcSearchOptions,
        bias: CtcBiasing | None,
        language: CtcLanguageModel | None,
    ) -> None:
        self.bias, self.language = bias, language
        fused = bias if bias is not None else language
        self.gains = None if fused is None else fused.gains
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
        last_nodes: list[Any] = heads[row, :entries].tolist()
        masses: list[Any] = scores[row, :entries].tolist()
        self.entries = [_Entry(head, *pair) for head, pair in zip(last_nodes, masses, strict=True)]
        if self.gains is not None:
            gains = self.gains[row, :entries].tolist()
            self.entries = [e._replace(gain=gain) for e, gain in zip(self.entries, gains, strict=True)]
        if bias is not None:
            spots = bias.nodes[row, :entries].tolist()
            if any(not 0 <= spot < len(bias.fails) for spot in spots):
                raise ValueError(f"row {row} of the state is corrupt")
            self.entries = [e._replace(spot=spot) for e, spot in zip(self.entries, spots, strict=True)]
        if language is not None:
            contexts = language.contexts[row, :entries].tolist()
            if any(not 0 <= context < len(language.backoff_states) for context in contexts):
                raise ValueError(f"row {row} of the state is corrupt")
            self.entries = [e._replace(context=context) for e, context in zip(self.entries, contexts, strict=True)]
        valid = -1 <= self.last < options.vocab and all(-1 <= entry.node < used for entry in self.entries)
        if not valid or any(
            not (-1 <= node.parent < i and 0 <= node.token < options.vocab) for i, node in enumerate(self.nodes)
        ):
            raise ValueError(f"row {row} of the state is corrupt")
        if not self.entries:
            self.entries = [_Entry(-1, 0.0, NONE, 1, context=0 if language is None else language.start_state)]

    def save(self, row: int, state: tuple[Tensor, ...]) -> None:
        counts, heads, scores, nodes, peaks = state
        entries, used = len(self.entries), len(self.nodes)
        counts[row] = torch.tensor([entries, used, self.last + 1])
        heads[row, :entries] = torch.tensor([e.node for e in self.entries])
        scores[row, :entries] = torch.tensor([[e.blank, e.token] for e in self.entries], dtype=torch.float64)
        if self.gains is not None:
            self.gains[row, :entries] = torch.tensor([e.gain for e in self.entries], dtype=torch.float64)
        if self.bias is not None:
            self.bias.nodes[row, :entries] = torch.tensor([e.spot for e in self.entries])
        if self.language is not None:
            self.language.contexts[row, :entries] = torch.tensor([e.context for e in self.entries])
        if used:
            nodes[row, :used] = torch.tensor([[n.parent, n.token, n.frame] for n in self.nodes])
            peaks[row, :used] = torch.tensor([[n.peak, n.logprob] for n in self.nodes], dtype=torch.float64)

    def path(self, node: int) -> list[Item]:
        """Returns the unfixed tokens that end in `node`. The frame of each is before the next one's."""
        tokens: list[Item] = []
        limit = math.inf
        while node >= 0:
            item = self.nodes[node]
            limit = min(limit - 1, item.frame)
            tokens.append((item.token, int(limit), item.logprob))
            node = item.parent
        return tokens[::-1]

    def advance(self, frame_logprobs: list[float], frame: int) -> None:
        """Advances the search by one frame."""
        logprobs = [x if math.isfinite(x) else NONE for x in frame_logprobs]
        candidates = self._rank(logprobs)
        if not candidates:
            return  # no token is possible: the frame is skipped
        best = candidates[0].score
        candidates = [k for k in candidates if k.score >= best - self.options.max_gap]
        entries = []
        for k in candidates:
            node = self.entries[k.entry].node
            if k.token >= 0:
                node = self._child(node, k.token, frame)
            peak = k.nonblank + k.gain - best
            if node >= 0 and peak > self.nodes[node].peak:
                item = self.nodes[node]
                item.peak, item.frame, item.logprob = peak, frame, logprobs[item.token]
            entries.append(_Entry(node, k.blank, k.nonblank, k.spot, k.gain, k.context))
        self.entries = entries
        self._compact()

    def _rank(self, logprobs: list[float]) -> list[_Candidate]:
        """Returns the candidates after a frame, best first; equal ones in the order they are listed."""
        options = self.options
        tokens = [t for t, x in enumerate(logprobs) if t != options.blank and x >= options.min_logprob and x > NONE]
        tokens = sorted(tokens, key=lambda t: -logprobs[t])[: options.top]
        totals = [_add(e.blank, e.token) for e in self.entries]
        lasts = [self.nodes[e.node].token if e.node >= 0 else self.last for e in self.entries]
        parents = [self.nodes[e.node].parent if e.node >= 0 else _NO_PARENT for e in self.entries]
        at = {e.node: i for i, e in enumerate(self.entries)}
        ranked: list[_Candidate] = []
        for i, entry in enumerate(self.entries):
            blank = totals[i] + logprobs[options.blank]
            nonblank = entry.token + logprobs[lasts[i]] if lasts[i] >= 0 else NONE
            parent = at.get(parents[i], -1)
            if parent >= 0:
                # A repeated token needs a blank between.
                mass = self.entries[parent].blank if lasts[parent] == lasts[i] else totals[parent]
                nonblank = _add(nonblank, mass + logprobs[lasts[i]])
            total = _add(blank, nonblank) + entry.gain
            ranked.append(_Candidate(total, i, -1, blank, nonblank, entry.spot, entry.gain, entry.context))
        existing = {(at[parents[i]], lasts[i]) for i in range(len(self.entries)) if parents[i] in at}
        for i, entry in enumerate(self.entries):
            for token in tokens:
                if (i, token) not in existing:
                    score = (entry.blank if token == lasts[i] else totals[i]) + logprobs[token]
                    spot, gain, context = entry.spot, entry.gain, entry.context
                    if self.bias is not None:
                        spot, bonus = self.bias.step(spot, token)
                        gain += bonus
                    if self.language is not None:
                        context, gain = self.language.step(context, token, gain)
                    ranked.append(_Candidate(score + gain, i, token, NONE, score, spot, gain, context))
        return sorted((k for k in ranked if k.score > NONE), key=lambda k: -k.score)[: self.size]

    def _child(self, parent: int, token: int, frame: int) -> int:
        for i in range(parent + 1, len(self.nodes)):
            if self.nodes[i].parent == parent and self.nodes[i].token == token:
                return i
        self.nodes.append(_PrefixNode(parent, token, frame, NONE, NONE))
        return len(self.nodes) - 1

    def _compact(self) -> None:
        """Fixes tokens that all entries share, and drops nodes of no entry, until the rest fits into the arena."""
        live = self._live()
        while True:
            while sum(live) and all(e.node >= 0 for e in self.entries):
                first = live.index(True)  # parents come first, so this one follows the fixed tokens
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
        """Fixes the token of node `first`, which all other live nodes follow."""
        # No later than any node after it, or a token fixed afterwards could get an earlier frame.
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
        """Drops entries that do not begin as the best does; where that has no unfixed token, the worst entry."""
        oldest = self._oldest(self.entries[0].node)
        if oldest < 0:
            self.entries.pop()
        else:
            self.entries = [e for e in self.entries if self._oldest(e.node) == oldest]

    def _oldest(self, node: int) -> int:
        while node >= 0 and self.nodes[node].parent >= 0:
            node = self.nodes[node].parent
        return node
