"""All metrics. docs/metrics.md explains each, and what to do when it changes.

The engine and the server are two processes, each with its own registry; `render_exposition` joins both into one
text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Media type of the text that `render_exposition` returns."""

STAGES = ("vad", "chunk", "encode", "verify", "decode", "hotwords", "speak", "turn", "speakers")
PRIORITIES = ("live", "interactive", "bulk")
STATES = ("waiting", "decoding", "speaking")
MIGRATIONS = (("session", "state"), ("stream", "state"), ("stream", "replay"))
TIERS = ("host", "disk")
TIER_MOVES = (("device", "host"), ("host", "disk"), ("disk", "host"), ("host", "device"))
TIER_LOSSES = ("room", "corrupted", "failed")
PEER_STATES = ("connecting", "ready", "refused")
PEER_FAILURES = ("unreachable", "refused", "gone", "timeout", "corrupted", "malformed")
PEER_PHASES = ("waiting", "encoding", "transfer", "whole")

STEP_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
WAIT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 30, 60)
"""Bounds for waiting times, finest between 100 ms and 1 s, where a listener begins to notice."""
FIRST_SOUND_BUCKETS_S = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.75, 1, 2.5, 5, 10)
"""Bounds for the latency of speech, finest up to 250 ms, within which a listener expects an answer to begin."""
REQUEST_BUCKETS_S = (*WAIT_BUCKETS_S, 120, 300, 900, 3_600)
"""Bounds for whole requests: recordings of hours pass through the same routes."""
REAL_TIME_FACTOR_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 3, 10)
"""Bounds for the real-time factor; above 1 the request took longer than its audio lasts."""
BATCH_ROWS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024)
BATCH_FILL_BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)


