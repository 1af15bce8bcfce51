"""Riva's gRPC services with its own client, on the real server's second port."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import threading
import wave
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from children import Child
from running_server import MODEL, VOICE, WAIT_S, eventually

from asr_serve.audio.encode.companded_encoder import create_audio_encoder
from asr_serve.audio.reader import read_audio
from asr_serve.config import ServeConfig
from asr_serve.errors import ProgramMissing
from asr_serve.protocols.riva import recognition as recognition_messages
from asr_serve.protocols.riva import synthesis as synthesis_messages
from asr_serve.protocols.riva.methods import PATHS, RECOGNIZE, STREAMING_RECOGNIZE, SYNTHESIZE, SYNTHESIZE_ONLINE
from asr_serve.server.realtime.riva import packages

grpc = pytest.importorskip("grpc", reason="no gRPC here: pip install 'asr-serve[riva]'")
riva_client = pytest.importorskip("riva.client", reason="no client of Riva here: pip install nvidia-riva-client")
riva_asr = pytest.importorskip("riva.client.proto.riva_asr_pb2")
riva_tts = pytest.importorskip("riva.client.proto.riva_tts_pb2")

BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."
SPOKEN = "Ever tried. Ever failed."
RATE_HZ = 16_000
CHUNK_BYTES = 3_200
LINEAR_PCM, FLAC, MULAW, OGGOPUS, ALAW = 1, 2, 3, 4, 20
STREAMS = 12
LEAVING_CLIENTS = 8
LIKELY = "tride"
"""Word that sounds like one of the text, which a search finds where it is boosted."""
UNKNOWN_FIELD = b"\x90\x03\x01"
"""Field 50, a number, of any message."""


@pytest.fixture(scope="module")
def riva(serve_voice):
    """A server with a port for Riva's clients."""
    return serve_voice(riva_port=0, max_characters=500)


@pytest.fixture
def auth(riva):
    made = riva_client.Auth(uri=address(riva))
    yield made
    made.channel.close()
    riva.expect_empty()
    eventually(lambda: not riva.gate.live_sessions)


@pytest.fixture
def asr(auth):
    return riva_client.ASRService(auth)


@pytest.fixture
def tts(auth):
    return riva_client.SpeechSynthesisService(auth)


@pytest.fixture(scope="module")
def speech(packaged_speech):
    """beckett.wav, (n,) float32 at 16 kHz."""
    return read_audio(packaged_speech / "beckett.wav")


@pytest.fixture(scope="module")
def pcm(speech):
    return (speech * 32_767).astype("<i2").tobytes()


def address(server):
    return f"127.0.0.1:{server.app.state.riva.port}"


def recognition(**fields):
    """RecognitionConfig as programs send it."""
    return riva_client.RecognitionConfig(**{"language_code": "en-US", "enable_automatic_punctuation": True} | fields)


def streaming(interim_results=False, **fields):
    fields = {"encoding": LINEAR_PCM, "sample_rate_hertz": RATE_HZ} | fields
    return riva_client.StreamingRecognitionConfig(config=recognition(**fields), interim_results=interim_results)


def cut(audio, size=CHUNK_BYTES):
    return [audio[at : at + size] for at in range(0, len(audio), size)]


def audio_message(audio):
    return riva_asr.StreamingRecognizeRequest(audio_content=audio).SerializeToString()


def text_of(results):
    return "".join(result.alternatives[0].transcript for result in results).strip()


def final_text(responses):
    return text_of(result for response in responses for result in response.results if result.is_final)


def refusal(call):
    """Code and message of a call that is refused."""
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return refused.value.code(), refused.value.details()


def encoded(speech, form, rate_hz=RATE_HZ):
    encoder = create_audio_encoder(form, rate_hz)
    return encoder.encode(speech) + encoder.finish()


# --- recordings -------------------------------------------------------------------------------------------


def test_a_recording_has_the_text_of_our_own_route(asr, riva, cities):
    """Whole, as transcribe_file_offline.py sends it: the encoding is that of the file."""
    response = asr.offline_recognize(cities.read_bytes(), recognition())
    ours = riva.http.post("/v1/audio/transcriptions", files={"file": cities.read_bytes()}).json()
    assert text_of(response.results) == ours["text"]
    assert len(response.results) > 1
    assert [result.audio_processed for result in response.results] == sorted(
        result.audio_processed for result in response.results
    )
    assert riva.counted("asr_serve_requests_total", route=RECOGNIZE, method="POST", status="200")


