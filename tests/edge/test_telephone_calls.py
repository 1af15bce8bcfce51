"""Real telephones call: their words are transcribed, their keys told, and what is played to them is heard; the example
agent greets them, hears, answers in a voice of ours, and is interrupted."""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import runpy
import sys
import threading
import wave
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from baresip import Baresip
from children import Child
from rtp_sender import RtpSender, l16_packets
from running_edge import RunningEdge, text_of
from running_server import WAIT_S, Running, eventually
from test_edge_senders import EdgeCommand

from asr_serve.audio import read_audio
from asr_serve.edge.rtp_playout import PlayoutResult
from asr_serve.edge.telephone import CallRequest
from asr_serve.errors import SessionExpired

SECONDS, PLAYED_SECONDS = 5, 4
AGENT = Path(__file__).resolve().parents[2] / "examples" / "voice_agent.py"
GREETING = "Good morning, and thank you for calling. All of us are glad that you do. What is it that you want to know?"
CODECS = {"pcmu": "PCMU/8000", "pcma": "PCMA/8000", "g722": "G722/8000", "opus": "opus/48000"}


def write_wav(path: Path, pcm: np.ndarray) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(np.rint(pcm * 32_767).astype("<i2").tobytes())
    return path


@pytest.fixture(scope="module")
def speech(cities: Path) -> np.ndarray:
    return read_audio(cities)[: SECONDS * 16_000]


@pytest.fixture
def spoken(speech: np.ndarray, tmp_path: Path) -> Path:
    """A file of the speech, and a long silence."""
    return write_wav(tmp_path / "spoken.wav", np.concatenate([speech, np.zeros(60 * 16_000, np.float32)]))


@pytest.fixture
def edge(speaker: Running) -> Iterator[RunningEdge]:
    made = RunningEdge(speaker.url, sip={})
    yield made
    made.close()


@pytest.fixture
def telephone(tmp_path: Path, spoken: Path) -> Iterator[Callable[..., Baresip]]:
    made: list[Baresip] = []

    def start(codec: str = "pcmu", wav: Path = spoken, *, secure: bool = False) -> Baresip:
        made.append(Baresip(tmp_path / f"{codec}{len(made)}", wav, codec=codec, secure=secure))
        return made[-1]

    yield start
    for each in made:
        each.close()


def uri(edge: RunningEdge) -> str:
    assert edge.telephone is not None
    return f"sip:asr@127.0.0.1:{edge.telephone.port}"


def words(text: str) -> list[str]:
    return "".join(letter for letter in text.lower() if letter.isalnum() or letter == " ").split()


def resembles(heard: list[str], said: list[str]) -> bool:
    """Returns whether three words of four are there: a telephone that waits for a processor leaves sound out."""
    blocks = difflib.SequenceMatcher(None, heard, said, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) >= 0.75 * len(said)


def play(edge: RunningEdge, session_id: str, pcm: np.ndarray) -> asyncio.Future[PlayoutResult]:
    """Begins to play (n,) float32 at 16 kHz, in pieces of odd sizes."""
    data = np.rint(pcm * 32_767).astype("<i2").tobytes()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 5_001):
            yield data[at : at + 5_001]

    assert edge.telephone is not None
    return asyncio.run_coroutine_threadsafe(edge.telephone.play(session_id, pieces(), 16_000), edge.loop)  # type: ignore[return-value]


def words_of(server: Running, file: Path) -> list[str]:
    answer = server.http.post("/v1/audio/transcriptions", files={"file": file.read_bytes()})
    assert answer.status_code == 200, answer.text
    return words(answer.json()["text"])


def calls_of(edge: RunningEdge, count: int) -> list[dict[str, Any]]:
    eventually(lambda: len(edge.call_notes("call")) == count)
    return edge.call_notes("call")


