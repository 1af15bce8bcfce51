"""Incremental encoding gives at every moment the tokens of the audio so far, whatever the pieces and the batch,
on a thread and in a process that may be killed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_clients import engine_pid, fail_calls, start_engine, wait_until
from streaming_moonshine import MODEL, write
from tiny_moonshine import WAIT_S, clip, on_loop

from asr_serve.config import EngineConfig
from asr_serve.decoding.hypothesis import Hypothesis, Recognition
from asr_serve.decoding.search_options import DraftTokens, SearchOptions
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.engine.client import EngineClient, RecognitionStream
from asr_serve.engine.request import HypothesisRequest
from asr_serve.engine.seq2seq.decoder import DecodeRunner
from asr_serve.engine.seq2seq.encoder import EncoderResult
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
def begin(request: pytest.FixtureRequest, close_later: Any, folder: Path) -> Begin:
    process = request.param == "process"
    return lambda **settings: close_later(
        start_engine(MODEL, folder, EngineConfig(**(CONFIG | settings)), process=process)
    )


class Reference:
    """The whole utterance through the encoder at once, then as many frames to the decoder as are known."""

    def __init__(self, folder: Path) -> None:
        found = AsrCheckpoint.find(MODEL, folder)
        self.model, _, self.device, self.text, *_ = found.build("cpu", "fp32")
        self.chunk = found.card.chunk

    @cache  # noqa: B019
    def tokens(self, index: int, samples: int, ended: bool) -> tuple[int, ...]:
        """Tokens of the first `samples` of a clip, `ended` or still going on."""
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


def greedy_request(samples: int, draft: tuple[int, ...] = ()) -> HypothesisRequest:
    return HypothesisRequest(samples, GREEDY, DraftTokens(draft), "live")


class ClipStream:
    """Sends a clip in pieces of random lengths, and requests a hypothesis now and then."""

    def __init__(self, client: EngineClient, index: int, seed: int) -> None:
        self.stream: RecognitionStream = client.open_stream(live=True, samples=len(CLIPS[index]))
        self.index, self.roll = index, random.Random(seed)
        self.at = 0
        self.draft: tuple[int, ...] = ()
        self.requested: list[tuple[int, bool, Future[Recognition]]] = []

    @property
    def finished(self) -> bool:
        return self.at == len(CLIPS[self.index])

    def send_next(self) -> None:
        pcm = CLIPS[self.index]
        piece = pcm[self.at : self.at + self.roll.choice([700, 1_601, 5_120, 20_000])]
        self.at += len(piece)
        if not self.finished and self.roll.random() < 0.3:
            self.stream.submit_audio(piece)
            return
        back = 0 if self.finished else self.roll.choice([0, 0, 300, 4_000])
        samples = max(0, self.at - back)
        future = self.stream.submit_hypothesis(piece, greedy_request(samples, self.draft), last=self.finished)
        self.requested.append((samples, self.finished, future))
        if self.roll.random() < 0.7:
            self.draft = future.result(WAIT_S).tokens

    def expect_reference(self, reference: Reference) -> int:
        """Compare every hypothesis; return how many tokens there were."""
        count = 0
        for samples, ended, future in self.requested:
            tokens = future.result(WAIT_S).tokens
            assert tokens == reference.tokens(self.index, samples, ended), (self.index, samples, ended)
            count += len(tokens)
        return count


def expect_empty(client: EngineClient) -> None:
    if hasattr(client.backend, "loop"):
        on_loop(client, lambda loop: loop.check())
    # A process hears of it later.
    wait_until(lambda: not any(client.describe()[held] for held in ("pages_used", "slots_used")), client.describe)


def finish(streams: list[ClipStream]) -> None:
    roll = random.Random(7)
    while unfinished := [stream for stream in streams if not stream.finished]:
        roll.choice(unfinished).send_next()


@pytest.mark.slow
def test_hypotheses_are_those_of_the_audio_so_far(begin: Begin, reference: Reference) -> None:
    client = begin()
    streams = [ClipStream(client, index, seed) for seed, index in enumerate([0, 1, 2, 3, 4, 2])]
    finish(streams)
    assert sum(stream.expect_reference(reference) for stream in streams) > 100
    if hasattr(client.backend, "loop"):
        runner = on_loop(client, lambda loop: loop.executor._seq2seq.decode_runner)
        assert 0 < runner.positions_accepted < runner.positions_verified  # drafts are used, and are wrong at times
    expect_empty(client)


@pytest.mark.repeats(begin="process")
def test_hypotheses_are_the_same_without_chunked_inference(begin: Begin, reference: Reference) -> None:
    client = begin(use_chunked_inference=False)
    streams = [ClipStream(client, index, index) for index in range(3)]
    finish(streams)
    assert sum(stream.expect_reference(reference) for stream in streams) > 30


@pytest.mark.parametrize("drafted", [False, True], ids=["", "drafted"])
@pytest.mark.repeats(begin="process", drafted=False)
def test_a_finished_stream_has_the_tokens_and_times_of_an_utterance(begin: Begin, drafted: bool) -> None:
    client, options = begin(), SearchOptions(temperatures=(0.0,), words=drafted)
    utterances = [client.submit(pcm, options) for pcm in CLIPS]
    for pcm, ticket in zip(CLIPS, utterances, strict=True):
        utterance = ticket.future.result(WAIT_S)
        draft = DraftTokens(utterance.tokens if drafted else ())
        stream = client.open_stream(live=True)
        request = HypothesisRequest(len(pcm), options, draft, "live")
        streamed = stream.submit_hypothesis(pcm, request, last=True).result(WAIT_S)
        assert streamed.tokens == utterance.tokens
        assert streamed.tokens
        if drafted:
            assert len(streamed.times) == len(streamed.tokens)
            edges = [edge for time in streamed.times for edge in time]
            assert edges == sorted(edges)
            assert edges == pytest.approx([edge for time in utterance.times for edge in time], abs=320)  # a frame
    expect_empty(client)


@pytest.mark.repeats(begin="process")
def test_no_tokens_before_the_first_frame(begin: Begin) -> None:
    client = begin()
    stream = client.open_stream(live=True)
    assert stream.submit_hypothesis(CLIPS[0][:800], greedy_request(800)).result(WAIT_S).tokens == ()
    assert stream.submit_hypothesis(CLIPS[0][800:810], greedy_request(0)).result(WAIT_S).tokens == ()
    stream.close()
    expect_empty(client)


@pytest.mark.slow
def test_closed_streams_and_cancelled_requests_leave_nothing_behind(begin: Begin, reference: Reference) -> None:
    client = begin(max_sessions=3)
    roll = random.Random(3)
    stays = ClipStream(client, 4, 1)
    for round_ in range(12):
        goes = [client.open_stream(live=True) for _ in range(3)]
        futures = [stream.submit_hypothesis(CLIPS[round_ % 5], greedy_request(20_000)) for stream in goes]
        tickets = [client.submit(CLIPS[2], GREEDY) for _ in range(2)]
        if not stays.finished:
            stays.send_next()
        for stream in goes:
            stream.close()
        client.cancel(roll.choice(tickets))
        for future in [*futures, *(ticket.future for ticket in tickets)]:
            assert isinstance(future.exception(WAIT_S), Cancelled | None)
    while not stays.finished:
        stays.send_next()
    stays.expect_reference(reference)
    expect_empty(client)


@pytest.mark.repeats(begin="process")
def test_few_pages_bound_concurrency_and_nobody_starves(begin: Begin, reference: Reference) -> None:
    client = begin(kv_bytes=1, max_sessions=4)  # as few pages as one utterance needs
    futures = [
        client.open_stream(live=i < 2, samples=len(CLIPS[i]) if i else None).submit_hypothesis(
            CLIPS[i], greedy_request(len(CLIPS[i])), last=True
        )
        for i in (0, 1, 2, 3)
    ]
    tickets = [client.submit(CLIPS[4], GREEDY) for _ in range(3)]
    for index, future in enumerate(futures):
        assert future.result(WAIT_S).tokens == reference.tokens(index, len(CLIPS[index]), True)
    assert len({ticket.future.result(WAIT_S).tokens for ticket in tickets}) == 1
    expect_empty(client)


@pytest.mark.repeats(begin="process")
def test_audio_past_the_announced_length_is_ignored(begin: Begin) -> None:
    client = begin()
    stream = client.open_stream(live=True, samples=16_000)
    answer = stream.submit_hypothesis(CLIPS[3], greedy_request(len(CLIPS[3])), last=True)
    assert answer.result(WAIT_S).tokens  # of what it was given room for
    expect_empty(client)


@pytest.mark.slow
def test_a_restarted_process_replays_the_stream(folder: Path, reference: Reference, close_later: Any) -> None:
    client = close_later(start_engine(MODEL, folder, EngineConfig(**CONFIG), process=True))
    stream = client.open_stream(live=True)
    first = stream.submit_hypothesis(CLIPS[2][:20_000], greedy_request(20_000)).result(WAIT_S)
    os.kill(engine_pid(client), signal.SIGKILL)
    rest = stream.submit_hypothesis(CLIPS[2][20_000:], greedy_request(len(CLIPS[2]), first.tokens), last=True)
    assert rest.result(WAIT_S).tokens == reference.tokens(2, len(CLIPS[2]), True)
    assert first.tokens == reference.tokens(2, 20_000, False)
    expect_empty(client)


def test_a_failed_hypothesis_fails_its_own_stream_only(folder: Path, close_later: Any) -> None:
    client = close_later(start_engine(MODEL, folder, EngineConfig(**CONFIG)))
    stream, other = client.open_stream(live=True), client.open_stream(live=True)
    assert other.submit_hypothesis(CLIPS[0][:16_000], greedy_request(16_000)).result(WAIT_S)
    fail_calls(on_loop(client, lambda loop: loop.executor._seq2seq.decode_runner), "add_row", 1)
    lost = stream.submit_hypothesis(CLIPS[1], greedy_request(16_000))
    with pytest.raises(StepFailed, match="hiccuped"):
        lost.result(WAIT_S)
    assert other.submit_hypothesis(CLIPS[0][16_000:], greedy_request(len(CLIPS[0])), last=True).result(WAIT_S).tokens
    with pytest.raises(Cancelled):
        stream.submit_hypothesis(CLIPS[1], greedy_request(16_000)).result(WAIT_S)
    expect_empty(client)
