"""The search of decoding graphs: exhaustive search agrees with it, and the native module with the reference."""

from __future__ import annotations

import itertools
import math
import struct
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from case_tiers import exhaustive_after
from decoding.random_graphs import COLUMNS, WORDS, Path, all_paths, random_graph

from asr_serve import kernels
from asr_serve.decoding.wfst.search_graph import SearchGraph, prepare_graph
from asr_serve.kernels import wfst_reference
from asr_serve.models.decoding_graph import DecodingGraph
from asr_serve.models.ngram import NgramModel

INF, NEVER = math.inf, 1 << 30
EXACT = (INF, INF, 1.0, NEVER, 0, NEVER, NEVER, NEVER)
"""Options of a search that drops nothing and fixes nothing."""


def built() -> ModuleType:
    native = kernels.wfst()
    if native is wfst_reference:
        pytest.skip("the native search is not built or not wanted: pip install -e . builds it")
    return native


def native_graph(module: ModuleType, graph: SearchGraph) -> Any:
    fields = graph._asdict()
    model = fields.pop("language_model")
    return module.Graph(**fields, language_model=None if model is None else tuple(model))


def random_case(seed: int, frames: int, **options: Any) -> tuple[DecodingGraph, np.ndarray]:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, lm=seed % 2 == 1, boundaries=seed % 3 == 0, **options)
    return graph, rng.normal(-2, 1.5, (frames, COLUMNS)).astype(np.float32)


def run(
    module: ModuleType,
    graph: SearchGraph,
    scores: np.ndarray,
    options: tuple[Any, ...],
    chunks: list[int],
    most: int,
    risk: tuple[float, bool] = (1.0, False),
) -> tuple[list[Any], list[Any], list[Any]]:
    """Words fixed on the way, tails, and hypotheses."""
    loaded, session = native_graph(module, graph), module.Session()
    fixed: list[Any] = []
    tails: list[Any] = []
    start = 0
    for size in chunks:
        piece = torch.from_numpy(scores[None, start : start + size].copy())
        ((new, tail),) = module.step(loaded, [session], piece, torch.tensor([piece.shape[1]]), options, 1)
        fixed += new
        tails.append(tail)
        start += size
    return fixed, tails, module.finish(loaded, session, options, most, *risk)


def best_by_words(paths: list[Path]) -> dict[tuple[int, ...], float]:
    best: dict[tuple[int, ...], float] = {}
    for path in paths:
        words = tuple(word for word, _ in path.words)
        best[words] = min(best.get(words, INF), path.cost)
    return best


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("module", ["native", "reference"])
def test_hypotheses_are_those_of_an_exhaustive_search(module, lookahead):
    search = built() if module == "native" else wfst_reference
    for seed in range({("native", True): 200, ("native", False): 60}.get((module, lookahead), 20)):
        graph, scores = random_case(seed, 2 + seed % 3)
        prepared = prepare_graph(graph, lookahead=lookahead)
        paths = all_paths(graph, scores)
        _, _, found = run(search, prepared, scores, EXACT, [len(scores)], 10)
        expected = sorted(best_by_words(paths).items(), key=lambda item: item[1])
        costs = [cost for cost, _ in found]
        assert costs == sorted(costs)
        np.testing.assert_allclose(costs, [cost for _, cost in expected[:10]], atol=2e-4)
        for cost, words in found:
            assert math.isclose(best_by_words(paths)[tuple(word for word, *_ in words)], cost, abs_tol=2e-4)
        assert len({tuple(word for word, *_ in words) for _, words in found}) == len(found)


# --- lattices -------------------------------------------------------------------------------------------------


def lattice_of(module: ModuleType, graph: SearchGraph, scores: np.ndarray) -> tuple[list[Any], list[Any]]:
    loaded, session = native_graph(module, graph), module.Session()
    module.step(loaded, [session], torch.from_numpy(scores[None].copy()), torch.tensor([len(scores)]), EXACT, 1)
    arcs, finals, least = module.lattice(loaded, session, EXACT)
    assert least == module.finish(loaded, session, EXACT, 1, 1.0, False)[0][0]
    return arcs, finals


