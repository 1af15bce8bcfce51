"""Executor of encoder-decoder models: schedules requests, encodes batches, decodes a token of every row."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from asr_serve.config import EngineConfig
from asr_serve.decoding.language_model.token_models import TokenLanguageModel
from asr_serve.engine.cache.digest import DIGEST_BYTES
from asr_serve.engine.executor import CheckThrottle, LoopContext, StepGuard
from asr_serve.engine.request import RecognitionRequest, reject
from asr_serve.engine.seq2seq.biasing_queue import BiasingQueue
from asr_serve.engine.seq2seq.coalescing import RequestCoalescer
from asr_serve.engine.seq2seq.decode_batch import DecodeRow
from asr_serve.engine.seq2seq.decoder import MAX_VERIFY_POSITIONS, DecodeRunner
from asr_serve.engine.seq2seq.encoder import (
    PEER_LOST_ERRORS,
    BorrowedPages,
    EncodeBatch,
    EncoderPool,
    EncoderResult,
    EncodeRunner,
)
from asr_serve.engine.seq2seq.encoder_cache import EncoderCache
from asr_serve.engine.seq2seq.finalize import Finalizer
from asr_serve.engine.seq2seq.hotword_rescoring import HotwordRescorer
from asr_serve.engine.seq2seq.request_table import RequestTable
from asr_serve.engine.seq2seq.scheduler import LIVE_RESERVE_FRACTION, Seq2SeqScheduler
from asr_serve.errors import Cancelled, OptionError
from asr_serve.models.interfaces import EncoderDecoderModel

if TYPE_CHECKING:
    from asr_serve.engine.remote.peer_pool import PeerPool

MAX_BULK_ENCODES = 8
"""Encode batches in a row while there is only bulk work: decoding is cheapest with all rows taken."""
GATHER_STEPS, GATHER_ROWS = 4, 8
"""Most decoding steps for which requests wait until a whole batch of them can be encoded, and the rows that must decode
meanwhile: some of them end with each step, and their callers send more."""
LIVE_DECODE_STEPS = 6
"""Decoding steps between two encode batches while live rows decode: a verified draft needs a few more tokens, and
encoding takes much longer than a step."""
CONCURRENT_BATCH_DIVISOR = 4
"""Divisor of the size of a batch that one thread encodes beside the loop."""
QUIET_S = 5.0
"""Time without live requests after which files have the engine to themselves."""
DECODE_PACE_S, DECODE_PACE_ROWS = 0.02, 8
"""Least time between decoding steps of fewer rows while every encoder is busy, with live requests."""
UPLOAD_PACE_S, UPLOAD_PACE_DIVISOR = 0.1, 4
"""The same without live requests, where decoding takes a core from encoders; and the divisor of the most decoding rows
that gives how many do not wait."""
UPLOADS_PER_THREAD = 4
"""Interactive requests for each thread from which encoders run beside the loop, until there are half as many. A
server's threads delay one of them then, and not all that would wait for it at the end of each product."""


