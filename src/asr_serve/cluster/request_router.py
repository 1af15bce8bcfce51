"""Router of control calls from an ingress to the replicas of a model, by the interface of Ray Serve.

A call that names a replica goes to that one, and any other call to the shorter of two queues of audio. Ray Serve tells
a router which replicas run: an ingress learns from it whom to connect to. Ray Serve copies this module to every process
that calls a replica, so that state is elsewhere (`membership`).
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from asr_serve.cluster import membership
from asr_serve.engine.replicas.routing import ReplicaLoad, choose

IDLE = ReplicaLoad(0, 0)
GONE_S = 0.1
"""Pause before a call that names a replica that does not run is routed again. It ends when its caller cancels it."""


class AudioRequestRouter(RequestRouter):  # type: ignore[misc]
    """Router of one deployment's control calls."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Receives the running replicas from Ray Serve."""
        super().update_replicas(replicas)
        running = {each.replica_id.unique_id: each.node_id for each in replicas}
        membership.publish(self._deployment_id.name, running)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replica that the call names, or the less loaded one of two."""
        wanted: Any = None if pending_request is None else pending_request.kwargs.get("replica_id")
        if wanted is not None:
            found = [each for each in candidate_replicas if each.replica_id.unique_id == wanted]
            if not found:
                # Ray Serve asks again at once, for ever: without a pause, a call to a replica that has died would
                # keep this loop from learning of any other.
                await asyncio.sleep(GONE_S)
            return [found]
        if not candidate_replicas:
            return []
        loads = membership.loads_of(self._deployment_id.name)
        draw = random.Random()
        return [[choose(candidate_replicas, lambda each: loads.get(each.replica_id.unique_id, IDLE).for_request, draw)]]
