"""Parts of FunASR's programs: their common flags, how they end, and the server that they start."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import typer

from asr_serve.api.cli.exit_codes import exit_on_error, print_error
from asr_serve.funasr.loading import DEFAULT_MODEL, DEFAULT_UTILIZATION, HUBS, MAX_MODEL_LEN, LoadOptions

PARTS = ("--vad-model", "--spk-model")
"""Flags that name models which are built in here, or found on this machine; they are accepted and change nothing."""


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Runs a program and exits: an error is a line on stderr, and the exit code is that of `asr-serve`."""
    try:
        exit_on_error(main)()
    except typer.Exit as end:
        sys.exit(end.exit_code)
    sys.exit(0)


def add_model_flags(parser: argparse.ArgumentParser, *other_names: str) -> None:
    """Adds the flags that choose a model and its place, with FunASR's names. `other_names`: of --model."""
    parser.add_argument(
        "--model", *other_names, dest="model", default=DEFAULT_MODEL, help="folder or name of the model (%(default)s)"
    )
    parser.add_argument("--hub", default="ms", choices=list(HUBS), help="hub of missing weights")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, bf16, fp16 or fp32 (%(default)s)")
    parser.add_argument("--gpu-memory-utilization", type=float, default=DEFAULT_UTILIZATION, help="share of a GPU")
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN, help="tokens of a sequence (%(default)s)")


def load_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of LoadOptions from the flags of `add_model_flags`."""
    names = ("hub", "device", "dtype", "gpu_memory_utilization", "max_model_len")
    return {name: getattr(args, name) for name in names}


def add_server_flags(parser: argparse.ArgumentParser, port: int) -> None:
    """Adds the flags of FunASR's servers."""
    add_model_flags(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: every one (%(default)s)")
    parser.add_argument("--port", type=int, default=port, help="port to listen on (%(default)s)")
    for part in PARTS:
        parser.add_argument(part, help="no effect: the server has its own")


def server_command(args: argparse.Namespace, more: Sequence[str] = (), language: str | None = None) -> list[str]:
    """Arguments of `asr-serve` for the flags of `add_server_flags`. `language`: that of its sessions. Missing weights
    are fetched. Raises OptionError, UnknownModel, WeightsMissing, WeightsCorrupt."""
    from asr_serve.config import EngineConfig
    from asr_serve.funasr.loading import DTYPES, engine_config, find_model
    from asr_serve.models.registry import asr_card
    from asr_serve.pipelines.segments import check_language
    from asr_serve.text.languages import requested_language_code

    options = LoadOptions(**load_arguments(args))
    name, folder = find_model(args.model, args.hub)
    check_language(asr_card(name), requested_language_code(language))
    engine = engine_config(name, folder, options)
    command = ["serve", "--host", args.host, "--port", str(args.port), "--model", name]
    command += ["--weights", str(folder)] if folder is not None else []
    command += ["--device", args.device, "--dtype", DTYPES[args.dtype], "--voice", "none"]
    command += ["--alias", f"fun-asr-nano={name}"] if name != "fun-asr-nano" else []
    if engine.kv_bytes != EngineConfig().kv_bytes:
        command += ["--set", f"engine.kv_bytes={engine.kv_bytes}"]
    return [*command, *more]


def start_server(arguments: Sequence[str]) -> NoReturn:
    """Becomes the server: this process, which has loaded torch to look at the model, is replaced."""
    print_error(f"asr-serve {shlex.join(arguments)}")
    os.execv(sys.executable, [sys.executable, "-c", "from asr_serve.api.cli import main; main()", *arguments])
