"""The rough life of a live server: long, silent, fast, cut off, killed. Callers speak FunASR's realtime protocol.

    python bench/soak.py --data DIR --only silence,speech,hang_ups,deaf,killed --json soak.json

DIR holds transcripts.tsv, lines of relative/path.flac<TAB>text. README.md says what each scenario does and how to
read the result. Nothing here is a speed: it tells what is lost, what is kept, and how much memory that takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import struct
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import clips
import machine
import numpy as np
import psutil
import serve
from clips import RATE_HZ, Clip
from serve_peers import HOST, Setting, asr_serve
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from asr_serve_tools.evaluate.wer import wer

PACKET_MS = 100
SETTLE_S = 20.0
"""For the last callers' rows and pages to come back."""
Row = dict[str, Any]


class Server:
    """What is watched from outside: memory, and what the metrics say is held."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid, self.port = pid, port
        self.rss_mib: list[float] = []

    @property
    def url(self) -> str:
        return f"ws://{HOST}:{self.port}/?sentences=new"

    def engine(self) -> psutil.Process:
        return psutil.Process(self.pid).children()[0]

    def watch(self) -> None:
        family = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        total = 0
        for process in family:
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        self.rss_mib.append(round(total / 2**20, 1))

    async def sample(self, every_s: float) -> None:
        while True:
            self.watch()
            await asyncio.sleep(every_s)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://{HOST}:{self.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.M)
        return sum(map(float, found))

    async def held(self) -> dict[str, float]:
        """What is still lent out when everybody has gone; zero is right."""
        names = ("asr_serve_sessions", "asr_serve_pages_used", "asr_serve_live_open_sessions")
        until_s, held = time.monotonic() + SETTLE_S, dict.fromkeys(names, -1.0)
        while time.monotonic() < until_s:
            held = {name: self.metric(name) for name in names}
            if not any(held.values()):
                break
            await asyncio.sleep(1)
        return held

    def memory(self) -> Row:
        """After a tenth of the time, to leave out warming up; then the greatest, and the last."""
        seen = self.rss_mib
        begun = seen[len(seen) // 10] if seen else 0.0
        return {
            "rss_mib_begun": begun,
            "rss_mib_peak": max(seen, default=0.0),
            "rss_mib_end": seen[-1] if seen else 0.0,
        }


def pcm16(audio: np.ndarray) -> bytes:
    return np.clip(np.rint(audio * 32_768), -32_768, 32_767).astype("<i2").tobytes()


async def converse(url: str, packets: Iterator[bytes], speed: float) -> tuple[list[dict[str, Any]], int]:
    """One call at `speed` times real time: its sentences, and how many messages came."""
    sentences: list[dict[str, Any]] = []
    messages = 0

    async def read(line: ClientConnection) -> None:
        nonlocal messages
        async for text in line:
            messages += 1
            told = json.loads(text)
            if told.get("event") == "error":
                raise RuntimeError(text)
            sentences.extend(told.get("sentences", []))
            if told.get("event") == "stopped":
                return

    async with connect(url, proxy=None, compression=None, ping_interval=None, max_size=None) as line:
        await line.send("START")
        reading = asyncio.create_task(read(line))
        begun_s, sent_samples = time.monotonic(), 0
        for packet in packets:
            if reading.done():
                break
            await line.send(packet)
            sent_samples += len(packet) // 2
            await asyncio.sleep(max(0.0, begun_s + sent_samples / RATE_HZ / speed - time.monotonic()))
        await line.send("STOP")
        await reading
    return sentences, messages


def packets(audio: bytes, ms: int = PACKET_MS) -> Iterator[bytes]:
    step = 2 * RATE_HZ * ms // 1_000
    return (audio[at : at + step] for at in range(0, len(audio), step))


def speech(heard: Sequence[Clip], seconds: float, rng: random.Random, pause_s: float = 1.0) -> tuple[bytes, str]:
    """Clips in a random order with pauses, that long at least, and what they say."""
    parts, said, samples = [], [], 0
    while samples < seconds * RATE_HZ:
        clip = rng.choice(heard)
        parts += [clip.audio, np.zeros(int(pause_s * RATE_HZ), np.float32)]
        said.append(clip.text)
        samples += len(clip.audio) + int(pause_s * RATE_HZ)
    return pcm16(np.concatenate(parts)), " ".join(said)


# --- scenarios -----------------------------------------------------------------------------------------


async def silence(server: Server, heard: Sequence[Clip], args: argparse.Namespace) -> Row:
    """Hours of a quiet line, 200 times as fast: no word, no growth."""
    noise = pcm16(np.random.default_rng(0).normal(0, 3e-4, 10 * RATE_HZ).astype(np.float32))
    hours = args.hours or 8.0
    sentences, messages = await converse(server.url, (noise for _ in range(int(hours * 360))), 200.0)
    return {"audio_h": hours, "speed": 200, "sentences": len(sentences), "messages": messages}


async def long_speech(server: Server, heard: Sequence[Clip], args: argparse.Namespace) -> Row:
    """Hours of speech, 20 times as fast."""
    hours = args.hours or 3.0
    audio, said = speech(heard, hours * 3_600, random.Random(1))
    sentences, _ = await converse(server.url, packets(audio, 500), 20.0)
    ordered = all(a["end"] <= b["start"] for a, b in pairwise(sentences))
    rate = wer([said], [" ".join(s["text"] for s in sentences)])
    return {
        "audio_h": round(len(audio) / 2 / RATE_HZ / 3_600, 3),
        "speed": 20,
        "sentences": len(sentences),
        "in_order": ordered,
        "wer": round(rate.percent, 2),
    }


async def beside(
    server: Server, heard: Sequence[Clip], what: Callable[[], Awaitable[Row]], callers: int = 4, seconds: float = 40.0
) -> Row:
    """While others do `what`, these speak, in real time, twice: first alone. Their text must be the same."""
    streams = [speech(heard, seconds, random.Random(100 + n))[0] for n in range(callers)]

    async def call() -> list[str]:
        found = await asyncio.gather(*(converse(server.url, packets(audio), 1.0) for audio in streams))
        return [" ".join(s["text"] for s in sentences) for sentences, _ in found]

    alone = await call()
    calling = asyncio.create_task(call())
    row = await what()
    again = await calling
    same = sum(a == b for a, b in zip(alone, again, strict=True))
    return {**row, "callers_beside": callers, "their_text_unchanged": same}


async def hang_ups(server: Server, heard: Sequence[Clip], args: argparse.Namespace) -> Row:
    """200 callers who vanish in mid-word, without a close, while others go on."""
    audio = speech(heard, 30, random.Random(2))[0]

    async def one(number: int) -> None:
        line = await connect(server.url, proxy=None, compression=None, ping_interval=None)
        await line.send("START")
        for packet in packets(audio[: 32_000 * (1 + number % 5)]):
            await line.send(packet)
        wire: socket.socket = line.transport.get_extra_info("socket")
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no goodbye
        line.transport.abort()

    async def all_of_them() -> Row:
        rng, tasks = random.Random(3), []
        for number in range(200):
            tasks.append(asyncio.create_task(one(number)))
            await asyncio.sleep(rng.random() * 0.3)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [repr(d) for d in done if isinstance(d, BaseException)]
        return {"hang_ups": len(done) - len(refused), "refused": len(refused)}

    return await beside(server, heard, all_of_them)


async def deaf(server: Server, heard: Sequence[Clip], args: argparse.Namespace) -> Row:
    """A caller who sends fast and never reads, beside others."""

    async def flood() -> Row:
        audio, _ = speech(heard, 600, random.Random(4))
        line = socket.create_connection((HOST, server.port))
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        line.settimeout(20)
        line.sendall(
            f"GET / HTTP/1.1\r\nHost: {HOST}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        sent = 0
        try:
            line.sendall(frame(1, b"START"))
            for packet in packets(audio):
                line.sendall(frame(2, packet))
                sent += len(packet)
        except OSError:
            pass  # nobody reads us any more, or we were dropped: both are fine
        await asyncio.sleep(5)
        line.close()
        return {"deaf_sent_s": round(sent / 2 / RATE_HZ, 1)}

    return await beside(server, heard, lambda: asyncio.to_thread(asyncio.run, flood()))


def frame(kind: int, payload: bytes) -> bytes:
    """A client's WebSocket frame, masked with zeros."""
    length = len(payload)
    head = (
        bytes([0x80 | kind, 0x80 | length]) if length < 126 else bytes([0x80 | kind, 0xFE]) + length.to_bytes(2, "big")
    )
    return head + bytes(4) + payload


