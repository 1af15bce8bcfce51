"""CTC searches: against the definition, against other people's searches, and chunk by chunk as all at once."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from streaming_search import PosteriorModel, chunk_of, posteriors, run_search, state_of
from torch import Tensor

from asr_serve import devices, kernels
from asr_serve.decoding.ctc import CtcBeamOptions, CtcGreedy, CtcPrefixBeam
from asr_serve.decoding.ctc_batched import LENGTH, BatchedCtcPrefixBeam
from asr_serve.decoding.language_model.kneser_ney import train
from asr_serve.decoding.language_model.ngram_scorer import NgramScorer
from asr_serve.decoding.language_model.scorer import LanguageModelFusion
from asr_serve.errors import OptionError
from asr_serve.kernels import ctc_search_reference
from asr_serve.types import NBestHypothesis, SearchToken

FIXTURE = Path(__file__).parent / "fixtures" / "ctc.safetensors"
EVERYTHING: dict[str, Any] = {"tokens": 1_000, "min_logprob": -math.inf, "max_gap": math.inf, "nodes": 60_000}
KINDS = ["greedy", "native", "reference", "batched"]
CPU = devices.make_device("cpu", "fp32")


def search_of(kind: str, vocab: int, blank: int = 0, **options: Any) -> Any:
    if kind == "greedy":
        return CtcGreedy(PosteriorModel(vocab, blank))
    if kind == "batched":
        tail = min(max(2, options.pop("nodes", 64)), 64)
        return BatchedCtcPrefixBeam(PosteriorModel(vocab, blank), CPU, CtcBeamOptions(**options), tail=tail)
    search = CtcPrefixBeam(PosteriorModel(vocab, blank), **options)
    if kind == "reference":
        search._native = ctc_search_reference
    elif search._native is ctc_search_reference:
        pytest.skip("the native search is not built or not wanted: pip install -e . builds it")
    return search


@pytest.fixture(params=["native", "reference", "batched"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def renew(search: Any, state: dict[str, Tensor], row: int) -> None:
    for name, spec in search.state_specs().items():
        if spec.initial_value is not None:
            state[name][row] = spec.initial_value


def ids(tokens: list[SearchToken]) -> list[int]:
    return [token.id for token in tokens]


def collapsed(path: tuple[int, ...], blank: int) -> tuple[int, ...]:
    return tuple(s for s, _ in itertools.groupby(path) if s != blank)


# --- the definition -------------------------------------------------------------------------------


@pytest.mark.parametrize("blank", [0, 4])
@pytest.mark.parametrize("seed", range(5))
def test_greedy_is_the_best_path(seed: int, blank: int) -> None:
    logprobs = posteriors(seed, 60, 5)
    fixed, tail, best = run_search(search_of("greedy", 5, blank), logprobs)
    symbols = logprobs.argmax(-1).tolist()
    new = [f for f, s in enumerate(symbols) if s != blank and (f == 0 or symbols[f - 1] != s)]
    assert fixed == [SearchToken(symbols[f], f, float(logprobs[f, symbols[f]])) for f in new]
    assert tail == []
    assert [guess.tokens for guess in best] == [[]]
    assert best[0].logprob == pytest.approx(float(logprobs.max(-1).values.double().sum()), abs=1e-9)


@pytest.mark.parametrize(("vocab", "frames", "blank"), [(3, 8, 0), (4, 6, 3), (3, 7, 1), (2, 9, 0)])
def test_an_unpruned_beam_holds_every_text(kind: str, vocab: int, frames: int, blank: int) -> None:
    """Summed over all alignments, by brute force."""
    logprobs = posteriors(vocab * frames, frames, vocab, sharp=1.0)
    sums: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(vocab), repeat=frames):
        text = collapsed(path, blank)
        said = math.exp(sum(float(logprobs[f, s]) for f, s in enumerate(path)))
        sums[text] = sums.get(text, 0.0) + said
    search = search_of(kind, vocab, blank, beam=256, **EVERYTHING)
    fixed, tail, best = run_search(search, logprobs)
    assert fixed == [], "silence is still possible, so nothing is for ever"
    found = {tuple(ids(guess.tokens)): math.exp(guess.logprob) for guess in best}
    likeliest = sorted(sums, key=lambda text: -sums[text])[:256]
    if len(sums) <= 256:
        assert found == pytest.approx(sums, rel=1e-6)
    assert [tuple(ids(guess.tokens)) for guess in best[:20]] == likeliest[:20]
    assert tuple(ids(tail)) == likeliest[0]
    assert all(found[text] == pytest.approx(sums[text], rel=1e-6) for text in likeliest[:20])


@pytest.mark.parametrize("seed", range(4))
def test_no_text_is_likelier_than_its_exact_sum(kind: str, seed: int) -> None:
    """A narrow beam loses alignments, never adds any."""
    logprobs = posteriors(seed, 30, 8, sharp=1.5)
    fixed, _, best = run_search(search_of(kind, 8, beam=8), logprobs)
    for guess in best:
        assert guess.logprob <= exact_logprob(logprobs, ids(fixed + guess.tokens)) + 1e-4
    assert guess.logprob <= best[0].logprob


def exact_logprob(logprobs: Tensor, tokens: list[int]) -> float:
    """Log-probability of a text, over all its alignments; blank is 0."""
    loss = torch.nn.functional.ctc_loss(
        logprobs[:, None], torch.tensor([tokens]), [len(logprobs)], [len(tokens)], reduction="sum"
    )
    return -float(loss)


# --- other people's searches ----------------------------------------------------------------------


def clips() -> list[Any]:
    with safe_open(FIXTURE, "pt") as file:
        about, logprobs = file.metadata(), file.get_tensor("logprobs")
    clear = json.loads(about["clear"])
    said = json.loads(about["said"])
    return [pytest.param(c, said[i], i in clear, id=f"clip{i}") for i, c in enumerate(logprobs)]


@pytest.mark.parametrize(("logprobs", "said", "clear"), clips())
def test_the_n_best_list_is_that_of_wenet(kind: str, logprobs: Tensor, said: dict[str, Any], clear: bool) -> None:
    expect_wenet(search_of(kind, 12, beam=12, **EVERYTHING), logprobs, said["wenet"])


def expect_wenet(search: Any, logprobs: Tensor, expected: list[dict[str, Any]]) -> None:
    fixed, _, best = run_search(search, logprobs)
    assert [ids(fixed + guess.tokens) for guess in best] == [each["tokens"] for each in expected]
    assert [guess.logprob for guess in best] == pytest.approx([e["logprob"] for e in expected], abs=1e-5)


def test_entries_that_return_to_the_beam_are_those_of_wenet(kind: str) -> None:
    with safe_open(FIXTURE, "pt") as file:
        expected, few = json.loads(file.metadata()["few"]), file.get_tensor("few")
    for logprobs, answer in zip(few, expected, strict=True):
        expect_wenet(search_of(kind, 3, beam=4, **EVERYTHING), logprobs, answer)


@pytest.mark.parametrize(("logprobs", "said", "clear"), clips())
@pytest.mark.parametrize("other", ["pyctcdecode", "flashlight", "fast_ctc_decode"])
def test_other_searches_find_no_likelier_text(logprobs: Tensor, said: dict[str, Any], clear: bool, other: str) -> None:
    """Other searches cut other entries; in the end the exact probability decides."""
    fixed, tail, _ = run_search(search_of("native", 12, beam=256, **EVERYTHING), logprobs)
    ours, theirs = ids(fixed + tail), said[other]["tokens"]
    assert ours == theirs or exact_logprob(logprobs, ours) > exact_logprob(logprobs, theirs)
    assert ours == theirs or not clear


@pytest.mark.parametrize(("logprobs", "said", "clear"), clips())
def test_token_frames_are_those_of_the_best_alignment(
    kind: str, logprobs: Tensor, said: dict[str, Any], clear: bool
) -> None:
    """flashlight's alignment gives the first frame of a run; the peak may come a frame later."""
    fixed, tail, _ = run_search(search_of(kind, 12, beam=12, **EVERYTHING), logprobs)
    ours = fixed + tail
    assert all(token.logprob == float(logprobs[token.frame, token.id]) for token in ours if clear)
    if ids(ours) == said["flashlight"]["tokens"]:
        off = [token.frame - frame for token, frame in zip(ours, said["flashlight"]["frames"], strict=True)]
        assert set(off) <= ({0} if clear else {-1, 0, 1})
    else:
        assert not clear


