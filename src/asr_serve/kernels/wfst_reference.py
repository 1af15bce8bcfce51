"""Search of decoding graphs in Python: the oracle of kernels/src/wfst.hpp, which describes the algorithm, and its
fallback for small graphs. Results are equal to the last bit."""

from __future__ import annotations

import heapq
import math
import struct
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from asr_serve.kernels.lattice_reference import NO_WORD, BayesRisk, LatticeArc, Word, WordLattice, cost_of

PRUNE_FRAMES, BEAM_DELTA, MOST_STEPS = 10, np.float32(0.5), 200_000
MAX_LATTICE_ARCS, MAX_LATTICE_TRACES, COST_STEPS = 1 << 12, 1 << 20, 1_024.0
MAX_NARROWED_BEAM, MIN_NARROWED_BEAM = 16.0, 1e-3
INF = np.float32(np.inf)
NONWORD, BEGIN, END, INTERNAL, SINGLETON = range(5)


class Graph:
    """Decoding graph: the arrays of decoding/wfst/search_graph.py."""

    def __init__(
        self,
        arc_offsets: np.ndarray,
        epsilon_offsets: np.ndarray,
        arc_labels: np.ndarray,
        arc_words: np.ndarray,
        arc_costs: np.ndarray,
        arc_bounds: np.ndarray,
        arc_states: np.ndarray,
        final_costs: np.ndarray,
        label_columns: np.ndarray,
        label_phones: np.ndarray,
        phone_boundaries: np.ndarray,
        depths: np.ndarray,
        start_state: int,
        language_model: tuple[Any, ...] | None = None,
    ) -> None:
        del arc_bounds  # they save the native search time
        self.first, self.end = arc_offsets[:-1].tolist(), arc_offsets[1:].tolist()
        self.epsilon = epsilon_offsets.tolist()
        self.labels, self.words, self.costs = arc_labels.tolist(), arc_words.tolist(), list(arc_costs)
        self.states, self.final_costs = arc_states.tolist(), list(final_costs)
        self.columns = [int(label_columns[label]) if label >= 0 else -1 for label in self.labels]
        self.phones, self.boundaries = label_phones.tolist(), phone_boundaries.tolist()
        self.depths, self.start, self.lm = depths.tolist(), start_state, language_model
        self.width = max(self.columns, default=-1) + 1

    def word_cost(self, state: int, word: int) -> tuple[np.float32, int]:
        assert self.lm is not None
        offsets, words, logprobs, states, backoffs, backoff_logprobs, *_ = self.lm
        logprob = np.float32(0)
        while state >= 0:
            first, end = int(offsets[state]), int(offsets[state + 1])
            arc = first + int(np.searchsorted(words[first:end], word))
            if arc < end and words[arc] == word:
                return -(logprob + logprobs[arc]), int(states[arc])
            logprob = logprob + backoff_logprobs[state]
            state = int(backoffs[state])
        return INF, 0

    def kind(self, label: int) -> int:
        phone = self.phones[label]
        return int(self.boundaries[phone]) if 0 <= phone < len(self.boundaries) else NONWORD

    def loops(self, arc: int) -> bool:
        """Returns whether the arc leads back to its own state."""
        state = self.states[arc]
        return bool(self.first[state] <= arc < self.end[state])


class Options(NamedTuple):
    """Options of a search, as in kernels/src/wfst.hpp."""

    beam: np.float32
    lattice_beam: np.float32
    scale: np.float32
    max_active: int
    min_active: int
    delay: int
    max_frames: int
    max_links: int


class Token:
    """Hypothesis at the latest frame: states of the graph and of the language model, and its cost."""

    def __init__(self, state: int, lm: int, cost: np.float32) -> None:
        self.state, self.lm, self.cost = state, lm, cost


class Link(NamedTuple):
    """Arc that was taken between two nodes; `excess`: its cost above that of the best way to its target."""

    source: int
    target: int
    arc: int
    excess: np.float32


class Level:
    """Nodes of one frame (their extra costs) and the links that lead to them."""

    def __init__(self, extras: list[np.float32], emitting: list[Link], epsilon: list[Link]) -> None:
        self.extras, self.emitting, self.epsilon = extras, emitting, epsilon
        self.find_best()

    def find_best(self) -> None:
        self.best: list[int] = [-1] * len(self.extras)
        for i, link in enumerate(self.links):
            if link.excess == 0 and self.best[link.target] < 0:
                self.best[link.target] = i

    @property
    def links(self) -> list[Link]:
        return self.emitting + self.epsilon


