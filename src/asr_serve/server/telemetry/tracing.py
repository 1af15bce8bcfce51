"""Traces for OpenTelemetry, which only this file loads, and only when traces are configured.

    POST /v1/audio/transcriptions      a request, in the server
    ├── upload                         its body, up to the last byte
    └── utterance                      each segment, in the engine process
        ├── queue                      admitted, waiting
        ├── encode
        │   └── peer               at an engine that encodes for others
        │       ├── peer_queue
        │       ├── peer_encode
        │       └── peer_transfer
        └── decode

Engines have no part in this: their times are returned with each result (`types.EngineTimestamps`), those of a peer by
way of the engine that decodes, and their spans are created from them afterwards. So a request is one tree, however many
processes and hosts serve it. Attributes hold names and sizes, never a key or spoken text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Self

from asr_serve.errors import OptionError
from asr_serve.types import EngineTimestamps, PeerTimings

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SpanExporter

EXPORT_S = 5.0
"""Timeout of one export, retries included."""
TRACER_CLOSE_S = 5.0
"""Longest wait of a shutdown for a collector that does not answer."""


class RequestTrace:
    """Trace of a request that is not traced: every call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Ends the request's span, which names the exception, if any."""

    def upload(self) -> AbstractContextManager[None]:
        """Context manager around reading the body."""
        return nullcontext()

    def engine_phases(self, phases: EngineTimestamps) -> None:
        """Records the times of one utterance in the engine."""

    def set_attributes(self, **attributes: str | int | float) -> None:
        """Adds attributes of the request: model, request_id, audio_ms."""

    def set_response(self, route: str, status: int) -> None:
        """Records the response. `route`: the template that the request matched."""


class Tracer:
    """Starts a trace for each request. This class traces nothing; `create` returns one that does if configured."""

    @staticmethod
    def create(endpoint: str | None, service_name: str) -> Tracer:
        """Returns a tracer. `endpoint`: base URL of an OTLP/HTTP collector, or None for no traces. Raises OptionError
        if there is an endpoint and OpenTelemetry is not installed."""
        if endpoint is None:
            return Tracer()
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError:
            raise OptionError(
                f"otel_endpoint={endpoint}, and OpenTelemetry is not installed",
                "traces need the extra otel",
                "pip install 'asr-serve[otel]'",
                param="otel_endpoint",
            ) from None
        url = endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"
        return OtelTracer(OTLPSpanExporter(url, timeout=EXPORT_S), service_name)

    def start_request(self, method: str, headers: Mapping[str, str]) -> RequestTrace:
        """Starts a trace now; it continues a valid `traceparent` of `headers` (lower case, or case-insensitive)."""
        return RequestTrace()

    def close(self) -> None:
        """Sends the remaining spans, for TRACER_CLOSE_S at most."""


class OtelTracer(Tracer):
    """Tracer that sends spans to `exporter`, in batches, from a thread of the SDK."""

    def __init__(self, exporter: SpanExporter, service_name: str) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Its own provider, not the process's global one: an embedding application may have that already.
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service_name}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("asr_serve")
        self._propagator = TraceContextTextMapPropagator()

    def start_request(self, method: str, headers: Mapping[str, str]) -> RequestTrace:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(
            method,
            context=self._propagator.extract(headers, Context()),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "process": "server"},
        )
        return _OtelRequestTrace(self._tracer, span, method)

    def close(self) -> None:
        # The SDK waits for half a minute for an unreachable collector.
        closing = Thread(target=self._provider.shutdown, name="asr-serve traces", daemon=True)
        closing.start()
        closing.join(TRACER_CLOSE_S)


class _OtelRequestTrace(RequestTrace):
    def __init__(self, tracer: trace.Tracer, span: trace.Span, method: str) -> None:
        from opentelemetry import trace

        self._api, self._tracer, self._span, self._method = trace, tracer, span, method

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if kind is not None:
            self._fail(kind.__name__)
        self._span.end()

    def upload(self) -> AbstractContextManager[None]:
        return self._upload()

    @contextmanager
    def _upload(self) -> Iterator[None]:
        span = self._child("upload", self._span, "server")
        try:
            yield
        finally:
            span.end()

    def engine_phases(self, phases: EngineTimestamps) -> None:
        shift_ns = _shift_to_our_clock(phases, time.time_ns())
        begun_ns, encoded_ns, ended_ns = (
            stamp_ns + shift_ns for stamp_ns in (phases.encode_start_ns, phases.encode_end_ns, phases.decode_end_ns)
        )
        utterance = self._child("utterance", self._span, "engine", phases.submitted_ns)
        if phases.replica:
            utterance.set_attribute("replica", phases.replica)
        self._child("queue", utterance, "engine", phases.submitted_ns).end(begun_ns)
        encode = self._child("encode", utterance, "engine", begun_ns)
        if phases.peer is not None:
            self._peer_spans(encode, phases.peer, shift_ns)
        encode.end(encoded_ns)
        self._child("decode", utterance, "engine", encoded_ns).end(ended_ns)
        utterance.end(ended_ns)

    def _peer_spans(self, encode: trace.Span, times: PeerTimings, shift_ns: int) -> None:
        """Creates the spans of a peer's work. Its clock is not asked: what its durations leave of the time between
        request and answer is taken to be the two ways, half each."""
        sent_ns, received_ns = times.sent_ns + shift_ns, times.received_ns + shift_ns
        stages = {"peer_queue": times.waited_s, "peer_encode": times.encoded_s, "peer_transfer": times.transfer_s}
        peer = self._child("peer", encode, "peer", sent_ns)
        peer.set_attribute("peer", times.peer)
        start_ns = sent_ns + max(0, received_ns - sent_ns - round(sum(stages.values()) * 1e9)) // 2
        for name, seconds in stages.items():
            end_ns = min(start_ns + round(seconds * 1e9), received_ns)
            self._child(name, peer, "peer", start_ns).end(end_ns)
            start_ns = end_ns
        peer.end(received_ns)

    def _child(self, name: str, parent: trace.Span, process: str, start_ns: int | None = None) -> trace.Span:
        # The parent is passed, not looked up: a request's work is spread over tasks and threads.
        context = self._api.set_span_in_context(parent)
        return self._tracer.start_span(name, context=context, start_time=start_ns, attributes={"process": process})

    def set_attributes(self, **attributes: str | int | float) -> None:
        self._span.set_attributes(attributes)

    def set_response(self, route: str, status: int) -> None:
        self._span.update_name(f"{self._method} {route}")
        self._span.set_attributes({"http.route": route, "http.response.status_code": status})
        if status >= 500:
            self._fail(str(status))

    def _fail(self, kind: str) -> None:
        self._span.set_attribute("error.type", kind)
        self._span.set_status(self._api.StatusCode.ERROR)


def _shift_to_our_clock(phases: EngineTimestamps, now_ns: int) -> int:
    """Returns what to add to an engine's times: 0 on this host. The clock of another host may be fast or slow, which
    shows where its work would begin before the request or end after now; then the least shift that mends it."""
    return max(phases.submitted_ns - phases.encode_start_ns, min(0, now_ns - phases.decode_end_ns))
