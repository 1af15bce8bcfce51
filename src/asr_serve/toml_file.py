"""TOML files that users write: read and checked, with the line of what is wrong."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from asr_serve.errors import OptionError, SourceNotFound
from asr_serve.types import describe_allowed

MAX_FILE_BYTES = 1 << 16


def read_toml(path: Path, what: str, param: str) -> tuple[str, dict[str, Any]]:
    """Reads a file and returns its text and its content. `what`: the kind of file, as errors name it; `param`: the
    option that named it. Raises SourceNotFound, and OptionError with the line of what is wrong."""
    try:
        data = path.read_bytes()
    except OSError as failure:
        raise SourceNotFound(
            f"the {what} file {path} cannot be read: {failure.strerror}", todo="check the path"
        ) from failure
    if len(data) > MAX_FILE_BYTES:
        raise OptionError(f"a {what} file of {len(data)} bytes: {path}", f"up to {MAX_FILE_BYTES}", param=param)
    try:
        text = data.decode()
    except UnicodeDecodeError as failure:
        line = data.count(b"\n", 0, failure.start) + 1
        raise OptionError(f"{path}, line {line}: {failure}", "UTF-8", param=param) from failure
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as failure:
        message, _, place = str(failure).partition(" (at line ")
        line = int(place.partition(",")[0]) if place else text.count("\n") + 1
        raise OptionError(f"{path}, line {line}: {message}", "a TOML file", param=param) from failure


def describe_invalid(
    failure: msgspec.ValidationError, table: dict[str, Any], kind: type[msgspec.Struct]
) -> tuple[str, str, str]:
    """Returns the key of a table that is wrong, what came, and what its type, a field of `kind`, allows."""
    message, _, place = str(failure).partition(" - at `$.")
    allowed = {field.name: field.type for field in msgspec.structs.fields(kind)}
    if missing := re.search(r"missing required field `(\w+)`", message):
        key = missing[1]
        return key, f"{key} is missing", describe_allowed(inspect.type_info(allowed[key]))
    key = place.rstrip("`")
    if key not in allowed:  # inside of a value
        return key, f"{table.get(key)!r}", message
    return key, f"{key} = {table.get(key)!r}", describe_allowed(inspect.type_info(allowed[key]))
