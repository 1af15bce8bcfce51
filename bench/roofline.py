"""How far each part of a model is from what the machine can do: its products and its memory, measured and drawn.

    python bench/roofline.py --data DIR --json bench/results/roofline-cpu.json --image docs/img/roofline.png
    python bench/roofline.py --draw bench/results/roofline-cpu.json --image docs/img/roofline.png

Limits are measured first, on one core and on all: the fastest product of bf16 and of 8-bit integers over the shapes and
candidates of int8.py, and reading a buffer from memory and one from the cache. Then models transcribe the clips of DIR
under the timers of breakdown.py. A part of a model (its products of one shape, attention) has an intensity, operations
for each byte that it reads or writes once, and so a limit: the machine's products, or its memory times the intensity.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import breakdown
import clips
import int8
import machine
import torch

import asr_serve
from asr_serve import kernels
from asr_serve.config import EngineConfig

ROWS = (1, 16, 64, 1_024)
"""Decoding steps of one caller to many, and an encode batch."""
ROUNDS = 5
MEMORY_BYTES, CACHE_BYTES = 512 << 20, 8 << 20
"""Buffers that are read: one larger than every cache, one that the last-level cache holds, as it does a decoder."""
MODES = {"bf16": "none", "8-bit": "auto"}
"""Name -> engine.quantize."""
LEAST_SHARE = 0.01
"""Share of the time of a pass from which on a part is told."""

Row = dict[str, Any]


class Limits(NamedTuple):
    """What all cores do at best."""

    bf16_gops: float
    int8_gops: float
    memory_gb_s: float
    cache_gb_s: float

    @classmethod
    def of(cls, rows: list[Row], threads: int) -> Limits:
        best: dict[str, float] = {}
        for row in rows:
            if row.get("threads") == threads:
                value = row.get("gops") or row["gb_s"]
                best[row["limit"]] = max(best.get(row["limit"], 0.0), value)
        return cls(best["bf16"], best["int8"], best["memory"], best["cache"])

    def gops(self, mode: str, intensity: float) -> float:
        """Most operations a second, in billions, of work whose weights and inputs are in memory."""
        return min(self.int8_gops if mode == "8-bit" else self.bf16_gops, intensity * self.memory_gb_s)


def set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    if (core := kernels.core()) is not None:
        core.set_threads(threads)


def fastest(call: int8.Call) -> float:
    """Seconds of the fastest of ROUNDS turns."""
    once = int8.turn(call, 2)
    times = max(1, int(int8.AT_LEAST_S / max(once, 1e-7)))
    return min(int8.turn(call, times) for _ in range(ROUNDS))


def product_limits(threads: int) -> Iterator[Row]:
    """A row for each shape, number of rows and type: the fastest candidate."""
    for inputs, outputs in int8.SHAPES:
        for rows in ROWS:
            if rows * inputs * outputs > int8.MOST_PRODUCTS:
                continue
            calls = int8.candidates(inputs, outputs, rows)
            rates = {name: 2e-9 * rows * inputs * outputs / fastest(call) for name, call in calls.items()}
            for kind in ("bf16", "int8"):
                mine = {name: rate for name, rate in rates.items() if (name == "bf16") == (kind == "bf16")}
                name = max(mine, key=lambda candidate: mine[candidate])
                yield {
                    "name": f"{kind} {rows} x {inputs} x {outputs}, {threads} threads",
                    "limit": kind,
                    "threads": threads,
                    "shape": [rows, inputs, outputs],
                    "candidate": name,
                    "gops": round(mine[name], 1),
                }


def memory_limits(threads: int) -> Iterator[Row]:
    for limit, nbytes in (("memory", MEMORY_BYTES), ("cache", CACHE_BYTES)):
        buffer = torch.ones(nbytes // 4)
        rate = 1e-9 * nbytes / fastest(buffer.sum)
        yield {
            "name": f"reading {limit}, {threads} threads",
            "limit": limit,
            "threads": threads,
            "gb_s": round(rate, 1),
        }


def parts(name: str, mode: str, audio: list[clips.Audio], limits: Limits) -> Iterator[Row]:
    """A row for each part of a model that takes time: what it does, and what it could."""
    engine = EngineConfig.from_mapping({"prefix_bytes": 0, "quantize": MODES[mode]})
    with asr_serve.load(name, turn_model="none", engine=engine) as model:
        if model.describe()["quantize"] != MODES[mode]:
            return  # its card allows no layer
        spent = breakdown.watch(model)
        model.transcribe(audio, vad=False)
        spent.clear()
        for _ in range(breakdown.PASSES):
            model.transcribe(audio, vad=False)
        device = model.describe()
    total_s = sum(spent[part].seconds for part in ("encode", "step") if part in spent)
    for part, work in sorted(spent.items(), key=lambda item: -item[1].seconds):
        if not work.operations or work.seconds < LEAST_SHARE * total_s:
            continue
        # Attention is computed in the device's dtype in every mode, and so are the layers that a card keeps in it.
        intensity = work.operations / work.moved_bytes
        limit = limits.gops("8-bit" if breakdown.EIGHT_BITS in part else "bf16", intensity)
        gops = 1e-9 * work.operations / work.seconds
        yield {
            "name": f"{name} {mode}: {part}",
            "model": name,
            "mode": mode,
            "part": part,
            "products": device["products"],
            "share_percent": round(100 * work.seconds / total_s, 1),
            "gops": round(gops, 1),
            "gb_s": round(1e-9 * work.moved_bytes / work.seconds, 1),
            "operations_per_byte": round(intensity, 2),
            "limit_gops": round(limit, 1),
            "of_limit_percent": round(100 * gops / limit, 1),
        }


def run(args: argparse.Namespace) -> Row:
    cores = machine.cores()
    about = machine.describe(cores)
    audio = [clip.audio for clip in clips.load(args.data, args.clips)]
    rows: list[Row] = []
    for threads in sorted({1, cores}):
        set_threads(threads)
        rows += [*memory_limits(threads), *product_limits(threads)]
        print(threads, Limits.of(rows, threads), file=sys.stderr, flush=True)
    limits = Limits.of(rows, cores)
    for name in args.models.split(","):
        for mode in MODES:
            rows += parts(name, mode, audio, limits)
            print(f"{name} {mode}", file=sys.stderr, flush=True)
    return {"bench": "roofline", "machine": about, "rows": rows}


MODE_COLORS = {"bf16": "#1b6ca8", "8-bit": "#e07b00"}
MARKERS = ("o", "s", "^", "D")


def draw(found: Row, image: Path) -> None:
    """Limits of one core (dashed) and of all cores, and the parts of every model; their size is their share of time."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    mpl.use("agg")
    measured = [row for row in found["rows"] if "part" in row]
    cores = found["machine"]["threads"]
    figure = Figure(figsize=(11, 6.2), layout="constrained", dpi=140)
    axes = figure.subplots()
    intensities = [2.0 ** (step / 16) for step in range(-16, 16 * 10 + 1)]
    for threads, style in ((1, "--"), (cores, "-")):
        limits = Limits.of(found["rows"], threads)
        for mode, color in MODE_COLORS.items():
            axes.plot(intensities, [limits.gops(mode, each) for each in intensities], style, color=color, alpha=0.7)
        cached = [min(limits.int8_gops, each * limits.cache_gb_s) for each in intensities]
        axes.plot(intensities, cached, style, color="#888888", alpha=0.6, zorder=0)
    models = list(dict.fromkeys(row["model"] for row in measured))
    for row in measured:
        axes.scatter(
            row["operations_per_byte"],
            row["gops"],
            s=20 + 14 * row["share_percent"],
            marker=MARKERS[models.index(row["model"]) % len(MARKERS)],
            color=MODE_COLORS[row["mode"]],
            edgecolors="white",
            alpha=0.85,
            zorder=3,
        )
        if row["share_percent"] >= LABELLED_PERCENT and row["mode"] == "8-bit":
            label = row["part"].removeprefix(f"product{breakdown.EIGHT_BITS} ").removeprefix("product ")
            axes.annotate(
                label, (row["operations_per_byte"], row["gops"]), (5, 4), textcoords="offset points", fontsize=6.5
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("operations for each byte that is read or written")
    axes.set_ylabel("billion operations a second")
    axes.grid(alpha=0.25, which="both")
    handles = [
        *(Line2D([], [], color=color, label=f"limit of {mode}: {cores} cores") for mode, color in MODE_COLORS.items()),
        Line2D([], [], color="#888888", label="limit of the last-level cache"),
        Line2D([], [], color="#555555", linestyle="--", label="the same limits of one core"),
        *(
            Line2D([], [], color="#555555", linestyle="", marker=marker, label=f"{name}; the larger, the more time")
            for name, marker in zip(models, MARKERS, strict=False)
        ),
    ]
    axes.legend(handles=handles, fontsize=8, loc="lower right")
    axes.set_title(f"{found['machine']['cpu']}, {cores} cores", fontsize=9)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image)


LABELLED_PERCENT = 5.0
"""Share of the time from which on a part's name is written."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, metavar="DIR", help="folder with transcripts.tsv")
    source.add_argument("--draw", type=Path, metavar="FILE", help="draw what was measured before")
    add("--models", default="moonshine-tiny-en,whisper-tiny-en", metavar="A,B", help="encoder-decoder models")
    add("--clips", type=int, default=50, metavar="N", help="at most (50)")
    add("--image", type=Path, metavar="FILE", help="where the picture goes")
    add("--json", type=Path, metavar="FILE", help="where the result goes, which is printed too")
    args = parser.parse_args()
    if args.draw is not None:
        found = json.loads(args.draw.read_text(encoding="utf-8"))
    else:
        found = run(args)
        machine.tell(args.json, found)
    if args.image is not None:
        draw(found, args.image)


if __name__ == "__main__":
    main()
