"""When tokens were said, of streams that sleep, that another engine takes over, and whose engine dies: as of those
that nothing happens to."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_moonshine import WAIT_S, clip

from asr_serve.config import EngineConfig
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process.client import ProcessBackend, process_backend
from asr_serve.engine.process.messages import EngineSpec
from asr_serve.engine.process.process import RingSize
from asr_serve.engine.streaming.token_alignment import StreamTokenAligner, compact_posteriors
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.types import SearchResult, SearchToken

MODEL = "fastconformer-streaming-medium-en"
NEMO = Path(__file__).parents[2] / "models" / "fixtures" / "fastconformer_hybrid.nemo"
CLIPS = [clip(seed, 30_000 + 9_001 * seed) for seed in range(4)]
PIECE = 7_001
Told = list[tuple[list[int], list[tuple[int, int]]]]


@pytest.fixture
def begin() -> Iterator[Callable[..., EngineClient]]:
    started: list[EngineClient] = []

    def starting(*, process: bool = False, **settings: Any) -> EngineClient:
        config = EngineConfig(**({"use_chunked_inference": True, "chunk_wait_ms": 1.0} | settings))
        if process:
            spec = EngineSpec(model=MODEL, device="cpu", dtype="fp32", weights=str(NEMO), threads=1)
            connect = process_backend(spec, RingSize(64, 16_384))
        else:
            found = AsrCheckpoint.find(MODEL, NEMO)
            connect = thread_backend(found.card, lambda: found.build("cpu", "fp32"))
        started.append(EngineClient(config, connect))
        return started[-1]

    yield starting
    for client in started:
        client.close()


def told(client: EngineClient, between: Callable[[int], None] = lambda number: None) -> Told:
    """Tokens and runs of all clips, a piece of each in turn; every second piece asks for times."""
    streams = [client.open_stream(live=True, words=True) for _ in CLIPS]
    found: list[list[SearchResult]] = [[] for _ in CLIPS]
    number = 0
    while any(number * PIECE < len(pcm) for pcm in CLIPS):
        for stream, pcm, own in zip(streams, CLIPS, found, strict=True):
            if (part := pcm[number * PIECE : (number + 1) * PIECE]).size:
                own.append(stream.submit_audio(part.copy(), timed=number % 2 == 1).result(WAIT_S))
        number += 1
        between(number)
    for stream, own in zip(streams, found, strict=True):
        own.append(stream.submit_audio(np.zeros(0, np.float32), last=True, timed=True).result(WAIT_S))
    return [
        ([t.id for f in own for t in f.fixed_tokens], [run for f in own for run in f.token_runs]) for own in found
    ]


@pytest.mark.slow
@pytest.mark.parametrize("head", ["rnnt", "ctc"])
@pytest.mark.parametrize("how", ["sleep", "sleep in a file", "death", "another engine"])
def test_times_are_those_of_streams_that_nothing_happens_to(
    begin: Callable[..., EngineClient], how: str, head: str
) -> None:
    want = told(begin(max_sessions=4, host_bytes=0, head=head))
    assert all(len(tokens) == len(runs) for tokens, runs in want)
    assert sum(len(runs) for _, runs in want) > 5
    happened: list[int] = []
    if how.startswith("sleep"):
        tiers = {"host_bytes": 1 << 20, "disk_bytes": 64 << 20} if how != "sleep" else {}
        client = begin(max_sessions=2, sleep_after_s=0.001, head=head, **tiers)

        def between(number: int) -> None:
            deadline_s = time.monotonic() + WAIT_S
            while client.describe().get("streams_asleep") != len(CLIPS):
                assert time.monotonic() < deadline_s, client.describe()
                time.sleep(0.005)
            happened.append(number)
    else:
        client = begin(process=True, max_sessions=4, head=head)
        link = client.backend
        assert isinstance(link, ProcessBackend)

        def between(number: int) -> None:
            if number != 3:
                return
            before = link._current.process.pid
            if how == "death":
                os.kill(before, signal.SIGKILL)
            else:
                link.renew(WAIT_S)
                assert link._current.process.pid != before
            happened.append(number)

    assert told(client, between) == want
    assert happened


def test_a_search_that_turns_back_behind_what_was_told_is_taken_at_its_word() -> None:
    told = StreamTokenAligner()
    heard = compact_posteriors(torch.log_softmax(torch.eye(6)[[0, 1, 0, 2, 0, 0, 3, 0]] * 9, dim=-1), 0)
    told.append_step([SearchToken(1, 1, -0.1), SearchToken(2, 3, -0.1)], heard)
    assert told.token_runs() == [(1, 2), (3, 4)]
    told.append_step([SearchToken(3, 6, -0.1)], None)
    assert told.token_runs(before=2)[2:] == [(6, 7)]
