"""Where recordings wait for their cloning: a folder for each, which goes away with it. What a server leaves behind
that was killed goes away when the next one begins: nobody's recordings are kept."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

FOLDER_PREFIX = "asr-serve-clone-"
FRESH_S = 60.0
"""A folder that is younger may be about to be locked."""


class UploadFolder:
    """One that is locked as long as its process lives."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self._handle: int | None = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._handle, fcntl.LOCK_EX)

    def remove(self) -> None:
        """And all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def remove_stale_folders(parent: Path | None = None) -> list[Path]:
    """Remove those whose server is gone; which they were."""
    gone = []
    for path in (parent or Path(tempfile.gettempdir())).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or removed meanwhile
            if not path.is_symlink() and path.is_dir() and time.time() - path.stat().st_mtime > FRESH_S:
                handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
                    gone.append(path)
                finally:
                    os.close(handle)
    return gone
