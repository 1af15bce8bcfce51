"""Process that clones one voice, beside a server: reads a CloneRequest, writes a line of JSON for every event.

The end of its standard input stops it, so that it ends with the process that started it. It runs at a low
priority.

    python -m asr_serve.cloning.worker < order.json
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from asr_serve.config import limit_openmp_spinning
from asr_serve.errors import AsrServeError
from asr_serve.voices.cloning_messages import CloneFailed, CloneMessage, CloneProgress, CloneRequest

NICE = 10


def run(on_progress: Callable[[CloneProgress], None], order: CloneRequest, stop: threading.Event) -> CloneMessage:
    from asr_serve.cloning.clone import clone_voice

    try:
        return clone_voice(order, on_progress, stop.is_set)
    except AsrServeError as failure:
        return CloneFailed(failure.code, str(failure))
    except OSError as failure:
        return CloneFailed("system_error", f"{failure.strerror or failure}: {failure.filename or ''}".rstrip(": "))


def main() -> None:
    os.nice(NICE)
    limit_openmp_spinning()
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no message
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=CloneRequest)
    stop = threading.Event()
    threading.Thread(target=_watch, args=(sys.stdin.fileno(), stop), daemon=True).start()
    say(out, run(lambda progress: say(out, progress), order, stop))


def _watch(stdin_fd: int, stop: threading.Event) -> None:
    """Waits until the other side hangs up. Unbuffered: a lock held by a waiting thread would abort the exit."""
    while os.read(stdin_fd, 1):
        pass
    stop.set()


def say(out: BinaryIO, what: CloneMessage) -> None:
    try:
        out.write(msgspec.json.encode(what) + b"\n")
        out.flush()
    except BrokenPipeError:
        os._exit(1)  # the other side is gone


if __name__ == "__main__":
    main()
