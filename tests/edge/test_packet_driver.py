"""Packet receivers, native, in Python and past the kernel: the same datagrams, filters and bounds."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from packet_wire import RECEIVER, SENDER, PacketWire, open_xdp
from rtp_sender import RtpSender
from typer.testing import CliRunner

from asr_serve import kernels
from asr_serve.api.cli import app
from asr_serve.edge.packet_driver import RecvmmsgDriver, describe_source, parse_source
from asr_serve.edge.rtcp import build_source_description
from asr_serve.edge.rtp import RtpPacket, build_rtp
from asr_serve.errors import OptionError, StaleBuild
from asr_serve.kernels import packets_reference

FAST = (1e6, 1e6)
WAIT_S = 30


def packet(ssrc: int, number: int = 0) -> bytes:
    return build_rtp(RtpPacket(0, False, number, 0, ssrc, b"audio"))


class Receiving(NamedTuple):
    """A receiver, and how to send to it."""

    receiver: Any
    connect: Callable[..., RtpSender]
    address: str
    """Address that senders have."""


@contextmanager
def on_loopback(module: Any) -> Iterator[Receiving]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.bind(("127.0.0.1", 0))
        bound.setblocking(False)
        made = module.PacketReceiver([bound.fileno()], batch=8, slot_bytes=256)
        port = bound.getsockname()[1]
        yield Receiving(made, lambda host="127.0.0.1": RtpSender(port, host, to="127.0.0.1"), "127.0.0.1")
        made.close()


@contextmanager
def on_a_wire() -> Iterator[Receiving]:
    with PacketWire() as wire:
        driver = open_xdp(wire, RECEIVER, gather_ms=0)

        def connect() -> RtpSender:
            with wire.inside(wire.sender):
                return RtpSender(driver.port, SENDER, to=RECEIVER)

        yield Receiving(driver, connect, SENDER)
        driver.close()


def open_receiver(kind: str) -> AbstractContextManager[Receiving]:
    if kind == "af_xdp":
        return on_a_wire()
    module = packets_reference if kind == "reference" else kernels.packets()
    if kind == "native" and module is packets_reference:
        pytest.fail("the native module is not built: make setup")
    return on_loopback(module)


@pytest.fixture(params=["native", "reference"])
def loopback(request: pytest.FixtureRequest) -> Iterator[Receiving]:
    with open_receiver(request.param) as made:
        yield made


@pytest.fixture(params=["native", "reference", "af_xdp"])
def receiving(request: pytest.FixtureRequest) -> Iterator[Receiving]:
    with open_receiver(request.param) as made:
        yield made


def collect(receiver: object, count: int) -> list[tuple[int, bytes, bytes]]:
    """The next `count` datagrams; more are a failure."""
    found: list[tuple[int, bytes, bytes]] = []
    end_s = time.monotonic() + WAIT_S
    while len(found) < count and time.monotonic() < end_s:
        found += [datagram[:3] for datagram in receiver.receive(50)]
    assert receiver.receive(0) == [], "more than expected"
    return found


def test_expected_packets_come_with_flow_source_and_time(receiving: Receiving) -> None:
    receiver, sender = receiving.receiver, receiving.connect()
    receiver.admit_ssrc(7, 99, b"", *FAST)
    before_s = time.monotonic()
    sender.send([packet(99, 1), packet(98), packet(99, 2)])
    time.sleep(0.05)
    datagrams = receiver.receive(1_000)
    assert [(flow, payload) for flow, _, payload, _ in datagrams] == [(7, packet(99, 1)), (7, packet(99, 2))]
    for _, source, _, arrival_s in datagrams:
        assert describe_source(source) == sender.source
        assert before_s <= arrival_s <= time.monotonic()
    assert receiver.counts()["unknown_source"] == 1
    sender.close()


def test_a_latched_flow_hears_its_source_alone(receiving: Receiving) -> None:
    receiver, sender = receiving.receiver, receiving.connect()
    receiver.admit_ssrc(1, 5, b"", *FAST)
    sender.send([packet(5)])
    ((_, source, _),) = collect(receiver, 1)
    receiver.latch(1, source, 5)
    other = receiving.connect()
    other.send([packet(5, 1)])
    sender.send([packet(5, 2), packet(6, 3)])  # its SSRC may change
    assert [payload for _, _, payload in collect(receiver, 2)] == [packet(5, 2), packet(6, 3)]
    assert receiver.counts()["unknown_source"] == 1
    other.close()
    sender.close()


def test_callers_behind_one_port_never_get_each_others_audio(loopback: Receiving) -> None:
    receiver, sender = loopback.receiver, loopback.connect()
    source = parse_source(sender.source)
    for flow, ssrc in ((1, 101), (2, 102)):
        receiver.admit_ssrc(flow, ssrc, b"", *FAST)
        receiver.latch(flow, source, ssrc)
    receiver.latch(1, source, 111)  # its SSRC has changed
    sender.send([packet(101), packet(111), packet(102), packet(199)])
    assert [flow for flow, _, _ in collect(receiver, 3)] == [1, 1, 2]
    receiver.forget(2)
    sender.send([packet(102), packet(101)])  # the ended one goes on sending
    assert [flow for flow, _, _ in collect(receiver, 1)] == [1]
    receiver.forget(1)
    receiver.admit_ssrc(3, 103, b"", *FAST)
    receiver.latch(3, source, 103)
    sender.send([packet(101), packet(111), packet(102), packet(103), packet(104)])
    assert [payload for _, _, payload in collect(receiver, 2)] == [packet(103), packet(104)]
    receiver.forget(3)
    receiver.admit_source(4, source, *FAST)  # telephones may use an SSRC again
    sender.send([packet(103)])
    assert [flow for flow, _, _ in collect(receiver, 1)] == [4]
    sender.close()


def test_an_ssrc_that_is_pinned_elsewhere_is_its_sources(loopback: Receiving) -> None:
    receiver, one, other = loopback.receiver, loopback.connect(), loopback.connect()
    receiver.admit_ssrc(1, 5, parse_source(one.source), *FAST)
    receiver.admit_source(2, parse_source(other.source), *FAST)
    one.send([packet(5)])
    other.send([packet(5)])
    assert sorted((flow, source) for flow, source, _ in collect(receiver, 2)) == [
        (1, parse_source(one.source)),
        (2, parse_source(other.source)),
    ]
    one.close()
    other.close()


def test_sources_with_and_without_port(receiving: Receiving) -> None:
    receiver, sender = receiving.receiver, receiving.connect()
    other = receiving.connect()
    receiver.admit_source(1, parse_source(sender.source), *FAST)
    receiver.admit_source(2, parse_source(receiving.address), *FAST)
    sender.send([packet(1)])
    other.send([packet(1)])
    assert {flow for flow, _, _ in collect(receiver, 2)} == {1, 2}
    receiver.forget(1)
    receiver.forget(2)
    sender.send([packet(1)])
    time.sleep(0.05)
    assert receiver.receive(100) == []
    other.close()
    sender.close()


def test_a_flow_beyond_its_rate_is_cut_and_others_are_not(receiving: Receiving) -> None:
    receiver, sender = receiving.receiver, receiving.connect()
    receiver.admit_ssrc(1, 1, b"", 1.0, 5.0)
    receiver.admit_ssrc(2, 2, b"", *FAST)
    sender.send([packet(ssrc, number) for number in range(30) for ssrc in (1, 2)], 0.0005)
    found = [flow for flow, _, _ in collect(receiver, 35)]
    assert found.count(2) == 30
    assert found.count(1) == 5
    assert receiver.counts()["over_rate"] == 25
    assert [receiver.over_rate(flow) for flow in (1, 2, 3)] == [25, 0, 0]
    receiver.forget(1)
    assert receiver.over_rate(1) == 0
    sender.close()


def test_rtcp_is_of_its_own_flow_while_there_is_one(receiving: Receiving) -> None:
    """Also that of a source whose datagrams are a flow's, and with a rate of its own."""
    receiver, caller, stranger = receiving.receiver, receiving.connect(), receiving.connect()
    receiver.admit_source(1, parse_source(caller.source), *FAST)
    report = build_source_description(5, b"name")
    caller.send([report])
    stranger.send([report])
    assert [flow for flow, _, _ in collect(receiver, 1)] == [1]
    receiver.admit_rtcp(2, 1.0, 2.0, *FAST)
    caller.send([report, packet(9)])
    assert [flow for flow, _, _ in collect(receiver, 2)] == [2, 1]
    stranger.send([report, report, packet(9)])
    assert [(flow, describe_source(source)) for flow, source, _ in collect(receiver, 1)] == [(2, stranger.source)]
    counts = receiver.counts()
    assert (counts["unknown_source"], counts["over_rate"]) == (2, 1)
    receiver.forget(2)
    stranger.send([report])
    caller.send([report])
    assert [flow for flow, _, _ in collect(receiver, 1)] == [1]
    for each in (caller, stranger):
        each.close()


