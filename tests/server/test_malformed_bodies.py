"""Bodies, fields and audio that are no good, over the real server: each is answered in OpenAI's shape and by name.

More fields are in test_openai_routes.
"""

from __future__ import annotations

import io
import re
import resource
import struct
from collections.abc import Callable, Iterator

import av
import numpy as np
import pytest
from raw_http import BOUNDARY, FORM_END, field, form, told
from running_server import MODEL, Running

ROUTE = "/v1/audio/transcriptions"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
HOUR_S = 3_600
MOST_BYTES = 300_000


@pytest.fixture(scope="module")
def small(serve: Callable[..., Running]) -> Iterator[Running]:
    """A server that takes little."""
    server = serve(max_body_bytes=MOST_BYTES, max_duration_s=60)
    yield server
    server.expect_empty()


def post(server: Running, body: bytes, kind: str | None = FORM, path: str = ROUTE) -> tuple[int, str, str | None, str]:
    answer = server.http.post(path, content=body, headers={"Content-Type": kind} if kind else {})
    return told(answer.status_code, dict(answer.headers), answer.content)


def parts(*pairs: tuple[str, str], audio: bytes = b"x") -> bytes:
    return form(pairs, audio)


def part(head: bytes, body: bytes = b"x") -> bytes:
    return f"--{BOUNDARY}\r\n".encode() + head + b"\r\n\r\n" + body + b"\r\n" + FORM_END


def wav(seconds: float = 1.0, announced_s: float | None = None, channels: int = 1, rate_hz: int = 16_000) -> bytes:
    data = bytes(2 * int(seconds * 16_000))
    length = len(data) if announced_s is None else int(2 * announced_s * 16_000)
    riff, fmt = (b"RIFF", 36 + length, b"WAVE"), (b"fmt ", 16, 1, channels, rate_hz, 2 * rate_hz, 2, 16)
    return struct.pack("<4sI4s4sIHHIIHH4sI", *riff, *fmt, b"data", length) + data


def encoded(codec: str, kind: str, seconds: float, rate_hz: int = 16_000, **options: str) -> bytes:
    """A tone; longer than a minute, silence."""
    made = io.BytesIO()
    with av.open(made, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate_hz, layout="mono", options=options)
        for _ in range(int(seconds)):
            tone = np.sin(np.arange(rate_hz) / 8) * (seconds <= 60) / 2
            frame = av.AudioFrame.from_ndarray((tone * 32_767).astype(np.int16)[None], "s16", "mono")
            frame.sample_rate = rate_hz
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return made.getvalue()


# --- bodies -----------------------------------------------------------------------------------------------

