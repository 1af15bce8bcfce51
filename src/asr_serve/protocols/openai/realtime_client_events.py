"""OpenAI Realtime, transcription sessions: client events to commands and settings. No sockets here.

Source  the Realtime API's reference, as openai 3.52 for Python has its types: `types/realtime` of the current API,
        `types/beta/realtime` of the beta API, which has the same content in other members
"""

from __future__ import annotations

import binascii
import math
from typing import Any, Literal

import msgspec

from asr_serve.audio.silence_schedule import SilenceSchedule
from asr_serve.errors import (
    AudioTooLong,
    EmptyAudio,
    MalformedRequest,
    MissingOption,
    OptionError,
    UnknownOption,
    UnsupportedOption,
)
from asr_serve.pipelines.options import ListenOptions, TurnOptions
from asr_serve.protocols.form_fields import FormFields, expect_choice, quote_for_message
from asr_serve.protocols.json_members import JsonMembers, decode_json
from asr_serve.types import suggest_name

PATH = "/v1/realtime"
SUBPROTOCOL, KEY_SUBPROTOCOL = "realtime", "openai-insecure-api-key."
"""Subprotocols that a browser's WebSocket offers, its only way to send a key."""
BETA_HEADER, BETA_SUBPROTOCOL = "realtime=v1", "openai-beta.realtime-v1"

REALTIME_ERROR_CODES: dict[type[Exception], str] = {
    AudioTooLong: "session_expired",
    EmptyAudio: "input_audio_buffer_commit_empty",
    MalformedRequest: "invalid_event",
    MissingOption: "missing_required_parameter",
    OptionError: "invalid_value",
    UnknownOption: "unknown_parameter",
}
"""OpenAI's codes of errors that have other codes elsewhere."""

