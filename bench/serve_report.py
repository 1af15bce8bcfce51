"""From answers to rows: rates, percentiles, error rates, and how the service compares with the engine alone."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import report

Row = dict[str, Any]
KEYS = (
    "system",
    "clients",
    "rps",
    "rtfx",
    "p50_ms",
    "p95_ms",
    "p99_ms",
    "max_ms",
    "errors",
    "wer",
    "server_cpu_s",
    "client_cpu_s",
    "rss_mib",
)
"""What every row has; null where it was not measured."""
OURS = "asr-serve"
OFFLINE = "asr-serve offline"
WHOLE = "asr-serve offline whole"
"""The engine without a server, with voice activity and without."""
TARGET_CLIENTS = 32
"""The number of clients that the summary speaks of, where it was measured."""


def row(system: str, clients: int, rounds: Sequence[Row], references: Sequence[str], lengths_s: Sequence[float]) -> Row:
    """The round whose `rps` is the median one, with the errors of all of them and the worst error rate."""
    for found in rounds:
        for trouble in ("skipped", "failed"):
            if trouble in found:
                return {**blank(system, clients), trouble: found[trouble]}
    measured = [facts(found, lengths_s) for found in rounds]
    heard = [texts(found) for found in rounds]
    middle = sorted(range(len(rounds)), key=lambda place: measured[place]["rps"])[(len(rounds) - 1) // 2]
    return {
        **blank(system, clients),
        **measured[middle],
        "errors": dict(sum((Counter(made["errors"]) for made in measured), Counter())),
        "wer": max((rate for pairs in heard if (rate := error_rate(references, pairs)) is not None), default=None),
        "unsteady_clips": sum(len(said) > 1 for said in by_clip([pair for pairs in heard for pair in pairs]).values()),
        "rps_rounds": [made["rps"] for made in measured],
        "p99_ms_rounds": [made["p99_ms"] for made in measured],
    }


def facts(found: Row, lengths_s: Sequence[float]) -> Row:
    """One level of one round.

    Rates count the answers that ended while it lasted; latencies and errors, the requests begun while it did.
    """
    wall_s, answers = found["wall_s"], found["answers"]
    done = [answer["clip"] for answer in answers if answer["ended_inside"] and text_of(answer) is not None]
    begun = [answer for answer in answers if answer["begun_inside"]]
    latencies_ms = sorted(1_000 * answer["latency_s"] for answer in begun if text_of(answer) is not None)
    errors = Counter(
        "unreadable" if answer["status"] == 200 else str(answer["status"])
        for answer in begun
        if text_of(answer) is None
    )
    errors["429"] += found["refused"]
    p50_ms, p95_ms, p99_ms = (percentile(latencies_ms, share) for share in (0.50, 0.95, 0.99))
    return {
        "rps": round(len(done) / wall_s, 2),
        "rtfx": round(sum(lengths_s[clip] for clip in done) / wall_s, 2),
        "p50_ms": p50_ms,
        "p95_ms": p95_ms,
        "p99_ms": p99_ms,
        "max_ms": percentile(latencies_ms, 1.0),
        "p99_over_p50": round(p99_ms / p50_ms, 2) if p50_ms and p99_ms else None,
        "errors": dict(+errors),
        "server_cpu_s": round(found["server_cpu_s"], 2),
        "client_cpu_s": round(found["client_cpu_s"], 2),
        "rss_mib": round(found["rss_mib"]),
        "requests": len(begun),
        "wall_s": round(wall_s, 2),
        "reconnects": found["reconnects"],
    }


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Nearest rank: the smallest value that `share` of all do not exceed. None when there is none."""
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 1) if ordered else None


def text_of(answer: Row) -> str | None:
    """The text of an answer; None when it has none, whatever its status says."""
    if answer["status"] != 200:
        return None
    try:
        text = json.loads(answer["body"])["text"]
    except (ValueError, TypeError, KeyError):
        return None
    return text if isinstance(text, str) else None


def texts(found: Row) -> list[tuple[int, str]]:
    """(clip, text) of every answer that was counted in some way."""
    counted = (answer for answer in found["answers"] if answer["begun_inside"] or answer["ended_inside"])
    return [(answer["clip"], text) for answer in counted if (text := text_of(answer)) is not None]


def by_clip(pairs: Sequence[tuple[int, str]]) -> dict[int, Counter[str]]:
    heard: dict[int, Counter[str]] = {}
    for clip, text in pairs:
        heard.setdefault(clip, Counter())[text] += 1
    return heard


