"""FunASR's WebSockets: frames to commands and samples, segments to answers. No sockets here.

Source  FunASR's vLLM guide, sections 5.5 (`/ws`: the answer after STOP) and 6.3 (text while somebody speaks)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from asr_serve import units
from asr_serve.errors import OptionError, UnknownCommand, UnsupportedProtocol
from asr_serve.pipelines.options import (
    MAX_SPEAKERS,
    SPEAKER_COUNT_FIELDS,
    check_speaker_counts,
    check_speakers_not_disabled,
)
from asr_serve.protocols.form_fields import FALSE, TRUE, FormFields, parse_word_list, quote_for_message
from asr_serve.protocols.speaker_names import speaker_number
from asr_serve.text import languages
from asr_serve.types import Segment, suggest_name

FLAGS = ("spk", "words", "itn")
"""What may be wanted beside the text: who speaks, words with their times, numbers as one writes them. Ours, as
commands (`SPK:true`) and in the query."""
COMMANDS = ("START", "STOP", "LANGUAGE:", "HOTWORDS:", *(f"{flag.upper()}:" for flag in FLAGS))
TWO_PASS_KEYS = frozenset({"mode", "is_speaking"})
"""Either is in every message of the 2-pass protocol, which is refused by name."""
PLACES = 4
"""Of a probability."""
MAX_COMMAND_CHARACTERS = 1 << 20
"""Of a text frame: ten thousand long hotwords."""

STARTED = '{"event":"started"}'
STOPPED = '{"event":"stopped"}'
NOT_STARTED = "That holds from the next START on: this session is heard as it began."


class StartCommand(msgspec.Struct, frozen=True):
    """A session begins."""


class StopCommand(msgspec.Struct, frozen=True):
    """No more audio will come: finish the text."""


class LanguageCommand(msgspec.Struct, frozen=True):
    name: str
    """As it was sent."""
    code: str | None
    """None: the model's own."""


class HotwordsCommand(msgspec.Struct, frozen=True):
    words: tuple[str, ...]


class FlagCommand(msgspec.Struct, frozen=True):
    name: str
    """One of FLAGS."""
    on: bool


Command = StartCommand | StopCommand | LanguageCommand | HotwordsCommand | FlagCommand


class FunAsrOptions(msgspec.Struct, frozen=True):
    """How a session is to be heard, and what is to be told of it."""

    language: str | None = None
    """None: the model's own."""
    hotwords: tuple[str, ...] = ()
    spk: bool = False
    words: bool = False
    itn: bool = False
    numbers: tuple[tuple[str, int], ...] = ()
    """How many speak, as options have it; of no effect without `spk`."""

    @classmethod
    def from_query(cls, fields: FormFields) -> FunAsrOptions:
        """What a query wants. Raises OptionError."""
        spk, words, itn = (fields.flag(flag) for flag in FLAGS)
        counted = {name: fields.integer(name, 1, MAX_SPEAKERS) for name in SPEAKER_COUNT_FIELDS}
        check_speakers_not_disabled({"spk": spk, **counted}, "spk")
        check_speaker_counts(**counted)
        numbers = tuple((name, value) for name, value in counted.items() if value is not None)
        return cls(spk=spk or bool(numbers), words=words or False, itn=itn or False, numbers=numbers)

    def pipeline_options(self) -> dict[str, Any]:
        """As TranscribeOptions and ListenOptions call them."""
        return {
            "language": self.language or None,
            "hotwords": self.hotwords,
            "words": self.words,
            "speakers": self.spk,
            "itn": self.itn,
            **(dict(self.numbers) if self.spk else {}),
        }


def parse_command(text: str) -> Command:
    """Read a text frame. Raises UnknownCommand, and UnsupportedProtocol where no other frame will be one either.

    >>> parse_command("START"), parse_command("LANGUAGE:English"), parse_command("HOTWORDS:Ada, Babbage,")
    (StartCommand(), LanguageCommand(name='English', code='en'), HotwordsCommand(words=('Ada', 'Babbage')))
    """
    if len(text) > MAX_COMMAND_CHARACTERS:
        raise UnknownCommand(
            f"a text of {len(text)} characters came",
            f"commands are up to {MAX_COMMAND_CHARACTERS} characters long",
            "send audio in binary frames",
        )
    if _is_two_pass(text):
        raise UnsupportedProtocol(
            "the text is FunASR's older 2-pass protocol, whose first message is JSON with a `mode`",
            "it is not served here; `/` tells text while somebody speaks, `/ws` after STOP",
            "send START, samples and STOP, as FunASR's client_python.py does; or use /v1/stream",
        )
    name, colon, value = text.strip().partition(":")
    match name + colon:
        case "START":
            return StartCommand()
        case "STOP":
            return StopCommand()
        case "LANGUAGE:":
            return LanguageCommand(value.strip(), languages.requested_language_code(value))
        case "HOTWORDS:":
            return HotwordsCommand(parse_word_list(value))
        case "SPK:" | "WORDS:" | "ITN:":
            return FlagCommand(name.lower(), _flag(name, value))
    raise UnknownCommand(
        f"the text {quote_for_message(text)} is no command",
        f"commands: {', '.join(COMMANDS)}",
        suggest_name((name + colon).upper(), COMMANDS),
    )


