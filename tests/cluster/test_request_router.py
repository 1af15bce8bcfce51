"""Router of control calls: a call to a replica that has died leaves the loop to others."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")


@pytest.mark.filterwarnings("ignore")  # Ray Serve's own, when it is imported
def test_a_call_to_a_replica_that_is_gone_lets_others_run():
    from ray.serve.request_router import PendingRequest

    from asr_serve.cluster.request_router import AudioRequestRouter

    async def route() -> int:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        router = AudioRequestRouter.__new__(AudioRequestRouter)  # what it is asked needs no Ray
        call = PendingRequest(args=[], kwargs={"replica_id": "gone"}, metadata=None)
        task = asyncio.ensure_future(others())
        for _ in range(3):
            assert await router.choose_replicas([], call) == [[]]
        task.cancel()
        return turns

    assert asyncio.run(route()) >= 3
