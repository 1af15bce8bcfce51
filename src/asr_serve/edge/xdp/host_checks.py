"""Checks of what a host allows the edge: kernel, privileges, memory, buffers, cards; and the command that mends it."""

from __future__ import annotations

import mmap
import platform
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import msgspec

from asr_serve.edge.packet_driver import RECEIVE_BUFFER_BYTES
from asr_serve.edge.xdp.network_interface import NetworkInterface, list_interfaces
from asr_serve.edge.xdp.xdp_driver import (
    FRAME_BYTES,
    FRAMES,
    MAX_FRAMES,
    MAX_QUEUES,
    DriverUnavailable,
    find_interface,
    native_module,
    try_loading,
)

CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13, "CAP_BPF": 39}
"""Bits of what AF_XDP needs. CAP_SYS_ADMIN stands in for CAP_BPF."""
CAP_IPC_LOCK, CAP_SYS_ADMIN = 14, 21
MIN_KERNEL = (5, 9)
"""First with links of XDP programs, that end with their process."""
MAX_FRAME_MTU = 1_500
GRANT = (
    "run as root; or in the unit of systemd: AmbientCapabilities=CAP_NET_ADMIN CAP_NET_RAW CAP_BPF CAP_IPC_LOCK; "
    "or docker run --cap-add NET_ADMIN --cap-add NET_RAW --cap-add BPF --cap-add IPC_LOCK"
)


class HostCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Finding about the host. `needed`: AF_XDP does not work without it. `mend`: a command, where `fits` is false."""

    name: str
    found: str
    fits: bool
    needed: bool = False
    mend: str = ""


class EdgeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report on what the edge can do on this host."""

    driver: str
    """Fastest driver that will work: af_xdp or recvmmsg."""
    checks: list[HostCheck]
    interfaces: list[NetworkInterface]


def inspect_host(interface: str | None = None) -> EdgeReport:
    """Inspects this host, and one interface or all of them. Nothing is changed. Raises DriverUnavailable for an
    interface that does not exist or is down."""
    try:
        interfaces = [each for each in list_interfaces() if not each.loopback]
    except (OSError, AttributeError):  # no netlink
        interfaces = []
    if interface is not None:
        interfaces = [find_interface(interface)]
    checks = [*_software(), *_privileges(), *_memory(interfaces), *_buffers()]
    for device in interfaces:
        checks += _card(device)
    works = all(check.fits or not check.needed for check in checks) and any(each.up for each in interfaces)
    return EdgeReport(driver="af_xdp" if works else "recvmmsg", checks=checks, interfaces=interfaces)


def _software() -> Iterator[HostCheck]:
    release = platform.release()
    numbers = tuple(map(int, re.findall(r"\d+", release)[:2]))
    new = platform.system() == "Linux" and numbers >= MIN_KERNEL
    needs = ".".join(map(str, MIN_KERNEL))
    yield HostCheck(
        name="kernel",
        found=f"{platform.system()} {release}",
        fits=new,
        needed=True,
        mend="" if new else f"AF_XDP needs Linux {needs} or newer: install one, or keep to recvmmsg",
    )
    try:
        native_module()
    except DriverUnavailable as error:
        yield HostCheck(name="native receiver", found=error.came, fits=False, needed=True, mend="make setup")
    else:
        yield HostCheck(name="native receiver", found="built", fits=True, needed=True)


def _privileges() -> Iterator[HostCheck]:
    bits = _capabilities()
    missing = [name for name, bit in CAPABILITIES.items() if not bits >> bit & 1]
    if bits >> CAP_SYS_ADMIN & 1 and "CAP_BPF" in missing:
        missing.remove("CAP_BPF")
    found = f"without {', '.join(missing)}" if missing else ", ".join(CAPABILITIES)
    if not missing:
        try:  # a container may have them and still be refused
            try_loading()
        except DriverUnavailable as error:
            found, missing = error.came, [error.came]
    yield HostCheck(name="privileges", found=found, fits=not missing, needed=True, mend=GRANT if missing else "")


