"""Folder of a labelling run, from which an interrupted run continues.

all.jsonl     every segment: its position, both texts, the error rate between them
kept.jsonl    segments under the threshold, in the format of NeMo's manifests
files.jsonl   recordings that are done, and the length of all.jsonl after each: an incomplete end is cut off
label.json    the models, the language and the segmentation
.lock         locked while a run writes here
summary.json  hours by threshold
kept.svg      plot of hours by threshold
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from asr_serve.errors import OptionError
from asr_serve_tools.label import threshold_plot

STEPS = 100
"""Number of steps of the error rate from 0 to 1 for which hours are counted."""
ALL, KEPT, FILES, CHOSEN, SUMMARY, PLOT, LOCK = (
    "all.jsonl",
    "kept.jsonl",
    "files.jsonl",
    "label.json",
    "summary.json",
    "kept.svg",
    ".lock",
)


class LabelRow(msgspec.Struct, frozen=True):
    audio_filepath: str
    offset: float
    """Start of the segment in seconds."""
    duration: float
    text: str
    """Text of the first model."""
    cer: float
    hypotheses: dict[str, str]
    """Text of each model, by its name."""


class LabeledFile(msgspec.Struct, frozen=True):
    """A recording that both models have processed."""

    audio_filepath: str
    duration: float
    segments: int
    all_bytes: int
    """Length of all.jsonl after its rows."""
    size_bytes: int = 0
    modified_ns: int = 0
    """Modification time of the file when it was processed; 0 if it is not a file."""


class LabelSummary(msgspec.Struct, frozen=True):
    threshold: float
    files: int
    failed: int
    hours: float
    """Length of all recordings."""
    speech_hours: float
    """Length of all segments."""
    kept_hours: float
    kept_segments: int
    segments: int
    hours_under: dict[str, float]
    """Hours that each threshold keeps."""


@contextlib.contextmanager
def lock_label_folder(folder: Path) -> Iterator[None]:
    """Create the folder and lock it against other runs. Raises OptionError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise OptionError(
            f"cannot write into the folder {folder}: {error.strerror}", "an --out that can be written"
        ) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OptionError(
                f"another run is labelling into {folder}", "one at a time", "wait for it, or name another --out"
            ) from None
        yield
    finally:
        os.close(handle)


class LabelStore:
    """Store in the existing folder of one labelling run. Raises OptionError for a folder made with other settings."""

    def __init__(self, folder: Path, chosen: dict[str, Any]) -> None:
        self.folder = folder
        self.done: dict[str, LabeledFile] = {}
        size = 0
        whole = 0
        self.seconds = 0.0
        length_of_all = (folder / ALL).stat().st_size if (folder / ALL).exists() else 0
        for line in _lines(folder / FILES):
            try:
                row = msgspec.json.decode(line, type=LabeledFile)
            except msgspec.DecodeError:
                break  # an incomplete last line
            if not line.endswith(b"\n") or not size <= row.all_bytes <= length_of_all:
                break  # some of its rows are missing
            self.done[row.audio_filepath] = row
            self.seconds += row.duration
            size, whole = row.all_bytes, whole + len(line)
        self._expect(chosen)
        for name, length in ((ALL, size), (FILES, whole)):
            with (folder / name).open("ab") as file:
                file.truncate(length)

    def append_file(self, path: str, duration: float, rows: Iterable[LabelRow]) -> None:
        """Write a recording's rows, then mark it as done: after a stop between the two it is processed again."""
        lines = [msgspec.json.encode(row) + b"\n" for row in rows]
        with (self.folder / ALL).open("ab") as file:
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        done = LabeledFile(path, duration, len(lines), size, *_stamp(path))
        with (self.folder / FILES).open("ab", buffering=0) as file:
            file.write(msgspec.json.encode(done) + b"\n")
        self.done[path] = done
        self.seconds += duration

    def is_labeled(self, path: str) -> bool:
        """Returns whether both models have processed a recording. Raises OptionError if the file has changed since."""
        if (done := self.done.get(path)) is None:
            return False
        if done.size_bytes and (done.size_bytes, done.modified_ns) != _stamp(path):
            raise OptionError(
                f"{path} has changed since it was heard", "the recordings as they were", "name another --out"
            )
        return True

    def finish(self, threshold: float, failed: int) -> LabelSummary:
        """Write kept.jsonl, the summary and its plot, for all recordings done so far."""
        hours = [0.0] * (STEPS + 1)
        total = kept = speech_s = kept_s = 0.0
        part = self.folder / f".{KEPT}.part"
        with part.open("wb") as file:
            for line in _lines(self.folder / ALL):
                row = msgspec.json.decode(line, type=LabelRow)
                total += 1
                speech_s += row.duration
                if not row.text.strip():
                    continue
                # Index of the lowest threshold that keeps it.
                index = -int(-row.cer * STEPS // 1)
                if index <= STEPS:
                    hours[index] += row.duration / 3_600
                if row.cer <= threshold:
                    kept += 1
                    kept_s += row.duration
                    file.write(line)
        part.replace(self.folder / KEPT)
        under = 0.0
        curve = []
        for index, counted in enumerate(hours):
            under += counted
            curve.append((index / STEPS, under))
        summary = LabelSummary(
            threshold=threshold,
            files=len(self.done),
            failed=failed,
            hours=round(self.seconds / 3_600, 6),
            speech_hours=round(speech_s / 3_600, 6),
            kept_hours=round(kept_s / 3_600, 6),
            kept_segments=int(kept),
            segments=int(total),
            hours_under={f"{at:.2f}": round(found, 6) for at, found in curve},
        )
        encoded = msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"
        (self.folder / SUMMARY).write_bytes(encoded)
        (self.folder / PLOT).write_text(
            threshold_plot.threshold_svg(curve, threshold, kept_s / 3_600, speech_s / 3_600), "utf-8"
        )
        return summary

    def _expect(self, chosen: dict[str, Any]) -> None:
        path = self.folder / CHOSEN
        if not self.done:  # no recording was done with earlier settings
            path.write_bytes(msgspec.json.encode(chosen) + b"\n")
            return
        try:
            before = msgspec.json.decode(path.read_bytes())
        except msgspec.DecodeError:
            before = None
        if before != chosen:
            raise OptionError(
                f"{self.folder} was made with {path.read_text('utf-8', 'replace').strip()}",
                "the same models and cutting go on with it; --threshold may be another",
                "name another --out",
            )


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        with path.open("rb") as file:
            yield from file
