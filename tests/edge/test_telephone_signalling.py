"""The telephone before sipp: how calls begin, change and end, and what is refused."""

from __future__ import annotations

import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running_edge import RunningEdge
from running_server import eventually
from sipp import ACK, INVITE, OK_TO_BYE, Sipp, fresh, offer, pause, receive, respond, send

from asr_serve.edge.telephone import CallRequest
from asr_serve.errors import OptionError

NOBODY = "http://127.0.0.1:9"
"""A server that is away: signalling does not need it."""

Phone = Callable[..., RunningEdge]


@pytest.fixture
def phone() -> Iterator[Phone]:
    """`phone(max_calls=1)`: an edge with a telephone of these settings."""
    made: list[RunningEdge] = []

    def start(edge: dict[str, Any] | None = None, **sip: Any) -> RunningEdge:
        made.append(RunningEdge(NOBODY, sip=sip, **(edge or {})))
        return made[-1]

    yield start
    for each in made:
        each.close()


def sip_port(edge: RunningEdge) -> int:
    assert edge.telephone is not None
    return edge.telephone.port


def ends(edge: RunningEdge, count: int = 1) -> list[dict[str, Any]]:
    eventually(lambda: len(edge.call_notes("call_end")) >= count)
    return edge.call_notes("call_end")


@pytest.mark.parametrize("transport", ["u1", "t1"])
def test_a_caller_hangs_up(phone: Phone, tmp_path: Path, transport: str) -> None:
    edge = phone(tcp=transport == "t1")
    steps = (INVITE, receive(200), ACK, pause(50), send("BYE", 2), receive(200))
    messages = Sipp(tmp_path / "sipp", sip_port(edge), *steps, flags=("-t", transport)).finish()
    assert "m=audio" in messages
    (call,), (end,) = edge.call_notes("call"), ends(edge)
    assert (end["cause"], end["session"]) == ("hangup", call["session"])
    assert edge.events(call["session"])[0]["type"] == "call"
    assert edge.describe(call["session"]).ended
    assert edge.metric("asr_serve_edge_calls_total", outcome="answered") == 1
    assert edge.metric("asr_serve_edge_open_calls") == 0


def test_we_hang_up_when_the_session_is_deleted(phone: Phone, tmp_path: Path) -> None:
    edge = phone()
    steps = (INVITE, receive(200), ACK, receive("BYE"), OK_TO_BYE)
    sipp = Sipp(tmp_path / "sipp", sip_port(edge), *steps)
    eventually(lambda: edge.call_notes("call"))
    (call,) = edge.call_notes("call")
    eventually(lambda: "ACK sip:" in sipp.messages())
    edge.call(edge.service.end, call["session"])
    sipp.finish()
    (end,) = ends(edge)
    assert end["cause"] == "local"


def test_a_caller_gives_up_while_it_rings(phone: Phone, tmp_path: Path) -> None:
    edge = phone(ring_s=30.0)
    cancel = fresh(send("CANCEL", retransmits=False)).replace("[branch]", "[branch-2]")
    steps = (INVITE, receive(180), cancel, receive(200), receive(487), ACK.replace("[branch]", "[branch-5]"))
    Sipp(tmp_path / "sipp", sip_port(edge), *steps).finish()
    (end,) = ends(edge)
    assert (end["cause"], end["status"]) == ("cancelled", 487)
    assert edge.call_notes("call") == []
    assert edge.metric("asr_serve_edge_calls_total", outcome="cancelled") == 1
    assert edge.metric("asr_serve_edge_calls_total", outcome="answered") == 0


