"""NIXL's back ends for files: POSIX (with io_uring), and GPUDirect Storage."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from asr_serve.errors import DiskFailed, OptionError, PeerGone, TransportFailed, TransportTimeout
from asr_serve.transfer.disk.base import DiskBackend, IoPiece, split_extents
from asr_serve.transfer.disk.nameless_file import FileExtent, NamelessFile, address
from asr_serve.transfer.nixl_agent import Backend, NixlAgent, NixlDescriptor, NixlTransfer

UNDER_WAY, PIECE_BYTES = 32, 4 << 20
PAUSE_S = 100e-6
"""Pause after a round of polls without a completion: shorter than the disk takes for the pieces in flight."""
MAX_WAIT_S = 60.0
"""Limit of the wait for pieces in flight after a failure. Then the back end is abandoned."""

LEAKED_BUFFERS: list[object] = []
"""Transfers that never ended, and all that they may access, referenced as long as this process lives: they would
otherwise write into memory that was freed and reused."""

log = logging.getLogger("asr_serve.disk")

PARAMS: dict[Backend, dict[str, str]] = {"POSIX": {"use_uring": "true"}, "GDS": {}}


class NixlDiskBackend(DiskBackend):
    """Disk back end by NIXL. Raises OptionError where NIXL is not installed, or cannot load its back end."""

    name = "nixl"
    backend: Backend = "POSIX"

    def __init__(self, file: NamelessFile) -> None:
        self._idle: list[NixlAgent] = []
        self._lost: DiskFailed | None = None
        """Failure after which the back end is not used any more."""
        super().__init__(file)
        try:
            self._idle.append(self._agent())
        except OptionError as error:
            raise OptionError(
                f"disk_backend {self.name}: {error.came}", error.allowed, error.todo, param="disk_backend"
            ) from error

    def _agent(self) -> NixlAgent:
        return NixlAgent(self.backend, PARAMS[self.backend])

    def _transfer_extents(self, fd: int, extents: list[FileExtent], write: bool) -> Iterator[int]:
        self._expect_alive()
        try:
            agent = self._idle.pop()
        except IndexError:
            agent = self._agent()
        try:
            yield from self._run_pieces(agent, fd, extents, write)
        except (TransportFailed, PeerGone) as error:
            raise DiskFailed(f"the disk cannot {'write' if write else 'read'} ({error.came})") from error
        finally:
            if agent not in LEAKED_BUFFERS:
                self._idle.append(agent)

    def _run_pieces(self, agent: NixlAgent, fd: int, extents: list[FileExtent], write: bool) -> Iterator[int]:
        yield from (index for index, (_, memory) in enumerate(extents) if not memory.nbytes)
        remaining = [memory.nbytes for _, memory in extents]
        with contextlib.ExitStack() as registrations:
            spans = {(address(memory), memory.nbytes) for _, memory in extents if memory.nbytes}
            for start, nbytes in spans:
                registrations.callback(agent.deregister, agent.register(start, nbytes))
            registrations.callback(agent.deregister, agent.register(0, self.nbytes, kind="FILE", device=fd))
            under_way: list[tuple[IoPiece, NixlTransfer]] = []
            registrations.callback(self._drain, under_way, registrations, agent, extents)
            pieces = split_extents(extents, PIECE_BYTES)
            while True:
                while len(under_way) < UNDER_WAY and (piece := next(pieces, None)):
                    under_way.append((piece, self._start(agent, fd, piece, write)))
                if not under_way:
                    return
                finished = [each for each in under_way if each[1].poll()]
                self._file.expect_open()
                self._expect_alive()
                if not finished:
                    time.sleep(PAUSE_S)
                for piece, transfer in finished:
                    under_way.remove((piece, transfer))
                    transfer.release()
                    remaining[piece.extent] -= piece.memory.nbytes
                    if not remaining[piece.extent]:
                        yield piece.extent

    def _start(self, agent: NixlAgent, fd: int, piece: IoPiece, write: bool) -> NixlTransfer:
        source = NixlDescriptor(address(piece.memory), piece.memory.nbytes)
        target = NixlDescriptor(piece.offset, piece.memory.nbytes, fd)
        return agent.start_transfer("WRITE" if write else "READ", [source], [target], remote_kind="FILE")

    def _drain(
        self,
        under_way: list[tuple[IoPiece, NixlTransfer]],
        held: contextlib.ExitStack,
        agent: NixlAgent,
        extents: list[FileExtent],
    ) -> None:
        """Waits until the disk accesses none of this memory any more. Raises DiskFailed, `still_under_way`, after
        MAX_WAIT_S: then nothing of `held` is released, and the back end accepts no more transfers."""
        deadline, timed_out = time.monotonic() + MAX_WAIT_S, None
        for piece, transfer in list(under_way):
            try:
                transfer.wait(max(0.0, deadline - time.monotonic()))
            except TransportTimeout as timeout:
                timed_out = timeout
                continue
            except (TransportFailed, PeerGone):
                pass  # it has ended
            transfer.release()
            under_way.remove((piece, transfer))
        if timed_out is not None:
            self._file.keep_open()
            LEAKED_BUFFERS.extend((agent, held.pop_all(), under_way, extents))
            raise self._abandon(len(under_way), extents) from timed_out

    def _abandon(self, count: int, extents: list[FileExtent]) -> DiskFailed:
        nbytes = sum(memory.nbytes for _, memory in extents)
        message = f"{count} transfers of the disk did not end in {MAX_WAIT_S:g} s: it is not used any more"
        self._lost = DiskFailed(message, todo="look after the disk, then load the model again")
        log.error("%s, and %d bytes of memory are never used again", message, nbytes)
        return self._lost

    def _expect_alive(self) -> None:
        if self._lost is not None:
            raise DiskFailed(self._lost.came, self._lost.allowed, self._lost.todo)

    def _release(self) -> None:
        while self._idle:
            self._idle.pop().close()


class GdsDiskBackend(NixlDiskBackend):
    """GPUDirect Storage by NVIDIA's cuFile. Untested: no machine with nvidia-fs was available."""

    name = "gds"
    backend: Backend = "GDS"
