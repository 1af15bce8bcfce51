"""What every model file offers, and how the folder is read.

A model file `models/<task>/<kind>.py` holds CARDS (one Card per published size), Config, Model, rename and
tiny. There is no list to edit: a file in the folder is a model.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from functools import cache
from types import ModuleType

import msgspec

from asr_serve import units
from asr_serve.errors import UnknownModel


class Packaged(msgspec.Struct, frozen=True):
    """Weights that an installable package carries."""

    requirement: str
    """What to install, with its version."""
    module: str
    folder: str
    """Folder inside the module that holds the files."""
    sha256: dict[str, str]
    """File name -> sha256 of the files we read."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One published set of weights: what it is, where it comes from, what it can take."""

    name: str
    task: str
    kind: str
    """Name of the model file that reads it."""
    languages: tuple[str, ...]
    parameters: int
    licence: str
    source: str
    """Paper or reference implementation."""
    hub: str
    """Hugging Face repository."""
    revision: str = "main"
    packaged: Packaged | None = None
    rate_hz: int = units.RATE_HZ
    max_segment_ms: int
    """Longest utterance the model was made for; longer speech is cut."""
    min_segment_ms: int
    """Shorter ones are padded with silence."""
    tokens_per_s: float
    """More tokens than this per second of audio are a hallucination; decoding stops there."""

    @property
    def package(self) -> str | None:
        return self.packaged.requirement if self.packaged else None


@cache
def kinds(task: str = "asr") -> dict[str, ModuleType]:
    """File name -> module, for every model file of a task. A file that does not import is an error here."""
    folder = importlib.import_module(f"asr_serve.models.{task}")
    return {
        info.name: importlib.import_module(f"{folder.__name__}.{info.name}")
        for info in pkgutil.iter_modules(folder.__path__)
    }


def cards(task: str = "asr") -> dict[str, Card]:
    """Every published set of weights by name."""
    return {card.name: card for module in kinds(task).values() for card in module.CARDS}


def card(name: str, task: str = "asr") -> Card:
    """The card of that name. Raises UnknownModel with the nearest name."""
    known = cards(task)
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    raise UnknownModel(
        f"there is no model {name!r}",
        f"models: {', '.join(known)}",
        f"did you mean {near[0]!r}?" if near else "list them with: asr-serve models list",
    )
