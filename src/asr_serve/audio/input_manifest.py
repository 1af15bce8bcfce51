"""Files, folders, globs, wav.scp, jsonl manifests, text lists and `-` to InputItems, lazily and in order.

A name without audio (a missing file, an empty glob or folder) still yields an item: reading it fails, the error is
reported under its key, and the others finish. Only a malformed list raises, because none of its lines can then be
trusted.

Keys: a list's own key; else the path as it was written; `stdin` for `-`; `input-N` for the Nth input when it
has no name. A repeated key gets `#2`, then `#3` and so on.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

import msgspec

from asr_serve.errors import OptionError

if TYPE_CHECKING:
    from asr_serve.audio.reader import Source

_AUDIO = (
    ".3gp .aac .ac3 .aif .aiff .amr .au .avi .caf .flac .m4a .m4b .mka .mkv .mov .mp2 .mp3 .mp4 .mpga "
    ".oga .ogg .opus .wav .webm .wma .wv"
)
AUDIO_SUFFIXES = frozenset(_AUDIO.split())
"""Suffixes of files that are read from a folder. A file named explicitly may have any suffix."""
KALDI_SUFFIX, JSONL_SUFFIX = ".scp", ".jsonl"
TEXT_SUFFIXES = frozenset((".txt", ".lst", ".list"))
LIST_SUFFIXES = frozenset((KALDI_SUFFIX, JSONL_SUFFIX, *TEXT_SUFFIXES))
SOURCE_FIELDS = ("wav", "audio", "path", "audio_filepath", "source")
"""Fields of a jsonl manifest that may hold the audio's path; the first one present is used."""
LINE_BYTES = 1 << 20
"""Longest line of a list."""

_ARCHIVE = re.compile(r"\.ark:\d+$")


class InputItem(msgspec.Struct, frozen=True):
    """One input: a key to report it by, and the source of its audio."""

    key: str
    source: Source


def expand_inputs(
    inputs: Iterable[str | os.PathLike[str] | InputItem | Source],
    *,
    recursive: bool = True,
    stdin: BinaryIO | None = None,
) -> Iterator[InputItem]:
    """Every input as InputItems with unique keys. Folders and lists are read lazily, as items are consumed.

    Folders are read in the order of their names; hidden entries and linked folders are skipped.
    `recursive=False` skips subfolders. `stdin` replaces the process's own.
    Raises OptionError, with the list's name and line, for a malformed list.
    """
    if isinstance(inputs, str | bytes | os.PathLike):
        inputs = (inputs,)
    next_number: dict[str, int] = {}
    for item in _expand(inputs, recursive, stdin):
        key = item.key
        while key in next_number:
            next_number[item.key] += 1
            key = f"{item.key}#{next_number[item.key]}"
        next_number[key] = 1
        yield item if key == item.key else InputItem(key, item.source)


def path_key(path: str | os.PathLike[str]) -> str:
    """Key of a path: valid Unicode even where the file's name is not."""
    return os.fsencode(path).decode("utf-8", "replace")


def _expand(inputs: Iterable[object], recursive: bool, stdin: BinaryIO | None) -> Iterator[InputItem]:
    stdin_taken = False
    for number, source in enumerate(inputs, start=1):
        if isinstance(source, InputItem):
            yield source
        elif isinstance(source, str) and source == "-":
            if stdin_taken:
                raise OptionError("`-` is given twice", "standard input can be read once", "name the other input")
            stdin_taken = True
            yield InputItem("stdin", sys.stdin.buffer if stdin is None else stdin)
        elif isinstance(source, str | os.PathLike):
            yield from _named(Path(source), recursive)
        else:
            yield InputItem(f"input-{number}", source)  # type: ignore[arg-type]  # any Source


def _named(path: Path, recursive: bool) -> Iterator[InputItem]:
    if os.path.isdir(path):  # not Path.is_dir: that raises where a folder above may not be read
        empty = True
        for found in _walk(path, recursive):
            empty = False
            yield found
        if empty:
            yield _plain(path)
    elif path.suffix.lower() in LIST_SUFFIXES and os.path.isfile(path) and os.access(path, os.R_OK):
        yield from _list(path)
    elif glob.has_magic(str(path)) and not os.path.exists(path):
        matches = sorted(glob.iglob(str(path), recursive=recursive))
        for match in matches:
            yield from _named(Path(match), recursive)
        if not matches:
            yield _plain(path)
    else:
        yield _plain(path)


