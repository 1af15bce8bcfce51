"""Datasets of an evaluation: a folder or a list, to clips with references and a digest.

FOLDER/transcripts.tsv    lines of relative/path.flac<TAB>text, as bench/clips.py reads them
FOLDER/*.rttm             speakers of the recordings whose names they have; with or without transcripts.tsv
LIST.jsonl                manifest of NeMo: the audio's path and `text` in each line
wav.scp                   Kaldi's, with the file `text` beside it
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec

from asr_serve.audio.input_manifest import AUDIO_SUFFIXES, JSONL_SUFFIX, KALDI_SUFFIX, expand_inputs
from asr_serve.errors import OptionError, SourceNotFound
from asr_serve.evaluation.store import EvaluatedDataset
from asr_serve.types import SpeakerTurn
from asr_serve_tools.evaluate.clip_scores import guess_language
from asr_serve_tools.evaluate.diarization_error import read_rttm

TRANSCRIPTS = "transcripts.tsv"
MOST_CLIPS = 1_000_000


class EvaluationClip(msgspec.Struct, frozen=True):
    path: str
    """Relative to the dataset's folder where it is inside."""
    file: Path
    reference: str | None
    """None: no transcript, speakers alone."""
    turns: tuple[SpeakerTurn, ...] | None = None
    """None: no reference of who speaks."""


class ClipList(msgspec.Struct, frozen=True):
    dataset: EvaluatedDataset
    clips: tuple[EvaluationClip, ...]

    @property
    def has_turns(self) -> bool:
        return any(clip.turns is not None for clip in self.clips)


def read_clips(source: Path, most_clips: int | None = None, language: str | None = None) -> ClipList:
    """Reads a dataset. `most_clips`: only so many, spread evenly over the list: a dataset of its own. `language`: its
    code; None: by the script of its transcripts.

    Raises SourceNotFound for a missing list or audio file, OptionError for a line that is wrong, or a list without
    a clip.
    """
    if source.is_dir():
        folder, found = source, list(_folder(source))
    elif not source.is_file():
        raise SourceNotFound(
            f"there is no dataset at {source}", f"a folder with {TRANSCRIPTS}, or a list", "check --data"
        )
    else:
        folder, found = source.parent, list(_list(source))
    if not found:
        raise OptionError(
            f"{source} lists no clip", f"a folder with {TRANSCRIPTS} (path, tab, text) or .rttm files, or a list"
        )
    if (repeated := len(found) - len({clip.path for clip in found})) > 0:
        raise OptionError(f"{source} lists {repeated} clips twice", "each clip once")
    if most_clips is not None and most_clips < len(found):
        found = [found[place * len(found) // most_clips] for place in range(most_clips)]
    texts = [clip.reference for clip in found if clip.reference]
    dataset = EvaluatedDataset(
        name=source.name if source.is_dir() else f"{folder.absolute().name}/{source.name}",
        folder=str(folder.absolute()),
        sha256=_digest(found),
        language=language or guess_language(texts),
        clips=len(found),
    )
    return ClipList(dataset, tuple(found))


def _folder(folder: Path) -> Iterator[EvaluationClip]:
    turns: dict[str, tuple[SpeakerTurn, ...]] = {}
    for path in sorted(folder.glob("*.rttm")):
        own = read_rttm(path)
        if len(own) == 1:  # the file's name is the recording's, whatever stands in it
            turns[path.stem] = tuple(next(iter(own.values())))
        turns.update((name, tuple(found)) for name, found in own.items())
    table = folder / TRANSCRIPTS
    if table.is_file():
        for number, line in enumerate(_text(table).splitlines(), start=1):
            if not line.strip():
                continue
            path_written, tab, text = line.partition("\t")
            if not tab or not path_written.strip():
                raise OptionError(f"{table}, line {number}: {line[:80]!r}", "relative/path.flac, a tab, and the text")
            file = folder / path_written.strip()
            yield EvaluationClip(path_written.strip(), file, text.strip(), turns.get(file.stem))
        return
    if not turns:
        raise SourceNotFound(
            f"{folder} has no {TRANSCRIPTS} and no .rttm file",
            "lines of relative/path.flac, a tab, and the text",
            "write one; docs/evaluation.md shows it",
        )
    for item in expand_inputs([folder]):
        file = Path(str(item.source))
        if file.suffix.lower() in AUDIO_SUFFIXES and file.stem in turns:
            yield EvaluationClip(file.relative_to(folder).as_posix(), file, None, turns[file.stem])


def _list(path: Path) -> Iterator[EvaluationClip]:
    match path.suffix.lower():
        case suffix if suffix == JSONL_SUFFIX:
            lines = [line for line in _text(path).splitlines() if line.strip()]
            for number, (line, item) in enumerate(zip(lines, expand_inputs([path]), strict=True), start=1):
                text = msgspec.json.decode(line).get("text")
                if not isinstance(text, str):
                    raise OptionError(f"{path}, entry {number}: no text", "`text` is the transcript")
                yield _listed(path, Path(str(item.source)), text)
        case suffix if suffix == KALDI_SUFFIX:
            split = (line.split(maxsplit=1) for line in _text(path.with_name("text")).splitlines() if line.strip())
            texts = {parts[0]: parts[1] if len(parts) > 1 else "" for parts in split}
            for item in expand_inputs([path]):
                if item.key not in texts:
                    raise OptionError(f"{path.with_name('text')} has no {item.key}", f"a line for each of {path.name}")
                yield _listed(path, Path(str(item.source)), texts[item.key].strip())
        case _:
            raise OptionError(
                f"the list {path}",
                f"a folder with {TRANSCRIPTS}, a .jsonl manifest with `text`, or wav.scp beside `text`",
            )


def _listed(path: Path, file: Path, text: str) -> EvaluationClip:
    inside = file.is_relative_to(path.parent)
    return EvaluationClip(file.relative_to(path.parent).as_posix() if inside else str(file), file, text)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as failure:
        raise SourceNotFound(f"{path} cannot be read: {failure.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(f"{path} is not text", "UTF-8") from None


def _digest(clips: list[EvaluationClip]) -> str:
    """SHA-256 of names, sizes and references: what was recorded anew has another size."""
    digest = hashlib.sha256()
    for clip in itertools.islice(clips, MOST_CLIPS):
        try:
            size = clip.file.stat().st_size
        except OSError as failure:
            raise SourceNotFound(
                f"{clip.file}: {failure.strerror}", "every clip of the list", "check the list"
            ) from None
        row = (clip.path, size, clip.reference, [(t.speaker, t.start_samples, t.end_samples) for t in clip.turns or ()])
        digest.update(msgspec.json.encode(row) + b"\n")
    return digest.hexdigest()
