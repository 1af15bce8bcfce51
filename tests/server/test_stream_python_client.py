"""Our Python client on the real server, behind a proxy that cuts connections; and `asr-serve listen --server`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case_tiers import exhaustive_after
from children import Child
from running_server import PAID, PAID_WRITTEN, WAIT_S, Running, eventually
from websockets.sync.server import ServerConnection
from websockets.sync.server import serve as serve_websocket

from asr_serve.api.cli.exit_codes import FAILED, INTERRUPTED
from asr_serve.api.client.connection import websocket_url
from asr_serve.api.client.stream import ConnectionLost, StreamClient
from asr_serve.api.client.transcript import SessionTranscript
from asr_serve.audio import read_audio
from asr_serve.errors import OptionError, OutOfTurn, Refused, Unreachable, UnsupportedOption
from asr_serve.protocols.stream.server_events import (
    AckEvent,
    EndEvent,
    FlushedEvent,
    LockedTextEvent,
    NumberedEvent,
    PartialEvent,
    SegmentEvent,
    SessionEvent,
    stream_error,
)

RUN = "from asr_serve.api.cli import main; main()"
OPTIONS: dict[str, Any] = {"silence_schedule": "inf:300", "partial_ms": 200}


class Proxy:
    """TCP to a server; `cut` breaks what is connected, `deaf` refuses what comes."""

    def __init__(self, port: int) -> None:
        self.port, self.deaf, self.connections = port, False, 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self.passed_bytes = 0
        """From clients to the server."""
        self.cut_after: Callable[[], float] = lambda: math.inf
        """How many of them a connection lasts."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                if self.deaf:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self.port))
                with self._lock:
                    self.connections += 1
                    self._open += [near, far]
                last = self.cut_after()
                threading.Thread(target=self._pass, args=(near, far, last), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, None), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, last: float | None) -> None:
        came = 0
        with contextlib.suppress(OSError):
            while piece := source.recv(4_096):
                target.sendall(piece)
                came += len(piece)
                if last is not None:
                    self.passed_bytes += len(piece)
                    if came > last:
                        break
        for each in (source, target):
            reset(each)

    def cut(self) -> None:
        with self._lock:
            gone, self._open = self._open, []
        for each in gone:
            reset(each)

    def close(self) -> None:
        reset(self._listening)
        self.cut()


def reset(line: socket.socket) -> None:
    """Close without a word."""
    with contextlib.suppress(OSError):
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        line.shutdown(socket.SHUT_RDWR)
    line.close()


@pytest.fixture
def proxy(server: Running) -> Iterator[Proxy]:
    made = Proxy(server.port)
    yield made
    made.close()


@pytest.fixture(scope="module")
def speech(cities: Path) -> bytes:
    return as_pcm16(read_audio(cities)[: 12 * 16_000])


def as_pcm16(pcm: np.ndarray) -> bytes:
    return np.round(pcm * 32_767).astype("<i2").tobytes()


def told(stream: StreamClient) -> tuple[SessionTranscript, list[Any]]:
    transcript, events = SessionTranscript(), []
    for event in stream:
        transcript.note(event)
        events.append(event)
    return transcript, events


@pytest.fixture(scope="module")
def uncut(shared_server: Running, speech: bytes) -> list[Any]:
    """What is told of the speech when nothing breaks."""
    with StreamClient(shared_server.url, **OPTIONS) as stream:
        stream.send(speech)
        stream.end()
        return told(stream)[1]


def segments(events: list[Any]) -> list[SegmentEvent]:
    return [event for event in events if isinstance(event, SegmentEvent)]


def said(found: list[SegmentEvent]) -> list[tuple[float, float, str]]:
    return [(each.start_s, each.end_s, each.text) for each in found]


