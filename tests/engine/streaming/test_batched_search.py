"""An engine that searches CTC on the model's device gives what the native search gives: tokens, times, n-best lists,
with hotwords, language models and rescoring of each session."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from recording_device import RecordingDevice
from tiny_streaming import clips, model
from torch import Tensor

from asr_serve import devices
from asr_serve.config import EngineConfig
from asr_serve.decoding.attention_rescoring import AttentionRescoringSearch
from asr_serve.decoding.biasing_list import StreamingBiasingList
from asr_serve.decoding.ctc import CtcGreedy, CtcPrefixBeam
from asr_serve.decoding.ctc_batched import LANGUAGE_STATE, LENGTH, BatchedCtcPrefixBeam
from asr_serve.decoding.language_model.kneser_ney import train
from asr_serve.decoding.language_model.ngram_scorer import NgramScorer
from asr_serve.decoding.language_model.token_models import TokenLanguageModel
from asr_serve.devices.interface import Device
from asr_serve.engine.builder import build_chunked
from asr_serve.engine.executor import EngineComponents
from asr_serve.engine.streaming.model_runner import ChunkedModelRunner
from asr_serve.engine.streaming.search_router import BiasingSearchRouter
from asr_serve.models.registry import asr_card
from asr_serve.types import NBestHypothesis, SearchToken

CARDS = {"fastconformer 8,1": "fastconformer-streaming-medium-en", "u2pp 2": "u2pp-librispeech-en"}
ROUNDS = 3


class Told:
    """What a session was told."""

    def __init__(self) -> None:
        self.fixed: list[SearchToken] = []
        self.tails: list[list[SearchToken]] = []
        self.hypotheses: list[NBestHypothesis] = []
        self.runs: list[tuple[int, int]] = []

    @property
    def places(self) -> Any:
        """Tokens and times, in all hypotheses."""
        tokens = [self.fixed, *self.tails, *(each.tokens for each in self.hypotheses)]
        return [[(token.id, token.frame) for token in each] for each in tokens], self.runs

    @property
    def numbers(self) -> list[float]:
        tokens = [token for each in (self.fixed, *self.tails) for token in each]
        sums = [number for each in self.hypotheses for number in (each.logprob, each.gain)]
        return [*(token.logprob for token in tokens), *sums]


def options_of(vocab: int) -> dict[str, dict[str, Any]]:
    """Options of sessions, by name."""

    def encode(text: str) -> list[int]:
        return [ord(letter) % (vocab - 1) + 1 for letter in text.lower()]

    words = [StreamingBiasingList(text, encode, str, vocab) for text in ("ab\t10\nba\t10", "cd\t30\ndec\t3")]
    texts = [[str(token % vocab) for token in range(start, start + 9)] for start in range(20)]
    ngrams = train(texts, 3).to_model().for_tokens([str(token) for token in range(vocab)])
    loaded = TokenLanguageModel(NgramScorer(ngrams), b"contents")
    return {
        "plain": {},
        "times": {"words": True},
        "hotwords": {"biasing": words[0], "words": True},
        "other hotwords": {"biasing": words[1]},
        "language model": {"language_model": loaded.with_weight(0.4)},
        "both": {"biasing": words[0], "language_model": loaded.with_weight(0.8)},
    }


def runner(name: str, beam: int, device: Device, *, batched: bool | None) -> ChunkedModelRunner:
    network, card = model(name), asr_card(CARDS[name])
    parts = EngineComponents(network, None, device, str, language_models={"any": None})  # type: ignore[dict-item]
    frames = 2 * network.frame_block
    config = EngineConfig(head="ctc", beam=beam, max_sessions=8, use_chunked_inference=True, chunk_frames=frames)
    return build_chunked(
        network, card, parts, config, batched_search=batched, graphs=False, poison=device.torch_device.type == "cpu"
    )


def hear(there: ChunkedModelRunner, options: dict[str, dict[str, Any]]) -> dict[str, Told]:
    """All sessions at once, each with its own clip; a piece of it in each round."""
    told = {name: Told() for name in options}
    sessions = {there.open_session(**more): name for name, more in options.items()}
    heard = dict(zip(options, clips(5, len(options) + 1)[:1] + clips(5, len(options) + 1)[2:], strict=True))
    for part in range(ROUNDS):
        for session, name in sessions.items():
            samples = len(heard[name]) // ROUNDS + 1
            there.append_audio(session, heard[name][part * samples : (part + 1) * samples], 0.0)
            if part == ROUNDS - 1:
                there.finish_audio(session, 0.0)
        while ready := there.schedule(1e9):
            for session, found in there.step(ready, 0.0):
                told[sessions[session]].fixed += found.fixed_tokens
                told[sessions[session]].tails.append(found.tail_tokens)
    for session, name in sessions.items():
        assert session.finished
        told[name].hypotheses = session.hypotheses
        told[name].runs = list(session.aligner.token_runs()) if session.aligner is not None else []
        there.close_session(session)
    return told


@pytest.mark.parametrize(
    ("name", "beam", "records"),
    [
        ("fastconformer 8,1", 4, False),
        pytest.param("fastconformer 8,1", 4, True, marks=pytest.mark.slow),
        ("u2pp 2", 3, False),
        ("u2pp 2", 1, False),
    ],
)
def test_the_batched_search_gives_what_the_native_one_gives(name: str, beam: int, records: bool) -> None:
    options = options_of(model(name).vocab_size)
    device = RecordingDevice() if records else model(name).device
    expected = hear(runner(name, beam, model(name).device, batched=False), options)
    found = hear(runner(name, beam, device, batched=True), options)
    for case in options:
        assert found[case].places == expected[case].places, case
        assert found[case].numbers == pytest.approx(expected[case].numbers, abs=1e-5), case
        assert len(found[case].hypotheses) > 1 or (beam == 1 and case in ("plain", "times")), "one hypothesis only"
    assert any(each.runs for each in found.values())
    assert found["hotwords"].places != found["both"].places != found["language model"].places
    if isinstance(device, RecordingDevice):
        assert sum(len(each.graphs) for each in device.recordings) >= 4  # plain, hotwords, language model, both


@pytest.mark.parametrize("biased", [False, True])
def test_a_corrupt_snapshot_is_refused_and_others_go_on(biased: bool) -> None:
    """A step has the rows of many sessions: one that cannot be never gets there."""
    name = "u2pp 2"
    options = options_of(model(name).vocab_size)["language model" if biased else "plain"]
    there, clip = runner(name, 3, model(name).device, batched=True), clips(5, 3)[0]
    first = there.open_session(**options)
    there.append_audio(first, clip, 0.0)
    while ready := there.schedule(1e9):
        there.step(ready, 0.0)
    saved = there.save_session(first)
    part = [*there.states.specs].index(f"search.{'hot' if biased else 'plain'}.ctc_numbers")
    numbers = np.frombuffer(saved.parts[part], np.int64).copy()
    assert len(numbers) == there.states.tensors[[*there.states.specs][part]][0].numel()
    plane = LANGUAGE_STATE if biased else LENGTH
    numbers.reshape(LANGUAGE_STATE + 1, -1)[plane, 0] = 10**6
    parts = (*saved.parts[:part], numbers.tobytes(), *saved.parts[part + 1 :])
    with pytest.raises(ValueError, match="corrupt"):
        there.load_session(msgspec.structs.replace(saved, parts=parts), live=True, **options)
    second = there.load_session(saved, live=True, **options)
    for session in (first, second):
        there.append_audio(session, clip, 0.0)
    while ready := there.schedule(1e9):
        assert len(ready) == 2
        ours, theirs = there.step(ready, 0.0)
        assert ours.result == theirs.result


@pytest.mark.parametrize("batched", [False, True])
def test_weights_of_a_language_model_make_no_groups(batched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of sessions with as many weights is one search, and each session has its own weight in it."""
    name = "fastconformer 8,1"
    there = runner(name, 4, model(name).device, batched=batched)
    chosen = options_of(model(name).vocab_size)["language model"]["language_model"]
    loaded = TokenLanguageModel(chosen.fusion.scorer, b"contents")
    options = {str(weight): {"language_model": loaded.with_weight(weight)} for weight in (0.0, 0.4, 0.4001, 3.0)}
    search: Any = there.search
    calls, step = list[int](), search.biased_search.step

    def count(hidden: Tensor, *more: Any) -> Any:
        calls.append(len(hidden))
        return step(hidden, *more)

    monkeypatch.setattr(search.biased_search, "step", count)
    together = hear(there, options)
    assert max(calls) == len(options)
    alone = {
        case: hear(there, {key: options[case] if key == case else {} for key in options})[case] for case in options
    }
    for case in options:
        assert together[case].places == alone[case].places, case
        assert together[case].numbers == pytest.approx(alone[case].numbers, abs=1e-5), case
    gains = [together[case].hypotheses[0].gain for case in options]
    assert len(set(gains)) == len(gains)


def test_the_device_chooses_the_search() -> None:
    def searches(device: Device, beam: int, name: str) -> tuple[type, type, bool]:
        search = runner(name, beam, device, batched=None).search
        rescored = isinstance(search, AttentionRescoringSearch)
        routed = search.search if isinstance(search, AttentionRescoringSearch) else search
        assert isinstance(routed, BiasingSearchRouter)
        return type(routed.plain_search), type(routed.biased_search), rescored

    cpu = devices.make_device("cpu", "fp32")
    assert searches(cpu, 4, "u2pp 2") == (CtcPrefixBeam, CtcPrefixBeam, True)
    other = RecordingDevice()
    other.torch_device = torch.device("meta")
    assert searches(other, 4, "u2pp 2") == (BatchedCtcPrefixBeam, BatchedCtcPrefixBeam, True)
    assert searches(other, 4, "fastconformer 8,1") == (BatchedCtcPrefixBeam, BatchedCtcPrefixBeam, False)
    assert searches(other, 1, "u2pp 2") == (CtcGreedy, BatchedCtcPrefixBeam, False)
