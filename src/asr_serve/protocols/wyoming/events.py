"""Events of Wyoming: those of a client to requests, answers to bytes.

Source  wyoming 1.10 for Python: asr.py, tts.py, audio.py, info.py, error.py, ping.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import msgspec

from asr_serve.errors import MalformedRequest, OptionError
from asr_serve.protocols.wyoming.framing import WyomingEvent, encode_event

PATH = "/wyoming"
"""Route in logs and metrics. No URL leads there."""
PROGRAM = "asr-serve"
MAX_NAMES = 1_000
"""Names and terms of one request."""
RATES_HZ = (8_000, 48_000)

T = TypeVar("T", bound=msgspec.Struct)


class WyomingDescribe(msgspec.Struct, frozen=True):
    """Requests `info`."""


class WyomingPing(msgspec.Struct, frozen=True):
    """Requests `pong`."""

    text: str | None = None


class WyomingTranscribe(msgspec.Struct, frozen=True):
    """Options of the audio that follows."""

    name: str | None = None
    """Model."""
    language: str | None = None
    transcript_names: tuple[str, ...] | None = None
    transcript_terms: tuple[str, ...] | None = None

    @property
    def hotwords(self) -> tuple[str, ...]:
        return (*(self.transcript_names or ()), *(self.transcript_terms or ()))


class WyomingAudioFormat(msgspec.Struct, frozen=True):
    """Format of PCM: `width` in bytes."""

    rate: int
    width: int
    channels: int


class WyomingAudioStart(WyomingAudioFormat, frozen=True):
    """Audio begins."""


class WyomingAudioChunk(msgspec.Struct, frozen=True):
    """Audio, in a format that each chunk names again."""

    format: WyomingAudioFormat
    audio: bytes


class WyomingAudioStop(msgspec.Struct, frozen=True):
    """Audio ends: its text is to follow."""


class WyomingVoice(msgspec.Struct, frozen=True):
    name: str | None = None
    language: str | None = None
    speaker: str | None = None


class WyomingSynthesize(msgspec.Struct, frozen=True):
    """Text to be spoken."""

    text: str
    voice: WyomingVoice | None = None
    text_format: Literal["text", "ssml"] | None = None


class WyomingSynthesizeStart(msgspec.Struct, frozen=True):
    """Text to be spoken follows in chunks."""

    voice: WyomingVoice | None = None
    text_format: Literal["text", "ssml"] | None = None


class WyomingSynthesizeChunk(msgspec.Struct, frozen=True):
    text: str


class WyomingSynthesizeStop(msgspec.Struct, frozen=True):
    """The text ends."""


WyomingRequest = (
    WyomingDescribe
    | WyomingPing
    | WyomingTranscribe
    | WyomingAudioStart
    | WyomingAudioChunk
    | WyomingAudioStop
    | WyomingSynthesize
    | WyomingSynthesizeStart
    | WyomingSynthesizeChunk
    | WyomingSynthesizeStop
)
_KINDS: dict[str, type[WyomingRequest]] = {
    "describe": WyomingDescribe,
    "ping": WyomingPing,
    "transcribe": WyomingTranscribe,
    "audio-start": WyomingAudioStart,
    "audio-stop": WyomingAudioStop,
    "synthesize": WyomingSynthesize,
    "synthesize-start": WyomingSynthesizeStart,
    "synthesize-chunk": WyomingSynthesizeChunk,
    "synthesize-stop": WyomingSynthesizeStop,
}


def parse_event(event: WyomingEvent) -> WyomingRequest | None:
    """Request of an event; None: of a type that is not served, which the protocol has servers drop. Raises
    MalformedRequest, OptionError."""
    if event.type == "audio-chunk":
        chunk = WyomingAudioChunk(_convert(event, WyomingAudioFormat), event.payload)
        check_format(chunk.format)
        return chunk
    kind = _KINDS.get(event.type)
    if kind is None:
        return None
    request = _convert(event, kind)
    if isinstance(request, WyomingAudioStart):
        check_format(request)
    if isinstance(request, WyomingTranscribe) and len(request.hotwords) > MAX_NAMES:
        raise OptionError(f"{len(request.hotwords)} names and terms", f"up to {MAX_NAMES}", param="transcript_names")
    return request


def check_format(form: WyomingAudioFormat) -> None:
    """Raises OptionError for audio that is not 16-bit PCM of one channel, at a rate that is served."""
    least, most = RATES_HZ
    if form.width != 2 or form.channels != 1 or not least <= form.rate <= most:
        raise OptionError(
            f"audio of {form.channels} channels of {8 * form.width} bits at {form.rate} Hz",
            f"one channel of 16 bits, at {least} to {most} Hz",
            "convert it before it is sent",
            param="rate",
        )


def _convert(event: WyomingEvent, kind: type[T]) -> T:
    try:
        return msgspec.convert(event.data, kind)
    except msgspec.ValidationError as error:
        raise MalformedRequest(
            f"data of the event {event.type} that cannot be read: {error}", "the members that Wyoming has", ""
        ) from None


# --- answers ----------------------------------------------------------------------------------------------


def encode_pong(text: str | None) -> bytes:
    return encode_event("pong", {"text": text})


def encode_error(code: str, message: str) -> str:
    """Error, after which the connection ends."""
    return encode_event("error", {"text": message, "code": code}).decode()


def encode_transcript_start(language: str) -> bytes:
    return encode_event("transcript-start", {"language": language} if language else None)


def encode_transcript_chunk(text: str) -> bytes:
    return encode_event("transcript-chunk", {"text": text})


def encode_transcript_end(text: str, language: str) -> bytes:
    """The end of a stream of text, and all of it once more, for clients that read no stream."""
    whole = {"text": text} | ({"language": language} if language else {})
    return encode_event("transcript-stop") + encode_event("transcript", whole)


def encode_audio_start(rate_hz: int) -> bytes:
    return encode_event("audio-start", {"rate": rate_hz, "width": 2, "channels": 1, "timestamp": 0})


def encode_audio_chunk(pcm: bytes, rate_hz: int) -> bytes:
    return encode_event("audio-chunk", {"rate": rate_hz, "width": 2, "channels": 1}, pcm)


def encode_audio_stop() -> bytes:
    return encode_event("audio-stop")


def encode_synthesize_stopped() -> bytes:
    return encode_event("synthesize-stopped")


class WyomingModel(msgspec.Struct, frozen=True):
    """Model or voice that `info` lists."""

    name: str
    languages: tuple[str, ...]
    description: str
    source: str
    """Paper or program that it comes from."""
    url: str


def encode_info(version: str, models: Iterable[WyomingModel], voices: Iterable[WyomingModel]) -> bytes:
    """The event `info`: models and voices; wake words and intents are not served."""
    recognizers, speakers = [_artifact(each, version) for each in models], [_artifact(each, version) for each in voices]
    program = {
        "name": PROGRAM,
        "description": "Speech recognition and synthesis",
        "attribution": {"name": PROGRAM, "url": ""},
        "installed": True,
        "version": version,
    }
    return encode_event(
        "info",
        {
            "asr": [
                {**program, "models": recognizers, "supports_transcript_streaming": True, "requires_external_vad": True}
            ]
            if recognizers
            else [],
            "tts": [{**program, "voices": speakers, "supports_synthesize_streaming": True}] if speakers else [],
            **{kind: [] for kind in ("handle", "intent", "wake", "mic", "snd")},
        },
    )


def _artifact(model: WyomingModel, version: str) -> dict[str, Any]:
    return {
        "name": model.name,
        "description": model.description,
        "attribution": {"name": model.source, "url": model.url},
        "installed": True,
        "version": version,
        "languages": model.languages,
    }
