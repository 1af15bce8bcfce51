"""A client of /v1/stream that resumes its session, here or at another server, and what holds of all that it is told."""

from __future__ import annotations

from stream_client import Event, Line, expect_sound, numbered, segments


class Caller:
    """A client that goes from one server to another, and checks what it is told."""

    def __init__(self, pcm: bytes, **query: object) -> None:
        self.pcm, self.query = pcm, query
        self.told: list[Event] = []
        """Numbered events, as its user has seen them."""
        self.acknowledged = self.at = 0
        self.session, self._given = "", False
        self.line: Line

    def continue_as(self, other: Caller) -> None:
        """The session of another client, as far as that has it."""
        self.session, self._given, self.told = other.session, True, list(other.told)
        self.at, self.acknowledged = other.at, other.acknowledged

    def connect(self, kind: type[Line], port: int, host: str = "127.0.0.1", *, durable: bool = True) -> Line:
        query = {"session": self.session, "after": len(self.told)} if self.session else self.query
        line = kind(port, host=host, **query)
        if self.session and not self._given:
            self.line.socket.close()
        self.line, self._given = line, False
        opened = line.hear("session")
        assert opened.get("durable", False) is durable
        assert opened["last_seq"] >= len(self.told)
        # Every byte that was acknowledged is there, and none that was not sent.
        assert self.acknowledged <= opened["received_bytes"] <= self.at
        self.session, self.at = opened["session_id"], opened["received_bytes"]
        self._seen = 0
        return line

    def say(self, until: float, wait_s: float = 0.0) -> None:
        """Send up to that share of the audio."""
        end = len(self.pcm) if until >= 1 else int(until * len(self.pcm)) // 2 * 2
        while self.at < end:
            size = min(3_200, end - self.at)
            self.line.send(self.pcm[self.at : self.at + size])
            self.at += size
            while self.line.poll(wait_s):
                pass
            self.listen()

    def listen(self) -> None:
        for event in self.line.events[self._seen :]:
            if "seq" in event:
                self.told.append(event)
            elif event["type"] == "ack":
                assert event["received_bytes"] >= self.acknowledged
                self.acknowledged = event["received_bytes"]
        self._seen = len(self.line.events)

    def hear_more(self, count: int = 1) -> None:
        """Wait for so many numbered events more."""
        wanted = len(self.told) + count
        self.line.until(lambda: len(numbered(self.line.events)) >= wanted - len(self.told))
        self.listen()

    def leave(self) -> None:
        while self.line.poll():
            pass
        self.listen()
        self.line.cut(reset=True)

    def end(self) -> None:
        self.line.end()
        self.line.rest()
        self.listen()
        self.line.socket.close()

    def expect(self, uncut: list[Event]) -> None:
        expect_sound(self.told)
        assert segments(self.told) == segments(uncut), (segments(self.told), segments(uncut))
        assert self.told[-1]["duration_s"] == uncut[-1]["duration_s"]
