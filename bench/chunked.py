"""Streaming models: chunks of many sessions in one step, beside one session after another.

    python bench/chunked.py --sessions 1,8,64,256 --json chunked.json

Every session always has its next chunk ready: what is measured is what the engine can do, not what callers
bring. A step of `sequential` is one session's chunk, one of `chunked` is a chunk of up to --max-rows of them; a
round is a chunk of everybody, which live callers need within `chunk_ms`. Both modes run in turns on the same
machine, model and audio. README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import machine
import msgspec
import numpy as np

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]
SECONDS_AHEAD = 2.0
"""Audio that a session is given at once."""
TOKENS_PER_S = 4.0
"""What a transducer of random weights is made to say, about as much as people do: left alone, every frame says as
many tokens as it may."""


def fastconformer(right: int, head: str, size: str, device: Any) -> Any:
    """A published size, of random weights: what a product costs does not depend on its numbers."""
    sys.path.insert(0, str(HERE.parent / "tests" / "models"))
    from tiny_fastconformer import weights

    from asr_serve.models.asr.nemo.fastconformer import Config, Model

    sizes: dict[str, dict[str, Any]] = {"large": {}, "medium": {"d_model": 256, "n_heads": 4, "n_layers": 16}}
    config = msgspec.structs.replace(Config(), att_context_size=((70, right),), heads=(head,), **sizes[size])
    tensors = weights(config)
    if head == "ctc":
        return Model(config, tensors, device)
    bias = tensors["joint.out.bias"]
    low, high = 0.0, 200.0
    for _ in range(10):
        bias[config.vocab_size] = (low + high) / 2
        model = Model(config, tensors, device)
        said = Load(build(model, 1, right + 1, 1, 1, False, False), 1)
        rounds = round(4_000 / (80 * (right + 1)))
        for _ in range(rounds):
            said.round()
        low, high = (bias[-1].item(), high) if said.tokens / 4 > TOKENS_PER_S else (low, bias[-1].item())
    return model


def packaged(name: str, device: Any) -> Any:
    """Real weights, of the package that has them."""
    from asr_serve.engine.builder import AsrCheckpoint

    found = AsrCheckpoint.find(name, None)
    from safetensors.torch import load_file

    return found.file.Model(found.config, load_file(found.folder / "model.safetensors"), device)


def load(spec: str, device: Any) -> Any:
    """`fastconformer-medium:1:ctc`: size, look-ahead in frames, head; else a card's name."""
    kind, *rest = spec.split(":")
    if kind.startswith("fastconformer-"):
        return fastconformer(int(rest[0]), rest[1], kind.removeprefix("fastconformer-"), device)
    return packaged(kind, device)


def speech(seconds: float, seed: int) -> np.ndarray:
    """Noise that swells as speech does: the models' work does not depend on what they hear."""
    chance = np.random.default_rng(seed)
    samples = int(seconds * 16_000)
    swell = np.interp(
        np.arange(samples), np.linspace(0, samples, 4 * int(seconds) + 2), chance.random(4 * int(seconds) + 2)
    )
    return (0.2 * swell * chance.standard_normal(samples)).astype(np.float32)


class Load:
    """So many sessions of a wrapper, each with its next chunk ready."""

    def __init__(self, wrapper: Any, sessions: int, seed: int = 0) -> None:
        self.wrapper = wrapper
        self.audio = speech(SECONDS_AHEAD, seed)
        self.sessions = [wrapper.open_session() for _ in range(sessions)]
        self.tokens = 0

    def round(self) -> list[float]:
        """A chunk of everybody; how long each step took, in seconds."""
        wrapper, took = self.wrapper, []
        window, frame = max(wrapper._windows.values()), wrapper.model.frame_samples
        for session in self.sessions:
            while not session.audio_buffer.has_window(window, frame):
                wrapper.append_audio(session, self.audio, 1_000 * time.perf_counter())
        left = set(self.sessions)
        while left:
            started = time.perf_counter()
            running = wrapper.schedule(1_000 * started)
            done = wrapper.step(running, 1_000 * started)
            took.append(time.perf_counter() - started)
            self.tokens += sum(len(each.result.fixed_tokens) for each in done)
            left -= set(running)
        return took

    def close(self) -> None:
        for session in self.sessions:
            self.wrapper.close_session(session)


