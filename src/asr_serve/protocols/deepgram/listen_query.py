"""Query of Deepgram's `/v1/listen`: fields to options.

Source  Deepgram's API reference, Listen v1, pre-recorded and streaming
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qs

import msgspec

from asr_serve.audio.silence_schedule import SilenceSchedule
from asr_serve.errors import UnsupportedOption
from asr_serve.models.registry import AsrCard
from asr_serve.pipelines.options import ListenOptions, TranscribeOptions
from asr_serve.pipelines.prompting import normalizes_text
from asr_serve.pipelines.segments import SegmentNormalizer
from asr_serve.protocols.form_fields import FALSE, TRUE, FormFields, quote_for_message
from asr_serve.text import languages

LISTEN_PATH = "/v1/listen"
ENCODINGS = {"linear16": "s16le", "mulaw": "mulaw", "alaw": "alaw", "opus": "opus", "ogg-opus": "ogg"}
"""Deepgram's encodings of live audio -> ours."""
RAW_ENCODINGS = ("linear16", "mulaw", "alaw")
"""Encodings of a recording without a header."""
MIN_ENDPOINTING_MS = 300
"""Shortest pause that ends an utterance; a shorter one, like Deepgram's default of 10 ms, counts as this. Models here
recognize an utterance as a whole, which a pause inside a phrase must not cut."""
MAX_PAUSE_MS = 60_000
NO_ENDPOINTING_MS = 10_000
"""Pause that ends an utterance with `endpointing=false`."""
MIN_UTTERANCE_END_MS = 1_000

SHARED_FIELDS = (
    *("model", "language", "punctuate", "smart_format", "numerals", "diarize", "diarize_model"),
    *("keywords[]", "keyterm[]", "encoding", "sample_rate", "channels", "tag[]", "api_key", "caller_id"),
)
UPLOAD_ONLY_FIELDS = ("detect_language[]", "utterances", "paragraphs")
LIVE_ONLY_FIELDS = ("interim_results", "endpointing", "utterance_end_ms", "vad_events")
UNSUPPORTED = {
    "callback": "answers go to the caller alone",
    "multichannel": "the channels of a recording are mixed",
    "redact[]": "the transcript has all that was said",
    "profanity_filter": "the transcript has all that was said",
    "replace[]": "the transcript has all that was said",
    "search[]": "the words have times, to be searched in",
    "summarize": "transcripts, words, utterances, paragraphs and speakers",
    "sentiment": "transcripts, words, utterances, paragraphs and speakers",
    "topics": "transcripts, words, utterances, paragraphs and speakers",
    "intents": "transcripts, words, utterances, paragraphs and speakers",
    "detect_entities": "transcripts, words, utterances, paragraphs and speakers",
}
"""Features that an answer would lack, or that would have removed something from it -> what there is instead. They are
refused unless they are false."""
WITHOUT_EFFECT = (
    *("version", "tier", "mip_opt_out", "no_delay", "filler_words", "dictation", "measurements", "utt_split"),
    *("extra[]", "callback_method", "language_hint[]", "alternatives", "custom_topic[]", "custom_topic_mode"),
    *("custom_intent[]", "custom_intent_mode"),
)
"""Fields that have no effect, and are named among the ignored ones."""
_KEYWORD = re.compile(r"(?P<word>.*?)(:(?P<weight>-?\d+(\.\d+)?))?", re.DOTALL)
_OPTION_FIELDS = {"speakers": "diarize", "words": "utterances", "itn": "numerals", "hotwords": "keyterm"}


