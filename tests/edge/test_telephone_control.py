"""Control of the telephone over HTTP, and its settings."""

from __future__ import annotations

import asyncio
import re
import runpy
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_edge import RunningEdge
from running_server import WAIT_S, eventually
from typer.testing import CliRunner

from asr_serve.api.cli import app
from asr_serve.api.cli.exit_codes import USAGE
from asr_serve.edge import sip_endpoint
from asr_serve.edge.control_api import CALLS_PATH, PATH, create_control_api
from asr_serve.edge.edge_config import load_edge_config
from asr_serve.edge.sip.user_agent import SipCall
from asr_serve.edge.sip_config import SipConfig
from asr_serve.edge.telephone import CallRequest
from asr_serve.errors import OptionError

AGENT = Path(__file__).resolve().parents[2] / "examples" / "voice_agent.py"
NOBODY = "http://127.0.0.1:9"


@pytest.mark.parametrize("has_telephone", [True, False])
def test_requests_that_cannot_be_met_are_refused(has_telephone: bool) -> None:
    edge = RunningEdge(NOBODY, sip={} if has_telephone else None)

    async def ask() -> list[tuple[int, str]]:
        transport = httpx.ASGITransport(create_control_api(edge.service, edge.telephone))
        async with httpx.AsyncClient(transport=transport, base_url="http://edge") as http:
            answers = [
                await http.post(f"{PATH}/edge_none/audio", content=b"\0\0"),
                await http.delete(f"{PATH}/edge_none/audio"),
                await http.post(f"{PATH}/edge_none/audio", params={"rate": "fast"}),
                await http.post(CALLS_PATH, json={"to": "7001"}),
                await http.post(CALLS_PATH, json={"to": "sip:a@127.0.0.1", "options": {"rate": 8_000}}),
                await http.post(CALLS_PATH, json={"from": "7001"}),
                *[
                    await http.get(f"{CALLS_PATH}/events", params={"after": each})
                    for each in ("0" * 4_400, "0" * 20 + "1")
                ],
                await http.post(
                    CALLS_PATH, content=b'{"to":"sip:a@127.0.0.1"}', headers={"Content-Type": "text/plain"}
                ),
                await http.post(PATH),
            ]
        return [(answer.status_code, answer.json()["error"]["code"]) for answer in answers]

    answers = edge.call(ask)
    edge.close()
    assert answers[-2:] == [(415, "unsupported_media_type")] * 2  # as a form of another origin sends it
    del answers[-2:]
    if has_telephone:
        unknown, malformed = (404, "unknown_session"), (400, "malformed_request")
        options = [(400, "option_error"), (400, "unknown_option")]
        assert answers == [unknown, unknown, malformed, *options, malformed, malformed, malformed]
    else:
        missing, malformed = (404, "no_such_route"), (400, "malformed_request")
        assert answers == [missing, missing, malformed, missing, missing, malformed, missing, missing]


