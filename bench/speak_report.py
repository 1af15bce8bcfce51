"""From sayings to rows: how soon sound comes, whether it ever runs out, what a second of it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import report
from serve_report import percentile

Row = dict[str, Any]
OURS = "asr-serve"
KEYS = (
    "system",
    "way",
    "callers",
    "first_audio_p50_ms",
    "first_audio_p95_ms",
    "first_audio_max_ms",
    "rtf",
    "gaps",
    "starved_ms",
    "sayings",
    "errors",
    "rss_mib",
)
"""What the table shows; null where it was not measured."""


def row(system: str, way: str, callers: float, rounds: Sequence[Row]) -> Row:
    """All rounds of a level together: every saying that counts, and all that was spent."""
    for found in rounds:
        for trouble in ("skipped", "failed"):
            if trouble in found:
                return {**blank(system, way, callers), trouble: found[trouble]}
    sayings = [saying for found in rounds for saying in found["sayings"]]
    heard = [saying for saying in sayings if "first_ms" in saying]
    first_ms = sorted(saying["first_ms"] for saying in heard)
    audio_s = sum(found["audio_s"] for found in rounds)
    cpu_s = sum(found["server_cpu_s"] for found in rounds)
    return {
        **blank(system, way, callers),
        "first_audio_p50_ms": percentile(first_ms, 0.50),
        "first_audio_p95_ms": percentile(first_ms, 0.95),
        "first_audio_p99_ms": percentile(first_ms, 0.99),
        "first_audio_max_ms": percentile(first_ms, 1.0),
        "rtf": round(cpu_s / audio_s, 4) if audio_s else None,
        "gaps": sum(saying["gaps"] for saying in heard),
        "starved_ms": round(sum(saying["starved_ms"] for saying in heard), 1),
        "sayings": len(sayings),
        "errors": dict(Counter(saying["error"].split()[0] for saying in sayings if saying["error"])),
        "made_p50": percentile(sorted(100 * each["made_s"] / each["audio_s"] for each in heard), 0.50),
        "audio_s": round(audio_s, 2),
        "wall_s": round(sum(found["wall_s"] for found in rounds), 2),
        "server_cpu_s": round(cpu_s, 2),
        "client_cpu_s": round(sum(found["client_cpu_s"] for found in rounds), 2),
        "rss_mib": round(max(found["rss_mib"] for found in rounds)),
        "first_audio_p50_ms_rounds": [
            percentile(sorted(each["first_ms"] for each in found["sayings"] if "first_ms" in each), 0.50)
            for found in rounds
        ],
    }


def blank(system: str, way: str, callers: float) -> Row:
    return {**dict.fromkeys(KEYS), "system": system, "way": way, "callers": callers}


def flawless(made: Row, within_ms: float) -> bool:
    """Everybody heard everything, without a gap, and all sentences but one in twenty began within that time. A
    voice that gives whole sentences has no gaps in them: its callers wait before them."""
    p95_ms = made["first_audio_p95_ms"]
    return made["gaps"] == 0 and not made["errors"] and p95_ms is not None and p95_ms <= within_ms


def most(holds: Callable[[int], bool], limit: int) -> tuple[int, list[tuple[int, bool]]]:
    """The largest number up to `limit` that holds, where whatever holds for more holds for fewer; 0: not one does.
    And all that was tried, in order. Doubles until something fails, then halves what lies between, to one in
    sixteen."""
    tried: list[tuple[int, bool]] = []

    def look(number: int) -> bool:
        tried.append((number, holds(number)))
        return tried[-1][1]

    good, bad = 0, 1
    while bad <= limit and look(bad):
        good, bad = bad, min(2 * bad, limit) if bad < limit else limit + 1
    while bad - good > max(1, good // 16):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if look(middle) else (good, middle)
    return good, tried


def brief(made: Row) -> str:
    for trouble in ("skipped", "failed"):
        if trouble in made:
            return f"{trouble}: {made[trouble]}"
    errors = f", errors {made['errors']}" if made["errors"] else ""
    return (
        f"first sound p50 {made['first_audio_p50_ms']} ms, p95 {made['first_audio_p95_ms']} ms, "
        f"rtf {made['rtf']}, {made['gaps']} gaps in {made['sayings']} sentences{errors}"
    )


def table(rows: Sequence[Row]) -> str:
    """For people: one line a row."""
    named = ("system", "way", "callers", "p50 ms", "p95 ms", "max ms", "rtf/core", "gaps", "starved ms", "sentences")
    cells: list[tuple[str, ...]] = [(*named, "errors", "RSS MiB")]
    for made in rows:
        errors = " ".join(f"{status}:{count}" for status, count in (made["errors"] or {}).items())
        cells.append(tuple(report.shown(value) for value in ({**made, "errors": errors or None}[key] for key in KEYS)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in cells]
    troubles = {
        f"{made['system']}: {kind}: {made[kind]}" for made in rows for kind in ("skipped", "failed") if kind in made
    }
    return "\n".join([*text, *sorted(troubles)])
