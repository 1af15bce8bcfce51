"""The load generator of the service's bench, against real HTTP servers with every way of answering."""

from __future__ import annotations

import asyncio
import email
import email.policy
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_modules import bench_modules

pytest.importorskip("jiwer")
pytest.importorskip("whisper_normalizer")

Reply = Callable[[int, bytes, asyncio.StreamWriter], Awaitable[None]]
"""Number of the request on its connection, its body, where the answer goes."""


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The bench's files as they import each other when run as scripts."""
    with bench_modules("serve", "serve_load", "serve_report") as modules:
        yield modules


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
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\ncontent-length: %d\r\n\r\n" % len(said) + said)


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
    assert all(0 < answer["latency_s"] < 60 for answer in answers)
    assert found["reconnects"] == (len(answers) - 4 if reply in (then_close, until_end) else 0)
    assert found["client_cpu_s"] > 0
    assert found["rss_mib"] > 1
    assert found["server_cpu_s"] >= 0


def test_requests_are_valid_http(bench: SimpleNamespace, files: list[str]) -> None:
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


async def test_a_full_server_is_retried_after_its_retry_time(bench: SimpleNamespace, files: list[str]) -> None:
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
    assert sum(waited) >= len(turned_away)  # a busy machine is slow without being told to wait
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


async def test_errors_are_counted_by_name(bench: SimpleNamespace, files: list[str]) -> None:
    turns = itertools.count()

    async def reply(number: int, body: bytes, writer: asyncio.StreamWriter) -> None:
        match next(turns) % 5:
            case 0:
                writer.write(b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\n{}")
            case 1:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            case 2:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{")
                writer.close()
            case 3:
                writer.write(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")
            case _:
                await with_length(number, body, writer)

    async with listening(reply) as port:
        found = await bench.serve_load.run(job(files, port, requests=60))
    row = bench.serve_report.facts(found, [1.0] * 5)
    assert row["errors"].keys() == {"500", "unreadable", "not http", "closed"}
    begun = [answer for answer in found["answers"] if answer["begun_inside"]]
    good = sum(answer["status"] == 200 and answer["body"] != "{}" for answer in begun)
    assert sum(row["errors"].values()) == len(begun) - good
    assert row["requests"] == len(begun)
    assert found["reconnects"] > 0


async def test_a_lost_server_ends_the_level(bench: SimpleNamespace, files: list[str]) -> None:
    found = await bench.serve_load.run(job(files, bench.serve.free_port(), requests=8, per_client=1))
    row = bench.serve_report.row("x", 4, [found], ["a"] * 5, [1.0] * 5)
    assert row["errors"].keys() == {"no connection"}
    assert (row["rps"], row["p50_ms"], row["p99_over_p50"], row["wer"]) == (0.0, None, None, None)


async def test_a_client_without_an_answer_fails_the_level(bench: SimpleNamespace, files: list[str]) -> None:
    asked, enough = itertools.count(), asyncio.Event()

    async def reply(number: int, body: bytes, writer: asyncio.StreamWriter) -> None:
        if next(asked) == 20:
            await enough.wait()
        else:
            await with_length(number, body, writer)

    async with listening(reply) as port:
        found = await bench.serve_load.run(job(files, port, limit_s=1))
        enough.set()
    assert found["failed"].startswith("not over after 1 s: ")
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
