"""Inaudible watermark in synthesized speech, detectable with its key.

Time is divided into blocks of 40 ms, and the telephone band, 300 to 3,800 Hz, into 32 bands. The mark is carried
by the shape of a block's spectrum: the log-energies of 16 bands, added with signs, make one number, and a block
has two such numbers. Each is moved to the nearest point of a grid, whose offset is drawn from the key, by making
some bands a little louder and others a little softer, preferably weak ones. So the mark follows the signal, some
40 dB below it, and silence stays silent.

A detector with the key measures how well the numbers lie on the grid. In unmarked audio they lie anywhere, and the
probability of reaching a score by chance is known exactly for any audio, because the grid's offsets are random.

Loudness cancels out, by the signs. A gentle equalizer moves all numbers of one kind together, which does not
affect the detector; nor do the position of the audio and cuts. Resampling, and codecs that keep the spectrum's
shape, leave most of the mark. A change of speed or pitch, or a strong echo, destroys it: it labels speech, and
does not resist attacks.

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
"""Numbers in a block: one from the even bands, one from the odd ones."""
STEP = 0.55
"""Step of the grid, in nats of energy."""
FLOOR = 1e-3
"""Share of a block's energy below which a band has little influence."""
SILENT = 1e-3
"""Root mean square below which a block is left as it is."""
PERIOD_BLOCKS = 512
"""Blocks after which the grid's offsets repeat: 20 s."""
WINDOW_BLOCKS = 256
"""Blocks in one detector window, fewer than a period, so that no offset counts twice."""
STEP_MS = 1
"""Step of the detector's search for the start of blocks."""
LOUD = 0.7
"""Preference of changes in weak bands: 0 changes all bands by equal decibels; 1 adds the least energy."""
ROUNDS = 4
"""Newton steps that move a number to its grid point."""
KEY = b"asr-serve: synthetic speech"
"""Default key. It is public: anybody may detect the mark."""
DETECTION_SCORE = 6.0
"""Least score of marked speech, which chance reaches once in a million."""


class WatermarkDetection(msgspec.Struct, frozen=True):
    """Result of a detector."""

    score: float
    """Negative log10 of the probability of this result by chance: 6 means once in a million."""

    @property
    def is_marked(self) -> bool:
        return self.score >= DETECTION_SCORE


