"""Tensor parallelism: the group of ranks that share the weights of a decoder, and layers that are split over it.

A column-parallel product has a part of its outputs on each rank: heads of attention, columns of a feed-forward. The
row-parallel product after it has the same part of its inputs, and the ranks sum their results. A vocabulary is split
by tokens. Every rank runs the same model on its part of the weights; a group of one rank splits nothing.

Source: Megatron-LM, arXiv:1909.08053.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.errors import OptionError

if TYPE_CHECKING:
    from asr_serve.devices.interface import Device, Linear, VocabularyMatrix


class Communicator(Protocol):
    """Collective operations of a group: every rank calls them in the same order. They raise RuntimeError when a rank
    is gone, or does not answer in time."""

    def all_reduce(self, x: Tensor) -> None:
        """Sums `x` over all ranks, in place."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """Returns `x` of each rank, in their order, on rank 0; nothing on the others."""


class TensorParallelGroup:
    """Ranks of a tensor-parallel engine as a model sees them: its own, and how many there are."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._communicator: Communicator | None = None

    def connect(self, communicator: Communicator) -> None:
        """Sets the communicator. Call it before the first collective of a group of several."""
        self._communicator = communicator

    def part(self, total: int) -> slice:
        """Part of `total` heads, columns or tokens that this rank has; parts differ by one at most."""
        return slice(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def count(self, total: int) -> int:
        """Length of this rank's part of `total`."""
        part = self.part(total)
        return int(part.stop - part.start)

    def check_heads(self, *heads: int) -> None:
        """Raises OptionError for numbers of heads that cannot be split evenly."""
        if any(count % self.size for count in heads):
            counts = " and ".join(map(str, dict.fromkeys(heads)))
            allowed = [size for size in range(1, min(heads) + 1) if not any(count % size for count in heads)]
            raise OptionError(
                f"tensor_parallel_size={self.size} for a decoder of {counts} heads",
                f"a divisor of its attention heads and of its heads of keys and values: {', '.join(map(str, allowed))}",
                param="tensor_parallel_size",
            )

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of `x` over all ranks; x is overwritten."""
        if self.size > 1:
            assert self._communicator is not None, "a rank computes before its group is connected"
            self._communicator.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Returns `x`, of one shape on all ranks, of each rank on rank 0; nothing on the others."""
        if self.size == 1:
            return [x]
        assert self._communicator is not None, "a rank computes before its group is connected"
        return self._communicator.gather(x)


SINGLE_RANK = TensorParallelGroup()
"""Group of an engine that splits nothing."""


class RowParallelLinear:
    """Linear of which each rank has a part of the inputs: the results of all ranks are summed."""

    def __init__(self, linear: Linear, group: TensorParallelGroup) -> None:
        """`linear`: this rank's part; the bias is rank 0's."""
        self.linear, self.group = linear, group

    def __call__(self, x: Tensor, *, gelu: bool = False, add: Tensor | None = None) -> Tensor:
        if not gelu:  # rank 0 adds, inside its product
            return self.group.all_reduce(self.linear(x, add=add if self.group.rank == 0 else None))
        y = F.gelu(self.group.all_reduce(self.linear(x)))
        return y if add is None else y + add

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes


def row_parallel(
    make: Callable[[Tensor, Tensor | None], Linear],
    group: TensorParallelGroup,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Linear:
    """Returns the Linear of `weight` (out, in) and `bias` (out,), given whole, with this rank's part of the inputs.
    `make`: makes a linear layer, of the device."""
    if group.size == 1:
        return make(weight, bias)
    part = weight[:, group.part(weight.shape[1])]
    return RowParallelLinear(make(part, None if group.rank else bias), group)


class ParallelVocabulary:
    """VocabularyMatrix of which each rank has a part of the tokens: embeddings are summed over the ranks, logits are
    gathered on rank 0. Another rank returns the logits of its own tokens."""

    def __init__(self, device: Device, weight: Tensor) -> None:
        """`weight` (vocab, dim): the whole matrix."""
        self.group, self.tokens = device.group, len(weight)
        self.first, self.own = self.group.part(len(weight)).start, self.group.count(len(weight))
        self.widest = -(-self.tokens // self.group.size)
        self.part = device.vocabulary(weight[self.group.part(len(weight))])
        self.weight: Tensor | None = None
        """The whole matrix on rank 0 where logits are not float32, to decide near ties by."""
        if self.part.weight is not None and device.dtype != torch.float32 and not self.group.rank:
            self.weight = weight.to(device.torch_device, device.dtype)

    def __len__(self) -> int:
        return self.tokens

    def embed(self, tokens: Tensor) -> Tensor:
        own = tokens - self.first
        absent = (own < 0) | (own >= self.own)
        return self.group.all_reduce(self.part.embed(own.masked_fill(absent, 0)).masked_fill(absent[:, None], 0))

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.part(x)
        parts = self.group.gather(F.pad(logits, (0, self.widest - self.own)))
        sizes = [TensorParallelGroup(rank, len(parts)).count(self.tokens) for rank in range(len(parts))]
        return torch.cat([part[:, :own] for part, own in zip(parts, sizes, strict=True)], 1) if parts else logits

    @property
    def nbytes(self) -> int:
        return self.part.nbytes + (0 if self.weight is None else self.weight.nbytes)


def parallel_vocabulary(device: Device, weight: Tensor) -> VocabularyMatrix:
    """Returns the VocabularyMatrix of `weight` (vocab, dim), given whole, with this rank's part of the tokens."""
    return device.vocabulary(weight) if device.group.size == 1 else ParallelVocabulary(device, weight)


def stack_parts(group: TensorParallelGroup, tensors: Sequence[Tensor]) -> Tensor:
    """Stacks this rank's part of the outputs of several matrices (out, in), or of their biases (out,)."""
    return torch.cat([tensor[group.part(len(tensor))] for tensor in tensors])
