"""OpenAI's transcriptions and translations: a form to what is asked.

Source  the API reference of POST /v1/audio/transcriptions, as openai 3.52 for Python sends and reads it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec

from asr_serve.decoding.seq2seq import MAX_BEAMS, SearchOptions
from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.pipelines.options import SPEAKER_COUNT_FIELDS, LongForm, TranscribeOptions
from asr_serve.pipelines.prompting import MAX_PROMPT_CHARACTERS
from asr_serve.protocols.fields import Fields, expect
from asr_serve.protocols.transcriptions import cutting, known, wants

DIARIZED = "diarized_json"
FORMATS = {
    "json": "application/json",
    "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "verbose_json": "application/json",
    "vtt": "text/vtt; charset=utf-8",
    DIARIZED: "application/json",
    # ours
    "jsonl": "application/jsonl",
    "karaoke": "text/vtt; charset=utf-8",
    "rttm": "text/plain; charset=utf-8",
    "ctm": "text/plain; charset=utf-8",
    "textgrid": "text/plain; charset=utf-8",
}
"""response_format -> the type of the answer."""
TRANSLATED = ("json", "text", "srt", "verbose_json", "vtt")
"""Those of translations, whose words and speakers nobody tells."""
STREAMED = ("json", "text", "verbose_json", DIARIZED)
"""Formats whose segments can go out one after another; the others are of one piece."""
OF_SPEAKERS = (DIARIZED, "rttm")
"""Formats that tell who speaks, always."""
OF_WORDS = ("karaoke", "ctm", "textgrid")
"""Formats of words, always."""
WITH_WORDS = ("verbose_json", "srt", "vtt", "jsonl", *OF_WORDS)
"""Formats that have a place for words."""
GRANULARITIES = "timestamp_granularities[]"

FIELDS = (
    "model",
    "language",
    "languages[]",
    "prompt",
    "keywords[]",
    "response_format",
    "temperature",
    "stream",
    GRANULARITIES,
    "include[]",
    *cutting.OPENAI,
    known.NAMES,
    known.REFERENCES,
    *wants.FIELDS,
    # ours
    *("beam", "long_form"),
    *cutting.OURS,
)
"""Every field but the file."""
TRANSLATION_FIELDS = (
    *("model", "prompt", "response_format", "temperature"),
    "hotwords",  # FunASR's
    *("beam", "long_form", *cutting.OURS),  # ours
)
"""The same of a translation."""


class Ask(msgspec.Struct, frozen=True):
    """What a form asks for. `model` None: the server's own."""

    model: str | None
    options: TranscribeOptions
    response_format: str = "json"
    stream: bool = False
    logprobs: bool = False
    granularities: tuple[str, ...] = ()
    """Whose times are asked for by name."""
    keywords: bool = False
    """Hot words came under OpenAI's name."""

    @property
    def params(self) -> dict[str, str]:
        """Options to the fields that ask for them, where these have other names."""
        params = {"speakers": "spk", "words": GRANULARITIES, "known_speakers": known.REFERENCES}
        return params | {"hotwords": "keywords[]"} if self.keywords else params


def ask(sent: Mapping[str, Sequence[str]], *, complete: bool, max_beam: int = MAX_BEAMS) -> Ask:
    """Read a form. While it is not `complete`, what only a later field can put right is let pass. `max_beam`: the
    most that one caller may ask for.

    Raises OptionError, UnsupportedOption for what is known and not honoured.
    """
    fields = Fields(sent, FIELDS)
    form = fields.choice("response_format", list(FORMATS)) or "json"
    stream = fields.flag("stream") or False
    include = fields.many("include[]")
    for value in include:
        expect("include[]", value, ["logprobs"])
    granularities = tuple(sorted(set(fields.many(GRANULARITIES))))
    for value in granularities:
        expect(GRANULARITIES, value, ["segment", "word"])
    if complete:
        _expect_together(fields, form, stream, granularities)
    options = msgspec.structs.replace(
        _options(fields, complete, max_beam),
        words=_words(form, granularities),
        itn=wants.itn(fields),
        **_speakers(fields, form, complete),
    )
    keywords = "keywords[]" in fields
    return Ask(fields.text("model"), options, form, stream, bool(include), granularities, keywords)


