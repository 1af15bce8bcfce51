"""Names of options in errors: those that the user typed, FunASR's arguments or the flags of a program."""

from __future__ import annotations

import argparse
import contextlib
import copy
import re
from collections.abc import Iterator, Mapping

from asr_serve.errors import AsrServeError, OptionError

ARGUMENTS = {
    "temperatures": "temperature",
    "speakers": "spk",
    "max_decode_rows": "max_num_seqs",
    "kv_bytes": "gpu_memory_utilization",
}
"""Names of this engine's options -> FunASR's arguments."""


@contextlib.contextmanager
def renamed_options(names: Mapping[str, str]) -> Iterator[None]:
    """Context manager that raises OptionError with other names of options. `names`: names of options in errors -> those
    that the user typed."""
    try:
        yield
    except OptionError as error:
        raise rename_option(error, names) from error


def rename_option(error: OptionError, names: Mapping[str, str]) -> OptionError:
    """Returns a copy of an error with other names of options: `name=value` becomes `--flag value` where the other name
    is a flag.

    >>> error = OptionError("hub='xx'", "one of: ms, hf", param="hub")
    >>> str(rename_option(error, {"hub": "--hub"}))
    "--hub 'xx'. one of: ms, hf."
    """

    def renamed(text: str) -> str:
        return re.sub(
            r"(?<![\w.-])(\w+)=",
            lambda found: found[0] if (own := names.get(found[1])) is None else own + (" " if own[0] == "-" else "="),
            text,
        )

    made = copy.copy(error)
    AsrServeError.__init__(made, renamed(error.came), renamed(error.allowed), renamed(error.todo))
    made.param = None if error.param is None else names.get(error.param, error.param)
    return made


def flag_names(parser: argparse.ArgumentParser, **other_names: str) -> dict[str, str]:
    """Names of options -> the flags of a program that set them. `other_names`: names that the program's own differ
    from -> its arguments."""
    flags = {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings}
    return flags | {name: flags[argument] for name, argument in other_names.items()}
