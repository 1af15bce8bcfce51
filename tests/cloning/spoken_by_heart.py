"""Speech whose times and pitch are known: a few sentences of a small voice that a test dependency carries."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from asr_serve.cloning.voice_corpus import CorpusUtterance

TEXTS = (
    "The birch canoe slid on the smooth planks.",
    "Glue the sheet to the dark blue background.",
    "It is easy to tell the depth of a well.",
    "These days a chicken leg is a rare dish.",
    "Rice is often served in round bowls.",
    "The juice of lemons makes fine punch.",
    "The box was thrown beside the parked truck.",
    "Four hours of steady work faced us.",
)


class Known(NamedTuple):
    text: str
    line: CorpusUtterance
    pcm: np.ndarray
    f0: np.ndarray


def spoken(speed: float = 1.0) -> list[Known]:
    pytest.importorskip("hibari", reason="hibari-tts is not installed")
    from asr_serve_tools.train.voice import teacher_voices

    reader, heart = teacher_voices.TeacherPhonemizer(), teacher_voices.HeartTeacher()
    found = []
    for text in TEXTS:
        phonemes = reader.phonemes(text)
        made = teacher_voices.corpus_utterance(text, reader.spoken(phonemes), heart.read(reader.ids(phonemes), speed))
        assert made is not None
        found.append(Known(text, *made))
    return found
