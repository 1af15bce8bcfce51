"""The command with /v1/stream: TLS, HTTP/2 and WebSockets; an engine that dies; a stop while somebody speaks."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from children import Child
from stream_client import WebSocket, expect_sound, pcm_of, pour, segments
from websockets.sync.client import connect

WAIT_S = 180.0
BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."
COMMAND = [
    sys.executable,
    "-c",
    "from asr_serve.api.cli import main; main()",
    "serve",
    "--port",
    "0",
    "--voice",
    "none",
]
COMMAND += ["--realtime-port", "0", "--set", "engine_threads=1"]


class Served:
    def __init__(self, process: subprocess.Popen[str], said: str) -> None:
        self.process, self.said = process, said
        main, live = re.search(r" on (http\S+) ", said), re.search(r"^  live +(ws\S+) ", said, re.MULTILINE)
        assert main
        assert live
        self.url, self.live = main[1], live[1]
        self.port = int(self.url.rpartition(":")[2])


@contextmanager
def servers() -> Iterator[Callable[..., Served]]:
    """`start(tls_cert=...)`: the command with these settings, when it is ready."""
    processes: list[subprocess.Popen[str]] = []

    def start(**settings: object) -> Served:
        flags = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        process = Child([*COMMAND, *flags], stderr=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stderr
        said = ""
        while "  live " not in said:
            line = process.stderr.readline()
            assert line, f"the server ended: {said}"
            said += line
        return Served(process, said)

    try:
        yield start
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=WAIT_S)


@pytest.fixture
def started() -> Iterator[Callable[..., Served]]:
    with servers() as start:
        yield start


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One for several tests; the last of them stops it."""
    with servers() as start:
        yield start()


@pytest.fixture(scope="module")
def pcm(packaged_speech: Path) -> bytes:
    return pcm_of(packaged_speech / "beckett.wav")


@pytest.mark.slow
def test_an_engine_that_dies_while_somebody_speaks(served: Served, pcm: bytes):
    with WebSocket(served.port) as line:
        session = line.hear("session")["session_id"]
        pour(line, pcm[:128_000], wait_s=0.02)
        [engine] = psutil.Process(served.process.pid).children()
        engine.kill()
        line.cut(reset=True)
    with WebSocket(served.port, session=session) as line:
        pour(line, pcm[line.hear("session")["received_bytes"] :], wait_s=0.01)
        line.end()
        events = line.rest()
    expect_sound(events)
    assert segments(events) == [(0.102, 9.146, BECKETT)]


def received_s(served: Served) -> float:
    metrics = httpx.get(f"{served.url}/metrics", timeout=WAIT_S).text
    return float(re.search(r'^asr_serve_live_audio_seconds_total\{.*"/v1/stream".*\} (\S+)', metrics, re.MULTILINE)[1])  # type: ignore[index]


@pytest.mark.slow
def test_a_stop_while_somebody_speaks(served: Served, pcm: bytes):
    before_s = received_s(served)
    with WebSocket(served.port) as line:
        pour(line, pcm)
        line.hear("partial")
        # What has not been read when the server stops is not acknowledged: its client would send it again.
        line.until(lambda: received_s(served) > before_s + 9.5)
        served.process.send_signal(signal.SIGTERM)
        events = line.rest()
        assert line.code == 1_012
    assert [e["code"] for e in events if e["type"] == "error"] == ["draining"]
    assert segments(events) == [(0.102, 9.146, BECKETT)]
    assert served.process.wait(WAIT_S) == 0


@pytest.mark.slow
def test_an_engine_that_dies_again_and_again_is_told(started, pcm: bytes):
    served = started()
    server = psutil.Process(served.process.pid)
    with WebSocket(served.port) as line:
        session = line.hear("session")["session_id"]
        pour(line, pcm[:64_000])
        told: list[dict[str, Any]] = []
        while not told:
            for engine in server.children():
                with suppress(psutil.NoSuchProcess):
                    engine.kill()
            line.send(pcm[:3_200])
            line.poll(0.3)
            told = [event for event in line.events if event["type"] == "error"]
        assert told[0]["code"] in ("engine_crashed", "engine_closed")
        line.rest()
        assert line.code in (1_011, 1_013)
    with WebSocket(served.port, session=session) as line:
        assert [e["code"] for e in line.rest() if e["type"] == "error"] == [told[0]["code"]]


