"""A request's trace through the roles of a cluster, each in a process of its own: one tree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_clients import WAIT_S, backend_of, start_engine, wait_until
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from test_remote_encoding import CONFIG, MODEL, ONCE
from test_replicated_backend import KEY, Processes, Settings
from tiny_moonshine import clip, save

from asr_serve.config import EngineConfig
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process.messages import EncoderAddress, ListenSpec
from asr_serve.engine.replicas.backend import replicated_backend
from asr_serve.server.telemetry.tracing import OtelTracer
from asr_serve.types import EngineTimestamps

pytestmark = pytest.mark.slow

CLIPS = [clip(seed, 20_000 + 3_000 * seed) for seed in range(6)]
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Roles:
    """`ingress`: a client of the decode replica's process, for which the process at `encoder` encodes."""

    def __init__(self, folder: Path, undo: contextlib.ExitStack) -> None:
        weights = folder / "weights"
        weights.mkdir()
        save(weights)
        config = msgspec.structs.replace(CONFIG, role="decode", prefix_bytes=1 << 20)
        servers = {"servers": ListenSpec(str(folder), None, KEY), "digest_key": KEY}

        def start(config: EngineConfig, **spec: Any) -> EngineClient:
            spec |= {"process": True, "turn_model": "none", "peer_keys": ("the-key-of-a-cluster",)}
            client = start_engine(MODEL, weights, config, **spec)
            undo.callback(client.close)
            return client

        with ThreadPoolExecutor() as pool:
            encoding = pool.submit(start, EngineConfig(role="encode", max_sessions=2))
            decodes, encodes = start(config, **servers), encoding.result()
        encoder = backend_of(encodes).address
        assert isinstance(encoder, EncoderAddress)
        self.encoder = encoder.peer
        backend_of(decodes).set_peers([self.encoder]).result(WAIT_S)
        wait_until(lambda: decodes.describe().get("peers") == {self.encoder: "ready"}, decodes.describe)
        directory = Processes([decodes], same_machine=True)
        self.ingress = EngineClient(config, replicated_backend(directory, Settings()))
        undo.callback(self.ingress.close)
        directory.backend.watch_room(self.ingress.set_room)
        wait_until(lambda: len(directory.backend.loads) == 1)


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    with contextlib.ExitStack() as undo:
        yield Roles(tmp_path_factory.mktemp("roles"), undo)


def answered(roles: Roles, *clips: int) -> list[EngineTimestamps]:
    """Times of the utterances, as they come with their answers."""
    tickets = [roles.ingress.submit(CLIPS[index], ONCE) for index in clips]
    phases = [ticket.future.result(WAIT_S).phases for ticket in tickets]
    assert all(each is not None for each in phases)
    return [each for each in phases if each is not None]


def spans_of(*utterances: EngineTimestamps) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracer = OtelTracer(exporter, "ingress")
    with tracer.start_request("POST", {"traceparent": CALLER}) as request:
        for each in utterances:
            request.engine_phases(each)
    tracer.close()
    return list(exporter.get_finished_spans())


def path(span: ReadableSpan, by_id: dict[int, ReadableSpan]) -> str:
    parent = by_id.get(span.parent.span_id) if span.parent else None
    return span.name if parent is None else f"{path(parent, by_id)}/{span.name}"


def test_a_request_is_one_tree_through_three_processes(roles: Roles) -> None:
    utterances = answered(roles, *range(5))
    spans = spans_of(*utterances)
    by_id = {span.context.span_id: span for span in spans}
    below = [
        *("utterance", "utterance/queue", "utterance/encode", "utterance/encode/peer", "utterance/decode"),
        *(f"utterance/encode/peer/peer_{name}" for name in ("queue", "encode", "transfer")),
    ]
    assert sorted(path(span, by_id) for span in spans) == sorted(["POST", *[f"POST/{name}" for name in below] * 5])
    assert {span.context.trace_id for span in spans} == {0x0AF7651916CD43DD8448EB211C80319C}
    for span in spans:
        assert span.start_time <= span.end_time
        outer = by_id.get(span.parent.span_id)
        if outer is not None and outer.name != "POST":  # which begins after the work here
            assert outer.start_time <= span.start_time
            assert span.end_time <= outer.end_time
    assert {span.attributes["replica"] for span in spans if span.name == "utterance"} == {"replica 0"}
    assert {span.attributes["peer"] for span in spans if span.name == "peer"} == {roles.encoder}
    encoded = [span for span in spans if span.name == "peer_encode"]
    assert all(span.end_time > span.start_time and span.attributes["process"] == "peer" for span in encoded)


def test_what_no_peer_encoded_has_no_span_of_one(roles: Roles) -> None:
    """Audio whose answer is cached at the decode replica."""
    (first,) = answered(roles, 5)
    (again,) = answered(roles, 5)
    assert first.peer is not None
    assert again.peer is None
    names = sorted(span.name for span in spans_of(again))
    assert names == ["POST", "decode", "encode", "queue", "utterance"]