MALFORMED = "malformed_request"
BODIES: dict[str, tuple[bytes, str | None, str]] = {
    "json": (b'{"model": "whisper-1", "file": "a.wav"}', "application/json", "'application/json' came"),
    "form of text": (b"model=whisper-1&file=a", "application/x-www-form-urlencoded", "urlencoded' came"),
    "the audio itself": (wav(), "audio/wav", "'audio/wav' came"),
    "no type": (parts(), None, "without a Content-Type"),
    "long type": (b"", "a" * 5_000, "'a{80}' came"),
    "no boundary": (parts(), "multipart/form-data", "names no boundary"),
    "long boundary": (parts(), "multipart/form-data; boundary=" + "b" * 300, "boundary .* cannot be used"),
    "another boundary": (parts(), "multipart/form-data; boundary=other", "before its closing boundary"),
    "empty": (b"", FORM, "ends after 0 bytes"),
    "cut in a field": (field("model", "whisper-1")[:40], FORM, "ends after 40 bytes"),
    "cut in the file": (parts(audio=bytes(1_000))[:-100], FORM, "before its closing boundary"),
    "no boundary at all": (bytes(10_000), FORM, "hold no boundary"),
    "bytes in a field": (
        part(b'Content-Disposition: form-data; name="prompt"', b"caf\xe9"), FORM, "'prompt' is not UTF-8"
    ),
    "bytes in a name": (part(b'Content-Disposition: form-data; name="caf\xe9"'), FORM, "not UTF-8"),
    "no name": (part(b"Content-Disposition: form-data"), FORM, "has no name"),
    "no header": (part(b""), FORM, "has no name|well-formed"),
    "two files": (parts()[:-len(FORM_END)] + parts(), FORM, "a second file came|more than 1 files came"),
    "a file elsewhere": (parts().replace(b'"file"', b'"audio"'), FORM, "a file came as the field 'audio'"),
    "a list of files": (parts().replace(b'"file"', b'"file[]"'), FORM, "a file came as the field 'file\\[\\]'"),
    "base64": (part(b'Content-Disposition: form-data; name="file"; filename="a"\r\n'
                    b"Content-Transfer-Encoding: base64"), FORM, "encoded as 'base64'"),
    "many fields": (parts(*(("language", "en"),) * 2_000), FORM, "more than 64 fields"),
    "many names": (parts(*((f"field-{n}", "") for n in range(2_000))), FORM, "more than 64 fields"),
    "many empty parts": (
        f"--{BOUNDARY}\r\n\r\n\r\n".encode() * 9_000 + FORM_END, FORM, "has no name|well-formed"
    ),
    "a long field": (parts(("language", "x" * 70_000)), FORM, "'language' holds more than 65536 bytes"),
    "a long header": (part(b"X: " + b"y" * 100_000), FORM, "well-formed"),
    "many headers": (part(b"\r\n".join([b"X: y"] * 10_000)), FORM, "well-formed"),
}  # fmt: skip


@pytest.mark.parametrize("path", [ROUTE, "/asr", "/inference"])
@pytest.mark.parametrize("name", BODIES)
def test_bodies(small, name, path):
    body, kind, says = BODIES[name]
    status, code, param, message = post(small, body, kind, path)
    assert (status, code, param) == (400, MALFORMED, None)
    assert re.search(says, message), message
    assert len(message) < 600


def test_gzip_is_no_form(small):
    status, code, _, message = post(small, b"\x1f\x8b" + bytes(100), FORM)
    assert (status, code) == (400, MALFORMED)
    assert "before its closing boundary" in message


# --- fields -----------------------------------------------------------------------------------------------

FIELDS: list[tuple[str, str, str, str]] = [
    ("temperature", "abc", "temperature", "'abc'"),
    ("temperature", "1e999", "temperature", "'1e999'"),
    ("temperature", '{"value": 0}', "temperature", "from 0 to 1"),
    ("temperature", "٠", "temperature", "a number"),
    ("stream", "2", "stream", "'2'. true or false"),
    ("stream", "\0", "stream", "x00"),
    ("timestamp_granularities[]", "sentence", "timestamp_granularities[]", "'sentence'. one of: segment"),
    ("timestamp_granularities", '["segment"]', "timestamp_granularities[]", "'[\"segment\"]'"),
    ("chunking_strategy", '{"type": "server_vad"', "chunking_strategy", '\'{"type": "server_vad"\''),
    ("chunking_strategy", '{"type": ["server_vad"]}', "chunking_strategy", "auto, or"),
    ("chunking_strategy", "[" * 900, "chunking_strategy", "auto, or"),
    ("chunking_strategy", "[" * 60_000, "chunking_strategy", "holds 60000 characters"),
    ("max_segment_ms", "1e4", "max_segment_ms", "a whole number"),
    ("max_segment_ms", "9" * 900, "max_segment_ms", "a whole number"),
    ("chunking_strategy[type]", "none", "chunking_strategy[type]", "'none'. one of: server_vad"),
    ("silence_schedule", "inf:" + "9" * 400, "silence_schedule", "silence"),
    ("silence_schedule", "inf:-1", "silence_schedule", "-1"),
    ("response_format", "JSON", "response_format", "'JSON'. one of: json"),
    ("response_format", "../../etc/passwd", "response_format", "etc/passwd"),
    ("language", "xx", "language", "'xx'"),
    ("language", "x" * 2_000, "language", "holds 2000 characters"),
    ("langauge", "en", "langauge", "unknown field 'langauge'. fields: model, language"),
    ("diarize", "true", "diarize", "did you mean 'spk'"),
    ("file", "data:audio/wav;base64,UklGRg==", "file", "came as text"),
]