def test_the_voice_agent_skips_calls_that_have_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """An agent that begins is told of all calls that the edge remembers."""
    agent = runpy.run_path(str(AGENT))
    edge = RunningEdge(NOBODY)
    session, gone = edge.create().id, edge.create().id
    for each in (session, gone):
        edge.call(edge.service.end, each)
    eventually(lambda: edge.events(gone)[-1:])
    edge.call(edge.service._drop, gone)

    async def take_up() -> None:
        transport = httpx.ASGITransport(create_control_api(edge.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://edge") as http:
            for each in (session, gone, "edge_none"):
                await agent["Conversation"](http, http, None, each, agent["EchoBot"]()).run()

    edge.call(take_up)
    edge.close()
    told = capsys.readouterr().out.splitlines()
    assert told == [f"skipped a call that has ended: {each}" for each in (session, gone, "edge_none")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sip = 3", "table"),
        ('[sip]\npasword = "x"', "password"),
        ('[sip]\nhost = "0.0.0.0"', "callers"),
        ('[sip]\nhost = "0.0.0.0"\nallow = ["10.0.0.0/8"]', "--host 0.0.0.0"),
        ('[sip]\nallow = ["10.0.0.300"]', "10.0.0.0/24"),
        ('[sip]\nregistrar = "pbx"', "sip:pbx.example.org"),
        ('[sip]\nregistrar = "sip:pbx;transport=tls"', "TLS"),
        ('[sip]\nencodings = ["opus", "mp3"]', "encodings"),
        ("[sip]\nencodings = []", "empty"),
        ('[sip]\nuser = "a b"', "user"),
    ],
)
def test_wrong_settings_of_the_telephone_are_told(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "edge.toml"
    file.write_text(text)
    result = CliRunner().invoke(app, ["edge", "--config", str(file)])
    assert result.exit_code == USAGE
    assert said in result.output


def test_a_wrong_password_is_not_printed(tmp_path: Path) -> None:
    file = tmp_path / "edge.toml"
    for table in ('password = "se\\"cret"', '[sip.callers]\nann = "se\\"cret"'):
        file.write_text(f"[sip]\n{table}")
        result = CliRunner().invoke(app, ["edge", "--config", str(file)])
        assert result.exit_code == USAGE
        assert "***" in result.output
        assert "cret" not in result.output


def test_flags_and_the_variable_come_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "edge.toml"
    file.write_text(
        'host = "10.0.0.5"\n[sip]\nhost = "10.0.0.5"\nport = 5070\npassword = "old"\nuser = "7001"\n'
        'registrar = "sip:pbx"\n'
    )
    monkeypatch.setenv("ASR_SERVE_SIP_PASSWORD", "new")
    sip = load_edge_config(str(file), {"sip": {"port": 5_080}}).sip
    assert sip == SipConfig(host="10.0.0.5", port=5_080, password="new", user="7001", registrar="sip:pbx")
    assert load_edge_config(None, {}).sip is None


@pytest.mark.parametrize("flag", ["--sip=a:b", "--sip-register=7001@pbx", "--sip-register=sip:pbx", "--sip=0.0.0.0"])
def test_wrong_flags_are_told(flag: str) -> None:
    assert CliRunner().invoke(app, ["edge", flag]).exit_code == USAGE


async def test_another_port_is_tried_where_tcp_has_taken_the_one_of_udp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two ports that the system chooses for UDP are another program's for TCP by the time we ask."""
    loop, taken = asyncio.get_running_loop(), []
    open_udp = loop.create_datagram_endpoint

    async def open_and_lose(*args: Any, **options: Any) -> Any:
        made = await open_udp(*args, **options)
        if len(taken) < 2:
            other = socket.socket()
            other.bind(("127.0.0.1", made[0].get_extra_info("sockname")[1]))
            other.listen()
            taken.append(other)
        return made

    monkeypatch.setattr(loop, "create_datagram_endpoint", open_and_lose)
    endpoint = sip_endpoint.SipEndpoint("127.0.0.1", 0, tcp=True, on_events=lambda: None)
    await endpoint.start()
    ports = [each.getsockname()[1] for each in taken]
    assert len(ports) == 2
    assert endpoint.port not in ports
    with socket.create_connection(("127.0.0.1", endpoint.port), WAIT_S):
        await endpoint.close()
    fixed = sip_endpoint.SipEndpoint("127.0.0.1", ports[0], tcp=True, on_events=lambda: None)
    with pytest.raises(OptionError, match="--sip"):
        await fixed.start()
    for each in taken:
        each.close()
    await asyncio.sleep(0)


def test_connections_of_those_who_may_not_call_are_refused_and_silent_ones_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sip_endpoint, "FIRST_MESSAGE_S", 0.05)
    edge = RunningEdge(NOBODY, sip={"tcp": True, "allow": ["127.0.0.1"]})
    assert edge.telephone is not None
    address = ("127.0.0.1", edge.telephone.port)
    with socket.create_connection(address, WAIT_S, source_address=("127.0.0.2", 0)) as stranger:
        assert is_closed(stranger)
    assert edge.metric("asr_serve_edge_sip_messages_total", outcome="not_allowed") == 1
    with socket.create_connection(address, WAIT_S) as silent:
        silent.sendall(b"OPTIONS sip:")  # a beginning is no message
        assert is_closed(silent)
    edge.close()


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_STREAM])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_every_address_is_answered_at(host: str, kind: socket.SocketKind) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    edge = RunningEdge(NOBODY, sip={"host": "::", "tcp": True, "allow": ["127.0.0.1", "::1"]}, host="::")
    assert edge.telephone is not None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, kind) as phone:
        phone.settimeout(WAIT_S)
        phone.connect((host, edge.telephone.port))
        lines = [f"OPTIONS sip:{host} SIP/2.0", f"Via: SIP/2.0/X [::1]:{phone.getsockname()[1]};branch=z9hG4bK1"]
        lines += [
            "From: <sip:a@b>;tag=1",
            "To: <sip:a@b>",
            "Call-ID: 1",
            "CSeq: 1 OPTIONS",
            "Content-Length: 0",
            "",
            "",
        ]
        phone.sendall("\r\n".join([*lines, "", ""]).encode())
        assert phone.recv(4_096).startswith(b"SIP/2.0 200 OK\r\n")
    edge.close()


