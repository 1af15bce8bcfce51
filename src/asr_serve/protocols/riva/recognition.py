"""Recognition: RecognitionConfig to options, transcripts and live events to messages.

Source  the messages of nvidia-riva-client 2.28 for Python, and what its scripts send
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from asr_serve.audio.silence_schedule import SilenceSchedule
from asr_serve.audio.stream_decoder import MAX_RATE_HZ, MIN_RATE_HZ
from asr_serve.errors import MissingOption, OptionError, UnsupportedOption
from asr_serve.models.registry import AsrCard
from asr_serve.pipelines.live.events import LivePartial, LiveSegmentDone
from asr_serve.pipelines.options import MAX_SPEAKERS, ListenOptions, TranscribeOptions
from asr_serve.pipelines.prompting import normalizes_text
from asr_serve.pipelines.segments import SegmentNormalizer
from asr_serve.protocols.form_fields import quote_for_message
from asr_serve.protocols.recognition_fields import MAX_HOTWORDS
from asr_serve.protocols.riva import message_classes
from asr_serve.protocols.riva.message_classes import MAX_LIST_MESSAGES, MAX_LIVE_OPTIONS_BYTES, parse_message
from asr_serve.protocols.segment_text import plain_text, segment_confidence, transcript_text
from asr_serve.protocols.speaker_names import speaker_number
from asr_serve.text import languages
from asr_serve.types import Segment, Transcript, Word
from asr_serve.units import samples_to_ms, samples_to_s

ENCODINGS = {0: None, 1: "LINEAR_PCM", 2: "FLAC", 3: "MULAW", 4: "OGGOPUS", 20: "ALAW"}
"""Number of an encoding -> its name; None: a container tells it."""
RAW_ENCODINGS = {"LINEAR_PCM": "s16le", "MULAW": "mulaw", "ALAW": "alaw"}
"""Encodings of samples without a header -> ours."""
MAX_CHANNELS = 16
MAX_BOOST, BOOST_OF_WEIGHT_1 = 100.0, 10.0
"""Riva's highest recommended boost, and the one that is a hotword of weight 1."""
MIN_STOP_HISTORY_MS, MAX_STOP_HISTORY_MS = 300, 60_000
"""Shortest pause that ends an utterance, which a pause inside a phrase must not cut, and the longest."""
CHANNEL_TAG = 1
"""Number of the one channel."""
ENDPOINTING_FIELDS = ("start_history", "start_threshold", "stop_threshold", "stop_history_eou", "stop_threshold_eou")
"""Fields of the endpointing that are not supported: of Riva's, which counts the blanks of a CTC model."""
OPTION_FIELDS = {
    "model": "model",
    "language": "language_code",
    "hotwords": "speech_contexts",
    "speakers": "diarization_config",
    "max_speakers": "max_speaker_count",
    "words": "enable_word_time_offsets",
    "n_best": "max_alternatives",
    "beam": "max_alternatives",
    "rate": "sample_rate_hertz",
}
"""Options -> the fields that set them."""


class RivaRecognitionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a RecognitionConfig. `model` None: the server's own."""

    model: str | None
    language: str | None
    """Language code; None: the model's own, or detected."""
    detects_language: bool
    encoding: str | None
    """Name of the encoding; None: the audio is in a container that tells it."""
    rate_hz: int | None
    channels: int
    n_best: int
    hotwords: tuple[str, ...]
    words: bool
    punctuated: bool
    verbatim: bool
    speakers: bool
    max_speakers: int | None
    stop_history_ms: int | None
    """Pause that ends an utterance; None: by the server's schedule."""
    interim_results: bool = False

    def raw_encoding(self, first_bytes: bytes) -> str | None:
        """Our name of the encoding of audio that begins so, where it has no header of its own; None where it has.
        Raises MissingOption where nothing tells its encoding or its rate."""
        if first_bytes[:4] in (b"RIFF", b"OggS", b"fLaC") or self.encoding in ("FLAC", "OGGOPUS"):
            return None
        if self.encoding is None:
            raise MissingOption(
                "no encoding came, and the audio has no header that tells it",
                f"encodings: {', '.join(name for name in ENCODINGS.values() if name)}",
                "set encoding and sample_rate_hertz, or send WAV, FLAC or Ogg",
                param="encoding",
            )
        if self.rate_hz is None:
            raise MissingOption(
                f"no sample_rate_hertz came for {self.encoding}, which does not tell it",
                f"{MIN_RATE_HZ} to {MAX_RATE_HZ}",
                "set sample_rate_hertz",
                param="sample_rate_hertz",
            )
        return RAW_ENCODINGS[self.encoding]

    def transcribe_options(self, card: AsrCard) -> TranscribeOptions:
        """Options of a recording for a model. Raises OptionError."""
        return TranscribeOptions(
            language=self.language,
            priority="interactive",
            beam=1 if card.streaming else self.n_best,
            n_best=self.n_best,
            hotwords=self.hotwords,
            words=self.words,
            speakers=self.speakers,
            max_speakers=self.max_speakers,
            itn=self._itn(card),
        )

    def listen_options(self, card: AsrCard) -> ListenOptions:
        """Options of a live session. Pauses alone end an utterance, also where a turn model is loaded."""
        pause_ms = self.stop_history_ms
        return ListenOptions(
            language=self.language,
            hotwords=self.hotwords,
            words=self.words,
            speakers=self.speakers,
            max_speakers=self.max_speakers,
            itn=self._itn(card),
            silence_schedule=None if pause_ms is None else SilenceSchedule.parse([(math.inf, pause_ms)]),
        )

    def _itn(self, card: AsrCard) -> bool | None:
        """Returns whether numbers get their written form: unless words are verbatim, where the model and this machine
        can."""
        if self.verbatim:
            return False
        try:
            SegmentNormalizer(card.language(self.language), itn=normalizes_text(card, True))
        except UnsupportedOption:
            return None
        return True


