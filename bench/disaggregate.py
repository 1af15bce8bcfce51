"""Encoding in one process and decoding in another, against both in one, on the same cores.

    python bench/disaggregate.py --data DIR --json disaggregate.json

DIR as for offline.py. Two cores in all. `together` is one engine on both; `split` is an engine that encodes and
one that decodes, by each transport there is, a core for each (apart) or both cores for both (shared). Every clip is
asked for by itself, by so many askers at once, each of whom waits for its answer before the next. Nothing is
remembered of what was heard before. What decoding says must be the same tokens, which is counted: in bf16 a few
may differ, as they do between any two batches. The rounds of all arrangements are taken in turn, and medians are
told.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import clips
import machine
import numpy as np

from asr_serve.config import EngineConfig
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process.backend import ProcessBackend, process_backend
from asr_serve.engine.process.engine_process import RingSize
from asr_serve.engine.process.messages import EngineSpec
from asr_serve.errors import AsrServeError
from asr_serve.transfer import transports

MODELS = ("whisper-tiny-en", "whisper-base")
LOADS = (1, 4, 16)
CORES = 2
READY_S = 120.0
ONCE = SearchOptions(temperatures=(0.0,))
PAYS = 1.05
"""Less than that is within what one round differs from the next."""


class Arrangement(NamedTuple):
    """`transport` None: together. `apart`: a core for each, instead of both for both."""

    transport: str | None
    apart: bool = False
    carries: str = "auto"

    @property
    def name(self) -> str:
        if self.transport is None:
            return "together"
        return f"split {self.transport} {'apart' if self.apart else 'shared'}"


def arrangements() -> list[Arrangement]:
    ways = [transport for transport in ("shm", "tcp", "nixl") if transport in transports.available_transports()]
    return [Arrangement(None), *(Arrangement(transport, apart) for transport in ways for apart in (True, False))]


@contextmanager
def on(cores: set[int]) -> Iterator[None]:
    """What is started within runs on these."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def engine(model: str, dtype: str, threads: int, cores: set[int], port: int, **settings: Any) -> EngineClient:
    config = EngineConfig(prefix_bytes=0, **settings)
    spec = EngineSpec(
        model=model, device="cpu", dtype=dtype, turn_model="none", threads=threads, listen=("127.0.0.1", port)
    )
    with on(cores):
        return EngineClient(config, process_backend(spec, RingSize()))


@contextmanager
def arranged(how: Arrangement, model: str, dtype: str, cores: list[int]) -> Iterator[EngineClient]:
    """The engine that is asked."""
    with ExitStack() as stack:
        both = set(cores)
        if how.transport is None:
            yield stack.enter_context(closing(engine(model, dtype, CORES, both, 0)))
            return
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        threads = 1 if how.apart else CORES
        first, last = ({cores[0]}, {cores[1]}) if how.apart else (both, both)
        stack.enter_context(closing(engine(model, dtype, threads, first, port, role="encode")))
        asks = {
            "role": "decode",
            "peers": (f"127.0.0.1:{port}",),
            "peer_transport": how.transport,
            "peer_carries": how.carries,
        }
        client = stack.enter_context(closing(engine(model, dtype, threads, last, 0, **asks)))
        end_s = time.monotonic() + READY_S
        while not counted(client, "asr_serve_peers", 'state="ready"'):
            if time.monotonic() > end_s:
                raise SystemExit(f"{how.name}: the two never met")
            time.sleep(0.2)
        yield client


@contextmanager
def closing(client: EngineClient) -> Iterator[EngineClient]:
    try:
        yield client
    finally:
        client.close()


def counted(client: EngineClient, metric: str, labels: str = "") -> float:
    assert isinstance(client.backend, ProcessBackend)
    time.sleep(0.6)  # its text is not made anew more often
    report = client.backend.report()
    text = report.metrics.decode() if report else ""
    return sum(float(value) for value in re.findall(rf"^{metric}{{.*{labels}.*}} (\S+)$", text, re.MULTILINE))


def load(client: EngineClient, speech: list[np.ndarray], at_once: int) -> tuple[float, list[float], list[Any]]:
    """Wall time, and of each clip its time and its tokens."""
    waiting = list(enumerate(speech))[::-1]
    taking = threading.Lock()
    times, said = [0.0] * len(speech), [()] * len(speech)

    def ask() -> None:
        while True:
            with taking:
                if not waiting:
                    return
                index, pcm = waiting.pop()
            started = time.perf_counter()
            said[index] = client.submit(pcm, ONCE).future.result().tokens
            times[index] = time.perf_counter() - started

    askers = [threading.Thread(target=ask) for _ in range(at_once)]
    started = time.perf_counter()
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    return time.perf_counter() - started, times, said


