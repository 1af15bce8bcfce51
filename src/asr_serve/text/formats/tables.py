"""A transcript as tables for programs that score and annotate: RTTM, CTM, TextGrid.

Source  RTTM and CTM: NIST's RT-09 evaluation plan, appendix A, and SCTK; TextGrid: Praat's manual, "TextGrid file
        formats", the long one
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import NamedTuple

from asr_serve.text.formats.subtitle_tokens import clean_text
from asr_serve.types import SpeakerTurn, Transcript
from asr_serve.units import samples_to_ms, samples_to_s

_UNFIT = re.compile(r"[\s;]+")
"""They end a field, or begin a comment."""


class TextGridInterval(NamedTuple):
    """Of a tier."""

    start_samples: int
    end_samples: int
    text: str


def rttm(transcript: Transcript) -> str:
    """Who spoke when: a line for each turn. Turns may overlap."""
    name = recording_name(transcript.key)
    lines = []
    for turn in speaker_turns(transcript):
        start, end = samples_to_ms(turn.start_samples), samples_to_ms(turn.end_samples)
        if end > start:
            said = f"{_seconds(start)} {_seconds(end - start)}"
            lines.append(f"SPEAKER {name} 1 {said} <NA> <NA> {column_value(turn.speaker)} <NA> <NA>\n")
    return "".join(lines)


def ctm(transcript: Transcript) -> str:
    """When which word was said, and how sure the model was: a line for each. A word that is written with a space
    inside is a line for each part, which share its time by their characters."""
    name = recording_name(transcript.key)
    lines = []
    for word in (word for segment in transcript.segments for word in segment.words):
        parts = word.text.split()
        total, passed = sum(map(len, parts)), 0
        start, length = word.start_samples, word.end_samples - word.start_samples
        for part in parts:
            begins = samples_to_ms(start + length * passed // total)
            passed += len(part)
            ends = samples_to_ms(start + length * passed // total)
            told = f"{_seconds(begins)} {_seconds(ends - begins)} {column_value(part)} {word.confidence:.3f}"
            lines.append(f"{name} 1 {told}\n")
    return "".join(lines)


def textgrid(transcript: Transcript) -> str:
    """Tiers `words`, `segments` and `speakers`; where several speak at once, the last names all of them."""
    found = (word for segment in transcript.segments for word in segment.words)
    tiers = {
        "words": [TextGridInterval(word.start_samples, word.end_samples, word.text) for word in found],
        "segments": [TextGridInterval(s.start_samples, s.end_samples, s.text) for s in transcript.segments],
        "speakers": [*_together(speaker_turns(transcript))],
    }
    ends = [each.end_samples for tier in tiers.values() for each in tier]
    # Praat opens nothing of no length.
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
        for index, each in enumerate(filled, start=1):
            quoted = clean_text(each.text).replace('"', '""')
            lines += [
                f"        intervals [{index}]:",
                f"            xmin = {_exact(each.start_samples)}",
                f"            xmax = {_exact(each.end_samples)}",
                f'            text = "{quoted}"',
            ]
    return "\n".join(lines) + "\n"


def speaker_turns(transcript: Transcript) -> Sequence[SpeakerTurn]:
    """Its turns; of one that has none, those that its segments tell."""
    if transcript.turns:
        return transcript.turns
    return [SpeakerTurn(s.speaker, s.start_samples, s.end_samples) for s in transcript.segments if s.speaker]


def recording_name(key: str) -> str:
    """The name of the recording in a table: its file's, without folder and suffix.

    >>> recording_name("calls/monday 7.wav"), recording_name("")
    ('monday_7', 'audio')
    """
    return column_value(PurePath(key).stem) if key.strip() else "audio"


def column_value(text: str) -> str:
    """What may stand in one column."""
    return _UNFIT.sub("_", clean_text(text)) or "_"


def _together(spoken: Iterable[SpeakerTurn]) -> Iterable[TextGridInterval]:
    """Stretches in which the same people speak."""
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
    """Without gaps, from 0 to the end: intervals of a tier meet. What has no length joins what comes next, or the
    one before."""
    found: list[TextGridInterval] = []
    at, held = 0, ""
    for each in tier:
        text = f"{held} {each.text}".strip()
        start = max(at, each.start_samples)
        if each.end_samples <= start:
            held = text
            continue
        if start > at:
            found.append(TextGridInterval(at, start, ""))
        found.append(TextGridInterval(start, each.end_samples, text))
        at, held = each.end_samples, ""
    if at < end:
        found.append(TextGridInterval(at, end, held))
    elif held:
        found[-1] = found[-1]._replace(text=f"{found[-1].text} {held}")
    return found


def _seconds(ms: int) -> str:
    return f"{ms // 1_000}.{ms % 1_000:03}"


def _exact(samples: int) -> str:
    """Seconds to the sample: neighbours must meet to the last digit."""
    return f"{samples_to_s(samples):.7f}".rstrip("0").rstrip(".")