def ask_translation(sent: Mapping[str, Sequence[str]], *, complete: bool, max_beam: int = MAX_BEAMS) -> Ask:
    """Read the form of POST /v1/audio/translations. See `ask`."""
    fields = Fields(sent, TRANSLATION_FIELDS)
    form = fields.choice("response_format", list(TRANSLATED)) or "json"
    options = msgspec.structs.replace(_options(fields, complete, max_beam), task="translate")
    return Ask(fields.text("model"), options, form)


def _speakers(fields: Fields, form: str, complete: bool) -> dict[str, Any]:
    found = wants.speakers(fields, complete=complete, implied=form in OF_SPEAKERS)
    those = known.known(fields, complete=complete)
    if found:
        return {**found, "known_speakers": those}
    if those and complete:
        raise OptionError(
            f"{known.NAMES} came, and nobody asked who speaks",
            f"with response_format={DIARIZED}, or spk=true",
            "send one of them, or leave it out",
            param=known.NAMES,
        )
    return {}


def _words(form: str, granularities: Sequence[str]) -> bool:
    """FunASR's clients read words of `verbose_json` without asking."""
    return "word" in granularities or form in OF_WORDS or (form == "verbose_json" and not granularities)


def _expect_together(fields: Fields, form: str, stream: bool, granularities: Sequence[str]) -> None:
    if stream and form not in STREAMED:
        raise OptionError(
            f"stream=true with response_format={form}",
            f"a stream is of {', '.join(STREAMED)}",
            f"leave stream out, or ask for {STREAMED[0]}",
            param="stream",
        )
    if "include[]" in fields and form != "json":
        raise OptionError(
            f"include[]=logprobs with response_format={form}", "json alone has a place for them", param="include[]"
        )
    if granularities and form not in WITH_WORDS:
        raise OptionError(
            f"{GRANULARITIES} with response_format={form}",
            f"those that have a place for times: {', '.join(WITH_WORDS)}",
            "ask for response_format=verbose_json",
            param=GRANULARITIES,
        )
    wanted = "spk" if fields.flag("spk") else next((name for name in SPEAKER_COUNT_FIELDS if name in fields), "")
    if wanted and (form == "json" or (form == "text" and stream)):
        raise OptionError(
            f"{wanted}={fields.text(wanted)} with {'a stream of ' if stream else ''}response_format={form}",
            "one that has a place for who speaks",
            f"ask for verbose_json, {DIARIZED} or vtt",
            param=wanted,
        )


def _options(fields: Fields, complete: bool, max_beam: int) -> TranscribeOptions:
    temperature = fields.number("temperature", 0, 1)
    return TranscribeOptions(
        language=_language(fields),
        priority="interactive",
        temperatures=(temperature,) if temperature else SearchOptions().temperatures,
        beam=_beam(fields, max_beam),
        prompt=fields.text("prompt", MAX_PROMPT_CHARACTERS) or "",
        hotwords=_hotwords(fields),
        long_form=_long_form(fields),
        **cutting.cutting(fields, complete=complete),
    )


def _beam(fields: Fields, most: int) -> int:
    beam = fields.whole("beam", 1, MAX_BEAMS) or 1
    if beam > most:
        raise OptionError(f"beam={beam}", f"up to {most} on this server", "see its setting max_beam", param="beam")
    return beam


def _hotwords(fields: Fields) -> tuple[str, ...]:
    """Under FunASR's name and vLLM's, or under OpenAI's."""
    hotwords, keywords = wants.hotwords(fields), tuple(fields.many("keywords[]"))
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
