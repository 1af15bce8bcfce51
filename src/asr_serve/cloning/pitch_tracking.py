"""How high a voice is, frame by frame, in any recording of speech.

Of each frame the autocorrelation of its sound is taken, and divided by that of the window that it was cut with:
its peaks are the periods that the sound may have. A path through the peaks of all frames is found, in which a
voice neither jumps by an octave nor comes and goes without reason.

Source  Boersma 1993, "Accurate short-term analysis of the fundamental frequency and the harmonics-to-noise ratio
        of a sampled sound"; tests/cloning/test_pitch_tracking.py compares with signals and voices
        whose pitch is known.
"""

from __future__ import annotations

import numpy as np

from asr_serve.cloning.voice_corpus import HOP, RATE_HZ

LOW_HZ, HIGH_HZ = 60.0, 600.0
WINDOW = round(3 * RATE_HZ / LOW_HZ)
"""Three periods of the lowest voice."""
FFT = 1 << (WINDOW + round(RATE_HZ / LOW_HZ)).bit_length()
CANDIDATES = 8
BLOCK = 1_024
"""Frames that are looked at together."""
OCTAVE = 0.01
"""Less is a peak worth, for each octave below HIGH_HZ: of two that are as good the higher is the voice."""
VOICED, SILENT = 0.45, 0.01
"""A peak as high as the first is as good as no voice at all; so is any in what is as quiet as the second, of the
loudest."""
JUMP, COMES = 0.35, 0.14
"""What an octave from one frame to the next costs, and what a voice that begins or ends; of frames of 10 ms."""
FRAME_OF_10_MS = 0.01 * RATE_HZ / HOP


def track_pitch(pcm: np.ndarray, frames: int | None = None) -> np.ndarray:
    """(n,) float at 22.05 kHz -> (frames,) float32 in Hz, 0 where there is no voice; a frame is 256 samples, and
    its pitch that of its middle."""
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
    found = [pitch_candidates(windows[at : at + BLOCK], loudest) for at in range(0, frames, BLOCK)]
    hz, worth = (np.concatenate(each) for each in zip(*found, strict=True))
    return best_pitch_path(hz, worth).astype(np.float32)


def pitch_candidates(windows: np.ndarray, loudest: float) -> tuple[np.ndarray, np.ndarray]:
    """What the voice may be in each of (frames, WINDOW): (frames, 1 + CANDIDATES) in Hz, the first 0: no voice;
    and how good each is, -inf where there is none."""
    hann = np.hanning(WINDOW + 2)[1:-1]
    shortest, longest = int(RATE_HZ / HIGH_HZ), int(np.ceil(RATE_HZ / LOW_HZ))
    own = np.fft.irfft(np.abs(np.fft.rfft(hann, FFT)) ** 2)[: longest + 2]
    cut = windows - windows.mean(1, keepdims=True)
    heard = np.fft.irfft(np.abs(np.fft.rfft(cut * hann, FFT)) ** 2)[:, : longest + 2]
    power = heard[:, :1]
    like = heard / np.where(power > 0, power, 1) * (own[0] / own)
    middle, before, after = like[:, 1:-1], like[:, :-2], like[:, 2:]
    is_peak = (middle > before) & (middle >= after) & (middle > VOICED / 2)
    is_peak[:, : shortest - 1] = False
    # A parabola through three values has its top between them.
    bend = np.where(is_peak, np.minimum(before - 2 * middle + after, -1e-9), -1.0)
    off = np.where(is_peak, 0.5 * (before - after) / bend, 0.0).clip(-0.5, 0.5)
    height = np.minimum(middle - 0.25 * (before - after) * off, 1.0)
    lag = np.arange(1, longest + 1) + off
    hz = RATE_HZ / lag
    good = np.where(is_peak & (hz >= LOW_HZ), height - OCTAVE * np.log2(HIGH_HZ / hz), -np.inf)
    best = np.argsort(-good, axis=1)[:, :CANDIDATES]
    peak = np.abs(windows[:, WINDOW // 3 : -WINDOW // 3]).max(1)
    none = VOICED + np.maximum(0, 2 - (peak / loudest) / (SILENT / (1 + VOICED)))
    return (
        np.concatenate([np.zeros((len(hz), 1)), np.take_along_axis(hz, best, 1)], 1),
        np.concatenate([none[:, None], np.take_along_axis(good, best, 1)], 1),
    )


def best_pitch_path(hz: np.ndarray, worth: np.ndarray) -> np.ndarray:
    """Of the candidates of each frame the one on the best path through all: (frames,) Hz."""
    frames, count = hz.shape
    octaves = np.log2(np.where(hz > 0, hz, 1))
    voiced = hz > 0
    came = np.zeros((frames, count), np.int64)
    total = worth[0]
    for frame in range(1, frames):
        apart = np.abs(octaves[frame - 1][:, None] - octaves[frame][None])
        both = voiced[frame - 1][:, None] & voiced[frame][None]
        one = voiced[frame - 1][:, None] ^ voiced[frame][None]
        cost = FRAME_OF_10_MS * (JUMP * apart * both + COMES * one)
        through = total[:, None] - cost
        came[frame] = through.argmax(0)
        total = through.max(0) + worth[frame]
    chosen = np.zeros(frames, np.int64)
    chosen[-1] = total.argmax()
    for frame in range(frames - 1, 0, -1):
        chosen[frame - 1] = came[frame, chosen[frame]]
    found: np.ndarray = hz[np.arange(frames), chosen]
    return found