class Session:
    """State of one session's search: the tokens of its latest frame, and the history that is not fixed yet."""

    def __init__(self) -> None:
        self.frontier: list[Token] = []
        self.levels: list[Level] = []
        self.frames = self.base_frame = self.owed = self.first_lm = 0
        self.offset, self.adaptive = 0.0, np.float32(0)

    @property
    def tokens(self) -> int:
        return len(self.frontier)

    @property
    def history(self) -> tuple[int, int]:
        return len(self.levels), sum(len(level.links) for level in self.levels)

    def export_state(self) -> bytes:
        nodes = sum(len(level.extras) for level in self.levels)
        place = (self.frames, self.base_frame, self.owed, self.first_lm)
        counts = (len(self.frontier), len(self.levels), nodes, self.history[1])
        out = [struct.pack("<8qdff", *place, *counts, self.offset, self.adaptive, 0.0)]
        out += [struct.pack("<iif", token.state, token.lm, token.cost) for token in self.frontier]
        out += [struct.pack("<3i", len(x.extras), len(x.emitting), len(x.epsilon)) for x in self.levels]
        out += [struct.pack("<f", extra) for level in self.levels for extra in level.extras]
        out += [struct.pack("<iiif", *link) for level in self.levels for link in level.links]
        return b"".join(out)

    def import_state(self, graph: Graph, data: bytes) -> None:
        """Raises ValueError for data that `export_state` did not make."""
        offset = 0

        def read(layout: str) -> tuple[Any, ...]:
            nonlocal offset
            if offset + struct.calcsize(layout) > len(data):
                raise ValueError("a saved search that ends too early")
            found = struct.unpack_from(layout, data, offset)
            offset += struct.calcsize(layout)
            return found

        frames, base, owed, first_lm, tokens, count, nodes, links, cost, adaptive, _ = read("<8qdff")
        contexts = 1 if graph.lm is None else len(graph.lm[4])
        if (
            min(tokens, count, nodes) < 1
            or links < 0
            or max(tokens, count, nodes, links) > len(data)
            or base < 0
            or frames != base + count - 1
            or frames >= 1 << 31
            or abs(owed) > frames
            or not 0 <= first_lm < contexts
            or not math.isfinite(cost)
            or not adaptive >= 0
        ):
            raise ValueError("numbers of a saved search that cannot be")
        frontier = [Token(state, lm, np.float32(c)) for state, lm, c in (read("<iif") for _ in range(tokens))]
        if any(
            not (0 <= t.state < len(graph.first) and 0 <= t.lm < contexts and math.isfinite(t.cost)) for t in frontier
        ):
            raise ValueError("a token of a saved search is out of range")
        sizes = [read("<3i") for _ in range(count)]
        if any(n < 1 or e < 0 or x < 0 for n, e, x in sizes) or sizes[0][1]:
            raise ValueError("a level of a saved search is out of range")
        if (sum(n for n, *_ in sizes), sum(e + x for _, e, x in sizes), sizes[-1][0]) != (nodes, links, tokens):
            raise ValueError("levels of a saved search that do not agree with its numbers")
        extras = [[np.float32(*read("<f")) for _ in range(n)] for n, *_ in sizes]
        if any(not (extra == -1 or 0 <= extra < INF) for own in extras for extra in own):
            raise ValueError("a node of a saved search is out of range")
        levels: list[Level] = []
        for own, (size, emitting, epsilon) in zip(extras, sizes, strict=True):
            found = []
            for _ in range(emitting + epsilon):
                source, target, arc, excess = read("<iiif")
                found.append(Link(source, target, arc, np.float32(excess)))
            for i, link in enumerate(found):
                sources = len(levels[-1].extras) if i < emitting else size
                if not (
                    0 <= link.source < sources
                    and 0 <= link.target < size
                    and -1 <= link.arc < len(graph.words)
                    and 0 <= link.excess < INF
                    and (link.arc < 0 or (graph.columns[link.arc] >= 0) == (i < emitting))
                ):
                    raise ValueError("a link of a saved search is out of range")
            left: set[int] = set()
            for link in found[emitting:]:
                left.add(link.source)
                if link.target in left:
                    raise ValueError("a link of a saved search leads back to a node that links left before")
            level = Level(own, found[:emitting], found[emitting:])
            for node in range(size):
                hops = 0
                while level.best[node] >= emitting and hops <= size:
                    node, hops = found[level.best[node]].source, hops + 1
                if hops > size or (levels and level.best[node] < 0):
                    raise ValueError("a path of a saved search has no beginning")
            if not levels and level.best.count(-1) != 1:
                raise ValueError("a saved search has more than one beginning")
            levels.append(level)
        if offset != len(data):
            raise ValueError("a saved search with bytes behind it")
        self.frontier, self.levels, self.frames, self.base_frame, self.owed = frontier, levels, frames, base, owed
        self.first_lm = first_lm
        self.offset, self.adaptive = cost, np.float32(adaptive)


class _Step(NamedTuple):
    level: int
    link: int
    """Index into the level's links."""


class _Element(NamedTuple):
    """Node of the history, and how a path of a lattice comes to it."""

    node: int
    cost: float
    """Above that of the best path with the same words."""
    graph_cost: float
    trace: int


class _LatticeState:
    def __init__(self, elements: list[_Element], forward: float) -> None:
        self.elements, self.forward, self.number = elements, forward, -1


