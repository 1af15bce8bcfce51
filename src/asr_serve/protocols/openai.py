"""OpenAI's transcriptions and translations: form to what is asked, transcript to bytes, errors to their shape.

Source  the API reference of POST /v1/audio/transcriptions, as openai 3.52 for Python sends and reads it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import msgspec

from asr_serve.decoding.attention import MOST_BEAMS, SearchOptions
from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.pipelines.options import LongForm, TranscribeOptions
from asr_serve.pipelines.prompts import MOST_CHARACTERS
from asr_serve.protocols.fields import Fields, expect, shown
from asr_serve.text import subtitles
from asr_serve.types import Segment, Transcript
from asr_serve.vad.schedule import SilenceSchedule

FORMATS = {
    "json": "application/json",
    "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "verbose_json": "application/json",
    "vtt": "text/vtt; charset=utf-8",
}
"""response_format -> the type of the answer."""
SPEAKERS = "diarized_json"
STREAMED = ("json", "text", "verbose_json")
"""Formats whose words can go out one after another, in verbose_json with times; the others are of one piece."""

STRATEGY = "chunking_strategy"
STRATEGY_MEMBERS = ("type", "threshold", "prefix_padding_ms", "silence_duration_ms")
LONGEST_MS, LONGEST_PADDING_MS = 60_000, 10_000

FIELDS = (
    "model",
    "language",
    "languages[]",
    "prompt",
    "keywords[]",
    "response_format",
    "temperature",
    "stream",
    "timestamp_granularities[]",
    "include[]",
    STRATEGY,
    *(f"{STRATEGY}[{member}]" for member in STRATEGY_MEMBERS),
    "known_speaker_names[]",
    "known_speaker_references[]",
    # FunASR's, for the same route
    "spk",
    "hotwords",
    # ours
    "beam",
    "long_form",
    "vad",
    "max_segment_ms",
    "silence_schedule",
)
"""Every field but the file."""
TRANSLATION_FIELDS = (
    *("model", "prompt", "response_format", "temperature"),
    "hotwords",  # FunASR's
    *("beam", "long_form", "vad", "max_segment_ms", "silence_schedule"),  # ours
)
"""The same of a translation."""


class Ask(msgspec.Struct, frozen=True):
    """What a form asks for. `model` None: the server's own."""

    model: str | None
    options: TranscribeOptions
    response_format: str = "json"
    stream: bool = False
    logprobs: bool = False


def ask(sent: Mapping[str, Sequence[str]], *, complete: bool, max_beam: int = MOST_BEAMS) -> Ask:
    """Read a form. While it is not `complete`, what only a later field can put right is let pass. `max_beam`: the
    most that one caller may ask for.

    Raises OptionError, UnsupportedOption for what is known and not honoured.
    """
    fields = Fields(sent, FIELDS)
    _refuse(fields)
    form = fields.choice("response_format", [*FORMATS, SPEAKERS]) or "json"
    stream = fields.flag("stream") or False
    include = fields.many("include[]")
    for value in include:
        expect("include[]", value, ["logprobs"])
    granularities = fields.many("timestamp_granularities[]")
    for value in granularities:
        expect("timestamp_granularities[]", value, ["segment", "word"])
    if complete:
        _expect_together(form, stream, bool(include), bool(granularities))
    if form == SPEAKERS:
        raise UnsupportedOption(
            f"response_format={SPEAKERS} needs to know who speaks",
            "the models here hear words, not speakers",
            f"ask for one of: {', '.join(FORMATS)}",
            param="response_format",
        )
    if "word" in granularities:
        raise UnsupportedOption(
            "timestamp_granularities[]=word is not supported",
            "the models here tell the times of segments",
            "ask for segment",
            param="timestamp_granularities[]",
        )
    return Ask(fields.text("model"), _options(fields, complete, max_beam), form, stream, bool(include))


def ask_translation(sent: Mapping[str, Sequence[str]], *, complete: bool, max_beam: int = MOST_BEAMS) -> Ask:
    """Read the form of POST /v1/audio/translations. See `ask`."""
    fields = Fields(sent, TRANSLATION_FIELDS)
    _refuse(fields)
    form = fields.choice("response_format", list(FORMATS)) or "json"
    options = msgspec.structs.replace(_options(fields, complete, max_beam), task="translate")
    return Ask(fields.text("model"), options, form)


def _refuse(fields: Fields) -> None:
    """What no model here does yet."""
    for name in ("known_speaker_names[]", "known_speaker_references[]"):
        fields.refuse(name, "the models here hear words, not speakers")
    fields.refuse_true("spk", "the models here hear words, not speakers")