# --- TLS --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2", *names]
    subprocess.run(["openssl", *made], check=True, capture_output=True)
    return cert, key


def negotiated(port: int, context: ssl.SSLContext) -> str | None:
    with (
        socket.create_connection(("127.0.0.1", port), WAIT_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as line,
    ):
        return line.selected_alpn_protocol()


@pytest.mark.slow
def test_tls_with_http_2_and_websockets_on_both_ports(started, certificate, pcm: bytes):
    cert, key = certificate
    served = started(tls_cert=cert, tls_key=key)
    assert served.url.startswith("https://")
    assert served.live.startswith("wss://")
    assert f"curl {served.url}" in served.said
    trusted = ssl.create_default_context(cafile=cert)
    trusted.set_alpn_protocols(["h2", "http/1.1"])
    ports = [served.port, int(served.live.rpartition(":")[2])]
    assert [negotiated(port, trusted) for port in ports] == ["h2", "h2"]
    trusted.set_alpn_protocols(["http/1.1"])
    for port in ports:
        assert negotiated(port, trusted) == "http/1.1"
        with connect(f"wss://localhost:{port}/v1/stream", ssl=trusted, open_timeout=WAIT_S) as line:
            line.send(pcm)
            line.send('{"type":"end"}')
            events = [json.loads(line.recv(WAIT_S))]
            while events[-1]["type"] != "end":
                events.append(json.loads(line.recv(WAIT_S)))
        assert segments(events) == [(0.102, 9.146, BECKETT)]
    if shutil.which("curl"):
        for version in ("--http2", "--http1.1"):
            command = ["curl", "-sN", "--cacert", str(cert), version, "-w", "%{http_version}", "-T", "-"]
            url = f"https://localhost:{served.port}/v1/stream"
            done = subprocess.run(
                [*command, "-X", "POST", url], input=pcm, capture_output=True, check=True, timeout=WAIT_S
            )
            assert BECKETT.encode() in done.stdout
            assert done.stdout.endswith(b"2" if version == "--http2" else b"1.1")
    with pytest.raises(ssl.SSLCertVerificationError):
        negotiated(served.port, ssl.create_default_context())
    with socket.create_connection(("127.0.0.1", served.port), WAIT_S) as plain, suppress(ConnectionResetError):
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert not plain.recv(4_096).startswith(b"HTTP")
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(WAIT_S) == 0


@pytest.mark.slow
def test_certificates_that_are_no_good(certificate, tmp_path: Path):
    cert, key = certificate
    locked, other, empty = tmp_path / "locked.pem", tmp_path / "other.pem", tmp_path / "empty.pem"
    empty.write_text("")
    lock = ["pkcs8", "-topk8", "-in", key, "-out", locked, "-passout", "pass:s3cret"]
    subprocess.run(["openssl", *lock], check=True, capture_output=True)
    subprocess.run(["openssl", "genrsa", "-out", other, "2048"], check=True, capture_output=True)
    for settings, why in (
        ({"tls_cert": cert}, "tls_cert without tls_key"),
        ({"tls_key": key}, "tls_key without tls_cert"),
        ({"tls_cert": tmp_path / "none.pem", "tls_key": key}, "No such file"),
        ({"tls_cert": cert, "tls_key": tmp_path}, "Is a directory"),
        ({"tls_cert": cert, "tls_key": other}, "cannot be used"),
        ({"tls_cert": cert, "tls_key": locked}, "without a password"),
        ({"tls_cert": empty, "tls_key": key}, "cannot be used"),
        ({"tls_cert": key, "tls_key": cert}, "cannot be used"),
    ):
        flags = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        done = subprocess.run(
            [*COMMAND, *flags], capture_output=True, text=True, timeout=WAIT_S, stdin=subprocess.DEVNULL, check=False
        )
        assert done.returncode not in (0, -6), settings
        assert why in done.stderr, (settings, done.stderr)
        assert "Traceback" not in done.stderr
