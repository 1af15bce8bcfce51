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


class Attachment:
    """Attachment to one replica. Protected by the lock of its ReplicaAttachments."""

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.call: Any = None
        """The long call to the replica, the last one that was made."""
        self.leaving = False
        """Whether Ray Serve ends the replica: an address that it sends from now on does not count."""
        self.left = False
        """Whether its call has been ended."""


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
        """`on_address`: called with a replica's id, its node and the address of its engine, now and after each restart;
        it must not wait. `on_gone`: called with the id of one that Ray Serve ends; the call to it lasts until this
        returns, and `on_address` is not called for it any more. Both are called on threads of their own. `loads`: load
        of the replicas as this process knows it."""
        self._handle, self._deployment, self._loads = handle, deployment, loads
        self._on_address, self._on_gone = on_address, on_gone
        self._changes: queue.SimpleQueue[dict[str, str] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        """Lock of the attachments, held while `on_address` runs: a replica that leaves gets no address after that."""
        self._attachments: dict[str, Attachment] = {}

    def start(self) -> None:
        membership.watch(self._deployment, self._changes.put, self._loads)
        threading.Thread(target=self._follow, name="replicas", daemon=True).start()
        # The first call makes the handle's router, which learns of the replicas.
        threading.Thread(target=self._first_call, name="first call", daemon=True).start()

    def close(self) -> None:
        """Ends all calls. Idempotent."""
        membership.forget(self._deployment)
        self._changes.put(None)
        with self._lock:
            self._closed.set()
            calls = [each.call for each in self._attachments.values() if each.call is not None]
        for call in calls:
            call.cancel()

    def _first_call(self) -> None:
        try:
            self._handle.describe.remote().result()
        except (RayError, RayServeException, TimeoutError) as failure:
            log.warning("%s: %s", self._deployment, failure)

    def _follow(self) -> None:
        """Attaches to replicas that come, and leaves those that go."""
        while (members := self._changes.get()) is not None:
            with self._lock:
                gone = [self._attachments[each] for each in self._attachments.keys() - members.keys()]
                new = [Attachment(each) for each in members.keys() - self._attachments.keys()]
                for each in gone:
                    each.leaving = True
                    del self._attachments[each.replica_id]
                self._attachments.update({each.replica_id: each for each in new})
            for work, attachments in ((self._attach, new), (self._leave, gone)):
                for each in attachments:
                    name = f"replica {each.replica_id}"
                    threading.Thread(target=work, args=(each,), name=name, daemon=True).start()

    def _attach(self, attachment: Attachment) -> None:
        replica_id = attachment.replica_id
        while not (self._closed.is_set() or attachment.leaving):
            call = self._handle.options(stream=True).attach.remote(replica_id=replica_id)
            with self._lock:
                attachment.call, unwanted = call, attachment.left or self._closed.is_set()
            if unwanted:  # who ended it did not know this call
                call.cancel()
                return
            try:
                for node_id, address in call:
                    with self._lock:
                        if not attachment.leaving:
                            self._on_address(replica_id, node_id, address)
            except (RayError, RayServeException, asyncio.CancelledError) as failure:
                log.info("replica %s of %s: %s", replica_id, self._deployment, type(failure).__name__)
            self._closed.wait(ATTACH_AGAIN_S)

    def _leave(self, attachment: Attachment) -> None:
        self._on_gone(attachment.replica_id)
        with self._lock:
            attachment.left = True
            call = attachment.call
        if call is not None:
            call.cancel()
