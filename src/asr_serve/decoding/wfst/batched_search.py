"""Search of a decoding graph for many sessions at once, as tensor operations of fixed shape, for any device.

Token passing: a token is a state of the graph, a state of the language model, and the cost of the best path to them. A
frame expands the arcs of all tokens into a fixed number of places, merges tokens of equal states by sorting, and keeps
the cheapest. Nothing is read back before the chunk ends, so a CUDA graph records it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr_serve.decoding.captured_chunks import CapturedChunks
from asr_serve.decoding.language_model.ngram_scorer import NgramScorer
from asr_serve.decoding.wfst.search import validate_options
from asr_serve.devices.interface import Device
from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.models.decoding_graph import DecodingGraph, GraphSearchOptions
from asr_serve.models.interfaces import State, StateSpec, StreamingChunk, StreamingModel
from asr_serve.types import NBestHypothesis, SearchResult, SearchToken

MOST_EPSILON_ROUNDS = 8
"""Arcs without a frame that a path may take one after another, in a graph with circles of them."""
NEVER = math.inf


class BatchedWfstSearch:
    """StreamingSearch (models/interfaces.py) over a decoding graph.

    Out     Words as tokens: `id` is the word, `frame` that of the arc that outputs it, `logprob` the natural log of
            the path's weight since the word before it. A word is fixed when all tokens share it, or when a
            hypothesis grows too long (`max_tail_words`), which the ends of chunks decide. finish: different word
            sequences of the last frame's tokens, best first; in final states of the graph, or in any where none is
            reached. A token has its best path alone: there is no lattice, of which WfstSearch makes longer lists,
            confidences and words of minimum risk.
    State   Tokens, and the tree of words after the fixed ones, on the model's device.
    Raises  OptionError for options out of range, UnsupportedOption for minimum risk
    Source  Young, Russell and Thornton 1989, Token passing; the batching of arcs over threads by prefix sums as in
            Chen et al., Interspeech 2018 (arXiv:1804.03243)
    """

    def __init__(
        self,
        model: StreamingModel,
        graph: DecodingGraph,
        device: Device,
        options: GraphSearchOptions,
        *,
        arcs_per_token: int = 4,
        max_tail_words: int = 64,
    ) -> None:
        """Sets the limits; those of lattices are not used.

        Args:
            arcs_per_token: places for expanded arcs, as a multiple of `options.max_active`; the most costly tokens
                are not expanded where a frame needs more.
            max_tail_words: most words of a hypothesis that are not fixed: where a chunk leaves more than half as
                many, all but a quarter are.
        """
        validate_options(options)
        if options.minimum_risk:
            raise UnsupportedOption(
                "minimum_risk=True",
                "words of the best path: a batched search keeps no lattice",
                "use WfstSearch, which keeps one",
                param="graph_minimum_risk",
            )
        for name, value in (("arcs_per_token", arcs_per_token), ("max_tail_words", max_tail_words)):
            if not 1 <= value <= 512:
                raise OptionError(f"{name}={value}", "1 to 512", param=name)
        self.model, self.options = model, options
        self._places, self._tail_words = arcs_per_token * options.max_active, max_tail_words
        self._graph = _GraphTensors.of(graph, device.torch_device)
        lm = graph.language_model
        self._scorer = None if lm is None else NgramScorer(lm, device.torch_device)
        self._language_states = 1 if lm is None else lm.states
        self._rounds = epsilon_rounds(graph)
        self._frame_words = words_of_frame(graph, self._rounds)
        self._last_word = int(graph.arc_words.max(initial=-1))
        self._start = graph.start_state, 0 if lm is None else lm.start_state
        self._nodes = 2 * options.max_active + max_tail_words
        """Places for words that are not fixed. A frame adds at most as many as there are tokens, and none is added
        where no place is left: such a token is dropped."""
        self._advance = CapturedChunks(device, self._advance_chunk)

    def state_specs(self) -> dict[str, StateSpec]:
        tokens, nodes = (self.options.max_active,), (self._nodes,)
        return {
            "wfst_started": StateSpec((), torch.int64),
            "wfst_total": StateSpec((), torch.float64),
            "wfst_costs": StateSpec(tokens, torch.float32, None),
            "wfst_states": StateSpec(tokens, torch.int64, None),
            "wfst_language_states": StateSpec(tokens, torch.int64, None),
            "wfst_token_nodes": StateSpec(tokens, torch.int64, None),
            "wfst_parents": StateSpec(nodes, torch.int64, None),
            "wfst_words": StateSpec(nodes, torch.int64, None),
            "wfst_frames": StateSpec(nodes, torch.int64, None),
            "wfst_node_costs": StateSpec(nodes, torch.float64, None),
        }

    def step(self, hidden: Tensor, chunk: StreamingChunk, state: State) -> list[SearchResult]:
        """Same as StreamingSearch.step. Rows that were restored must have passed `validate_row`."""
        numbers, logprobs = self._advance(state, self.model.graph_scores(hidden), chunk)
        most = logprobs.shape[1]
        results = []
        for row, logs in zip(numbers.tolist(), logprobs.tolist(), strict=True):
            fixed, length = row[:2]
            words, frames = row[2 : 2 + most], row[2 + most :]
            tokens = [SearchToken(*item) for item in zip(words[:length], frames, logs, strict=False)]
            results.append(SearchResult(tokens[:fixed], tokens[fixed:]))
        return results

    def finish(self, row: int, state: State) -> list[NBestHypothesis]:
        """N-best list, as StreamingSearch.finish."""
        if not int(state["wfst_started"][row]):
            return [NBestHypothesis([], 0.0)]
        saved = {name: state[name][row].cpu() for name in self.state_specs()}
        states, costs = saved["wfst_states"], saved["wfst_costs"].double()
        finals = self._graph.final_costs.cpu()[states.clamp(min=0)].double()
        if self._scorer is not None:
            language = state["wfst_language_states"][row].clamp(min=0)
            finals = finals - self._scorer.final_logprobs(language).cpu()
        complete = costs + finals
        if not torch.isfinite(complete).any():
            complete = costs
        best: dict[tuple[int, ...], NBestHypothesis] = {}
        for at in complete.argsort(stable=True).tolist():
            if not math.isfinite(float(complete[at])):
                break
            path = self._path(saved, int(saved["wfst_token_nodes"][at]))
            total = -(float(complete[at]) + float(saved["wfst_total"]))
            best.setdefault(tuple(token.id for token in path), NBestHypothesis(path, total))
        return list(best.values()) or [NBestHypothesis([], 0.0)]

    def validate_row(self, row: int, state: State) -> None:
        """Raises ValueError as RowValidatingSearch.validate_row: for indices out of range, and words whose parents do
        not come before them."""
        used = int(state["wfst_started"][row])
        if not used:
            return
        saved = {name: state[name][row].cpu() for name in self.state_specs()}
        parents, words = saved["wfst_parents"], saved["wfst_words"]
        limits = {
            "wfst_states": len(self._graph.arc_offsets),
            "wfst_language_states": self._language_states,
            "wfst_token_nodes": self._nodes,
        }
        within = [bool(((saved[name] >= 0) & (saved[name] < most)).all()) for name, most in limits.items()]
        rising = bool(((parents >= 0) & (parents <= torch.arange(len(parents)).sub(1).clamp(min=0))).all())
        known = bool(((words >= -1) & (words <= self._last_word)).all())
        if not (0 < used <= self._nodes and all(within) and rising and known):
            raise ValueError("a saved row of the search is corrupt")

    @staticmethod
    def _path(saved: dict[str, Tensor], node: int) -> list[SearchToken]:
        path = []
        while node > 0:
            parent = int(saved["wfst_parents"][node])
            cost = float(saved["wfst_node_costs"][node] - saved["wfst_node_costs"][parent])
            path.append(SearchToken(int(saved["wfst_words"][node]), int(saved["wfst_frames"][node]), -cost))
            node = parent
        return path[::-1]

    # --- one chunk -------------------------------------------------------------------------------------

    def _advance_chunk(
        self, state: State, scores: Tensor, rows: Tensor, starts: Tensor, frames: Tensor
    ) -> tuple[Tensor, ...]:
        """Search a chunk's frames and update the sessions' rows. A ChunkFunction.

        Returns: numbers (n, 2 + 2 * most) int64: how many words were fixed, how many the best hypothesis has after what
        was fixed before, those words, their frames; their log-probabilities (n, most) float32. `most`: words that a
        hypothesis can have then, those that it had before the chunk included.
        """
        tokens, tree = self._load(state, rows)
        for frame in range(scores.shape[1]):
            stepped, grown = self._frame(tokens, tree, scores[:, frame], starts + frame)
            moves = (frame < frames) & torch.isfinite(stepped.costs[:, 0])
            tokens, tree = stepped.where(moves, tokens), grown.where(moves, tree)
        # Before the first frame of a session there may be words as in a frame.
        most = self._tail_words + self._frame_words * (scores.shape[1] + 1)
        tokens, tree, (numbers, logprobs) = self._fix(tokens, tree, most)
        for name, tensor in {**tokens.to_state(), **tree.to_state()}.items():
            state[name][rows] = tensor
        return numbers, logprobs

    def _load(self, state: State, rows: Tensor) -> tuple[_Tokens, _WordTree]:
        """Tokens and words of the sessions."""
        started = state["wfst_started"][rows] > 0
        n, active = len(rows), self.options.max_active

        def begun(name: str, value: float | Tensor) -> Tensor:
            return torch.where(started[:, None], state[name][rows], value)

        first = torch.arange(active, device=rows.device) == 0
        tree = _WordTree(
            parents=begun("wfst_parents", 0),
            words=begun("wfst_words", -1),
            frames=begun("wfst_frames", 0),
            costs=begun("wfst_node_costs", 0.0),
            used=torch.where(started, state["wfst_started"][rows], 1),
        )
        tokens = _Tokens(
            costs=begun("wfst_costs", torch.where(first, 0.0, NEVER)),
            states=begun("wfst_states", self._start[0]),
            language_states=begun("wfst_language_states", self._start[1]),
            nodes=begun("wfst_token_nodes", 0),
            total=torch.where(started, state["wfst_total"][rows], 0.0),
        )
        # A new session follows arcs without a frame from the start state.
        closed, grown = self._follow_epsilons(tokens, tree, torch.full((n,), -1, device=rows.device))
        return closed.where(~started, tokens), grown.where(~started, tree)

    def _frame(self, tokens: _Tokens, tree: _WordTree, scores: Tensor, frame: Tensor) -> tuple[_Tokens, _WordTree]:
        graph = self._graph
        arcs, sources, costs = self._expand(tokens, graph.arc_offsets, graph.epsilon_offsets)
        columns = graph.arc_columns[arcs].clamp(min=0)
        costs = costs - self.options.acoustic_scale * scores.gather(1, columns)
        empty = tokens._replace(costs=torch.full_like(tokens.costs, NEVER))
        tokens, tree = self._merge(empty, tokens, tree, arcs, sources, costs, frame)
        best = torch.where(torch.isfinite(tokens.costs[:, :1]), tokens.costs[:, :1], 0.0)
        tokens = tokens._replace(costs=tokens.costs - best, total=tokens.total + best[:, 0].double())
        return self._follow_epsilons(tokens, tree, frame)

    def _follow_epsilons(self, tokens: _Tokens, tree: _WordTree, frame: Tensor) -> tuple[_Tokens, _WordTree]:
        graph = self._graph
        for _ in range(self._rounds):
            arcs, sources, costs = self._expand(tokens, graph.epsilon_offsets, graph.arc_ends)
            tokens, tree = self._merge(tokens, tokens, tree, arcs, sources, costs, frame)
        return tokens, tree

    def _expand(self, tokens: _Tokens, begins: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Arcs of all tokens, the cheapest token's first: arcs (n, places) and the index of each one's token, and the
        cost after it without the acoustic score; inf in places without an arc."""
        places = torch.arange(self._places, device=begins.device)
        first = begins[tokens.states]
        count = torch.where(torch.isfinite(tokens.costs), ends[tokens.states] - first, 0)
        until = count.cumsum(1)
        wide = places.expand(len(until), -1).contiguous()
        sources = torch.searchsorted(until, wide, right=True).clamp(max=until.shape[1] - 1)
        arcs = first.gather(1, sources) + places - (until - count).gather(1, sources)
        valid = places < until[:, -1:]
        arcs = torch.where(valid, arcs, 0)
        costs = tokens.costs.gather(1, sources) + self._graph.arc_costs[arcs]
        return arcs, sources, torch.where(valid, costs, NEVER)

    def _merge(
        self,
        kept: _Tokens,
        origin: _Tokens,
        tree: _WordTree,
        arcs: Tensor,
        sources: Tensor,
        costs: Tensor,
        frame: Tensor,
    ) -> tuple[_Tokens, _WordTree]:
        """The cheapest of the tokens `kept` and of those at the ends of arcs, one for each pair of states."""
        active, words = self.options.max_active, self._graph.arc_words[arcs]
        language = origin.language_states.gather(1, sources)
        if self._scorer is not None:
            logprobs, after = self._scorer.score(language, words.clamp(min=0))
            spoken = words >= 0
            costs = torch.where(spoken, costs - logprobs.float(), costs)
            language = torch.where(spoken, after, language)
        costs = torch.cat([kept.costs, costs], 1)
        states = torch.cat([kept.states, self._graph.arc_states[arcs]], 1)
        language = torch.cat([kept.language_states, language], 1)
        nodes = torch.cat([kept.nodes, origin.nodes.gather(1, sources)], 1)
        words = torch.cat([torch.full_like(kept.nodes, -1), words], 1)

        keys = states * self._language_states + language
        by_cost = costs.sort(dim=1, stable=True).indices
        ordered, by_key = keys.gather(1, by_cost).sort(dim=1, stable=True)
        index = by_cost.gather(1, by_key)
        repeated = torch.zeros_like(ordered, dtype=torch.bool)
        repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
        costs = torch.where(repeated, NEVER, costs.gather(1, index))
        costs, cheapest = costs.sort(dim=1, stable=True)
        costs, index = costs[:, :active], index.gather(1, cheapest[:, :active])
        best = costs[:, :1]
        # Compared as inf > inf + beam is false: without a token nothing is dropped.
        costs = torch.where(costs > best + self.options.beam, NEVER, costs)
        total = origin.total
        nodes, tree, room = tree.append(
            nodes.gather(1, index), words.gather(1, index), costs.double() + total[:, None], frame
        )
        costs = torch.where(room, costs, NEVER)
        return _Tokens(costs, states.gather(1, index), language.gather(1, index), nodes, total), tree

    def _fix(self, tokens: _Tokens, tree: _WordTree, most: int) -> tuple[_Tokens, _WordTree, tuple[Tensor, ...]]:
        """Output the best hypothesis, fix the words that all tokens share, and drop words of no token, and tokens with
        more than `max_tail_words` words after the fixed ones. `most`: words that a token can have."""
        tail, live = self._tail_words, torch.isfinite(tokens.costs)
        n, nodes = tree.parents.shape
        path, chain = tree.trace(tokens.nodes[:, 0], most)
        passes = torch.zeros(n, nodes + 1, dtype=torch.int64, device=live.device)
        at, ones = torch.where(live, tokens.nodes, 0), torch.ones_like(tokens.nodes)
        for _ in range(most):
            passes = passes.scatter_add(1, torch.where(at > 0, at, nodes), ones)
            at = tree.parents.gather(1, at)
        passes = passes[:, :nodes]
        shared = (passes.gather(1, path) == live.sum(1, keepdim=True)) & (chain > 0)
        fixed = shared.long().sum(1)
        length = (chain > 0).sum(1)
        # Long before a hypothesis is longer than the tail, its oldest words are fixed, and others dropped.
        forced = torch.where(length > tail // 2, length - tail // 4, 0)
        fixed = torch.maximum(fixed, forced)
        root = path.gather(1, (fixed - 1).clamp(min=0)[:, None])[:, 0]
        root = torch.where(fixed > 0, root, 0)
        follows = torch.zeros_like(live)
        at = torch.where(live, tokens.nodes, 0)
        for _ in range(tail + 1):
            follows = follows | (at == root[:, None])
            at = tree.parents.gather(1, at)
        costs = torch.where(live & follows, tokens.costs, NEVER)
        before = tree.costs.gather(1, path)
        steps = before - tree.costs.gather(1, tree.parents.gather(1, path))
        output = (
            torch.cat([fixed[:, None], length[:, None], tree.words.gather(1, path), tree.frames.gather(1, path)], 1),
            -steps.float(),
        )
        tokens = tokens._replace(costs=costs)
        moved, tree = tree.compact(tokens, root, tail)
        return moved, tree, output


class _Tokens(NamedTuple):
    """Tokens of n sessions, (n, max_active), the cheapest first; those with cost inf are not there."""

    costs: Tensor
    """Cost beyond `total`."""
    states: Tensor
    language_states: Tensor
    nodes: Tensor
    """Last word of each, in the tree."""
    total: Tensor
    """(n,) float64."""

    def where(self, condition: Tensor, other: _Tokens) -> _Tokens:
        return _Tokens(
            *(torch.where(condition.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(self, other, strict=True))
        )

    def to_state(self) -> dict[str, Tensor]:
        return {
            "wfst_costs": self.costs,
            "wfst_states": self.states,
            "wfst_language_states": self.language_states,
            "wfst_token_nodes": self.nodes,
            "wfst_total": self.total,
        }


class _WordTree(NamedTuple):
    """Words of n sessions after the fixed ones, (n, nodes): each with the word before it. Node 0 is the last fixed
    word; parents come before their children."""

    parents: Tensor
    words: Tensor
    frames: Tensor
    costs: Tensor
    """Cost of the path up to each word, float64."""
    used: Tensor
    """(n,): nodes in use."""

    def where(self, condition: Tensor, other: _WordTree) -> _WordTree:
        return _WordTree(
            *(torch.where(condition.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(self, other, strict=True))
        )

    def append(self, nodes: Tensor, words: Tensor, costs: Tensor, frame: Tensor) -> tuple[Tensor, _WordTree, Tensor]:
        """Append the words (n, tokens) that are not -1, each after its node.

        Returns: nodes of the tokens, the tree, and for which tokens there was room.
        """
        capacity = self.parents.shape[1]
        new = (words >= 0) & torch.isfinite(costs)
        places = self.used[:, None] + new.long().cumsum(1) - 1
        room = ~new | (places < capacity)
        index = torch.where(new & room, places, capacity)

        def put(into: Tensor, values: Tensor) -> Tensor:
            return torch.cat([into, into[:, :1]], 1).scatter(1, index, values.to(into.dtype))[:, :-1]

        tree = _WordTree(
            put(self.parents, nodes),
            put(self.words, words),
            put(self.frames, frame[:, None].expand_as(nodes)),
            put(self.costs, costs),
            (self.used + new.long().sum(1)).clamp(max=capacity),
        )
        return torch.where(new & room, places, nodes), tree, room

    def trace(self, nodes: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Path (n, longest) of nodes that lead to `nodes` (n,), the oldest first, and whether each place holds one."""
        found, at = [], nodes[:, None]
        for _ in range(longest):
            found.append(at)
            at = self.parents.gather(1, at)
        path = torch.cat(found[::-1], 1)
        # Those that end early repeat node 0 at the front: moved to the back.
        order = (path == 0).long().sort(dim=1, stable=True).indices
        path = path.gather(1, order)
        return path, (path > 0).long()

    def compact(self, tokens: _Tokens, root: Tensor, longest: int) -> tuple[_Tokens, _WordTree]:
        """Tree of the words of live tokens after `root` (n,), which becomes node 0, and the tokens in it."""
        n, capacity = self.parents.shape
        live = torch.isfinite(tokens.costs)
        needed = torch.zeros(n, capacity + 1, dtype=torch.int64, device=live.device)
        at = torch.where(live, tokens.nodes, root[:, None])
        for _ in range(longest + 1):
            inside = at != root[:, None]
            needed = needed.scatter(1, torch.where(inside, at, capacity), 1)
            at = torch.where(inside, self.parents.gather(1, at), at)
        needed = needed[:, :capacity]
        needed = needed.scatter(1, root[:, None], 0)
        places = needed.cumsum(1) * needed  # the root, and what is dropped, become 0
        used = needed.sum(1) + 1
        order = (1 - needed).sort(dim=1, stable=True).indices  # needed ones first, in their order
        index = torch.cat([root[:, None], order[:, :-1]], 1)
        parents = places.gather(1, self.parents.gather(1, index))
        inside = torch.arange(capacity, device=live.device) < used[:, None]
        parents = torch.where(inside, parents, 0)
        parents[:, 0] = 0
        nodes = torch.where(live, places.gather(1, tokens.nodes), 0)
        tree = _WordTree(
            parents, self.words.gather(1, index), self.frames.gather(1, index), self.costs.gather(1, index), used
        )
        return tokens._replace(nodes=nodes), tree

    def to_state(self) -> dict[str, Tensor]:
        return {
            "wfst_parents": self.parents,
            "wfst_words": self.words,
            "wfst_frames": self.frames,
            "wfst_node_costs": self.costs,
            "wfst_started": self.used,
        }


class _GraphTensors(NamedTuple):
    """A decoding graph on a device; indices are int64."""

    arc_offsets: Tensor
    epsilon_offsets: Tensor
    arc_ends: Tensor
    arc_columns: Tensor
    arc_words: Tensor
    arc_costs: Tensor
    arc_states: Tensor
    final_costs: Tensor

    @classmethod
    def of(cls, graph: DecodingGraph, device: torch.device) -> _GraphTensors:
        def index(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(device)

        columns = np.append(graph.label_columns, -1)[graph.arc_labels]
        # One arc at least, so that places without an arc have one to read.
        pad = (0, 1)
        return cls(
            index(graph.arc_offsets[:-1]),
            index(graph.epsilon_offsets),
            index(graph.arc_offsets[1:]),
            index(np.pad(columns, pad)),
            index(np.pad(graph.arc_words, pad, constant_values=-1)),
            torch.from_numpy(np.pad(graph.arc_costs, pad)).to(device),
            index(np.pad(graph.arc_states, pad)),
            torch.from_numpy(graph.final_costs).to(device),
        )


def epsilon_rounds(graph: DecodingGraph) -> int:
    """Arcs without a frame on the longest path of them; MOST_EPSILON_ROUNDS where they run in a circle, or are more."""
    counts = graph.arc_offsets[1:] - graph.epsilon_offsets
    sources = np.repeat(np.arange(graph.states), counts)
    ends = graph.arc_states[np.flatnonzero(graph.arc_labels < 0)]
    depth = np.zeros(graph.states, np.int64)
    for rounds in range(MOST_EPSILON_ROUNDS):
        deeper = depth.copy()
        np.maximum.at(deeper, ends, depth[sources] + 1)
        if (deeper == depth).all():
            return rounds
        depth = deeper
    return MOST_EPSILON_ROUNDS


def words_of_frame(graph: DecodingGraph, rounds: int) -> int:
    """Most words that a path outputs in a frame: by one arc that consumes it and at most `rounds` that do not."""
    spoken, counts = graph.arc_words >= 0, graph.arc_offsets[1:] - graph.epsilon_offsets
    epsilon, sources = np.flatnonzero(graph.arc_labels < 0), np.repeat(np.arange(graph.states), counts)
    words = np.zeros(graph.states, np.int64)
    for _ in range(rounds):
        more = words.copy()
        np.maximum.at(more, sources, spoken[epsilon] + words[graph.arc_states[epsilon]])
        words = more
    after = words[graph.arc_states] + spoken
    return int(after[graph.arc_labels >= 0].max(initial=words.max(initial=0)))
