"""The table of FunASR's guide to vLLM, for any models of ours and any folder of speech: engine, service, service with
speakers; speed and error rates.

    python bench/funasr_table.py --data DIR --models moonshine-tiny-en,whisper-tiny-en --json funasr-table.json

DIR holds transcripts.tsv, lines of relative/path.flac<TAB>text. The rows of the guide are computed on its own
recordings by a GPU, and are not repeated here. README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import clips
import machine
import offline
import serve
import serve_load
import serve_peers
from clips import Clip
from serve_peers import HOST

import asr_serve
from asr_serve.config import EngineConfig
from asr_serve_tools.evaluate.wer import cer, wer

Row = dict[str, Any]
Pass = Callable[[], list[str]]
"""Transcribes all clips once; the texts in their order."""
LIMIT_S = 600.0
COLUMNS = ("model", "engine", "vad", "rtfx", "cer", "wer", "notes")


def engine_rows(model: str, speech: Sequence[Clip], repeats: int) -> list[Row]:
    """All clips in one call of the library: each whole, and cut by voice activity detection."""
    # Without memory: the same clips come again and again.
    with asr_serve.load(model, device="cpu", engine=EngineConfig(prefix_bytes=0)) as loaded:
        audio = [clip.audio for clip in speech]

        def transcribe(vad: bool) -> list[str]:
            return [found.text for found in loaded.transcribe(audio, vad=vad)]

        facts = {"dtype": loaded.describe()["dtype"], "engine": "library, one call"}
        whole = measured(partial(transcribe, False), speech, repeats)
        cut = measured(partial(transcribe, True), speech, repeats)
    return [
        {"name": "asr-serve", "model": model, **facts, "vad": "none", **whole, "notes": "each clip whole"},
        {"name": "asr-serve", "model": model, **facts, "vad": "dynamic", **cut, "notes": "the defaults"},
    ]


def service_rows(model: str, files: Sequence[Path], speech: Sequence[Clip], args: argparse.Namespace) -> list[Row]:
    """`args.clients` clients of the HTTP service, each with one file at a time: without speakers, and with."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = serve.Run(args, speech, files, offline.environment(args.threads), folder)
        setting = serve_peers.Setting(serve.free_port(), args.threads, folder, ("--model", model))
        made = serve_peers.asr_serve(setting)._replace(model=model)
        with serve.started(made, setting.port, run) as (_, trouble):
            for speakers in (False, True):
                row = {
                    "name": "asr-serve",
                    "model": model,
                    "engine": f"service{' with speakers' if speakers else ''}",
                    "vad": "dynamic",
                    "clients": args.clients,
                }
                if trouble is None:
                    send = partial(post_all, files, model, setting.port, args.clients, speakers)
                    rows.append(row | measured(send, speech, args.repeats) | {"notes": f"{args.clients} clients"})
                else:
                    rows.append(row | {"failed": trouble})
    return rows


def post_all(files: Sequence[Path], model: str, port: int, clients: int, speakers: bool) -> list[str]:
    fields = {"model": model, "response_format": "verbose_json" if speakers else "json"}
    fields |= {"spk": "true"} if speakers else {}
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda file: post(file, fields, port), files))


def post(file: Path, fields: dict[str, str], port: int) -> str:
    """Text of one file."""
    request = serve_load.request(file, f"{HOST}:{port}", "/v1/audio/transcriptions", fields)
    head, _, body = request.partition(b"\r\n\r\n")
    headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    connection = http.client.HTTPConnection(HOST, port, timeout=LIMIT_S)
    try:
        connection.request("POST", "/v1/audio/transcriptions", body, headers)
        answer = connection.getresponse()
        told = json.loads(answer.read())
        if answer.status != 200:
            raise SystemExit(f"{file}: status {answer.status}: {told}")
        text: str = told["text"]
        return text
    finally:
        connection.close()


def measured(once: Pass, speech: Sequence[Clip], repeats: int) -> Row:
    """Speed of the median pass after one to warm up, and error rates, the same in all passes or the worst."""
    said = [clip.text for clip in speech]
    once()
    walls, rates = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        texts = once()
        walls.append(time.perf_counter() - started)
        rates.append((round(cer(said, texts).percent, 2), round(wer(said, texts).percent, 2)))
    rtfx = clips.seconds([clip.audio for clip in speech]) / statistics.median(walls)
    return {
        "rtfx": round(rtfx, 1),
        "cer": max(rate for rate, _ in rates),
        "wer": max(rate for _, rate in rates),
        "walls_s": [round(wall, 3) for wall in walls],
    }


def table(rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cells = [str(row.get(column, "")) for column in COLUMNS]
        if "failed" in row:
            cells[-1] = f"failed: {row['failed']}"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="folder with transcripts.tsv")
    add("--models", default="moonshine-tiny-en,whisper-tiny-en", metavar="A,B", help="of ours, by name")
    add("--clips", type=int, metavar="N", help="only so many, spread evenly over the set")
    add("--clients", type=int, default=8, metavar="N", help="of the service (8)")
    add("--repeats", type=int, default=3, help="passes that are timed (3)")
    add("--threads", type=int, default=machine.cores(), help="of the service (all cores)")
    add("--limit-s", type=float, default=LIMIT_S, help="most seconds until the service is ready")
    add("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    os.environ["ASR_SERVE_THREADS"] = str(args.threads)
    described, speech = machine.describe(args.threads), clips.load(args.data, args.clips)
    files = [args.data / clip.path for clip in speech]
    rows = list(
        chain.from_iterable(
            [*engine_rows(model, speech, args.repeats), *service_rows(model, files, speech, args)]
            for model in args.models.split(",")
        )
    )
    workload = {"clips": len(speech), "audio_s": round(clips.seconds([clip.audio for clip in speech]), 1)}
    found = {"bench": "funasr_table", "machine": described, "workload": workload, "rows": rows}
    machine.write(args.json, found)
    print(table(rows))
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
