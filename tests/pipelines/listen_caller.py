"""One live caller, driven as a server drives it; whatever it is told must be consistent at all times."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from asr_serve.api.library import Model
from asr_serve.engine.client import EngineClient
from asr_serve.engine.loop import Loop
from asr_serve.engine.partial_rate import PartialRateController
from asr_serve.pipelines.live.events import (
    FlushDone,
    LiveEvent,
    LivePartial,
    LiveSegmentDone,
    SessionFinished,
    TurnEvent,
)
from asr_serve.pipelines.live.listen import LiveSession
from asr_serve.pipelines.options import ListenOptions
from asr_serve.types import Segment

RATE_HZ = 16_000
WAIT_S = 60.0
"""Longer than any answer takes; only a hang reaches it."""
Said = list[tuple[int, int, str]]


def hurried() -> Callable[[], float]:
    """A clock by which a minute has passed whenever it is read: every partial that may be asked for is."""
    return map(float, itertools.count(0, 60)).__next__


def still() -> float:
    """A clock that stands: no partial but the first of a segment."""
    return 0.0


class Caller:
    """Puts, hears, and checks each event against those before."""

    def __init__(self, model: Model, clock: Callable[[], float] | None = None, **options: object) -> None:
        self.bell = threading.Event()
        arguments = () if clock is None else (clock,)
        # On a busy machine one slow answer would have the next caller refused.
        model._client.partial_rate = PartialRateController()
        self.listening = LiveSession(
            model._client, model._tokenizer, ListenOptions.of(options), self.bell.set, *arguments
        )
        self.segments: list[Segment] = []
        self.languages: list[tuple[str, float]] = []
        """Of each, and how probable that is."""
        self.partials: list[LivePartial] = []
        self.turns: list[TurnEvent] = []
        self.flushed: list[FlushDone] = []
        self.asked: list[FlushDone] = []
        self.finished: SessionFinished | None = None
        self.locked = ""

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.listening.close()

    @property
    def said(self) -> Said:
        return [(s.start_samples, s.end_samples, s.text) for s in self.segments]

    @property
    def text(self) -> str:
        return " ".join(s.text for s in self.segments)

    def count(self, state: str) -> int:
        return sum(turn.state == state for turn in self.turns)

    def advance(self) -> list[LiveEvent]:
        self.bell.clear()
        events = self.listening.advance()
        for event in events:
            self._take(event)
        return events

    def settle(self) -> None:
        """Until the engine has nothing of this caller's under way."""
        while not self.listening.idle:
            self.answer()

    def answer(self) -> None:
        """Wait for the engine and hear it."""
        assert self.bell.wait(WAIT_S), "nobody wakes this caller any more"
        self.advance()

    def write(self, pcm: np.ndarray) -> None:
        while self.listening.full:
            self.answer()
        self.listening.append_audio(pcm)
        self.advance()

    def flush(self, name: str) -> None:
        self.listening.flush(name)
        self.asked.append(FlushDone(name, self.listening.received_samples))
        self.advance()

    def finish(self) -> None:
        self.listening.finish()
        self.advance()
        while self.finished is None:
            self.answer()
        assert self.listening.advance() == []
        assert self.finished.duration_samples == self.listening.received_samples

    def _take_turn(self, turn: TurnEvent) -> None:
        before = next((t for t in reversed(self.turns) if t.state != "ended"), None)
        match turn.state:
            case "started":
                assert before is None or (
                    before.state == "stopped" and before.position_samples <= turn.position_samples
                )
            case "eager_end":
                assert before is not None
                assert before.state in ("started", "resumed")
            case "resumed":
                assert before is not None
                assert before.state == "eager_end"
            case "stopped":
                assert before is not None
                assert before.state != "stopped"
            case "ended":
                last = [t for t in self.turns if t.state == "stopped"][self.count("ended")]
                assert (last.position_samples, last.by) == (turn.position_samples, turn.by)
                assert not self.segments or self.segments[-1].end_samples <= turn.position_samples
        self.turns.append(turn)

    def _take(self, event: LiveEvent) -> None:
        assert self.finished is None, "something follows the end"
        received = self.listening.received_samples
        match event:
            case LiveSegmentDone(segment=segment):
                before = self.segments[-1].end_samples if self.segments else 0
                assert before <= segment.start_samples < segment.end_samples <= received
                assert segment.text == segment.text.strip() != ""
                assert segment.text.startswith(self.locked), (self.locked, segment.text)
                self.segments.append(segment)
                self.languages.append((event.language, event.language_prob))
                self.locked = ""
            case LivePartial():
                assert event.start_samples <= event.heard_samples
                assert event.start_samples >= (self.segments[-1].end_samples if self.segments else 0)
                assert event.locked_text.startswith(self.locked), (self.locked, event.locked_text)
                assert event.locked_text == event.locked_text.strip()
                assert event.start_samples <= event.locked_samples or not event.locked_text
                assert event.locked_samples <= received
                self.locked = event.locked_text
                self.partials.append(event)
            case TurnEvent():
                self._take_turn(event)
            case FlushDone():
                self.flushed.append(event)
                assert self.asked[: len(self.flushed)] == self.flushed
                assert not self.locked, "flushed, and yet words of an open segment are locked"
            case SessionFinished():
                assert self.asked == self.flushed
                assert len(self.turns) == sum(self.count(state) for state in TURN_STATES)
                assert self.count("started") == self.count("stopped") == self.count("ended")
                assert not self.locked, "locked words that no segment says"
                self.finished = event


