"""FunASR's `serve_vllm.py`: recordings over HTTP (`/asr`, `/v1/audio/transcriptions`) and `/ws`, by this server.

python -m asr_serve.funasr.serve_vllm --port 8899 --model FunAudioLLM/Fun-ASR-Nano-2512
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from asr_serve.funasr.option_names import flag_names, renamed_options
from asr_serve.funasr.programs import add_server_flags, run_program, server_command, start_server


def arguments(argv: Sequence[str] | None = None) -> list[str]:
    """Arguments of `asr-serve` for those of this program. Raises as `server_command` does."""
    parser = argparse.ArgumentParser(prog="python -m asr_serve.funasr.serve_vllm", description=__doc__)
    add_server_flags(parser, port=8_000)
    args = parser.parse_args(argv)
    with renamed_options(flag_names(parser)):
        return server_command(args)


if __name__ == "__main__":
    run_program(lambda: start_server(arguments()))