def test_a_session_from_beginning_to_end(uncut: list[Any]) -> None:
    assert isinstance(uncut[0], SessionEvent)
    assert not uncut[0].resumed
    assert isinstance(uncut[-1], EndEvent)
    assert uncut[-1].duration_s == 12.0
    assert uncut[-1].segments == len(segments(uncut)) >= 2
    assert [event.seq for event in uncut if isinstance(event, NumberedEvent)] == list(
        range(1, 1 + sum(isinstance(event, NumberedEvent) for event in uncut))
    )
    assert not any(isinstance(event, ConnectionLost) for event in uncut)
    text = " ".join(each.text for each in segments(uncut))
    assert "best of times" in text.lower()


@pytest.mark.slow
@pytest.mark.parametrize("seed", exhaustive_after(2, range(6)))
def test_connections_cut_at_random_change_nothing(proxy: Proxy, speech: bytes, uncut: list[Any], seed: int) -> None:
    """After so many bytes, or so much time, of which some is after all audio was sent."""
    chance = random.Random(seed)
    transcript = SessionTranscript()
    with contextlib.ExitStack() as held:
        if seed % 2:
            # The first one by bytes: on a busy machine all may be said before the thread has its turn.
            proxy.cut_after = lambda: 1_000 if proxy.connections == 1 else math.inf
            held.enter_context(cutting(proxy, chance))
        else:
            proxy.cut_after = lambda: chance.uniform(2_000, 150_000)
        stream = held.enter_context(StreamClient(proxy.url, **OPTIONS))
        threading.Thread(target=send_in_pieces, args=(stream, speech, chance), daemon=True).start()
        events = []
        for event in stream:
            transcript.note(event)
            events.append(event)
    assert proxy.connections > 1
    assert said(segments(events)) == said(segments(uncut))
    seqs = [event.seq for event in events if isinstance(event, NumberedEvent)]
    assert seqs == sorted(set(seqs)), "each once, in order"
    assert seqs[-1] - len(seqs) in (0, 1), "all, but for a flush that had to be asked for twice"
    assert events[-1].duration_s == 12.0
    assert sum(isinstance(event, ConnectionLost) for event in events) == sum(
        isinstance(event, SessionEvent) and event.resumed for event in events
    )
    flushed = [event.id for event in events if isinstance(event, FlushedEvent)]
    assert flushed in ([], ["now"]), "asked for once, answered once"
    assert transcript.ended
    assert transcript.text == transcript.final == " ".join(each.text for each in segments(events))


@pytest.mark.parametrize(("code", "announced"), [(1000, 0), (1001, 1)])
def test_a_connection_closed_before_its_last_events(code: int, announced: int) -> None:
    """A normal close says that everything was sent: what this side dropped is fetched again, and nothing was lost."""
    opened: list[str] = []

    def answer(line: ServerConnection) -> None:
        assert line.request is not None
        opened.append(line.request.path)
        session = SessionEvent("one", len(opened) > 1, "m", "en", "s16le", 16_000, 0, len(opened) - 1, 30.0)
        line.send(session.encode().json.decode())
        if len(opened) == 1:
            line.close(code)
        else:
            line.send(EndEvent(seq=1, duration_s=1.0, segments=0).encode().json.decode())
            line.close()

    with serve_websocket(answer, "127.0.0.1", 0) as scripted:
        thread = threading.Thread(target=scripted.serve_forever)
        thread.start()
        with StreamClient(f"http://127.0.0.1:{scripted.socket.getsockname()[1]}") as stream:
            events = list(stream)
        scripted.shutdown()
        thread.join(WAIT_S)
    assert [path.partition("?")[2] for path in opened] == ["", "session=one&after=0"]
    assert sum(isinstance(event, ConnectionLost) for event in events) == announced
    assert sum(isinstance(event, SessionEvent) and event.resumed for event in events) == announced
    assert isinstance(events[-1], EndEvent)


