"""What is written where nobody speaks: silence, noise, tones, breath and music, through files and live.

    python bench/no_speech.py --model whisper-tiny-en --minutes 10 --json no_speech.json

Every sound is made here, from seeds. `--sounds DIR` adds recordings without speech: each file in the folder is a
row. Exit code 1 when words were written.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import machine
import numpy as np
from clips import decode
from numpy.typing import NDArray

import asr_serve
from asr_serve.api.library import Model

Audio = NDArray[np.floating[Any]]
RATE_HZ = 16_000
STRETCH_S = 20.0
"""A sound changes its level, pitch and pace so often."""
LEVELS_DB = (-70.0, -55.0, -40.0, -30.0, -20.0, -14.0, -8.0)
KEYS_HZ = ((697, 770, 852, 941), (1_209, 1_336, 1_477, 1_633))
CALLS = ((350, 440, 1e9, 0), (440, 480, 2, 4), (480, 620, 0.5, 0.5), (425, 425, 1, 4), (1_000, 1_000, 0.2, 0.8))
"""Dial tone, ring, engaged, a ring elsewhere, a beep: two frequencies, seconds on and off."""
SCALES = ((0, 2, 4, 5, 7, 9, 11), (0, 2, 3, 5, 7, 8, 10), (0, 3, 5, 7, 10))
WAYS = ("transcribe", "live")
CHUNK_MS = 2_000
"""Between two results of a stream, which comes faster than it would be spoken."""
TEXT_CHARS = 400


def _clock(seconds: float) -> Audio:
    return np.arange(round(seconds * RATE_HZ)) / RATE_HZ


def _noise(rng: np.random.Generator, seconds: float, slope: float = 0.0) -> Audio:
    """Of unit power, falling by f ** -slope: 0 white, 0.5 pink, 1 brown."""
    count = round(seconds * RATE_HZ)
    spectrum = np.fft.rfft(rng.standard_normal(count))
    spectrum[0] = 0
    spectrum[1:] /= np.arange(1, len(spectrum)) ** slope
    made = np.fft.irfft(spectrum, count)
    return made / made.std()


def _gain(db: float) -> float:
    return float(10 ** (db / 20))


def silence(rng: np.random.Generator, seconds: float) -> Audio:
    return np.zeros(round(seconds * RATE_HZ))


def noise(slope: float) -> Callable[[np.random.Generator, float], Audio]:
    def stretch(rng: np.random.Generator, seconds: float) -> Audio:
        return _noise(rng, seconds, slope) * _gain(rng.choice(LEVELS_DB))

    return stretch


def waves(rng: np.random.Generator, seconds: float) -> Audio:
    """Pink noise that swells and fades a few times a second, as speech does."""
    swell = np.abs(np.sin(np.pi * rng.uniform(1, 5) * _clock(seconds))) ** rng.uniform(0.5, 3)
    return _noise(rng, seconds, 0.5) * swell * _gain(rng.uniform(-40, -12))


def breath(rng: np.random.Generator, seconds: float) -> Audio:
    """In and out, close to a microphone, over a quiet room."""
    t = _clock(seconds)
    cycle = (t / rng.uniform(2.5, 5)) % 1
    phase = np.where(cycle < 0.4, cycle / 0.4, np.where(cycle > 0.5, (cycle - 0.5) / 0.5, 0))
    spectrum = np.fft.rfft(_noise(rng, seconds))
    hz = np.fft.rfftfreq(len(t), 1 / RATE_HZ)
    mouth = sum(np.exp(-(((hz - centre) / 400) ** 2)) for centre in rng.uniform(300, 3_500, 3))
    blown = np.fft.irfft(spectrum * mouth, len(t))
    loud = np.sin(np.pi * np.clip(phase, 0, 1)) ** 2 * _gain(rng.uniform(-35, -12))
    return blown / blown.std() * loud + _noise(rng, seconds, 0.5) * _gain(-65)


def clicks(rng: np.random.Generator, seconds: float) -> Audio:
    """Keyboards, taps, a bad line."""
    made = np.zeros(round(seconds * RATE_HZ))
    for at in rng.integers(0, len(made) - 800, round(seconds * rng.uniform(1, 8))):
        knock = _noise(rng, 0.05, rng.uniform(0, 1)) * np.exp(-rng.uniform(40, 300) * _clock(0.05))
        made[at : at + len(knock)] += knock * _gain(rng.uniform(-30, -8))
    return made + _noise(rng, seconds, 0.5) * _gain(-60)


def hum(rng: np.random.Generator, seconds: float) -> Audio:
    t, mains = _clock(seconds), rng.choice([50, 60, 100, 120, 400])
    parts = [rng.uniform(0, 1) * np.sin(2 * np.pi * mains * k * t + rng.uniform(0, 6)) for k in range(1, 12)]
    return np.sum(parts, 0) * _gain(rng.uniform(-50, -18))


def calls(rng: np.random.Generator, seconds: float) -> Audio:
    """What a telephone says while nobody does."""
    low, high, on_s, off_s = CALLS[rng.integers(len(CALLS))]
    t = _clock(seconds)
    return (
        _gain(rng.uniform(-30, -10))
        * (np.sin(2 * np.pi * low * t) + np.sin(2 * np.pi * high * t))
        * (t % (on_s + off_s) < on_s)
    )


def sweeps(rng: np.random.Generator, seconds: float) -> Audio:
    """Sirens, whistles and wails: gliding overtones, the voice's own shape."""
    t = _clock(seconds)
    pitch = rng.uniform(200, 900) * (1 + rng.uniform(0.1, 0.8) * np.sin(2 * np.pi * rng.uniform(0.1, 6) * t))
    turned = 2 * np.pi * np.cumsum(pitch) / RATE_HZ
    overtones = [np.sin(k * turned) / k for k in range(1, rng.integers(2, 8))]
    return np.sum(overtones, axis=0) * _gain(rng.uniform(-35, -12))


