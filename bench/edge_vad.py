"""Voice activity at the edge: vad.wasm beside torch and ONNX, and many gated callers one by one and in batches.

    python bench/edge_vad.py --data DIR --json edge-vad.json

Speed is CPU time of one thread. The contenders take turns, so that a slow moment of the machine hits all of them.
README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import clips
import machine
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from asr_serve.edge.gate_worker import GATHER_S
from asr_serve.edge.speech_gate import WINDOW_SAMPLES
from asr_serve.edge.voice_activity import VoiceActivityInstance, VoiceActivityModule, VoiceActivityPool
from asr_serve.models.auxiliary import silero

Step = Callable[[np.ndarray], np.ndarray]
"""Takes the next window of each row, (rows, 512) int16, and returns their probabilities (rows,)."""
RATE_HZ = 16_000
PACKET_SAMPLES = 320


def wasm(rows: int) -> Step:
    instance = VoiceActivityInstance(VoiceActivityModule())
    instance.slot_numbers[:rows] = [instance.acquire() for _ in range(rows)]

    def step(windows: np.ndarray) -> np.ndarray:
        instance.input[:rows] = windows
        instance.step(rows)
        return instance.probabilities[:rows].copy()

    return step


def torch_model(rows: int) -> Step:
    model = silero.load()
    state, counts = model.state(rows), torch.ones(rows, dtype=torch.int64)

    def step(windows: np.ndarray) -> np.ndarray:
        nonlocal state
        scores, state = model.step(torch.from_numpy(windows.astype(np.float32) / 32_768), state, counts)
        return scores[:, 0].numpy()

    return step


def package_file(name: str) -> Path | None:
    spec = importlib.util.find_spec("silero_vad")
    folder = spec.submodule_search_locations if spec is not None else None
    return Path(folder[0]) / "data" / name if folder else None


def jit(rows: int) -> Step:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        model = torch.jit.load(str(package_file("silero_vad.jit")))
    model.reset_states()

    def step(windows: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            scores: np.ndarray = model(torch.from_numpy(windows.astype(np.float32) / 32_768), RATE_HZ)[:, 0].numpy()
        return scores

    return step


def onnx(rows: int) -> Step:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        str(package_file("silero_vad.onnx")), options, providers=["CPUExecutionProvider"]
    )
    state, context, rate = np.zeros((2, rows, 128), np.float32), np.zeros((rows, 64), np.float32), np.array(RATE_HZ)

    def step(windows: np.ndarray) -> np.ndarray:
        nonlocal state, context
        audio = np.concatenate([context, windows.astype(np.float32) / 32_768], 1)
        context = audio[:, -64:]
        scores, state = session.run(None, {"input": audio, "state": state, "sr": rate})
        found: np.ndarray = scores[:, 0]
        return found

    return step


CONTENDERS: dict[str, Callable[[int], Step]] = {
    "asr-serve vad.wasm": wasm,
    "asr-serve torch": torch_model,
    "silero-vad jit": jit,
    "silero-vad onnx": onnx,
}


def speed(speech: np.ndarray, batches: Sequence[int], rounds: int, least_s: float) -> list[dict[str, Any]]:
    """Rows of the contenders. Every one steps the same windows, and its probabilities are compared with torch's."""
    windows = speech[: len(speech) // WINDOW_SAMPLES * WINDOW_SAMPLES].reshape(-1, WINDOW_SAMPLES)
    rows = []
    for batch in batches:
        steps = {name: make(batch) for name, make in CONTENDERS.items()}
        # Row r begins r windows later, so that the rows differ.
        inputs = [
            np.stack([windows[(at + row) % len(windows)] for row in range(batch)])
            for at in range(min(300, len(windows)))
        ]
        answers = {name: np.concatenate([step(window) for window in inputs]) for name, step in steps.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(rounds):
            for name, step in steps.items():
                done, begin = 0, time.thread_time()
                while (spent := time.thread_time() - begin) < least_s:
                    step(inputs[done % len(inputs)])
                    done += 1
                times[name].append(spent / done / batch * 1e6)
                print(f"round {number + 1}/{rounds}  batch {batch}  {name}: {times[name][-1]:.1f} us", file=sys.stderr)
        ours = times["asr-serve vad.wasm"]
        rows += [
            {
                "name": f"{name} batch {batch}",
                "batch": batch,
                "us_per_window": round(statistics.median(found), 1),
                "us_per_window_least": round(min(found), 1),
                "us_per_window_rounds": [round(each, 1) for each in found],
                "callers_per_core": round(WINDOW_SAMPLES / RATE_HZ * 1e6 / statistics.median(found)),
                "wasm_speed_over_this": round(
                    statistics.median(each / mine for each, mine in zip(found, ours, strict=True)), 2
                ),
                "wasm_least_speed_over_this": round(min(found) / min(ours), 2),
                "max_difference": float(np.abs(answers[name] - answers["asr-serve torch"]).max()),
            }
            for name, found in times.items()
        ]
    return rows


def sessions(speech: np.ndarray, counts: Sequence[int], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Rows of many callers whose packets come 50 times a second: stepped one after the other, as each packet comes, and
    in batches of what came in GATHER_S, as gate_worker.py does."""
    rows = []
    for count in counts:
        times: dict[str, list[float]] = {"one by one": [], "batched": []}
        for number in range(rounds):
            for name, found in times.items():
                pool = VoiceActivityPool()
                callers = [pool.open() for _ in range(count)]
                # Callers of whom a packet comes in a turn: each has a phase of its own.
                turn = max(1, round(count * GATHER_S * RATE_HZ / PACKET_SAMPLES))
                packets = 0
                begin, at = time.thread_time(), 0
                while (spent := time.thread_time() - begin) < seconds or not packets:
                    for first in range(0, count, turn):
                        due = [
                            (callers[row], speech[(at + row * 997) % (len(speech) - PACKET_SAMPLES) :][:PACKET_SAMPLES])
                            for row in range(first, min(count, first + turn))
                        ]
                        if name == "batched":
                            pool.feed(due)
                        else:
                            for caller, pcm in due:
                                caller.feed(pcm)
                        packets += len(due)
                    at += PACKET_SAMPLES
                found.append(spent / packets * 1e6)
                print(f"round {number + 1}/{rounds}  {count} callers  {name}: {found[-1]:.1f} us", file=sys.stderr)
        rows += [
            {
                "name": f"asr-serve gate {name}, {count} callers",
                "callers": count,
                "us_per_packet": round(statistics.median(found), 1),
                "us_per_packet_rounds": [round(each, 1) for each in found],
                "core_share": round(count * 50 * statistics.median(found) * 1e-6, 3),
            }
            for name, found in times.items()
        ]
    return rows


def to_int16(audio: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(audio * 32_767), -32_768, 32_767).astype(np.int16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with transcripts.tsv")
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--batches", default="1,64", help="callers of a step (default: %(default)s)")
    parser.add_argument("--sessions", default="64,512", help="callers of an edge, or none (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="CPU time of a contender in a round")
    parser.add_argument("--clips", type=int, default=16, help="whose windows are stepped")
    args = parser.parse_args()
    torch.set_num_threads(1)
    spoken = clips.load(args.data, args.clips)
    facts = machine.describe(threads=1, packages=("wasmtime", "silero-vad"))
    speech = to_int16(np.concatenate([clip.audio for clip in spoken]))
    rows = speed(speech, [int(each) for each in args.batches.split(",")], args.rounds, args.seconds)
    counts = [int(each) for each in args.sessions.split(",") if each != "none"]
    rows += sessions(speech, counts, args.rounds, args.seconds)
    facts["load_1m_at_end"] = round(os.getloadavg()[0], 2)
    machine.tell(args.json, {"bench": "edge_vad", "machine": facts, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