def test_a_server_whose_engine_is_loading_is_asked_again() -> None:
    """As the ingress of a cluster is for some seconds after it was replaced."""
    opened: list[str] = []

    def answer(line: ServerConnection) -> None:
        opened.append("")
        if len(opened) == 2:
            line.send(stream_error("engine_closed", "the engine of m is loading", 20))
        else:
            session = SessionEvent("one", len(opened) > 1, "m", "en", "s16le", 16_000, 0, 0, 30.0)
            line.send(session.encode().json.decode())
        if len(opened) == 3:
            line.send(EndEvent(seq=1, duration_s=1.0, segments=0).encode().json.decode())
        line.close(1001 if len(opened) == 1 else 1000)

    with serve_websocket(answer, "127.0.0.1", 0) as scripted:
        thread = threading.Thread(target=scripted.serve_forever)
        thread.start()
        with StreamClient(f"http://127.0.0.1:{scripted.socket.getsockname()[1]}") as stream:
            events = list(stream)
        scripted.shutdown()
        thread.join(WAIT_S)
    assert len(opened) == 3
    assert isinstance(events[-1], EndEvent)


@contextlib.contextmanager
def cutting(proxy: Proxy, chance: random.Random) -> Iterator[None]:
    """Twenty times, once there is a connection, at short and at longer intervals."""
    over = threading.Event()

    def cut() -> None:
        eventually(lambda: proxy.passed_bytes > 1_000)
        for _ in range(20):
            if over.wait(chance.choice((0.01, 0.05, 0.2)) * chance.random()):
                return
            proxy.cut()

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(WAIT_S)


def send_in_pieces(stream: StreamClient, audio: bytes, chance: random.Random) -> None:
    at = 0
    while at < len(audio):
        size = chance.randrange(1, 40_000)
        stream.send(audio[at : at + size])
        at += size
    stream.flush("now")
    stream.end()


def test_what_is_locked_begins_the_segment(uncut: list[Any]) -> None:
    locked = ""
    for event in uncut:
        if isinstance(event, LockedTextEvent):
            locked += event.text
        if isinstance(event, SegmentEvent):
            assert event.text.startswith(locked)
            locked = ""


def test_a_flush_makes_final_what_was_sent(server: Running, speech: bytes) -> None:
    with StreamClient(server.url) as stream:
        stream.send(speech[: 2 * 16_000 * 3])
        name = stream.flush()
        with pytest.raises(OptionError):
            stream.flush(name)
        final = []
        while not isinstance(event := stream.take(WAIT_S), FlushedEvent):
            final.append(event)
        assert event.id == name
        assert event.position_s == 3.0
        assert segments(final)
        stream.end()
        told(stream)
        assert stream.over
        with pytest.raises(OutOfTurn):
            stream.send(b"\0\0")


def test_silence_as_a_count_survives_connections_that_are_cut(proxy: Proxy, server: Running, speech: bytes) -> None:
    """Speech, a count, speech, a count: the same words and times as with zeros, and the same length."""
    half, pause = speech[: 2 * 16_000 * 4], 3 * 16_000
    heard = []
    for url, counted in ((server.url, False), (proxy.url, True)):
        with StreamClient(url) as stream:
            for part in range(2):
                stream.send(half)
                if counted:
                    stream.send_silence(pause)
                    if not part:
                        proxy.cut()
                else:
                    stream.send(bytes(2 * pause))
            stream.end()
            heard.append(told(stream)[1])
    assert len(segments(heard[0])) >= 2
    assert said(segments(heard[1])) == said(segments(heard[0]))
    assert heard[0][-1].duration_s == heard[1][-1].duration_s == 2 * (4 + 3)
    with StreamClient(server.url, encoding="opus") as stream, pytest.raises(UnsupportedOption, match="opus"):
        stream.send_silence(160)


def test_a_connection_that_stands_still_is_found_again(proxy: Proxy, speech: bytes, uncut: list[Any]) -> None:
    with StreamClient(proxy.url, **OPTIONS) as stream:
        stream.send(speech[:100_000])
        while not isinstance(stream.take(WAIT_S), AckEvent):
            pass
        proxy.deaf = True
        proxy.cut()
        stream.send(speech[100_000:])
        stream.end()
        seen: list[Any] = []
        while not seen or not isinstance(seen[-1], ConnectionLost):
            seen.append(stream.take(WAIT_S))
        assert stream.take(0.5) is None
        assert not stream.over
        proxy.deaf = False
        _, events = told(stream)
    assert said(segments(seen + events)) == said(segments(uncut))


