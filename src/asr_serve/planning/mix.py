"""Mix files: TOML that says what callers do. Everything that can be known from the file is checked here, and told
with its line and key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import msgspec
from msgspec import Meta

from asr_serve.errors import OptionError
from asr_serve.toml_file import describe_invalid, read_toml
from asr_serve.types import suggest_name

MAX_ENTRIES = 16

Share = Annotated[float, Meta(ge=0, le=1)]
Duty = Annotated[float, Meta(gt=0, le=1)]
PerHour = Annotated[float, Meta(gt=0, le=100_000)]
ModelName = Annotated[str, Meta(min_length=1, max_length=200)]


class LiveCallers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Callers who speak live."""

    model: ModelName
    share: Share
    """Share of all callers."""
    duty: Duty = 0.5
    """Share of the time in which the caller has the floor: segments and the pauses between them. The rest is silence,
    while somebody else speaks."""
    segment_s: Annotated[float, Meta(ge=0.3, le=60)] = 4.0
    """Mean length of a segment, from its first word to its last."""
    segment_spread: Annotated[float, Meta(ge=0, le=2)] = 0.6
    """Standard deviation of the logarithm of segments' lengths; 0: all are equal."""
    pause_s: Annotated[float, Meta(ge=0.1, le=600)] = 2.5
    """Mean pause between segments. A pause is at least as long as the silence that ends a segment."""
    silence_ms: Annotated[int, Meta(ge=100, le=10_000)] | None = None
    """Silence that ends a segment. None: by the server's table, which depends on the segment's length."""
    p95_ms: Annotated[float, Meta(gt=0)] | None = None
    """Bound on the 95th percentile of finals. None: that of the command."""


