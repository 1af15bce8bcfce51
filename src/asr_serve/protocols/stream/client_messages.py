"""Client messages of /v1/stream: query to options, texts to commands. No sockets, no HTTP."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asr_serve.audio.silence_schedule import SilenceSchedule
from asr_serve.audio.stream_decoder import DEFAULT_RATES_HZ, ENCODINGS, MAX_RATE_HZ, MIN_RATE_HZ
from asr_serve.errors import MalformedRequest, OptionError, UnknownCommand, UnsupportedOption
from asr_serve.pipelines.options import (
    MAX_SPEAKERS,
    SPEAKER_COUNT_FIELDS,
    ListenOptions,
    TurnOptions,
    check_speakers_not_disabled,
)
from asr_serve.pipelines.prompting import MAX_PROMPT_CHARACTERS
from asr_serve.protocols.form_fields import FormFields, quote_for_message
from asr_serve.protocols.json_members import decode_json
from asr_serve.protocols.recognition_fields import MAX_HOTWORDS_CHARACTERS, parse_language_model
from asr_serve.types import suggest_name

PATH = "/v1/stream"
QUERY = (
    *("model", "language", "encoding", "rate", "partial_ms", "max_segment_ms", "silence_schedule", "threshold"),
    *("turn", "eager_threshold", "turn_threshold", "prompt", "hotwords", "words", "speakers", "itn"),
    *("language_model", "language_model_weight"),
    *SPEAKER_COUNT_FIELDS,
    *("durable", "api_key", "caller_id", "session", "after", "received", "epoch", "start"),
)
RESUME_ONLY = ("after", "received", "epoch")
RESUME = ("session", *RESUME_ONLY, "api_key", "caller_id")
START = "start"
"""Query field with which the first message of a WebSocket has further options."""
MAX_START_CHARACTERS = MAX_HOTWORDS_CHARACTERS + MAX_PROMPT_CHARACTERS + 65_536
"""Limit of that message: ten thousand hotwords do not fit in a URL."""
SILENCE = "silence"
PACKETS = "opus"
"""Encoding whose packets must stay separate, as in WebSocket messages, not in HTTP bodies."""
MAX_POSITION = 10**12
"""Limit of numbers of events, of bytes of audio, and of epochs."""
MAX_ID_CHARACTERS = 200
MAX_MESSAGE_CHARACTERS = 4_096
"""Limit of a command."""
EXAMPLE = 'like {"type":"start","hotwords":["Ada","Babbage:2"]}'
COMMANDS = ("silence", "flush", "end")
MAX_SILENCE_S = 60
"""Limit of a silence message."""
MAX_SILENCE_SAMPLES = MAX_SILENCE_S * MAX_RATE_HZ


class NewSessionRequest(msgspec.Struct, frozen=True):
    """Request for a new session."""

    model: str | None
    encoding: str
    rate_hz: int | None
    options: ListenOptions
    durable: bool = False
    """Whether the session must be one that any server can continue."""


class StreamResume(msgspec.Struct, frozen=True):
    """Request to resume a session."""

    session_id: str
    after: int
    """Number of the last event that the client has; 0 for none."""
    received: int = 0
    """Bytes of audio that the client has no more, since they were acknowledged."""
    epoch: int = 0
    """Highest epoch that the client was told of this session: servers with a lower one have lost it."""


def parse_query(query: Mapping[str, Sequence[str]], *, packets: bool) -> NewSessionRequest | StreamResume:
    """Parses a query. `packets`: whether the transport keeps packets separate. Raises OptionError."""
    fields = FormFields(query, QUERY)
    if START in fields and not packets:
        raise OptionError("start over HTTP", "a body is audio only", "use the WebSocket", param=START)
    session = fields.text("session")
    if session is not None:
        return _resume(fields, session)
    for name in RESUME_ONLY:
        if name in fields:
            raise OptionError(f"{name} came without session", "a session goes on", "send both, or none", param=name)
    encoding = fields.choice("encoding", ENCODINGS) or ENCODINGS[0]
    if encoding == PACKETS and not packets:
        raise OptionError(
            "encoding=opus over HTTP",
            "a body does not tell where a packet ends",
            "send encoding=ogg, or use the WebSocket",
            param="encoding",
        )
    rate_hz = fields.integer("rate", MIN_RATE_HZ, MAX_RATE_HZ)
    if rate_hz is not None and encoding not in DEFAULT_RATES_HZ:
        raise OptionError(
            f"rate={rate_hz} with encoding={encoding}", "Opus tells its rate itself", "leave it out", param="rate"
        )
    partial_ms, schedule = fields.integer("partial_ms", 100, 60_000), fields.text("silence_schedule")
    speakers = fields.flag("speakers")
    numbers: dict[str, Any] = {name: fields.integer(name, 1, MAX_SPEAKERS) for name in SPEAKER_COUNT_FIELDS}
    check_speakers_not_disabled({"speakers": speakers, **numbers})
    options = ListenOptions(
        language=fields.language("language"),
        partial_ms=ListenOptions().partial_ms if partial_ms is None else partial_ms,
        max_segment_ms=fields.integer("max_segment_ms", 1_000, 86_400_000),
        silence_schedule=None if schedule is None else SilenceSchedule.from_text(schedule),
        threshold=fields.number("threshold", 0, 1),
        turn=_turn(fields),
        prompt=fields.text("prompt", MAX_PROMPT_CHARACTERS) or "",
        hotwords=fields.word_list("hotwords", MAX_HOTWORDS_CHARACTERS),
        words=fields.flag("words") or False,
        speakers=speakers or False,
        **numbers,
        itn=fields.flag("itn"),
        **parse_language_model(fields, complete=True),
    )
    durable = fields.flag("durable") or False
    if durable and speakers:
        raise UnsupportedOption(
            "durable=true with speakers=true",
            "the state of speakers is all audio of the session, and is not stored",
            "leave one of them out",
            param="durable",
        )
    return NewSessionRequest(fields.text("model"), encoding, rate_hz, options, durable)


def expects_start_message(query: Mapping[str, Sequence[str]]) -> bool:
    """Returns whether the first message of this WebSocket has further options. Raises OptionError."""
    if not (FormFields({START: query.get(START, ())}, QUERY).flag(START) or False):
        return False
    if "session" in query:
        raise OptionError("start came with session", "a session goes on as it was opened", "leave it out", param=START)
    return True


def merge_start_message(query: Mapping[str, Sequence[str]], text: str) -> dict[str, Sequence[str]]:
    """Query with the options of the first message added. Raises MalformedRequest, OptionError."""
    if len(text) > MAX_START_CHARACTERS:
        raise MalformedRequest(f"a start of {len(text)} characters came", f"up to {MAX_START_CHARACTERS} are allowed")
    sent = decode_json(
        text, dict[str, str | bool | int | float | list[str]], "a start came that cannot be read", EXAMPLE
    )
    if sent.pop("type", None) != START:
        raise MalformedRequest("with start=true the first message was no start", EXAMPLE)
    merged = dict(query)
    for name, value in sent.items():
        if name in RESUME or name == START:
            raise OptionError(
                f"{quote_for_message(name)} came in the start",
                "it is part of the address",
                param=quote_for_message(name),
            )
        if name in query:
            raise OptionError(f"{name} came in the address and in the start", "once is allowed", param=name)
        if isinstance(value, list) and name != "hotwords":
            raise OptionError(
                f"{quote_for_message(name)} is a list", "hotwords may be one", param=quote_for_message(name)
            )
        merged[name] = [_as_field(value)]
    return merged


def _as_field(value: str | float | list[str]) -> str:
    if isinstance(value, list):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _resume(fields: FormFields, session: str) -> StreamResume:
    for name in QUERY:
        if name in fields and name not in RESUME:
            raise OptionError(
                f"{name} came with session", "a session goes on as it was opened", "leave it out", param=name
            )
    after, received, epoch = (fields.integer(name, 0, MAX_POSITION) or 0 for name in RESUME_ONLY)
    return StreamResume(session, after, received, epoch)


def _turn(fields: FormFields) -> TurnOptions:
    chosen, threshold = fields.text("turn") or SILENCE, fields.number("turn_threshold", 0, 1)
    model = None if chosen == SILENCE else chosen
    if model is None and threshold is not None:
        raise UnsupportedOption(
            f"turn_threshold={threshold:g} with turn={SILENCE}",
            "a pause ends a turn by its length: see silence_schedule",
            "name a turn model, or leave it out",
            param="turn_threshold",
        )
    return TurnOptions(
        model=model,
        threshold=TurnOptions().threshold if threshold is None else threshold,
        eager_threshold=fields.number("eager_threshold", 0, 1),
    )


class FlushCommand(msgspec.Struct, frozen=True):
    id: str


class EndCommand(msgspec.Struct, frozen=True):
    """Ends the audio."""


class SilenceCommand(msgspec.Struct, frozen=True):
    """Stands for audio: so many samples of silence at the session's rate."""

    samples: int
    noise: bool = False
    """Whether the noise of the audio before it goes on."""


