"""The work of a model whose encoder carries state and whose decoder does not: utterances that grow.

While somebody speaks, the encoder hears each chunk once, and what the decoder needs of its frames goes straight
into pages. A hypothesis is a row that reads those pages: it decodes all of the utterance so far, with the
hypothesis before as its draft, so that it costs a pass and the few tokens that are new. Nothing is encoded twice,
and nothing is copied. Whole utterances go the way of engine/utterances, beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from asr_serve.decoding.attention import Recognition
from asr_serve.engine.chunked.stream import Stream
from asr_serve.engine.chunked.streams import Streams
from asr_serve.engine.chunked.wrapper import ChunkedInferenceWrapper, Session
from asr_serve.engine.saved import Held, Part
from asr_serve.engine.session import Utterance
from asr_serve.engine.states import as_bytes, from_bytes
from asr_serve.engine.utterances.encode import Lent
from asr_serve.engine.utterances.rows import pages_of
from asr_serve.engine.utterances.runner import DecodeRunner
from asr_serve.engine.utterances.work import Utterances
from asr_serve.engine.work import Keeper
from asr_serve.models.streaming import Chunk, Found, Guess, State, StateSpec
from asr_serve.native import PAGE
from asr_serve.types import Priority

RESERVE = 4
"""One in so many pages is not given to audio that grows: rows need some to decode it."""
NOTHING = Recognition(tokens=(), avg_logprob=0.0, temperature=0.0, finish="stop", compression_ratio=1.0)
"""Of a stream whose first frame is yet to come."""


class Frames:
    """Where each session's frames go: what a wrapper takes for its search."""

    def __init__(self, model: Any, runner: DecodeRunner, slots: int, longest: int) -> None:
        """`longest`: frames of an utterance; those past them are dropped."""
        self._model, self._runner = model, runner
        self.most = pages_of(longest)
        """Pages."""
        self._tables = torch.zeros(slots + 1, self.most, dtype=torch.int32)
        self._limits = torch.zeros(slots + 1, dtype=torch.int64)

    def lend(self, row: int, pages: list[int]) -> None:
        """To the session at that row of the state, for as many of its frames as they hold."""
        self._tables[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self._limits[row] = len(pages) * PAGE

    @torch.inference_mode()
    def blank(self, row: int, positions: Iterable[int]) -> None:
        """Of the session at that row of the state: what somebody had there before is in nothing that is saved."""
        if len(at := torch.tensor(list(positions), device=self._runner.pool.device)):
            layers, _, heads, block = self._runner.pool.shape[1:]
            cross = self._runner.pool.new_zeros(len(at), layers, 2, heads * block // PAGE)
            tables = self._tables[row].to(at.device).expand(len(at), -1).contiguous()
            self._runner.put(cross, tables, at)

    def state(self) -> dict[str, StateSpec]:
        return {}

    @torch.inference_mode()
    def step(self, hidden: Tensor, chunk: Chunk, state: State) -> list[Found]:
        at = chunk.seen[:, None] + torch.arange(hidden.shape[1], device=hidden.device)
        rows = chunk.rows.cpu()
        new = at < torch.minimum(chunk.seen + chunk.frames, self._limits[rows].to(at.device))[:, None]
        positions = at[new]
        if len(positions):
            cross = self._model.cross(self._model.adapt(hidden[new], positions))
            tables = self._tables[rows].to(hidden.device)
            self._runner.put(cross, tables.repeat_interleave(new.sum(1), dim=0), positions)
        return [Found([], [])] * len(hidden)

    def finish(self, row: int, state: State) -> list[Guess]:
        return [Guess([], 0.0)]


class Growing(Streams):
    """Owns whole utterances too. See engine/work.Work."""

    def __init__(
        self,
        wrapper: ChunkedInferenceWrapper,
        frames: Frames,
        utterances: Utterances,
        shares: Mapping[Priority, float],
        on_done: Callable[[int], None],
        on_start: Callable[[list[int]], None],
        **sleep: Any,
    ) -> None:
        """`frames`: what the wrapper has for its search. `sleep`: see Streams."""
        super().__init__(wrapper, shares, on_done, on_start, **sleep)
        self._frames, self._utterances = frames, utterances
        self._pages: dict[int, list[int]] = {}
        """Of those that have a slot."""
        self._own = pages_of(utterances.model.max_tokens)
        """Pages that one hypothesis needs at most."""
        chunk, window = wrapper.sizes[0], wrapper.model.window(wrapper.sizes[0])
        self._first, self._each = window.samples - window.before, chunk * wrapper.model.frame_samples
        """Samples until a stream's first chunk is whole, and from one to the next."""

    def begin(self, keeper: Keeper) -> None:
        super().begin(keeper)
        self._utterances.begin(keeper)

    @property
    def due_s(self) -> float | None:
        return min((due for due in (super().due_s, self._utterances.due_s) if due is not None), default=None)

    @property
    def idle(self) -> bool:
        return self._utterances.idle

    def check(self) -> None:
        super().check()
        assert self._utterances.pages_lent == sum(map(len, self._pages.values())), "a stream's pages were lost"
        self._utterances.check()

    def end(self, error: Exception) -> None:
        try:
            super().end(error)
        finally:
            self._utterances.end(error)

    def report(self) -> dict[str, int]:
        found = self._utterances.report()
        return {**found, "waiting": found["waiting"] + len(self._waiting)}

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), **self._utterances.describe()}

    def submit(self, utterance: Utterance) -> None:
        self._utterances.submit(utterance)

    def cancel(self, request_id: int) -> None:
        self._utterances.cancel(request_id)

    def step(self) -> bool:
        heard = super().step()
        return self._utterances.step() or heard

    # --- hypotheses --------------------------------------------------------------------------------------

    def _ask(self, number: int, stream: Stream, session: Session) -> None:
        wanted = stream.pieces[0].wanted
        if wanted is None:
            self._answer(number, stream, session, Found([], []))
        elif not (frames := min(self._known(session, wanted.samples), len(self._pages[number]) * PAGE)):
            self._answer(number, stream, session, NOTHING)
        else:
            decoded: Future[Recognition] = Future()
            decoded.add_done_callback(lambda _: self._decoded(number, decoded))
            # A stream has one hypothesis under way at most, and its number is nobody else's.
            utterance = Utterance(
                number, None, wanted.samples, wanted.options, wanted.priority, decoded, wanted.draft
            )
            self._utterances.decode(utterance, Lent(self._pages[number], frames))

    def _known(self, session: Session, samples: int) -> int:
        """Frames of so many samples that a hypothesis may read: those of chunks that are whole with these samples,
        however many have come since; so it depends on the audio alone."""
        if session.over:
            known = min(self.wrapper.model.frames(samples), session.audio.seen)
        else:
            chunks = max(0, samples - self._first + self._each) // self._each
            known = min(chunks * self.wrapper.sizes[0], session.audio.seen)
        return known

    def _decoded(self, number: int, decoded: Future[Recognition]) -> None:
        if (stream := self._streams.get(number)) is None:
            return  # it was dropped, and its hypothesis with it
        assert stream.session is not None
        error = decoded.exception()
        if error is not None:
            assert isinstance(error, Exception)
            self._drop(number, error)
            return
        with self._attempt(number):  # a future would swallow what goes wrong here
            self._answer(number, stream, stream.session, decoded.result())
        self._go_on(number)

    # --- slots -------------------------------------------------------------------------------------------

    def _needs(self, stream: Stream) -> int:
        """Pages: reserved whole, as those of a row are."""
        if stream.samples is None:
            return self._frames.most
        return min(self._frames.most, pages_of(self.wrapper.model.frames(stream.samples)))

    @property
    def _free(self) -> int:
        pages = self._utterances.decode_runner.pages
        kept = pages.pages // RESERVE if self._pages else self._own  # in the smallest pool one has room
        left = pages.free - self._utterances.encoders.pages - kept
        need = max(self._needs(self._streams[number]) for number in self._waiting)
        return min(super()._free, max(0, left) // need)

    def _open(self, number: int, stream: Stream) -> Session:
        session = super()._open(number, stream)
        pages = self._pages[number] = self._utterances.decode_runner.pages.take(self._needs(stream))
        self._utterances.pages_lent += len(pages)
        self._frames.lend(session.slot.row, pages)
        return session

    def _rise(self, number: int, stream: Stream, session: Session) -> None:
        super()._rise(number, stream, session)
        self._utterances.cancel(number)  # nobody reads the pages from here on
        if (pages := self._pages.pop(number, None)) is not None:
            self._utterances.pages_lent -= len(pages)
            self._utterances.decode_runner.pages.give(pages)

    # --- sleep -------------------------------------------------------------------------------------------

    def _hold(self, number: int, session: Session) -> Held:
        """With the pages that hold frames, behind the session's own parts."""
        numbers, parts = super()._hold(number, session)
        frames = min(session.audio.seen, len(self._pages[number]) * PAGE)
        pages, pool = self._pages[number][: pages_of(frames)], self._utterances.decode_runner.pool
        self._frames.blank(session.slot.row, range(frames, len(pages) * PAGE))
        if not pool.is_cpu:  # from there it is one copy for all of them
            pool, pages = pool[torch.tensor(pages, device=pool.device)].cpu(), list(range(len(pages)))
        return Held(numbers, [*parts, *(as_bytes(pool[page]) for page in pages)])

    def _expect(self, stream: Stream, held: Held) -> None:
        session, pages = self._apart(held)
        seen = self.wrapper.expect(session).seen
        count, pool = pages_of(min(seen, self._needs(stream) * PAGE)), self._utterances.decode_runner.pool
        sizes, page_bytes = [len(page) for page in pages], pool[0].nbytes
        if sizes != [page_bytes] * count:
            raise ValueError(f"saved pages of {sizes} bytes, where there are {count} of {page_bytes}")

    def _take_up(self, number: int, session: Session, held: Held) -> None:
        own, saved = self._apart(held)
        super()._take_up(number, session, own)
        pool = self._utterances.decode_runner.pool
        for page, part in zip(self._pages[number], saved, strict=False):
            from_bytes(pool[page], part)

    def _apart(self, held: Held) -> tuple[Held, list[Part]]:
        """A session's own; and its pages."""
        own = self.wrapper.parts
        return Held(held.numbers, held.parts[:own]), list(held.parts[own:])