@pytest.mark.parametrize(
    ("form", "encoding", "rate_hz"),
    [
        ("pcm", LINEAR_PCM, RATE_HZ),
        ("wav", LINEAR_PCM, RATE_HZ),
        ("flac", FLAC, 0),
        ("mulaw", MULAW, RATE_HZ),
        ("alaw", ALAW, RATE_HZ),
        ("opus", OGGOPUS, 0),
    ],
)
def test_encodings_of_recordings(asr, riva, speech, form, encoding, rate_hz):
    sound = encoded(speech, form)
    response = asr.offline_recognize(sound, recognition(encoding=encoding, sample_rate_hertz=rate_hz))
    assert text_of(response.results) == BECKETT


def test_channels_of_a_recording_are_mixed(asr, pcm):
    both = np.repeat(np.frombuffer(pcm, "<i2"), 2).tobytes()
    config = recognition(encoding=LINEAR_PCM, sample_rate_hertz=RATE_HZ, audio_channel_count=2)
    assert text_of(asr.offline_recognize(both, config).results) == BECKETT


def test_words_have_times_and_text_is_plain_unless_it_is_to_be_punctuated(asr, riva, beckett):
    config = recognition(enable_word_time_offsets=True, enable_automatic_punctuation=False)
    [result] = asr.offline_recognize(beckett.read_bytes(), config).results
    [alternative] = result.alternatives
    assert alternative.transcript == "ever tried ever failed no matter try again fail again fail better "
    assert [word.word for word in alternative.words] == alternative.transcript.split()
    assert 0 < alternative.confidence <= 1
    sent = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    ours = riva.http.post("/v1/audio/transcriptions", files={"file": beckett.read_bytes()}, data=sent).json()["words"]
    assert [(word.start_time, word.end_time) for word in alternative.words] == [
        (round(1_000 * word["start"]), round(1_000 * word["end"])) for word in ours
    ]


def test_speakers_have_numbers(asr, packaged_speech, hears_speakers):
    config = recognition()
    riva_client.add_speaker_diarization_to_config(config, True)
    found = asr.offline_recognize((packaged_speech / "endgame_nagg_nell.wav").read_bytes(), config).results
    tags = {word.speaker_tag for result in found for word in result.alternatives[0].words}
    assert tags == {1, 2}


def test_alternatives_are_different_texts(asr, beckett):
    [result] = asr.offline_recognize(beckett.read_bytes(), recognition(max_alternatives=3)).results
    texts = [alternative.transcript for alternative in result.alternatives]
    assert 1 < len(texts) <= 3
    assert len(set(texts)) == len(texts)


def test_likely_words_reach_the_search(asr, riva, beckett):
    """They change the text as those of our own route do: a boost of 10 is a weight of 1."""
    config, sound = recognition(), beckett.read_bytes()
    riva_client.add_word_boosting_to_config(config, [LIKELY], 40.0)
    boosted = text_of(asr.offline_recognize(sound, config).results)
    sent = {"files": {"file": sound}, "data": {"hotwords": f"{LIKELY}:4"}}
    assert boosted == riva.http.post("/v1/audio/transcriptions", **sent).json()["text"]
    assert LIKELY in boosted
    assert LIKELY not in BECKETT
    riva_client.add_word_boosting_to_config(config, ["日本"], 4.0)
    code, message = refusal(lambda: asr.offline_recognize(beckett.read_bytes(), config))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "日本" in message


def test_large_messages_are_handled_beside_the_event_loop(asr, tts, beckett, monkeypatch):
    found = dict[str, bool]()

    def watch(module, name):
        work = getattr(module, name)

        def run(*args, **kwargs):
            found[name] = asyncio._get_running_loop() is None
            return work(*args, **kwargs)

        monkeypatch.setattr(module, name, run)

    for module, name in (
        (recognition_messages, "parse_recognize"),
        (recognition_messages, "encode_recognize"),
        (synthesis_messages, "parse_synthesize"),
        (synthesis_messages, "encode_audio"),
    ):
        watch(module, name)
    assert text_of(asr.offline_recognize(beckett.read_bytes(), recognition()).results) == BECKETT
    assert tts.synthesize("Hello.", sample_rate_hz=8_000).audio
    assert found == dict.fromkeys(("parse_recognize", "encode_recognize", "parse_synthesize", "encode_audio"), True)


