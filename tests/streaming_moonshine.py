"""A Moonshine Streaming of random weights, as a hub would have it."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

MODEL = "moonshine-streaming-tiny-en"
FIXTURE = Path(__file__).parent / "models" / "fixtures" / "moonshine_streaming.safetensors"
SIZE = "wide"


def write(folder: Path) -> Path:
    """The checkpoint, into `folder`: it hears up to 5 s."""
    prefix = f"{SIZE}.weights."
    with safe_open(FIXTURE, "pt") as file:
        config = json.loads(file.metadata()["said"])[SIZE]["config"]
        names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
        save_file({name.removeprefix(prefix): file.get_tensor(name) for name in names}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "pieces.json").write_text(json.dumps([f"\u2581w{i}" for i in range(config["vocab_size"])]))
    return folder
