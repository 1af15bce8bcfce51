"""Training audio, decoded once into one file of samples for random access."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from asr_serve import units
from asr_serve.audio.input_manifest import expand_inputs
from asr_serve.audio.reader import open_audio
from asr_serve.errors import AudioError, EmptyAudio, OptionError

SHORTEST_S = 1.0
"""Least length of a recording; shorter ones are skipped."""
FULL_SCALE = 32_768


class CorpusClip(msgspec.Struct, frozen=True):
    """Position of one recording in the samples."""

    key: str
    start: int
    samples: int


class CorpusIndex(msgspec.Struct, frozen=True):
    """Decoded recordings, and the inputs that they came from."""

    inputs: list[str]
    clips: list[CorpusClip]


class AudioCorpus:
    """Recordings as 16 kHz mono int16, concatenated in `samples.i16` beside `clips.json`; memory-mapped."""

    def __init__(self, folder: Path) -> None:
        self.index = msgspec.json.decode((folder / "clips.json").read_bytes(), type=CorpusIndex)
        self.samples = np.memmap(folder / "samples.i16", np.int16, "r")

    @classmethod
    def build(cls, inputs: Sequence[str], folder: Path, say: Callable[[str], None]) -> AudioCorpus:
        """Open the corpus in `folder`, or build it from files, folders and lists. Recordings that cannot be decoded are
        reported and left out. Raises EmptyAudio when nothing remains; OptionError when `folder` holds the samples of
        other inputs."""
        if (folder / "clips.json").is_file():
            found = cls(folder)
            if found.index.inputs != list(inputs):
                raise OptionError(
                    f"audio: {', '.join(inputs)}",
                    f"{folder} was made of {', '.join(found.index.inputs)}",
                    "go on with those, or take another run folder",
                )
            return found
        folder.mkdir(parents=True, exist_ok=True)
        clips: list[CorpusClip] = []
        at = 0
        with (folder / "samples.i16").open("wb") as file:
            for item in expand_inputs(inputs):
                begin = at
                try:
                    with open_audio(item.source) as stream:
                        for chunk in stream:
                            file.write(np.round(chunk * (FULL_SCALE - 1)).astype(np.int16).tobytes())
                            at += len(chunk)
                except AudioError as failure:
                    say(f"{item.key}: {failure}")
                if at - begin >= units.s_to_samples(SHORTEST_S):
                    clips.append(CorpusClip(item.key, begin, at - begin))
        if not clips:
            raise EmptyAudio(f"no audio of {SHORTEST_S:g} s or more in {', '.join(inputs)}")
        part = folder / "clips.part"  # renamed when complete: after an interruption all is decoded again
        part.write_bytes(msgspec.json.encode(CorpusIndex(list(inputs), clips)))
        os.replace(part, folder / "clips.json")
        say(f"{len(clips)} recordings, {units.samples_to_s(sum(c.samples for c in clips)) / 3_600:.2f} hours")
        return cls(folder)

    def split(self, held_out: float) -> tuple[list[CorpusClip], list[CorpusClip]]:
        """Recordings to train on and, spread over the corpus, the share `held_out`, at least one each. Raises
        OptionError for fewer than two recordings."""
        clips = self.index.clips
        if len(clips) < 2:
            raise OptionError(f"{len(clips)} recording", "two or more: one is held out", "cut it into parts")
        period = min(len(clips), max(2, round(1 / held_out)))
        return [c for i, c in enumerate(clips) if i % period], clips[::period]

    def read(self, clip: CorpusClip, begin: int, samples: int) -> np.ndarray:
        """Samples from `begin` of a clip, up to `samples` of them, float32 in -1..1."""
        first = clip.start + begin
        return self.samples[first : min(first + samples, clip.start + clip.samples)].astype(np.float32) / FULL_SCALE
