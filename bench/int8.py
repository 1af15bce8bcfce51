"""Products over weights of 8 bits: every candidate at every shape, and whole models, turn about in one run.

    python bench/int8.py --json int8.json
    python bench/int8.py --data DIR --speech DIR --rounds 5 --json int8.json

Without --data and --speech only products are measured. --data holds transcripts.tsv, lines of
relative/path.flac<TAB>text; whole models then transcribe it in every mode, one after another, round after round.
--speech holds clips whose text need not be known: one word in a few hundred is more than a tenth of a percent, so
what 8 bits and 16 change is told by how many words are not fp32's, over more speech than has been written down.
Every mode also transcribes --data once in each of the other WAYS, and --speech in those that its folders have.
Times are the median over rounds: of the calling thread's clock for products on one thread, else of the wall.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import clips
import machine
import torch
from torch import Tensor

import asr_serve
from asr_serve import kernels
from asr_serve.config import EngineConfig
from asr_serve.devices.cpu import PackedLinear
from asr_serve.devices.int8 import CpuInt8Linear
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.kernels import int8_reference
from asr_serve.models.registry import asr_card
from asr_serve.types import Quantize
from asr_serve_tools.evaluate.wer import cer, wer

SHAPES = (
    *((288, 864), (288, 288), (288, 2_304), (1_152, 288), (288, 32_768)),  # Moonshine tiny
    *((384, 1_152), (384, 384), (384, 1_536), (1_536, 384), (384, 51_864)),  # Whisper tiny.en
    *((512, 2_048), (2_048, 512), (1_280, 5_120), (5_120, 1_280)),  # Whisper base, large
)
ROWS = (1, 4, 16, 64, 256, 1_024)
"""Decoding steps of one caller to many, and encode batches."""
MOST_PRODUCTS = 1_024 * 1_280 * 5_120
ALONE = 8
"""Clips that are also transcribed one after another."""
AT_LEAST_S = 0.002
"""How long one turn of a candidate takes, repeated as often as that needs."""
MODES: dict[str, tuple[str, Quantize]] = {
    "fp32": ("fp32", "none"),
    "bf16": ("bf16", "none"),
    "int8": ("bf16", "int8"),
    "dynamic": ("bf16", "dynamic"),
    "auto": ("auto", "auto"),
}
"""Name -> dtype, quantize."""
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"vad": False},
    "greedy, voice activity": {"vad": True},
    "beam 5, voice activity": {"vad": True, "beam": 5},
}
"""Name -> options of transcribe. The first is timed."""
WAYS_WITHOUT_TEXT = ("greedy", "greedy, voice activity")
TIMED = "greedy"

Call = Callable[[], Any]


def candidates(inputs: int, outputs: int, rows: int) -> dict[str, Call]:
    """Name -> one product of bf16 activations, all of one weight. Where a candidate takes integers, the
    rounding of the rows is not counted: in its favour."""
    weight, x = torch.randn(outputs, inputs), torch.randn(rows, inputs).bfloat16()
    integers, scale = int8_reference.quantise(weight)
    plain, short = PackedLinear(weight.bfloat16(), None), scale.bfloat16()
    ours = {bits: CpuInt8Linear(weight, None, kernels.kernels(), bits) for bits in (16, 8)}
    found: dict[str, Call] = {
        "bf16": lambda: plain(x),
        "ours, 16-bit rows": lambda: ours[16](x),
        "ours, 8-bit rows": lambda: ours[8](x),
    }
    if hasattr(torch, "_weight_int8pack_mm"):
        found["torch int8pack"] = lambda: torch._weight_int8pack_mm(x, integers, short)
    if hasattr(torch.ops, "onednn") and hasattr(torch.ops.onednn, "qlinear_pointwise"):
        packed = torch.ops.onednn.qlinear_prepack(integers, None)
        zeros, row_scale = torch.zeros(outputs, dtype=torch.int64), float(x.abs().max() / 127)
        rounded = ((x.float() / row_scale).round() + 128).to(torch.uint8)
        found["onednn int8"] = lambda: onednn(rounded, row_scale, packed, scale, zeros)
    return found


def onednn(x: Tensor, x_scale: float, weight: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    """One scale for all rows: oneDNN has no other here."""
    out: Tensor = torch.ops.onednn.qlinear_pointwise(
        x, x_scale, 128, weight, scale, zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""
    )
    return out


def turn(call: Call, times: int) -> float:
    """Seconds for one call. Of this thread's own clock where it works alone: others who use the machine are not on
    it, but for the caches."""
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = now()
    for _ in range(times):
        call()
    return (now() - start) / times


def products(rounds: int) -> list[dict[str, Any]]:
    """A row for each shape and number of rows: microseconds of every candidate, and times bf16's speed."""
    table: list[dict[str, Any]] = []
    for inputs, outputs in SHAPES:
        for rows in ROWS:
            if rows * inputs * outputs > MOST_PRODUCTS:
                continue
            calls = candidates(inputs, outputs, rows)
            times = {}
            for name, call in calls.items():
                call()
                times[name] = max(1, int(AT_LEAST_S / max(turn(call, 1), 1e-7)))
            taken: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(rounds):
                for name, call in calls.items():
                    taken[name].append(turn(call, times[name]))
            seconds = {name: median(each) for name, each in taken.items()}
            row: dict[str, Any] = {
                "inputs": inputs,
                "outputs": outputs,
                "rows": rows,
                "us": {name: round(value * 1e6, 2) for name, value in seconds.items()},
                "times_bf16": {name: round(seconds["bf16"] / value, 2) for name, value in seconds.items()},
            }
            table.append(row)
            told = "  ".join(f"{name} {ratio:.2f}" for name, ratio in row["times_bf16"].items())
            say(f"{inputs}x{outputs} rows={rows}: {told}")
    return table


