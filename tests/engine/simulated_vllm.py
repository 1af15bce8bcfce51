"""A worker of the vLLM protocol without vLLM: its answers follow from the prompt by arithmetic, and seeds of requests
name its faults. Run by `interpreter`, which takes the place of another environment's Python."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parents[2] / "src" / "asr_serve" / "engine" / "vllm" / "worker_main.py"
REFUSED, KILLED, SILENT, SLOW = 1_001, 1_002, 1_003, 1_004
"""Seeds of requests that the worker refuses, dies of, never answers, and answers slowly."""
EOS, TOKENS = 39, 30
SLOW_STEP_S = 0.05
VERSION = "simulated"


def interpreter(folder: Path, *faults: str) -> str:
    """Writes a program that is called as a Python interpreter is, and runs this file. `faults`: `start`, it cannot
    load the model; `restart`, it can once only."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "{folder}" "{",".join(faults)}" "$3"\n')
    path.chmod(0o755)
    return str(path)


def answer(tokens: list[int], total: int, seed: int) -> list[int]:
    """Tokens after a prompt: `total` is the sum of the embeddings' bytes."""
    start = sum(token for token in tokens if token >= 0) + total + seed
    length = 3 + start % 7
    return [*(4 + (start * (i + 1) + i * i) % TOKENS for i in range(length)), EOS]


class SimulatedEngine:
    """The methods of worker_main.VllmEngine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        folder, faults = Path(sys.argv[1]), sys.argv[2].split(",")
        started = folder / "started"
        if "start" in faults or ("restart" in faults and started.exists()):
            raise RuntimeError("no memory")
        started.touch()
        self.settings, self.requests = settings, dict[int, dict[str, Any]]()
        (folder / "running").write_text("")
        self.folder = folder

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    def describe(self) -> dict[str, Any]:
        return {"version": VERSION, "torch": "", "device": "cpu", "pages": 100, "page_positions": 16}

    def add(self, frame: dict[str, Any], payload: bytearray) -> None:
        if frame["seed"] == REFUSED:
            raise ValueError("not this one")
        assert len(self.requests) < self.settings["max_rows"]
        following = answer(frame["tokens"], sum(payload), frame["seed"])[: frame["max_tokens"]]
        self.requests[frame["id"]] = {**frame, "following": following}
        (self.folder / "sampling").write_text(" ".join(f"{frame[name]}" for name in ("temperature", "top_k", "top_p")))
        self._tell()

    def abort(self, numbers: list[int]) -> None:
        for number in numbers:
            self.requests.pop(number, None)
        self._tell()

    def _tell(self) -> None:
        """Leaves the number of requests where the test reads it."""
        part = self.folder / "running.part"
        part.write_text(",".join(map(str, self.requests)))
        part.replace(self.folder / "running")

    def step(self) -> dict[str, Any]:
        seeds = {each["seed"] for each in self.requests.values()}
        if KILLED in seeds:
            os._exit(3)
        if SILENT in seeds:
            time.sleep(600)
        if SLOW in seeds:
            time.sleep(SLOW_STEP_S)
        outputs = []
        for number, request in list(self.requests.items()):
            token = request["following"].pop(0)
            done = token in request["stop_tokens"]
            ended = "stop" if done else "length" if not request["following"] else None
            outputs.append({"id": number, "tokens": [token], "logprobs": [-0.25], "finish": ended})
            if ended:
                del self.requests[number]
        self._tell()
        return {"op": "tokens", "outputs": outputs, "seconds": 0.001, "kv_usage": 0.5}


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("worker_main", WORKER)
    assert spec is not None
    assert spec.loader is not None
    worker_main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker_main)
    worker_main.main(SimulatedEngine)
