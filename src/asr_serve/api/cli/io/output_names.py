"""Names of output files: unique, valid on every file system, and never those of inputs."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from asr_serve.audio.input_manifest import AUDIO_SUFFIXES, InputItem, path_key
from asr_serve.errors import OptionError

MAX_NAME_BYTES = 200
FORBIDDEN_CHARACTERS = re.compile(r'[\x00-\x1f\x7f<>:"\\|?*]')


def plan_output_paths(items: Sequence[InputItem], folder: Path, suffix: str) -> dict[str, Path]:
    """Maps keys to output paths, all different.

    A file keeps its place below the common folder of all inputs, with its audio suffix replaced: `a/x.wav b/x.wav`
    become `a/x.srt b/x.srt`. Inputs from a list are named by their key. Where two would share a name (x.wav and
    x.mp3) they keep their audio suffix: `x.wav.srt x.mp3.srt`.
    """
    on_disk = [path.parent for item in items if (path := _own_path(item))]
    shared = Path(os.path.commonpath(on_disk)) if on_disk else Path()
    stems: dict[str, list[InputItem]] = {}
    for item in items:
        stems.setdefault(_stem(item, shared, keep_suffix=False).casefold(), []).append(item)
    taken: set[str] = set()
    paths = {}
    for item in items:
        alone = len(stems[_stem(item, shared, keep_suffix=False).casefold()]) == 1
        base = stem = _stem(item, shared, keep_suffix=not alone)
        number = 1
        while stem.casefold() in taken:
            number += 1
            stem = f"{base}#{number}"
        taken.add(stem.casefold())
        paths[item.key] = folder / f"{stem}{suffix}"
    return paths


def _own_path(item: InputItem) -> Path | None:
    """Returns the source's absolute path if the key is that path as written, perhaps numbered; None if a list
    gave the key."""
    if not isinstance(item.source, str | os.PathLike):
        return None
    written = path_key(item.source)
    own = item.key == written or item.key.startswith(f"{written}#")
    return Path(os.path.abspath(item.source)) if own else None


def _stem(item: InputItem, shared: Path, *, keep_suffix: bool) -> str:
    own = _own_path(item)
    path = Path(item.key) if own is None else own.relative_to(shared)
    if not keep_suffix and path.suffix.lower() in AUDIO_SUFFIXES:
        path = path.with_suffix("")
    return "/".join(_sanitize(part) for part in path.parts if part != path.anchor) or "_"


def _sanitize(part: str) -> str:
    """Returns a name that every file system accepts, whatever the key contains."""
    part = "__" if part == ".." else FORBIDDEN_CHARACTERS.sub("_", os.fsencode(part).decode("utf-8", "replace"))
    if len(part.encode()) <= MAX_NAME_BYTES:
        return part
    cut = part.encode()[: MAX_NAME_BYTES - 20].decode("utf-8", "ignore")
    return f"{cut}-{hashlib.sha256(part.encode()).hexdigest()[:12]}"


def check_inputs_not_overwritten(paths: Iterable[Path], items: Sequence[InputItem], lists: Sequence[Path]) -> None:
    """Raises OptionError if a result would overwrite an input or a list of inputs."""
    read = {os.path.realpath(i.source) for i in items if isinstance(i.source, str | os.PathLike)}
    read.update(os.path.realpath(path) for path in lists)
    for path in paths:
        if os.path.realpath(path) in read:
            raise OptionError(f"--output would overwrite the input {path}", "a name that is no input")


def source_name(item: InputItem) -> str:
    source = item.source
    return os.path.realpath(source) if isinstance(source, str | os.PathLike) else item.key
