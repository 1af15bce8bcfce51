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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import clips
import machine

import asr_serve
from asr_serve.config import EngineConfig

PASSES = 5
WITHIN = {"softmax": "attention", "attend_clips": "attention", "attention": "encode", "tanh_norm": "encode"}


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
    for name, (calls, seconds) in sorted(spent.items(), key=lambda row: -row[1][1]):
        rows.append(
            {
                "name": name,
                "wall_s": round(seconds / PASSES, 4),
                "share": round(seconds / PASSES / wall_s, 3),
                "calls": calls // PASSES,
                "within": WITHIN.get(name.split()[0], ""),
            }
        )
    found = {"bench": "breakdown", "machine": machine.describe(facts["threads"]), "dtype": facts["dtype"], "rows": rows}
    found["products"] = facts["products"]
    machine.tell(args.json, found)


def watch(model: Any) -> dict[str, list[float]]:
    """Put timers around what the engine's thread calls; (calls, seconds) by name."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])

    def timed(name: str | Callable[..., str], call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = call(*arguments, **options)
            entry = spent[name if isinstance(name, str) else name(result, *arguments)]
            entry[0] += 1
            entry[1] += time.perf_counter() - started
            return result

        return run

    loop = model._client.backend.loop
    device, network, decode = model.device, loop.executor.model, loop.executor.decode_runner
    kernels = {n: timed(n, f) for n, f in vars(device.kernels).items() if callable(f)}
    device.kernels = network.kernels = SimpleNamespace(**kernels)
    device.attention = timed("attention", device.attention)
    loop.executor.encode_runner.encode = timed("encode", loop.executor.encode_runner.encode)
    decode.step = timed("step", decode.step)
    decode.add_row = timed("add_row", decode.add_row)

    def shape(result: Any, x: Any) -> str:
        return f"product {x.shape[-1]}->{result.shape[-1]} ({'encode' if x.shape[0] > 64 else 'step'})"

    audio = network if isinstance(network.encoder, list) else network.encoder  # Whisper's is an object of its own
    layers = network.encoder if audio is network else audio.layers
    owners = [audio.stem, *layers, *network.decoder, network]
    for owner in owners:
        for name, part in list(vars(owner).items()):
            if type(part).__name__.endswith("Linear"):
                setattr(owner, name, timed(shape, part))
    return spent


if __name__ == "__main__":
    main()
