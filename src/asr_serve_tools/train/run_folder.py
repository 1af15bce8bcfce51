"""Lock of a run folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asr_serve.errors import OptionError

LOCK = ".lock"


@contextmanager
def lock_run_folder(run: Path) -> Iterator[None]:
    """Lock a run folder against other runs. Raises OptionError if another run holds the lock."""
    with (run / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OptionError(
                f"another run writes into {run}", "one at a time", "wait for it, or take another folder", param="run"
            ) from None
        yield
