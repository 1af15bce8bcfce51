"""Everything that one engine process was given on its way to another, while people speak."""

from __future__ import annotations

import time
from collections import Counter
from typing import Literal, NamedTuple

from asr_serve.engine.process import wire
from asr_serve.engine.process.child import Left
from asr_serve.engine.process.given import Given
from asr_serve.engine.process.pending import Session, Stream
from asr_serve.transfer.parcel import Parcel

MOST_MOVING = 8
"""Streams on their way at once. Each is some MB of memory meanwhile, and its audio waits; the others go on."""

How = Literal["state", "replay"]
"""From where it stood; or heard again from its start."""
What = Literal["session", "stream"]


class Renewed(NamedTuple):
    """What has become of an engine process that another took the place of."""

    sessions: int
    """Callers whose voice activity is followed, that went over; all of them from where they stood."""
    streams: int
    """Streams that went over from where they stood."""
    replayed: int
    """Those that were heard again from their start instead."""
    repeated: int
    """Requests that the old process did not finish in time: the new one begins them again."""
    load_s: float
    """Until the new process was there."""
    total_s: float
    """Until the old one was gone."""


class Renewal:
    """Sessions go over at once. Streams do a few at a time: no more of one is sent to the old process; when that
    has answered what it has, it says where the stream stands; the new one goes on from there, with what has come
    meanwhile. What can't go that way is heard again. Requests stay where they are. Under the lock of Processes."""

    def __init__(self, old: Given, new: Given) -> None:
        self.old, self.new = old, new
        self.moved: Counter[tuple[What, How]] = Counter()
        self.repeated = 0
        self.waited_s = 0.0
        """How long the audio of all streams together waited on their way."""
        self._since: dict[int, float] = {}
        """Those on their way: since when, on the monotonic clock."""

    @property
    def finished(self) -> bool:
        return self.old.idle and not self._since

    def begin(self) -> None:
        for number, session in list(self.old.sessions.items()):
            if not isinstance(session, Stream):
                self.old.close(number)
                self._go_over(number, session)
        self._next()

    def heard(self, given: Given, message: wire.ToServer | Left) -> None:
        """After `given` took it."""
        match message:
            case wire.Said(session=number) | wire.Failed(id=number, piece=int()) if given is self.old:
                if number in self._since:
                    self._ask(number)
            case Left(session=number, saved=saved) if given is self.old:
                self._left(number, saved)
            case Left(saved=Parcel() as nobodys):
                nobodys.close()
            case wire.Opened(session=number, failure=failure) if given is self.new:
                self._arrived(number, "replay" if failure else "state")
            case wire.Opened(session=number) if number in self._since:  # of a renewal before, that took too long
                self._ask(number)

    def closed(self, number: int) -> None:
        """Its caller went away."""
        if self._since.pop(number, None) is not None:
            self._next()

    def began(self) -> None:
        """The new process died, and another has begun in its place."""
        for number in list(self._since):
            stream = self.new.sessions.get(number)
            if isinstance(stream, Stream) and not stream.coming:
                self._arrived(number, "replay" if stream.heard else "state")

    def inherit(self) -> None:
        """The old process is gone, or is to go: what it has not done is done by the new one."""
        sessions, self.old.sessions = self.old.sessions, type(self.old.sessions)()
        for number, session in sessions.items():
            self._go_over(number, session)
        work, self.old.work = self.old.work, {}
        for each in work.values():
            each.started = False
            self.new.submit(each)
            self.repeated += 1

    def _next(self) -> None:
        """Let some more streams go."""
        for number, stream in self.old.sessions.items():
            if len(self._since) >= MOST_MOVING:
                return
            if number not in self._since and isinstance(stream, Stream):
                self._since[number] = time.monotonic()
                stream.going = True
                self._ask(number)

    def _ask(self, number: int) -> None:
        """Where it stands, once the process has answered all that it was sent."""
        stream = self.old.sessions.get(number)
        if not isinstance(stream, Stream):  # it has ended, or was lost
            self.closed(number)
        elif not stream.under_way and not stream.coming:
            self.old.send(wire.Export(number))

    def _left(self, number: int, saved: Parcel | None) -> None:
        stream = self.old.sessions.get(number)
        if not isinstance(stream, Stream):  # closed meanwhile
            if saved is not None:
                saved.close()
            return
        self.old.close(number)
        stream.saved = saved
        self._go_over(number, stream)

    def _go_over(self, number: int, session: Session) -> None:
        if not isinstance(session, Stream):
            self.moved["session", "state"] += 1
            self.new.open(number, session)
            return
        session.going = session.coming = False
        self._since.setdefault(number, time.monotonic())
        self.new.open(number, session)
        if session.saved is None and not session.coming:
            self._arrived(number, "replay" if session.heard else "state")

    def _arrived(self, number: int, how: How) -> None:
        if (since_s := self._since.pop(number, None)) is not None:
            self.moved["stream", how] += 1
            self.waited_s += time.monotonic() - since_s
            self._next()
