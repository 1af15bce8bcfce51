"""Uploads: any split of a body means the same, and its audio is there while it is still on its way."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import tempfile
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request

from asr_serve import errors
from asr_serve.audio.reader import open_audio, read_audio
from asr_serve.server.uploads.upload import Upload, UploadLimits

BOUNDARY = "aB0'x"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
LIMITS = UploadLimits(max_bytes=1 << 30)
WAIT_S = 120.0
"""No test waits this long unless it fails."""


def part(name: str, value: bytes | str, extra: str = "", headers: str = "") -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n{headers}\r\n'
    return head.encode() + data + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def file_part(data: bytes) -> bytes:
    return part("file", data, '; filename="a.wav"', "Content-Type: audio/wav\r\n")


async def chunks(*pieces: bytes) -> AsyncIterator[bytes]:
    """Pieces that come one by one, each in its own turn of the event loop."""
    for piece in pieces:
        await asyncio.sleep(0)
        yield piece


def split(body: bytes, size: int) -> AsyncIterator[bytes]:
    return chunks(*(body[at : at + size] for at in range(0, len(body), size)))


async def begin(body: AsyncIterator[bytes], limits: UploadLimits = LIMITS, **options: object) -> Upload:
    return await asyncio.wait_for(Upload.start(body, FORM, None, limits, **options), WAIT_S)


async def in_thread(work: Callable[[], object]) -> object:
    return await asyncio.wait_for(asyncio.to_thread(work), WAIT_S)


class Tap:
    """A body that is handed out by the test, so that nothing depends on the clock."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()

    def give(self, piece: bytes | Exception | None) -> None:
        """None ends the body; an error breaks it off."""
        self._pieces.put_nowait(piece)

    async def body(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece


# --- what a body says ---


async def read_all(pieces: list[bytes], memory_bytes: int) -> tuple[object, ...]:
    upload = await begin(chunks(*pieces), UploadLimits(max_bytes=1 << 20, memory_bytes=memory_bytes))
    try:
        await upload.finish()
        assert upload.complete
        said = upload.fields, upload.filename, upload.content_type, upload.has_file, upload.received_bytes
        return *said, upload.open_bytes().read()
    finally:
        upload.close()


LOOKALIKES = [b"\r", b"\n", b"-", b"--", b"\r\n--", f"--{BOUNDARY}".encode(), f"\r\n--{BOUNDARY}"[:-1].encode(), b"x"]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(LOOKALIKES), max_size=12), st.data(), st.sampled_from([0, 5, 1 << 20]))
@example([], None, 0)
def test_any_split_of_a_body_says_the_same(tokens, data, memory_bytes):
    audio = b"".join(tokens)
    delimiter = f"\r\n--{BOUNDARY}".encode()
    while delimiter in audio:  # then it could not have been sent with this boundary
        audio = audio.replace(delimiter, b"")
    preamble, epilogue = b"written for mail clients\r\n", b"and after\r\n--"
    body = preamble + form(
        part("include[]", "words"), part("prompt", "ä\r\n-- ß"), file_part(audio), part("include[]", "")
    )
    body += epilogue
    cuts = [] if data is None else data.draw(st.lists(st.integers(0, len(body)), max_size=30))
    edges = [0, *sorted(cuts), len(body)]
    pieces = [body[a:b] for a, b in itertools.pairwise(edges)]
    fields = {"include[]": ["words", ""], "prompt": ["ä\r\n-- ß"]}
    expected = (fields, "a.wav", "audio/wav", True, len(body), audio)
    assert asyncio.run(read_all(pieces, memory_bytes)) == expected


async def test_a_body_that_comes_byte_by_byte():
    upload = await begin(split(b"\r\n" + form(part("model", "m"), file_part(b"\r\n\r\n--")), 1))
    await upload.finish()
    assert (upload.fields, upload.open_bytes().read()) == ({"model": ["m"]}, b"\r\n\r\n--")
    upload.close()


