"""Callers who speak for hours, session after session: what soak.py's scenario `callers` plays, counts and judges.

A caller's clips go out at `speed` times real time over FunASR's realtime WebSocket; after `session_s` of audio it hangs
up and dials again. Words are compared with those of the same clips, each recognized alone by the library: whatever
differs was lost, added or changed on the way through the service, or by what was spoken next to it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import live_report
import live_speech
import live_worker
import numpy as np
import psutil
import serve_load
from clips import Clip
from live_calls import Call
from live_load import CONNECT_S, Line
from live_speech import RATE_HZ, Caller, Pcm
from serve_report import percentile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import asr_serve
from asr_serve.config import EngineConfig
from asr_serve_tools.evaluate.wer import ErrorRate, normalize, wer

Row = dict[str, Any]

SEED = 29
PAUSE_S = 2.5
GRACE_S = 60.0
MAX_SPREAD_S = 8.0
"""Callers dial one after another over so long, as live.py's do."""
STRETCH_S = 600.0
"""Length of a stretch, for which waits for finals are reported together."""
LEAST_MINUTES = 6
"""Minutes of memory that a verdict needs: two in each third."""
LEAST_RECORDED = 0.9
"""Share of the minutes that must have been recorded for a verdict: the thirds are of the whole time only then."""


class Plan(NamedTuple):
    """Size of the run, and its limit of memory."""

    callers: int
    speed: float
    """Seconds of audio that are sent in a second."""
    audio_s: float
    """Audio that each caller sends, pauses included."""
    session_s: float
    """Most audio of a session."""
    flat_mib: float
    """Growth of memory that is still called flat."""


class Speech:
    """Clips as samples, with what voice activity and the library, a clip at a time, make of them."""

    def __init__(self, clips: Sequence[Clip], model: str) -> None:
        self.pcm: list[Pcm] = [
            np.clip(np.rint(clip.audio * 32_768), -32_768, 32_767).astype(np.int16) for clip in clips
        ]
        self.pause = round(PAUSE_S * RATE_HZ)
        self.probabilities = live_worker.voices(self.pcm, self.pause)
        with asr_serve.load(model, engine=EngineConfig(prefix_bytes=0)) as loaded:
            self.texts = [found.text for found in loaded.transcribe([clip.audio for clip in clips])]

    def sessions(self, number: int, plan: Plan) -> Iterator[Caller]:
        """Sessions of one caller, in order: each holds as many clips as fit, at least one."""
        lengths = [len(pcm) for pcm in self.pcm]
        order = serve_load.order(number, len(lengths), SEED)
        left = round(plan.audio_s * RATE_HZ)
        while left > 0:
            caller = live_speech.plan(order, lengths, self.pause, min(left, round(plan.session_s * RATE_HZ)))
            left -= caller.samples + self.pause
            if left < min(lengths):
                left = 0
            yield caller


class Session(NamedTuple):
    """One session that is over."""

    word_errors: ErrorRate | None
    """Words of the session against those of the clips that were sent whole; None without such a clip."""
    finals: list[tuple[float, float]]
    """(when it came, how long it took in ms) of each final of a segment that ended at a pause; those at STOP are left
    out."""
    error: str | None
    refusals: int
    audio_s: float


async def session(caller: Caller, speech: Speech, plan: Plan, url: str, begins_s: float) -> Session:
    """One call, from dialling to its last words; whatever ends it early is in `error`."""
    job = {
        "url": url,
        "protocol": "funasr",
        "silence_ms": None,
        "at_once": False,
        "grace_s": GRACE_S,
        "speed": plan.speed,
    }
    line = Line(begins_s, live_speech.stream(caller, speech.pcm), job)
    await line.run()
    return await asyncio.to_thread(read, line, caller, speech)  # other callers go on meanwhile


def read(line: Line, caller: Caller, speech: Speech) -> Session:
    """What came of a call that is over."""
    messages = line.heard(0.0)
    call = Call(caller, live_speech.voiced(caller, speech.probabilities), messages)
    sent = len(call.moments_s) * live_speech.PACKET_SAMPLES
    starts = zip(caller.clips, caller.starts, strict=True)
    reference = " ".join(speech.texts[clip] for clip, start in starts if start + len(speech.pcm[clip]) <= sent)
    # Sentences without a wait are the last ones of a call that broke off.
    waits = zip(call.sentences, call.finals_ms(0.0), strict=False)
    return Session(
        wer([reference], [" ".join(sentence.text for sentence in call.sentences)]) if normalize(reference) else None,
        [(sentence.arrived_s, wait[0]) for sentence, wait in waits if wait is not None and wait[1] is not None],
        live_report.error_of(messages),
        line.retries,
        min(sent, caller.samples) / RATE_HZ,
    )


