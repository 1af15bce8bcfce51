"""Where the time goes: seconds spent in each kind of work while the clips are transcribed whole.

    python bench/breakdown.py --data DIR [--dtype bf16] [--quantize none] [--json FILE]

Timers are put around the device's products, attention and kernels on the engine's thread; they cost a few
percent. Nested rows (attention holds softmax, a step holds its products) are marked by `within`.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import clips
import machine
from torch import Tensor

import asr_serve
from asr_serve.config import EngineConfig
from asr_serve.devices.bf16 import CpuBf16Linear
from asr_serve.devices.int8 import CpuInt8Linear

PASSES = 5
EIGHT_BITS = " of 8 bits"
"""In the names of such products."""
WITHIN = {
    "softmax": "attention",
    "attend_clips": "attention",
    "attention": "encode",
    "tanh_norm": "encode",
    "decoder": "step",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with transcripts.tsv")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model", default="moonshine-tiny-en")
    parser.add_argument("--quantize", default=EngineConfig().quantize)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    audio = [clip.audio for clip in clips.load(args.data)]
    with asr_serve.load(
        args.model,
        dtype=args.dtype,
        turn_model="none",
        engine=EngineConfig.from_mapping({"prefix_bytes": 0, "quantize": args.quantize}),
    ) as model:
        spent = watch(model)
        model.transcribe(audio, vad=False)  # compiles for each shape, maps memory
        spent.clear()
        started = time.perf_counter()
        for _ in range(PASSES):
            model.transcribe(audio, vad=False)
        wall_s = (time.perf_counter() - started) / PASSES
        facts = model.describe()
    total_s = sum(map(len, audio)) / clips.RATE_HZ
    rows: list[dict[str, Any]] = [
        {"name": "asr-serve", "wall_s": round(wall_s, 4), "audio_s": total_s, "rtfx": round(total_s / wall_s, 1)}
    ]
    for name, work in sorted(spent.items(), key=lambda row: -row[1].seconds):
        rows.append(
            {
                "name": name,
                "wall_s": round(work.seconds / PASSES, 4),
                "share": round(work.seconds / PASSES / wall_s, 3),
                "calls": work.calls // PASSES,
                "within": WITHIN.get(name.split()[0], ""),
            }
        )
    found = {"bench": "breakdown", "machine": machine.describe(facts["threads"]), "dtype": facts["dtype"], "rows": rows}
    found["products"] = facts["products"]
    machine.tell(args.json, found)


@dataclass
class Work:
    """What was spent on one kind of work, and its size; products and attention alone tell theirs."""

    calls: int = 0
    seconds: float = 0.0
    operations: int = 0
    """Multiplications and additions."""
    moved_bytes: int = 0
    """Inputs, weights and outputs, once each."""


Size = tuple[int, int]
"""Operations and bytes of a call."""


def attention_size(result: Tensor, qkv: Tensor, packing: Any, *_: Any) -> Size:
    width = qkv.shape[2] * qkv.shape[3]
    return 4 * width * sum(frames**2 for frames in packing.frames), qkv.nbytes + result.nbytes


def attend_size(
    result: None, pool: Tensor, layer: int, q: Tensor, out: Tensor, tables: Tensor, lengths: Tensor, *_: Any
) -> Size:
    numbers = 2 * int(lengths.sum()) * q.shape[1]  # keys and values
    return 2 * numbers, numbers * pool.element_size()


def product_size(weight_bytes: int) -> Callable[..., Size]:
    def size(result: Tensor, x: Tensor) -> Size:
        return 2 * result.numel() * x.shape[-1], weight_bytes + x.nbytes + result.nbytes

    return size


def watch(model: Any) -> dict[str, Work]:
    """Puts timers around what the engine's thread calls."""
    spent: dict[str, Work] = defaultdict(Work)

    def timed(
        name: str | Callable[..., str], call: Callable[..., Any], size: Callable[..., Size] | None = None
    ) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = call(*arguments, **options)
            seconds = time.perf_counter() - started
            work = spent[name if isinstance(name, str) else name(result, *arguments)]
            work.calls += 1
            work.seconds += seconds
            if size is not None:
                operations, moved_bytes = size(result, *arguments)
                work.operations += operations
                work.moved_bytes += moved_bytes
            return result

        return run

    loop = model._client.backend.loop
    device, network, decode = model.device, loop.executor.model, loop.executor.decode_runner
    sizes = {"attend": attend_size}
    kernels = {n: timed(n, f, sizes.get(n)) for n, f in vars(device.kernels).items() if callable(f)}
    device.kernels = network.kernels = SimpleNamespace(**kernels)
    device.attention = timed("attention", device.attention, attention_size)
    loop.executor.encode_runner.encode = timed("encode", loop.executor.encode_runner.encode)
    decode.step = timed("step", decode.step)
    decode.prefill_and_verify = timed("prefill_and_verify", decode.prefill_and_verify)
    decode.add_row = timed("add_row", decode.add_row)

    def shape(bits: str) -> Callable[..., str]:
        def name(result: Any, x: Any) -> str:
            return f"product{bits} {x.shape[-1]}->{result.shape[-1]} ({'encode' if x.shape[0] > 64 else 'step'})"

        return name

    audio = network if isinstance(network.encoder, list) else network.encoder  # Whisper's is an object of its own
    layers = network.encoder if audio is network else audio.layers
    if getattr(network, "native_layers", None) is not None:
        network.native_layers = timed("decoder layers", network.native_layers)
    owners = [audio.stem, *layers, *network.decoder, network, network.head]
    for owner in owners:
        for name, part in list(vars(owner).items()):
            kind = type(part)
            if kind.__name__.endswith("Linear") and kind.__module__.startswith("asr_serve.devices"):
                setattr(
                    owner,
                    name,
                    timed(
                        shape(EIGHT_BITS if isinstance(part, CpuInt8Linear) else ""), part, product_size(part.nbytes)
                    ),
                )
    if isinstance(network.head, CpuBf16Linear):  # the vocabulary is the product itself
        network.head = timed(shape(""), network.head, product_size(network.head.nbytes))
    return spent


if __name__ == "__main__":
    main()
