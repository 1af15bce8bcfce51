"""The speech the benches run on: read once, decoded once, handed to every system as the same arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
from numpy.typing import NDArray

Audio = NDArray[np.float32]
RATE_HZ = 16_000


class Clip(NamedTuple):
    path: str
    audio: Audio
    text: str


def read_transcripts(folder: Path) -> list[tuple[str, str]]:
    """(relative path, text) for each line of transcripts.tsv: `relative/path.flac<TAB>text`."""
    table = folder / "transcripts.tsv"
    if not table.is_file():
        raise SystemExit(f"{table}: not found; it holds lines of: relative/path.flac<TAB>text")
    pairs = []
    for number, line in enumerate(table.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        path, tab, text = line.partition("\t")
        if not tab or not path.strip():
            raise SystemExit(f"{table}:{number}: expected relative/path.flac<TAB>text, got {line[:60]!r}")
        pairs.append((path.strip(), text.strip()))
    if not pairs:
        raise SystemExit(f"{table}: no line with a clip in it")
    return pairs


def spread(count: int, wanted: int | None) -> list[int]:
    """`wanted` places out of `count`, evenly spread: the first ones alone would all be one speaker."""
    if wanted is None or wanted >= count:
        return list(range(count))
    return [place * count // wanted for place in range(wanted)]


def load(folder: Path, wanted: int | None = None) -> list[Clip]:
    pairs = read_transcripts(folder)
    return [Clip(path, decode(folder / path), text) for path, text in (pairs[i] for i in spread(len(pairs), wanted))]


def without_text(folder: Path, wanted: int | None = None, longest_s: float = 30.0) -> list[Clip]:
    """The folder's FLAC and WAV files that are no longer, and not silent throughout; of what is said nothing is
    known."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".flac", ".wav"))
    if not files:
        raise SystemExit(f"{folder}: no FLAC or WAV file in it")
    found = [
        Clip(str(path.relative_to(folder)), decode(path), "") for path in (files[i] for i in spread(len(files), wanted))
    ]
    return [clip for clip in found if 0 < len(clip.audio) <= longest_s * RATE_HZ and clip.audio.any()]


def decode(path: Path) -> Audio:
    """16 kHz mono float32, whatever the file holds."""
    with av.open(str(path)) as container:
        to_mono = av.AudioResampler(format="flt", layout="mono", rate=RATE_HZ)
        frames = [out for frame in container.decode(audio=0) for out in to_mono.resample(frame)]
        frames += to_mono.resample(None)
        parts = [frame.to_ndarray().reshape(-1) for frame in frames]
    if not parts:
        raise SystemExit(f"{path}: no audio in it")
    return np.concatenate(parts).astype(np.float32, copy=False)


def seconds(audio: Sequence[Audio]) -> float:
    return sum(len(clip) for clip in audio) / RATE_HZ


def save(path: Path, audio: Sequence[Audio]) -> None:
    """One file that a worker maps instead of decoding again."""
    np.savez(path, flat=np.concatenate(audio), lengths=np.array([len(clip) for clip in audio]))


def restore(path: Path) -> list[Audio]:
    with np.load(path) as saved:
        return np.split(saved["flat"], np.cumsum(saved["lengths"])[:-1])


def cut(audio: Sequence[Audio], length_s: float) -> list[Audio]:
    """The same speech as pieces of one length, clips joined end to end. The ragged end is left out."""
    flat, samples = np.concatenate(audio), round(length_s * RATE_HZ)
    flat = np.tile(flat, -(-samples // len(flat)))
    return list(flat[: len(flat) // samples * samples].reshape(-1, samples))


def write_long(path: Path, clips: Sequence[Clip], length_s: float, gap_s: float = 0.5) -> tuple[float, str]:
    """The clips over and over as one FLAC file, a pause after each. Its true length and its text.

    Written clip by clip: the whole never sits in our memory either.
    """
    gap, said, samples = np.zeros(round(gap_s * RATE_HZ), np.float32), [], 0
    with av.open(str(path), "w", format="flac") as container:
        stream = container.add_stream("flac", rate=RATE_HZ, layout="mono", format="s16")
        while samples < length_s * RATE_HZ:
            for clip in clips:
                sound = np.concatenate([clip.audio, gap])
                pcm = np.clip(np.rint(sound * 32_768), -32_768, 32_767).astype(np.int16)
                frame = av.AudioFrame.from_ndarray(pcm[None], format="s16", layout="mono")
                frame.sample_rate, frame.pts = RATE_HZ, samples
                container.mux(stream.encode(frame))
                samples += len(pcm)
                said.append(clip.text)
                if samples >= length_s * RATE_HZ:
                    break
        container.mux(stream.encode(None))
    return samples / RATE_HZ, " ".join(said)
