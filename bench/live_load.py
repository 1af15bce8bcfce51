"""Callers in real time against one live WebSocket, in a process of their own.

    python live_load.py JOB.json RESULT.json

Each caller says hello in its protocol, then sends 100 ms of speech whenever that much time has passed on its own
clock (with a `speed` in the job, so many times as often), says goodbye, and keeps what comes with the time it came. The
server shares the machine's cores with this process: messages are made beforehand, nothing is compressed, and answers
are read when the call is over.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import sys
import time
from pathlib import Path
from typing import Any

import live_protocols
import live_speech
import machine
from live_protocols import REFUSED, code
from live_speech import Caller, Pace, Pcm
from serve_load import tree, tree_cpu_s
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

Job = dict[str, Any]
Heard = dict[str, Any]

SEND_BUFFER_BYTES = 8_192
"""So that a server that does not read is felt early: what waits in our own buffers is sent for nobody."""
CONNECT_S = 1.0
"""A caller dials so long before it speaks."""
RETRY_S = 3.0
"""A caller who is refused for lack of capacity dials again after so long, unless all dial at once."""
MAX_RETRIES_S = 180.0
"""With `retry`, a caller who is refused dials again when it was told to, for so long."""


class Line:
    """One call."""

    def __init__(self, begins_s: float, pcm: Pcm, job: Job) -> None:
        self.begins_s, self.samples, self.job = begins_s, len(pcm), job
        self.speed: float = job.get("speed", 1.0)
        self.protocol = live_protocols.NAMES[job["protocol"]](job["silence_ms"])
        self.packets = self.protocol.packets(pcm)
        self.pace: Pace | None = None
        self.stop_s: float | None = None
        self.messages: list[tuple[float, str]] = []
        self.error: str | None = None
        self.retries = 0
        self.retry_s: float | None = None
        """How long a caller who was refused was told to wait."""

    async def run(self) -> None:
        """The whole call; whatever ends it early is in `error`."""
        clock = asyncio.get_running_loop()
        await asyncio.sleep(self.begins_s - CONNECT_S - clock.time())
        await self.call()
        if self.job["at_once"]:
            limit_s = (
                MAX_RETRIES_S if self.job.get("retry", False) else -math.inf
            )  # it may be refused before `begins_s`
        else:
            limit_s = self.job["grace_s"]
        while self.error == REFUSED and clock.time() - self.begins_s < limit_s:
            await asyncio.sleep(RETRY_S if self.retry_s is None or not self.job.get("retry", False) else self.retry_s)
            self.error, self.retry_s = None, None
            self.retries += 1
            await self.call()

    async def call(self) -> None:
        """One attempt: dial, talk, hang up."""
        try:
            if self.job["protocol"] == "riva":
                from live_riva import dial

                async with dial(self.job["riva"], self.protocol) as call:
                    await self.talk(call)
                return
            async with connect(
                self.job["url"] + self.protocol.path,
                proxy=None,
                compression=None,
                ping_interval=None,
                max_size=None,
                max_queue=None,
                write_limit=0,
                open_timeout=self.job["grace_s"],
                close_timeout=1,
            ) as line:
                wire: socket.socket = line.transport.get_extra_info("socket")
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
                await self.talk(line)
        except InvalidStatus as refused:
            self.error = str(refused.response.status_code)
        except (OSError, InvalidHandshake, TimeoutError) as error:
            self.error = self.error or f"no connection: {type(error).__name__}"
        except ConnectionClosed as closed:
            self.error = self.error or f"closed {closed.rcvd.code if closed.rcvd else ''}".strip()

    async def talk(self, line: Any) -> None:
        """The call over a ClientConnection, or a RivaLine."""
        clock = asyncio.get_running_loop()
        if self.protocol.hello is not None:
            await line.send(self.protocol.hello)
        while not self.protocol.ready(first := json.loads(await line.recv())):
            if (error := code(first)) is not None:
                self.error, self.retry_s = error, live_protocols.retry_s(first)
                return
        reading = asyncio.create_task(self.read(line))
        pace = self.pace = Pace(max(clock.time(), self.begins_s), self.speed)
        try:
            ends_s = pace.begun_s + live_speech.due_s(self.samples, self.speed)
            async with asyncio.timeout_at(ends_s + self.job["grace_s"]):
                cuts = live_speech.packets(self.samples)
                for packet, (_, end) in zip(self.packets, cuts, strict=True):
                    await asyncio.sleep(pace.begun_s + live_speech.due_s(end, self.speed) - clock.time())
                    called_s = clock.time()
                    await line.send(packet)
                    pace.took(end, called_s, clock.time())
                self.stop_s = clock.time()
                await line.send(self.protocol.goodbye)
                await reading
        except TimeoutError:
            self.error = f"not stopped {self.job['grace_s']:.0f} s after its end"
            line.transport.abort()  # a server that does not read would not let us say goodbye either
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def read(self, line: Any) -> None:
        """Until the server has said all."""
        clock = asyncio.get_running_loop()
        async for text in line:
            self.messages.append((clock.time(), str(text)))
            if self.protocol.ended(str(text), parting=self.stop_s is not None):
                return
        self.error = "closed before it had stopped"

    def heard(self, opened_s: float) -> Heard:
        """For the result, times in seconds since `opened_s`."""
        pace = self.pace or Pace(self.begins_s)
        read = [(round(came_s - opened_s, 4), json.loads(text)) for came_s, text in self.messages]
        refused = next((told for _, message in read if (told := code(message))), None)
        return {
            "begun_s": pace.begun_s - opened_s,
            "moments_s": [round(moment - opened_s, 4) for moment in pace.moments_s],
            "waits_ms": [round(1_000 * wait, 1) for wait in pace.waits_s],
            "lags_ms": [round(1_000 * lag, 1) for lag in pace.lags_s],
            "stop_s": None if self.stop_s is None else round(self.stop_s - opened_s, 4),
            "messages": list(self.protocol.heard(read)),
            "error": refused or self.error,
            "retries": self.retries,
        }


async def run(job: Job) -> dict[str, Any]:
    clips = live_speech.restore(Path(job["clips"]))
    callers = [Caller(*caller) for caller in job["callers"]]
    begins = [0.0] * len(callers) if job["at_once"] else live_speech.begins_s(len(callers), job["seconds"])
    sounds = [live_speech.stream(caller, clips) for caller in callers]
    clock = asyncio.get_running_loop()
    opened_s = clock.time() + CONNECT_S + 0.5
    lines = [Line(opened_s + at_s, pcm, job) for at_s, pcm in zip(begins, sounds, strict=True)]
    await asyncio.sleep(opened_s - clock.time() - CONNECT_S)
    used_s, cpu_s, theirs_s = live_speech.machine_cpu_s(), time.process_time(), tree_cpu_s(job["pid"])
    wall_s = clock.time()
    await asyncio.gather(*(line.run() for line in lines))
    wall_s = clock.time() - wall_s
    cpu_s, theirs_s = time.process_time() - cpu_s, tree_cpu_s(job["pid"]) - theirs_s
    return {
        "callers": [line.heard(opened_s) for line in lines],
        "wall_s": wall_s,
        "load_cpu": cpu_s / wall_s,
        "server_cpu": theirs_s / wall_s,
        "others_cpu": (live_speech.machine_cpu_s() - used_s - cpu_s - theirs_s) / wall_s,
        "rss_mib": sum(machine.peak_mib(str(pid)) for pid in tree(job["pid"])),
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(run(json.loads(Path(sys.argv[1]).read_text())))))