def test_what_waits_is_bounded_and_not_all_sent_again(proxy: Proxy, speech: bytes) -> None:
    with StreamClient(proxy.url, buffer_bytes=64_000) as stream:
        stream.send(speech[:64_000])
        eventually(lambda: stream._arrived_bytes >= 32_000)
        proxy.deaf = True
        proxy.cut()
        done = threading.Event()

        def send() -> None:
            for at in range(64_000, 320_000, 32_000):
                stream.send(speech[at : at + 32_000])
            done.set()

        threading.Thread(target=send, daemon=True).start()
        assert not done.wait(0.3), "there is no room"
        proxy.deaf = False
        assert done.wait(WAIT_S)
        stream.end()
        told(stream)


def test_a_session_whose_time_is_up(serve: Callable[..., Running], speech: bytes) -> None:
    server = serve(resume_s=0.5)
    proxy = Proxy(server.port)
    with StreamClient(proxy.url) as stream:
        stream.send(speech[:64_000])
        while not isinstance(stream.take(WAIT_S), AckEvent):
            pass
        proxy.deaf = True
        proxy.cut()
        with pytest.raises(Unreachable, match=r"not found again for 0\.5 s"):
            told(stream)
        with pytest.raises(Unreachable):
            stream.send(b"\0\0")
    proxy.close()


def test_refusals(server: Running) -> None:
    with pytest.raises(Refused) as refused:
        StreamClient(server.url, rate=5)
    assert "8000" in str(refused.value)
    with pytest.raises(Refused, match="did you mean 'language'"):
        StreamClient(server.url, langauge="en")
    with pytest.raises(Unreachable, match="no server answers at http"):
        StreamClient("http://127.0.0.1:1")
    with pytest.raises(Refused) as refused:
        StreamClient(f"{server.url}/nowhere")
    assert refused.value.code == "no_such_route"


def test_keys(serve: Callable[..., Running]) -> None:
    server = serve(api_keys=("right",))
    for key in (None, "wrong"):
        with pytest.raises(Refused, match="key"):
            StreamClient(server.url, api_key=key)
    with StreamClient(server.url, api_key="right") as stream:
        stream.end()
        assert isinstance(told(stream)[1][-1], EndEvent)


def test_hanging_up_drops_the_session(server: Running, speech: bytes) -> None:
    with StreamClient(server.url) as stream:
        stream.send(speech)
        assert isinstance(stream.take(WAIT_S), SessionEvent)
    assert stream.over or stream._closed
    server.expect_empty()


@pytest.mark.parametrize(
    ("server", "found"),
    [
        ("http://a:8000", "ws://a:8000/v1/stream"),
        ("a:8000", "ws://a:8000/v1/stream"),
        ("https://a/asr/", "wss://a/asr/v1/stream"),
        ("wss://[::1]:9/v1/stream", "wss://[::1]:9/v1/stream"),
    ],
)
def test_addresses(server: str, found: str) -> None:
    assert websocket_url(server, {}) == found
    assert websocket_url(server, {"a": "b c"}) == f"{found}?a=b+c"


@pytest.mark.parametrize("server", ["", "ftp://a", "http://", "http://a?x=1", "file:///a"])
def test_what_is_no_address(server: str) -> None:
    with pytest.raises(OptionError, match="a URL"):
        websocket_url(server, {})