def lattice_paths(lattice: tuple[list[Any], list[Any]], graph_scale: float = 1.0) -> dict[tuple[int, ...], float]:
    """Cost of each word sequence of a lattice, with the graph's part scaled."""
    arcs, finals = lattice
    found: dict[tuple[int, ...], float] = {}
    waiting: list[tuple[int, tuple[int, ...], float]] = [(0, (), 0.0)]
    while waiting:
        state, words, cost = waiting.pop()
        end, graph_end = finals[state]
        if end < INF:
            assert words not in found, "two paths with the same words"
            found[words] = cost + end - (1 - graph_scale) * graph_end
        for source, target, word, more, graph_more, _, _ in arcs:
            if source == state:
                waiting.append((target, (*words, word), cost + more - (1 - graph_scale) * graph_more))
    return found


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("module", ["native", "reference"])
def test_a_lattice_has_each_word_sequence_once_at_its_best_cost(module, lookahead):
    search = built() if module == "native" else wfst_reference
    sizes = []
    for seed in range(200 if module == "native" else 15):
        graph, scores = random_case(seed, 2 + seed % 2)
        expected = best_by_words(all_paths(graph, scores))
        lattice = lattice_of(search, prepare_graph(graph, lookahead=lookahead), scores)
        found, best = lattice_paths(lattice), min(expected.values())
        assert found.keys() == expected.keys()
        for words, cost in found.items():
            assert math.isclose(cost, expected[words] - best, abs_tol=4e-3)
        sizes.append(len(found))
        arcs, finals = lattice
        assert all(0 <= source < target < len(finals) for source, target, *_ in arcs)
        assert all(0 <= start < end <= len(scores) for *_, start, end in arcs)
    assert max(sizes) > 20


@pytest.mark.parametrize("module", ["native", "reference"])
def test_a_lattice_tells_the_costs_of_the_graph_from_the_scores(module):
    """Where all columns of a frame score alike, all paths have the same scores."""
    search = built() if module == "native" else wfst_reference
    for seed in range(60 if module == "native" else 30):
        graph, scores = random_case(seed, 3)
        scores[:] = scores[:, :1]
        lattice = lattice_of(search, prepare_graph(graph), scores)
        whole, scaled = lattice_paths(lattice), lattice_paths(lattice, 0.6)
        base = min(whole, key=whole.__getitem__)
        for words, cost in whole.items():
            assert math.isclose(scaled[words] - scaled[base], 0.6 * (cost - whole[base]), abs_tol=6e-3)


def edit_distance(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a):
        new = [i + 1]
        for j, y in enumerate(b):
            new.append(min(row[j] + (x != y), row[j + 1] + 1, new[-1] + 1))
        row = new
    return row[-1]


def risks(paths: dict[tuple[int, ...], float], candidates: list[tuple[int, ...]]) -> list[float]:
    """Expected edit distance of each candidate, by enumeration."""
    least = min(paths.values())
    weights = [math.exp(least - cost) for cost in paths.values()]
    total = sum(weights)
    return [
        sum(w * edit_distance(words, each) for words, w in zip(paths, weights, strict=True)) / total
        for each in candidates
    ]


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("module", ["native", "reference"])
def test_words_of_minimum_risk_are_those_of_enumeration(module, scale):
    """The recursion bounds the expected edit distance from above; it leads to the least in nine cases of ten."""
    search = built() if module == "native" else wfst_reference
    cases, best, changed = 100 if module == "native" else 20, 0, 0
    for seed in range(cases):
        graph, scores = random_case(seed, 2)
        arcs, finals = lattice = lattice_of(search, prepare_graph(graph), scores)
        paths = lattice_paths(lattice, scale)
        candidates = [each for size in range(3) for each in itertools.product(range(WORDS), repeat=size)]
        likeliest = min(paths, key=paths.__getitem__)
        bound, (confidences,), words = search.minimum_risk(arcs, finals, scale, [likeliest])
        found = tuple(word for word, *_ in words)
        before, after, *every = risks(paths, [likeliest, found, *candidates])
        assert bound >= before - 1e-4
        assert after <= before + 1e-4
        assert len(confidences) == len(likeliest)
        assert all(value <= 0 for value in confidences)
        assert all(first[2] <= second[1] for first, second in itertools.pairwise(words))
        changed += found != likeliest
        best += after <= min(every) + 1e-4 or len(found) > 2
    assert best >= 0.9 * cases
    assert changed or cases < 100


