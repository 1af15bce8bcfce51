"""What waits for a client: events in order, of states only the newest, and the end of patience."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from asr_serve.errors import ClientGone
from asr_serve.server.realtime.outbox import CONGESTION_EVENTS, Outbox


class Reader:
    """A client that takes what comes while its gate is open."""

    def __init__(self) -> None:
        self.took: list[str] = []
        self.gate = asyncio.Event()

    async def send(self, message: Any) -> None:
        await self.gate.wait()
        self.took.append(message["text"])


def state(text: str, made: list[str] | None = None) -> Callable[[], str]:
    def make() -> str:
        if made is not None:
            made.append(text)
        return text

    return make


async def test_a_slow_reader_gets_every_event_and_the_newest_state():
    reader, made = Reader(), []
    outbox = Outbox(reader.send)
    writer = asyncio.create_task(outbox.run())
    outbox.send("a")
    await asyncio.sleep(0)  # under way
    assert outbox.send_state(state("one", made))
    assert not outbox.send_state(state("two", made))
    outbox.send("b")
    assert not outbox.send_state(state("three", made))
    reader.gate.set()
    await outbox.wait_empty()
    assert reader.took == ["a", "b", "three"]
    assert made == ["three"], "what nobody sees is not made"
    assert outbox.send_state(state("four"))
    outbox.send_replacing_state("final")
    await outbox.wait_empty()
    assert reader.took[3:] == ["final"]
    writer.cancel()


async def test_a_crowd_is_told_of():
    reader = Reader()
    outbox = Outbox(reader.send)
    for number in range(CONGESTION_EVENTS):
        assert not outbox.congested
        outbox.send(str(number))
    assert outbox.congested
    writer = asyncio.create_task(outbox.run())
    reader.gate.set()
    await outbox.wait_empty()
    assert not outbox.congested
    assert len(reader.took) == CONGESTION_EVENTS
    writer.cancel()


async def test_who_takes_nothing_is_given_up():
    outbox = Outbox(Reader().send, send_s=0.05)
    outbox.send("a")
    with pytest.raises(ClientGone, match=r"took nothing for 0\.05 s"):
        await outbox.run()
