"""A batch whose server is killed: every line is answered, and none twice.

    python bench/batch_kills.py --clips 10000 --kills 5 --json batch-kills-cpu.json

Short clips, all different, are uploaded and submitted as one batch by OpenAI's client. All processes of the server are
killed (SIGKILL) at moments that are drawn in advance, as shares of the lines that have an answer; each time it is
started again with the same folder. At the end, the custom_ids of the output are counted. README.md says how to read the
result.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import machine
import openai
import psutil

ENDPOINT = "/v1/audio/transcriptions"
RATE_HZ, SEED = 16_000, 20_26
PACKAGES = ("asr-serve", "torch", "openai", "moonshine-voice")
WAIT_S = 900.0
"""Longer than a start takes on a busy machine."""


class KilledServer:
    """Server that is started again with the same folder and port."""

    def __init__(self, folder: Path, threads: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._folder, self._threads = folder, threads
        self._log = (folder / "server.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=WAIT_S
        )

    def start(self) -> None:
        """Starts it, and waits until it answers; its models may still be loading."""
        settings = {
            "batch.folder": str(self._folder / "queue"),
            "engine_threads": str(self._threads),
            "turn_model": "none",
        }
        flags = [f"--set={name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-c", "from asr_serve.api.cli import main; main()", "serve", "--voice=none", *flags]
        self._process = subprocess.Popen([*command, f"--port={self.port}"], stdout=self._log, stderr=self._log)
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            if self._process.poll() is not None:
                raise SystemExit(f"the server did not start:\n{(self._folder / 'server.log').read_text()}")
            with contextlib.suppress(openai.APIConnectionError):
                self.client.batches.list(limit=1)
                return
            time.sleep(0.05)
        raise SystemExit("the server did not answer in time")

    def kill(self) -> None:
        """Kills all of its processes at once."""
        if self._process is None or self._process.poll() is not None:
            return
        everything = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
        for process in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(WAIT_S)
        psutil.wait_procs(everything[1:], WAIT_S)

    def close(self) -> None:
        self.kill()
        self.client.close()
        self._log.close()


def clips(count: int, seconds: float) -> Iterator[bytes]:
    """Different stretches of a recording, as WAV files."""
    with wave.open(str(files("moonshine_voice") / "assets" / "two_cities.wav")) as recording:
        rate_hz, total = recording.getframerate(), recording.getnframes()
        samples = recording.readframes(total)
    length = int(seconds * rate_hz)
    for number in range(count):
        start = number * max(1, (total - length) // max(1, count))
        made = io.BytesIO()
        with wave.open(made, "wb") as clip:
            clip.setparams((1, 2, rate_hz, 0, "NONE", ""))
            clip.writeframes(samples[2 * start : 2 * (start + length)])
        yield made.getvalue()


def submit(client: openai.OpenAI, count: int, seconds: float) -> tuple[str, float]:
    """Uploads all clips and submits them as one batch; returns its id, and the seconds that took."""
    began_s, lines = time.perf_counter(), []
    for number, clip in enumerate(clips(count, seconds)):
        file = client.files.create(file=(f"{number}.wav", clip), purpose="batch")
        request = {"custom_id": f"clip-{number}", "method": "POST", "url": ENDPOINT, "body": {"file": file.id}}
        lines.append(json.dumps(request))
    source = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
    any_endpoint: Any = ENDPOINT  # the client's types name endpoints of text alone
    batch = client.batches.create(input_file_id=source.id, endpoint=any_endpoint, completion_window="24h")
    return batch.id, time.perf_counter() - began_s


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    draw = random.Random(SEED)
    moments = sorted(draw.uniform(0.05, 0.95) for _ in range(args.kills))
    server = KilledServer(folder, args.threads)
    killed_at = []
    try:
        server.start()
        batch_id, upload_s = submit(server.client, args.clips, args.seconds)
        began_s = time.perf_counter()
        while True:
            batch = server.client.batches.retrieve(batch_id)
            done = batch.request_counts.completed + batch.request_counts.failed if batch.request_counts else 0
            if moments and done >= moments[0] * args.clips:
                moments.pop(0)
                server.kill()
                killed_at.append(done)
                print(f"killed with {done} of {args.clips} answered", file=sys.stderr, flush=True)
                server.start()
                continue
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                break
            time.sleep(args.look_s)
        took_s = time.perf_counter() - began_s
        answers = _lines(server.client, batch.output_file_id)
        failures = _lines(server.client, batch.error_file_id)
    finally:
        server.close()
    counts = collections.Counter(line["custom_id"] for line in answers + failures)
    wanted = {f"clip-{number}" for number in range(args.clips)}
    row = {
        "name": "asr-serve",
        "status": batch.status,
        "clips": args.clips,
        "clip_s": args.seconds,
        "kills": len(killed_at),
        "killed_at_answers": killed_at,
        "answered_once": sum(count == 1 for name, count in counts.items() if name in wanted),
        "answered_more_than_once": sum(count > 1 for count in counts.values()),
        "not_answered": len(wanted - counts.keys()),
        "unknown_answers": len(counts.keys() - wanted),
        "errors": len(failures),
        "upload_s": round(upload_s, 1),
        "batch_s": round(took_s, 1),
    }
    return {"bench": "batch_kills", "machine": machine.describe(args.threads, PACKAGES), "rows": [row]}


def _lines(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clips", type=int, default=10_000, help="number of clips")
    parser.add_argument("--kills", type=int, default=5, help="number of kills")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a clip")
    parser.add_argument("--threads", type=int, default=machine.cores(), help="threads of the engine")
    parser.add_argument("--look-s", type=float, default=0.5, help="time between two looks at the batch")
    parser.add_argument("--folder", type=Path, help="folder of the queue; default: a temporary one")
    parser.add_argument("--json", type=Path, help="file of the result")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with contextlib.ExitStack() as held:
        folder = args.folder or Path(held.enter_context(tempfile.TemporaryDirectory(prefix="asr-serve-batch-")))
        os.makedirs(folder, exist_ok=True)
        report = run(args, folder)
    machine.tell(args.json, report)
    row = report["rows"][0]
    whole = row["answered_once"] == args.clips and row["status"] == "completed" and row["kills"] == args.kills
    return 0 if whole and not row["unknown_answers"] else 1


if __name__ == "__main__":
    sys.exit(main())
