"""OpenAI's transcriptions and translations: form to request.

Source  the API reference of POST /v1/audio/transcriptions, as openai 3.52 for Python sends and reads it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec

from asr_serve.decoding.search_options import MAX_BEAMS, REPETITION_PENALTIES, SearchOptions
from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.pipelines.options import MAX_N_BEST, SPEAKER_COUNT_FIELDS, LongForm, TranscribeOptions
from asr_serve.pipelines.prompting import MAX_PROMPT_CHARACTERS
from asr_serve.protocols import recognition_fields
from asr_serve.protocols.form_fields import FormFields, expect_choice
from asr_serve.protocols.openai import chunking_strategy, known_speakers
from asr_serve.text.formats.registry import JSON, TRANSCRIPT_FORMATS

DIARIZED_JSON = "diarized_json"
"""OpenAI's JSON with speakers, the one format that HTTP has and the command line has not."""
_ROWS = TRANSCRIPT_FORMATS.items()
RESPONSE_FORMATS = {name: row.media_type for name, row in _ROWS} | {DIARIZED_JSON: JSON}
"""Media type of the response, by response_format."""
TRANSLATION_FORMATS = tuple(name for name, row in _ROWS if row.is_translation)
"""Formats of translations, which have no words and no speakers."""
STREAMED_FORMATS = (*(name for name, row in _ROWS if row.streams), DIARIZED_JSON)
"""Formats whose segments can be sent one by one; the others are sent whole."""
FORMATS_WITH_SPEAKERS = (DIARIZED_JSON, *(name for name, row in _ROWS if row.needs_speakers))
"""Formats that always have speakers."""
FORMATS_OF_WORDS = tuple(name for name, row in _ROWS if row.needs_words)
"""Formats that always have words."""
FORMATS_WITH_WORDS = tuple(name for name, row in _ROWS if row.shows_words and name != "json")
"""Formats that can have words; OpenAI's json is the text alone."""
FORMATS_WITH_ALTERNATIVES = tuple(name for name, row in _ROWS if row.shows_alternatives and name != "json")
"""Formats that can have alternatives of segments."""
GRANULARITIES = "timestamp_granularities[]"
MAX_TOP_K = 1_000_000
"""Limit of `top_k`: no vocabulary has as many tokens."""

TRANSCRIPTION_FIELDS = (
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
    *chunking_strategy.CHUNKING_FIELDS,
    known_speakers.NAMES_FIELD,
    known_speakers.REFERENCES_FIELD,
    *recognition_fields.FIELDS,
    # ours
    *("beam", "long_form", "n_best", "repetition_penalty", "top_k", "top_p"),
    *chunking_strategy.SEGMENTATION_FIELDS,
)
"""Every field but the file."""
TRANSLATION_FIELDS = (
    *("model", "prompt", "response_format", "temperature"),
    "hotwords",  # FunASR's
    *("beam", "long_form", "repetition_penalty", "top_k", "top_p", *chunking_strategy.SEGMENTATION_FIELDS),  # ours
)
"""Every field of a translation but the file."""


class TranscriptionRequest(msgspec.Struct, frozen=True):
    """Request of a form. `model` None: the server's own."""

    model: str | None
    options: TranscribeOptions
    response_format: str = "json"
    stream: bool = False
    logprobs: bool = False
    granularities: tuple[str, ...] = ()
    """Requested granularities of times: segment, word."""
    keywords: bool = False
    """Whether hotwords came under OpenAI's name."""
    raw_pcm: bool = False
    """Always false: the file has a header."""
    detects_language: bool = False
    """Always false: the language is detected where the model can."""

    @property
    def option_to_field(self) -> dict[str, str]:
        """Options to the fields that set them, where the names differ."""
        params = {
            "speakers": "spk",
            "words": GRANULARITIES,
            "known_speakers": known_speakers.REFERENCES_FIELD,
            "temperatures": "temperature",
        }
        return params | {"hotwords": "keywords[]"} if self.keywords else params


def parse_transcription_form(
    sent: Mapping[str, Sequence[str]], *, complete: bool, max_beam: int = MAX_BEAMS
) -> TranscriptionRequest:
    """Parses a form. While it is not `complete`, errors that a later field can correct are passed over. `max_beam`:
    limit for one request. Raises OptionError; UnsupportedOption for a known option that is not supported."""
    fields = FormFields(sent, TRANSCRIPTION_FIELDS)
    form = fields.choice("response_format", list(RESPONSE_FORMATS)) or "json"
    stream = fields.flag("stream") or False
    include = fields.repeated("include[]")
    for value in include:
        expect_choice("include[]", value, ["logprobs"])
    granularities = tuple(sorted(set(fields.repeated(GRANULARITIES))))
    for value in granularities:
        expect_choice(GRANULARITIES, value, ["segment", "word"])
    if complete:
        _expect_together(fields, form, stream, granularities)
    options = msgspec.structs.replace(
        _options(fields, complete, max_beam),
        words=_words(form, granularities),
        itn=recognition_fields.parse_itn(fields),
        n_best=_n_best(fields) if complete else 1,  # its beam may follow
        **recognition_fields.parse_language_model(fields, complete=complete),
        **_speakers(fields, form, complete),
    )
    keywords = "keywords[]" in fields
    return TranscriptionRequest(fields.text("model"), options, form, stream, bool(include), granularities, keywords)