def test_confidences_are_shares_of_the_paths():
    """Of a lattice without alternatives in length: the share of paths that have the word in its place."""
    arcs = [(0, 1, 7, 0.0, 0.0, 0, 3), (0, 1, 8, 1.0, 0.5, 0, 4), (1, 2, 9, 0.0, 0.0, 4, 6), (1, 2, 5, 0.5, 0.0, 4, 8)]
    finals = [(INF, 0.0), (INF, 0.0), (0.0, 0.0)]
    for module in (built(), wfst_reference):
        distance, confidences, words = module.minimum_risk(arcs, finals, 0.8, [[7, 9], [8, 9]])
        first, second = 1 / (1 + math.exp(-0.9)), 1 / (1 + math.exp(-0.5))
        np.testing.assert_allclose(np.exp(confidences), [[first, second], [1 - first, second]], rtol=1e-9)
        assert math.isclose(distance, 2 - first - second, rel_tol=1e-6)
        assert [word[:3] for word in words] == [(7, 0, 3), (9, 4, 6)]
        assert module.minimum_risk(arcs, finals, 0.8, [[8, 5]])[2] == words


def test_lattices_that_are_none_are_refused():
    good = [(0, 1, 7, 0.0, 0.0, 0, 3)]
    for module in (built(), wfst_reference):
        for arcs, finals in (
            ([], []),
            ([], [(0.0, 0.0), (0.0, 0.0)]),
            (good, [(INF, 0.0), (INF, 0.0)]),
            ([(1, 0, *good[0][2:]), *good], [(INF, 0.0), (0.0, 0.0)]),
            ([(0, 1, -1, *good[0][3:])], [(INF, 0.0), (0.0, 0.0)]),
        ):
            with pytest.raises(ValueError, match="lattice"):
                module.minimum_risk(arcs, finals, 1.0, [[7]])
        with pytest.raises(ValueError, match="one at least"):
            module.minimum_risk(good, [(INF, 0.0), (0.0, 0.0)], 1.0, [])


def test_a_lattice_too_large_is_narrowed():
    """Every frame outputs one of many words."""
    words = 40
    graph = DecodingGraph(
        np.array([0, words], np.int32),
        np.array([words], np.int32),
        np.arange(words, dtype=np.int32) % COLUMNS,
        np.arange(words, dtype=np.int32),
        np.linspace(0, 1, words, dtype=np.float32),
        np.zeros(words, np.int32),
        np.zeros(1, np.float32),
        np.arange(COLUMNS, dtype=np.int32),
        np.full(COLUMNS, -1, np.int32),
        np.zeros(0, np.int8),
        0,
        random_ngram_of(words),
    )
    scores = np.zeros((30, COLUMNS), np.float32)
    search = built()
    loaded, session = native_graph(search, prepare_graph(graph)), search.Session()
    options = (30.0, 30.0, 1.0, NEVER, 0, NEVER, NEVER, NEVER)
    search.step(loaded, [session], torch.from_numpy(scores[None].copy()), torch.tensor([30]), options, 1)
    arcs, finals, _ = search.lattice(loaded, session, options)
    assert 30 <= len(arcs) <= 5_000
    assert finals[-1][0] < INF


def random_ngram_of(words: int) -> NgramModel:
    """Bigram model in which every pair of words has a cost of its own."""
    rng = np.random.default_rng(0)
    return NgramModel(
        np.arange(0, (words + 2) * words, words, dtype=np.int64),
        np.tile(np.arange(words, dtype=np.int32), words + 1),
        -rng.uniform(0.5, 3, (words + 1) * words).astype(np.float32),
        np.tile(np.arange(1, words + 1, dtype=np.int32), words + 1),
        np.array([-1] + [0] * words, np.int32),
        np.zeros(words + 1, np.float32),
        np.zeros(words + 1, np.float32),
        0,
    )


# --- ties ---------------------------------------------------------------------------------------------------


def homophones(words: int) -> SearchGraph:
    """Graph in which every two frames are one of `words` words, all as likely."""
    return prepare_graph(
        DecodingGraph(
            np.array([0, words, words + 1], np.int32),
            np.array([words, words + 1], np.int32),
            np.array([0] * words + [1], np.int32),
            np.array([*range(words), -1], np.int32),
            np.array([0.25] * words + [0.5], np.float32),
            np.array([1] * words + [0], np.int32),
            np.full(2, 0.125, np.float32),
            np.array([0, 1], np.int32),
            np.full(2, -1, np.int32),
            np.zeros(0, np.int8),
            0,
            None,
        )
    )


