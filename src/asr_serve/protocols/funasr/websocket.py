"""FunASR's WebSockets: text frames to commands, segments to answers. No sockets here.

Source  FunASR's vLLM guide, sections 5.5 (`/ws`: the answer after STOP) and 6.3 (text while audio arrives)
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
from asr_serve.protocols.funasr.runtime import is_runtime_message
from asr_serve.protocols.speaker_names import speaker_number
from asr_serve.text import languages
from asr_serve.types import Segment, suggest_name

FLAGS = ("spk", "words", "itn")
"""Optional results: speakers, words with times, inverse text normalization. Our extensions, as commands
(`SPK:true`) and in the query."""
COMMANDS = ("START", "STOP", "LANGUAGE:", "HOTWORDS:", *(f"{flag.upper()}:" for flag in FLAGS))
PLACES = 4
"""Decimal places of a probability."""
MAX_COMMAND_CHARACTERS = 1 << 20
"""Limit of a text frame: ten thousand long hotwords."""

STARTED = '{"event":"started"}'
STOPPED = '{"event":"stopped"}'
NOT_STARTED = "It takes effect from the next START on: this session continues as it started."


class StartCommand(msgspec.Struct, frozen=True):
    """Starts a session."""


class StopCommand(msgspec.Struct, frozen=True):
    """Ends the audio: the final text follows."""


class LanguageCommand(msgspec.Struct, frozen=True):
    name: str
    """Language as the client sent it."""
    code: str | None
    """Language code; None: the model's own."""


class HotwordsCommand(msgspec.Struct, frozen=True):
    words: tuple[str, ...]


class FlagCommand(msgspec.Struct, frozen=True):
    name: str
    """One of FLAGS."""
    on: bool


Command = StartCommand | StopCommand | LanguageCommand | HotwordsCommand | FlagCommand


class FunAsrOptions(msgspec.Struct, frozen=True):
    """Options of a session."""

    language: str | None = None
    """Language code; None: the model's own."""
    hotwords: tuple[str, ...] = ()
    spk: bool = False
    words: bool = False
    itn: bool | None = None
    numbers: tuple[tuple[str, int], ...] = ()
    """Speaker counts, by their names as options; no effect without `spk`."""

    @classmethod
    def from_query(cls, fields: FormFields) -> FunAsrOptions:
        """Parses a query. Raises OptionError."""
        spk, words, itn = (fields.flag(flag) for flag in FLAGS)
        counts = {name: fields.integer(name, 1, MAX_SPEAKERS) for name in SPEAKER_COUNT_FIELDS}
        check_speakers_not_disabled({"spk": spk, **counts}, "spk")
        check_speaker_counts(**counts)
        numbers = tuple((name, value) for name, value in counts.items() if value is not None)
        return cls(spk=spk or bool(numbers), words=words or False, itn=itn, numbers=numbers)

    def pipeline_options(self) -> dict[str, Any]:
        """Arguments of TranscribeOptions and ListenOptions."""
        return {
            "language": self.language or None,
            "hotwords": self.hotwords,
            "words": self.words,
            "speakers": self.spk,
            "itn": self.itn,
            **(dict(self.numbers) if self.spk else {}),
        }