def parse_translation_form(
    sent: Mapping[str, Sequence[str]], *, complete: bool, max_beam: int = MAX_BEAMS
) -> TranscriptionRequest:
    """Parses the form of POST /v1/audio/translations. See `parse_transcription_form`."""
    fields = FormFields(sent, TRANSLATION_FIELDS)
    form = fields.choice("response_format", list(TRANSLATION_FORMATS)) or "json"
    options = msgspec.structs.replace(_options(fields, complete, max_beam), task="translate")
    return TranscriptionRequest(fields.text("model"), options, form)


def _speakers(fields: FormFields, form: str, complete: bool) -> dict[str, Any]:
    options = recognition_fields.parse_speaker_options(fields, complete=complete, implied=form in FORMATS_WITH_SPEAKERS)
    known = known_speakers.parse_known_speakers(fields, complete=complete)
    if options:
        return {**options, "known_speakers": known}
    if known and complete:
        raise OptionError(
            f"{known_speakers.NAMES_FIELD} came, and speakers were not requested",
            f"with response_format={DIARIZED_JSON}, or spk=true",
            "send one of them, or leave it out",
            param=known_speakers.NAMES_FIELD,
        )
    return {}


def _words(form: str, granularities: Sequence[str]) -> bool | None:
    """Returns whether words are requested; None: where the model has them. FunASR's clients expect those of
    `verbose_json` without a request."""
    if "word" in granularities:
        return True
    return None if form in FORMATS_OF_WORDS or (form == "verbose_json" and not granularities) else False


def _expect_together(fields: FormFields, form: str, stream: bool, granularities: Sequence[str]) -> None:
    if stream and form not in STREAMED_FORMATS:
        raise OptionError(
            f"stream=true with response_format={form}",
            f"a stream is of {', '.join(STREAMED_FORMATS)}",
            f"leave stream out, or ask for {STREAMED_FORMATS[0]}",
            param="stream",
        )
    if "include[]" in fields and form != "json":
        raise OptionError(
            f"include[]=logprobs with response_format={form}", "json alone has a place for them", param="include[]"
        )
    if "word" in granularities and form not in FORMATS_WITH_WORDS:  # segment, OpenAI's default, has no effect there
        raise OptionError(
            f"{GRANULARITIES} with response_format={form}",
            f"those that have a place for times: {', '.join(FORMATS_WITH_WORDS)}",
            "ask for response_format=verbose_json",
            param=GRANULARITIES,
        )
    n_best = _n_best(fields)
    if n_best > 1 and (stream or form not in FORMATS_WITH_ALTERNATIVES):
        raise OptionError(
            f"n_best={n_best} with {'a stream of ' if stream else ''}response_format={form}",
            f"those that have a place for alternatives: {', '.join(FORMATS_WITH_ALTERNATIVES)}, sent whole",
            "ask for response_format=verbose_json",
            param="n_best",
        )
    field = "spk" if fields.flag("spk") else next((name for name in SPEAKER_COUNT_FIELDS if name in fields), "")
    if field and (form == "json" or (form == "text" and stream)):
        raise OptionError(
            f"{field}={fields.text(field)} with {'a stream of ' if stream else ''}response_format={form}",
            "a format that holds speakers",
            f"ask for verbose_json, {DIARIZED_JSON} or vtt",
            param=field,
        )


def _options(fields: FormFields, complete: bool, max_beam: int) -> TranscribeOptions:
    temperature = fields.number("temperature", 0, 1)
    return TranscribeOptions(
        language=_language(fields),
        priority="interactive",
        temperatures=(temperature,) if temperature else SearchOptions().temperatures,
        beam=_beam(fields, max_beam),
        top_k=max(0, fields.integer("top_k", -1, MAX_TOP_K) or 0),  # vLLM's clients send -1 for all tokens
        top_p=1.0 if (top_p := fields.number("top_p", 0, 1)) is None else top_p,
        repetition_penalty=fields.number("repetition_penalty", *REPETITION_PENALTIES) or 1.0,
        prompt=fields.text("prompt", MAX_PROMPT_CHARACTERS) or "",
        hotwords=_hotwords(fields),
        long_form=_long_form(fields),
        **chunking_strategy.parse_segmentation_options(fields, complete=complete),
    )


def _beam(fields: FormFields, cap: int) -> int:
    beam = fields.integer("beam", 1, MAX_BEAMS) or 1
    if beam > cap:
        raise OptionError(f"beam={beam}", f"up to {cap} on this server", "see its setting max_beam", param="beam")
    return beam


def _n_best(fields: FormFields) -> int:
    return fields.integer("n_best", 1, MAX_N_BEST) or 1


def _hotwords(fields: FormFields) -> tuple[str, ...]:
    """Hotwords, under FunASR's and vLLM's name or under OpenAI's."""
    hotwords, keywords = recognition_fields.parse_hotwords(fields), tuple(fields.repeated("keywords[]"))
    if hotwords and keywords:
        raise OptionError("keywords[] came beside hotwords", "one of them is allowed", param="keywords[]")
    return hotwords or keywords


def _long_form(fields: FormFields) -> LongForm:
    chosen: Any = fields.choice("long_form", get_args(LongForm))
    return chosen or "parallel"


def _language(fields: FormFields) -> str | None:
    language, languages = fields.language("language"), fields.repeated("languages[]")
    if not languages:
        return language
    if language is not None:
        raise OptionError("language came beside languages[]", "one of them is allowed", param="languages[]")
    if len(languages) > 1:
        raise UnsupportedOption(
            "several languages[] came",
            "one, or none: then a multilingual model detects the language",
            "name one",
            param="languages[]",
        )
    return FormFields({"languages[]": languages}, ["languages[]"]).language("languages[]")
