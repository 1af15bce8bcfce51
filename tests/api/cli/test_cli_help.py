"""Help texts of every command: complete, printed as they are meant, and in the terms of the field."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import typer.main
from typer.testing import CliRunner

from asr_serve.api.cli import app

FRAGMENT = re.compile(r"(Of|That|Who|With|By|Into|When|As|Without|What)\b")
"""Beginnings of texts that leave their subject out."""
PRIVATE = re.compile(r"\b(hears?|heard|said|teach|taught|learns|whoever|somebody else)\b", re.IGNORECASE)


def commands(command: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def find(path: tuple[str, ...]) -> object:
    found: object = typer.main.get_command(app)
    for name in path:
        found = found.commands[name]  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("path", list(commands(typer.main.get_command(app))), ids=" ".join)
def test_help_is_complete_and_in_plain_terms(path: tuple[str, ...]) -> None:
    command = find(path)
    texts = [param.help for param in command.params if hasattr(param, "help")]  # type: ignore[attr-defined]
    assert all(texts), "every option has a help text"
    assert not [text for text in texts if FRAGMENT.match(text)]
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "\\b" not in result.stdout
    assert not PRIVATE.findall(result.stdout)
