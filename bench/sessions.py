"""Live sessions in Redis: what a write and a takeover cost, beside a look-up in the server's memory.

    python bench/sessions.py --json sessions.json

A real redis-server on this machine, without a disk, by TCP; a real checkpoint, of a session in the middle of speech.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.resources
import json
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import machine
import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import asr_serve
from asr_serve.audio import read_audio
from asr_serve.audio.resample import ResamplerState
from asr_serve.audio.stream_decoder import CodecState, LiveDecoderState
from asr_serve.config import EngineConfig
from asr_serve.errors import ProgramMissing, StoreUnavailable
from asr_serve.pipelines.live.live_session import LiveSession
from asr_serve.pipelines.options import ListenOptions
from asr_serve.protocols.stream.client_messages import NewSessionRequest
from asr_serve.server.sessions.cipher import AesGcmCipher, NoCipher, SessionCipher
from asr_serve.server.sessions.records import (
    SessionCheckpoint,
    SessionHeader,
    SessionPosition,
    SessionWrite,
    StoredAudio,
    StoredEvent,
    StoredSession,
)
from asr_serve.server.sessions.redis_store import RedisSessionStore

RATE_HZ = 16_000
SPEECH_S = 10
TIMEOUT_S = 60.0
BATCHES = (1, 16, 64)
"""Sessions in one batch of writes."""
TTL_MS = 60_000


def speech() -> np.ndarray:
    """Speech that a test dependency carries."""
    return read_audio(Path(str(importlib.resources.files("moonshine_voice"))) / "assets" / "two_cities.wav")


def measure(times_s: list[float], **row: object) -> dict[str, object]:
    cuts = statistics.quantiles(times_s, n=100)
    return {
        "name": "asr-serve",
        **row,
        "p50_us": round(1e6 * statistics.median(times_s), 2),
        "p95_us": round(1e6 * cuts[94], 2),
        "count": len(times_s),
    }


def real_checkpoint(rows: list[dict[str, object]], repeats: int) -> tuple[SessionCheckpoint, np.ndarray]:
    """State of a session after SPEECH_S of speech, with the audio it still needs; measures exporting and encoding."""
    pcm = speech()[: SPEECH_S * RATE_HZ]
    changed: list[bool] = []
    with asr_serve.load("moonshine-tiny-en", engine=EngineConfig(prefix_bytes=4_096)) as model:
        session = LiveSession(model._client, model.tokenizer, ListenOptions(), lambda: changed.append(True))
        for at in range(0, len(pcm), 1_600):
            session.append_audio(pcm[at : at + 1_600])
            session.advance()
            time.sleep(0.02)
        while not session.idle:
            time.sleep(0.01)
            session.advance()
        state = session.export_state()
        assert state is not None
        checkpoint = SessionCheckpoint(state, 5, "It was the best", 0, b"{}", [], False, None)
        times_s = []
        for _ in range(repeats):
            started_s = time.perf_counter()
            live = session.export_state()
            encoded = msgspec.msgpack.encode(msgspec.structs.replace(checkpoint, live=live))
            times_s.append(time.perf_counter() - started_s)
        rows.append(measure(times_s, store="", operation="checkpoint", sessions=1, encrypted=False, bytes=len(encoded)))
        _, audio = session.received_audio(state.audio_from)
        session.close()
    return checkpoint, audio.copy()


class Writes:
    """Writes of many sessions that speak: 0.25 s of audio, an event and a checkpoint each."""

    def __init__(self, checkpoint: SessionCheckpoint, audio: np.ndarray) -> None:
        self._checkpoint, self._audio = checkpoint, audio
        self.ids = [secrets.token_hex(16) for _ in range(max(BATCHES))]
        assert checkpoint.live is not None
        self._from = checkpoint.live.audio_from
        self._seq = 0
        self._epochs = dict.fromkeys(self.ids, 1)
        self._numbers = dict.fromkeys(self.ids, 0)

    def _write(self, session_id: str, header: SessionHeader | None, start: int, pcm: np.ndarray) -> SessionWrite:
        end = start + len(pcm)
        self._numbers[session_id] += 1
        return SessionWrite(
            session_id=session_id,
            client="anonymous",
            epoch=self._epochs[session_id],
            number=self._numbers[session_id],
            ttl_ms=TTL_MS,
            header=header,
            position=SessionPosition(2 * end, end, LiveDecoderState(CodecState(), ResamplerState(end, end, end, b""))),
            checkpoint=self._checkpoint,
            events=[StoredEvent(self._seq, "locked", b'{"type":"locked","seq":1,"text":" of times"}' + b" " * 60)],
            audio=[StoredAudio.of(start, pcm, pcm16=True)],
            first_samples=self._from,
            first_seq=max(1, self._seq - 100),
        )

    def whole(self) -> list[SessionWrite]:
        request = NewSessionRequest(None, "s16le", None, ListenOptions())
        header = SessionHeader("moonshine-tiny-en", "en", request, time.time())
        self._seq, self._end = 1, self._from + len(self._audio)
        return [self._write(name, header, self._from, self._audio) for name in self.ids]

    def more(self, count: int) -> list[SessionWrite]:
        self._seq += 1
        pcm = self._audio[:4_000]
        made = [self._write(name, None, self._end, pcm) for name in self.ids[:count]]
        self._end += len(pcm)
        return made


async def timed(work: Awaitable[Any], times_s: list[float]) -> Any:
    started_s = time.perf_counter()
    found = await work
    times_s.append(time.perf_counter() - started_s)
    return found


async def bench_redis(
    url: str, checkpoint: SessionCheckpoint, audio: np.ndarray, rows: list[dict[str, object]], repeats: int
) -> None:
    ciphers: dict[bool, SessionCipher] = {False: NoCipher(), True: AesGcmCipher([os.urandom(32)])}
    for encrypted, cipher in ciphers.items():
        store = RedisSessionStore(url, f"bench-{encrypted}", TIMEOUT_S, cipher)
        end_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                await store.ping()
                break
            except StoreUnavailable:
                assert time.monotonic() < end_s, "redis-server does not answer"
                await asyncio.sleep(0.05)
        writes = Writes(checkpoint, audio)
        await store.write(writes.whole())
        for count in BATCHES:
            times_s: list[float] = []
            for _ in range(repeats):
                batch = writes.more(count)
                outcomes = await timed(store.write(batch), times_s)
                assert all(outcome.value == "written" for outcome in outcomes)
                if writes._seq % 20 == 0:
                    await store.write(writes.whole())  # the audio stays as long as that of a segment
            rows.append(
                measure(times_s, store="redis", operation="write", sessions=count, encrypted=encrypted, bytes=0)
            )
        await store.write(writes.whole())
        times_s = []
        for at in range(repeats):
            name = writes.ids[at % len(writes.ids)]
            stored = await timed(store.read(name, "anonymous"), times_s)
            assert isinstance(stored, StoredSession)
        stored_bytes = sum(len(each.data) for each in stored.audio)
        rows.append(
            measure(times_s, store="redis", operation="fetch", sessions=1, encrypted=encrypted, bytes=stored_bytes)
        )
        await store.close()


def bench_local(rows: list[dict[str, object]], repeats: int) -> None:
    """The look-up in memory of a session that is here, among 1,024."""
    sessions = {secrets.token_hex(16): object() for _ in range(1_024)}
    names, times_s = list(sessions), []
    for at in range(repeats):
        name = names[at % len(names)]
        started_s = time.perf_counter()
        found = sessions.get(name)
        times_s.append(time.perf_counter() - started_s)
        assert found is not None
    rows.append(measure(times_s, store="local", operation="fetch", sessions=1, encrypted=False, bytes=0))


def measure_all(repeats: int) -> list[dict[str, object]]:
    """Every row, with a redis-server of its own. Raises ProgramMissing."""
    if shutil.which("redis-server") is None:
        raise ProgramMissing(
            "sessions are stored by redis-server, which is not installed", todo="apt install redis-server"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    rows: list[dict[str, object]] = []
    try:
        bench_local(rows, repeats)
        checkpoint, audio = real_checkpoint(rows, repeats)
        asyncio.run(bench_redis(f"redis://127.0.0.1:{port}/0", checkpoint, audio, rows, repeats))
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--repeats", type=int, default=1_000)
    chosen = parser.parse_args()
    about = machine.describe(1, ["redis", "cryptography"])
    try:
        rows = measure_all(chosen.repeats)
    except ProgramMissing as missing:
        sys.exit(str(missing))
    for row in rows:
        print(row)
    if chosen.json is not None:
        result = {"bench": "sessions", "machine": about, "rows": rows}
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
