"""Transcripts as OpenAI's and FunASR's clients read them: pure functions of transcripts that are made here."""

from __future__ import annotations

import json

import msgspec
import pytest
from openai.types.audio import (
    TranscriptionDiarized,
    TranscriptionTextDeltaEvent,
    TranscriptionTextDoneEvent,
    TranscriptionTextSegmentEvent,
    TranscriptionVerbose,
)

from asr_serve.pipelines.options import KnownSpeaker, TranscribeOptions
from asr_serve.protocols.funasr import asr as funasr
from asr_serve.protocols.openai.transcription_form import RESPONSE_FORMATS, TranscriptionRequest
from asr_serve.protocols.openai.transcription_response import TranscriptEventEncoder, render_transcription
from asr_serve.types import Alternative, Segment, SpeakerTurn, Transcript, Word

HELLO = Segment(
    8_000,
    24_000,
    "Hello, you!",
    words=(Word("Hello,", 8_000, 15_200, 0.98, "SPEAKER_00"), Word("you!", 16_000, 23_200, 0.75, "SPEAKER_00")),
    speaker="SPEAKER_00",
)
TWENTY = Segment(
    32_000,
    64_000,
    "About $20.",
    words=(
        Word("About", 32_000, 40_000, 0.9, "SPEAKER_01"),
        Word("$20.", 40_000, 64_000, 0.8, "SPEAKER_01", "twenty dollars."),
    ),
    speaker="SPEAKER_01",
    spoken="About twenty dollars.",
)
SAID = Transcript(
    *("audio", "Hello, you! About $20.", "en", 70_000, (HELLO, TWENTY), "m"),
    language_prob=0.75,
    turns=(SpeakerTurn("SPEAKER_00", 8_000, 24_000), SpeakerTurn("SPEAKER_01", 32_000, 64_000)),
)
RICH = TranscribeOptions(words=True, speakers=True, itn=True)
HELLO_WORDS = [
    {"word": "Hello,", "start": 0.5, "end": 0.95, "confidence": 0.98, "speaker": "SPK0"},
    {"word": "you!", "start": 1.0, "end": 1.45, "confidence": 0.75, "speaker": "SPK0"},
]
TWENTY_WORDS = [
    {"word": "About", "start": 2.0, "end": 2.5, "confidence": 0.9, "speaker": "SPK1"},
    {"word": "$20.", "start": 2.5, "end": 4.0, "confidence": 0.8, "speaker": "SPK1", "spoken": "twenty dollars."},
]


def made(transcript: Transcript = SAID, options: TranscribeOptions = RICH, **asked: object) -> dict:
    return json.loads(render_transcription(transcript, TranscriptionRequest(None, options, **asked), lambda _: ""))


def verbose(*granularities: str, options: TranscribeOptions = RICH, said: Transcript = SAID) -> dict:
    found = made(said, options, response_format="verbose_json", granularities=granularities)
    TranscriptionVerbose.model_validate(found)
    return found


# --- verbose_json -------------------------------------------------------------------------------------------


def test_words_of_all_and_of_each_segment():
    found = verbose("segment", "word")
    assert found["words"] == HELLO_WORDS + TWENTY_WORDS
    assert [each["words"] for each in found["segments"]] == [HELLO_WORDS, TWENTY_WORDS]
    assert [each["speaker"] for each in found["segments"]] == ["SPK0", "SPK1"]
    assert [each.get("spoken") for each in found["segments"]] == [None, "About twenty dollars."]
    assert (found["text"], found["language"], found["language_probability"]) == (SAID.text, "en", 0.75)


def test_funasr_reads_words_where_nobody_asked():
    found = verbose()
    assert "words" not in found
    assert [each["words"] for each in found["segments"]] == [HELLO_WORDS, TWENTY_WORDS]


def test_segments_alone():
    found = verbose("segment", options=TranscribeOptions())
    assert "words" not in found
    assert all("words" not in each for each in found["segments"])


