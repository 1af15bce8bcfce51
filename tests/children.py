"""Processes that tests start: they hear SIGINT as a command in the foreground does, and end at a limit."""

from __future__ import annotations

import signal
import subprocess
import threading
from typing import Any, AnyStr

LIMIT_S = 570.0
"""How long a test's child may run: under pytest's own limit of 600 s, which ends no wait that follows it."""
MODULE_LIMIT_S = 3_600.0
"""How long one may run that serves a whole module."""


def restore_sigint() -> None:
    """Undo that SIGINT is ignored, as it is below `nohup make test &` in a script.

    Who starts a process with `exec` hands on that a signal is ignored, and Python installs no KeyboardInterrupt
    then. A signal that has a handler gets its default in the child, so a handler here is enough for all of them,
    engine processes too.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Child(subprocess.Popen[AnyStr]):
    """A Popen that is killed after `limit_s`, which ends every wait for it: `with`, `wait`, `communicate`,
    reads of its pipes."""

    def __init__(self, *args: Any, limit_s: float = LIMIT_S, **kwargs: Any) -> None:
        self._limit = threading.Timer(limit_s, self.kill)
        self._limit.daemon = True
        super().__init__(*args, **kwargs)
        self._limit.start()

    def poll(self) -> int | None:
        return self._told(super().poll())

    def wait(self, timeout: float | None = None) -> int:
        code = super().wait(timeout)
        self._told(code)
        return code

    def _told(self, code: int | None) -> int | None:
        if code is not None:
            self._limit.cancel()
        return code
