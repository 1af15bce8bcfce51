"""Cores that this process may use, by its affinity mask and the CPU quota of its control groups.

A container's quota is no mask: the process sees every core, runs on all of them, and is stopped until the period of
100 ms ends once their time is used up. Threads that wait for each other after each product then all wait for that.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path, PurePosixPath
from typing import NamedTuple

CONTENTION_WINDOW_S = 1.0
"""Least time over which the use of other processes is measured."""
CONTENDED_SHARE, UNCONTENDED_SHARE = 0.15, 0.1
"""Share of the cores' time used by others from which cores are contended, and below which they no longer are."""
STAT_IDLE, STAT_GUEST = (3, 4), 8
"""Fields of a core in /proc/stat: idle and waiting for I/O; and the first of those that others include."""


class _Hierarchy(NamedTuple):
    """Control groups that limit CPU time. `name`: its field in /proc/self/cgroup; `root`: the group that is mounted,
    at `mount`."""

    name: str
    root: PurePosixPath
    mount: Path


def usable_cores() -> int:
    """Cores that this process can keep busy: those of its affinity mask, and no more than the whole cores of its
    quota. At least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    # A part of a core is left to the server's own threads.
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(process: Path = Path("/proc/self")) -> float | None:
    """CPU seconds per second that the control groups of a process allow, the smallest of all levels. None: there is
    no limit, or the system has no control groups. `process`: its folder in /proc.

    Source  Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max), Documentation/scheduler/sched-bwc.rst
            (cpu.cfs_quota_us)
    """
    try:
        mounts, groups = (os.fsdecode((process / name).read_bytes()) for name in ("mountinfo", "cgroup"))
    except OSError:
        return None
    quotas = list[float]()
    for hierarchy in _hierarchies(mounts):
        group = _group(groups, hierarchy)
        if group is not None:
            quotas += [quota for level in (group, *group.parents) if (quota := _quota(hierarchy.mount / level))]
    return min(quotas, default=None)


class CoreContention:
    """Detects whether other processes keep the cores busy that this process may use. For any thread.

    Source  Linux, Documentation/filesystems/proc.rst (/proc/stat)
    """

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat, self._contended = stat, False
        self._measured_s, self._own_s = -CONTENTION_WINDOW_S, 0.0
        self._ticks: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def contended(self) -> bool:
        """Returns whether they did, lately: over CONTENTION_WINDOW_S, or since an earlier call. False without
        /proc/stat."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._measured_s >= CONTENTION_WINDOW_S:
                self._measure(now_s)
            return self._contended

    def _measure(self, now_s: float) -> None:
        before, before_own_s = self._ticks, self._own_s
        self._ticks, self._own_s, self._measured_s = self._busy_and_total(), time.process_time(), now_s
        if before is None or self._ticks is None or (elapsed := self._ticks[1] - before[1]) <= 0:
            return
        own = (self._own_s - before_own_s) * os.sysconf("SC_CLK_TCK")
        others = (self._ticks[0] - before[0] - own) / elapsed
        self._contended = others >= (UNCONTENDED_SHARE if self._contended else CONTENDED_SHARE)

    def _busy_and_total(self) -> tuple[int, int] | None:
        """Returns the busy ticks of the cores that this process may use, and all their ticks."""
        try:
            rows = [line.split() for line in self._stat.read_text().splitlines()]
            usable = {f"cpu{core}" for core in os.sched_getaffinity(0)}
            cores = [[int(field) for field in fields[:STAT_GUEST]] for name, *fields in rows if name in usable]
        except (OSError, ValueError, AttributeError):  # another system
            return None
        total = sum(map(sum, cores))
        return total - sum(core[field] for core in cores for field in STAT_IDLE), total


def _hierarchies(mounts: str) -> list[_Hierarchy]:
    found = list[_Hierarchy]()
    for line in mounts.split("\n"):
        # By single spaces and line feeds: the name of a device may be empty, and a path hold other white space.
        place, _, kind = line.partition(" - ")
        root, mount = (*place.split(" ")[3:5], "", "")[:2]
        file_system, _, options = (*kind.split(" ")[:3], "", "", "")[:3]
        if file_system == "cgroup2":
            found.append(_Hierarchy("", PurePosixPath(root), Path(mount)))
        elif file_system == "cgroup" and "cpu" in options.split(","):
            found.append(_Hierarchy("cpu", PurePosixPath(root), Path(mount)))
    return found


def _group(groups: str, hierarchy: _Hierarchy) -> PurePosixPath | None:
    """The group of the process, relative to the mounted one; None if the process is in none of this hierarchy."""
    for line in filter(None, groups.split("\n")):
        _, controllers, path = line.split(":", 2)
        if hierarchy.name in controllers.split(","):
            group = PurePosixPath(path)
            # A container that sees its own group alone may still be told the path outside.
            inside = group.is_relative_to(hierarchy.root)
            return group.relative_to(hierarchy.root) if inside else PurePosixPath()
    return None


def _quota(group: Path) -> float | None:
    """The quota of one group, of either version. None where it has no limit."""
    try:
        if (newer := group / "cpu.max").exists():
            quota, period = newer.read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 else None
    except (OSError, ValueError):
        return None