class RivaRecognizeRequest(NamedTuple):
    """Request for the transcript of a recording."""

    options: RivaRecognitionOptions
    audio: bytes
    id: str


class RivaUpload(msgspec.Struct, frozen=True):
    """The same, as the parsed form of an upload."""

    recognition: RivaRecognitionOptions
    options: TranscribeOptions
    stream: bool = False
    """Always false: the response is sent whole."""
    raw_pcm: bool = False
    """Always false: raw samples get a header."""

    @property
    def model(self) -> str | None:
        return self.recognition.model

    @property
    def detects_language(self) -> bool:
        return self.recognition.detects_language

    @property
    def option_to_field(self) -> Mapping[str, str]:
        return OPTION_FIELDS


class RivaStreamingRequest(NamedTuple):
    """Message of a live session: its options, or audio."""

    options: RivaRecognitionOptions | None
    audio: bytes
    id: str


def parse_recognize(data: bytes, max_beam: int) -> RivaRecognizeRequest:
    """Raises MalformedRequest, OptionError."""
    message = parse_message(message_classes.RecognizeRequest, data, "audio")
    if not message.HasField("config"):
        raise MissingOption("no config came", "a RecognitionConfig", "set config", param="config")
    audio = bytes(message.audio)  # a copy, each time that it is read
    if not audio:
        raise MissingOption("no audio came", "a recording, in one message", "set audio", param="audio")
    options = _parse_config(message.config)
    if options.n_best > max_beam:
        raise OptionError(f"max_alternatives={options.n_best}", f"up to {max_beam}", param="max_alternatives")
    if options.stop_history_ms is not None:
        raise UnsupportedOption(
            "stop_history for a whole recording",
            "it is for live audio",
            "leave endpointing_config out",
            param="stop_history",
        )
    return RivaRecognizeRequest(options, audio, message.id.value)


def parse_streaming(data: bytes) -> RivaStreamingRequest:
    """Raises MalformedRequest, OptionError."""
    message = parse_message(message_classes.StreamingRecognizeRequest, data, "audio_content", MAX_LIVE_OPTIONS_BYTES)
    refuse_configuration("runtime_config", message.runtime_config)
    kind = message.WhichOneof("streaming_request")
    if kind == "streaming_config":
        config = message.streaming_config
        options = msgspec.structs.replace(_parse_config(config.config), interim_results=config.interim_results)
        for name, unsupported in (
            ("max_alternatives", options.n_best > 1),
            ("encoding", options.encoding == "FLAC"),
            ("audio_channel_count", options.channels > 1),
        ):
            if unsupported:
                raise UnsupportedOption(
                    f"{name}={_shown(config.config, name)} for live audio",
                    "one alternative of one channel, as LINEAR_PCM, MULAW, ALAW or OGGOPUS",
                    "convert the audio, or send the recording to Recognize",
                    param=name,
                )
        return RivaStreamingRequest(options, b"", message.id.value)
    if kind is None:
        raise MissingOption(
            "a StreamingRecognizeRequest came with nothing in it",
            "streaming_config first, then audio_content",
            "set one of them",
            param="streaming_request",
        )
    return RivaStreamingRequest(None, message.audio_content, message.id.value)


