"""Speech to learn a voice from, on disk: PCM, what was said, when each sound of it ends, and how high.

A folder has a voice in each three files: `NAME.i16`, 22.05 kHz mono end to end; `NAME.f0`, float32 in Hz, a value
for each mel frame, 0 where there is no voice; `NAME.jsonl`, an utterance a line. A line is written last: what a
run that was stopped has left half done is cut off by the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from asr_serve.errors import OptionError

RATE_HZ, HOP = 22_050, 256
FULL_SCALE = 32_767
LEVEL, RANGE_DB = 0.1, 40.0
"""Root mean square that all speech is brought to, over the stretches that are no more than RANGE_DB below the
loudest."""


class CorpusUtterance(msgspec.Struct, frozen=True):
    """An utterance. `frames`: mel frames of each phoneme; together they are all of it."""

    text: str
    phonemes: str
    samples: int
    frames: list[int]


class VoiceRecording(NamedTuple):
    voice: str
    line: CorpusUtterance
    pcm: np.ndarray
    """(samples,) int16."""
    f0: np.ndarray
    """(frames,) float32, Hz."""


class VoiceCorpus:
    """One voice's files. Opening them for writing cuts off what is half there."""

    def __init__(self, folder: Path, name: str, *, write: bool = False) -> None:
        self.name = name
        self._pcm, self._f0, self._lines = (folder / f"{name}.{kind}" for kind in ("i16", "f0", "jsonl"))
        if write:
            folder.mkdir(parents=True, exist_ok=True)
            for path in (self._pcm, self._f0, self._lines):
                path.touch()
        elif not self._lines.is_file():
            raise OptionError(f"{self._lines} is not there", "the three files of a voice", param="speech")
        whole = self._lines.read_bytes()
        kept = whole[: whole.rfind(b"\n") + 1]
        self.lines = [msgspec.json.decode(line, type=CorpusUtterance) for line in kept.splitlines()]
        self.samples = sum(line.samples for line in self.lines)
        self.frames = sum(sum(line.frames) for line in self.lines)
        if write:
            for path, size in (
                (self._lines, len(kept)),
                (self._pcm, 2 * self.samples),
                (self._f0, 4 * self.frames),
            ):
                with path.open("r+b") as file:
                    file.truncate(size)

    @property
    def minutes(self) -> float:
        return self.samples / RATE_HZ / 60

    def append(self, line: CorpusUtterance, pcm: np.ndarray, f0: np.ndarray) -> None:
        """`pcm` (samples,) float32, `f0` (frames,)."""
        assert (len(pcm), len(f0)) == (line.samples, sum(line.frames))
        with self._pcm.open("ab") as file:
            file.write(np.round(pcm * FULL_SCALE).clip(-FULL_SCALE, FULL_SCALE).astype(np.int16).tobytes())
        with self._f0.open("ab") as file:
            file.write(f0.astype(np.float32).tobytes())
        with self._lines.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
        self.lines.append(line)
        self.samples += line.samples
        self.frames += sum(line.frames)

    def __iter__(self) -> Iterator[VoiceRecording]:
        pcm = np.memmap(self._pcm, np.int16, "r") if self.samples else np.zeros(0, np.int16)
        f0 = np.memmap(self._f0, np.float32, "r") if self.frames else np.zeros(0, np.float32)
        sample = frame = 0
        for line in self.lines:
            frames = sum(line.frames)
            yield VoiceRecording(self.name, line, pcm[sample : sample + line.samples], f0[frame : frame + frames])
            sample += line.samples
            frame += frames


def open_voice_corpora(folder: Path) -> list[VoiceCorpus]:
    """Those in a folder that have anything, by name. Raises OptionError where there is none."""
    found = [VoiceCorpus(folder, path.stem) for path in sorted(folder.glob("*.jsonl"))]
    found = [voice for voice in found if voice.lines]
    if not found:
        raise OptionError(
            f"{folder} holds no speech", "a folder that asr-serve train voice has filled", param="speech"
        )
    return found


def normalize_level(pcm: np.ndarray) -> np.ndarray:
    """(n,) float at 22.05 kHz, as loud as all other speech here. Silence stays what it is."""
    found = speech_rms(pcm)
    if not found:
        return pcm
    gain = LEVEL / found
    return (pcm * min(gain, 0.99 / float(np.abs(pcm).max()))).astype(np.float32)


def speech_rms(pcm: np.ndarray) -> float:
    """Root mean square of what is spoken, see RANGE_DB. 0 where nothing is."""
    size = RATE_HZ // 50
    if len(pcm) < size:
        return 0.0
    power = (pcm[: len(pcm) // size * size].reshape(-1, size) ** 2).mean(1)
    loud = power[power > power.max() * 10 ** (-RANGE_DB / 10)]
    return float(np.sqrt(loud.mean())) if len(loud) else 0.0
