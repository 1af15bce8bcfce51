"""Agents of NIXL, which transfers bytes between machines (UCX) and between memory and files (POSIX, GDS).

    agent = NixlAgent("UCX")                                 one back end for each agent
    agent.register(address, nbytes)
    peer = agent.add_remote(metadata_of_the_other_agent)
    local, remote = [NixlDescriptor(address, 4_096)], [NixlDescriptor(remote_address, 4_096)]
    with agent.start_transfer("WRITE", local, remote, peer=peer) as transfer:
        transfer.wait(timeout_s=5.0)

This is the only file that loads the package, and only when an agent is made: without the package, this file can be
imported. An agent and its transfers belong to one thread at a time. NIXL has no event to wait for, and some of its
back ends advance only when they are polled (POSIX submits 64 pieces a poll), so `wait` polls, at growing
intervals.

Source: NIXL 1.5, https://github.com/ai-dynamo/nixl (docs/nixl.md, src/plugins/posix/README.md).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import time
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple, Self

from asr_serve.config import disable_ucx_infiniband
from asr_serve.errors import OptionError, PeerGone, TransportFailed, TransportTimeout

Backend = Literal["UCX", "POSIX", "GDS", "GDS_MT"]
Kind = Literal["DRAM", "VRAM", "FILE"]

ASK_AT_ONCE = 200
"""Polls before the first pause: a small transfer is done by then, and shorter than a pause."""
PAUSE_S, LONGEST_PAUSE_S = 50e-6, 1e-3


class NixlDescriptor(NamedTuple):
    """Range of memory or of a file. `at`: address, or position in the file; `device`: 0, a GPU, or the descriptor."""

    at: int
    nbytes: int
    device: int = 0


def installed() -> bool:
    """Returns whether the package is installed. Loads nothing."""
    return importlib.util.find_spec("nixl") is not None


def missing(backend: Backend) -> str | None:
    """Returns why no agent with this back end can be made here, or None where one can."""
    try:
        NixlAgent(backend).close()
    except OptionError as error:
        return str(error)
    return None


class NixlAgent:
    """Agent: one end of transfers, with one back end.

    `params` go to the back end; `progress` gives it a thread of its own, which UCX needs on the side that only
    receives. Raises OptionError where NIXL is not installed, or cannot load the back end.
    """

    def __init__(
        self,
        backend: Backend,
        params: Mapping[str, str] | None = None,
        *,
        name: str | None = None,
        progress: bool = False,
    ) -> None:
        api = _load()
        self._failures: tuple[type[Exception], ...] = _failures(api)
        self._backend = backend
        self.name = name or f"asr-serve-{os.getpid()}-{time.monotonic_ns():x}"
        failures: tuple[type[Exception], ...] = (*self._failures, RuntimeError)
        try:
            config = api.nixl_agent_config(enable_prog_thread=progress, backends=[])
            self._agent: Any = api.nixl_agent(self.name, config)
            self._agent.create_backend(backend, dict(params or {}))
        except failures as error:
            raise OptionError(
                f"NIXL's back end {backend} does not start here ({_told(error)})", todo=_WANTS.get(backend, "")
            ) from error
        self._registered: list[Any] = []

    def register(self, at: int, nbytes: int, *, kind: Kind = "DRAM", device: int = 0) -> object:
        """Registers memory, or a file (its descriptor as `device`), for transfers; returns the entry for `deregister`.
        Raises TransportFailed."""
        try:
            entry = self._agent.register_memory([(at, nbytes, device, "")], kind, backends=[self._backend])
        except self._failures as error:
            raise TransportFailed(f"NIXL does not register {nbytes} bytes of {kind} ({_told(error)})") from error
        self._registered.append(entry)
        return entry

    def deregister(self, entry: object) -> None:
        """Deregisters memory. No transfer of it may be in progress. Raises TransportFailed."""
        self._registered.remove(entry)
        try:
            self._agent.deregister_memory(entry, backends=[self._backend])
        except self._failures as error:
            raise TransportFailed(f"NIXL does not let go of memory ({_told(error)})") from error

    def metadata(self) -> bytes:
        """Returns the metadata with which another agent can reach this one and write to memory registered so far."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def add_remote(self, metadata: bytes) -> str:
        """Adds another agent; returns its name, for `start_transfer`. Raises TransportFailed."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except self._failures as error:
            raise TransportFailed(f"NIXL cannot reach the other side ({_told(error)})") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_remote(self, peer: str) -> None:
        """Removes another agent: nothing is sent there any more. Ignores errors of one that is gone already."""
        try:
            self._agent.remove_remote_agent(peer)
        except self._failures:
            return

    def start_transfer(
        self,
        operation: Literal["READ", "WRITE"],
        local: Sequence[NixlDescriptor],
        remote: Sequence[NixlDescriptor],
        *,
        peer: str | None = None,
        local_kind: Kind = "DRAM",
        remote_kind: Kind = "DRAM",
    ) -> NixlTransfer:
        """Starts to copy `local` to `remote` (WRITE) or back (READ), by descriptors of equal length. `peer`: owner of
        `remote`, None for this agent's own (a file). Raises PeerGone, TransportFailed."""
        agent = self._agent
        try:
            local_descriptors, remote_descriptors = (
                agent.get_xfer_descs(list(local), local_kind),
                agent.get_xfer_descs(list(remote), remote_kind),
            )
            handle = agent.initialize_xfer(
                operation, local_descriptors, remote_descriptors, peer or self.name, b"", [self._backend]
            )
        except self._failures as error:
            raise self._error(error, peer) from error
        transfer = NixlTransfer(self, handle, peer)
        with contextlib.ExitStack() as undo:
            undo.callback(transfer.release)
            transfer.post()
            undo.pop_all()
        return transfer

    def close(self) -> None:
        """Deregisters everything, and closes the agent. Its transfers must have been released. Idempotent."""
        while self._agent is not None and self._registered:
            try:
                self.deregister(self._registered[-1])
            except TransportFailed:
                continue
        self._agent = None

    def _error(self, error: Exception, peer: str | None) -> TransportFailed | PeerGone:
        if type(error).__name__ == "nixlRemoteDisconnectError":
            return PeerGone(f"{peer} hung up")
        return TransportFailed(f"NIXL's back end {self._backend} failed ({_told(error)})")


