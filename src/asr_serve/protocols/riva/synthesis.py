"""Synthesis: SynthesizeSpeechRequest to a request for speech, audio and voices to messages.

Source  the messages of nvidia-riva-client 2.28 for Python, and what its scripts send
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from asr_serve.errors import MissingOption, OptionError, TextTooLong, UnsupportedOption
from asr_serve.protocols.form_fields import quote_for_message
from asr_serve.protocols.openai.speech import SpeechRequest, SpeechStyle, SpeechWord, check_lexicon
from asr_serve.protocols.riva import message_classes
from asr_serve.protocols.riva.message_classes import MAX_OPTIONS_BYTES, parse_message
from asr_serve.protocols.riva.recognition import refuse_configuration

FORMATS = {0: "pcm", 1: "pcm", 2: "flac", 3: "mulaw", 4: "opus", 20: "alaw"}
"""Number of an encoding -> our format; an unspecified one is LINEAR_PCM."""
MIN_RATE_HZ, MAX_RATE_HZ = 8_000, 48_000
MAX_CHARACTER_BYTES = 4
"""Bytes of a character in UTF-8."""


class RivaSpeechRequest(NamedTuple):
    """Request for the speech of a whole text."""

    text: str
    format: str
    rate_hz: int | None
    """None: the voice's own."""
    language: str | None
    voice: str | None
    """Name of a voice, of a model, or both with a dot between."""
    lexicon: dict[str, str]
    """Phonemes of words."""
    word_times: bool
    id: str

    def speech(self, model: str | None, voice: str | None) -> SpeechRequest:
        """The same for a model and a voice. Text in an element `speak` is SSML."""
        style = SpeechStyle(ssml=self.text.lstrip().startswith("<speak"), lexicon=self.lexicon)
        return SpeechRequest(self.text, model, voice, self.format, self.rate_hz, style)


class RivaVoices(msgspec.Struct, frozen=True):
    """Voices of a model."""

    model: str
    voices: Sequence[str]
    languages: Mapping[str, str]
    """Voice -> its language."""
    rate_hz: int


def parse_synthesize(data: bytes, most_characters: int) -> RivaSpeechRequest:
    """Raises MalformedRequest, OptionError, TextTooLong."""
    most_bytes = MAX_CHARACTER_BYTES * most_characters + MAX_OPTIONS_BYTES
    message = parse_message(message_classes.SynthesizeSpeechRequest, data, max_options_bytes=most_bytes)
    if message.HasField("zero_shot_data"):
        raise UnsupportedOption(
            "zero_shot_data is not supported: no voice here imitates a recording at once",
            "the voices that GetRivaSynthesisConfig lists, cloned ones among them",
            "leave it out, or clone the voice first, with POST /v1/audio/voices",
            param="zero_shot_data",
        )
    refuse_configuration("custom_configuration", message.custom_configuration)
    if message.encoding not in FORMATS:
        allowed = "LINEAR_PCM (1), FLAC (2), MULAW (3), OGGOPUS (4), ALAW (20)"
        raise OptionError(f"encoding={message.encoding}", f"one of: {allowed}", param="encoding")
    if not message.text.strip():
        raise MissingOption("no text came", "the text that is to be spoken", "set text", param="text")
    if len(message.text) > most_characters:
        raise TextTooLong(
            f"text has {len(message.text)} characters",
            f"up to {most_characters}",
            "send it in parts, or have max_characters raised",
            param="text",
        )
    rate_hz = message.sample_rate_hz
    if rate_hz and not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
        raise OptionError(
            f"sample_rate_hz={rate_hz}",
            f"{MIN_RATE_HZ} to {MAX_RATE_HZ}, or 0 for the voice's own",
            param="sample_rate_hz",
        )
    return RivaSpeechRequest(
        message.text,
        FORMATS[message.encoding],
        rate_hz or None,
        message.language_code or None,
        message.voice_name or None,
        _lexicon(message.custom_dictionary),
        message.enable_word_time_offsets,
        message.id.value,
    )


def _lexicon(dictionary: str) -> dict[str, str]:
    """Phonemes of words, of pairs `word  phonemes` with commas between. Raises OptionError."""
    lexicon = dict[str, str]()
    for pair in dictionary.split(",") if dictionary.strip() else ():
        word, spaces, phonemes = pair.strip().partition("  ")
        if not spaces:
            raise OptionError(
                f"custom_dictionary has {quote_for_message(pair)}",
                "pairs of a word and its phonemes, two spaces between both, commas between pairs",
                param="custom_dictionary",
            )
        lexicon[word] = phonemes.strip()
    check_lexicon(lexicon, "custom_dictionary")
    return lexicon


def encode_audio(audio: bytes, request_id: str, words: Iterable[SpeechWord] = (), start_s: float = 0.0) -> bytes:
    """SynthesizeSpeechResponse with audio, all of it or a part. `words`: those with times, from `start_s` on."""
    response = message_classes.SynthesizeSpeechResponse(audio=audio)
    response.id.value = request_id
    for word in words:
        start_ms, end_ms = (round(1_000 * (start_s + time_s)) for time_s in (word.start, word.end))
        response.meta.words.add(word=word.word, start_time=start_ms, end_time=end_ms)
    return bytes(response.SerializeToString())


def parse_config_request(data: bytes) -> str | None:
    """Name of the model whose voices are requested; None: all. Raises MalformedRequest."""
    name = parse_message(message_classes.SynthesisConfigRequest, data).model_name
    return str(name) or None


def encode_voices(models: Iterable[RivaVoices]) -> bytes:
    """RivaSynthesisConfigResponse: an entry for each model and language. A voice's name is that of the model, a dot and
    that of the subvoice."""
    response = message_classes.SynthesisConfigResponse()
    for model in models:
        for language in dict.fromkeys(model.languages[voice] for voice in model.voices):
            names = [voice for voice in model.voices if model.languages[voice] == language]
            parameters = response.model_config.add(model_name=model.model).parameters
            parameters["language_code"] = language
            parameters["voice_name"] = model.model
            parameters["subvoices"] = ",".join(f"{name}:{number}" for number, name in enumerate(names))
            parameters["sample_rate"] = str(model.rate_hz)
    return bytes(response.SerializeToString())
