"""Enrolled speakers: known voices, from a few seconds of each, give their names to the speakers of a recording."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from asr_serve.diarization.diarize import Diarization
from asr_serve.diarization.local_speakers import LocalSpeakers
from asr_serve.diarization.speaker_groups import ALIKE


def dominant_embedding(heard: LocalSpeakers) -> np.ndarray | None:
    """Returns the embedding (width,) of whoever speaks most in a window; None where nobody speaks long enough."""
    if not heard.who:
        return None
    frames = heard.active.sum(0)
    most = max(range(len(heard.who)), key=lambda index: int(frames[heard.who[index]]))
    embedding: np.ndarray = heard.embeddings[most]
    return embedding


def rename_enrolled(found: Diarization, known: Mapping[str, np.ndarray]) -> Diarization:
    """Renames the speakers that are similar enough to an enrolled voice: the most similar pair first, each name
    once. The others are renumbered in the order of their first speech."""
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
        (
            (float(embedding @ own), speaker, name)
            for speaker, embedding in voices.items()
            for name, own in known.items()
        ),
        key=lambda pair: -pair[0],
    )
    names: dict[str, str] = {}
    for alike, speaker, name in pairs:
        if alike >= ALIKE[1] and speaker not in names and name not in names.values():
            names[speaker] = name
    return names