class _CommandMessage(msgspec.Struct, frozen=True):
    type: str = ""
    id: str = ""
    samples: int | None = None
    noise: bool = False


def parse_command(text: str | bytes) -> FlushCommand | EndCommand | SilenceCommand:
    """Parses a text message. Raises MalformedRequest, UnknownCommand; OptionError for a flush's id and for the length
    of a silence."""
    sent = _read(text)
    match sent.type:
        case "silence":
            return _silence(sent)
        case "flush":
            return _flush(sent)
        case "end":
            return EndCommand()
    raise UnknownCommand(
        f"the type {quote_for_message(sent.type)} is no command",
        f"types: {', '.join(COMMANDS)}",
        suggest_name(sent.type, COMMANDS),
    )


def parse_flush_body(body: bytes) -> FlushCommand:
    """Parses the body of a request to flush; it may be empty. Raises MalformedRequest, OptionError."""
    return _flush(_read(body) if body else _CommandMessage())


def _read(text: str | bytes) -> _CommandMessage:
    if len(text) > MAX_MESSAGE_CHARACTERS:
        raise MalformedRequest(
            f"a command of {len(text)} characters came",
            f"up to {MAX_MESSAGE_CHARACTERS} are allowed",
            "send audio in binary messages",
        )
    return decode_json(
        text, _CommandMessage, "a command came that cannot be read", 'commands are JSON, like {"type":"flush","id":"1"}'
    )


def _silence(sent: _CommandMessage) -> SilenceCommand:
    if sent.samples is None:
        raise OptionError(
            "a silence without samples",
            'it says how long it is, like {"type":"silence","samples":1600}',
            param="samples",
        )
    if not 1 <= sent.samples <= MAX_SILENCE_SAMPLES:
        raise OptionError(
            f"a silence of {sent.samples} samples",
            f"from 1 to {MAX_SILENCE_SAMPLES}, and up to {MAX_SILENCE_S} s",
            "send a longer one in parts",
            param="samples",
        )
    return SilenceCommand(sent.samples, sent.noise)


def _flush(sent: _CommandMessage) -> FlushCommand:
    if len(sent.id) > MAX_ID_CHARACTERS:
        raise OptionError(f"an id of {len(sent.id)} characters", f"up to {MAX_ID_CHARACTERS}", param="id")
    return FlushCommand(sent.id or f"flush_{secrets.token_hex(8)}")