@pytest.mark.parametrize(
    ("name", "value", "param", "says"), FIELDS, ids=[f"{n[:30]}={v[:30]}" for n, v, _, _ in FIELDS]
)
def test_fields(small, name, value, param, says):
    body = form([(name, value)], None if name == "file" else wav())
    status, code, named, message = post(small, body)
    assert (status, code, named) == (400, "option_error", param)
    assert says in message
    assert len(message) < 700


def test_fields_that_nobody_knows_are_ignored(server, beckett):
    others = [("user", "me"), ("url", "file:///etc/passwd"), ("", "x"), ("f" * 500, "x"), ("\r\nx-a: b", "é")]
    got = server.http.post(ROUTE, data=dict(others), files={"file": beckett.read_bytes()})
    assert (got.status_code, "Ever tried" in got.text) == (200, True)
    ignored = got.headers["x-ignored"]
    assert ignored.startswith("user, url, '', ffff")
    assert "x-a" not in got.headers
    assert "x-ignored" not in server.http.post(ROUTE, files={"file": beckett.read_bytes()}).headers


def test_nothing_is_fetched_from_an_address(small):
    status, code, param, message = post(small, form([("file_url", "http://127.0.0.1/a.wav")], None))
    assert (status, code, param) == (400, "option_error", "file")
    assert "no file came" in message


def test_names_of_models(small):
    for name in ("gpt-4o", "../../etc/passwd", "\0", "é" * 500):
        status, code, _, message = post(small, parts(("model", name), audio=wav()))
        assert (status, code) == (404, "model_not_found")
        assert repr(name[:40])[1:-1] in message


def test_the_same_field_twice(small):
    for name, value in (("temperature", "0"), ("stream", "false"), ("response_format", "json"), ("model", "m")):
        status, code, param, message = post(small, form([(name, value)], wav(), [(name, value)]))
        assert (status, code, param) == (400, "option_error", name)
        assert f"{name} came 2 times" in message


# --- audio ------------------------------------------------------------------------------------------------


def cut(data: bytes) -> bytes:
    return data[: len(data) * 6 // 10]


AUDIO: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "nothing": (lambda: b"", "empty_audio", "0 bytes"),
    "text": (lambda: b"It was the best of times.\n" * 99, "not_audio", "not a known audio container"),
    "pdf": (lambda: b"%PDF-1.7\n" + bytes(5_000), "not_audio", "not a known audio container"),
    "zip": (lambda: b"PK\3\4" + bytes(5_000), "not_audio", "not a known audio container"),
    "a playlist": (lambda: b"#EXTM3U\n#EXTINF:1\nfile:///etc/passwd\n", "not_audio", "playlists are not"),
    "ffmpeg's concat": (lambda: b"ffconcat version 1.0\nfile /etc/passwd\n", "not_audio", "a known audio container"),
    "wav without samples": (lambda: wav(0), "empty_audio", "0 samples"),
    "cut wav": (lambda: cut(wav()), "truncated_audio", "announces 1.000 s and 0.5"),
    "cut flac": (lambda: cut(encoded("flac", "flac", 3)), "truncated_audio", "announces 3.000 s"),
    "cut mp3": (lambda: cut(encoded("libmp3lame", "mp3", 3)), "truncated_audio", "announces 3.0"),
    "cut m4a": (lambda: cut(encoded("aac", "ipod", 3)), "truncated_audio", "moov"),
    "cut webm": (lambda: cut(encoded("libopus", "webm", 3)), "truncated_audio", "announces 3.0"),
    "wav of 25 h and 1 s": (lambda: wav(1, 25 * HOUR_S), "audio_too_long", "90000.0 s .*at most 60 s"),
    "wav of 25 h, its header alone": (lambda: wav(0, 25 * HOUR_S), "audio_too_long", "90000.0 s"),
    "wav of 50 s, its header alone": (lambda: wav(0, 50), "truncated_audio", "announces 50.000 s and 0.000"),
    "wav of 0 channels": (lambda: wav(channels=0), "unsupported_audio", "0 channels"),
    "wav of 65535 channels": (lambda: wav(channels=65_535), "truncated_audio", "cut off"),
    "wav at 1 Hz": (lambda: wav(rate_hz=1), "unsupported_audio", "1 Hz"),
    "wav at 4 GHz": (lambda: wav(rate_hz=(1 << 31) - 1), "unsupported_audio", "2147483647 Hz"),
}  # fmt: skip