@pytest.mark.parametrize(
    ("extra", "filename"),
    [
        ("", None),
        ('; filename=""', ""),
        ("; filename=plain.wav", "plain.wav"),
        ("; FileName = my speech.wav ", "my speech.wav"),
        ('; filename="a;b=\\"c\\".wav"', 'a;b="c".wav'),
        ('; filename="C:\\new.wav"', "C:\\new.wav"),
        ('; filename="größe.wav"', "größe.wav"),
        ("; filename*=UTF-8''na%C3%AFve%20one.wav", "naïve one.wav"),
        ("; filename=\"naive.wav\"; filename*=utf-8'en'na%C3%AFve.wav", "naïve.wav"),
        ("; filename*=iso-8859-1''na%EFve.wav; filename=b.wav", "naïve.wav"),
        ("; filename*=klingon''x; filename=b.wav", "b.wav"),
        ("; filename*=broken", None),
        ('; filename="../../etc/passwd"', "../../etc/passwd"),
        ("; filename=\"; filename*=utf-8''x\"", "; filename*=utf-8''x"),
    ],
)
async def test_names_of_files(extra, filename):
    upload = await begin(chunks(form(part("file", b"abc", extra))))
    assert upload.complete
    assert (upload.has_file, upload.filename, upload.open_bytes().read()) == (True, filename, b"abc")
    upload.close()


async def test_a_header_in_odd_case():
    body = form(
        b"--" + BOUNDARY.encode() + b'\r\ncontent-DISPOSITION:Form-Data;NAME="file"\r\n'
        b"CONTENT-type: \t Audio/X-Wav; Rate=8000\r\n\r\nabc\r\n"
    )
    content_type = f'Multipart/FORM-data; charset=utf-8; Boundary="{BOUNDARY}"'
    upload = await Upload.start(chunks(body), content_type, len(body), LIMITS)
    assert (upload.content_type, upload.filename) == ("Audio/X-Wav; Rate=8000", None)
    assert upload.open_bytes().read() == b"abc"
    upload.close()


async def test_a_form_without_a_file():
    upload = await begin(chunks(form(part("model", "m"))))
    assert upload.complete
    assert not upload.has_file
    assert upload.open_bytes().read() == b""
    upload.close()
    upload = await begin(chunks(f"--{BOUNDARY}--".encode()))
    assert (upload.complete, upload.has_file, upload.fields) == (True, False, {})
    upload.close()


async def test_an_empty_file_is_for_the_decoder_to_refuse():
    upload = await begin(chunks(form(file_part(b""))))
    assert upload.has_file
    with pytest.raises(errors.EmptyAudio):
        open_audio(upload.open_bytes())
    upload.close()


# --- what is refused ---

