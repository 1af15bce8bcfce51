"""A client of one live session, driven as a server drives it; its events must be consistent at all times."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from tiny_moonshine import on_loop

from asr_serve.api.library import Model
from asr_serve.engine.client import EngineClient
from asr_serve.engine.partial_rate import PartialRateController
from asr_serve.pipelines.live.events import (
    FlushDone,
    LiveEvent,
    LivePartial,
    LiveSegmentDone,
    SessionFinished,
    TurnEvent,
)
from asr_serve.pipelines.live.live_session import LiveSession
from asr_serve.pipelines.options import ListenOptions
from asr_serve.types import Segment

RATE_HZ = 16_000
WAIT_S = 180.0
"""Longer than any answer takes; only a hang reaches it."""
SegmentSpans = list[tuple[int, int, str]]


def fast_clock() -> Callable[[], float]:
    """A clock by which a minute has passed whenever it is read: every possible partial is requested."""
    return map(float, itertools.count(0, 60)).__next__


def stopped_clock() -> float:
    """A clock that stands still: no partial but the first of a segment."""
    return 0.0


class LiveClient:
    """Sends audio, collects events, and checks each against those before."""

    def __init__(self, model: Model, clock: Callable[[], float] | None = None, **options: object) -> None:
        self.changed = threading.Event()
        arguments = () if clock is None else (clock,)
        # On a busy machine one slow answer would have the next client refused.
        model._client.partial_rate = PartialRateController()
        self.session = LiveSession(
            model._client, model.tokenizer, ListenOptions.of(options), self.changed.set, *arguments
        )
        self.segments: list[Segment] = []
        self.languages: list[tuple[str, float]] = []
        """Language of each segment and its probability."""
        self.partials: list[LivePartial] = []
        self.turns: list[TurnEvent] = []
        self.flushed: list[FlushDone] = []
        self.requested_flushes: list[FlushDone] = []
        self.finished: SessionFinished | None = None
        self.locked = ""

    def __enter__(self) -> LiveClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()

    @property
    def spans(self) -> SegmentSpans:
        return [(s.start_samples, s.end_samples, s.text) for s in self.segments]

    @property
    def text(self) -> str:
        return " ".join(s.text for s in self.segments)

    def count(self, state: str) -> int:
        return sum(turn.state == state for turn in self.turns)

    def advance(self) -> list[LiveEvent]:
        self.changed.clear()
        events = self.session.advance()
        for event in events:
            self._on_event(event)
        return events

    def settle(self) -> None:
        """Wait until the engine has nothing of this session in flight."""
        while not self.session.idle:
            self.answer()

    def answer(self) -> None:
        """Wait for the engine and read its events."""
        assert self.changed.wait(WAIT_S), "nobody wakes this session any more"
        self.advance()

    def write(self, pcm: np.ndarray) -> None:
        while self.session.full:
            self.answer()
        self.session.append_audio(pcm)
        self.advance()

    def flush(self, name: str) -> None:
        self.session.flush(name)
        self.requested_flushes.append(FlushDone(name, self.session.received_samples))
        self.advance()

    def finish(self) -> None:
        self.session.finish()
        self.advance()
        while self.finished is None:
            self.answer()
        assert self.session.advance() == []
        assert self.finished.duration_samples == self.session.received_samples

    def _on_turn(self, turn: TurnEvent) -> None:
        before = next((t for t in reversed(self.turns) if t.state != "ended"), None)
        match turn.state:
            case "started" if before is not None:
                assert before.state == "stopped"
                assert before.position_samples <= turn.position_samples
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

    def _on_event(self, event: LiveEvent) -> None:
        assert self.finished is None, "something follows the end"
        received = self.session.received_samples
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
                self._on_turn(event)
            case FlushDone():
                self.flushed.append(event)
                assert self.requested_flushes[: len(self.flushed)] == self.flushed
                assert not self.locked, "flushed, and yet words of an open segment are locked"
            case SessionFinished():
                assert self.requested_flushes == self.flushed
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


def run_session(
    model: Model,
    pcm: np.ndarray,
    sizes: Iterable[int] = (1 << 40,),
    clock: Callable[[], float] | None = None,
    *,
    in_step: bool = False,
    **options: object,
) -> LiveClient:
    """A whole session over `pcm`. `in_step`: each packet is answered before the next."""
    with LiveClient(model, clock, **options) as client:
        for packet in packets(pcm, sizes):
            client.write(packet)
            if in_step:
                client.settle()
        client.finish()
    return client


def expect_streaming_idle(client: EngineClient) -> None:
    """Like `expect_idle`, for an engine whose encoder runs while the audio comes."""
    on_loop(client, lambda loop: loop.check())
    stats = client.describe()
    held = ("requests", "sessions", "pages_used", "slots_used", "sessions_used")
    assert not any(stats[name] for name in held), stats


def plain_words(text: str) -> list[str]:
    """Words as compared: no case, no marks."""
    words = ("".join(c for c in word if c.isalnum()) for word in text.casefold().replace("-", " ").split())
    return [word for word in words if word]
