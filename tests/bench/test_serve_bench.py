"""The load bench of the service: its generator against real HTTP servers, and its arithmetic on known answers."""

from __future__ import annotations

import asyncio
import email
import email.policy
import importlib
import itertools
import json
import os
import sys
import wave
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
ROW_KEYS = {"system", "clients", "rps", "rtfx", "p50_ms", "p95_ms", "p99_ms"}
ROW_KEYS |= {"max_ms", "errors", "wer", "server_cpu_s", "client_cpu_s", "rss_mib"}

pytest.importorskip("jiwer")
pytest.importorskip("whisper_normalizer")

Reply = Callable[[int, bytes, asyncio.StreamWriter], Awaitable[None]]
"""Number of the request on its connection, its body, where the answer goes."""


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The bench's files as they import each other when run as scripts."""
    sys.path.insert(0, str(BENCH))
    names = ("clips", "serve", "serve_load", "serve_peers", "serve_report")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    sys.path.remove(str(BENCH))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Five files; each holds its own name, so that an answer shows whose it is."""
    paths = [tmp_path / f"{name}.flac" for name in ("one", "two", "three", "four", "five")]
    for path in paths:
        path.write_bytes(b"\r\n--\x00\xff" + path.stem.encode())
    return [str(path) for path in paths]


@asynccontextmanager
async def listening(reply: Reply) -> Any:
    """A server on a free port that reads whole requests and lets `reply` answer them; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for number in itertools.count():
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                kind = head.partition(b"Content-Type:")[2].split(b"\r\n")[0]
                body = b"Content-Type:" + kind + b"\r\n\r\n" + await reader.readexactly(length)
                await reply(number, body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def form(body: bytes) -> dict[str, bytes]:
    """The fields of a multipart body, read by somebody else's parser."""
    message = email.message_from_bytes(body, policy=email.policy.HTTP)
    return {
        str(part.get_param("name", header="content-disposition")): part.get_payload(decode=True)
        for part in message.iter_parts()
    }


def text(body: bytes) -> bytes:
    return json.dumps({"text": form(body)["file"][6:].decode()}).encode()


async def with_length(_: int, body: bytes, writer: asyncio.StreamWriter) -> None:
    said = text(body)
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\ncontent-length: %d\r\n\r\n" % len(said) + said
    )


async def in_chunks(_: int, body: bytes, writer: asyncio.StreamWriter) -> None:
    said = text(body)
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for part in (said[:3], said[3:]):
        writer.write(b"%x;note=1\r\n%b\r\n" % (len(part), part))
        await writer.drain()
        await asyncio.sleep(0)
    writer.write(b"0\r\nServer-Timing: 1\r\n\r\n")


async def after_continue(number: int, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    await with_length(number, body, writer)


async def then_close(_: int, body: bytes, writer: asyncio.StreamWriter) -> None:
    said = text(body)
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(said) + said)
    writer.close()


async def until_end(_: int, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + text(body))
    writer.close()


def job(files: list[str], port: int, **more: Any) -> dict[str, Any]:
    return {
        "host": "127.0.0.1",
        "port": port,
        "path": "/v1/audio/transcriptions",
        "files": files,
        "fields": {"model": "m", "response_format": "json"},
        "seed": 1,
        "limit_s": 20,
        "pid": os.getpid(),
        "clients": 4,
        "seconds": 0,
        "requests": 40,
        "per_client": 3,
        **more,
    }


@pytest.mark.parametrize("reply", [with_length, in_chunks, after_continue, then_close, until_end])
async def test_every_answer_belongs_to_its_clip(bench: SimpleNamespace, files: list[str], reply: Reply) -> None:
    async with listening(reply) as port:
        found = await bench.serve_load.run(job(files, port))
    answers = json.loads(json.dumps(found))["answers"]
    assert all(answer["status"] == 200 for answer in answers)
    names = [Path(file).stem for file in files]
    assert all(json.loads(answer["body"]) == {"text": names[answer["clip"]]} for answer in answers)
    inside = [answer for answer in answers if answer["ended_inside"]]
    assert len(inside) >= 40
    # Each client has one request on its way when counting starts, and one when it stops.
    assert abs(sum(answer["begun_inside"] for answer in answers) - len(inside)) <= 4
    assert len(answers) > len(inside)
    assert all(0 < answer["latency_s"] < 5 for answer in answers)
    assert found["reconnects"] == (len(answers) - 4 if reply in (then_close, until_end) else 0)
    assert 0 < found["client_cpu_s"] <= found["wall_s"] * 1.1
    assert found["rss_mib"] > 1
    assert found["server_cpu_s"] >= 0


