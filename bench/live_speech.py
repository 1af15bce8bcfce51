"""What the callers of the live bench say, and when: clips with pauses between, in packets on a clock.

Positions are samples since the caller's first one. Every clip starts on a window of voice activity, so that what
Silero says of a clip holds wherever it is spoken. Imports numpy and no more: peers' environments read this too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RATE_HZ = 16_000
WINDOW_SAMPLES = 512
WINDOW_MS = 32
PACKET_SAMPLES = 1_600
SPEECH = 0.5
"""Silero is read at one half, by the engine too."""

Pcm = NDArray[np.int16]
Voiced = NDArray[np.bool_]
"""For every window of a caller's audio, whether Silero hears speech in it."""


class Caller(NamedTuple):
    clips: list[int]
    """Which clips, in the order they are spoken."""
    starts: list[int]
    """Sample at which each of them starts."""
    samples: int
    """All there is. The last clip has no pause after it: STOP comes at once."""


def plan(order: Iterator[int], lengths: Sequence[int], pause: int, limit: int) -> Caller:
    """Clips as `order` brings them, those left out that would not end before `limit` samples, until none would.

    At least one: the shortest is spoken whatever the limit.
    """
    clips: list[int] = []
    starts: list[int] = []
    at, samples, shortest = 0, 0, min(lengths)
    while not clips or at + shortest <= limit:
        clip = next(order)
        if at + lengths[clip] > max(limit, at + shortest if not clips else 0):
            continue
        clips.append(clip)
        starts.append(at)
        samples = at + lengths[clip]
        at += windows(lengths[clip] + pause) * WINDOW_SAMPLES
    return Caller(clips, starts, samples)


def windows(samples: int) -> int:
    """Windows that hold so many samples, the last one perhaps in part."""
    return -(-samples // WINDOW_SAMPLES)


def stream(caller: Caller, clips: Sequence[Pcm]) -> Pcm:
    """All the caller's samples, silence between the clips."""
    whole = np.zeros(caller.samples, np.int16)
    for clip, start in zip(caller.clips, caller.starts, strict=True):
        whole[start : start + len(clips[clip])] = clips[clip]
    return whole


def voiced(caller: Caller, probabilities: Sequence[Sequence[float]]) -> Voiced:
    """Where the caller speaks. probabilities: of each clip and the pause after it, window by window."""
    whole = np.zeros(windows(caller.samples), np.bool_)
    for clip, start in zip(caller.clips, caller.starts, strict=True):
        part = whole[start // WINDOW_SAMPLES :]
        heard = np.asarray(probabilities[clip])[: len(part)] >= SPEECH
        part[: len(heard)] = heard
    return whole


def begins_s(callers: int, seconds: float, most_s: float = 8.0) -> list[float]:
    """When each of them calls: evenly over one clip and its pause, or a quarter of the time there is."""
    spread_s = min(most_s, seconds / 4)
    return [spread_s * number / callers for number in range(callers)]


def packets(samples: int) -> list[tuple[int, int]]:
    """First sample and end of each packet; the last may be short."""
    return [(at, min(at + PACKET_SAMPLES, samples)) for at in range(0, samples, PACKET_SAMPLES)]


def due_s(end: int, speed: float = 1.0) -> float:
    """When a packet is due: its last sample has just been spoken, `speed` times as fast as people speak."""
    return end / RATE_HZ / speed


class Pace:
    """One caller's clock: how the packets went that were due at fixed times.

    A packet that could not go because the one before it was still being taken counts from when it was due, not
    from when there was time for it; else a slow system would be asked less often, and look quick.
    """

    def __init__(self, begun_s: float, speed: float = 1.0) -> None:
        self.begun_s, self.speed = begun_s, speed
        self.moments_s: list[float] = []
        """When each packet was given, or should have been."""
        self.waits_s: list[float] = []
        """How long each was not taken after that."""
        self.lags_s: list[float] = []
        """How late we ourselves were."""
        self._free_s = -1.0e9

    def took(self, end: int, called_s: float, returned_s: float) -> None:
        due = self.begun_s + due_s(end, self.speed)
        moment = called_s if self._free_s <= due else due
        self.moments_s.append(moment)
        self.waits_s.append(returned_s - moment)
        self.lags_s.append(moment - due)
        self._free_s = returned_s


def machine_cpu_s() -> float:
    """Processor seconds that everything on the machine has used; 0 where there is no /proc."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, *_ = map(int, stat.read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def save(path: Path, clips: Sequence[Pcm]) -> None:
    np.savez(path, flat=np.concatenate(clips), lengths=np.array([len(clip) for clip in clips]))


def restore(path: Path) -> list[Pcm]:
    with np.load(path) as saved:
        return np.split(saved["flat"], np.cumsum(saved["lengths"])[:-1])
