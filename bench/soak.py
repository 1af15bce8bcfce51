"""The rough life of a live server: long, silent, fast, cut off, killed. Callers speak FunASR's realtime protocol.

    python bench/soak.py --data DIR --only silence,speech,hang_ups,deaf,killed --json soak.json
    python bench/soak.py --speech DIR --only callers --callers 32 --minutes 180 --json soak-callers.json

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
import soak_callers
from clips import RATE_HZ, Clip
from serve_peers import HOST, Setting, asr_serve
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from asr_serve_tools.evaluate.wer import wer

PACKET_MS = 100
MODEL = "moonshine-tiny-en"
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
            with suppress(psutil.Error):
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
            message = json.loads(text)
            if message.get("event") == "error":
                raise RuntimeError(text)
            sentences.extend(message.get("sentences", []))
            if message.get("event") == "stopped":
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


def speech(recordings: Sequence[Clip], seconds: float, rng: random.Random, pause_s: float = 1.0) -> tuple[bytes, str]:
    """Clips in a random order with pauses, that long at least, as 16-bit PCM, and their reference text."""
    parts, texts, samples = [], [], 0
    while samples < seconds * RATE_HZ:
        clip = rng.choice(recordings)
        parts += [clip.audio, np.zeros(int(pause_s * RATE_HZ), np.float32)]
        texts.append(clip.text)
        samples += len(clip.audio) + int(pause_s * RATE_HZ)
    return pcm16(np.concatenate(parts)), " ".join(texts)


# --- scenarios -----------------------------------------------------------------------------------------


async def silence(server: Server, recordings: Sequence[Clip], args: argparse.Namespace) -> Row:
    """Hours of a quiet line, 200 times as fast: no word, no growth."""
    noise = pcm16(np.random.default_rng(0).normal(0, 3e-4, 10 * RATE_HZ).astype(np.float32))
    hours = args.hours or 8.0
    sentences, messages = await converse(server.url, (noise for _ in range(int(hours * 360))), 200.0)
    return {"audio_h": hours, "speed": 200, "sentences": len(sentences), "messages": messages}


async def long_speech(server: Server, recordings: Sequence[Clip], args: argparse.Namespace) -> Row:
    """Hours of speech, 20 times as fast."""
    hours = args.hours or 3.0
    audio, reference = speech(recordings, hours * 3_600, random.Random(1))
    sentences, _ = await converse(server.url, packets(audio, 500), 20.0)
    ordered = all(a["end"] <= b["start"] for a, b in pairwise(sentences))
    rate = wer([reference], [" ".join(s["text"] for s in sentences)])
    return {
        "audio_h": round(len(audio) / 2 / RATE_HZ / 3_600, 3),
        "speed": 20,
        "sentences": len(sentences),
        "in_order": ordered,
        "wer": round(rate.percent, 2),
    }


async def beside(
    server: Server,
    recordings: Sequence[Clip],
    what: Callable[[], Awaitable[Row]],
    callers: int = 4,
    seconds: float = 40.0,
) -> Row:
    """While others do `what`, these speak, in real time, twice: first alone. Their text must be the same."""
    streams = [speech(recordings, seconds, random.Random(100 + n))[0] for n in range(callers)]

    async def call() -> list[str]:
        found = await asyncio.gather(*(converse(server.url, packets(audio), 1.0) for audio in streams))
        return [" ".join(s["text"] for s in sentences) for sentences, _ in found]

    alone = await call()
    calling = asyncio.create_task(call())
    row = await what()
    again = await calling
    same = sum(a == b for a, b in zip(alone, again, strict=True))
    return {**row, "callers_beside": callers, "their_text_unchanged": same}


async def hang_ups(server: Server, recordings: Sequence[Clip], args: argparse.Namespace) -> Row:
    """200 callers who vanish in mid-word, without a close, while others go on."""
    audio = speech(recordings, 30, random.Random(2))[0]

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

    return await beside(server, recordings, all_of_them)


async def deaf(server: Server, recordings: Sequence[Clip], args: argparse.Namespace) -> Row:
    """A caller who sends fast and never reads, beside others."""

    async def flood() -> Row:
        audio, _ = speech(recordings, 600, random.Random(4))
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

    return await beside(server, recordings, lambda: asyncio.to_thread(asyncio.run, flood()))


def frame(kind: int, payload: bytes) -> bytes:
    """A client's WebSocket frame, masked with zeros."""
    length = len(payload)
    head = (
        bytes([0x80 | kind, 0x80 | length]) if length < 126 else bytes([0x80 | kind, 0xFE]) + length.to_bytes(2, "big")
    )
    return head + bytes(4) + payload


