"""AF_XDP on a wire of its own, natively: what the program takes, what it leaves to the kernel, what it refuses, and
what is left when its process is killed."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from children import Child
from packet_wire import NEIGHBOUR, RECEIVER, RECEIVER_6, SENDER, SENDER_6, PacketWire, open_xdp, run
from rtp_sender import RtpSender
from typer.testing import CliRunner

from asr_serve import kernels
from asr_serve.api.cli import app
from asr_serve.api.cli.exit_codes import USAGE
from asr_serve.edge.driver_choice import open_driver
from asr_serve.edge.edge_config import EdgeConfig
from asr_serve.edge.packet_driver import RecvmmsgDriver, describe_source, parse_source
from asr_serve.edge.rtp import RtpPacket, build_rtp
from asr_serve.edge.xdp import build_filter
from asr_serve.edge.xdp.filter_object import MapDefinition, read_filter
from asr_serve.edge.xdp.host_checks import inspect_host
from asr_serve.edge.xdp.network_interface import list_interfaces
from asr_serve.edge.xdp.xdp_driver import FRAMES, DriverUnavailable, XdpDriver
from asr_serve.errors import OptionError

WAIT_S = 60
FAST = (1e6, 1e6)
SSRC = 77
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13, "CAP_SYS_ADMIN": 21, "CAP_BPF": 39}


@pytest.fixture(scope="module")
def wire() -> Iterator[PacketWire]:
    with PacketWire() as made:
        yield made


@pytest.fixture
def driver(wire: PacketWire) -> Iterator[XdpDriver]:
    made = open_xdp(wire, "::", gather_ms=0)
    made.admit_ssrc(1, SSRC, b"", *FAST)
    yield made
    made.close()
    assert not wire.program()


def packet(number: int, payload: bytes = b"audio") -> bytes:
    return build_rtp(RtpPacket(0, False, number, 0, SSRC, payload))


def received(driver: XdpDriver, count: int) -> list[bytes]:
    found: list[bytes] = []
    end_s = time.monotonic() + WAIT_S
    while len(found) < count and time.monotonic() < end_s:
        found += [payload for _, _, payload, _ in driver.receive(50)]
    assert driver.receive(20) == [], "more than expected"
    return found


def sender(wire: PacketWire, driver: XdpDriver, address: str = SENDER, to: str = RECEIVER) -> RtpSender:
    with wire.inside(wire.sender):
        return RtpSender(driver.port, address, to)


def test_the_built_program_is_that_of_the_source(tmp_path: Path) -> None:
    if shutil.which("clang") is None:
        pytest.skip("no clang: apt install clang")
    rebuilt = tmp_path / "rtp_filter.o"
    build_filter.build(rebuilt)
    if rebuilt.read_bytes() == build_filter.BUILT.read_bytes():
        return
    version = subprocess.run(["clang", "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert f"version {build_filter.CLANG}" not in version, (
        "rtp_filter.o is not built from rtp_filter.c: make rtp-filter"
    )
    assert read_filter(rebuilt).maps == read_filter(build_filter.BUILT).maps


def test_the_object_is_read_and_linked(tmp_path: Path) -> None:
    made = read_filter(build_filter.BUILT)
    assert made.maps == {
        "ports": MapDefinition(1, 2, 4, 64),
        "addresses": MapDefinition(1, 16, 4, 256),
        "sockets": MapDefinition(17, 4, 4, 64),
    }
    assert [name for _, name in made.references] == ["ports", "addresses", "sockets"]
    code = made.linked({"ports": 5, "addresses": 6, "sockets": 7})
    for (offset, _), fd in zip(made.references, (5, 6, 7), strict=True):
        opcode, registers, _, immediate = struct.unpack_from("<BBhi", code, offset)
        assert (opcode, registers >> 4, immediate) == (0x18, 1, fd)
    (tmp_path / "wrong.o").write_bytes(b"\x7fELF" + bytes(100))
    with pytest.raises(ValueError, match="little-endian BPF"):
        read_filter(tmp_path / "wrong.o")


def test_packets_of_both_families_come_past_the_kernel(wire: PacketWire, driver: XdpDriver) -> None:
    assert "native mode" in driver.details
    assert wire.program()
    before, before_s = wire.kernel_datagrams(), time.monotonic()
    senders = [sender(wire, driver), sender(wire, driver, SENDER_6, RECEIVER_6)]
    for number, each in enumerate(senders):
        each.send([packet(number, bytes(1_300))], 0)  # beside an odd length
        each.send([packet(number + 2, b"odd")], 0)
    datagrams = []
    while len(datagrams) < 4:
        datagrams += driver.receive(WAIT_S * 1_000)
    assert {describe_source(source) for _, source, _, _ in datagrams} == {each.source for each in senders}
    assert sorted(payload for _, _, payload, _ in datagrams) == sorted(
        [packet(0, bytes(1_300)), packet(1, bytes(1_300)), packet(2, b"odd"), packet(3, b"odd")]
    )
    arrivals = [arrival_s for *_, arrival_s in datagrams]
    assert before_s <= min(arrivals)
    assert max(arrivals) <= time.monotonic()
    assert len(set(arrivals)) == 4  # the program's clock, not the time of the batch
    assert wire.kernel_datagrams() == before
    assert driver.counts()["received"] == 4
    for each in senders:
        each.close()


def ipv4(
    datagram: bytes, *, to: str = RECEIVER, options: bytes = b"", fragment: int = 0, length: int | None = None
) -> bytes:
    """EtherType and IPv4 packet of a UDP datagram with its header."""
    words = 5 + len(options) // 4
    total = 4 * words + len(datagram) if length is None else length
    head = struct.pack(">BBHHHBBH", 0x40 | words, 0, total, 1, fragment, 64, 17, 0)
    head += socket.inet_aton(SENDER) + socket.inet_aton(to) + options
    return b"\x08\x00" + head[:10] + checksum(head) + head[12:] + datagram


def ipv6(datagram: bytes, *, extension: bytes = b"") -> bytes:
    """EtherType and IPv6 packet of a UDP datagram with its header."""
    ends = socket.inet_pton(socket.AF_INET6, SENDER_6) + socket.inet_pton(socket.AF_INET6, RECEIVER_6)
    kind = 60 if extension else 17
    return (
        b"\x86\xdd" + struct.pack(">IHBB", 6 << 28, len(extension + datagram), kind, 64) + ends + extension + datagram
    )


def udp(payload: bytes, port: int, *, ends: bytes | None = None, length: int | None = None) -> bytes:
    """UDP datagram, with the checksum for these addresses, or without one."""
    length = 8 + len(payload) if length is None else length
    head = struct.pack(">HHHH", 4_000, port, length, 0)
    if ends is None:
        return head + payload
    return head[:6] + checksum(ends + struct.pack(">HH", 17, length) + head + payload) + payload


def checksum(data: bytes) -> bytes:
    words = np.frombuffer(data + bytes(len(data) % 2), ">u2").astype(np.uint64)
    total = int(words.sum())
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack(">H", ~total & 0xFFFF or 0xFFFF)


ENDS = socket.inet_aton(SENDER) + socket.inet_aton(RECEIVER)
ENDS_6 = socket.inet_pton(socket.AF_INET6, SENDER_6) + socket.inet_pton(socket.AF_INET6, RECEIVER_6)
NO_OPTIONS = bytes([1, 1, 1, 0])
DESTINATION_OPTIONS = bytes([17, 0, 1, 4, 0, 0, 0, 0])


def test_what_the_program_does_not_understand_the_kernel_still_delivers(wire: PacketWire, driver: XdpDriver) -> None:
    """Options, extension headers and fragments are slower, not lost."""
    before = wire.kernel_datagrams()
    large = packet(9, bytes(1_900))
    frames = [
        ipv4(udp(packet(1), driver.port), options=NO_OPTIONS),
        ipv6(udp(packet(2), driver.port, ends=ENDS_6), extension=DESTINATION_OPTIONS),
    ]
    wire.send_frames(frames)
    calling = sender(wire, driver)
    calling.send([large], 0)  # two fragments
    assert sorted(received(driver, 3)) == sorted([packet(1), packet(2), large])
    assert wire.kernel_datagrams() == before + 3
    calling.close()


def test_other_ports_addresses_and_tags_are_left_to_the_kernel(wire: PacketWire, driver: XdpDriver) -> None:
    with wire.inside(wire.receiver):
        other = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    other.settimeout(WAIT_S)
    other.bind((RECEIVER, 0))
    before = wire.kernel_datagrams()
    with wire.inside(wire.sender):
        calling = RtpSender(other.getsockname()[1], SENDER, RECEIVER)
    calling.send([packet(1)])
    assert other.recv(2_000) == packet(1)
    wire.send_frames(
        [
            b"\x81\x00\x00\x05" + ipv4(udp(packet(2), driver.port)),  # of a VLAN that is not ours
            ipv4(udp(packet(3), driver.port), to="10.91.0.77"),  # for somebody behind this host
            b"\x08\x06" + bytes(28),
        ]
    )
    ours = sender(wire, driver)
    ours.send([packet(4)])
    assert received(driver, 1) == [packet(4)]
    assert driver.counts()["received"] == 1
    assert wire.kernel_datagrams() == before + 1
    ours.close()
    calling.close()
    other.close()


def test_damaged_and_hostile_frames_are_dropped_and_counted(
    wire: PacketWire, driver: XdpDriver, rng: np.random.Generator
) -> None:
    good = udp(packet(1), driver.port, ends=ENDS)
    damaged = good[:-1] + bytes([good[-1] ^ 1])
    bad_header = ipv4(good)[:10] + b"\x01" + ipv4(good)[11:]  # another time to live
    lengths = [ipv4(udp(packet(1), driver.port, length=n)) for n in (0, 7, 200, 65_535)]
    lengths += [ipv4(good, length=n) for n in (0, 20, 27, 1_400)]
    fuzz = []
    for _ in range(2_000):
        frame = bytearray(
            ipv4(udp(packet(2), driver.port)) if rng.random() < 0.5 else ipv6(udp(packet(2), driver.port))
        )
        for at in rng.integers(0, len(frame), rng.integers(1, 6)):
            frame[at] = rng.integers(0, 256)
        fuzz.append(bytes(frame[: rng.integers(2, len(frame) + 1)]))
    without_sum = ipv6(udp(packet(1), driver.port))
    wire.send_frames([ipv4(damaged), bad_header, without_sum])
    assert driver.receive(WAIT_S * 1_000) == []
    while driver.counts()["checksum"] < 3:
        assert driver.receive(WAIT_S * 1_000) == []
    wire.send_frames(lengths)
    for start in range(0, len(fuzz), 500):
        wire.send_frames(fuzz[start : start + 500])
        driver.receive(0)
    wire.send_frames([ipv4(good)])
    end_s = time.monotonic() + WAIT_S
    found: list[bytes] = []
    while packet(1) not in found and time.monotonic() < end_s:
        found += [payload for _, _, payload, _ in driver.receive(50)]
    assert packet(1) in found
    assert all(payload[8:12] == packet(2)[8:12] for payload in found)  # what nobody changed in its header


def test_a_full_ring_is_counted_and_recovers(wire: PacketWire, driver: XdpDriver) -> None:
    calling = sender(wire, driver)
    sent = FRAMES + 500
    calling.send([packet(number % 65_536) for number in range(sent)], 0)
    found: list[bytes] = []
    while batch := driver.receive(100):
        found += [payload for _, _, payload, _ in batch]
    counts = driver.counts()
    assert len(found) == FRAMES
    assert counts["kernel"] == sent - FRAMES
    assert counts["received"] == FRAMES
    calling.send([packet(7)])
    assert received(driver, 1) == [packet(7)]
    calling.close()


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """This thread may not do what AF_XDP needs."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = struct.pack("<Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    assert libc.capget(header, data) == 0
    before = data.raw
    words = list(struct.unpack("<6I", before))
    for bit in CAPABILITIES.values():
        words[3 * (bit // 32)] &= ~(1 << bit % 32)
    assert libc.capset(header, struct.pack("<6I", *words)) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


@contextlib.contextmanager
def without_native_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ASR_SERVE_NATIVE", "0")
    try:
        yield
    finally:
        monkeypatch.undo()


def test_refusals_say_why_and_auto_falls_back(
    wire: PacketWire, driver: XdpDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver.close()
    cases: list[tuple[dict[str, str], Callable[[], contextlib.AbstractContextManager[None]], str]] = [
        ({"interface": "eth77"}, contextlib.nullcontext, "interfaces here: rtp0"),
        ({"interface": wire.device, "host": NEIGHBOUR}, contextlib.nullcontext, "has no address"),
        ({"interface": wire.device, "host": "localhost"}, contextlib.nullcontext, "is no address"),
        ({"interface": wire.device, "host": RECEIVER}, without_privileges, "CAP_BPF"),
        ({"interface": wire.device, "host": RECEIVER}, lambda: without_native_module(monkeypatch), "make setup"),
    ]
    for settings, hindered, said in cases:
        config = EdgeConfig(**{"port": 0, **settings})
        if settings.get("host") == NEIGHBOUR:  # an address that cannot be listened on is no driver's fault
            with wire.inside(wire.receiver), pytest.raises(OptionError, match="cannot be listened on"):
                open_driver(config)
            continue
        with wire.inside(wire.receiver), hindered():
            with pytest.raises(DriverUnavailable, match=said):
                open_driver(EdgeConfig(port=0, driver="af_xdp", **settings))
            made = open_driver(config)
            assert isinstance(made, RecvmmsgDriver)
            made.close()
        assert said in caplog.text
        caplog.clear()
    assert not wire.program()
    with wire.inside(wire.receiver):
        first = open_driver(EdgeConfig(port=0, interface=wire.device, host=RECEIVER))
        assert isinstance(first, XdpDriver)
        with pytest.raises(DriverUnavailable, match="another"):
            XdpDriver(RECEIVER, 0, wire.device)
        first.close()
        run("ip", "-n", wire.receiver, "link", "set", wire.device, "down")
        with pytest.raises(DriverUnavailable, match="link set rtp0 up"):
            XdpDriver(RECEIVER, 0, wire.device)
        run("ip", "-n", wire.receiver, "link", "set", wire.device, "up")
        run("ip", "-n", wire.receiver, "addr", "add", f"{RECEIVER_6}/64", "dev", wire.device, "nodad")
    with pytest.raises(OptionError, match="--interface"):
        EdgeConfig(driver="af_xdp")


def test_native_sockets_refuse_what_is_out_of_bounds() -> None:
    native = kernels.packets()
    rest = {"interface": 1, "queue": 0, "zero_copy": False}
    for size, frame_bytes, ring in (
        (4096, 1_000, 1),
        (3 * 2_048, 2_048, 1),
        (4_096, 2_048, 4),
        (0, 2_048, 1),
        (4_096, 0, 1),
    ):
        with pytest.raises(ValueError, match="powers of two"):
            native.XdpSocket(bytearray(size), frame_bytes=frame_bytes, ring=ring, **rest)


def test_facts_about_interfaces(wire: PacketWire) -> None:
    with wire.inside(wire.receiver):
        found = {each.name: each for each in list_interfaces()}
    assert found["lo"].loopback
    device = found[wire.device]
    assert (device.up, device.mtu, device.kind, device.program) == (True, 1_500, "veth", 0)
    assert {RECEIVER, RECEIVER_6} < set(device.addresses)
    assert device.features is None or "native" in device.features


def test_the_doctor_says_what_the_host_allows_and_what_mends_it(wire: PacketWire) -> None:
    open_xdp(wire, RECEIVER).close()  # or skip
    with wire.inside(wire.receiver):
        result = CliRunner().invoke(app, ["doctor", "--edge", "--interface", wire.device, "--json"])
        assert result.exit_code == 0, result.output
        report = json.loads(result.output)
        assert report["driver"] == "af_xdp"
        found = {check["name"]: check for check in report["checks"]}
        assert found[f"interface {wire.device}"]["found"].startswith("veth, ")
        assert all(check["fits"] or check["mend"] for check in report["checks"])
        text = CliRunner().invoke(app, ["doctor", "--edge"]).output
        assert all(f"  {name} " in text for name in found)
        with without_privileges():
            refused = inspect_host()
        first = open_driver(EdgeConfig(port=0, interface=wire.device, host=RECEIVER))
        taken = inspect_host(wire.device)
        first.close()
        with pytest.raises(DriverUnavailable, match="rtp0"):
            inspect_host("eth77")
    assert refused.driver == "recvmmsg"
    (privileges,) = (check for check in refused.checks if check.name == "privileges")
    assert (privileges.fits, privileges.needed) == (False, True)
    assert "CAP_BPF" in privileges.found
    assert "AmbientCapabilities" in privileges.mend
    (card,) = (check for check in taken.checks if check.name.startswith("interface"))
    assert f"ip link set {wire.device} xdp off" in card.mend
    assert CliRunner().invoke(app, ["doctor", "--interface", "eth0"]).exit_code == USAGE


def test_a_killed_process_leaves_nothing_and_the_next_receives(wire: PacketWire) -> None:
    open_xdp(wire, RECEIVER).close()  # or skip
    code = (
        "import sys\nfrom asr_serve.edge.xdp.xdp_driver import XdpDriver\n"
        f"driver = XdpDriver({RECEIVER!r}, 5004, {wire.device!r})\n"
        f"driver.admit_ssrc(1, {SSRC}, b'', 1e6, 1e6)\n"
        "print('ready', flush=True)\nwhile not driver.receive(1000): pass\nprint('came', flush=True)\n"
        "while True: driver.receive(1000)\n"
    )
    with wire.inside(wire.sender):
        calling = RtpSender(5004, SENDER, RECEIVER)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for _ in range(2):
        with wire.inside(wire.receiver):  # a child is where its parent's thread is
            child = Child([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environ)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert wire.program()
        calling.send([packet(1)])
        assert child.stdout.readline() == "came\n"
        child.send_signal(signal.SIGKILL)
        child.wait(WAIT_S)
        child.stdout.close()
        assert not wire.program()
    calling.close()


def test_a_flood_of_others_costs_no_packet_of_a_call(wire: PacketWire, driver: XdpDriver) -> None:
    """Ten packets of strangers for each of a call, which all arrive, in order."""
    calling, stranger = sender(wire, driver), sender(wire, driver, NEIGHBOUR)
    driver.admit_ssrc(1, SSRC, parse_source(calling.source), *FAST)
    numbers = range(400)
    over = threading.Event()
    found: list[bytes] = []

    def receive() -> None:
        while len(found) < len(numbers) and not over.is_set():
            found.extend(payload for _, _, payload, _ in driver.receive(50))

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        for number in numbers:
            stranger.send([packet(number), bytes(20), packet(number + 1) + b"x"] * 3 + [b"\x80"], 0)
            calling.send([packet(number)], 0.0005)
        thread.join(WAIT_S)
    finally:
        over.set()
        thread.join(60)
    assert found == [packet(number) for number in numbers]
    counts = driver.counts()
    assert counts["kernel"] == 0
    assert (counts["unknown_source"], counts["not_rtp"]) == (6 * len(numbers), 4 * len(numbers))
    calling.close()
    stranger.close()