def test_a_call_is_held_and_goes_on_at_another_address(phone: Phone, tmp_path: Path) -> None:
    edge = phone()
    ack = [send("ACK", number, retransmits=False) for number in (1, 2, 3)]
    moved = offer().replace("[auto_media_port]", "[media_port+40]").replace("1 1 IN", "1 2 IN")
    steps = (
        *(INVITE, receive(200), ack[0]),
        *(send("INVITE", 2, body=offer("sendonly")), receive(200), ack[1]),
        *(send("INVITE", 3, body=moved), receive(200), ack[2]),
        *(send("INVITE", 4, body=offer(types="18")), receive(488), send("ACK", 4, retransmits=False)),
        *(pause(50), send("BYE", 5), receive(200)),
    )
    messages = Sipp(tmp_path / "sipp", sip_port(edge), *steps).finish()
    answered = [line for line in messages.splitlines() if line in ("a=sendrecv", "a=recvonly", "a=sendonly")]
    assert answered == [
        "a=sendrecv",
        "a=sendrecv",
        "a=sendonly",
        "a=recvonly",
        "a=sendrecv",
        "a=sendrecv",
        "a=sendrecv",
    ]
    (call,) = edge.call_notes("call")
    kinds = [event["type"] for event in edge.events(call["session"])]
    assert kinds[:3] == ["call", "hold", "resume"]
    ports = [line.split()[1] for line in messages.splitlines() if line.startswith("m=audio")]
    assert edge.describe(call["session"]).source == f"127.0.0.1:{ports[4]}"


def test_full_lines_are_busy_and_full_edges_unavailable(phone: Phone, tmp_path: Path) -> None:
    edge = phone(max_calls=1)
    taken = Sipp(tmp_path / "taken", sip_port(edge), INVITE, receive(200), ACK, receive("BYE"), OK_TO_BYE)
    eventually(lambda: edge.call_notes("call"))
    busy = Sipp(tmp_path / "busy", sip_port(edge), INVITE, receive(486), ACK).finish()
    assert "Retry-After: " in busy
    eventually(lambda: "ACK sip:" in taken.messages())
    edge.call(edge.service.end, edge.call_notes("call")[0]["session"])
    taken.finish()
    assert edge.metric("asr_serve_edge_calls_total", outcome="busy") == 1
    full = phone({"max_sessions": 1})
    full.create()
    messages = Sipp(tmp_path / "full", sip_port(full), INVITE, receive(503), ACK).finish()
    assert "Retry-After: " in messages
    assert full.metric("asr_serve_edge_calls_total", outcome="unavailable") == 1


def test_what_is_not_spoken_is_answered_so(phone: Phone, tmp_path: Path) -> None:
    edge = phone(encodings=["PCMU"])
    steps = (
        *(send("OPTIONS"), receive(200)),
        *(fresh(send("PUBLISH", 2)), receive(405)),
        *(fresh(send("INVITE", 3, body=offer())), receive(488), send("ACK", 3, retransmits=False)),
    )
    messages = Sipp(tmp_path / "sipp", sip_port(edge), *steps).finish()
    assert "Allow: INVITE, ACK, BYE, CANCEL, OPTIONS" in messages
    assert "one of: PCMU" in messages
    assert edge.metric("asr_serve_edge_sip_messages_total", outcome="method_not_allowed") == 1
    assert edge.metric("asr_serve_edge_calls_total", outcome="not_acceptable") == 1


@pytest.mark.parametrize("password", ["secret", "wrong"])
def test_callers_have_passwords(phone: Phone, tmp_path: Path, password: str) -> None:
    edge = phone(callers={"ann": "secret"}, digests=["MD5"])
    signed = fresh(send("INVITE", 2, f"[authentication username=ann password={password}]", body=offer()))
    after = (receive(200), send("ACK", 2, retransmits=False), pause(50), send("BYE", 3), receive(200))
    refused = (receive(401), send("ACK", 2, retransmits=False))
    steps = (INVITE, receive(401, auth=True), ACK, signed, *(after if password == "secret" else refused))
    Sipp(tmp_path / "sipp", sip_port(edge), *steps).finish()
    assert len(edge.call_notes("call")) == (password == "secret")


