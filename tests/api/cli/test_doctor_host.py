"""`asr-serve doctor --host`: what is, what should be, and the command that mends it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asr_serve.api.cli import app
from asr_serve.api.cli.host import (
    ENA_EXPRESS_STATISTIC,
    HOST_REQUIREMENTS,
    HostFinding,
    NetworkCard,
    check_host,
    format_host_report,
    parse_expectations,
)
from asr_serve.edge.xdp.host_checks import MAX_FRAME_MTU
from asr_serve.errors import OptionError

GOOD_CARD = NetworkCard(
    name="ens5",
    mtu=MAX_FRAME_MTU,
    queues=8,
    max_queues=32,
    rx_ring=1_024,
    max_rx_ring=16_384,
    statistics={"rx_bytes": 5, ENA_EXPRESS_STATISTIC: 3},
)
FILES = {
    "proc/sys/kernel/osrelease": "6.1.141-155.222.amzn2023.aarch64\n",
    "proc/meminfo": "MemTotal: 99000000 kB\nHugePages_Total: 24576\nHugePages_Free: 24000\nHugepagesize: 2048 kB\n",
    "proc/sys/net/core/somaxconn": "4096\n",
    "proc/sys/net/core/rmem_max": "8388608\n",
    "proc/sys/net/core/netdev_max_backlog": "16384\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/block/nvme0n1/queue/scheduler": "[none] mq-deadline kyber\n",
    "sys/block/nvme1n1/queue/scheduler": "[none] mq-deadline kyber\n",
    **{f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor": "performance\n" for core in range(16)},
}
"""A host of the edge as the module makes it."""


def host(folder: Path, **changed: str) -> Path:
    for name, text in (FILES | changed).items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def findings(root: Path, *cards: NetworkCard, expect: tuple[str, ...] = ()) -> dict[str, HostFinding]:
    report = check_host(parse_expectations(expect), root, list(cards))
    named = {each.name: each for each in report.findings}
    assert len(named) == len(report.findings)
    assert report.fits == all(each.fits is not False for each in report.findings)
    assert all(each.mend for each in report.findings if each.fits is False), "every fault comes with what mends it"
    assert not any(each.mend for each in report.findings if each.fits is not False)
    return named


def changed_card(**fields: Any) -> NetworkCard:
    return NetworkCard(**({name: getattr(GOOD_CARD, name) for name in GOOD_CARD.__struct_fields__} | fields))


def test_a_host_as_the_module_makes_it_has_nothing_to_mend(tmp_path: Path) -> None:
    found = findings(host(tmp_path), GOOD_CARD)
    assert {name for name, each in found.items() if each.fits is not True} == set()
    assert found["nvme scheduler"].found == "none, all 2"
    assert found["ens5 ENA Express"].found == "on for TCP and UDP"
    text = format_host_report(check_host(parse_expectations(()), tmp_path, [GOOD_CARD]))
    assert text.endswith("nothing to mend\n")


@pytest.mark.parametrize(
    ("file", "text", "name", "mend"),
    [
        ("proc/sys/kernel/osrelease", "5.15.0-generic", "kernel", "install a kernel 6.1 or newer, and reboot"),
        (
            "proc/meminfo",
            "MemTotal: 99000000 kB\nHugePages_Total: 8\nHugepagesize: 2048 kB\n",
            "huge pages",
            "sysctl -w vm.nr_hugepages=24576",
        ),
        (  # c8g.4xlarge, of the first design
            "proc/meminfo",
            "MemTotal: 32000000 kB\nHugePages_Total: 8\nHugepagesize: 2048 kB\n",
            "huge pages",
            "a host with more memory: 48 GiB of pages",
        ),
        ("proc/sys/net/core/somaxconn", "128", "net.core.somaxconn", "sysctl -w net.core.somaxconn=4096"),
        ("proc/sys/net/core/rmem_max", "212992", "net.core.rmem_max", "sysctl -w net.core.rmem_max=8388608"),
        (
            "sys/kernel/mm/transparent_hugepage/enabled",
            "[always] madvise never",
            "transparent huge pages",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        (
            "sys/block/nvme1n1/queue/scheduler",
            "none [mq-deadline] kyber",
            "nvme scheduler nvme1n1",
            "echo none > /sys/block/nvme1n1/queue/scheduler",
        ),
        (
            "sys/devices/system/cpu/cpu3/cpufreq/scaling_governor",
            "powersave",
            "cpu governor cpu3",
            "echo performance > /sys/devices/system/cpu/cpu3/cpufreq/scaling_governor",
        ),
    ],
)
def test_each_fault_is_named_with_what_mends_it(file: str, text: str, name: str, mend: str, tmp_path: Path) -> None:
    found = findings(host(tmp_path, **{file: text}), GOOD_CARD)
    assert [each.name for each in found.values() if each.fits is False] == [name]
    assert found[name].mend.startswith(mend)


@pytest.mark.parametrize(
    ("fields", "name", "mend"),
    [
        ({"statistics": {ENA_EXPRESS_STATISTIC: 0}}, "ENA Express", "aws ec2 modify-network-interface-attribute"),
        ({"statistics": {ENA_EXPRESS_STATISTIC: 1}}, "ENA Express", "aws ec2 modify-network-interface-attribute"),
        ({"statistics": {"rx_bytes": 1}}, "ENA Express", "an instance type with ENA Express"),
        ({"statistics": None}, "ENA Express", "an instance type with ENA Express"),
        ({"mtu": 8_900}, "MTU", f"ip link set ens5 mtu {MAX_FRAME_MTU}"),
        ({"queues": 2}, "queues", "ethtool -L ens5 combined 8"),
        ({"queues": 2, "max_queues": 4}, "queues", "a larger instance type: this card has 4 at most"),
        ({"rx_ring": 256}, "receive ring", "ethtool -G ens5 rx 1024"),
    ],
)
def test_each_fault_of_a_card_is_named(fields: dict[str, Any], name: str, mend: str, tmp_path: Path) -> None:
    found = findings(host(tmp_path), changed_card(**fields), changed_card(name="ens6"))
    assert [each.name for each in found.values() if each.fits is False] == [f"ens5 {name}"]
    assert found[f"ens5 {name}"].mend.startswith(mend)


def test_what_a_host_does_not_tell_is_no_fault_and_no_pass(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    found = findings(tmp_path, changed_card(queues=None, rx_ring=None))
    unknown = {name for name, each in found.items() if each.fits is None}
    assert {"net.core.somaxconn", "cpu governor", "nvme scheduler", "ens5 queues", "ens5 receive ring"} <= unknown
    assert findings(tmp_path)["network cards"].fits is None


def test_a_host_is_asked_for_no_more_queues_than_it_has_cores(tmp_path: Path) -> None:
    root = host(tmp_path)
    for core in range(4, 16):
        shutil.rmtree(root / f"sys/devices/system/cpu/cpu{core}")
    assert findings(root, changed_card(queues=4))["ens5 queues"].fits is True


def test_what_a_deployment_has_changed_is_expected_instead(tmp_path: Path) -> None:
    root = host(tmp_path, **{"proc/meminfo": "MemTotal: 9000000 kB\nHugePages_Total: 512\nHugepagesize: 2048 kB\n"})
    card = changed_card(statistics=None)
    found = findings(root, card, expect=("huge_pages=512", "enable_mlpf=false"))
    assert all(each.fits for each in found.values())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("huge_page=3", "did you mean 'huge_pages'"),
        ("huge_pages", "NAME=VALUE"),
        ("huge_pages=many", "a number of pages of 2 MiB"),
        ("enable_mlpf=yes", "true or false"),
        ("min_kernel=six", "MAJOR.MINOR"),
    ],
)
def test_wrong_expectations_are_refused(text: str, said: str) -> None:
    with pytest.raises(OptionError) as refused:
        parse_expectations([text])
    assert said in str(refused.value)


def test_every_default_is_a_value_that_is_allowed() -> None:
    assert parse_expectations([f"{each.name}={each.default}" for each in HOST_REQUIREMENTS.values()])


def test_the_command_tells_by_its_exit_code_and_as_json() -> None:
    run = CliRunner().invoke
    result = run(app, ["doctor", "--host", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == (0 if report["fits"] else 1)
    assert {"name", "found", "wanted", "fits", "mend"} == set(report["findings"][0])
    text = run(app, ["doctor", "--host"])
    assert text.exit_code == result.exit_code
    assert all(each["mend"] in text.stdout for each in report["findings"])
    for arguments, said in (
        (["doctor", "--host", "--edge"], "one of the two"),
        (["doctor", "--expect", "huge_pages=1"], "--expect without --host"),
        (["doctor", "--host", "--interface", "eth0"], "--interface without --edge"),
    ):
        refused = run(app, arguments)
        assert refused.exit_code == 2
        assert said in refused.output


def test_cards_are_read_by_the_kernels_own_interface() -> None:
    """A pair of virtual interfaces: each driver's statistics name the other."""
    if sys.platform != "linux" or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("no network namespaces here: not Linux, or no ip")
    script = (
        "ip link add left mtu 1400 type veth peer name right && exec "
        f'{sys.executable} -c "'
        "from asr_serve.api.cli.host import read_card, list_cards, read_statistics; import socket; "
        "card = read_card('left'); print(card.statistics['peer_ifindex'], socket.if_nametoindex('right'), card.mtu, "
        "card.queues, read_statistics('lo'), list_cards())\""
    )
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", script],
        capture_output=True, text=True, timeout=60, check=False, env=os.environ,
    )  # fmt: skip
    if done.returncode and "Operation not permitted" in done.stderr:
        pytest.skip("no network namespaces here: " + done.stderr.strip()[:80])
    assert done.returncode == 0, done.stderr
    peer, right, *_ = done.stdout.split()
    assert peer == right
