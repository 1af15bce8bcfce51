"""Search of a decoding graph on the CPU, many sessions in a call, with lattices: the native token passing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asr_serve import kernels
from asr_serve.decoding.language_model.ngram_scorer import NgramScorer
from asr_serve.decoding.language_model.scorer import LanguageModelFusion
from asr_serve.decoding.wfst.lattice_rescoring import LatticeTerm, best_paths, rescore_lattice
from asr_serve.decoding.wfst.search_graph import SearchGraph
from asr_serve.errors import OptionError, WeightsCorrupt
from asr_serve.kernels.lattice_reference import LatticeArc, WordLattice, cost_of
from asr_serve.kernels.wfst_reference import PRUNE_FRAMES
from asr_serve.models.decoding_graph import GraphSearchOptions
from asr_serve.models.interfaces import State, StateSpec, StreamingChunk, StreamingModel
from asr_serve.types import NBestHypothesis, SearchResult, SearchToken

MAX_HISTORY_FRAMES = 1_024
"""Frames of a session that stay open; at half a minute of them words are fixed although others are still likely."""
MAX_HISTORY_LINKS = 1 << 18
"""Links between paths of a session's open frames, 16 bytes each, at which the same happens: 4 MB, or 256 links a frame
where MAX_HISTORY_FRAMES stay open. A session also holds 8 bytes for each node, of which there are hardly more than
links, and, as the search counts links every PRUNE_FRAMES frames, what so many frames add in between."""
MAX_ACTIVE, LEAST_ACTIVE = 1 << 20, {"max_active": 1, "min_active": 0}
"""Bounds of the limits of paths."""


class _RescoredSession:
    """Language model of a session, and its state after the words that are fixed."""

    def __init__(self, term: LatticeTerm) -> None:
        self.term, self.context = term, term.model.start_state

    def append(self, words: Iterable[int]) -> None:
        for word in words:
            _, self.context = self.term.model.step(self.context, word)

    def restore(self, contexts: np.ndarray) -> None:
        """Restores the state. Raises ValueError for one that the model lacks."""
        if contexts.shape != (1,) or not 0 <= contexts[0] < self.term.model.states:
            raise ValueError("a saved search without the state of its language model")
        self.context = int(contexts[0])


class WfstSearch:
    """StatefulSearch (models/interfaces.py) over a decoding graph that is composed with its language model on the way.

    Out     Words as tokens: `id` is the word, `frame` and `end_frame` its span where the graph tells phones by their
            places in words (else the frame at which it is output), `logprob` the natural log of its posterior
            probability: in the lattice around it while the session runs, and in the confusion network at its end. With
            one hypothesis a word is fixed when all paths share it; with more, words stay open for MAX_HISTORY_FRAMES,
            so that the list covers them. Results do not depend on chunks or on other sessions. finish: n-best list
            out of the lattice, with the weight of each whole path; with GraphSearchOptions.minimum_risk the words of
            minimum Bayes risk come before it, and are in it once. With a language model of the session, finish composes
            the lattice with it first, from the state after the fixed words on: times are those of the lattice, and
            probabilities those of the rescored one.
    State   A session's paths and lattice grow with what is open, MAX_HISTORY_LINKS at most, and lie outside the rows.
    Source  Kaldi's lattice-faster-decoder (Povey et al., ICASSP 2012); kernels/src/wfst.hpp describes the search, and
            kernels/src/lattice.hpp minimum risk
    """

    def __init__(
        self, model: StreamingModel, graph: SearchGraph, options: GraphSearchOptions, hypotheses: int = 1
    ) -> None:
        """`hypotheses`: most entries of an n-best list. Raises OptionError for limits out of range, WeightsCorrupt for
        a graph that reads more columns than a CTC model has."""
        validate_options(options)
        if "wfst" not in model.heads and graph.columns > model.vocab_size:
            raise WeightsCorrupt(
                f"a decoding graph that reads {graph.columns} tokens",
                f"one of this model's vocabulary, which has {model.vocab_size}",
            )
        self.model, self.hypotheses = model, hypotheses
        self._native = kernels.wfst()
        language = graph.language_model
        self._graph = self._native.Graph(*graph[:-1], None if language is None else tuple(language))
        limits = (options.beam, options.lattice_beam, options.acoustic_scale, options.max_active, options.min_active)
        self._open_options = (*limits, MAX_HISTORY_FRAMES, MAX_HISTORY_FRAMES, MAX_HISTORY_LINKS)
        """Options of a session whose words stay open: it has several hypotheses, or a language model."""
        self._options = (*limits, 0, *self._open_options[-2:]) if hypotheses == 1 else self._open_options
        self._risk = options.graph_scale, options.minimum_risk
        self._lattice_beam = options.lattice_beam
        self._sessions: dict[int, Any] = {}
        self._rescored: dict[int, _RescoredSession] = {}

    def state_specs(self) -> dict[str, StateSpec]:
        return {}

    def set_language_model(self, row: int, fusion: LanguageModelFusion | None) -> None:
        self._rescored.pop(row, None)
        if fusion is not None:
            assert isinstance(fusion.scorer, NgramScorer), "lattices are composed with n-gram models"
            self._rescored[row] = _RescoredSession(LatticeTerm(fusion.scorer.model, fusion.weight))

    def step(self, hidden: Tensor, chunk: StreamingChunk, state: State) -> list[SearchResult]:
        scores, counts = self.model.graph_scores(hidden).cpu(), chunk.frames.cpu()
        rows = [
            (index, row, start)
            for index, (row, start, count) in enumerate(
                zip(chunk.rows.tolist(), chunk.start_frames.tolist(), counts.tolist(), strict=True)
            )
            if count
        ]
        results = [SearchResult([], [])] * len(scores)
        plain = [each for each in rows if each[1] not in self._rescored]
        for group, options in (
            (plain, self._options),
            ([each for each in rows if each[1] in self._rescored], self._open_options),
        ):
            if not group:
                continue
            chosen_scores, chosen_counts = scores, counts
            if len(group) < len(scores):  # other rows only fill the batch, or are of the other group
                chosen = torch.tensor([index for index, _, _ in group], dtype=torch.int64)
                chosen_scores, chosen_counts = scores[chosen], counts[chosen]
            sessions = [self._session(row, start) for _, row, start in group]
            found = self._native.step(
                self._graph, sessions, chosen_scores, chosen_counts, options, torch.get_num_threads()
            )
            for (index, row, _), (fixed, tail) in zip(group, found, strict=True):
                results[index] = SearchResult(_tokens(fixed), _tokens(tail))
                if (rescored := self._rescored.get(row)) is not None:
                    rescored.append(word for word, *_ in fixed)
        return results

    def finish(self, row: int, state: State) -> list[NBestHypothesis]:
        session = self._sessions.get(row)
        if session is None:
            return [NBestHypothesis([], 0.0)]
        if (rescored := self._rescored.get(row)) is not None:
            return self._rescore(row, rescored)
        found = self._native.finish(self._graph, session, self._options, self.hypotheses, *self._risk)
        return [NBestHypothesis(_tokens(words), -cost) for cost, words in found] or [NBestHypothesis([], 0.0)]

    def lattice(self, row: int) -> WordLattice:
        """Word lattice of a session that has ended, of what follows its fixed words: all of the session where several
        hypotheses were asked for."""
        return self._lattice(row)[0]

    def _lattice(self, row: int) -> tuple[WordLattice, float]:
        """`lattice`, whose costs are above the best path's, and the cost of that whole path."""
        session = self._sessions.get(row)
        if session is None:
            return WordLattice([], [(0.0, 0.0)]), 0.0
        options = self._open_options if row in self._rescored else self._options
        arcs, finals, least = self._native.lattice(self._graph, session, options)
        return WordLattice([LatticeArc(*arc) for arc in arcs], finals), least

    def _rescore(self, row: int, session: _RescoredSession) -> list[NBestHypothesis]:
        """N-best list out of a session's lattice together with its language model, in the form of `finish`."""
        graph_scale, minimum_risk = self._risk
        found, least = self._lattice(row)
        lattice = rescore_lattice(found, [session.term], (session.context,))
        paths = best_paths(lattice, self.hypotheses)
        sequences = [path.words for path in paths]
        _, confidences, decoded = self._native.minimum_risk(lattice.arcs, lattice.finals, graph_scale, sequences)
        listed = []
        for path, logprobs in zip(paths, confidences, strict=True):
            words = zip(path.arcs, logprobs, strict=True)
            tokens = [SearchToken(arc.word, arc.start, logprob, arc.end) for arc, logprob in words]
            listed.append(NBestHypothesis(tokens, -(least + path.cost)))
        if not minimum_risk:
            return listed
        ids = [word for word, *_ in decoded]
        if ids in sequences:
            at = sequences.index(ids)
            return [listed[at], *listed[:at], *listed[at + 1 :]]
        cost = cost_of(lattice, ids, paths[0].cost + self._lattice_beam)
        return [NBestHypothesis(_tokens(decoded), -(least + cost)), *listed][: self.hypotheses]

    def export_state(self, row: int) -> tuple[bytes, Tensor]:
        session, rescored = self._sessions.get(row), self._rescored.get(row)
        context = [] if rescored is None else [rescored.context]
        return b"" if session is None else session.export_state(), torch.tensor(context, dtype=torch.int64)

    def import_state(self, row: int, numbers: bytes, tensor: bytes, seen: int, device: torch.device) -> None:
        self._sessions.pop(row, None)
        if not numbers:
            if seen:
                raise ValueError("a saved search without its paths")
            return
        session = self._native.Session()
        session.import_state(self._graph, numbers)
        levels, _ = session.history
        if levels > MAX_HISTORY_FRAMES + PRUNE_FRAMES:
            raise ValueError(f"a saved search that keeps open {levels} frames, more than {MAX_HISTORY_FRAMES}")
        if session.frames != seen:
            raise ValueError(f"a saved search after {session.frames} frames, of a session after {seen}")
        if (rescored := self._rescored.get(row)) is not None:
            rescored.restore(np.frombuffer(tensor, np.int64))
        self._sessions[row] = session

    def free(self, row: int) -> None:
        self._sessions.pop(row, None)
        self._rescored.pop(row, None)

    def _session(self, row: int, start_frame: int) -> Any:
        if start_frame == 0 or row not in self._sessions:
            self._sessions[row] = self._native.Session()
            if (rescored := self._rescored.get(row)) is not None:
                rescored.context = rescored.term.model.start_state
        return self._sessions[row]


def validate_options(options: GraphSearchOptions) -> None:
    """Raises OptionError for limits out of range."""
    for name, value in options._asdict().items():
        if name in LEAST_ACTIVE:
            if not LEAST_ACTIVE[name] <= value <= MAX_ACTIVE:
                raise OptionError(f"{name}={value}", f"{LEAST_ACTIVE[name]} to {MAX_ACTIVE}", param=f"graph_{name}")
        elif name != "minimum_risk" and not value > 0:
            raise OptionError(f"{name}={value}", "more than 0", param=f"graph_{name}")


def _tokens(words: list[tuple[int, int, int, float]]) -> list[SearchToken]:
    return [SearchToken(word, start, logprob, end) for word, start, end, logprob in words]
