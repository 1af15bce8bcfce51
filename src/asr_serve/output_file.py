"""Files of results, which appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yields the path of a new file beside `path`, which replaces it when the context ends without an error: a reader
    sees the old content or the new one, even after a crash. Raises OSError, which names `path`."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        if error.filename in (part, str(part)) or error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
