"""Parser of a subset of SSML: a text with its prosody, breaks and pronunciations.

It uses expat's events. A document type is refused, so there are no entities except XML's own five; depth is
bounded here, and size by the caller. Anything unknown is an error that lists the known: nothing is silently
ignored.

Source  W3C, Speech Synthesis Markup Language 1.1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar
from xml.parsers import expat

from asr_serve.errors import MalformedSsml, TextError
from asr_serve.text.g2p import phoneme_alphabets
from asr_serve.text.g2p.character_folding import fold_characters
from asr_serve.text.g2p.clauses import (
    NEUTRAL_PROSODY,
    OVERRIDE_PLACEHOLDER,
    PITCH_RANGE_SEMITONES,
    SPEED_RANGE,
    PronunciationOverride,
    ProsodySettings,
)
from asr_serve.text.g2p.phoneme_alphabets import Alphabet
from asr_serve.text.g2p.sentence_splitter import BreakKind
from asr_serve.text.normalization import say_as

MAX_DEPTH = 32
LONGEST_BREAK_MS = 10_000
MAX_ELEMENT_CHARACTERS = 1_000
"""Most characters of text in an element with a replaced pronunciation: they are processed as a whole, before any
audio."""
ELEMENTS: dict[str, tuple[str, ...]] = {
    "speak": ("version", "xml:lang", "xmlns", "xmlns:xsi", "xsi:schemaLocation", "xml:base"),
    "p": ("xml:lang",),
    "s": ("xml:lang",),
    "break": ("time", "strength"),
    "prosody": ("rate", "pitch", "volume"),
    "say-as": ("interpret-as", "format", "detail"),
    "phoneme": ("alphabet", "ph"),
    "sub": ("alias",),
    "emphasis": ("level",),
}
REPLACED = ("say-as", "phoneme", "sub")
"""Elements with a replaced pronunciation, which hold text only."""
STRENGTHS = {"none": 0, "x-weak": 100, "weak": 200, "medium": 400, "strong": 700, "x-strong": 1_200}
RATES = {"x-slow": 0.5, "slow": 0.75, "medium": 1.0, "default": 1.0, "fast": 1.25, "x-fast": 1.6}
PITCHES = {"x-low": -4.0, "low": -2.0, "medium": 0.0, "default": 0.0, "high": 2.0, "x-high": 4.0}
VOLUMES = {"x-soft": -12.0, "soft": -6.0, "medium": 0.0, "default": 0.0, "loud": 6.0, "x-loud": 12.0}
LEVELS = {
    "none": NEUTRAL_PROSODY,
    "reduced": ProsodySettings(1.1, -0.5, -2.0),
    "moderate": ProsodySettings(0.95, 0.5, 1.5),
    "strong": ProsodySettings(0.9, 1.0, 3.0),
}
T = TypeVar("T")
_number = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)"


class SsmlBreak(NamedTuple):
    """Break between two characters of the text, which no clause crosses."""

    at: int
    kind: BreakKind
    ms: int | None = None
    """Requested silence; None if not requested."""


class SsmlScript(NamedTuple):
    """Text with its pronunciations, prosody and breaks."""

    text: str
    overrides: list[PronunciationOverride]
    """Override of each OVERRIDE_PLACEHOLDER in the text, in order."""
    prosody_changes: list[tuple[int, ProsodySettings]]
    """Prosody with the character from which on it holds; in order, the first at 0."""
    breaks: list[SsmlBreak]


class _OpenElement(NamedTuple):
    name: str
    manner: ProsodySettings
    attributes: dict[str, str]
    line: int
    column: int


def parse_ssml(document: str, alphabet: Alphabet, british: bool = False) -> SsmlScript:
    """Parse a <speak> document. Raises MalformedSsml, and UnsupportedScript."""
    return _Reader(alphabet, british).read(document)


class _Reader:
    def __init__(self, alphabet: Alphabet, british: bool) -> None:
        self._alphabet, self._british = alphabet, british
        self._script = SsmlScript("", [], [(0, NEUTRAL_PROSODY)], [])
        self._texts: list[str] = []
        self._length = 0
        self._held: list[str] | None = None
        self._open: list[_OpenElement] = []
        self._blamed: _OpenElement | None = None
        self._xml = xml = expat.ParserCreate()
        xml.buffer_text = True
        xml.StartElementHandler, xml.EndElementHandler = self._start, self._end
        xml.CharacterDataHandler = self._characters
        xml.StartDoctypeDeclHandler = self._doctype

    def read(self, document: str) -> SsmlScript:
        try:
            self._xml.Parse(document.encode("utf-8", "replace"), True)
        except expat.ExpatError as failure:
            reason = expat.ErrorString(failure.code)
            raise MalformedSsml(
                f"the XML is broken: {reason}",
                "every element is closed, & is written &amp; and < is written &lt;",
                line=failure.lineno,
                column=failure.offset + 1,
            ) from failure
        return self._script._replace(text="".join(self._texts))

    # handlers of expat's events

    def _doctype(self, *_: object) -> None:
        raise self._error("a document type", "<speak> and what is in it", "leave it out")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if not self._open and name != "speak":
            raise self._error(f"<{name}> at the top", "<speak>")
        if name not in ELEMENTS or (self._open and name == "speak"):
            raise self._error(f"<{name}>", f"in <speak>: {', '.join(f'<{n}>' for n in ELEMENTS if n != 'speak')}")
        if len(self._open) >= MAX_DEPTH:
            raise self._error(f"{MAX_DEPTH + 1} elements in each other", f"at most {MAX_DEPTH}")
        if self._open and self._open[-1].name in (*REPLACED, "break"):
            raise self._error(f"<{name}> in <{self._open[-1].name}>", "text" if self._held is not None else "nothing")
        for attribute in attributes:
            if attribute not in ELEMENTS[name]:
                raise self._error(f'{attribute}="..." of <{name}>', ", ".join(ELEMENTS[name]))
        language = attributes.get("xml:lang", "en")
        if language.lower().split("-")[0] != "en":
            raise self._error(f'xml:lang="{language}"', "en, en-US, en-GB")
        outer = self._open[-1].manner if self._open else NEUTRAL_PROSODY
        manner = outer
        if name == "prosody":
            manner = self._prosody(attributes).combined_with(outer)
        elif name == "emphasis":
            manner = self._one_of(attributes, "level", LEVELS, "moderate").combined_with(outer)
        elif name in ("p", "s"):
            self._stop("paragraph" if name == "p" else "sentence")
        elif name == "break":
            self._stop("none", self._break_ms(attributes))
        elif name in REPLACED:
            self._held = []
        self._open.append(
            _OpenElement(name, manner, attributes, self._xml.CurrentLineNumber, self._xml.CurrentColumnNumber + 1)
        )
        self._in(manner)

    def _end(self, name: str) -> None:
        element = self._open.pop()
        if name in REPLACED:
            written = fold_characters(self._short("".join(self._held or []), f"<{name}>")).strip()
            self._held = None
            self._replace(element, written)
        elif name in ("p", "s"):
            self._stop("paragraph" if name == "p" else "sentence")
        if self._open:
            self._in(self._open[-1].manner)

    def _characters(self, text: str) -> None:
        if self._held is not None:
            self._held.append(text)
        else:
            location = f"the text that ends in line {self._xml.CurrentLineNumber}"
            self._add(re.sub(r"\s+", " ", fold_characters(text, location)))

    # building the script

    def _add(self, text: str) -> None:
        self._texts.append(text)
        self._length += len(text)

    def _in(self, manner: ProsodySettings) -> None:
        manners = self._script.prosody_changes
        if manners[-1][1] != manner:
            if manners[-1][0] == self._length:
                manners.pop()
            manners.append((self._length, manner))

    def _stop(self, kind: BreakKind, ms: int | None = None) -> None:
        self._script.breaks.append(SsmlBreak(self._length, kind, ms))

    def _replace(self, element: _OpenElement, written: str) -> None:
        attributes, self._blamed = element.attributes, element
        try:
            if element.name == "phoneme":
                override = PronunciationOverride(written, phonemes=self._phonemes(attributes))
            elif element.name == "sub":
                override = PronunciationOverride(
                    written, words=fold_characters(self._needed(attributes, "alias")).strip()
                )
            else:
                kind = self._needed(attributes, "interpret-as")
                override = PronunciationOverride(
                    written, words=say_as.verbalize_say_as(written, kind, attributes.get("format", ""), self._british)
                )
        except MalformedSsml:
            raise
        except TextError as error:
            raise MalformedSsml(
                f"<{element.name}>: {error.came}", error.allowed, error.todo, line=element.line, column=element.column
            ) from error
        self._blamed = None
        if override.words or override.phonemes:
            self._script.overrides.append(override)
            self._add(OVERRIDE_PLACEHOLDER)

    def _phonemes(self, attributes: dict[str, str]) -> str:
        readers: dict[str, Callable[[str], str]] = {
            "ipa": lambda ph: phoneme_alphabets.from_ipa(ph, self._alphabet, self._british),
            "x-misaki": lambda ph: phoneme_alphabets.from_misaki(ph, self._alphabet),
        }
        reader = self._one_of(attributes, "alphabet", readers, "ipa")
        return phoneme_alphabets.check_phonemes(reader(self._needed(attributes, "ph")), self._alphabet, "ph")

    def _prosody(self, attributes: dict[str, str]) -> ProsodySettings:
        if not attributes:
            raise self._error("<prosody> without attributes", "rate, pitch, volume")
        return ProsodySettings(
            self._rate(attributes.get("rate", "default")),
            self._pitch(attributes.get("pitch", "default")),
            self._volume(attributes.get("volume", "default")),
        )

    def _rate(self, value: str) -> float:
        """Speed factor: `fast`, `1.2` and `120%` are of the usual speed, `+20%` is relative to it."""
        found = re.fullmatch(rf"({_number})(%?)", value)
        rate = RATES.get(value)
        if found:
            rate = float(found[1]) / (100 if found[2] else 1)
            rate += 1 if found[2] and value[0] in "+-" else 0
        if rate is None or not SPEED_RANGE[0] <= rate <= SPEED_RANGE[1]:
            raise self._error(f'rate="{value}"', f"{', '.join(RATES)}; 0.25 to 4; 25% to 400%; +20%, -20%")
        return rate

    def _pitch(self, value: str) -> float:
        found = re.fullmatch(rf"({_number})(st|%)", value)
        pitch = PITCHES.get(value)
        if found and found[2] == "st":
            pitch = float(found[1])
        elif found and float(found[1]) > -100:
            pitch = 12 * math.log2(1 + float(found[1]) / 100)
        if pitch is None or not PITCH_RANGE_SEMITONES[0] <= pitch <= PITCH_RANGE_SEMITONES[1]:
            raise self._error(f'pitch="{value}"', f"{', '.join(PITCHES)}; -12st to +12st; -50% to +100%")
        return pitch

    def _volume(self, value: str) -> float:
        found = re.fullmatch(rf"({_number})dB", value)
        volume = VOLUMES.get(value) if not found else float(found[1])
        if volume is None or not -12 <= volume <= 12:
            raise self._error(f'volume="{value}"', f"{', '.join(VOLUMES)}; -12dB to +12dB")
        return volume

    def _break_ms(self, attributes: dict[str, str]) -> int:
        if "time" not in attributes:
            return self._one_of(attributes, "strength", STRENGTHS, "medium")
        value = attributes["time"]
        found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(ms|s)", value)
        ms = round(float(found[1]) * (1_000 if found[2] == "s" else 1)) if found else -1
        if not 0 <= ms <= LONGEST_BREAK_MS:
            raise self._error(f'time="{value}"', "0ms to 10s, like 250ms or 1.5s")
        return ms

    def _one_of(self, attributes: dict[str, str], name: str, known: dict[str, T], usual: str) -> T:
        value = attributes.get(name, usual)
        if value not in known:
            raise self._error(f'{name}="{value}"', ", ".join(known))
        return known[value]

    def _needed(self, attributes: dict[str, str], name: str) -> str:
        if not attributes.get(name, "").strip():
            raise self._error(f"no {name}", f'{name}="..."')
        return self._short(attributes[name], name)

    def _short(self, text: str, where: str) -> str:
        if len(text) > MAX_ELEMENT_CHARACTERS:
            raise self._error(
                f"{len(text):,} characters of {where}", f"at most {MAX_ELEMENT_CHARACTERS:,}", "make several of it"
            )
        return text

    def _error(self, came: str, allowed: str, todo: str = "") -> MalformedSsml:
        line, column = self._xml.CurrentLineNumber, self._xml.CurrentColumnNumber + 1
        if self._blamed:
            line, column = self._blamed.line, self._blamed.column
        return MalformedSsml(came, allowed, todo, line=line, column=column)
