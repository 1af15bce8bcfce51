"""Search of decoding graphs: Kaldi's decoders find the same, and sessions behave as the engine expects."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from random_graphs import COLUMNS, random_graph
from safetensors import safe_open
from streaming_search import chunk_of
from torch import Tensor

from asr_serve.decoding.wfst.search import MAX_HISTORY_FRAMES, WfstSearch
from asr_serve.decoding.wfst.search_graph import prepare_graph
from asr_serve.errors import OptionError, WeightsCorrupt
from asr_serve.models.checkpoints.openfst_files import make_decoding_graph, read_transducer
from asr_serve.models.decoding_graph import DecodingGraph, GraphSearchOptions
from asr_serve.models.interfaces import NBestHypothesis, SearchToken
from asr_serve.models.ngram import NgramModel

FIXTURE = Path(__file__).parent / "fixtures" / "wfst.safetensors"


class ScoreModel:
    """As much of a model as the search needs: its hidden frames are the scores."""

    heads = ("wfst",)
    vocab_size = COLUMNS

    def graph_scores(self, hidden: Tensor) -> Tensor:
        return hidden


class KaldiCase(NamedTuple):
    graph: DecodingGraph
    scores: np.ndarray
    expected: dict[str, Any]


@pytest.fixture(scope="module")
def kaldi(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[KaldiCase]]:
    folder = tmp_path_factory.mktemp("graphs")
    with safe_open(FIXTURE, "np") as file:
        expected = json.loads(file.metadata()["expected"])
        cases = []
        for i, found in enumerate(expected):
            scores = file.get_tensor(f"{i}.scores")
            (folder / "graph.fst").write_bytes(file.get_tensor(f"{i}.const").tobytes())
            columns = np.arange(-1, scores.shape[1]).clip(0).astype(np.int32)
            cases.append(KaldiCase(make_decoding_graph(read_transducer(folder / "graph.fst"), columns), scores, found))
        return json.loads(file.metadata()["settings"]), cases


def search_of(graph: DecodingGraph, options: GraphSearchOptions, hypotheses: int = 1) -> WfstSearch:
    return WfstSearch(ScoreModel(), prepare_graph(graph), options, hypotheses)  # type: ignore[arg-type]


def run(
    search: WfstSearch, scores: np.ndarray, chunk: int = 7, row: int = 0
) -> tuple[list[SearchToken], list[NBestHypothesis]]:
    """Words fixed on the way, and hypotheses for the rest."""
    fixed: list[SearchToken] = []
    for start in range(0, len(scores), chunk):
        piece = torch.from_numpy(scores[None, start : start + chunk].copy())
        (result,) = search.step(piece, chunk_of([row], [start], [piece.shape[1]]), {})
        fixed += result.fixed_tokens
    return fixed, search.finish(row, {})


@pytest.mark.parametrize("name", ["wide", "beam", "active"])
def test_best_path_is_that_of_kaldi(kaldi, name):
    settings, cases = kaldi
    beam, most, least = settings[name]
    options = GraphSearchOptions(beam, 6.0, 1.0, min(most, 1 << 20), least)
    for case in cases:
        fixed, found = run(search_of(case.graph, options), case.scores)
        words, cost = case.expected[name]
        assert [token.id for token in fixed + found[0].tokens] == words
        assert math.isclose(-found[0].logprob, cost, rel_tol=2e-6)


def test_n_best_list_is_that_of_kaldis_lattice(kaldi):
    for case in kaldi[1]:
        search = search_of(case.graph, GraphSearchOptions(1000.0, 5.0, 1.0, 1 << 20, 0), hypotheses=5)
        fixed, found = run(search, case.scores)
        assert not fixed
        expected = case.expected["list"]
        assert [[token.id for token in each.tokens] for each in found] == [words for words, _ in expected]
        np.testing.assert_allclose([-each.logprob for each in found], [cost for _, cost in expected], rtol=2e-6)


# --- sessions ---------------------------------------------------------------------------------------------

OPTIONS = GraphSearchOptions(8.0, 4.0, 1.0, 50, 5)


def case_of(seed: int = 4, frames: int = 60, **options: Any) -> tuple[DecodingGraph, np.ndarray]:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, states=12, **options)
    return graph, rng.normal(-2, 1.5, (frames, COLUMNS)).astype(np.float32)


def test_rows_without_frames_and_other_sessions_change_nothing():
    graph, scores = case_of(lm=True)
    alone = run(search_of(graph, OPTIONS), scores, chunk=10)
    search = search_of(graph, OPTIONS)
    others = np.random.default_rng(0).normal(-2, 1.5, (3, *scores.shape)).astype(np.float32)
    fixed: list[SearchToken] = []
    for start in range(0, 60, 10):
        batch = torch.from_numpy(np.stack([others[0], scores, others[1], others[2]])[:, start : start + 10].copy())
        results = search.step(batch, chunk_of([3, 1, 9, 0], [start] * 4, [10, 10, 0, 4]), {})
        fixed += results[1].fixed_tokens
        assert results[2] == ([], [], [])
    assert (fixed, search.finish(1, {})) == alone


def test_a_row_is_used_again_by_a_new_session():
    graph, scores = case_of()
    search = search_of(graph, OPTIONS)
    first = run(search, scores)
    assert run(search, scores) == first
    search.free(0)
    assert search.finish(0, {}) == [NBestHypothesis([], 0.0)]


def test_words_stay_open_where_hypotheses_are_listed_and_are_fixed_where_none_are():
    graph, scores = case_of(frames=400)
    fixed, best = run(search_of(graph, OPTIONS), scores)
    assert fixed
    open_words, listed = run(search_of(graph, OPTIONS, hypotheses=8), scores)
    assert not open_words
    assert len(listed) == 8
    assert [token.id for token in listed[0].tokens] == [token.id for token in fixed + best[0].tokens]
    assert listed[0].logprob == best[0].logprob
    assert all(a.logprob >= b.logprob for a, b in itertools.pairwise(listed))


def test_open_words_of_a_long_session_are_bounded():
    graph, _ = case_of()
    search = search_of(graph, OPTIONS, hypotheses=4)
    rng = np.random.default_rng(0)
    fixed = 0
    for start in range(0, 6 * MAX_HISTORY_FRAMES, 256):
        piece = torch.from_numpy(rng.normal(-2, 1.5, (1, 256, COLUMNS)).astype(np.float32))
        (result,) = search.step(piece, chunk_of([0], [start], [256]), {})
        fixed += len(result.fixed_tokens)
        assert len(result.tail_tokens) <= MAX_HISTORY_FRAMES + 20
    assert fixed > len(result.tail_tokens)


def test_links_of_a_session_with_many_likely_words_are_bounded():
    """Every frame is one of many words, each after any other: some 1,600 links a frame."""
    words = 40
    rng = np.random.default_rng(0)
    graph = DecodingGraph(
        np.array([0, words], np.int32),
        np.array([words], np.int32),
        np.arange(words, dtype=np.int32) % COLUMNS,
        np.arange(words, dtype=np.int32),
        np.zeros(words, np.float32),
        np.zeros(words, np.int32),
        np.zeros(1, np.float32),
        np.arange(COLUMNS, dtype=np.int32),
        np.full(COLUMNS, -1, np.int32),
        np.zeros(0, np.int8),
        0,
        NgramModel(
            np.arange(0, (words + 2) * words, words, dtype=np.int64),
            np.tile(np.arange(words, dtype=np.int32), words + 1),
            -rng.uniform(0.5, 3, (words + 1) * words).astype(np.float32),
            np.tile(np.arange(1, words + 1, dtype=np.int32), words + 1),
            np.array([-1] + [0] * words, np.int32),
            np.zeros(words + 1, np.float32),
            np.zeros(words + 1, np.float32),
            0,
        ),
    )
    search = search_of(graph, GraphSearchOptions(30.0, 30.0, 1.0, 7_000, 200), hypotheses=4)
    fixed = 0
    for start in range(0, 350, 50):
        (result,) = search.step(torch.zeros(1, 50, COLUMNS), chunk_of([0], [start], [50]), {})
        fixed += len(result.fixed_tokens)
        assert len(search.export_state(0)[0]) < 4.5e6
    assert fixed > 100


def test_words_have_the_spans_of_their_phones():
    """Words a (labels begin, inside, end) and b (a phone of its own), silence between; words are output late or
    early."""
    silence, begin, inside, end, alone = range(5)
    arcs = [
        [(silence, -1, 0, 0), (begin, -1, 1, 0), (alone, 1, 5, 0)],
        [(begin, -1, 1, 0), (inside, -1, 2, 0)],
        [(inside, -1, 2, 0), (end, -1, 3, 0)],
        [(end, -1, 3, 0), (-1, 0, 4, 0)],
        [(silence, -1, 0, 0)],
        [(alone, -1, 5, 0), (silence, -1, 0, 0)],
    ]
    flat = [arc for row in arcs for arc in row]
    offsets = np.cumsum([0, *map(len, arcs)]).astype(np.int32)
    graph = DecodingGraph(
        offsets,
        offsets[:-1] + np.array([sum(a[0] >= 0 for a in row) for row in arcs], np.int32),
        *(np.array(column, np.int32) for column in list(zip(*flat, strict=True))[:2]),
        np.zeros(len(flat), np.float32),
        np.array([arc[2] for arc in flat], np.int32),
        np.zeros(6, np.float32),
        np.arange(5, dtype=np.int32),
        np.arange(5, dtype=np.int32),
        np.array([0, 1, 3, 2, 4], np.int8),
        0,
    )
    said = [0, 0, 1, 1, 2, 3, 3, 3, 0, 0, 4, 0, 1, 2, 3, 0, 4, 4, 4] + [0] * 24
    scores = np.full((len(said), 5), -20.0, np.float32)
    scores[np.arange(len(said)), said] = 0
    for hypotheses in (1, 3):
        fixed, found = run(search_of(graph, OPTIONS, hypotheses), scores)
        words = [(token.id, token.frame, token.end_frame) for token in fixed + found[0].tokens]
        assert words == [(0, 2, 8), (1, 10, 11), (0, 12, 15), (1, 16, 19)]
        assert bool(fixed) == (hypotheses == 1)


def test_a_saved_session_continues():
    graph, scores = case_of(lm=True)
    whole = run(search_of(graph, OPTIONS), scores, chunk=30)
    search, other = search_of(graph, OPTIONS), search_of(graph, OPTIONS)
    first = search.step(torch.from_numpy(scores[None, :30].copy()), chunk_of([0], [0], [30]), {})
    numbers, tensor = search.export_state(0)
    other.import_state(5, numbers, bytes(tensor.numpy()), 30, torch.device("cpu"))
    second = other.step(torch.from_numpy(scores[None, 30:].copy()), chunk_of([5], [30], [30]), {})
    assert (first[0].fixed_tokens + second[0].fixed_tokens, other.finish(5, {})) == whole
    assert search.export_state(7)[0] == b""
    for wrong, seen in ((numbers, 29), (numbers[:-1], 30), (b"", 30)):
        with pytest.raises(ValueError, match="saved search"):
            other.import_state(6, wrong, b"", seen, torch.device("cpu"))
    other.import_state(6, b"", b"", 0, torch.device("cpu"))


def test_a_saved_session_with_more_frames_than_one_keeps_open_is_refused():
    graph, scores = case_of(frames=1_100)
    search = search_of(graph, OPTIONS, hypotheses=2)
    session = search._native.Session()
    options = (*search._options[:-3], 1 << 30, 1 << 30, 1 << 40)
    search._native.step(search._graph, [session], torch.from_numpy(scores[None]), torch.tensor([1_100]), options, 1)
    with pytest.raises(ValueError, match="keeps open 1101 frames"):
        search.import_state(0, session.export_state(), b"", 1_100, torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"beam": 0.0}, "beam=0"), ({"lattice_beam": math.nan}, "lattice_beam"), ({"max_active": 0}, "max_active=0")],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        search_of(case_of()[0], GraphSearchOptions()._replace(**options))


def test_graphs_that_cannot_be_searched_are_refused():
    graph, _ = case_of()
    loop = graph._replace(arc_labels=np.full_like(graph.arc_labels, -1), epsilon_offsets=graph.arc_offsets[:-1])
    with pytest.raises(WeightsCorrupt, match="loop of arcs that consume nothing"):
        prepare_graph(loop)
    with pytest.raises(WeightsCorrupt, match="no path leads"):
        prepare_graph(graph._replace(final_costs=np.full(graph.states, np.inf, np.float32)))
    model = ScoreModel()
    model.heads, model.vocab_size = ("ctc",), 2  # type: ignore[assignment]
    with pytest.raises(WeightsCorrupt, match="reads 4 tokens"):
        WfstSearch(model, prepare_graph(graph), OPTIONS)  # type: ignore[arg-type]


def test_words_that_the_language_model_lacks_are_not_found():
    graph, scores = case_of(lm=True)
    words = graph.arc_words.copy()
    words[np.flatnonzero(words >= 0)[0]] = 77
    fixed, found = run(search_of(graph._replace(arc_words=words), OPTIONS), scores)
    assert 77 not in [token.id for token in fixed + found[0].tokens]
