"""Log of events: who listens, from where on."""

from __future__ import annotations

import contextlib
import json

import pytest

from asr_serve.edge import event_log
from asr_serve.edge.event_log import EdgeEventLog, EventPosition, LoggedEvent, parse_event_id
from asr_serve.errors import AtCapacity, MalformedRequest


def filled(count: int) -> EdgeEventLog:
    log = EdgeEventLog()
    for number in range(1, count + 1):
        log.append("call", b'{"n":%d}' % number)
    log.close()
    return log


async def told(log: EdgeEventLog, position: EventPosition) -> list[LoggedEvent]:
    return [event async for event in log.listen(position, 1.0) if event is not None]


@pytest.mark.parametrize(("after", "numbers"), [(0, [1, 2, 3]), (2, [3]), (3, []), (50, [0, 1, 2, 3])])
@pytest.mark.parametrize("has_epoch", [True, False])
async def test_listeners_go_on_behind_their_last_event(after: int, numbers: list[int], has_epoch: bool) -> None:
    log = filled(3)
    events = await told(log, EventPosition(log.epoch if has_epoch else None, after))
    assert [event.number for event in events] == numbers


async def test_an_id_of_before_a_restart_is_told_and_gets_everything() -> None:
    """Also where the new log has as many events as the old one had, so that numbers alone would look right."""
    before, after = filled(2), filled(3)
    (_, last) = await told(before, parse_event_id("0"))
    events = await told(after, parse_event_id(last.id))
    assert [event.type for event in events] == ["restarted", "call", "call", "call"]
    assert json.loads(events[0].json) == {"type": "restarted", "epoch": after.epoch}
    assert b"id:" not in events[0].sse  # whoever reconnects has the place that he had
    assert events[1].sse == b'id: %s-1\nevent: call\ndata: {"n":1}\n\n' % after.epoch.encode()
    assert [event.number for event in await told(after, parse_event_id(events[2].id))] == [3]


async def test_events_that_gave_way_are_told_as_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_EVENTS", 2)
    log = filled(5)
    first, *rest = await told(log, EventPosition(log.epoch, 1))
    assert (first.type, json.loads(first.json)) == ("missed", {"type": "missed", "events": 2})
    assert [event.number for event in rest] == [4, 5]
    assert [event.number for event in await told(log, EventPosition(log.epoch, 3))] == [4, 5]


async def test_messages_have_their_id_in_front() -> None:
    log = filled(1)
    (event,) = await told(log, parse_event_id("0"))
    assert json.loads(event.message) == {"id": f"{log.epoch}-1", "n": 1}
    assert json.loads(LoggedEvent("ab-1", 1, "call", b"{}").message) == {"id": "ab-1"}
    assert LoggedEvent("", 0, "missed", b'{"events":1}').message == '{"events":1}'


async def test_listeners_of_a_log_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_LISTENERS", 1)
    log = EdgeEventLog()
    with contextlib.ExitStack() as listener:
        listener.enter_context(log.place())  # from the request on, before anything is listened to
        with pytest.raises(AtCapacity):
            listener.enter_context(log.place())
    with log.place():
        pass


@pytest.mark.parametrize("text", ["", "-1", "x-1", "1-", "ab-1-1", "٣", "0" * 4_400, "0" * 20 + "1", "1" * 13, "A-1"])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(MalformedRequest):
        parse_event_id(text)