def _expect_together(form: str, stream: bool, include: bool, granularities: bool) -> None:
    if stream and form not in (*STREAMED, SPEAKERS):
        raise OptionError(
            f"stream=true with response_format={form}",
            f"a stream is of {', '.join(STREAMED)}",
            f"leave stream out, or ask for {STREAMED[0]}",
            param="stream",
        )
    if include and form != "json":
        raise OptionError(
            f"include[]=logprobs with response_format={form}", "json alone has a place for them", param="include[]"
        )
    if granularities and form != "verbose_json":
        raise OptionError(
            f"timestamp_granularities[] with response_format={form}",
            "verbose_json alone has a place for times",
            "ask for response_format=verbose_json",
            param="timestamp_granularities[]",
        )


def _options(fields: Fields, complete: bool, max_beam: int) -> TranscribeOptions:
    temperature = fields.number("temperature", 0, 1)
    vad = fields.flag("vad")
    threshold, pad_ms, schedule = _strategy(fields, complete)
    if "silence_schedule" in fields:
        if schedule is not None:
            raise OptionError(
                f"silence_schedule came beside {STRATEGY}'s silence_duration_ms",
                "one of them says when a segment ends",
                param="silence_schedule",
            )
        schedule = _schedule(fields.text("silence_schedule") or "")
    if vad is False and (threshold, pad_ms, schedule) != (None, None, None):
        raise OptionError("vad=false came beside options of voice activity", "one or the other", param="vad")
    longest_ms = fields.whole("max_segment_ms", 1_000, 86_400_000)
    if pad_ms is not None and longest_ms is not None and 4 * pad_ms > longest_ms:
        raise OptionError(
            f"{STRATEGY}'s prefix_padding_ms={pad_ms} with max_segment_ms={longest_ms}",
            "padding may be a quarter of a segment",
            param=f"{STRATEGY}[prefix_padding_ms]",
        )
    return TranscribeOptions(
        language=_language(fields),
        priority="interactive",
        vad=vad is not False,
        silence_schedule=schedule,
        max_segment_ms=longest_ms,
        temperatures=(temperature,) if temperature else SearchOptions().temperatures,
        beam=_beam(fields, max_beam),
        prompt=fields.text("prompt", MOST_CHARACTERS) or "",
        hotwords=_hotwords(fields),
        long_form=_long_form(fields),
        threshold=threshold,
        pad_before_ms=pad_ms,
    )


def _beam(fields: Fields, most: int) -> int:
    beam = fields.whole("beam", 1, MOST_BEAMS) or 1
    if beam > most:
        raise OptionError(f"beam={beam}", f"up to {most} on this server", "see its setting max_beam", param="beam")
    return beam


def _hotwords(fields: Fields) -> tuple[str, ...]:
    """Under FunASR's name and vLLM's, or under OpenAI's."""
    hotwords, keywords = fields.words("hotwords", MOST_CHARACTERS), tuple(fields.many("keywords[]"))
    if hotwords and keywords:
        raise OptionError("keywords[] came beside hotwords", "one of them is allowed", param="keywords[]")
    return hotwords or keywords


def _long_form(fields: Fields) -> LongForm:
    chosen: Any = fields.choice("long_form", get_args(LongForm))
    return chosen or "parallel"


def _language(fields: Fields) -> str | None:
    language, several = fields.language("language"), fields.many("languages[]")
    if not several:
        return language
    if language is not None:
        raise OptionError("language came beside languages[]", "one of them is allowed", param="languages[]")
    if len(several) > 1:
        raise UnsupportedOption(
            "several languages[] came",
            "one, or none: then a model that knows several hears which it is",
            "name one",
            param="languages[]",
        )
    return Fields({"languages[]": several}, ["languages[]"]).language("languages[]")


def _schedule(text: str) -> SilenceSchedule:
    try:
        return SilenceSchedule.from_text(text)
    except OptionError as error:
        raise OptionError(error.came, error.allowed, error.todo, param="silence_schedule") from None


def _strategy(fields: Fields, complete: bool) -> tuple[float | None, int | None, SilenceSchedule | None]:
    """(threshold, padding before speech in ms, schedule) of the chunking strategy; None is our own choice."""
    members = [f"{STRATEGY}[{member}]" for member in STRATEGY_MEMBERS]
    if any(name in fields for name in members):
        if STRATEGY in fields:
            raise OptionError(f"{STRATEGY} came as a whole and in parts", "one or the other", param=STRATEGY)
    else:
        text = fields.text(STRATEGY)
        if text is None or text == "auto":
            return None, None, None
        fields = Fields(_members(text), members)
    kind, threshold, pad, silence = members
    if kind in fields or complete:
        expect(kind, fields.text(kind) or "", ["server_vad"])
    silence_ms = fields.whole(silence, 0, LONGEST_MS)
    return (
        fields.number(threshold, 0.001, 1),
        fields.whole(pad, 0, LONGEST_PADDING_MS),
        None if silence_ms is None else SilenceSchedule(((math.inf, silence_ms),)),
    )