def _plain(path: Path) -> InputItem:
    return InputItem(path_key(path), path)


def _walk(folder: Path, recursive: bool) -> Iterator[InputItem]:
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError:  # no permission: the audio reader reports it under the folder's name
        yield _plain(folder)
        return
    for entry in found:
        if entry.name.startswith("."):  # includes the ._x.wav companions of macOS
            continue
        if entry.is_dir(follow_symlinks=False):
            if recursive:
                yield from _walk(folder / entry.name, recursive)
        elif Path(entry.name).suffix.lower() in AUDIO_SUFFIXES and not entry.is_dir():
            yield _plain(folder / entry.name)


def _list(path: Path) -> Iterator[InputItem]:
    parse = {KALDI_SUFFIX: _kaldi, JSONL_SUFFIX: _jsonl}.get(path.suffix.lower(), _text)
    for number, line in _lines(path):
        item = parse(ManifestLine(path, number), line)
        if item is not None:
            yield item


class ManifestLine(msgspec.Struct, frozen=True):
    """Position of a line in a list, for errors and for relative paths."""

    path: Path
    number: int

    def refuse(self, came: str, allowed: str, todo: str = "") -> NoReturn:
        raise OptionError(f"{self.path}, line {self.number}: {came}", allowed, todo)

    def item(self, key: str | None, written: str) -> InputItem:
        """Item of a line; its path is relative to the list's own folder."""
        return InputItem(path_key(written) if key is None else key, self.path.parent / written)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Non-blank lines with their numbers. File names need not be UTF-8, so lines need not be either."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LINE_BYTES + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if len(line) > LINE_BYTES or b"\0" in line:
                ManifestLine(path, number).refuse(
                    "not a line of text", f"a list of one input a line, {LINE_BYTES} bytes at most"
                )
            if text := os.fsdecode(line).strip():
                yield number, text


def _text(where: ManifestLine, line: str) -> InputItem | None:
    """One path per line; `#` starts a comment line."""
    return None if line.startswith("#") else where.item(None, line)


def _kaldi(where: ManifestLine, line: str) -> InputItem:
    """Kaldi's `key path`. Commands (`... |`) are never run, and offsets into archives are not read."""
    parts = line.split(maxsplit=1)
    if len(parts) < 2:
        where.refuse(f"{line!r} has a key and no path", "`key path`, a space or a tab between")
    key, written = parts
    if written.endswith("|"):
        where.refuse("a command to run", "a path to an audio file", "run the command yourself and list what it wrote")
    if _ARCHIVE.search(written):
        where.refuse(f"{written!r} points into an archive", "a path to an audio file", "extract it first")
    return where.item(path_key(key), written)


def _jsonl(where: ManifestLine, line: str) -> InputItem:
    """A JSON object with the audio's path in one of SOURCE_FIELDS, and optionally a `key`."""
    try:
        row = msgspec.json.decode(line.encode("utf-8", "surrogateescape"))
    except msgspec.DecodeError as error:
        where.refuse(f"not JSON ({error})", "one JSON object a line")
    if not isinstance(row, dict):
        where.refuse(f"a JSON {type(row).__name__}", "one JSON object a line")
    field = next((name for name in SOURCE_FIELDS if name in row), None)
    if field is None:
        where.refuse(f"fields {', '.join(row) or 'none'}", f"one of {', '.join(SOURCE_FIELDS)} holds the path")
    written, key = row[field], row.get("key")
    if not isinstance(written, str) or not written:
        where.refuse(f"{field} is {msgspec.json.encode(written).decode()}", f"{field} is a path")
    if key is not None and not isinstance(key, str | int):
        where.refuse(f"key is {msgspec.json.encode(key).decode()}", "key is a text or a number")
    if row.get("offset"):  # NeMo: a part of a file. Transcribing all of it would be silently wrong.
        where.refuse(f"offset {row['offset']}", "whole files", "cut the file first, or leave `offset` out")
    return where.item(None if key is None else str(key), written)