def test_silence_has_no_result(asr):
    silence = bytes(2 * RATE_HZ)
    response = asr.offline_recognize(silence, recognition(encoding=LINEAR_PCM, sample_rate_hertz=RATE_HZ))
    assert not response.results


def test_a_request_has_an_id(auth, riva, beckett):
    """Its own, or that of the call in logs and traces."""
    stub = riva_client.ASRService(auth).stub
    request = riva_asr.RecognizeRequest(config=recognition(), audio=beckett.read_bytes())
    response, call = stub.Recognize.with_call(request, metadata=[("x-request-id", "call-7")])
    assert response.id.value == "call-7"
    assert dict(call.trailing_metadata())["x-request-id"] == "call-7"
    assert dict(call.trailing_metadata())["x-model"] == MODEL
    request.id.value = "mine"
    assert stub.Recognize(request).id.value == "mine"


# --- live audio -------------------------------------------------------------------------------------------


def test_speech_becomes_text_while_it_is_spoken(asr, riva, pcm):
    found = list(asr.streaming_response_generator(cut(pcm), streaming(interim_results=True)))
    assert final_text(found) == BECKETT
    results = [result for response in found for result in response.results]
    interim = [result for result in results if not result.is_final]
    assert len(interim) > 1
    assert all(0 <= result.stability <= 1 and result.alternatives[0].transcript for result in interim)
    assert [result.audio_processed for result in results] == sorted(result.audio_processed for result in results)
    eventually(
        lambda: riva.counted("asr_serve_live_sessions_total", route=STREAMING_RECOGNIZE, end="done"),
        lambda: riva.http.get("/metrics").text,
    )
    assert riva.counted("asr_serve_live_audio_seconds_total", route=STREAMING_RECOGNIZE) > len(pcm) / 32_000 - 0.001


def test_a_live_call_has_trailing_metadata(auth, pcm):
    sent = riva_asr.StreamingRecognizeRequest(streaming_config=streaming()).SerializeToString()
    call = auth.channel.stream_stream(STREAMING_RECOGNIZE)(
        iter([sent + UNKNOWN_FIELD, *map(audio_message, cut(pcm))]), metadata=[("x-request-id", "call-8")]
    )
    assert len(list(call)) == 1
    found = dict(call.trailing_metadata())
    assert (found["x-request-id"], found["x-model"]) == ("call-8", MODEL)
    assert found["x-ignored"] == "StreamingRecognizeRequest.50"
    refused = auth.channel.stream_stream(STREAMING_RECOGNIZE)(iter([b"\xff"]), metadata=[("x-request-id", "call-9")])
    assert refusal(lambda: list(refused))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(refused.trailing_metadata())["x-request-id"] == "call-9"


def test_without_interim_results_only_final_ones_come(asr, pcm):
    found = list(asr.streaming_response_generator(cut(pcm), streaming(enable_word_time_offsets=True)))
    assert all(result.is_final for response in found for result in response.results)
    words = [word for response in found for result in response.results for word in result.alternatives[0].words]
    assert [word.word for word in words] == BECKETT.split()
    assert all(word.start_time < word.end_time for word in words)


def test_a_file_is_streamed_with_its_header(asr, beckett):
    """As transcribe_file.py sends it: no encoding, and chunks of the file."""
    config = streaming(encoding=0, sample_rate_hertz=0)
    with riva_client.AudioChunkFileIterator(str(beckett), 1_600) as chunks:
        found = list(asr.streaming_response_generator(chunks, config))
    assert final_text(found) == BECKETT
    out = io.StringIO()
    riva_client.print_streaming(found, output_file=out)
    assert out.getvalue() == f"## {BECKETT} \n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "encoding", "size"),
    [("mulaw", MULAW, 3), ("mulaw", MULAW, 1_601), ("alaw", ALAW, 800), ("opus", OGGOPUS, 777), ("pcm", LINEAR_PCM, 3)],
)
def test_encodings_of_live_audio_cut_anywhere(asr, speech, form, encoding, size):
    sound = encoded(speech[: 2 * RATE_HZ] if size < 100 else speech, form)
    rate_hz = 0 if encoding == OGGOPUS else RATE_HZ
    found = list(
        asr.streaming_response_generator(cut(sound, size), streaming(encoding=encoding, sample_rate_hertz=rate_hz))
    )
    assert final_text(found).startswith("Ever") if size < 100 else final_text(found) == BECKETT


