"""Fun-ASR-Nano and LLMASR in the engine: prompts, prefix cache, penalties and cancellations leave every answer as
funasr's own classes gave it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from engine_clients import poison_free_pages
from fun_asr_folders import MODELS, clips, facts, write_converted, write_ctc_converted
from tiny_moonshine import expect_empty, held, outcome

from asr_serve.config import EngineConfig
from asr_serve.decoding.hypothesis import Recognition, repeated_tokens
from asr_serve.decoding.search_options import DraftTokens, SearchOptions
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.engine.client import EngineClient
from asr_serve.engine.seq2seq.ctc_token_aligner import CtcTokenAligner
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.errors import Cancelled, OptionError, UnsupportedOption
from asr_serve.kernels import PAGE
from asr_serve.models.interfaces import PROMPT_EMBEDDING

CARDS = {"nano": "fun-asr-nano", "llmasr": "llm-asr"}
LANGUAGES = {"英文": "en", "中文": "zh", "日文": "ja"}
TOKENS_PER_S = 20.0
ONCE: dict[str, Any] = {"temperatures": (0.0,), "min_avg_logprob": -1e9, "max_compression_ratio": 1e9}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AsrCheckpoint]:
    found = {
        name: AsrCheckpoint.find(CARDS[name], write_converted(name, tmp_path_factory.mktemp(name))) for name in MODELS
    }
    ctc = write_ctc_converted(tmp_path_factory.mktemp("ctc"))
    return found | {"ctc": AsrCheckpoint.find(CARDS["nano"], ctc)}


@pytest.fixture
def begin(checkpoints: dict[str, AsrCheckpoint]) -> Iterator[Callable[..., EngineClient]]:
    """Starts an engine of a model; it remembers nothing unless it is told to."""
    started = []

    def start(name: str, **settings: Any) -> EngineClient:
        checkpoint = checkpoints[name]
        card = msgspec.structs.replace(checkpoint.card, tokens_per_s=TOKENS_PER_S)
        config = {"max_decode_rows": 12, "kv_bytes": 4 << 20, "max_sessions": 2, "prefix_bytes": 0, **settings}
        client = EngineClient(EngineConfig(**config), thread_backend(card, lambda: checkpoint.build("cpu", "fp32")))
        started.append(client)
        return client

    yield start
    for client in started:
        client.close()


def options(request: dict[str, Any], **further: Any) -> SearchOptions:
    return SearchOptions(
        language=LANGUAGES.get(request.get("language", ""), ""),
        hotwords=tuple(request.get("hotwords", ())),
        itn=request.get("itn", True),
        **ONCE | further,
    )


@cache
def expected(name: str, clip: int, index: int, answer: str = "answer") -> tuple[int, ...]:
    """funasr's greedy answer, as far as the engine follows it."""
    known, end = facts()["models"][name]["clips"][clip][index][answer], 258
    tokens: list[int] = []
    for token in known[: 4 + int(len(clips()[clip]) / 16_000 * TOKENS_PER_S)]:
        if token == end:
            break
        tokens.append(token)
        if loop := repeated_tokens(tokens):
            del tokens[-loop:]
            break
    return tuple(tokens)


def cases(name: str) -> list[tuple[int, int, dict[str, Any], str]]:
    """Clip, index of its request, options and answer of each request of the fixture, without a penalty and with."""
    return [
        (clip, index, {"repetition_penalty": penalty}, answer)
        for clip, made in enumerate(facts()["models"][name]["clips"])
        for index in range(len(made))
        for penalty, answer in ((1.0, "answer"), (1.3, "penalized"))
    ]


def request(name: str, clip: int, index: int) -> dict[str, Any]:
    return dict(facts()["models"][name]["clips"][clip][index]["request"])


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_funasrs_alone_and_together(begin: Any, name: str) -> None:
    client = begin(name)
    wanted = cases(name)
    alone = [
        outcome(client.submit(clips()[clip], options(request(name, clip, index), **further)))
        for clip, index, further, _ in wanted
    ]
    with held(client):
        tickets = [
            client.submit(clips()[clip], options(request(name, clip, index), **further))
            for clip, index, further, _ in wanted
        ]
    for (clip, index, _, answer), first, ticket in zip(wanted, alone, tickets, strict=True):
        together = outcome(ticket)
        assert isinstance(first, Recognition)
        assert isinstance(together, Recognition)
        assert first.tokens == together.tokens == expected(name, clip, index, answer), (clip, index, answer)
        assert first.avg_logprob == pytest.approx(together.avg_logprob, abs=1e-4)
    expect_empty(client)


@pytest.mark.parametrize("name", MODELS)
def test_a_draft_is_verified_under_the_penalty(begin: Any, name: str) -> None:
    client, right = begin(name), expected(name, 0, 0, "penalized")
    for draft in (right, (*right[:5], 7, *right[5:]), expected(name, 0, 0)):
        found = client.submit(clips()[0], options({}, repetition_penalty=1.3), draft=DraftTokens(draft))
        assert outcome(found).tokens == right
    expect_empty(client)


def test_beams_penalize_their_own_tokens(begin: Any) -> None:
    client = begin("nano")
    plain, penalized = (
        outcome(client.submit(clips()[0], options({}, beam=3, repetition_penalty=penalty))) for penalty in (1.0, 2.0)
    )
    repeats = [len(answer.tokens) - len(set(answer.tokens)) for answer in (plain, penalized)]
    assert repeats[1] < repeats[0]
    expect_empty(client)


