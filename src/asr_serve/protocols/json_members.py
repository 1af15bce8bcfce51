"""JSON of clients: decoded, and the members of its objects read by name. Every refusal of a member is an OptionError
that names it."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import msgspec

from asr_serve.errors import MalformedRequest, MissingOption, OptionError, UnknownOption, UnsupportedOption
from asr_serve.protocols.form_fields import MAX_QUOTED_CHARACTERS, expect_choice, quote_for_message
from asr_serve.protocols.ignored_fields import refuse_or_ignore
from asr_serve.types import suggest_name

T = TypeVar("T")


def decode_json(source: str | bytes, kind: type[T], came: str, allowed: str) -> T:
    """Decodes a client's JSON into `kind`. Raises MalformedRequest, with `came` and the reason, then `allowed`."""
    try:
        return msgspec.json.decode(source, type=kind)
    except RecursionError:
        reason = "its lists or objects are nested too deeply"
    except (msgspec.DecodeError, UnicodeError) as error:
        reason = str(error)
    raise MalformedRequest(f"{came}: {reason}", allowed)


class JsonMembers:
    """Members of a JSON object, by name; null counts as absent. Raises OptionError for a value of the wrong kind,
    with `param` naming the member as OpenAI does."""

    def __init__(self, value: Any, path: str = "") -> None:
        if not isinstance(value, dict):
            raise OptionError(f"{path} is {_describe(value)}", "it must be an object", param=path)
        self._remaining, self._path, self._requested = dict(value), path, list[str]()

    def name(self, member: str) -> str:
        return f"{self._path}.{member}" if self._path else member

    def __contains__(self, member: str) -> bool:
        """Returns whether the member was sent, even as null. It counts as known from then on."""
        self._requested.append(member)
        return member in self._remaining

    def pop(self, member: str) -> Any:
        self._requested.append(member)
        return self._remaining.pop(member, None)

    def object(self, member: str) -> JsonMembers | None:
        value = self.pop(member)
        return None if value is None else JsonMembers(value, self.name(member))

    def text(self, member: str) -> str | None:
        value = self.pop(member)
        if value is None or isinstance(value, str):
            return value or None
        raise OptionError(f"{self.name(member)} is {_describe(value)}", "it must be text", param=self.name(member))

    def flag(self, member: str) -> bool:
        value = self.pop(member)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise OptionError(
            f"{self.name(member)} is {_describe(value)}", "it must be true or false", param=self.name(member)
        )

    def choice(self, member: str, choices: tuple[str, ...]) -> str | None:
        value = self.text(member)
        if value is not None:
            expect_choice(self.name(member), value, choices)
        return value

    def required(self, member: str, choices: tuple[str, ...]) -> str:
        """Reads a choice that must be present. Raises MissingOption."""
        value = self.choice(member, choices)
        if value is None:
            name = self.name(member)
            raise MissingOption(f"{name} is missing", f"one of: {', '.join(choices)}", param=name)
        return value

    def string_list(self, member: str) -> list[str]:
        value = self.pop(member)
        if value is None:
            return []
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        raise OptionError(
            f"{self.name(member)} is {_describe(value)}", "it must be a list of texts", param=self.name(member)
        )

    def number(self, member: str, low: float, high: float, default: float) -> float:
        value, name = self.pop(member), self.name(member)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise OptionError(
                f"{name} is {_describe(value)}", f"it must be a number from {low:g} to {high:g}", param=name
            )
        return value

    def integer(self, member: str, high: int, default: int) -> int:
        value = self.number(member, 0, high, default)
        if value != int(value):
            name = self.name(member)
            raise OptionError(f"{name} is {value}", f"it must be a whole number from 0 to {high}", param=name)
        return int(value)

    def reject_unsupported(self, member: str, can: str, todo: str = "leave it out") -> None:
        """Raises UnsupportedOption unless the value is null, false or empty. `can`: what is supported instead."""
        value, name = self.pop(member), self.name(member)
        if value:
            raise UnsupportedOption(f"{name} is not supported", can, todo, param=name)

    def refuse_or_ignore_unknown(self) -> None:
        """Refuses members that were never read, with UnknownOption, or ignores them: see `refuse_or_ignore`."""
        for member in self._remaining:
            refuse_or_ignore(member, self._requested, self.name(member)[:200], partial(self._unknown_member, member))

    def _unknown_member(self, member: str) -> UnknownOption:
        name, known = self.name(member), ", ".join(sorted(set(self._requested)))
        near = suggest_name(member, self._requested)
        return UnknownOption(
            f"unknown parameter {quote_for_message(name)}", f"known here: {known}", near, param=name[:200]
        )


def _describe(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_QUOTED_CHARACTERS else f"{text[:MAX_QUOTED_CHARACTERS]}..."
