"""OpenAI Realtime, transcription sessions: a client's events to what is asked. No sockets here.

Source  the Realtime API's reference, as openai 3.52 for Python has its types: `types/realtime` as it is now, and
        `types/beta/realtime` as it was before, which says the same in other members
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
from asr_serve.pipelines.live.events import ListenOptions, TurnOptions
from asr_serve.protocols.fields import Fields, expect, shown
from asr_serve.protocols.members import Members
from asr_serve.types import suggest_name

PATH = "/v1/realtime"
SUBPROTOCOL, KEY_SUBPROTOCOL = "realtime", "openai-insecure-api-key."
"""What a browser's WebSocket offers; it can bring its key in no other way."""
BETA_HEADER, BETA_SUBPROTOCOL = "realtime=v1", "openai-beta.realtime-v1"

CODES: dict[type[Exception], str] = {
    AudioTooLong: "session_expired",
    EmptyAudio: "input_audio_buffer_commit_empty",
    MalformedRequest: "invalid_event",
    MissingOption: "missing_required_parameter",
    OptionError: "invalid_value",
    UnknownOption: "unknown_parameter",
}
"""OpenAI's names for errors that have others elsewhere."""

FORMATS = {"audio/pcm": ("s16le", 24_000), "audio/pcmu": ("mulaw", 8_000), "audio/pcma": ("alaw", 8_000)}
"""A format to its encoding and rate, as `audio/stream_decoder.decoder` takes them."""
BETA_FORMATS = {"pcm16": "audio/pcm", "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}
LOGPROBS = "item.input_audio_transcription.logprobs"
COMMITTED_BY_CLIENT = ("gpt-realtime-whisper", "gpt-live-transcribe")
"""Models to which OpenAI gives no turn detection: who asks for one by that name commits, and does not say so."""

LONGEST_PADDING_MS, LONGEST_SILENCE_MS = 4_000, 60_000
EAGERNESS = {"low": (0.7, 8_000), "medium": (0.5, 4_000), "auto": (0.5, 4_000), "high": (0.3, 2_000)}
"""The turn model's probability that ends a turn, and the pause that does in any case."""
HEARS_ONLY = "this server transcribes only"
EVENTS = (
    "session.update",
    "transcription_session.update",
    "input_audio_buffer.append",
    "input_audio_buffer.commit",
    "input_audio_buffer.clear",
)
OTHER_EVENTS = ("response.", "conversation.", "output_audio_buffer.")
"""How the events begin that are good ones elsewhere."""


class Sent(msgspec.Struct, frozen=True):
    """An event as it came. `members`: all but its type and id."""

    type: str
    event_id: str | None
    members: dict[str, Any]


class ServerVad(msgspec.Struct, frozen=True):
    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500


class SemanticVad(msgspec.Struct, frozen=True):
    eagerness: Literal["low", "medium", "high", "auto"] = "auto"


class Settings(msgspec.Struct, frozen=True):
    """Of a session. `turns` None: the client says where an item ends."""

    model: str | None = None
    """As the client names it; None: the server's own."""
    format: str = "audio/pcm"
    language: str | None = None
    prompt: str = ""
    hotwords: tuple[str, ...] = ()
    turns: ServerVad | SemanticVad | None = ServerVad()
    logprobs: bool = False

    @classmethod
    def of(cls, model: str | None) -> Settings:
        """Those of a session that has just begun."""
        return cls(model, turns=_usual_turns(model))

    def heard_as(self, other: Settings) -> bool:
        """Whether audio is heard in the same way."""
        return msgspec.structs.replace(self, logprobs=other.logprobs) == other

    def listen(self, turn_model: str | None) -> ListenOptions:
        """`turn_model`: the one that the server has loaded. Raises OptionError."""
        asked = ListenOptions(language=self.language, prompt=self.prompt, hotwords=self.hotwords)
        match self.turns:
            case ServerVad(threshold, prefix_ms, silence_ms):
                return msgspec.structs.replace(
                    asked,
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
                threshold, silence_ms = EAGERNESS[eagerness]
                return msgspec.structs.replace(
                    asked,
                    silence_schedule=SilenceSchedule(((math.inf, silence_ms),)),
                    turn=TurnOptions(model=turn_model, threshold=threshold),
                )
        return asked


def _usual_turns(model: str | None) -> ServerVad | None:
    return None if model is not None and model.startswith(COMMITTED_BY_CLIENT) else ServerVad()


def sent(text: str) -> Sent:
    """Read a frame. Raises MalformedRequest, MissingOption, OptionError."""
    try:
        members = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise MalformedRequest(
            f"a text that is no JSON came: {shown(text)}", "every event is a JSON object", "see its type first"
        ) from None
    if not isinstance(members, dict):
        raise MalformedRequest(f"{shown(text)} is no event", "every event is a JSON object with a type")
    kind, event_id = members.pop("type", None), members.pop("event_id", None)
    known_id = event_id[:512] if isinstance(event_id, str) else None
    return Sent(kind if isinstance(kind, str) else "", known_id, members)


# --- what they ask for ------------------------------------------------------------------------------------


class Append(msgspec.Struct, frozen=True):
    """Audio in the session's format, cut anywhere."""

    audio: bytes


class Commit(msgspec.Struct, frozen=True):
    """What came so far is an item."""


class Clear(msgspec.Struct, frozen=True):
    """What came so far is forgotten."""


class Update(msgspec.Struct, frozen=True):
    """`beta`: in the shape of before."""

    session: dict[str, Any]
    beta: bool


Event = Append | Commit | Clear | Update


def read(came: Sent) -> Event:
    """What an event asks for. Raises OptionError, MissingOption, UnknownOption."""
    members = Members(came.members)
    match came.type:
        case "input_audio_buffer.append":
            audio = members.text("audio")
            members.end()
            return Append(_bytes(audio or ""))
        case "input_audio_buffer.commit":
            members.end()
            return Commit()
        case "input_audio_buffer.clear":
            members.end()
            return Clear()
        case "session.update" | "transcription_session.update":
            session = members.take("session")
            if session is None:
                raise MissingOption("session is missing", "what is to be changed", param="session")
            members.end()
            Members(session, "session")
            return Update(session, came.type != "session.update")
        case "":
            raise MissingOption("type is missing", f"one of: {', '.join(EVENTS)}", param="type")
    allowed = f"one of: {', '.join(EVENTS)}"
    if came.type.startswith(OTHER_EVENTS):
        raise OptionError(
            f"the event {shown(came.type)} is for sessions that answer", f"{HEARS_ONLY}; {allowed}", param="type"
        )
    raise OptionError(
        f"the event {shown(came.type)} is unknown", allowed, suggest_name(came.type, EVENTS), param="type"
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


def updated(settings: Settings, update: Update) -> Settings:
    """The settings with what is asked for; what is not named stays. Raises OptionError, MissingOption,
    UnknownOption, UnsupportedOption."""
    session = Members(update.session, "session")
    changed = (_beta_session if update.beta else _session)(settings, session)
    session.end()
    return changed


def _session(settings: Settings, session: Members) -> Settings:
    if session.required("type", ("transcription", "realtime")) == "realtime":
        raise UnsupportedOption(
            "session.type=realtime is not supported", HEARS_ONLY, "ask for transcription", param="session.type"
        )
    settings = _include(settings, session)
    audio = session.object("audio")
    heard = None if audio is None else audio.object("input")
    if heard is not None:
        if (form := heard.object("format")) is not None:
            settings = msgspec.structs.replace(settings, format=_format(form))
        settings = _heard(settings, heard, "")
        heard.end()
    if audio is not None:
        audio.refuse("output", HEARS_ONLY)
        audio.end()
    return settings


def _beta_session(settings: Settings, session: Members) -> Settings:
    settings = _include(settings, session)
    if (form := session.choice("input_audio_format", tuple(BETA_FORMATS))) is not None:
        settings = msgspec.structs.replace(settings, format=BETA_FORMATS[form])
    if set(session.texts("modalities")) - {"text", "audio"}:
        raise OptionError("session.modalities holds another one", "text, audio", param="session.modalities")
    session.refuse("client_secret", "keys are those that the server was started with")
    return _heard(settings, session, "input_audio_")


def _include(settings: Settings, session: Members) -> Settings:
    if "include" not in session:
        return settings
    include = session.texts("include")
    for each in include:
        expect("session.include", each, [LOGPROBS])
    return msgspec.structs.replace(settings, logprobs=bool(include))


def _format(form: Members) -> str:
    kind = form.required("type", tuple(FORMATS))
    rate_hz = FORMATS[kind][1]
    form.number("rate", rate_hz, rate_hz, rate_hz)
    form.end()
    return kind


def _heard(settings: Settings, heard: Members, prefix: str) -> Settings:
    """What both shapes have, under names that begin differently."""
    heard.refuse(f"{prefix}noise_reduction", "audio is heard as it comes")
    replace = msgspec.structs.replace
    if f"{prefix}transcription" in heard and (how := heard.object(f"{prefix}transcription")) is not None:
        if (model := how.text("model")) is not None and model != settings.model:
            usual = settings.turns == _usual_turns(settings.model)
            settings = replace(settings, model=model, turns=_usual_turns(model) if usual else settings.turns)
        if (language := _language(how)) is not None:
            settings = replace(settings, language=language)
        if "prompt" in how:
            settings = replace(settings, prompt=how.text("prompt") or "")
        if "keywords" in how:
            settings = replace(settings, hotwords=tuple(how.texts("keywords")))
        how.refuse("delay", "words are sent as soon as they are certain")
        how.end()
    if "turn_detection" in heard:
        settings = replace(settings, turns=_turns(heard.object("turn_detection")))
    return settings


def _language(how: Members) -> str | None:
    language, several = how.text("language"), how.texts("languages")
    if len(several) > 1:
        name = how.name("languages")
        raise UnsupportedOption(
            f"several {name}", "the models here do not tell languages apart", "name one", param=name
        )
    name = how.name("language" if language else "languages")
    return Fields({name: [language or "".join(several)]}, [name]).language(name)


def _turns(how: Members | None) -> ServerVad | SemanticVad | None:
    if how is None:
        return None
    kind = how.required("type", ("server_vad", "semantic_vad"))
    for answer in ("create_response", "interrupt_response"):
        how.refuse(answer, f"{HEARS_ONLY}, and has no responses")
    turns: ServerVad | SemanticVad
    if kind == "semantic_vad":
        eagerness: Any = how.choice("eagerness", tuple(EAGERNESS)) or "auto"
        turns = SemanticVad(eagerness)
    else:
        how.refuse("idle_timeout_ms", "nobody is called when nothing is said")
        turns = ServerVad(
            how.number("threshold", 0.001, 1, 0.5),
            how.whole("prefix_padding_ms", LONGEST_PADDING_MS, 300),
            how.whole("silence_duration_ms", LONGEST_SILENCE_MS, 500),
        )
    how.end()
    return turns