class WatermarkEmbedder:
    """Embeds the mark in one stream.

    In      pcm (n,) float32 in -1..1 at `rate_hz`, any n
    Out     as many samples, one block (40 ms) later; `flush` returns the rest
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
        """Remaining samples, less than a block, without a mark."""
        rest, self._pending = self._pending, np.zeros(0, np.float32)
        return rest

    def _length(self) -> int:
        """Samples of the next block; blocks begin at the samples nearest to multiples of 40 ms."""
        start = ms_to_samples(self._blocks * BLOCK_MS, self._rate_hz)
        return ms_to_samples((self._blocks + 1) * BLOCK_MS, self._rate_hz) - start

    def _marked(self, block: np.ndarray) -> np.ndarray:
        bands = self._bands
        if math.sqrt(float(np.square(block).mean())) < SILENT:
            return block
        pcm = block[: bands.length] if len(block) >= bands.length else np.pad(block, (0, bands.length - len(block)))
        spectrum = np.fft.rfft(bands.window * pcm)
        changed, gains = spectrum, np.zeros(BANDS)
        cost = (np.abs(spectrum) ** 2 @ bands.spread) ** LOUD + 1e-12
        change = np.zeros(bands.length)
        target: np.ndarray | None = None
        for _ in range(ROUNDS):
            numbers, leverage = bands.numbers(changed)
            if target is None:
                offset = self._grid[self._blocks % PERIOD_BLOCKS]
                target = (np.round((numbers - offset) / STEP) * STEP) + offset
            for kind, signs in enumerate(SIGNS):
                slope = signs * leverage / math.sqrt(BANDS / KINDS)
                cheap = slope / cost
                gains += cheap * (target[kind] - numbers[kind]) / max(float(slope @ cheap), 1e-9)
            # The change is a gain on bands of the windowed block, faded at both ends.
            change = np.fft.irfft(spectrum * (bands.spread @ gains), bands.length) * bands.edges
            changed = spectrum + np.fft.rfft(bands.window * change)
        marked = block.copy()
        marked[: bands.length] += change[: len(block)].astype(np.float32)
        return marked


def embed_watermark(pcm: np.ndarray, rate_hz: int, key: bytes = KEY) -> np.ndarray:
    """Embed the mark in a whole clip; see WatermarkEmbedder. (n,) float32 to (n,) float32."""
    embedder = WatermarkEmbedder(rate_hz, key)
    return np.concatenate([embedder.embed(pcm), embedder.flush()])


def detect_watermark(pcm: np.ndarray, rate_hz: int, key: bytes = KEY) -> WatermarkDetection:
    """Detect the mark in any part of `pcm` (n,), int16 or float32. One second of speech is often enough, five
    always are."""
    resampler = Resampler(rate_hz)
    resampled = np.concatenate([resampler.resample(to_float32(pcm)), resampler.finish()])
    block, window = ms_to_samples(BLOCK_MS), ms_to_samples(BLOCK_MS * WINDOW_BLOCKS)
    starts = range(0, max(1, len(resampled) - window // 2), window // 2)
    scores = [_score(resampled[at : at + window + block], _grid(key)) for at in starts]
    # Every window searched is one more chance of a random match.
    return WatermarkDetection(max(0.0, max(scores) - math.log10(len(scores))))


def _score(pcm: np.ndarray, grid: np.ndarray) -> float:
    """Score of one window (n,) at 16 kHz: minus log10 of the probability of as good a match by chance."""
    bands, block, step = _bands(RATE_HZ), ms_to_samples(BLOCK_MS), ms_to_samples(STEP_MS)
    grid_phases = np.exp(-2j * np.pi * grid / STEP)  # (PERIOD_BLOCKS, KINDS)
    conjugate = np.conj(np.fft.fft(np.conj(grid_phases), axis=0))
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
        # Correlation with the grid at every shift of its period: sums of unit phasors, with random angles by the
        # key.
        sums = np.fft.ifft(np.fft.fft(phases, axis=0) * conjugate, axis=0)
        power = (np.abs(sums) ** 2).sum(axis=1) / use.sum()
        best = max(best, float(power.max()))
        trials += PERIOD_BLOCKS
    # Both powers are exponentially distributed where the angles are random: their sum exceeds x with probability
    # (1 + x) exp(-x).
    return max(0.0, (best - math.log1p(best) - math.log(max(1, trials))) / math.log(10))


SIGNS = np.zeros((KINDS, BANDS))
"""Signs of the bands in each number, (KINDS, BANDS): as many positive as negative, spread over the spectrum."""
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
        """Membership of bins in bands, (bins, bands), 0 or 1."""
        for band in range(BANDS):
            self.spread[(place >= band) & (place < band + 1), band] = 1

    def numbers(self, spectrum: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Spectrum (..., bins) to the numbers (..., KINDS) and the derivative of each band's log-energy by its
        gain (..., BANDS)."""
        energy = (spectrum.real**2 + spectrum.imag**2) @ self.spread
        floor = FLOOR * energy.sum(axis=-1, keepdims=True) + 1e-12
        logs = np.log(energy + floor)
        return logs @ SIGNS.T / math.sqrt(BANDS / KINDS), 2 * energy / (energy + floor)


@cache
def _bands(rate_hz: int) -> _Bands:
    return _Bands(rate_hz)


@cache
def _grid(key: bytes) -> np.ndarray:
    """Offsets of the grid by key, (PERIOD_BLOCKS, KINDS), uniform in 0..STEP."""
    wanted = PERIOD_BLOCKS * KINDS
    drawn = np.frombuffer(hashlib.shake_256(key).digest(8 * wanted), "<u8")
    return STEP * (drawn / 2.0**64).reshape(PERIOD_BLOCKS, KINDS)
