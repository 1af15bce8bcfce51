"""FunASR's `serve_realtime_ws.py`: text while somebody speaks, over a WebSocket at `/`, by this server.

python -m asr_serve.funasr.serve_realtime_ws --port 10095 --language 中文 --hotword-file hotword_list
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from asr_serve.funasr.option_names import flag_names, renamed_options
from asr_serve.funasr.programs import add_server_flags, run_program, server_command, start_server
from asr_serve.server.realtime.funasr.session_defaults import read_hotwords


def arguments(argv: Sequence[str] | None = None) -> list[str]:
    """Arguments of `asr-serve` for those of this program. Raises as `server_command` does."""
    parser = argparse.ArgumentParser(prog="python -m asr_serve.funasr.serve_realtime_ws", description=__doc__)
    add_server_flags(parser, port=10_095)
    parser.add_argument("--language", help="language of sessions that send no LANGUAGE: (the model detects it)")
    parser.add_argument("--hotword-file", help="hotwords of sessions that send no HOTWORDS:, one a line")
    args = parser.parse_args(argv)
    names = flag_names(parser, funasr_language="language", funasr_hotwords_file="hotword_file")
    with renamed_options(names):
        more = []
        if args.language is not None:
            more += ["--set", f"funasr_language={args.language}"]
        if args.hotword_file is not None:
            read_hotwords(args.hotword_file)  # the server would name its own setting in an error
            more += ["--set", f"funasr_hotwords_file={Path(args.hotword_file).absolute()}"]
        return server_command(args, more, args.language)


if __name__ == "__main__":
    run_program(lambda: start_server(arguments()))
