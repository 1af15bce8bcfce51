"""Small random decoding graphs and language models, and an exhaustive search of them, for tests of WFST searches."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

from asr_serve.models.decoding_graph import DecodingGraph
from asr_serve.models.ngram import NgramModel

COLUMNS, WORDS = 4, 5


def random_graph(
    rng: np.random.Generator, states: int = 4, *, lm: bool = False, boundaries: bool = False, epsilon: float = 0.4
) -> DecodingGraph:
    """Graph whose every state has a consuming arc and a path to an end; epsilon arcs lead to greater states,
    a share `epsilon` of them."""
    rows: list[list[tuple[int, int, float, int]]] = []
    for state in range(states):
        arcs = [
            (int(rng.integers(COLUMNS)), _word(rng), float(rng.uniform(0, 3)), int(rng.integers(states)))
            for _ in range(rng.integers(1, 4))
        ]
        later = range(state + 1, states)
        arcs += [(-1, _word(rng), float(rng.uniform(-0.5, 2)), to) for to in later if rng.random() < epsilon]
        rows.append(arcs)
    flat = list(itertools.chain(*rows))
    offsets = np.cumsum([0, *(len(row) for row in rows)])
    consuming = [sum(arc[0] >= 0 for arc in row) for row in rows]
    finals = np.where(rng.random(states) < 0.6, rng.uniform(0, 2, states), np.inf)
    ends = np.isfinite(finals)
    for _ in rows:
        ends |= [any(ends[arc[3]] for arc in row) for row in rows]
    finals[~ends] = 0.5
    return DecodingGraph(
        offsets.astype(np.int32),
        (offsets[:-1] + consuming).astype(np.int32),
        np.array([arc[0] for arc in flat], np.int32),
        np.array([arc[1] for arc in flat], np.int32),
        np.array([arc[2] for arc in flat], np.float32),
        np.array([arc[3] for arc in flat], np.int32),
        finals.astype(np.float32),
        np.arange(COLUMNS, dtype=np.int32),
        np.arange(COLUMNS, dtype=np.int32) if boundaries else np.full(COLUMNS, -1, np.int32),
        rng.integers(0, 5, COLUMNS).astype(np.int8) if boundaries else np.zeros(0, np.int8),
        0,
        random_ngram(rng) if lm else None,
    )


def _word(rng: np.random.Generator) -> int:
    return int(rng.integers(WORDS)) if rng.random() < 0.4 else -1


def random_ngram(rng: np.random.Generator) -> NgramModel:
    """Bigram model over WORDS words; state 0 is the empty context, state 1 + w the context of word w."""
    offsets, words, logprobs, states = (
        [0],
        list(range(WORDS)),
        list(-rng.uniform(0.5, 3, WORDS)),
        list(range(1, WORDS + 1)),
    )
    offsets.append(WORDS)
    for _ in range(WORDS):
        seen = np.flatnonzero(rng.random(WORDS) < 0.5)
        words += seen.tolist()
        logprobs += (-rng.uniform(0.1, 2, len(seen))).tolist()
        states += (seen + 1).tolist()
        offsets.append(len(words))
    return NgramModel(
        np.array(offsets, np.int64),
        np.array(words, np.int32),
        np.array(logprobs, np.float32),
        np.array(states, np.int32),
        np.array([-1] + [0] * WORDS, np.int32),
        np.array([0.0, *(-rng.uniform(0, 1, WORDS))], np.float32),
        -rng.uniform(0.1, 3, WORDS + 1).astype(np.float32),
        int(rng.integers(WORDS + 1)),
    )


class Path(NamedTuple):
    cost: float
    words: tuple[tuple[int, int], ...]
    """Words, each with the number of frames consumed when its arc has been passed."""


def all_paths(graph: DecodingGraph, scores: np.ndarray) -> list[Path]:
    """Every path of the graph over scores (frames, columns), those that end in a final state, or where there are none
    all that consume the frames."""
    model = graph.language_model
    ended: list[Path] = []
    open_paths: list[Path] = []

    def go(state: int, context: int, frame: int, cost: float, words: tuple[tuple[int, int], ...]) -> None:
        if frame == len(scores):
            open_paths.append(Path(cost, words))
            final = float(graph.final_costs[state]) - (float(model.final_logprobs[context]) if model else 0.0)
            if final < math.inf:
                ended.append(Path(cost + final, words))
        for arc in range(graph.arc_offsets[state], graph.arc_offsets[state + 1]):
            label, word = int(graph.arc_labels[arc]), int(graph.arc_words[arc])
            if label >= 0 and frame == len(scores):
                continue
            total, after, following = cost + float(graph.arc_costs[arc]), context, frame + (label >= 0)
            if label >= 0:
                total -= float(scores[frame, graph.label_columns[label]])
            if word >= 0 and model is not None:
                logprob, after = model.step(context, word)
                total -= logprob
            if total < math.inf:
                go(
                    int(graph.arc_states[arc]),
                    after,
                    following,
                    total,
                    words + (((word, following),) if word >= 0 else ()),
                )

    go(graph.start_state, 0 if model is None else model.start_state, 0, 0.0, ())
    return ended or open_paths
