"""Faults of a server whose sessions are in Redis, and what its callers notice. A server is the one of a machine of its
own, started by the command or by Ray as an ingress."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
from hosts import PORT, WAIT_S, Host, Network, wait_until
from resuming_caller import Caller
from stream_client import Event, Http2, Line, WebSocket, numbered


def begin(pcm: bytes, host: Host, kind: type[Line], until: float) -> Caller:
    caller = Caller(pcm)
    caller.connect(kind, PORT, host.address)
    caller.say(until, wait_s=0.002)
    return caller


def finish(callers: list[Caller], uncut: list[Event]) -> None:
    for caller in callers:
        caller.say(1.0)
        caller.end()
        caller.expect(uncut)


def callers_of_a_server_that_is_killed_resume(
    killed: Host, other: Host, kill: Callable[[], None], pcm: bytes, uncut: list[Event]
) -> None:
    """At the other one, over either transport."""
    kinds: list[type[Line]] = [WebSocket, Http2, WebSocket, Http2]
    callers = [begin(pcm, killed, kind, 0.2 + 0.15 * number) for number, kind in enumerate(kinds)]
    kill()
    killed_s = time.monotonic()
    for caller, kind in zip(callers, reversed(kinds), strict=True):
        caller.line.rest()
        caller.listen()
        caller.connect(kind, PORT, other.address)
    print(f"4 callers resumed after {time.monotonic() - killed_s:.2f} s")
    finish(callers, uncut)
    assert other.gauge("asr_serve_session_store_up") == 1


def a_server_is_cut_off_from_redis(network: Network, node: Host, other: Host, pcm: bytes, uncut: list[Event]) -> None:
    """Sessions go on there, in memory, and nobody continues an older state of them elsewhere."""
    stays, leaves = (begin(pcm, node, WebSocket, 0.3) for _ in range(2))
    for caller in (stays, leaves):
        caller.hear_more()
    redis_host = next(host for host in network.hosts if host.name == "redis")
    network.cut(node, redis_host)
    wait_until(lambda: node.gauge("asr_serve_session_store_up") == 0)
    assert httpx.get(f"{node.url}/ready", timeout=WAIT_S).json()["session_store"] == "away"
    assert httpx.get(f"{other.url}/ready", timeout=WAIT_S).json()["session_store"] == "connected"
    for caller in (stays, leaves):
        seen = len(caller.told)
        caller.say(0.7, wait_s=0.002)
        caller.line.flush("in memory")
        caller.line.until(lambda caller=caller: any(event["type"] == "flushed" for event in caller.line.events))
        caller.listen()
        assert len(caller.told) > seen
        assert last_ack(caller)["durable"] is False
    # It was told more than what is stored: the other ingress does not take the session away from where it is.
    leaves.leave()
    refused = httpx.post(
        f"{other.url}/v1/stream", params={"session": leaves.session, "after": len(leaves.told)}, timeout=WAIT_S
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
    leaves.connect(Http2, PORT, node.address, durable=False)
    network.heal(node, redis_host)
    wait_until(lambda: node.gauge("asr_serve_session_store_up") == 1)
    for caller in (stays, leaves):
        caller.say(0.9)
        caller.line.until(lambda caller=caller: last_ack(caller)["durable"])  # it is written whole
        caller.listen()
    stays.leave()
    stays.connect(WebSocket, PORT, other.address)
    for caller in (stays, leaves):
        caller.say(1.0)
        caller.end()
        assert [event["seq"] for event in caller.told] == list(range(1, len(caller.told) + 1))
        assert [event["type"] for event in caller.told].count("flushed") == 1
        assert caller.told[-1]["duration_s"] == uncut[-1]["duration_s"]


def last_ack(caller: Caller) -> Event:
    acks = [event for event in caller.line.events if event["type"] == "ack"]
    return {"durable": True, **acks[-1]} if acks else {"durable": None}


def a_server_is_cut_off_and_fenced(network: Network, node: Host, other: Host, pcm: bytes, uncut: list[Event]) -> None:
    """Its session is taken over. When it is back, it drops the session and tells no more of it, also to a client that
    has not closed its old connection."""
    caller = begin(pcm, node, WebSocket, 0.4)
    caller.hear_more()
    old = caller.line
    fenced = node.gauge("asr_serve_session_store_refused_writes_total")
    network.cut(node)
    given = Caller(pcm)
    given.continue_as(caller)
    given.connect(Http2, PORT, other.address)
    network.heal(node)
    old.send(pcm[caller.at : caller.at + 64_000])  # what is done with this is refused
    last = old.rest()[-1]
    assert (last["type"], last["code"]) == ("error", "taken_over")
    old.socket.close()
    assert node.gauge("asr_serve_session_store_refused_writes_total") > fenced
    finish([given], uncut)
    # What was on its way before the cut may still have come; all of it was stored, and so nothing is told otherwise.
    assert [event for event in numbered(old.events) if event not in given.told] == []
