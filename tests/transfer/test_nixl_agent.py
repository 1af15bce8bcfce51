"""NIXL by our one file: agents that meet, transfers that end, and what is said where it is not here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from asr_serve.errors import OptionError, TransportFailed
from asr_serve.transfer import nixl_agent
from asr_serve.transfer.disk import aligned_memory
from asr_serve.transfer.disk.nameless_file import address
from asr_serve.transfer.nixl_agent import NixlAgent, NixlDescriptor

NBYTES = 1 << 20
WAIT_S = 60.0


needs_nixl = pytest.mark.skipif(not nixl_agent.installed(), reason="NIXL is not installed")


@needs_nixl
def test_one_agent_writes_into_the_memory_of_another() -> None:
    there, here = aligned_memory(NBYTES), aligned_memory(NBYTES)
    here[:] = os.urandom(NBYTES)
    receiver, sender = NixlAgent("UCX", progress=True), NixlAgent("UCX")
    assert receiver.name != sender.name
    receiver.register(address(there), NBYTES)
    sender.register(address(here), NBYTES)
    peer = sender.add_remote(receiver.metadata())
    assert peer == receiver.name
    half = NBYTES // 2
    local = [NixlDescriptor(address(here), half), NixlDescriptor(address(here) + half, half)]
    remote = [NixlDescriptor(address(there) + half, half), NixlDescriptor(address(there), half)]
    with sender.start_transfer("WRITE", local, remote, peer=peer) as transfer:
        transfer.wait(WAIT_S)
        assert transfer.poll()
    assert there == bytes(here[half:]) + bytes(here[:half])
    sender.remove_remote(peer)
    sender.remove_remote(peer)
    for agent in (sender, receiver, sender):
        agent.close()


@needs_nixl
def test_memory_that_was_not_registered_is_refused() -> None:
    there, here = aligned_memory(NBYTES), aligned_memory(NBYTES)
    receiver, sender = NixlAgent("UCX", progress=True), NixlAgent("UCX")
    entry = receiver.register(address(there), NBYTES)
    sender.register(address(here), NBYTES)
    peer = sender.add_remote(receiver.metadata())
    with pytest.raises(TransportFailed):
        sender.start_transfer(
            "WRITE", [NixlDescriptor(address(here), 64)], [NixlDescriptor(address(there) + NBYTES, 64)], peer=peer
        )
    with pytest.raises(TransportFailed):
        sender.start_transfer(
            "WRITE", [NixlDescriptor(address(here) + NBYTES, 64)], [NixlDescriptor(address(there), 64)], peer=peer
        )
    with pytest.raises(TransportFailed):
        sender.add_remote(b"no metadata")
    receiver.deregister(entry)
    sender.close()
    receiver.close()


@needs_nixl
def test_a_transfer_that_failed_stays_failed() -> None:
    memory = aligned_memory(NBYTES)
    agent = NixlAgent("POSIX", {"use_uring": "true"})
    agent.register(address(memory), NBYTES)
    fd = os.memfd_create("empty")
    try:
        agent.register(0, NBYTES, kind="FILE", device=fd)
        transfer = agent.start_transfer(
            "READ", [NixlDescriptor(address(memory), NBYTES)], [NixlDescriptor(0, NBYTES, fd)], remote_kind="FILE"
        )
        for _ in range(2):
            with pytest.raises(TransportFailed):
                transfer.wait(WAIT_S)
        transfer.release()
        transfer.release()
        agent.close()
    finally:
        os.close(fd)


CHILD = """
import sys
from asr_serve.transfer.nixl_agent import NixlAgent
NixlAgent("UCX")
left_open = NixlAgent("UCX", progress=True)
print("answer")
"""


@needs_nixl
def test_a_process_with_nixl_exits_cleanly_and_prints_nothing_of_it() -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", CHILD], env=environ, capture_output=True, timeout=WAIT_S, check=False)
    assert (ran.returncode, ran.stdout) == (0, b"answer\n"), ran.stderr


@needs_nixl
def test_a_missing_backend_is_an_error() -> None:
    said = nixl_agent.missing("NONE")  # type: ignore[arg-type]
    assert said is not None
    assert "NIXL's back end NONE does not start here" in said


def test_without_nixl_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(OptionError, match="pip install --no-deps nixl"):
        NixlAgent("UCX")
    assert "NIXL is not installed" in str(nixl_agent.missing("UCX"))


def test_loading_the_file_loads_no_nixl() -> None:
    script = "import sys, asr_serve.transfer.nixl_agent as file; file.installed(); sys.exit('nixl' in sys.modules)"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", script], env=environ, check=False).returncode == 0
