"""Riva's messages: ours are its client's on the wire, and what is not supported is refused by name."""

from __future__ import annotations

import importlib

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from asr_serve.errors import MalformedRequest, MissingOption, OptionError, UnsupportedOption
from asr_serve.models.registry import asr_card
from asr_serve.pipelines.live.events import LivePartial, LiveSegmentDone
from asr_serve.protocols.ignored_fields import MAX_REPORTED, IgnoredFields, collect_ignored_fields
from asr_serve.protocols.recognition_fields import MAX_HOTWORDS
from asr_serve.protocols.riva import message_classes, recognition, synthesis
from asr_serve.protocols.riva.methods import DESCRIPTORS, PATHS, decode_status, encode_status
from asr_serve.types import Alternative, Segment, Transcript, Word

MAX_BEAM = 8


@pytest.mark.parametrize("part", ["riva_common", "riva_audio", "riva_asr", "riva_tts"])
def test_every_field_of_the_client_is_ours_too(part):
    """Names, numbers, types and repetition; a field that an older client does not have yet is ours alone."""
    pytest.importorskip("riva.client", reason="no client of Riva here: pip install nvidia-riva-client")
    theirs = importlib.import_module(f"riva.client.proto.{part}_pb2").DESCRIPTOR
    for name, enum in theirs.enum_types_by_name.items():
        ours = message_classes.POOL.FindEnumTypeByName(f"{theirs.package}.{name}")
        assert {value.name: value.number for value in ours.values} == {
            value.name: value.number for value in enum.values
        }
    for name, message in theirs.message_types_by_name.items():
        compare(message_classes.POOL.FindMessageTypeByName(f"{theirs.package}.{name}"), message)


def compare(ours, theirs):
    for field in theirs.fields:
        own = ours.fields_by_name[field.name]
        assert (own.number, own.type, own.is_repeated) == (field.number, field.type, field.is_repeated), field.full_name
        assert (own.containing_oneof is None) == (field.containing_oneof is None), field.full_name
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            compare(own.message_type, field.message_type)
    for inner in theirs.nested_types:
        compare(ours.nested_types_by_name[inner.name], inner)


def test_the_methods_are_those_of_the_services():
    services = ("asr.RivaSpeechRecognition", "tts.RivaSpeechSynthesis")
    found = [message_classes.POOL.FindServiceByName(f"nvidia.riva.{name}") for name in services]
    assert sorted(f"/{service.full_name}/{method.name}" for service in found for method in service.methods) == sorted(
        PATHS
    )


def test_the_descriptors_are_those_of_the_proto_files(tmp_path):
    pytest.importorskip("grpc_tools", reason="no grpc_tools here: pip install grpcio-tools")
    from asr_serve.protocols.riva.build_descriptors import build

    build(tmp_path / "made")
    made, committed = (FileDescriptorSet.FromString(path.read_bytes()) for path in (tmp_path / "made", DESCRIPTORS))
    assert made == committed


def config(**fields):
    request = message_classes.RecognizeRequest(audio=b"RIFF0000")
    request.config.SetInParent()
    for name, value in fields.items():
        if isinstance(value, (bool, int, float, str)):
            setattr(request.config, name, value)
        else:
            value(request.config)
    return request


def parse(**fields):
    return recognition.parse_recognize(config(**fields).SerializeToString(), MAX_BEAM).options


def context(*phrases, boost=0.0):
    return lambda sent: sent.speech_contexts.add(phrases=phrases, boost=boost)


def speakers(most):
    def fill(sent):
        sent.diarization_config.enable_speaker_diarization = True
        sent.diarization_config.max_speaker_count = most

    return fill


