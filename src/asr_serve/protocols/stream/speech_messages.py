"""Messages of synthesis over a WebSocket: text in, audio out as binary messages."""

from __future__ import annotations

import secrets
from typing import Literal

import msgspec

from asr_serve.errors import MalformedRequest, OptionError, TextTooLong, UnknownCommand, UnsupportedOption
from asr_serve.protocols.form_fields import quote_for_message
from asr_serve.protocols.json_members import JsonMembers, decode_json
from asr_serve.protocols.openai.speech import (
    IGNORED_MEMBERS,
    SpeechStyle,
    SpeechWord,
    parse_format_and_rate,
    parse_style,
    parse_voice,
)
from asr_serve.types import suggest_name

PATH = "/v1/audio/speech/stream"
COMMANDS = ("start", "text", "flush", "end", "cancel")
MAX_SPEECH_MESSAGE_CHARACTERS = 1 << 18
"""Limit of a message; a lexicon is its longest possible part."""
MAX_TEXT_CHARACTERS = 1 << 16
"""Limit of the text in a message."""
MAX_FLUSH_ID_CHARACTERS = 200


class StartSpeech(msgspec.Struct, frozen=True):
    """Starts a speech."""

    model: str | None = None
    voice: str | None = None
    format: str = "pcm"
    rate_hz: int | None = None
    style: SpeechStyle = SpeechStyle()
    words: bool = True
    ignored: tuple[str, ...] = ()


class AppendText(msgspec.Struct, frozen=True):
    """Appends text, cut anywhere."""

    text: str


class FlushSpeech(msgspec.Struct, frozen=True):
    """Speaks the text so far as it is."""

    id: str


class EndSpeech(msgspec.Struct, frozen=True):
    """Ends the text of this speech."""


class CancelSpeech(msgspec.Struct, frozen=True):
    """Ends the speech at once: somebody interrupts."""


SpeechCommand = StartSpeech | AppendText | FlushSpeech | EndSpeech | CancelSpeech


def parse_speech_command(message: str) -> SpeechCommand:
    """Parses a text message. Raises MalformedRequest, UnknownCommand, OptionError, TextTooLong."""
    if len(message) > MAX_SPEECH_MESSAGE_CHARACTERS:
        raise MalformedRequest(
            f"a message of {len(message)} characters came",
            f"up to {MAX_SPEECH_MESSAGE_CHARACTERS} are allowed",
            "send text in parts, as it is made",
        )
    sent: object = decode_json(
        message, object, "a message came that cannot be read", 'messages are JSON, like {"type":"text","text":"Hello."}'
    )
    if not isinstance(sent, dict):
        raise MalformedRequest("a message came that is no object", 'messages are like {"type":"end"}')
    members = JsonMembers(sent)
    kind = members.text("type") or ""
    command = _read(kind, members)
    members.refuse_or_ignore_unknown()
    return command


def _read(kind: str, members: JsonMembers) -> SpeechCommand:
    match kind:
        case "start":
            return _start(members)
        case "text":
            text = members.text("text") or ""
            if len(text) > MAX_TEXT_CHARACTERS:
                raise TextTooLong(
                    f"text has {len(text)} characters",
                    f"up to {MAX_TEXT_CHARACTERS} in a message",
                    "send it in parts",
                    param="text",
                )
            return AppendText(text)
        case "flush":
            name = members.text("id") or f"flush_{secrets.token_hex(8)}"
            if len(name) > MAX_FLUSH_ID_CHARACTERS:
                raise OptionError(f"an id of {len(name)} characters", f"up to {MAX_FLUSH_ID_CHARACTERS}", param="id")
            return FlushSpeech(name)
        case "end":
            return EndSpeech()
        case "cancel":
            return CancelSpeech()
    raise UnknownCommand(
        f"the type {quote_for_message(kind)} is no command",
        f"types: {', '.join(COMMANDS)}",
        suggest_name(kind, COMMANDS),
    )


def _start(members: JsonMembers) -> StartSpeech:
    form, rate_hz = parse_format_and_rate(members, "format", "sample_rate", default="pcm")
    style = parse_style(members)
    for name, on in (("ssml", style.ssml), ("phonemes", style.phonemes)):
        if on:
            raise UnsupportedOption(
                f"{name}=true is not supported",
                "here text comes in parts, and each is spoken when it is here",
                "send it to POST /v1/audio/speech",
                param=name,
            )
    words = members.pop("words")
    if words is not None and not isinstance(words, bool):
        raise OptionError(f"words is {quote_for_message(str(words))}", "true or false", param="words")
    ignored = tuple(name for name in IGNORED_MEMBERS if members.text(name) is not None)
    return StartSpeech(members.text("model"), parse_voice(members), form, rate_hz, style, words is not False, ignored)


# --- server events ----------------------------------------------------------------------------------------


class SpeechEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of events. Times are seconds since the speech's first sample."""

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()


class SpeechStarted(SpeechEvent, frozen=True, kw_only=True, tag="started"):
    """Start of a speech: voice, and format of the audio."""

    model: str
    voice: str
    format: str
    sample_rate: int
    ignored: tuple[str, ...] = ()


class SpeechSentence(SpeechEvent, frozen=True, kw_only=True, tag="sentence"):
    """Sentence, sent before its audio, which begins at `start`."""

    index: int
    start: float
    words: tuple[SpeechWord, ...] = ()


class SpeechFlushed(SpeechEvent, frozen=True, kw_only=True, tag="flushed"):
    """End of a flush: all text before it has been spoken. `seconds`: audio so far."""

    id: str
    seconds: float


class SpeechFinished(SpeechEvent, frozen=True, kw_only=True, tag="done"):
    """End of a speech; another may start. `seconds` of audio were sent."""

    reason: Literal["end", "cancelled", "failed"]
    seconds: float
    sentences: int
    characters: int


class SpeechError(SpeechEvent, frozen=True, kw_only=True, tag="error"):
    code: str
    message: str
    param: str | None = None
    retry_after_ms: int | None = None


def speech_error(code: str, message: str, retry_after_ms: int | None = None, param: str | None = None) -> str:
    """Error event of a refusal or failure. `message` says what came, what is allowed, what to do."""
    return SpeechError(code=code, message=message, param=param, retry_after_ms=retry_after_ms).to_json()