def _memory(interfaces: list[NetworkInterface]) -> Iterator[HostCheck]:
    queues = max([1, *(min(each.queues, MAX_QUEUES) for each in interfaces)])
    needed = min(FRAMES * queues, MAX_FRAMES) * FRAME_BYTES
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locks = bool(_capabilities() >> CAP_IPC_LOCK & 1) or soft == resource.RLIM_INFINITY or soft >= needed
    yield HostCheck(
        name="locked memory",
        found="as much as is needed" if locks else f"{soft >> 10} KiB of {needed >> 10}",
        fits=locks,
        needed=True,
        mend="" if locks else "ulimit -l unlimited; in the unit of systemd: LimitMEMLOCK=infinity",
    )
    free, size_kb = _huge_pages()
    pages = -(-needed // max(1, size_kb << 10))
    fits = free * (size_kb << 10) >= needed
    yield HostCheck(
        name="huge pages",
        found=f"{free} free of {size_kb} kB",
        fits=fits,
        mend="" if fits else f"sysctl -w vm.nr_hugepages={pages}  (fewer misses of the TLB; it works without)",
    )


def _buffers() -> Iterator[HostCheck]:
    try:
        most = int(Path("/proc/sys/net/core/rmem_max").read_text())
    except (OSError, ValueError):
        return
    forced = bool(_capabilities() >> CAPABILITIES["CAP_NET_ADMIN"] & 1)
    fits = forced or most >= RECEIVE_BUFFER_BYTES
    beyond = ", and CAP_NET_ADMIN goes beyond" if forced and most < RECEIVE_BUFFER_BYTES else ""
    yield HostCheck(
        name="receive buffer",
        found=f"{most >> 10} KiB at most{beyond}",
        fits=fits,
        mend="" if fits else f"sysctl -w net.core.rmem_max={RECEIVE_BUFFER_BYTES}",
    )


def _card(device: NetworkInterface) -> Iterator[HostCheck]:
    name = f"interface {device.name}"
    kind = device.kind or "unknown driver"
    if not device.up:
        yield HostCheck(name=name, found=f"{kind}, down", fits=False, mend=f"ip link set {device.name} up")
        return
    features = device.features
    if features is None:
        mode = "XDP mode unknown before Linux 6.3; the edge tells it at its start"
    elif "native" not in features:
        mode = "generic XDP alone: the kernel's, which is slower"
    else:
        mode = "native XDP, " + ("zero-copy" if "zero-copy" in features else "copy mode")
    large = device.mtu > MAX_FRAME_MTU
    taken = device.program
    mend = ""
    if taken:
        mend = f"another XDP program is attached: ip link set {device.name} xdp off, if nobody needs it"
    elif large:
        mend = f"ip link set {device.name} mtu {MAX_FRAME_MTU}  (drivers refuse native XDP for long frames)"
    used = min(device.queues, MAX_QUEUES)
    yield HostCheck(
        name=name,
        found=f"{kind}, {mode}, {used} of {device.queues} queues, MTU {device.mtu}",
        fits=not taken and not large,
        mend=mend,
    )


def _capabilities() -> int:
    """Effective capabilities of this thread."""
    try:
        status = Path("/proc/thread-self/status").read_text()
    except OSError:
        return 0
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return int(match[1], 16) if match else 0


def _huge_pages() -> tuple[int, int]:
    """Free huge pages, and their size in kB."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 0, mmap.PAGESIZE >> 10
    fields = dict(re.findall(r"^(HugePages_Free|Hugepagesize):\s+(\d+)", text, re.MULTILINE))
    return int(fields.get("HugePages_Free", 0)), int(fields.get("Hugepagesize", 2_048))


def format_host(report: EdgeReport) -> str:
    """Formats a report as text."""
    lines = ["edge", f"  driver   {report.driver}" + ("" if report.driver == "recvmmsg" else ", with --interface NAME")]
    for check in report.checks:
        lines.append(
            f"  {check.name:17} {check.found}{'' if check.fits or not check.needed else '  (needed for AF_XDP)'}"
        )
        if check.mend:
            lines.append(f"    {check.mend}")
    return "".join(f"{line}\n" for line in lines)


__all__ = ["EdgeReport", "HostCheck", "format_host", "inspect_host"]
