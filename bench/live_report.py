"""From calls to rows: percentiles, what was missed, how many words were wrong, and how many callers were fine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import report
from live_calls import Call, Heard
from live_speech import RATE_HZ, WINDOW_SAMPLES
from serve_report import percentile

Row = dict[str, Any]

OURS = "asr-serve"
KEYS = (
    "system",
    "protocol",
    "callers",
    "first_word_p50_ms",
    "first_word_p95_ms",
    "first_right_p50_ms",
    "final_p50_ms",
    "final_p95_ms",
    "final_p99_ms",
    "settled_p50_ms",
    "settled_p95_ms",
    "after_speech_p50_ms",
    "after_speech_p95_ms",
    "realtime_misses",
    "wer",
    "offline_wer",
    "partials_per_s",
    "partial_interval_p50_ms",
    "errors",
    "refused",
    "retries",
    "admitted_p50_s",
    "admitted_p95_s",
    "server_cpu",
    "load_cpu",
    "others_cpu",
    "duty",
    "batch_lines_per_s",
    "seconds",
    "audio_s",
)
"""What every row has; null where it was not measured, or has no meaning for the system."""
LATE_MS = 1_000
"""A final later than this is a real-time miss."""
HELD_MS = 100
"""So is a packet of ours that the server did not take for so long."""
BEHIND_MS = 1_000
"""A peer works in the call that takes the packet: it may be this far behind before that is a miss."""


def row(
    system: str, calls: Sequence[Call], found: Row, references: Sequence[str], seconds: float, *, at_once: bool = False
) -> Row:
    """One level. references: what each clip says. Latencies count from when every caller was on the line, those of
    callers who all dialled `at_once` from when the first one was."""
    begun_s = sorted(call.heard["begun_s"] for call in calls)
    since_s = begun_s[0] if at_once else begun_s[-1]
    said = [" ".join(references[clip] for clip in call.caller.clips) for call in calls]
    first = [wait for call in calls for wait in call.first_words_ms(since_s)]
    finals = [final for call in calls for final in call.finals_ms(since_s)]
    after = [pair for call in calls for pair in call.after_speech_ms(since_s)]
    closed = [final for final in finals if final is not None]
    ours = system == OURS
    misses = missed(calls, [wait for wait, _ in closed] if ours else [], HELD_MS if ours else BEHIND_MS)
    partials = [times for call in calls for times in call.partials_s()]
    intervals = [later - earlier for times in partials for earlier, later in pairwise(times)]
    silences = [silence for _, silence in closed if silence is not None]
    audio_s = sum(call.caller.samples for call in calls) / RATE_HZ
    made = {
        **blank(system, len(calls)),
        **shares("first_word", [pair[0] for pair in first if pair is not None], (50, 95)),
        **shares("first_right", [pair[1] for pair in first if pair is not None], (50,)),
        **(shares("final", [wait for wait, _ in closed], (50, 95, 99, 100)) if ours else {}),
        **shares("settled", [settled for settled, _ in after], (50, 95)),
        **shares("after_speech", [locked for _, locked in after], (50, 95)),
        "realtime_misses": sum(misses.values()),
        "wer": error_rate(said, [" ".join(text.text for text in call.sentences) for call in calls]),
        "partials_per_s": round(sum(map(len, partials)) / found["wall_s"], 2),
        "partial_interval_p50_ms": percentile(sorted(1_000 * interval for interval in intervals), 0.5),
        "errors": dict(Counter(trouble for call in calls if (trouble := error_of(call.heard)))),
        "retries": sum(call.heard.get("retries", 0) for call in calls),
        **({f"admitted_p{percent}_s": percentile(begun_s, percent / 100) for percent in (50, 95)} if at_once else {}),
        "server_cpu": round(found["server_cpu"], 3),
        "load_cpu": None if found["load_cpu"] is None else round(found["load_cpu"], 3),
        "others_cpu": round(max(0.0, found["others_cpu"]), 3),
        "duty": round(sum(call.voiced.sum() for call in calls) * WINDOW_SAMPLES / RATE_HZ / audio_s, 3),
        "seconds": seconds,
        "audio_s": round(audio_s, 1),
        "misses": misses,
        "first_words": len(first),
        "unheard": sum(pair is None for pair in first),
        "sentences": sum(len(call.sentences) for call in calls),
        "lag_p99_ms": percentile(sorted(lag for call in calls for lag in call.heard["lags_ms"]), 0.99),
        "wait_p99_ms": percentile(sorted(wait for call in calls for wait in call.heard["waits_ms"]), 0.99),
        "rss_mib": round(found["rss_mib"]),
    }
    if ours:
        made["cut"] = sum(final is None for final in finals)
        made["silence_mean_ms"] = round(float(np.mean(silences)), 1) if silences else None
    return made


def missed(calls: Sequence[Call], finals_ms: Sequence[float], wait_ms: float) -> Row:
    """Real-time misses by kind."""
    return {
        "late_finals": sum(wait > LATE_MS for wait in finals_ms),
        "late_packets": sum(wait > wait_ms for call in calls for wait in call.heard["waits_ms"]),
        "lost_sessions": sum(error_of(call.heard) is not None for call in calls),
    }


def error_of(heard: Heard) -> str | None:
    """Why a call did not reach its end; None when it did."""
    error: str | None = heard["error"]
    return error or ("broke off" if heard["stop_s"] is None else None)


def error_rate(said: Sequence[str], heard: Sequence[str]) -> float:
    from asr_serve_tools.evaluate.wer import wer

    return round(wer(said, heard).percent, 2)


def shares(name: str, values_ms: Sequence[float], percents: Sequence[int]) -> Row:
    ordered = sorted(values_ms)
    return {f"{name}_p{percent}_ms": percentile(ordered, percent / 100) for percent in percents}


def blank(system: str, callers: int) -> Row:
    return {**dict.fromkeys(KEYS), "system": system, "callers": callers}


def holds(made: Row, final_ms: float = 500, first_word_ms: float = 900) -> bool:
    """Returns whether a level was fine: everything in time, and ours as quick as it should be; a peer has no target."""
    if "failed" in made or "skipped" in made or made["realtime_misses"] or made.get("refused"):
        return False
    return made["system"] != OURS or all(
        made[key] is not None and made[key] < limit
        for key, limit in (("final_p95_ms", final_ms), ("first_word_p50_ms", first_word_ms))
    )


def summarize(rows: Sequence[Row]) -> list[Row]:
    """For each system the most callers that were fine, and the fewest that were not."""
    found = []
    for system, protocol in dict.fromkeys((made["system"], made["protocol"]) for made in rows):
        its = [made for made in rows if (made["system"], made["protocol"]) == (system, protocol)]
        measured = [made for made in its if "skipped" not in made]
        broken = min((made["callers"] for made in measured if not holds(made)), default=None)
        held = [made["callers"] for made in measured if holds(made) and (broken is None or made["callers"] < broken)]
        if measured:
            found.append(
                {"system": system, "protocol": protocol, "held_callers": max(held, default=0), "broken_callers": broken}
            )
    return found


def brief(made: Row) -> str:
    for trouble in ("skipped", "failed"):
        if trouble in made:
            return f"{made['callers']} callers: {trouble}: {made[trouble]}"
    protocol = f"{made['protocol']}, " if made["protocol"] else ""
    return (
        f"{protocol}{made['callers']} callers: first word p50 {made['first_word_p50_ms']} ms, "
        f"final p95 {made['final_p95_ms']} ms, locked p50 {made['after_speech_p50_ms']} ms after speech, "
        f"{made['realtime_misses']} misses, "
        f"WER {made['wer']}, {made['server_cpu']} cores"
    )


def table(rows: Sequence[Row]) -> str:
    """For people: one line a row."""
    keys = [key for key in KEYS if key not in ("seconds", "audio_s", "partial_interval_p50_ms")]
    cells = [[key.removesuffix("_ms").replace("_", " ") for key in keys]]
    for made in rows:
        errors = " ".join(f"{kind}:{count}" for kind, count in (made["errors"] or {}).items())
        cells.append([report.shown(value) for value in ({**made, "errors": errors or None}[key] for key in keys)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in cells]
    troubles = [
        f"{made['system']} {made['callers']}: {kind}: {made[kind]}"
        for made in rows
        for kind in ("skipped", "failed")
        if kind in made
    ]
    return "\n".join([*text, *troubles])
