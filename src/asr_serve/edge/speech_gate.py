"""Speech gate of one caller: lets speech through and replaces what is certainly silence by its length.

Sans I/O and without the network: windows go out, their speech probabilities come in. Positions are samples at 16 kHz
since the caller's first one. Every sample comes out exactly once, as itself or in the count of a silence, in order;
neither packets nor pauses between them make a difference.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from asr_serve.errors import OptionError
from asr_serve.units import ms_to_samples

WINDOW_SAMPLES = 512
MAX_MARGIN_MS = 10_000
PIECE_SAMPLES = 4 * WINDOW_SAMPLES
"""Samples that `append` takes at once."""


class GateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Thresholds and margins of a gate. The defaults are wider than those of endpointing (audio/endpointing.py), which
    pads segments with 250 ms: a recognizer behind the gate gets the same segments, nearly always. Measured by
    bench/edge_gate.py.

    Raises  OptionError
    """

    threshold: float = 0.3
    """Probability at which speech starts."""
    neg_threshold: float = 0.2
    """Probability from which on speech that has started goes on."""
    pre_roll_ms: int = 640
    """Audio before speech that goes with it. In silence, counts come this much later."""
    hangover_ms: int = 960
    """Audio after speech that goes with it."""
    lead_ms: int = 512
    """Audio at the beginning that goes on in any case: the engine behind the gate hears the noise of the line."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise OptionError(f"threshold is {self.threshold}", "it must be above 0 and at most 1", "try 0.3")
        if not 0 < self.neg_threshold <= self.threshold:
            raise OptionError(
                f"neg_threshold is {self.neg_threshold}",
                f"it must be above 0 and at most threshold, {self.threshold}",
                f"try {0.7 * self.threshold:.2g}",
            )
        for name in ("pre_roll_ms", "hangover_ms", "lead_ms"):
            if not 0 <= getattr(self, name) <= MAX_MARGIN_MS:
                raise OptionError(f"{name} is {getattr(self, name)}", f"it must be from 0 to {MAX_MARGIN_MS}")


class GatedSpeech(msgspec.Struct, frozen=True):
    """Audio to forward as it is."""

    samples: NDArray[np.int16]


class GatedSilence(msgspec.Struct, frozen=True):
    """Audio to forward as its length."""

    count: int
    noise: bool = False
    """Whether it sounds like the audio before it; otherwise it is digital silence."""


GateOutput = GatedSpeech | GatedSilence


class SpeechGate:
    """Gate of one caller: `append`, then `window` and `apply_probability` while there is a window, then `take`.

    State   the samples of the pre-roll and of an unfinished window, in one buffer that is allocated once
    """

    def __init__(self, config: GateConfig | None = None) -> None:
        config = config or GateConfig()
        self.config = config
        self._pre_roll = ms_to_samples(config.pre_roll_ms)
        self._hangover = ms_to_samples(config.hangover_ms)
        self._lead = ms_to_samples(config.lead_ms)
        self._buffer = np.zeros(2 * (self._pre_roll + WINDOW_SAMPLES + PIECE_SAMPLES), np.int16)
        self._start = 0
        """Position of the buffer's first sample."""
        self._end = 0
        """Samples received."""
        self._scored = 0
        """End of the windows whose probability is known."""
        self._emitted = 0
        """End of what was given out. After a flush it may be past `_scored`."""
        self._speech_until = 0
        """End of the hangover of the last speech."""
        self._speaking = False
        self._runs: list[list[NDArray[np.int16]] | int] = []
        """Outputs since the last `take`: audio in pieces, or the length of a silence."""

    @property
    def received_samples(self) -> int:
        return self._end

    @property
    def held_samples(self) -> int:
        """Samples received and not given out yet: at most the pre-roll and one window, after all windows."""
        return self._end - self._emitted

    def append(self, pcm: NDArray[np.int16]) -> int:
        """Appends the first samples of `pcm` (n,) and returns how many: all, or as many as fit before the windows that
        are ready have their probabilities."""
        oldest = min(self._emitted, self._scored)
        count = min(len(pcm), PIECE_SAMPLES - min(PIECE_SAMPLES, self._end - self._scored))
        if self._end + count - self._start > len(self._buffer):
            kept = self._buffer[oldest - self._start : self._end - self._start]
            self._buffer[: len(kept)] = kept.copy()
            self._start = oldest
        at = self._end - self._start
        self._buffer[at : at + count] = pcm[:count]
        self._end += count
        return count

    def window(self) -> NDArray[np.int16] | None:
        """Returns the next window (512,) whose probability is wanted, valid until `append`; None until there is one."""
        if self._end - self._scored < WINDOW_SAMPLES:
            return None
        at = self._scored - self._start
        return self._buffer[at : at + WINDOW_SAMPLES]

    def tail(self) -> NDArray[np.int16] | None:
        """Returns the unfinished window with zeros after it, for the end of the audio; None without one. Its
        probability goes to `finish`."""
        if self._end == self._scored:
            return None
        padded = np.zeros(WINDOW_SAMPLES, np.int16)
        padded[: self._end - self._scored] = self._buffer[self._scored - self._start : self._end - self._start]
        return padded

    def apply_probability(self, probability: float) -> None:
        """Takes the speech probability of the next window."""
        self._apply(probability, min(self._end, self._scored + WINDOW_SAMPLES))

    def _apply(self, probability: float, end: int) -> None:
        self._scored = end
        if probability >= (self.config.neg_threshold if self._speaking else self.config.threshold):
            self._speaking, self._speech_until = True, end + self._hangover
            self._emit_speech(end)
        else:
            self._emit_speech(min(end, max(self._speech_until, self._lead)))
            self._speaking = 0 < end <= self._speech_until
            self._emit_silence(end - self._pre_roll)

    def flush(self) -> None:
        """Gives out everything received, as audio: whether it is silence is not known yet."""
        self._emit_speech(self._end)

    def finish(self, tail_probability: float | None = None) -> None:
        """Gives out the rest. `tail_probability` is that of `tail()`."""
        if tail_probability is not None:
            self._apply(tail_probability, self._end)
        self._emit_silence(self._end)

    def take(self) -> list[GateOutput]:
        """Returns what is to be forwarded since the last call, in order."""
        runs, self._runs = self._runs, []
        return [
            GatedSilence(run, noise=True) if isinstance(run, int) else GatedSpeech(np.concatenate(run)) for run in runs
        ]

    def _emit_speech(self, to: int) -> None:
        if to <= self._emitted:
            return
        samples = self._buffer[self._emitted - self._start : to - self._start].copy()
        self._emitted = to
        if self._runs and isinstance(last := self._runs[-1], list):
            last.append(samples)
        else:
            self._runs.append([samples])

    def _emit_silence(self, to: int) -> None:
        if to <= self._emitted:
            return
        count, self._emitted = to - self._emitted, to
        if self._runs and isinstance(last := self._runs[-1], int):
            self._runs[-1] = last + count
        else:
            self._runs.append(count)
