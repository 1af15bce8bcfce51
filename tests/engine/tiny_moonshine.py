"""A Moonshine of random weights, small enough to run by the hundred, and the engine around it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tiny_configs
import torch
from safetensors.torch import save_file
from torch import Tensor

from asr_serve import devices
from asr_serve.config import EngineConfig
from asr_serve.engine.builder import EngineComponents
from asr_serve.engine.client import EngineClient, Ticket
from asr_serve.engine.loop import Loop
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.errors import AsrServeError
from asr_serve.models.asr.moonshine import moonshine
from asr_serve.models.auxiliary import silero

WAIT_S = 180.0
"""Longer than anything here takes; only a hang reaches it."""
CARD = msgspec.structs.replace(moonshine.CARDS[0], name="tiny-random", max_segment_ms=8_000)
MAX_SAMPLES = 8 * 16_000


def weights(config: moonshine.Config, seed: int = 5) -> dict[str, Tensor]:
    """A checkpoint whose answers differ from clip to clip and end at different lengths."""
    chance = torch.Generator().manual_seed(seed)
    width, inner = config.hidden_size, config.intermediate_size

    def normal(*shape: int, std: float = 0.35) -> Tensor:
        return torch.randn(*shape, generator=chance) * std

    found = {
        "model.encoder.conv1.weight": normal(width, 1, 127),
        "model.encoder.groupnorm.weight": 1 + normal(width),
        "model.encoder.groupnorm.bias": normal(width),
        "model.encoder.conv2.weight": normal(2 * width, width, 7, std=0.1),
        "model.encoder.conv2.bias": normal(2 * width),
        "model.encoder.conv3.weight": normal(width, 2 * width, 3, std=0.1),
        "model.encoder.conv3.bias": normal(width),
        "model.encoder.layer_norm.weight": 1 + normal(width),
        "model.decoder.norm.weight": 1 + normal(width),
        "model.decoder.embed_tokens.weight": normal(config.vocab_size, width, std=0.6),
    }
    for side, layers, up in (
        ("encoder", config.encoder_num_hidden_layers, inner),
        ("decoder", config.decoder_num_hidden_layers, 2 * inner),
    ):
        for layer in range(layers):
            at = f"model.{side}.layers.{layer}"
            for block in ("self_attn", "encoder_attn")[: 1 + (side == "decoder")]:
                for kind in "qkvo":
                    found[f"{at}.{block}.{kind}_proj.weight"] = normal(width, width)
            for norm in ("input_layernorm", "post_attention_layernorm", "final_layernorm"):
                found[f"{at}.{norm}.weight"] = 1 + normal(width)
            found[f"{at}.mlp.fc1.weight"], found[f"{at}.mlp.fc1.bias"] = normal(up, width), normal(up)
            found[f"{at}.mlp.fc2.weight"], found[f"{at}.mlp.fc2.bias"] = normal(width, inner), normal(width)
    return found


def save(folder: Path) -> Path:
    """The same as a checkpoint, as another process can load it."""
    config = tiny_configs.moonshine_config()
    (folder / "config.json").write_text(json.dumps(msgspec.to_builtins(config)))
    save_file({name: tensor.contiguous() for name, tensor in weights(config).items()}, folder / "model.safetensors")
    (folder / "tokenizer.bin").write_bytes(b"".join(b"\x03w%02d" % token for token in range(config.vocab_size)))
    return folder


def text(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def build() -> EngineComponents:
    device = devices.make_device("cpu", "fp32")
    config = tiny_configs.moonshine_config()
    return EngineComponents(moonshine.Model(config, weights(config), device), silero.load(), device, text)


def start(build: Callable[[], EngineComponents] = build, **settings: Any) -> EngineClient:
    """Unless it is told to, it remembers nothing: what is asked is computed."""
    config = {"max_decode_rows": 8, "kv_bytes": 1 << 20, "max_sessions": 6, "prefix_bytes": 0, **settings}
    return EngineClient(EngineConfig(**config), thread_backend(CARD, build))


def clip(seed: int, samples: int) -> np.ndarray:
    """Noise whose colour and loudness change, so that clips sound different to random weights too."""
    chance = np.random.default_rng(seed)
    noise = chance.standard_normal(samples).astype(np.float32)
    swell = np.interp(np.arange(samples), np.linspace(0, samples, 9), chance.uniform(0, 1, 9))
    tone = np.sin(np.arange(samples) * chance.uniform(0.01, 1.0))
    return (0.1 * swell * noise + 0.3 * (1 - swell) * tone).astype(np.float32)


def on_loop(client: EngineClient, work: Callable[[Loop], Any]) -> Any:
    """What `work` returns when the loop's own thread runs it, between two steps."""
    done: Future[Any] = Future()

    def job(loop: Loop) -> None:
        try:
            done.set_result(work(loop))
        except BaseException as failure:
            done.set_exception(failure)

    client.backend.call(job)
    return done.result(WAIT_S)


@contextmanager
def held(client: EngineClient) -> Iterator[None]:
    """The loop stands still inside the block, and reads its inbox after it."""
    entered, leave = threading.Event(), threading.Event()

    def job(_: Loop) -> None:
        entered.set()
        assert leave.wait(WAIT_S)

    client.backend.call(job)
    assert entered.wait(WAIT_S)
    try:
        yield
    finally:
        leave.set()


def outcome(ticket: Ticket) -> Any:
    """The answer, or the class of the error."""
    try:
        return ticket.future.result(WAIT_S)
    except AsrServeError as error:
        return type(error)


def expect_empty(client: EngineClient) -> None:
    """Nothing is held by anybody, and the loop is still there to say so."""

    def look(loop: Loop) -> None:
        loop.check()
        assert not loop.executor.open_requests
        assert not loop.executor.decode_runner.rows
        assert len(loop.executor.scheduler) == 0

    on_loop(client, look)
    told = client.describe()
    assert (told["pages_used"], told["requests"]) == (0, 0)
    assert client._samples == 0
