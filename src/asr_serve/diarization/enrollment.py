"""Speakers who are known, by what a few seconds of each sound like: they are told by their names."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from asr_serve.diarization.diarize import Diarization
from asr_serve.diarization.local_speakers import LocalSpeakers
from asr_serve.diarization.speaker_groups import ALIKE


def dominant_embedding(heard: LocalSpeakers) -> np.ndarray | None:
    """(width,) of whoever speaks most in a window; None where nobody speaks long enough to be known by it."""
    if not heard.who:
        return None
    longest = heard.active.sum(0)
    most = max(range(len(heard.who)), key=lambda each: int(longest[heard.who[each]]))
    found: np.ndarray = heard.embeddings[most]
    return found


def rename_enrolled(found: Diarization, known: Mapping[str, np.ndarray]) -> Diarization:
    """The same, with names for those who are alike enough: the surest pair first, each name once. Who is left is
    numbered anew, by who of them spoke first."""
    names = _names(found.voices, known)
    order = dict.fromkeys(turn.speaker for turn in found.turns)
    others = (speaker for speaker in order if speaker not in names)
    names |= {speaker: f"SPEAKER_{number:02d}" for number, speaker in enumerate(others)}
    return Diarization(
        tuple(msgspec.structs.replace(turn, speaker=names[turn.speaker]) for turn in found.turns),
        {names[speaker]: direction for speaker, direction in found.voices.items()},
    )


def _names(voices: Mapping[str, np.ndarray], known: Mapping[str, np.ndarray]) -> dict[str, str]:
    pairs = sorted(
        ((float(heard @ own), speaker, name) for speaker, heard in voices.items() for name, own in known.items()),
        key=lambda pair: -pair[0],
    )
    names: dict[str, str] = {}
    for alike, speaker, name in pairs:
        if alike >= ALIKE[1] and speaker not in names and name not in names.values():
            names[speaker] = name
    return names
