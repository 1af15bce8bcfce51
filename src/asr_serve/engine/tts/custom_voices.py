"""Cloned voices of a TTS model: one file each, loaded when a sentence requests it."""

from __future__ import annotations

import re
from pathlib import Path

from asr_serve.errors import UnknownVoice
from asr_serve.models.interfaces import TtsModel
from asr_serve.models.registry import TtsCard
from asr_serve.types import Sentence, suggest_name

NAME = re.compile(r"\A[a-z0-9][a-z0-9_-]{0,63}\Z")
"""Valid names of cloned voices, and of their files."""
SUFFIX = ".safetensors"


class CustomVoiceLoader:
    """Loader of cloned voices from a folder that other processes write to. Belongs to the loop's thread."""

    def __init__(self, model: TtsModel, card: TtsCard, folder: Path) -> None:
        self._model, self._card, self._folder = model, card, folder
        self._built_in = model.voices

    def ensure_for_sentence(self, sentence: Sentence) -> None:
        """Loads the sentence's voice and validates the sentence. Raises UnknownVoice, WeightsCorrupt,
        OptionError."""
        self.load_voice(sentence.voice)
        self._model.validate(sentence)

    def load_voice(self, name: str) -> None:
        """Registers the voice with the model, which reads a changed file again and drops voices unused for long.
        Raises UnknownVoice where there is no such file, WeightsCorrupt."""
        if not self._expect_custom_voice(name):
            return
        path = self._folder / f"{name}{SUFFIX}"
        if NAME.match(name) is None or not path.is_file():
            raise self._unknown_voice(name)
        self._model.register_voice(name, path)

    def _expect_custom_voice(self, name: str) -> bool:
        """Returns whether the voice is not built in, and the model supports cloned ones."""
        return self._card.clones and name not in self._built_in

    def _unknown_voice(self, name: str) -> UnknownVoice:
        cloned = sorted(path.stem for path in self._folder.glob(f"*{SUFFIX}")) if self._folder.is_dir() else []
        names = [*self._built_in, *cloned]
        return UnknownVoice(
            f"{self._card.name} has no voice {name[:100]!r}",
            f"voices: {', '.join(names)}",
            suggest_name(name, names),
            param="voice",
        )
