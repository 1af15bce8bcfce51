"""Token times of streams that are offloaded, handed over or lose their engine: those of undisturbed streams."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from case_tiers import exhaustive_after
from engine_clients import NEMO, NEMO_MODEL, backend_of, engine_pid, start_engine, wait_until
from tiny_moonshine import WAIT_S, clip

from asr_serve.config import EngineConfig
from asr_serve.engine.client import EngineClient
from asr_serve.engine.streaming.token_aligner import StreamTokenAligner, compact_posteriors
from asr_serve.types import SearchResult, SearchToken

CLIPS = [clip(seed, 30_000 + 9_001 * seed) for seed in range(4)]
PIECE = 7_001
TokensAndRuns = list[tuple[list[int], list[tuple[int, int]]]]


@pytest.fixture
def begin(close_later: Any) -> Callable[..., EngineClient]:
    def start(*, process: bool = False, **settings: Any) -> EngineClient:
        config = EngineConfig(**({"use_chunked_inference": True, "chunk_wait_ms": 1.0} | settings))
        return close_later(start_engine(NEMO_MODEL, NEMO, config, process=process))

    return start


def tokens_and_runs(client: EngineClient, between: Callable[[int], None] = lambda number: None) -> TokensAndRuns:
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
    return [([t.id for f in own for t in f.fixed_tokens], [run for f in own for run in f.token_runs]) for own in found]


@pytest.mark.slow
@pytest.mark.parametrize("head", exhaustive_after(1, ["rnnt", "ctc"]))
@pytest.mark.parametrize("how", ["sleep", "sleep in a file", "death", "another engine"])
def test_token_times_survive_offload_handover_and_death(
    begin: Callable[..., EngineClient], how: str, head: str
) -> None:
    want = tokens_and_runs(begin(max_sessions=4, host_bytes=0, head=head))
    assert all(len(tokens) == len(runs) for tokens, runs in want)
    assert sum(len(runs) for _, runs in want) > 5
    happened: list[int] = []
    if how.startswith("sleep"):
        tiers = {"host_bytes": 1 << 20, "disk_bytes": 64 << 20} if how != "sleep" else {}
        client = begin(max_sessions=2, offload_after_s=0.001, head=head, **tiers)

        def between(number: int) -> None:
            wait_until(lambda: client.describe().get("streams_offloaded") == len(CLIPS), client.describe)
            happened.append(number)
    else:
        client = begin(process=True, max_sessions=4, head=head)

        def between(number: int) -> None:
            if number != 3:
                return
            before = engine_pid(client)
            if how == "death":
                os.kill(before, signal.SIGKILL)
            else:
                backend_of(client).renew(WAIT_S)
                assert engine_pid(client) != before
            happened.append(number)

    assert tokens_and_runs(client, between) == want
    assert happened


def test_a_search_that_revises_reported_tokens_is_followed() -> None:
    aligner = StreamTokenAligner()
    posteriors = compact_posteriors(torch.log_softmax(torch.eye(6)[[0, 1, 0, 2, 0, 0, 3, 0]] * 9, dim=-1), 0)
    aligner.append_step([SearchToken(1, 1, -0.1), SearchToken(2, 3, -0.1)], posteriors)
    assert aligner.token_runs() == [(1, 2), (3, 4)]
    aligner.append_step([SearchToken(3, 6, -0.1)], None)
    assert aligner.token_runs(before=2)[2:] == [(6, 7)]
