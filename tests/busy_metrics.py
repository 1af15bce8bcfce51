"""Metrics as a busy server with two engines has them: at least one sample of every family."""

from __future__ import annotations

from asr_serve.errors import AtCapacity
from asr_serve.metrics import EngineMetrics, ServerMetrics, render_exposition

MODELS = ("moonshine-tiny-en", "moonshine-base-en")
ROUTE = "/v1/audio/transcriptions"


def busy_engine(model: str) -> EngineMetrics:
    metrics = EngineMetrics(model)
    metrics.queue["interactive"].observe(0.02)
    for stage in metrics.step:
        metrics.step[stage].observe(0.004)
        metrics.batch_rows[stage].observe(12)
        metrics.batch_fill[stage].observe(12 / 64)
    metrics.failed_steps["decode"].inc()
    metrics.occupied_seconds.inc(3.5)
    metrics.set_accelerator(0.4)
    metrics.add_collectives(0.6)
    metrics.pages.set(900)
    metrics.pages_used.set_function(lambda: 45)
    metrics.sessions.set(3)
    metrics.requests["waiting"].set(5)
    metrics.requests["decoding"].set(12)
    metrics.requests["speaking"].set(4)
    metrics.first_sound.observe(0.06)
    metrics.spoken_seconds.inc(12.5)
    metrics.audio_seconds.inc(7.5)
    metrics.tokens.inc(30)
    metrics.fallbacks.inc()
    for found in metrics.prefix_requests:
        metrics.prefix_requests[found].inc()
    metrics.prefix_tokens.inc(192)
    metrics.prefix_evictions.inc()
    metrics.prefix_bytes.set(90_000_000)
    for tier in metrics.tier_bytes:
        metrics.tier_bytes[tier].set(200_000_000)
        metrics.tier_entries[tier].set(120)
    metrics.tier_moves["host", "disk"].inc()
    metrics.tier_lost["room"].inc()
    metrics.tier_failed_writes.inc()
    for work in metrics.tier_seconds:
        metrics.tier_seconds[work].observe(0.02)
    metrics.streams_offloaded.set(40)
    metrics.offloads.inc()
    metrics.restore.observe(0.003)
    metrics.recomputed.inc()
    metrics.peers["ready"].set(2)
    metrics.peer_batches.inc()
    metrics.peer_bytes.inc(4_000_000)
    metrics.peer_failures["gone"].inc()
    for phase in metrics.peer_seconds:
        metrics.peer_seconds[phase].observe(0.05)
    return metrics


def busy_server() -> ServerMetrics:
    metrics = ServerMetrics("1.2.3")
    metrics.requests.labels(ROUTE, "POST", "200").inc()
    metrics.requests_in_flight.labels(ROUTE).inc()
    metrics.request_seconds.labels(ROUTE).observe(0.4)
    metrics.first_text_seconds.labels(ROUTE).observe(0.2)
    metrics.real_time_factor.labels(ROUTE).observe(0.05)
    metrics.rejections.labels(AtCapacity("", "", 1).code).inc()
    metrics.upload_bytes.labels(ROUTE).inc(240_000)
    metrics.upload_audio_seconds.labels(ROUTE).inc(7.5)
    metrics.live_open.labels("/").inc()
    metrics.live_ended.labels("/", "done").inc()
    metrics.live_waiting.set(3)
    for outcome in ("unsure", "timeout", "unavailable"):
        metrics.language_identifications.labels(outcome, "").inc()
    metrics.language_identifications.labels("identified", "de").inc()
    metrics.session_store.up.set(1)
    metrics.governance.requests.labels("default", "canary", "m", "done").inc()
    metrics.governance.stage.labels("default", "canary").set(1)
    metrics.governance.rollbacks.labels("default", "server").inc()
    metrics.governance.shadow_words.labels("default").inc(120)
    metrics.governance.shadow_different_words.labels("default").inc(7)
    metrics.governance.shadow_dropped.labels("default").inc()
    metrics.batch.lines.labels("/v1/audio/transcriptions", "completed").inc()
    metrics.batch.batches.labels("/v1/audio/transcriptions", "completed").inc()
    metrics.batch.open_batches.set(2)
    metrics.batch.waiting_lines.set(1_200)
    metrics.batch.stored_bytes.set(90_000_000)
    metrics.batch.notices.labels("delivered").inc()
    live = metrics.live_route("/")
    live.audio.inc(9.5)
    live.interval.observe(0.5)
    live.final.observe(0.9)
    live.dropped.inc()
    metrics.calls.packets.inc(500)
    metrics.calls.lost.inc(3)
    metrics.calls.dropped("late")
    for model in MODELS:
        metrics.engine_up.labels(model).set_function(lambda: 1)
        metrics.live_turnaround.labels(model).set(0.12)
        metrics.engine_restarts.labels(model).inc()
        metrics.migrations.labels(model, "stream", "state").inc()
        metrics.migration_seconds.labels(model).inc(0.3)
        metrics.queue_requests.labels(model).set(7)
        metrics.queue_capacity.labels(model).set(2_048)
        metrics.queue_fill.labels(model).set(0.6)
        metrics.backlog_seconds.labels(model).set(81.5)
        metrics.ring_slots.labels(model).set(1_024)
        metrics.ring_depth.labels(model).set_function(lambda: 2)
        metrics.ring_full_waits.labels(model).inc()
    return metrics


def busy_exposition() -> bytes:
    return render_exposition(busy_server(), [busy_engine(model).render() for model in MODELS])