def spoken(words: int) -> np.ndarray:
    scores = np.zeros((2 * words, 2), np.float32)
    scores[::2, 1] = scores[1::2, 0] = -30
    return scores


def tied_options(lattice_beam: float) -> tuple[Any, ...]:
    return (16.0, lattice_beam, 1.0, 7_000, 200, NEVER, NEVER, NEVER)


@pytest.mark.parametrize("minimum_risk", [False, True])
@pytest.mark.parametrize("module", ["native", "reference"])
def test_tied_words_are_listed(module, minimum_risk):
    """There are 4 ** 10 paths, each as good as any."""
    search = built() if module == "native" else wfst_reference
    _, _, found = run(search, homophones(4), spoken(10), tied_options(6.0), [20], 10, (1.0, minimum_risk))
    assert len(found) == len({tuple(word for word, *_ in words) for _, words in found}) == 10
    assert {(cost, len(words)) for cost, words in found} == {(10 * 0.75 + 0.125, 10)}


def test_native_and_reference_list_the_same_of_tied_words():
    for words, risk in ((3, True), (4, False)):
        graph, options = homophones(words), tied_options(6.0)
        ours, theirs = (run(m, graph, spoken(9), options, [18], 7, (0.9, risk)) for m in (built(), wfst_reference))
        assert ours == theirs


def test_a_list_has_the_best_path_although_the_bound_of_its_steps_is_reached(monkeypatch):
    """Of the native search, by a session with more frames than the list may have steps."""
    monkeypatch.setattr(wfst_reference, "MOST_STEPS", 5)
    graph = homophones(1)
    for module, frames in ((built(), 210_000), (wfst_reference, 10)):
        stays = graph._replace(arc_states=np.array([1, 1], np.int32))
        scores = np.full((frames, 2), -30, np.float32)
        scores[0, 0] = scores[1:, 1] = 0
        options = tied_options(6.0)
        _, _, found = run(module, stays, scores, options, [frames], 3)
        assert [word[:3] for word in found[0][1]] == [(0, 0, 1)]
        assert len(found) == 1
        assert math.isclose(found[0][0], 0.25 + 0.5 * (frames - 1) + 0.125, rel_tol=1e-6)


@pytest.mark.parametrize("module", ["native", "reference"])
def test_a_lattice_of_more_tied_paths_than_fit_has_the_best_path(module, monkeypatch):
    monkeypatch.setattr(wfst_reference, "MAX_LATTICE_ARCS", 100)
    search = built() if module == "native" else wfst_reference
    graph, options = homophones(400 if module == "native" else 10), tied_options(6.0)
    loaded, session = native_graph(search, graph), search.Session()
    search.step(loaded, [session], torch.from_numpy(spoken(12)[None]), torch.tensor([24]), options, 1)
    arcs, finals, _ = search.lattice(loaded, session, options)
    assert arcs == [(i, i + 1, 0, 0.0, 0.75 if i else 0.25, 2 * i, 2 * i + 1) for i in range(12)]
    assert finals == [(INF, 0.0)] * 12 + [(0.0, 0.625)]
    found = search.finish(loaded, session, options, 2, 1.0, True)
    assert [word for word, *_ in found[0][1]] == [0] * 12
    assert [logprob for *_, logprob in found[0][1]] == [0.0] * 12


# --- long sessions --------------------------------------------------------------------------------------------

