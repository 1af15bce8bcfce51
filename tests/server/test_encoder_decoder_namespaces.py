"""An encoder in one network namespace, a decoder in another, and nothing between them but a wire.

What this cannot show: two kernels. Shared memory would be reached from both namespaces, so each transport is named.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from running_server import eventually
from server_process import WAIT_S, Serving

from asr_serve.transfer import transports

MODEL = "moonshine-tiny-en"
PLAIN = ("--model", MODEL, "--port", "0", "--set", "engine.prefix_bytes=0")
ENCODER, DECODER = "10.213.7.1", "10.213.7.2"


class Wire(NamedTuple):
    """Two namespaces, and the device of each at the ends of the wire."""

    encoder: str
    decoder: str
    encoder_device: str
    decoder_device: str

    def within(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", name]

    def pull(self, up: bool) -> None:
        """Pull the wire out, or put it back. Nobody is told."""
        run(*self.within(self.encoder), "ip", "link", "set", self.encoder_device, "up" if up else "down")


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    mark = f"{os.getpid() % 100_000}"
    made = Wire(f"asr-e{mark}", f"asr-d{mark}", f"asre{mark}", f"asrd{mark}")
    try:
        run("ip", "netns", "add", made.encoder)
        run("ip", "netns", "add", made.decoder)
        run("ip", "link", "add", made.encoder_device, "type", "veth", "peer", "name", made.decoder_device)
        for name, device, address in (
            (made.encoder, made.encoder_device, ENCODER),
            (made.decoder, made.decoder_device, DECODER),
        ):
            run("ip", "link", "set", device, "netns", name)
            run(*made.within(name), "ip", "address", "add", f"{address}/24", "dev", device)
            for each in (device, "lo"):
                run(*made.within(name), "ip", "link", "set", each, "up")
    except OSError as failure:
        remove(made)
        pytest.skip(f"no network namespaces here: {failure}")
    yield made
    remove(made)


def remove(wire: Wire) -> None:
    for command in (
        ("link", "delete", wire.encoder_device),
        ("netns", "delete", wire.encoder),
        ("netns", "delete", wire.decoder),
    ):
        subprocess.run(["ip", *command], capture_output=True, check=False, timeout=WAIT_S)


@pytest.fixture(scope="module")
def encoder(wire: Wire, packaged_speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    flags = (
        "--role",
        "encode",
        *PLAIN,
        "--host",
        ENCODER,
        "--encode-port",
        "8100",
        "--set",
        "peer_keys=between-us-two-only",
    )
    started = Serving(tmp_path_factory.mktemp("encoder") / "log", *flags, within=wire.within(wire.encoder))
    yield started
    started.close()


def ask(server: Serving, script: str, *arguments: str) -> str:
    """What a client in the server's namespace prints."""
    return run(*server.within, sys.executable, "-c", script, server.url, *arguments)


def transcribe(server: Serving, file: Path) -> str:
    script = f"""
import httpx, sys
files = {{"file": open(sys.argv[2], "rb")}}
answer = httpx.post(sys.argv[1] + "/v1/audio/transcriptions", files=files, timeout={WAIT_S})
answer.raise_for_status()
print(answer.json()["text"])"""
    return ask(server, script, str(file)).strip()


def counted(server: Serving, metric: str, labels: str = "") -> float:
    # Not httpx: it takes longer to import than all else here, and this is asked again and again.
    script = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1] + '/metrics').read().decode())"
    text = ask(server, script)
    return sum(float(value) for value in re.findall(rf"^{metric}{{.*{labels}.*}} (\S+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def speech(packaged_speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten seconds."""
    path = tmp_path_factory.mktemp("speech") / "cities.wav"
    with wave.open(str(packaged_speech / "two_cities.wav")) as long, wave.open(str(path), "wb") as short:
        short.setparams(long.getparams())
        short.writeframes(long.readframes(10 * long.getframerate()))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_over_a_wire_that_is_pulled_out(
    wire: Wire, encoder: Serving, speech: Path, tmp_path: Path, transport: str
) -> None:
    if transport not in transports.available_transports():
        pytest.skip(f"this installation has no {transport}")
    assert encoder.encodes_at == f"{ENCODER}:8100"
    flags = ("--role", "decode", "--peer", encoder.encodes_at, *PLAIN, "--set", "peer_keys=between-us-two-only")
    settings = ("--set", f"engine.peer_transport={transport}", "--set", "engine.peer_timeout_s=5")
    door = Serving(tmp_path / "door", *flags, *settings, within=wire.within(wire.decoder))
    try:
        door.said(f"peer {ENCODER}:8100 encodes for this engine \\(hidden by {transport}\\)")
        split = transcribe(door, speech)
        assert split.startswith("It was the best of times")
        # Eventually: an engine renews its metrics twice a second.
        eventually(lambda: counted(door, "asr_serve_peer_bytes_total") > 100_000)
        batches = counted(door, "asr_serve_peer_batches_total")
        assert batches >= 1, door.log.read_text() + encoder.log.read_text()

        wire.pull(up=False)
        assert transcribe(door, speech) == split
        eventually(lambda: counted(door, "asr_serve_peers", 'state="ready"') == 0)
        assert counted(door, "asr_serve_failed_steps_total") == 0

        wire.pull(up=True)
        eventually(lambda: counted(door, "asr_serve_peers", 'state="ready"') == 1)
        assert transcribe(door, speech) == split
        eventually(lambda: counted(door, "asr_serve_peer_batches_total") > batches)
    finally:
        wire.pull(up=True)
        door.close()
