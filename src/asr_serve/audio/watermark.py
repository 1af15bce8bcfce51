"""An inaudible mark in speech: whoever has the key can tell that we made it.

Time is cut into blocks of 40 ms, and what a telephone carries, 300 to 3,800 Hz, into 32 bands. What carries the
mark is the shape of a block's spectrum: the log-energies of 16 bands, added with signs, make one number; there
are two such numbers in a block. Each is moved to the nearest point of a grid, whose place is drawn from the key,
by making some bands a little louder and others a little softer, the weaker ones rather than the stronger. So the
mark follows the sound, some 40 dB below it, and nothing is in silence.

A detector with the key measures how well the numbers lie on the grid. In other sound they lie anywhere: how often
chance alone does as well can be stated exactly, whatever the sound, because the grid's places are random.

Loudness cancels out, by the signs. A gentle equaliser moves all numbers of one kind together, which the detector
does not mind; nor does it mind where the sound begins or what was cut away. Resampling, and codecs that keep the
spectrum's shape, leave most of it. Another speed, pitch or a strong echo does not: this is a mark for honest
finders, not a lock.

Source  B. Chen, G. Wornell, "Quantization index modulation", IEEE Transactions on Information Theory 47(4), 2001:
        spread-transform dither modulation. The band-energy features and the search are ours.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache

import msgspec
import numpy as np

from asr_serve.audio.pcm import to_float32
from asr_serve.audio.resample import Resampler
from asr_serve.units import RATE_HZ, ms_to_samples

BLOCK_MS = 40
LOW_HZ, HIGH_HZ, BANDS = 300, 3_800, 32
KINDS = 2
"""Numbers of a block: one of the even bands, one of the odd ones."""
STEP = 0.55
"""Of the grid, in nats of energy."""
FLOOR = 1e-3
"""Of a block's energy: a band with less has no say."""
SILENT = 1e-3
"""Root mean square below which a block is left as it is."""
PERIOD_BLOCKS = 512
"""After 20 s the grid's places come again."""
WINDOW_BLOCKS = 256
"""What a detector looks at together: less than a period, so that no place counts twice."""
STEP_MS = 1
"""How finely a detector looks for the blocks."""
LOUD = 0.7
"""How far what is added goes where it is weak rather than strong: 0, everywhere alike in decibels; 1, as little
energy as can be."""
ROUNDS = 4
"""Newton steps by which a number comes to its point."""
KEY = b"asr-serve: synthetic speech"
"""Unless another is given. It is no secret: anybody may look for the mark."""
DETECTION_SCORE = 6.0
"""A score from which on speech counts as marked: once in a million would chance do as well."""


class WatermarkDetection(msgspec.Struct, frozen=True):
    """What a detector says."""

    score: float
    """How unlikely chance is: 6 means once in a million."""

    @property
    def is_marked(self) -> bool:
        return self.score >= DETECTION_SCORE


class WatermarkEmbedder:
    """Marks one stream.

    In      pcm (n,) float32 in -1..1 at `rate_hz`, any n
    Out     as many samples, one block (40 ms) later; `end` gives the rest
    State   less than two blocks of samples, and the number of blocks so far
    """

    def __init__(self, rate_hz: int, key: bytes = KEY) -> None:
        self._rate_hz, self._grid, self._bands = rate_hz, _grid(key), _bands(rate_hz)
        self._pending = np.zeros(0, np.float32)
        self._blocks = 0

    def embed(self, pcm: np.ndarray) -> np.ndarray:
        self._pending = np.concatenate([self._pending, pcm])
        done: list[np.ndarray] = []
        while len(self._pending) >= (length := self._length()):
            done.append(self._marked(self._pending[:length]))
            self._pending = self._pending[length:]
            self._blocks += 1
        return np.concatenate(done) if done else np.zeros(0, np.float32)

    def flush(self) -> np.ndarray:
        """What is less than a block stays as it is."""
        rest, self._pending = self._pending, np.zeros(0, np.float32)
        return rest

    def _length(self) -> int:
        """Of the next block: they begin at the samples nearest to multiples of 40 ms."""
        begin = ms_to_samples(self._blocks * BLOCK_MS, self._rate_hz)
        return ms_to_samples((self._blocks + 1) * BLOCK_MS, self._rate_hz) - begin

    def _marked(self, block: np.ndarray) -> np.ndarray:
        bands = self._bands
        if math.sqrt(float(np.square(block).mean())) < SILENT:
            return block
        pcm = (
            block[: bands.length] if len(block) >= bands.length else np.pad(block, (0, bands.length - len(block)))
        )
        spectrum = np.fft.rfft(bands.window * pcm)
        changed, gains = spectrum, np.zeros(BANDS)
        cost = (np.abs(spectrum) ** 2 @ bands.spread) ** LOUD + 1e-12
        change = np.zeros(bands.length)
        target: np.ndarray | None = None
        for _ in range(ROUNDS):
            numbers, leverage = bands.numbers(changed)
            if target is None:
                place = self._grid[self._blocks % PERIOD_BLOCKS]
                target = (np.round((numbers - place) / STEP) * STEP) + place
            for kind, signs in enumerate(SIGNS):
                slope = signs * leverage / math.sqrt(BANDS / KINDS)
                cheap = slope / cost
                gains += cheap * (target[kind] - numbers[kind]) / max(float(slope @ cheap), 1e-9)
            # What is added is louder or softer bands of the windowed block, and fades at both ends.
            change = np.fft.irfft(spectrum * (bands.spread @ gains), bands.length) * bands.edges
            changed = spectrum + np.fft.rfft(bands.window * change)
        marked = block.copy()
        marked[: bands.length] += change[: len(block)].astype(np.float32)
        return marked