def test_words_go_both_ways_in_every_codec(
    speaker: Running,
    edge: RunningEdge,
    telephone: Callable[..., Baresip],
    speech: np.ndarray,
    cities: Path,
    tmp_path: Path,
) -> None:
    """Half of the telephones call, half are called; half hang up, half are hung up on; one encrypts."""
    plain = edge.create()
    with closing(RtpSender(edge.driver.port)) as sender:
        sender.send(l16_packets(speech, plain.ssrc))
    said = read_audio(cities)[SECONDS * 16_000 :][: PLAYED_SECONDS * 16_000]
    phones = {codec: telephone(codec, secure=codec == "g722") for codec in CODECS}
    assert edge.telephone is not None
    for codec, phone in phones.items():
        if codec in ("pcmu", "g722"):
            phone.dial(uri(edge))
        else:
            edge.call(edge.telephone.place_call, CallRequest(to=f"sip:ann@127.0.0.1:{phone.sip_port}"))
    sessions = {}
    for call in calls_of(edge, len(CODECS)):
        (begun,) = (event for event in edge.events(call["session"]) if event["type"] == "call")
        codec = next(codec for codec, name in CODECS.items() if name == begun["encoding"])
        sessions[codec] = call["session"]
        assert edge.describe(call["session"]).encrypted == (codec == "g722")
        assert begun["direction"] == ("in" if codec in ("pcmu", "g722") else "out")
    playing = {codec: play(edge, session, said) for codec, session in sessions.items()}
    expected = words(text_of(edge.end(plain.id)))
    wanted = words_of(speaker, write_wav(tmp_path / "said.wav", said))
    assert min(len(expected), len(wanted)) > 6
    for codec, session in sessions.items():
        result = playing[codec].result(60)
        assert result.played_s == pytest.approx(PLAYED_SECONDS, abs=0.02)
        assert not result.interrupted
        eventually(lambda session=session: edge.describe(session).received_s > SECONDS + 0.5)
    for codec, phone in phones.items():
        if codec in ("pcmu", "pcma"):
            phone.command("hangup")
        else:
            edge.call(edge.service.end, sessions[codec])
    eventually(lambda: len(edge.call_notes("call_end")) == len(CODECS))
    for codec, phone in phones.items():
        log = edge.call(edge.service.events, sessions[codec])
        eventually(lambda log=log: log.ended)
        events = edge.events(sessions[codec])
        assert resembles(words(text_of(events)), expected), (codec, text_of(events))
        assert events[-1]["reason"] == ("hangup" if codec in ("pcmu", "pcma") else "deleted")
        assert events[-1]["lost_packets"] == 0
        phone.close()
        (recorded,) = phone.folder.glob("dump-*-dec.wav")
        heard = words_of(speaker, recorded)
        assert resembles(heard, wanted), (codec, heard, wanted)


def test_keys_hold_and_interruption(edge: RunningEdge, telephone: Callable[..., Baresip], speech: np.ndarray) -> None:
    phone = telephone()
    phone.dial(uri(edge))
    (call,) = calls_of(edge, 1)
    session = call["session"]

    def kinds() -> list[str]:
        return [event["type"] for event in edge.events(session)]

    for key in "4#":
        phone.command("sndcode", key)
        eventually(lambda key=key: [e["digit"] for e in edge.events(session) if e["type"] == "digit"][-1:] == [key])
    playing = play(edge, session, np.resize(speech, 60 * 16_000))
    eventually(lambda: phone.says("incoming rtp"))
    phone.command("hold")
    eventually(lambda: "hold" in kinds())
    taken = edge.describe(session).packets
    phone.command("resume")
    eventually(lambda: "resume" in kinds())
    eventually(lambda: edge.describe(session).packets > taken + 20)
    assert not playing.done()
    assert edge.telephone is not None
    edge.call(edge.telephone.stop_playing, session)
    result = playing.result(60)
    assert result.interrupted
    assert 0 < result.played_s < 30
    eventually(lambda: "played" in kinds())
    (played,) = (event for event in edge.events(session) if event["type"] == "played")
    assert (played["interrupted"], played["played_s"]) == (True, result.played_s)
    phone.command("hangup")
    log = edge.call(edge.service.events, session)
    eventually(lambda: log.ended)
    with pytest.raises(SessionExpired):
        edge.call(edge.telephone.stop_playing, session)


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * 16_000), np.float32)