async def killed(server: Server, recordings: Sequence[Clip], args: argparse.Namespace) -> Row:
    """The engine process is killed twice with callers on line: they get the same words."""

    async def kill() -> Row:
        for _ in range(2):
            await asyncio.sleep(12)
            os.kill(server.engine().pid, signal.SIGKILL)
        return {"kills": 2}

    row = await beside(server, recordings, kill)
    return {**row, "restarts": server.metric("asr_serve_engine_restarts_total")}


async def callers(server: Server, recordings: Sequence[Clip], args: argparse.Namespace) -> Row:
    """Many callers, hours on end. The last minute is printed each minute, and the row so far written each ten."""
    plan = soak_callers.Plan(
        args.callers, args.speed, 60 * args.minutes, 60 * (args.session_minutes or args.minutes), args.flat_mib
    )
    speech = await asyncio.to_thread(soak_callers.Speech, recordings, MODEL)
    soak = soak_callers.Soak(plan, (args.speech or args.data).name)

    def report(minute: Row) -> None:
        print(json.dumps(minute), file=sys.stderr, flush=True)
        if len(soak.minutes) % 10 == 0:
            write(args, [{"name": "callers", "unfinished": True, **soak.row()}])

    watching = asyncio.create_task(soak.watch(server, report))
    try:
        await soak_callers.call_all(speech, plan, f"ws://{HOST}:{server.port}", soak.sessions.append)
    finally:
        watching.cancel()
    return soak.row()


SCENARIOS = {
    "silence": silence,
    "speech": long_speech,
    "hang_ups": hang_ups,
    "deaf": deaf,
    "killed": killed,
    "callers": callers,
}
WITHOUT_TEXT = ("callers",)
"""Scenarios whose speech need not be written down."""


def one(name: str, recordings: Sequence[Clip], args: argparse.Namespace, folder: Path) -> Row:
    port = serve.free_port()
    # Longer than a session may last by default.
    env = {**os.environ, "ASR_SERVE_MAX_SESSION_S": "86400"}
    run = serve.Run(args, recordings, [], env, folder)
    with serve.started(asr_serve(Setting(port, args.threads, folder)), port, run) as (process, trouble):
        if trouble:
            return {"name": name, "failed": trouble}
        server = Server(process.pid, port)

        async def live() -> Row:
            sampling = asyncio.create_task(server.sample(1.0))
            begun_s = time.monotonic()
            try:
                row = await SCENARIOS[name](server, recordings, args)
            finally:
                sampling.cancel()
            return {"name": name, **row, "wall_s": round(time.monotonic() - begun_s, 1), "left": await server.held()}

        try:
            return {**asyncio.run(live()), **server.memory()}
        except (OSError, ConnectionClosed, RuntimeError, psutil.Error) as failure:
            return {"name": name, "failed": f"{type(failure).__name__}: {failure}"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="folder with transcripts.tsv")
    add("--speech", type=Path, metavar="DIR", help="folder of clips whose text need not be known, for callers")
    add(
        "--only",
        default="silence,speech,hang_ups,deaf,killed",
        help=f"of {','.join(SCENARIOS)}; default: all but callers",
    )
    add("--hours", type=float, help="of audio, for silence and speech; default 8 and 3")
    add("--clips", type=int, default=50)
    add("--callers", type=int, default=32, metavar="N", help="of callers: how many speak at once (32)")
    add("--speed", type=float, default=1.0, metavar="S", help="of callers: times real time (1)")
    add("--minutes", type=float, default=180.0, metavar="M", help="of callers: audio of each, in minutes (180)")
    add("--session-minutes", type=float, metavar="M", help="of callers: most of a session (all of it)")
    add("--flat-mib", type=float, default=32.0, metavar="X", help="of callers: growth that is still flat (32)")
    add("--json", type=Path)
    parser.set_defaults(threads=machine.cores(), limit_s=120.0)
    args = parser.parse_args(argv)
    names = args.only.split(",")
    if unknown := [name for name in names if name not in SCENARIOS]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(SCENARIOS)}")
    if args.data is None and (args.speech is None or any(name not in WITHOUT_TEXT for name in names)):
        parser.error("--data is needed: only callers can do with --speech")
    for name in ("callers", "speed", "minutes", "session_minutes", "flat_mib"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    recordings = clips.load(args.data, args.clips) if args.data else []
    rows = []
    for name in names:
        speech = clips.without_text(args.speech, args.clips) if name in WITHOUT_TEXT and args.speech else recordings
        with tempfile.TemporaryDirectory(prefix="asr-serve-bench-") as folder:
            rows.append(one(name, speech, args, Path(folder)))
        write(args, rows)
    print(json.dumps(rows, indent=1))
    return int(any("failed" in row for row in rows))


def write(args: argparse.Namespace, rows: Sequence[Row]) -> None:
    machine.write(args.json, {"bench": "soak", "machine": machine.describe(args.threads), "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
