"""Temporary folders of recordings, one for each cloning, deleted at its end. Folders that a killed server left
are deleted when the next one starts: no recordings are kept."""

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
"""Age below which a folder may be about to be locked."""


class UploadFolder:
    """Temporary folder that is locked as long as its process lives."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        self._handle: int | None = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._handle, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Deletes the folder and its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def remove_stale_folders(parent: Path | None = None) -> list[Path]:
    """Deletes folders whose server has ended; returns their paths."""
    removed = []
    for path in (parent or Path(tempfile.gettempdir())).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or removed meanwhile
            if not path.is_symlink() and path.is_dir() and time.time() - path.stat().st_mtime > FRESH_S:
                handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
                    removed.append(path)
                finally:
                    os.close(handle)
    return removed