TURN_STATES = ("started", "eager_end", "resumed", "stopped", "ended")


def packets(pcm: np.ndarray, sizes: Iterable[int]) -> Iterator[np.ndarray]:
    """`pcm` in packets of these sizes, again and again."""
    at = 0
    for size in itertools.cycle(sizes):
        if at >= len(pcm):
            return
        yield pcm[at : at + size]
        at += size


def hear(
    model: Model,
    pcm: np.ndarray,
    sizes: Iterable[int] = (1 << 40,),
    clock: Callable[[], float] | None = None,
    *,
    in_step: bool = False,
    **options: object,
) -> Caller:
    """Everything that is said, from `put` to the end. `in_step`: each packet is answered before the next."""
    with Caller(model, clock, **options) as caller:
        for packet in packets(pcm, sizes):
            caller.write(packet)
            if in_step:
                caller.settle()
        caller.finish()
    return caller


def on_loop(client: EngineClient, work: Callable[[Loop], object]) -> None:
    """Have the loop's thread do it, and wait."""
    done = threading.Event()
    failed: list[BaseException] = []

    def job(loop: Loop) -> None:
        try:
            work(loop)
        except BaseException as failure:
            failed.append(failure)
        done.set()

    client.backend.call(job)
    assert done.wait(WAIT_S)
    if failed:
        raise failed[0]


def expect_empty(client: EngineClient) -> None:
    """No request, page, slot or session is held by anybody."""

    def look(loop: Loop) -> None:
        loop.check()
        assert (len(loop.executor.open_requests), len(loop.executor.scheduler), len(loop.vad_scheduler)) == (
            0,
            0,
            0,
        )

    on_loop(client, look)
    told = client.describe()
    assert {k: told[k] for k in ("requests", "sessions", "pages_used", "sessions_used")} == {
        "requests": 0,
        "sessions": 0,
        "pages_used": 0,
        "sessions_used": 0,
    }


def expect_growing_empty(client: EngineClient) -> None:
    """The same where audio is encoded while it is spoken."""
    on_loop(client, lambda loop: loop.check())
    told = client.describe()
    held = ("requests", "sessions", "pages_used", "slots_used", "sessions_used")
    assert not any(told[name] for name in held), told


def plain(text: str) -> list[str]:
    """Words as compared: no case, no marks."""
    words = ("".join(c for c in word if c.isalnum()) for word in text.casefold().replace("-", " ").split())
    return [word for word in words if word]