def test_a_shorter_pause_ends_an_utterance(asr, pcm):
    config = streaming()
    riva_client.add_endpoint_parameters_to_config(config, -1, -1.0, 400, -1, -1.0, -1.0)
    found = list(asr.streaming_response_generator(cut(pcm + bytes(64_000)), config))
    assert len([result for response in found for result in response.results]) > 1


@pytest.mark.slow
def test_many_streams_at_once(asr, riva, pcm):
    config = streaming(interim_results=True)
    with ThreadPoolExecutor(STREAMS) as pool:
        texts = pool.map(lambda _: final_text(asr.streaming_response_generator(cut(pcm), config)), range(STREAMS))
        assert list(texts) == [BECKETT] * STREAMS


def test_a_call_that_is_cancelled_frees_its_session(auth, riva, pcm):
    stub, more = riva_client.ASRService(auth).stub, threading.Event()

    def requests():
        yield riva_asr.StreamingRecognizeRequest(streaming_config=streaming(interim_results=True))
        yield riva_asr.StreamingRecognizeRequest(audio_content=pcm[:96_000])
        more.wait(WAIT_S)

    call = stub.StreamingRecognize(requests())
    assert next(call).results  # it is under way
    assert riva.gate.live_sessions == 1
    call.cancel()
    more.set()
    eventually(lambda: not riva.gate.live_sessions)
    eventually(lambda: riva.counted("asr_serve_live_sessions_total", route=STREAMING_RECOGNIZE, end="client_gone"))


def test_a_client_that_is_killed_leaves_nothing_behind(auth, riva):
    script = (
        "import sys, time, riva.client as riva\n"
        "config = riva.StreamingRecognitionConfig(config=riva.RecognitionConfig(encoding=1, sample_rate_hertz=16000))\n"
        "def audio():\n"
        "    while True:\n"
        "        yield bytes(3200)\n"
        "        time.sleep(0.05)\n"
        "service = riva.ASRService(riva.Auth(uri=sys.argv[1]))\n"
        "list(service.streaming_response_generator(audio(), config))\n"
    )
    with Child([sys.executable, "-c", script, address(riva)]) as child:
        try:
            eventually(lambda: riva.gate.live_sessions, lambda: f"it ended: {child.poll()}")
        finally:
            child.kill()
    eventually(lambda: not riva.gate.live_sessions)


def test_a_recording_whose_client_leaves_is_given_up(auth, riva, cities):
    def given_up():
        return riva.counted("asr_serve_requests_total", route=RECOGNIZE, method="POST", status="499")

    backend = next(engine for engine in riva.engines if engine.name == MODEL).client.backend
    before = given_up()
    os.kill(backend.pid, signal.SIGSTOP)  # it is not done before anybody looks
    try:
        stub = riva_client.ASRService(auth).stub
        call = stub.Recognize.future(riva_asr.RecognizeRequest(config=recognition(), audio=cities.read_bytes()))
        eventually(lambda: riva.gate.active_work)
        call.cancel()
        eventually(lambda: not riva.gate.active_work)
        eventually(lambda: given_up() == before + 1)
    finally:
        os.kill(backend.pid, signal.SIGCONT)


def test_a_client_that_leaves_before_its_message(auth, riva):
    more = threading.Event()

    def nothing():
        more.wait(WAIT_S)
        yield from ()

    def left():
        return riva.counted("asr_serve_requests_total", route=RECOGNIZE, method="POST", status="499")

    before = left()
    call = auth.channel.stream_stream(RECOGNIZE)(nothing())
    eventually(lambda: riva.gate.active_work)
    call.cancel()
    more.set()
    eventually(lambda: left() == before + 1)