# --- chunk by chunk -------------------------------------------------------------------------------


def expect_equal(kind: str, result: Any, expected: Any) -> None:
    """Bit for bit, but for the batched search: torch's logarithms differ in the last bit by their place in a tensor."""
    if kind != "batched":
        assert result == expected
        return
    assert result[:2] == expected[:2]
    assert [guess.tokens for guess in result[2]] == [guess.tokens for guess in expected[2]]
    assert [guess.logprob for guess in result[2]] == pytest.approx([guess.logprob for guess in expected[2]], abs=1e-9)


@pytest.mark.parametrize("which", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_batching_and_chunks_change_nothing(which: str, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**31))
    options = {
        "beam": data.draw(st.sampled_from([1, 3, 8])),
        "nodes": data.draw(st.sampled_from([2, 9, 100])),
        "max_gap": data.draw(st.sampled_from([3.0, math.inf])),
    }
    search, sharp = search_of(which, 6, 5, **options), data.draw(st.sampled_from([0.3, 2.0, 6.0]))
    lengths = data.draw(st.lists(st.integers(1, 25), min_size=1, max_size=5))
    audio = [posteriors(seed + i, length, 6, sharp=sharp) for i, length in enumerate(lengths)]
    alone = [run_search(search, logprobs) for logprobs in audio]

    slots = 3
    state, free = state_of(search, slots), list(range(slots))
    waiting, online, at = list(range(len(audio))), {}, [0] * len(audio)
    fixed: list[list[SearchToken]] = [[] for _ in audio]
    while waiting or online:
        while waiting and free and not (online and data.draw(st.booleans())):
            online[waiting.pop()] = row = free.pop()
            renew(search, state, row)
        width = data.draw(st.sampled_from([25, 1, 2, 5, 9]))
        moving = [s for s in online if not data.draw(st.booleans())]
        fillers = data.draw(st.integers(0, 2))
        counts = [min(width, lengths[s] - at[s]) for s in moving]
        hidden = torch.full((len(moving) + fillers, width, 6), math.nan)
        for i, (s, count) in enumerate(zip(moving, counts, strict=True)):
            hidden[i, :count] = audio[s][at[s] : at[s] + count]
        rows = [online[s] for s in moving] + [slots] * fillers
        seen = [at[s] for s in moving] + [0] * fillers
        found = search.step(hidden, chunk_of(rows, seen, counts + [0] * fillers), state)
        assert len(found) == len(rows)
        for s, count, came in zip(moving, counts, found, strict=False):
            fixed[s] += came.fixed_tokens
            at[s] += count
            if at[s] == lengths[s]:
                expect_equal(which, (fixed[s], came.tail_tokens, search.finish(online[s], state)), alone[s])
                free.append(online.pop(s))