def test_rtcp_that_floods_takes_nothing_from_that_of_other_addresses(loopback: Receiving) -> None:
    """Whatever its ports. Addresses are told apart by a random hash: one of twelve may have the flood's."""
    receiver, flood = loopback.receiver, [loopback.connect("127.0.0.2") for _ in range(4)]
    others = [loopback.connect(f"127.0.0.{number}") for number in range(3, 15)]
    receiver.admit_rtcp(1, 0.001, 15.0, 0.001, 3.0)
    report = build_source_description(5, b"name")
    for sender in [*flood * 5, *others]:
        sender.send([report])
    found: list[str] = []
    end_s = time.monotonic() + WAIT_S
    while receiver.counts()["received"] < 32 and time.monotonic() < end_s:
        found += [describe_source(source).partition(":")[0] for _, source, *_ in receiver.receive(50)]
    assert found[:3] == ["127.0.0.2"] * 3
    assert "127.0.0.2" not in found[3:]
    assert len(set(found[3:])) == len(found[3:]) >= 11
    assert receiver.counts()["over_rate"] == receiver.over_rate(1) == 32 - len(found)
    for sender in (*flood, *others):
        sender.close()


def test_a_native_module_of_other_sources_is_refused_and_what_builds_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stale = ModuleType("asr_serve.kernels._packets")
    monkeypatch.setitem(sys.modules, stale.__name__, stale)
    with pytest.raises(StaleBuild, match="make setup"):
        kernels.packets()
    result = CliRunner().invoke(app, ["edge", "--port", "0", "--control-port", "0"])
    assert result.exit_code not in (0, None)
    assert "make setup" in result.output
    assert "Traceback" not in result.output
    monkeypatch.setenv("ASR_SERVE_NATIVE", "0")
    assert kernels.packets() is packets_reference