def test_clients_that_leave_while_they_send_a_recording(auth, riva):
    """gRPC reports a message that is broken off as the end of the messages, which is no call without a message."""

    def counted(status):
        return riva.counted("asr_serve_requests_total", route=RECOGNIZE, method="POST", status=status)

    before = counted("499"), counted("400")
    request = riva_asr.RecognizeRequest(config=recognition(encoding=LINEAR_PCM), audio=bytes(40 << 20))
    for _ in range(LEAVING_CLIENTS):
        call = riva_client.ASRService(auth).stub.Recognize.future(request)
        eventually(lambda: riva.gate.active_work)
        call.cancel()
        eventually(lambda: not riva.gate.active_work)
    eventually(lambda: (counted("499"), counted("400")) == (before[0] + LEAVING_CLIENTS, before[1]))


# --- synthesis --------------------------------------------------------------------------------------------


def test_a_text_is_spoken_and_heard_again(tts, asr):
    response = tts.synthesize(SPOKEN, sample_rate_hz=RATE_HZ)
    heard = asr.offline_recognize(response.audio, recognition(encoding=LINEAR_PCM, sample_rate_hertz=RATE_HZ))
    assert text_of(heard.results).startswith("Ever tried")
    found = list(tts.synthesize_online(SPOKEN, sample_rate_hz=RATE_HZ))
    assert len(found) > 1
    assert b"".join(each.audio for each in found) == response.audio


def test_speech_is_that_of_our_own_route(tts, riva):
    response = tts.synthesize(SPOKEN, "heart", sample_rate_hz=24_000)
    sent = {"input": SPOKEN, "voice": "heart", "response_format": "pcm"}
    assert response.audio == riva.http.post("/v1/audio/speech", json=sent).content


def test_rates_of_the_client_are_resampled(tts):
    """44.1 kHz is the client's default."""
    sounds = [np.frombuffer(tts.synthesize(SPOKEN, **rate).audio, "<i2") for rate in ({}, {"sample_rate_hz": 22_050})]
    assert len(sounds[0]) == pytest.approx(2 * len(sounds[1]), abs=2)


@pytest.mark.parametrize(("encoding", "magic"), [(OGGOPUS, b"OggS"), (FLAC, b"fLaC")])
def test_containers_of_speech(tts, asr, encoding, magic):
    sound = tts.synthesize(SPOKEN, encoding=encoding).audio
    assert sound[:4] == magic
    assert text_of(asr.offline_recognize(sound, recognition()).results).startswith("Ever tried")


def test_voices_are_listed_and_named(tts, riva):
    """By full names, as talk.py makes them: a model, a dot and a voice."""
    found = tts.stub.GetRivaSynthesisConfig(riva_tts.RivaSynthesisConfigRequest()).model_config
    assert {each.model_name for each in found} == {VOICE}
    listed = [voice["id"] for voice in riva.http.get("/v1/audio/voices").json()["voices"]]
    names = [
        f"{each.parameters['voice_name']}.{subvoice.split(':')[0]}"
        for each in found
        for subvoice in each.parameters["subvoices"].split(",")
    ]
    assert sorted(names) == sorted(f"{VOICE}.{name}" for name in listed)
    whole = tts.synthesize("Hello.", sample_rate_hz=8_000).audio
    for name in (names[0], listed[0], VOICE, None):
        for language in ("en-US", "en-GB", "en"):
            assert tts.synthesize("Hello.", name, language, sample_rate_hz=8_000).audio == whole


def test_ssml_is_spoken(tts):
    plain = tts.synthesize("Ever tried.", sample_rate_hz=RATE_HZ).audio
    paused = tts.synthesize('<speak>Ever<break time="2s"/> tried.</speak>', sample_rate_hz=RATE_HZ).audio
    assert len(paused) > len(plain) + 2 * RATE_HZ


def test_texts_one_after_another(auth, riva):
    """As the client sends them from 2.22 on, with the times of their words."""
    from asr_serve.protocols.riva.message_classes import SynthesizeSpeechRequest, SynthesizeSpeechResponse

    def request(text):
        return SynthesizeSpeechRequest(text=text, sample_rate_hz=RATE_HZ, enable_word_time_offsets=True)

    online = auth.channel.stream_stream(
        SYNTHESIZE_ONLINE,
        request_serializer=SynthesizeSpeechRequest.SerializeToString,
        response_deserializer=SynthesizeSpeechResponse.FromString,
    )
    whole = auth.channel.unary_unary(
        SYNTHESIZE,
        request_serializer=SynthesizeSpeechRequest.SerializeToString,
        response_deserializer=SynthesizeSpeechResponse.FromString,
    )
    texts = ("Ever tried.", "Ever failed.")
    found = list(online(map(request, texts)))
    assert b"".join(each.audio for each in found) == b"".join(whole(request(text)).audio for text in texts)
    words = [word for each in found for word in each.meta.words]
    assert [word.word for word in words] == ["Ever", "tried.", "Ever", "failed."]
    starts = [word.start_time for word in words]
    assert starts == sorted(starts)


