"""Outputs of `transcribe`: the screen, one file, a folder with a file for each input, or one jsonl file.

A file appears under its name only when it is complete (written under another name, then renamed), so an existing
file is finished; `--resume` relies on that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from asr_serve.api.cli.io.output_names import (
    FORBIDDEN_CHARACTERS,
    check_inputs_not_overwritten,
    plan_output_paths,
    source_name,
)
from asr_serve.audio.input_manifest import InputItem
from asr_serve.errors import OptionError
from asr_serve.output_file import replaced_file
from asr_serve.text.formats import text_and_json
from asr_serve.text.formats.registry import JSON, TRANSCRIPT_FORMATS, TranscriptFormat, render, transcript_format
from asr_serve.types import Segment, Transcript, suggest_name

OWNERS_FILE = ".asr-serve.jsonl"
"""File in an output folder with the source of each file, so that `--resume` cannot confuse two."""
ONE_OBJECT = "one JSON object a line"


class TranscriptSink(Protocol):
    """Receiver of results as they come. Every method is called from one thread."""

    def finished(self, item: InputItem) -> bool:
        """Returns whether this input's result exists from an earlier run."""

    def begin(self) -> None:
        """Called when the model is loaded and work starts: only now may an older result be deleted."""

    def segment(self, item: InputItem, segment: Segment) -> None: ...

    def done(self, item: InputItem, transcript: Transcript) -> Path | None: ...


class StdoutSink:
    """Results on stdout: text segment by segment, every other format when its file is done."""

    def __init__(self, form: str, several: bool, stream: BinaryIO | None = None) -> None:
        self.form, self.several = form, several
        self.stream: BinaryIO = sys.stdout.buffer if stream is None else stream
        self._headed: str | None = None
        self._speaker = ""
        self._any = False

    def finished(self, item: InputItem) -> bool:
        return False

    def begin(self) -> None:
        pass

    def segment(self, item: InputItem, segment: Segment) -> None:
        if self.form != "text":
            return
        if self._headed != item.key:
            self._speaker = ""
        if line := text_and_json.speaker_line(segment, self._speaker):
            self._head(item)
            self._headed = item.key
            self._speaker = segment.speaker
            self._write(f"{line}\n")

    def done(self, item: InputItem, transcript: Transcript) -> None:
        if self.form == "text":
            self._head(item)
            if not transcript.segments:
                self._write(text_and_json.text(transcript))
            return
        row = transcript_format(self.form)
        if not row.is_self_delimiting:
            self._head(item)
        result = row.render(transcript)
        if self.several and row.media_type == JSON:
            # One document per line, for jq and for readers.
            result = msgspec.json.format(result.encode(), indent=0).decode() + "\n"
        self._write(result)

    def _head(self, item: InputItem) -> None:
        """Prints a heading above each of several inputs, as head(1) does."""
        if not self.several or self._headed == item.key:
            return
        self._write(f"{chr(10) if self._any else ''}==> {FORBIDDEN_CHARACTERS.sub('_', item.key)} <==\n")
        self._headed, self._any = item.key, True

    def _write(self, text: str) -> None:
        self.stream.write(text.encode("utf-8", "replace"))
        self.stream.flush()


class FileSink:
    """One file for each input, at `paths`."""

    def __init__(self, form: str, paths: dict[str, Path], folder: Path | None = None, *, resume: bool = False) -> None:
        self.form, self.paths, self.folder, self.resume = form, paths, folder, resume
        self._owners = folder / OWNERS_FILE if folder else None
        if folder:
            make_folder(folder)
        rows = read_rows(self._owners) if self._owners else ()
        self._owner = {str(row.get("output")): row.get("source") for row in rows}

    def finished(self, item: InputItem) -> bool:
        path = self.paths[item.key]
        if not self.resume or not is_complete(path, self.form):
            return False
        owner = self._owner.get(self._name(path))
        return owner is None or owner == source_name(item)

    def begin(self) -> None:
        if self._owners and self._owners.exists():
            drop_torn_tail(self._owners)

    def segment(self, item: InputItem, segment: Segment) -> None:
        pass

    def done(self, item: InputItem, transcript: Transcript) -> Path:
        path = self.paths[item.key]
        make_folder(path.parent)
        write_atomically(path, render(transcript, self.form).encode("utf-8", "replace"))
        if self._owners is not None:
            row = {"output": self._name(path), "source": source_name(item)}
            append_row(self._owners, msgspec.json.encode(row) + b"\n")
        return path

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.folder)) if self.folder else path.name


