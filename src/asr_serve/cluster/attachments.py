"""Long calls to the replicas of a deployment, which tell a process where their engines listen.

They also keep Ray Serve from ending a replica under this process: it waits for the calls in progress.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from asr_serve.cluster import membership
from asr_serve.engine.replicas.routing import ReplicaLoad

log = logging.getLogger(__name__)

ATTACH_AGAIN_S = 1.0
"""Pause before a replica is attached to again, where the call ended though the replica runs."""


class ReplicaAttachments:
    """Attached replicas of one deployment, as Ray Serve reports them."""

    def __init__(
        self,
        handle: DeploymentHandle,
        deployment: str,
        on_address: Callable[[str, str, bytes], None],
        on_gone: Callable[[str], None],
        loads: Callable[[], dict[str, ReplicaLoad]] = dict,
    ) -> None:
        """`on_address`: called with a replica's id, its node and the address of its engine, now and after each restart.
        `on_gone`: called with the id of one that Ray Serve ends; the call to it lasts until this returns. Both are
        called on threads of their own. `loads`: load of the replicas as this process knows it."""
        self._handle, self._deployment, self._loads = handle, deployment, loads
        self._on_address, self._on_gone = on_address, on_gone
        self._changes: queue.SimpleQueue[dict[str, str] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._calls: dict[str, Any] = {}
        """Call of each replica that is attached."""

    def start(self) -> None:
        membership.watch(self._deployment, self._changes.put, self._loads)
        threading.Thread(target=self._follow, name="replicas", daemon=True).start()
        # The first call makes the handle's router, which learns of the replicas.
        threading.Thread(target=self._first_call, name="first call", daemon=True).start()

    def close(self) -> None:
        """Ends all calls. Idempotent."""
        self._closed.set()
        membership.forget(self._deployment)
        self._changes.put(None)
        for call in list(self._calls.values()):
            call.cancel()

    def _first_call(self) -> None:
        try:
            self._handle.describe.remote().result()
        except (RayError, RayServeException, TimeoutError) as failure:
            log.warning("%s: %s", self._deployment, failure)

    def _follow(self) -> None:
        """Attaches to replicas that come, and leaves those that go."""
        known: set[str] = set()
        while (members := self._changes.get()) is not None:
            for replica_id in members.keys() - known:
                self._in_thread(self._attach, replica_id)
            for replica_id in known - members.keys():
                self._in_thread(self._leave, replica_id)
            known = set(members)

    def _in_thread(self, work: Callable[[str], None], replica_id: str) -> None:
        threading.Thread(target=work, args=(replica_id,), name=f"replica {replica_id}", daemon=True).start()

    def _attach(self, replica_id: str) -> None:
        while not self._closed.is_set():
            call = self._handle.options(stream=True).attach.remote(replica_id=replica_id)
            self._calls[replica_id] = call
            try:
                for node_id, address in call:
                    self._on_address(replica_id, node_id, address)
            except (RayError, RayServeException, asyncio.CancelledError) as failure:
                log.info("replica %s of %s: %s", replica_id, self._deployment, type(failure).__name__)
            if self._calls.get(replica_id) is not call or self._closed.wait(ATTACH_AGAIN_S):
                return
            if self._calls.get(replica_id) is not call:
                return

    def _leave(self, replica_id: str) -> None:
        self._on_gone(replica_id)
        if (call := self._calls.pop(replica_id, None)) is not None:
            call.cancel()