async def call_all(speech: Speech, plan: Plan, url: str, ended: Callable[[Session], None]) -> None:
    """Runs all callers until each has sent all its audio; calls `ended` with every session."""
    clock = asyncio.get_running_loop()
    opened_s = clock.time() + CONNECT_S
    spread_s = min(MAX_SPREAD_S, plan.audio_s / plan.speed / 4)

    async def one(number: int) -> None:
        begins_s = opened_s + spread_s * number / plan.callers
        for caller in speech.sessions(number, plan):
            ended(await session(caller, speech, plan, url, begins_s))
            begins_s = clock.time() + CONNECT_S

    await asyncio.gather(*map(one, range(plan.callers)))


def words(sessions: Sequence[Session]) -> Row:
    """Words lost, added and changed between the library's texts of the clips and the texts of the sessions."""
    errors = [each.word_errors for each in sessions if each.word_errors is not None]
    reference = sum(each.reference for each in errors)
    return {
        "words": reference,
        "words_lost": sum(each.deletions for each in errors),
        "words_added": sum(each.insertions for each in errors),
        "words_changed": sum(each.substitutions for each in errors),
        "words_unlike_percent": round(100 * sum(each.errors for each in errors) / reference, 2) if reference else None,
    }


def stretches(finals: Sequence[tuple[float, float]], begun_s: float) -> list[Row]:
    """Number of finals in each stretch since `begun_s`, and the 95th and 99th percentiles of their waits."""
    by_stretch: dict[int, list[float]] = {}
    for came_s, wait_ms in finals:
        by_stretch.setdefault(int((came_s - begun_s) // STRETCH_S), []).append(wait_ms)
    return [
        {
            "from_minute": round(number * STRETCH_S / 60),
            "finals": len(waits),
            "p95_ms": percentile(sorted(waits), 0.95),
            "p99_ms": percentile(sorted(waits), 0.99),
        }
        for number, waits in sorted(by_stretch.items())
    ]


def is_flat(rss_mib: Sequence[float], wall_min: float, most_mib: float) -> Row:
    """Whether memory grew by less than `most_mib` from the second third of the minutes to the last, by their medians.
    The first third is warming up. Null where there are too few minutes, or too many of `wall_min` were not recorded."""
    if len(rss_mib) < max(LEAST_MINUTES, LEAST_RECORDED * wall_min):
        return {"rss_growth_mib": None, "memory_flat": None}
    third = len(rss_mib) // 3
    growth = round(median(rss_mib[-third:]) - median(rss_mib[-2 * third : -third]), 1)
    return {"rss_growth_mib": growth, "memory_flat": growth < most_mib}


class Soak:
    """Sessions and minutes of a run so far, and its row in the result."""

    def __init__(self, plan: Plan, folder: str) -> None:
        self.plan, self.folder = plan, folder
        self.sessions: list[Session] = []
        self.minutes: list[Row] = []
        self._begun_s = time.monotonic()

    def row(self) -> Row:
        finals = [final for each in self.sessions for final in each.finals]
        rss = [minute["rss_mib"] for minute in self.minutes]
        early = Counter(each.error for each in self.sessions if each.error)
        audio_s = sum(each.audio_s for each in self.sessions)
        return {
            "speech": self.folder,
            "callers": self.plan.callers,
            "speed": self.plan.speed,
            "minutes": round(self.plan.audio_s / 60, 2),
            "session_minutes": round(self.plan.session_s / 60, 2),
            "audio_h": round(audio_s / 3_600, 3),
            "sessions": len(self.sessions),
            "ended_early": dict(early),
            "refusals": sum(each.refusals for each in self.sessions),
            **words(self.sessions),
            "finals": len(finals),
            "final_p95_ms": percentile(sorted(wait for _, wait in finals), 0.95),
            "stretches": stretches(finals, self._begun_s),
            "flat_below_mib": self.plan.flat_mib,
            **is_flat(rss, (time.monotonic() - self._begun_s) / 60, self.plan.flat_mib),
            "memory": self.minutes,
        }

    def minute(self, server: Any) -> Row:
        """Records the server's memory, pages and sessions. Raises OSError, HTTPException or psutil.Error where the
        server does not answer."""
        server.watch()
        self.minutes.append(
            {
                "minute": round((time.monotonic() - self._begun_s) / 60, 1),
                "rss_mib": server.rss_mib[-1],
                "pages_used": server.metric("asr_serve_pages_used"),
                "sessions": server.metric("asr_serve_live_open_sessions"),
                "rows": server.metric("asr_serve_sessions"),
            }
        )
        ended = sum(each.error is not None for each in self.sessions)
        return {**self.minutes[-1], "sessions_done": len(self.sessions), "ended_early": ended}

    async def watch(self, server: Any, report: Callable[[Row], None], every_s: float = 60.0) -> None:
        """Records a minute each `every_s` and calls `report` with it, until it is cancelled. A minute in which the
        server does not answer is printed, and missing in the row."""
        while True:
            try:
                minute = await asyncio.to_thread(self.minute, server)
            except (OSError, HTTPException, psutil.Error) as failure:
                print(f"a minute was not recorded: {type(failure).__name__}: {failure}", file=sys.stderr, flush=True)
            else:
                report(minute)
            await asyncio.sleep(every_s)