REALTIME_FORMATS = {"audio/pcm": ("s16le", 24_000), "audio/pcmu": ("mulaw", 8_000), "audio/pcma": ("alaw", 8_000)}
"""Encoding and rate of a format, as arguments of `audio/stream_decoder.create_live_decoder`."""
BETA_FORMATS = {"pcm16": "audio/pcm", "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}
LOGPROBS = "item.input_audio_transcription.logprobs"
COMMITTED_BY_CLIENT = ("gpt-realtime-whisper", "gpt-live-transcribe")
"""Models without turn detection at OpenAI: a client that names one commits, without switching turns off."""

MAX_REALTIME_PADDING_MS, MAX_REALTIME_SILENCE_MS = 4_000, 60_000
EAGERNESS_THRESHOLDS = {"low": (0.7, 8_000), "medium": (0.5, 4_000), "auto": (0.5, 4_000), "high": (0.3, 2_000)}
"""Probability of the turn model that ends a turn, and the pause in ms that ends it in any case."""
TRANSCRIPTION_ONLY = "this server transcribes only"
CLIENT_EVENT_TYPES = (
    "session.update",
    "transcription_session.update",
    "input_audio_buffer.append",
    "input_audio_buffer.commit",
    "input_audio_buffer.clear",
)
UNSUPPORTED_EVENT_PREFIXES = ("response.", "conversation.", "output_audio_buffer.")
"""Prefixes of events that are valid in other kinds of sessions."""


class ClientEvent(msgspec.Struct, frozen=True):
    """Event as received. `members`: all but its type and id."""

    type: str
    event_id: str | None
    members: dict[str, Any]


class ServerVad(msgspec.Struct, frozen=True):
    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500


class SemanticVad(msgspec.Struct, frozen=True):
    eagerness: Literal["low", "medium", "high", "auto"] = "auto"


class RealtimeSettings(msgspec.Struct, frozen=True):
    """Settings of a session. `turn_detection` None: the client commits items."""

    model: str | None = None
    """Model as the client names it; None: the server's own."""
    format: str = "audio/pcm"
    language: str | None = None
    prompt: str = ""
    hotwords: tuple[str, ...] = ()
    turn_detection: ServerVad | SemanticVad | None = ServerVad()
    logprobs: bool = False

    @classmethod
    def initial(cls, model: str | None) -> RealtimeSettings:
        """Settings of a new session."""
        return cls(model, turn_detection=_default_turn_detection(model))

    def same_recognition(self, other: RealtimeSettings) -> bool:
        """Returns whether audio is recognized in the same way."""
        return msgspec.structs.replace(self, logprobs=other.logprobs) == other

    def listen_options(self, turn_model: str | None) -> ListenOptions:
        """Options of the live session. `turn_model`: the one that the server has loaded. Raises OptionError."""
        options = ListenOptions(language=self.language, prompt=self.prompt, hotwords=self.hotwords)
        match self.turn_detection:
            case ServerVad(threshold, prefix_ms, silence_ms):
                return msgspec.structs.replace(
                    options,
                    threshold=threshold,
                    pad_before_ms=prefix_ms,
                    silence_schedule=SilenceSchedule(((math.inf, silence_ms),)),
                )
            case SemanticVad(eagerness):
                if turn_model is None:
                    raise UnsupportedOption(
                        "turn_detection.type=semantic_vad needs a turn model",
                        "this server has loaded none",
                        "start it with the setting turn_model, or ask for server_vad",
                        param="turn_detection.type",
                    )
                threshold, silence_ms = EAGERNESS_THRESHOLDS[eagerness]
                return msgspec.structs.replace(
                    options,
                    silence_schedule=SilenceSchedule(((math.inf, silence_ms),)),
                    turn=TurnOptions(model=turn_model, threshold=threshold),
                )
        return options


def _default_turn_detection(model: str | None) -> ServerVad | None:
    return None if model is not None and model.startswith(COMMITTED_BY_CLIENT) else ServerVad()


def decode_client_event(text: str) -> ClientEvent:
    """Decodes a frame. Raises MalformedRequest."""
    came = f"the text {quote_for_message(text)} came, which cannot be read as JSON"
    members: object = decode_json(text, object, came, 'every event is a JSON object, like {"type":"session.update"}')
    if not isinstance(members, dict):
        raise MalformedRequest(f"{quote_for_message(text)} is no event", "every event is a JSON object with a type")
    kind, event_id = members.pop("type", None), members.pop("event_id", None)
    known_id = event_id[:512] if isinstance(event_id, str) else None
    return ClientEvent(kind if isinstance(kind, str) else "", known_id, members)


# --- commands ---------------------------------------------------------------------------------------------


class AppendAudio(msgspec.Struct, frozen=True):
    """Audio in the session's format, cut anywhere."""

    audio: bytes


class CommitAudio(msgspec.Struct, frozen=True):
    """Commits the audio so far as an item."""


class ClearAudio(msgspec.Struct, frozen=True):
    """Discards the audio so far."""


class UpdateSession(msgspec.Struct, frozen=True):
    """Changes the settings. `beta`: `session` is in the shape of the beta API."""

    session: dict[str, Any]
    beta: bool


ClientCommand = AppendAudio | CommitAudio | ClearAudio | UpdateSession


def parse_command(event: ClientEvent) -> ClientCommand:
    """Parses an event into a command. Raises OptionError, MissingOption, UnknownOption."""
    members = JsonMembers(event.members)
    match event.type:
        case "input_audio_buffer.append":
            audio = members.text("audio")
            members.refuse_or_ignore_unknown()
            return AppendAudio(_bytes(audio or ""))
        case "input_audio_buffer.commit":
            members.refuse_or_ignore_unknown()
            return CommitAudio()
        case "input_audio_buffer.clear":
            members.refuse_or_ignore_unknown()
            return ClearAudio()
        case "session.update" | "transcription_session.update":
            session = members.pop("session")
            if session is None:
                raise MissingOption("session is missing", "what is to be changed", param="session")
            members.refuse_or_ignore_unknown()
            JsonMembers(session, "session")
            return UpdateSession(session, event.type != "session.update")
        case "":
            raise MissingOption("type is missing", f"one of: {', '.join(CLIENT_EVENT_TYPES)}", param="type")
    allowed = f"one of: {', '.join(CLIENT_EVENT_TYPES)}"
    if event.type.startswith(UNSUPPORTED_EVENT_PREFIXES):
        raise OptionError(
            f"the event {quote_for_message(event.type)} is for sessions that answer",
            f"{TRANSCRIPTION_ONLY}; {allowed}",
            param="type",
        )
    raise OptionError(
        f"the event {quote_for_message(event.type)} is unknown",
        allowed,
        suggest_name(event.type, CLIENT_EVENT_TYPES),
        param="type",
    )


def _bytes(audio: str) -> bytes:
    try:
        return binascii.a2b_base64(audio, strict_mode=True)
    except (binascii.Error, ValueError):
        raise OptionError(
            "audio is no base64",
            "bytes in base64, with padding and without line breaks",
            "this event is dropped, and its words are lost",
            param="audio",
        ) from None


def apply_update(settings: RealtimeSettings, update: UpdateSession) -> RealtimeSettings:
    """Settings after an update, which changes only the members it has. Raises OptionError, MissingOption,
    UnknownOption, UnsupportedOption."""
    session = JsonMembers(update.session, "session")
    changed = (_beta_session if update.beta else _session)(settings, session)
    session.refuse_or_ignore_unknown()
    return changed


def _session(settings: RealtimeSettings, session: JsonMembers) -> RealtimeSettings:
    if session.required("type", ("transcription", "realtime")) == "realtime":
        raise UnsupportedOption(
            "session.type=realtime is not supported", TRANSCRIPTION_ONLY, "ask for transcription", param="session.type"
        )
    settings = _include(settings, session)
    audio = session.object("audio")
    audio_input = None if audio is None else audio.object("input")
    if audio_input is not None:
        if (form := audio_input.object("format")) is not None:
            settings = msgspec.structs.replace(settings, format=_format(form))
        settings = _input_settings(settings, audio_input, "")
        audio_input.refuse_or_ignore_unknown()
    if audio is not None:
        audio.reject_unsupported("output", TRANSCRIPTION_ONLY)
        audio.refuse_or_ignore_unknown()
    return settings


def _beta_session(settings: RealtimeSettings, session: JsonMembers) -> RealtimeSettings:
    settings = _include(settings, session)
    if (form := session.choice("input_audio_format", tuple(BETA_FORMATS))) is not None:
        settings = msgspec.structs.replace(settings, format=BETA_FORMATS[form])
    if set(session.string_list("modalities")) - {"text", "audio"}:
        raise OptionError("session.modalities holds another one", "text, audio", param="session.modalities")
    session.reject_unsupported("client_secret", "keys are those that the server was started with")
    return _input_settings(settings, session, "input_audio_")


def _include(settings: RealtimeSettings, session: JsonMembers) -> RealtimeSettings:
    if "include" not in session:
        return settings
    include = session.string_list("include")
    for value in include:
        expect_choice("session.include", value, [LOGPROBS])
    return msgspec.structs.replace(settings, logprobs=bool(include))


def _format(form: JsonMembers) -> str:
    kind = form.required("type", tuple(REALTIME_FORMATS))
    rate_hz = REALTIME_FORMATS[kind][1]
    form.number("rate", rate_hz, rate_hz, rate_hz)
    form.refuse_or_ignore_unknown()
    return kind


def _input_settings(settings: RealtimeSettings, members: JsonMembers, prefix: str) -> RealtimeSettings:
    """Settings after the members that both shapes have, under names with different prefixes."""
    members.reject_unsupported(f"{prefix}noise_reduction", "audio is heard as it comes")
    replace = msgspec.structs.replace
    if f"{prefix}transcription" in members and (options := members.object(f"{prefix}transcription")) is not None:
        if (model := options.text("model")) is not None and model != settings.model:
            is_default = settings.turn_detection == _default_turn_detection(settings.model)
            settings = replace(
                settings,
                model=model,
                turn_detection=_default_turn_detection(model) if is_default else settings.turn_detection,
            )
        if (language := _language(options)) is not None:
            settings = replace(settings, language=language)
        if "prompt" in options:
            settings = replace(settings, prompt=options.text("prompt") or "")
        if "keywords" in options:
            settings = replace(settings, hotwords=tuple(options.string_list("keywords")))
        options.reject_unsupported("delay", "words are sent as soon as they are certain")
        options.refuse_or_ignore_unknown()
    if "turn_detection" in members:
        settings = replace(settings, turn_detection=_turns(members.object("turn_detection")))
    return settings


def _language(members: JsonMembers) -> str | None:
    language, languages = members.text("language"), members.string_list("languages")
    if len(languages) > 1:
        name = members.name("languages")
        raise UnsupportedOption(
            f"several {name}", "the models here do not tell languages apart", "name one", param=name
        )
    name = members.name("language" if language else "languages")
    return FormFields({name: [language or "".join(languages)]}, [name]).language(name)


def _turns(members: JsonMembers | None) -> ServerVad | SemanticVad | None:
    if members is None:
        return None
    kind = members.required("type", ("server_vad", "semantic_vad"))
    for member in ("create_response", "interrupt_response"):
        members.reject_unsupported(member, f"{TRANSCRIPTION_ONLY}, and has no responses")
    turns: ServerVad | SemanticVad
    if kind == "semantic_vad":
        eagerness: Any = members.choice("eagerness", tuple(EAGERNESS_THRESHOLDS)) or "auto"
        turns = SemanticVad(eagerness)
    else:
        members.reject_unsupported("idle_timeout_ms", "nobody is called when nothing is said")
        turns = ServerVad(
            members.number("threshold", 0.001, 1, 0.5),
            members.integer("prefix_padding_ms", MAX_REALTIME_PADDING_MS, 300),
            members.integer("silence_duration_ms", MAX_REALTIME_SILENCE_MS, 500),
        )
    members.refuse_or_ignore_unknown()
    return turns