class EngineMetrics:
    """Metrics of an engine process. Labels are resolved once, so that a step costs no label look-up:
    `metrics.step["decode"].observe(seconds)`."""

    def __init__(self, model: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)

        queue = histogram(
            "asr_serve_queue_seconds",
            "Time from admission of an utterance to the start of its encoding.",
            ("model", "priority"),
            buckets=WAIT_BUCKETS_S,
        )
        self.queue = {priority: queue.labels(model, priority) for priority in PRIORITIES}
        step = histogram(
            "asr_serve_step_seconds", "Time of one step of a stage.", ("model", "stage"), buckets=STEP_BUCKETS_S
        )
        self.step = {stage: step.labels(model, stage) for stage in STAGES}
        rows = histogram(
            "asr_serve_batch_rows",
            "Callers or utterances in one step; token positions (verify).",
            ("model", "stage"),
            buckets=BATCH_ROWS_BUCKETS,
        )
        self.batch_rows = {stage: rows.labels(model, stage) for stage in STAGES}
        fill = histogram(
            "asr_serve_batch_fill_ratio",
            "Share of a step in use: windows of those computed (vad), frames of those planned for (encode), "
            "positions of those in one pass (verify), rows of those there are (decode, chunk, speak); 1 for turn.",
            ("model", "stage"),
            buckets=BATCH_FILL_BUCKETS,
        )
        self.batch_fill = {stage: fill.labels(model, stage) for stage in STAGES}
        failed = counter("asr_serve_failed_steps_total", "Steps that raised an error.", ("model", "stage"))
        self.failed_steps = {stage: failed.labels(model, stage) for stage in STAGES}

        self.occupied_seconds = counter(
            "asr_serve_occupied_seconds_total",
            "Time of steps, each times the used share of its capacity: its rate is the occupancy of the device.",
            ("model",),
        ).labels(model)
        self._model = model
        # What an engine cannot measure has no sample: 0 would mean that an accelerator is idle.
        self._accelerator = gauge(
            "asr_serve_accelerator_utilization_ratio",
            "Share of the last moments in which the accelerator computed anything.",
            ("model",),
        )
        self._collectives = counter(
            "asr_serve_collective_seconds_total",
            "Time in collectives of a decoder that is split over processes, as rank 0 sees it.",
            ("model",),
        )

        self.pages = gauge("asr_serve_pages", "Pages of decoder memory there are.", ("model",)).labels(model)
        self.pages_used = gauge(
            "asr_serve_pages_used", "Pages of decoder memory that are lent out.", ("model",)
        ).labels(model)
        self.sessions = gauge("asr_serve_sessions", "Voice-activity sessions that are open.", ("model",)).labels(model)
        requests = gauge("asr_serve_engine_requests", "Utterances or sentences in the engine.", ("model", "state"))
        self.requests = {state: requests.labels(model, state) for state in STATES}

        self.audio_seconds = counter("asr_serve_audio_seconds_total", "Audio recognised.", ("model",)).labels(model)
        self.first_sound = histogram(
            "asr_serve_first_sound_seconds",
            "Time from admission of a sentence to its first sound; the count is of sentences.",
            ("model",),
            buckets=FIRST_SOUND_BUCKETS_S,
        ).labels(model)
        self.spoken_seconds = counter("asr_serve_spoken_seconds_total", "Speech made.", ("model",)).labels(model)
        self.tokens = counter("asr_serve_tokens_total", "Tokens decoded.", ("model",)).labels(model)
        drafts = counter("asr_serve_draft_tokens_total", "Tokens of drafts: held, or dropped.", ("model", "verdict"))
        self.draft_tokens = {verdict: drafts.labels(model, verdict) for verdict in ("held", "dropped")}
        self.fallbacks = counter(
            "asr_serve_fallbacks_total",
            "Utterances decoded again: with all of their window, or at a higher temperature.",
            ("model",),
        ).labels(model)

        found = counter(
            "asr_serve_prefix_requests_total",
            "Utterances answered, by what was known of the same audio: the answer, its audio as encoded, or none.",
            ("model", "found"),
        )
        self.prefix_requests = {what: found.labels(model, what) for what in ("answer", "audio", "none")}
        self.prefix_tokens = counter(
            "asr_serve_prefix_tokens_total",
            "Tokens of prompts whose keys and values were kept, and not computed.",
            ("model",),
        ).labels(model)
        self.prefix_evictions = counter(
            "asr_serve_prefix_evictions_total", "Utterances whose audio was kept and gave way.", ("model",)
        ).labels(model)
        self.prefix_bytes = gauge(
            "asr_serve_prefix_bytes",
            "Memory of what was heard before: answers, voice activity, and pages whoever holds them.",
            ("model",),
        ).labels(model)

        peers = gauge("asr_serve_peers", "Engines that this one asks to encode.", ("model", "state"))
        self.peers = {state: peers.labels(model, state) for state in PEER_STATES}
        self.peer_batches = counter("asr_serve_peer_batches_total", "Batches that peers encoded.", ("model",)).labels(
            model
        )
        self.peer_bytes = counter(
            "asr_serve_peer_bytes_total", "Bytes that came of them, by shared memory or a network.", ("model",)
        ).labels(model)
        failures = counter(
            "asr_serve_peer_failures_total", "Peers that were lost, or not to be had.", ("model", "reason")
        )
        self.peer_failures = {reason: failures.labels(model, reason) for reason in PEER_FAILURES}
        phases = histogram(
            "asr_serve_peer_seconds",
            "Time of an utterance at a peer, by phase: it waits there, its batch is encoded, the result is "
            "transferred; and the whole of it, as this engine sees it.",
            ("model", "phase"),
            buckets=WAIT_BUCKETS_S,
        )
        self.peer_seconds = {phase: phases.labels(model, phase) for phase in PEER_PHASES}

        tier_bytes = gauge("asr_serve_tier_bytes", "Offloaded streams, and what the cache gave up.", ("model", "tier"))
        self.tier_bytes = {tier: tier_bytes.labels(model, tier) for tier in TIERS}
        entries = gauge("asr_serve_tier_entries", "The same, in number.", ("model", "tier"))
        self.tier_entries = {tier: entries.labels(model, tier) for tier in TIERS}
        moves = counter(
            "asr_serve_tier_moves_total", "Copies of entries from one tier to another.", ("model", "from", "to")
        )
        self.tier_moves = {(source, to): moves.labels(model, source, to) for source, to in TIER_MOVES}
        lost = counter("asr_serve_tier_lost_entries_total", "Entries that were given up.", ("model", "reason"))
        self.tier_lost = {reason: lost.labels(model, reason) for reason in TIER_LOSSES}
        self.tier_failed_writes = counter(
            "asr_serve_tier_failed_writes_total",
            "Entries that the disk did not take, and that stay in memory.",
            ("model",),
        ).labels(model)
        spent = histogram(
            "asr_serve_tier_seconds",
            "Time in which the disk read or wrote an entry, those of its batch included.",
            ("model", "work"),
            buckets=STEP_BUCKETS_S,
        )
        self.tier_seconds = {work: spent.labels(model, work) for work in ("read", "write")}

        self.streams_offloaded = gauge(
            "asr_serve_streams_offloaded", "Callers' streams that gave up their slot and are offloaded.", ("model",)
        ).labels(model)
        self.offloads = counter(
            "asr_serve_stream_offloads_total", "Times a caller's stream was offloaded.", ("model",)
        ).labels(model)
        self.restore = histogram(
            "asr_serve_stream_restore_seconds",
            "Time from the next audio of an offloaded stream until it has a slot and its state; the count is of "
            "streams that were restored.",
            ("model",),
            buckets=(*STEP_BUCKETS_S, 10),
        ).labels(model)
        self.recomputed = counter(
            "asr_serve_recomputed_streams_total",
            "Streams whose state was lost while they were offloaded, and that were recomputed or given up.",
            ("model",),
        ).labels(model)

    def set_accelerator(self, utilization: float) -> None:
        """Sets the utilization, 0..1, of the accelerator of an engine that has one."""
        self._accelerator.labels(self._model).set(utilization)

    def add_collectives(self, seconds: float) -> None:
        """Adds time in collectives, for an engine that has some."""
        self._collectives.labels(self._model).inc(max(0.0, seconds))

    def render(self) -> bytes:
        """Render the registry as Prometheus text, for `render_exposition` in the server."""
        return generate_latest(self.registry)


