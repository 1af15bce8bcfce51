"""Labelling of recordings by the agreement of two models; the entry point of this package.

A word on which two different models agree is seldom wrong, and where they differ at least one is: so the character
error rate between their hypotheses selects training data without any reference (NVIDIA calls it CER-Hypo). Both
models use the same voice activity detection and the same limit, so that their segments have the same times.

Source  pseudo-labels, and why to filter them: Kahn et al., "Self-training for end-to-end speech recognition",
        arXiv:1909.09116
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Literal, Protocol, get_args

import msgspec

from asr_serve.audio.input_manifest import InputItem
from asr_serve.errors import AsrServeError, OptionError
from asr_serve.models.registry import AsrCard, TtsCard, wrong_model
from asr_serve.pipelines.offline.transcribe import Event, FileDone, FileFailed, Progress
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.pipelines.segments import PADDING_MS
from asr_serve.types import Segment, Transcript, unknown_name_error
from asr_serve.units import samples_to_s
from asr_serve_tools.label.error_rate import error_rate, plain_text
from asr_serve_tools.label.label_store import LabelRow, LabelStore

LabelUnit = Literal["segment", "file"]


class LabelingModel(Protocol):
    """Interface of a model for labelling; `asr_serve.load` returns one."""

    def events(
        self, items: Iterable[InputItem], options: TranscribeOptions | None = None
    ) -> Generator[Event, None, None]: ...


class LabelingFailure(msgspec.Struct, frozen=True):
    key: str
    error: AsrServeError


def check_label_options(names: Sequence[str], threshold: float, unit: str) -> None:
    """Raise OptionError for names, threshold or unit out of range."""
    if len(names) != 2 or names[0] == names[1]:
        raise OptionError(f"--models {','.join(names)}", "two different models, like moonshine-tiny-en,whisper-tiny-en")
    if not 0 <= threshold <= 1:
        raise OptionError(f"--threshold {threshold}", "a character error rate from 0 to 1")
    if unit not in get_args(LabelUnit):
        raise unknown_name_error("--per", unit, get_args(LabelUnit))


def split_writable_items(items: Iterable[InputItem]) -> tuple[list[InputItem], list[LabelingFailure]]:
    """Items whose paths fit in a manifest, which is UTF-8, and failures for the others."""
    good, failures = list[InputItem](), list[LabelingFailure]()
    for item in items:
        try:
            str(item.source).encode()
        except UnicodeEncodeError:
            error = OptionError("a name that is not UTF-8", "a path that a manifest can hold", "rename the file")
            failures.append(LabelingFailure(item.key, error))
        else:
            good.append(item)
    return good, failures


def max_segment_ms(cards: Iterable[AsrCard | TtsCard]) -> int:
    """Longest segment in ms that all models accept, without padding. Raises WrongModel for a speech synthesis model."""
    limits = []
    for card in cards:
        if not isinstance(card, AsrCard):
            raise wrong_model(card.name, AsrCard)
        limits.append(card.max_segment_ms)
    return min(limits) - 2 * PADDING_MS


def label_recordings(
    models: Sequence[LabelingModel],
    names: Sequence[str],
    items: Sequence[InputItem],
    options: TranscribeOptions,
    record: LabelStore,
    unit: LabelUnit,
    progress: Callable[[int, int | None], None] = lambda done, total: None,
) -> list[LabelingFailure]:
    """Label recordings in order: a recording's rows are written when both models have processed it. Returns
    failures of recordings that cannot be read; the others continue. Holds one recording's text at a time."""
    failures: list[LabelingFailure] = []
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(contextlib.closing(model.events(items, options))) for model in models)
        for item in items:
            ended = [_file(first, progress), _file(second, lambda done, total: None)]
            failed = next((event for event in ended if isinstance(event, FileFailed)), None)
            if failed is not None:
                failures.append(LabelingFailure(item.key, failed.error))
                continue
            one, other = (event.transcript for event in ended if isinstance(event, FileDone))
            path = item.source if isinstance(item.source, str) else str(item.source)
            found = _of_file if unit == "file" else _of_segments
            record.append_file(path, one.duration_s, list(found(path, names, one, other)))
    return failures


def _file(events: Iterator[Event], progress: Callable[[int, int | None], None]) -> FileDone | FileFailed:
    """Final event of the next file."""
    for event in events:
        if isinstance(event, Progress):
            progress(event.audio_samples, event.total_samples)
        elif isinstance(event, FileDone | FileFailed):
            return event
    raise AssertionError("a model ends every file")


def _of_segments(path: str, names: Sequence[str], one: Transcript, other: Transcript) -> Iterator[LabelRow]:
    """A row for each segment of either transcript."""
    texts = [{(s.start_samples, s.end_samples): s for s in transcript.segments} for transcript in (one, other)]
    for span in sorted(texts[0].keys() | texts[1].keys()):
        text, other_text = (_text(transcript.get(span)) for transcript in texts)
        start, end = map(samples_to_s, span)
        yield _row(
            path, start, end - start, names, text, other_text, error_rate(plain_text(text), plain_text(other_text))
        )


def _of_file(path: str, names: Sequence[str], one: Transcript, other: Transcript) -> Iterator[LabelRow]:
    """One row for the file. Its error rate is computed segment by segment, so that no comparison is too long."""
    rows = list(_of_segments(path, names, one, other))
    if not rows:
        return
    lengths = [len(plain_text(row.text)) for row in rows]
    errors = sum(
        row.cer * length if length else len(plain_text(row.hypotheses[names[1]]))
        for row, length in zip(rows, lengths, strict=True)
    )
    cer = errors / sum(lengths) if sum(lengths) else 1.0
    yield _row(path, 0.0, one.duration_s, names, one.text, other.text, cer)


def _row(
    path: str, offset: float, duration: float, names: Sequence[str], text: str, other_text: str, cer: float
) -> LabelRow:
    return LabelRow(path, offset, duration, text, round(cer, 4), {names[0]: text, names[1]: other_text})


def _text(segment: Segment | None) -> str:
    return "" if segment is None else segment.text
