"""Packet receivers, native and in Python: the same datagrams, filters and bounds."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from rtp_sender import RtpSender

from asr_serve import kernels
from asr_serve.edge.packet_driver import RecvmmsgDriver, describe_source, parse_source
from asr_serve.edge.rtp import RtpPacket, build_rtp
from asr_serve.errors import OptionError
from asr_serve.kernels import packets_reference

FAST = (1e6, 1e6)


def packet(ssrc: int, number: int = 0) -> bytes:
    return build_rtp(RtpPacket(0, False, number, 0, ssrc, b"audio"))


@pytest.fixture(params=["native", "reference"])
def receiver(request: pytest.FixtureRequest) -> Iterator[tuple[object, int]]:
    module = packets_reference if request.param == "reference" else kernels.packets()
    if request.param == "native" and module is packets_reference:
        pytest.fail("the native module is not built: make setup")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.bind(("127.0.0.1", 0))
        bound.setblocking(False)
        made = module.PacketReceiver([bound.fileno()], batch=8, batches=2, slot_bytes=256)
        yield made, bound.getsockname()[1]
        made.close()


@pytest.fixture
def sender(receiver: tuple[object, int]) -> Iterator[RtpSender]:
    made = RtpSender(receiver[1])
    yield made
    made.close()


def collect(receiver: object, count: int) -> list[tuple[int, bytes, bytes]]:
    """Datagrams, copied before they are released; all that come within a second of `count`."""
    found: list[tuple[int, bytes, bytes]] = []
    end_s = time.monotonic() + 5
    while len(found) < count and time.monotonic() < end_s:
        batch = receiver.receive(50)
        if batch is not None:
            found += [(flow, source, bytes(payload)) for flow, source, payload, _ in batch.datagrams]
            batch.release()
    batch = receiver.receive(0)
    assert batch is None, "more than expected"
    return found


def test_expected_packets_come_with_flow_source_and_time(receiver: tuple, sender: RtpSender) -> None:
    receiving, _ = receiver
    receiving.admit_ssrc(7, 99, b"", *FAST)
    before_s = time.monotonic()
    sender.send([packet(99, 1), packet(98), packet(99, 2)])
    time.sleep(0.05)
    batch = receiving.receive(1_000)
    flows = [(flow, bytes(payload)) for flow, _, payload, _ in batch.datagrams]
    assert flows == [(7, packet(99, 1)), (7, packet(99, 2))]
    for _, source, payload, arrival_s in batch.datagrams:
        assert describe_source(source) == sender.source
        assert payload.readonly
        assert before_s <= arrival_s <= time.monotonic()
    assert receiving.counts()["unknown_source"] == 1
    batch.release()
    batch.release()
    assert batch.datagrams == []


def test_a_latched_flow_hears_its_source_alone(receiver: tuple, sender: RtpSender) -> None:
    receiving, port = receiver
    receiving.admit_ssrc(1, 5, b"", *FAST)
    sender.send([packet(5)])
    ((_, source, _),) = collect(receiving, 1)
    receiving.latch(1, source)
    other = RtpSender(port)
    other.send([packet(5, 1)])
    sender.send([packet(5, 2), packet(6, 3)])  # its SSRC may change
    assert [payload for _, _, payload in collect(receiving, 2)] == [packet(5, 2), packet(6, 3)]
    assert receiving.counts()["unknown_source"] == 1
    other.close()


def test_sources_with_and_without_port(receiver: tuple, sender: RtpSender) -> None:
    receiving, port = receiver
    other = RtpSender(port)
    receiving.admit_source(1, parse_source(sender.source), *FAST)
    receiving.admit_source(2, parse_source("127.0.0.1"), *FAST)
    sender.send([packet(1)])
    other.send([packet(1)])
    assert {flow for flow, _, _ in collect(receiving, 2)} == {1, 2}
    receiving.forget(1)
    receiving.forget(2)
    sender.send([packet(1)])
    time.sleep(0.05)
    assert receiving.receive(100) is None
    other.close()


def test_a_flow_beyond_its_rate_is_cut_and_others_are_not(receiver: tuple, sender: RtpSender) -> None:
    receiving, _ = receiver
    receiving.admit_ssrc(1, 1, b"", 1.0, 5.0)
    receiving.admit_ssrc(2, 2, b"", *FAST)
    sender.send([packet(ssrc, number) for number in range(30) for ssrc in (1, 2)], 0.0005)
    found = [flow for flow, _, _ in collect(receiving, 35)]
    assert found.count(2) == 30
    assert found.count(1) == 5
    assert receiving.counts()["over_rate"] == 25


def test_what_is_no_rtp_or_too_long_is_counted(receiver: tuple, sender: RtpSender) -> None:
    receiving, _ = receiver
    receiving.admit_source(1, parse_source("127.0.0.1"), *FAST)
    sender.send([b"", b"\x80", bytes(40), packet(1) + bytes(300), packet(1)])
    assert collect(receiving, 1) == [(1, parse_source(sender.source), packet(1))]
    counts = receiving.counts()
    assert (counts["received"], counts["not_rtp"], counts["truncated"]) == (5, 3, 1)


def test_lent_batches_are_bounded_and_keep_their_bytes(receiver: tuple, sender: RtpSender) -> None:
    receiving, _ = receiver
    receiving.admit_ssrc(1, 1, b"", *FAST)
    lent = []
    for number in range(2):
        sender.send([packet(1, number)])
        lent.append(receiving.receive(1_000))
    with pytest.raises(RuntimeError, match="lent"):
        receiving.receive(0)
    assert [bytes(batch.datagrams[0][2]) for batch in lent] == [packet(1, 0), packet(1, 1)]
    for batch in lent:
        batch.release()
    assert receiving.receive(0) is None


@pytest.mark.parametrize("module", [packets_reference, kernels.packets()])
def test_receivers_refuse_what_is_out_of_bounds(module: object) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        for wrong in ({"batch": 0}, {"batches": 65}, {"slot_bytes": 10}):
            with pytest.raises(ValueError):
                module.PacketReceiver([bound.fileno()], **wrong)
        with pytest.raises(ValueError):
            module.PacketReceiver([])
        made = module.PacketReceiver([bound.fileno()])
        with pytest.raises(ValueError, match="source"):
            made.admit_source(1, b"short", 1.0, 1.0)
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
