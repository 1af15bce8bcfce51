"""A model whose encoder carries state: hypotheses of audio that is encoded once, beside encoding all of it again.

    python bench/incremental.py --seconds 4,8,16 --callers 1,8 --json incremental.json

Callers speak in step, and each wants a hypothesis every --partial-ms. `carried` gives the engine what is new;
`again` gives it the whole segment so far, as for a model that hears whole utterances. Weights are random, of
the published tiny size: what a product costs does not depend on its numbers. The words are given, four tokens a
second, as a draft that holds, and the decoder ends behind them, the same in both modes; so the difference is the
encoder's.
README.md says how to read the result.
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
RATE_HZ = 16_000
TOKENS_PER_S = 4
MODES = ("carried", "again")


def build(dtype: str) -> Any:
    """Parts of an engine, and its card."""
    import torch
    from transformers import MoonshineStreamingConfig, MoonshineStreamingForConditionalGeneration

    from asr_serve import devices
    from asr_serve.engine.builder import EngineComponents
    from asr_serve.models.asr.moonshine import moonshine_streaming
    from asr_serve.models.auxiliary import silero

    torch.manual_seed(1)
    config = moonshine_streaming.Config()
    heads = {"num_key_value_heads": config.num_attention_heads}
    settings: dict[str, Any] = {
        **heads,
        "encoder_config": {"num_key_value_heads": config.encoder_config.num_attention_heads},
    }
    upstream = MoonshineStreamingForConditionalGeneration(MoonshineStreamingConfig(**settings))
    config = moonshine_streaming.Config.of(upstream.config.to_dict())
    weights = upstream.state_dict()
    # All tokens are equally likely, and so the first of them comes: it is to be the end.
    weights["proj_out.weight"] = torch.zeros_like(weights["model.decoder.embed_tokens.weight"])
    model = moonshine_streaming.Model(config, weights, devices.make_device("cpu", dtype))
    model.eos = 0
    return EngineComponents(model, silero.load(), model.device, lambda tokens: " ".join(map(str, tokens)))


def measure(client: Any, mode: str, seconds: float, callers: int, partial_ms: int) -> Row:
    from asr_serve.decoding.search_options import DraftTokens, SearchOptions
    from asr_serve.engine.request import HypothesisRequest

    options = SearchOptions(temperatures=(0.0,), min_avg_logprob=-100.0, max_compression_ratio=100.0)
    samples, step = int(seconds * RATE_HZ), partial_ms * RATE_HZ // 1_000
    chance = np.random.default_rng(5)
    clips = [chance.standard_normal(samples).astype(np.float32) * 0.1 for _ in range(callers)]
    script = tuple(chance.integers(100, 30_000, int(seconds * TOKENS_PER_S)).tolist())
    streams = [client.open_stream(live=True, samples=samples) for _ in clips] if mode == "carried" else []
    rounds, at = [], 0
    while at < samples:
        end = min(at + step, samples)
        said = script[: int(end / RATE_HZ * TOKENS_PER_S)]
        draft = DraftTokens(said, len(said))
        began_s = time.perf_counter()
        if mode == "carried":
            futures = [
                stream.hear(clip[at:end], HypothesisRequest(end, options, draft, "live"), last=end == samples)
                for stream, clip in zip(streams, clips, strict=True)
            ]
        else:
            futures = [client.submit(clip[:end], options, "live", draft=draft).future for clip in clips]
        for future in futures:
            assert future.result(120).tokens == said or at == 0
        rounds.append(time.perf_counter() - began_s)
        at = end
    return {
        "mode": mode,
        "segment_s": seconds,
        "callers": callers,
        "ms_per_audio_s": round(1_000 * sum(rounds) / (seconds * callers), 2),
        "partial_p50_ms": round(1_000 * statistics.median(rounds), 1),
        "last_partial_ms": round(1_000 * rounds[-1], 1),
    }


def rows(args: argparse.Namespace) -> Iterator[Row]:
    from asr_serve.config import EngineConfig
    from asr_serve.engine.client import EngineClient
    from asr_serve.engine.thread_backend import thread_backend
    from asr_serve.models.asr.moonshine import moonshine_streaming

    card = msgspec.structs.replace(moonshine_streaming.CARDS[0], tokens_per_s=100.0)
    config = EngineConfig(use_chunked_inference=True, kv_bytes=2 << 30, prefix_bytes=0)
    client = EngineClient(config, thread_backend(card, lambda: build(args.dtype)))
    try:
        for mode in MODES:
            measure(client, mode, 2, 1, args.partial_ms)  # shapes are compiled
        for seconds in args.seconds:
            for callers in args.callers:
                found: dict[str, list[Row]] = {mode: [] for mode in MODES}
                for _ in range(args.repeats):
                    for mode in MODES:
                        found[mode].append(measure(client, mode, seconds, callers, args.partial_ms))
                for runs in found.values():
                    row = sorted(runs, key=lambda each: each["ms_per_audio_s"])[len(runs) // 2]
                    print(json.dumps(row), flush=True)
                    yield row
    finally:
        client.close()


def ratios(found: list[Row]) -> list[Row]:
    carried = {(row["segment_s"], row["callers"]): row for row in found if row["mode"] == "carried"}
    return [
        {"segment_s": at[0], "callers": at[1], "again_over_carried": round(row["ms_per_audio_s"] / base, 2)}
        for row in found
        if row["mode"] == "again" and (base := carried[at := (row["segment_s"], row["callers"])]["ms_per_audio_s"])
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=lambda text: [float(s) for s in text.split(",")], default=[4.0, 8.0, 16.0])
    parser.add_argument("--callers", type=lambda text: [int(s) for s in text.split(",")], default=[1, 8])
    parser.add_argument("--partial-ms", type=int, default=480)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--repeats", type=int, default=3, help="of each row, in turns; the median is told")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    found = list(rows(args))
    report = {"machine": machine.describe(machine.cores()), "rows": found, "ratios": ratios(found)}
    machine.write(args.json, report)
    print(json.dumps(report["ratios"], indent=1))
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent / "src"))
    sys.exit(main())