def endpointing(**fields):
    def fill(sent):
        for name, value in fields.items():
            setattr(sent.endpointing_config, name, value)

    return fill


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"profanity_filter": True}, UnsupportedOption, "profanity_filter"),
        (
            {"enable_separate_recognition_per_channel": True},
            UnsupportedOption,
            "enable_separate_recognition_per_channel",
        ),
        ({"x": lambda sent: sent.custom_configuration.update(a="b")}, UnsupportedOption, "custom_configuration"),
        ({"x": endpointing(start_history=100)}, UnsupportedOption, "start_history"),
        ({"x": endpointing(start_threshold=0.5)}, UnsupportedOption, "start_threshold"),
        ({"x": endpointing(stop_threshold=0.5)}, UnsupportedOption, "stop_threshold"),
        ({"x": endpointing(stop_history_eou=300)}, UnsupportedOption, "stop_history_eou"),
        ({"x": endpointing(stop_threshold_eou=0.5)}, UnsupportedOption, "stop_threshold_eou"),
        ({"x": endpointing(stop_history=500)}, UnsupportedOption, "stop_history"),
        ({"x": endpointing(stop_history=-1)}, OptionError, "stop_history"),
        ({"encoding": 7}, OptionError, "encoding"),
        ({"sample_rate_hertz": 4_000}, OptionError, "sample_rate_hertz"),
        ({"sample_rate_hertz": -1}, OptionError, "sample_rate_hertz"),
        ({"audio_channel_count": 99}, OptionError, "audio_channel_count"),
        ({"max_alternatives": -1}, OptionError, "max_alternatives"),
        ({"max_alternatives": 9}, OptionError, "max_alternatives"),
        ({"x": context("Ada", boost=-4)}, OptionError, "boost"),
        ({"x": context("Ada", boost=101)}, OptionError, "boost"),
        ({"x": context("Ada", boost=float("nan"))}, OptionError, "boost"),
        (
            {"x": lambda sent: setattr(sent.diarization_config, "max_speaker_count", 2)},
            OptionError,
            "max_speaker_count",
        ),
        ({"x": speakers(33)}, OptionError, "max_speaker_count"),
        ({"x": speakers(-1)}, OptionError, "max_speaker_count"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields, error, param):
    with pytest.raises(error) as refused:
        parse(**fields)
    assert refused.value.param == param
    assert param in str(refused.value)


def test_fields_become_options():
    card = asr_card("moonshine-tiny-en")
    plain = parse(language_code="en-US")
    assert (plain.language, plain.encoding, plain.n_best, plain.punctuated) == ("en", None, 1, False)
    assert plain.transcribe_options(card).itn is not False
    assert parse(verbatim_transcripts=True).transcribe_options(card).itn is False
    assert parse(language_code="multi").detects_language
    assert parse(x=context("Ada", "Charles Babbage", boost=20)).hotwords == ("Ada:2", "Charles Babbage:2")
    assert parse(x=context("ratio 3:1")).hotwords == ("ratio 3:1:1",)
    speakers = parse(x=lambda sent: setattr(sent.diarization_config, "enable_speaker_diarization", True))
    assert speakers.transcribe_options(card).speakers
    assert speakers.words
    several = parse(max_alternatives=3).transcribe_options(card)
    assert (several.n_best, several.beam) == (3, 3)


def test_live_options():
    sent = message_classes.StreamingRecognizeRequest()
    sent.streaming_config.interim_results = True
    sent.streaming_config.config.endpointing_config.stop_history = 100
    options = recognition.parse_streaming(sent.SerializeToString()).options
    assert options.interim_results
    listen = options.listen_options(asr_card("moonshine-tiny-en"))
    assert listen.silence_schedule.rows == ((float("inf"), recognition.MIN_STOP_HISTORY_MS),)


@pytest.mark.parametrize(("name", "value"), [("max_alternatives", 2), ("encoding", 2), ("audio_channel_count", 2)])
def test_what_live_audio_cannot_have_is_refused_by_name(name, value):
    sent = message_classes.StreamingRecognizeRequest()
    setattr(sent.streaming_config.config, name, value)
    with pytest.raises(UnsupportedOption) as refused:
        recognition.parse_streaming(sent.SerializeToString())
    assert refused.value.param == name


def test_a_configuration_of_the_session_is_refused_by_name():
    for name in ("streaming_config", "audio_content"):
        sent = message_classes.StreamingRecognizeRequest()
        if name == "audio_content":
            sent.audio_content = b"ab"
        else:
            sent.streaming_config.interim_results = True
        sent.runtime_config["keepalive"] = "1"
        with pytest.raises(UnsupportedOption, match="keepalive") as refused:
            recognition.parse_streaming(sent.SerializeToString())
        assert refused.value.param == "runtime_config"


