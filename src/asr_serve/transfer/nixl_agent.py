"""NIXL, which carries bytes between machines (UCX) and between memory and files (POSIX, GDS): what we use of it.

    agent = Agent("UCX")                                     # one back end an agent
    agent.register(address, nbytes)
    peer = agent.meet(metadata_of_the_other_agent)
    with agent.start("WRITE", [Span(address, 4_096)], [Span(there, 4_096)], peer=peer) as transfer:
        transfer.wait(timeout_s=5.0)

The only file that loads the package, and only when an agent is made: without it, this can be imported. An agent
and what came from it belong to one thread at a time. NIXL has no event to wait for, and some of its back ends get
no further unless they are asked (POSIX submits 64 pieces a question), so `wait` asks again and again, less often
as time goes by.

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
from types import ModuleType, TracebackType
from typing import Any, Literal, NamedTuple, Self

from asr_serve.config import disable_ucx_infiniband
from asr_serve.errors import OptionError, PeerGone, RoadFailed, RoadTimeout

Backend = Literal["UCX", "POSIX", "GDS", "GDS_MT"]
Kind = Literal["DRAM", "VRAM", "FILE"]

ASK_AT_ONCE = 200
"""Questions before the first pause: a small transfer is done by then, and a pause is longer than it."""
PAUSE_S, LONGEST_PAUSE_S = 50e-6, 1e-3


class NixlDescriptor(NamedTuple):
    """A stretch of memory or of a file. `at`: address, or position in the file; `device`: 0, a GPU, or the file's
    descriptor."""

    at: int
    nbytes: int
    device: int = 0


def installed() -> bool:
    """Whether the package is here. Loads nothing."""
    return importlib.util.find_spec("nixl") is not None


def missing(backend: Backend) -> str | None:
    """Why there can be no agent with this back end here, or None where there can."""
    try:
        NixlAgent(backend).close()
    except OptionError as error:
        return str(error)
    return None


class NixlAgent:
    """One end of transfers, with one back end.

    `params` go to the back end; `progress` gives it a thread of its own, which UCX wants on the side that only
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
                f"NIXL's back end {backend} does not start here ({_told(error)})",
                todo=_WANTS.get(backend, ""),
            ) from error
        self._registered: list[Any] = []

    def register(self, at: int, nbytes: int, *, kind: Kind = "DRAM", device: int = 0) -> object:
        """Let transfers touch so much memory, or a file (its descriptor as `device`); for `forget`.

        Raises RoadFailed.
        """
        try:
            entry = self._agent.register_memory([(at, nbytes, device, "")], kind, backends=[self._backend])
        except self._failures as error:
            raise RoadFailed(f"NIXL does not register {nbytes} bytes of {kind} ({_told(error)})") from error
        self._registered.append(entry)
        return entry

    def deregister(self, entry: object) -> None:
        """No transfer touches it any more. Not while one that does is under way."""
        self._registered.remove(entry)
        try:
            self._agent.deregister_memory(entry, backends=[self._backend])
        except self._failures as error:
            raise RoadFailed(f"NIXL does not let go of memory ({_told(error)})") from error

    def metadata(self) -> bytes:
        """What another agent needs to `meet` this one and to write to what was registered until now."""
        found: bytes = self._agent.get_agent_metadata()
        return found

    def add_remote(self, metadata: bytes) -> str:
        """Make another agent's acquaintance; returns its name, for `start`. Raises RoadFailed."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except self._failures as error:
            raise RoadFailed(f"NIXL cannot reach the other side ({_told(error)})") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_remote(self, peer: str) -> None:
        """Forget another agent: nothing goes there any more. Quiet where it is gone already."""
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
        """Begin to copy `local` to `remote` (WRITE) or back (READ), span by span of equal length.

        `peer`: whose `remote` is, None for this agent's own (a file). Raises PeerGone, RoadFailed.
        """
        agent = self._agent
        try:
            here, there = (
                agent.get_xfer_descs(list(local), local_kind),
                agent.get_xfer_descs(list(remote), remote_kind),
            )
            handle = agent.initialize_xfer(operation, here, there, peer or self.name, b"", [self._backend])
        except self._failures as error:
            raise self._error(error, peer) from error
        transfer = NixlTransfer(self, handle, peer)
        with contextlib.ExitStack() as undo:
            undo.callback(transfer.release)
            transfer.post()
            undo.pop_all()
        return transfer

    def close(self) -> None:
        """Idempotent. What it registered is registered no more; its transfers must have been released."""
        while self._agent is not None and self._registered:
            try:
                self.deregister(self._registered[-1])
            except RoadFailed:
                continue
        self._agent = None

    def _error(self, error: Exception, peer: str | None) -> RoadFailed | PeerGone:
        if type(error).__name__ == "nixlRemoteDisconnectError":
            return PeerGone(f"{peer} hung up")
        return RoadFailed(f"NIXL's back end {self._backend} failed ({_told(error)})")


class NixlTransfer:
    """One that was begun. Release it, or leave its `with`, whatever became of it."""

    def __init__(self, agent: NixlAgent, handle: Any, peer: str | None) -> None:
        self._agent, self._handle, self._peer = agent, handle, peer
        self._state = "PROC"
        self._failure: PeerGone | RoadFailed | None = None

    def post(self) -> None:
        self._step(lambda: self._agent._agent.transfer(self._handle))

    def poll(self) -> bool:
        """Ask once, and so let the back end work. Raises PeerGone, RoadFailed."""
        if self._failure is not None:
            raise self._failure
        if self._state == "PROC":
            self._step(lambda: self._agent._agent.check_xfer_state(self._handle))
        return self._state == "DONE"

    def wait(self, timeout_s: float) -> None:
        """Until it is there. Raises RoadTimeout, PeerGone, RoadFailed; after each of these what was to be written
        may still be written, until the agents have parted."""
        until = time.monotonic() + timeout_s
        asked, pause_s = 0, PAUSE_S
        while not self.poll():
            asked += 1
            if asked < ASK_AT_ONCE:
                continue
            if time.monotonic() > until:
                raise RoadTimeout(f"nothing more came from NIXL in {timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)

    def release(self) -> None:
        """Idempotent. One that is under way is called off where the back end can."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        if self._state == "PROC":
            self._failure = RoadFailed("the transfer was called off")
        try:
            self._agent._agent.release_xfer_handle(handle)
        except self._agent._failures:
            return  # it is still being worked on: NIXL keeps it on a list until the agent goes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _step(self, ask: Any) -> None:
        try:
            self._state = ask()
        except self._agent._failures as error:
            self._failure = self._agent._error(error, self._peer)
            raise self._failure from error
        if self._state == "ERR":
            self._failure = RoadFailed(f"NIXL's back end {self._agent._backend} failed")
            raise self._failure


_CUFILE = "GPUDirect Storage wants an NVIDIA GPU, its driver with nvidia-fs, and libcufile (package nvidia-cufile)"
_WANTS = {
    "GDS": _CUFILE,
    "GDS_MT": _CUFILE,
    "POSIX": "take another disk_road",
    "UCX": "take another peer_road",
}
"""What to do where a back end does not start."""


def _load() -> ModuleType:
    disable_ucx_infiniband()
    try:
        import nixl
    except ImportError as error:
        raise OptionError(
            f"NIXL is not installed ({error})",
            todo="pip install --no-deps nixl nixl-cu12",
        ) from error
    _quieten()
    return importlib.import_module(f"{nixl._pkg.__name__}._api")


def _quieten() -> None:
    """It writes to stdout, where a command's answer goes: what it says goes the way of every other log."""
    log = logging.getLogger("nixl")
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.WARNING)
    logging.raiseExceptions = True


def _failures(api: ModuleType) -> tuple[type[Exception], ...]:
    """NIXL's exceptions, which have no base of their own."""
    found = vars(api.nixlBind).values()
    return tuple(each for each in found if isinstance(each, type) and issubclass(each, Exception))


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
