"""A Whisper of a published shape with random weights: how much audio a device hears at once, and how fast.

    python bench/shape.py --shape large-v3 --device cuda --requests 1,8,32,64 --graphs on,off --json shape.json

What a product costs does not depend on its numbers, so this says what real weights of that shape would cost, on
machines that no hub is reachable from. Every answer is made as long as --tokens-per-s says: end-of-text is never
the likeliest, and large positions keep an answer from repeating itself. Each point submits so many clips at once,
ROUNDS times; the median counts. `graphs off` runs every decoding step operation by operation (CUDA only).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import machine
import msgspec
import numpy as np
import torch
from torch._C._profiler import _ExperimentalConfig as ExperimentalConfig
from torch.nn import functional as F

from asr_serve import devices
from asr_serve.config import EngineConfig
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.devices.cuda import CudaDevice
from asr_serve.engine.builder import EngineComponents
from asr_serve.engine.client import EngineClient
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.models.asr.whisper import whisper
from asr_serve.models.auxiliary import silero
from asr_serve.types import Int8Calibration

ROUNDS, PROFILE_ROWS = 3, 30
PAGE_POSITIONS = 16
CALIBRATION = Int8Calibration(kept=("decoder.*",))
"""Layers that --quantize auto computes in 8 bits: an encoder's, which no card of Whisper allows, to see their cost."""


class Shape(NamedTuple):
    width: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    mels: int = 80
    vocabulary: int = 51_865


SHAPES = {
    "tiny.en": Shape(384, 6, 4, 4, vocabulary=51_864),
    "base": Shape(512, 8, 6, 6),
    "small": Shape(768, 12, 12, 12),
    "medium": Shape(1_024, 16, 24, 24),
    "large-v3": Shape(1_280, 20, 32, 32, 128, 51_866),
    "large-v3-turbo": Shape(1_280, 20, 32, 4, 128, 51_866),
}


def config_of(shape: Shape) -> whisper.Config:
    return whisper.Config(
        vocab_size=shape.vocabulary,
        num_mel_bins=shape.mels,
        d_model=shape.width,
        encoder_layers=shape.encoder_layers,
        encoder_attention_heads=shape.heads,
        encoder_ffn_dim=4 * shape.width,
        decoder_layers=shape.decoder_layers,
        decoder_attention_heads=shape.heads,
        decoder_ffn_dim=4 * shape.width,
        eos_token_id=50_256 if shape.vocabulary == 51_864 else 50_257,
    )


def weights(config: whisper.Config, where: str) -> dict[str, torch.Tensor]:
    """Under the names of a checkpoint, made on the device that will hold them."""
    torch.manual_seed(0)
    width = config.d_model

    def normal(*dims: int, std: float | None = None) -> torch.Tensor:
        return torch.randn(*dims, device=where) * (dims[-1] ** -0.5 if std is None else std)

    found = {
        "encoder.conv1.weight": normal(width, config.num_mel_bins, 3, std=0.05),
        "encoder.conv1.bias": normal(width),
        "encoder.conv2.weight": normal(width, width, 3, std=0.02),
        "encoder.conv2.bias": normal(width),
        "encoder.embed_positions.weight": normal(config.max_source_positions, width),
        "decoder.embed_positions.weight": normal(config.max_target_positions, width, std=3.0),
        "decoder.embed_tokens.weight": F.normalize(normal(config.vocab_size, width)),
    }
    for side, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        norms = [f"{side}.layer_norm"]
        for layer in range(layers):
            at = f"{side}.layers.{layer}"
            blocks = ("self_attn", "encoder_attn")[: 1 + (side == "decoder")]
            norms += [f"{at}.final_layer_norm", *[f"{at}.{block}_layer_norm" for block in blocks]]
            products = [(f"{b}.{kind}_proj", width, width) for b in blocks for kind in ("q", "k", "v", "out")]
            for name, rows, columns in (*products, ("fc1", 4 * width, width), ("fc2", width, 4 * width)):
                found[f"{at}.{name}.weight"] = normal(rows, columns)
                if not name.endswith("k_proj"):
                    found[f"{at}.{name}.bias"] = torch.zeros(rows, device=where)
        for norm in norms:
            found[f"{norm}.weight"], found[f"{norm}.bias"] = (
                torch.ones(width, device=where),
                torch.zeros(width, device=where),
            )
    found["decoder.layer_norm.bias"] = away = normal(width, std=1.0)
    found["decoder.embed_tokens.weight"][config.special.eot] = -F.normalize(away, dim=0)  # never the likeliest
    return found


def clip(seconds: float, seed: int) -> np.ndarray:
    chance = np.random.default_rng(seed)
    return (0.1 * chance.standard_normal(int(seconds * 16_000))).astype(np.float32)


