"""Tables of a transcript for scoring and annotation programs: RTTM, CTM, TextGrid.

Source  RTTM and CTM: NIST's RT-09 evaluation plan, appendix A, and SCTK; TextGrid: Praat's manual, "TextGrid file
        formats", the long format
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import NamedTuple

from asr_serve.text.formats.subtitle_tokens import clean_text
from asr_serve.types import SpeakerTurn, Transcript
from asr_serve.units import samples_to_ms, samples_to_s

_UNFIT = re.compile(r"[\s;]+")
"""Characters that end a field, or begin a comment."""


class TextGridInterval(NamedTuple):
    """Interval of a TextGrid tier."""

    start_samples: int
    end_samples: int
    text: str


def rttm(transcript: Transcript) -> str:
    """RTTM: a line for each speaker turn. Turns may overlap."""
    name = recording_name(transcript.key)
    lines = []
    for turn in speaker_turns(transcript):
        start, end = samples_to_ms(turn.start_samples), samples_to_ms(turn.end_samples)
        if end > start:
            times = f"{_seconds(start)} {_seconds(end - start)}"
            lines.append(f"SPEAKER {name} 1 {times} <NA> <NA> {column_value(turn.speaker)} <NA> <NA>\n")
    return "".join(lines)


def ctm(transcript: Transcript) -> str:
    """CTM: a line for each word in order of time, as sclite requires, with its time and confidence. A word that
    contains a space becomes a line for each part; its time is divided by characters."""
    name = recording_name(transcript.key)
    lines: list[tuple[int, str]] = []
    for word in (word for segment in transcript.segments for word in segment.words):
        parts = word.text.split()
        total, passed = sum(map(len, parts)), 0
        start, length = word.start_samples, word.end_samples - word.start_samples
        for part in parts:
            begins = samples_to_ms(start + length * passed // total)
            passed += len(part)
            ends = samples_to_ms(start + length * passed // total)
            fields = f"{_seconds(begins)} {_seconds(ends - begins)} {column_value(part)} {word.confidence:.3f}"
            lines.append((begins, f"{name} 1 {fields}\n"))
    lines.sort(key=lambda line: line[0])  # of speakers who talk at once
    return "".join(line for _, line in lines)


def textgrid(transcript: Transcript) -> str:
    """TextGrid with the tiers `words`, `segments` and `speakers`; where several people speak at once, `speakers`
    names all of them."""
    words = [word for segment in transcript.segments for word in segment.words]
    words.sort(key=lambda word: word.start_samples)  # of speakers who talk at once
    tiers = {
        "words": [TextGridInterval(word.start_samples, word.end_samples, word.text) for word in words],
        "segments": [TextGridInterval(s.start_samples, s.end_samples, s.text) for s in transcript.segments],
        "speakers": [*_together(speaker_turns(transcript))],
    }
    ends = [interval.end_samples for tier in tiers.values() for interval in tier]
    # Praat does not open a file of no length.
    end = max([transcript.duration_samples, 1, *ends])
    lines = [
        'File type = "ooTextFile"',
        'Object class = "TextGrid"',
        "",
        "xmin = 0",
        f"xmax = {_exact(end)}",
        "tiers? <exists>",
        f"size = {len(tiers)}",
        "item []:",
    ]
    for number, (name, tier) in enumerate(tiers.items(), start=1):
        filled = _filled(tier, end)
        lines += [
            f"    item [{number}]:",
            '        class = "IntervalTier"',
            f'        name = "{name}"',
            "        xmin = 0",
            f"        xmax = {_exact(end)}",
            f"        intervals: size = {len(filled)}",
        ]
        for index, interval in enumerate(filled, start=1):
            quoted = clean_text(interval.text).replace('"', '""')
            lines += [
                f"        intervals [{index}]:",
                f"            xmin = {_exact(interval.start_samples)}",
                f"            xmax = {_exact(interval.end_samples)}",
                f'            text = "{quoted}"',
            ]
    return "\n".join(lines) + "\n"


def speaker_turns(transcript: Transcript) -> Sequence[SpeakerTurn]:
    """Speaker turns of a transcript; without any, turns made of its segments."""
    if transcript.turns:
        return transcript.turns
    return [SpeakerTurn(s.speaker, s.start_samples, s.end_samples) for s in transcript.segments if s.speaker]


def recording_name(key: str) -> str:
    """Name of the recording in a table: the file's name without folder and suffix.

    >>> recording_name("calls/monday 7.wav"), recording_name("")
    ('monday_7', 'audio')
    """
    return column_value(PurePath(key).stem) if key.strip() else "audio"


def column_value(text: str) -> str:
    """Text as the value of one column; never empty."""
    return _UNFIT.sub("_", clean_text(text)) or "_"


def _together(spoken: Iterable[SpeakerTurn]) -> Iterable[TextGridInterval]:
    """Intervals in which the same people speak."""
    edges = sorted(
        edge
        for turn in spoken
        if turn.end_samples > turn.start_samples
        for edge in ((turn.start_samples, 1, turn.speaker), (turn.end_samples, 0, turn.speaker))
    )
    speaking: list[str] = []
    before = 0
    for at, begins, speaker in edges:
        if speaking and at > before:
            yield TextGridInterval(before, at, " + ".join(sorted(set(speaking))))
        before = at
        if begins:
            speaking.append(speaker)
        else:
            speaking.remove(speaker)


def _filled(tier: Iterable[TextGridInterval], end: int) -> list[TextGridInterval]:
    """Tier without gaps from 0 to the end, as TextGrid requires. The text of an interval of no length joins the
    next one, or the one before; that of an interval inside others joins the one in which it begins."""
    intervals: list[TextGridInterval] = []
    at, pending = 0, ""
    for interval in tier:
        if interval.start_samples < at and interval.end_samples <= at:
            index = bisect_right(intervals, interval.start_samples, key=lambda each: each.start_samples) - 1
            covering = intervals[index]
            intervals[index] = covering._replace(text=f"{covering.text} {interval.text}".strip())
            continue
        text = f"{pending} {interval.text}".strip()
        start = max(at, interval.start_samples)
        if interval.end_samples <= start:
            pending = text
            continue
        if start > at:
            intervals.append(TextGridInterval(at, start, ""))
        intervals.append(TextGridInterval(start, interval.end_samples, text))
        at, pending = interval.end_samples, ""
    if at < end:
        intervals.append(TextGridInterval(at, end, pending))
    elif pending:
        intervals[-1] = intervals[-1]._replace(text=f"{intervals[-1].text} {pending}")
    return intervals


def _seconds(ms: int) -> str:
    return f"{ms // 1_000}.{ms % 1_000:03}"


def _exact(samples: int) -> str:
    """Time in seconds, exact to the sample, so that adjacent intervals meet to the last digit."""
    return f"{samples_to_s(samples):.7f}".rstrip("0").rstrip(".")
