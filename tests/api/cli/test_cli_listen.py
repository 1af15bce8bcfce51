"""`asr-serve listen`: its parts, and the whole of it as a process with the embedded model."""

from __future__ import annotations

import io
import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cli_process import expect_usage_error, start_cli
from cli_process import invoke as invoke_cli
from typer.testing import Result

import asr_serve
from asr_serve.api.cli import backends
from asr_serve.api.cli.exit_codes import FAILED, INTERRUPTED, USAGE
from asr_serve.api.cli.io import audio_sources
from asr_serve.api.cli.io.audio_sources import InterruptHandler, StdinSource, paced_chunks
from asr_serve.api.cli.io.captions import CELLS, Captions, JsonLineCaptions, LevelMeter, caption
from asr_serve.api.stream import StreamResult
from asr_serve.audio import read_audio
from asr_serve.config import EngineConfig
from asr_serve.errors import OptionError, UnsupportedAudio, WeightsMissing
from asr_serve.types import Segment

WAIT_S = 180.0


def start(*arguments: str | Path, **streams: Any) -> subprocess.Popen[bytes]:
    return start_cli("listen", "--dtype", "fp32", *arguments, **streams)


def listen(*arguments: str | Path, sent: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    with start(*arguments, stdin=subprocess.DEVNULL if sent is None else subprocess.PIPE) as process:
        out, err = process.communicate(sent, WAIT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def invoke(*arguments: str) -> Result:
    return invoke_cli("listen", *arguments)


@pytest.fixture(scope="module")
def path(packaged_speech: Path) -> Path:
    return packaged_speech / "beckett.wav"


@pytest.fixture(scope="module")
def pcm16(path: Path) -> bytes:
    return np.round(read_audio(path) * 32_767).astype("<i2").tobytes()


def as_wav(pcm16: bytes, *, channels: int = 1, width: int = 2, rate_hz: int = 16_000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(channels)
        written.setsampwidth(width)
        written.setframerate(rate_hz)
        written.writeframes(pcm16)
    return file.getvalue()


# --- with the model -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_file_and_stdin_give_the_same_text(path: Path, pcm16: bytes) -> None:
    file = listen(path)
    assert file.returncode == 0, file.stderr.decode()
    assert re.fullmatch(rb"[^\n\x1b]*no matter[^\n\x1b]*\n", file.stdout), "a line for the segment, no escapes"
    assert re.fullmatch(rb"10\.0 s of audio in .* x real time\n", file.stderr)
    raw = listen("-", sent=pcm16)
    assert raw.stdout == file.stdout
    assert raw.stderr.startswith(b"listening; ctrl-C ends\n10.0 s of audio")
    # What a recorder writes that cannot go back: no length.
    header = bytearray(as_wav(b""))
    header[40:44] = (2**31).to_bytes(4, "little")
    recorded = listen("-", "--quiet", sent=bytes(header) + pcm16)
    assert (recorded.stdout, recorded.stderr, recorded.returncode) == (file.stdout, b"", 0)


@pytest.mark.slow
def test_json_lines_add_up_to_the_text(path: Path) -> None:
    done = listen(path, "--json", "-q", "--chunk-ms", "1000", "--silence-schedule", "inf:300")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr.decode()
    assert [line["audio_duration_ms"] for line in lines] == [*range(1_000, 10_000, 1_000), 9_963]
    assert [line["is_final"] for line in lines] == [False] * 9 + [True]
    assert "".join(line["delta"] for line in lines) == lines[-1]["text"]
    segments = [segment for line in lines for segment in line["segments"]]
    assert len(segments) >= 3
    assert len(lines[-1]["segments"]) < len(segments), "they come when they are closed"
    assert " ".join(segment["text"] for segment in segments) == lines[-1]["text"]
    assert all(a["end"] <= b["start"] for a, b in itertools.pairwise(segments))


@pytest.mark.slow
def test_a_terminal_shows_one_changing_line(path: Path) -> None:
    ours, theirs = pty.openpty()
    with start(path, stdout=theirs) as process:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 4_096):
                shown += piece
        except OSError:  # the other end was closed
            pass
        assert process.wait(WAIT_S) == 0
    os.close(ours)
    states = shown.decode().split("\r\x1b[K")
    assert len(states) > 10
    assert all("\n" not in state for state in states[:-1])
    assert "\x1b[2m" in states[3], "dim is what may change"
    assert "no matter" in states[-1]
    assert states[-1].endswith("\r\n")


@pytest.mark.slow
def test_the_first_ctrl_c_ends_stdin_and_finishes_the_text(pcm16: bytes) -> None:
    with start("-", "--json", stdin=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(pcm16[: 2 * 16_000 * 4])
        process.stdin.flush()
        before = [json.loads(process.stdout.readline()) for _ in range(5)]
        process.send_signal(signal.SIGINT)
        after = [json.loads(line) for line in process.stdout]
        assert process.wait(WAIT_S) == INTERRUPTED
    assert not before[-1]["is_final"]
    assert after[-1]["is_final"]
    assert after[-1]["audio_duration_ms"] == 4_000
    assert after[-1]["text"].lower().startswith("ever tried")


@pytest.mark.slow
def test_real_time_and_a_closed_reader(path: Path) -> None:
    with start(path, "--real-time", "--json") as process:
        assert process.stdout
        assert json.loads(process.stdout.readline())["audio_duration_ms"] == 720
        process.stdout.close()  # `| head -1`
        assert process.wait(WAIT_S) == 141
    missing = listen(path.with_name("none.wav"))
    assert missing.returncode == FAILED
    assert re.fullmatch(rb"error: the file '.*none\.wav' does not exist\..*\n", missing.stderr)


# --- without ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: object, **options: object) -> None:
        pytest.fail("a model was loaded")

    monkeypatch.setattr(asr_serve, "load", load)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["talk.wav", "--chunk-ms", "5"], "chunk_ms=5. a whole number, 100 to 30000"),
        (["talk.wav", "--silence-schedule", "5000"], "silence schedule"),
        (["talk.wav", "--rate", "8000"], "--rate with a file"),
        (["-", "--real-time"], "--real-time with stdin"),
        (["--file", "talk.wav", "--chunk-ms", "5"], "chunk_ms=5. a whole number, 100 to 30000"),
        (["-", "--realtime"], "--real-time with stdin"),
        (["--mic", "--real-time"], "--real-time with --mic"),
        (["talk.wav", "--num-speakers", "0"], "num_speakers=0. a whole number from 1 to 32"),
        (["talk.wav", "--min-speakers", "3", "--max-speakers", "2"], "min_speakers=3 with max_speakers=2"),
        (["--mic", "--rate", "8000"], "--rate with --mic"),
        (["talk.wav", "--mic"], "talk.wav and --mic came"),
        (["talk.wav", "--file", "other.wav"], "talk.wav and --file other.wav came"),
        (["--json"], "nothing to listen to came"),
        (["talk.wav", "--input", "usb"], "--input with a file"),
        (["talk.wav", "--api-key", "x"], "--api-key without --server"),
        (["talk.wav", "--server", "http://127.0.0.1:1", "--weights", "x"], "--weights with --server"),
        (["talk.wav", "--server", "ftp://127.0.0.1"], "a URL, http:// or https://"),
        (["talk.wav", "--set", "engine.head=crf"], "engine.head='crf' (flag --set). ctc, rnnt, tdt"),
        (["talk.wav", "--set", "port=1"], "it is a server's"),
        (["talk.wav", "--server", "http://127.0.0.1:1", "--set", "engine.beam=2"], "--set with --server"),
    ],
)
def test_wrong_usage_loads_no_model(arguments: list[str], message: str) -> None:
    expect_usage_error(invoke(*arguments), message)