def test_what_was_not_asked_for_is_not_there():
    plain = Transcript("audio", "Hello.", "en", 32_000, (Segment(0, 16_000, "Hello."),))
    found = verbose("segment", options=TranscribeOptions(), said=plain)
    assert not {"words", "language_probability"} & set(found)
    assert not {"speaker", "spoken", "words"} & set(found["segments"][0])


def test_a_segment_without_words_has_none():
    silent = Transcript("audio", "", "en", 32_000, ())
    found = verbose("word", said=silent)
    assert (found["words"], found["segments"], found["text"]) == ([], [], "")


def test_alternatives_have_words_where_segments_do():
    said = HELLO.words
    other = Word("ewe!", 16_000, 23_200, 0.2)
    alternatives = (Alternative("Hello, you!", -3.25001, said), Alternative("Hello, ewe!", -4.5, (said[0], other)))
    listed = msgspec.structs.replace(HELLO, alternatives=alternatives)
    transcript = msgspec.structs.replace(SAID, segments=(listed, TWENTY))
    first, second = verbose("segment", "word", said=transcript)["segments"]
    ewe = {"word": "ewe!", "start": 1.0, "end": 1.45, "confidence": 0.2}
    assert first["alternatives"] == [
        {"text": "Hello, you!", "score": -3.25, "words": HELLO_WORDS},
        {"text": "Hello, ewe!", "score": -4.5, "words": [HELLO_WORDS[0], ewe]},
    ]
    assert "alternatives" not in second
    first, _ = verbose("segment", said=transcript)["segments"]
    assert first["alternatives"] == [{"text": "Hello, you!", "score": -3.25}, {"text": "Hello, ewe!", "score": -4.5}]
    row = json.loads(render_transcription(transcript, TranscriptionRequest(None, RICH, "jsonl"), lambda _: ""))
    assert [each["text"] for each in row["segments"][0]["alternatives"]] == ["Hello, you!", "Hello, ewe!"]


# --- diarized_json ------------------------------------------------------------------------------------------


def test_diarized():
    found = made(response_format="diarized_json")
    checked = TranscriptionDiarized.model_validate(found)
    assert checked.usage.seconds == 5
    assert found == {
        "task": "transcribe",
        "duration": 4.375,
        "text": SAID.text,
        "segments": [
            {
                "type": "transcript.text.segment",
                "id": "seg_001",
                "start": 0.5,
                "end": 1.5,
                "text": "Hello, you!",
                "speaker": "A",
            },
            {
                "type": "transcript.text.segment",
                "id": "seg_002",
                "start": 2.0,
                "end": 4.0,
                "text": "About $20.",
                "speaker": "B",
            },
        ],
        "usage": {"type": "duration", "seconds": 5},
    }


def test_who_is_known_has_a_name():
    options = TranscribeOptions(speakers=True, known_speakers=(KnownSpeaker("A", b""), KnownSpeaker("agent", b"")))
    segments = [Segment(n, n + 1, "x", speaker=name) for n, name in enumerate(("agent", "SPEAKER_00", "A"))]
    found = made(Transcript("k", "x x x", "en", 3, tuple(segments)), options, response_format="diarized_json")
    assert [each["speaker"] for each in found["segments"]] == ["agent", "B", "A"]


# --- streams ------------------------------------------------------------------------------------------------


def events(form: str, options: TranscribeOptions = RICH) -> list[dict]:
    deltas = TranscriptEventEncoder(TranscriptionRequest(None, options, form, stream=True), lambda _: "")
    sent = deltas.encode_segment(HELLO) + deltas.encode_segment(TWENTY) + deltas.encode_done(SAID)
    return [json.loads(line.removeprefix(b"data: ")) for line in sent.split(b"\n\n") if line]