def _shown(config: Any, name: str) -> str:
    value = getattr(config, name)
    return str(ENCODINGS[value] if name == "encoding" else value)


def _parse_config(config: Any) -> RivaRecognitionOptions:
    _refuse_unsupported(config)
    if config.encoding not in ENCODINGS:
        raise OptionError(
            f"encoding={config.encoding}",
            f"one of: {', '.join(f'{name} ({number})' for number, name in ENCODINGS.items() if name)}",
            param="encoding",
        )
    rate_hz = _integer(config, "sample_rate_hertz", MIN_RATE_HZ, MAX_RATE_HZ)
    code = config.language_code.strip()
    detects = code.lower() == "multi"
    diarization = config.diarization_config
    speakers = diarization.enable_speaker_diarization
    max_speakers = _integer(diarization, "max_speaker_count", 1, MAX_SPEAKERS)
    if max_speakers is not None and not speakers:
        raise OptionError(
            "max_speaker_count without enable_speaker_diarization", "both, or neither", param="max_speaker_count"
        )
    return RivaRecognitionOptions(
        model=config.model or None,
        language=None if detects else languages.requested_language_code(code or None),
        detects_language=detects,
        encoding=ENCODINGS[config.encoding],
        rate_hz=rate_hz,
        channels=_integer(config, "audio_channel_count", 1, MAX_CHANNELS) or 1,
        n_best=_integer(config, "max_alternatives", 1, 50) or 1,
        hotwords=_hotwords(config.speech_contexts),
        words=config.enable_word_time_offsets or speakers,
        punctuated=config.enable_automatic_punctuation,
        verbatim=config.verbatim_transcripts,
        speakers=speakers,
        max_speakers=max_speakers,
        stop_history_ms=_stop_history_ms(config),
    )


def _refuse_unsupported(config: Any) -> None:
    for name, instead in (
        ("profanity_filter", "the transcript has all that was said"),
        ("enable_separate_recognition_per_channel", "the channels of a recording are mixed"),
    ):
        if getattr(config, name):
            raise UnsupportedOption(f"{name}=true is not supported", instead, "leave it out", param=name)
    refuse_configuration("custom_configuration", config.custom_configuration)
    for name in ENDPOINTING_FIELDS:
        if config.endpointing_config.HasField(name):
            raise UnsupportedOption(
                f"{name} is not supported",
                "stop_history, the pause in ms that ends an utterance",
                "leave it out",
                param=name,
            )


def refuse_configuration(name: str, configuration: Mapping[str, str]) -> None:
    """Raises UnsupportedOption for a table of options that are Riva's own, unless it is empty."""
    for key in configuration:
        raise UnsupportedOption(
            f"{name} has {quote_for_message(key)}, which is not supported",
            "the fields of the message",
            "leave it out",
            param=name,
        )


def _integer(message: Any, name: str, least: int, most: int) -> int | None:
    """Number of a field; None for 0, which stands for a field that is not set. Raises OptionError."""
    value = int(getattr(message, name))
    if value and not least <= value <= most:
        raise OptionError(f"{name}={value}", f"{least} to {most}, or 0 for the default", param=name)
    return value or None


def _hotwords(contexts: Any) -> tuple[str, ...]:
    """Hotwords of speech contexts: ours have a weight from 0.1 to 10, of which 1 is the default. Raises OptionError."""
    if len(contexts) > MAX_LIST_MESSAGES:
        raise OptionError(
            f"{len(contexts)} speech_contexts",
            f"up to {MAX_LIST_MESSAGES}",
            "put phrases with the same boost into one",
            param="speech_contexts",
        )
    if (phrases := sum(len(context.phrases) for context in contexts)) > MAX_HOTWORDS:
        raise OptionError(
            f"{phrases} phrases in speech_contexts",
            f"up to {MAX_HOTWORDS}",
            "name those that matter most",
            param="speech_contexts",
        )
    return tuple(word for context in contexts for word in _context_hotwords(context))


def _context_hotwords(context: Any) -> Iterable[str]:
    boost = context.boost
    if not 0 <= boost <= MAX_BOOST:
        raise OptionError(
            f"boost={boost:g}",
            f"0, for the default, to {MAX_BOOST:g}: words become likelier, never less likely",
            param="boost",
        )
    weight = max(0.1, boost / BOOST_OF_WEIGHT_1) if boost else 1.0
    return (f"{phrase}:{weight:g}" for phrase in context.phrases)


