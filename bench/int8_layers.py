"""Which layers a model's 8 bits may be in: the error of each layer alone, on speech that no error rate is measured on.

    python bench/int8_layers.py --speech DIR --model moonshine-tiny-en --json int8-layers-moonshine-tiny-en.json

DIR holds FLAC files, whose text need not be known. The model in float32 transcribes them; then each variant predicts
the tokens of that answer one after another, and its error is how far its probabilities of the next token are from
float32's: the mean Kullback-Leibler divergence in nats. Variants are bf16 throughout, and bf16 with one layer, a group
of layers, or all of them in 8-bit weights and activations; the keys and values of cross-attention, in 8 bits with a
scale for each position of a head, count as a layer. Layers that alone add more error than bf16 has throughout are
`kept` in bf16: they are what stands in the model's card (models/registry.AsrCard.int8). The first and the last layer,
which are the convolutions and the vocabulary, always are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import clips
import machine
import torch
from clips import Audio
from parity import BATCH, Ours
from torch import Tensor

from asr_serve.decoding.search_options import SearchOptions
from asr_serve.devices.cpu import CROSS_KV, CpuDevice
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.models.registry import asr_card


class ChosenLayers(CpuDevice):
    """A bf16 CPU that computes the named layers in 8 bits, whether that is faster or not."""

    def __init__(self, chosen: frozenset[str] | None) -> None:
        """`chosen`: names of layers; None: all of them."""
        super().__init__(torch.bfloat16, "auto")
        self.chosen = chosen
        self.layers: list[str] = []
        """Names of all layers that may be chosen, in the order in which the model took them."""

    def _quantizes(self, layer: str | None) -> bool:
        if layer is None:
            return False
        self.layers.append(layer)
        return self._chooses(layer)

    @property
    def int8_cross_kv(self) -> bool:
        return self._chooses(CROSS_KV)

    def _chooses(self, layer: str) -> bool:
        return self.chosen is None or layer in self.chosen


class Calibration:
    """float32's answers and probabilities on the speech, and the errors of variants against them."""

    def __init__(self, model: str, audio: Sequence[Audio]) -> None:
        self.checkpoint = AsrCheckpoint.find(model, None)
        card = asr_card(model)
        self.batches = [audio[start : start + BATCH] for start in range(0, len(audio), BATCH)]
        exact = self._network(CpuDevice(torch.float32))
        start = exact.network.prompt_tokens(SearchOptions(language=card.language() or "en"))
        self.frames, self.tokens, self.logprobs = [], [], []
        self.skipped = len(start) - 1
        """First predictions that are those of the prompt."""
        for batch in self.batches:
            frames = exact.frames(batch)
            limits = [int(len(clip) / clips.RATE_HZ * card.tokens_per_s) + len(start) for clip in batch]
            found = exact.greedy(frames, limits, start)
            self.tokens.append([row[:-1] for row in found])
            self.frames.append(torch.cat(frames))
            self.logprobs.append(self._predicted(exact, frames, self.tokens[-1]))
        self.positions = sum(map(len, self.logprobs))
        bf16 = self._network(ChosenLayers(frozenset()))
        self.bf16_frames = [bf16.frames(batch) for batch in self.batches]

    def _network(self, device: CpuDevice) -> Ours:
        network: Any = self.checkpoint.load_model(device)
        return Ours(network, device)

    def _predicted(self, ours: Ours, frames: Sequence[Tensor], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Log probabilities (positions, vocabulary) after each token of each clip."""
        logits = ours.logits(frames, tokens)
        return torch.cat([each[self.skipped :] for each in logits]).log_softmax(-1)

    def layers(self) -> list[str]:
        device = ChosenLayers(frozenset())
        self._network(device)
        return [*device.layers, CROSS_KV]

    def measure(self, name: str, chosen: frozenset[str] | None) -> dict[str, Any]:
        """A row: errors of the variant with those layers in 8 bits."""
        ours = self._network(ChosenLayers(chosen))
        encodes_as_bf16 = chosen is not None and not any(layer.startswith("encoder.") for layer in chosen)
        divergence, same, off, size = 0.0, 0, 0.0, 0.0
        for batch, bf16_frames, exact_frames, tokens, exact in zip(
            self.batches, self.bf16_frames, self.frames, self.tokens, self.logprobs, strict=True
        ):
            frames = bf16_frames if encodes_as_bf16 else ours.frames(batch)
            off += float((torch.cat(frames).float() - exact_frames).square().sum())
            size += float(exact_frames.square().sum())
            found = self._predicted(ours, frames, tokens)
            divergence += float((exact.exp() * (exact - found)).sum())
            same += int((exact.argmax(-1) == found.argmax(-1)).sum())
        row = {
            "name": name,
            "divergence_nats": float(f"{divergence / self.positions:.4g}"),
            "frames_error": float(f"{(off / size) ** 0.5:.4g}"),
            "same_tokens_percent": round(100 * same / self.positions, 2),
        }
        print(row, file=sys.stderr, flush=True)
        return row


def run(model: str, audio: Sequence[Audio], threads: int, alone: bool) -> dict[str, Any]:
    """`alone`: whether each layer is measured alone, too."""
    measured = Calibration(model, audio)
    names = measured.layers()
    base = measured.measure("bf16", frozenset())
    rows = [base, measured.measure("all layers", None)]
    for side in ("encoder", "decoder"):
        group = frozenset(name for name in names if name.startswith(f"{side}."))
        rows.append(measured.measure(f"{side} layers", group))
    layers = [measured.measure(name, frozenset({name})) for name in names if alone]
    kept = [row["name"] for row in layers if row["divergence_nats"] > 2 * base["divergence_nats"]]
    if kept:
        rows.append(measured.measure("all layers but those kept", frozenset(names) - frozenset(kept)))
    found = {
        "bench": "int8_layers",
        "machine": machine.describe(threads),
        "model": model,
        "clips": len(audio),
        "audio_s": round(clips.seconds(audio), 1),
        "positions": measured.positions,
        "rows": rows + layers,
    }
    return {**found, "kept": kept} if alone else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speech", type=Path, required=True, metavar="DIR", help="folder of FLAC files")
    parser.add_argument("--model", default="moonshine-tiny-en", help="an encoder-decoder model (moonshine-tiny-en)")
    parser.add_argument("--clips", type=int, default=20, metavar="N", help="how many (20)")
    parser.add_argument("--json", type=Path, help="write here, too")
    parser.add_argument("--groups-only", action="store_true", help="no layer alone: encoder, decoder, all of them")
    args = parser.parse_args()
    audio = [clip.audio for clip in clips.without_text(args.speech, args.clips)]
    machine.tell(args.json, run(args.model, audio, machine.cores(), not args.groups_only))


if __name__ == "__main__":
    main()
