"""Callers of POST /v1/audio/speech, in a process of their own: what they cost is not the server's.

    python bench/speak_load.py JOB.json FOUND.json

Ways to call: `talk`, each plays what comes and asks for its next sentence when that has been played; `together`,
all ask at one moment, again and again; `open`, so many a second at random moments, whoever else is still waiting.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import machine
import serve_load
from speak_calls import Arrival, Level, played_s, saying

Job = dict[str, Any]
SAMPLE_BYTES = 2
LOOK_S = 0.05


class Ear(serve_load.Line):
    """A connection that writes down when sound comes."""

    def __init__(self, host: str, port: int, count: Callable[[int], None]) -> None:
        """`count` is told of all samples that come."""
        super().__init__(host, port)
        self.arrivals: list[Arrival] = []
        self._bytes, self._count = 0, count

    async def hear(self, sent: bytes) -> tuple[int | str, list[Arrival], bytes]:
        """Status, or why there is none; what came when; and the body of what is no sound."""
        self.arrivals, self._bytes = [], 0
        status, _, body = await self.ask(sent)
        return status, self.arrivals, body

    async def body(self, headers: serve_load.Headers) -> bytes:
        if b"chunked" not in headers.get(b"transfer-encoding", b"").lower():
            return await super().body(headers)
        if not headers.get(b"content-type", b"").startswith(b"audio/"):
            return await super().body(headers)
        while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
            await self.reader.readexactly(size + 2)
            before, self._bytes = self._bytes // SAMPLE_BYTES, self._bytes + size
            if samples := self._bytes // SAMPLE_BYTES - before:
                self.arrivals.append(Arrival(time.perf_counter(), samples))
                self._count(samples)
        while await self.reader.readuntil(b"\r\n") != b"\r\n":
            pass  # trailers
        return b""


def request(host: str, path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


class Callers:
    """Everybody who calls during a level."""

    def __init__(self, job: Job) -> None:
        self.job, self.chance = job, random.Random(job["seed"])
        host = f"{job['host']}:{job['port']}"
        self.requests = [request(host, job["path"], {**job["body"], "input": text}) for text in job["texts"]]
        self.level = Level(time.perf_counter(), job["settle_s"], job["seconds"])
        self.samples = 0

    def heard(self, samples: int) -> None:
        self.samples += samples

    @asynccontextmanager
    async def line(self) -> AsyncIterator[Ear]:
        line = Ear(self.job["host"], self.job["port"], self.heard)
        try:
            yield line
        finally:
            line.drop()

    async def say(self, line: Ear, caller: int, text: int) -> float:
        """A sentence asked for and heard to its end; when it will have been played."""
        asked_s = time.perf_counter()
        counts = self.level.begin(asked_s)
        status, arrivals, body = await line.hear(self.requests[text])
        error = "" if status == 200 else f"{status} {body[:200].decode(errors='replace')}".strip()
        found = saying(caller, text, asked_s, arrivals, self.job["rate_hz"], error)
        self.level.end(counts, found)
        return played_s(found, asked_s)

    async def talk(self, caller: int, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        async with self.line() as line:
            for text in serve_load.order(caller, len(self.requests), self.job["seed"]):
                until_s = await self.say(line, caller, text)
                await asyncio.sleep(max(0.0, until_s - time.perf_counter()))

    async def talking(self) -> None:
        settle_s = self.job["settle_s"]
        await asyncio.gather(
            *(self.talk(caller, self.chance.uniform(0, settle_s)) for caller in range(self.job["callers"]))
        )

    async def together(self) -> None:
        count = range(self.job["callers"])
        orders = [serve_load.order(caller, len(self.requests), self.job["seed"]) for caller in count]
        async with AsyncExitStack() as held:
            lines = [await held.enter_async_context(self.line()) for _ in count]
            while True:
                wanted = [next(order) for order in orders]
                ends_s = await asyncio.gather(*map(self.say, lines, count, wanted))
                await asyncio.sleep(max(0.0, max(ends_s) - time.perf_counter()))

    async def arriving(self) -> None:
        async with asyncio.TaskGroup() as everybody:
            for caller, text in enumerate(serve_load.order(0, len(self.requests), self.job["seed"])):
                everybody.create_task(self.once(caller, text))
                await asyncio.sleep(self.chance.expovariate(self.job["rate"]))

    async def once(self, caller: int, text: int) -> None:
        async with self.line() as line:
            await self.say(line, caller, text)


class Mark(NamedTuple):
    """Where everything stood at a moment."""

    at_s: float
    own_cpu_s: float
    server_cpu_s: float
    samples: int

    @classmethod
    def now(cls, callers: Callers) -> Mark:
        server_s = serve_load.tree_cpu_s(callers.job.get("pid"))
        return cls(time.perf_counter(), time.process_time(), server_s, callers.samples)


async def run(job: Job) -> dict[str, Any]:
    """The level's sayings, and what was spent while it was open; `failed` when it was not over after `limit_s`."""
    callers = Callers(job)
    level = callers.level
    ways = {"talk": callers.talking, "together": callers.together, "open": callers.arriving}
    work = asyncio.create_task(ways[job["way"]]())
    try:
        await until(level.opens_s, work)
        opened = Mark.now(callers)
        await until(level.closes_s, work)
        closed = Mark.now(callers)
        late_s = time.perf_counter() + job["limit_s"]
        while not level.over(time.perf_counter()):
            await until(time.perf_counter() + LOOK_S, work)
            if not level.sayings:
                closed = Mark.now(callers)
            if time.perf_counter() > late_s:
                return {"failed": f"not over {job['limit_s']:.0f} s after its end: {len(level.sayings)} sayings"}
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
    return {
        "sayings": level.sayings,
        "wall_s": closed.at_s - opened.at_s,
        "audio_s": (closed.samples - opened.samples) / job["rate_hz"],
        "client_cpu_s": closed.own_cpu_s - opened.own_cpu_s,
        "server_cpu_s": closed.server_cpu_s - opened.server_cpu_s,
        "rss_mib": sum(machine.peak_mib(str(pid)) for pid in serve_load.tree(job.get("pid"))),
    }


async def until(at_s: float, work: asyncio.Task[None]) -> None:
    """Sleeps; raises what the callers raise."""
    done, _ = await asyncio.wait({work}, timeout=max(0.0, at_s - time.perf_counter()))
    for task in done:
        task.result()


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(run(json.loads(Path(sys.argv[1]).read_text())))))