def test_engine_settings_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, **options: object) -> None:
        assert (name, options["engine"]) == ("armspeech-hy", EngineConfig(beam=8, chunk_wait_ms=0.0))
        raise WeightsMissing("far enough")

    monkeypatch.setattr(asr_serve, "load", load)
    settings = ["--set", "engine.beam=8", "--set", "engine.chunk_wait_ms=0"]
    assert "far enough" in invoke("talk.wav", "-m", "armspeech-hy", *settings).stderr


def test_prompts_and_hot_words_reach_a_model_and_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Any] = []

    def remote(server: str, key: str | None, query: dict[str, Any]) -> None:
        requests.append(query)
        raise WeightsMissing("far enough")

    def local(model: str, options: dict[str, Any], **loading: Any) -> None:
        requests.append(options)
        raise WeightsMissing("far enough")

    monkeypatch.setattr(backends, "RemoteTranscriber", remote)
    monkeypatch.setattr(backends, "LocalTranscriber", local)
    said = ["--prompt", "A talk.", "--hotword", "Ada", "--hotword", "Charles Babbage", "--num-speakers", "2"]
    for server in ([], ["--server", "http://127.0.0.1:1"]):
        assert "far enough" in invoke("talk.wav", *said, *server).stderr
    assert requests[0]["hotwords"] == ("Ada", "Charles Babbage")
    assert requests[1]["hotwords"] == "Ada,Charles Babbage"
    assert {(each["prompt"], each["num_speakers"]) for each in requests} == {("A talk.", 2)}


