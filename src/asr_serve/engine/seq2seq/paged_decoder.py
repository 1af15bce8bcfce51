"""Decoder of a model over its pages of keys and values, in one process or split over the ranks of a group.

Everything that reads or writes pages goes through here, except for audio that grows in pages
(engine/streaming/incremental_encoder), whose models are never split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.devices.interface import Device
from asr_serve.engine.tensor_parallel import commands
from asr_serve.engine.tensor_parallel.commands import TensorData
from asr_serve.engine.tensor_parallel.rank_processes import RankProcesses
from asr_serve.kernels import PAGE
from asr_serve.models.interfaces import EncoderDecoderModel, IncrementalEncoderDecoderModel
from asr_serve.models.packing import PackedBatch, PagedKeyValues

ForwardFunction = Callable[..., tuple[Tensor, ...]]


class PagedDecoder:
    """A model's decoder and the tensor of its pages. On a rank of a group it is that rank's part, and every rank must
    make the same calls."""

    def __init__(self, model: EncoderDecoderModel, device: Device, pages: int) -> None:
        self.model, self.device = model, device
        self.kv_cache = device.allocate(pages, model.layers, 2, model.heads, model.head_dim * PAGE)
        """Pages (pages, layers, 2, heads, head_dim * PAGE); page 0 is that of padding rows."""
        self.kv_cache[0].zero_()
        self.int8_audio = (
            device.int8_cross_kv and device.group.size == 1 and not isinstance(model, IncrementalEncoderDecoderModel)
        )
        """Whether pages of audio hold 8 bits. Those of growing audio are written frame by frame, as they are; those of
        several ranks are joined head by head."""
        self.query_layers = len(model.alignment.heads)
        """Layers whose cross-attention queries `decode` returns."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in this process."""
        return self.kv_cache[0].nbytes

    @property
    def saved_page_bytes(self) -> int:
        """Bytes of a page with the heads of all ranks, as `read_pages` returns it."""
        return self.page_bytes * self.device.group.size

    def capture(self, function: ForwardFunction) -> ForwardFunction:
        """Returns a function that calls `decode`, recorded where the device can replay it."""
        return self.device.capture(function)

    def decode(
        self,
        tokens: Tensor,
        token_tables: Tensor,
        token_lengths: Tensor,
        audio_tables: Tensor,
        audio_lengths: Tensor,
        logit_positions: Tensor | None = None,
        *embeddings: Tensor,
    ) -> tuple[Tensor, ...]:
        """Decodes one position of each row; see EncoderDecoderModel.decode. `embeddings`: one tensor or none, for a
        model with audio in its prompt."""
        own = PagedKeyValues(self.kv_cache, token_tables, token_lengths)
        audio = self.audio(audio_tables, audio_lengths)
        return self.model.decode(tokens, own, audio, logit_positions, *embeddings)

    def audio(self, tables: Tensor, lengths: Tensor) -> PagedKeyValues:
        """Cross-attention keys and values of rows: tables of their pages, and filled positions."""
        return PagedKeyValues(self.kv_cache, tables, lengths, self.int8_audio)

    def store(self, decoder_input: Tensor, pages: Sequence[int]) -> None:
        """Writes cross-attention keys and values (frames, layers, 2, width) of a recording into its pages."""
        self._write(decoder_input, pages)

    def store_hidden(self, hidden: Tensor, pages: Sequence[int]) -> None:
        """Writes cross-attention keys and values of encoder frames (frames, width) into their pages."""
        padded = F.pad(hidden, (0, 0, 0, -len(hidden) % self.device.frame_block))  # few shapes
        self._write(self.model.cross_keys_values(padded)[: len(hidden)], pages)

    def _write(self, cross: Tensor, pages: Sequence[int]) -> None:
        table = torch.tensor(pages, dtype=torch.int32, device=self.device.torch_device)
        store = self.device.kernels.store_int8 if self.int8_audio else self.device.kernels.store
        store(self.kv_cache, cross, table)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies pages, given as pairs of source and target; no page is both."""
        sources, targets = torch.tensor(copies, device=self.kv_cache.device).T
        self.kv_cache[targets] = self.kv_cache[sources]

    def read_pages(self, pages: Sequence[int]) -> Tensor:
        """Returns a copy of pages on the host, with the heads of all ranks, on rank 0."""
        parts = self.device.group.gather(self.kv_cache[list(pages)])
        return torch.cat([part.cpu() for part in parts], dim=3) if parts else torch.empty(0)

    def write_pages(self, pages: Sequence[int], saved: Tensor) -> None:
        """Writes pages that `read_pages` returned."""
        part = saved[:, :, :, self.device.group.part(saved.shape[3])]
        self.kv_cache[list(pages)] = part.to(self.kv_cache.device)

    def align(
        self, tokens: Tensor, packing: PackedBatch, audio_tables: Tensor, audio_lengths: Tensor, frames: Sequence[int]
    ) -> list[Tensor]:
        """Scores known answers for word times; see EncoderDecoderModel.align."""
        audio = self.audio(audio_tables, audio_lengths)
        return self.model.align(tokens, packing, audio, frames)

    def watch(self, call: Callable[[Callable[[], None]], None]) -> None:
        """Lets the loop notice the death of another rank while it is idle. `call`: runs a function on its thread."""

    def close(self) -> None:
        """Ends the other ranks, if there are any."""


class TensorParallelDecoder(PagedDecoder):
    """Rank 0 of a decoder that is split over processes: it sends every call to the other ranks. Every method raises
    RankLost.

    Times of words come from `align` alone: queries of alignment heads stay on their ranks. `store` takes encoder
    frames in place of keys and values, which each rank computes for its own heads. Steps are not recorded on a CUDA
    device.
    """

    def __init__(self, model: EncoderDecoderModel, device: Device, pages: int, ranks: RankProcesses) -> None:
        super().__init__(model, device, pages)
        self.query_layers, self._ranks = 0, ranks
        with ranks.running(commands.AllocatePages(pages)):
            pass

    def capture(self, function: ForwardFunction) -> ForwardFunction:
        target = self.device.torch_device
        return lambda *inputs: function(*(each.to(target) for each in inputs))

    def decode(
        self,
        tokens: Tensor,
        token_tables: Tensor,
        token_lengths: Tensor,
        audio_tables: Tensor,
        audio_lengths: Tensor,
        logit_positions: Tensor | None = None,
        *embeddings: Tensor,
    ) -> tuple[Tensor, ...]:
        inputs = [tokens, token_tables, token_lengths, audio_tables, audio_lengths]
        inputs += [] if logit_positions is None else [logit_positions, *embeddings]
        with self._ranks.running(commands.DecodeStep([*map(TensorData.pack, inputs)])):
            logits, hidden, *_ = super().decode(*inputs)
        return logits, hidden

    def store(self, decoder_input: Tensor, pages: Sequence[int]) -> None:
        with self._ranks.running(commands.StoreFrames(TensorData.pack(decoder_input), [*pages])):
            self.store_hidden(decoder_input, pages)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        with self._ranks.running(commands.CopyPages([*copies])):
            super().copy_pages(copies)

    def read_pages(self, pages: Sequence[int]) -> Tensor:
        with self._ranks.running(commands.ReadPages([*pages])):
            return super().read_pages(pages)

    def write_pages(self, pages: Sequence[int], saved: Tensor) -> None:
        with self._ranks.running(commands.WritePages([*pages], TensorData.pack(saved))):
            super().write_pages(pages, saved)

    def align(
        self, tokens: Tensor, packing: PackedBatch, audio_tables: Tensor, audio_lengths: Tensor, frames: Sequence[int]
    ) -> list[Tensor]:
        command = commands.AlignAnswers(
            TensorData.pack(tokens),
            packing.frames,
            packing.total,
            TensorData.pack(audio_tables),
            TensorData.pack(audio_lengths),
            [*frames],
        )
        with self._ranks.running(command):
            return super().align(tokens, packing, audio_tables, audio_lengths, frames)

    def watch(self, call: Callable[[Callable[[], None]], None]) -> None:
        self._ranks.watch(lambda: call(self._ranks.report_lost))

    def close(self) -> None:
        self._ranks.close()