class _Network:
    """Nodes of a history in topological order, and its links by the nodes that they leave."""

    def __init__(self, graph: Graph, session: Session) -> None:
        self.levels: list[int] = []
        self.nodes: list[int] = []
        self.extras: list[np.float32] = []
        self.links: list[Link] = []
        self.steps: list[_Step] = []
        numbers: list[list[int]] = []
        for position, level in enumerate(session.levels):
            depths = [0] * len(level.extras)
            for link in level.epsilon:
                depths[link.target] = max(depths[link.target], depths[link.source] + 1)
            own = [0] * len(depths)
            for node in sorted(range(len(depths)), key=depths.__getitem__):
                own[node] = len(self.levels)
                self.levels.append(position)
                self.nodes.append(node)
                self.extras.append(level.extras[node])
            numbers.append(own)
            for i, link in enumerate(level.links):
                behind = numbers[position - 1] if i < len(level.emitting) else own
                self.links.append(link._replace(source=behind[link.source], target=own[link.target]))
                self.steps.append(_Step(position, i))
        self.start = numbers[0][session.levels[0].best.index(-1)]
        self.leaving: list[list[int]] = [[] for _ in self.levels]
        for place, link in enumerate(self.links):
            self.leaving[link.source].append(place)
        self.graph_costs = [0.0] * len(self.links)
        contexts = [0] * len(self.levels)
        contexts[self.start] = session.first_lm
        for node, places in enumerate(self.leaving):
            for place in places:
                link, context, cost = self.links[place], contexts[node], 0.0
                if link.arc >= 0:
                    cost = float(graph.costs[link.arc])
                    if graph.words[link.arc] >= 0 and graph.lm is not None:
                        paid, context = graph.word_cost(context, graph.words[link.arc])
                        cost += float(paid)
                self.graph_costs[place], contexts[link.target] = cost, context


class _WordSpans:
    """Spans of the words of a path, by the places of its phones in words."""

    def __init__(self) -> None:
        self.spans: list[list[int]] = []
        self.first = self.phone = -1

    def add(self, graph: Graph, arc: int, frame: int) -> bool:
        label = graph.labels[arc]
        kind, phone = graph.kind(label), graph.phones[label]
        begins = not graph.loops(arc) and (phone != self.phone or label == self.first)
        if begins:
            self.first, self.phone = label, phone
        if begins and kind in (BEGIN, SINGLETON):
            self.spans.append([frame, 0])
        if kind in (END, SINGLETON) and self.spans:
            self.spans[-1][1] = frame + 1
        return begins and kind not in (INTERNAL, END)

    @property
    def between(self) -> bool:
        return not self.spans or self.spans[-1][1] > 0


