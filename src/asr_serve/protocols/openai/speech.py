"""OpenAI's speech: JSON to what is asked, sound to server-sent events.

Source  the API reference of POST /v1/audio/speech, as openai 3.52 for Python sends it
"""

from __future__ import annotations

import base64
from collections.abc import Iterable

import msgspec

from asr_serve.audio.encode import FORMATS
from asr_serve.errors import MalformedRequest, MissingOption, OptionError, TextTooLong
from asr_serve.protocols.form_fields import quote_for_message
from asr_serve.protocols.json_members import JsonMembers
from asr_serve.protocols.openai.events import server_sent_event
from asr_serve.units import samples_to_ms, samples_to_s

PATH = "/v1/audio/speech"
STREAMS = ("audio", "sse")
PCM_RATE_HZ = 24_000
"""Of pcm, which does not tell: OpenAI's. The others are at the voice's own rate unless asked."""
RATES_HZ = (8_000, 16_000, 22_050, 24_000, 44_100, 48_000)
MIN_SPEED, MAX_SPEED = 0.25, 4.0
MAX_SEMITONES = MOST_DB = 12.0
MAX_SPEECH_SEED = (1 << 53) - 1
"""The largest whole number that every JSON reader takes for what it is."""
MAX_LEXICON_WORDS = 1_000
"""Of a lexicon."""
MAX_LEXICON_WORD_CHARACTERS = 100
"""In characters; and its phonemes."""
TOKEN_MS = 50
"""In `usage` an output token is so much sound."""
IGNORED_MEMBERS = ("instructions",)
"""Fields that OpenAI's clients send and no voice here can follow: they are taken, and the answer says that nothing
was done with them."""
BODY_BYTES = 1 << 16
"""What may be in a body beside the text, whose every character may be written in twelve bytes."""


class SpeechStyle(msgspec.Struct, frozen=True):
    """How it is to be said."""

    speed: float = 1.0
    pitch: float = 0.0
    """Semitones."""
    energy: float = 0.0
    """dB."""
    seed: int = 0
    ssml: bool = False
    phonemes: bool = False
    lexicon: dict[str, str] = {}
    """Word -> phonemes."""
    watermark: bool = False


class SpeechRequest(msgspec.Struct, frozen=True):
    """What a request asks for. `model` and `voice` None: the server's own."""

    text: str
    model: str | None = None
    voice: str | None = None
    format: str = "mp3"
    rate_hz: int | None = None
    style: SpeechStyle = SpeechStyle()
    sse: bool = False
    words: bool = False
    ignored: tuple[str, ...] = ()
    """Fields that were sent and change nothing."""


def max_body_bytes(most_characters: int) -> int:
    """The largest body there is any use in reading."""
    return 12 * most_characters + BODY_BYTES


def parse_speech_request(body: bytes, most_characters: int) -> SpeechRequest:
    """Read a body. Raises MalformedRequest, OptionError, TextTooLong."""
    try:
        sent = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise MalformedRequest(
            f"a body came that is no JSON: {error}",
            'a body is like {"model":"tts-1","input":"Hello.","voice":"alloy"}',
        ) from None
    if not isinstance(sent, dict):
        raise MalformedRequest(
            "a body came that is no object", 'a body is like {"input":"Hello.","voice":"alloy"}'
        )
    members = JsonMembers(sent)
    text = members.pop("input")
    if not isinstance(text, str):
        what = "is missing" if text is None else "is no text"
        raise (MissingOption if text is None else OptionError)(
            f"input {what}", "the text that is to be spoken", param="input"
        )
    if len(text) > most_characters:
        raise TextTooLong(
            f"input has {len(text)} characters",
            f"up to {most_characters}",
            "send it in parts, or have max_characters raised",
            param="input",
        )
    model, named = members.text("model"), parse_voice(members)
    form, rate_hz = parse_format_and_rate(members, "response_format", "sample_rate")
    manner = parse_style(members)
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
    members.reject_unknown()
    return SpeechRequest(text, model, named, form, rate_hz, manner, sse, words, ignored)