def test_what_is_no_rtp_or_too_long_is_counted(loopback: Receiving) -> None:
    receiver, sender = loopback.receiver, loopback.connect()
    receiver.admit_source(1, parse_source(loopback.address), *FAST)
    sender.send([b"", b"\x80", bytes(40), packet(1) + bytes(300), packet(1)])
    assert collect(receiver, 1) == [(1, parse_source(sender.source), packet(1))]
    counts = receiver.counts()
    assert (counts["received"], counts["not_rtp"], counts["truncated"]) == (5, 3, 1)
    sender.close()


def test_a_batch_is_bounded_and_the_rest_stays(loopback: Receiving) -> None:
    receiver, sender = loopback.receiver, loopback.connect()
    receiver.admit_ssrc(1, 1, b"", *FAST)
    packets = [packet(1, number) for number in range(12)]
    sender.send(packets)
    first = [payload for _, _, payload, _ in receiver.receive(1_000)]
    assert first == packets[:8]
    assert [payload for _, _, payload in collect(receiver, 4)] == packets[8:]
    assert first == packets[:8]  # copies
    sender.close()


@pytest.mark.parametrize("module", [packets_reference, kernels.packets()])
def test_gathered_packets_come_in_one_batch(module: Any) -> None:
    """A tenth of a second, for packets a millisecond apart; the first is not held back. A sender that was held up tries
    again."""
    batches: list[int] = []
    for _ in range(10):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
            bound.bind(("127.0.0.1", 0))
            bound.setblocking(False)
            receiver = module.PacketReceiver([bound.fileno()], gather_us=100_000)
            receiver.admit_ssrc(1, 1, b"", *FAST)
            sender = RtpSender(bound.getsockname()[1])
            thread = threading.Thread(target=sender.send, args=([packet(1, number) for number in range(5)],))
            thread.start()
            batches.clear()
            while sum(batches) < 5:
                batches.append(len(receiver.receive(WAIT_S * 1_000)))
            thread.join(WAIT_S)
            sender.close()
            receiver.close()
            with pytest.raises(RuntimeError, match="closed"):
                receiver.receive(0)
        if len(batches) < 3:
            return
    pytest.fail(f"never gathered: {batches}")


def test_flows_come_and_go_while_another_thread_receives(receiving: Receiving) -> None:
    receiver, sender = receiving.receiver, receiving.connect()
    receiver.admit_ssrc(1, 1, b"", *FAST)
    over = threading.Event()

    def admit() -> None:
        number = 2
        while not over.is_set():
            receiver.admit_ssrc(number, number, b"", *FAST)
            receiver.latch(number, parse_source(sender.source), number)
            receiver.forget(number)
            number += 1

    thread = threading.Thread(target=admit)
    thread.start()
    try:
        packets = [packet(1, number) for number in range(500)]
        found: list[bytes] = []
        for start in range(0, len(packets), 4):
            sender.send(packets[start : start + 4], 0)
            found += [payload for _, _, payload in collect(receiver, 4)]
        assert found == packets
    finally:
        over.set()
        thread.join(WAIT_S)
    sender.close()


@pytest.mark.parametrize("module", [packets_reference, kernels.packets()])
def test_receivers_refuse_what_is_out_of_bounds(module: object) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        for wrong in ({"batch": 0}, {"batch": 5_000}, {"slot_bytes": 10}, {"gather_us": 200_000}):
            with pytest.raises(ValueError):
                module.PacketReceiver([bound.fileno()], **wrong)
        with pytest.raises(ValueError):
            module.PacketReceiver([])
        made = module.PacketReceiver([bound.fileno()])
        for admit in (made.admit_source, lambda flow, *args: made.admit_ssrc(flow, 1, *args)):
            with pytest.raises(ValueError, match="source"):
                admit(1, b"short", 1.0, 1.0)
        made.close()


def test_a_taken_port_is_told() -> None:
    driver = RecvmmsgDriver("127.0.0.1", 0)
    with pytest.raises(OptionError, match="--port"):
        RecvmmsgDriver("127.0.0.1", driver.port)
    driver.close()


@pytest.mark.parametrize("text", ["10.0.0.1:5004", "[2001:db8::1]:5004"])
def test_sources_are_parsed_and_described(text: str) -> None:
    assert describe_source(parse_source(text)) == text


@pytest.mark.parametrize("text", ["", "host:5004", "10.0.0.1:70000", "10.0.0.1:x", "[::1]:", "1.2.3"])
def test_wrong_sources_are_refused(text: str) -> None:
    with pytest.raises(OptionError):
        parse_source(text)