SMALL = UploadLimits(max_bytes=4_000, max_field_bytes=100, max_fields=3, max_repeats={"k[]": 5})
HEAD = f"--{BOUNDARY}\r\n".encode()
REFUSED = {
    "no boundary": (b"RIFF" * 30, errors.MalformedRequest, "before its closing boundary"),
    "empty body": (b"", errors.MalformedRequest, "ends after 0 bytes"),
    "other boundary": (b"--other\r\n" * 460, errors.AudioTooLarge, "at most 4000"),
    "longer boundary": (form().replace(b"--\r\n", b"more\r\n"), errors.MalformedRequest, "no well-formed"),
    "cut in the file": (form(file_part(b"abc"))[:-20], errors.MalformedRequest, "before its closing boundary"),
    "cut in a header": (HEAD + b"Content-Dispo", errors.MalformedRequest, "before its closing boundary"),
    "cut between parts": (part("a", "1"), errors.MalformedRequest, "before its closing boundary"),
    "too large": (form(file_part(bytes(4_001))), errors.AudioTooLarge, "at most 4000"),
    "fields": (form(*[part("a", "1")] * 4), errors.MalformedRequest, "more than 3 fields"),
    "repeated fields": (form(*[part("k[]", "1")] * 6), errors.MalformedRequest, "more than 5 fields 'k"),
    "field": (form(part("prompt", "x" * 101)), errors.MalformedRequest, "'prompt' holds more than 100 bytes"),
    "not UTF-8": (form(part("prompt", b"caf\xe9")), errors.MalformedRequest, "'prompt' is not UTF-8"),
    "name not UTF-8": (form(part("caf?", "x").replace(b"?", b"\xe9")), errors.MalformedRequest, "not UTF-8"),
    "no name": (form(HEAD + b"Content-Disposition: form-data\r\n\r\nx\r\n"), errors.MalformedRequest, "no name"),
    "no disposition": (form(HEAD + b"\r\nx\r\n"), errors.MalformedRequest, "no name"),
    "two files": (form(file_part(b"a"), file_part(b"b")), errors.MalformedRequest, "a second file"),
    "file elsewhere": (
        form(part("audio", b"a", '; filename="a.wav"')), errors.MalformedRequest, "as the field 'audio'"
    ),
    "base64": (
        form(part("file", "YWJj", "", "Content-Transfer-Encoding: BASE64\r\n")), errors.MalformedRequest, "base64"
    ),
    "header": (HEAD + b"X: " + b"x" * 5_000, errors.AudioTooLarge, "4000"),
    "bad header": (HEAD + b"Content Disposition: x\r\n\r\n", errors.MalformedRequest, "no well-formed"),
    "many headers": (HEAD + b"X: x\r\n" * 50, errors.MalformedRequest, "no well-formed"),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize("name", REFUSED)
async def test_refused_bodies(name, size):
    body, kind, says = REFUSED[name]
    with pytest.raises(kind, match=says):
        (await begin(split(body, size), SMALL, patience_s=WAIT_S)).close()


async def test_a_body_without_any_boundary_is_refused_early():
    tap = Tap()
    tap.give(bytes(10_000))  # and no end
    with pytest.raises(errors.MalformedRequest, match="first 10000 bytes hold no boundary"):
        await begin(tap.body())


@pytest.mark.parametrize(
    ("content_type", "says"),
    [
        ("", "without a Content-Type"),
        ("application/json", "'application/json' came"),
        ("multipart/mixed; boundary=x", "'multipart/mixed' came"),
        ("multipart/form-data", "names no boundary"),
        ('multipart/form-data; boundary=""', "names no boundary"),
        ("multipart/form-data; boundary=ü", "not in ASCII"),
        ("multipart/form-data; boundary=" + "x" * 300, "cannot be used"),
    ],
)
async def test_refused_content_types(content_type, says):
    with pytest.raises(errors.MalformedRequest, match=says):
        await Upload.start(chunks(form()), content_type, None, LIMITS)


async def test_a_content_length_over_the_limit_is_refused_before_reading():
    untouched = chunks(form())
    with pytest.raises(errors.AudioTooLarge, match="4001 bytes"):
        await Upload.start(untouched, FORM, 4_001, SMALL)
    assert await anext(untouched) == form()
    await untouched.aclose()
    (await Upload.start(chunks(form()), FORM, 4_000, SMALL)).close()


async def test_an_upload_that_stops_coming():
    limits = UploadLimits(max_bytes=1_000, idle_timeout_s=0.05)
    tap = Tap()
    tap.give(HEAD)
    with pytest.raises(errors.RequestTimeout, match=r"no byte came for 0\.05 s after the first 9"):
        await begin(tap.body(), limits)
    tap = Tap()
    tap.give(file_part(b"abc")[:-2])
    upload = await begin(tap.body(), limits, patience_s=0)
    tap.give(b"")  # is not a byte
    with pytest.raises(OSError, match="no byte came"):
        await in_thread(upload.open_bytes().read)
    with pytest.raises(errors.RequestTimeout):
        await upload.finish()
    assert isinstance(upload.failure, errors.RequestTimeout)
    upload.close()


@pytest.mark.parametrize("rate", [0, 1, 3])
async def test_an_upload_that_drips(monkeypatch, rate):
    """It is never idle. Time passes where the test says so: 100 s, in which 200 bytes come."""
    loop, ahead_s = asyncio.get_running_loop(), 0.0
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + ahead_s)
    sent = form(file_part(bytes(300)))
    tap = Tap()
    tap.give(sent[:100])
    limits = UploadLimits(max_bytes=1_000, idle_timeout_s=70, min_bytes_per_s=rate)
    upload = await begin(tap.body(), limits, patience_s=0)
    for before, count in ((100, 101), (101, 200)):
        ahead_s += 50
        tap.give(sent[before:count])
        while upload.received_bytes < count and upload.failure is None:
            await asyncio.sleep(0)
    tap.give(sent[200:])
    tap.give(None)
    if rate < 3:
        await upload.finish()
        assert upload.open_bytes().read() == bytes(300)
    else:
        told = r"\d+ bytes came in \S+ s, [\d.]+ a second.*at least 3 a second"
        with pytest.raises(errors.RequestTimeout, match=told):
            await upload.finish()
    upload.close()