def _members(text: str) -> dict[str, list[str]]:
    """`{"type": "server_vad", "threshold": 0.4}` under the names a form gives them."""
    try:
        members = msgspec.json.decode(text, type=dict[str, str | int | float])
    except msgspec.MsgspecError:
        raise OptionError(
            f"{STRATEGY}={shown(text)}",
            'auto, or {"type": "server_vad"} with threshold, prefix_padding_ms, silence_duration_ms',
            param=STRATEGY,
        ) from None
    return {f"{STRATEGY}[{name}]": [str(value)] for name, value in members.items()}


# --- answers ----------------------------------------------------------------------------------------------


class Logprob(msgspec.Struct, frozen=True):
    token: str
    bytes: list[int]
    logprob: float
    """Natural logarithm."""


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="duration"):
    seconds: int
    """Of audio, rounded up."""
    cached_seconds: int = 0
    """Of these, how many had been heard before, rounded down; left out where it is 0. Ours: OpenAI's clients pass
    over it."""


class Transcription(msgspec.Struct, frozen=True, omit_defaults=True):
    """response_format=json"""

    text: str
    usage: Usage
    logprobs: list[Logprob] | None = None


Spell = Callable[[list[int]], str]
"""Token ids to their text."""


def render(transcript: Transcript, asked: Ask, spell: Spell) -> bytes:
    """The answer in the form asked for; FORMATS has its type."""
    usage = Usage(math.ceil(transcript.duration_s), math.floor(transcript.cached_s))
    task = asked.options.task
    if task == "translate":
        transcript = msgspec.structs.replace(transcript, language="en")
    if asked.response_format == "json":
        heard = logprobs(transcript.segments, spell) if asked.logprobs else None
        return msgspec.json.encode(Transcription(transcript.text, usage, heard))
    if asked.response_format == "verbose_json":
        return msgspec.json.encode({**subtitles.verbose(transcript), "task": task, "usage": usage})
    if asked.response_format == "text":
        return f"{transcript.text}\n".encode()
    return subtitles.render(transcript, asked.response_format).encode()


class TextDelta(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="transcript.text.delta"):
    delta: str
    logprobs: list[Logprob] | None = None
    start: float | None = None
    """Of the segment, in seconds. This and `end` are ours, and come with verbose_json."""
    end: float | None = None


class TextDone(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="transcript.text.done"):
    text: str
    logprobs: list[Logprob] | None = None


class Deltas:
    """A transcript in events, a segment each; joined, the deltas are its text."""

    def __init__(self, asked: Ask, spell: Spell) -> None:
        self._logprobs, self._spell = asked.logprobs, spell
        self._times = asked.response_format == "verbose_json"
        self._first = True

    def segment(self, segment: Segment) -> bytes:
        first, self._first = self._first, False
        heard = logprobs([segment], self._spell, first=first) if self._logprobs else None
        times = (segment.start_s, segment.end_s) if self._times else (None, None)
        return event(TextDelta(segment.text if first else f" {segment.text}", heard, *times))

    def done(self, transcript: Transcript) -> bytes:
        heard = logprobs(transcript.segments, self._spell) if self._logprobs else None
        return event(TextDone(transcript.text, heard))


def event(data: object) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def logprobs(segments: Iterable[Segment], spell: Spell, *, first: bool = True) -> list[Logprob]:
    """Each token with its text; joined, the texts are those of the segments with a space between."""
    found: list[Logprob] = []
    for segment in segments:
        lead = "" if first else " "
        first = False
        for text, logprob in zip(texts(segment.tokens, spell), segment.logprobs, strict=True):
            token, lead = lead + text, ""
            found.append(Logprob(token, list(token.encode()), logprob))
    return found


def texts(tokens: Sequence[int], spell: Spell) -> list[str]:
    """The part of the text that each token adds. Bytes of a character that is not whole count to the token that
    completes it; at the very end they count as they are."""
    found: list[str] = []
    start = heard = said = 0
    for count in range(1, len(tokens) + 1):
        # Not from the very first: a text of n tokens would be spelt n times. One group before is enough, so that
        # the space between two is no end of a text.
        text = spell(list(tokens[start:count]))
        whole = text if count == len(tokens) else text.rstrip("\ufffd")
        found.append(whole[said:])
        if len(whole) > said:
            said = len(whole)
            if whole == text:
                start, heard = heard, count
                said = len(spell(list(tokens[start:count])))
    return found


class Problem(msgspec.Struct, frozen=True):
    """What went wrong, as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: Problem
