"""Deepgram's `/v1/speak`: query and body to a request for speech; messages of its WebSocket. No sockets here.

Source  Deepgram's API reference, Speak v1, REST and WebSocket
"""

from __future__ import annotations

from urllib.parse import parse_qs

import msgspec

from asr_serve.audio.encode.companded_encoder import WAV_SUFFIX
from asr_serve.errors import (
    MalformedRequest,
    MissingOption,
    OptionError,
    TextTooLong,
    UnknownCommand,
    UnsupportedOption,
)
from asr_serve.protocols.deepgram.listen_query import was_sent
from asr_serve.protocols.deepgram.models import model_uuid
from asr_serve.protocols.form_fields import FormFields, quote_for_message
from asr_serve.protocols.json_members import JsonMembers, decode_json
from asr_serve.protocols.openai.speech import MAX_SPEED, MIN_SPEED, SpeechRequest, SpeechStyle
from asr_serve.protocols.stream.speech_messages import MAX_SPEECH_MESSAGE_CHARACTERS, MAX_TEXT_CHARACTERS, StartSpeech
from asr_serve.types import suggest_name

SPEAK_PATH = "/v1/speak"
RAW_RATES_HZ = {"linear16": 24_000, "mulaw": 8_000, "alaw": 8_000}
"""Default rate of each encoding of samples."""
UPLOAD_ENCODINGS = (*RAW_RATES_HZ, "mp3", "opus", "flac", "aac")
CONTAINERS = ("none", "wav", "ogg")
FIELDS = ("model", "voice", "encoding", "container", "sample_rate", "speed", "api_key", "caller_id")
"""Fields of the query. `voice` is our extension: in Deepgram, a voice is a model."""
WITHOUT_EFFECT = ("bit_rate", "mip_opt_out", "tag[]", "callback_method")
COMMANDS = ("Speak", "Flush", "Clear", "Close")


class SpeakQuery(msgspec.Struct, frozen=True):
    """Options of a request or connection."""

    name: str | None = None
    """Model, voice, or one of Deepgram's voices; None: the server's own model."""
    voice: str | None = None
    format: str = "mp3"
    rate_hz: int | None = None
    speed: float = 1.0
    ignored: tuple[str, ...] = ()

    def request(self, text: str, model: str | None, voice: str | None) -> SpeechRequest:
        """Request for the speech of a whole text, by a model and a voice."""
        style = SpeechStyle(speed=self.speed)
        return SpeechRequest(
            text, model, voice, format=self.format, rate_hz=self.rate_hz, style=style, ignored=self.ignored
        )

    def start(self, model: str | None, voice: str | None) -> StartSpeech:
        """Start of a speech whose text comes in parts."""
        style = SpeechStyle(speed=self.speed)
        return StartSpeech(model, voice, self.format, self.rate_hz, style, words=False, ignored=self.ignored)


def parse_speak_query(query: str, *, live: bool) -> SpeakQuery:
    """Parses the query of a request or, with `live`, of a WebSocket. Raises OptionError, UnsupportedOption."""
    fields = FormFields(parse_qs(query, keep_blank_values=True), (*FIELDS, *WITHOUT_EFFECT, "callback"))
    fields.reject_unsupported("callback", "the audio is in the answer")
    encoding = fields.choice("encoding", tuple(RAW_RATES_HZ) if live else UPLOAD_ENCODINGS)
    encoding = encoding or ("linear16" if live else "mp3")
    rate_hz = fields.integer("sample_rate", 8_000, 48_000)
    speed = fields.number("speed", MIN_SPEED, MAX_SPEED)
    return SpeakQuery(
        name=fields.text("model"),
        voice=fields.text("voice"),
        format=_format(encoding, fields.choice("container", CONTAINERS), live=live),
        rate_hz=RAW_RATES_HZ.get(encoding) if rate_hz is None else rate_hz,
        speed=1.0 if speed is None else speed,
        ignored=tuple(name.removesuffix("[]") for name in WITHOUT_EFFECT if was_sent(fields, name)),
    )


def _format(encoding: str, container: str | None, *, live: bool) -> str:
    """Our name of an encoding in a container."""
    raw = encoding in RAW_RATES_HZ
    possible: tuple[str, ...] = ("ogg",) if encoding == "opus" else ("none",)
    if raw and not live:
        possible = ("wav", "none")
    if container is not None and container not in possible:
        raise UnsupportedOption(
            f"container={container} with encoding={encoding}", f"one of: {', '.join(possible)}", param="container"
        )
    in_wav = raw and (container or possible[0]) == "wav"
    if encoding == "linear16":
        return "wav" if in_wav else "pcm"
    return f"{encoding}{WAV_SUFFIX}" if in_wav else encoding