def error_rate(references: Sequence[str], pairs: Sequence[tuple[int, str]]) -> float | None:
    """Percent over the clips that were answered, each with its mean errors.

    Some clips were asked for more often than others; so that this does not show, each counts once.
    """
    errors = words = 0.0
    for clip, heard in by_clip(pairs).items():
        rates = [(*word_errors(references[clip], text), times) for text, times in heard.items()]
        errors += sum(wrong * times for wrong, _, times in rates) / heard.total()
        words += rates[0][1]
    return round(100 * errors / words, 2) if words else None


@cache
def word_errors(reference: str, text: str) -> tuple[int, int]:
    """Errors, and words in the reference."""
    from asr_serve_tools.evaluate.wer import wer

    rate = wer(["word", reference], ["word", text])  # a word of its own: wer wants one, references may be empty
    return rate.errors, rate.reference - 1


def alone(system: str, rounds: Sequence[Row], references: Sequence[str]) -> Row:
    """The engine without a server: the median pass over all clips."""
    made = report.row(system, rounds, references)
    for trouble in ("skipped", "failed"):
        if trouble in made:
            return {**blank(system, None), trouble: made[trouble]}
    return {
        **blank(system, None),
        "rps": round(len(references) / made["wall_s"], 2),
        "rtfx": made["rtfx"],
        "wer": made["wer"],
        "server_cpu_s": made["cpu_s"],
        "rss_mib": made["peak_mib"],
        "wall_s": made["wall_s"],
        "rtfx_rounds": [round(found["audio_s"] / statistics.median(found["walls_s"]), 2) for found in rounds],
        "notes": made["notes"],
    }


def blank(system: str, clients: int | None) -> Row:
    return {**dict.fromkeys(KEYS), "system": system, "clients": clients}


def summarize(rows: Sequence[Row]) -> list[Row]:
    """What each server comes to. Adds `share_of_offline` to the rows of ours.

    share_of_offline       speed at 32 clients (or at the most there were) over the engine's without a server
    p99_over_p50           at that number of clients
    held_past_saturation   requests a second at the most clients over the best there was; 0 when that level failed
    """
    speeds = {made["system"]: made["rtfx"] for made in rows if made["clients"] is None}
    served = [made for made in rows if made["clients"] is not None]
    found = []
    for system in dict.fromkeys(made["system"] for made in served):
        levels = sorted((made for made in served if made["system"] == system), key=lambda made: made["clients"])
        best_rps = max(made["rps"] or 0.0 for made in levels)
        if not best_rps:
            continue
        for made in levels if system == OURS else ():
            for key, name in (("share_of_offline", OFFLINE), ("share_of_offline_whole", WHOLE)):
                made[key] = round(made["rtfx"] / speeds[name], 3) if made["rtfx"] and speeds.get(name) else None
        at = next((made for made in levels if made["clients"] == TARGET_CLIENTS), levels[-1])
        keys = ("rps", "rtfx", "share_of_offline", "share_of_offline_whole", "p99_over_p50")
        found.append(
            {
                "system": system,
                "at_clients": at["clients"],
                **{key: at[key] for key in keys if key in at},
                "held_past_saturation": round((levels[-1]["rps"] or 0.0) / best_rps, 3),
            }
        )
    return found


def brief(found: Row, lengths_s: Sequence[float]) -> str:
    made = facts(found, lengths_s)
    errors = f", errors {made['errors']}" if made["errors"] else ""
    return (
        f"{made['rps']} requests/s, {made['rtfx']} x real time, p50 {made['p50_ms']} ms, p99 {made['p99_ms']} ms"
        f"{errors}; {made['requests']} requests in {made['wall_s']} s"
    )


def table(rows: Sequence[Row]) -> str:
    """For people: one line a row."""
    speeds = ("system", "clients", "req/s", "x real time", "p50 ms", "p95 ms", "p99 ms", "max ms", "errors")
    cells: list[tuple[str, ...]] = [(*speeds, "WER %", "server cpu s", "client cpu s", "RSS MiB")]
    for made in rows:
        errors = " ".join(f"{status}:{count}" for status, count in (made["errors"] or {}).items())
        cells.append(tuple(report.shown(value) for value in ({**made, "errors": errors or None}[key] for key in KEYS)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in cells]
    troubles = {
        f"{made['system']}: {kind}: {made[kind]}" for made in rows for kind in ("skipped", "failed") if kind in made
    }
    return "\n".join([*text, *sorted(troubles)])


def lines(summary: Sequence[Row]) -> str:
    return "\n".join("  ".join(f"{key}={value}" for key, value in made.items()) for made in summary)