class JsonLinesSink:
    """One jsonl file with a line for each input as it finishes. With `resume`, existing lines stay."""

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path, self.resume = path, resume
        self.keys: set[str] = set()
        make_folder(path.parent)
        if resume:
            for row in read_rows(path):
                key = row.get("key")
                if "text" not in row or not isinstance(key, str):
                    raise OptionError(
                        f"{path} holds lines that are no results of ours",
                        "--resume goes on with a file that `--format jsonl` wrote",
                        "name another --output",
                    )
                self.keys.add(key)

    def finished(self, item: InputItem) -> bool:
        return item.key in self.keys

    def begin(self) -> None:
        if not self.resume:
            self.path.write_bytes(b"")
        elif self.path.exists():
            drop_torn_tail(self.path)

    def segment(self, item: InputItem, segment: Segment) -> None:
        pass

    def done(self, item: InputItem, transcript: Transcript) -> Path:
        append_row(self.path, text_and_json.jsonl(transcript).encode("utf-8", "replace"))
        self.keys.add(item.key)
        return self.path


def choose_sink(
    form: str, output: str | None, items: Sequence[InputItem], *, lists: Sequence[Path] = (), resume: bool = False
) -> TranscriptSink:
    """Returns the sink for `--format` and `--output`. Raises OptionError.

    jsonl goes into one file; other formats into a folder, or into one file if there is one input and the name has
    a suffix. `lists` are files that were read to find the inputs, and so must not be written.
    """
    several = len(items) > 1
    if output is None:
        if resume:
            raise OptionError("--resume without --output", "what is done is looked up there", "add --output DIR")
        return StdoutSink(form, several)
    target = Path(output)
    into_folder = is_folder(output)
    if form == "jsonl":
        path = target / "transcripts.jsonl" if into_folder else target
        check_inputs_not_overwritten([path], items, lists)
        return JsonLinesSink(path, resume=resume)
    if into_folder:
        if target.exists() and not target.is_dir():
            raise OptionError(f"--output {output} is a file", "a folder, or a file name with a suffix")
        paths = plan_output_paths(items, target, transcript_format(form).suffix)
        check_inputs_not_overwritten(paths.values(), items, lists)
        return FileSink(form, paths, target, resume=resume)
    if several:
        raise OptionError(
            f"--output {output} is one file and there are {len(items)} inputs",
            "a folder, or one jsonl file",
            "name a folder, or add --format jsonl",
        )
    paths = {item.key: target for item in items}
    check_inputs_not_overwritten(paths.values(), items, lists)
    return FileSink(form, paths, resume=resume)


def choose_format(form: str | None, output: str | None) -> str:
    """Returns --format, or that of --output's suffix, or text for a folder or stdout. Raises OptionError."""
    if form is not None:
        return transcript_format(form, param="--format").name
    if output is None or is_folder(output):
        return "text"
    suffixes: dict[str, TranscriptFormat] = {}
    for row in TRANSCRIPT_FORMATS.values():
        suffixes.setdefault(row.suffix, row)
    suffix = Path(output).suffix
    for row in suffixes.values():
        if suffix.lower() == row.suffix.lower():
            return row.name
    raise OptionError(
        f"--output {output} ends in {suffix}, which says no format",
        f"a folder, or a file that ends in {', '.join(suffixes)}",
        suggest_name(suffix, list(suffixes)) or "add --format to have it under this name",
    )


def is_folder(output: str) -> bool:
    """Returns whether --output names a folder: an existing one, or a name that ends as a folder's."""
    target = Path(output)
    return target.is_dir() or output.endswith(os.sep) or not target.suffix


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"cannot make the folder {folder}: {error.strerror}", "a --output that can be written"
        ) from error


def is_complete(path: Path, form: str) -> bool:
    """Returns whether the file exists and is valid for its format; one that another program damaged is made again."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    row = transcript_format(form)
    if row.media_type == JSON:
        try:
            msgspec.json.decode(content)
        except msgspec.DecodeError:
            return False
    return content.startswith(row.signature.encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Writes under another name, then renames: a reader sees all of it or nothing, even after a crash."""
    with replaced_file(path) as part, part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def append_row(path: Path, line: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(line)


def read_rows(path: Path) -> Iterator[dict[str, object]]:
    """Yields the JSON objects of a jsonl file. A torn last line is skipped. Raises OptionError for others."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                if line.endswith(b"\n"):
                    raise OptionError(f"{path}, line {number}: not JSON ({error})", ONE_OBJECT) from None
                return
            if not isinstance(row, dict):
                raise OptionError(f"{path}, line {number}: a JSON {type(row).__name__}", ONE_OBJECT)
            yield row


def drop_torn_tail(path: Path) -> None:
    """Removes an incomplete last line; completes one that only lacks its line feed."""
    with path.open("r+b") as file:
        end = 0
        line = b""
        for line in file:
            end += len(line)
        if not line or line.endswith(b"\n"):
            return
        try:
            msgspec.json.decode(line)
        except msgspec.DecodeError:
            file.truncate(end - len(line))
        else:
            file.seek(end)
            file.write(b"\n")
