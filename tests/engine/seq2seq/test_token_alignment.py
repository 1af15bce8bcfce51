"""When tokens were said: told of every answer that wants it, however it came about, in any company."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import tiny_moonshine
import tiny_whisper
import torch
from test_remote_encoding import Pair, expect_nothing_left
from tiny_moonshine import WAIT_S, clip, held, on_loop

from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import DraftTokens, SearchOptions
from asr_serve.engine.client import EngineClient
from asr_serve.engine.loop import Loop
from asr_serve.engine.seq2seq.token_aligner import FinishedRow, TokenAligner
from asr_serve.errors import StepFailed

PASSES: dict[str, Any] = {"min_avg_logprob": -1e9, "max_compression_ratio": 1e9}
FAILS: dict[str, Any] = {"min_avg_logprob": 0.0, "max_no_speech": 1.0}
WORDS: dict[str, Any] = {"words": True, "temperatures": (0.0,), **PASSES}
MODELS: dict[str, Any] = {"moonshine": tiny_moonshine, "whisper": tiny_whisper}
CLIPS = {
    "moonshine": [clip(seed, samples) for seed, samples in enumerate([1_600, 16_000, 40_000, 9_000, 64_000])],
    "whisper": tiny_whisper.CLIPS,
}
OPTIONS = {
    "moonshine": [
        SearchOptions(**WORDS),
        SearchOptions(**WORDS, beam=3),
        SearchOptions(**WORDS, prefix=(9, 8, 7)),
        SearchOptions(words=True, temperatures=(0.8,), seed=3, **PASSES),
        SearchOptions(words=True, temperatures=(0.0, 0.7), **FAILS),
        SearchOptions(words=True, temperatures=(0.0, 0.5), beam=2, **FAILS),
    ],
    "whisper": [
        SearchOptions(**WORDS, language="en"),
        SearchOptions(**WORDS),
        SearchOptions(**WORDS, beam=3),
        SearchOptions(**WORDS, language="en", timestamps=True),
        SearchOptions(**WORDS, language="en", prompt=tuple(range(2, 42)), timestamps=True),
        SearchOptions(words=True, temperatures=(0.0, 0.7), language="en", **FAILS),
    ],
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(model: str) -> Iterator[Callable[..., EngineClient]]:
    made: list[EngineClient] = []

    def starting(**settings: Any) -> EngineClient:
        made.append(MODELS[model].start(**settings))
        return made[-1]

    yield starting
    for client in made:
        client.close()


def ask(client: EngineClient, model: str, index: int, options: SearchOptions, **more: Any) -> Recognition:
    return client.submit(CLIPS[model][index], options, **more).future.result(WAIT_S)


def expect_times(answer: Recognition, samples: int) -> None:
    assert len(answer.times) == len(answer.tokens)
    edges = [edge for time in answer.times for edge in time]
    assert edges == sorted(edges)
    assert all(0 <= edge <= samples for edge in edges)


@pytest.mark.slow
def test_every_answer_has_the_times_it_requests(start: Callable[..., EngineClient], model: str) -> None:
    client = start()
    for options in OPTIONS[model]:
        for index, pcm in enumerate(CLIPS[model]):
            answer = ask(client, model, index, options)
            expect_times(answer, len(pcm))
            plain = ask(client, model, index, msgspec.structs.replace(options, words=False))
            assert plain.times == ()
            assert (plain.tokens, plain.logprobs) == (answer.tokens, answer.logprobs), "they say the same"


def test_some_tokens_take_time(start: Callable[..., EngineClient], model: str) -> None:
    client = start()
    answers = [ask(client, model, i, OPTIONS[model][0]) for i in range(len(CLIPS[model]))]
    assert len({answer.times for answer in answers}) == len(answers)
    assert any(end > first for answer in answers for first, end in answer.times)


@pytest.mark.slow
def test_times_are_the_same_in_any_batch(start: Callable[..., EngineClient], model: str) -> None:
    client = start()
    asked = [(index, options) for options in OPTIONS[model] for index in range(len(CLIPS[model]))]
    alone = [ask(client, model, index, options).times for index, options in asked]
    with held(client):
        tickets = [client.submit(CLIPS[model][index], options) for index, options in asked]
    together = [ticket.future.result(WAIT_S).times for ticket in tickets]
    for mine, theirs in zip(together, alone, strict=True):
        assert sum(mine, ()) == pytest.approx(sum(theirs, ()), abs=384)  # a frame


def test_attention_kept_while_decoding_equals_that_of_a_second_pass(
    start: Callable[..., EngineClient], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of greedy answers queries are kept while they are decoded; of others they are made anew, all at once."""
    compared: list[tuple[torch.Tensor, torch.Tensor]] = []

    def looks(self: TokenAligner, ended: list[FinishedRow]) -> list[torch.Tensor]:
        kept = [self._scores_from_queries(each) for each in ended if self._has_queries(each)]
        assert len(kept) == len(ended)
        compared.extend(zip(kept, self._scores_by_forward(ended), strict=True))
        return kept

    monkeypatch.setattr(TokenAligner, "attention_scores", looks)
    # What is no text is not said again; but this Whisper says nothing without.
    monkeypatch.setattr(TokenAligner, "_is_text", lambda self, token: True)
    client = start()
    options = OPTIONS[model][0]
    with held(client):
        tickets = [client.submit(pcm, options) for pcm in CLIPS[model]]
    for ticket in tickets:
        ticket.future.result(WAIT_S)
    assert len(compared) == len(tickets)
    for mine, theirs in compared:
        assert theirs.std() > 0.1
        torch.testing.assert_close(mine, theirs[:, : mine.shape[1]], atol=1e-4, rtol=1e-4)


