"""From runs to rows: medians, ratios within the run, error rates, and the one JSON object."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
BASE = "onnx"
"""The row the others are compared with."""


def row(name: str, results: Sequence[dict[str, Any]], references: Sequence[str] | None) -> Row:
    """One system's rounds as one row. `rtfx` and `wall_s` are the median; the best round is beside it.

    A system that changes its answer between rounds gets its worst error rate, and a note.
    """
    for result in results:
        for trouble in ("skipped", "failed"):
            if trouble in result:
                return {**blank(name), trouble: result[trouble]}
    facts = dict(results[0]["facts"])
    walls = [wall for result in results for wall in result["walls_s"]]
    audio_s = results[0]["audio_s"]
    made: Row = {
        "name": name,
        "rtfx": round(audio_s / statistics.median(walls), 2),
        "wer": None,
        "wall_s": round(statistics.median(walls), 3),
        "audio_s": round(audio_s, 2),
        "best_rtfx": round(audio_s / min(walls), 2),
        "best_wall_s": round(min(walls), 3),
        "walls_s": [round(wall, 6) for wall in walls],
        "cpu_s": round(statistics.median(cpu for result in results for cpu in result["cpus_s"]), 3),
        "load_s": round(statistics.median(result["load_s"] for result in results), 2),
        "first_text_s": round(statistics.median(result["first_text_s"] for result in results), 2),
        "peak_mib": round(max(result["peak_mib"] for result in results)),
        **facts,
    }
    if references is not None:
        made.update(worst_rate(references, [result["texts"] for result in results]))
        if any(result["texts"] != results[0]["texts"] for result in results):
            made["notes"] = f"{made.get('notes', '')}; texts differ between rounds, worst WER shown".lstrip("; ")
    return made


def blank(name: str) -> Row:
    return {"name": name, "rtfx": None, "wer": None, "wall_s": None, "audio_s": None}


def worst_rate(references: Sequence[str], rounds: Sequence[list[str]]) -> Row:
    from asr_serve_tools.evaluate.wer import cer, wer

    texts = max(rounds, key=lambda heard: wer(references, heard).percent)
    words = wer(references, texts)
    return {
        "wer": round(words.percent, 2),
        "cer": round(cer(references, texts).percent, 2),
        "words": words.reference,
        "substitutions": words.substitutions,
        "deletions": words.deletions,
        "insertions": words.insertions,
    }


def compare(rows: Sequence[Row], base: str = BASE) -> None:
    """Add to each row how many times the base's speed it has, and how much worse its words are.

    The ratio of medians, and the lowest and highest ratio of any one round: systems take turns, so the two
    of a round were measured within minutes of each other.
    """
    found = next((made for made in rows if made["name"] == base and made["rtfx"]), None)
    if found is None:
        return
    for made in rows:
        if not made["rtfx"]:
            continue
        made[f"vs_{base}"] = round(made["rtfx"] / found["rtfx"], 2)
        rounds = [theirs / ours for ours, theirs in zip(made["walls_s"], found["walls_s"], strict=True)]
        made[f"vs_{base}_rounds"] = [round(min(rounds), 2), round(max(rounds), 2)]
        if made["wer"] is not None and found["wer"] is not None:
            made[f"wer_minus_{base}"] = round(made["wer"] - found["wer"], 2)


def bench(machine: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    return {"bench": "offline", "machine": machine, "rows": list(rows)}


def table(rows: Sequence[Row]) -> str:
    """For people: one line a row."""
    head = ("name", "x real time", "best", "vs onnx", "WER %", "wall s", "cpu s", "first text s", "peak MiB", "dtype")
    keys = ("name", "rtfx", "best_rtfx", "vs_onnx", "wer", "wall_s", "cpu_s", "first_text_s", "peak_mib", "dtype")
    lines = [head, *(tuple(shown(made.get(key)) for key in keys) for made in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = "\n".join(
        "  ".join(cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in pairs).rstrip()
        for line in lines
        for pairs in [list(enumerate(zip(line, widths, strict=True)))]
    )
    troubles = [
        f"{made['name']}: {kind}: {made[kind]}" for made in rows for kind in ("skipped", "failed") if kind in made
    ]
    return "\n".join([text, *troubles])


def shown(value: Any) -> str:
    return "-" if value is None else str(value)


def texts(paths: Sequence[str], references: Sequence[str], heard: dict[str, list[str]]) -> dict[str, Any]:
    """Every system's text for every clip, for reading where they differ."""
    return {
        "clips": [
            {"path": path, "reference": said, "texts": {name: lines[place] for name, lines in heard.items()}}
            for place, (path, said) in enumerate(zip(paths, references, strict=True))
        ]
    }
