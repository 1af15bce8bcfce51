"""FunASR's `client_python.py`: sends the microphone or a file to a server, and prints the text while it is spoken.

    python -m asr_serve.funasr.client_python --server ws://localhost:10095 --mic

It is `asr-serve listen --server`: it speaks this server's /v1/stream, and opens a lost connection again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from asr_serve.api.cli import app
from asr_serve.funasr.programs import run_program


def arguments(argv: Sequence[str] | None = None) -> list[str]:
    """Arguments of `asr-serve` for those of this program."""
    parser = argparse.ArgumentParser(prog="python -m asr_serve.funasr.client_python", description=__doc__)
    parser.add_argument("--server", default="ws://localhost:10095", help="address of the server (%(default)s)")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--mic", action="store_true", help="read the microphone")
    source.add_argument("--file", help="read a recording, at the speed at which it was spoken")
    parser.add_argument("--hotwords", default="", help="hotwords, separated by commas")
    parser.add_argument("--language", help="language, as a name or a code")
    parser.add_argument("--spk", action=argparse.BooleanOptionalAction, default=False, help="label speakers")
    args = parser.parse_args(argv)
    command = ["listen", "--server", args.server]
    command += ["--mic"] if args.mic else [args.file, "--real-time"]
    command += ["--hotwords", args.hotwords] if args.hotwords else []
    command += ["--language", args.language] if args.language else []
    return [*command, "--speakers"] if args.spk else command


if __name__ == "__main__":
    run_program(lambda: app(arguments()))
