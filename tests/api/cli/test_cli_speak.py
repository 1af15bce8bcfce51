"""`asr-serve speak`: files, stdout, the loudspeaker and a server, with a real voice."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_process import expect_usage_error, require_alsa, start_cli
from cli_process import invoke as invoke_cli
from typer.testing import Result

from asr_serve.api.cli.exit_codes import FAILED
from asr_serve.api.cli.io import loudspeaker
from asr_serve.api.cli.io.speech_report import SpeechProgressMeter, WordTimesFile
from asr_serve.api.cli.speak import read_lexicon, voice_model
from asr_serve.audio import read_audio
from asr_serve.audio.container_headers import read_wav_header
from asr_serve.audio.watermark import detect_watermark
from asr_serve.config import voices_dir
from asr_serve.errors import OptionError, SourceNotFound
from asr_serve.models.checkpoints.store import locate
from asr_serve.models.registry import tts_card
from asr_serve.pipelines.options import AudioChunk, SpokenWord
from asr_serve.voices.cloned_voice import ClonedVoiceCard, Consent
from asr_serve.voices.voice_store import VoiceStore

WAIT_S = 120
TEXT = "Hello there. It costs five dollars, and the doctor said so on 15 March."
DONE = re.compile(r"\d+\.\d s of speech in \d+\.\d s: real-time factor \d+\.\d\d, first sound after \d+\.\d\d s")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_SERVE_THREADS", "1")


@pytest.fixture(scope="module")
def hibari() -> str:
    if locate(tts_card("hibari")) is None:
        pytest.skip("hibari-tts is not installed: pip install 'hibari-tts[fast]'")
    return "hibari"


def invoke(*arguments: str | Path, stdin: str | bytes = "") -> Result:
    return invoke_cli("speak", *arguments, stdin=stdin)


def start(*arguments: str | Path, **environ: str) -> subprocess.Popen[bytes]:
    return start_cli("speak", *arguments, environ=environ, stdin=subprocess.PIPE)


# --- files ------------------------------------------------------------------------------------------------


def test_a_file_and_its_word_times(hibari: str, tmp_path: Path) -> None:
    done = invoke(TEXT, "-m", hibari, "-o", tmp_path / "said.wav", "--words", tmp_path / "said.json")
    assert done.exit_code == 0, done.stderr
    assert DONE.search(done.stderr)
    assert done.stderr.rstrip().endswith(f"-> {tmp_path / 'said.wav'}")
    assert not done.stdout
    header = read_wav_header((tmp_path / "said.wav").read_bytes())
    assert header is not None
    assert header.data_bytes is not None
    seconds = header.data_bytes / 48_000
    times = json.loads((tmp_path / "said.json").read_text())
    assert times["model"] == hibari
    assert times["duration"] == pytest.approx(seconds)
    words = [word for sentence in times["sentences"] for word in sentence["words"]]
    assert " ".join(word["word"] for word in words) == TEXT
    assert words[0]["start"] == 0
    assert seconds - 0.2 < words[-1]["end"] <= seconds
    assert sorted(os.listdir(tmp_path)) == ["said.json", "said.wav"]


@pytest.mark.parametrize("form", ["srt", "vtt"])
def test_captions_of_words(hibari: str, tmp_path: Path, form: str) -> None:
    long = f"{TEXT} " * 2
    done = invoke(long, "-m", hibari, "-o", tmp_path / "said.mp3", "--words", tmp_path / f"said.{form}", "-q")
    assert (done.exit_code, done.stderr) == (0, "")
    captions = (tmp_path / f"said.{form}").read_text()
    lines = [line for line in captions.splitlines() if line and "-->" not in line and not line.isdigit()]
    assert " ".join(line for line in lines if line != "WEBVTT") == long.strip()
    assert max(map(len, lines)) <= 42


def test_stdin_to_stdout(hibari: str) -> None:
    done = invoke("-", "-m", hibari, "-o", "-", "-f", "flac", "-q", stdin="Hello there. Goodbye.")
    assert done.exit_code == 0, done.stderr
    assert len(read_audio(done.stdout_bytes)) > 16_000


@pytest.mark.slow
def test_text_is_spoken_while_it_comes(hibari: str) -> None:
    with start("-", "-m", hibari, "-o", "-", "-f", "pcm", "-q") as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"Hello there, my friend. And ")
        process.stdin.flush()
        first = process.stdout.read(4_800)  # though stdin is open still
        assert len(first) == 4_800
        process.stdin.write(b"goodbye.")
        process.stdin.close()
        assert len(process.stdout.read()) > 48_000
        assert process.wait(WAIT_S) == 0


def test_options_reach_the_voice(hibari: str, tmp_path: Path) -> None:
    def synthesize(text: str, *options: str | Path) -> np.ndarray:
        done = invoke(text, "-m", hibari, "-q", "-o", tmp_path / "said.flac", *options)
        assert done.exit_code == 0, done.stderr
        return read_audio(tmp_path / "said.flac")

    (tmp_path / "lexicon.txt").write_text("# names\nNguyen nwˈɪn\n")
    (tmp_path / "lexicon.json").write_text('{"Nguyen": "nwˈɪn"}')
    plain = synthesize("Nguyen costs five dollars, they say.")
    assert len(synthesize("Nguyen costs five dollars, they say.", "--speed", "2")) < 0.7 * len(plain)
    for name in ("lexicon.txt", "lexicon.json"):
        found = synthesize("Nguyen costs five dollars, they say.", "--lexicon", tmp_path / name)
        assert not np.array_equal(found, plain)
    inline = synthesize("[Nguyen](/nwˈɪn/) costs five dollars, they say.")
    assert np.array_equal(found, inline)
    paused = synthesize('<speak>One.<break time="3s"/>Two.</speak>', "--ssml")
    assert len(paused) > 3.5 * 16_000
    assert len(synthesize("həlˈO wˈɜɹld", "--phonemes")) > 8_000
    marked = synthesize(TEXT, "--watermark", "--rate", "16000", "--seed", "5", "--pitch", "2", "--energy", "-3")
    assert detect_watermark(marked, 16_000).is_marked


@pytest.mark.parametrize(
    ("arguments", "stdin", "error"),
    [
        ([""], "", "the text is empty"),
        (["🎉"], "", "nothing in it to say"),
        (["日本"], "", "CJK UNIFIED IDEOGRAPH"),
        (["x" * 100_001], "", "at most 100,000"),
        (["-"], b"\xff\xfe\x00", "stdin is no text"),
        (["Hello.", "--voice", "nobody"], "", "hibari has no voice 'nobody'"),
    ],
    ids=["empty", "emoji", "script", "long", "bytes", "voice"],
)
def test_invalid_text_leaves_no_file(
    hibari: str, tmp_path: Path, arguments: list[str], stdin: str | bytes, error: str
) -> None:
    expect_usage_error(invoke(*arguments, "-m", hibari, "-o", tmp_path / "said.wav", stdin=stdin), error)
    assert not os.listdir(tmp_path)


# --- the command line -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["Hello.", "-o", "said.mp4"], "suffix names no format"),
        (["Hello.", "-o", "said.wav", "-f", "mp4"], "unknown format 'mp4'"),
        (["Hello.", "-o", "/nowhere/said.wav"], "there is no folder"),
        (["Hello.", "-o", "said.wav", "--speed", "9"], "speed=9"),
        (["Hello.", "-o", "said.wav", "--words", "said.txt"], "--words said.txt"),
        (["Hello.", "-o", "said.wav", "--ssml", "--phonemes"], "one of them"),
        (["Hello.", "-o", "said.wav", "-m", "moonshine-tiny-en"], "does not synthesize it"),
        (["Hello.", "-o", "said.wav", "-m", "hibary"], "did you mean 'hibari'"),
        (["Hello.", "-o", "said.wav", "--api-key", "x"], "--api-key without --server"),
        (["Hello.", "-o", "said.wav", "--server", "127.0.0.1:1", "--device", "cpu"], "--device with --server"),
        (["Hello.", "-o", "said.wav", "--server", "127.0.0.1:1", "-l", "en"], "--language with --server"),
        (["Hello.", "-o", "said.wav", "--server", "ftp://127.0.0.1"], "a URL, http:// or https://"),
        (["-o", "said.wav"], "no text came"),
    ],
)  # fmt: skip
def test_wrong_usage(arguments: list[str], error: str) -> None:
    expect_usage_error(invoke(*arguments), error)


def test_help_has_examples() -> None:
    shown = invoke("--help").stdout
    for word in ("--voice", "--list-voices", "--server", "asr-serve speak - -o book.opus", "Exit code"):
        assert word in shown


def test_voices_are_listed(hibari: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    tensors = b"no voice at all"
    made = ClonedVoiceCard(
        name="my-voice", created=1, model="fastpitch-en", fingerprint="", consent=Consent("I agree.", "me", 1),
        clips=20, seconds=60.0, start="heart", similarity=None, ceiling=1.0, steps=1, seed=0,
        sha256=hashlib.sha256(tensors).hexdigest(), release="0.1.0",
    )  # fmt: skip
    VoiceStore(voices_dir(None)).add(made, tensors)
    head, first = invoke("--list-voices", "-m", hibari).stdout.splitlines()
    assert head.split() == ["VOICE", "MODEL", "LANGUAGE", "PHONEMES"]
    assert first.split() == ["heart", "hibari", "en", "misaki", "default"]
    lines = [line.split() for line in invoke("--list-voices", "-m", "fastpitch-en").stdout.splitlines()]
    assert ["emma", "fastpitch-en", "en", "misaki"] in lines
    assert lines[-1] == ["my-voice", "fastpitch-en", "en", "misaki", "cloned"]


def test_the_default_voice() -> None:
    assert voice_model("auto").name == "fastpitch-en"


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.txt", "word", "line 1: 'word' without phonemes"),
        ("a.json", "[1]", "an object"),
        ("a.json", "{", "an object"),
    ],
)
def test_invalid_lexicons(tmp_path: Path, name: str, content: str, error: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(OptionError, match=error):
        read_lexicon(tmp_path / name)
    with pytest.raises(SourceNotFound, match="cannot be read"):
        read_lexicon(tmp_path / "nowhere.txt")


# --- reports -----------------------------------------------------------------------------------------


def test_the_progress_meter() -> None:
    now = iter([0.0, 0.25, 1.0])
    meter = SpeechProgressMeter(lambda: next(now))
    assert meter.describe() == "0.0 s of speech"
    meter.start()
    meter.update(meter.note_audio(AudioChunk(np.zeros(0, np.int16), 24_000, 0)), None)
    assert meter.first_s is None
    meter.update(meter.note_audio(AudioChunk(np.zeros(96_000, np.int16), 24_000, 0)), None)
    assert meter.first_s == 0.25
    assert meter.describe() == "4.0 s of speech: real-time factor 0.25, first sound after 0.25 s"


def test_a_word_of_several_stays_on_one_line(tmp_path: Path) -> None:
    words = WordTimesFile(tmp_path / "said.srt")
    spoken_words = (SpokenWord("on", 0, 1_600), SpokenWord("15 March", 1_600, 16_000))
    words.add_chunk(AudioChunk(np.zeros(16_000, np.int16), 16_000, 0, "on 15 March", spoken_words))
    words.write("hibari")
    assert (tmp_path / "said.srt").read_text() == "1\n00:00:00,000 --> 00:00:01,000\non 15 March\n"


# --- the loudspeaker --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Hello.", "pip install 'asr-serve[mic]', or write it to a file instead: -o speech.wav"),
        ("", "the text is empty"),
        ("\u4f60\u597d", "this voice reads English"),
    ],
    ids=["no player", "empty", "script"],
)
def test_a_missing_player_is_an_error_after_those_of_the_text(
    monkeypatch: pytest.MonkeyPatch, hibari: str, text: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    done = invoke(text, "-m", hibari)
    expect_usage_error(done, message)
    assert text == "Hello." or "sounddevice" not in done.stderr


@pytest.fixture
def alsa() -> None:
    require_alsa()


def test_speech_is_played_to_its_last_sample(alsa: None, hibari: str, tmp_path: Path) -> None:
    played, config = tmp_path / "played.raw", tmp_path / "asoundrc"
    config.write_text(
        f'pcm.!default {{ type file slave.pcm "nothing" file "{played}" format raw }}\npcm.nothing {{ type null }}\n'
    )
    with start(TEXT, "-m", hibari, ALSA_CONFIG_PATH=str(config)) as process:
        _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, stderr
    assert DONE.search(stderr.decode())
    done = invoke(TEXT, "-m", hibari, "-q", "-o", "-", "-f", "pcm")
    expected = np.frombuffer(done.stdout_bytes, "<i2")
    recorded = np.fromfile(played, "<i2")
    recorded = recorded[np.flatnonzero(recorded)[0] :]
    expected = expected[np.flatnonzero(expected)[0] : np.flatnonzero(expected)[-1] + 1]
    # In pieces: where the machine was late, the device had silence between two.
    assert len(recorded) >= len(expected)
    assert np.array_equal(recorded[:1_000], expected[:1_000])
    assert np.array_equal(recorded[np.flatnonzero(recorded)[-1] - 999 :][:1_000], expected[-1_000:])


def test_no_loudspeaker(alsa: None, hibari: str, tmp_path: Path) -> None:
    (tmp_path / "asoundrc").write_text("pcm.!default { type hw card 31 }\n")
    with start("Hello.", "-m", hibari, ALSA_CONFIG_PATH=str(tmp_path / "asoundrc")) as process:
        _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == FAILED
    assert b"no loudspeaker can be used" in stderr
    assert loudspeaker.TO_FILE.encode() in stderr


# --- a server ---------------------------------------------------------------------------------------------


class FakeServer:
    """An HTTP server that answers as it is told, and keeps the last request."""

    def __init__(self) -> None:
        self.status, self.headers, self.parts = 200, {"x-sample-rate": "24000", "x-model": "hibari"}, [b""]
        self.path, self.body, self.key = "", {}, ""
        fake_server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                fake_server.path, fake_server.key = self.path, self.headers.get("authorization", "")
                fake_server.body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(fake_server.status)
                for name, value in fake_server.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                for part in fake_server.parts:
                    self.wfile.write(part)

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join(WAIT_S)
        self.server.server_close()


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    made = FakeServer()
    yield made
    made.close()


def sse(**members: Any) -> bytes:
    return b"data: " + json.dumps(members).encode() + b"\n\n"


def test_audio_and_words_of_a_server(fake_server: FakeServer, tmp_path: Path) -> None:
    # Three bytes, then one: a sample may be cut in two.
    fake_server.parts = [
        sse(type="speech.audio.words", words=[{"word": "Hi.", "start": 0.0, "end": 1 / 24_000}]),
        sse(type="speech.audio.delta", audio="AQAC"),
        sse(type="speech.audio.delta", audio="AA=="),
        sse(type="speech.audio.done", usage={}),
    ]
    done = invoke(
        "Hi.", "--server", f"{fake_server.url}/v1", "--voice", "emma", "--speed", "1.5", "--rate", "24000",
        "--api-key", "secret", "-m", "tts-1", "-o", tmp_path / "said.pcm", "--words", tmp_path / "said.json",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert np.fromfile(tmp_path / "said.pcm", "<i2").tolist() == [1, 2]
    assert json.loads((tmp_path / "said.json").read_text())["sentences"][0]["words"][0]["word"] == "Hi."
    assert (fake_server.path, fake_server.key) == ("/v1/audio/speech", "Bearer secret")
    assert fake_server.body == {
        "input": "Hi.", "response_format": "pcm", "stream_format": "sse", "words": True, "voice": "emma",
        "speed": 1.5, "sample_rate": 24_000, "model": "tts-1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "part", "error"),
    [
        (200, sse(type="speech.audio.delta", audio="AQA="), "before the end of the audio"),
        (200, sse(type="error", error={"message": "the engine is full", "code": "x"}), "the engine is full"),
        (503, b'{"error": {"message": "no room", "code": "at_capacity"}}', "no room"),
        (404, b"nothing here", "answers with 404, and is no asr-serve"),
        (None, b"", "no server answers at http://127.0.0.1:9"),
    ],
)
def test_a_failing_server_leaves_no_file(
    fake_server: FakeServer, status: int | None, part: bytes, error: str, tmp_path: Path
) -> None:
    fake_server.status, fake_server.parts = status or 0, [part]
    url = fake_server.url if status else "http://127.0.0.1:9"
    done = invoke("Hi.", "--server", url, "-o", tmp_path / "said.wav")
    assert done.exit_code == FAILED
    assert error in done.stderr
    assert not os.listdir(tmp_path)
