"""Subtitle formats of a transcript: SubRip and WebVTT.

Source  WebVTT: https://www.w3.org/TR/webvtt1/: voices, timestamps inside cues, escapes
"""

from __future__ import annotations

from collections.abc import Iterable

from asr_serve.text.formats.cues import Cue, build_cues
from asr_serve.text.formats.subtitle_tokens import SubtitleToken, clean_text
from asr_serve.types import Transcript
from asr_serve.units import samples_to_ms

_VTT_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def srt(transcript: Transcript) -> str:
    """SubRip. It has no escapes, so `-->` in the text becomes one character; and no speakers, so a name is written
    where the speaker changes."""
    cues = build_cues(transcript.segments, samples_to_ms(transcript.duration_samples), names=True)
    blocks = (
        f"{number}\n{stamp(cue.start_ms, ',')} --> {stamp(cue.end_ms, ',')}\n"
        + "".join(f"{line.replace('-->', '→')}\n" for line in cue.lines)
        for number, cue in enumerate(cues, start=1)
    )
    return "\n".join(blocks)


def vtt(transcript: Transcript, *, karaoke: bool = False) -> str:
    """WebVTT; `&`, `<` and `>` (and so `-->`) are escaped. The speaker is a voice tag, `<v Ada>`. `karaoke`: each
    word with a known time follows its timestamp, so that a player can show it as it is spoken."""
    blocks = (
        f"{stamp(cue.start_ms, '.')} --> {stamp(cue.end_ms, '.')}\n{_voice(cue)}"
        + "".join(f"{line}\n" for line in (_karaoke(cue) if karaoke else map(_escaped, cue.lines)))
        for cue in build_cues(transcript.segments, samples_to_ms(transcript.duration_samples))
    )
    return "\n".join(["WEBVTT\n", *blocks])


def karaoke(transcript: Transcript) -> str:
    """WebVTT with a timestamp before each word."""
    return vtt(transcript, karaoke=True)


def stamp(ms: int, point: str) -> str:
    """Time as `01:02:03,004`, with `point` before the milliseconds; hours may have more than two digits."""
    seconds, ms = divmod(ms, 1_000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{point}{ms:03}"


def _voice(cue: Cue) -> str:
    name = _escaped(clean_text(cue.speaker))
    return f"<v {name}>" if name else ""


def _escaped(line: str) -> str:
    return line.translate(_VTT_ESCAPES)


def _karaoke(cue: Cue) -> Iterable[str]:
    """Lines of a cue with timestamps, which increase and lie inside the cue's time."""
    last_ms = cue.start_ms
    for row in cue.rows:
        line = ""
        for number, piece in enumerate(row):
            line += " " if number and piece.spaced else ""
            if _stands(piece, last_ms, cue.end_ms):
                last_ms = piece.start_ms
                line += f"<{stamp(last_ms, '.')}>"
            line += _escaped(piece.text)
        yield line


def _stands(piece: SubtitleToken, last_ms: int, end_ms: int) -> bool:
    return piece.timed and last_ms < piece.start_ms < end_ms
