"""START HERE: two models hear the same recordings; what they agree on is kept as labels.

A word that two different models hear alike is seldom wrong, and where they differ one of them is: so the
character error rate between their hypotheses tells, without any reference, what to learn from (NVIDIA calls it
CER-Hypo). Both cut by the same voice activity and the same limit, so that their segments have the same times.

Source  pseudo-labels, and why to filter them: Kahn et al., "Self-training for end-to-end speech recognition",
        arXiv:1909.09116
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Literal, Protocol, get_args

import msgspec

from asr_serve.audio.manifest import Item
from asr_serve.errors import AsrServeError, OptionError, WrongModel
from asr_serve.label.agreement import error_rate, plain
from asr_serve.label.record import Record, Row
from asr_serve.models.card import Card, VoiceCard
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.pipelines.transcribe import Event, FileDone, FileFailed, Progress
from asr_serve.pipelines.utterance import CONTEXT_MS
from asr_serve.types import Segment, Transcript
from asr_serve.units import samples_to_s
from asr_serve.values import unknown

Unit = Literal["segment", "file"]


class Hearer(Protocol):
    """What is needed of a model; `asr_serve.load` returns one."""

    def events(
        self, items: Iterable[Item], options: TranscribeOptions | None = None
    ) -> Generator[Event, None, None]: ...


class Failure(msgspec.Struct, frozen=True):
    key: str
    error: AsrServeError


def expect(names: Sequence[str], threshold: float, unit: str) -> None:
    """Raises OptionError."""
    if len(names) != 2 or names[0] == names[1]:
        raise OptionError(
            f"--models {','.join(names)}", "two different models, like moonshine-tiny-en,whisper-tiny-en"
        )
    if not 0 <= threshold <= 1:
        raise OptionError(f"--threshold {threshold}", "a character error rate from 0 to 1")
    if unit not in get_args(Unit):
        raise unknown("--per", unit, get_args(Unit))


def writable(items: Iterable[Item]) -> tuple[list[Item], list[Failure]]:
    """Those whose paths a manifest can hold, which is UTF-8, as not every file's name is; and the others."""
    good, failures = list[Item](), list[Failure]()
    for item in items:
        try:
            str(item.source).encode()
        except UnicodeEncodeError:
            error = OptionError("a name that is not UTF-8", "a path that a manifest can hold", "rename the file")
            failures.append(Failure(item.key, error))
        else:
            good.append(item)
    return good, failures


def limit_ms(cards: Iterable[Card | VoiceCard]) -> int:
    """The longest segment that all models hear. Raises WrongModel for one that speaks."""
    limits = []
    for card in cards:
        if not isinstance(card, Card):
            raise WrongModel(f"the model {card.name} speaks, and hears nothing", "two models that hear")
        limits.append(card.max_segment_ms)
    return min(limits) - 2 * CONTEXT_MS


def label(
    models: Sequence[Hearer],
    names: Sequence[str],
    items: Sequence[Item],
    options: TranscribeOptions,
    record: Record,
    unit: Unit,
    progress: Callable[[int, int | None], None] = lambda done, total: None,
) -> list[Failure]:
    """Each recording's rows go into the record when both models have heard it, in order. One that cannot be read
    is told at the end, and the others go on. Holds one recording's text at a time."""
    failures: list[Failure] = []
    with contextlib.ExitStack() as held:
        first, second = (held.enter_context(contextlib.closing(each.events(items, options))) for each in models)
        for item in items:
            ended = [_file(first, progress), _file(second, lambda done, total: None)]
            failed = next((event for event in ended if isinstance(event, FileFailed)), None)
            if failed is not None:
                failures.append(Failure(item.key, failed.error))
                continue
            one, other = (event.transcript for event in ended if isinstance(event, FileDone))
            path = item.source if isinstance(item.source, str) else str(item.source)
            found = _of_file if unit == "file" else _of_segments
            record.add(path, one.duration_s, list(found(path, names, one, other)))
    return failures


def _file(events: Iterator[Event], progress: Callable[[int, int | None], None]) -> FileDone | FileFailed:
    """The end of the next file."""
    for event in events:
        if isinstance(event, Progress):
            progress(event.audio_samples, event.total_samples)
        elif isinstance(event, FileDone | FileFailed):
            return event
    raise AssertionError("a model ends every file")


def _of_segments(path: str, names: Sequence[str], one: Transcript, other: Transcript) -> Iterator[Row]:
    """A row for each segment that either has words for."""
    texts = [{(s.start_samples, s.end_samples): s for s in each.segments} for each in (one, other)]
    for span in sorted(texts[0].keys() | texts[1].keys()):
        said, heard = (_text(each.get(span)) for each in texts)
        start, end = map(samples_to_s, span)
        yield _row(path, start, end - start, names, said, heard, error_rate(plain(said), plain(heard)))


def _of_file(path: str, names: Sequence[str], one: Transcript, other: Transcript) -> Iterator[Row]:
    """One row. Its rate is that over all characters of its segments, so that no text is too long to compare."""
    rows = list(_of_segments(path, names, one, other))
    if not rows:
        return
    lengths = [len(plain(row.text)) for row in rows]
    errors = sum(
        row.cer * length if length else len(plain(row.hypotheses[names[1]]))
        for row, length in zip(rows, lengths, strict=True)
    )
    cer = errors / sum(lengths) if sum(lengths) else 1.0
    yield _row(path, 0.0, one.duration_s, names, one.text, other.text, cer)


def _row(
    path: str, offset: float, duration: float, names: Sequence[str], said: str, heard: str, cer: float
) -> Row:
    return Row(path, offset, duration, said, round(cer, 4), {names[0]: said, names[1]: heard})


def _text(segment: Segment | None) -> str:
    return "" if segment is None else segment.text
