"""Our Moonshine beside the vendor's own graphs, number for number, on real speech.

    python bench/parity.py --data DIR --json parity.json

The same clips, whole, through the encoder and a plain greedy search of each: no voice activity, no batching
policy, no fall-back. The graphs hold 8-bit weights, which are exactly ours, but also quantise activations as
they go; so frames differ a little and now and then a word does. The texts that differ are listed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import clips
import machine
import numpy as np
import torch
from clips import Audio
from peers import OnnxLoop
from torch import Tensor

from asr_serve import devices
from asr_serve.kernels import PAGE
from asr_serve.models.checkpoints import store
from asr_serve.models.packing import PagedKeyValues
from asr_serve.models.registry import asr_card, model_modules
from asr_serve.text import tokenizers as detokenisers

MODEL = "moonshine-tiny-en"
BATCH = 10
POISON = 1e4
"""What pages hold before they are written: who reads too far gets a wrong answer."""


def limit(audio: Audio) -> int:
    """Tokens a clip may have."""
    return int(len(audio) / clips.RATE_HZ * OnnxLoop.TOKENS_PER_S) + 1


class Ours:
    """The networks of our model without the engine."""

    def __init__(self, network: Any, device: Any) -> None:
        self.network, self.device = network, device

    @classmethod
    def load(cls, folder: Path, dtype: str, kind: str = "moonshine") -> Ours:
        from safetensors.torch import load_file

        file, device = model_modules()[kind], devices.make_device("cpu", dtype)
        config = file.Config.of(json.loads((folder / "config.json").read_text()))
        return cls(file.Model(config, load_file(folder / "model.safetensors"), device), device)

    @torch.inference_mode()
    def frames(self, batch: Sequence[Audio]) -> list[Tensor]:
        """Encoder frames (frames, width) of each clip, all in one batch."""
        hidden, packing = self.network.encode([torch.from_numpy(clip) for clip in batch])
        return [hidden[offset : offset + count] for offset, count in zip(packing.offsets, packing.frames, strict=True)]

    @torch.inference_mode()
    def logits(self, frames: Sequence[Tensor], tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Next-token logits (tokens, vocabulary) of each clip after each of its given tokens."""
        longest = max(map(len, tokens))
        given = torch.full((len(tokens), longest), self.network.eos)
        for row, mine in enumerate(tokens):
            given[row, : len(mine)] = torch.tensor(mine)
        own, audio = self._pages(frames, longest)
        steps = []
        for at in range(longest):
            own.lengths.fill_(at + 1)
            steps.append(self.network.decode(given[:, at].clone(), own, audio)[0].float())
        return [torch.stack(steps, 1)[row, : len(mine)] for row, mine in enumerate(tokens)]

    @torch.inference_mode()
    def greedy(self, frames: Sequence[Tensor], limits: Sequence[int], start: Sequence[int] = ()) -> list[list[int]]:
        """BOS, or `start`, and what follows; up to `limits` tokens, or to EOS, which is kept."""
        own, audio = self._pages(frames, max(limits))
        found = [[*start] or [self.network.bos] for _ in frames]
        for at in range(max(limits)):
            own.lengths.fill_(at + 1)
            last = torch.tensor([row[min(at, len(row) - 1)] for row in found])
            chosen = self.network.decode(last, own, audio)[0].argmax(-1).tolist()
            if at < len(start) - 1:
                continue
            for row, (token, most) in enumerate(zip(chosen, limits, strict=True)):
                if found[row][-1] != self.network.eos and len(found[row]) <= most:
                    found[row].append(token)
            if all(row[-1] == self.network.eos for row in found):
                break
        return found

    def _pages(self, frames: Sequence[Tensor], longest: int) -> tuple[PagedKeyValues, PagedKeyValues]:
        net, rows = self.network, len(frames)
        wide, deep = -(-longest // PAGE), -(-max(map(len, frames)) // PAGE)
        shape = (1 + rows * (wide + deep), net.layers, 2, net.heads, net.head_dim * PAGE)
        pool = torch.full(shape, POISON, dtype=self.device.dtype)
        pages = 1 + torch.arange(rows * (wide + deep), dtype=torch.int32).view(rows, wide + deep)
        own, audio = pages[:, :wide].contiguous(), pages[:, wide:].contiguous()
        for table, clip in zip(audio, frames, strict=True):
            store = self.device.kernels.store_int8 if self.device.int8_cross_kv else self.device.kernels.store
            store(pool, net.cross_keys_values(clip), table[: -(-len(clip) // PAGE)].contiguous())
        lengths = torch.tensor([len(clip) for clip in frames])
        return (
            PagedKeyValues(pool, own, torch.ones(rows, dtype=torch.int64)),
            PagedKeyValues(pool, audio, lengths, self.device.int8_cross_kv),
        )


class Graphs(OnnxLoop):
    """The vendor's graphs, one clip at a time, token by token as they are used."""

    def frames(self, audio: Audio) -> Tensor:
        mask = np.ones((1, len(audio)), np.int64)
        return torch.from_numpy(self.encoder.run(None, {"input_values": audio[None], "attention_mask": mask})[0][0])

    def picks(self, audio: Audio, frames: Tensor, given: Sequence[int] | None = None) -> list[int]:
        """The best next token after BOS and each that follows: its own picks, up to EOS, or `given` ones."""
        past = {name: np.zeros((1, heads, 0, size), np.float32) for name, (heads, size) in self.past.items()}
        picked: list[int] = []
        for at in range(len(given) if given else limit(audio)):
            last = given[at] if given else [self.BOS, *picked][-1]
            logits, *present = self.decoder.run(
                None,
                {
                    "encoder_attention_mask": np.ones((1, len(audio)), np.int64),
                    "input_ids": np.array([[last]], np.int64),
                    "encoder_hidden_states": frames[None].numpy(),
                    "use_cache_branch": np.array([at > 0]),
                    **past,
                },
            )
            picked.append(int(logits[0, -1].argmax()))
            for name, value in zip(self.present, present, strict=True):
                if not (at and ".encoder." in name):  # with the cache branch these come back empty
                    past[name] = value
            if not given and picked[-1] == self.EOS:
                break
        return picked


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Of each frame."""
    return torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1)


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Share of next tokens that are the same, over all clips, in percent."""
    same = [a == b for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=True)]
    return 100 * sum(same) / len(same)


class Measured:
    """Everything compared over one set of clips."""

    def __init__(self, audio: Sequence[Audio], graphs: Graphs) -> None:
        self.audio, self.graphs = audio, graphs
        self.frames = [graphs.frames(clip) for clip in audio]
        self.picks = [graphs.picks(clip, mine) for clip, mine in zip(audio, self.frames, strict=True)]

    def against(self, ours: Ours) -> tuple[dict[str, Any], list[list[int]]]:
        """Numbers, and our greedy tokens without BOS."""
        frames, greedy, after_theirs = [], [], []
        for start in range(0, len(self.audio), BATCH):
            batch, theirs = self.audio[start : start + BATCH], self.picks[start : start + BATCH]
            hidden = ours.frames(batch)
            frames += hidden
            given = [[ours.network.bos, *picks[:-1]] for picks in theirs]
            after_theirs += [logits.argmax(-1).tolist() for logits in ours.logits(hidden, given)]
            greedy += [found[1:] for found in ours.greedy(hidden, [limit(clip) for clip in batch])]
        theirs_after = [
            self.graphs.picks(clip, mine, [ours.network.bos, *said[:-1]])
            for clip, mine, said in zip(self.audio, self.frames, greedy, strict=True)
        ]
        similar = [cosine(a, b) for a, b in zip(frames, self.frames, strict=True)]
        numbers = {
            "cosine_mean": round(float(torch.cat(similar).mean()), 6),
            "cosine_worst_clip": round(min(float(clip.mean()) for clip in similar), 6),
            "agreement_on_theirs": round(agreement(after_theirs, self.picks), 3),
            "agreement_on_ours": round(agreement(greedy, theirs_after), 3),
            "tokens": sum(map(len, self.picks)),
            "same_tokens_clips": sum(a == b for a, b in zip(greedy, self.picks, strict=True)),
        }
        return numbers, greedy


def run(data: Path, threads: int) -> dict[str, Any]:
    from asr_serve_tools.evaluate.wer import normalize, wer

    torch.set_num_threads(threads)
    speech = clips.load(data)
    folder = store.resolve(asr_card(MODEL))
    text = detokenisers.load_tokenizer(folder).decode
    measured = Measured([clip.audio for clip in speech], Graphs("cpu", threads))
    said, theirs = [clip.text for clip in speech], [text(picks) for picks in measured.picks]
    base = wer(said, theirs)
    rows: list[dict[str, Any]] = [{"name": "onnx", "wer": round(base.percent, 2), "clips": len(speech)}]
    differ: list[dict[str, str]] = []
    for dtype in ("fp32", "bf16"):
        numbers, greedy = measured.against(Ours.load(folder, dtype))
        heard = [text(picks) for picks in greedy]
        rate = wer(said, heard)
        rows.append(
            {
                "name": f"asr-serve {dtype}",
                "wer": round(rate.percent, 2),
                "wer_minus_onnx": round(rate.percent - base.percent, 2),
                "errors_minus_onnx": rate.errors - base.errors,
                **numbers,
                "texts_differ": sum(normalize(a) != normalize(b) for a, b in zip(heard, theirs, strict=True)),
            }
        )
        differ += [
            {"key": clip.path, "dtype": dtype, "onnx": other, "ours": mine}
            for clip, other, mine in zip(speech, theirs, heard, strict=True)
            if other != mine
        ]
    return {"bench": "parity", "machine": machine.describe(threads), "rows": rows, "texts": differ}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with transcripts.tsv")
    parser.add_argument("--threads", type=int, default=machine.cores())
    parser.add_argument("--json", type=Path, help="write here, too")
    args = parser.parse_args()
    machine.tell(args.json, run(args.data, args.threads))


if __name__ == "__main__":
    main()
