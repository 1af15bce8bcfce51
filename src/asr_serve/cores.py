"""Cores that this process may use, by its affinity mask and the CPU quota of its control groups.

A container's quota is no mask: the process sees every core, runs on all of them, and is stopped until the period of
100 ms ends once their time is used up. Threads that wait for each other after each product then all wait for that.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import NamedTuple


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