def test_the_agent_answers_and_is_interrupted(
    speaker: Running, telephone: Callable[..., Baresip], cities: Path, tmp_path: Path
) -> None:
    config = tmp_path / "edge.toml"
    config.write_text(
        f'server = "{speaker.url}"\nport = 0\ncontrol_port = 0\napi_keys = ["secret"]\n'
        '[options]\nsilence_schedule = "inf:400"\n[sip]\nport = 0\ntcp = false\n'
    )
    edge = EdgeCommand(tmp_path / "edge.log", "--config", str(config))
    control, port = edge.said(r"health\s+(http://\S+)/health"), edge.said(r"sip:asr-serve@127\.0\.0\.1:(\d+)")
    environ = {name: value for name, value in os.environ.items() if not name.endswith("API_KEY")}
    command = [sys.executable, str(AGENT), "--edge", control, "--server", speaker.url, "--greeting", GREETING]
    with (tmp_path / "agent.log").open("w") as out:
        agent = Child(command, stdout=out, stderr=out, env={**environ, "EDGE_API_KEY": "secret"})

    def said(prefix: str) -> list[str]:
        lines = (tmp_path / "agent.log").read_text().splitlines()
        return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]

    times = read_audio(cities)[: int(2.3 * 16_000)]  # It was the best of times,
    spoken = [silence(1.5), *([times, silence(1.5)] * 30)]  # again and again: whenever it speaks, it is interrupted
    phone = telephone("g722", write_wav(tmp_path / "call.wav", np.concatenate(spoken)))
    phone.dial(f"sip:agent@127.0.0.1:{port}")
    log = tmp_path / "agent.log"
    eventually(lambda: any(float(line.split()[0]) > 0.3 for line in said("interrupted after ")), log.read_text)
    eventually(lambda: len(said("agent: ")) > 1, log.read_text)
    heard, (greeting, answer, *_) = said("caller: ")[0], said("agent: ")
    assert "best of time" in heard.lower()
    assert (greeting, answer) == (GREETING, f"You said: {heard}")
    phone.command("hangup")
    eventually(lambda: phone.says("terminated"), phone.said)
    phone.close()
    (recorded,) = phone.folder.glob("dump-*-dec.wav")
    assert np.abs(read_audio(recorded)).max() > 0.05
    for process in (agent, edge.process):
        process.terminate()
        process.wait(WAIT_S)


async def test_the_agent_remembers_what_its_language_model_began_to_say() -> None:
    asked: list[list[dict[str, str]]] = []

    class Completions(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"])
            self.send_response(200)
            self.end_headers()
            for part in ("It costs 2.5", "0. Is th", "at all? I", " think so."):
                delta = {"choices": [{"delta": {"content": part}}]}
                self.wfile.write(b"data: " + json.dumps(delta).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    example = runpy.run_path(str(AGENT))
    async with example["client"](f"http://127.0.0.1:{http.server_port}/v1", None) as client:
        bot = example["ChatBot"](client, example["PARSER"].parse_args([]))
        assert [part async for part in bot.reply("How much?")] == ["It costs 2.50.", "Is that all?", "I think so."]
        async with aclosing(bot.reply("Really?")) as reply:
            async for _ in reply:
                break
    assert [message["content"].strip() for message in asked[1][1:]] == [
        *("How much?", "It costs 2.50. Is that all? I think so.", "Really?")
    ]
    assert bot.messages[-1] == {"role": "assistant", "content": "It costs 2.50. "}
    http.shutdown()
    http.server_close()
    thread.join(WAIT_S)


@pytest.mark.parametrize("direction", ["in", "out"])
def test_an_edge_that_requires_encryption_has_no_other_calls(
    speaker: Running, telephone: Callable[..., Baresip], speech: np.ndarray, direction: str
) -> None:
    edge = RunningEdge(speaker.url, sip={}, require_srtp=True)
    assert edge.telephone is not None
    plain, secure = telephone(), telephone(secure=True)
    for phone in (plain, secure):
        if direction == "in":
            phone.dial(uri(edge))
        else:
            edge.call(edge.telephone.place_call, CallRequest(to=f"sip:ann@127.0.0.1:{phone.sip_port}"))
    (call,) = calls_of(edge, 1)
    session = call["session"]
    eventually(lambda: plain.says("488") if direction == "in" else edge.call_notes("call_end"), plain.said)
    playing = play(edge, session, speech[:16_000])
    for command, told in (("hold", "hold"), ("resume", "resume")):
        secure.command(command)
        eventually(lambda told=told: told in [event["type"] for event in edge.events(session)], secure.said)
    taken = edge.describe(session).packets
    eventually(lambda: edge.describe(session).packets > taken + 20, lambda: str(edge.describe(session)))
    assert playing.result(60).played_s == 1.0
    assert secure.says("incoming rtp for 'audio' established")
    assert not secure.says("(?i)authentication failed|srtp.*failed")
    assert edge.describe(session).encrypted
    edge.close()
