"""Spool of one session's audio: bounded memory between what arrives and what the server needs no more."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from asr_serve.audio.pcm import SAMPLE_BYTES
from asr_serve.edge.speech_gate import GatedSpeech, GateOutput

BLOCK_SAMPLES = 8_000
"""Samples of a block, to which smaller pieces are joined."""


class _Block(NamedTuple):
    start: int
    samples: int
    pcm: bytearray | None
    """None: silence."""
    noise: bool = False
    """Whether the silence sounds like the audio before it."""


class SpooledSilence(NamedTuple):
    """Length of a silence, and whether it sounds like the audio before it."""

    samples: int
    noise: bool


class AudioSpool:
    """Audio of one session by position, from `start` to `end`; silence costs nothing. Thread-safe.

    Full means that what comes is replaced by silence, and reported: positions stay exact.
    """

    def __init__(self, max_samples: int) -> None:
        self._max_samples = max_samples
        self._lock = threading.Lock()
        self._blocks: deque[_Block] = deque()
        self._held = 0
        """Samples that take memory."""
        self.start = self.end = 0
        self.ended = False
        self.discarded_samples = 0
        self._noise_known = False
        """Whether the audio before the end is here."""
        self.speech_samples = 0
        """Samples appended that are no silence."""

    def append(self, audio: GateOutput) -> int:
        """Appends; returns how many samples of speech there was no room for. What comes after the end has no position:
        its speech is counted as discarded."""
        with self._lock:
            if self.ended:
                self.discarded_samples += len(audio.samples) if isinstance(audio, GatedSpeech) else 0
                return 0
            if isinstance(audio, GatedSpeech):
                if self._held + len(audio.samples) > self._max_samples:
                    self._append_silence(len(audio.samples), noise=False)
                    self._noise_known = False
                    self.discarded_samples += len(audio.samples)
                    return len(audio.samples)
                self._append_pcm(audio.samples.astype("<i2", copy=False).tobytes())
            else:
                self._append_silence(audio.count, noise=audio.noise and self._noise_known)
        return 0

    def close(self) -> None:
        """Marks the end: nothing is appended any more."""
        with self._lock:
            self.ended = True

    def read(self, position: int, max_samples: int) -> bytes | SpooledSilence:
        """Returns what begins at `position`, up to `max_samples`: samples, 16-bit little-endian, or a
        silence. Nothing where the spool ends."""
        with self._lock:
            assert self.start <= position <= self.end, (self.start, position, self.end)
            for block in self._blocks:
                skip = position - block.start
                if skip < block.samples:
                    count = min(block.samples - skip, max_samples)
                    if block.pcm is None:
                        return SpooledSilence(count, block.noise)
                    return bytes(block.pcm[skip * SAMPLE_BYTES : (skip + count) * SAMPLE_BYTES])
        return b""

    def trim(self, position: int) -> None:
        """Drops whole blocks before `position`, which is not read again."""
        with self._lock:
            while self._blocks and self._blocks[0].start + self._blocks[0].samples <= position:
                block = self._blocks.popleft()
                self._held -= 0 if block.pcm is None else block.samples
                self.start = block.start + block.samples

    def _append_pcm(self, pcm: bytes) -> None:
        samples = len(pcm) // SAMPLE_BYTES
        last = self._blocks[-1] if self._blocks else None
        if last is not None and last.pcm is not None and last.samples + samples <= BLOCK_SAMPLES:
            last.pcm.extend(pcm)
            self._blocks[-1] = _Block(last.start, last.samples + samples, last.pcm)
        else:
            self._blocks.append(_Block(self.end, samples, bytearray(pcm)))
        self._noise_known = True
        self._held += samples
        self.speech_samples += samples
        self.end += samples

    def _append_silence(self, samples: int, *, noise: bool) -> None:
        last = self._blocks[-1] if self._blocks else None
        if last is not None and last.pcm is None and last.noise == noise:
            self._blocks[-1] = _Block(last.start, last.samples + samples, None, noise)
        else:
            self._blocks.append(_Block(self.end, samples, None, noise))
        self.end += samples
