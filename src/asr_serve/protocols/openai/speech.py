"""OpenAI's speech: JSON to request, audio to server-sent events.

Source  the API reference of POST /v1/audio/speech, as openai 3.52 for Python sends it
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping

import msgspec

from asr_serve.audio.encode import FORMATS
from asr_serve.errors import MalformedRequest, MissingOption, OptionError, TextTooLong
from asr_serve.protocols.form_fields import quote_for_message
from asr_serve.protocols.json_members import JsonMembers, decode_json
from asr_serve.protocols.openai.events import server_sent_event
from asr_serve.units import samples_to_ms, samples_to_s

PATH = "/v1/audio/speech"
STREAMS = ("audio", "sse")
PCM_RATE_HZ = 24_000
"""Rate of pcm, which has no header: OpenAI's. Other formats have the voice's own rate unless requested."""
RATES_HZ = (8_000, 16_000, 22_050, 24_000, 44_100, 48_000)
MIN_SPEED, MAX_SPEED = 0.25, 4.0
MAX_SEMITONES = MOST_DB = 12.0
MAX_SPEECH_SEED = (1 << 53) - 1
"""Largest integer that every JSON reader represents exactly."""
MAX_LEXICON_WORDS = 1_000
"""Limit of the words in a lexicon."""
MAX_LEXICON_WORD_CHARACTERS = 100
"""Limit of a word, and of its phonemes, in characters."""
TOKEN_MS = 50
"""Audio that counts as one output token in `usage`."""
IGNORED_MEMBERS = ("instructions",)
"""Members that OpenAI's clients send and no voice supports: accepted, and reported as ignored."""
SPEECH_MEMBERS = (
    *("input", "model", "voice", "response_format", "sample_rate", "stream_format", "words"),
    *("speed", "pitch", "energy", "seed", "ssml", "phonemes", "lexicon", "watermark"),
    *IGNORED_MEMBERS,
)
"""Every member of a request."""
BODY_BYTES = 1 << 16
"""Limit of a body beside its text, whose characters take up to twelve bytes each."""


class SpeechStyle(msgspec.Struct, frozen=True):
    """Style of speech."""

    speed: float = 1.0
    pitch: float = 0.0
    """Semitones."""
    energy: float = 0.0
    """dB."""
    seed: int = 0
    ssml: bool = False
    phonemes: bool = False
    lexicon: dict[str, str] = {}
    """Phonemes of words."""
    watermark: bool = False


class SpeechRequest(msgspec.Struct, frozen=True):
    """Request for speech. `model` and `voice` None: the server's own."""

    text: str
    model: str | None = None
    voice: str | None = None
    format: str = "mp3"
    rate_hz: int | None = None
    style: SpeechStyle = SpeechStyle()
    sse: bool = False
    words: bool = False
    ignored: tuple[str, ...] = ()
    """Members that were sent and have no effect."""


def max_body_bytes(most_characters: int) -> int:
    """Size of the largest valid body."""
    return 12 * most_characters + BODY_BYTES


def parse_speech_request(body: bytes, most_characters: int) -> SpeechRequest:
    """Parses a body. Raises MalformedRequest, OptionError, TextTooLong."""
    example = 'a body is like {"model":"tts-1","input":"Hello.","voice":"alloy"}'
    sent: object = decode_json(body, object, "a body came that cannot be read as JSON", example)
    if not isinstance(sent, dict):
        raise MalformedRequest("a body came that is no object", example)
    members = JsonMembers(sent)
    text = members.pop("input")
    if not isinstance(text, str):
        problem = "is missing" if text is None else "is no text"
        raise (MissingOption if text is None else OptionError)(
            f"input {problem}", "the text that is to be spoken", param="input"
        )
    if len(text) > most_characters:
        raise TextTooLong(
            f"input has {len(text)} characters",
            f"up to {most_characters}",
            "send it in parts, or have max_characters raised",
            param="input",
        )
    model, voice = members.text("model"), parse_voice(members)
    form, rate_hz = parse_format_and_rate(members, "response_format", "sample_rate")
    style = parse_style(members)
    sse = members.choice("stream_format", STREAMS) == "sse"
    words = members.flag("words")
    if words and not sse:
        raise OptionError(
            "words=true with stream_format=audio",
            "sound has no place for the times of words",
            "ask for stream_format=sse",
            param="words",
        )
    ignored = tuple(name for name in IGNORED_MEMBERS if members.text(name) is not None)
    members.refuse_or_ignore_unknown()
    return SpeechRequest(text, model, voice, form, rate_hz, style, sse, words, ignored)


def parse_voice(members: JsonMembers) -> str | None:
    """Name of a voice: text, or OpenAI's object for a custom voice, {"id": name}."""
    value, name = members.pop("voice"), members.name("voice")
    if value is None or isinstance(value, str):
        return value or None
    if not isinstance(value, dict):
        raise OptionError(f"{name} is {quote_for_message(str(value))}", 'a name, or {"id": name}', param=name)
    custom = JsonMembers(value, name)
    voice = custom.text("id")
    custom.refuse_or_ignore_unknown()
    return voice