def test_a_speech_whose_client_leaves_is_given_up(auth, riva):
    text = " ".join([SPOKEN] * 20)
    call = riva_client.SpeechSynthesisService(auth).stub.SynthesizeOnline(riva_tts.SynthesizeSpeechRequest(text=text))
    assert next(call).audio
    call.cancel()
    eventually(lambda: not riva.gate.active_work)


def test_models_are_listed(asr):
    """As --list-models reads them."""
    found = asr.stub.GetRivaSpeechRecognitionConfig(riva_asr.RivaSpeechRecognitionConfigRequest()).model_config
    assert [(each.model_name, each.parameters["type"]) for each in found] == [(MODEL, "offline"), (MODEL, "online")]
    assert found[0].parameters["language_code"] == "en"
    request = riva_asr.RivaSpeechRecognitionConfigRequest(model_name="nobody")
    code, message = refusal(lambda: asr.stub.GetRivaSpeechRecognitionConfig(request))
    assert code is grpc.StatusCode.NOT_FOUND
    assert MODEL in message


# --- what is refused --------------------------------------------------------------------------------------

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("fields", "code", "word"),
    [
        ({"model": "nobody"}, grpc.StatusCode.NOT_FOUND, "nobody"),
        ({"model": VOICE}, INVALID, VOICE),
        ({"language_code": "fr-FR"}, INVALID, "fr"),
        ({"profanity_filter": True}, INVALID, "profanity_filter"),
        ({"encoding": MULAW, "sample_rate_hertz": 1}, INVALID, "sample_rate_hertz"),
        ({"encoding": LINEAR_PCM, "sample_rate_hertz": 0}, INVALID, "sample_rate_hertz"),
        ({"encoding": 0, "sample_rate_hertz": 0}, INVALID, "encoding"),
    ],
)
@pytest.mark.parametrize("live", [False, True], ids=["recording", "live"])
def test_options_that_are_not_served(asr, fields, code, word, live):
    sound = bytes(CHUNK_BYTES)
    fields = {"encoding": LINEAR_PCM, "sample_rate_hertz": RATE_HZ} | fields
    if live:
        found = refusal(lambda: list(asr.streaming_response_generator([sound], streaming(**fields))))
    else:
        found = refusal(lambda: asr.offline_recognize(sound, recognition(**fields)))
    assert found[0] is code, found
    assert word in found[1]


@pytest.mark.parametrize(
    ("fields", "code", "word"),
    [
        ({"voice_name": "nobody"}, INVALID, "nobody"),
        ({"voice_name": f"{VOICE}.nobody"}, INVALID, "nobody"),
        ({"language_code": "tlh"}, INVALID, "tlh"),
        ({"language_code": "de-DE", "voice_name": "heart"}, INVALID, "language_code"),
        ({"encoding": 9}, INVALID, "encoding"),
        ({"sample_rate_hz": 1}, INVALID, "sample_rate_hz"),
        ({"text": ""}, INVALID, "text"),
        ({"text": "x" * 501}, INVALID, "500"),
        ({"text": "<speak><nothing/></speak>"}, INVALID, "nothing"),
        ({"zero_shot_data": riva_tts.ZeroShotData(quality=20)}, INVALID, "zero_shot_data"),
    ],
)
@pytest.mark.parametrize("online", [False, True], ids=["whole", "online"])
def test_speech_that_is_not_served(tts, fields, code, word, online):
    request = riva_tts.SynthesizeSpeechRequest(**{"text": "Hello."} | fields)
    found = refusal(lambda: list(tts.stub.SynthesizeOnline(request)) if online else tts.stub.Synthesize(request))
    assert found[0] is code, found
    assert word in found[1]


