"""A streaming model over many sessions: chunks of whoever is ready go through it as one batch.

The sequential path, one session after another through the same model, is what runs unless chunked inference is
asked for; it is the reference that the chunked one must equal, numbers and text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from asr_serve.decoding.hotwords import Expecting, StreamWords
from asr_serve.devices.base import Device
from asr_serve.engine.chunked.audio import Audio, Place
from asr_serve.engine.chunked.either import named, part
from asr_serve.engine.chunked.evidence import Evidence, columns
from asr_serve.engine.chunked.evidence import Kept as KeptEvidence
from asr_serve.engine.saved import Held, Part, Saved, read
from asr_serve.engine.states import Slot, StateCacheManager, as_bytes, row_bytes
from asr_serve.models.streaming import Chunk, Found, Guess, Remembering, Search, StateSpec, StreamingModel

MAX_ROWS = 64
"""Sessions in one step."""
WAIT_MS = 10.0
"""How long who is ready waits for company."""
PATIENCE_MS = 1_000.0
"""The same for who does not speak live: a recording that is there already."""
BULK_FRAMES = 32
"""Encoder frames that a recording takes in a step where nobody speaks. All sessions' state has room for them."""
QUIET_MS = 5_000.0
"""When callers have brought nothing for so long, nobody speaks."""


class Session:
    """One stream through the model. Belongs to its wrapper."""

    def __init__(
        self, slot: Slot, audio: Audio, live: bool, evidence: Evidence | None, hot: StreamWords | None = None
    ) -> None:
        self.slot, self.audio, self.live, self.evidence, self.hot = slot, audio, live, evidence, hot
        self.ready_ms: float | None = None
        """Since when its next chunk is there; None: it is not."""
        self.over = False
        """Its last frame was taken."""
        self.guesses: list[Guess] = []
        """Once over: how it may end, best first."""


class Progress(NamedTuple):
    """What a step did for one session."""

    session: Session
    found: Found


class _Numbers(NamedTuple):
    """Of a saved session. Its parts: a row of each tensor of state; the audio that waits; what the search keeps
    besides, numbers and a tensor."""

    layout: bytes
    """Equal where rows mean the same, as far as shapes tell."""
    place: Place
    guesses: Annotated[list[Guess], msgspec.Meta(max_length=1_024)]
    """Once over: one at least."""
    evidence: KeptEvidence | None
    hot: bytes = b""
    """Of its hot words, the digest."""


class _Input(NamedTuple):
    """Of a step, on the host: see Chunk."""

    pcm: Tensor
    seen: Tensor
    frames: Tensor
    ends: Tensor


class _Batch:
    """The input of every step, whatever its shape, in the same memory."""

    def __init__(self, rows: int, samples: int) -> None:
        """`rows` and `samples` of the largest."""
        self._pcm = torch.zeros(rows * samples)
        self._numbers = torch.zeros(3, rows, dtype=torch.int64)

    def fill(self, rows: int, samples: int, sessions: Sequence[Session], frames: Sequence[int]) -> _Input:
        """`rows` of them, those past the sessions empty."""
        made = _Input(self._pcm[: rows * samples].view(rows, samples), *(each[:rows] for each in self._numbers))
        pcm, seen, counts, ends = (each.numpy() for each in made)
        for row, (session, count) in enumerate(zip(sessions, frames, strict=True)):
            session.audio.read(pcm[row])
            seen[row], counts[row], ends[row] = session.audio.seen, count, session.audio.end
        seen[len(sessions) :] = counts[len(sessions) :] = ends[len(sessions) :] = 0
        pcm[len(sessions) :] = 0.0
        return made


