"""Reader of evaluations for a server: pages of runs and of clips, and the recording of a clip.

The file may be missing, damaged or replaced while the server runs: each question is answered from the file that is
there now, or with an error that the server's clients can read.
"""

from __future__ import annotations

import logging
import mimetypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from asr_serve.errors import (
    ClipAudioMissing,
    EvaluationsUnreadable,
    NoEvaluations,
    OptionError,
    SourceNotFound,
    UnknownEvaluation,
)
from asr_serve.evaluation.store import ClipOrder, EvaluationResult, EvaluationStore, EvaluationSummary

COMMAND = "asr-serve eval run --systems MODEL --data FOLDER --store FILE"

log = logging.getLogger(__name__)


class EvaluationList(msgspec.Struct, frozen=True):
    """Runs, newest first."""

    data: list[EvaluationSummary]
    total: int
    """Number of all runs that have a result."""
    object: Literal["list"] = "list"


class EvaluationClips(msgspec.Struct, frozen=True):
    """Figures of one run, and some of its clips."""

    evaluation: EvaluationSummary
    data: list[EvaluationResult]
    total: int
    """Number of all clips that have a result, failed ones counted."""
    object: Literal["list"] = "list"


class EvaluationReader:
    """Reads the file of the setting `evaluations`. All methods block, and may be called from any thread."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._lock = threading.Lock()
        self._store: EvaluationStore | None = None  # kept open, because it caches figures
        self._opened: tuple[int, ...] = ()

    def runs(self, limit: int, offset: int) -> EvaluationList:
        """Raises NoEvaluations, EvaluationsUnreadable."""
        with self._reading() as store:
            return EvaluationList(store.summaries(limit=limit, offset=offset), store.count_summaries())

    def clips(self, run_id: str, order: ClipOrder, limit: int, offset: int) -> EvaluationClips:
        """Raises NoEvaluations, EvaluationsUnreadable, UnknownEvaluation."""
        with self._reading() as store:
            summary = store.summary(run_id)
            if summary is None:
                raise _unknown(run_id)
            return EvaluationClips(summary, store.results(run_id, order, limit, offset), summary.clips + summary.failed)

    def audio(self, run_id: str, path: str) -> tuple[Path, str]:
        """File of a clip and its media type. Raises as `clips`, and ClipAudioMissing."""
        with self._reading() as store:
            if store.summary(run_id) is None:
                raise _unknown(run_id)
            if store.result(run_id, path) is None:
                raise UnknownEvaluation(f"the evaluation {run_id} has no clip {path[:200]!r}", "a `path` of its clips")
            file = Path(store.run(run_id).dataset.folder, path)
        kind = (mimetypes.guess_type(file.name)[0] or "").replace("/x-", "/")
        # Whoever writes the store could name any file: what is no recording by its name is not sent.
        if not kind.startswith(("audio/", "video/")) or not file.is_file() or not os.access(file, os.R_OK):
            raise ClipAudioMissing(
                f"the recording {path[:200]!r} is not on this server",
                "recordings that are where they were when they were evaluated",
                "put the data set at the same path, or use a report: asr-serve eval report --html report.html",
            )
        return file, kind

    def close(self) -> None:
        with self._lock:
            self._drop()

    @contextmanager
    def _reading(self) -> Iterator[EvaluationStore]:
        if self._path is None:
            raise NoEvaluations(
                "this server shows no evaluations: `evaluations` is not set",
                "the SQLite file of asr-serve eval",
                f"make one and name it in the settings: {COMMAND}",
            )
        with self._lock:
            try:
                yield self._current(self._path)
            except SourceNotFound as failure:
                self._drop()
                raise NoEvaluations(
                    f"there is no file {self._path.name} of evaluations yet", "", f"make it: {COMMAND}"
                ) from failure
            except (OptionError, OSError, msgspec.MsgspecError) as failure:
                self._drop()
                log.warning("the evaluations cannot be read: %s", failure)
                raise EvaluationsUnreadable(
                    f"the file {self._path.name} of evaluations cannot be read",
                    "a file that asr-serve eval of this version wrote, which this server may read",
                    "the server's log has the reason",
                ) from failure

    def _current(self, path: Path) -> EvaluationStore:
        """The store, opened anew where the file is another one."""
        try:
            found = path.stat()
        except FileNotFoundError:
            raise SourceNotFound(f"there is no {path}") from None
        opened: tuple[int, ...] = (found.st_dev, found.st_ino)
        if not os.access(path.parent, os.W_OK):  # SQLite does not look again whether such a file has changed
            opened += (found.st_mtime_ns, found.st_size)
        if self._store is None or opened != self._opened:
            self._drop()
            self._store, self._opened = EvaluationStore(path), opened
        return self._store

    def _drop(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


def _unknown(run_id: str) -> UnknownEvaluation:
    return UnknownEvaluation(
        f"there is no evaluation {run_id[:100]!r}", "a `run_id` of GET /v1/evaluations", "look at the list again"
    )