def parse_command(text: str) -> Command:
    """Parses a text frame. Raises UnknownCommand, and UnsupportedProtocol where no other frame can be valid.

    >>> parse_command("START"), parse_command("LANGUAGE:English"), parse_command("HOTWORDS:Ada, Babbage,")
    (StartCommand(), LanguageCommand(name='English', code='en'), HotwordsCommand(words=('Ada', 'Babbage')))
    """
    if len(text) > MAX_COMMAND_CHARACTERS:
        raise UnknownCommand(
            f"a text of {len(text)} characters came",
            f"commands are up to {MAX_COMMAND_CHARACTERS} characters long",
            "send audio in binary frames",
        )
    if is_runtime_message(text):
        raise UnsupportedProtocol(
            "the text is one of FunASR's runtime protocol, whose first message is JSON with a `mode`",
            "a connection has one protocol, and this one has begun with commands",
            "connect again, or send START, samples and STOP",
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


def _flag(name: str, value: str) -> bool:
    flag = value.strip().casefold()
    if flag not in TRUE + FALSE:
        raise OptionError(
            f"{name}:{quote_for_message(value)}", "true or false", f"like {name}:true", param=name.lower()
        )
    return flag in TRUE


def language_answer(name: str) -> str:
    return _json({"event": "language_set", "language": name or "auto"})


def hotwords_answer(words: Iterable[str], reason: str = "") -> str:
    """Answer to HOTWORDS. `reason`: why the words have no effect yet; empty: they have one."""
    note = {"message": reason} if reason else {}
    return _json({"event": "hotwords_set", "hotwords": list(words), "used": not reason, **note})


def flag_answer(flag: FlagCommand, reason: str = "") -> str:
    """Answer to a flag, with `reason` as in `hotwords_answer`."""
    note = {"message": reason} if reason else {}
    return _json({"event": f"{flag.name}_set", flag.name: flag.on, "used": not reason, **note})


def error_answer(code: str, message: str, retry_after_ms: int | None = None) -> str:
    """Error event. `message` says what came, what is allowed, what to do."""
    event: dict[str, object] = {"event": "error", "code": code, "message": message}
    if retry_after_ms is not None:
        event["retry_after_ms"] = retry_after_ms
    return _json(event)


class FunAsrWord(msgspec.Struct, frozen=True):
    """Word, or character of a script without spaces; times as in its sentence."""

    word: str
    start: int
    end: int


class FunAsrSentence(msgspec.Struct, frozen=True, omit_defaults=True):
    """Locked sentence. Times are milliseconds since START."""

    text: str
    start: int
    end: int
    spk: int | str | None = None
    """Speaker: a number from 0, or a name."""
    words: list[FunAsrWord] | None = None
    language: str | None = None
    language_probability: float | None = None
    """Probability of `language`, 0 to 1. Both only if the language was detected."""

    @classmethod
    def from_segment(
        cls, segment: Segment, *, words: bool = False, language: str = "", probability: float = 0.0
    ) -> FunAsrSentence:
        """`words`: whether to include them. `probability` of `language`; 0: it was not detected."""
        start, end = units.samples_to_ms(segment.start_samples), units.samples_to_ms(segment.end_samples)
        timed_words = [
            FunAsrWord(word.text, units.samples_to_ms(word.start_samples), units.samples_to_ms(word.end_samples))
            for word in segment.words
        ]
        detected = (language, round(probability, PLACES)) if probability else (None, None)
        return cls(segment.text, start, end, _spk(segment.speaker), timed_words if words else None, *detected)


def _spk(speaker: str) -> int | str | None:
    index = speaker_number(speaker)
    return speaker or None if index is None else index


class SentenceEncoder:
    """Locked sentences of one session, each encoded as JSON once."""

    def __init__(self, *, only_new: bool = False, words: bool = False, spk: bool = False) -> None:
        """`only_new`: an answer has the sentences locked since the one before it, instead of all. `words`: whether
        sentences include words. `spk`: whether `relabel_speakers` may follow."""
        self._only_new, self._words, self._spk = only_new, words, spk
        self._locked = ""
        self._spoken: list[FunAsrSentence] = []
        """All sentences, with `spk`."""

    def add_segment(self, segment: Segment, language: str = "", probability: float = 0.0) -> None:
        """Adds a segment. Arguments as for FunAsrSentence.from_segment."""
        sentence = FunAsrSentence.from_segment(segment, words=self._words, language=language, probability=probability)
        self._add(sentence)
        if self._spk:
            self._spoken.append(sentence)

    def relabel_speakers(self, speakers: Sequence[str]) -> None:
        """Revises the speaker of every sentence; `encode_final` sends all of them once more."""
        assert len(speakers) == len(self._spoken)
        self._locked = ""
        for sentence, speaker in zip(self._spoken, speakers, strict=True):
            self._add(msgspec.structs.replace(sentence, spk=_spk(speaker)))

    def _add(self, sentence: FunAsrSentence) -> None:
        encoded = _json(sentence)
        self._locked = f"{self._locked},{encoded}" if self._locked else encoded

    def encode_partial(self, partial: str, start_samples: int = 0, duration_samples: int = 0) -> str:
        """Answer while audio arrives. `start_samples`: start of the partial, which FunASR's own clients show.
        `duration_samples`: length of the audio since START."""
        start = f',"partial_start_ms":{units.samples_to_ms(start_samples)}' if partial else ""
        tail = f'{start},"is_final":false,{_duration(duration_samples)}'
        return f'{{"sentences":[{self._pop_sentences()}],"partial":{_json(partial)}{tail}}}'

    def encode_final(self, duration_samples: int, language: str = "", probability: float = 0.0) -> str:
        """Answer after STOP, with the length of the audio and, on `/ws`, its detected language."""
        tail = f",{_duration(duration_samples)}"
        if probability:
            tail += f',"language":{_json(language)},"language_probability":{round(probability, PLACES)}'
        return f'{{"sentences":[{self._pop_sentences()}],"is_final":true{tail}}}'

    def _pop_sentences(self) -> str:
        sentences = self._locked
        if self._only_new:
            self._locked = ""
        return sentences


def _duration(samples: int) -> str:
    return f'"duration_ms":{units.samples_to_ms(samples)}'


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