class ChunkedInferenceWrapper:
    """Sessions of one streaming model. Belongs to one thread.

    Whoever is ready runs and others wait; who is ready waits a moment for company, `wait_ms` at most, unless
    everybody is there or the step is full. Those that have most of a recording to hear take many chunks at once.
    """

    def __init__(
        self,
        model: StreamingModel,
        search: Search,
        device: Device,
        *,
        slots: int,
        chunk: int,
        kv_bytes: int | None = None,
        use_chunked_inference: bool = False,
        max_rows: int = MAX_ROWS,
        wait_ms: float = WAIT_MS,
        bulk_frames: int | None = None,
        aligns: bool = False,
        graphs: bool = True,
        poison: bool = False,
    ) -> None:
        """`chunk`: encoder frames of a step, a multiple of the model's block. `kv_bytes`: what the sessions' state
        may take; fewer than `slots` of them are let in where that is not enough. `bulk_frames`: the most, of all
        rows together, in a step of many chunks; None: as many as the device needs to be busy. `aligns`: the
        search is over the model's head `ctc`. `graphs`: record steps, on a device that can. `poison`: see
        StateCacheManager."""
        assert chunk % model.block == 0, f"chunks of {chunk} frames, where {model.block} see each other"
        self.model, self.search, self.device, self._aligns = model, search, device, aligns
        self.chunked, self.wait_ms = use_chunked_inference, wait_ms
        self.sizes = (chunk, max(1, BULK_FRAMES // chunk) * chunk)
        self._windows = {size: model.window(size).samples for size in self.sizes}
        for size, samples in self._windows.items():
            assert samples >= size * model.frame_samples, "a window reaches to where the next one begins"
        encoder, found = model.state(self.sizes[-1]), search.state()
        audio = StateSpec((self._windows[self.sizes[-1]],), fresh=None, on_host=True)
        specs = {"audio": audio, **named("encoder", encoder), **named("search", found)}
        if kv_bytes is not None:
            slots = max(1, min(slots, kv_bytes // row_bytes(specs)))
        self.max_rows = min(max_rows, slots) if self.chunked else 1
        self._bulk_rows = max(1, (bulk_frames or device.encode_frames) // self.sizes[-1])
        self.states = StateCacheManager(specs, slots, device.torch_device, poison=poison)
        told = [getattr(model, name, None) for name in ("frame_samples", "heads", "vocab", "blank", "durations")]
        facts = [type(model).__module__, type(search).__name__, told, self._windows, list(specs.items())]
        self._layout = hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()
        self._remembers = search if isinstance(search, Remembering) else None
        self._expecting = search if isinstance(search, Expecting) else None
        self._encoder = part("encoder", self.states.tensors)
        self._search = part("search", self.states.tensors)
        self._sessions: set[Session] = set()
        self._ready: set[Session] = set()
        self._spoken_ms = -QUIET_MS
        """When a caller last brought audio."""
        self._batch = _Batch(self._rows(self.max_rows), self._windows[self.sizes[-1]])
        self._shapes: set[tuple[int, int]] = set()
        """Of steps that were taken before."""
        self._forward = device.step(self._step) if graphs else self._step

    # --- sessions --------------------------------------------------------------------------------------

    def open(self, *, live: bool = True, words: bool = False, hot: StreamWords | None = None) -> Session:
        """`words`: somebody will ask when its tokens were said. `hot`: its hot words. Raises AtCapacity."""
        slot = self.states.take()
        row = self.states.tensors["audio"][slot.row]
        row.zero_()
        audio = Audio(row, self.model.window(self.sizes[0]))
        session = Session(slot, audio, live, Evidence() if words else None, hot)
        if self._expecting is not None:
            self._expecting.expect(slot.row, hot)
        else:
            assert hot is None, "hot words for a search that knows none"
        self._sessions.add(session)
        return session

    def put(self, session: Session, pcm: np.ndarray, now_ms: float) -> None:
        """`pcm` (n,) float32 at 16 kHz, any n. What no chunk has taken is kept: bound it."""
        if session.live:
            self._spoken_ms = now_ms
        session.audio.put(pcm)
        self._look(session, now_ms)

    def finish(self, session: Session, now_ms: float) -> None:
        """No more will come: the rest is ready, however short."""
        session.audio.ended = True
        self._look(session, now_ms)

    def close(self, session: Session) -> None:
        """At any time."""
        self._sessions.remove(session)
        self._ready.discard(session)
        if self._remembers is not None:
            self._remembers.forget(session.slot.row)
        if self._expecting is not None:
            self._expecting.expect(session.slot.row, None)
        self.states.give(session.slot)

    def _look(self, session: Session, now_ms: float) -> None:
        audio = session.audio
        if audio.ended and audio.seen >= self.model.frames(audio.samples):
            session.over = True
            if not audio.seen:
                self.states.begin([session.slot])  # it never ran: its row is somebody else's still
            session.guesses = self.search.finish(session.slot.row, self._search)
            if session.evidence is not None:
                session.evidence.hear(session.guesses[0].tokens, None)
        if not session.over and (
            audio.ended or audio.holds(self._windows[self.sizes[0]], self.model.frame_samples)
        ):
            self._ready.add(session)
            if session.ready_ms is None:
                session.ready_ms = now_ms
        else:
            self._ready.discard(session)
            session.ready_ms = None

    @property
    def free(self) -> int:
        """Sessions that may still be opened."""
        return self.states.slots - self.states.used

    # --- saved sessions --------------------------------------------------------------------------------

    def save(self, session: Session) -> Saved:
        """Between two steps: from it `load` makes one that goes on to the bit."""
        return self.held(session).saved()

    def held(self, session: Session) -> Held:
        """The same without a copy, until the session's next step."""
        audio, row = session.audio, session.slot.row
        evidence = session.evidence
        frames = b"" if evidence is None else evidence.frames.tobytes()
        parts: list[Part] = [*self.states.parts(session.slot), as_bytes(torch.from_numpy(audio.waiting)), frames]
        if self._remembers is not None:
            beside, tensor = self._remembers.keeps(row)
            parts += [memoryview(beside), as_bytes(tensor)]
        kept = None if evidence is None else evidence.kept
        hot = session.hot.digest if session.hot is not None else b""
        numbers = _Numbers(self._layout, audio.place, session.guesses, kept, hot)
        return Held(msgspec.msgpack.encode(numbers), parts)

    @property
    def parts(self) -> int:
        """Of a saved session."""
        return len(self.states.specs) + (2 if self._remembers is None else 4)

    def expect(self, saved: Saved | Held) -> Place:
        """Raises ValueError for one of another model, or of other sizes. What its rows say is not looked at. Where
        it stands."""
        numbers, rows = read(_Numbers, saved.numbers), len(self.states.specs)
        if numbers.layout != self._layout or len(saved.parts) != self.parts:
            raise ValueError("a session of another model, or of one that was set up in another way")
        self.states.expect_parts(saved.parts[:rows])
        blank = Audio(self.states.tensors["audio"][-1], self.model.window(self.sizes[0]))
        blank.expect(numbers.place, saved.parts[rows], self.model.frame_samples)
        self._evidence(numbers, saved.parts[rows + 1])
        if numbers.guesses and not numbers.place.ended:
            raise ValueError("a session that is over, and has not ended")
        return numbers.place

    @staticmethod
    def _evidence(numbers: _Numbers, frames: Part) -> Evidence | None:
        """Of a saved session. Raises ValueError."""
        if numbers.evidence is None and len(frames):
            raise ValueError("a saved session with frames that nobody asked for")
        return None if numbers.evidence is None else Evidence(numbers.evidence, frames, numbers.place.seen)

    def load(
        self, saved: Saved | Held, live: bool, now_ms: float = 0.0, hot: StreamWords | None = None
    ) -> Session:
        """Raises AtCapacity, and ValueError as `expect` does."""
        self.expect(saved)
        session = self.open(live=live, hot=hot)
        try:
            self.resume(session, saved, now_ms)
        except ValueError:
            self.close(session)
            raise
        return session

    def resume(self, session: Session, saved: Saved | Held, now_ms: float) -> None:
        """Have one that is new stand where that one stood. Raises ValueError; then close it."""
        numbers, rows = read(_Numbers, saved.numbers), len(self.states.specs)
        if numbers.hot != (session.hot.digest if session.hot is not None else b""):
            raise ValueError("a saved session with other hot words")
        self.states.load_parts(session.slot, saved.parts[:rows])
        session.audio.resume(numbers.place, saved.parts[rows])
        if self._remembers is not None:
            beside: list[Part] = list(saved.parts[rows + 2 :])
            seen, where = numbers.place.seen, self.device.torch_device
            self._remembers.keep(session.slot.row, bytes(beside[0]), bytes(beside[1]), seen, where)
        session.evidence = self._evidence(numbers, saved.parts[rows + 1])
        session.guesses, session.over = numbers.guesses, bool(numbers.guesses)
        if not session.over:
            self._look(session, now_ms)

    # --- steps -----------------------------------------------------------------------------------------

    @property
    def due_ms(self) -> float | None:
        """When the next step is due, on the clock of `put`; None when nobody is ready."""
        if not self._ready:
            return None
        since = min(self._since(session) for session in self._ready)
        alone = not self.chunked or len(self._ready) >= min(self.max_rows, len(self._sessions))
        return since if alone else since + self.wait_ms

    def next(self, now_ms: float) -> list[Session]:
        """Those who take the next step together, as long a one; nobody before it is due."""
        if (due_ms := self.due_ms) is None or now_ms < due_ms:
            return []
        first, *others = sorted(self._ready, key=self._urgency)
        size = self._most(first, now_ms)
        fits = [session for session in others if self._most(session, now_ms) == size]
        rows = self.max_rows if size == self.sizes[0] else min(self.max_rows, self._bulk_rows)
        return [first, *fits[: rows - 1]]

    @staticmethod
    def _since(session: Session) -> float:
        assert session.ready_ms is not None
        return session.ready_ms

    def _urgency(self, session: Session) -> tuple[float, int]:
        return self._since(session) + (0.0 if session.live else PATIENCE_MS), session.slot.row

    def _most(self, session: Session, now_ms: float) -> int:
        """Frames of a step that suits it: many where nobody waits for the first of them, nor for the step to end.
        The rest of a recording may fill a step of many by half."""
        one, bulk = self.sizes[0], self.sizes[-1]
        if session.live or now_ms - self._spoken_ms < QUIET_MS:
            return one
        if session.audio.ended:
            return bulk if 2 * self._left(session) > bulk else one
        return bulk if session.audio.holds(self._windows[bulk], self.model.frame_samples) else one

    def step(self, sessions: Sequence[Session], now_ms: float) -> list[Progress]:
        """A chunk of these, as `next` chose them. Should it fail, their state is of no more use."""
        size = min(self._most(session, now_ms) for session in sessions)
        frames = [min(size, self._left(session)) for session in sessions]
        rows, samples = self._rows(len(sessions)), self._windows[size]
        if (rows, size) not in self._shapes:
            self._record(rows, samples)
            self._shapes.add((rows, size))
        given = self._batch.fill(rows, samples, sessions, frames)
        found = self._advance(given, self.states.begin([each.slot for each in sessions], rows), sessions)
        for session, count in zip(sessions, frames, strict=True):
            session.audio.advance(count, self.model.frame_samples)
            session.ready_ms = None  # its turn for the next one comes after those who are ready now
            self._look(session, now_ms)
        return [Progress(session, each) for session, each in zip(sessions, found, strict=True)]

    def _left(self, session: Session) -> int:
        """Frames that its audio still has."""
        audio = session.audio
        return self.model.frames(audio.samples) - audio.seen if audio.ended else self.sizes[-1]

    def _rows(self, sessions: int) -> int:
        """Of a step of so many."""
        return min(self.device.rows(sessions), self.states.slots + 1)

    @torch.inference_mode()
    def _record(self, rows: int, samples: int) -> None:
        """A shape that is new. Where steps are recorded, the first call runs more than once: it is one of rows
        that are nobody's."""
        if self._forward != self._step:
            pcm, *numbers = self._batch.fill(rows, samples, [], [])
            self._forward(pcm, self.states.begin([], rows), *numbers)

    @torch.inference_mode()
    def _advance(self, given: _Input, rows: Tensor, sessions: Sequence[Session]) -> list[Found]:
        pcm, *numbers = given
        (hidden,) = self._forward(pcm, rows, *numbers)
        n, device = len(sessions), self.device.torch_device
        live = Chunk(pcm[:n], rows[:n], *(each[:n].to(device) for each in numbers))
        found = self.search.step(hidden[:n], live, self._search)
        self._gather(hidden, given.frames.tolist(), sessions, found)
        return found

    def _gather(
        self, hidden: Tensor, frames: Sequence[int], sessions: Sequence[Session], found: Sequence[Found]
    ) -> None:
        """What those need of whom words are wanted."""
        wanted = [row for row, session in enumerate(sessions) if session.evidence is not None]
        if not wanted:
            return
        heard = columns(self.model.ctc(hidden[wanted]), self.model.blank) if self._aligns else None
        for i, row in enumerate(wanted):
            evidence = sessions[row].evidence
            assert evidence is not None
            evidence.hear(found[row].fixed, None if heard is None else heard[i, : frames[row]])

    def _step(self, *given: Tensor) -> tuple[Tensor]:
        return (self.model.step(Chunk(*(each.to(self.device.torch_device) for each in given)), self._encoder),)