class ListenQuery(msgspec.Struct, frozen=True):
    """Options of a request or connection. `model` None: the server's own."""

    model: str | None = None
    language: str | None = None
    """Language code; None: the model's own, or detected."""
    detect_language: bool = False
    plain: bool = False
    """Whether transcripts are without punctuation and capitals: `punctuate=false`."""
    smart_format: bool = False
    numerals: bool = False
    diarize: bool = False
    hotwords: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    encoding: str | None = None
    sample_rate_hz: int | None = None
    utterances: bool = False
    paragraphs: bool = False
    interim_results: bool = False
    endpointing_ms: int | None = None
    """Pause that ends an utterance; None: by the server's schedule."""
    utterance_end_ms: int | None = None
    """Silence after the last word that is reported; None: it is not."""
    vad_events: bool = False
    ignored: tuple[str, ...] = ()
    """Fields that were sent and have no effect."""

    @property
    def option_to_field(self) -> dict[str, str]:
        """Options to the fields that set them, where the names differ."""
        return _OPTION_FIELDS

    def formatting(self, card: AsrCard) -> tuple[bool | None, tuple[str, ...]]:
        """Returns whether numbers get their written form from that model, and the fields without effect. `smart_format`
        has none where numbers cannot be written; `numerals` is refused there. Raises UnsupportedOption."""
        if not (self.smart_format or self.numerals):
            return None, ()
        try:
            SegmentNormalizer(card.language(self.language), itn=normalizes_text(card, True))
        except UnsupportedOption:
            if self.numerals:
                raise
            return None, ("smart_format",)
        return True, ()

    def transcribe_options(self, itn: bool | None) -> TranscribeOptions:
        return TranscribeOptions(
            language=self.language,
            priority="interactive",
            hotwords=self.hotwords,
            words=None,
            itn=itn,
            speakers=self.diarize,
        )

    def listen_options(self, itn: bool | None) -> ListenOptions:
        """Options of a live session. Pauses alone end an utterance, also where a turn model is loaded."""
        silence_ms = self.endpointing_ms
        return ListenOptions(
            language=self.language,
            hotwords=self.hotwords,
            words=None,
            itn=itn,
            speakers=self.diarize,
            silence_schedule=None if silence_ms is None else SilenceSchedule.parse([(float("inf"), silence_ms)]),
        )


class ListenRequest(msgspec.Struct, frozen=True):
    """Request for the transcript of a recording."""

    query: ListenQuery
    options: TranscribeOptions
    stream: bool = False
    """Always false: the response is sent whole."""
    raw_pcm: bool = False
    """Always false: raw samples get a header as they arrive."""

    @property
    def model(self) -> str | None:
        return self.query.model

    @property
    def detects_language(self) -> bool:
        return self.query.detect_language

    @property
    def option_to_field(self) -> Mapping[str, str]:
        return self.query.option_to_field


def parse_listen_query(query: str, *, live: bool) -> ListenQuery:
    """Parses the query of a request or, with `live`, of a WebSocket. Raises OptionError, UnsupportedOption."""
    sent = parse_qs(query, keep_blank_values=True)
    own, others = (LIVE_ONLY_FIELDS, UPLOAD_ONLY_FIELDS) if live else (UPLOAD_ONLY_FIELDS, LIVE_ONLY_FIELDS)
    fields = FormFields(sent, (*SHARED_FIELDS, *own, *others, *UNSUPPORTED, *WITHOUT_EFFECT))
    _reject_unsupported(fields, sent)
    ignored = [name.removesuffix("[]") for name in (*WITHOUT_EFFECT, *others) if was_sent(fields, name)]
    smart_format = fields.flag("smart_format") or False
    codes = fields.repeated("detect_language[]") if not live else []
    detect = any(code.lower() not in FALSE for code in codes)
    encoding = fields.choice("encoding", tuple(ENCODINGS) if live else RAW_ENCODINGS)
    diarize_model = fields.text("diarize_model")
    return ListenQuery(
        model=fields.text("model"),
        language=None if detect else _language(fields),
        detect_language=detect,
        plain=fields.flag("punctuate") is False and not smart_format,
        smart_format=smart_format,
        numerals=fields.flag("numerals") or False,
        diarize=(fields.flag("diarize") or False) or (diarize_model or "false").lower() not in FALSE,
        hotwords=(*map(_keyterm, fields.repeated("keyterm[]")), *map(_keyword, fields.repeated("keywords[]"))),
        tags=tuple(fields.repeated("tag[]")),
        encoding=encoding,
        sample_rate_hz=_sample_rate(fields, encoding),
        utterances=not live and (fields.flag("utterances") or False),
        paragraphs=not live and (fields.flag("paragraphs") or smart_format),
        interim_results=live and (fields.flag("interim_results") or False),
        endpointing_ms=_endpointing_ms(fields) if live else None,
        utterance_end_ms=_utterance_end_ms(fields) if live else None,
        vad_events=live and (fields.flag("vad_events") or False),
        ignored=tuple(ignored),
    )


