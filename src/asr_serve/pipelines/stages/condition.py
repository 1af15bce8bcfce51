"""Conditions of stages: comparisons of a segment's measures, joined by `and` and `or`.

    condition  = conjunction { "or" conjunction }
    conjunction = term { "and" term }
    term       = "(" condition ")" | field comparison number
    comparison = "<" | "<=" | ">" | ">=" | "==" | "!="

`and` binds closer than `or`. Nothing else can be said, so a file from anybody may be read.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from asr_serve import units
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.errors import OptionError
from asr_serve.types import suggest_name

MAX_CONDITION_CHARACTERS = 1_000
MAX_PARENTHESES = 32
"""Depth of parentheses."""
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<comparison><=|>=|==|!=|<|>)|(?P<parenthesis>[()]))"
)


class SegmentMeasures(msgspec.Struct, frozen=True):
    """Measures of a segment's answer that a condition may compare."""

    confidence: float
    """Mean probability of the answer's tokens, 0..1; of a model that outputs words these are words. 0 for an answer
    without tokens."""
    avg_logprob: float
    """Mean natural-log probability of the tokens."""
    no_speech_prob: float
    """The model's probability of no speech; 0 from models without such an estimate."""
    tokens: int
    """Number of the answer's tokens."""
    duration_s: float
    """Duration of the segment, silence at its edges included."""

    @classmethod
    def of(cls, answer: Recognition, samples: int) -> SegmentMeasures:
        """Measures of an answer to `samples` of audio."""
        probabilities = [math.exp(logprob) for logprob in answer.logprobs]
        confidence = sum(probabilities) / len(probabilities) if probabilities else 0.0
        return cls(
            confidence, answer.avg_logprob, answer.no_speech_prob, len(answer.tokens), units.samples_to_s(samples)
        )


class _Token(NamedTuple):
    kind: str
    text: str
    column: int
    """Column in the text, from 1."""


class Comparison(NamedTuple):
    """`field comparison number`."""

    field: str
    comparison: str
    number: float

    def holds(self, measures: SegmentMeasures) -> bool:
        return _COMPARISONS[self.comparison](getattr(measures, self.field), self.number)


class Conjunction(NamedTuple):
    """Terms all of which must hold."""

    terms: tuple[Comparison | Condition, ...]

    def holds(self, measures: SegmentMeasures) -> bool:
        return all(term.holds(measures) for term in self.terms)


class Condition(NamedTuple):
    """Conjunctions one of which must hold."""

    alternatives: tuple[Conjunction, ...]

    def holds(self, measures: SegmentMeasures) -> bool:
        return any(conjunction.holds(measures) for conjunction in self.alternatives)


def parse_condition(text: str) -> Condition:
    """Parses a condition. Raises OptionError with the column of what is wrong."""
    if len(text) > MAX_CONDITION_CHARACTERS:
        raise OptionError(f"a condition of {len(text)} characters", f"up to {MAX_CONDITION_CHARACTERS}", param="when")
    return _Parser(text).parse()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._depth = text, 0
        self._tokens = self._split(text)

    def _split(self, text: str) -> list[_Token]:
        tokens, at = [], 0
        while text[at:].strip():
            if (match := _TOKEN.match(text, at)) is None:
                column = at + len(text[at:]) - len(text[at:].lstrip()) + 1
                raise self._error(column, f"{text[column - 1]!r}", "fields, comparisons, numbers, and, or, ( and )")
            kind = str(match.lastgroup)
            tokens.append(_Token(kind, match[kind], match.start(kind) + 1))
            at = match.end()
        return [*tokens, _Token("end", "the end", len(text) + 1)]

    def parse(self) -> Condition:
        condition = self._condition()
        if (token := self._tokens[0]).kind != "end":
            raise self._error(token.column, repr(token.text), "and, or, or the end")
        return condition

    def _condition(self) -> Condition:
        alternatives = [self._conjunction()]
        while self._accept("or"):
            alternatives.append(self._conjunction())
        return Condition(tuple(alternatives))

    def _conjunction(self) -> Conjunction:
        terms = [self._term()]
        while self._accept("and"):
            terms.append(self._term())
        return Conjunction(tuple(terms))

    def _term(self) -> Comparison | Condition:
        token = self._tokens.pop(0)
        if token.text == "(":
            self._depth += 1
            if self._depth > MAX_PARENTHESES:
                raise self._error(token.column, "one more (", f"{MAX_PARENTHESES} inside each other")
            condition = self._condition()
            if not self._accept(")"):
                raise self._error(self._tokens[0].column, repr(self._tokens[0].text), ")")
            self._depth -= 1
            return condition
        fields = SegmentMeasures.__struct_fields__
        if token.kind != "name" or token.text in ("and", "or"):
            raise self._error(token.column, repr(token.text), f"a field: {', '.join(fields)}")
        if token.text not in fields:
            allowed = f"a field: {', '.join(fields)}"
            raise self._error(token.column, f"the field {token.text!r}", allowed, suggest_name(token.text, fields))
        comparison = self._expect("comparison", f"a comparison: {' '.join(_COMPARISONS)}")
        return Comparison(token.text, comparison, float(self._expect("number", "a number")))

    def _accept(self, text: str) -> bool:
        found = self._tokens[0].text == text and self._tokens[0].kind != "end"
        if found:
            self._tokens.pop(0)
        return found

    def _expect(self, kind: str, allowed: str) -> str:
        token = self._tokens[0]
        if token.kind != kind:
            raise self._error(token.column, repr(token.text), allowed)
        return self._tokens.pop(0).text

    def _error(self, column: int, came: str, allowed: str, todo: str = "") -> OptionError:
        return OptionError(
            f"{came} at column {column} of the condition {self._text!r}", f"there belongs {allowed}", todo, param="when"
        )