@pytest.mark.parametrize("which", KINDS)
def test_a_saved_row_resumes_bit_for_bit(which: str) -> None:
    logprobs = posteriors(3, 40, 9)
    search = search_of(which, 9, beam=6, nodes=20)
    first = state_of(search, 2)
    search.step(logprobs[None, :17], chunk_of([0], [0], [17]), first)
    second = state_of(search, 3, poison=-5)
    for name in first:
        saved = first[name][0].numpy().tobytes()
        second[name][2] = torch.frombuffer(bytearray(saved), dtype=first[name].dtype).view(first[name][0].shape)
    rest = [
        search.step(logprobs[None, 17:], chunk_of([row], [17], [23]), state) for row, state in ((0, first), (2, second))
    ]
    assert rest[0] == rest[1]
    assert rest[0][0].fixed_tokens
    assert search.finish(0, first) == search.finish(2, second)
    assert all(first[name][0].numpy().tobytes() == second[name][2].numpy().tobytes() for name in first)


@pytest.mark.parametrize("which", KINDS)
def test_a_token_across_a_chunk_edge_is_emitted_once(which: str) -> None:
    heard = torch.full((8, 3), 0.005)
    for frame, symbol in enumerate([0, 1, 1, 1, 0, 1, 2, 2]):
        heard[frame, symbol] = 0.99
    for widths in ([8], [2, 6], [3, 3, 2], [1] * 8):
        fixed, tail, _ = run_search(search_of(which, 3), heard.log(), widths)
        assert ids(fixed + tail) == [1, 1, 2]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_batched_search_is_the_native_one(data: st.DataObject) -> None:
    """The same hypotheses, scores, fixed tokens and frames, many sessions of different lengths at once."""
    vocab, blank = data.draw(st.sampled_from([(3, 0), (6, 5), (40, 7)]))
    options = {
        "beam": data.draw(st.sampled_from([1, 2, 5, 16])),
        "tokens": data.draw(st.sampled_from([1, 4, 16])),
        "min_logprob": data.draw(st.sampled_from([-8.0, -2.0, -math.inf])),
        "max_gap": data.draw(st.sampled_from([3.0, 12.0, math.inf])),
    }
    seed, sharp = data.draw(st.integers(0, 2**31)), data.draw(st.sampled_from([0.3, 2.0, 6.0]))
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=6))
    logprobs = posteriors(seed, len(lengths), max(lengths), vocab, sharp=sharp)
    batched = search_of("batched", vocab, blank, **options)
    native = search_of("native", vocab, blank, **options, nodes=4_096)
    state, rows = state_of(batched, len(lengths)), list(range(len(lengths)))
    found = batched.step(logprobs, chunk_of(rows, [0] * len(rows), lengths), state)
    for row, length in enumerate(lengths):
        expected = run_search(native, logprobs[row, :length])
        expect_equal("batched", (found[row].fixed_tokens, found[row].tail_tokens, batched.finish(row, state)), expected)


