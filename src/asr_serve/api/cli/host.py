"""Report of `asr-serve doctor --host`: whether a host is as deploy/terraform/aws makes it, and what mends it.

Source: the kernel's Documentation/networking/ethtool-netlink.rst and include/uapi/linux/ethtool.h; ENA's driver, whose
statistics tell whether ENA Express (SRD) is on.
"""

from __future__ import annotations

import ctypes
import platform
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from asr_serve.edge.xdp.host_checks import MAX_FRAME_MTU
from asr_serve.errors import OptionError
from asr_serve.types import suggest_name

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

ETHTOOL_IOCTL = 0x8946
GET_RING, GET_STRINGS, GET_STATS, GET_STRING_COUNTS, GET_CHANNELS = 0x10, 0x1B, 0x1D, 0x37, 0x3C
STATISTICS, STRING_BYTES = 1, 32
MAX_STATISTICS = 4_096
ENA_EXPRESS_STATISTIC = "ena_srd_mode"
"""Statistic of the mode: 0 off, 1 on for TCP, 2 on for UDP, 3 on for both. Drivers without it know no ENA Express."""
HUGE_PAGE_KB = 2_048


class HostRequirement(NamedTuple):
    """Requirement for a host. `allowed`: values of --expect, as a pattern and in words."""

    name: str
    default: str
    pattern: str
    allowed: str


HOST_REQUIREMENTS = {
    each.name: each
    for each in (
        HostRequirement("huge_pages", "24576", r"\d{1,6}", "a number of pages of 2 MiB"),
        HostRequirement("enable_mlpf", "true", "true|false", "true or false"),
        HostRequirement("nic_queues", "8", r"[1-9]\d{0,2}", "1 to 999"),
        HostRequirement("rx_ring", "1024", r"[1-9]\d{0,4}", "a number of descriptors, 1 to 99999"),
        HostRequirement("min_kernel", "6.1", r"\d{1,2}\.\d{1,3}", "MAJOR.MINOR"),
        HostRequirement("somaxconn", "4096", r"[1-9]\d{0,5}", "a number of connections"),
        HostRequirement("rmem_max", "8388608", r"[1-9]\d{0,9}", "a number of bytes"),
        HostRequirement("netdev_max_backlog", "16384", r"[1-9]\d{0,6}", "a number of packets"),
        HostRequirement("nvme_scheduler", "none", r"[a-z-]{1,20}", "a scheduler, like none"),
        HostRequirement("cpu_governor", "performance", r"[a-z]{1,20}", "a governor, like performance"),
        HostRequirement("transparent_huge_pages", "madvise", "always|madvise|never", "always, madvise or never"),
    )
}
"""Requirements by name, with the names and defaults of the Terraform module's variables, as a test verifies."""


class HostFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Finding about a host: what is, what should be, and the command that mends it. `fits`: None where the host
    does not tell, or where there is nothing to check."""

    name: str
    found: str
    wanted: str
    fits: bool | None
    mend: str = ""


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report on a host."""

    fits: bool
    """Whether nothing is known to be wrong."""
    findings: list[HostFinding]


class NetworkCard(msgspec.Struct, frozen=True, kw_only=True):
    """Network card of this host; None where its driver does not tell."""

    name: str
    mtu: int
    queues: int | None = None
    max_queues: int | None = None
    rx_ring: int | None = None
    max_rx_ring: int | None = None
    statistics: dict[str, int] | None = None


def parse_expectations(texts: Iterable[str]) -> dict[str, str]:
    """Reads requirements from NAME=VALUE. Raises OptionError."""
    wanted = {name: each.default for name, each in HOST_REQUIREMENTS.items()}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise OptionError(f"--expect {text}", "NAME=VALUE", "like huge_pages=1024", param="expect")
        requirement = HOST_REQUIREMENTS.get(name)
        if requirement is None:
            raise OptionError(
                f"--expect {name}",
                ", ".join(HOST_REQUIREMENTS),
                suggest_name(name, list(HOST_REQUIREMENTS)),
                param="expect",
            )
        if not re.fullmatch(requirement.pattern, value):
            raise OptionError(f"--expect {text}", f"{name}={requirement.allowed}", param="expect")
        wanted[name] = value
    return wanted


def check_host(wanted: Mapping[str, str], root: Path = Path("/"), cards: list[NetworkCard] | None = None) -> HostReport:
    """Compares this host with what is wanted; nothing of it changes. `root`: folder that has `proc` and `sys`; `cards`:
    those of this host, unless they are given."""
    cards = list_cards(root) if cards is None else cards
    findings = [
        _kernel(wanted["min_kernel"], root),
        _huge_pages(int(wanted["huge_pages"]), root),
        _transparent_huge_pages(wanted["transparent_huge_pages"], root),
        *_sysctls(wanted, root),
        *_chosen("cpu governor", wanted["cpu_governor"], root, "sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"),
        *_chosen("nvme scheduler", wanted["nvme_scheduler"], root, "sys/block/nvme*/queue/scheduler"),
    ]
    if not cards:
        findings.append(
            HostFinding(name="network cards", found="none that is hardware", wanted="one or more", fits=None)
        )
    cores = len(list((root / "sys/devices/system/cpu").glob("cpu[0-9]*"))) or 1
    for card in cards:
        findings += _card(card, wanted, cores)
    return HostReport(fits=all(each.fits is not False for each in findings), findings=findings)


