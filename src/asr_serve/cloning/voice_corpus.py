"""Corpus of voices on disk: PCM, text, phoneme durations and pitch.

A folder holds three files for each voice: `NAME.i16`, 22.05 kHz mono end to end; `NAME.f0`, float32 in Hz, a value
for each mel frame, 0 where unvoiced; `NAME.jsonl`, an utterance a line. A line is written last: incomplete data of
an interrupted run is truncated by the next.
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
"""Root mean square that speech is normalized to, over blocks that are at most RANGE_DB below the loudest."""


class CorpusUtterance(msgspec.Struct, frozen=True):
    """Utterance. `frames`: mel frames of each phoneme; they add up to the whole utterance."""

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
    """Files of one voice. Opening them for writing truncates incomplete data."""

    def __init__(self, folder: Path, name: str, *, write: bool = False) -> None:
        self.name = name
        self._pcm, self._f0, self._lines = (folder / f"{name}.{kind}" for kind in ("i16", "f0", "jsonl"))
        if write:
            folder.mkdir(parents=True, exist_ok=True)
            for path in (self._pcm, self._f0, self._lines):
                path.touch()
        elif not self._lines.is_file():
            raise OptionError(f"{self._lines} is not there", "the three files of a voice", param="speech")
        content = self._lines.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        self.lines = [msgspec.json.decode(line, type=CorpusUtterance) for line in complete.splitlines()]
        self.samples = sum(line.samples for line in self.lines)
        self.frames = sum(sum(line.frames) for line in self.lines)
        if write:
            for path, size in (
                (self._lines, len(complete)),
                (self._pcm, 2 * self.samples),
                (self._f0, 4 * self.frames),
            ):
                with path.open("r+b") as file:
                    file.truncate(size)

    @property
    def minutes(self) -> float:
        return self.samples / RATE_HZ / 60

    def append(self, line: CorpusUtterance, pcm: np.ndarray, f0: np.ndarray) -> None:
        """Appends an utterance: `pcm` (samples,) float32, `f0` (frames,)."""
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
    """Opens the non-empty corpora of a folder, by name. Raises OptionError where there is none."""
    corpora = [VoiceCorpus(folder, path.stem) for path in sorted(folder.glob("*.jsonl"))]
    corpora = [voice for voice in corpora if voice.lines]
    if not corpora:
        raise OptionError(f"{folder} holds no speech", "a folder that asr-serve train voice has filled", param="speech")
    return corpora


def normalize_level(pcm: np.ndarray) -> np.ndarray:
    """Normalizes speech (n,) float at 22.05 kHz to LEVEL. Silence stays unchanged."""
    rms = speech_rms(pcm)
    if not rms:
        return pcm
    gain = LEVEL / rms
    return (pcm * min(gain, 0.99 / float(np.abs(pcm).max()))).astype(np.float32)


def speech_rms(pcm: np.ndarray) -> float:
    """Returns the root mean square of the loud blocks, see RANGE_DB. 0 where there is no sound."""
    size = RATE_HZ // 50
    if len(pcm) < size:
        return 0.0
    power = (pcm[: len(pcm) // size * size].reshape(-1, size) ** 2).mean(1)
    loud = power[power > power.max() * 10 ** (-RANGE_DB / 10)]
    return float(np.sqrt(loud.mean())) if len(loud) else 0.0