def parse_format_and_rate(members: JsonMembers, form: str, rate: str, default: str = "mp3") -> tuple[str, int | None]:
    """Audio format and rate. `form`, `rate`: names of their members; `default`: default format."""
    chosen = members.choice(form, FORMATS) or default
    rate_hz = members.pop(rate)
    if rate_hz is not None and (isinstance(rate_hz, bool) or rate_hz not in RATES_HZ):
        raise OptionError(
            f"{rate}={quote_for_message(str(rate_hz))}",
            f"one of: {', '.join(map(str, RATES_HZ))}",
            param=members.name(rate),
        )
    return chosen, rate_hz


def parse_style(members: JsonMembers) -> SpeechStyle:
    """Style, from the members that requests and sessions share."""
    ssml, phonemes = members.flag("ssml"), members.flag("phonemes")
    if ssml and phonemes:
        raise OptionError(
            "ssml=true and phonemes=true",
            "one of them: SSML has an element for phonemes",
            '<phoneme ph="...">',
            param="phonemes",
        )
    return SpeechStyle(
        speed=float(members.number("speed", MIN_SPEED, MAX_SPEED, 1.0)),
        pitch=float(members.number("pitch", -MAX_SEMITONES, MAX_SEMITONES, 0.0)),
        energy=float(members.number("energy", -MOST_DB, MOST_DB, 0.0)),
        seed=members.integer("seed", MAX_SPEECH_SEED, 0),
        ssml=ssml,
        phonemes=phonemes,
        lexicon=_lexicon(members),
        watermark=members.flag("watermark"),
    )


def _lexicon(members: JsonMembers) -> dict[str, str]:
    sent, name = members.pop("lexicon"), members.name("lexicon")
    if sent is None:
        return {}
    allowed = f"an object of up to {MAX_LEXICON_WORDS} words, each with its phonemes"
    if not isinstance(sent, dict):
        raise OptionError(f"{name} is no object", allowed, param=name)
    check_lexicon(sent, name)
    return sent


def check_lexicon(lexicon: Mapping[str, object], name: str) -> None:
    """Checks phonemes of words, which came as the member `name`. Raises OptionError."""
    if len(lexicon) > MAX_LEXICON_WORDS:
        raise OptionError(f"{name} has {len(lexicon)} words", f"up to {MAX_LEXICON_WORDS}", param=name)
    for word, phonemes in lexicon.items():
        valid = isinstance(phonemes, str) and phonemes.strip() and len(phonemes) <= MAX_LEXICON_WORD_CHARACTERS
        if not valid or not word.strip() or len(word) > MAX_LEXICON_WORD_CHARACTERS:
            raise OptionError(
                f"{name}[{quote_for_message(word)}] is {quote_for_message(str(phonemes))}",
                f"phonemes, and a word, of 1 to {MAX_LEXICON_WORD_CHARACTERS} characters",
                param=name,
            )


# --- responses --------------------------------------------------------------------------------------------


class SpeechUsage(msgspec.Struct, frozen=True):
    """Usage: `input_tokens` are characters, `output_tokens` units of 50 ms of audio."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    seconds: float


class SpeechDelta(msgspec.Struct, frozen=True, tag_field="type", tag="speech.audio.delta"):
    """Audio in base64. All deltas, decoded and joined, are the file."""

    audio: str


class SpeechWord(msgspec.Struct, frozen=True):
    """Word, with times in seconds since the first sample."""

    word: str
    start: float
    end: float


class SpeechWords(msgspec.Struct, frozen=True, tag_field="type", tag="speech.audio.words"):
    """Words of a sentence, sent before its audio. Ours."""

    words: tuple[SpeechWord, ...]


class VoiceEntry(msgspec.Struct, frozen=True):
    id: str
    """Value for `voice`."""
    name: str
    model: str
    default: bool
    """Whether its model uses it when no voice is requested."""
    cloned: bool
    """Whether it was cloned from recordings: see /v1/voices."""


class VoiceList(msgspec.Struct, frozen=True):
    """Voices of the loaded models."""

    voices: list[VoiceEntry]


class SpeechDone(msgspec.Struct, frozen=True, tag_field="type", tag="speech.audio.done"):
    usage: SpeechUsage


def encode_audio_delta(audio: bytes) -> bytes:
    return server_sent_event(SpeechDelta(base64.b64encode(audio).decode()))


def encode_words(words: Iterable[SpeechWord]) -> bytes:
    return server_sent_event(SpeechWords(tuple(words)))


def speech_usage(characters: int, samples: int, rate_hz: int) -> SpeechUsage:
    """Usage of a text of `characters` and its audio, `samples` at `rate_hz`."""
    tokens = -(-samples_to_ms(samples, rate_hz) // TOKEN_MS)
    return SpeechUsage(characters, tokens, characters + tokens, samples_to_s(samples, rate_hz))


def encode_done(characters: int, samples: int, rate_hz: int) -> bytes:
    return server_sent_event(SpeechDone(speech_usage(characters, samples, rate_hz)))
