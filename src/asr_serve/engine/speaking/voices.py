"""Voices that a model was taught after it was made: a file each, taken in when somebody wants to hear one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from asr_serve.errors import UnknownVoice
from asr_serve.models.card import VoiceCard
from asr_serve.types import Sentence
from asr_serve.values import nearest

NAME = re.compile(r"\A[a-z0-9][a-z0-9_-]{0,63}\Z")
"""Of a cloned voice, and so of its file."""
SUFFIX = ".safetensors"


class Voices:
    """What there is in a folder, into which others write. Belongs to the loop's thread."""

    def __init__(self, model: Any, card: VoiceCard, folder: Path) -> None:
        """`model`: has `voice(name, path)`, where its card says that it can be taught voices."""
        self._model, self._card, self._folder = model, card, folder
        self._own = tuple(getattr(model, "voices", card.voices))

    def expect(self, sentence: Sentence) -> None:
        """The model knows its voice from here on. Raises UnknownVoice, WeightsCorrupt, OptionError."""
        self.ensure(sentence.voice)
        self._model.expect(sentence)

    def ensure(self, name: str) -> None:
        """Have the model know that voice, which reads a file anew when it has changed, and forgets those that were
        not wanted for long. Raises UnknownVoice where there is no such file, WeightsCorrupt."""
        if not self._taught(name):
            return
        path = self._folder / f"{name}{SUFFIX}"
        if NAME.match(name) is None or not path.is_file():
            raise self._unknown(name)
        self._model.voice(name, path)

    def _taught(self, name: str) -> bool:
        """It is none of the model's own, where it may have others."""
        return self._card.clones and name not in self._own

    def _unknown(self, name: str) -> UnknownVoice:
        cloned = sorted(path.stem for path in self._folder.glob(f"*{SUFFIX}")) if self._folder.is_dir() else []
        names = [*self._own, *cloned]
        return UnknownVoice(
            f"{self._card.name} has no voice {name[:100]!r}",
            f"voices: {', '.join(names)}",
            nearest(name, names),
            param="voice",
        )