def test_a_diarized_stream():
    first, hello, second, twenty, done = events("diarized_json")
    for delta, segment in ((first, hello), (second, twenty)):
        assert TranscriptionTextDeltaEvent.model_validate(delta).segment_id == segment["id"]
        assert TranscriptionTextSegmentEvent.model_validate(segment).text == delta["delta"].strip()
    assert [hello["speaker"], twenty["speaker"]] == ["A", "B"]
    assert [hello, twenty] == made(response_format="diarized_json")["segments"]
    assert first["delta"] + second["delta"] == TranscriptionTextDoneEvent.model_validate(done).text == SAID.text


def test_a_verbose_stream():
    hello, twenty, done = events("verbose_json")
    assert (hello["words"], twenty["words"]) == (HELLO_WORDS, TWENTY_WORDS)
    assert (twenty["start"], twenty["end"], twenty["speaker"]) == (2.0, 4.0, "SPK1")
    assert twenty["spoken"] == "About twenty dollars."
    assert hello["delta"] + twenty["delta"] == done["text"]
    assert (done["language"], done.get("language_probability")) == (SAID.language, SAID.language_prob or None)


def test_a_verbose_stream_says_how_sure_the_language_is():
    heard = msgspec.structs.replace(SAID, language="de", language_prob=0.75)
    asked = TranscriptionRequest(None, RICH, "verbose_json", stream=True)
    done = json.loads(TranscriptEventEncoder(asked, lambda _: "").encode_done(heard).removeprefix(b"data: "))
    assert (done["language"], done["language_probability"]) == ("de", 0.75)


def test_a_stream_of_text_tells_nothing_else():
    assert [set(event) for event in events("json")] == [{"type", "delta"}] * 2 + [{"type", "text"}]


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [name for name in RESPONSE_FORMATS if name not in ("json", "diarized_json")])
def test_every_format_has_the_words(form):
    body = render_transcription(SAID, TranscriptionRequest(None, RICH, form), lambda _: "").decode()
    if form == "rttm":
        assert [line.split()[7] for line in body.splitlines()] == ["SPEAKER_00", "SPEAKER_01"]
    else:
        assert "$20." in body
    assert body.endswith("\n") or form == "verbose_json"


def test_text_and_voices_tell_who_speaks():
    assert render_transcription(SAID, TranscriptionRequest(None, RICH, "text"), lambda _: "").decode() == (
        "SPEAKER_00: Hello, you!\nSPEAKER_01: About $20.\n"
    )
    plain = TranscribeOptions()
    assert (
        render_transcription(SAID, TranscriptionRequest(None, plain, "text"), lambda _: "").decode() == f"{SAID.text}\n"
    )
    assert (
        "<v SPEAKER_01>About $20."
        in render_transcription(SAID, TranscriptionRequest(None, RICH, "vtt"), lambda _: "").decode()
    )
    lit = render_transcription(
        SAID, TranscriptionRequest(None, RICH, "vtt", granularities=("word",)), lambda _: ""
    ).decode()
    assert "<00:00:02.500>$20." in lit


# --- FunASR -------------------------------------------------------------------------------------------------


def asr(options: TranscribeOptions) -> dict:
    return json.loads(funasr.render_asr_answer(SAID, funasr.AsrRequest(None, options), 0.875))


def test_funasr_answer():
    found = asr(RICH)
    assert found == {
        "text": SAID.text,
        "segments": [
            {
                "text": "Hello, you!",
                "start": 0.5,
                "end": 1.5,
                "speaker": "SPK0",
                "words": [{"word": "Hello,", "start": 0.5, "end": 0.95}, {"word": "you!", "start": 1.0, "end": 1.45}],
            },
            {
                "text": "About $20.",
                "start": 2.0,
                "end": 4.0,
                "speaker": "SPK1",
                "words": [{"word": "About", "start": 2.0, "end": 2.5}, {"word": "$20.", "start": 2.5, "end": 4.0}],
            },
        ],
        "duration": 4.375,
        "processing_time": 0.875,
        "rtf": 0.2,
    }


def test_funasr_answer_without_words():
    assert all("words" not in each for each in asr(TranscribeOptions())["segments"])
