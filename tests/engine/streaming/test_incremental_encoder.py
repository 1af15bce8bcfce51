"""Utterances that are encoded while they are spoken say what they would say as a whole, at every moment, however
the audio comes and whoever else is there; on a thread and in a process, through its death."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from streaming_moonshine import MODEL, write
from tiny_moonshine import WAIT_S, clip, on_loop

from asr_serve.config import EngineConfig
from asr_serve.decoding.seq2seq import DraftTokens, Hypothesis, Recognition, SearchOptions
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.engine.client import EngineClient, RecognitionStream
from asr_serve.engine.process.client import ProcessBackend, process_backend
from asr_serve.engine.process.messages import EngineSpec
from asr_serve.engine.process.process import RingSize
from asr_serve.engine.request import HypothesisRequest
from asr_serve.engine.seq2seq.decoder import DecodeRunner
from asr_serve.engine.seq2seq.encoder import EncoderResult
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.errors import Cancelled, StepFailed

CONFIG = {"use_chunked_inference": True, "max_sessions": 6, "chunk_wait_ms": 1.0, "max_decode_rows": 4}
CLIPS = [clip(seed, 20_000 + 9_001 * seed) for seed in range(5)]
GREEDY = SearchOptions(temperatures=(0.0,))
TOKENS_PER_S = 6.5
Begin = Callable[..., EngineClient]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("moonshine-streaming"))


@pytest.fixture(params=["thread", pytest.param("process", marks=pytest.mark.slow)])
def begin(request: pytest.FixtureRequest, folder: Path) -> Iterator[Begin]:
    started: list[EngineClient] = []

    def starting(**settings: Any) -> EngineClient:
        config = EngineConfig(**(CONFIG | settings))
        if request.param == "thread":
            found = AsrCheckpoint.find(MODEL, folder)
            connect = thread_backend(found.card, lambda: found.build("cpu", "fp32"))
        else:
            spec = EngineSpec(model=MODEL, device="cpu", dtype="fp32", weights=str(folder), threads=1)
            connect = process_backend(spec, RingSize(64, 16_384))
        started.append(EngineClient(config, connect))
        return started[-1]

    yield starting
    for client in started:
        client.close()


class Reference:
    """The whole utterance through the encoder at once, then as many frames to the decoder as are known."""

    def __init__(self, folder: Path) -> None:
        found = AsrCheckpoint.find(MODEL, folder)
        self.model, _, self.device, self.text, *_ = found.build("cpu", "fp32")
        self.chunk = found.card.chunk

    @cache  # noqa: B019
    def said(self, index: int, samples: int, ended: bool) -> tuple[int, ...]:
        """Of the first `samples` of a clip: `ended`, or while it goes on."""
        encoder = self.model.encoder
        if ended:
            frames = encoder.count_frames(samples)
        else:
            window = encoder.audio_window(self.chunk)
            frames = 0
            while (frames * encoder.frame_samples - window.left_samples) + window.samples <= samples:
                frames += self.chunk
        return self._decoded(self._cross(index)[:frames], samples) if frames else ()

    @cache  # noqa: B019
    def _cross(self, index: int) -> torch.Tensor:
        with torch.inference_mode():
            hidden, _ = self.model.encode([torch.from_numpy(CLIPS[index])])
            return self.model.cross_keys_values(hidden)[: self.model.count_frames(len(CLIPS[index]))]

    def _decoded(self, cross: torch.Tensor, samples: int) -> tuple[int, ...]:
        runner = DecodeRunner(self.model, self.device, 1, 1 << 20, len(cross))
        limit = 4 + int(samples / 16_000 * TOKENS_PER_S)
        row = runner.add_row(0, EncoderResult(cross), Hypothesis(GREEDY, self.model.eos, limit, self.text))
        while not runner.step():
            pass
        answer = row.hypothesis.finalize(row.finish)
        assert answer is not None
        return answer.tokens


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def wanted(samples: int, draft: tuple[int, ...] = ()) -> HypothesisRequest:
    return HypothesisRequest(samples, GREEDY, DraftTokens(draft), "live")


class Caller:
    """Puts a clip in pieces of random lengths, and wants a hypothesis now and then."""

    def __init__(self, client: EngineClient, index: int, seed: int) -> None:
        self.stream: RecognitionStream = client.open_stream(live=True, samples=len(CLIPS[index]))
        self.index, self.roll = index, random.Random(seed)
        self.at = 0
        self.draft: tuple[int, ...] = ()
        self.asked: list[tuple[int, bool, Future[Recognition]]] = []

    @property
    def over(self) -> bool:
        return self.at == len(CLIPS[self.index])

    def go_on(self) -> None:
        pcm = CLIPS[self.index]
        piece = pcm[self.at : self.at + self.roll.choice([700, 1_601, 5_120, 20_000])]
        self.at += len(piece)
        if not self.over and self.roll.random() < 0.3:
            self.stream.submit_audio(piece)
            return
        back = 0 if self.over else self.roll.choice([0, 0, 300, 4_000])
        samples = max(0, self.at - back)
        future = self.stream.submit_hypothesis(piece, wanted(samples, self.draft), last=self.over)
        self.asked.append((samples, self.over, future))
        if self.roll.random() < 0.7:
            self.draft = future.result(WAIT_S).tokens

    def expect(self, reference: Reference) -> int:
        """How many tokens were right."""
        count = 0
        for samples, ended, future in self.asked:
            tokens = future.result(WAIT_S).tokens
            assert tokens == reference.said(self.index, samples, ended), (self.index, samples, ended)
            count += len(tokens)
        return count


def expect_empty(client: EngineClient) -> None:
    if not isinstance(client.backend, ProcessBackend):
        on_loop(client, lambda loop: loop.check())
    deadline_s = time.monotonic() + WAIT_S
    while any(client.describe()[held] for held in ("pages_used", "slots_used")):  # a process hears of it later
        assert time.monotonic() < deadline_s, client.describe()
        time.sleep(0.01)


@pytest.mark.slow
def test_at_every_moment_it_says_what_the_audio_so_far_says(begin: Begin, reference: Reference) -> None:
    client = begin()
    callers = [Caller(client, index, seed) for seed, index in enumerate([0, 1, 2, 3, 4, 2])]
    roll = random.Random(7)
    while going := [caller for caller in callers if not caller.over]:
        roll.choice(going).go_on()
    assert sum(caller.expect(reference) for caller in callers) > 100
    if not isinstance(client.backend, ProcessBackend):
        runner = on_loop(client, lambda loop: loop.executor._utterances.decode_runner)
        assert 0 < runner.positions_accepted < runner.positions_verified  # drafts are used, and are wrong at times
    expect_empty(client)


def test_one_by_one_it_says_the_same(begin: Begin, reference: Reference) -> None:
    client = begin(use_chunked_inference=False)
    callers = [Caller(client, index, index) for index in range(3)]
    while going := [caller for caller in callers if not caller.over]:
        for caller in going:
            caller.go_on()
    assert sum(caller.expect(reference) for caller in callers) > 30


def test_the_whole_says_what_an_utterance_says(begin: Begin) -> None:
    client = begin()
    whole = [client.submit(pcm, GREEDY) for pcm in CLIPS]
    for index, ticket in enumerate(whole):
        stream = client.open_stream(live=True)
        grown = stream.submit_hypothesis(CLIPS[index], wanted(len(CLIPS[index])), last=True)
        assert grown.result(WAIT_S).tokens == ticket.future.result(WAIT_S).tokens
        assert grown.result().tokens
    expect_empty(client)


def test_the_whole_says_when_as_an_utterance_does(begin: Begin) -> None:
    client, options = begin(), SearchOptions(temperatures=(0.0,), words=True)
    for pcm in CLIPS:
        whole = client.submit(pcm, options).future.result(WAIT_S)
        stream = client.open_stream(live=True)
        grown = stream.submit_hypothesis(
            pcm, HypothesisRequest(len(pcm), options, DraftTokens(whole.tokens), "live"), last=True
        ).result(WAIT_S)
        assert grown.tokens == whole.tokens
        assert len(grown.times) == len(grown.tokens) > 0
        edges = [edge for time in grown.times for edge in time]
        assert edges == sorted(edges)
        assert edges == pytest.approx([edge for time in whole.times for edge in time], abs=320)  # a frame
    expect_empty(client)


def test_before_its_first_frame_is_known_it_says_nothing(begin: Begin) -> None:
    client = begin()
    stream = client.open_stream(live=True)
    assert stream.submit_hypothesis(CLIPS[0][:800], wanted(800)).result(WAIT_S).tokens == ()
    assert stream.submit_hypothesis(CLIPS[0][800:810], wanted(0)).result(WAIT_S).tokens == ()
    stream.close()
    expect_empty(client)


@pytest.mark.slow
def test_who_goes_away_leaves_nothing_behind(begin: Begin, reference: Reference) -> None:
    client = begin(max_sessions=3)
    roll = random.Random(3)
    stays = Caller(client, 4, 1)
    for round_ in range(12):
        goes = [client.open_stream(live=True) for _ in range(3)]
        futures = [stream.submit_hypothesis(CLIPS[round_ % 5], wanted(20_000)) for stream in goes]
        tickets = [client.submit(CLIPS[2], GREEDY) for _ in range(2)]
        if not stays.over:
            stays.go_on()
        for stream in goes:
            stream.close()
        client.cancel(roll.choice(tickets))
        for future in [*futures, *(ticket.future for ticket in tickets)]:
            assert isinstance(future.exception(WAIT_S), Cancelled | None)
    while not stays.over:
        stays.go_on()
    stays.expect(reference)
    expect_empty(client)


def test_pages_bound_who_is_heard_at_once_and_nobody_starves(begin: Begin, reference: Reference) -> None:
    client = begin(kv_bytes=1, max_sessions=4)  # as few pages as one utterance needs
    futures = [
        client.open_stream(live=i < 2, samples=len(CLIPS[i]) if i else None).submit_hypothesis(
            CLIPS[i], wanted(len(CLIPS[i])), last=True
        )
        for i in (0, 1, 2, 3)
    ]
    tickets = [client.submit(CLIPS[4], GREEDY) for _ in range(3)]
    for index, future in enumerate(futures):
        assert future.result(WAIT_S).tokens == reference.said(index, len(CLIPS[index]), True)
    assert len({ticket.future.result(WAIT_S).tokens for ticket in tickets}) == 1
    expect_empty(client)


def test_more_audio_than_was_announced_is_not_heard(begin: Begin) -> None:
    client = begin()
    stream = client.open_stream(live=True, samples=16_000)
    answer = stream.submit_hypothesis(CLIPS[3], wanted(len(CLIPS[3])), last=True)
    assert answer.result(WAIT_S).tokens  # of what it was given room for
    expect_empty(client)


@pytest.mark.slow
def test_another_process_hears_it_again(folder: Path, reference: Reference) -> None:
    spec = EngineSpec(model=MODEL, device="cpu", dtype="fp32", weights=str(folder), threads=1)
    client = EngineClient(EngineConfig(**CONFIG), process_backend(spec, RingSize(64, 16_384)))
    try:
        stream = client.open_stream(live=True)
        first = stream.submit_hypothesis(CLIPS[2][:20_000], wanted(20_000)).result(WAIT_S)
        link = client.backend
        assert isinstance(link, ProcessBackend)
        assert link._current is not None
        os.kill(link._current.process.pid, signal.SIGKILL)
        rest = stream.submit_hypothesis(CLIPS[2][20_000:], wanted(len(CLIPS[2]), first.tokens), last=True)
        assert rest.result(WAIT_S).tokens == reference.said(2, len(CLIPS[2]), True)
        assert first.tokens == reference.said(2, 20_000, False)
        expect_empty(client)
    finally:
        client.close()


def test_a_hypothesis_that_fails_fails_its_stream_and_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = AsrCheckpoint.find(MODEL, folder)
    client = EngineClient(EngineConfig(**CONFIG), thread_backend(found.card, lambda: found.build("cpu", "fp32")))
    try:
        stream, other = client.open_stream(live=True), client.open_stream(live=True)
        assert other.submit_hypothesis(CLIPS[0][:16_000], wanted(16_000)).result(WAIT_S)

        def broken(*_: Any) -> None:
            raise RuntimeError("on purpose")

        with monkeypatch.context() as patch:
            runner = on_loop(client, lambda loop: loop.executor._utterances.decode_runner)
            patch.setattr(runner, "add_row", broken)
            lost = stream.submit_hypothesis(CLIPS[1], wanted(16_000))
            with pytest.raises(StepFailed, match="on purpose"):
                lost.result(WAIT_S)
        assert other.submit_hypothesis(CLIPS[0][16_000:], wanted(len(CLIPS[0])), last=True).result(WAIT_S).tokens
        with pytest.raises(Cancelled):
            stream.submit_hypothesis(CLIPS[1], wanted(16_000)).result(WAIT_S)
        expect_empty(client)
    finally:
        client.close()