def embed_watermark(pcm: np.ndarray, rate_hz: int, key: bytes = KEY) -> np.ndarray:
    """All at once; see Watermark. (n,) float32 to (n,) float32."""
    mark = WatermarkEmbedder(rate_hz, key)
    return np.concatenate([mark.embed(pcm), mark.flush()])


def detect_watermark(pcm: np.ndarray, rate_hz: int, key: bytes = KEY) -> WatermarkDetection:
    """How surely `pcm` (n,), int16 or float32, bears the mark, in any part of it. A second of speech is often
    enough, five are for certain."""
    resampler = Resampler(rate_hz)
    heard = np.concatenate([resampler.resample(to_float32(pcm)), resampler.finish()])
    block, window = ms_to_samples(BLOCK_MS), ms_to_samples(BLOCK_MS * WINDOW_BLOCKS)
    starts = range(0, max(1, len(heard) - window // 2), window // 2)
    scores = [_score(heard[at : at + window + block], _grid(key)) for at in starts]
    # One more place to look is one more chance for chance.
    return WatermarkDetection(max(0.0, max(scores) - math.log10(len(scores))))


def _score(pcm: np.ndarray, grid: np.ndarray) -> float:
    """Of one window (n,) at 16 kHz: minus log10 of how likely chance does as well."""
    bands, block, step = _bands(RATE_HZ), ms_to_samples(BLOCK_MS), ms_to_samples(STEP_MS)
    places = np.exp(-2j * np.pi * grid / STEP)  # (PERIOD_BLOCKS, KINDS)
    turned = np.conj(np.fft.fft(np.conj(places), axis=0))
    best, trials = 0.0, 0
    for offset in range(0, block, step):
        blocks = pcm[offset : offset + (len(pcm) - offset) // block * block].reshape(-1, block)[:WINDOW_BLOCKS]
        loud = np.sqrt(np.square(blocks).mean(axis=1))
        use = loud > max(SILENT / 2, 0.01 * float(loud.max(initial=0)))
        if use.sum() < 8:
            continue
        numbers, _ = bands.numbers(np.fft.rfft(bands.window * blocks[:, : bands.length]))
        phases = np.zeros((PERIOD_BLOCKS, KINDS), complex)
        phases[: len(blocks)] = np.exp(2j * np.pi * numbers / STEP) * use[:, None]
        # Against the grid at every place of its period: sums of unit numbers whose angles are random by the key.
        sums = np.fft.ifft(np.fft.fft(phases, axis=0) * turned, axis=0)
        power = (np.abs(sums) ** 2).sum(axis=1) / use.sum()
        best = max(best, float(power.max()))
        trials += PERIOD_BLOCKS
    # Each of the two is exponential where the angles are random: their sum x exceeds by chance with (1 + x)
    # exp(-x).
    return max(0.0, (best - math.log1p(best) - math.log(max(1, trials))) / math.log(10))


SIGNS = np.zeros((KINDS, BANDS))
"""What is added and what taken away: as many of each, spread over the spectrum."""
for _kind in range(KINDS):
    SIGNS[_kind, _kind::KINDS] = np.tile([1, -1, -1, 1], BANDS // KINDS // 4)


class _Bands:
    """The bands of a block at one rate."""

    def __init__(self, rate_hz: int) -> None:
        self.length = length = ms_to_samples(BLOCK_MS, rate_hz)
        self.window = np.hanning(length + 2)[1:-1]
        fade = np.minimum(1, np.arange(1, length + 1) / (0.1 * length))
        self.edges = np.minimum(fade, fade[::-1])
        hz = np.fft.rfftfreq(length, 1 / rate_hz)
        width = (HIGH_HZ - LOW_HZ) / BANDS
        place = (hz - LOW_HZ) / width
        self.spread = np.zeros((len(hz), BANDS))
        """(bins, bands): which band a bin belongs to."""
        for band in range(BANDS):
            self.spread[(place >= band) & (place < band + 1), band] = 1

    def numbers(self, spectrum: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(..., bins) to the numbers (..., KINDS), and by how much a band's log-energy grows with its gain
        (..., BANDS)."""
        energy = (spectrum.real**2 + spectrum.imag**2) @ self.spread
        floor = FLOOR * energy.sum(axis=-1, keepdims=True) + 1e-12
        logs = np.log(energy + floor)
        return logs @ SIGNS.T / math.sqrt(BANDS / KINDS), 2 * energy / (energy + floor)


@cache
def _bands(rate_hz: int) -> _Bands:
    return _Bands(rate_hz)


@cache
def _grid(key: bytes) -> np.ndarray:
    """Where the grid's points lie: (PERIOD_BLOCKS, KINDS), uniform in 0..STEP."""
    wanted = PERIOD_BLOCKS * KINDS
    drawn = np.frombuffer(hashlib.shake_256(key).digest(8 * wanted), "<u8")
    return STEP * (drawn / 2.0**64).reshape(PERIOD_BLOCKS, KINDS)