class NixlTransfer:
    """Started transfer. Release it, or leave its `with`, whatever its result."""

    def __init__(self, agent: NixlAgent, handle: Any, peer: str | None) -> None:
        self._agent, self._handle, self._peer = agent, handle, peer
        self._state = "PROC"
        self._failure: PeerGone | TransportFailed | None = None

    def post(self) -> None:
        self._step(lambda: self._agent._agent.transfer(self._handle))

    def poll(self) -> bool:
        """Polls once, which advances the back end; returns whether all is transferred. Raises PeerGone,
        TransportFailed."""
        if self._failure is not None:
            raise self._failure
        if self._state == "PROC":
            self._step(lambda: self._agent._agent.check_xfer_state(self._handle))
        return self._state == "DONE"

    def wait(self, timeout_s: float) -> None:
        """Waits until the transfer is complete. Raises TransportTimeout, PeerGone, TransportFailed; after
        each of these a write may still be in progress until the agents have disconnected."""
        until = time.monotonic() + timeout_s
        polls, pause_s = 0, PAUSE_S
        while not self.poll():
            polls += 1
            if polls < ASK_AT_ONCE:
                continue
            if time.monotonic() > until:
                raise TransportTimeout(f"nothing more came from NIXL in {timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)

    def release(self) -> None:
        """Releases the transfer. One in progress is cancelled where the back end can. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        if self._state == "PROC":
            self._failure = TransportFailed("the transfer was called off")
        try:
            self._agent._agent.release_xfer_handle(handle)
        except self._agent._failures:
            return  # still in progress: NIXL keeps it on a list until the agent is closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _step(self, ask: Any) -> None:
        try:
            self._state = ask()
        except self._agent._failures as error:
            self._failure = self._agent._error(error, self._peer)
            raise self._failure from error
        if self._state == "ERR":
            self._failure = TransportFailed(f"NIXL's back end {self._agent._backend} failed")
            raise self._failure


_CUFILE = "GPUDirect Storage wants an NVIDIA GPU, its driver with nvidia-fs, and libcufile (package nvidia-cufile)"
_WANTS = {"GDS": _CUFILE, "GDS_MT": _CUFILE, "POSIX": "take another disk_backend", "UCX": "take another peer_transport"}
"""Advice where a back end does not start."""


def _load() -> ModuleType:
    disable_ucx_infiniband()
    try:
        import nixl
    except ImportError as error:
        raise OptionError(f"NIXL is not installed ({error})", todo="pip install --no-deps nixl nixl-cu12") from error
    _quieten()
    return importlib.import_module(f"{nixl._pkg.__name__}._api")


def _quieten() -> None:
    """Redirects NIXL's log from stdout, where a command's output goes, to the root logger."""
    log = logging.getLogger("nixl")
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.WARNING)
    logging.raiseExceptions = True


def _failures(api: ModuleType) -> tuple[type[Exception], ...]:
    """Returns NIXL's exceptions, which have no common base class."""
    values = vars(api.nixlBind).values()
    return tuple(each for each in values if isinstance(each, type) and issubclass(each, Exception))


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