def test_it_registers_again_before_the_registration_ends_and_leaves_at_the_end(tmp_path: Path) -> None:
    """The registrar checks the digests, and grants two seconds."""
    challenge = 'WWW-Authenticate: Digest realm="pbx", nonce="n", algorithm=MD5, qop="auth"'
    verify = '<verifyauth assign_to="ok" username="7001" password="secret"/><log message="verified [$ok]"/>'
    signed = receive("REGISTER", action=verify)
    round_ = (receive("REGISTER"), respond("401 Unauthorized", challenge), signed, respond("200 OK", "Expires: 2"))
    sipp = Sipp(tmp_path / "sipp", None, *round_, *round_, *round_, flags=("-trace_logs", "-log_file", "verified"))
    edge = RunningEdge(NOBODY, sip={"registrar": f"sip:127.0.0.1:{sipp.port}", "user": "7001", "password": "secret"})
    eventually(lambda: edge.call_notes("registration"))
    assert edge.metric("asr_serve_edge_sip_registered") == 1
    eventually(lambda: sipp.messages().count("200 OK") == 2)
    assert edge.call_notes("registration") == [{"type": "registration", "registered": True, "detail": "for 2 s"}]
    edge.close()
    messages = sipp.finish()
    assert (tmp_path / "sipp" / "verified").read_text().split() == ["verified", "true"] * 3
    assert re.findall(r"^Expires: (\d+)$", messages, re.MULTILINE) == [*("300", "300", "2") * 2, "0", "0", "2"]


def test_nonsense_and_floods_disturb_no_call(phone: Phone, tmp_path: Path) -> None:
    edge = phone()
    sipp = Sipp(tmp_path / "sipp", sip_port(edge), INVITE, receive(200), ACK, pause(600), send("BYE", 2), receive(200))
    eventually(lambda: edge.call_notes("call"))
    rng = random.Random(5)
    lines = (b"INVITE sip:asr@127.0.0.1 SIP/2.0", b"Via: SIP/2.0/UDP 127.0.0.1:9;branch=z9hG4bK%d")
    lines += (b"From: <sip:x@y>;tag=1", b"To: <sip:asr@127.0.0.1>", b"Call-ID: f%d", b"CSeq: 1 INVITE")
    template = b"\r\n".join([*lines, b"Contact: <sip:x@127.0.0.1:9>", b"Content-Length: 0", b"", b""])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for number in range(1_500):
            data = bytearray(template % (number, number))
            for _ in range(rng.randrange(1, 9)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            sender.sendto(bytes(data), ("127.0.0.1", sip_port(edge)))
            if number % 50 == 0:
                time.sleep(0.005)
    sipp.finish()
    assert edge.metric("asr_serve_edge_sip_messages_total", outcome="malformed") > 100
    assert edge.metric("asr_serve_edge_open_calls") <= 64
    session = edge.call_notes("call")[0]["session"]
    assert [end["cause"] for end in ends(edge) if end.get("session") == session] == ["hangup"]


def test_a_call_of_ours_is_placed_and_who_is_not_there_is_told(phone: Phone, tmp_path: Path) -> None:
    edge = phone()
    assert edge.telephone is not None
    ring = respond("180 Ringing")
    answer = respond("200 OK", "Contact: <sip:sipp@[local_ip]:[local_port]>", "Content-Type: application/sdp")
    answer = answer.replace("Content-Length: 0\n\n", "Content-Length: [len]\n\n" + offer(types="8 0"))
    callee = Sipp(tmp_path / "callee", None, receive("INVITE"), ring, answer, receive("ACK"), receive("BYE"), OK_TO_BYE)
    placed = edge.call(edge.telephone.place_call, CallRequest(to=f"sip:bob@127.0.0.1:{callee.port}"))
    eventually(lambda: edge.call_notes("call"))
    (call,) = edge.call_notes("call")
    assert (call["call_id"], call["direction"]) == (placed.call_id, "out")
    edge.call(edge.service.end, call["session"])
    callee.finish()
    busy = Sipp(tmp_path / "busy", None, receive("INVITE"), respond("486 Busy Here"), receive("ACK"))
    edge.call(edge.telephone.place_call, CallRequest(to=f"sip:bob@127.0.0.1:{busy.port}"))
    busy.finish()
    (_, end) = ends(edge, 2)
    assert (end["cause"], end["status"]) == ("rejected", 486)
    for wrong in ("7001", "sip:", "sip:a@b:99999"):
        with pytest.raises(OptionError):
            edge.call(edge.telephone.place_call, CallRequest(to=wrong))


def test_calls_end_with_the_edge(tmp_path: Path) -> None:
    edge = RunningEdge(NOBODY, sip={})
    sipp = Sipp(tmp_path / "sipp", sip_port(edge), INVITE, receive(200), ACK, receive("BYE"), OK_TO_BYE)
    eventually(lambda: "ACK sip:" in sipp.messages())
    edge.close()
    sipp.finish()
