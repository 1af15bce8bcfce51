"""Traces as an exporter sees them: names, parents, times; and over HTTP to a collector."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from asr_serve.errors import OptionError
from asr_serve.server.telemetry import tracing
from asr_serve.server.telemetry.tracing import OtelTracer, Tracer
from asr_serve.types import EngineTimestamps, PeerTimings

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def traced(tracer: OtelTracer, exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    tracer.close()
    return list(exporter.get_finished_spans())


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Iterator[OtelTracer]:
    tracer = OtelTracer(exporter, "asr-serve test")
    yield tracer
    tracer.close()


def engine_work() -> EngineTimestamps:
    """The times an engine would stamp while it works."""
    stamps = []
    for _ in range(4):
        stamps.append(time.time_ns())
        while time.time_ns() == stamps[-1]:
            pass
    return EngineTimestamps(*stamps)


def test_a_request_with_two_utterances(tracer: OtelTracer, exporter: InMemorySpanExporter) -> None:
    with tracer.start_request("POST", {}) as request:
        with request.upload():
            request.engine_phases(engine_work())  # text streams while the upload still runs
        request.engine_phases(engine_work())
        request.set_attributes(model="moonshine-tiny-en", audio_ms=3_000)
        request.set_response("/v1/audio/transcriptions", 200)
    spans = traced(tracer, exporter)

    (root,) = [span for span in spans if span.parent is None]
    assert root.name == "POST /v1/audio/transcriptions"
    assert root.kind is SpanKind.SERVER
    assert root.resource.attributes["service.name"] == "asr-serve test"
    assert dict(root.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/audio/transcriptions",
        "http.response.status_code": 200,
        "process": "server",
        "model": "moonshine-tiny-en",
        "audio_ms": 3_000,
    }
    assert root.status.status_code is StatusCode.UNSET

    by_id = {span.context.span_id: span for span in spans}
    tree = sorted((by_id[span.parent.span_id].name, span.name) for span in spans if span.parent)
    assert tree == [
        *[(root.name, name) for name in ("upload", "utterance", "utterance")],
        *[("utterance", name) for name in ("decode", "decode", "encode", "encode", "queue", "queue")],
    ]
    for span in spans:
        assert span.context.trace_id == root.context.trace_id
        assert span.start_time <= span.end_time
        if span.parent:
            outer = by_id[span.parent.span_id]
            assert outer.start_time <= span.start_time
            assert span.end_time <= outer.end_time
            assert span.attributes["process"] == ("server" if span.name == "upload" else "engine")


def test_the_engines_times_are_its_own(tracer: OtelTracer, exporter: InMemorySpanExporter) -> None:
    with tracer.start_request("POST", {}) as request:
        request.engine_phases(EngineTimestamps(1_000, 4_000, 9_000, 25_000))
    times = {span.name: (span.start_time, span.end_time) for span in traced(tracer, exporter)}
    del times["POST"]
    assert times == {
        "utterance": (1_000, 25_000),
        "queue": (1_000, 4_000),
        "encode": (4_000, 9_000),
        "decode": (9_000, 25_000),
    }


NOW_NS = 1_000_000


@pytest.mark.parametrize(
    ("off_by_ns", "shown_ns"),
    [(0, 0), (-4_000, -3_000), (NOW_NS, NOW_NS - 25_000), (-25_000, -3_000)],
    ids=["our own", "a little slow", "fast", "slow"],
)
def test_the_clock_of_another_host_is_shifted_as_little_as_keeps_order(
    tracer: OtelTracer, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, off_by_ns: int, shown_ns: int
) -> None:
    def at(ns: int) -> int:
        return ns + off_by_ns

    peer = PeerTimings("10.0.0.1:81", at(5_000), at(8_000), 0.5e-6, 1e-6, 0.5e-6)
    with tracer.start_request("POST", {}) as request, monkeypatch.context() as patched:
        patched.setattr(tracing.time, "time_ns", lambda: NOW_NS)
        request.engine_phases(EngineTimestamps(1_000, at(4_000), at(9_000), at(25_000), peer))
    times = {span.name: (span.start_time, span.end_time) for span in traced(tracer, exporter)}
    del times["POST"]
    assert times.pop("utterance") == (1_000, 25_000 + shown_ns)
    assert times.pop("queue") == (1_000, 4_000 + shown_ns)
    assert {name: (start - shown_ns, end - shown_ns) for name, (start, end) in times.items()} == {
        "encode": (4_000, 9_000),
        "peer": (5_000, 8_000),
        "peer_queue": (5_500, 6_000),
        "peer_encode": (6_000, 7_000),
        "peer_transfer": (7_000, 7_500),
        "decode": (9_000, 25_000),
    }


def test_a_peer_that_reports_impossible_times_stays_within_its_answer(
    tracer: OtelTracer, exporter: InMemorySpanExporter
) -> None:
    peer = PeerTimings("10.0.0.1:81", 5_000, 8_000, 2e-6, 3e-6, 3e-6)
    with tracer.start_request("POST", {}) as request:
        request.engine_phases(EngineTimestamps(1_000, 4_000, 9_000, 25_000, peer))
    times = {span.name: (span.start_time, span.end_time) for span in traced(tracer, exporter)}
    assert [times[f"peer_{name}"] for name in ("queue", "encode", "transfer")] == [
        (5_000, 7_000),
        (7_000, 8_000),
        (8_000, 8_000),
    ]


def test_the_callers_trace_is_continued(tracer: OtelTracer, exporter: InMemorySpanExporter) -> None:
    with tracer.start_request("POST", {"traceparent": CALLER}):
        pass
    (root,) = traced(tracer, exporter)
    assert root.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert root.parent.span_id == 0xB7AD6B7169203331
    assert root.parent.is_remote


def test_a_trace_the_caller_does_not_record_is_not_recorded(tracer: OtelTracer, exporter: InMemorySpanExporter) -> None:
    with tracer.start_request("POST", {"traceparent": CALLER[:-1] + "0"}) as request:
        with request.upload():
            pass
        request.engine_phases(engine_work())
        request.set_response("/asr", 200)
    assert traced(tracer, exporter) == []


@pytest.mark.parametrize("header", ["", "nonsense", CALLER[:-4], "00-" + "0" * 32 + "-b7ad6b7169203331-01", "\x00"])
def test_a_bad_traceparent_begins_a_trace_of_our_own(
    tracer: OtelTracer, exporter: InMemorySpanExporter, header: str
) -> None:
    with tracer.start_request("POST", {"traceparent": header}):
        pass
    (root,) = traced(tracer, exporter)
    assert root.parent is None


def test_a_request_that_breaks_off(tracer: OtelTracer, exporter: InMemorySpanExporter) -> None:
    with pytest.raises(ConnectionError), tracer.start_request("POST", {}) as request, request.upload():
        raise ConnectionError("what the message says stays out of the trace")
    upload, root = traced(tracer, exporter)
    assert (upload.name, root.name) == ("upload", "POST")
    assert root.status.status_code is StatusCode.ERROR
    assert root.attributes["error.type"] == "ConnectionError"
    assert "stays out" not in root.to_json() + upload.to_json()


@pytest.mark.parametrize(("status", "failed"), [(200, False), (429, False), (500, True), (503, True)])
def test_only_our_own_failures_are_errors(
    tracer: OtelTracer, exporter: InMemorySpanExporter, status: int, failed: bool
) -> None:
    with tracer.start_request("POST", {}) as request:
        request.set_response("/asr", status)
    (root,) = traced(tracer, exporter)
    assert (root.status.status_code is StatusCode.ERROR) == failed
    assert root.attributes.get("error.type") == (str(status) if failed else None)


def test_without_an_endpoint_nothing_is_loaded() -> None:
    script = """if True:
        import sys
        from asr_serve.server.telemetry.tracing import Tracer
        from asr_serve.types import EngineTimestamps
        tracer = Tracer.create(None, "asr-serve")
        with tracer.start_request("POST", {"traceparent": "x"}) as request:
            with request.upload():
                request.engine_phases(EngineTimestamps(1, 2, 3, 4))
            request.set_attributes(model="m")
            request.set_response("/asr", 200)
        tracer.close()
        sys.exit(any(name.split(".")[0] in ("opentelemetry", "torch") for name in sys.modules))
    """
    environ = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", script], env=environ, check=False).returncode == 0


def test_asked_for_and_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(OptionError) as caught:
        Tracer.create("http://127.0.0.1:4318", "asr-serve")
    assert caught.value.param == "otel_endpoint"
    assert "pip install 'asr-serve[otel]'" in str(caught.value)


@pytest.mark.parametrize("suffix", ["", "/", "/v1/traces"])
def test_spans_reach_a_collector(suffix: str) -> None:
    bodies: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        tracer = Tracer.create(f"http://127.0.0.1:{server.server_port}{suffix}", "asr-serve")
        with tracer.start_request("POST", {}) as request:
            request.engine_phases(engine_work())
            request.set_response("/asr", 200)
        tracer.close()
        server.shutdown()
        thread.join(60)
    assert {path for path, _ in bodies} == {"/v1/traces"}
    sent = [ExportTraceServiceRequest.FromString(body) for _, body in bodies]
    names = [s.name for m in sent for r in m.resource_spans for scope in r.scope_spans for s in scope.spans]
    assert sorted(names) == ["POST /asr", "decode", "encode", "queue", "utterance"]


@pytest.mark.slow
def test_a_collector_that_is_away_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "TRACER_CLOSE_S", 0.2)
    before = set(threading.enumerate())
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as taken:
        port = taken.server_port
    tracer = Tracer.create(f"http://127.0.0.1:{port}", "asr-serve")
    began = time.monotonic()
    for _ in range(3_000):  # more than the SDK keeps
        with tracer.start_request("POST", {}) as request:
            request.set_response("/asr", 200)
    tracer.close()
    assert time.monotonic() - began < 60  # an exporter that is waited for tries again for longer
    for thread in set(threading.enumerate()) - before:
        thread.join(60)  # it waits random times: `random` is not for others to use while hypothesis draws