class _Search:
    """One session's search during a call."""

    def __init__(self, graph: Graph, options: Options, session: Session) -> None:
        self.graph, self.options, self.session = graph, options, session
        self.final: list[np.float32] = []
        self.final_graph: list[float] = []
        if not session.levels:
            self._clear()
            session.first_lm = 0 if graph.lm is None else int(graph.lm[7])
            self._insert(graph.start, session.first_lm, np.float32(0))
            self._close(INF)
            self._finish_frame(0)

    # --- frames ------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self.table: dict[tuple[int, int], int] = {}
        self.tokens: list[Token] = []
        self.links: list[Link] = []
        self.waiting: dict[int, list[int]] = {}

    def _insert(self, state: int, lm: int, cost: np.float32) -> int:
        place = self.table.setdefault((state, lm), len(self.tokens))
        if place == len(self.tokens):
            self.tokens.append(Token(state, lm, cost))
            if self.graph.epsilon[state] < self.graph.end[state]:
                self.waiting.setdefault(self.graph.depths[state], []).append(place)
        elif cost < self.tokens[place].cost:
            self.tokens[place].cost = cost
        return place

    def step(self, scores: np.ndarray) -> list[Word]:
        session, graph = self.session, self.graph
        negated = -self.options.scale * scores
        self._clear()
        best = min(token.cost for token in session.frontier)
        found = []
        for source, token in enumerate(session.frontier):
            for arc in range(graph.first[token.state], graph.epsilon[token.state]):
                total = token.cost - best + graph.costs[arc] + negated[graph.columns[arc]]
                lm = token.lm
                if graph.words[arc] >= 0 and graph.lm is not None:
                    cost, lm = graph.word_cost(lm, graph.words[arc])
                    total = total + cost
                if total < INF:
                    found.append((total, source, arc, lm))
        cutoff = min((total for total, *_ in found), default=INF) + session.adaptive
        for total, source, arc, lm in found:
            if total <= cutoff:
                self.links.append(Link(source, self._insert(graph.states[arc], lm, total), arc, total))
        session.frames += 1
        if self.tokens:
            emitting = len(self.links)
            self._close(cutoff)
        else:
            for source, token in enumerate(session.frontier):
                cost = token.cost - best
                self.links.append(Link(source, self._insert(token.state, token.lm, cost), -1, cost))
            emitting = len(self.links)
            self.waiting.clear()
        session.offset += float(best)
        self._finish_frame(emitting)
        if session.frames % PRUNE_FRAMES:
            return []
        self._prune([np.float32(0)] * len(session.frontier))
        return self._fix()

    def _close(self, cutoff: np.float32) -> None:
        graph = self.graph
        depth = 0
        while self.waiting and depth <= max(self.waiting):
            for source in self.waiting.get(depth, ()):
                token = self.tokens[source]
                if token.cost > cutoff:
                    continue
                for arc in range(graph.epsilon[token.state], graph.end[token.state]):
                    total, lm = token.cost + graph.costs[arc], token.lm
                    if graph.words[arc] >= 0 and graph.lm is not None:
                        cost, lm = graph.word_cost(lm, graph.words[arc])
                        total = total + cost
                    if total > cutoff or not total < INF:
                        continue
                    self.links.append(Link(source, self._insert(graph.states[arc], lm, total), arc, total))
            depth += 1

    def _choose_cutoff(self) -> tuple[np.float32, np.float32]:
        options, costs = self.options, sorted(token.cost for token in self.tokens)
        by_beam = costs[0] + options.beam
        within = sum(cost <= by_beam for cost in costs)
        if within > options.max_active and (limit := costs[options.max_active]) < by_beam:
            return limit, limit - costs[0] + BEAM_DELTA
        if within <= options.min_active:
            limit = costs[options.min_active] if len(costs) > options.min_active else INF
            if limit > by_beam:
                return limit, limit - costs[0] + BEAM_DELTA if limit < INF else INF
        return by_beam, options.beam

    def _finish_frame(self, emitting: int) -> None:
        session = self.session
        cutoff, session.adaptive = self._choose_cutoff()
        kept = [bool(token.cost <= cutoff) for token in self.tokens]
        for link in reversed(self.links[emitting:]):
            if kept[link.target] and link.excess == self.tokens[link.target].cost:
                kept[link.source] = True
        order = [0] if not session.levels else []  # by the first links that lead to them
        numbers = {place: number for number, place in enumerate(order)}
        found: tuple[list[Link], list[Link]] = ([], [])
        for i, link in enumerate(self.links):
            enters = i < emitting
            if not kept[link.target] or not (enters or kept[link.source]):
                continue
            excess = link.excess - self.tokens[link.target].cost
            if excess <= self.options.lattice_beam:
                if link.target not in numbers:
                    numbers[link.target] = len(order)
                    order.append(link.target)
                source = link.source if enters else numbers[link.source]
                found[0 if enters else 1].append(Link(source, numbers[link.target], link.arc, excess))
        session.frontier = [self.tokens[place] for place in order]
        session.levels.append(Level([np.float32(-1)] * len(session.frontier), *found))

    # --- history -----------------------------------------------------------------------------------------

    def _prune(self, extras: list[np.float32]) -> None:
        session, beam = self.session, self.options.lattice_beam
        last = len(session.levels) - 1
        for position in range(last, -1, -1):
            level = session.levels[position]
            for link in reversed(level.epsilon):
                extra = extras[link.target] + link.excess
                if extra <= beam and extra < INF:
                    extras[link.source] = min(extras[link.source], extra)
            if position < last and extras == level.extras:
                return
            kept = [extra < INF for extra in extras]
            numbers = (np.cumsum(kept) - 1).tolist()
            if position == last:
                session.frontier = [token for token, keep in zip(session.frontier, kept, strict=True) if keep]
                self.final = [cost for cost, keep in zip(self.final, kept, strict=False) if keep]
                self.final_graph = [cost for cost, keep in zip(self.final_graph, kept, strict=False) if keep]
            else:
                behind = session.levels[position + 1]
                behind.emitting = [link._replace(source=numbers[link.source]) for link in behind.emitting]
            before = [INF] * (len(session.levels[position - 1].extras) if position else 0)
            emitting, epsilon = [], []
            for link in level.emitting:
                extra = extras[link.target] + link.excess
                if extra <= beam and extra < INF:
                    emitting.append(link._replace(target=numbers[link.target]))
                    before[link.source] = min(before[link.source], extra)
            for link in level.epsilon:
                extra = extras[link.target] + link.excess
                if extra <= beam and extra < INF:
                    epsilon.append(link._replace(source=numbers[link.source], target=numbers[link.target]))
            level.extras = [extra for extra, keep in zip(extras, kept, strict=True) if keep]
            level.emitting, level.epsilon = emitting, epsilon
            level.find_best()
            extras = before

    def _fix(self) -> list[Word]:
        session, options = self.session, self.options
        fixed: list[Word] = []
        level = min(self._converged(), len(session.levels) - 1 - options.delay)
        if level > 0:
            fixed += self._cut(level, False)
        while len(session.levels) > 4 and (
            len(session.levels) > options.max_frames or session.history[1] > options.max_links
        ):
            fixed += self._cut(len(session.levels) // 2, True)
        return fixed

    def _converged(self) -> int:
        levels = self.session.levels
        reached, position = list(range(len(levels[-1].extras))), len(levels) - 1
        while position > 0 and len(reached) > 1:
            reached = list(dict.fromkeys(self._entering_link(position, node).source for node in reached))
            position -= 1
        return position if len(reached) == 1 else -1

    def _entering_link(self, position: int, node: int) -> Link:
        level = self.session.levels[position]
        links = level.links
        while (best := level.best[node]) >= len(level.emitting):
            node = links[best].source
        return links[best]

    def _best_path(self) -> list[_Step]:
        costs = [token.cost for token in self.session.frontier]
        return self._path_to(costs.index(min(costs)))

    def _path_to(self, node: int) -> list[_Step]:
        session = self.session
        path: list[_Step] = []
        position = len(session.levels) - 1
        while position >= 0:
            level = session.levels[position]
            if (best := level.best[node]) < 0:
                break
            path.append(_Step(position, best))
            node = level.links[best].source
            position -= best < len(level.emitting)
        return path[::-1]

    def _arc(self, step: _Step) -> int:
        return self.session.levels[step.level].links[step.link].arc

    def _emits(self, step: _Step) -> bool:
        return step.link < len(self.session.levels[step.level].emitting)

    def _is_word(self, arc: int) -> bool:
        return arc >= 0 and self.graph.words[arc] >= 0

    def _to_words(self, path: Sequence[_Step]) -> list[Word]:
        session, graph = self.session, self.graph
        phones, words = _WordSpans(), []
        for step in path:
            if (arc := self._arc(step)) < 0:
                continue
            frame = max(session.base_frame + step.level - 1, 0)
            if graph.columns[arc] >= 0 and graph.boundaries:
                phones.add(graph, arc, frame)
            if graph.words[arc] >= 0:
                words.append((graph.words[arc], frame, frame + 1, 0.0))
        for i, (word, *_) in enumerate(words):
            if 0 <= (group := i + session.owed) < len(phones.spans):
                first, end = phones.spans[group]
                words[i] = (word, first, end or session.frames, 0.0)
        return words

    def _cut(self, level: int, forced: bool) -> list[Word]:
        session, graph = self.session, self.graph
        path = self._best_path()
        phones, place, count, words, owed = _WordSpans(), 0, 0, 0, 0
        for i, step in enumerate(path):
            if step.level > level:
                break
            if (arc := self._arc(step)) < 0:
                continue
            if self._emits(step):
                whole = phones.between and len(phones.spans) == words + session.owed
                begins = not graph.boundaries or phones.add(graph, arc, 0)
                if begins and (whole or not graph.boundaries) and step.level > 1:
                    place, count = i, words
            words += self._is_word(arc)
        if not place and forced:
            while path[place].level < level or not self._emits(path[place]):
                place += 1
            begun = _WordSpans()
            for step in path[:place]:
                if (arc := self._arc(step)) < 0:
                    continue
                if self._emits(step) and graph.boundaries:
                    begun.add(graph, arc, 0)
                count += self._is_word(arc)
            owed = session.owed + count - len(begun.spans) if graph.boundaries else 0
        if not place:
            return []
        fixed: list[Word] = []
        if count:
            fixed = self._with_logprobs(path, self._to_words(path), self._posteriors())[:count]
        session.owed = owed
        for step in path[:place]:
            if graph.lm is not None and self._is_word(arc := self._arc(step)):
                _, session.first_lm = graph.word_cost(session.first_lm, graph.words[arc])
        self._drop_before(path[place].level - 1, session.levels[path[place].level].links[path[place].link].source)
        return fixed

    def _drop_before(self, start: int, node: int) -> None:
        session = self.session
        kept_before: list[bool] = []
        numbers_before: list[int] = []
        for position in range(start, len(session.levels)):
            level = session.levels[position]
            count = len(level.extras)
            if position == start:
                kept = [n == node for n in range(count)]
            else:
                kept = [kept_before[self._entering_link(position, n).source] for n in range(count)]
            numbers = (np.cumsum(kept) - 1).tolist()
            if position + 1 == len(session.levels):
                session.frontier = [token for token, keep in zip(session.frontier, kept, strict=True) if keep]
            level.extras = [extra for extra, keep in zip(level.extras, kept, strict=True) if keep]
            emitting, epsilon = ([], []) if position == start else (level.emitting, level.epsilon)
            level.emitting = [
                link._replace(source=numbers_before[link.source], target=numbers[link.target])
                for link in emitting
                if kept_before[link.source] and kept[link.target]
            ]
            level.epsilon = [
                link._replace(source=numbers[link.source], target=numbers[link.target])
                for link in epsilon
                if kept[link.source] and kept[link.target]
            ]
            level.find_best()
            kept_before, numbers_before = kept, numbers
        session.levels = session.levels[start:]
        session.base_frame += start

    # --- results -----------------------------------------------------------------------------------------

    def tail(self) -> list[Word]:
        path = self._best_path()
        words = self._to_words(path)
        return self._with_logprobs(path, words, self._posteriors()) if words else []

    def finish(self, most: int, graph_scale: float, minimum_risk: bool) -> list[tuple[float, list[Word]]]:
        self._prune_ends()
        found = self._nbest(most)
        lattice = self._make_lattice()
        risk = BayesRisk(lattice, graph_scale)
        out = []
        for cost, words in found:
            logprobs = risk.confidences([word for word, *_ in words])
            out.append((cost, [(*word[:3], logprob) for word, logprob in zip(words, logprobs, strict=True)]))
        if not minimum_risk:
            return out
        decoded = risk.decode([word for word, *_ in out[0][1]])
        ids = [word for word, *_ in decoded]
        for i, (_, words) in enumerate(out):
            if [word for word, *_ in words] == ids:
                return [out[i], *out[:i], *out[i + 1 :]]
        beam = float(self.options.lattice_beam)
        cost = self.least_cost + cost_of(lattice, ids, beam)
        return [(cost, decoded), *out][:most]

    def lattice(self) -> WordLattice:
        """The session's paths after the fixed words."""
        self._prune_ends()
        return self._make_lattice()

    @property
    def least_cost(self) -> float:
        """Cost of the best path of a session that has ended, with what was taken off the frontier's costs."""
        return self.session.offset + float(self.final_best)

    def _prune_ends(self) -> None:
        graph, session = self.graph, self.session
        ends = [graph.final_costs[t.state] for t in session.frontier]
        if graph.lm is not None:
            ends = [cost - graph.lm[6][t.lm] for cost, t in zip(ends, session.frontier, strict=True)]
        self.final = [t.cost + cost for t, cost in zip(session.frontier, ends, strict=True)]
        if not min(self.final) < INF:
            ends = [np.float32(0)] * len(ends)
            self.final = [token.cost for token in session.frontier]
        self.final_graph = [float(cost) for cost in ends]
        best = min(self.final)
        above = [cost - best for cost in self.final]
        self._prune([cost if cost <= self.options.lattice_beam else INF for cost in above])
        self.final_best = best

    def _make_lattice(self) -> WordLattice:
        network, beam = _Network(self.graph, self.session), float(self.options.lattice_beam)
        while (lattice := self._determinized(network, beam)) is None:
            if beam <= MIN_NARROWED_BEAM:
                return self._best_path_lattice(network)
            beam = min(beam / 2, MAX_NARROWED_BEAM)
        return lattice

    def _best_path_lattice(self, network: _Network) -> WordLattice:
        end = self._best_end()
        path = self._path_to(end)
        words = self._to_words(path)
        graph_costs = dict(zip(network.steps, network.graph_costs, strict=True))
        arcs: list[LatticeArc] = []
        spent = 0.0
        for step in path:
            spent += graph_costs[step]
            if self._is_word(self._arc(step)):
                word, first, last, _ = words[len(arcs)]
                arcs.append(LatticeArc(len(arcs), len(arcs) + 1, word, 0.0, spent, first, last))
                spent = 0.0
        return WordLattice(arcs, [(math.inf, 0.0)] * len(arcs) + [(0.0, spent + self.final_graph[end])])

    def _best_end(self) -> int:
        return self.final.index(min(self.final))

    def _determinized(self, network: _Network, beam: float) -> WordLattice | None:
        graph, last = self.graph, len(self.session.levels) - 1
        traces: list[tuple[int, int]] = []
        states: list[_LatticeState] = []
        known: dict[tuple[tuple[int, int], ...], int] = {}
        waiting: list[tuple[int, int]] = []

        def find(elements: list[_Element], forward: float) -> int:
            key = tuple((e.node, math.floor(e.cost * COST_STEPS + 0.5)) for e in elements)
            index = known.setdefault(key, len(states))
            if index == len(states):
                heapq.heappush(waiting, (elements[0].node, index))
                states.append(_LatticeState(elements, forward))
            states[index].forward = min(states[index].forward, forward)
            return index

        find([_Element(network.start, 0.0, 0.0, -1)], 0.0)
        arcs: list[LatticeArc] = []
        finals: list[tuple[float, float]] = []
        while waiting:
            _, index = heapq.heappop(waiting)
            state = states[index]
            state.number = len(finals)
            final = (math.inf, 0.0)
            reached = {element.node: element for element in state.elements}
            followed: dict[int, dict[int, _Element]] = {}
            queue = list(reached)
            heapq.heapify(queue)
            while queue:
                element = reached[heapq.heappop(queue)]
                if network.levels[element.node] == last:
                    token = network.nodes[element.node]
                    cost = element.cost + float(self.final[token] - self.final_best)
                    if cost < final[0]:
                        final = (cost, element.graph_cost + self.final_graph[token])
                for place in network.leaving[element.node]:
                    link = network.links[place]
                    cost = element.cost + float(link.excess)
                    if state.forward + cost + float(network.extras[link.target]) > beam:
                        continue
                    word = graph.words[link.arc] if self._is_word(link.arc) else NO_WORD
                    to = reached if word == NO_WORD else followed.setdefault(word, {})
                    if link.target in to and not cost < to[link.target].cost:
                        continue
                    if word == NO_WORD and link.target not in to:
                        heapq.heappush(queue, link.target)
                    spent = element.graph_cost + network.graph_costs[place]
                    to[link.target] = _Element(link.target, cost, spent, len(traces))
                    traces.append((place, element.trace))
            finals.append((math.inf, final[1]) if state.forward + final[0] > beam else final)
            for word, reached in sorted(followed.items()):
                to_all = [reached[node] for node in sorted(reached)]
                least = min(to_all, key=lambda e: e.cost)
                likeliest = min(to_all, key=lambda e: e.cost + float(network.extras[e.node]))
                words = self._to_words(self._path_through(network, traces, likeliest))
                count, trace = 0, likeliest.trace
                while trace >= 0:
                    place, trace = traces[trace]
                    count += self._is_word(network.links[place].arc)
                spent = to_all[0].graph_cost
                moved = [_Element(e.node, e.cost - least.cost, e.graph_cost - spent, e.trace) for e in to_all]
                target = find(moved, state.forward + least.cost)
                _, start, end, _ = words[count - 1]
                arcs.append(LatticeArc(state.number, target, word, least.cost, spent, start, end))
            if len(arcs) > MAX_LATTICE_ARCS or len(traces) > MAX_LATTICE_TRACES:
                return None
        if not any(cost < math.inf for cost, _ in finals):
            return None
        return WordLattice([arc._replace(target=states[arc.target].number) for arc in arcs], finals)

    def _path_through(self, network: _Network, traces: list[tuple[int, int]], element: _Element) -> list[_Step]:
        path: list[_Step] = []
        trace = element.trace
        while trace >= 0:
            place, trace = traces[trace]
            path.append(network.steps[place])
        path.reverse()
        node, last = element.node, len(self.session.levels) - 1
        while True:
            least, following = INF, -1
            for place in network.leaving[node]:
                link = network.links[place]
                cost = link.excess + network.extras[link.target]
                if cost < least:
                    least, following = cost, place
            ends = network.levels[node] == last and self.final[network.nodes[node]] - self.final_best <= least
            if ends or following < 0:
                return path
            path.append(network.steps[following])
            node = network.links[following].target

    def _posteriors(self) -> list[tuple[int, int, float]]:
        """Level, word and posterior probability of each link that outputs a word."""
        levels, frontier = self.session.levels, self.session.frontier
        forward: list[list[float]] = []
        entries: list[list[float]] = []
        for position, level in enumerate(levels):
            entry = [0.0] * len(level.extras)
            if position == 0:
                entry[level.best.index(-1)] = 1.0
            for link in level.emitting:
                entry[link.target] += forward[-1][link.source] * _weight(link)
            at = entry.copy()
            for link in level.epsilon:
                at[link.target] += at[link.source] * _weight(link)
            most = _largest(at)
            forward.append([value / most for value in at])
            entries.append([value / most for value in entry])
        best = min(token.cost for token in frontier)
        at = [math.exp(-float(token.cost - best)) for token in frontier]
        found: list[tuple[int, int, float]] = []
        for position in range(len(levels) - 1, -1, -1):
            level = levels[position]
            for link in reversed(level.epsilon):
                at[link.source] += at[link.target] * _weight(link)
            most, total, entering = _largest(at), 0.0, 0.0
            at = [value / most for value in at]
            for entry_sum, value in zip(entries[position], at, strict=True):
                total += entry_sum * value
            before = [0.0] * (len(levels[position - 1].extras) if position else 0)
            for link in level.emitting:
                weight = _weight(link) * at[link.target]
                before[link.source] += weight
                entering += forward[position - 1][link.source] * weight
            for i, link in reversed(list(enumerate(level.links))):
                if not self._is_word(link.arc):
                    continue
                enters = i < len(level.emitting)
                source = forward[position - 1][link.source] if enters else forward[position][link.source]
                share = source * _weight(link) * at[link.target] / (entering if enters else total)
                found.append((position, self.graph.words[link.arc], share))
            at = before
        return found[::-1]

    def _with_logprobs(
        self, path: Sequence[_Step], words: list[Word], links: list[tuple[int, int, float]]
    ) -> list[Word]:
        outputs = [step.level for step in path if self._is_word(self._arc(step))]
        result = []
        for i, (word, first, end, _) in enumerate(words):
            low = (outputs[i - 1] + outputs[i]) // 2 + 1 if i else 0
            high = (outputs[i] + outputs[i + 1]) // 2 if i + 1 < len(words) else len(self.session.levels)
            total = 0.0
            at = bisect_left(links, min(low, outputs[i]), key=lambda link: link[0])
            while at < len(links) and links[at][0] <= high:
                total += links[at][2] if links[at][1] == word else 0.0
                at += 1
            result.append((word, first, end, math.log(min(max(total, 1e-10), 1.0))))
        return result

    def _nbest(self, most: int) -> list[tuple[float, list[Word]]]:
        levels = self.session.levels
        partials: list[tuple[int, int, int, int, int]] = []
        queue: list[tuple[float, int, int]] = []
        suffixes: dict[tuple[int, int], int] = {}
        expanded: set[tuple[int, int, int]] = set()
        out: list[tuple[float, list[Word]]] = []

        def push(cost: float, partial: tuple[int, int, int, int, int]) -> None:
            heapq.heappush(queue, (cost, partial[0], len(partials)))
            partials.append(partial)

        for node, cost in enumerate(self.final):
            if cost < INF:
                push(float(cost - self.final_best), (len(levels) - 1, node, 0, -1, -1))
        beginning = levels[0].best.index(-1)
        for _ in range(MOST_STEPS):
            if not queue or len(out) >= most:
                break
            above, position, index = heapq.heappop(queue)
            _, node, suffix, _, _ = partials[index]
            if (position, node, suffix) in expanded:
                continue
            expanded.add((position, node, suffix))
            if not position and node == beginning:
                path = []
                while partials[index][3] >= 0:
                    *_, taken, after = partials[index]
                    path.append(_Step(partials[after][0], taken))
                    index = after
                out.append((self.least_cost + above, self._to_words(path)))
                continue
            for i, link in enumerate(levels[position].links):
                if link.target != node:
                    continue
                longer = suffix
                if self._is_word(link.arc):
                    longer = suffixes.setdefault((suffix, self.graph.words[link.arc]), len(suffixes) + 1)
                enters = i < len(levels[position].emitting)
                push(above + float(link.excess), (position - enters, link.source, longer, i, index))
        if not out:
            return [(self.least_cost, self._to_words(self._path_to(self._best_end())))]
        return out


def _weight(link: Link) -> float:
    return 1.0 if link.excess == 0 else math.exp(-float(link.excess))


def _largest(sums: list[float]) -> float:
    most = max(sums, default=0.0)
    return most if most > 0 else 1.0


def _options(given: tuple[Any, ...]) -> Options:
    beam, lattice_beam, scale, *limits = given
    return Options(np.float32(beam), np.float32(lattice_beam), np.float32(scale), *limits)


def step(
    graph: Graph, sessions: Sequence[Session], scores: Tensor, frames: Tensor, options: tuple[Any, ...], threads: int
) -> list[tuple[list[Word], list[Word]]]:
    """One chunk of many sessions: the words fixed by it, and the rest of the best path, of each."""
    del threads
    if scores.ndim != 3 or scores.shape[2] < graph.width or len({*map(id, sessions)}) != len(scores):
        raise ValueError("scores must be (sessions, frames, columns of the graph), no session twice")
    results = []
    for session, rows, count in zip(sessions, scores.numpy(), frames.tolist(), strict=True):
        search, fixed = _Search(graph, _options(options), session), []
        for row in rows[:count]:
            fixed += search.step(row)
        results.append((fixed, search.tail()))
    return results


def finish(
    graph: Graph, session: Session, options: tuple[Any, ...], most: int, graph_scale: float, minimum_risk: bool
) -> list[tuple[float, list[Word]]]:
    """Hypotheses of a session that has ended."""
    return _Search(graph, _options(options), session).finish(most, graph_scale, minimum_risk)


def lattice(
    graph: Graph, session: Session, options: tuple[Any, ...]
) -> tuple[list[tuple[Any, ...]], list[tuple[float, float]], float]:
    """Arcs and final costs of the word lattice of a session that has ended, and the cost of the whole best path."""
    search = _Search(graph, _options(options), session)
    arcs, finals = search.lattice()
    return [tuple(arc) for arc in arcs], finals, search.least_cost


def minimum_risk(
    arcs: Sequence[tuple[Any, ...]],
    finals: Sequence[tuple[float, float]],
    graph_scale: float,
    sequences: Sequence[Sequence[int]],
) -> tuple[float, list[list[float]], list[Word]]:
    """Expected edit distance of the first of some word sequences, the confidences of the words of each, and the words
    of minimum Bayes risk from the first on."""
    if not sequences:
        raise ValueError("sequences: one at least")
    lattice = WordLattice([LatticeArc(*arc) for arc in arcs], list(finals))
    entered = {0, *(arc.target for arc in lattice.arcs)}
    if not finals or not finals[-1][0] < math.inf or len(entered) != len(finals):
        raise ValueError("a lattice whose states are reached, and whose last state is final")
    if any(not 0 <= arc.source < arc.target < len(finals) or arc.word < 0 for arc in lattice.arcs):
        raise ValueError("an arc of a lattice that leads to no later state, or without a word")
    risk = BayesRisk(lattice, graph_scale)
    distance = risk.evaluate(sequences[0])
    return distance, [risk.confidences(words) for words in sequences], risk.decode(sequences[0])
