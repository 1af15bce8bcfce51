"""NIXL's back ends for files: POSIX (io_uring below it), and GPUDirect Storage."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from asr_serve.errors import DiskFailed, OptionError, PeerGone, RoadFailed, RoadTimeout
from asr_serve.transfer.disk.base import DiskBackend, IoPiece, split_extents
from asr_serve.transfer.disk.nameless_file import FileExtent, NamelessFile, address
from asr_serve.transfer.nixl_agent import Backend, NixlAgent, NixlDescriptor, NixlTransfer

UNDER_WAY, PIECE_BYTES = 32, 4 << 20
PAUSE_S = 100e-6
"""Between two rounds of questions in which nothing had come: shorter than a disk takes for what is under way."""
MAX_WAIT_S = 60.0
"""So long what is under way is waited for after a failure. Then the road is given up."""

LEAKED_BUFFERS: list[object] = []
"""Transfers that never came to an end, and all that they may touch, kept as long as this process lives: they would
write into memory that was given back when it is another's."""

log = logging.getLogger("asr_serve.disk")

PARAMS: dict[Backend, dict[str, str]] = {"POSIX": {"use_uring": "true"}, "GDS": {}}


class NixlDiskBackend(DiskBackend):
    """Raises OptionError where NIXL is not installed, or cannot load the back end."""

    name = "nixl"
    backend: Backend = "POSIX"

    def __init__(self, file: NamelessFile) -> None:
        self._idle: list[NixlAgent] = []
        self._lost: DiskFailed | None = None
        """Why it carries nothing any more."""
        super().__init__(file)
        try:
            self._idle.append(self._agent())
        except OptionError as error:
            raise OptionError(
                f"disk_road {self.name}: {error.came}", error.allowed, error.todo, param="disk_road"
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
        except (RoadFailed, PeerGone) as error:
            raise DiskFailed(f"the disk cannot {'write' if write else 'read'} ({error.came})") from error
        finally:
            if agent not in LEAKED_BUFFERS:
                self._idle.append(agent)

    def _run_pieces(self, agent: NixlAgent, fd: int, extents: list[FileExtent], write: bool) -> Iterator[int]:
        yield from (index for index, (_, memory) in enumerate(extents) if not memory.nbytes)
        left = [memory.nbytes for _, memory in extents]
        with contextlib.ExitStack() as held:
            spans = {(address(memory), memory.nbytes) for _, memory in extents if memory.nbytes}
            for at, nbytes in spans:
                held.callback(agent.deregister, agent.register(at, nbytes))
            held.callback(agent.deregister, agent.register(0, self.nbytes, kind="FILE", device=fd))
            under_way: list[tuple[IoPiece, NixlTransfer]] = []
            held.callback(self._drain, under_way, held, agent, extents)
            coming = split_extents(extents, PIECE_BYTES)
            while True:
                while len(under_way) < UNDER_WAY and (piece := next(coming, None)):
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
                    left[piece.extent] -= piece.memory.nbytes
                    if not left[piece.extent]:
                        yield piece.extent

    def _start(self, agent: NixlAgent, fd: int, piece: IoPiece, write: bool) -> NixlTransfer:
        here = NixlDescriptor(address(piece.memory), piece.memory.nbytes)
        there = NixlDescriptor(piece.offset, piece.memory.nbytes, fd)
        return agent.start_transfer("WRITE" if write else "READ", [here], [there], remote_kind="FILE")

    def _drain(
        self,
        under_way: list[tuple[IoPiece, NixlTransfer]],
        held: contextlib.ExitStack,
        agent: NixlAgent,
        extents: list[FileExtent],
    ) -> None:
        """Until the disk touches none of this memory any more. Raises DiskFailed, `still_under_way`, where that
        does not come about: nothing of `held` is let go then, and nobody is served any more."""
        until, late = time.monotonic() + MAX_WAIT_S, None
        for piece, transfer in list(under_way):
            try:
                transfer.wait(max(0.0, until - time.monotonic()))
            except RoadTimeout as timeout:
                late = timeout
                continue
            except (RoadFailed, PeerGone):
                pass  # it has come to its end
            transfer.release()
            under_way.remove((piece, transfer))
        if late is not None:
            self._file.keep_open()
            LEAKED_BUFFERS.extend((agent, held.pop_all(), under_way, extents))
            raise self._abandon(len(under_way), extents) from late

    def _abandon(self, count: int, extents: list[FileExtent]) -> DiskFailed:
        nbytes = sum(memory.nbytes for _, memory in extents)
        came = f"{count} transfers of the disk did not end in {MAX_WAIT_S:g} s: it is not used any more"
        self._lost = DiskFailed(came, todo="look after the disk, then load the model again")
        log.error("%s, and %d bytes of memory are never used again", came, nbytes)
        return self._lost

    def _expect_alive(self) -> None:
        if self._lost is not None:
            raise DiskFailed(self._lost.came, self._lost.allowed, self._lost.todo)

    def _release(self) -> None:
        while self._idle:
            self._idle.pop().close()


class GdsDiskBackend(NixlDiskBackend):
    """The same by NVIDIA's cuFile. Not tried: no machine of ours has a GPU with nvidia-fs."""

    name = "gds"
    backend: Backend = "GDS"
