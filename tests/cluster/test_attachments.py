"""Attachments to replicas: a replica that leaves is given up for good, whenever its last address comes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from engine_clients import WAIT_S, wait_until

pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray Serve's own, when it is imported

NAME = "a model of this test alone"


class Call:
    """A long call that yields what the test sends."""

    def __init__(self) -> None:
        self.addresses: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.cancelled = threading.Event()

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        while (address := self.addresses.get()) is not None:
            yield "node", address

    def result(self) -> None:
        """Returns, as `describe` does, of which this is the answer."""

    def cancel(self) -> None:
        self.cancelled.set()
        self.addresses.put(None)


class Replicas:
    """Handle of a deployment, and what its attachments report."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.addresses: list[bytes] = []
        self.may_call, self.calling = threading.Event(), threading.Event()
        self.may_go, self.going = threading.Event(), threading.Event()
        self.may_call.set()
        self.attach = self.describe = self

    def options(self, stream: bool) -> Replicas:
        return self

    def remote(self, replica_id: str | None = None) -> Any:
        call = Call()
        if replica_id is not None:
            self.calling.set()
            assert self.may_call.wait(WAIT_S)
            self.calls.append(call)
        return call

    def on_address(self, replica_id: str, node_id: str, address: bytes) -> None:
        self.addresses.append(address)

    def on_gone(self, replica_id: str) -> None:
        self.going.set()
        assert self.may_go.wait(WAIT_S)


@pytest.fixture
def replicas() -> Iterator[Replicas]:
    from asr_serve.cluster.attachments import ReplicaAttachments

    found: Any = Replicas()
    attachments = ReplicaAttachments(found, NAME, found.on_address, found.on_gone)
    attachments.start()
    yield found
    found.may_call.set()
    found.may_go.set()
    attachments.close()
    wait_until(lambda: not threads())


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "replica of this test"]


def publish(*running: str) -> None:
    from asr_serve.cluster import membership

    membership.publish(NAME, dict.fromkeys(running, "node"))


def test_an_engine_that_restarts_while_its_replica_leaves_is_not_added_again(replicas: Replicas):
    publish("of this test")
    wait_until(lambda: len(replicas.calls) == 1)
    [call] = replicas.calls
    call.addresses.put(b"first")
    wait_until(lambda: replicas.addresses == [b"first"])
    publish()
    assert replicas.going.wait(WAIT_S)
    call.addresses.put(b"restarted")
    wait_until(call.addresses.empty)
    assert not call.cancelled.is_set(), "Ray Serve waits for the call until the work of the replica is elsewhere"
    replicas.may_go.set()
    assert call.cancelled.wait(WAIT_S)
    wait_until(lambda: not threads())
    assert replicas.addresses == [b"first"]
    assert len(replicas.calls) == 1


def test_a_call_that_begins_while_its_replica_leaves_is_ended(replicas: Replicas):
    replicas.may_call.clear()
    publish("of this test")
    assert replicas.calling.wait(WAIT_S)
    replicas.may_go.set()
    publish()
    assert replicas.going.wait(WAIT_S)
    wait_until(lambda: len(threads()) == 1)  # who leaves has found no call
    replicas.may_call.set()
    wait_until(lambda: not threads())
    [call] = replicas.calls
    assert call.cancelled.is_set(), "nobody else knew of it"


def test_a_call_that_ends_while_its_replica_runs_is_made_again(replicas: Replicas):
    publish("of this test")
    wait_until(lambda: len(replicas.calls) == 1)
    replicas.calls[0].addresses.put(None)
    wait_until(lambda: len(replicas.calls) == 2)
    replicas.calls[1].addresses.put(b"again")
    wait_until(lambda: replicas.addresses == [b"again"])