def test_a_message_of_nothing_is_refused():
    with pytest.raises(MissingOption):
        recognition.parse_streaming(b"")
    with pytest.raises(MissingOption) as refused:
        recognition.parse_recognize(b"", MAX_BEAM)
    assert refused.value.param == "config"
    sent = config()
    sent.audio = b""
    with pytest.raises(MissingOption) as refused:
        recognition.parse_recognize(sent.SerializeToString(), MAX_BEAM)
    assert refused.value.param == "audio"


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\xff\xff\xff\xff\x7f", b"GET / HTTP/1.1\r\n\r\n"])
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(MalformedRequest):
        recognition.parse_recognize(data, MAX_BEAM)


def test_a_message_is_bounded_without_its_audio():
    sent = config(x=context("Ada" * (2 << 20)))
    with pytest.raises(MalformedRequest, match="without its audio") as refused:
        recognition.parse_recognize(sent.SerializeToString(), MAX_BEAM)
    assert f"{sent.config.ByteSize()} of them in config" in str(refused.value)
    assert f"up to {message_classes.MAX_OPTIONS_BYTES} bytes" in str(refused.value)
    sent = config()
    sent.audio = b"RIFF" + bytes(message_classes.MAX_OPTIONS_BYTES)
    assert (
        len(recognition.parse_recognize(sent.SerializeToString(), MAX_BEAM).audio) > message_classes.MAX_OPTIONS_BYTES
    )


def test_a_live_message_has_a_lower_bound():
    sent = message_classes.StreamingRecognizeRequest()
    sent.streaming_config.config.speech_contexts.add(phrases=["a" * message_classes.MAX_LIVE_OPTIONS_BYTES])
    with pytest.raises(MalformedRequest, match="of them in streaming_config") as refused:
        recognition.parse_streaming(sent.SerializeToString())
    assert f"up to {message_classes.MAX_LIVE_OPTIONS_BYTES} bytes without its audio" in str(refused.value)
    sent = message_classes.StreamingRecognizeRequest(audio_content=bytes(1 << 20))
    assert len(recognition.parse_streaming(sent.SerializeToString()).audio) == 1 << 20


class NeverBuilt:
    """A class of messages that is not made from a message which is too large."""

    DESCRIPTOR = message_classes.RecognizeRequest.DESCRIPTOR

    @staticmethod
    def FromString(data):
        raise AssertionError(f"built of {len(data)} bytes")


@pytest.mark.parametrize(
    ("data", "came"),
    [
        (b"\x0a\x00" * (1 << 20), "more than 256 fields came"),  # an empty config, again and again
        (b"\x12\x00" * (1 << 20), "more than 256 fields came"),  # so with audio
        (b"\x0a\x80\x80\x40" + b"\x32\x00" * (1 << 19), "1048576 of them in config"),  # empty speech_contexts
        (b"\x92\x03\x80\x80\x40" + bytes(1 << 20), "1048576 of them in field 50"),
        (b"\x0a\xff\xff\xff\x7f" + bytes(1 << 20), "are no RecognizeRequest"),  # longer than what came
        (b"\x0b" + bytes(1 << 20), "are no RecognizeRequest"),  # a group
        (b"\xff" * (1 << 20), "are no RecognizeRequest"),
    ],
    ids=["configs", "audio", "contexts", "unknown", "cut", "group", "number"],
)
def test_nothing_is_built_of_a_message_that_is_too_large(data, came):
    with pytest.raises(MalformedRequest, match=came):
        message_classes.parse_message(NeverBuilt, data, "audio")


def test_fields_of_all_kinds_are_counted():
    sent = config()
    sent.audio = b"RIFF" + bytes(message_classes.MAX_OPTIONS_BYTES)
    others = b"\x90\x03\x80\x01" + b"\x99\x03" + bytes(8) + b"\xa5\x03" + bytes(4)  # 50, 51 and 52
    ignored = IgnoredFields()
    with collect_ignored_fields(ignored):
        parsed = recognition.parse_recognize(sent.SerializeToString() + others, MAX_BEAM)
    assert parsed.audio == sent.audio
    assert str(ignored) == "RecognizeRequest.50, RecognizeRequest.51, RecognizeRequest.52"