def test_a_terminal_as_stdin_is_refused() -> None:
    ours, theirs = pty.openpty()
    with start("-", stdin=theirs) as process:
        _, err = process.communicate(timeout=WAIT_S)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == USAGE
    assert b"arecord -f S16_LE -r 16000 | asr-serve listen -" in err


def test_help_has_examples() -> None:
    said = invoke("--help").stdout
    assert "arecord -f S16_LE -r 16000 | asr-serve listen -" in said
    assert "--real-time" in said
    assert "listen" in invoke_cli("--help").stdout


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Standard input as a pipe that sends pieces."""
    read, write = os.pipe()
    file = os.fdopen(read, "rb")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=file, isatty=lambda: False))

    def send(*pieces: bytes) -> StdinSource:
        for piece in pieces:
            os.write(write, piece)
        os.close(write)
        return StdinSource()

    yield send
    file.close()


@pytest.mark.parametrize("split", [3, 12, 44, 100])
def test_a_wav_header_is_read_and_trailing_chunks_are_not(stdin: Any, split: int) -> None:
    pcm = bytes(range(200)) * 10
    written = as_wav(pcm, rate_hz=8_000) + b"LIST\x04\0\0\0abcd"
    opened = stdin(written[:split], written[split:])
    assert opened.open(None) == 8_000
    assert b"".join(opened.chunks()) == pcm
    assert not opened.interrupted


@pytest.mark.parametrize(("rate_hz", "pcm"), [(48_000, b"\1\2" * 1_000), (None, b"")], ids=["raw", "empty"])
def test_raw_samples_have_the_rate_given_or_16_khz(stdin: Any, rate_hz: int | None, pcm: bytes) -> None:
    opened = stdin(pcm) if pcm else stdin()
    assert opened.open(rate_hz) == (rate_hz or 16_000)
    assert b"".join(opened.chunks()) == pcm


@pytest.mark.parametrize(
    ("head", "rate_hz", "error", "match"),
    [
        (as_wav(b"\0" * 400, channels=2), None, UnsupportedAudio, "ffmpeg -i"),
        (as_wav(b"\0" * 400, width=3), None, UnsupportedAudio, "ffmpeg -i"),
        (b"fLaC" + b"\0" * 100, None, UnsupportedAudio, "ffmpeg -i"),
        (b"OggS" + b"\0" * 100, None, UnsupportedAudio, "ffmpeg -i"),
        (b"RIFF" + b"\0" * 9_000, None, UnsupportedAudio, "ffmpeg -i"),
        (as_wav(b"\0" * 400), 44_100, OptionError, "16000 Hz"),
    ],
    ids=["stereo", "24 bit", "flac", "ogg", "no data", "another rate"],
)
def test_unsupported_stdin_is_refused(
    stdin: Any, head: bytes, rate_hz: int | None, error: type[Exception], match: str
) -> None:
    opened = stdin(head)
    with pytest.raises(error, match=match):
        opened.open(rate_hz)


def test_a_file_is_paced_in_real_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    arrived_s: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(audio_sources, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    samples = 0
    for piece in paced_chunks(str(path)):
        samples += len(piece)
        arrived_s.append(now_s)
        now_s += 0.03  # what is done with it takes time, and is made up for
        assert arrived_s[-1] == pytest.approx(100 + samples / 16_000)
    assert samples == len(read_audio(path))


def result(text: str, fixed: int, *segments: str, is_final: bool = False) -> StreamResult:
    closed = tuple(Segment(at * 16_000, (at + 1) * 16_000, said) for at, said in enumerate(segments))
    return StreamResult(text, text[:fixed], 1_000, is_final, closed)


def test_captions_print_segments_and_redraw_the_rest() -> None:
    out = io.BytesIO()
    captions = Captions(out, out)
    captions.show(result("So it", 0))
    captions.show(result("So it goes. And then", 2))
    captions.show(result("So it goes. And then he", 15, "So it goes."))
    assert out.getvalue().decode().split("\r\x1b[K") == [
        "",
        "\x1b[2mSo it\x1b[0m",
        "\x1b[1mSo\x1b[0m\x1b[2m it goes. And then\x1b[0m",
        "So it goes.\n\x1b[1mAnd\x1b[0m\x1b[2m then he\x1b[0m",
    ]
    captions.close()
    assert out.getvalue().endswith(b"he\x1b[0m\n")
    out = io.BytesIO()
    captions = Captions(out)
    captions.show(result("So it goes. And", 15, "So it goes."))
    captions.show(result("So it goes. And then.", 21, "So it goes.", "And then.", is_final=True))
    captions.close()
    assert out.getvalue() == b"So it goes.\nAnd then.\n"


def test_captions_report_corrected_speakers() -> None:
    def by(*speakers: str, is_final: bool = False) -> StreamResult:
        said = ["Yes.", "No.", "Well."][: len(speakers)]
        segments = tuple(
            Segment(at * 16_000, (at + 1) * 16_000, text, speaker=speaker)
            for at, (text, speaker) in enumerate(zip(said, speakers, strict=True))
        )
        return StreamResult(" ".join(said), " ".join(said), 3_000, is_final, segments)

    captions = Captions(out := io.BytesIO())
    captions.show(by("A", "A"))
    assert captions.corrected == []
    captions.show(by("A", "B", "A", is_final=True))
    assert captions.corrected == ["0:01 B: No."]
    assert out.getvalue() == b"A: Yes.\nNo.\nWell.\n"
    captions = Captions(io.BytesIO())
    captions.show(by("A", "B"))
    captions.show(by("A", "B", is_final=True))
    assert captions.corrected == []


def test_json_of_unfixed_text() -> None:
    out = io.BytesIO()
    JsonLineCaptions(out).show(result("So it", 2))
    assert json.loads(out.getvalue()) == {
        "audio_duration_ms": 1_000,
        "is_final": False,
        "delta": "So",
        "unfixed_text": " it",
        "segments": [],
    }


@pytest.mark.parametrize(
    ("fixed", "unfixed", "shown"),
    [
        ("abc", " def", "\x1b[1mabc\x1b[0m\x1b[2m def\x1b[0m"),
        ("abcdef", " ghij", "\x1b[1m…ef\x1b[0m\x1b[2m ghij\x1b[0m"),
        ("abc", " defghijkl", "\x1b[2m…fghijkl\x1b[0m"),
        ("abcdefghijkl", "", "\x1b[1m…fghijkl\x1b[0m"),
        ("", "", ""),
    ],
)
def test_a_caption_shows_the_end_that_fits(fixed: str, unfixed: str, shown: str) -> None:
    assert caption(fixed, unfixed, 9) == shown


def test_the_level_meter_goes_from_silence_to_full_scale() -> None:
    level = LevelMeter(16_000)
    assert level.bar() == f"▕{' ' * CELLS}▏"
    assert not level.append_audio(np.ones(1_599, np.float32))
    assert level.append_audio(np.ones(1, np.float32))
    assert level.bar() == f"▕{'█' * CELLS}▏"
    bars = []
    for peak in (0.0, 0.001, 0.01, 0.1, 0.5):
        assert level.append_audio(np.full(1_600, peak, np.float32))
        bars.append(level.bar())
    assert all(len(bar) == CELLS + 2 for bar in bars)
    assert [bar.count(" ") for bar in bars] == sorted((bar.count(" ") for bar in bars), reverse=True)
    assert len(set(bars[1:])) == 4


def test_the_level_meter_stands_before_the_caption() -> None:
    out, screen = io.BytesIO(), io.BytesIO()
    captions = Captions(out, screen, LevelMeter(16_000))
    captions.append_audio(np.ones(1_600, np.float32))
    captions.show(result("So it", 0))
    captions.notice("warning: x", lambda line: screen.write(f"{line}\n".encode()))
    captions.show(result("So it goes.", 11, "So it goes."))
    captions.close()
    bar = f"▕{'█' * CELLS}▏"
    so_it = f"{bar} \x1b[2mSo it\x1b[0m"
    states = ["", f"{bar} ", so_it, "warning: x\n", so_it, f"{bar} ", ""]
    assert screen.getvalue().decode().split("\r\x1b[K") == states
    assert out.getvalue() == b"So it goes.\n"


def test_ctrl_c_outside_a_read_is_kept_and_the_next_is_raised() -> None:
    with InterruptHandler() as ctrl_c:
        assert ctrl_c.unless(lambda: True)
        signal.raise_signal(signal.SIGINT)
        assert ctrl_c.came
        assert not ctrl_c.unless(lambda: True)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