def models(names: Sequence[str], modes: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each model, folder and mode: memory, speed, all clips at once and alone, what was heard."""
    rows: list[dict[str, Any]] = []
    rounds = 1 if args.rounds is None else args.rounds
    for name in names:
        sizes = {mode: weight_bytes(name, *MODES[mode]) for mode in modes}
        loaded = {
            mode: asr_serve.load(
                name,
                dtype=MODES[mode][0],
                turn_model="none",
                engine=EngineConfig(quantize=MODES[mode][1], prefix_bytes=0),
            )
            for mode in modes
        }
        chosen = asr_card(name)
        for folder, has_text in [(each, True) for each in args.data] + [(each, False) for each in args.speech]:
            wanted = args.clips if has_text else args.speech_clips
            speech = clips.load(folder, wanted) if has_text else clips.without_text(folder, wanted)
            audio = [clip.audio for clip in speech]
            texts, walls = transcribed(loaded, audio, rounds if has_text else 0)
            for way in WAYS if has_text else WAYS_WITHOUT_TEXT:
                if way != TIMED:
                    texts = {mode: heard(model, audio, WAYS[way]) for mode, model in loaded.items()}
                for mode in texts:
                    rows.append(
                        {
                            "model": name,
                            "data": folder.name,
                            "way": way,
                            "mode": mode,
                            "minutes": round(clips.seconds(audio) / 60, 1),
                            "products": loaded[mode].describe()["products"],
                            "weights_mb": round(sizes[mode] / 1e6, 2),
                            "of_16_bit_percent": round(50 * sizes[mode] / chosen.parameters, 1),
                            **(speeds(audio, walls[mode]) if way == TIMED else {}),
                            **(rates([clip.text for clip in speech], texts[mode]) if has_text else {}),
                            **likeness(texts, mode),
                        }
                    )
                    say(json.dumps(rows[-1]))
        for model in loaded.values():
            model.close()
    return rows


def speech_totals(rows: Sequence[dict[str, Any]], folders: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each model, way and mode but fp32, over all folders of speech: words that are not fp32's, and of those
    of 8 bits how many more, in percent of the words, than bf16 has."""
    totals: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        if row["data"] not in folders or "words_of_fp32" not in row:
            continue
        key = (row["model"], row["way"], row["mode"])
        total = totals.setdefault(key, dict(zip(("model", "way", "mode"), key, strict=True)))
        for name in ("minutes", "texts", "texts_as_fp32", "words_of_fp32", "words_unlike_fp32"):
            total[name] = round(total.get(name, 0) + row[name], 1)
    for (model, way, mode), total in totals.items():
        total["words_unlike_fp32_percent"] = round(100 * total["words_unlike_fp32"] / max(1, total["words_of_fp32"]), 2)
        if mode != "bf16" and (bf16 := totals.get((model, way, "bf16"))):
            more = total["words_unlike_fp32"] - bf16["words_unlike_fp32"]
            total["beyond_bf16_percent"] = round(100 * more / max(1, total["words_of_fp32"]), 2)
    return list(totals.values())


def transcribed(
    loaded: dict[str, Any], audio: Sequence[clips.Audio], rounds: int
) -> tuple[dict[str, list[str]], dict[str, dict[str, list[float]]]]:
    """Texts, and seconds, of every mode: turn about, after one round to warm up."""
    walls: dict[str, dict[str, list[float]]] = {mode: {"all": [], "alone": []} for mode in loaded}
    texts: dict[str, list[str]] = {}
    for number in range(rounds + 1):
        for mode, model in loaded.items():
            start = time.perf_counter()
            texts[mode] = heard(model, audio, WAYS[TIMED])
            middle = time.perf_counter()
            if number:
                for pcm in audio[:ALONE]:
                    model.transcribe([pcm], vad=False)
                walls[mode]["all"].append(middle - start)
                walls[mode]["alone"].append(time.perf_counter() - middle)
    return texts, walls


def heard(model: Any, audio: Sequence[clips.Audio], options: dict[str, Any]) -> list[str]:
    return [found.text for found in model.transcribe(list(audio), **options)]


def speeds(audio: Sequence[clips.Audio], walls: dict[str, list[float]]) -> dict[str, float]:
    """Nothing where no round was timed."""
    if not walls["all"]:
        return {}
    return {
        "rtfx": round(clips.seconds(audio) / median(walls["all"]), 1),
        "rtfx_alone": round(clips.seconds(audio[:ALONE]) / median(walls["alone"]), 1),
    }


def rates(said: Sequence[str], heard: Sequence[str]) -> dict[str, float]:
    words, letters = wer(said, heard), cer(said, heard)
    return {
        "words": words.reference,
        "word_errors": words.errors,
        "wer_percent": round(words.percent, 2),
        "cer_percent": round(letters.percent, 2),
    }


def likeness(texts: dict[str, list[str]], mode: str) -> dict[str, float]:
    """Of the texts, how many are fp32's; words that differ, of a hundred."""
    if mode == "fp32" or "fp32" not in texts:
        return {}
    unlike = wer(texts["fp32"], texts[mode])
    return {
        "texts": len(texts[mode]),
        "texts_as_fp32": sum(a == b for a, b in zip(texts[mode], texts["fp32"], strict=True)),
        "words_of_fp32": unlike.reference,
        "words_unlike_fp32": unlike.errors,
        "words_unlike_fp32_percent": round(unlike.percent, 2),
    }


def weight_bytes(name: str, dtype: str, quantize: Quantize) -> int:
    """Of everything that a loaded model holds: products, vocabularies, and tensors that belong to neither."""
    model = AsrCheckpoint.find(name, None).build("cpu", dtype, quantize).model
    found = [each for each in parts_of(model) if not isinstance(each, Tensor)]
    own = {id(value) for each in found for value in vars(each).values() if isinstance(value, Tensor)}
    tensors = {
        each.data_ptr(): each.nbytes for each in parts_of(model) if isinstance(each, Tensor) and id(each) not in own
    }
    return int(sum(each.nbytes for each in found)) + sum(tensors.values())


def parts_of(root: Any) -> list[Any]:
    """Products and vocabularies, which tell their bytes themselves, and all other tensors."""
    found: list[Any] = []
    seen: set[int] = set()
    left = [root]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor) or (callable(each) and hasattr(each, "nbytes")):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            left += each
        elif isinstance(each, dict):
            left += each.values()
        elif type(each).__module__.startswith(("asr_serve.models", "asr_serve.audio.features")) and hasattr(
            each, "__dict__"
        ):
            left += vars(each).values()
            left += getattr(each, "_buffers", {}).values()
    return found


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, action="append", default=[], metavar="DIR", help="folder with transcripts.tsv")
    add("--speech", type=Path, action="append", default=[], metavar="DIR", help="folder of clips without text")
    add("--modes", default="fp32,bf16,int8", metavar="A,B", help="of fp32, bf16, int8, dynamic, auto")
    add("--models", default="moonshine-tiny-en", metavar="A,B", help="which (moonshine-tiny-en)")
    add("--clips", type=int, default=50, metavar="N", help="of --data at most (50)")
    add("--speech-clips", type=int, default=60, metavar="N", help="of --speech at most (60)")
    add("--rounds", type=int, metavar="N", help="turns of each (5; of models 1); 0: texts only")
    add("--threads", type=int, default=1, metavar="N", help="for the products; models use what the engine takes (1)")
    add("--no-products", action="store_true", help="whole models only")
    add("--json", type=Path, metavar="FILE", help="where the result goes")
    args = parser.parse_args(argv)
    core = kernels.core()
    if core is None:
        parser.error("the native core is not built: there is nothing to measure")
    found: dict[str, Any] = {"machine": machine.describe(args.threads), "int8": core.int8_isa()}
    if args.data or args.speech:
        found["models"] = models(args.models.split(","), args.modes.split(","), args)
    if args.speech:
        found["speech"] = speech_totals(found["models"], [folder.name for folder in args.speech])
    if not args.no_products:
        torch.set_num_threads(args.threads)
        core.set_threads(args.threads)
        found["products"] = products(args.rounds or 5)
    machine.tell(args.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