def test_speech_contexts_are_bounded():
    many = [context() for _ in range(message_classes.MAX_LIST_MESSAGES)]
    fields = {f"x{number}": each for number, each in enumerate(many)}
    assert parse(**fields).hotwords == ()
    with pytest.raises(OptionError, match=r"1001 speech_contexts\. up to 1000") as refused:
        parse(**fields, another=context("Ada"))
    assert refused.value.param == "speech_contexts"
    words = ["a"] * (MAX_HOTWORDS // 2)
    assert len(parse(x=context(*words), y=context(*words)).hotwords) == MAX_HOTWORDS
    with pytest.raises(OptionError, match=r"10001 phrases in speech_contexts\. up to 10000") as refused:
        parse(x=context(*words), y=context(*words, "b"))
    assert refused.value.param == "speech_contexts"


def test_unknown_fields_are_looked_at_up_to_a_bound():
    tags = [number << 3 for number in range(200, 1_200)]
    others = b"".join(bytes([tag & 0x7F | 0x80, tag >> 7, 0]) for tag in tags)
    ignored = IgnoredFields()
    with collect_ignored_fields(ignored):
        recognition.parse_recognize(config().SerializeToString() + others, MAX_BEAM)
    assert str(ignored).endswith(f", {message_classes.MAX_UNKNOWN_FIELDS - MAX_REPORTED} more")
    assert str(ignored).count("RecognizeRequest.") == MAX_REPORTED


def test_a_field_that_nobody_knows_is_told_or_refused():
    unknown = b"\xf2\x03\x01a"  # field 62, text
    sent = config().SerializeToString() + b"\x0a" + bytes([len(unknown)]) + unknown  # in config, which is merged
    ignored = IgnoredFields()
    with collect_ignored_fields(ignored):
        recognition.parse_recognize(sent, MAX_BEAM)
    assert str(ignored) == "RecognitionConfig.62"
    with collect_ignored_fields(IgnoredFields(strict=True)), pytest.raises(OptionError) as refused:
        recognition.parse_recognize(sent, MAX_BEAM)
    assert refused.value.param == "RecognitionConfig.62"


@pytest.mark.parametrize(
    ("fields", "first", "encoding"),
    [
        ({}, b"RIFF", None),
        ({"encoding": 1, "sample_rate_hertz": 16_000}, b"RIFF", None),
        ({"encoding": 1, "sample_rate_hertz": 16_000}, bytes(4), "s16le"),
        ({"encoding": 3, "sample_rate_hertz": 8_000}, bytes(4), "mulaw"),
        ({"encoding": 20, "sample_rate_hertz": 8_000}, bytes(4), "alaw"),
        ({"encoding": 2}, b"fLaC", None),
        ({"encoding": 4}, b"OggS", None),
        ({}, b"OggS", None),
    ],
)
def test_the_first_bytes_tell_a_header_from_samples(fields, first, encoding):
    assert parse(**fields).raw_encoding(first) == encoding


@pytest.mark.parametrize(
    ("fields", "param"),
    [({}, "encoding"), ({"encoding": 1}, "sample_rate_hertz"), ({"encoding": 3}, "sample_rate_hertz")],
)
def test_samples_want_an_encoding_and_a_rate(fields, param):
    with pytest.raises(MissingOption) as refused:
        parse(**fields).raw_encoding(bytes(4))
    assert refused.value.param == param


# --- answers ----------------------------------------------------------------------------------------------

WORDS = (Word("Ever", 1_600, 3_200, 0.5, "SPEAKER_01"), Word("tried,", 3_200, 4_808, 1.0))
SEGMENT = Segment(1_600, 16_000, "Ever tried,", words=WORDS, speaker="SPEAKER_00")


def test_a_transcript_has_a_result_for_each_segment():
    segments = (
        SEGMENT,
        Segment(16_000, 32_000, "..."),
        Segment(
            32_000,
            48_000,
            "ever failed.",
            alternatives=(Alternative("ever failed.", -1.0), Alternative("ever fail.", -2.0)),
        ),
    )
    transcript = Transcript("a", "", "en", 48_000, segments)
    options = parse(enable_word_time_offsets=True, enable_automatic_punctuation=False)
    found = message_classes.RecognizeResponse.FromString(recognition.encode_recognize(transcript, options, "r1"))
    assert found.id.value == "r1"
    assert [[each.transcript for each in result.alternatives] for result in found.results] == [
        ["ever tried "],
        ["ever failed ", "ever fail "],
    ]
    first = found.results[0].alternatives[0]
    assert [(word.word, word.start_time, word.end_time, word.speaker_tag) for word in first.words] == [
        ("ever", 100, 200, 2),
        ("tried", 200, 301, 1),
    ]
    assert first.confidence == pytest.approx(0.75)
    assert list(first.language_code) == ["en"]
    assert [result.audio_processed for result in found.results] == [1.0, 3.0]
    assert {result.channel_tag for result in found.results} == {1}


def test_punctuation_and_words_are_as_requested():
    transcript = Transcript("a", "", "en", 48_000, (SEGMENT,))
    options = parse(enable_automatic_punctuation=True)
    found = message_classes.RecognizeResponse.FromString(recognition.encode_recognize(transcript, options, ""))
    assert found.results[0].alternatives[0].transcript == "Ever tried, "
    assert not found.results[0].alternatives[0].words


def test_live_results():
    options = parse(enable_automatic_punctuation=True, enable_word_time_offsets=True)
    decode = message_classes.StreamingRecognizeResponse.FromString
    final = decode(recognition.encode_final(LiveSegmentDone(SEGMENT, 24_000), options, "r1")).results[0]
    assert (final.is_final, final.stability, final.audio_processed) == (True, 1.0, 1.5)
    assert final.alternatives[0].transcript == "Ever tried, "
    assert len(final.alternatives[0].words) == 2
    assert recognition.encode_final(LiveSegmentDone(Segment(0, 1, "..."), 1), parse(), "") is None
    partial = LivePartial(0, 8_000, "Ever", " tri")
    interim = decode(recognition.encode_interim(partial, options, "r1")).results[0]
    assert (interim.is_final, interim.stability, interim.audio_processed) == (False, 0.5, 0.5)
    assert interim.alternatives[0].transcript == "Ever tri "


# --- synthesis --------------------------------------------------------------------------------------------


def speech(**fields):
    sent = message_classes.SynthesizeSpeechRequest(**{"text": "Hello."} | fields)
    return synthesis.parse_synthesize(sent.SerializeToString(), 100)


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"zero_shot_data": {"quality": 20}}, UnsupportedOption, "zero_shot_data"),
        ({"custom_configuration": {"exaggeration_factor": "1.5"}}, UnsupportedOption, "custom_configuration"),
        ({"encoding": 9}, OptionError, "encoding"),
        ({"sample_rate_hz": 4_000}, OptionError, "sample_rate_hz"),
        ({"sample_rate_hz": 96_000}, OptionError, "sample_rate_hz"),
        ({"text": " "}, MissingOption, "text"),
        ({"text": "x" * 101}, OptionError, "text"),
        ({"custom_dictionary": "Ada"}, OptionError, "custom_dictionary"),
        ({"custom_dictionary": "Ada  "}, OptionError, "custom_dictionary"),
        ({"custom_dictionary": "a" * 101 + "  b"}, OptionError, "custom_dictionary"),
    ],
)
def test_speech_that_is_not_supported_is_refused_by_name(fields, error, param):
    with pytest.raises(error) as refused:
        speech(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "largest"),
    [({"text": "x" * (300 << 10)}, "text"), ({"zero_shot_data": {"audio_prompt": bytes(300 << 10)}}, "zero_shot_data")],
)
def test_a_request_for_speech_is_bounded(fields, largest):
    with pytest.raises(MalformedRequest, match=f"of them in {largest}") as refused:
        speech(**fields)
    assert f"up to {message_classes.MAX_OPTIONS_BYTES + 400} bytes" in str(refused.value)


def test_the_longest_text_is_taken_in_every_script():
    text = "𝄞" * 100_000
    sent = message_classes.SynthesizeSpeechRequest(text=text).SerializeToString()
    assert synthesis.parse_synthesize(sent, len(text)).text == text


def test_a_request_for_speech():
    sent = speech(
        encoding=4, sample_rate_hz=44_100, voice_name="hibari.heart", custom_dictionary="Ada  ˈeɪdə, Ben  bˈɛn"
    )
    assert (sent.format, sent.rate_hz, sent.voice) == ("opus", 44_100, "hibari.heart")
    assert sent.lexicon == {"Ada": "ˈeɪdə", "Ben": "bˈɛn"}
    assert not sent.speech(None, None).style.ssml
    assert speech(text="<speak>Hello.</speak>").speech(None, None).style.ssml


def test_errors_have_a_status_of_grpc():
    status = decode_status(encode_status(429, "full", 200))
    assert (status.code, status.message, status.retry_after_ms) == ("RESOURCE_EXHAUSTED", "full", 200)
    assert decode_status(encode_status(500, "")).code == "INTERNAL"
