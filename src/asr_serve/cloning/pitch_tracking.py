"""Pitch tracking: F0 for each frame of any recording of speech.

The autocorrelation of each frame is divided by that of its window; its peaks are candidate periods. A path through
the candidates of all frames is found that penalizes octave jumps and changes of voicing.

Source  Boersma 1993, "Accurate short-term analysis of the fundamental frequency and the harmonics-to-noise ratio
        of a sampled sound"; tests/cloning/test_pitch_tracking.py compares with signals and voices
        whose pitch is known.
"""

from __future__ import annotations

import numpy as np

from asr_serve.cloning.voice_corpus import HOP, RATE_HZ

LOW_HZ, HIGH_HZ = 60.0, 600.0
WINDOW = round(3 * RATE_HZ / LOW_HZ)
"""Window length in samples: three periods of LOW_HZ."""
FFT = 1 << (WINDOW + round(RATE_HZ / LOW_HZ)).bit_length()
CANDIDATES = 8
BLOCK = 1_024
"""Frames that are processed together."""
OCTAVE = 0.01
"""Penalty of a peak for each octave below HIGH_HZ: of two equally good peaks the higher is chosen."""
VOICED, SILENT = 0.45, 0.01
"""Strength of a peak that equals that of no voice; peak amplitude of a silent frame, as a fraction of the loudest."""
JUMP, COMES = 0.35, 0.14
"""Costs of an octave between frames, and of a change of voicing, for frames of 10 ms."""
FRAME_OF_10_MS = 0.01 * RATE_HZ / HOP


def track_pitch(pcm: np.ndarray, frames: int | None = None) -> np.ndarray:
    """Tracks F0 of (n,) float at 22.05 kHz: (frames,) float32 in Hz, 0 where unvoiced. A frame is 256 samples; its
    F0 is that of its middle."""
    frames = len(pcm) // HOP if frames is None else frames
    if not frames:
        return np.zeros(0, np.float32)
    sound = pcm.astype(np.float64) - pcm.mean()
    loudest = float(np.abs(sound).max())
    if not loudest:
        return np.zeros(frames, np.float32)
    # The first window's middle is the first frame's.
    padded = np.zeros(WINDOW + frames * HOP)
    first = WINDOW // 2 - HOP // 2
    padded[first : first + len(sound)] = sound[: len(padded) - first]
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:frames]
    candidates = [pitch_candidates(windows[at : at + BLOCK], loudest) for at in range(0, frames, BLOCK)]
    hz, worth = (np.concatenate(each) for each in zip(*candidates, strict=True))
    return best_pitch_path(hz, worth).astype(np.float32)


def pitch_candidates(windows: np.ndarray, loudest: float) -> tuple[np.ndarray, np.ndarray]:
    """Finds candidates in each window of (frames, WINDOW): (frames, 1 + CANDIDATES) in Hz, the first 0 for
    unvoiced; and their strengths, -inf where there is no candidate."""
    hann = np.hanning(WINDOW + 2)[1:-1]
    shortest, longest = int(RATE_HZ / HIGH_HZ), int(np.ceil(RATE_HZ / LOW_HZ))
    own = np.fft.irfft(np.abs(np.fft.rfft(hann, FFT)) ** 2)[: longest + 2]
    cut = windows - windows.mean(1, keepdims=True)
    autocorrelation = np.fft.irfft(np.abs(np.fft.rfft(cut * hann, FFT)) ** 2)[:, : longest + 2]
    power = autocorrelation[:, :1]
    normalized = autocorrelation / np.where(power > 0, power, 1) * (own[0] / own)
    middle, before, after = normalized[:, 1:-1], normalized[:, :-2], normalized[:, 2:]
    is_peak = (middle > before) & (middle >= after) & (middle > VOICED / 2)
    is_peak[:, : shortest - 1] = False
    # The top of the parabola through three values lies between them.
    curvature = np.where(is_peak, np.minimum(before - 2 * middle + after, -1e-9), -1.0)
    offset = np.where(is_peak, 0.5 * (before - after) / curvature, 0.0).clip(-0.5, 0.5)
    height = np.minimum(middle - 0.25 * (before - after) * offset, 1.0)
    lag = np.arange(1, longest + 1) + offset
    hz = RATE_HZ / lag
    strength = np.where(is_peak & (hz >= LOW_HZ), height - OCTAVE * np.log2(HIGH_HZ / hz), -np.inf)
    best = np.argsort(-strength, axis=1)[:, :CANDIDATES]
    peak = np.abs(windows[:, WINDOW // 3 : -WINDOW // 3]).max(1)
    unvoiced = VOICED + np.maximum(0, 2 - (peak / loudest) / (SILENT / (1 + VOICED)))
    return (
        np.concatenate([np.zeros((len(hz), 1)), np.take_along_axis(hz, best, 1)], 1),
        np.concatenate([unvoiced[:, None], np.take_along_axis(strength, best, 1)], 1),
    )


def best_pitch_path(hz: np.ndarray, worth: np.ndarray) -> np.ndarray:
    """Returns each frame's candidate on the best path through all frames: (frames,) Hz."""
    frames, count = hz.shape
    octaves = np.log2(np.where(hz > 0, hz, 1))
    voiced = hz > 0
    previous = np.zeros((frames, count), np.int64)
    total = worth[0]
    for frame in range(1, frames):
        distance = np.abs(octaves[frame - 1][:, None] - octaves[frame][None])
        both_voiced = voiced[frame - 1][:, None] & voiced[frame][None]
        changed = voiced[frame - 1][:, None] ^ voiced[frame][None]
        cost = FRAME_OF_10_MS * (JUMP * distance * both_voiced + COMES * changed)
        through = total[:, None] - cost
        previous[frame] = through.argmax(0)
        total = through.max(0) + worth[frame]
    chosen = np.zeros(frames, np.int64)
    chosen[-1] = total.argmax()
    for frame in range(frames - 1, 0, -1):
        chosen[frame - 1] = previous[frame, chosen[frame]]
    path: np.ndarray = hz[np.arange(frames), chosen]
    return path
