"""Running replicas of the deployments that this process calls: the router publishes them, and connections follow."""

from __future__ import annotations

import threading
from collections.abc import Callable

from asr_serve.engine.replicas.routing import ReplicaLoad

Members = Callable[[dict[str, str]], None]
"""Called with the running replicas: id -> node id."""
Loads = Callable[[], dict[str, ReplicaLoad]]

_lock = threading.Lock()
_members: dict[str, dict[str, str]] = {}
_watchers: dict[str, Members] = {}
_loads: dict[str, Loads] = {}


def publish(deployment: str, running: dict[str, str]) -> None:
    """Publishes the running replicas of a deployment: id -> node id."""
    with _lock:
        _members[deployment] = running
        if (watcher := _watchers.get(deployment)) is not None:
            watcher(dict(running))


def watch(deployment: str, on_change: Members, loads: Loads) -> None:
    """Calls `on_change` with the replicas of a deployment, now and after each change, on a thread that must not wait.
    `loads`: load of its replicas as this process knows it."""
    with _lock:
        _watchers[deployment], _loads[deployment] = on_change, loads
        on_change(dict(_members.get(deployment, {})))


def forget(deployment: str) -> None:
    """Ends `watch`."""
    with _lock:
        _watchers.pop(deployment, None)
        _loads.pop(deployment, None)


def loads_of(deployment: str) -> dict[str, ReplicaLoad]:
    """Load of each replica that this process is connected to."""
    with _lock:
        read = _loads.get(deployment)
    return read() if read is not None else {}