def parse_speak_body(body: bytes, content_type: str, most_characters: int) -> str:
    """Text of a body: that of a JSON object or, with `text/plain`, the body. Raises MalformedRequest, OptionError,
    TextTooLong."""
    example = 'a body is like {"text": "Hello."}'
    if content_type.partition(";")[0].strip().lower() == "text/plain":
        try:
            text = body.decode()
        except UnicodeDecodeError as error:
            raise MalformedRequest(f"a body came that is no UTF-8: {error}", example) from None
    else:
        sent: object = decode_json(body, object, "a body came that cannot be read as JSON", example)
        if not isinstance(sent, dict):
            raise MalformedRequest("a body came that is no object", example)
        members = JsonMembers(sent)
        text = _text(members)
        members.refuse_or_ignore_unknown()
    if len(text) > most_characters:
        raise TextTooLong(
            f"text has {len(text)} characters",
            f"up to {most_characters}",
            "send it in parts, or have max_characters raised",
            param="text",
        )
    return text


def _text(members: JsonMembers) -> str:
    text = members.pop("text")
    if not isinstance(text, str):
        problem = "is missing" if text is None else "is no text"
        raise (MissingOption if text is None else OptionError)(
            f"text {problem}", "the text that is to be spoken", param="text"
        )
    return text


# --- WebSocket --------------------------------------------------------------------------------------------


class SpeakText(msgspec.Struct, frozen=True):
    """Appends text."""

    text: str


class SpeakFlush(msgspec.Struct, frozen=True):
    """Speaks the text so far; Flushed follows its audio."""


class SpeakClear(msgspec.Struct, frozen=True):
    """Drops text and audio that have not been sent."""


class SpeakClose(msgspec.Struct, frozen=True):
    """Speaks the rest, and ends the connection."""


SpeakCommand = SpeakText | SpeakFlush | SpeakClear | SpeakClose


def parse_speak_command(message: str) -> SpeakCommand:
    """Parses a text message. Raises MalformedRequest, UnknownCommand, OptionError, TextTooLong."""
    if len(message) > MAX_SPEECH_MESSAGE_CHARACTERS:
        raise MalformedRequest(
            f"a message of {len(message)} characters came",
            f"up to {MAX_SPEECH_MESSAGE_CHARACTERS} are allowed",
            "send text in parts, as it is made",
        )
    allowed = 'messages are JSON, like {"type": "Speak", "text": "Hello."}'
    sent: object = decode_json(message, object, "a message came that cannot be read", allowed)
    if not isinstance(sent, dict):
        raise MalformedRequest("a message came that is no object", allowed)
    members = JsonMembers(sent)
    kind = members.text("type") or ""
    match kind:
        case "Speak":
            text = _text(members)
            if len(text) > MAX_TEXT_CHARACTERS:
                came, most = f"text has {len(text)} characters", f"up to {MAX_TEXT_CHARACTERS} in a message"
                raise TextTooLong(came, most, "send it in parts", param="text")
            return SpeakText(text)
        case "Flush":
            return SpeakFlush()
        case "Clear":
            return SpeakClear()
        case "Close":
            return SpeakClose()
    raise UnknownCommand(
        f"the type {quote_for_message(kind)} is no command",
        f"types: {', '.join(COMMANDS)}",
        suggest_name(kind, COMMANDS),
    )


class SpeakMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of server messages."""

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()


class SpeakMetadata(SpeakMessage, frozen=True, kw_only=True, tag="Metadata"):
    """First message."""

    request_id: str
    model_name: str
    model_version: str
    model_uuid: str
    voice: str
    """Voice that speaks. Ours."""


class SpeakFlushed(SpeakMessage, frozen=True, kw_only=True, tag="Flushed"):
    """All text before a Flush has been spoken."""

    sequence_id: int


class SpeakCleared(SpeakMessage, frozen=True, kw_only=True, tag="Cleared"):
    """Nothing that came before a Clear is spoken any more."""

    sequence_id: int


def speak_metadata(request_id: str, model: str, voice: str, version: str) -> str:
    return SpeakMetadata(
        request_id=request_id, model_name=model, model_version=version, model_uuid=model_uuid(model), voice=voice
    ).to_json()
