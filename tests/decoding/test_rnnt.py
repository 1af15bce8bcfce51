"""Greedy transducer search: many sessions, a chunk at a time, say what each says alone, frame by frame."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tiny_transducer import TinyTransducer, noise, run

from asr_serve.decoding.rnnt import TransducerGreedy
from asr_serve.errors import OptionError
from asr_serve.models.interfaces import NBestHypothesis, SearchToken, StreamingChunk

FIXTURE = Path(__file__).parent / "fixtures" / "rnnt.safetensors"
KINDS = [(), (0, 1, 2, 3, 4), (1, 2), (0, 1), (2, 8)]


@torch.inference_mode()
def frame_by_frame(model: TinyTransducer, hidden: torch.Tensor, max_symbols: int) -> tuple[list[SearchToken], float]:
    """The definition: one session, one frame, one token at a time; and the log-probability of the path."""
    memory = {name: torch.zeros(1, *spec.shape) for name, spec in model.predictor_state_specs().items()}
    predicted, memory = model.predict(torch.tensor([model.blank_id]), memory)
    projected = model.project_encoder(hidden[None])[0]
    said, score, frame, symbols = [], 0.0, 0, 0
    while frame < len(hidden):
        logits = model.joint(projected[frame : frame + 1], predicted)[0]
        tokens = logits[: model.vocab_size].log_softmax(-1)
        token = int(tokens.argmax())
        score += float(tokens[token])
        lasts = 0 if token != model.blank_id else 1
        if model.durations:
            durations = logits[model.vocab_size :].log_softmax(-1)
            lasts = model.durations[int(durations.argmax())]
            score += float(durations.max())
        if token == model.blank_id:
            lasts = max(lasts, 1)
        else:
            said.append(SearchToken(token, frame, float(tokens[token])))
            predicted, memory = model.predict(torch.tensor([token]), memory)
            symbols += 1
            if symbols == max_symbols:
                lasts = max(lasts, 1)
        if lasts:
            frame, symbols = frame + lasts, 0
    return said, score


def same(found: list[SearchToken], expected: list[SearchToken]) -> None:
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in expected], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("durations", KINDS, ids=str)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    chunks=st.lists(st.sampled_from([1, 2, 3, 5, 8, 40]), min_size=1, max_size=3),
    max_symbols=st.sampled_from([1, 2, 5]),
    eager=st.sampled_from([-8.0, -4.0, -1.0, 2.0]),
    layers=st.sampled_from([1, 2]),
    blank=st.sampled_from([0, 8]),
    company=st.integers(1, 6),
    slots=st.integers(1, 6),
    fill=st.integers(0, 2),
    idle=st.sampled_from([0.0, 0.2]),
)
def test_chunks_and_batching_change_nothing(
    durations, seed, lengths, chunks, max_symbols, eager, layers, blank, company, slots, fill, idle
):
    model = TinyTransducer.random(seed, eager=eager, layers=layers, durations=durations, blank=blank)
    sessions = noise(seed + 1, lengths)
    search = TransducerGreedy(model, max_symbols)
    found = run(search, sessions, slots=slots, chunks=chunks, company=company, shuffle=seed, fill=fill, idle=idle)
    for hidden, heard in zip(sessions, found, strict=True):
        expected, score = frame_by_frame(model, hidden, max_symbols)
        same(heard.fixed, expected)
        (guess,) = heard.guesses
        assert guess.tokens == []
        assert guess.logprob == pytest.approx(score, abs=1e-3)
        for partial in heard.partials:
            same(partial.tokens, [token for token in expected if token.frame < partial.frames])
            assert partial.unfixed == 0


def test_what_is_tried_says_several_tokens_at_a_frame_and_skips_past_chunks():
    """The property above would say little of models that do neither."""
    model = TinyTransducer.random(24, eager=-4.0, layers=2)
    said, _ = frame_by_frame(model, noise(1, [200])[0], 5)
    at = [token.frame for token in said]
    assert {at.count(frame) for frame in range(200)} == {0, 1, 2, 3, 4, 5}
    model = TinyTransducer.random(58, eager=-1.0, layers=2, durations=(0, 1, 2, 3, 4))
    said, _ = frame_by_frame(model, noise(1, [200])[0], 5)
    steps = {later.frame - sooner.frame for sooner, later in itertools.pairwise(said)}
    assert {0, 1, 2, 3, 4} <= steps


def test_a_model_without_blanks_emits_max_symbols_at_every_frame():
    model = TinyTransducer.random(5, eager=1e6)
    (heard,) = run(TransducerGreedy(model, 3), noise(6, [7]), chunks=[2, 3])
    assert [token.frame for token in heard.fixed] == [frame for frame in range(7) for _ in range(3)]
    model = TinyTransducer.random(5, eager=1e6, durations=(0,))
    (heard,) = run(TransducerGreedy(model, 3), noise(6, [7]), chunks=[2, 3])
    assert [token.frame for token in heard.fixed] == [frame for frame in range(7) for _ in range(3)]


def test_silence_has_no_tokens_and_blanks_without_duration_end():
    for durations in ((), (0,), (0, 3)):
        model = TinyTransducer.random(5, eager=-1e6, durations=durations)
        (heard,) = run(TransducerGreedy(model), noise(6, [30]), chunks=[4])
        assert heard.fixed == []
        assert heard.guesses[0].logprob > -1e3


def test_state_is_small_and_complete_for_a_new_session():
    search = TransducerGreedy(TinyTransducer.random(1, layers=2))
    specs = search.state_specs()
    assert {name: spec.shape for name, spec in specs.items()} == {
        "begun": (),
        "h": (2, 8),
        "c": (2, 8),
        "predicted": (10,),
        "score": (),
        "skip": (),
    }
    assert [name for name, spec in specs.items() if spec.initial_value is not None] == ["begun"]


def test_the_predictor_runs_once_for_each_token_of_the_longest_session():
    model = TinyTransducer.random(24, eager=-4.0, layers=2)
    search = TransducerGreedy(model)
    sessions = noise(4, [40] * 5)
    model.calls = dict.fromkeys(model.calls, 0)
    state = {name: torch.zeros(6, *spec.shape, dtype=spec.dtype) for name, spec in search.state_specs().items()}
    rows = torch.arange(5)
    chunk = StreamingChunk(torch.zeros(5, 0), rows, torch.zeros_like(rows), torch.full_like(rows, 40), rows)
    found = search.step(torch.stack(sessions), chunk, state)
    assert model.calls["project"] == 1
    assert model.calls["predict"] == max(len(each.fixed_tokens) for each in found) > 0


def test_a_session_without_frames_ends_empty():
    search = TransducerGreedy(TinyTransducer.random(1))
    state = {name: torch.zeros(2, *spec.shape, dtype=spec.dtype) for name, spec in search.state_specs().items()}
    assert search.finish(0, state) == [NBestHypothesis([], 0.0)]


@pytest.mark.parametrize("max_symbols", [0, -1])
def test_max_symbols_is_one_or_more(max_symbols):
    with pytest.raises(OptionError, match="max_symbols"):
        TransducerGreedy(TinyTransducer.random(1), max_symbols)


@pytest.mark.parametrize("kind", ["rnnt", "tdt"])
@pytest.mark.parametrize("chunks", [[1], [3, 7], [100]], ids=str)
def test_tokens_are_those_of_nemo(kind, chunks):
    with safe_open(FIXTURE, "pt") as fixture:
        about = json.loads(fixture.metadata()["about"])
        tensors = {name: fixture.get_tensor(name) for name in fixture.keys()}  # noqa: SIM118
    weights = {name.removeprefix(f"{kind}."): each for name, each in tensors.items() if name.startswith(f"{kind}.")}
    model = TinyTransducer(**about["sizes"], durations=tuple(about[kind]["durations"])).load(weights)
    lengths = about["lengths"]
    sessions = [tensors["encoded"][index, :length] for index, length in enumerate(lengths)]
    found = run(TransducerGreedy(model, about["max_symbols"]), sessions, chunks=chunks, shuffle=1)
    for heard, expected in zip(found, about[kind]["said"], strict=True):
        assert [list(token[:2]) for token in heard.fixed] == expected


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("durations", KINDS, ids=str)
def test_a_cuda_device_has_the_same_tokens(durations):
    sessions = noise(1, [30, 7, 50])
    said = []
    for device in ("cpu", "cuda"):
        model = TinyTransducer.random(24, eager=-4.0, durations=durations).to(device)
        said.append(run(TransducerGreedy(model, 5, device), sessions, chunks=[3, 8], fill=1, device=device))
    for ours, theirs in zip(*said, strict=True):
        same(ours.fixed, theirs.fixed)
