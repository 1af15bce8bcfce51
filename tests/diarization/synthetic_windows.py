"""Windows that an engine might have heard, made of who speaks when: no network is asked."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from asr_serve.diarization.local_speakers import WINDOW_SAMPLES, LocalSpeakers
from asr_serve.diarization.speaker_groups import DiarizationWindow
from asr_serve.diarization.windowing import window_starts

STEP_SAMPLES, FIRST_SAMPLES, WIDTH = 270, 360, 32
Said = tuple[str, float, float]


def direction(name: str, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    """Of that person; a little off."""
    own = np.random.default_rng(sum(map(ord, name))).standard_normal(WIDTH)
    off = np.random.default_rng(seed).standard_normal(WIDTH)
    voice = own / np.linalg.norm(own) + noise * off / np.linalg.norm(off)
    return (voice / np.linalg.norm(voice)).astype(np.float32)


def window(said: Sequence[Said], start_s: float, samples: int = WINDOW_SAMPLES, seed: int = 0) -> DiarizationWindow:
    """What is heard of it from there on. The order of speakers is another in each window."""
    start = round(start_s * 16_000)
    frames = max(0, (samples - 991) // STEP_SAMPLES + 1)
    at = start + FIRST_SAMPLES + (np.arange(frames) + 0.5) * STEP_SAMPLES
    chance = np.random.default_rng(seed)
    names = [name for name in dict.fromkeys(each for each, _, _ in said) if _speaks(said, name, at).any()]
    chance.shuffle(names)
    active = np.zeros((frames, 3), bool)
    for local, name in enumerate(names):
        active[:, local] = _speaks(said, name, at)
    who, clean, voices = [], [], []
    for local, name in enumerate(names):
        alone = int((active[:, local] & (active.sum(1) == 1)).sum()) * STEP_SAMPLES
        if active[:, local].sum() * STEP_SAMPLES < 4_000:
            continue
        who.append(local)
        clean.append(alone if alone >= 8_000 else 0)
        voices.append(direction(name, 0.4 if alone else 1.2, seed + local))
    heard = LocalSpeakers(
        first_samples=FIRST_SAMPLES,
        step_samples=STEP_SAMPLES,
        speakers=3,
        chances=(active * np.uint8(255)).tobytes(),
        who=tuple(who),
        clean_samples=tuple(clean),
        heard_samples=tuple(max(4_000, min(each, 80_000)) for each in clean),
        voices=b"".join(each.tobytes() for each in voices),
    )
    return DiarizationWindow(start, samples, heard)


def windows(said: Sequence[Said], seconds: float, step: int = WINDOW_SAMPLES) -> list[DiarizationWindow]:
    """Of a whole recording."""
    samples = round(seconds * 16_000)
    return [
        window(said, at / 16_000, min(samples, WINDOW_SAMPLES), seed=number)
        for number, at in enumerate(window_starts(samples, step))
    ]


def unlistened(one: DiarizationWindow) -> DiarizationWindow:
    """It was heard who speaks when in it, and not what they sound like."""
    heard = msgspec.structs.replace(one.local_speakers, who=(), clean_samples=(), heard_samples=(), voices=b"")
    return one._replace(local_speakers=heard)


def _speaks(said: Sequence[Said], name: str, at: np.ndarray) -> np.ndarray:
    found = np.zeros(len(at), bool)
    for each, start, end in said:
        if each == name:
            found |= (at >= start * 16_000) & (at < end * 16_000)
    return found
