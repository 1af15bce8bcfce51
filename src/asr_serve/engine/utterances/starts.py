"""How a model's rows begin: tokens before the answer, the language where nobody said which, and what a request may
ask for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import torch

from asr_serve.decoding.attention import SearchOptions
from asr_serve.decoding.rules import PLAIN, Rule, Rules
from asr_serve.devices.base import Device
from asr_serve.engine.utterances.rows import Row
from asr_serve.errors import OptionError, UnsupportedOption

NO_OPTIONS = SearchOptions()
KEPT = 64
"""Starts that are remembered: requests ask for the same, and each asks more than once."""


def rows_needed(options: SearchOptions) -> int:
    """By a request."""
    return options.beam if options.temperatures[0] == 0 else 1


class Starts:
    """Of one model. `special`: its ids by name that are no text; None: a row begins with one token and says text
    until it ends."""

    def __init__(self, model: Any, device: Device) -> None:
        self._model = model
        self.words = len(model.embedding)
        self.special: Any = getattr(model, "special", None)
        self.rules: Rules | None = None
        self.languages: list[str] = []
        if self.special is not None:
            where = device.torch_device
            self.rules = Rules(self.special, model.suppress, model.suppress_first, self.words, where)
            self.languages = list(self.special.languages)
            self.language_ids = torch.tensor(list(self.special.languages.values()), device=where)
        self._started = lru_cache(KEPT)(self._start)

    def hears_language(self, options: SearchOptions) -> bool:
        """Whether the model is to tell it."""
        return self.special is not None and bool(self.special.multilingual) and not options.language

    def tokens(self, options: SearchOptions) -> tuple[int, ...]:
        """Of a row whose language is to be heard, as many as when it is. Raises OptionError."""
        return self.in_language(options, self.languages[0] if self.hears_language(options) else options.language)

    def in_language(self, options: SearchOptions, language: str) -> tuple[int, ...]:
        return self._started(options, language)

    def _start(self, options: SearchOptions, language: str) -> tuple[int, ...]:
        start: tuple[int, ...] = self._model.start(msgspec.structs.replace(options, language=language))
        return start

    def room(self, options: SearchOptions, max_tokens: int) -> int:
        """Positions of a row with an answer of `max_tokens` at most, the last of which is never fed."""
        begins, most = len(self.tokens(options)), int(self._model.max_tokens)
        return begins - 1 + min(max_tokens, most - begins)

    def check(self, options: SearchOptions) -> None:
        """Raises OptionError for what this model cannot do."""
        if self.special is None:
            for name in ("task", "prompt", "timestamps"):
                if (value := getattr(options, name)) != getattr(NO_OPTIONS, name):
                    raise UnsupportedOption(f"{name}={value!r}", "this model has no such choice", param=name)
        for token in options.prefix:
            if not 0 <= token < self.words or token == self._model.eos:
                raise OptionError(f"prefix has token {token}", "tokens that can be said", param="prefix")
        self.tokens(options)

    def asked(self, row: Row, fed: int, drafted: int) -> list[int]:
        """Of the positions that a row is fed, those that tell something: after all of its start, and after each
        token of the draft; first of all, where it has to begin, "start", which tells whether anybody speaks."""
        tail = range(fed - drafted - 1, fed)
        if row.begun or self.special is None:
            return [*tail]
        start = self.before(row.start) - row.known
        return [*tail] if start in tail else [start, *tail]

    def before(self, start: Sequence[int]) -> int:
        """Tokens of it before "start": what was said before, where something is to be read."""
        return 0 if self.special is None else len(start) - 1 - start[::-1].index(self.special.sot)

    def rule(self, row: Row, said: Sequence[int]) -> Rule:
        """For what comes after `said`, which may be more than the row has said yet."""
        if self.rules is None:
            return PLAIN
        return self.rules.after(said[row.hypothesis.begin :], row.hypothesis.options.timestamps)