@pytest.mark.parametrize("stream", ["false", "true"])
@pytest.mark.parametrize("name", AUDIO)
def test_audio(small, name, stream):
    make, expected, says = AUDIO[name]
    status, code, param, message = post(small, form([("stream", stream)], make()))
    assert (status, code, param) == (400, expected, None)
    assert re.search(says, message), message


def flac_bomb(hours: float) -> bytes:
    """Silence at 8 kHz in blocks of 65535 samples, each a constant in 15 bytes; its header announces no length."""
    info = struct.pack(">HH3s3sQ16s", 65_535, 65_535, bytes(3), bytes(3), 8_000 << 44 | 15 << 36, bytes(16))
    made = [b"fLaC\x80\0\0\x22", info]
    for number in range(int(hours * HOUR_S * 8_000 / 65_535)):
        head = b"\xff\xf8\x74\x08" + _long_utf8(number) + b"\xff\xfe"
        frame = head + bytes([_crc(head, 8, 0x07)]) + b"\0\0\0"
        made.append(frame + _crc(frame, 16, 0x8005).to_bytes(2, "big"))
    return b"".join(made)


def _long_utf8(number: int) -> bytes:
    return chr(number).encode("utf-8", "surrogatepass")


def _crc(data: bytes, bits: int, polynomial: int) -> int:
    crc, top = 0, 1 << bits
    for byte in data:
        crc ^= byte << bits - 8
        for _ in range(8):
            crc <<= 1
            crc ^= (top | polynomial) * (crc >> bits)
    return crc


BOMBS = {
    "flac": lambda: flac_bomb(25),
    "opus": lambda: encoded("libopus", "ogg", 600, application="lowdelay", frame_duration="60"),
}


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["false", "true"])
@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.repeats(name="flac", stream="true")
@pytest.mark.repeats(name="opus", stream="false")
def test_a_small_file_of_many_hours_is_left_at_the_limit(small, name, stream):
    bomb = BOMBS[name]()
    assert len(bomb) < MOST_BYTES
    most_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status, code, _, message = post(small, form([("stream", stream)], bomb))
    assert (status, code) == (400, "audio_too_long")
    assert re.search(r"lasts 6\d\.\d s or more", message), message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most_kib < 100_000


@pytest.mark.parametrize(
    ("path", "field", "example"),
    [
        (ROUTE, "model", "belongs in the form. send it there: curl -F model=..."),
        (ROUTE, "timestamp_granularities[]", "belongs in the form"),
        (ROUTE, "include", "belongs in the form"),
        ("/v1/audio/translations", "beam", "belongs in the form"),
        ("/asr", "language", "belongs in the form"),
        ("/inference", "prompt", "belongs in the form"),
        ("/v1/audio/speech", "voice", 'belongs in the JSON body. send it there: {"voice": ...}'),
    ],
)
def test_fields_in_the_address_are_refused_with_their_place(
    server: Running, path: str, field: str, example: str
) -> None:
    for query in (f"{field}=en", f"{field}=", f"api-version=1&{field}=x"):
        status, code, param, message = post(server, parts(("model", MODEL)), path=f"{path}?{query}")
        assert (status, code, param) == (400, "option_error", field)
        assert example in message


def test_other_parameters_of_an_address_are_ignored(server: Running) -> None:
    body, kind = parts(audio=wav()), {"Content-Type": FORM}
    answer = server.http.post(f"{ROUTE}?api-version=2026-01-01", content=body, headers=kind)
    assert answer.status_code == 200, answer.text
