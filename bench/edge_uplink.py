"""CPU of a caller between the edge and the engine: WebSocket, HTTP/2, shared memory.

    python bench/edge_uplink.py --callers 8 --seconds 20 --json edge-uplink.json

Each row runs a server and an edge of its own, as processes, and sends real speech as RTP in real time. CPU is that of
the edge's process, the server's and the engine's, from the first packet to the last word.
"""

from __future__ import annotations

import argparse
import json
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import machine
import numpy as np
import psutil

from asr_serve.audio import read_audio

UPLINKS = ("websocket", "http2", "engine")
UNITS, RATE_HZ = 320, 16_000
PAYLOAD_TYPE = 97
"""L16 at 16 kHz, by the edge's defaults."""
START_S = 180.0


def free_port(kind: int = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"{url} did not answer within {START_S:g} s")


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(uplink: str, callers: int, speech: np.ndarray) -> dict[str, Any]:
    """Row of one uplink."""
    program = str(Path(sys.executable).with_name("asr-serve"))
    with tempfile.TemporaryDirectory() as folder:
        server_port, control_port, port = free_port(), free_port(), free_port(socket.SOCK_DGRAM)
        url, control = f"http://127.0.0.1:{server_port}", f"http://127.0.0.1:{control_port}"
        sets = (f"port={server_port}", "voice=none", "engine_threads=1", f"edge_folder={folder}/offer")
        server = subprocess.Popen(
            [program, "serve", *(word for each in sets for word in ("--set", each))], stderr=subprocess.DEVNULL
        )
        how = ["--engine", f"{folder}/offer"] if uplink == "engine" else ["--uplink", uplink]
        edge = None
        try:
            wait_for(f"{url}/ready")
            edge = subprocess.Popen(
                [program, "edge", "--server", url, "--port", str(port), "--control-port", str(control_port), *how],
                stderr=subprocess.DEVNULL,
            )
            wait_for(f"{control}/health")
            (engine,) = [each for each in psutil.Process(server.pid).children() if "asr_serve" in str(each.cmdline())]
            processes = {"edge": psutil.Process(edge.pid), "server": psutil.Process(server.pid), "engine": engine}
            send(control, port, 1, speech[:RATE_HZ])  # everything is loaded and connected
            before = {name: cpu_s(process) for name, process in processes.items()}
            texts = send(control, port, callers, speech)
            used = {name: cpu_s(process) - before[name] for name, process in processes.items()}
        finally:
            for process in (edge, server):
                if process is not None:
                    process.terminate()
                    process.wait(60)
    seconds = callers * len(speech) / RATE_HZ
    row = {f"{name}_ms_per_s": round(1_000 * value / seconds, 2) for name, value in used.items()}
    between = round(row["edge_ms_per_s"] + row["server_ms_per_s"], 2)
    return {"uplink": uplink, "callers": callers, **row, "edge_and_server_ms_per_s": between, "texts": len(set(texts))}


def send(control: str, port: int, callers: int, speech: np.ndarray) -> list[str]:
    """Sends speech as that many callers, in real time; returns their texts."""
    pcm = np.rint(speech * 32_767).astype(">i2")
    sessions = [httpx.post(f"{control}/v1/edge/sessions", json={}).json() for _ in range(callers)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        line.connect(("127.0.0.1", port))
        began_s = time.monotonic()
        for number in range(len(pcm) // UNITS):
            payload = pcm[number * UNITS : (number + 1) * UNITS].tobytes()
            for session in sessions:
                head = struct.pack(">BBHII", 0x80, PAYLOAD_TYPE, number & 0xFFFF, number * UNITS, session["ssrc"])
                line.send(head + payload)
            time.sleep(max(0.0, began_s + (number + 1) * UNITS / RATE_HZ - time.monotonic()))
    time.sleep(0.5)
    for session in sessions:
        httpx.delete(f"{control}/v1/edge/sessions/{session['id']}")
    texts = []
    for session in sessions:
        events = httpx.get(f"{control}{session['events']}", timeout=START_S).text
        told = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: ")]
        texts.append(" ".join(event["text"] for event in told if event["type"] == "segment"))
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--speech", default=None, help="file of speech; default: the packaged one")
    parser.add_argument("--json", default=None)
    chosen = parser.parse_args()
    path = chosen.speech
    if path is None:
        import moonshine_voice

        path = Path(moonshine_voice.__file__).parent / "assets" / "two_cities.wav"
    speech = read_audio(path)
    speech = np.resize(speech, chosen.seconds * RATE_HZ)
    rows = []
    for turn in range(chosen.turns):
        for uplink in UPLINKS:
            rows.append({"turn": turn, **measure(uplink, chosen.callers, speech)})
            print(json.dumps(rows[-1]), flush=True)
    report = {"bench": "edge_uplink", "machine": machine.describe(1, ["asr-serve", "h2"]), "rows": rows}
    machine.write(None if chosen.json is None else Path(chosen.json), report)


if __name__ == "__main__":
    main()
