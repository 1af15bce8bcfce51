"""Whole utterances, from the queue to their text: plan, encode a batch, decode a token of every row."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from asr_serve.config import EngineConfig
from asr_serve.engine.session import Utterance, reject
from asr_serve.engine.utterances.encode import EncoderResult, EncodeRunner, Lent
from asr_serve.engine.utterances.encoders import LOST, Batch, Encoders
from asr_serve.engine.utterances.ends.settling import Settling
from asr_serve.engine.utterances.flights import Sharing
from asr_serve.engine.utterances.hot.biasing import Spelling
from asr_serve.engine.utterances.hot.second_look import SecondLook
from asr_serve.engine.utterances.kept import Kept
from asr_serve.engine.utterances.planner import LIVE_RESERVE, Planner
from asr_serve.engine.utterances.requests import Requests
from asr_serve.engine.utterances.rows import Row
from asr_serve.engine.utterances.runner import VERIFY_ROWS, DecodeRunner
from asr_serve.engine.work import Attempt, Keeper, Seldom
from asr_serve.errors import Cancelled, OptionError

if TYPE_CHECKING:
    from asr_serve.engine.peers.asking import Peers

BULK_ENCODES = 8
"""Encode batches in a row while only bulk work is there: decoding is cheapest with all rows taken."""
LIVE_STEPS = 6
"""Decoding steps between two encode batches while callers' rows decode: a verified draft needs a few more
tokens, and encoding takes much longer than a step."""
BESIDE = 4
"""So much smaller is a batch that one thread encodes beside the loop."""
QUIET_S = 5.0
"""When callers have said nothing for so long, files have the engine to themselves."""
PACE_S, PACE_ROWS = 0.02, 8
"""Decoding steps of fewer rows are at least so far apart while every encoder is busy."""


class Utterances:
    """Owns the runners and every request that has been let in. See engine/work.Work."""

    def __init__(
        self,
        model: Any,
        encode: EncodeRunner,
        decode: DecodeRunner,
        config: EngineConfig,
        text: Callable[[list[int]], str],
        tokens_per_s: float,
        on_done: Callable[[int], None],
        on_start: Callable[[list[int]], None],
        *,
        growing: bool = False,
        kept: Kept | None = None,
        peers: Peers | None = None,
        encode_text: Callable[[str], list[int]] | None = None,
    ) -> None:
        """`growing`: callers' audio is encoded elsewhere, while they speak (engine/chunked/growing). `kept`: what
        was heard before; None: everything is computed for whoever asks. `peers`: engines that encode too.
        `encode_text`: hot words to tokens."""
        self.growing, self.pages_lent = growing, 0
        """By whoever does that: pages of the runner's that no row gives back."""
        self.model, self.device, self.encode_runner, self.decode_runner = model, encode.device, encode, decode
        self.planner = Planner(config, config.encode_frames or encode.device.encode_frames)
        self.requests = Requests(model, decode, config.window, text, tokens_per_s, on_done, on_start)
        self.utterances = self.requests.open
        self.spelling = Spelling(encode_text, text, lambda job: self.keeper.call(job), self._fail)
        self.sharing = Sharing(
            kept,
            lambda each, like: self.planner.add(self.requests.waiting(each, like)),
            lambda each: self.planner.remove(each.id),
            lambda ids: self.requests.on_start(ids),
            self.requests.answer,
            lambda: decode.pages.free - self.encoders.pages,
            lambda job: self.keeper.call(job),
            time.monotonic,
        )
        second_look = SecondLook(decode, text)
        self.settling = Settling(decode, self.requests, self.sharing, second_look, self._attempt)
        self._encoded_elsewhere: deque[int] = deque()
        """Those whose audio lies in pages that somebody lends, without a row."""
        self._peers, self._alone, self._decoded_s = peers, config.role == "both", -PACE_S
        self._look_through = Seldom()

    def begin(self, keeper: Keeper) -> None:
        self.keeper, self.requests.stats = keeper, keeper.stats
        if self.sharing.kept is not None:
            self.sharing.kept.stats = keeper.stats
        self.encoders = Encoders(
            self.encode_runner,
            lambda *encoded: keeper.call(lambda: self._encoded(*encoded)),
            self._peers,
            lambda: keeper.call(lambda: None),
            alone=self._alone,
        )

    @property
    def due_s(self) -> float | None:
        decoding = self._decoded_s + PACE_S if self.decode_runner.held else None
        return min((due for due in (decoding, self.sharing.due_s) if due is not None), default=None)

    @property
    def idle(self) -> bool:
        return not self.encoders.under_way

    def check(self) -> None:
        runner = self.decode_runner
        if self._look_through(runner.pages.pages + self.sharing.things):
            runner.pages.check()
            self.sharing.look_through()
        if not runner.held:
            assert runner.pages.used == self.pages_lent, "no row decodes, yet pages are held"
        self.encoders.check()
        self.sharing.check(idle=not self.utterances)
        waiting = len(self.planner) + len(self._encoded_elsewhere) + self.sharing.waiting + self.spelling.waiting
        assert len(self.utterances) == runner.requests + waiting, "a request was lost"

    def end(self, error: Exception) -> None:
        self.encoders.close()
        self.spelling.close()
        try:
            self._fail(list(self.utterances), error)
        finally:
            for utterance in self.utterances.values():
                reject(utterance.future, error)

    def report(self) -> dict[str, int]:
        pages = self.decode_runner.pages
        return {
            "waiting": len(self.planner) + self.sharing.waiting + self.spelling.waiting,
            "decoding": len(self.decode_runner.held),
            "pages": pages.pages,
            "pages_used": pages.used,
            "kept_bytes": self.sharing.kept.nbytes if self.sharing.kept else 0,
        }

    def describe(self) -> dict[str, Any]:
        return {"pages": self.decode_runner.pages.pages, "pages_used": self.decode_runner.pages.used}

    # --- messages --------------------------------------------------------------------------------------

    def submit(self, utterance: Utterance) -> None:
        self.requests.add(utterance)
        if not self._refused(utterance):
            self.spelling.then(utterance, lambda: self.sharing.enter(utterance))

    def decode(self, utterance: Utterance, lent: Lent) -> None:
        """One whose audio was encoded elsewhere: it joins as there is a row. Its samples are not counted."""
        self.requests.add(utterance, lent)
        if not self._refused(utterance):
            self.spelling.then(utterance, lambda: self._encoded_elsewhere.append(utterance.id))

    def _refused(self, utterance: Utterance) -> bool:
        """Whether it asks for what can never be done; it is told so."""
        try:
            self.decode_runner.check(utterance.options)
            self.requests.expect_room(utterance)
        except OptionError as error:
            self._fail([utterance.id], error)
            return True
        return False

    def cancel(self, request_id: int) -> None:
        self._fail([request_id], Cancelled("the request was cancelled"))

    # --- a turn ----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Encoding and decoding."""
        self.sharing.overdue()
        self._join_lent()
        encoded = self._send()
        if self.encoders.beside(self._speaking()):
            started = self._start_encoding()
            decoded = not self._paced() and self._decode()
            return self.settling.look() or decoded or started or encoded
        heard = False
        for _ in range(BULK_ENCODES if self.encoders.here else 0):
            if not self._encode(self._plan()):
                break
            encoded = True
            self.keeper.drain()  # whoever comes meanwhile must not wait for all of them
            heard |= self.keeper.hear()
            if self.requests.pressing or not self.keeper.running:
                break
        decoded = self._decode()
        for _ in range(LIVE_STEPS - 1):
            live = any(self.utterances[row.request_id].priority == "live" for row in self.decode_runner.rows)
            if self.settling.waiting or not live:
                break
            self.keeper.drain()
            self._decode()
        return self.settling.look() or decoded or encoded or heard

    def _speaking(self) -> bool:
        """Whether anybody on line said something of late: who is silent costs files nothing, and callers whose
        audio is encoded elsewhere need no encoders."""
        live = self.keeper.listeners.live > 0 and time.monotonic() - self.requests.live_s < QUIET_S
        return live and bool(len(self.planner) or self.encoders.under_way or not self.growing)

    def _paced(self) -> bool:
        """Whether a few rows wait for more: a step costs as much for one as for PACE_ROWS, and takes it from
        encoders that all have work."""
        if self.encoders.free or time.monotonic() - self._decoded_s >= PACE_S:
            return False
        rows = [self.utterances[row.request_id] for row in self.decode_runner.rows]
        return len(rows) < PACE_ROWS and not any(row.urgent for row in rows)

    def _plan(self, frames: int | None = None) -> list[int]:
        runner, beside = self.decode_runner, self.encoders
        free_rows = runner.free_rows - beside.rows
        kept = (0, 0)
        busy = runner.held or beside.under_way
        if self._speaking() and busy:  # an engine that does nothing gives a file whatever it needs
            kept = runner.max_rows // LIVE_RESERVE, runner.pages.pages // LIVE_RESERVE
        return self.planner.plan(free_rows, runner.pages.free - beside.pages, kept=kept, frames=frames)

    # --- encoding --------------------------------------------------------------------------------------

    def _send(self) -> bool:
        """Have peers encode what they have room for."""
        sent = False
        while self.encoders.away and (ids := self._plan()):
            self._start(ids, away=True)
            sent = True
        return sent

    def _start_encoding(self) -> bool:
        """Have batches encoded beside us, while there are threads for it."""
        started, frames = False, self.planner.encode_frames // BESIDE
        while self.encoders.here and self._speaking() and self.encoders.free and (ids := self._plan(frames)):
            self._start(ids, away=False)
            started = True
        return started

    def _start(self, ids: list[int], *, away: bool) -> None:
        if not (batch := self._begin(ids)):
            return
        _, rows, pages = map(sum, zip(*map(self.requests.need, batch), strict=True))
        classes = [(u.priority, u.within_ms) for u in batch]
        pcm, whole = [u.pcm for u in batch if u.pcm is not None], [u.whole for u in batch]
        self.encoders.start(Batch([u.id for u in batch], rows, pages, classes), pcm, whole, away=away)

    def _encoded(self, batch: Batch, encoded: Future[list[EncoderResult]], seconds: float) -> None:
        """What was encoded beside us joins; of who has gone meanwhile it is for those who waited with them."""
        self.encoders.over(batch)
        results: dict[int, EncoderResult] = {}
        if isinstance(encoded.exception(), LOST):
            for each in [self.utterances[i] for i in batch.ids if i in self.utterances]:
                self.sharing.plan(each)
        else:
            with self._attempt("encode", "encoding", batch.ids):
                results = dict(zip(batch.ids, encoded.result(), strict=True))
        self._join({i: result for i, result in results.items() if i in self.utterances}, seconds)
        for i in batch.ids:
            with self._attempt("encode", "keeping", []):
                self.sharing.adopt(i, results.get(i))

    def _encode(self, ids: list[int]) -> bool:
        if not ids:
            return False
        started = time.perf_counter()
        if not (batch := self._begin(ids)):
            return True
        ids, results = [u.id for u in batch], dict[int, EncoderResult]()
        with self._attempt("encode", "encoding", ids):
            pcm = [u.pcm for u in batch if u.pcm is not None]
            encoded = self.encode_runner.run(pcm, [u.whole for u in batch])
            results = dict(zip(ids, encoded, strict=True))
        self._join(results, time.perf_counter() - started)
        return True

    def _begin(self, ids: list[int]) -> list[Utterance]:
        """These are worked on: those whose frames are kept join, before others take pages, and the rest is to be
        encoded."""
        batch = self.requests.start(ids)
        self.sharing.started(batch)
        return [utterance for utterance in batch if not self._join_kept(utterance)]

    def _join_kept(self, utterance: Utterance) -> bool:
        found = False
        with self._attempt("encode", "joining", [utterance.id]):
            hypothesis = self.requests.hypothesis(utterance)
            if (held := self.sharing.frames(utterance)) is not None:
                found = True
                self.decode_runner.join(utterance.id, held, hypothesis, utterance.root)
                self.requests.heard(utterance)
        return found or utterance.id not in self.utterances

    def _join(self, encoded: dict[int, EncoderResult], seconds: float) -> None:
        """What is encoded is decoded from here on."""
        if not encoded:
            return
        with self._attempt("encode", "encoding", list(encoded)):
            for request_id, result in encoded.items():
                utterance = self.utterances[request_id]
                utterance.encoded = True
                hypothesis = self.requests.hypothesis(utterance)
                row = self.decode_runner.join(request_id, result, hypothesis, utterance.root)
                self.sharing.encoded(utterance, row)
                self.requests.heard(utterance)
            frames = sum(result.frames for result in encoded.values())
            fill = min(1.0, frames / self.planner.encode_frames)
            self.keeper.stats.step("encode", seconds, len(encoded), fill)

    def _join_lent(self) -> None:
        """Those whose audio is in pages: before any other takes what they need."""
        runner, beside = self.decode_runner, self.encoders
        while self._encoded_elsewhere:
            utterance = self.utterances[self._encoded_elsewhere[0]]
            _, rows, pages = self.requests.need(utterance)
            if runner.free_rows - beside.rows < rows or runner.pages.free - beside.pages < pages:
                return
            self._encoded_elsewhere.popleft()
            with self._attempt("decode", "joining", [utterance.id]):
                utterance.encode_start_ns = utterance.encode_end_ns = time.time_ns()
                runner.join(utterance.id, self.requests.lent[utterance.id], self.requests.hypothesis(utterance))

    # --- decoding --------------------------------------------------------------------------------------

    def _verify(self, rows: list[Row]) -> None:
        """What drafts hold, in one pass over all their positions."""
        started, runner = time.perf_counter(), self.decode_runner
        offered, held, fed = runner.positions_verified, runner.positions_held, runner.positions_fed
        ended: list[Row] | None = None
        with self._attempt("verify", "verifying a draft", [row.request_id for row in rows]):
            ended = runner.verify(rows)
        if ended is None:
            return
        self.settling.settle(ended)
        offered, held = runner.positions_verified - offered, runner.positions_held - held
        positions, stats = runner.positions_fed - fed, self.keeper.stats
        stats.step("verify", time.perf_counter() - started, positions, min(1.0, positions / VERIFY_ROWS))
        stats.verified(offered, held)

    def _decode(self) -> bool:
        runner = self.decode_runner
        if drafted := runner.drafted():
            self._verify(drafted)
        if not runner.rows:
            return bool(drafted)
        started, rows = time.perf_counter(), len(runner.rows)
        self._decoded_s = time.monotonic()
        ended: list[Row] | None = None
        with self._attempt("decode", "decoding", list(dict.fromkeys(row.request_id for row in runner.rows))):
            ended = runner.step()
        if ended is not None:
            self.settling.settle(ended)
            self.keeper.stats.step("decode", time.perf_counter() - started, rows, rows / runner.max_rows)
        return True

    # --- endings ---------------------------------------------------------------------------------------

    def _attempt(self, stage: str, what: str, ids: list[int]) -> Attempt:
        """A step for these requests: it may fail them."""
        return Attempt(self.keeper.stats, stage, what, lambda error: self._fail(ids, error))

    def _fail(self, ids: list[int], error: Exception) -> None:
        """Those that are still here."""
        ids = [i for i in ids if i in self.utterances]
        wanted = set(ids)
        for row in [row for row in self.decode_runner.held if row.request_id in wanted]:
            self.decode_runner.leave(row)
        for request_id in ids:
            self.planner.remove(request_id)
            self.spelling.leave(request_id)
            if request_id in self._encoded_elsewhere:
                self._encoded_elsewhere.remove(request_id)
            utterance = self.requests.remove(request_id)
            encoding = any(request_id in batch.ids for batch in self.encoders.under_way)
            if not self.sharing.leave(utterance, encoding):
                self.encoders.drop(request_id)
            reject(utterance.future, error)
