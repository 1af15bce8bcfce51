"""A model that hears what a file's name says: events without an engine, for tests of the command line.

The file's bytes are its text, a segment a line. `!word` fails the file there; `wait` blocks until the process
is interrupted, after telling stdout's reader nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Self

from asr_serve.audio.input_manifest import InputItem
from asr_serve.errors import CorruptAudio, SourceNotFound, UnknownModel
from asr_serve.pipelines.offline.transcribe import FileDone, FileFailed, Progress, SegmentDone
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.types import Segment, Transcript

SEGMENT_SAMPLES = 16_000


class FakeModel:
    """`heard` are the keys it was given, `engine` what it was loaded with, `cancelled` whether the events
    were closed before their end."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.options: TranscribeOptions | None = None
        self.engine: object = None
        self.cancelled = False
        self.closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def describe(self) -> dict[str, object]:
        return {"model": "fake", "dtype": "fp32"}

    def events(
        self, items: Iterable[InputItem], options: TranscribeOptions
    ) -> Generator[SegmentDone | FileDone | FileFailed | Progress, None, None]:
        self.options = options
        finished = False
        done_samples = 0
        try:
            for index, item in enumerate(items):
                self.heard.append(item.key)
                segments: list[Segment] = []
                try:
                    lines = self.lines(item)
                    for line in lines:
                        if line == "wait":
                            threading.Event().wait()
                        if line.startswith("!"):
                            raise CorruptAudio(f"{item.key} broke", "", "record it again")
                        start = len(segments) * SEGMENT_SAMPLES
                        segments.append(Segment(start, start + SEGMENT_SAMPLES, line))
                        yield SegmentDone(index, item.key, segments[-1])
                except (CorruptAudio, SourceNotFound) as error:
                    yield FileFailed(index, item.key, error)
                    continue
                done_samples += len(segments) * SEGMENT_SAMPLES
                yield Progress(done_samples, None)
                text = " ".join(segment.text for segment in segments)
                length = len(segments) * SEGMENT_SAMPLES
                yield FileDone(index, item.key, Transcript(item.key, text, "en", length, tuple(segments), "fake"))
            finished = True
        finally:
            self.cancelled = not finished

    def lines(self, item: InputItem) -> list[str]:
        if not isinstance(item.source, str | Path):
            return item.source.read().decode().splitlines()  # type: ignore[union-attr]
        path = Path(item.source)
        if not path.is_file():
            raise SourceNotFound(f"the file {str(path)!r} does not exist", "", "check the path")
        return path.read_text().splitlines()


def load(model: str = "fake", **options: object) -> FakeModel:
    if model == "moonshine-tiny":
        raise UnknownModel(
            f"there is no model {model!r}", "models: moonshine-tiny-en", "did you mean 'moonshine-tiny-en'?"
        )
    return FakeModel()


if __name__ == "__main__":  # the command line as a process of its own, with this model in it
    import asr_serve
    from asr_serve.api.cli import main

    asr_serve.load = load  # type: ignore[assignment]
    main()