async def test_errors_after_the_beginning_reach_readers_and_finish():
    tap = Tap()
    tap.give(file_part(b"abc") + HEAD)
    upload = await begin(tap.body(), patience_s=0)
    assert (await in_thread(upload.open_bytes().read)) == b"abc"  # whole, though the form is not
    tap.give(file_part(b"def").removeprefix(HEAD))
    with pytest.raises(errors.MalformedRequest, match="a second file"):
        await upload.finish()
    with pytest.raises(OSError, match="a second file"):
        upload.open_bytes().read()
    assert not upload.complete
    upload.close()


async def test_a_full_disk_asks_to_come_again(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    small = UploadLimits(max_bytes=1_000, memory_bytes=10)
    with pytest.raises(errors.AtCapacity, match="cannot keep the upload"):
        await begin(chunks(form(file_part(bytes(11)))), small)
    (await begin(chunks(form(file_part(bytes(10)))), small)).close()


# --- while it comes ---


def encoded(path: Path, kind: str, codec: str, rate_hz: int, seconds: float) -> bytes:
    """Noise, which no codec makes small, encoded by PyAV."""
    noise = np.random.default_rng(3).normal(0, 0.1, (1, round(seconds * rate_hz))).astype(np.float32)
    with av.open(str(path), "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate_hz, layout="mono")
        frame = av.AudioFrame.from_ndarray(noise, format="fltp", layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = rate_hz, Fraction(1, rate_hz), 0
        context = stream.codec_context
        convert = av.AudioResampler(
            format=context.format.name, layout="mono", rate=rate_hz, frame_size=context.frame_size or 1_024
        )
        for piece in [*convert.resample(frame), *convert.resample(None), None]:
            container.mux(stream.encode(piece))
    return path.read_bytes()


STREAMED = {
    "wav": ("wav", "pcm_s16le", 16_000),
    "flac": ("flac", "flac", 16_000),
    "mp3": ("mp3", "libmp3lame", 44_100),
    "ogg": ("ogg", "libopus", 48_000),
}


@pytest.mark.parametrize("name", STREAMED)
async def test_audio_is_decoded_while_it_comes(tmp_path, name):
    audio = encoded(tmp_path / "x", *STREAMED[name], seconds=40)
    body = form(part("model", "m"), file_part(audio))
    tap, first = Tap(), asyncio.Event()
    loop = asyncio.get_running_loop()
    half = len(body) // 2
    for at in range(0, half, 10_000):
        tap.give(body[at : min(half, at + 10_000)])
    upload = await begin(tap.body())

    def decode() -> np.ndarray:
        with open_audio(upload.open_bytes()) as stream:
            heard = [next(stream)]
            loop.call_soon_threadsafe(first.set)
            heard += stream
        return np.concatenate(heard)

    decoding = asyncio.create_task(in_thread(decode))
    await asyncio.wait_for(first.wait(), WAIT_S)
    assert upload.fields == {"model": ["m"]}
    assert (upload.received_bytes, upload.complete, upload.failure) == (half, False, None)
    tap.give(body[half:])
    tap.give(None)
    await upload.finish()
    heard, whole = await decoding, read_audio(audio)
    # An encoder's padding at the end of an mp3 is cut off only where ffmpeg can seek.
    same = len(whole) if name != "mp3" else len(whole) - 800
    assert len(heard) - len(whole) in (range(800) if name == "mp3" else [0])
    np.testing.assert_array_equal(heard[:same], whole[:same])
    upload.close()


@pytest.mark.parametrize("whole", [True, False])
async def test_an_m4a_with_its_index_at_the_end(tmp_path, whole):
    audio = encoded(tmp_path / "x", "ipod", "aac", 44_100, seconds=5)
    assert audio.index(b"moov") > audio.index(b"mdat")
    body = form(file_part(audio))
    tap = Tap()
    tap.give(body if whole else body[:-1_000])
    if whole:
        tap.give(None)
    upload = await begin(tap.body(), patience_s=WAIT_S if whole else 0)
    assert upload.complete == whole
    decoding = asyncio.create_task(in_thread(lambda: read_audio(upload.open_bytes())))
    if not whole:
        await asyncio.sleep(0)
        tap.give(body[-1_000:])
        tap.give(None)
    np.testing.assert_array_equal(await decoding, read_audio(audio))
    upload.close()


async def test_two_readers_meet_neither_each_other_nor_the_edge_of_memory():
    audio = np.random.default_rng(1).bytes(300_000)
    tap = Tap()
    upload = await begin_with(tap, UploadLimits(max_bytes=1 << 20, memory_bytes=1_000))

    def read(size: int) -> bytes:
        reader, pieces = upload.open_bytes(), []
        while piece := reader.read(size):
            assert len(piece) <= size
            pieces.append(piece)
        return b"".join(pieces)

    reading = [asyncio.create_task(in_thread(lambda size=size: read(size))) for size in (999, 7_777, 1 << 20)]
    for at in range(0, len(audio), 1_234):
        tap.give(audio[at : at + 1_234])
        await asyncio.sleep(0)
    tap.give(form(b"\r\n"))
    tap.give(None)
    assert all([await task == audio for task in reading])
    assert upload.open_bytes().read() == audio
    upload.close()


async def begin_with(tap: Tap, limits: UploadLimits = LIMITS, **options: object) -> Upload:
    """An upload whose file has begun and holds nothing yet."""
    tap.give(file_part(b"")[:-2])
    return await begin(tap.body(), limits, patience_s=0, **options)


async def test_a_reader_can_seek_from_the_moment_the_file_is_whole():
    tap = Tap()
    upload = await begin_with(tap)
    reader = upload.open_bytes()
    assert reader.readable()
    assert not reader.seekable()
    with pytest.raises(io.UnsupportedOperation):
        reader.seek(0)
    tap.give(b"abcdef")
    assert (await in_thread(lambda: reader.read(4)), reader.tell()) == (b"abcd", 4)
    tap.give(form(b"\r\n"))
    tap.give(None)
    await upload.finish()
    assert reader.seekable()
    assert reader.read() == b"ef"
    assert reader.read() == b""
    assert (reader.seek(-5, os.SEEK_END), reader.seek(1, os.SEEK_CUR), reader.read(2)) == (1, 2, b"cd")
    assert (reader.seek(99), reader.read(1), reader.seek(-1), reader.read(1)) == (99, b"", 0, b"a")
    upload.close()


@pytest.mark.parametrize("begun", [b"", bytes(100_000)], ids=len)
async def test_closing_wakes_a_blocked_reader(begun):
    tap, waiting = Tap(), threading.Event()
    upload = await begin_with(tap, UploadLimits(max_bytes=1 << 20, memory_bytes=1_000))
    tap.give(begun)

    def read() -> None:
        reader = upload.open_bytes()
        left = len(begun)
        while left:
            left -= len(reader.read(left))
        waiting.set()
        reader.read(1)

    reading = asyncio.create_task(in_thread(read))
    await in_thread(waiting.wait)
    upload.close()
    upload.close()
    with pytest.raises(OSError, match="the upload is closed"):
        await reading
    with pytest.raises(OSError, match="the upload is closed"):
        upload.open_bytes().read()
    with pytest.raises(errors.Cancelled):
        await upload.finish()


async def test_a_client_that_leaves_fails_the_readers():
    tap = Tap()
    upload = await begin_with(tap, gone=ClientDisconnect)
    decoding = asyncio.create_task(in_thread(lambda: open_audio(upload.open_bytes())))
    tap.give(bytes(1_000))
    tap.give(ClientDisconnect())
    with pytest.raises(errors.ClientGone, match="left after 1099 bytes"):
        await upload.finish()
    with pytest.raises(errors.SourceNotFound, match="the client left"):
        await decoding
    assert isinstance(upload.failure, errors.ClientGone)
    upload.close()


async def test_starlette_s_stream_and_its_disconnect():
    body = form(part("model", "m"), file_part(b"abc"))
    end = {"type": "http.request", "body": body[50:], "more_body": False}
    for last in (end, {"type": "http.disconnect"}):
        messages = iter([{"type": "http.request", "body": body[:50], "more_body": True}, last])

        async def receive(messages=messages) -> dict[str, object]:
            return next(messages)

        stream = Request({"type": "http", "method": "POST", "headers": []}, receive).stream()
        if last is end:
            upload = await begin(stream, gone=ClientDisconnect)
            assert (upload.complete, upload.received_bytes) == (True, len(body))
            upload.close()
        else:
            with pytest.raises(errors.ClientGone, match="left after 50 bytes"):
                await begin(stream, gone=ClientDisconnect)


async def test_patience():
    tap = Tap()
    tap.give(part("model", "m"))
    beginning = asyncio.create_task(begin(tap.body(), patience_s=0, patience_bytes=10))
    await asyncio.sleep(0.02)
    assert not beginning.done(), "no file yet: fields are not waited for by the clock"
    tap.give(file_part(b"abc")[:-2])
    upload = await beginning
    assert upload.has_file
    upload.close()

    tap = Tap()
    tap.give(file_part(b"abc")[:-2])
    beginning = asyncio.create_task(begin(tap.body(), patience_s=WAIT_S, patience_bytes=10))
    await asyncio.sleep(0.02)
    assert not beginning.done()
    tap.give(b"defghij")
    upload = await beginning
    assert not upload.complete
    upload.close()


async def test_a_caller_that_gives_up_leaves_nothing_behind():
    before = asyncio.all_tasks()
    tap = Tap()
    beginning = asyncio.create_task(begin(tap.body()))
    await asyncio.sleep(0)
    beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before

    upload = await begin_with(tap)
    finishing = asyncio.create_task(upload.finish())
    await asyncio.sleep(0)
    finishing.cancel()  # only the waiting: reading goes on until close
    with pytest.raises(asyncio.CancelledError):
        await finishing
    tap.give(form(b"abc\r\n"))
    tap.give(None)
    await upload.finish()
    assert upload.open_bytes().read() == b"abc"
    upload.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


def unlinked_files() -> list[int]:
    """Sizes of the files without a name that this process holds open in the folder for temporary files."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(fd).startswith(tempfile.gettempdir()) and fd.stat().st_nlink == 0:
                found.append(fd.stat().st_size)
        except FileNotFoundError:
            continue  # the folder's own descriptor
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc to see open files")
async def test_a_large_upload_stays_on_disk_and_leaves_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mebibytes = 64
    chunk = np.random.default_rng(2).bytes(1 << 16)

    async def body() -> AsyncIterator[bytes]:
        yield file_part(b"")[:-2]
        for _ in range(mebibytes * 16):
            yield chunk
        yield form(b"\r\n")

    tracemalloc.start()
    try:
        upload = await begin(body())
        await upload.finish()
        assert unlinked_files() == [(mebibytes - 1) << 20]
        reader = upload.open_bytes()
        reader.seek(-len(chunk), os.SEEK_END)
        assert await in_thread(reader.read) == chunk
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
        assert list(tmp_path.iterdir()) == []
        upload.close()
        assert unlinked_files() == []
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()