def test_adding_up() -> None:
    known = SessionTranscript()
    assert known.note(PartialEvent(start_s=0, end_s=1, text="So"))
    assert not known.note(PartialEvent(start_s=0, end_s=2, text="So"))
    assert known.note(LockedTextEvent(start_s=0, end_s=1, text="So it", seq=1))
    assert known.note(PartialEvent(start_s=0, end_s=2, text=" goes"))
    assert (known.text, known.certain, known.final) == ("So it goes", "So it", "")
    assert known.note(SegmentEvent(index=0, start_s=0, end_s=2, text="So it goes.", seq=2))
    assert known.note(PartialEvent(start_s=2, end_s=3, text="And"))
    assert (known.text, known.certain, known.final) == ("So it goes. And", "So it goes.", "So it goes.")
    assert not known.note(AckEvent(received_bytes=64_000, received_s=2.0))
    assert known.note(EndEvent(duration_s=3.0, segments=1, seq=3))
    assert (known.heard_s, known.ended) == (3.0, True)


def test_what_is_locked_may_yet_be_written_otherwise() -> None:
    known = SessionTranscript(itn=True)
    assert known.note(LockedTextEvent(start_s=0, end_s=1, text="We paid twenty", seq=1))
    assert (known.text, known.certain) == ("We paid twenty", "")
    assert known.note(
        SegmentEvent(index=0, start_s=0, end_s=2, text="We paid $20.", spoken="We paid twenty dollars.", seq=2)
    )
    assert (known.text, known.certain) == ("We paid $20.", "We paid $20.")


def test_where_the_speaker_changes_several_segments_end_at_once() -> None:
    """What was locked begins all of them together: nothing of it is lost, or certain twice."""
    known = SessionTranscript()
    said = ["You were in pain?", "Not now.", "Do you remember?"]
    known.note(LockedTextEvent(start_s=0, end_s=3, text="You were in pain? Not now. Do you", seq=1))
    certain = [known.certain]
    for index, text in enumerate(said):
        known.note(SegmentEvent(index=index, start_s=index, end_s=index + 1, text=text, seq=index + 2))
        certain.append(known.certain)
    assert certain == ["You were in pain? Not now. Do you"] * 3 + [" ".join(said)]


# --- asr-serve listen --server ---------------------------------------------------------------------------


def start(*arguments: str | Path, **streams: Any) -> subprocess.Popen[bytes]:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return Child([sys.executable, "-c", RUN, "listen", *map(str, arguments)], env=environ, **streams)