AUDIO = audio_message(bytes(64))
CONFIG = riva_asr.StreamingRecognizeRequest(
    streaming_config=riva_asr.StreamingRecognitionConfig(
        config=riva_asr.RecognitionConfig(encoding=LINEAR_PCM, sample_rate_hertz=RATE_HZ)
    )
).SerializeToString()
LARGE = audio_message(bytes(17 << 20))
HUGE = riva_asr.RecognizeRequest(audio=bytes(65 << 20)).SerializeToString()


@pytest.mark.parametrize(
    ("path", "messages", "code", "word"),
    [
        (STREAMING_RECOGNIZE, [], INVALID, "streaming_config"),
        (STREAMING_RECOGNIZE, [b""], INVALID, "nothing in it"),
        (STREAMING_RECOGNIZE, [b"\xff"], INVALID, "StreamingRecognizeRequest"),
        (STREAMING_RECOGNIZE, [AUDIO], INVALID, "streaming_config"),
        (STREAMING_RECOGNIZE, [CONFIG, CONFIG], INVALID, "came again"),
        (STREAMING_RECOGNIZE, [CONFIG, b"\xff"], INVALID, "StreamingRecognizeRequest"),
        (STREAMING_RECOGNIZE, [CONFIG, LARGE], grpc.StatusCode.RESOURCE_EXHAUSTED, "audio_content"),
        (RECOGNIZE, [], INVALID, "without a message"),
        (RECOGNIZE, [b""], INVALID, "config"),
        (RECOGNIZE, [b"\xff"], INVALID, "RecognizeRequest"),
        (RECOGNIZE, [b"", b""], INVALID, "second message"),
        (RECOGNIZE, [HUGE], grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
        (SYNTHESIZE, [b"\xff"], INVALID, "SynthesizeSpeechRequest"),
        (SYNTHESIZE_ONLINE, [], INVALID, "no text came"),
        ("/nvidia.riva.asr.RivaSpeechRecognition/Dream", [b""], grpc.StatusCode.UNIMPLEMENTED, "not found"),
        ("/nvidia.riva.nlp.RivaLanguageUnderstanding/AnalyzeIntent", [b""], grpc.StatusCode.UNIMPLEMENTED, "not found"),
    ],
    ids=lambda value: f"{len(value)} messages" if isinstance(value, list) else str(value),
)
def test_messages_that_are_no_good(auth, path, messages, code, word):
    call = auth.channel.stream_stream(path)
    found = refusal(lambda: list(call(iter(messages), timeout=WAIT_S)))
    assert found[0] is code, found
    assert word in found[1]


def test_no_url_leads_there(riva):
    for path in PATHS:
        answer = riva.http.post(path, content=b"")
        assert answer.status_code == 404
    assert riva.http.get(RECOGNIZE).status_code == 405


# --- limits and keys --------------------------------------------------------------------------------------


def test_limits_are_those_of_all_routes(serve, pcm):
    small = serve(riva_port=0, max_live_sessions=1)
    auth, more = riva_client.Auth(uri=address(small)), threading.Event()

    def audio():
        yield pcm[:32_000]
        more.wait(WAIT_S)

    service = riva_client.ASRService(auth)
    first = iter(service.streaming_response_generator(audio(), streaming(interim_results=True)))
    assert next(first).results
    with pytest.raises(grpc.RpcError) as refused:
        list(service.streaming_response_generator([pcm], streaming()))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(refused.value.trailing_metadata())["retry-after-ms"]) > 0
    more.set()
    list(first)
    assert final_text(service.streaming_response_generator(cut(pcm), streaming())) == BECKETT
    auth.channel.close()