def start(shape: Shape, args: argparse.Namespace, requests: int) -> EngineClient:
    config = config_of(shape)
    card = msgspec.structs.replace(whisper.CARDS[0], name="random", tokens_per_s=args.tokens_per_s)

    def build() -> EngineComponents:
        device = devices.make_device(args.device, args.dtype, args.quantize, calibration=CALIBRATION)
        model = whisper.Model(config, weights(config, str(device.torch_device)), device)
        return EngineComponents(model, silero.load(), device, lambda tokens: " ".join(map(str, tokens)))

    positions = config.max_source_positions + config.max_target_positions
    pages = requests * -(-positions // PAGE_POSITIONS) + 1
    # With the extra dimension that the CPU's heads have, in float32 at most; a GPU's pages are in bf16 by default.
    itemsize = 2 if args.device != "cpu" and args.dtype != "fp32" else 4
    bytes_each = 2 * config.decoder_layers * (config.d_model + shape.heads) * PAGE_POSITIONS * itemsize
    engine = EngineConfig(
        max_decode_rows=requests, kv_bytes=max(64 << 20, pages * bytes_each), prefix_bytes=0, max_sessions=1
    )
    return EngineClient(engine, thread_backend(card, build))


def point(shape: Shape, args: argparse.Namespace, requests: int, graphs: bool) -> dict[str, Any]:
    gc.collect()
    if args.device != "cpu":  # the point before leaves its pages to the allocator, which are of another size
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    client = start(shape, args, requests)
    options = SearchOptions(temperatures=(0.0,), language="en", max_no_speech=1.0)
    clips = [clip(args.clip_s, seed) for seed in range(requests)]

    def answers() -> list[Recognition]:
        tickets = [client.submit(pcm, options, "bulk", wait=True, check=lambda: None) for pcm in clips]
        return [ticket.future.result() for ticket in tickets]

    try:
        walls, tokens = [], 0
        for round_number in range(ROUNDS + 1):
            began = time.perf_counter()
            heard = answers()
            if round_number:  # the first one records graphs and maps memory
                walls.append(time.perf_counter() - began)
            tokens = sum(len(each.tokens) for each in heard)
        if args.profile:
            # The engine computes on threads of its own.
            with torch.profiler.profile(experimental_config=ExperimentalConfig(profile_all_threads=True)) as profile:
                answers()
            by_time = "self_cpu_time_total" if args.device == "cpu" else "self_cuda_time_total"
            print(profile.key_averages().table(sort_by=by_time, row_limit=PROFILE_ROWS, max_name_column_width=70))
        described = client.describe()
        memory_gib = round(torch.cuda.max_memory_allocated() / 2**30, 2) if args.device != "cpu" else None
    finally:
        client.close()
    wall = statistics.median(walls)
    return {
        "name": "asr-serve" if args.quantize == "none" else f"asr-serve {args.quantize}",
        "requests": requests,
        "graphs": graphs,
        "x_real_time": round(requests * args.clip_s / wall, 1),
        "tokens_per_s": round(tokens / wall, 1),
        "tokens_each": tokens / requests,
        "wall_s": round(wall, 4),
        "walls_s": [round(each, 4) for each in walls],
        "memory_gib": memory_gib,
        "resident_gib": machine.resident_gib(),
        "engine": described,
    }


def peer_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    from shape_peer import point as peer_point

    config = config_of(SHAPES[args.shape])
    tokens = 4 + int(args.clip_s * args.tokens_per_s)  # as many as ours
    rows = []
    for requests in map(int, args.requests.split(",")):
        rows.append(peer_point(config, weights(config, "cpu"), "int8", machine.cores(), requests, args.clip_s, tokens))
        print(rows[-1], flush=True)
    return rows


def compared(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of all systems, each measured in a process of its own: what one holds is not counted for another."""
    rows: list[dict[str, Any]] = []
    for options in (["--quantize=none"], ["--quantize=auto"], ["--peer"]):
        with tempfile.TemporaryDirectory() as name:
            found = Path(name, "found.json")
            rest = [option for option in argv if option != "--compare"]
            subprocess.run([sys.executable, __file__, *rest, *options, f"--json={found}"], check=True)
            rows += json.loads(found.read_text(encoding="utf-8"))["rows"]
    return rows


def result_of(args: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "bench": "shape",
        "machine": machine.describe(torch.get_num_threads()),
        "shape": args.shape,
        "clip_s": args.clip_s,
        "rows": rows,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny.en")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto", help="auto, fp32 or bf16")
    parser.add_argument("--quantize", default="none", choices=("none", "int8", "auto"))
    parser.add_argument("--peer", action="store_true", help="CTranslate2 in int8 on these weights, instead")
    parser.add_argument("--compare", action="store_true", help="ours in none and auto and CTranslate2, a process each")
    parser.add_argument("--requests", default="1,8,32,64", help="clips at once, a point each")
    parser.add_argument("--clip-s", type=float, default=10.0)
    parser.add_argument("--tokens-per-s", type=float, default=4.0, help="length of an answer, by its clip's")
    parser.add_argument("--graphs", default="on", help="on,off: a point each; off is for CUDA")
    parser.add_argument("--profile", action="store_true", help="print which operations and kernels a round spends")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.compare:
        rows = compared(sys.argv[1:] if argv is None else argv)
        machine.write(args.json, result_of(args, rows))
        return 0
    rows = peer_rows(args) if args.peer else []
    for kind in [] if args.peer else args.graphs.split(","):
        without = patch.object(CudaDevice, "capture", lambda self, function: function)
        with without if kind == "off" else nullcontext():
            for requests in map(int, args.requests.split(",")):
                rows.append(point(SHAPES[args.shape], args, requests, kind == "on"))
                row = rows[-1]
                speed = f"{row['x_real_time']:>8} x real time  {row['tokens_per_s']:>8} tokens/s"
                print(f"{args.shape}  {requests:>4} at once  graphs {kind:<3}  {speed}", flush=True)
                machine.write(args.json, result_of(args, rows))  # what is measured stays, whatever fails later
    if args.peer:
        machine.write(args.json, result_of(args, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