class LiveRouteMetrics(NamedTuple):
    """Metrics of one route's live sessions, with resolved labels."""

    audio: Counter
    interval: Histogram
    final: Histogram
    dropped: Counter


class CallMetrics(NamedTuple):
    """Metrics of calls over WebRTC."""

    packets: Counter
    lost: Counter
    dropped_by_reason: Counter

    def dropped(self, reason: str) -> None:
        self.dropped_by_reason.labels(reason).inc()


class SessionStoreMetrics(NamedTuple):
    """Metrics of the store of live sessions."""

    up: Gauge
    write: Histogram
    refused: Counter
    rewritten: Counter


class BatchMetrics(NamedTuple):
    """Metrics of /v1/files and /v1/batches."""

    lines: Counter
    batches: Counter
    open_batches: Gauge
    waiting_lines: Gauge
    stored_bytes: Gauge
    notices: Counter


class GovernanceMetrics(NamedTuple):
    """Metrics of the routes of a policy."""

    requests: Counter
    stage: Gauge
    rollbacks: Counter
    shadow_words: Counter
    shadow_different_words: Counter
    shadow_dropped: Counter


class ServerMetrics:
    """Metrics of the server. `route` is the template that a request matched, never its path: clients must not be
    able to add labels. Series with the label `model` exist while the model is loaded."""

    def __init__(self, version: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)

        self.requests = counter("asr_serve_requests_total", "HTTP requests answered.", ("route", "method", "status"))
        self.requests_in_flight = gauge(
            "asr_serve_requests_in_flight", "HTTP requests begun and not yet answered.", ("route",)
        )
        self.request_seconds = histogram(
            "asr_serve_request_seconds",
            "Time from the head of a request to the last byte of its answer.",
            ("route",),
            buckets=REQUEST_BUCKETS_S,
        )
        self.first_text_seconds = histogram(
            "asr_serve_first_text_seconds",
            "Time from the head of a request to the first text of its answer.",
            ("route",),
            buckets=REQUEST_BUCKETS_S,
        )
        self.real_time_factor = histogram(
            "asr_serve_real_time_factor",
            "Seconds spent on a request per second of its audio.",
            ("route",),
            buckets=REAL_TIME_FACTOR_BUCKETS,
        )
        self.rejections = counter(
            "asr_serve_rejections_total", "Requests refused or given up, by the code of the error.", ("reason",)
        )
        self.upload_bytes = counter("asr_serve_upload_bytes_total", "Bytes of request bodies read.", ("route",))
        self.upload_audio_seconds = counter(
            "asr_serve_upload_audio_seconds_total", "Audio decoded from request bodies.", ("route",)
        )
        self.live_open = gauge("asr_serve_live_open_sessions", "WebSockets and calls that are open.", ("route",))
        self.live_ended = counter(
            "asr_serve_live_sessions_total",
            "WebSockets and calls that were open, by how they ended: done, client_gone in the middle of a session, or "
            "the code of an error.",
            ("route", "end"),
        )
        self.live_audio_seconds = counter("asr_serve_live_audio_seconds_total", "Audio of live sessions.", ("route",))
        self.live_waiting = gauge(
            "asr_serve_live_waiting_sessions", "Sessions of /v1/stream that lost their connection and wait for another."
        )
        self.resumes = counter(
            "asr_serve_live_resumes_total",
            "Connections that asked to go on with a session: resumed, or the code of the error.",
            ("outcome",),
        )
        for outcome in ("resumed", "taken_over", "session_expired", "events_expired"):
            self.resumes.labels(outcome)
        self.calls = CallMetrics(
            counter("asr_serve_webrtc_packets_total", "RTP packets of calls that arrived."),
            counter("asr_serve_webrtc_lost_packets_total", "RTP packets of calls that did not arrive in time."),
            counter(
                "asr_serve_webrtc_dropped_datagrams_total",
                "Datagrams of calls that were dropped, by reason.",
                ("reason",),
            ),
        )
        self._session_store_up = gauge(
            "asr_serve_session_store_up",
            "1 while the store accepts writes. Without sessions.redis_url there is no sample.",
            ("store",),
        )
        self._session_store_write = histogram(
            "asr_serve_session_store_write_seconds",
            "Time of one batch of writes of live sessions to Redis.",
            buckets=STEP_BUCKETS_S,
        )
        self._session_store_refused = counter(
            "asr_serve_session_store_refused_writes_total",
            "Writes that Redis refused since another server had claimed their session, which ended here.",
        )
        self._session_store_rewritten = counter(
            "asr_serve_session_store_rewritten_sessions_total",
            "Live sessions that Redis did not have any more, and that were written whole.",
        )
        self.live_partial_interval = histogram(
            "asr_serve_live_partial_interval_seconds",
            "Time between two partials of one sentence.",
            ("route",),
            buckets=WAIT_BUCKETS_S,
        )
        self.live_final = histogram(
            "asr_serve_live_final_seconds",
            "Time from the arrival of the audio that decided a sentence's end to its locked text.",
            ("route",),
            buckets=WAIT_BUCKETS_S,
        )
        self.live_turnaround = gauge(
            "asr_serve_live_turnaround_seconds",
            "Mean time that a live caller's request took lately, in and out of the engine.",
            ("model",),
        )
        self.live_dropped = counter(
            "asr_serve_live_dropped_partials_total",
            "Partials that a newer one replaced before the client took them.",
            ("route",),
        )
        self.language_identifications = counter(
            "asr_serve_language_identification_requests_total",
            "Recordings and live sessions whose language was to be identified, by what came of it.",
            ("outcome", "language"),
        )
        self.engine_up = gauge("asr_serve_engine_up", "1 while the engine process can take work.", ("model",))
        self.engine_restarts = counter(
            "asr_serve_engine_restarts_total", "Engine processes started in place of a dead one.", ("model",)
        )
        self.migrations = counter(
            "asr_serve_migrations_total",
            "What went to another engine process while that lived, by how: from where it stood, or heard again.",
            ("model", "what", "how"),
        )
        self.migration_seconds = counter(
            "asr_serve_migration_seconds_total",
            "Time that streams' audio waited on their way to another engine process, all together.",
            ("model",),
        )
        self.queue_requests = gauge(
            "asr_serve_ingress_queue_requests",
            "Utterances and sentences that this server has admitted and no engine has begun.",
            ("model",),
        )
        self.queue_capacity = gauge(
            "asr_serve_ingress_queue_capacity_requests", "Requests that this server admits at once.", ("model",)
        )
        self.queue_fill = gauge(
            "asr_serve_ingress_queue_fill_ratio",
            "Used share of what this server admits at once: requests or their audio, whichever is fuller.",
            ("model",),
        )
        self.backlog_seconds = gauge(
            "asr_serve_backlog_seconds", "Audio that this server has admitted and not answered.", ("model",)
        )
        self.ring_slots = gauge("asr_serve_ring_slots", "Slots of the ring of audio to the engine.", ("model",))
        self.ring_depth = gauge("asr_serve_ring_depth", "Slots written and not yet read.", ("model",))
        self.ring_full_waits = counter(
            "asr_serve_ring_full_waits_total", "Times the server waited for a free slot.", ("model",)
        )
        self.batch = BatchMetrics(
            counter(
                "asr_serve_batch_lines_total",
                "Lines of batches that were answered: completed, or failed by an error of their own.",
                ("endpoint", "outcome"),
            ),
            counter("asr_serve_batches_total", "Batches that ended, by their last status.", ("endpoint", "status")),
            gauge("asr_serve_batch_open_batches", "Batches that have not ended."),
            gauge("asr_serve_batch_waiting_lines", "Lines of batches without an answer."),
            gauge("asr_serve_batch_stored_bytes", "Bytes of files, lines and answers of /v1/files and /v1/batches."),
            counter(
                "asr_serve_batch_webhook_notices_total",
                "Ends of batches for the webhook: delivered, or dropped after days of attempts.",
                ("outcome",),
            ),
        )
        self.governance = GovernanceMetrics(
            counter(
                "asr_serve_policy_requests_total",
                "Recordings and live sessions of a policy's routes that were finished: done, or failed by the model.",
                ("policy_route", "stage", "model", "outcome"),
            ),
            gauge("asr_serve_policy_stage_routes", "1 for the stage that a route is in.", ("policy_route", "stage")),
            counter(
                "asr_serve_policy_rollbacks_total",
                "Candidates that were taken back: by the server, since they broke a rule, or by an administrator.",
                ("policy_route", "by"),
            ),
            counter(
                "asr_serve_policy_shadow_words_total",
                "Words of the stable model in recordings that the shadow transcribed too.",
                ("policy_route",),
            ),
            counter(
                "asr_serve_policy_shadow_different_words_total",
                "Words in which the shadow differs: replaced, left out or added.",
                ("policy_route",),
            ),
            counter(
                "asr_serve_policy_shadow_dropped_requests_total",
                "Recordings that a shadow was not given, since it had enough to do, or they were too long.",
                ("policy_route",),
            ),
        )
        gauge("asr_serve_build_info", "Always 1; the label says which build.", ("version",)).labels(version).set(1)

    def live_route(self, route: str) -> LiveRouteMetrics:
        self.live_ended.labels(route, "done")  # from the start, so that `rate` sees the first
        return LiveRouteMetrics(
            self.live_audio_seconds.labels(route),
            self.live_partial_interval.labels(route),
            self.live_final.labels(route),
            self.live_dropped.labels(route),
        )

    @property
    def session_store(self) -> SessionStoreMetrics:
        return SessionStoreMetrics(
            self._session_store_up.labels("redis"),
            self._session_store_write,
            self._session_store_refused,
            self._session_store_rewritten,
        )

    def remove_model(self, model: str) -> None:
        """Remove the series of a model that has been unloaded."""
        for metric in (
            self.engine_up,
            self.live_turnaround,
            self.engine_restarts,
            self.migration_seconds,
            self.queue_requests,
            self.queue_capacity,
            self.queue_fill,
            self.backlog_seconds,
            self.ring_slots,
            self.ring_depth,
            self.ring_full_waits,
        ):
            metric.remove(model)
        for what, how in MIGRATIONS:
            self.migrations.remove(model, what, how)