def build(model: Any, beam: int, chunk: int, sessions: int, rows: int, chunked: bool, graphs: bool) -> Any:
    from asr_serve.engine.builder import _search
    from asr_serve.engine.streaming.model_runner import ChunkedModelRunner

    return ChunkedModelRunner(
        model,
        _search(model, model.heads[0], beam, model.device, fuses=False, batched=model.device.name != "cpu"),
        model.device,
        slots=sessions,
        chunk=chunk,
        use_chunked_inference=chunked,
        max_rows=rows,
        wait_ms=0.0,
        graphs=graphs,
    )


def measure(load: Load, seconds: float, rounds: int) -> tuple[list[float], list[float]]:
    """At least that long and so many rounds, after one that is not counted: steps, and rounds."""
    load.round()
    load.tokens = 0
    steps: list[float] = []
    whole: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(whole) < rounds:
        began = time.perf_counter()
        steps += load.round()
        whole.append(time.perf_counter() - began)
    return steps, whole


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(np.array(values), 100 * share))


def rows(args: argparse.Namespace) -> Iterator[Row]:
    import torch

    from asr_serve import devices

    for dtype in args.dtype:
        device = devices.make_device(args.device, dtype)
        for spec in args.models:
            model = load(spec, device)
            chunk = -(-args.chunk_ms * 16 // model.frame_samples)
            chunk = -(-chunk // model.frame_block) * model.frame_block
            chunk_ms = chunk * model.frame_samples / 16
            for sessions in args.sessions:
                for mode in args.modes:
                    wrapper = build(
                        model, args.beam, chunk, sessions, args.max_rows, mode != "sequential", mode != "eager"
                    )
                    found = Load(wrapper, sessions)
                    steps, whole = measure(found, args.seconds, args.rounds)
                    audio_s = len(whole) * sessions * chunk_ms / 1_000
                    row = {
                        "model": spec,
                        "dtype": dtype,
                        "search": f"beam {args.beam}" if args.beam > 1 else "greedy",
                        "sessions": sessions,
                        "chunk_ms": chunk_ms,
                        "mode": mode,
                        "audio_s_per_s": round(audio_s / sum(whole), 2),
                        "step_p50_ms": round(1_000 * statistics.median(steps), 2),
                        "step_p95_ms": round(1_000 * percentile(steps, 0.95), 2),
                        "round_p95_ms": round(1_000 * percentile(whole, 0.95), 2),
                        "ms_per_session_s": round(1_000 * sum(whole) / audio_s, 3),
                        "tokens_per_s": round(found.tokens / audio_s, 2),
                        "state_mib": round(wrapper.states.row_bytes * sessions / 2**20, 1),
                        "steps": len(steps),
                    }
                    found.close()
                    print(json.dumps(row), flush=True)
                    yield row
            del model
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def ratios(found: list[Row]) -> list[Row]:
    """How many times the sequential path, where both were measured."""
    key = ("model", "dtype", "search", "sessions")
    alone = {tuple(row[k] for k in key): row for row in found if row["mode"] == "sequential"}
    return [
        {**{k: row[k] for k in key}, "mode": row["mode"], "times_sequential": round(row["audio_s_per_s"] / base, 2)}
        for row in found
        if row["mode"] != "sequential" and (base := alone.get(tuple(row[k] for k in key), {}).get("audio_s_per_s"))
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=numbers, default=[1, 8, 64, 256])
    parser.add_argument(
        "--models",
        type=lambda text: text.split(","),
        default=["fastconformer-large:1:ctc", "fastconformer-medium:1:rnnt", "armspeech-hy"],
    )
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["sequential", "chunked"])
    parser.add_argument("--dtype", type=lambda text: text.split(","), default=["fp32"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--chunk-ms", type=int, default=160, help="at least so long; whole blocks of the model")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--max-rows", type=int, default=64, help="sessions in one step")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each row, at least")
    parser.add_argument("--rounds", type=int, default=5, help="for each row, at least")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    found = list(rows(args))
    report = {"machine": machine.describe(machine.cores()), "rows": found, "times_sequential": ratios(found)}
    machine.write(args.json, report)
    print(json.dumps(report["times_sequential"], indent=1))
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent / "src"))
    sys.exit(main())
