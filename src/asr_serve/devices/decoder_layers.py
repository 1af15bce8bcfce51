"""Layers of an encoder-decoder model's decoder in one native call, where all of their products are native.

The same as tensor operations, which is its oracle and runs everywhere else, stands in the models' own layers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from asr_serve.devices.bf16 import CpuBf16Linear
from asr_serve.devices.int8 import CpuInt8Linear
from asr_serve.devices.interface import Device, LayerNorm, Linear
from asr_serve.models.packing import PagedKeyValues


class DecoderLayerParts(NamedTuple):
    """Norms and products of a layer: self-attention, cross-attention and feed-forward, each after its norm and with a
    residual."""

    own_norm: LayerNorm
    qkv: Linear
    own_out: Linear
    cross_norm: LayerNorm
    query: Linear
    cross_out: Linear
    feed_norm: LayerNorm
    up: Linear
    down: Linear


class DecoderLayer(Protocol):
    """Layer of a decoder as tensor operations."""

    @property
    def parts(self) -> DecoderLayerParts: ...

    def __call__(
        self, index: int, x: Tensor, positions: Tensor, own: PagedKeyValues, audio: PagedKeyValues, kernels: ModuleType
    ) -> tuple[Tensor, Tensor]:
        """Computes the layer over x (rows, width), and writes keys and values of its `positions` (rows,) into layer
        `index` of the pages.

        Returns: x after the layer, and its cross-attention queries (rows, heads * head_dim).
        """


class DecoderStack:
    """All layers of a decoder: in one native call where that is possible, else one after the other."""

    def __init__(
        self,
        device: Device,
        layers: Sequence[DecoderLayer],
        *,
        heads: int,
        head_dim: int,
        scale: float,
        angles: tuple[Tensor, Tensor] | None = None,
        gated: bool = False,
    ) -> None:
        """`scale`, `angles`, `gated`: see NativeDecoderLayers.build."""
        self._layers, self._kernels = layers, device.kernels
        parts = [layer.parts for layer in layers]
        self.native = NativeDecoderLayers.build(
            device, parts, heads=heads, head_dim=head_dim, scale=scale, angles=angles, gated=gated
        )

    def __call__(
        self, x: Tensor, own: PagedKeyValues, audio: PagedKeyValues, query_layers: Collection[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Computes all layers over x (rows, width), which may be overwritten, and writes keys and values of its
        positions.

        Returns: x after the layers, and for each of `query_layers`, which ascend, its cross-attention queries (rows,
            heads * head_dim).
        """
        if self.native is not None:
            return x, self.native(x, own, audio, query_layers)
        queries, positions = [], own.lengths - 1
        for index, layer in enumerate(self._layers):
            x, query = layer(index, x, positions, own, audio, self._kernels)
            queries += [query] if index in query_layers else []
        return x, queries


class NativeDecoderLayers:
    """All layers of a decoder as one call of the kernels for each pass."""

    def __init__(self, layers: Any, heads: int, head_dim: int) -> None:
        """`layers`: the kernels' DecoderLayers."""
        self._layers, self._query_width = layers, heads * head_dim

    @classmethod
    def build(
        cls,
        device: Device,
        layers: Sequence[DecoderLayerParts],
        *,
        heads: int,
        head_dim: int,
        scale: float,
        angles: tuple[Tensor, Tensor] | None = None,
        gated: bool = False,
    ) -> NativeDecoderLayers | None:
        """Returns the layers, or None where the kernels have no such call, or a product is not one of theirs. Raises
        ValueError for products whose shapes do not fit, and for one with a norm fused in: the layer has it already.

        Args:
            scale: of products of queries and keys.
            angles: cosines and sines (positions, half) of the rotation of queries and keys; None: there is none.
            gated: whether `up` makes counterparts and then as many gates for silu; else GELU follows it.
        """
        kind = device.kernels.DecoderLayers
        products = [part for layer in layers for part in layer if not isinstance(part, LayerNorm)]
        if kind is None or not all(type(each) in (CpuInt8Linear, CpuBf16Linear) for each in products):
            return None
        cos, sin = angles or (None, None)
        norm = layers[0].own_norm
        made = kind(len(norm.weight), heads, head_dim, scale, norm.eps, cos, sin, gated)
        for layer in layers:
            made.add(*(_float_norm(part) if isinstance(part, LayerNorm) else _product(part) for part in layer))
        return cls(made, heads, head_dim)

    def __call__(
        self, x: Tensor, own: PagedKeyValues, audio: PagedKeyValues, query_layers: Collection[int]
    ) -> list[Tensor]:
        """Computes all layers of x (rows, width) in place, and writes keys and values of its positions. Rows at the end
        of the batch whose pages are page 0 are not computed.

        Returns: for each of `query_layers` its cross-attention queries (rows, heads * head_dim).
        """
        queries = [x.new_empty(len(x), self._query_width) for _ in query_layers]
        self._layers.run(
            x,
            own.pool,
            own.block_tables,
            own.lengths,
            audio.pool,
            audio.block_tables,
            audio.lengths,
            audio.int8,
            [*zip(query_layers, queries, strict=True)],
        )
        return queries


def _float_norm(norm: LayerNorm) -> tuple[Tensor, Tensor | None]:
    """Weight and bias (width,) as the kernels take them."""
    return norm.weight.float().contiguous(), None if norm.bias is None else norm.bias.float().contiguous()


def _product(linear: Any) -> tuple[Any, int]:
    """The kernels' product of a linear layer, and the bits of its activations: 0 for bf16."""
    return linear.product, linear.bits if isinstance(linear, CpuInt8Linear) else 0