def test_a_draft_changes_no_times(start: Callable[..., EngineClient], model: str) -> None:
    client, options = start(), OPTIONS[model][0]
    for index in range(len(CLIPS[model])):
        plain = ask(client, model, index, options)
        drafted = ask(client, model, index, options, draft=DraftTokens(plain.tokens))
        assert (drafted.tokens, drafted.times) == (plain.tokens, plain.times)


def test_a_cached_answer_without_times_is_not_used_where_times_are_requested(
    start: Callable[..., EngineClient], model: str
) -> None:
    client, options = start(prefix_bytes=1 << 20), OPTIONS[model][0]
    plain = ask(client, model, 1, msgspec.structs.replace(options, words=False))
    wanted = ask(client, model, 1, options)
    again = ask(client, model, 1, options)
    assert (plain.times, wanted.reused, again.reused) == ((), "audio", "answer")
    assert wanted.times
    assert again.times == wanted.times


def test_an_empty_answer_has_no_times(start: Callable[..., EngineClient], model: str) -> None:
    if model != "whisper":
        pytest.skip("it cannot tell that nobody speaks")
    silent = SearchOptions(words=True, language="en", max_no_speech=0.0, min_avg_logprob=0.0, temperatures=(0.0,))
    answer = ask(start(), model, 2, silent)
    assert (answer.tokens, answer.times) == ((), ())


def test_a_failed_alignment_fails_requests_with_times_only(
    start: Callable[..., EngineClient], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: TokenAligner, each: FinishedRow, scores: torch.Tensor) -> tuple[tuple[int, int], ...]:
        raise RuntimeError("injected")

    monkeypatch.setattr(TokenAligner, "_times", fails)
    client, options = start(), OPTIONS[model][0]
    plain = msgspec.structs.replace(options, words=False)
    with held(client):  # they decode side by side, and end in the same step
        tickets = [client.submit(CLIPS[model][1], each) for each in (plain, options, plain)]
    with pytest.raises(StepFailed, match="injected"):
        tickets[1].future.result(WAIT_S)
    for ticket in (tickets[0], tickets[2]):
        assert ticket.future.result(WAIT_S).tokens

    def pages(loop: Loop) -> int:
        work: Any = loop.executor
        return int(work.decode_runner.page_pool.used_count)

    assert on_loop(client, pages) == 0


def test_audio_encoded_at_a_peer_has_the_same_times() -> None:
    client = tiny_moonshine.start()
    options = OPTIONS["moonshine"][0]
    here = [ask(client, "moonshine", i, options).times for i in range(len(CLIPS["moonshine"]))]
    client.close()
    pair = Pair(tiny_moonshine, peer_transport="tcp")
    there = [ask(pair.client, "moonshine", i, options).times for i in range(len(CLIPS["moonshine"]))]
    expect_nothing_left(pair.client)
    pair.close()
    assert there == here


def test_probability_of_the_language() -> None:
    client = tiny_whisper.start()
    options = OPTIONS["whisper"][1]
    heard = [ask(client, "whisper", i, options) for i in range(len(CLIPS["whisper"]))]
    told = ask(client, "whisper", 0, OPTIONS["whisper"][0])
    client.close()
    for index, answer in enumerate(heard):
        logits = tiny_whisper.decoder(index).logits((tiny_whisper.SPECIAL.sot,))
        languages = tiny_whisper.SPECIAL.languages
        sure = logits[list(languages.values())].float().softmax(0)
        assert answer.language_prob == pytest.approx(float(sure.max()), abs=1e-4)
        assert answer.language == list(languages)[int(sure.argmax())]
    assert told.language_prob == 0.0