def scorer_of(vocab: int, seed: int, order: int = 3) -> NgramScorer:
    """N-gram model of random texts over the tokens from 1 on, and one that never comes."""
    drawn = random.Random(seed)
    texts = [[str(drawn.randrange(1, vocab)) for _ in range(drawn.randint(0, 6))] for _ in range(12)]
    ngrams = train(texts, order, vocabulary=[str(token) for token in range(1, vocab)]).to_model()
    return NgramScorer(ngrams.reindexed({str(token): token for token in range(1, vocab)}))


def fused_search_of(kind: str, vocab: int, bonus: float, **options: Any) -> Any:
    if kind != "batched":
        return search_of(kind, vocab, fuses=True, token_bonus=bonus, **options)
    options.pop("nodes", None)
    return BatchedCtcPrefixBeam(PosteriorModel(vocab), CPU, CtcBeamOptions(**options), fuses=True, token_bonus=bonus)


@pytest.mark.parametrize(
    ("vocab", "frames", "weight", "bonus"), [(3, 6, 0.7, 0.0), (3, 7, 1.5, 0.4), (4, 5, 0.3, -0.2)]
)
def test_a_language_model_ranks_every_text(kind: str, vocab: int, frames: int, weight: float, bonus: float) -> None:
    """By brute force: the sum over alignments, times the language model's probability to the power of its weight."""
    logprobs, scorer = posteriors(frames, frames, vocab, sharp=1.0), scorer_of(vocab, frames)
    acoustic: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(vocab), repeat=frames):
        text = collapsed(path, 0)
        acoustic[text] = acoustic.get(text, 0.0) + math.exp(sum(float(logprobs[f, s]) for f, s in enumerate(path)))

    def language(text: tuple[int, ...]) -> float:
        logprob, state = 0.0, scorer.initial_state
        for token in text:
            more, state = scorer.model.step(state, token)
            logprob += weight * more + bonus
        return logprob + weight * float(scorer.model.final_logprobs[state])

    search = fused_search_of(kind, vocab, bonus, beam=256, **EVERYTHING)
    fusion = LanguageModelFusion(scorer, weight)
    _, _, best = run_search(search, logprobs, [2] * (frames // 2) + [1] * (frames % 2), fusion=fusion)
    found = {tuple(ids(guess.tokens)): guess for guess in best}
    expected = sorted(acoustic, key=lambda text: -(math.log(acoustic[text]) + language(text)))
    assert len(found) == min(256, len(acoustic))
    assert [tuple(ids(guess.tokens)) for guess in best[:20]] == expected[:20]
    for text in expected[:20]:
        assert found[text].logprob == pytest.approx(math.log(acoustic[text]), abs=1e-6)
        assert found[text].gain == pytest.approx(language(text), abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([3, 7, 40]),
    order=st.integers(1, 4),
    weight=st.sampled_from([0.0, 0.4, 2.0]),
    bonus=st.sampled_from([0.0, 1.5]),
    widths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
)
def test_all_searches_fuse_a_language_model_alike(
    seed: int, vocab: int, order: int, weight: float, bonus: float, widths: list[int]
) -> None:
    scorer, logprobs = scorer_of(vocab, seed, order), posteriors(seed, sum(widths), vocab)
    results = [
        run_search(
            fused_search_of(kind, vocab, bonus, beam=5, tokens=6, nodes=300),
            logprobs,
            widths,
            fusion=LanguageModelFusion(scorer, weight),
        )
        for kind in ("native", "reference", "batched")
    ]
    assert results[0] == results[1]
    expect_equal("batched", results[2], results[0])


# --- the beam's promises --------------------------------------------------------------------------


def test_token_frames_increase_and_are_in_the_past(kind: str) -> None:
    for seed, nodes in itertools.product(range(12), (3, 400)):
        logprobs = posteriors(seed, 30, 5, sharp=(0.3, 1.0, 3.0)[seed % 3])
        fixed, _, best = run_search(search_of(kind, 5, beam=8, nodes=nodes), logprobs, [3] * 10)
        for guess in best:
            frames = [token.frame for token in fixed + guess.tokens]
            assert frames == sorted(set(frames))
            assert all(0 <= frame < 30 for frame in frames)


def test_a_token_has_the_frame_of_its_peak(kind: str) -> None:
    said = torch.tensor([0.1, 0.3, 0.9, 0.99, 0.4, 0.05])
    heard = torch.stack([1 - said, said * 0.98, said * 0.02], 1)
    fixed, tail, _ = run_search(search_of(kind, 3), heard.log())
    assert [(token.id, token.frame) for token in fixed + tail] == [(1, 3)]


def unfixed_tokens(state: dict[str, Tensor]) -> int:
    """Tokens that the session in row 0 stores: nodes of its tree, or the batched search's longest tail."""
    return int(state["ctc_counts"][0, 1] if "ctc_counts" in state else state["ctc_numbers"][0, LENGTH].max())


def test_common_prefixes_are_fixed_and_leave_the_state(kind: str) -> None:
    """Silence of 20 frames after each word: rivals fall behind, and the tree stays small."""
    heard = torch.full((200, 4), 0.001)
    heard[:, 0] = 0.997
    heard[::20] = torch.tensor([0.001, 0.59, 0.4, 0.009])
    search = search_of(kind, 4, beam=4, max_gap=3.0)
    state, fixed = state_of(search, 1), []
    for at in range(0, 200, 4):
        [found] = search.step(heard[None, at : at + 4].log(), chunk_of([0], [at], [4]), state)
        fixed += found.fixed_tokens
        assert unfixed_tokens(state) <= 12
    assert len(fixed) >= 6
    assert [token.frame for token in fixed] == [20 * i for i in range(len(fixed))]


@pytest.mark.parametrize("nodes", [1, 5, 16])
def test_a_full_tree_fixes_the_best_entry(kind: str, nodes: int) -> None:
    """Two readings of every word, nearly as likely: without a limit nothing would ever be fixed."""
    heard = torch.full((80, 4), 1e-6)
    heard[:, 0] = 1.0
    heard[::4] = torch.tensor([1e-6, 0.501, 0.499, 1e-6])
    roomy = search_of(kind, 4, beam=8, max_gap=math.inf)
    assert len(run_search(roomy, heard.log())[0]) < 20
    search = search_of(kind, 4, beam=8, nodes=nodes, max_gap=math.inf)
    state, fixed, tail = state_of(search, 1), [], []
    for at in range(80):
        [found] = search.step(heard[None, at : at + 1].log(), chunk_of([0], [at], [1]), state)
        fixed, tail = fixed + found.fixed_tokens, found.tail_tokens
        assert len(tail) <= unfixed_tokens(state) <= max(nodes, 2 if kind == "batched" else 1)
        guesses = search.finish(0, state)
        assert guesses[0].tokens == tail
        assert all(a.logprob >= b.logprob for a, b in itertools.pairwise(guesses))
    assert ids(fixed + tail) == [1] * 20
    assert len(guesses) > 1 or nodes == 1, "entries that begin as the best one does were kept"


def test_equal_entries_keep_their_order(kind: str) -> None:
    flat = torch.full((3, 4), -math.log(4.0))
    _, tail, best = run_search(search_of(kind, 4, beam=3, **EVERYTHING), flat)
    again = run_search(search_of(kind, 4, beam=3, **EVERYTHING), flat, [1, 1, 1])
    assert (tail, best) == again[1:]
    assert ids(tail) == [1]
    only = run_search(search_of(kind, 4, beam=3, **EVERYTHING), flat[:1])[2]
    assert [ids(guess.tokens) for guess in only] == [[], [1], [2]]


def test_impossible_frames_are_skipped(kind: str) -> None:
    logprobs = posteriors(5, 12, 5)
    broken = torch.cat([logprobs[:6], torch.full((2, 5), -math.inf), torch.full((1, 5), math.nan), logprobs[6:]])
    search = search_of(kind, 5)
    fixed, tail, best = run_search(search, broken)
    expected, rest, list_ = run_search(search, logprobs)
    assert ids(fixed + tail) == ids(expected + rest)
    assert [guess.logprob for guess in best] == [guess.logprob for guess in list_]


@pytest.mark.parametrize("which", KINDS)
def test_a_session_without_frames_is_empty(which: str) -> None:
    search = search_of(which, 5)
    assert search.finish(0, state_of(search, 1)) == [NBestHypothesis([], 0.0)]
    assert run_search(search, torch.zeros(0, 5)) == ([], [], [NBestHypothesis([], 0.0)])


def test_pruned_tokens_open_no_entries(kind: str) -> None:
    heard = torch.tensor([[0.5, 0.45, 0.05], [0.9, 0.04, 0.06], [0.5, 0.45, 0.05]]).log()
    wide = run_search(search_of(kind, 3, **EVERYTHING), heard)[2]
    narrow = run_search(search_of(kind, 3, min_logprob=math.log(0.1)), heard)[2]
    assert all(2 not in ids(guess.tokens) for guess in narrow)
    scores = {tuple(ids(guess.tokens)): guess.logprob for guess in wide}
    assert {tuple(ids(guess.tokens)) for guess in narrow} == {(), (1,), (1, 1)}
    for guess in narrow:
        assert guess.logprob == pytest.approx(scores[tuple(ids(guess.tokens))], abs=1e-9)
    single = run_search(search_of(kind, 3, **EVERYTHING | {"tokens": 1}), heard[:1])[2]
    assert [ids(guess.tokens) for guess in single] == [[], [1]]


WRONG = [("beam", 0), ("beam", 257), ("tokens", 0), ("nodes", 0), ("nodes", 1 << 17)]
WRONG += [("min_logprob", math.nan), ("max_gap", -1.0), ("max_gap", math.nan)]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_options_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(OptionError) as refused:
        CtcPrefixBeam(PosteriorModel(5), **{name: value})
    assert refused.value.param == name


@pytest.mark.parametrize("kind", ["native", "reference"])
def test_non_contiguous_posteriors_are_refused(kind: str) -> None:
    search = search_of(kind, 5)
    with pytest.raises(TypeError):
        search.step(posteriors(1, 1, 4, 10)[:, :, ::2], chunk_of([0], [0], [4]), state_of(search, 1))


def test_the_native_search_is_used_where_it_was_built() -> None:
    assert CtcPrefixBeam(PosteriorModel(5))._native is kernels.search()