def parse_voice(members: JsonMembers) -> str | None:
    """A name, or OpenAI's object of a voice that somebody made: {"id": name}."""
    value, name = members.pop("voice"), members.name("voice")
    if value is None or isinstance(value, str):
        return value or None
    if not isinstance(value, dict):
        raise OptionError(f"{name} is {quote_for_message(str(value))}", 'a name, or {"id": name}', param=name)
    made = JsonMembers(value, name)
    found = made.text("id")
    made.reject_unknown()
    return found


def parse_format_and_rate(
    members: JsonMembers, form: str, rate: str, usual: str = "mp3"
) -> tuple[str, int | None]:
    """By the names that they have there; `usual` is the format where none is asked for."""
    found = members.choice(form, FORMATS) or usual
    rate_hz = members.pop(rate)
    if rate_hz is not None and (isinstance(rate_hz, bool) or rate_hz not in RATES_HZ):
        raise OptionError(
            f"{rate}={quote_for_message(str(rate_hz))}",
            f"one of: {', '.join(map(str, RATES_HZ))}",
            param=members.name(rate),
        )
    return found, rate_hz


def parse_style(members: JsonMembers) -> SpeechStyle:
    """The members that a request and a session have both."""
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
    fitting = f"an object of up to {MAX_LEXICON_WORDS} words, each with its phonemes"
    if not isinstance(sent, dict):
        raise OptionError(f"{name} is no object", fitting, param=name)
    if len(sent) > MAX_LEXICON_WORDS:
        raise OptionError(f"{name} has {len(sent)} words", fitting, param=name)
    for word, phonemes in sent.items():
        good = isinstance(phonemes, str) and phonemes.strip() and word.strip()
        if not good or max(len(word), len(phonemes)) > MAX_LEXICON_WORD_CHARACTERS:
            raise OptionError(
                f"{name}[{quote_for_message(word)}] is {quote_for_message(str(phonemes))}",
                f"phonemes, and a word, of 1 to {MAX_LEXICON_WORD_CHARACTERS} characters",
                param=name,
            )
    return sent


# --- what is answered -------------------------------------------------------------------------------------


class SpeechUsage(msgspec.Struct, frozen=True):
    """`input_tokens` are characters, `output_tokens` so many times 50 ms of sound."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    seconds: float


class SpeechDelta(msgspec.Struct, frozen=True, tag_field="type", tag="speech.audio.delta"):
    """Base64. All of them, decoded and one behind the other, are the file."""

    audio: str


class SpeechWord(msgspec.Struct, frozen=True):
    """Seconds since the first sample."""

    word: str
    start: float
    end: float


class SpeechWords(msgspec.Struct, frozen=True, tag_field="type", tag="speech.audio.words"):
    """Ours: of a sentence, before its sound."""

    words: tuple[SpeechWord, ...]


class VoiceEntry(msgspec.Struct, frozen=True):
    id: str
    """What `voice` may say."""
    name: str
    model: str
    default: bool
    """Of its model: it speaks where no voice is asked for."""
    cloned: bool
    """From somebody's recordings: see /v1/voices."""


class VoiceList(msgspec.Struct, frozen=True):
    """Of the models that are loaded."""

    voices: list[VoiceEntry]


class SpeechDone(msgspec.Struct, frozen=True, tag_field="type", tag="speech.audio.done"):
    usage: SpeechUsage


def encode_audio_delta(audio: bytes) -> bytes:
    return server_sent_event(SpeechDelta(base64.b64encode(audio).decode()))


def encode_words(found: Iterable[SpeechWord]) -> bytes:
    return server_sent_event(SpeechWords(tuple(found)))


def speech_usage(characters: int, samples: int, rate_hz: int) -> SpeechUsage:
    """`samples` at `rate_hz`: of what was said."""
    tokens = -(-samples_to_ms(samples, rate_hz) // TOKEN_MS)
    return SpeechUsage(characters, tokens, characters + tokens, samples_to_s(samples, rate_hz))


def encode_done(characters: int, samples: int, rate_hz: int) -> bytes:
    return server_sent_event(SpeechDone(speech_usage(characters, samples, rate_hz)))
