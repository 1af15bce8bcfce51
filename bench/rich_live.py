"""How much later a live segment is told when it is told by whom it was said: `speakers=true` of /v1/stream.

    python bench/rich_live.py --data DIR --json rich-live.json

DIR holds `librispeech-train-untranscribed`, of which meetings.py makes recordings of two people who take turns. A
server is started; callers send them as fast as they were spoken, each caller another recording, with speakers and
without in turns. A pause of 0.5 s ends a segment for all of them. The delay of a segment is from when the packet
was sent in which it ends until its event has come: most of the pause, and what is computed. Only ends that both
ways have are compared: where the speaker changes inside, a segment is told in parts at once, and the last counts.
The last of a recording is ended by its end, not by a pause, and is left out.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import machine
import meetings
import numpy as np

from asr_serve.api.client.stream import StreamClient
from asr_serve.protocols.stream.server_events import SegmentEvent
from asr_serve.units import RATE_HZ

Delays = dict[int, float]
"""By the end of a segment, in ms of its recording: ms until it was told."""
WAYS = ("without", "with")
PACKET_SAMPLES = RATE_HZ // 20
SCHEDULE = "inf:500"
PERCENTILES = {"p50": 50, "p95": 95}
APART_S = 0.37
"""Between the beginnings of two callers: people do not pause at once."""
PEOPLE = 24
"""Of whom two are drawn for each recording."""
SERVE = "from asr_serve.api.cli import main; main()"


@contextmanager
def server(model: str) -> Iterator[str]:
    """Its address. Nothing that was heard is kept: the recordings come again."""
    command = [sys.executable, "-c", SERVE, "serve", "-m", model, "--voice", "none", "--port", "0"]
    command += ["--set", "engine.prefix_bytes=0", "--set", "log_level=error"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            said = ""
            while not (ready := re.search(r" on (http://\S+) \(ready", said)):
                line = process.stderr.readline()
                if not line:
                    sys.exit(f"the server ended: {said}")
                said += line
            yield ready[1]
        finally:
            process.terminate()
            process.communicate()


def call(url: str, pcm: np.ndarray, way: str, begins_s: float) -> Delays:
    """One caller, who begins at `begins_s` of `time.perf_counter`."""
    packets = [pcm[at : at + PACKET_SAMPLES] for at in range(0, len(pcm), PACKET_SAMPLES)]
    sent_s: list[float] = []
    told: list[tuple[float, float]] = []
    query: dict[str, Any] = {"speakers": "true"} if way == "with" else {}
    with StreamClient(url, encoding="s16le", rate=RATE_HZ, silence_schedule=SCHEDULE, **query) as stream:

        def read() -> None:
            for event in stream:
                if isinstance(event, SegmentEvent):
                    told.append((event.end_s, time.perf_counter()))

        reader = threading.Thread(target=read)
        reader.start()
        for number, packet in enumerate(packets):
            time.sleep(max(0.0, begins_s + number * PACKET_SAMPLES / RATE_HZ - time.perf_counter()))
            stream.send((np.clip(packet, -1, 1) * 32_767).astype("<i2").tobytes())
            sent_s.append(time.perf_counter())
        over_s = time.perf_counter()
        stream.end()
        reader.join()
    found: Delays = {}
    for end_s, came_s in told:
        packet_number = min(len(sent_s) - 1, int(end_s * RATE_HZ) // PACKET_SAMPLES)
        if came_s < over_s:
            found[round(1_000 * end_s)] = 1_000 * (came_s - sent_s[packet_number])
    return found


def at_once(url: str, recordings: Sequence[np.ndarray], way: str) -> list[Delays]:
    """A caller for each recording."""
    begins_s = time.perf_counter() + 0.5
    with ThreadPoolExecutor(len(recordings)) as pool:
        calls = [pool.submit(call, url, pcm, way, begins_s + number * APART_S) for number, pcm in enumerate(recordings)]
        return [each.result() for each in calls]


def level(url: str, recordings: Sequence[np.ndarray], callers: int, rounds: int) -> dict[str, Any]:
    """So many callers at once, every recording as often as there are rounds; who goes first changes."""
    batches = [recordings[at : at + callers] for at in range(0, len(recordings), callers)]
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    alone = 0
    for number in range(rounds):
        for batch_number, batch in enumerate(batches):
            order = WAYS if (number + batch_number) % 2 == 0 else WAYS[::-1]
            by_way = {way: at_once(url, batch, way) for way in order}
            for plain, named in zip(by_way["without"], by_way["with"], strict=True):
                both = sorted(plain.keys() & named.keys())
                alone += len(plain.keys() - named.keys())
                found["without"] += [plain[end] for end in both]
                found["with"] += [named[end] for end in both]
    added = np.array(found["with"]) - np.array(found["without"])
    row: dict[str, Any] = {
        "name": f"asr-serve, {callers} at once",
        "callers": callers,
        "segments": len(added),
        "unmatched": alone,
    }
    for name, values in (*found.items(), ("added", added)):
        row |= {f"{name}_{part}_ms": round(float(np.percentile(values, p)), 1) for part, p in PERCENTILES.items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--model", default="moonshine-tiny-en")
    parser.add_argument("--callers", default="1,8", metavar="N,N")
    parser.add_argument("--recordings", type=int, default=8, help="of half a minute each; at least the most callers")
    parser.add_argument("--rounds", type=int, default=1, help="of each recording, both ways")
    parser.add_argument("--quick", action="store_true", help="two recordings, one caller and two: does it run?")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    levels = [1, 2] if args.quick else [int(each) for each in args.callers.split(",")]
    wanted = 2 if args.quick else args.recordings
    if not all(1 <= callers <= wanted for callers in levels):
        parser.error(f"--callers {args.callers} with {wanted} recordings: each caller has another")
    made = meetings.meetings(args.data, wanted, kinds=("talk",), people=PEOPLE)
    recordings = [each.pcm for each in made]
    report: dict[str, Any] = {
        "bench": "rich_live",
        "machine": machine.describe(machine.cores()),
        "model": args.model,
        "silence_schedule": SCHEDULE,
        "recordings_s": [round(len(pcm) / RATE_HZ, 1) for pcm in recordings],
        "speakers": sorted({len({turn.speaker for turn in each.turns}) for each in made}),
        "rows": [],
    }
    with server(args.model) as url:
        for way in WAYS:  # what is loaded when it is first asked for
            call(url, recordings[0][: 5 * RATE_HZ], way, time.perf_counter())
        for callers in levels:
            report["rows"].append(level(url, recordings, callers, args.rounds))
            print(report["rows"][-1], file=sys.stderr, flush=True)
    report["load_1m_after"] = round(os.getloadavg()[0], 2)
    machine.tell(args.json, report)


if __name__ == "__main__":
    main()