EDGE_DROPS = (
    *("not_rtp", "malformed", "rtcp", "unknown_source", "over_rate", "truncated", "unknown_payload_type"),
    *("bad_payload", "duplicate", "late", "jump", "srtp_auth", "srtp_replay", "checksum", "kernel"),
    "unknown_token",
)
SIP_MESSAGES = ("received", "malformed", "not_allowed", "out_of_dialog", "method_not_allowed", "unauthorized")
CALL_OUTCOMES = ("answered", "busy", "unavailable", "not_acceptable", "cancelled", "rejected", "failed")
EDGE_AUDIO = ("received", "concealed", "silent", "discarded")
JITTER_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5)


class EdgeMetrics:
    """Metrics of `asr-serve edge`. Sources are no labels: anybody can send from any number of them."""

    def __init__(self, version: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        self._packets = counter("asr_serve_edge_packets_total", "Datagrams received, those dropped included.")
        dropped = counter("asr_serve_edge_dropped_packets_total", "Datagrams dropped, by reason.", ("reason",))
        self._dropped = {reason: dropped.labels(reason) for reason in EDGE_DROPS}
        self._lost = counter("asr_serve_edge_lost_packets_total", "Packets of sessions that never arrived.")
        audio = counter(
            "asr_serve_edge_audio_seconds_total",
            "Audio of sessions: received, concealed where packets were lost, silent, or discarded by a full spool.",
            ("kind",),
        )
        self._audio = {kind: audio.labels(kind) for kind in EDGE_AUDIO}
        self._sessions = gauge("asr_serve_edge_sessions", "Sessions that take packets.")
        self.uplinks = gauge("asr_serve_edge_connected_sessions", "Sessions with a connection to the server.")
        self._jitter = Histogram(
            "asr_serve_edge_jitter_seconds",
            "Interarrival jitter of each session, once a second.",
            buckets=JITTER_BUCKETS_S,
            registry=self.registry,
        )
        self._drift = gauge(
            "asr_serve_edge_drift_ratio", "Largest drift of a sender's clock, its seconds over ours, less one."
        )
        self._ungated = counter(
            "asr_serve_edge_ungated_audio_seconds_total",
            "Audio sent on without a look for speech: it waited too long, or voice activity had no place, or failed.",
        )
        self._ungated_s = 0.0
        posted = counter(
            "asr_serve_edge_webhook_events_total", "Events for the webhook, by what became of them.", ("outcome",)
        )
        self._posted = {outcome: posted.labels(outcome) for outcome in ("delivered", "dropped")}
        self._webhook_counts = {"delivered": 0, "dropped": 0}
        messages = counter(
            "asr_serve_edge_sip_messages_total", "SIP messages received, by what they were.", ("outcome",)
        )
        self._messages = {outcome: messages.labels(outcome) for outcome in SIP_MESSAGES}
        self._sip_counts = dict.fromkeys((*SIP_MESSAGES, "busy", "not_acceptable"), 0)
        calls = counter("asr_serve_edge_calls_total", "Calls, by what became of them.", ("outcome",))
        self._calls = {outcome: calls.labels(outcome) for outcome in CALL_OUTCOMES}
        self.open_calls = gauge("asr_serve_edge_open_calls", "Telephone calls that have not ended.")
        self.registered = gauge("asr_serve_edge_sip_registered", "1 while a registrar knows this edge, else 0.")
        self._streams: dict[int, tuple[float, ...]] = {}
        """Totals of each session that have been counted."""
        gauge("asr_serve_edge_build_info", "Always 1; the label says which build.", ("version",)).labels(version).set(1)

    def count_drop(self, reason: str, packets: int = 1) -> None:
        self._dropped[reason].inc(packets)

    def count_driver(self, counts: dict[str, int]) -> None:
        """Adds what a driver has counted since the last time."""
        for name, count in counts.items():
            if name == "received":
                self._packets.inc(count)
            else:
                self.count_drop(name, count)

    def count_stream(self, key: int, audio_s: tuple[float, float, float, float], lost_packets: int) -> None:
        """Adds what a session has more than the last time; `audio_s` is its totals of EDGE_AUDIO."""
        totals = (*audio_s, float(lost_packets))
        before = self._streams.get(key, (0.0,) * len(totals))
        self._streams[key] = totals
        *audio, lost = (max(0.0, now - then) for now, then in zip(totals, before, strict=True))
        for kind, seconds in zip(EDGE_AUDIO, audio, strict=True):
            self._audio[kind].inc(seconds)
        self._lost.inc(lost)

    def forget_stream(self, key: int) -> None:
        self._streams.pop(key, None)

    def note_sessions(self, jitters_s: list[float], drifts_ppm: list[float]) -> None:
        """Notes the open sessions."""
        self._sessions.set(len(jitters_s))
        self._drift.set(max(drifts_ppm, key=abs, default=0.0) * 1e-6)
        for jitter_s in jitters_s:
            self._jitter.observe(jitter_s)

    def note_ungated(self, total_s: float) -> None:
        """Notes the total of audio that voice activity was too slow for."""
        self._ungated.inc(total_s - self._ungated_s)
        self._ungated_s = total_s

    def note_webhook(self, **counts: int) -> None:
        """Notes the totals of the webhook: delivered, dropped."""
        for outcome, count in counts.items():
            self._posted[outcome].inc(count - self._webhook_counts[outcome])
            self._webhook_counts[outcome] = count

    def count_call(self, outcome: str) -> None:
        self._calls[outcome].inc()

    def note_sip(self, counts: Mapping[str, int]) -> None:
        """Notes the totals of SIP messages, by SIP_MESSAGES, and of calls that were refused before anybody saw them."""
        for outcome, count in self._sip_counts.items():
            counted = self._messages[outcome] if outcome in SIP_MESSAGES else self._calls[outcome]
            counted.inc(counts.get(outcome, 0) - count)
            self._sip_counts[outcome] = counts.get(outcome, 0)

    def render(self) -> bytes:
        """Render the registry as Prometheus text."""
        text = generate_latest(self.registry).decode()
        return "".join(f"{line}\n" for line in text.splitlines() if "_created" not in line).encode()


def render_exposition(server: ServerMetrics, engines: Iterable[bytes]) -> bytes:
    """Render the server's metrics and those of its engines (`EngineMetrics.render`) as one Prometheus text: each
    family once, with the samples of all engines together."""
    families: dict[str, list[str]] = {}
    for text in (generate_latest(server.registry), *engines):
        family: list[str] = []
        for line in text.decode().split("\n"):
            if line.startswith("# HELP "):
                family = families.setdefault(line.split(" ", 3)[2], [])
            if line.startswith("#") and line in family:
                continue  # repeated from the previous engine
            family.append(line)
    # The library adds the creation time of each series; nothing reads it, and it doubles the number of families.
    exposed = (family for name, family in families.items() if not name.endswith("_created"))
    return "".join(f"{line}\n" for family in exposed for line in family if line).encode()