NARROW = (4.0, 2.0, 1.0, 12, 2, 0, 60, NEVER)
OPTIONS = {
    "fixes nothing": (INF, 4.0, 1.0, NEVER, 0, NEVER, NEVER, NEVER),
    "fixes": (INF, 3.0, 1.0, NEVER, 0, 0, NEVER, NEVER),
    "narrow": NARROW,
    "short history": (6.0, 4.0, 0.7, 30, 5, NEVER, 24, NEVER),
    "few links": (6.0, 6.0, 1.0, 30, 5, NEVER, NEVER, 120),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("seed", exhaustive_after(2, range(8)))
def test_native_and_reference_agree_to_the_last_bit(seed, options):
    graph, scores = random_case(seed, 47, states=12)
    prepared = prepare_graph(graph)
    for risk in ((1.0, False), (0.8, True)):
        ours, theirs = (run(m, prepared, scores, options, [13, 1, 33], 5, risk) for m in (built(), wfst_reference))
        assert ours == theirs


@pytest.mark.parametrize("lattice_beam", [0.1, 1.5])
@pytest.mark.parametrize("seed", exhaustive_after(4, range(12)))
def test_native_and_reference_agree_where_few_paths_make_the_beam_wider(seed, lattice_beam):
    graph, scores = random_case(seed, 47, states=60, epsilon=0.02)
    prepared = prepare_graph(graph)
    options = (0.3, lattice_beam, 1.0, NEVER, 3, NEVER, NEVER, NEVER)
    ours, theirs = (run(m, prepared, scores, options, [13, 1, 33], 5) for m in (built(), wfst_reference))
    assert ours == theirs


@pytest.mark.parametrize("seed", exhaustive_after(6, range(16)))
def test_best_path_of_a_long_session_is_that_of_dynamic_programming(seed):
    graph, scores = random_case(seed, 120, states=10)
    options = (INF, 2.0, 1.0, NEVER, 0, seed % 2 * NEVER, NEVER, NEVER)
    fixed, _, found = run(built(), prepare_graph(graph), scores, options, [120], 2)
    cost, words = viterbi(graph, scores)
    assert math.isclose(found[0][0], cost, rel_tol=1e-5)
    if len(found) == 1 or found[1][0] > found[0][0] + 1e-4:
        assert [word for word, *_ in fixed + found[0][1]] == words


def test_words_that_all_paths_share_are_fixed():
    options = (INF, 2.0, 1.0, NEVER, 0, 0, NEVER, NEVER)
    fixed = []
    for seed in range(0, 16, 2):
        graph, scores = random_case(seed, 120, states=10)
        fixed += run(built(), prepare_graph(graph), scores, options, [120], 2)[0]
    assert fixed


def viterbi(graph: DecodingGraph, scores: np.ndarray) -> tuple[float, list[int]]:
    model = graph.language_model
    start = (graph.start_state, 0 if model is None else model.start_state)
    tokens: dict[tuple[int, int], tuple[float, list[int]]] = {start: (0.0, [])}

    def spread(row: np.ndarray | None, found: dict[tuple[int, int], tuple[float, list[int]]]) -> None:
        for state in range(graph.states):
            for context in range(1 if model is None else model.states):
                source = (found if row is None else tokens).get((state, context))
                first, epsilon, end = (
                    graph.arc_offsets[state],
                    graph.epsilon_offsets[state],
                    graph.arc_offsets[state + 1],
                )
                for arc in range(epsilon, end) if row is None else range(first, epsilon):
                    if source is None:
                        break
                    cost, words, after = source[0] + float(graph.arc_costs[arc]), source[1], context
                    if row is not None:
                        cost -= float(row[graph.label_columns[graph.arc_labels[arc]]])
                    if (word := int(graph.arc_words[arc])) >= 0:
                        words = [*words, word]
                        if model is not None:
                            logprob, after = model.step(context, word)
                            cost -= logprob
                    key = int(graph.arc_states[arc]), after
                    if key not in found or cost < found[key][0]:
                        found[key] = cost, words

    spread(None, tokens)
    for row in scores:
        following: dict[tuple[int, int], tuple[float, list[int]]] = {}
        spread(row, following)
        spread(None, following)
        tokens = following
    ends = [
        (cost + float(graph.final_costs[state]) - (float(model.final_logprobs[context]) if model else 0.0), words)
        for (state, context), (cost, words) in tokens.items()
    ]
    best = min(ends)
    return best if best[0] < INF else min(tokens.values())


@pytest.mark.parametrize("module", ["native", "reference"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_results_do_not_depend_on_chunks_or_on_other_sessions(module, options):
    search = built() if module == "native" else wfst_reference
    frames = 90 if module == "native" else 35
    graph, scores = random_case(3, frames, states=12)
    prepared = prepare_graph(graph)
    whole = run(search, prepared, scores, options, [frames], 5, (0.9, True))
    single = run(search, prepared, scores, options, [1] * frames, 5, (0.9, True))
    assert single[0] == whole[0]
    assert single[1][-1] == whole[1][-1]
    assert single[2] == whole[2]
    loaded, sessions = native_graph(search, prepared), [search.Session() for _ in range(5)]
    rng = np.random.default_rng(1)
    batch = rng.normal(-2, 1.5, (5, frames, COLUMNS)).astype(np.float32)
    batch[2] = scores
    fixed: list[Any] = []
    for start in range(0, frames, 8):
        piece = torch.from_numpy(batch[:, start : start + 8].copy())
        found = search.step(loaded, sessions, piece, torch.full((5,), piece.shape[1]), options, 2)
        fixed += found[2][0]
    assert fixed == whole[0]
    assert search.finish(loaded, sessions[2], options, 5, 0.9, True) == whole[2]


def test_history_of_a_long_session_stays_small():
    search = built()
    graph, _ = random_case(5, 1, states=30)
    prepared = prepare_graph(graph)
    rng = np.random.default_rng(0)
    for options in (NARROW, (INF, INF, 1.0, NEVER, 0, NEVER, 50, NEVER)):
        loaded, session = native_graph(search, prepared), search.Session()
        for _ in range(40):
            piece = torch.from_numpy(rng.normal(-2, 1.5, (1, 100, COLUMNS)).astype(np.float32))
            search.step(loaded, [session], piece, torch.tensor([100]), options, 1)
            assert session.history[0] <= options[6] + 10
        assert session.frames == 4_000


@pytest.mark.parametrize("module", ["native", "reference"])
def test_a_saved_session_continues_and_a_damaged_one_is_refused(module):
    search = built() if module == "native" else wfst_reference
    graph, scores = random_case(9, 45, states=12)
    loaded = native_graph(search, prepare_graph(graph))
    whole, first = search.Session(), search.Session()
    pieces = [torch.from_numpy(scores[None, :23].copy()), torch.from_numpy(scores[None, 23:].copy())]
    for piece in pieces:
        search.step(loaded, [whole], piece, torch.tensor([piece.shape[1]]), NARROW, 1)
    search.step(loaded, [first], pieces[0], torch.tensor([23]), NARROW, 1)
    saved = first.export_state()
    second = search.Session()
    second.import_state(loaded, saved)
    assert second.export_state() == saved
    search.step(loaded, [second], pieces[1], torch.tensor([22]), NARROW, 1)
    assert second.export_state() == whole.export_state()
    assert search.finish(loaded, second, NARROW, 5, 0.9, True) == search.finish(loaded, whole, NARROW, 5, 0.9, True)
    rng = np.random.default_rng(0)
    for _ in range(400):
        damaged = bytearray(saved)
        damaged[rng.integers(len(saved))] ^= 1 << rng.integers(8)
        damaged = damaged[: rng.integers(len(saved))] if rng.random() < 0.2 else damaged
        third = search.Session()
        try:
            third.import_state(loaded, bytes(damaged))
        except ValueError:
            continue
        search.step(loaded, [third], pieces[1], torch.tensor([22]), NARROW, 1)
        search.finish(loaded, third, NARROW, 5, 0.9, True)
    with pytest.raises(ValueError, match="saved search"):
        search.Session().import_state(loaded, b"")


@pytest.mark.parametrize("module", ["native", "reference"])
def test_frames_that_no_arc_can_consume_are_skipped(module):
    search = built() if module == "native" else wfst_reference
    graph, scores = random_case(2, 20, states=8)
    prepared = prepare_graph(graph)
    blocked = np.insert(scores, 7, -np.inf, axis=0)
    blocked = np.insert(blocked, 12, np.nan, axis=0)
    plain, skipped = (run(search, prepared, x, EXACT, [len(x)], 3)[2] for x in (scores, blocked))
    assert [[w[0] for w in words] for _, words in plain] == [[w[0] for w in words] for _, words in skipped]
    np.testing.assert_allclose([cost for cost, _ in plain], [cost for cost, _ in skipped], atol=1e-4)


def test_native_and_reference_exchange_saved_sessions():
    native = built()
    graph, scores = random_case(7, 30, states=12)
    prepared = prepare_graph(graph)
    piece = torch.from_numpy(scores[None].copy())
    saved = []
    for module in (native, wfst_reference):
        session = module.Session()
        module.step(native_graph(module, prepared), [session], piece, torch.tensor([30]), NARROW, 1)
        saved.append(session.export_state())
    assert saved[0] == saved[1]
    session = wfst_reference.Session()
    session.import_state(native_graph(wfst_reference, prepared), saved[0])
    assert session.export_state() == saved[0]


# --- damaged sessions -----------------------------------------------------------------------------------------


def chain() -> SearchGraph:
    """States 0 to 3: a frame leads from 0 or 3 to 1, and no frame from 1 to 2 and from 2 to 3."""
    return prepare_graph(
        DecodingGraph(
            np.array([0, 1, 2, 3, 4], np.int32),
            np.array([1, 1, 2, 4], np.int32),
            np.array([0, -1, -1, 0], np.int32),
            np.array([0, -1, -1, 1], np.int32),
            np.zeros(4, np.float32),
            np.array([1, 2, 3, 1], np.int32),
            np.zeros(4, np.float32),
            np.zeros(1, np.int32),
            np.full(1, -1, np.int32),
            np.zeros(0, np.int8),
            0,
            None,
        )
    )


def saved_chain(links: list[tuple[int, int, int, float]], extra: float = 0.0) -> bytes:
    """Session of `chain` after one frame, with the links of that frame: one of the frame, and others of none."""
    tokens = [(1, 0, 0.0), (2, 0, 0.0), (3, 0, 0.0)]
    return b"".join(
        [
            struct.pack("<8qdff", 1, 0, 0, 0, len(tokens), 2, 1 + len(tokens), len(links), 0.0, 16.0, 0.0),
            *(struct.pack("<iif", *token) for token in tokens),
            struct.pack("<6i", 1, 0, 0, len(tokens), 1, len(links) - 1),
            struct.pack("<4f", extra, -1.0, -1.0, -1.0),
            *(struct.pack("<iiif", *link) for link in links),
        ]
    )


@pytest.mark.parametrize("module", ["native", "reference"])
def test_saved_links_out_of_order_are_refused(module):
    search = built() if module == "native" else wfst_reference
    loaded = native_graph(search, chain())
    frame, first, second = (0, 0, 0, 0.0), (0, 1, 1, 0.0), (1, 2, 2, 0.0)
    session = search.Session()
    session.import_state(loaded, saved_chain([frame, first, second]))
    found = search.finish(loaded, session, tied_options(6.0), 3, 0.9, True)
    assert [[word for word, *_ in words] for _, words in found] == [[0]]
    for links in (
        [frame, second, first],
        [frame, first, second, (1, 1, 1, 0.5)],
        [frame, first, second, (2, 0, 2, 0.5)],
    ):
        with pytest.raises(ValueError, match="saved search"):
            search.Session().import_state(loaded, saved_chain(links))


@pytest.mark.parametrize("extra", [INF, -INF, math.nan, -0.5])
@pytest.mark.parametrize("module", ["native", "reference"])
def test_saved_nodes_out_of_range_are_refused(module, extra):
    search = built() if module == "native" else wfst_reference
    links = [(0, 0, 0, 0.0), (0, 1, 1, 0.0), (1, 2, 2, 0.0)]
    with pytest.raises(ValueError, match="a node of a saved search"):
        search.Session().import_state(native_graph(search, chain()), saved_chain(links, extra))


@pytest.mark.parametrize("module", ["native", "reference"])
def test_saved_nodes_that_no_path_seems_to_pass_keep_the_best_path(module):
    """What nodes cost is not computed anew before a level at which it is as saved."""
    search = built() if module == "native" else wfst_reference
    loaded, session = native_graph(search, homophones(1)), search.Session()
    search.step(loaded, [session], torch.from_numpy(spoken(2)[None]), torch.tensor([4]), tied_options(6.0), 1)
    saved = bytearray(session.export_state())
    levels, nodes = struct.unpack_from("<8q", saved)[5:7]
    assert (levels, nodes) == (5, 5)
    struct.pack_into("<5f", saved, 80 + 12 + 12 * levels, 0.0, 1e30, 0.0, 0.0, -1.0)
    session.import_state(loaded, bytes(saved))
    ((cost, words),) = search.finish(loaded, session, tied_options(6.0), 2, 1.0, True)
    assert (cost, words) == (1.625, [(0, 0, 1, 0.0), (0, 2, 3, 0.0)])
