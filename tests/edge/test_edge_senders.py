"""Real senders and the real command: ffmpeg's RTP of every codec, and `asr-serve edge` over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from children import MODULE_LIMIT_S, Child
from rtp_sender import RtpSender, l16_packets
from running_edge import RunningEdge, text_of
from running_server import WAIT_S, Running, eventually
from typer.testing import CliRunner
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from asr_serve.api.cli import app
from asr_serve.api.cli.exit_codes import USAGE
from asr_serve.audio import read_audio
from asr_serve.edge.control_api import PATH

SECONDS = 6
SENDERS = {
    "pcmu": ("-ar", "8000", "-c:a", "pcm_mulaw", "-payload_type", "0"),
    "pcma": ("-ar", "8000", "-c:a", "pcm_alaw", "-payload_type", "8"),
    "g722": ("-ar", "16000", "-c:a", "g722", "-payload_type", "9"),
    "opus": ("-ar", "48000", "-c:a", "libopus", "-b:a", "32k", "-payload_type", "96"),
    "l16": ("-ar", "16000", "-c:a", "pcm_s16be", "-payload_type", "97"),
}


def signed(ssrc: int | None) -> str:
    """An SSRC as ffmpeg reads it."""
    assert ssrc is not None
    return str(ssrc - (1 << 32) if ssrc >= 1 << 31 else ssrc)


def words(text: str) -> list[str]:
    return "".join(letter for letter in text.lower() if letter.isalnum() or letter == " ").split()


def test_ffmpeg_sends_every_codec_at_once_and_the_words_are_those_of_the_file(server: Running, cities: Path) -> None:
    ffmpeg = shutil.which("ffmpeg")
    if ffmpeg is None:
        pytest.skip("no ffmpeg: apt install ffmpeg")
    edge = RunningEdge(server.url, drift=True)
    sessions = {codec: edge.create() for codec in SENDERS}
    plain = edge.create()
    pcm = read_audio(cities)[: SECONDS * 16_000]
    sender = RtpSender(edge.driver.port)
    sender.send(l16_packets(pcm, plain.ssrc))
    address = f"rtp://127.0.0.1:{edge.driver.port}?pkt_size=600"
    reading = ["-v", "error", "-re", "-t", str(SECONDS), "-i", str(cities), "-ac", "1"]
    children = [
        Child(
            [ffmpeg, *reading, *options, "-ssrc", signed(sessions[codec].ssrc), "-f", "rtp", address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for codec, options in SENDERS.items()
    ]
    for child in children:
        _, errors = child.communicate(timeout=WAIT_S)
        assert child.returncode == 0, errors
    expected = words(text_of(edge.end(plain.id)))
    assert len(expected) > 8
    for codec, session in sessions.items():
        eventually(lambda session=session: edge.describe(session.id).received_s > SECONDS - 0.3)
        events = edge.end(session.id)
        assert words(text_of(events)) == expected, codec
        end = events[-1]
        assert end["received_s"] == pytest.approx(SECONDS, abs=0.3), codec
        assert end["concealed_s"] == 0, codec
    sender.close()
    edge.close()


def gst_launch() -> str:
    found = shutil.which("gst-launch-1.0")
    if found is None:
        pytest.skip("no gst-launch-1.0: apt install gstreamer1.0-tools gstreamer1.0-plugins-{base,good}")
    return found


class Relay:
    """Port of this machine whose datagrams are kept, to be sent on with losses of the test's choice."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.settimeout(WAIT_S)
        self.port: int = self._socket.getsockname()[1]
        self.packets: list[bytes] = []
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        while packet := self._socket.recv(2_048):
            self.packets.append(packet)

    def finish(self) -> list[bytes]:
        """All datagrams so far."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            end.sendto(b"", ("127.0.0.1", self.port))
        self._thread.join(WAIT_S)
        self._socket.close()
        return self.packets


def test_gstreamer_sends_mulaw_and_opus_whose_losses_its_forward_error_correction_mends(
    server: Running, wav: Callable[[float, float], bytes], tmp_path: Path
) -> None:
    """PCMU straight to the edge; Opus with every seventh packet lost on the way. The words are those of the file."""
    program, seconds = gst_launch(), 5
    file = tmp_path / "speech.wav"
    file.write_bytes(wav(seconds, 0.5))
    pcm = read_audio(file)
    edge, relay = RunningEdge(server.url, drift=True), Relay()
    plain, mulaw, opus, torn = (edge.create() for _ in range(4))
    senders = [RtpSender(edge.driver.port) for _ in range(3)]
    senders[0].send(l16_packets(pcm, plain.ssrc))
    reading = f"filesrc location={file} ! wavparse ! audioconvert ! audioresample"
    coded = {
        f"{mulaw.ssrc} ! udpsink host=127.0.0.1 port={edge.driver.port}": "audio/x-raw,rate=8000,channels=1 ! mulawenc "
        "! rtppcmupay pt=0 min-ptime=20000000 max-ptime=20000000",
        f"{opus.ssrc} ! udpsink host=127.0.0.1 port={relay.port}": "audio/x-raw,rate=48000,channels=1 ! opusenc "
        "bitrate=32000 audio-type=voice inband-fec=true packet-loss-percentage=20 frame-size=20 ! rtpopuspay pt=96",
    }
    children = [
        Child(
            [program, "-q", *f"{reading} ! {coding} ssrc={target}".split()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for target, coding in coded.items()
    ]
    for child in children:
        _, errors = child.communicate(timeout=WAIT_S)
        assert child.returncode == 0, errors
    packets = relay.finish()
    lost = range(5, len(packets) - 5, 7)
    senders[1].send(packets)
    torn_packets = [packet[:8] + torn.ssrc.to_bytes(4, "big") + packet[12:] for packet in packets]
    senders[2].send(packet for number, packet in enumerate(torn_packets) if number not in lost)
    ends = {}
    for name, session in {"plain": plain, "mulaw": mulaw, "opus": opus, "torn": torn}.items():
        length_s = seconds + 0.5 - 0.02 * (len(lost) if name == "torn" else 0)
        eventually(lambda session=session, least_s=length_s - 0.1: edge.describe(session.id).received_s > least_s)
        ends[name] = edge.end(session.id)
    expected = words(text_of(ends["plain"]))
    assert len(expected) > 7
    for name, events in ends.items():
        assert words(text_of(events)) == expected, name
        assert events[-1]["concealed_s"] == pytest.approx(0.02 * len(lost) if name == "torn" else 0), name
    assert len(lost) > 30
    assert edge.describe(torn.id).lost_packets == len(lost)
    for sender in senders:
        sender.close()
    edge.close()


class EdgeCommand:
    """`asr-serve edge` with these flags, on ports of its own choice."""

    def __init__(self, log: Path, *flags: str) -> None:
        self._log = log
        environ = {name: value for name, value in os.environ.items() if not name.startswith("ASR_SERVE_")}
        environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-c", "from asr_serve.api.cli import main; main()", "edge", *flags]
        with log.open("w") as out:
            self.process = Child(command, stdout=out, stderr=out, env=environ, limit_s=MODULE_LIMIT_S)

    def said(self, pattern: str) -> str:
        end_s = time.monotonic() + WAIT_S
        while (found := re.search(pattern, self._log.read_text())) is None:
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < end_s, self._log.read_text()
            time.sleep(0.05)
        return found[1]


@pytest.fixture
def command(server: Running, tmp_path: Path) -> Iterator[EdgeCommand]:
    config = tmp_path / "edge.toml"
    config.write_text(
        f'server = "{server.url}"\nport = 0\ncontrol_port = 0\npackets_per_s = 10_000\napi_keys = ["secret"]\n'
        '[options]\nsilence_schedule = "inf:300"\n'
    )
    made = EdgeCommand(tmp_path / "edge.log", "--config", str(config))
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.wait(WAIT_S)


def test_the_command_serves_sessions_over_http_and_ends_with_their_last_words(
    command: EdgeCommand, cities: Path
) -> None:
    url, port = command.said(r"health\s+(http://\S+)/health"), int(command.said(r"UDP 127\.0\.0\.1:(\d+)"))
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    http = httpx.Client(base_url=url, timeout=WAIT_S, headers=headers)
    eventually(lambda: answers(http))
    assert httpx.get(f"{url}{PATH}", timeout=WAIT_S).status_code == 401
    for body, code in (
        ('{"ssrc": -1}', "malformed_request"),
        ('{"colour": 1}', "malformed_request"),
        ("{", "malformed_request"),
        ('{"source": "x"}', "option_error"),
        ('{"options": {"rate": 8000}}', "unknown_option"),
        ('{"options": {"words": "perhaps"}}', "option_error"),
        ('{"options": {"language": "klingon"}}', "option_error"),
        ('{"options": {"partial_ms": 5}}', "option_error"),
        ('{"payload_types": {"96": "mp3/90000"}}', "unsupported_option"),
    ):
        answer = http.post(PATH, content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code), answer.text
    assert http.post(PATH, content=b" " * 70_000).status_code == 400
    unknown = [http.get(f"{PATH}/edge_none"), http.delete(f"{PATH}/edge_none"), http.get(f"{PATH}/edge_none/events")]
    assert [(each.status_code, each.json()["error"]["code"]) for each in unknown] == [(404, "unknown_session")] * 3
    assert http.get("/nothing").status_code == 404
    created = http.post(PATH, json={"options": {"language": "en"}}).json()
    assert created["port"] == port
    sender = RtpSender(port)
    packets = l16_packets(read_audio(cities)[: 3 * 16_000], created["ssrc"])
    sender.send(packets)
    eventually(lambda: http.get(f"{PATH}/{created['id']}").json()["packets"] == len(packets))
    assert [each["id"] for each in http.get(PATH).json()["sessions"]] == [created["id"]]
    metrics = http.get("/metrics").text
    assert f"asr_serve_edge_packets_total {len(packets)}.0" in metrics
    with http.stream("GET", created["events"], params={"after": "1"}) as stream:
        command.process.send_signal(signal.SIGTERM)
        lines = list(stream.iter_lines())
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    ids = [line.removeprefix("id: ").split("-") for line in lines if line.startswith("id: ")]
    assert len({epoch for epoch, _ in ids}) == 1
    assert [int(number) for _, number in ids] == list(range(2, len(ids) + 2))
    assert len(words(text_of(events))) > 3
    assert (events[-1]["type"], events[-1]["reason"]) == ("end", "stopping")
    assert command.process.wait(WAIT_S) == 0
    sender.close()
    http.close()


def test_a_websocket_tells_the_same_events_and_goes_on_behind_any_of_them(command: EdgeCommand, cities: Path) -> None:
    url, port = command.said(r"health\s+(http://\S+)/health"), int(command.said(r"UDP 127\.0\.0\.1:(\d+)"))
    http = httpx.Client(base_url=url, timeout=WAIT_S, headers={"Authorization": "Bearer secret"})
    eventually(lambda: answers(http))
    created = http.post(PATH, json={"options": {"language": "en"}}).json()
    place = f"ws{url.removeprefix('http')}{created['events']}"
    sender = RtpSender(port)
    with connect(f"{place}?api_key=secret") as listener:
        sender.send(l16_packets(read_audio(cities)[: 3 * 16_000], created["ssrc"]))
        eventually(lambda: http.get(f"{PATH}/{created['id']}").json()["packets"] == 150)
        http.delete(f"{PATH}/{created['id']}")
        got = [json.loads(message) for message in listener]
    assert (listener.close_code, got[-1]["type"]) == (1_000, "end")
    told = http.get(created["events"]).text.split("\n\n")
    expected = []
    for each in told:
        fields = dict(line.split(": ", 1) for line in each.splitlines() if not line.startswith(":"))
        if fields:
            expected.append({"id": fields["id"], **json.loads(fields["data"])})
    assert got == expected
    authorized = {"Authorization": "Bearer secret"}
    with connect(f"{place}?after={got[1]['id']}", additional_headers=authorized) as listener:
        assert [json.loads(message) for message in listener] == got[2:]
    quiet = http.post(PATH, json={}).json()["events"]
    for path, headers, said in (
        (quiet, {}, "invalid_api_key"),
        (f"{quiet}?api_key=wrong", {}, "invalid_api_key"),
        (f"{quiet}?after=x", authorized, "malformed_request"),
        (f"{quiet}?api_key=secret", {"Origin": "https://elsewhere.example"}, "not_allowed"),
        (f"{PATH}/edge_none/events", authorized, "unknown_session"),
        (quiet, {**authorized, "Origin": url}, "malformed_request"),  # for what is sent
    ):
        with connect(f"ws{url.removeprefix('http')}{path}", additional_headers=headers) as listener:
            with contextlib.suppress(ConnectionClosed):
                listener.send("{}")
            answer = json.loads(listener.recv(WAIT_S))
            with pytest.raises(ConnectionClosed):
                listener.recv(WAIT_S)
        assert (answer["type"], answer["code"], listener.close_code) == ("error", said, 1_008), path
    sender.close()
    http.close()


def answers(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("colour = 1", "colour"),
        ("port = 70000", "port"),
        ('control_host = "0.0.0.0"', "api_keys"),
        ("spool_s = 1", "spool_s"),
        (f'webhook_secret = "whsec_{"a" * 33}"', "openssl"),
        ('webhook_secret = "short"', "whsec_"),
        ('[options]\nencoding = "opus"', "encoding"),
        ('[payload_types]\n96 = "mp3/90000"', "mp3"),
    ],
)
def test_wrong_settings_are_told(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "edge.toml"
    file.write_text(text)
    result = CliRunner().invoke(app, ["edge", "--config", str(file)])
    assert result.exit_code == USAGE
    assert said in result.output
    assert "aaaa" not in result.output  # a secret is not printed