def invite(phone: socket.socket, number: int, host: str, port: int, direction: str = "sendrecv") -> str:
    """Status line that answers an INVITE with audio at this address."""
    lines = ["v=0", f"o=a 1 1 IN IP4 {host}", "s=-", f"c=IN IP4 {host}", "t=0 0"]
    sdp = "\r\n".join([*lines, f"m=audio {port} RTP/AVP 0", f"a={direction}", ""])
    lines = ["INVITE sip:a@127.0.0.1 SIP/2.0", f"Via: SIP/2.0/UDP 127.0.0.1;rport;branch=z9hG4bK{number}"]
    lines += [f"From: <sip:a@b>;tag={number}", "To: <sip:a@b>", f"Call-ID: {number}", "CSeq: 1 INVITE"]
    lines += ["Contact: <sip:a@127.0.0.1>", "Content-Type: application/sdp", f"Content-Length: {len(sdp)}", "", sdp]
    phone.sendall("\r\n".join(lines).encode())
    while True:
        answer = phone.recv(4_096).decode()
        if f"Call-ID: {number}\r\n" in answer:  # not one of before, sent again
            return answer.partition("\r\n")[0]


@pytest.fixture
def edge() -> Iterator[RunningEdge]:
    made = RunningEdge(NOBODY, sip={})
    yield made
    made.close()


@pytest.fixture
def phone(edge: RunningEdge) -> Iterator[socket.socket]:
    assert edge.telephone is not None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.settimeout(WAIT_S)
        made.connect(("127.0.0.1", edge.telephone.port))
        yield made


def test_a_call_that_begins_on_hold_is_held(edge: RunningEdge, phone: socket.socket) -> None:
    assert invite(phone, 1, "0.0.0.0", 40_000) == "SIP/2.0 200 OK"
    assert invite(phone, 2, "127.0.0.1", 40_002, "inactive") == "SIP/2.0 200 OK"
    assert invite(phone, 3, "127.0.0.1", 40_004) == "SIP/2.0 200 OK"
    told = [[event["type"] for event in edge.events(call["session"])] for call in edge.call_notes("call")]
    assert [("hold" in types, types.index("call")) for types in told] == [(True, 0), (True, 0), (False, 0)]


def test_audio_of_our_own_port_is_refused(edge: RunningEdge, phone: socket.socket) -> None:
    assert invite(phone, 1, "127.0.0.1", edge.driver.port) == "SIP/2.0 488 Not Acceptable Here"
    assert invite(phone, 2, "0.0.0.0", edge.driver.port) == "SIP/2.0 488 Not Acceptable Here"
    assert invite(phone, 3, "127.0.0.1", 40_000) == "SIP/2.0 200 OK"


def test_a_call_that_fails_is_ended_and_others_go_on(
    edge: RunningEdge, phone: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(call: SipCall) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError

    assert edge.telephone is not None
    monkeypatch.setattr(edge.telephone, "_take_offer", fail)
    assert invite(phone, 1, "127.0.0.1", 40_000) == "SIP/2.0 480 Temporarily Unavailable"
    assert invite(phone, 2, "127.0.0.1", 40_000) == "SIP/2.0 200 OK"


@pytest.mark.parametrize(
    ("to", "said"), [("sip:a@127.0.0.1", 'allow = ["127.0.0.1"]'), ("sip:a@no-such-host.invalid", "resolved")]
)
def test_a_call_whose_answers_would_not_be_read_is_refused_at_once(to: str, said: str) -> None:
    edge = RunningEdge(NOBODY, sip={"allow": ["10.0.0.0/24"]})
    assert edge.telephone is not None
    with pytest.raises(OptionError, match=re.escape(said)):
        edge.call(edge.telephone.place_call, CallRequest(to=to))
    assert edge.metric("asr_serve_edge_open_calls") == 0
    edge.close()
