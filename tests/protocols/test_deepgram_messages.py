"""Deepgram's protocols without a server: queries, commands, and the messages that live events become."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asr_serve.errors import AsrServeError, OptionError, UnknownCommand, UnsupportedOption
from asr_serve.pipelines.live.events import FlushDone, LivePartial, LiveSegmentDone, TurnEvent
from asr_serve.protocols.deepgram.listen_query import MIN_ENDPOINTING_MS, NO_ENDPOINTING_MS, parse_listen_query
from asr_serve.protocols.deepgram.live_messages import ListenResultsEncoder, parse_listen_command
from asr_serve.protocols.deepgram.speak import (
    SpeakClose,
    SpeakFlush,
    SpeakText,
    parse_speak_body,
    parse_speak_command,
    parse_speak_query,
)
from asr_serve.protocols.ignored_fields import IgnoredFields, collect_ignored_fields
from asr_serve.types import Segment, Word

S = 16_000


def test_a_query_of_deepgrams_own_documentation():
    query = parse_listen_query(
        "model=nova-3&language=en-US&smart_format=true&diarize=true&utterances=true&keyterm=Ada&keyterm=Charles%20Babbage"
        "&keywords=Beckett:2&punctuate=true&filler_words=false&mip_opt_out=true&tag=a&tag=b",
        live=False,
    )
    assert (query.model, query.language) == ("nova-3", "en")
    assert (query.smart_format, query.diarize, query.utterances, query.paragraphs) == (True, True, True, True)
    assert query.hotwords == ("Ada", "Charles Babbage", "Beckett:2")
    assert query.tags == ("a", "b")
    assert query.ignored == ("mip_opt_out",)


@pytest.mark.parametrize(
    ("sent", "pause_ms"),
    [
        ("", None),
        ("endpointing=true", None),
        ("endpointing=false", NO_ENDPOINTING_MS),
        ("endpointing=10", MIN_ENDPOINTING_MS),
        ("endpointing=800", 800),
    ],
)
def test_endpointing(sent, pause_ms):
    assert parse_listen_query(sent, live=True).endpointing_ms == pause_ms


def test_detect_language_beats_a_language_and_multi_is_none():
    assert parse_listen_query("language=fr", live=False).language == "fr"
    assert parse_listen_query("language=multi", live=True).language is None
    detecting = parse_listen_query("language=fr&detect_language=true", live=False)
    assert (detecting.language, detecting.detect_language) == (None, True)
    assert parse_listen_query("detect_language=en&detect_language=de", live=False).detect_language


REFUSED = {
    "summarize=v2": "summarize",
    "sentiment=true": "sentiment",
    "topics=true": "topics",
    "intents=true": "intents",
    "detect_entities=true": "detect_entities",
    "redact=pci": "redact",
    "redact=pci&redact=ssn": "redact",
    "profanity_filter=true": "profanity_filter",
    "search=Ada": "search",
    "replace=a:b": "replace",
    "callback=http://127.0.0.1/": "callback",
    "multichannel=true": "multichannel",
    "channels=2": "channels",
    "keywords=Ada:-2": "keywords",
    "sample_rate=4000": "sample_rate",
    "encoding=speex": "encoding",
    "utterance_end_ms=5": "utterance_end_ms",
    "endpointing=soon": "endpointing",
    "diarize=perhaps": "diarize",
    "model=a&model=b": "model",
    "langauge=en": "langauge",
}


@pytest.mark.parametrize("query", REFUSED)
def test_what_is_refused_is_named(query):
    with pytest.raises(OptionError) as caught, collect_ignored_fields(IgnoredFields()):
        parse_listen_query(query, live=True)
    assert caught.value.param == REFUSED[query]


def test_features_that_are_off_are_no_matter_and_unknown_fields_are_ignored():
    ignored = IgnoredFields()
    with collect_ignored_fields(ignored):
        query = parse_listen_query("summarize=false&profanity_filter=false&multichannel=false&xyzzy=1", live=True)
    assert query.ignored == ()
    assert str(ignored) == "xyzzy"


@pytest.mark.parametrize("kind", ["KeepAlive", "Finalize", "CloseStream", "Configure"])
def test_commands(kind):
    assert parse_listen_command(json.dumps({"type": kind})) == kind


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"type": "Finalise"}', "[" * 100_000, "x" * 100_000, "START"])
def test_texts_that_are_no_command(text):
    with pytest.raises(AsrServeError) as caught:
        parse_listen_command(text)
    assert caught.value.code in ("unknown_command", "malformed_request")


# --- results ----------------------------------------------------------------------------------------------


def segment(text: str, start_s: float, end_s: float) -> LiveSegmentDone:
    start, end = int(start_s * S), int(end_s * S)
    words, step = text.split(), (end - start) // len(text.split())
    timed = [Word(word, start + at * step, start + (at + 1) * step, 0.5) for at, word in enumerate(words)]
    return LiveSegmentDone(Segment(start, end, text, words=tuple(timed)), end + S)


def turn(state: Any, at_s: float) -> TurnEvent:
    return TurnEvent(state, int(at_s * S))


def encoder(query: str) -> ListenResultsEncoder:
    return ListenResultsEncoder(parse_listen_query(query, live=True), "some-model", "req_1")


def said(messages: list[str]) -> list[tuple[Any, ...]]:
    found = map(json.loads, messages)
    return [
        (
            each["channel"]["alternatives"][0]["transcript"],
            *(name for name in ("is_final", "speech_final", "from_finalize") if each[name]),
        )
        if each["type"] == "Results"
        else (each["type"], each.get("timestamp", each.get("last_word_end")))
        for each in found
    ]


def test_a_pause_makes_a_result_speech_final():
    results = encoder("vad_events=true")
    assert said(results.on_events([turn("started", 0.5)])) == [("SpeechStarted", 0.5)]
    events = [segment("Ever tried.", 0.5, 1.5), turn("stopped", 1.5), turn("ended", 1.5)]
    assert said(results.on_events(events)) == [("Ever tried.", "is_final", "speech_final")]
    [message] = encoder("").on_events([segment("Ever tried.", 0.5, 1.5)])
    result = json.loads(message)
    assert (result["start"], result["duration"], result["speech_final"]) == (0.5, 1.0, False)
    [alternative] = result["channel"]["alternatives"]
    assert alternative["words"] == [
        {"word": "ever", "start": 0.5, "end": 1.0, "confidence": 0.5, "punctuated_word": "Ever"},
        {"word": "tried", "start": 1.0, "end": 1.5, "confidence": 0.5, "punctuated_word": "tried."},
    ]
    assert result["metadata"]["model_info"]["name"] == "some-model"
    assert result["channel_index"] == [0, 1]


def test_an_end_of_speech_behind_its_text_comes_as_an_empty_result():
    results = encoder("")
    assert said(results.on_events([turn("started", 0), segment("Ever tried.", 0, 1)])) == [("Ever tried.", "is_final")]
    assert said(results.on_events([turn("ended", 1)])) == [("", "is_final", "speech_final")]
    noise = results.on_events([turn("started", 2), turn("ended", 2.2)])
    assert said(noise) == [("", "is_final", "speech_final")]  # LiveKit takes it for speech until then


def test_a_finalized_result_says_so():
    results = encoder("")
    cut = [segment("Ever tried.", 0, 1), turn("ended", 1), FlushDone("", S)]
    assert said(results.on_events(cut)) == [("Ever tried.", "is_final", "speech_final", "from_finalize")]
    assert said(results.on_events([FlushDone("", 2 * S)])) == [("", "is_final", "from_finalize")]


def test_several_segments_at_once():
    both = [segment("Ever tried.", 0, 1), segment("Ever failed.", 1, 2), turn("ended", 2)]
    assert said(encoder("").on_events(both)) == [
        ("Ever tried.", "is_final"),
        ("Ever failed.", "is_final", "speech_final"),
    ]


def test_utterance_end_comes_once_after_enough_silence_and_not_while_somebody_speaks():
    results = encoder("utterance_end_ms=1000")
    results.on_events([turn("started", 0), segment("Ever tried.", 0, 1), turn("ended", 1)])
    assert results.on_silence(int(1.9 * S)) is None
    results.on_events([turn("started", 1.95)])
    assert results.on_silence(3 * S) is None
    results.on_events([turn("ended", 2.1)])  # a noise
    message = results.on_silence(3 * S)
    assert message is not None
    assert json.loads(message) == {"type": "UtteranceEnd", "channel": [0, 1], "last_word_end": 1.0}
    assert results.on_silence(9 * S) is None
    assert encoder("").on_silence(9 * S) is None


def test_text_that_is_final_late_does_not_end_the_utterance_after_it():
    """Under load the next utterance starts before the text of the last is final."""
    results = encoder("utterance_end_ms=1000")
    results.on_events([turn("started", 0)])
    results.on_events([turn("started", 1.5)])
    results.on_events([segment("Ever tried.", 0, 1), turn("ended", 1)])
    assert results.busy
    assert results.on_silence(3 * S) is None
    results.on_events([segment("Ever failed.", 1.5, 3), turn("ended", 3)])
    assert not results.busy
    assert results.on_silence(4 * S) is not None


@pytest.mark.parametrize("at_once", [False, True])
def test_the_end_of_an_utterance_is_told_though_the_next_one_has_started(at_once):
    """Under load its text is final after that, or nothing is asked between."""
    results = encoder("utterance_end_ms=1000&vad_events=true")
    events = [
        turn("started", 0),
        turn("started", 2.5),
        segment("Ever tried.", 0, 1),
        turn("ended", 1),
        segment("Ever failed.", 2.5, 4),
        turn("ended", 4),
    ]
    batches = [events] if at_once else [[event] for event in events]
    kinds = [json.loads(message) for batch in batches for message in results.on_events(batch)]
    told = [(each["type"], each.get("last_word_end")) for each in kinds if each["type"] != "SpeechStarted"]
    assert [kind for kind, _ in told].count("UtteranceEnd") == 1
    texts = [each["channel"]["alternatives"][0]["transcript"] for each in kinds if each["type"] == "Results"]
    assert [text for text in texts if text] == ["Ever tried.", "Ever failed."]
    assert told.index(("UtteranceEnd", 1.0)) < max(index for index, (kind, _) in enumerate(told) if kind == "Results")
    assert results.on_silence(5 * S) is not None


def test_the_end_of_an_utterance_is_told_before_the_start_that_comes_first():
    results = encoder("utterance_end_ms=1000&vad_events=true")
    results.on_events([turn("started", 0), segment("Ever tried.", 0, 1), turn("ended", 1)])
    found = [json.loads(message)["type"] for message in results.on_events([turn("started", 2.5)])]
    assert found == ["UtteranceEnd", "SpeechStarted"]


def test_plain_text_and_interim_results():
    results = encoder("punctuate=false")
    assert said(results.on_events([segment("Ever tried, it's - no matter!", 0, 1)])) == [
        ("ever tried it's no matter", "is_final")
    ]
    interim = json.loads(results.interim(LivePartial(2 * S, 3 * S, "Ever ", "failed,")))
    assert (interim["start"], interim["duration"], interim["is_final"]) == (2.0, 1.0, False)
    assert interim["channel"]["alternatives"] == [{"transcript": "ever failed", "confidence": 0.0, "words": []}]


# --- speech -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "live", "form", "rate_hz"),
    [
        ("", False, "mp3", None),
        ("encoding=linear16", False, "wav", 24_000),
        ("encoding=linear16&container=none&sample_rate=16000", False, "pcm", 16_000),
        ("encoding=mulaw", False, "mulaw-wav", 8_000),
        ("encoding=alaw&container=wav", False, "alaw-wav", 8_000),
        ("encoding=mulaw&container=none", False, "mulaw", 8_000),
        ("encoding=opus&container=ogg", False, "opus", None),
        ("", True, "pcm", 24_000),
        ("encoding=alaw", True, "alaw", 8_000),
    ],
)
def test_formats_of_speech(sent, live, form, rate_hz):
    query = parse_speak_query(sent, live=live)
    assert (query.format, query.rate_hz) == (form, rate_hz)


@pytest.mark.parametrize(
    ("sent", "live", "param"),
    [
        ("encoding=mp3", True, "encoding"),
        ("encoding=mp3&container=wav", False, "container"),
        ("speed=9", False, "speed"),
        ("sample_rate=1", False, "sample_rate"),
        ("callback=http://127.0.0.1", False, "callback"),
        ("modle=x", False, "modle"),
    ],
)
def test_queries_of_speech_that_are_refused(sent, live, param):
    with pytest.raises(OptionError) as caught, collect_ignored_fields(IgnoredFields()):
        parse_speak_query(sent, live=live)
    assert caught.value.param == param


def test_bodies_and_messages_of_speech():
    assert parse_speak_body(b'{"text": "Hello."}', "application/json", 10) == "Hello."
    assert parse_speak_body("Olé.".encode(), "text/plain; charset=utf-8", 10) == "Olé."
    for body, kind, code in (
        (b"{}", "application/json", "missing_option"),
        (b'{"text": 1}', "", "option_error"),
        (b"x", "", "malformed_request"),
        (b"[]", "", "malformed_request"),
        (b"\xff", "text/plain", "malformed_request"),
        (b'{"text": "longer than ten"}', "", "text_too_long"),
    ):
        with pytest.raises(AsrServeError) as caught:
            parse_speak_body(body, kind, 10)
        assert caught.value.code == code
    assert parse_speak_command('{"type": "Speak", "text": "Hi"}') == SpeakText("Hi")
    assert parse_speak_command('{"type": "Flush"}') == SpeakFlush()
    assert parse_speak_command('{"type": "Close"}') == SpeakClose()
    for text, kind in (('{"type": "speak"}', UnknownCommand), ('{"type": "Speak"}', OptionError)):
        with pytest.raises(kind):
            parse_speak_command(text)


def test_unsupported_is_an_error_of_its_own():
    with pytest.raises(UnsupportedOption, match="summarize='v2' is not supported"):
        parse_listen_query("summarize=v2", live=False)