class Seq2SeqExecutor:
    """Executor of encoder-decoder models: owns the runners and every open request. See ModelExecutor."""

    def __init__(
        self,
        model: EncoderDecoderModel,
        encode: EncodeRunner,
        decode: DecodeRunner,
        config: EngineConfig,
        text: Callable[[list[int]], str],
        tokens_per_s: float,
        on_done: Callable[[int], None],
        on_start: Callable[[list[int]], None],
        *,
        incremental: bool = False,
        encoder_cache: EncoderCache | None = None,
        peers: PeerPool | None = None,
        encode_text: Callable[[str], list[int]] | None = None,
        language_models: Mapping[str, TokenLanguageModel] = MappingProxyType({}),
    ) -> None:
        """`incremental`: live audio is encoded elsewhere, while it arrives (see IncrementalEncoderExecutor).
        `encoder_cache`: cache of earlier requests; None: every request is computed. `peers`: engines that encode too.
        `encode_text`: hotwords to tokens. `language_models`: those of beam search by
        name."""
        self.incremental, self.borrowed_page_count = incremental, 0
        """`borrowed_page_count`: pages of the runner that the incremental encoder holds; no row frees them."""
        self.model, self.device, self.encode_runner, self.decode_runner = model, encode.device, encode, decode
        self.scheduler = Seq2SeqScheduler(
            config, config.encode_frames or encode.device.encode_frames, packed=encode.device.packs_clips
        )
        self.requests = RequestTable(
            model, decode, config.window, text, tokens_per_s, on_done, on_start, language_models
        )
        self.open_requests = self.requests.open
        self.biasing_queue = BiasingQueue(encode_text, text, lambda job: self.loop.call(job), self._fail)
        self.coalescer = RequestCoalescer(
            encoder_cache,
            lambda request, like: self.scheduler.enqueue(self.requests.to_scheduled(request, like)),
            lambda request: self.scheduler.remove(request.id),
            lambda ids: self.requests.on_start(ids),
            self.requests.finish_from_cache,
            lambda: decode.page_pool.free_count - self.encoder_pool.reserved_pages,
            lambda job: self.loop.call(job),
            time.monotonic,
        )
        rescorer = HotwordRescorer(decode, text)
        self.finalizer = Finalizer(decode, self.requests, self.coalescer, rescorer, self._guard)
        self._encoded_elsewhere: deque[int] = deque()
        """Requests with borrowed pages that wait for a row."""
        self.peers, self._alone, self._decoded_s = peers, config.role == "both", -DECODE_PACE_S
        self._pace_s, self._pace_rows = DECODE_PACE_S, DECODE_PACE_ROWS
        self._many_uploads = False
        """Whether encoders run beside the loop for interactive requests."""
        self._deferring = False
        """Whether the last decoding pass left drafts of requests that are not urgent to the next one."""
        self._gathered_steps = 0
        """Decoding steps for which requests were left waiting."""
        self._check_throttle = CheckThrottle()

    def attach(self, context: LoopContext) -> None:
        self.loop, self.requests.stats = context, context.stats
        if self.coalescer.cache is not None:
            self.coalescer.cache.stats = context.stats
        self.encoder_pool = EncoderPool(
            self.encode_runner,
            lambda *encoded: context.call(lambda: self._on_encoded(*encoded)),
            self.peers,
            lambda: context.call(lambda: None),
            alone=self._alone,
        )
        self.decode_runner.decoder.watch(context.call)

    @property
    def due_s(self) -> float | None:
        decoding = self._decoded_s + self._pace_s if self.decode_runner.all_rows else None
        return min((due for due in (decoding, self.coalescer.due_s) if due is not None), default=None)

    @property
    def idle(self) -> bool:
        return not self.encoder_pool.in_flight

    def check(self) -> None:
        runner = self.decode_runner
        if self._check_throttle(runner.page_pool.pages + self.coalescer.check_cost):
            runner.page_pool.check()
            self.coalescer.check_cache()
        if not runner.all_rows:
            assert runner.page_pool.used_count == self.borrowed_page_count, "no row decodes, but pages are in use"
        self.encoder_pool.check()
        self.coalescer.check(idle=not self.open_requests)
        waiting = (
            len(self.scheduler) + len(self._encoded_elsewhere) + self.coalescer.waiting + self.biasing_queue.waiting
        )
        assert len(self.open_requests) == runner.request_count + waiting, "a request was lost"

    def shutdown(self, error: Exception) -> None:
        self.encoder_pool.close()
        self.biasing_queue.close()
        try:
            self._fail(list(self.open_requests), error)
        finally:
            for utterance in self.open_requests.values():
                reject(utterance.future, error)
            self.decode_runner.decoder.close()

    def cached_audio(self) -> list[bytes]:
        cache = self.coalescer.cache
        return [] if cache is None else [root[:DIGEST_BYTES] for root in cache.prefix_cache.roots if root]

    def watch_audio(self, on_change: Callable[[bytes, bool], None]) -> None:
        def on_root(root: bytes, cached: bool) -> None:
            if root:
                on_change(root[:DIGEST_BYTES], cached)

        if (cache := self.coalescer.cache) is not None:
            cache.prefix_cache.on_root = on_root

    def report(self) -> dict[str, int]:
        pages = self.decode_runner.page_pool
        return {
            "waiting": len(self.scheduler) + self.coalescer.waiting + self.biasing_queue.waiting,
            "decoding": len(self.decode_runner.all_rows),
            "pages": pages.pages,
            "pages_used": pages.used_count,
            "kept_bytes": self.coalescer.cache.nbytes if self.coalescer.cache else 0,
        }

    def describe(self) -> dict[str, Any]:
        pool = self.decode_runner.page_pool
        peers = {} if self.peers is None else {"peers": self.peers.describe()}
        cross_kv = "int8" if self.decode_runner.decoder.int8_audio else self.decode_runner.device.dtype_name
        return {"pages": pool.pages, "pages_used": pool.used_count, "cross_kv": cross_kv, **peers}

    # --- messages --------------------------------------------------------------------------------------

    def submit(self, utterance: RecognitionRequest) -> None:
        self.requests.add(utterance)
        if not self._reject_unsupported(utterance):
            self.biasing_queue.when_ready(utterance, lambda: self.coalescer.submit(utterance))

    def submit_encoded(self, utterance: RecognitionRequest, borrowed: BorrowedPages) -> None:
        """Adds a request whose audio was encoded elsewhere: it joins once a row is free. Its samples are not
        counted."""
        self.requests.add(utterance, borrowed)
        if not self._reject_unsupported(utterance):
            self.biasing_queue.when_ready(utterance, lambda: self._encoded_elsewhere.append(utterance.id))

    def _reject_unsupported(self, utterance: RecognitionRequest) -> bool:
        """Rejects a request that can never be served; returns whether it did."""
        try:
            self.decode_runner.validate(utterance.options)
            self.requests.validate_capacity(utterance)
            self.requests.language_model(utterance)
        except OptionError as error:
            self._fail([utterance.id], error)
            return True
        return False

    def cancel(self, request_id: int) -> None:
        self._fail([request_id], Cancelled("the request was cancelled"))

    def expedite(self, request_id: int, within_ms: int) -> None:
        if (utterance := self.open_requests.get(request_id)) is not None:
            utterance.within_ms = within_ms
            self.coalescer.requeue(utterance)

    # --- step ------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Encodes and decodes; returns whether there was anything to do."""
        self.coalescer.schedule_overdue()
        self._join_encoded_elsewhere()
        encoded = self._encode_at_peers()
        live, uploads = self._live_active(), self._uploads_active()
        if self.encoder_pool.set_concurrent(live or uploads):
            started = self._encode_concurrently(live=live) if live or uploads else False
            self.encoder_pool.share_threads(live=live)
            self._set_pace(live=live)
            decoded = not self._pace_decode() and self._decode()
            return self.finalizer.rescore() or decoded or started or encoded
        vad_stepped = False
        for _ in range(MAX_BULK_ENCODES if self.encoder_pool.encodes_locally else 0):
            if self._gather() or not self._encode(self._schedule()):
                break
            encoded = True
            self.loop.drain()  # new requests must not wait for all of them
            vad_stepped |= self.loop.step_vad()
            if self.requests.has_interactive or not self.loop.running:
                break
        decoded = self._decode()
        for _ in range(LIVE_DECODE_STEPS - 1):
            live = any(self.open_requests[row.request_id].priority == "live" for row in self.decode_runner.rows)
            if self.finalizer.has_pending or not live:
                break
            self.loop.drain()
            self._decode()
        return self.finalizer.rescore() or decoded or encoded or vad_stepped

    def _gather(self) -> bool:
        """Returns whether the requests that wait are encoded at a later step, with others: a few of them do not keep
        the device busy. Not where a step takes as long with few rows as with many."""
        waits = (
            self.device.rows_cost_time
            and 0 < self.scheduler.waiting_frames < self.scheduler.encode_frames
            and len(self.decode_runner.rows) >= GATHER_ROWS
            and not self.requests.counts["live"]
            and self._gathered_steps < GATHER_STEPS
        )
        self._gathered_steps = self._gathered_steps + 1 if waits else 0
        return waits

    def _live_active(self) -> bool:
        """Returns whether live requests arrived lately: silent sessions cost files nothing, and sessions whose audio is
        encoded elsewhere need no encoders."""
        live = self.loop.live_sessions > 0 and time.monotonic() - self.requests.last_live_s < QUIET_S
        return live and bool(len(self.scheduler) or self.encoder_pool.in_flight or not self.incremental)

    def _uploads_active(self) -> bool:
        """Returns whether there are so many interactive requests that they are encoded beside the loop, as live ones
        are."""
        many = UPLOADS_PER_THREAD * self.device.threads
        least = many // 2 if self._many_uploads else many
        self._many_uploads = self.device.rows_cost_time and self.requests.counts["interactive"] >= least
        return self._many_uploads

    def _set_pace(self, *, live: bool) -> None:
        """Sets how many rows are few, and how long they wait for more."""
        if live:
            self._pace_s, self._pace_rows = DECODE_PACE_S, DECODE_PACE_ROWS
        else:
            self._pace_s = UPLOAD_PACE_S if self.encoder_pool.shares_cores else 0.0
            self._pace_rows = self.decode_runner.max_rows // UPLOAD_PACE_DIVISOR

    def _pace_decode(self) -> bool:
        """Returns whether a few rows wait for more: a step costs nearly as much for one as for several, and takes it
        from encoders that all have work."""
        if self.encoder_pool.thread_available or time.monotonic() - self._decoded_s >= self._pace_s:
            return False
        requests = [self.open_requests[row.request_id] for row in self.decode_runner.rows]
        return len(requests) < self._pace_rows and not any(request.urgent for request in requests)

    def _schedule(self, frames: int | None = None, *, urgent: bool = False) -> list[int]:
        runner, encoder_pool = self.decode_runner, self.encoder_pool
        free_rows = runner.free_rows - encoder_pool.reserved_rows
        reserved = (0, 0)
        busy = runner.all_rows or encoder_pool.in_flight
        if self._live_active() and busy:  # an idle engine gives a file all that it needs
            reserved = runner.max_rows // LIVE_RESERVE_FRACTION, runner.page_pool.pages // LIVE_RESERVE_FRACTION
        free_pages = runner.page_pool.free_count - encoder_pool.reserved_pages
        return self.scheduler.schedule(free_rows, free_pages, reserved=reserved, frames=frames, urgent=urgent)

    # --- encoding --------------------------------------------------------------------------------------

    def _encode_at_peers(self) -> bool:
        """Submits batches to peers while they have room; returns whether there were any."""
        sent = False
        while self.encoder_pool.peer_available and (ids := self._schedule()):
            self._submit_batch(ids, away=True)
            sent = True
        return sent

    def _encode_concurrently(self, *, live: bool) -> bool:
        """Submits batches to encoder threads while some are free; returns whether there were any."""
        pool, started = self.encoder_pool, False
        if not pool.encodes_locally:
            return False
        frames = self._concurrent_frames(live=live)
        if pool.urgent_thread_available and (ids := self._schedule(frames, urgent=True)):
            self._submit_batch(ids, urgent=True)
            started = True
        while pool.thread_available and (ids := self._schedule(frames)):
            self._submit_batch(ids)
            started = True
        return started

    def _concurrent_frames(self, *, live: bool) -> int:
        """Returns the frames of a batch beside the loop: few where callers are connected, whose partials wait until one
        ends; else what waits, shared by the free threads."""
        most = self.scheduler.encode_frames
        least = most // CONCURRENT_BATCH_DIVISOR
        if live or self.loop.live_sessions:
            return least
        share = -(-self.scheduler.waiting_frames // max(1, self.encoder_pool.free_threads))
        return min(max(share, least), most)

    def _submit_batch(self, ids: list[int], *, away: bool = False, urgent: bool = False) -> None:
        if not (batch := self._start_requests(ids)):
            return
        _, rows, pages = map(sum, zip(*map(self.requests.resources_needed, batch), strict=True))
        classes = [(u.priority, u.within_ms) for u in batch]
        pcm, whole = [u.pcm for u in batch if u.pcm is not None], [u.full_window for u in batch]
        job = EncodeBatch([u.id for u in batch], rows, pages, classes, [u.options.words for u in batch], urgent)
        self.encoder_pool.submit(job, pcm, whole, away=away)

    def _on_encoded(self, batch: EncodeBatch, encoded: Future[list[EncoderResult]], seconds: float) -> None:
        """Joins results that did not come from the loop's thread; results of requests that left meanwhile are
        cached for those that wait for them."""
        self.encoder_pool.complete(batch)
        results: dict[int, EncoderResult] = {}
        if isinstance(encoded.exception(), PEER_LOST_ERRORS):
            for request in [self.open_requests[i] for i in batch.ids if i in self.open_requests]:
                self.coalescer.schedule(request)
        else:
            with self._guard("encode", "encoding", batch.ids):
                results = dict(zip(batch.ids, encoded.result(), strict=True))
        self._join({i: result for i, result in results.items() if i in self.open_requests}, seconds)
        for i in batch.ids:
            with self._guard("encode", "caching audio", []):
                self.coalescer.adopt_abandoned(i, results.get(i))

    def _encode(self, ids: list[int]) -> bool:
        if not ids:
            return False
        started = time.perf_counter()
        if not (batch := self._start_requests(ids)):
            return True
        ids, results = [u.id for u in batch], dict[int, EncoderResult]()
        with self._guard("encode", "encoding", ids):
            pcm = [u.pcm for u in batch if u.pcm is not None]
            encoded = self.encode_runner.encode(pcm, [u.full_window for u in batch], [u.options.words for u in batch])
            results = dict(zip(ids, encoded, strict=True))
        self._join(results, time.perf_counter() - started)
        return True

    def _start_requests(self, ids: list[int]) -> list[RecognitionRequest]:
        """Marks requests as started. Those whose frames are cached join, before others take pages; returns the
        rest, which are to be encoded."""
        batch = self.requests.mark_started(ids)
        self.coalescer.started(batch)
        return [utterance for utterance in batch if not self._join_cached(utterance)]

    def _join_cached(self, utterance: RecognitionRequest) -> bool:
        """Adds a row for a request whose frames are cached. Returns whether it is not to be encoded, which includes one
        that failed."""
        joined = False
        with self._guard("encode", "starting to decode", [utterance.id]):
            hypothesis = self.requests.hypothesis(utterance)
            if (pages := self.coalescer.cached_frames(utterance)) is not None:
                joined = True
                self.decode_runner.add_row(utterance.id, pages, hypothesis, utterance.encoder_key)
                self.requests.mark_encoded(utterance)
        return joined or utterance.id not in self.open_requests

    def _join(self, encoded: dict[int, EncoderResult], seconds: float) -> None:
        """Adds a row for each encoded request."""
        if not encoded:
            return
        with self._guard("encode", "encoding", list(encoded)):
            for request_id, result in encoded.items():
                utterance = self.open_requests[request_id]
                utterance.encoded, utterance.peer_timings = True, result.timings
                hypothesis = self.requests.hypothesis(utterance)
                row = self.decode_runner.add_row(request_id, result, hypothesis, utterance.encoder_key)
                self.coalescer.publish_frames(utterance, row)
                self.requests.mark_encoded(utterance)
            frames = sum(result.frames for result in encoded.values())
            fill = min(1.0, frames / self.scheduler.encode_frames)
            self.loop.stats.record_step("encode", seconds, len(encoded), fill)

    def _join_encoded_elsewhere(self) -> None:
        """Adds rows for requests with borrowed pages, before any other takes the pages that they need."""
        runner, encoder_pool = self.decode_runner, self.encoder_pool
        while self._encoded_elsewhere:
            utterance = self.open_requests[self._encoded_elsewhere[0]]
            _, rows, pages = self.requests.resources_needed(utterance)
            if (
                runner.free_rows - encoder_pool.reserved_rows < rows
                or runner.page_pool.free_count - encoder_pool.reserved_pages < pages
            ):
                return
            self._encoded_elsewhere.popleft()
            with self._guard("decode", "starting to decode", [utterance.id]):
                utterance.encode_start_ns = utterance.encode_end_ns = time.time_ns()
                runner.add_row(
                    utterance.id, self.requests.borrowed_pages[utterance.id], self.requests.hypothesis(utterance)
                )

    # --- decoding --------------------------------------------------------------------------------------

    def _decode(self) -> bool:
        """Decodes a token of every row. Prompts and drafts are fed in the same pass, where that has room. Those of
        urgent requests go first, so that a sentence that has ended does not wait for drafts of others, which wait for
        one pass at most."""
        runner = self.decode_runner
        if not (runner.rows or runner.prefilling):
            return False
        self._decoded_s = time.monotonic()
        drafted = runner.rows_to_prefill()
        urgent = [row for row in drafted if self.open_requests[row.request_id].urgent]
        self._deferring = not self._deferring and 0 < len(urgent) < len(drafted)
        stepped = bool(drafted) and self._verify(urgent if self._deferring else drafted)
        if not (stepped or self._deferring):
            self._step_rows()
        return True

    def _verify(self, rows: list[DecodeRow]) -> bool:
        """Prefills rows and verifies their drafts, in one pass over all their positions. Returns whether the other rows
        decoded a token in it. A failure fails the rows with drafts, and those that have a token of the pass already;
        the others can go on."""
        started, runner = time.perf_counter(), self.decode_runner
        verified, accepted, fed = runner.positions_verified, runner.positions_accepted, runner.positions_fed
        beside = runner.rows_beside(rows)
        scored = [len(row.hypothesis.logprobs) for row in beside]

        def fail(error: Exception) -> None:
            advanced = [row for row, n in zip(beside, scored, strict=True) if len(row.hypothesis.logprobs) > n]
            self._fail([row.request_id for row in (*rows, *advanced)], error)

        ended: list[DecodeRow] | None = None
        with StepGuard(self.loop.stats, "verify", "verifying a draft", fail):
            ended = runner.prefill_and_verify(rows, beside)
        if ended is None:
            return False
        self.finalizer.finalize(ended)
        verified, accepted = runner.positions_verified - verified, runner.positions_accepted - accepted
        positions, stats = runner.positions_fed - fed, self.loop.stats
        fill = min(1.0, positions / MAX_VERIFY_POSITIONS)
        stats.record_step("verify", time.perf_counter() - started, positions, fill)
        stats.record_verification(verified, accepted)
        if beside:
            stats.record_rows_beside(len(beside), len(beside) / runner.max_rows)
        return bool(beside)

    def _step_rows(self) -> None:
        """Decodes one token of every row, and feeds parts of prompts with audio in them."""
        runner = self.decode_runner
        if not (runner.rows or runner.prefilling):
            return
        started, rows = time.perf_counter(), len(runner.rows)
        ended: list[DecodeRow] | None = None
        stepped = [*runner.rows, *runner.prefilling]
        with self._guard("decode", "decoding", list(dict.fromkeys(row.request_id for row in stepped))):
            ended = runner.step()
        if ended is not None:
            self.finalizer.finalize(ended)
            self.loop.stats.record_step("decode", time.perf_counter() - started, rows, rows / runner.max_rows)

    # --- endings ---------------------------------------------------------------------------------------

    def _guard(self, stage: str, what: str, ids: list[int]) -> StepGuard:
        """Guard of a step, whose failure fails these requests."""
        return StepGuard(self.loop.stats, stage, what, lambda error: self._fail(ids, error))

    def _fail(self, ids: list[int], error: Exception) -> None:
        """Rejects those of the requests that are still open."""
        ids = [i for i in ids if i in self.open_requests]
        wanted = set(ids)
        for row in [row for row in self.decode_runner.all_rows if row.request_id in wanted]:
            self.decode_runner.remove_row(row)
        for request_id in ids:
            self.scheduler.remove(request_id)
            self.biasing_queue.cancel(request_id)
            if request_id in self._encoded_elsewhere:
                self._encoded_elsewhere.remove(request_id)
            utterance = self.requests.remove(request_id)
            encoding = any(request_id in batch.ids for batch in self.encoder_pool.in_flight)
            if not self.coalescer.remove(utterance, encoding):
                self.encoder_pool.cancel(request_id)
            reject(utterance.future, error)