def listen(*arguments: str | Path, heard: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    with start(*arguments, stdin=subprocess.DEVNULL if heard is None else subprocess.PIPE) as process:
        out, err = process.communicate(heard, WAIT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_a_file_is_heard_by_the_server(server: Running, beckett: Path) -> None:
    done = listen("--file", beckett, "--server", server.url)
    assert done.returncode == 0, done.stderr.decode()
    assert re.fullmatch(rb"[^\n\x1b]*no matter[^\n\x1b]*\n", done.stdout)
    assert re.fullmatch(rb"10\.0 s of audio in .* x real time\n", done.stderr)


def test_stdin_at_another_rate_and_json(server: Running, speech: bytes) -> None:
    doubled = np.repeat(np.frombuffer(speech, "<i2"), 2).tobytes()
    done = listen("-", "--rate", "32000", "--server", server.url, "--json", "-q", heard=doubled)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, b"")
    assert "".join(line["delta"] for line in lines) == lines[-1]["text"]
    assert "best of times" in lines[-1]["text"].lower()
    assert [line["is_final"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["audio_duration_ms"] == 12_000


@pytest.mark.slow
def test_words_and_speakers_on_the_command_line(server: Running, packaged_speech: Path, hears_speakers: None) -> None:
    """By the server and by a model in this process; who said what follows how far each had heard by then."""
    clip = packaged_speech / "endgame_nagg_nell.wav"
    asked = [clip, "--words", "--speakers", "--json", "-q"]
    there = listen(*asked, "--server", server.url)
    assert there.returncode == 0, there.stderr.decode()
    found = [json.loads(line) for line in there.stdout.splitlines()]
    assert "".join(line["delta"] for line in found) == found[-1]["text"]
    assert [line["is_final"] for line in found] == [False] * (len(found) - 1) + [True]
    segments = [segment for line in found for segment in line["segments"]]
    assert " ".join(segment["text"] for segment in segments) == found[-1]["text"]
    assert len(found[-1]["speakers"]) == len(segments) > 1
    assert set(found[-1]["speakers"]) == {"SPEAKER_00", "SPEAKER_01"}
    assert not any("speakers" in line for line in found[:-1])
    for segment in segments:
        assert segment["speaker"] in ("SPEAKER_00", "SPEAKER_01")
        assert " ".join(word["word"] for word in segment["words"]) == segment["text"]
        times = [time for word in segment["words"] for time in (word["start"], word["end"])]
        whole = [segment["start"], *times, segment["end"]]
        assert whole == sorted(whole)
        assert all(0 < word["confidence"] <= 1 for word in segment["words"])
    here = listen(*asked, "--dtype", "fp32")
    assert here.returncode == 0, here.stderr.decode()
    own = [json.loads(line) for line in here.stdout.splitlines()]
    assert own[-1].keys() == found[-1].keys()
    assert own[-1]["text"] == found[-1]["text"]
    assert set(own[-1]["speakers"]) == set(found[-1]["speakers"])
    as_text = listen(clip, "--speakers", "-q", "--server", server.url).stdout.decode()
    assert as_text.startswith("SPEAKER_00: Do you hear me?")
    assert "SPEAKER_01: " in as_text


def test_numbers_on_the_command_line(server: Running, paid_wav: bytes, tmp_path: Path) -> None:
    """What was told as certain stays, although the number was locked as it was said."""
    (tmp_path / "paid.wav").write_bytes(paid_wav)
    done = listen(tmp_path / "paid.wav", "--itn", "--json", "-q", "--chunk-ms", "100", "--server", server.url)
    assert done.returncode == 0, done.stderr.decode()
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert "".join(line["delta"] for line in found) == found[-1]["text"] == PAID_WRITTEN
    assert [s["spoken"] for line in found for s in line["segments"]] == [PAID]


@pytest.mark.slow
def test_a_connection_that_breaks_is_said_and_mended(proxy: Proxy, server: Running, beckett: Path) -> None:
    want = listen(beckett, "--server", server.url).stdout
    with start(beckett, "--realtime", "--server", proxy.url) as process:
        eventually(lambda: proxy.passed_bytes > 100_000)
        proxy.cut()
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert out == want
    assert re.match(rb"the connection was lost: .*; trying again\nconnected again: nothing is lost\n10\.0 s", err)


@pytest.mark.slow
def test_ctrl_c_ends_stdin_and_the_server_finishes_the_text(server: Running, speech: bytes) -> None:
    def heard_s() -> float:
        return server.counted("asr_serve_live_audio_seconds_total", route="/v1/stream")

    before_s = heard_s()
    with start("-", "--server", server.url, stdin=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stderr
        assert process.stderr.readline() == b"listening; ctrl-C ends\n"
        process.stdin.write(speech[: 2 * 16_000 * 4])
        process.stdin.flush()
        eventually(lambda: heard_s() > before_s + 3.9)  # a sum of floats
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == INTERRUPTED
    assert b"best of times" in out.lower()


def test_a_server_that_is_not_there_or_says_no(serve: Callable[..., Running], beckett: Path) -> None:
    gone = listen(beckett, "--server", "http://127.0.0.1:1")
    assert gone.returncode == FAILED
    assert gone.stderr.startswith(b"error: no server answers at http://127.0.0.1:1: ")
    keyed = serve(api_keys=("right",))
    refused = listen(beckett, "--server", keyed.url)
    assert refused.returncode == FAILED
    assert b"error: " in refused.stderr
    assert b"key" in refused.stderr
    assert listen(beckett, "--server", keyed.url, "--api-key", "right").returncode == 0
    wrong = listen(beckett, "--server", keyed.url, "--api-key", "right", "--model", "nothing")
    assert wrong.returncode == FAILED
    assert b"nothing" in wrong.stderr
