"""The microphone, through PortAudio and ALSA, with a pipe where a sound card would be."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cli_process import require_alsa, start_cli, start_python

from asr_serve.api.cli.exit_codes import FAILED, USAGE
from asr_serve.audio import read_audio

WAIT_S = 180.0
BLOCK_BYTES = 640
"""ALSA's file plugin gives no part of a sample back, so what is written is what one read asks for: 20 ms."""
BLOCK_S = BLOCK_BYTES / 32_000
CARD = """
pcm.!default {{ type file slave.pcm "nothing" file "/dev/null" infile "{pipe}" format raw }}
pcm.nothing {{ type null }}
"""
NO_CARD = "pcm.!default { type hw card 31 }\n"


@pytest.fixture(autouse=True)
def portaudio() -> None:
    require_alsa()


class FakeCard:
    """A sound card that records what is written to its pipe, in real time."""

    def __init__(self, folder: Path) -> None:
        self.pipe, self.config = folder / "pipe", folder / "asoundrc"
        os.mkfifo(self.pipe)
        self.config.write_text(CARD.format(pipe=self.pipe))
        self._ours = os.open(self.pipe, os.O_RDWR | os.O_NONBLOCK)  # so that opening its other end waits for nobody
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def play(self, pcm16: bytes) -> None:
        """Record this from now on, and silence after it."""
        self._thread = threading.Thread(target=self._play, args=(pcm16,), daemon=True)
        self._thread.start()

    def _play(self, pcm16: bytes) -> None:
        began_s, at = time.monotonic(), 0
        while not self._over.wait(max(0.0, began_s + at / 32_000 - time.monotonic())):
            try:
                os.write(self._ours, pcm16[at : at + BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0"))
            except BlockingIOError:  # two seconds of it wait to be heard; when nobody is left, for ever
                began_s += BLOCK_S
            else:
                at += BLOCK_BYTES

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(WAIT_S)
        os.close(self._ours)


@pytest.fixture
def card(tmp_path: Path) -> Iterator[FakeCard]:
    made = FakeCard(tmp_path)
    yield made
    made.close()


def start(config: Path, *arguments: str, **environ: str) -> subprocess.Popen[bytes]:
    return start_cli("listen", "--mic", *arguments, environ={"ALSA_CONFIG_PATH": str(config), **environ})


@pytest.fixture(scope="module")
def speech(packaged_speech: Path) -> bytes:
    pcm = read_audio(packaged_speech / "beckett.wav")[: 4 * 16_000]
    return np.round(pcm * 32_767).astype("<i2").tobytes()


@pytest.mark.slow
def test_speech_is_transcribed_until_ctrl_c(card: FakeCard, speech: bytes) -> None:
    with start(card.config, "--json", "--silence-schedule", "inf:300", ASR_SERVE_THREADS="1") as process:
        assert process.stderr
        assert process.stdout
        assert process.stderr.readline() == b"listening to default; ctrl-C ends\n"
        card.play(speech)
        lines = []
        while not any(line["segments"] for line in lines):
            lines.append(json.loads(process.stdout.readline()))
        process.send_signal(signal.SIGINT)
        lines += [json.loads(line) for line in process.stdout]
        assert process.wait(WAIT_S) == 0, "that is how it ends"
        assert b"warning" not in process.stderr.read()
    assert lines[-1]["is_final"]
    assert "ever tried" in lines[-1]["text"].lower()


def run(config: Path, *arguments: str) -> tuple[int, str]:
    with start(config, *arguments) as process:
        _, err = process.communicate(timeout=WAIT_S)
    return process.returncode, err.decode()


def test_no_microphone(tmp_path: Path) -> None:
    (tmp_path / "asoundrc").write_text(NO_CARD)
    code, err = run(tmp_path / "asoundrc")
    assert code == FAILED
    assert "error: no microphone was found." in err
    assert "plug one in" in err


def test_an_absent_microphone(card: FakeCard) -> None:
    code, err = run(card.config, "--input", "usb")
    assert code == USAGE
    assert re.search(r"one of: .*\d default", err)


COUNT_LOST = """
import sys, time
from asr_serve.api.cli.io import microphone
microphone.MAX_BUFFERED_S = float(sys.argv[1])
mic = microphone.MicrophoneSource()
slept = False
got, told = b"", []
for chunk in mic.chunks(told.append):
    got += chunk
    while not slept and mic.lost_samples < 8_000:
        time.sleep(0.01)
    if slept:
        break
    slept = True
sys.stderr.write(f"{len(got)} {mic.lost_samples} {len(told)} {mic.overflow_report()}")
"""


def test_lost_audio_is_counted(card: FakeCard, speech: bytes) -> None:
    """Half a second fits; the reader sleeps until more was lost."""
    environ = {"ALSA_CONFIG_PATH": str(card.config)}
    with start_python(COUNT_LOST, "0.5", environ=environ, text=True) as process:
        card.play(speech)
        _, err = process.communicate(timeout=WAIT_S)
    received_bytes, lost_samples, notices, report = err.split(maxsplit=3)
    assert int(notices) == 1
    assert int(lost_samples) >= 8_000
    assert int(received_bytes) >= 16_000
    assert "s of audio were lost" in report
