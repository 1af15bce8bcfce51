"""Fields of a form, read by name. Every refusal is an OptionError that names its field."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from urllib.parse import parse_qsl

import msgspec

from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.protocols.ignored_fields import refuse_or_ignore
from asr_serve.text import languages
from asr_serve.types import suggest_name

TRUE, FALSE = ("true", "1", "yes", "on", "t", "y"), ("false", "0", "no", "off", "f", "n")
MAX_FIELD_CHARACTERS = 1_000
MAX_QUOTED_CHARACTERS = 60
_BODY_EXAMPLES = {"the form": "curl -F {}=...", "the JSON body": '{{"{}": ...}}'}
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_WHOLE = re.compile(r"[+-]?\d{1,15}", re.ASCII)


class FormFields:
    """Fields of a form, by name. `known`: allowed names; one that ends in [] may come more than once, with or
    without the brackets.

    An empty value counts as absent, and so does a field that `refuse_or_ignore` ignores. Raises OptionError for one
    that it refuses, one sent twice, and, on reading it, for a value of the wrong kind.
    """

    def __init__(self, sent: Mapping[str, Sequence[str]], known: Sequence[str]) -> None:
        self._values: dict[str, list[str]] = {}
        for name, values in sent.items():
            field = name if name in known else f"{name}[]"
            if field not in known:
                refuse_or_ignore(name, known, name[:MAX_QUOTED_CHARACTERS], partial(_unknown_field, name, known))
                continue
            self._values.setdefault(field, []).extend(values)
        for name, values in self._values.items():
            if len(values) > 1 and not name.endswith("[]"):
                raise OptionError(f"{name} came {len(values)} times", "once is allowed", param=name)

    def __contains__(self, name: str) -> bool:
        """Returns whether the field was sent and is not empty."""
        return any(value.strip() for value in self._values.get(name, ()))

    def text(self, name: str, longest: int = MAX_FIELD_CHARACTERS) -> str | None:
        value = (self._values.get(name) or [""])[0].strip()
        if len(value) > longest:
            raise OptionError(f"{name} holds {len(value)} characters", f"up to {longest}", param=name)
        return value or None

    def word_list(self, name: str, longest: int) -> tuple[str, ...]:
        """Words in a text of up to `longest` characters. Raises OptionError."""
        return parse_word_list(self.text(name, longest) or "", name)

    def repeated(self, name: str) -> list[str]:
        """All values of `name`, which ends in []."""
        return [value.strip() for value in self._values.get(name, ()) if value.strip()]

    def choice(self, name: str, choices: Sequence[str]) -> str | None:
        value = self.text(name)
        if value is not None:
            expect_choice(name, value, choices)
        return value

    def flag(self, name: str) -> bool | None:
        value = self.text(name)
        if value is None:
            return None
        if value.lower() in TRUE + FALSE:
            return value.lower() in TRUE
        raise OptionError(f"{name}={quote_for_message(value)}", "true or false", param=name)

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.text(name)
        if value is None:
            return None
        number = float(value) if _NUMBER.fullmatch(value) else math.nan
        if not low <= number <= high:
            raise OptionError(f"{name}={quote_for_message(value)}", f"a number from {low:g} to {high:g}", param=name)
        return number

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        number = int(value) if _WHOLE.fullmatch(value) else low - 1
        if not low <= number <= high:
            raise OptionError(f"{name}={quote_for_message(value)}", f"a whole number from {low} to {high}", param=name)
        return number

    def language(self, name: str) -> str | None:
        """Language code: clients send `en`, `English` and `英文`; `null` and `auto` mean none."""
        return languages.requested_language_code(self.text(name))

    def reject_unsupported(self, name: str, can: str, todo: str = "") -> None:
        """Raises UnsupportedOption if the field was sent. `can`: what is supported instead."""
        if name in self:
            raise UnsupportedOption(f"{name} is not supported", can, todo or "leave it out", param=name)


def _unknown_field(name: str, known: Sequence[str]) -> OptionError:
    return OptionError(
        f"unknown field {quote_for_message(name)}",
        f"fields: {', '.join(known)}",
        suggest_name(name, known),
        param=name[:MAX_QUOTED_CHARACTERS],
    )


def reject_query_fields(query: str, known: Collection[str], place: str) -> None:
    """Raises OptionError if the query of an address has fields that belong in the body. Other parameters are ignored,
    as HTTP servers do. `known`: fields of the body. `place`: what the body is, for the message."""
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in known or f"{name}[]" in known:
            raise OptionError(
                f"{name} came in the address, as ?{name}={value[:MAX_QUOTED_CHARACTERS]}",
                f"{name} belongs in {place}",
                f"send it there: {_BODY_EXAMPLES[place].format(name)}",
                param=name,
            )


@contextlib.contextmanager
def errors_named_by_field(params: Mapping[str, str]) -> Iterator[None]:
    """Replaces the option in an OptionError by the name of its field. `params`: options to fields."""
    try:
        yield
    except OptionError as error:
        if error.param is not None:
            error.param = params.get(error.param, error.param)
        raise


def parse_word_list(text: str, name: str = "hotwords") -> tuple[str, ...]:
    """Words separated by commas, Chinese and Japanese ones included, or lines; or those of a JSON list, or of an
    object of weights as FunASR's clients send it. Raises OptionError for other JSON.

    >>> parse_word_list("Ada, Charles Babbage,")
    ('Ada', 'Charles Babbage')
    >>> parse_word_list('{"Ada": 2}')
    ('Ada:2',)
    """
    text = text.strip()
    if text[:1] not in ("[", "{"):
        return tuple(word.strip() for word in re.split("[,，、\r\n]", text) if word.strip())
    try:
        decoded = msgspec.json.decode(text, type=list[str] | dict[str, float])
    except (msgspec.DecodeError, RecursionError):
        allowed = 'words with commas, a JSON list of them, or an object like {"Ada": 2}'
        raise OptionError(f"{name}={quote_for_message(text)}", allowed, param=name) from None
    if isinstance(decoded, dict):
        return tuple(f"{word.strip()}:{weight:g}" for word, weight in decoded.items())
    return tuple(word.strip() for word in decoded if word.strip())


def expect_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises OptionError, with the nearest choice, when `value` is none of them."""
    if value not in choices:
        raise OptionError(
            f"{name}={quote_for_message(value)}",
            f"one of: {', '.join(choices)}",
            suggest_name(value, choices),
            param=name,
        )


def quote_for_message(value: str) -> str:
    """Quotes a client's text for a message: on one line, and no longer than is useful."""
    return repr(value if len(value) <= MAX_QUOTED_CHARACTERS else f"{value[:MAX_QUOTED_CHARACTERS]}...")
