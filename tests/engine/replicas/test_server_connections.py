"""Connections of servers to an engine: greetings and queues have limits, and accepting goes on after a failure."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_clients import RING, WAIT_S, wait_until

from asr_serve.engine.process import server_handshake
from asr_serve.engine.process.message_sender import MessageSender, OutgoingMessage
from asr_serve.engine.process.messages import EngineAddress, ListenSpec
from asr_serve.engine.process.server_handshake import (
    HANDSHAKE_S,
    MAX_GREETINGS,
    MAX_SERVERS,
    greet_engine,
    greet_server,
)
from asr_serve.engine.process.server_link import ServerPlaces
from asr_serve.engine.process.server_listener import ServerListener
from asr_serve.engine.replicas.remote_engine import RemoteEngine
from asr_serve.errors import PeerGone, PeerRefused

KEY = b"a key of this test alone"


def test_a_greeting_that_trickles_in_ends(monkeypatch):
    monkeypatch.setattr(server_handshake, "HANDSHAKE_S", 0.5)
    ours, theirs = socket.socketpair()
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(0.1):
            theirs.send(b"a")

    with ours, theirs:
        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            with pytest.raises(PeerGone, match="no greeting"):
                greet_server(ours, KEY)
        finally:
            ended.set()
            thread.join(WAIT_S)


def test_accepting_goes_on_where_descriptors_had_run_out(tmp_path: Path):
    listener = ServerListener(ListenSpec(str(tmp_path), None, KEY))
    facts: Any = SimpleNamespace(places=ServerPlaces())  # nobody gets as far
    ready: Any = None
    listener.start(facts, ready)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers: list[int] = []
    line = socket.socket(socket.AF_UNIX)
    try:
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
        try:
            with contextlib.suppress(OSError):  # there are none left
                while True:
                    fillers.append(os.dup(line.fileno()))
            line.connect(listener.address.unix_path)
            time.sleep(0.3)  # it fails to accept meanwhile, or has not tried: the connection is served either way
        finally:
            for filler in fillers:
                os.close(filler)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for _ in range(2):
            with pytest.raises(PeerRefused, match="does not know the key"):
                RemoteEngine.connect(listener.address, b"another key", RING, same_machine=True, name="it")
    finally:
        line.close()
        listener.close()


def test_connections_over_the_network_without_a_proof_keep_no_server_out(tmp_path: Path):
    listener = ServerListener(ListenSpec(str(tmp_path), "127.0.0.1", KEY))
    facts: Any = SimpleNamespace(places=ServerPlaces())  # nobody gets as far
    ready: Any = None
    listener.start(facts, ready)
    address = listener.address.tcp
    assert address is not None
    with contextlib.ExitStack() as opened:
        opened.callback(listener.close)

        def connect(host: str) -> socket.socket:
            return opened.enter_context(socket.create_connection(address, HANDSHAKE_S, source_address=(host, 0)))

        slow = connect("127.0.0.1")
        silent: list[socket.socket] = []
        for number in range(1, MAX_SERVERS + MAX_GREETINGS):
            silent.append(connect("127.0.0.2"))
            if number >= MAX_GREETINGS:
                assert silent[number - MAX_GREETINGS].recv(1) == b"", "the oldest one is ended"
            wait_until(lambda number=number: threads("server") == min(number + 1, MAX_GREETINGS))
        for line in (slow, connect("127.0.0.2"), connect("127.0.0.3")):
            with pytest.raises(PeerRefused, match="does not know the key"):  # it was answered, and hung up
                greet_engine(line, b"another key", None)
        for same_machine in (True, False):
            with pytest.raises(PeerRefused, match="does not know the key"):
                RemoteEngine.connect(listener.address, b"another key", RING, same_machine=same_machine, name="it")
    wait_until(lambda: not threads("server"))


def threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_nobody_can_connect_to_a_closed_listener(tmp_path: Path):
    listener = ServerListener(ListenSpec(str(tmp_path), "127.0.0.1", KEY))
    facts: Any = SimpleNamespace(places=ServerPlaces())
    ready: Any = None
    listener.start(facts, ready)
    listener.close()
    for same_machine in (True, False):
        with pytest.raises(PeerGone):
            RemoteEngine.connect(listener.address, KEY, RING, same_machine=same_machine, name="it")
    with pytest.raises(PeerGone):
        RemoteEngine.connect(EngineAddress(str(tmp_path / "no"), None), KEY, RING, same_machine=True, name="it")


@pytest.mark.parametrize(("limits", "room"), [({"max_messages": 4}, 4), ({"max_bytes": 50}, 5)])
def test_a_queue_that_nobody_reads_ends_at_its_limit(limits, room):
    release, writing = threading.Event(), threading.Event()
    written: list[bytes] = []

    def write(letter: OutgoingMessage) -> None:
        writing.set()
        release.wait(WAIT_S)
        written.append(letter.message)

    sender = MessageSender("it", write, **limits)
    try:
        assert sender.enqueue(OutgoingMessage(b"0" * 10))
        assert writing.wait(WAIT_S)  # that one waits no longer
        assert all(sender.enqueue(OutgoingMessage(b"%d" % number * 10)) for number in range(room))
        assert not sender.enqueue(OutgoingMessage(b"9" * 10)), "full"
        assert sender.enqueue(OutgoingMessage(b"9" * 10)), "it has ended: nothing more is said"
    finally:
        release.set()
        sender.finish()
    wait_until(lambda: not any(thread.name == "it" for thread in threading.enumerate()))
    assert written == [b"0" * 10], "the queue was dropped"