def _is_two_pass(text: str) -> bool:
    """Whether it opens a session of FunASR's 2-pass protocol: `{"mode": "2pass", "chunk_size": [5, 10, 5], ...}`;
    the modes are 2pass, online and offline. Its closing message, `{"is_speaking": false}`, belongs to it too."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        sent = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(sent, dict) and not TWO_PASS_KEYS.isdisjoint(sent)


def _flag(name: str, value: str) -> bool:
    said = value.strip().casefold()
    if said not in TRUE + FALSE:
        raise OptionError(
            f"{name}:{quote_for_message(value)}", "true or false", f"like {name}:true", param=name.lower()
        )
    return said in TRUE


def language_answer(name: str) -> str:
    return _json({"event": "language_set", "language": name or "auto"})


def hotwords_answer(words: Iterable[str], why: str = "") -> str:
    """`why` they are not used is said, so that nobody waits for an effect; empty: they are."""
    told = {"message": why} if why else {}
    return _json({"event": "hotwords_set", "hotwords": list(words), "used": not why, **told})


def flag_answer(flag: FlagCommand, why: str = "") -> str:
    """As `hotwords_set`."""
    told = {"message": why} if why else {}
    return _json({"event": f"{flag.name}_set", flag.name: flag.on, "used": not why, **told})


def error_answer(code: str, message: str, retry_after_ms: int | None = None) -> str:
    """Something was refused. What `message` says: what came, what is allowed, what to do."""
    told: dict[str, object] = {"event": "error", "code": code, "message": message}
    if retry_after_ms is not None:
        told["retry_after_ms"] = retry_after_ms
    return _json(told)


class FunAsrWord(msgspec.Struct, frozen=True):
    """A word, or a character of a script without spaces; times as those of its sentence."""

    word: str
    start: int
    end: int


class FunAsrSentence(msgspec.Struct, frozen=True, omit_defaults=True):
    """A locked one. Times are milliseconds since START."""

    text: str
    start: int
    end: int
    spk: int | str | None = None
    """Who speaks, by number from 0."""
    words: list[FunAsrWord] | None = None
    language: str | None = None
    language_probability: float | None = None
    """0 to 1. Both where nobody said it and the audio was asked."""

    @classmethod
    def from_segment(
        cls, segment: Segment, *, words: bool = False, language: str = "", probability: float = 0.0
    ) -> FunAsrSentence:
        """`words`: whether they are to be told. `language` that was heard; of `probability` 0: nobody asked."""
        start, end = units.samples_to_ms(segment.start_samples), units.samples_to_ms(segment.end_samples)
        told = [
            FunAsrWord(word.text, units.samples_to_ms(word.start_samples), units.samples_to_ms(word.end_samples))
            for word in segment.words
        ]
        heard = (language, round(probability, PLACES)) if probability else (None, None)
        return cls(segment.text, start, end, _spk(segment.speaker), told if words else None, *heard)


def _spk(speaker: str) -> int | str | None:
    index = speaker_number(speaker)
    return speaker or None if index is None else index


class SentenceEncoder:
    """The locked sentences of one session, each made JSON once."""

    def __init__(self, *, only_new: bool = False, words: bool = False, spk: bool = False) -> None:
        """`only_new`: an answer has those that were locked since the one before it, instead of all. `words`:
        whether each tells its own. `spk`: who speaks may yet be `known` otherwise."""
        self._only_new, self._words, self._spk = only_new, words, spk
        self._locked = ""
        self._spoken: list[FunAsrSentence] = []
        """With `spk`, all of them."""

    def add_segment(self, segment: Segment, language: str = "", probability: float = 0.0) -> None:
        """See Sentence.of."""
        sentence = FunAsrSentence.from_segment(
            segment, words=self._words, language=language, probability=probability
        )
        self._add(sentence)
        if self._spk:
            self._spoken.append(sentence)

    def relabel_speakers(self, speakers: Sequence[str]) -> None:
        """Who said each of them, as all of it shows: `final` tells them all once more."""
        assert len(speakers) == len(self._spoken)
        self._locked = ""
        for sentence, speaker in zip(self._spoken, speakers, strict=True):
            self._add(msgspec.structs.replace(sentence, spk=_spk(speaker)))

    def _add(self, sentence: FunAsrSentence) -> None:
        one = _json(sentence)
        self._locked = f"{self._locked},{one}" if self._locked else one

    def encode_partial(self, partial: str, start_samples: int = 0, duration_samples: int = 0) -> str:
        """While somebody speaks. `start_samples`: where the partial begins, which FunASR's own clients show.
        `duration_samples`: the length of the audio that has come since START."""
        began = f',"partial_start_ms":{units.samples_to_ms(start_samples)}' if partial else ""
        told = f'{began},"is_final":false,{_duration(duration_samples)}'
        return f'{{"sentences":[{self._pop_sentences()}],"partial":{_json(partial)}{told}}}'

    def encode_final(self, duration_samples: int, language: str = "", probability: float = 0.0) -> str:
        """After STOP: with the audio's length, and, on `/ws`, what language all of it was heard in."""
        told = f",{_duration(duration_samples)}"
        if probability:
            told += f',"language":{_json(language)},"language_probability":{round(probability, PLACES)}'
        return f'{{"sentences":[{self._pop_sentences()}],"is_final":true{told}}}'

    def _pop_sentences(self) -> str:
        taken = self._locked
        if self._only_new:
            self._locked = ""
        return taken


def _duration(samples: int) -> str:
    return f'"duration_ms":{units.samples_to_ms(samples)}'


def _json(what: object) -> str:
    return msgspec.json.encode(what).decode()