@pytest.mark.parametrize(
    ("settings", "texts", "code", "word"),
    [
        ({"max_session_s": 1.0}, ["Hello."], grpc.StatusCode.INVALID_ARGUMENT, "up to 1 s, of audio and of time"),
        ({"max_session_s": 1.0}, [SPOKEN] * 9, grpc.StatusCode.INVALID_ARGUMENT, "up to 1 s, of audio and of time"),
        ({"upload_idle_s": 0.5}, [], grpc.StatusCode.DEADLINE_EXCEEDED, "no text came for 0.5 s"),
        ({"session_idle_s": 0.5}, ["Hello."], grpc.StatusCode.DEADLINE_EXCEEDED, "no text came for 0.5 s"),
    ],
    ids=["time", "audio", "first", "next"],
)
def test_a_call_of_texts_has_an_end(serve_voice, settings, texts, code, word):
    """Also where the client never half-closes."""
    bounded = serve_voice(riva_port=0, **settings)
    auth, more = riva_client.Auth(uri=address(bounded)), threading.Event()

    def requests():
        for text in texts:
            yield riva_tts.SynthesizeSpeechRequest(text=text, sample_rate_hz=8_000).SerializeToString()
        more.wait(WAIT_S)

    found = refusal(lambda: list(auth.channel.stream_stream(SYNTHESIZE_ONLINE)(requests())))
    more.set()
    assert found[0] is code, found
    assert word in found[1]
    eventually(lambda: not bounded.gate.active_work)
    auth.channel.close()


def test_a_call_whose_message_does_not_come_is_ended(serve_voice):
    bounded = serve_voice(riva_port=0, upload_idle_s=0.5)
    auth, more = riva_client.Auth(uri=address(bounded)), threading.Event()

    def nothing():
        more.wait(WAIT_S)
        yield from ()

    found = refusal(lambda: list(auth.channel.stream_stream(SYNTHESIZE)(nothing())))
    more.set()
    assert found[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "no whole message came for 0.5 s" in found[1]
    auth.channel.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2", *names]
    subprocess.run(["openssl", *made], check=True, capture_output=True)
    return cert, key


def test_keys_over_tls(serve, certificate, beckett):
    """Riva's client sends a key over TLS alone."""
    cert, key = certificate
    locked = serve(riva_port=0, tls_cert=str(cert), tls_key=str(key), api_keys=("secret",))
    config, sound = recognition(), beckett.read_bytes()
    for sent, code in ((None, True), ("wrong", True), ("secret", False)):
        metadata = [] if sent is None else [["authorization", f"Bearer {sent}"]]
        auth = riva_client.Auth(ssl_cert=cert, uri=address(locked), metadata_args=metadata)
        service = riva_client.ASRService(auth)
        if code:
            found = refusal(lambda: service.offline_recognize(sound, config))  # noqa: B023
            assert found[0] is grpc.StatusCode.UNAUTHENTICATED
            live = refusal(lambda: list(service.streaming_response_generator([sound], streaming())))  # noqa: B023
            assert live[0] is grpc.StatusCode.UNAUTHENTICATED
        else:
            assert text_of(service.offline_recognize(sound, config).results) == BECKETT
        auth.channel.close()


def test_a_server_that_drains_sends_the_rest_first(serve, pcm):
    ending = serve(riva_port=0)
    auth, more = riva_client.Auth(uri=address(ending)), threading.Event()

    def audio():
        yield pcm
        more.wait(WAIT_S)

    service, found = riva_client.ASRService(auth), []
    responses = iter(service.streaming_response_generator(audio(), streaming(interim_results=True)))
    found.append(next(responses))
    ending.loop.call_soon_threadsafe(ending.gate.drain)
    with pytest.raises(grpc.RpcError) as ended:
        found.extend(responses)
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert final_text(found)
    assert refusal(lambda: service.offline_recognize(pcm, recognition()))[0] is grpc.StatusCode.UNAVAILABLE
    more.set()
    auth.channel.close()


def test_the_extra_is_named_where_its_packages_are_missing(monkeypatch):
    for name in ("grpc", "asr_serve.server.realtime.riva.grpc_server", "asr_serve.server.realtime.riva.endpoints"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("grpc_server", "endpoints"):
        monkeypatch.delattr(packages.__package__ + "." + name, raising=False)
    with pytest.raises(ProgramMissing, match=r"asr-serve\[riva\]"):
        packages.load_riva()
    assert ServeConfig(riva_port=50_051, api_keys=("secret",)).riva_port == 50_051


def test_a_pause_in_a_wav_header_is_no_text(asr):
    """A header of Python's wave module, and silence."""
    made = io.BytesIO()
    with wave.open(made, "wb") as clip:
        clip.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        clip.writeframes(bytes(2 * RATE_HZ))
    found = list(asr.streaming_response_generator(cut(made.getvalue()), streaming(encoding=0, sample_rate_hertz=0)))
    assert not [result for response in found for result in response.results]