class Files(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Recordings that are sent whole."""

    model: ModelName
    per_caller_per_hour: PerHour
    """Files that arrive in an hour for each caller of the plan, at random times."""
    length_s: Annotated[float, Meta(ge=0.3, le=14_400)] = 30.0
    """Mean length."""
    length_spread: Annotated[float, Meta(ge=0, le=2)] = 0.7
    """Standard deviation of the logarithm of lengths; 0: all are equal."""
    max_length_s: Annotated[float, Meta(ge=0.3, le=14_400)] = 600.0
    segment_s: Annotated[float, Meta(ge=0.3, le=60)] = 8.0
    """Mean length of the segments into which voice activity cuts a file."""
    repeated: Share = 0.0
    """Share of files that repeat the audio of an earlier one."""
    distinct: Annotated[int, Meta(ge=1, le=100_000)] = 50
    """Recordings that are repeated; the first is asked for most often (Zipf's law)."""
    p95_ms: Annotated[float, Meta(gt=0)] | None = None


class SynthesizedTexts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sentences that are synthesized."""

    voice: ModelName
    per_caller_per_hour: PerHour
    length_s: Annotated[float, Meta(ge=0.1, le=60)] = 3.0
    """Mean length of a sentence's audio."""
    length_spread: Annotated[float, Meta(ge=0, le=2)] = 0.5
    p95_ms: Annotated[float, Meta(gt=0)] | None = None

    @property
    def model(self) -> str:
        return self.voice


MixEntry = LiveCallers | Files | SynthesizedTexts
ENTRY_TYPES: dict[str, type[MixEntry]] = {"live": LiveCallers, "files": Files, "speech": SynthesizedTexts}


class Mix(NamedTuple):
    """Checked mix file."""

    name: str
    description: str
    live: tuple[LiveCallers, ...] = ()
    files: tuple[Files, ...] = ()
    speech: tuple[SynthesizedTexts, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        """Models, each once, in the order of the file."""
        entries: list[MixEntry] = [*self.live, *self.files, *self.speech]
        return tuple(dict.fromkeys(entry.model for entry in entries))

    def of_model(self, model: str) -> Mix:
        """Returns what goes to one model."""
        return self._replace(
            live=tuple(entry for entry in self.live if entry.model == model),
            files=tuple(entry for entry in self.files if entry.model == model),
            speech=tuple(entry for entry in self.speech if entry.model == model),
        )


def read_mix(path: Path) -> Mix:
    """Reads and checks a mix file. Raises OptionError with the line and the key of what is wrong, SourceNotFound."""
    return _MixReader(path, *read_toml(path, "mix", "mix")).read()


class _MixReader:
    def __init__(self, path: Path, text: str, content: dict[str, Any]) -> None:
        self._path, self._content = path, content
        self._lines = _key_lines(text)

    def read(self) -> Mix:
        content = self._content
        names = ["description", *ENTRY_TYPES]
        for key in content:
            if key not in names:
                allowed = "description, and tables [[live]], [[files]] and [[speech]]"
                self._fail("", 0, key, f"the key {key!r}", allowed, suggest_name(key, names))
        description = content.get("description", "")
        if not isinstance(description, str):
            self._fail("", 0, "description", f"{description!r}", "text")
        entries = {kind: self._entries(kind, content.get(kind, [])) for kind in ENTRY_TYPES}
        if not any(entries.values()):
            allowed = "at least one table [[live]], [[files]] or [[speech]]"
            raise OptionError(f"{self._path}, line 1: a mix of nothing", allowed, param="mix")
        live = tuple(entry for entry in entries["live"] if isinstance(entry, LiveCallers))
        if (total := sum(entry.share for entry in live)) > 1 + 1e-9:
            came = f"shares of live callers that add up to {total:g}"
            self._fail("live", len(live) - 1, "share", came, "up to 1 in all")
        files = tuple(entry for entry in entries["files"] if isinstance(entry, Files))
        for index, entry in enumerate(files):
            if entry.max_length_s < entry.length_s:
                came = f"max_length_s = {entry.max_length_s:g} below length_s = {entry.length_s:g}"
                self._fail("files", index, "max_length_s", came, "at least the mean")
        speech = tuple(entry for entry in entries["speech"] if isinstance(entry, SynthesizedTexts))
        return Mix(self._path.stem, description, live, files, speech)

    def _entries(self, kind: str, tables: Any) -> list[MixEntry]:
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            self._fail("", 0, kind, f"{str(tables)[:60]}", f"tables [[{kind}]]")
        if len(tables) > MAX_ENTRIES:
            self._fail(kind, 0, "", f"{len(tables)} tables [[{kind}]]", f"up to {MAX_ENTRIES}")
        return [self._entry(kind, index, table) for index, table in enumerate(tables)]

    def _entry(self, kind: str, index: int, table: dict[str, Any]) -> MixEntry:
        entry_type = ENTRY_TYPES[kind]
        for key in table:
            if key not in entry_type.__struct_fields__:
                came, allowed = f"the key {key!r} of [[{kind}]]", ", ".join(entry_type.__struct_fields__)
                self._fail(kind, index, key, came, allowed, suggest_name(key, entry_type.__struct_fields__))
        try:
            return msgspec.convert(table, entry_type)
        except msgspec.ValidationError as failure:
            self._fail(kind, index, *describe_invalid(failure, table, entry_type))

    def _fail(self, kind: str, index: int, key: str, came: str, allowed: str, todo: str = "") -> NoReturn:
        """Raises the error of a key in table `index` of a kind; kind '': outside of tables."""
        line = self._lines.get((kind, index, key)) or self._lines.get((kind, index, "")) or 1
        place = f"{self._path}, line {line}" + (f", {key}" if key else "")
        raise OptionError(f"{place}: {came}", allowed, todo, param="mix")


def _key_lines(text: str) -> dict[tuple[str, int, str], int]:
    """Lines, from 1, of the keys: by kind and number of their table; a table's own line has the key ''."""
    lines: dict[tuple[str, int, str], int] = {}
    counts: dict[str, int] = {}
    kind, index = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        if match := re.match(r"\s*\[\[?\s*\"?([\w-]+)\"?\s*\]\]?", line):
            kind = match[1]
            index = counts[kind] = counts.get(kind, -1) + 1
            lines[kind, index, ""] = number
            lines.setdefault(("", 0, kind), number)
        elif match := re.match(r"""\s*["']?([\w-]+)["']?\s*=""", line):
            lines.setdefault((kind, index, match[1]), number)
    return lines