def keys(rng: np.random.Generator, seconds: float) -> Audio:
    """Telephone keys."""
    made = np.zeros(round(seconds * RATE_HZ))
    step, tone = round(rng.uniform(0.15, 0.6) * RATE_HZ), _clock(rng.uniform(0.06, 0.14))
    for at in range(0, len(made) - step, step):
        pair = [row[rng.integers(4)] for row in KEYS_HZ]
        made[at : at + len(tone)] = sum(np.sin(2 * np.pi * hz * tone) for hz in pair)
    return made * _gain(rng.uniform(-30, -10))


def music(rng: np.random.Generator, seconds: float) -> Audio:
    """Chords, a bass, drums, and a melody on strings or on something that sings."""
    beat_s = 60 / rng.uniform(70, 170)
    scale, root_hz = SCALES[rng.integers(len(SCALES))], 110 * 2 ** (rng.integers(12) / 12)

    def hz(step: int) -> float:
        octave, place = divmod(step, len(scale))
        return float(root_hz * 2 ** (octave + scale[place] / 12))

    made = np.zeros(round(seconds * RATE_HZ))

    def play(at_s: float, sound: Audio) -> None:
        at = round(at_s * RATE_HZ)
        room = made[at : at + len(sound)]
        room += sound[: len(room)]

    chords = [int(step) for step in rng.integers(0, len(scale), 4)]
    sings, drums = rng.random() < 0.5, rng.random() < 0.6
    for beat in range(int(seconds / beat_s)):
        chord = chords[beat // 4 % 4]
        if beat % 4 == 0:
            for step in (chord, chord + 2, chord + 4):
                play(beat * beat_s, 0.15 * _string(hz(step + len(scale)), 4 * beat_s, 1.0))
        play(beat * beat_s, 0.3 * _string(hz(chord), beat_s, 3.0))
        for half in range(rng.integers(1, 4)):
            note = hz(int(rng.integers(2 * len(scale))) + len(scale))
            length = beat_s * rng.uniform(0.3, 0.9)
            sound = _sung(rng, note, length) if sings else _string(note, length, 4.0)
            play((beat + half / 3) * beat_s, 0.3 * sound)
        if drums:
            t = _clock(0.2)
            play(beat * beat_s, np.sin(2 * np.pi * 60 * t) * np.exp(-20 * t))
            play((beat + 0.5) * beat_s, 0.3 * _noise(rng, 0.2) * np.exp(-30 * t))
    return made / np.abs(made).max() * _gain(rng.uniform(-20, -1))


def _string(hz: float, seconds: float, fades: float) -> Audio:
    t = _clock(seconds)
    return sum(np.sin(2 * np.pi * hz * k * t) / k for k in range(1, 7)) * np.exp(-fades * t)


def _sung(rng: np.random.Generator, hz: float, seconds: float) -> Audio:
    """One vowel: harmonics under three formants, with vibrato."""
    t = _clock(seconds)
    turned = 2 * np.pi * hz * np.cumsum(1 + 0.01 * np.sin(2 * np.pi * 5.5 * t)) / RATE_HZ
    formants = (rng.uniform(300, 900), rng.uniform(900, 2_200), rng.uniform(2_200, 3_200))
    parts = [
        sum(np.exp(-(((k * hz - centre) / 150) ** 2)) for centre in formants) * np.sin(k * turned)
        for k in range(1, int(4_000 / hz) + 1)
    ]
    return np.sum(parts, 0) * np.minimum(1, 20 * np.minimum(t, seconds - t))


KINDS: dict[str, Callable[[np.random.Generator, float], Audio]] = {
    "digital silence": silence,
    "white noise": noise(0.0),
    "pink noise": noise(0.5),
    "brown noise": noise(1.0),
    "waves of noise": waves,
    "breath": breath,
    "clicks": clicks,
    "hum": hum,
    "call tones": calls,
    "sweeps": sweeps,
    "keys": keys,
    "music": music,
}


def made(kind: str, seconds: float, seed: int = 0) -> Audio:
    """(n,) float32 at 16 kHz: stretches of the same kind end to end."""
    rng = np.random.default_rng([seed, *kind.encode()])
    parts, left_s = [], seconds
    while left_s > 0:
        parts.append(KINDS[kind](rng, min(left_s, STRETCH_S)))
        left_s -= STRETCH_S
    return np.clip(np.concatenate(parts), -1, 1).astype(np.float32)


class Said:
    """What a model made of it."""

    def __init__(self, segments: list[str], shown: str) -> None:
        self.segments, self.shown = segments, shown
        """`shown`: live, the longest text that was shown before it was final."""


def through(model: Model, way: str, audio: Audio, vad: bool) -> Said:
    if way == "transcribe":
        [transcript] = model.transcribe(audio, vad=vad)
        return Said([segment.text for segment in transcript.segments], "")
    shown, last = "", None
    for last in model.stream(packets(audio), chunk_ms=CHUNK_MS):
        if not last.is_final:
            shown = max(shown, last.text, key=len)
    assert last is not None
    return Said([segment.text for segment in last.segments], shown)


def packets(audio: Audio, samples: int = 1_600) -> Iterator[Audio]:
    for at in range(0, len(audio), samples):
        yield audio[at : at + samples]


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    sounds: dict[str, Callable[[], Audio]] = {
        kind: partial(made, kind, 60 * arguments.minutes, arguments.seed) for kind in arguments.kinds or KINDS
    }
    if arguments.sounds:
        files = sorted(path for path in arguments.sounds.iterdir() if path.is_file())
        sounds |= {path.name: partial(decode, path) for path in files}
    with asr_serve.load(arguments.model) as model:
        for name, sound in sounds.items():
            audio = sound()
            for way in arguments.ways:
                started_s = time.perf_counter()
                said = through(model, way, audio, vad=not arguments.no_vad)
                text = " ".join(said.segments)
                yield {
                    "name": name,
                    "way": way,
                    "vad": not arguments.no_vad or way == "live",
                    "audio_s": round(len(audio) / RATE_HZ, 1),
                    "wall_s": round(time.perf_counter() - started_s, 1),
                    "segments": len(said.segments),
                    "words": len(text.split()),
                    "shown_words": len(said.shown.split()),
                    "text": text[:TEXT_CHARS],
                    "shown": said.shown[:TEXT_CHARS],
                }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="whisper-tiny-en")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each sound")
    parser.add_argument("--kinds", type=lambda text: text.split(","), help=f"of: {', '.join(KINDS)}")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help="transcribe,live")
    parser.add_argument("--sounds", type=Path, help="a folder of recordings without speech")
    parser.add_argument("--no-vad", action="store_true", help="files are heard whole: the model alone is to tell")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write it, too")
    arguments = parser.parse_args(argv)
    report: dict[str, object] = {
        "bench": "no_speech",
        "model": arguments.model,
        "machine": machine.describe(machine.cores()),
    }
    found = []
    for row in rows(arguments):
        found.append(row)
        print(f"{row['name']}, {row['way']}: {row['words']} words {row['text']!r}", file=sys.stderr, flush=True)
    report["rows"] = found
    machine.tell(arguments.json, report)
    return int(any(row["words"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
