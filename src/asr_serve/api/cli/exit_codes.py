"""End of a command: an error as one sentence on stderr, and an exit code.

0 success, 1 failure, 2 wrong usage, 130 ctrl-C, 141 stdout closed by its reader, 143 SIGTERM. Wrong usage is what
another command line or settings file would mend: an option, a setting, or a name or path that stands for no model. A
file that is missing is a failure, whether it holds audio, settings, a mix or a pipeline; so are broken audio, weights
that are not installed and a hub that cannot be reached.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

import typer

from asr_serve.errors import AsrServeError, NoCheckpoint, OptionError, UnknownModel

FAILED, USAGE, INTERRUPTED, BROKEN_PIPE, TERMINATED = 1, 2, 130, 141, 143
USAGE_ERRORS = (OptionError, UnknownModel, NoCheckpoint)

P = ParamSpec("P")


def exit_on_error(command: Callable[P, int | None]) -> Callable[P, None]:
    """Wraps a command: typed errors become a line on stderr, and its returned number the exit code."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
            sys.stdout.flush()
        except AsrServeError as error:
            print_error(f"error: {error}")
            raise typer.Exit(USAGE if isinstance(error, USAGE_ERRORS) else FAILED) from None
        except KeyboardInterrupt:
            print_error("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            silence_stdout()
            raise typer.Exit(BROKEN_PIPE) from None
        except OSError as error:  # disk full, folder removed: the system's message is the best there is
            silence_stdout()  # buffered output would fail again at exit, with a traceback
            print_error(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}.")
            raise typer.Exit(FAILED) from None
        if code:
            raise typer.Exit(code)

    return wrapper


def print_error(line: str) -> None:
    """Prints a line on stderr; it is lost if stderr is closed too."""
    try:
        print(line.encode("utf-8", "replace").decode(), file=sys.stderr, flush=True)
    except BrokenPipeError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # open for the rest of the process


def silence_stdout() -> None:
    """Redirects stdout, whose reader is gone, so that Python's own flush at exit succeeds."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # stdout is no file, or is closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