def _kernel(least: str, root: Path) -> HostFinding:
    release = _read(root / "proc/sys/kernel/osrelease") or platform.release()
    numbers = tuple(map(int, re.findall(r"\d+", release)[:2]))
    fits = numbers >= tuple(map(int, least.split(".")))
    mend = (
        ""
        if fits
        else f"install a kernel {least} or newer, and reboot (Amazon Linux 2023: dnf upgrade --releasever=latest)"
    )
    return HostFinding(name="kernel", found=release, wanted=f"{least} or newer", fits=fits, mend=mend)


def _huge_pages(wanted: int, root: Path) -> HostFinding:
    text = _read(root / "proc/meminfo") or ""
    fields = {name: int(number) for name, number in re.findall(r"^(\w+):\s+(\d+)", text, re.MULTILINE)}
    total, size_kb = fields.get("HugePages_Total"), fields.get("Hugepagesize")
    if total is None or size_kb is None:
        return HostFinding(name="huge pages", found="the kernel has none", wanted=str(wanted), fits=wanted == 0 or None)
    fits = total >= wanted and (size_kb == HUGE_PAGE_KB or not wanted)
    mend = ""
    if not fits:
        mend = f"sysctl -w vm.nr_hugepages={wanted}"
        if wanted * HUGE_PAGE_KB > 0.8 * fields.get("MemTotal", 0):
            gib = wanted * HUGE_PAGE_KB / (1 << 20)
            has = fields.get("MemTotal", 0) >> 20
            mend = f"a host with more memory: {gib:.0f} GiB of pages, and this one has {has} GiB"
    found = f"{total} of {size_kb} kB, {fields.get('HugePages_Free', 0)} free"
    return HostFinding(name="huge pages", found=found, wanted=f"{wanted} of {HUGE_PAGE_KB} kB", fits=fits, mend=mend)


def _transparent_huge_pages(wanted: str, root: Path) -> HostFinding:
    file = "sys/kernel/mm/transparent_hugepage/enabled"
    return _choice("transparent huge pages", wanted, root, root / file)


def _sysctls(wanted: Mapping[str, str], root: Path) -> Iterator[HostFinding]:
    for name in ("somaxconn", "rmem_max", "netdev_max_backlog"):
        least, text = int(wanted[name]), _read(root / f"proc/sys/net/core/{name}")
        known = text is not None and text.isdigit()
        fits = int(text) >= least if known and text is not None else None
        yield HostFinding(
            name=f"net.core.{name}",
            found=text if known and text is not None else "not told, as in a container",
            wanted=f"{least} or more",
            fits=fits,
            mend=f"sysctl -w net.core.{name}={least}" if fits is False else "",
        )


def _chosen(name: str, wanted: str, root: Path, pattern: str) -> Iterator[HostFinding]:
    """Findings about files of a kind, one for each that differs, and one for all that do not."""
    files = sorted(root.glob(pattern))
    findings = [_choice(f"{name} {file.relative_to(root).parts[-3]}", wanted, root, file) for file in files]
    wrong = [each for each in findings if not each.fits]
    if not files:
        yield HostFinding(name=name, found="there is nothing to choose here", wanted=wanted, fits=None)
    elif not wrong:
        yield HostFinding(name=name, found=f"{wanted}, all {len(files)}", wanted=wanted, fits=True)
    yield from wrong


def _choice(name: str, wanted: str, root: Path, file: Path) -> HostFinding:
    """Finding about a file of sysfs with a choice: `madvise`, or the one in brackets of `always [madvise] never`."""
    text = _read(file)
    if text is None:
        return HostFinding(name=name, found="not told", wanted=wanted, fits=None)
    bracket = re.search(r"\[([\w-]+)\]", text)
    found = bracket[1] if bracket else text
    mend = "" if found == wanted else f"echo {wanted} > /{file.relative_to(root)}"
    return HostFinding(name=name, found=found, wanted=wanted, fits=found == wanted, mend=mend)


def _card(card: NetworkCard, wanted: Mapping[str, str], cores: int) -> Iterator[HostFinding]:
    yield _ena_express(card, wanted["enable_mlpf"] == "true")
    # The same rule as that of `doctor --edge`; ENA Express, which carries up to 8900, has room for it too.
    long = card.mtu > MAX_FRAME_MTU
    yield HostFinding(
        name=f"{card.name} MTU",
        found=str(card.mtu),
        wanted=f"{MAX_FRAME_MTU} or less, for native XDP",
        fits=not long,
        mend=f"ip link set {card.name} mtu {MAX_FRAME_MTU}" if long else "",
    )
    queues = min(int(wanted["nic_queues"]), cores)
    yield _at_least(
        f"{card.name} queues", card.queues, queues, card.max_queues, f"ethtool -L {card.name} combined {queues}"
    )
    ring = int(wanted["rx_ring"])
    yield _at_least(
        f"{card.name} receive ring", card.rx_ring, ring, card.max_rx_ring, f"ethtool -G {card.name} rx {ring}"
    )