def was_sent(fields: FormFields, name: str) -> bool:
    """Returns whether a field was sent with a value that is not false."""
    values = fields.repeated(name) if name.endswith("[]") else [fields.text(name) or ""]
    return any(value and value.lower() not in FALSE for value in values)


def _reject_unsupported(fields: FormFields, sent: Mapping[str, Sequence[str]]) -> None:
    for name, instead in UNSUPPORTED.items():
        if was_sent(fields, name):
            param = name.removesuffix("[]")
            value = next(iter(sent.get(param) or sent.get(name) or ("",)))
            raise UnsupportedOption(
                f"{param}={quote_for_message(value)} is not supported", instead, "leave it out", param=param
            )
    channels = fields.integer("channels", 1, 16)
    if channels not in (None, 1):
        raise UnsupportedOption(
            f"channels={channels}", "one channel of samples", "mix the channels, or send one of them", param="channels"
        )


def _language(fields: FormFields) -> str | None:
    sent = fields.text("language")
    return None if sent is None or sent.lower() == "multi" else languages.requested_language_code(sent)


def _sample_rate(fields: FormFields, encoding: str | None) -> int | None:
    rate_hz = fields.integer("sample_rate", 8_000, 48_000)
    return rate_hz if encoding in RAW_ENCODINGS else None  # Opus and containers tell it themselves


def _keyterm(term: str) -> str:
    """Hotword of a key term, which has no weight: what looks like one is part of it.

    >>> _keyterm("Beckett"), _keyterm("ratio 3:1")
    ('Beckett', 'ratio 3:1:1')
    """
    return f"{term}:1" if _KEYWORD.fullmatch(term)["weight"] else term  # type: ignore[index]


def _keyword(keyword: str) -> str:
    """Hotword of a keyword with its intensifier, which Deepgram has from -10 to 10, and we have above 0.

    >>> _keyword("Beckett:2"), _keyword("Beckett")
    ('Beckett:2', 'Beckett')
    """
    match = _KEYWORD.fullmatch(keyword)
    assert match is not None, "it matches every text"
    if match["weight"] and float(match["weight"]) <= 0:
        raise UnsupportedOption(
            f"keywords={quote_for_message(keyword)}",
            "words become likelier, never less likely",
            "send a weight above 0, or leave it out",
            param="keywords",
        )
    return keyword


def _endpointing_ms(fields: FormFields) -> int | None:
    sent = fields.text("endpointing")
    if sent is None or sent.lower() in TRUE[:1]:
        return None
    if sent.lower() in FALSE[:1]:
        return NO_ENDPOINTING_MS
    pause_ms = fields.integer("endpointing", 0, MAX_PAUSE_MS)
    assert pause_ms is not None
    return max(pause_ms, MIN_ENDPOINTING_MS)


def _utterance_end_ms(fields: FormFields) -> int | None:
    sent = fields.text("utterance_end_ms")
    if sent is None or sent.lower() in FALSE[:1]:
        return None
    return fields.integer("utterance_end_ms", MIN_UTTERANCE_END_MS, MAX_PAUSE_MS)
