"""A picture of what live.py found: latency against callers.

python bench/live_plot.py bench/results/live-cpu.json docs/img/live-latency.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from live_report import OURS
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

Row = dict[str, Any]

TARGETS_MS = {"final": 500, "first_word": 900}
LINES = {"p50": "#1b6ca8", "p95": "#e07b00", "p99": "#8a2be2"}
PEERS = {"moonshine-voice": ("s", "#2e8b57"), "vosk": ("D", "#8b5a2b")}
MISS = "#c1121f"


def draw(found: dict[str, Any]) -> Figure:
    """Two panels: our finals; first words, ours and the peers'."""
    rows = [row for row in found["rows"] if "skipped" not in row and "failed" not in row]
    ours = sorted((row for row in rows if row["system"] == OURS), key=lambda row: row["callers"])
    ours = [row for row in ours if row.get("protocol") == ours[0].get("protocol")]
    figure = Figure(figsize=(11, 4.8), layout="constrained", dpi=140)
    finals, firsts = figure.subplots(1, 2)
    for share, color in LINES.items():
        line(finals, ours, f"final_{share}_ms", f"final {share}", color, "o-")
    target(finals, "final", "target: p95")
    finals.set_title("asr-serve: sentence locked,\nafter the audio that decides its end was sent")

    for share in ("p50", "p95"):
        line(firsts, ours, f"first_word_{share}_ms", f"asr-serve {share}", LINES[share], "o-")
    for name, (marker, color) in PEERS.items():
        its = sorted((row for row in rows if row["system"] == name), key=lambda row: row["callers"])
        line(firsts, its, "first_word_p50_ms", f"{name} p50", color, f"{marker}--")
    target(firsts, "first_word", "target: p50")
    firsts.set_title("First word shown,\nafter the onset of speech was sent")

    for axes in (finals, firsts):
        axes.plot([], [], "x", color=MISS, markersize=9, markeredgewidth=2, label="real-time miss")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(plain))
        axes.yaxis.set_major_formatter(FuncFormatter(plain))
        axes.yaxis.set_minor_formatter(FuncFormatter(between))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("callers at once (log)")
        axes.set_ylabel("ms")
        axes.grid(alpha=0.25, which="both")
        axes.legend(fontsize=8)
    machine = found["machine"]
    figure.suptitle(f"{machine['gpu'] or machine['cpu']}, {machine['threads']} cores", fontsize=9)
    return figure


def line(axes: Axes, rows: Sequence[Row], key: str, label: str, color: str, style: str) -> None:
    """One value against callers; a cross where something was missed."""
    shown = [row for row in rows if row[key] is not None]
    if not shown:
        return
    axes.plot([row["callers"] for row in shown], [row[key] for row in shown], style, color=color, label=label)
    missed = [row for row in shown if row["realtime_misses"]]
    axes.plot(
        [row["callers"] for row in missed],
        [row[key] for row in missed],
        "x",
        color=MISS,
        markersize=9,
        markeredgewidth=2,
    )


def target(axes: Axes, name: str, label: str) -> None:
    limit_ms = TARGETS_MS[name]
    axes.axhline(limit_ms, color="#555555", linestyle=":", label=f"{label} under {limit_ms} ms")


def plain(value: float, _: int) -> str:
    return f"{value:,.0f}"


def between(value: float, _: int) -> str:
    """Only 2 and 5 between powers of ten: all of them would not be legible."""
    return plain(value, 0) if f"{value:.0e}"[0] in "25" else ""


def main(source: str, image: str) -> None:
    mpl.use("agg")
    figure = draw(json.loads(Path(source).read_text(encoding="utf-8")))
    Path(image).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image)


if __name__ == "__main__":
    main(*sys.argv[1:3])