def measure(how: Arrangement, model: str, args: argparse.Namespace, speech: list[np.ndarray]) -> list[dict[str, Any]]:
    """One round at every load."""
    rows = []
    with arranged(how, model, args.dtype, args.cores) as client:
        load(client, speech[:8], 4)
        for at_once in args.loads:
            before = counted(client, "asr_serve_peer_bytes_total")
            wall_s, times, said = load(client, speech, at_once)
            crossed = counted(client, "asr_serve_peer_bytes_total") - before
            rows.append(
                {
                    "model": model,
                    "arrangement": how.name,
                    "at_once": at_once,
                    "times_real_time": round(clips.seconds(speech) / wall_s, 2),
                    "p50_ms": round(1_000 * float(np.percentile(times, 50)), 1),
                    "p95_ms": round(1_000 * float(np.percentile(times, 95)), 1),
                    "crossed_mb": round(crossed / 1e6, 2),
                    "said": said,
                }
            )
            print({key: value for key, value in rows[-1].items() if key != "said"}, file=sys.stderr, flush=True)
    return rows


def summed_up(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the rounds, and how many clips are said otherwise than together."""
    rows = []
    keys = list(dict.fromkeys((row["model"], row["arrangement"], row["at_once"]) for row in rounds))
    plain = {row["model"]: row["said"] for row in rounds if row["arrangement"] == "together" and row["at_once"] == 1}
    for model, arrangement, at_once in keys:
        same = [r for r in rounds if (r["model"], r["arrangement"], r["at_once"]) == (model, arrangement, at_once)]
        row = {"model": model, "arrangement": arrangement, "at_once": at_once}
        for figure in ("times_real_time", "p50_ms", "p95_ms", "crossed_mb"):
            row[figure] = round(statistics.median(r[figure] for r in same), 2)
        row["said_otherwise"] = sum(
            ours != theirs for ours, theirs in zip(same[0]["said"], plain.get(model, same[0]["said"]), strict=True)
        )
        rows.append(row)
    return rows


def rule(rows: list[dict[str, Any]]) -> str:
    """When to split, by these figures and no others."""
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for at_once in dict.fromkeys(row["at_once"] for row in rows):
            here = {r["arrangement"]: r for r in rows if (r["model"], r["at_once"]) == (model, at_once)}
            together = here.pop("together", None)
            if together is None or not here:
                continue
            best = max(here.values(), key=lambda row: row["times_real_time"])
            gain = best["times_real_time"] / together["times_real_time"]
            slower = best["p95_ms"] / together["p95_ms"]
            word = "pays" if gain >= PAYS else "loses" if gain <= 1 / PAYS else "makes no difference"
            found.append(
                f"{model}, {at_once} at once: splitting {word}; the best, {best['arrangement']}, has {gain:.2f} "
                f"of the throughput of together on the same cores, its p95 {slower:.2f} times as long"
            )
    pays = [line for line in found if "splitting pays" in line]
    advice = (
        "Split on one machine only where the lines below say that it pays."
        if pays
        else "On the same cores splitting never paid here: split to add cores that one process cannot have "
        "(another host, another GPU), or so that an encoder may die alone, and not to make one machine faster."
    )
    return " ".join([advice, *(f"{line}." for line in found)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder with transcripts.tsv")
    parser.add_argument("--clips", type=int, default=32, metavar="N", help="how many of it (32)")
    parser.add_argument("--model", action="append", metavar="NAME", help=f"again for more ({', '.join(MODELS)})")
    parser.add_argument("--at-once", type=int, action="append", metavar="N", help=f"again for more {LOADS}")
    parser.add_argument("--dtype", default="fp32", help="fp32, bf16 or auto (fp32)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of every arrangement (3)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    args.loads = args.at_once or LOADS
    args.cores = sorted(os.sched_getaffinity(0))[:CORES]
    if len(args.cores) < CORES:
        raise SystemExit(f"this needs {CORES} cores")
    speech = [clip.audio for clip in clips.load(args.data, args.clips)]
    rounds: list[dict[str, Any]] = []
    missing = {}
    for model in args.model or MODELS:
        try:
            for _ in range(args.rounds):
                for how in arrangements():
                    rounds += measure(how, model, args, speech)
        except AsrServeError as failure:
            missing[model] = str(failure)
    rows = summed_up(rounds)
    result = {
        "bench": "disaggregate",
        "machine": machine.describe(CORES),
        "clips": len(speech),
        "audio_s": round(clips.seconds(speech), 1),
        "dtype": args.dtype,
        "rounds": args.rounds,
        "rows": rows,
        "rule": rule(rows),
        "missing": missing,
    }
    machine.tell(args.json, result)


if __name__ == "__main__":
    main()
