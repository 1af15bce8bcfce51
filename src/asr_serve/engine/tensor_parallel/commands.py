"""Commands of rank 0 to the other ranks of a tensor-parallel engine, and the socket that carries them.

Rank 0 runs the engine's loop. Whatever it does with its model and its pages it sends first, as one command to every
other rank, which does the same with its own part. Nothing but the start is answered: the collectives of the model keep
the ranks together.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

STEP_TIMEOUT_S = 30.0
"""Limit of a step on any rank: half of what the supervisor of an engine process waits for a sign of life."""
HEADER = struct.Struct("<Q")
"""Length in bytes of the message that follows."""
MAX_MESSAGE_BYTES = 8 << 30
"""Bound of a message: an hour's encoder frames are far below it."""


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Model and place of a rank: the first message to it."""

    model: str
    weights: str
    """Folder of the checkpoint."""
    device: str
    dtype: str
    quantize: str
    size: int
    rank: int = 1
    timeout_s: float = STEP_TIMEOUT_S
    """Limit of a collective operation, and of the sending of a command."""


class TensorData(msgspec.Struct, frozen=True, array_like=True):
    """Tensor in a message: name of its dtype, shape, numbers."""

    dtype: str
    shape: tuple[int, ...]
    data: bytearray

    @classmethod
    def pack(cls, tensor: Tensor) -> TensorData:
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), bytearray(raw.numpy().data))

    def tensor(self, device: torch.device) -> Tensor:
        """Returns the tensor on a device. It shares the message's memory on the CPU."""
        dtype = DTYPES[self.dtype]
        if not self.data:
            return torch.empty(self.shape, dtype=dtype, device=device)
        return torch.frombuffer(self.data, dtype=dtype).view(self.shape).to(device)


DTYPES = {str(each).removeprefix("torch."): each for each in (torch.int32, torch.int64, torch.float32, torch.bfloat16)}
"""Types of tensors in messages by name."""


class AllocatePages(msgspec.Struct, frozen=True, tag=True):
    """Allocates the pool of keys and values; the first command of all."""

    pages: int


class DecodeStep(msgspec.Struct, frozen=True, tag=True):
    """Decodes a position of each row: the arguments of PagedDecoder.decode."""

    inputs: list[TensorData]


class StoreFrames(msgspec.Struct, frozen=True, tag=True):
    """Computes cross-attention keys and values of encoder frames, and stores them in pages."""

    hidden: TensorData
    pages: list[int]


class CopyPages(msgspec.Struct, frozen=True, tag=True):
    """Copies pages, from and to."""

    copies: list[tuple[int, int]]


class ReadPages(msgspec.Struct, frozen=True, tag=True):
    """Sends the contents of pages to rank 0, for offload."""

    pages: list[int]


class WritePages(msgspec.Struct, frozen=True, tag=True):
    """Writes this rank's heads of offloaded pages."""

    pages: list[int]
    saved: TensorData


class AlignAnswers(msgspec.Struct, frozen=True, tag=True):
    """Scores known answers for word times: the arguments of PagedDecoder.align."""

    tokens: TensorData
    positions: list[int]
    """Positions of each row; all together, padding included, are `total`."""
    total: int
    audio_tables: TensorData
    audio_lengths: TensorData
    frames: list[int]


Command = AllocatePages | DecodeStep | StoreFrames | CopyPages | ReadPages | WritePages | AlignAnswers


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """The rank has loaded its part of the weights."""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The rank could not load its part; `reason` is the error's message."""

    reason: str


RankReport = RankReady | RankFailed

encode = msgspec.msgpack.Encoder().encode
decode_spec = msgspec.msgpack.Decoder(RankSpec).decode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(RankReport).decode


class MessageSocket(NamedTuple):
    """Messages over a stream socket, each after its length."""

    end: socket.socket

    def send(self, message: bytes) -> None:
        """Sends a message. Raises OSError when the other side is gone, or takes nothing for the socket's timeout."""
        self.end.sendall(HEADER.pack(len(message)))
        self.end.sendall(message)

    def receive(self) -> bytes | None:
        """Receives the next message; None when the other side is gone. Raises OSError after the socket's timeout."""
        header = self._receive_exactly(HEADER.size)
        if header is None:
            return None
        (length,) = HEADER.unpack(header)
        if length > MAX_MESSAGE_BYTES:
            raise OSError(f"a message of {length} bytes")
        found = self._receive_exactly(length)
        return None if found is None else bytes(found)

    def _receive_exactly(self, count: int) -> bytearray | None:
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            received = self.end.recv_into(view[at:])
            if not received:
                return None
            at += received
        return data
