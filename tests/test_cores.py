"""Cores that a process may use, under real control groups where this machine lets a test make one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import Child

from asr_serve.cores import (
    CONTENDED_SHARE,
    CONTENTION_WINDOW_S,
    UNCONTENDED_SHARE,
    CoreContention,
    cpu_quota,
    usable_cores,
)

CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
PRINT_CORES = """
import sys
open(sys.argv[1], "w").write("0")
from asr_serve.cores import cpu_quota, usable_cores
print(cpu_quota(), usable_cores())
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A new control group, of either version."""
    parent = CPU_GROUPS if CPU_GROUPS.is_dir() else CPU_GROUPS.parent
    folder = parent / "asr-serve-test"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as failure:
        pytest.skip(f"no control groups of its own here: {failure}")
    yield folder
    folder.rmdir()


def limit(group: Path, quota_us: int) -> None:
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota_us} 100000")
    elif (group / "cpu.cfs_quota_us").exists():
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        pytest.skip("no control groups of its own here: none limits CPU time")


def printed(group: Path) -> list[str]:
    command = [sys.executable, "-c", PRINT_CORES, str(group / "cgroup.procs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def test_a_quota_bounds_the_cores(group: Path) -> None:
    assert printed(group) == [str(cpu_quota()), str(usable_cores())]
    for quota_us, cores in ((50_000, 1), (100_000, 1), (100_000 * (usable_cores() + 5), usable_cores())):
        limit(group, quota_us)
        assert printed(group) == [str(quota_us / 100_000), str(cores)]


V2 = "31 23 0:28 / {root} rw - cgroup2 cgroup2 rw\n"
V1 = (
    "31 23 0:28 / {root}/memory rw - cgroup cgroup rw,memory\n"
    "32 23 0:29 /pod {root} rw - cgroup cgroup rw,cpu,cpuacct\n"
)


def process(folder: Path, mounts: str, groups: str) -> Path:
    (folder / "mountinfo").write_text(mounts)
    (folder / "cgroup").write_text(groups)
    return folder


def test_the_smallest_quota_of_all_levels_counts(tmp_path: Path) -> None:
    """Files as Kubernetes has them: the pod's limit stands above the container's."""
    container = tmp_path / "pod" / "container"
    container.mkdir(parents=True)
    me = process(tmp_path, V2.format(root=tmp_path), "0::/pod/container\n")
    assert cpu_quota(me) is None
    (container / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(me) is None
    (tmp_path / "pod" / "cpu.max").write_text("250000 100000\n")
    assert cpu_quota(me) == 2.5
    (container / "cpu.max").write_text("75000 50000\n")
    assert cpu_quota(me) == 1.5


@pytest.mark.parametrize("group", ["/pod/container", "/elsewhere"])
def test_version_1_of_a_container(tmp_path: Path, group: str) -> None:
    (tmp_path / "container").mkdir()
    me = process(tmp_path, V1.format(root=tmp_path), f"4:memory:/\n3:cpu,cpuacct:{group}\n")
    (tmp_path / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(me) is None
    (tmp_path / "cpu.cfs_quota_us").write_text("350000\n")
    assert cpu_quota(me) == 3.5


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "none") is None
    assert cpu_quota(process(tmp_path, V2.format(root=tmp_path), "")) is None


def test_mounts_of_odd_names_are_passed_over(tmp_path: Path) -> None:
    """A device without a name, a path that is no UTF-8, and one with a character at which texts are split."""
    odd = b"40 23 0:30 / /a\xff rw - tmpfs  rw\n41 23 0:31 / /b\xe2\x80\xa8c\x85d\x0ce rw - tmpfs tmpfs rw\n42\n"
    me = process(tmp_path, "", "0::/\n")
    (me / "mountinfo").write_bytes(odd + V2.format(root=tmp_path).encode())
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert cpu_quota(me) == 0.5


def stat(folder: Path, busy: int, idle: int) -> Path:
    """/proc/stat, with so many ticks of every core. A guest's are among the user's."""
    rows = [f"cpu{core} {busy} 0 0 {idle - 1} 1 0 0 0 {busy} 0" for core in range(os.cpu_count() or 1)]
    path = folder / "stat"
    path.write_text("\n".join([f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0", *rows, "intr 1 2 3", "ctxt 4"]) + "\n")
    return path


def test_cores_are_contended_while_others_use_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    now_s = own_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "process_time", lambda: own_s)
    busy, idle = 5_000, 5_000
    contention = CoreContention(stat(tmp_path, busy, idle))
    assert not contention.contended(), "nothing is known yet"

    def after(own: float, others: float, elapsed_s: float = 2.0) -> bool:
        """What is said after a time in which both used these shares of all cores."""
        nonlocal now_s, own_s, busy, idle
        ticks = round(elapsed_s / tick_s)
        busy, idle = busy + round((own + others) * ticks), idle + round((1 - own - others) * ticks)
        now_s, own_s = now_s + elapsed_s, own_s + own * elapsed_s * cores
        stat(tmp_path, busy, idle)
        return contention.contended()

    assert not after(own=1.0, others=0.0)
    assert not after(own=0.5, others=CONTENDED_SHARE - 0.03)
    assert after(own=0.5, others=0.5)
    assert after(own=0.8, others=UNCONTENDED_SHARE + 0.02), "it stays so until they use clearly less"
    assert not after(own=0.8, others=UNCONTENDED_SHARE - 0.05)
    assert not after(own=0.0, others=1.0, elapsed_s=CONTENTION_WINDOW_S / 2), "too short a time"
    assert after(own=0.0, others=1.0, elapsed_s=CONTENTION_WINDOW_S / 2)
    assert not after(own=0.0, others=0.0)


@pytest.mark.parametrize("text", [None, "", "cpu0 many\n", "MemTotal: 1 kB\n"])
def test_cores_are_not_contended_where_nobody_tells(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "stat"
    if text is not None:
        path.write_text(text)
    contention = CoreContention(path)
    for _ in range(2):
        assert not contention.contended()
        contention._measured_s = -CONTENTION_WINDOW_S


def test_busy_processes_contend_for_the_cores() -> None:
    contention, end_s = CoreContention(), time.monotonic() + 60
    with contextlib.ExitStack() as processes:
        for _ in os.sched_getaffinity(0):
            busy = processes.enter_context(Child([sys.executable, "-c", "while True: pass"], limit_s=90))
            processes.callback(busy.kill)  # before the wait for its end
        while not contention.contended():
            assert time.monotonic() < end_s
            time.sleep(0.1)
