"""Offload of idle streams by a whole engine: to memory and to a file, on a thread and in a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_clients import NEMO, NEMO_MODEL, start_engine, wait_until
from streaming_moonshine import MODEL as MOONSHINE
from streaming_moonshine import write
from tiny_moonshine import WAIT_S, clip, on_loop

from asr_serve.api.library import Model
from asr_serve.audio import read_audio
from asr_serve.config import EngineConfig
from asr_serve.decoding.search_options import DraftTokens, SearchOptions
from asr_serve.engine.client import EngineClient
from asr_serve.engine.request import HypothesisRequest

CONFIG = {"use_chunked_inference": True, "max_sessions": 2, "chunk_wait_ms": 1.0, "max_decode_rows": 4}
OFFLOAD_SOON = {"offload_after_s": 0.001}
FILE = {"host_bytes": 1 << 20, "disk_bytes": 64 << 20}
"""So little memory that most of it goes to the file."""
CLIPS = [clip(seed, 20_000 + 9_001 * seed) for seed in range(4)]
GREEDY = SearchOptions(temperatures=(0.0,))
Begin = Callable[..., EngineClient]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("moonshine-streaming"))


@pytest.fixture(scope="module")
def awake() -> dict[str, list[list[tuple[int, ...]]]]:
    """Tokens of streams that are never offloaded, by model: computed once."""
    return {}


@pytest.fixture
def begin(close_later: Any, folder: Path) -> Begin:
    def start(name: str, *, process: bool = False, **settings: Any) -> EngineClient:
        weights = folder if name == MOONSHINE else NEMO
        return close_later(start_engine(name, weights, EngineConfig(**(CONFIG | settings)), process=process))

    return start


def greedy_request(samples: int, draft: tuple[int, ...] = ()) -> HypothesisRequest:
    return HypothesisRequest(samples, GREEDY, DraftTokens(draft), "live")


def until(client: EngineClient, what: str, count: int) -> None:
    wait_until(lambda: client.describe().get(what) == count, client.describe)


def expect_empty(client: EngineClient) -> None:
    for what in ("streams_offloaded", "slots_used"):
        until(client, what, 0)
    if hasattr(client.backend, "loop"):
        on_loop(client, lambda loop: loop.check())
        tiers = on_loop(client, lambda loop: loop.executor._offloader._offload_store)
        assert tiers is None or not [name for name in (b"stream %d" % n for n in range(99)) if name in tiers]


def tokens_of_clips(
    client: EngineClient, incremental: bool, cuts: list[int], *, sleeps: bool
) -> list[list[tuple[int, ...]]]:
    """Tokens of all clips, a piece of each in turn; `sleeps`: each time all of them are offloaded."""
    opened = [client.open_stream(live=True, samples=len(pcm)) for pcm in CLIPS]
    tokens: list[list[tuple[int, ...]]] = [[] for _ in CLIPS]
    at = 0
    for number, cut in enumerate(cuts):
        last = number == len(cuts) - 1
        for stream, pcm, own in zip(opened, CLIPS, tokens, strict=True):
            end = len(pcm) if last else at + cut
            piece = pcm[at:end].copy()
            if incremental:
                wanted = greedy_request(end, own[-1] if own else ())
                own.append(stream.submit_hypothesis(piece, wanted, last=last).result(WAIT_S).tokens)
            else:
                found = stream.submit_audio(piece, last=last).result(WAIT_S)
                own.append(tuple(token.id for token in found.fixed_tokens))
        at += cut
        if sleeps and not last:
            until(client, "streams_offloaded", len(CLIPS))
            until(client, "slots_used", 0)
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("how", ["memory", "file", "process"])
@pytest.mark.parametrize("name", [NEMO_MODEL, MOONSHINE])
@pytest.mark.repeats(name=MOONSHINE, how="file")
def test_offloaded_streams_have_the_tokens_of_resident_ones(begin: Begin, awake: Any, name: str, how: str) -> None:
    cuts = [5_000, 8_001, 1, 3_000, 0]
    if name not in awake:
        never = begin(name, max_sessions=len(CLIPS), host_bytes=0)
        awake[name] = tokens_of_clips(never, name == MOONSHINE, cuts, sleeps=False)
        expect_empty(never)
    want = awake[name]
    assert sum(len(tokens) for own in want for tokens in own) > 20
    client = begin(name, process=how == "process", **OFFLOAD_SOON, **(FILE if how == "file" else {}))
    assert tokens_of_clips(client, name == MOONSHINE, cuts, sleeps=True) == want, "four streams, two slots"
    if how == "memory":
        expect_empty(client)


def test_offloaded_pages_come_back_bit_for_bit(begin: Begin) -> None:
    """Also where others had those pages before, and wrote all over them."""
    sleeps, awake = (begin(MOONSHINE, max_sessions=3, **OFFLOAD_SOON), begin(MOONSHINE, max_sessions=3, host_bytes=0))
    streams = [client.open_stream(live=True, samples=60_000) for client in (sleeps, awake)]
    for cut in (9_000, 6_001):
        for stream in streams:
            stream.submit_hypothesis(CLIPS[3][:cut], greedy_request(cut)).result(WAIT_S)
        until(sleeps, "streams_offloaded", 1)
        on_loop(sleeps, lambda loop: loop.executor._seq2seq.decode_runner.kv_cache.fill_(float("nan")))
    for client, stream in zip((sleeps, awake), streams, strict=True):
        stream.submit_hypothesis(CLIPS[3][:700], greedy_request(15_000)).result(WAIT_S)
        if client is sleeps:
            until(client, "streams_offloaded", 1)
    ours, theirs = (
        on_loop(client, lambda loop, number=stream._number: loop.executor.export_stream(number))
        for client, stream in zip((sleeps, awake), streams, strict=True)
    )
    assert len(ours.parts) > 3
    assert ours == theirs
    assert not np.isnan(np.frombuffer(ours.parts[-1], np.float32)).any(), "nothing of who had the page before"
    for client in (sleeps, awake):
        expect_empty(client)


def test_an_incremental_stream_moves_to_another_engine_or_is_refused(begin: Begin) -> None:
    here, there = begin(MOONSHINE), begin(MOONSHINE)
    stream = here.open_stream(live=True, samples=len(CLIPS[3]))
    first = stream.submit_hypothesis(CLIPS[3][:20_000], greedy_request(20_000)).result(WAIT_S)
    saved = on_loop(here, lambda loop: loop.executor.export_stream(stream._number))
    expect_empty(here)

    def opened(loop: Any, parts: tuple[bytes, ...]) -> None:
        loop.executor.open_stream(77, True, len(CLIPS[3]), msgspec.structs.replace(saved, parts=parts))

    for parts in (saved.parts[:-1], (*saved.parts, saved.parts[-1]), (*saved.parts[:-1], saved.parts[-1][:-1])):
        with pytest.raises(ValueError, match="a snapshot has pages"):
            on_loop(there, lambda loop, parts=parts: opened(loop, parts))
    expect_empty(there)
    on_loop(there, lambda loop: opened(loop, saved.parts))
    stream._client, stream._number = there, 77
    got = stream.submit_hypothesis(CLIPS[3][20_000:], greedy_request(len(CLIPS[3]), first.tokens), last=True).result(
        WAIT_S
    )
    awake = begin(MOONSHINE, host_bytes=0)
    want = awake.open_stream(live=True, samples=len(CLIPS[3]))
    whole = want.submit_hypothesis(CLIPS[3], greedy_request(len(CLIPS[3])), last=True).result(WAIT_S)
    assert got.tokens == whole.tokens
    assert got.tokens
    expect_empty(there)


def test_streams_that_pause_in_mid_sentence_go_on(packaged_speech: Path) -> None:
    """More of them than slots, through the library's own stream: a client that sends nothing for a while."""
    speech = read_audio(packaged_speech / "two_cities.wav")[: 6 * 16_000]
    chunks = [speech[at : at + 8_000] for at in range(0, len(speech), 8_000)]
    everybody = threading.Barrier(3)

    def load(**settings: Any) -> Model:
        config = EngineConfig(**(CONFIG | settings))
        return Model.load(NEMO_MODEL, weights=NEMO, device="cpu", dtype="fp32", turn_model="none", engine=config)

    def transcribe(model: Model, *, pause: bool) -> str:
        def slowly() -> Iterator[np.ndarray]:
            for number, chunk in enumerate(chunks):
                if pause and number in (4, 7):
                    everybody.wait(WAIT_S)
                    until(model._client, "streams_offloaded", 3)
                    everybody.wait(WAIT_S)
                yield chunk

        return list(model.stream(slowly()))[-1].text

    with load(host_bytes=0, max_sessions=3) as model:
        want = transcribe(model, pause=False)
    assert len(want.split()) > 3
    with load(**OFFLOAD_SOON, max_sessions=3, kv_bytes=1) as model:
        assert model._client.describe()["slots"] == 1
        with ThreadPoolExecutor(3) as pool:
            results = [pool.submit(transcribe, model, pause=True) for _ in range(3)]
            assert [each.result(WAIT_S) for each in results] == [want] * 3
        expect_empty(model._client)