def test_a_shared_prompt_is_computed_once(begin: Any) -> None:
    client = begin("nano", prefix_bytes=1 << 20)
    runner, stats = client.backend.loop.executor.decode_runner, client.backend.loop.stats
    poison_free_pages(runner)
    shared = runner.model.prompt_tokens(options({"language": "英文"})).index(PROMPT_EMBEDDING) // PAGE * PAGE
    assert shared >= 2 * PAGE
    for count, clip in enumerate((0, 1, 2)):
        found = outcome(client.submit(clips()[clip], options({"language": "英文"})))
        assert found.tokens == expected("nano", clip, 1)
        assert stats.positions_reused == count * shared
    expect_empty(client)


@pytest.mark.parametrize("prefix_bytes", [0, 1 << 20])
def test_many_requests_with_cancellations(begin: Any, prefix_bytes: int) -> None:
    client, chance = begin("nano", max_decode_rows=6, prefix_bytes=prefix_bytes), random.Random(prefix_bytes)
    poison_free_pages(client.backend.loop.executor.decode_runner)
    wanted, tickets, cancelled = cases("nano"), [], 0
    for number in range(64):
        clip, index, further, answer = chance.choice(wanted)
        chosen = options(request("nano", clip, index), **further, hurried=chance.random() < 0.3)
        tickets.append((expected("nano", clip, index, answer), client.submit(clips()[clip], chosen, "bulk")))
        if chance.random() < 0.3:
            client.cancel(tickets[chance.randrange(number + 1)][1])
    for right, ticket in tickets:
        if (found := outcome(ticket)) is Cancelled:
            cancelled += 1
        else:
            assert found.tokens == right
    assert 0 < cancelled < 40
    expect_empty(client)


TEXTS = ("hello world now now now now", "开放开放 now 开放 hello", "now world now, now hello")
"""Beginnings of answers, which fill them but for one token."""


def test_times_come_from_the_ctc_head_alone_and_together(begin: Any) -> None:
    """Those of requests that want them, whoever is encoded beside them; answers are the same without."""
    client = begin("ctc")
    model = client.backend.loop.executor.model
    aligner = CtcTokenAligner(model.ctc_head, model.config.tokenizer.decode)
    wanted = [
        (clip, tuple(model.config.tokenizer.encode(text)), words)
        for clip in range(3)
        for text in TEXTS
        for words in (True, False)
    ]

    def submit(clip: int, prefix: tuple[int, ...], words: bool) -> Any:
        return client.submit(clips()[clip], options({}, prefix=prefix, words=words))

    alone = [outcome(submit(*each)) for each in wanted]
    with held(client):
        tickets = [submit(*each) for each in wanted]
    timed = 0
    for (clip, prefix, words), first, ticket in zip(wanted, alone, tickets, strict=True):
        together, pcm = outcome(ticket), clips()[clip]
        assert (first.tokens, first.times) == (together.tokens, together.times)
        assert first.tokens[:-1] == prefix[: len(first.tokens) - 1]
        with torch.inference_mode():
            (frames,) = model.encode_timed([torch.from_numpy(pcm)], [True])[2]
        assert first.times == (aligner.token_times(first.tokens, frames, len(pcm)) if words else ())
        timed += len(first.times) == len(first.tokens)
    assert timed >= 5
    expect_empty(client)


def test_beams_have_times_for_each_hypothesis(begin: Any) -> None:
    client = begin("ctc", max_decode_rows=12)
    prefix = tuple(client.backend.loop.executor.model.config.tokenizer.encode("now"))
    found = outcome(client.submit(clips()[0], options({}, prefix=prefix, beam=3, hypotheses=3, words=True)))
    assert len(found.hypotheses) == 3
    assert found.hypotheses[0].times == found.times
    for each in (found, *found.hypotheses):
        assert len(each.times) in (0, len(each.tokens))
    expect_empty(client)


def test_what_nobody_can_say_in_that_time_has_no_times(begin: Any) -> None:
    client = begin("ctc")
    prefix = tuple(client.backend.loop.executor.model.config.tokenizer.encode("Ada Babbage Ada"))
    found = outcome(client.submit(clips()[2][:2_000], options({}, prefix=prefix[:6], words=True)))
    assert found.tokens[:3] == prefix[:3]
    assert found.times == ()
    expect_empty(client)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"language": "xx"}, OptionError),
        ({"task": "translate"}, UnsupportedOption),
        ({"words": True}, UnsupportedOption),
        ({"prompt": (1, 2)}, UnsupportedOption),
    ],
)
def test_an_impossible_request_is_refused_alone(begin: Any, wrong: dict[str, Any], error: type[Exception]) -> None:
    client = begin("nano")
    with held(client):
        refused = client.submit(clips()[1], SearchOptions(**ONCE | wrong))
        right = client.submit(clips()[1], options({}))
    assert outcome(refused) is error
    assert outcome(right).tokens == expected("nano", 1, 0)
    expect_empty(client)


@pytest.mark.parametrize("penalty", [0.5, 2.5, float("nan")])
def test_a_penalty_out_of_range_is_refused(penalty: float) -> None:
    with pytest.raises(OptionError, match="repetition_penalty"):
        SearchOptions(repetition_penalty=penalty)