def _stop_history_ms(config: Any) -> int | None:
    endpointing = config.endpointing_config
    if not endpointing.HasField("stop_history"):
        return None
    pause_ms = int(endpointing.stop_history)
    if not 0 < pause_ms <= MAX_STOP_HISTORY_MS:
        raise OptionError(f"stop_history={pause_ms}", f"1 to {MAX_STOP_HISTORY_MS} ms", param="stop_history")
    return max(pause_ms, MIN_STOP_HISTORY_MS)


# --- answers ----------------------------------------------------------------------------------------------


def encode_recognize(transcript: Transcript, options: RivaRecognitionOptions, request_id: str) -> bytes:
    """RecognizeResponse with a result for each segment."""
    response = message_classes.RecognizeResponse()
    response.id.value = request_id
    for segment in transcript.segments:
        if not (text := _text(segment.text, options)):
            continue
        result = response.results.add(channel_tag=CHANNEL_TAG, audio_processed=segment.end_s)
        _fill(result.alternatives.add(), text, segment, transcript.language, options)
        for other in segment.alternatives[1:]:
            _fill_words(result.alternatives.add(transcript=_text(other.text, options)), other.words, "", options)
    return bytes(response.SerializeToString())


def encode_final(done: LiveSegmentDone, options: RivaRecognitionOptions, request_id: str) -> bytes | None:
    """StreamingRecognizeResponse with a final result; None: the segment has no words."""
    if not (text := _text(done.segment.text, options)):
        return None
    response = message_classes.StreamingRecognizeResponse()
    response.id.value = request_id
    result = response.results.add(
        is_final=True, stability=1.0, channel_tag=CHANNEL_TAG, audio_processed=samples_to_s(done.decided_samples)
    )
    _fill(result.alternatives.add(), text, done.segment, done.language, options)
    return bytes(response.SerializeToString())


def encode_interim(partial: LivePartial, options: RivaRecognitionOptions, request_id: str) -> bytes:
    """StreamingRecognizeResponse with the text beyond the final results. Its stability is the share of that which will
    not change any more."""
    response = message_classes.StreamingRecognizeResponse()
    response.id.value = request_id
    result = response.results.add(
        stability=len(partial.locked_text) / max(1, len(partial.text)),
        channel_tag=CHANNEL_TAG,
        audio_processed=samples_to_s(partial.heard_samples),
    )
    result.alternatives.add(transcript=_text(partial.text, options))
    return bytes(response.SerializeToString())


def _text(text: str, options: RivaRecognitionOptions) -> str:
    """Transcript of a result: with a space behind, so that those of several can be joined, as Riva's clients do."""
    shown = transcript_text(text.strip(), plain=not options.punctuated)
    return f"{shown} " if shown else ""


def _fill(alternative: Any, text: str, segment: Segment, language: str, options: RivaRecognitionOptions) -> None:
    alternative.transcript, alternative.confidence = text, segment_confidence(segment)
    if language:
        alternative.language_code.append(language)
    _fill_words(alternative, segment.words, segment.speaker, options)


def _fill_words(alternative: Any, words: Sequence[Word], speaker: str, options: RivaRecognitionOptions) -> None:
    if not options.words:
        return
    for word in words:
        text = word.text if options.punctuated else plain_text(word.text)
        if not text:
            continue
        number = speaker_number(word.speaker or speaker)
        alternative.words.add(
            word=text,
            start_time=samples_to_ms(word.start_samples),
            end_time=samples_to_ms(word.end_samples),
            confidence=word.confidence,
            speaker_tag=0 if number is None else number + 1,
        )


# --- models -----------------------------------------------------------------------------------------------


def parse_config_request(data: bytes) -> str | None:
    """Name of the model whose config is requested; None: all. Raises MalformedRequest."""
    name = parse_message(message_classes.RecognitionConfigRequest, data).model_name
    return str(name) or None


def encode_models(cards: Iterable[AsrCard]) -> bytes:
    """RivaSpeechRecognitionConfigResponse: each model twice, for recordings and for live audio, as Riva's are."""
    response = message_classes.RecognitionConfigResponse()
    for card in cards:
        for kind in ("offline", "online"):
            parameters = response.model_config.add(model_name=card.name).parameters
            parameters["type"] = kind
            parameters["streaming"] = str(kind == "online")
            parameters["language_code"] = ",".join(card.languages)
            parameters["sample_rate"] = "16000"
    return bytes(response.SerializeToString())