async def killed(server: Server, heard: Sequence[Clip], args: argparse.Namespace) -> Row:
    """The engine process is killed twice with callers on line: they get the same words."""

    async def kill() -> Row:
        for _ in range(2):
            await asyncio.sleep(12)
            os.kill(server.engine().pid, signal.SIGKILL)
        return {"kills": 2}

    row = await beside(server, heard, kill)
    return {**row, "restarts": server.metric("asr_serve_engine_restarts_total")}


SCENARIOS = {"silence": silence, "speech": long_speech, "hang_ups": hang_ups, "deaf": deaf, "killed": killed}


def one(name: str, heard: Sequence[Clip], args: argparse.Namespace, folder: Path) -> Row:
    port = serve.free_port()
    # Longer than a session may last by default.
    env = {**os.environ, "ASR_SERVE_MAX_SESSION_S": "86400"}
    run = serve.Run(args, heard, [], env, folder)
    with serve.started(asr_serve(Setting(port, args.threads, folder)), port, run) as (process, trouble):
        if trouble:
            return {"name": name, "failed": trouble}
        server = Server(process.pid, port)

        async def live() -> Row:
            sampling = asyncio.create_task(server.sample(1.0))
            begun_s = time.monotonic()
            try:
                row = await SCENARIOS[name](server, heard, args)
            finally:
                sampling.cancel()
            return {"name": name, **row, "wall_s": round(time.monotonic() - begun_s, 1), "left": await server.held()}

        try:
            return {**asyncio.run(live()), **server.memory()}
        except (OSError, ConnectionClosed, RuntimeError, psutil.Error) as failure:
            return {"name": name, "failed": f"{type(failure).__name__}: {failure}"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with transcripts.tsv")
    parser.add_argument("--only", default=",".join(SCENARIOS), help="scenarios, by comma")
    parser.add_argument("--hours", type=float, help="of audio, for silence and speech; default 8 and 3")
    parser.add_argument("--clips", type=int, default=50)
    parser.add_argument("--json", type=Path)
    parser.set_defaults(threads=machine.cores(), limit_s=120.0)
    args = parser.parse_args(argv)
    heard = clips.load(args.data, args.clips)
    rows = []
    for name in args.only.split(","):
        with tempfile.TemporaryDirectory(prefix="asr-serve-bench-") as folder:
            rows.append(one(name, heard, args, Path(folder)))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    found = {"bench": "soak", "machine": machine.describe(args.threads), "rows": rows}
    machine.tell(args.json, found)
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