def test_a_request_is_what_parsers_read(bench: SimpleNamespace, files: list[str]) -> None:
    sent = bench.serve_load.request(Path(files[0]), "h:1", "/asr", {"model": "m", "response_format": "json"})
    head, _, body = sent.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /asr HTTP/1.1"
    assert "Host: h:1" in lines
    assert f"Content-Length: {len(body)}" in lines
    kind = next(line for line in lines if line.startswith("Content-Type"))
    assert form(kind.encode() + b"\r\n\r\n" + body) == {
        "model": b"m",
        "response_format": b"json",
        "file": Path(files[0]).read_bytes(),
    }
    assert b'filename="one.flac"\r\nContent-Type: audio/flac' in body


def test_the_order_is_fixed_and_each_clients_own(bench: SimpleNamespace) -> None:
    order = bench.serve_load.order
    first = list(itertools.islice(order(0, 5, 7), 10))
    assert sorted(first[:5]) == sorted(first[5:]) == [0, 1, 2, 3, 4]
    assert first == list(itertools.islice(order(0, 5, 7), 10))
    assert len({tuple(itertools.islice(order(client, 5, 7), 10)) for client in range(20)}) > 15


async def test_a_full_server_is_asked_again_when_it_said(bench: SimpleNamespace, files: list[str]) -> None:
    turned_away: list[float] = []

    async def reply(number: int, body: bytes, writer: asyncio.StreamWriter) -> None:
        if number % 3 == 2:
            turned_away.append(asyncio.get_running_loop().time())
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 0.05\r\nContent-Length: 2\r\n\r\n{}")
        else:
            await with_length(number, body, writer)

    async with listening(reply) as port:
        found = await bench.serve_load.run(job(files, port, clients=1, requests=20))
    answers = found["answers"]
    assert {answer["status"] for answer in answers} == {200}
    waited = [answer["latency_s"] >= 0.05 for answer in answers]
    assert sum(waited) == len(turned_away)
    assert abs(found["refused"] - len(turned_away)) <= 1  # one may come before or after counting
    # Each clip is still asked for in turn: the refused one was sent again.
    wanted = list(itertools.islice(bench.serve_load.order(0, 5, 1), len(answers)))
    assert [answer["clip"] for answer in answers] == wanted
    row = bench.serve_report.facts(found, [1.0] * 5)
    assert row["errors"] == {"429": found["refused"]}


@pytest.mark.parametrize(
    ("headers", "wait_s"), [({b"retry-after": b"3"}, 3), ({b"retry-after": b"Fri, 31 Dec 1999"}, 1), ({}, 1)]
)
def test_retry_after(bench: SimpleNamespace, headers: dict[bytes, bytes], wait_s: float) -> None:
    assert bench.serve_load.retry_s(headers) == wait_s


