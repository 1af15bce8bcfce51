"""Closed-loop clients against one HTTP server, in a process of their own.

    python serve_load.py JOB.json RESULT.json

Each client posts a clip, waits for the whole answer and posts the next one. The server shares the machine's
cores with this process, so a request costs it little: the bytes of each are made beforehand, one write sends
them, and an answer is kept as it came, to be read when the clock has stopped.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import footprint
import machine

Job = dict[str, Any]
Result = dict[str, Any]
Headers = dict[bytes, bytes]

BOUNDARY = "asr-serve-bench-7d9f3c51a04e"
KINDS = {".flac": "audio/flac", ".wav": "audio/wav"}
RETRY_S = 1.0
"""Wait after a 429 that does not say how long."""
RECONNECT_S = 0.1
"""Wait after a connection broke, so that a dead server is not asked a thousand times a second."""


class NotHttp(Exception):
    """The bytes that came are no HTTP/1.1 answer."""


class Answer(NamedTuple):
    client: int
    clip: int
    begun_s: float
    ended_s: float
    status: int | str
    """HTTP status; or what went wrong before there was one: `closed`, `no connection`, `not http`."""
    body: bytes


def request(file: Path, host: str, path: str, fields: dict[str, str]) -> bytes:
    """POST of one file as multipart/form-data, headers included."""
    parts = [f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()]
    kind = KINDS.get(file.suffix, "application/octet-stream")
    parts.append(f'Content-Disposition: form-data; name="file"; filename="{file.name}"\r\nContent-Type: {kind}\r\n\r\n')
    opening = "".join(f"--{BOUNDARY}\r\n{part}" for part in parts).encode()
    body = b"".join([opening, file.read_bytes(), f"\r\n--{BOUNDARY}--\r\n".encode()])
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\n"
        f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def order(client: int, clips: int, seed: int) -> Iterator[int]:
    """Every clip once, shuffled, then every clip once again: the same for every server that is measured."""
    chance = random.Random(f"{seed}/{client}")
    while True:
        yield from chance.sample(range(clips), clips)


class Line:
    """One keep-alive connection, opened anew when the server has closed it."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port, self.connects = host, port, 0
        self.reader = asyncio.StreamReader()
        self.writer: asyncio.StreamWriter | None = None

    async def ask(self, sent: bytes) -> tuple[int | str, Headers, bytes]:
        """Status, headers and body of the answer; a failure's name as the status when there is none."""
        if self.writer is None or self.reader.at_eof() or self.writer.is_closing():
            self.drop()
            try:
                self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
            except OSError:
                return "no connection", {}, b""
            self.connects += 1
        try:
            self.writer.write(sent)
            status, headers = await self.head()
            body = await self.body(headers)
        except (OSError, asyncio.IncompleteReadError):
            self.drop()
            return "closed", {}, b""
        except (NotHttp, ValueError, asyncio.LimitOverrunError):
            self.drop()
            return "not http", {}, b""
        if headers.get(b"connection", b"").lower() == b"close":
            self.drop()
        return status, headers, body

    async def head(self) -> tuple[int, Headers]:
        status = 100
        while status < 200:  # 100 Continue and its like come before the answer
            first, *rest = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
            version, status_text, *_ = first.split(b" ", 2)
            if not version.startswith(b"HTTP/1."):
                raise NotHttp(first)
            status = int(status_text)
        pairs = (line.partition(b":") for line in rest)
        return status, {name.strip().lower(): value.strip() for name, _, value in pairs}

    async def body(self, headers: Headers) -> bytes:
        if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
            chunks = []
            while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
                chunks.append((await self.reader.readexactly(size + 2))[:-2])
            while await self.reader.readuntil(b"\r\n") != b"\r\n":
                pass  # trailers
            return b"".join(chunks)
        if b"content-length" in headers:
            return await self.reader.readexactly(int(headers[b"content-length"]))
        return await self.reader.read()

    def drop(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.writer = None


class Level:
    """What is counted while so many clients are at it.

    Counting starts when every client has had an answer: then the rush of the start is over and the server is
    as busy as it will be. It stops after `seconds`, `requests` answers and `per_client` answers for everybody.
    The load goes on until each request begun in between has its answer, so slow ones are neither left out nor
    answered by a server that has nothing else to do.
    """

    def __init__(self, job: Job) -> None:
        self.clients, self.pid = job["clients"], job.get("pid")
        self.seconds, self.requests, self.per_client = job["seconds"], job["requests"], job["per_client"]
        self.warm: set[int] = set()
        self.begun_s: dict[int, float] = {}
        """When each client began the request it waits for now."""
        self.answers: list[Answer] = []
        self.counts: Counter[int] = Counter()
        self.refused = 0
        self.opened_s = self.closed_s = float("inf")
        self.owed: set[int] = set()
        """Clients that still wait for a request begun before counting stopped."""
        self.over = False
        self.cpus_s: list[tuple[float, float]] = []
        """Ours and the server's, at the start and at the end of counting."""
        self.rss_mib = 0.0

    @property
    def open(self) -> bool:
        return self.opened_s < float("inf") == self.closed_s

    def begin(self, client: int) -> float:
        self.begun_s[client] = time.perf_counter()
        return self.begun_s[client]

    def refuse(self) -> None:
        self.refused += self.open

    def end(self, answer: Answer) -> None:
        self.answers.append(answer)
        if self.open:
            self.counts[answer.client] += 1
            if self.enough():
                self.close(answer.client)
        elif self.opened_s == float("inf"):
            self.warm.add(answer.client)
            if len(self.warm) == self.clients:
                self.cpus_s.append((time.process_time(), tree_cpu_s(self.pid)))
                self.opened_s = time.perf_counter()
        else:
            self.owed.discard(answer.client)
            self.over = not self.owed

    def enough(self) -> bool:
        return (
            time.perf_counter() - self.opened_s >= self.seconds
            and self.counts.total() >= self.requests
            and all(self.counts[client] >= self.per_client for client in range(self.clients))
        )

    def close(self, last: int) -> None:
        self.closed_s = time.perf_counter()
        self.cpus_s.append((time.process_time(), tree_cpu_s(self.pid)))
        self.owed = {client for client, begun_s in self.begun_s.items() if begun_s >= self.opened_s} - {last}
        self.over = not self.owed
        self.rss_mib = sum(machine.peak_mib(str(pid)) for pid in tree(self.pid))


async def client(number: int, requests: Sequence[bytes], level: Level, job: Job) -> int:
    """Post clips until the level is over; how many connections that took.

    After a 429 the client waits as long as it was told to and sends the same clip again: one request, which
    took from its first try to its answer.
    """
    line = Line(job["host"], job["port"])
    try:
        for clip in order(number, len(requests), job["seed"]):
            begun_s = level.begin(number)
            while True:
                status, headers, body = await line.ask(requests[clip])
                if status != 429 or level.over:
                    break
                level.refuse()
                await asyncio.sleep(retry_s(headers))
            level.end(Answer(number, clip, begun_s, time.perf_counter(), status, body))
            if level.over:
                break
            if isinstance(status, str):
                await asyncio.sleep(RECONNECT_S)
    finally:
        line.drop()
    return line.connects


def retry_s(headers: Headers) -> float:
    """Seconds of Retry-After; a date, or nothing, is RETRY_S."""
    try:
        return max(0.0, float(headers[b"retry-after"]))
    except (KeyError, ValueError):
        return RETRY_S


def tree(pid: int | None) -> list[int]:
    return footprint.family(pid) if pid else []


def tree_cpu_s(pid: int | None) -> float:
    """Processor seconds of a process and its descendants, those that have ended included."""
    ticks = 0
    for member in tree(pid):
        try:
            after_name = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # gone since
            continue
        ticks += sum(map(int, after_name[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


async def run(job: Job) -> Result:
    """The level's answers and its clock; `failed` when it was not over after `limit_s`."""
    files, host = [Path(name) for name in job["files"]], f"{job['host']}:{job['port']}"
    requests = [request(file, host, job["path"], job["fields"]) for file in files]
    level, connects, failed = Level(job), 0, None
    try:
        async with asyncio.timeout(job["limit_s"]):
            everybody = (client(number, requests, level, job) for number in range(level.clients))
            connects = sum(await asyncio.gather(*everybody))
    except TimeoutError:
        failed = f"not over after {job['limit_s']:.0f} s: {len(level.answers)} answers, {level.refused} refused"
    if failed:
        return {"failed": failed}
    (ours_s, theirs_s), (ours_end_s, theirs_end_s) = level.cpus_s
    return {
        "wall_s": level.closed_s - level.opened_s,
        "answers": [
            {
                "clip": answer.clip,
                "status": answer.status,
                "latency_s": answer.ended_s - answer.begun_s,
                "begun_inside": level.opened_s <= answer.begun_s < level.closed_s,
                "ended_inside": level.opened_s < answer.ended_s <= level.closed_s,
                "body": answer.body.decode("utf-8", errors="replace"),
            }
            for answer in level.answers
        ],
        "refused": level.refused,
        "reconnects": connects - level.clients,
        "client_cpu_s": ours_end_s - ours_s,
        "server_cpu_s": theirs_end_s - theirs_s,
        "rss_mib": level.rss_mib,
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(run(json.loads(Path(sys.argv[1]).read_text())))))