def _ena_express(card: NetworkCard, wanted: bool) -> HostFinding:
    name = f"{card.name} ENA Express"
    modes = {0: "off", 1: "on for TCP", 2: "on for UDP", 3: "on for TCP and UDP"}
    mode = None if card.statistics is None else card.statistics.get(ENA_EXPRESS_STATISTIC)
    found = "the driver knows none" if mode is None else modes.get(mode, f"mode {mode}")
    fits = mode == 3 if wanted else True
    mend = ""
    if not fits:
        mend = (
            "an instance type with ENA Express, and an ENA driver of 2.8 or newer"
            if mode is None
            else "aws ec2 modify-network-interface-attribute --network-interface-id ID --ena-srd-specification "
            "'EnaSrdEnabled=true,EnaSrdUdpSpecification={EnaSrdUdpEnabled=true}'"
        )
    return HostFinding(name=name, found=found, wanted="on for TCP and UDP" if wanted else "any", fits=fits, mend=mend)


def _at_least(name: str, found: int | None, wanted: int, most: int | None, command: str) -> HostFinding:
    if found is None:
        return HostFinding(name=name, found="the driver does not tell", wanted=f"{wanted} or more", fits=None)
    fits = found >= wanted
    mend = ""
    if not fits:
        mend = command if most is None or most >= wanted else f"a larger instance type: this card has {most} at most"
    return HostFinding(name=name, found=str(found), wanted=f"{wanted} or more", fits=fits, mend=mend)


def _read(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


# --- network cards, by ethtool's system call --------------------------------------------------------------


def list_cards(root: Path = Path("/")) -> list[NetworkCard]:
    """Network cards of this host, without virtual interfaces."""
    return [read_card(device.parent.name, root) for device in sorted((root / "sys/class/net").glob("*/device"))]


def read_card(name: str, root: Path = Path("/")) -> NetworkCard:
    """Facts about one interface."""
    ring = _ethtool(name, struct.pack("=9I", GET_RING, *[0] * 8))
    channels = _ethtool(name, struct.pack("=9I", GET_CHANNELS, *[0] * 8))
    rings = struct.unpack("=9I", ring) if ring else None
    counts = struct.unpack("=9I", channels) if channels else None
    mtu = _read(root / f"sys/class/net/{name}/mtu") or ""
    return NetworkCard(
        name=name,
        mtu=int(mtu) if mtu.isdigit() else 0,
        queues=counts[8] or counts[5] if counts else None,  # combined, else receiving
        max_queues=counts[4] or counts[1] if counts else None,
        rx_ring=rings[5] if rings else None,
        max_rx_ring=rings[1] if rings else None,
        statistics=read_statistics(name),
    )


def read_statistics(name: str) -> dict[str, int] | None:
    """Statistics of an interface's driver by their names; None where it has none."""
    counted = _ethtool(name, struct.pack("=IIQI", GET_STRING_COUNTS, 0, 1 << STATISTICS, 0))
    if counted is None:
        return None
    _, _, known, count = struct.unpack("=IIQI", counted)
    if not known or not 0 < count <= MAX_STATISTICS:
        return None
    strings = _ethtool(name, struct.pack("=III", GET_STRINGS, STATISTICS, count) + bytes(count * STRING_BYTES))
    numbers = _ethtool(name, struct.pack("=II", GET_STATS, count) + bytes(count * 8))
    if strings is None or numbers is None:
        return None
    names = [strings[12 + at : 12 + at + STRING_BYTES] for at in range(0, count * STRING_BYTES, STRING_BYTES)]
    values = struct.unpack(f"={count}Q", numbers[8 : 8 + 8 * count])
    return {
        name.partition(b"\0")[0].decode("ascii", "replace"): value for name, value in zip(names, values, strict=True)
    }


def _ethtool(name: str, request: bytes) -> bytes | None:
    """The kernel's answer in place of a request; None where there is none."""
    if fcntl is None or platform.system() != "Linux":
        return None
    buffer = ctypes.create_string_buffer(request, len(request))
    asked = struct.pack("16sP", name.encode()[:15], ctypes.addressof(buffer)) + bytes(16)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            fcntl.ioctl(any_socket, ETHTOOL_IOCTL, asked)
        except OSError:
            return None
    return buffer.raw


def format_host_report(report: HostReport) -> str:
    """Formats a report as text."""
    signs = {True: "ok", False: "WRONG", None: "?"}
    lines = ["host"]
    for each in report.findings:
        wanted = "" if each.fits else f"  (wanted: {each.wanted})"
        lines.append(f"  {signs[each.fits]:6}{each.name:27} {each.found}{wanted}")
        if each.mend:
            lines.append(f"          {each.mend}")
    wrong = sum(each.fits is False for each in report.findings)
    lines.append(f"{wrong} to mend" if wrong else "nothing to mend")
    return "".join(f"{line}\n" for line in lines)