async def test_what_goes_wrong_is_counted_by_name(bench: SimpleNamespace, files: list[str]) -> None:
    async def reply(number: int, body: bytes, writer: asyncio.StreamWriter) -> None:
        match number % 5:
            case 0:
                writer.write(b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\n{}")
            case 1:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            case 2:
                await with_length(number, body, writer)
            case 3 if hash(body) % 2:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{")
                writer.close()
            case _:
                writer.write(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")

    async with listening(reply) as port:
        found = await bench.serve_load.run(job(files, port, requests=60))
    row = bench.serve_report.facts(found, [1.0] * 5)
    assert row["errors"].keys() >= {"500", "unreadable", "not http"}
    assert row["errors"].keys() <= {"500", "unreadable", "not http", "closed"}
    begun = [answer for answer in found["answers"] if answer["begun_inside"]]
    good = sum(answer["status"] == 200 and answer["body"] != "{}" for answer in begun)
    assert (
        row["errors"].total()
        if isinstance(row["errors"], Counter)
        else sum(row["errors"].values()) == (len(begun) - good)
    )
    assert row["requests"] == len(begun)
    assert found["reconnects"] > 0


async def test_a_server_that_is_gone_ends_the_level(bench: SimpleNamespace, files: list[str]) -> None:
    found = await bench.serve_load.run(job(files, bench.serve.free_port(), requests=8, per_client=1))
    row = bench.serve_report.row("x", 4, [found], ["a"] * 5, [1.0] * 5)
    assert row["errors"].keys() == {"no connection"}
    assert (row["rps"], row["p50_ms"], row["p99_over_p50"], row["wer"]) == (0.0, None, None, None)


async def test_a_client_that_is_never_answered_fails_the_level(bench: SimpleNamespace, files: list[str]) -> None:
    asked = itertools.count()

    async def reply(number: int, body: bytes, writer: asyncio.StreamWriter) -> None:
        if next(asked) == 20:
            await asyncio.sleep(3_600)
        await with_length(number, body, writer)

    async with listening(reply) as port:
        found = await bench.serve_load.run(job(files, port, limit_s=0.5))
        assert found["failed"].startswith("not over after 0 s")
    assert bench.serve_report.row("x", 4, [found], [], [])["failed"] == found["failed"]


def test_what_is_counted(bench: SimpleNamespace) -> None:
    """Two clients; one is slow across both ends of the counting."""
    level = bench.serve_load.Level(job([], 0, clients=2, requests=3, per_client=1))

    def end(client: int, begun_s: float) -> None:
        level.end(bench.serve_load.Answer(client, 0, begun_s, bench.serve_load.time.perf_counter(), 200, b""))

    quick, slow = level.begin(0), level.begin(1)
    end(0, quick)
    assert not level.open  # the other has had no answer yet
    quick = level.begin(0)
    end(1, slow)
    assert level.open
    slow = level.begin(1)
    for _ in range(4):
        end(0, quick)
        quick = level.begin(0)
    assert level.open  # enough requests, but none of the slow client's
    end(1, slow)
    assert not level.open
    # The quick client's request was begun while it counted: it is waited for, and the other keeps up the load.
    assert (level.owed, level.over) == ({0}, False)
    slow = level.begin(1)
    end(1, slow)
    assert not level.over
    end(0, quick)
    assert level.over
    assert len(level.cpus_s) == 2


# The arithmetic --------------------------------------------------------------------------------------------------


def answered(clip: int, latency_s: float, said: str | None, *, begun: bool = True, ended: bool = True) -> Any:
    return {
        "clip": clip,
        "status": 200 if said is not None else 503,
        "latency_s": latency_s,
        "begun_inside": begun,
        "ended_inside": ended,
        "body": json.dumps({"text": said}),
    }


def level(answers: list[Any], wall_s: float = 10.0, refused: int = 0) -> dict[str, Any]:
    return {
        "wall_s": wall_s,
        "answers": answers,
        "refused": refused,
        "reconnects": 0,
        "client_cpu_s": 0.123,
        "server_cpu_s": 9.876,
        "rss_mib": 321.4,
    }


@pytest.mark.parametrize(
    ("count", "share", "value"),
    [(1, 0.5, 1), (2, 0.5, 1), (3, 0.5, 2), (100, 0.99, 99), (101, 0.99, 100), (200, 0.99, 198), (10, 1.0, 10)],
)
def test_percentiles_are_values_that_were_measured(
    bench: SimpleNamespace, count: int, share: float, value: float
) -> None:
    assert bench.serve_report.percentile([float(n) for n in range(1, count + 1)], share) == value


def test_no_answers_have_no_percentile(bench: SimpleNamespace) -> None:
    assert bench.serve_report.percentile([], 0.5) is None


def test_rates_count_what_ended_and_latencies_what_began(bench: SimpleNamespace) -> None:
    answers = [answered(0, 0.1, "a") for _ in range(18)]
    answers += [answered(1, 7.0, "b", begun=False), answered(1, 9.0, "b", ended=False)]
    answers += [answered(0, 5.0, None), answered(0, 5.0, "a", begun=False, ended=False)]
    row = bench.serve_report.facts(level(answers, refused=2), [2.0, 30.0])
    assert (row["rps"], row["rtfx"]) == (1.9, (18 * 2 + 30) / 10)
    assert (row["p50_ms"], row["p95_ms"], row["max_ms"]) == (100.0, 9_000.0, 9_000.0)
    assert row["p99_over_p50"] == 90.0
    assert (row["errors"], row["requests"]) == ({"503": 1, "429": 2}, 20)
    assert (row["server_cpu_s"], row["client_cpu_s"], row["rss_mib"]) == (9.88, 0.12, 321)


def test_each_clip_counts_once_in_the_error_rate(bench: SimpleNamespace) -> None:
    references = ["one two", "three four five six", "never asked"]
    pairs = [(0, "one two")] * 7 + [(1, "three four five six"), (1, "three four")]
    assert bench.serve_report.error_rate(references, pairs) == round(100 * (0 + 2 / 2) / 6, 2)
    assert bench.serve_report.error_rate(references, []) is None
    assert bench.serve_report.error_rate(["", "a"], [(0, "noise heard"), (1, "a")]) == 200.0


def test_the_median_round_is_the_row(bench: SimpleNamespace) -> None:
    rounds = [level([answered(0, 0.1, "a")] * count, refused=1) for count in (30, 10, 20)]
    rounds[0]["answers"] = [*rounds[0]["answers"][:-1], answered(0, 0.5, "b")]
    row = bench.serve_report.row("x", 8, rounds, ["a"], [1.0])
    assert row.keys() >= ROW_KEYS
    assert (row["system"], row["clients"], row["rps"]) == ("x", 8, 2.0)
    assert row["rps_rounds"] == [3.0, 1.0, 2.0]
    assert row["errors"] == {"429": 3}
    assert (row["wer"], row["unsteady_clips"]) == (3.33, 1)  # the round with the worst


def test_the_service_beside_the_engine(bench: SimpleNamespace) -> None:
    made = bench.serve_report
    rows = [
        {**made.blank(made.OURS, count), "rps": rps, "rtfx": 7 * rps, "p99_over_p50": ratio}
        for count, rps, ratio in ((1, 10.0, 1.5), (32, 40.0, 2.5), (128, 38.0, 4.0))
    ]
    rows += [{**made.blank("peer", 8), "rps": 2.0, "rtfx": 14.0, "p99_over_p50": 1.1}]
    rows += [{**made.blank("gone", 8), "skipped": "why"}]
    rows += [{**made.blank(made.OFFLINE, None), "rtfx": 350.0}, {**made.blank(made.WHOLE, None), "rtfx": 400.0}]
    ours, peer = made.summarize(rows)
    assert ours == {
        "system": "asr-serve",
        "at_clients": 32,
        "rps": 40.0,
        "rtfx": 280.0,
        "share_of_offline": 0.8,
        "share_of_offline_whole": 0.7,
        "p99_over_p50": 2.5,
        "held_past_saturation": 0.95,
    }
    assert (peer["system"], peer["at_clients"], peer["held_past_saturation"]) == ("peer", 8, 1.0)
    assert "share_of_offline" not in peer
    assert [row.get("share_of_offline") for row in rows[:3]] == [0.2, 0.8, 0.76]
    rows[2].update(rps=None, rtfx=None, failed="the server ended")
    assert made.summarize(rows)[0]["held_past_saturation"] == 0.0
    shown = made.table(rows)
    assert "asr-serve: failed: the server ended" in shown
    assert "gone: skipped: why" in shown
    assert "share_of_offline=0.8" in made.lines([ours])


def test_the_engine_alone(bench: SimpleNamespace) -> None:
    result = {
        "walls_s": [2.0, 1.0, 4.0],
        "cpus_s": [3.0, 3.0, 3.0],
        "texts": ["a", "b"],
        "facts": {"dtype": "bf16", "notes": "n"},
        "audio_s": 60.0,
        "load_s": 1.0,
        "first_text_s": 2.0,
        "peak_mib": 300.4,
    }
    row = bench.serve_report.alone("asr-serve offline", [result], ["a", "c"])
    assert row.keys() >= ROW_KEYS
    assert (row["clients"], row["rps"], row["rtfx"], row["wer"]) == (None, 1.0, 30.0, 50.0)
    assert (row["server_cpu_s"], row["rss_mib"], row["rtfx_rounds"]) == (3.0, 300, [30.0])
    assert bench.serve_report.alone("x", [{"failed": "why"}], ["a"])["failed"] == "why"


# A server in a process of its own --------------------------------------------------------------------------------

APP = '''
import asyncio, json, re

async def app(scope, receive, send):
    """Says the name of the file it was sent."""
    assert scope["type"] == "http"
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    name = re.search(rb'filename="(.+?)"', body)
    said = json.dumps({"text": "this is " + name[1].decode() if name else "ready"}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(said)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": said})
'''


@pytest.fixture
def data(tmp_path: Path, bench: SimpleNamespace) -> Path:
    """Three clips of 0.5, 1.0 and 1.5 s. The text of the last is what the server will not say."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines = []
    for number, said in enumerate(["this is 1.flac", "this is 2.flac", "that was 3.flac"], start=1):
        clip = bench.clips.Clip(f"{number}.flac", np.full(8_000 * number, 0.1, np.float32), said)
        bench.clips.write_long(folder / clip.path, [clip], 0.001, gap_s=0.0)
        lines.append(f"{clip.path}\t{said}")
    (folder / "transcripts.tsv").write_text("\n".join(lines) + "\n")
    return folder


def test_a_whole_run_against_granian(
    bench: SimpleNamespace, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("granian")
    (tmp_path / "hello.py").write_text(APP)
    ports: list[int] = []

    def granian(setting: Any) -> Any:
        ports.append(setting.port)
        command = [sys.executable, "-m", "granian", "--interface", "asgi", "--host", bench.serve_peers.HOST]
        command += ["--port", str(setting.port), "--working-dir", str(tmp_path), "hello:app"]
        return bench.serve_peers.Service(command, "/ready", "m", "says file names")

    def absent(setting: Any) -> Any:
        raise bench.serve_peers.Absent("no such package")

    def broken(setting: Any) -> Any:
        command = [sys.executable, "-c", "raise SystemExit('no weights')"]
        return bench.serve_peers.Service(command, "/ready", "m", "ends at once")

    entries = [("granian", granian), ("absent", absent), ("broken", broken)]
    monkeypatch.setitem(bench.serve_peers.PEERS, "agent-cli", entries)
    found_at = tmp_path / "out" / "serve.json"
    line = f"--data {data} --only-peers --peers agent-cli --clients 1,4 --repeats 2 --seconds 0.2 --requests 20"
    assert bench.serve.main([*line.split(), "--json", str(found_at)]) == 0

    found = json.loads(found_at.read_text())
    assert list(found) == ["bench", "machine", "rows", "summary"]
    assert found["bench"] == "serve"
    assert "granian" in found["machine"]["packages"]
    rows = {(row["system"], row["clients"]): row for row in found["rows"]}
    assert list(rows) == [(name, count) for name, _ in entries for count in (1, 4)]
    assert all(row.keys() >= ROW_KEYS for row in found["rows"])
    for count in (1, 4):
        row = rows["granian", count]
        assert (row["wer"], row["errors"], row["unsteady_clips"], row["reconnects"]) == (22.22, {}, 0, 0)
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"] <= row["max_ms"]
        assert row["requests"] >= 20
        assert row["rtfx"] == pytest.approx(row["rps"], rel=0.5)  # the clips are a second long, on the whole
        assert row["rss_mib"] > 20
        assert len(row["rps_rounds"]) == 2
        assert row["notes"] == "says file names"
        assert rows["absent", count]["skipped"] == "cannot be installed: no such package"
        assert rows["broken", count]["failed"] == "exit 1 before it was ready: no weights"
    assert [made["system"] for made in found["summary"]] == ["granian"]
    for port in ports:  # nothing is left behind
        with bench.serve.socket.socket() as again:
            again.bind((bench.serve_peers.HOST, port))


def test_wav_files_are_the_clips(bench: SimpleNamespace, tmp_path: Path) -> None:
    sound = np.array([0.0, 0.5, -1.0, 1.0], np.float32)
    path = bench.serve.write_wav(tmp_path / "x.wav", bench.clips.Clip("x", sound, ""))
    with wave.open(str(path)) as file:
        assert file.getparams()[:4] == (1, 2, 16_000, 4)
        assert np.frombuffer(file.readframes(4), "<i2").tolist() == [0, 16_384, -32_768, 32_767]


@pytest.mark.parametrize(
    "line", ["--clients 0", "--clients 1,x", "--peers nobody", "--repeats 0", "--requests 0", "--per-client 0"]
)
def test_bad_serve_options(bench: SimpleNamespace, line: str) -> None:
    with pytest.raises(SystemExit):
        bench.serve.parse(["--data", "x", *line.split()])


def test_serve_options(bench: SimpleNamespace, tmp_path: Path) -> None:
    args = bench.serve.parse(
        ["--data", "x", "--clients", "8,1,8", "--server", "--set 'engine.max_decode_rows=64'"]
    )
    assert args.clients == [8, 1]
    setting = bench.serve_peers.Setting(5, 2, tmp_path, args.server)
    assert bench.serve_peers.asr_serve(setting).command[-3:] == ["5", "--set", "engine.max_decode_rows=64"]
