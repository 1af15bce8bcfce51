"""Meetings made of single voices, on which numbers of speaker/ and engine/speakers are chosen.

LibriSpeech's training set has one clip of each of 251 people here, read in quiet. A meeting takes what some of
them say in pieces, cut at their pauses, and lays it out as people talk: with pauses, interruptions and short
answers, each voice in a place of its own in a room that answers, with noise. So who speaks when is known exactly,
which it is of no recording. Of recordings that are scored (ami, two-speaker-mixes) nothing is chosen.

alone, pair, talk, meeting, mixed, long    people who are about as loud as each other
excerpt, far    30 s of a livelier one: who has the floor is interrupted, others agree in a word, softer, laugh or
                rustle papers; near, or heard by one microphone across the room

    python bench/rich_speakers.py --data DIR --develop     what speaker/ makes of them, by kind of meeting
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import clips
import numpy as np
import torch

from asr_serve import units
from asr_serve.models.auxiliary import silero
from asr_serve.models.auxiliary.silero import WINDOW_SAMPLES, Silero
from asr_serve.types import SpeakerTurn

RATE = units.RATE_HZ
FOLDER = "librispeech-train-untranscribed"
JOINED_S = 0.25
"""Pauses that a reference speaks over."""
KINDS = ("alone", "pair", "talk", "meeting", "mixed", "long", "excerpt", "far")
EXCERPT_S = 30
FADE_SAMPLES = 160


class Voice(NamedTuple):
    """What one person says: pieces between pauses, and where in each there is speech."""

    name: str
    pieces: list[np.ndarray]
    speech: list[list[tuple[int, int]]]


class Meeting(NamedTuple):
    name: str
    kind: str
    pcm: np.ndarray
    turns: tuple[SpeakerTurn, ...]


def spoken(vad: Silero, pcm: np.ndarray) -> list[tuple[int, int]]:
    """Where somebody speaks, in samples."""
    windows = len(pcm) // WINDOW_SAMPLES
    state = vad.state(1)
    scores, _ = vad.step(torch.from_numpy(pcm[None, : windows * WINDOW_SAMPLES]), state, torch.tensor([windows]))
    edges = np.flatnonzero(np.diff((scores[0].numpy() > 0.5).astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    found: list[tuple[int, int]] = []
    for start, end in edges * WINDOW_SAMPLES:
        if found and start - found[-1][1] < JOINED_S * RATE:
            found[-1] = (found[-1][0], int(end))
        else:
            found.append((int(start), int(end)))
    return found


def voice(vad: Silero, path: Path) -> Voice:
    pcm = clips.decode(path)
    pcm = pcm * (0.05 / max(1e-6, float(np.sqrt(np.square(pcm).mean()))))
    speech = spoken(vad, pcm)
    middles = [(a[1] + b[0]) // 2 for a, b in itertools.pairwise(speech)]
    cuts = [max(0, speech[0][0] - 1600), *middles, min(len(pcm), speech[-1][1] + 1600)] if speech else [0]
    pieces, within = [], []
    for start, end in itertools.pairwise(cuts):
        pieces.append(pcm[start:end])
        within.append([(max(a, start) - start, min(b, end) - start) for a, b in speech if a < end and b > start])
    return Voice(path.stem, pieces, within)


class Maker:
    """Meetings out of voices; the same for the same seed."""

    def __init__(self, voices: Sequence[Voice], seed: int) -> None:
        self._voices, self._chance = list(voices), random.Random(seed)
        self._noise = np.random.default_rng(seed)

    def make(self, kind: str, number: int) -> Meeting:
        chance = self._chance
        people = {"alone": 1, "pair": 2, "talk": 2, "mixed": 2, "long": chance.randint(3, 5)}.get(kind) or (
            chance.randint(3, 5)
        )
        chosen = chance.sample(self._voices, people)
        if kind in ("excerpt", "far"):
            return self._excerpt(f"{kind}-{number:03d}", kind, chosen)
        laid = self._mixed(chosen) if kind == "mixed" else self._talk(chosen, kind)
        return self._heard(f"{kind}-{number:03d}", kind, laid)

    def _mixed(self, chosen: Sequence[Voice]) -> list[tuple[int, int, np.ndarray, list[tuple[int, int]]]]:
        """Each reads all of it; the second begins while the first reads."""
        laid = []
        begin = 0
        for number, each in enumerate(chosen):
            position = begin
            for pcm, speech in zip(each.pieces, each.speech, strict=True):
                laid.append((number, position, pcm, speech))
                position += len(pcm)
            begin += self._chance.randrange(0, max(1, int(0.6 * (position - begin))))
        return laid

    def _talk(self, chosen: Sequence[Voice], kind: str) -> list[tuple[int, int, np.ndarray, list[tuple[int, int]]]]:
        chance = self._chance
        rounds = 6 if kind == "long" else 1
        left = [
            [piece for _ in range(rounds) for piece in zip(each.pieces, each.speech, strict=True)] for each in chosen
        ]
        laid, position, last = [], int(chance.uniform(0, 1) * RATE), -1
        overlapping = chance.choice((0.05, 0.2, 0.4))
        while any(left):
            who = chance.choice([n for n, each in enumerate(left) if each and (n != last or sum(map(bool, left)) == 1)])
            turn = chance.choice((1, 1, 2, 3))
            gap = -chance.uniform(0.1, 1.5) if chance.random() < overlapping else chance.uniform(0.05, 1.2)
            start = max(0, position + int(gap * RATE))
            for _ in range(turn):
                if not left[who]:
                    break
                pcm, speech = left[who].pop(0)
                laid.append((who, start, pcm, speech))
                start += len(pcm)
            position, last = max(position, start), who
        return laid

    def _excerpt(self, name: str, kind: str, chosen: Sequence[Voice]) -> Meeting:
        """Half of the people say most of it. Where it begins and ends somebody may be in the middle of a word."""
        chance = self._chance
        length = (EXCERPT_S + 4) * RATE
        tracks = np.zeros((len(chosen), length), np.float32)
        turns: dict[int, list[tuple[int, int]]] = {}
        left = [list(zip(each.pieces, each.speech, strict=True)) for each in chosen]
        talkative = [chance.choice((0.3, 1.0, 3.0)) for _ in chosen]
        lively = chance.uniform(0.1, 0.5)

        def say(who: int, start: int, pcm: np.ndarray, speech: list[tuple[int, int]], gain_db: float) -> int:
            end = min(length, start + len(pcm))
            if end - start < 2 * FADE_SAMPLES:
                return end
            pcm = pcm[: end - start]
            fade = np.minimum(1, np.arange(len(pcm)) / FADE_SAMPLES)
            tracks[who, start:end] += pcm * fade * fade[::-1] * 10 ** (gain_db / 20)
            turns.setdefault(who, []).extend((start + a, min(end, start + b)) for a, b in speech if start + a < end)
            return end

        position, last = 0, -1
        while position < length and any(left):
            able = [who for who, each in enumerate(left) if each and who != last] or [last]
            who = chance.choices(able, [talkative[each] for each in able])[0]
            if not left[who]:
                break
            start = position
            for _ in range(chance.choice((1, 1, 2, 3))):
                if left[who]:
                    position = say(who, position, *left[who].pop(0), 0.0)
            for other, pieces in enumerate(left):  # a word of agreement, or an attempt
                if other != who and pieces and chance.random() < lively and position - start > RATE:
                    pcm, speech = chance.choice(pieces)
                    a, b = chance.choice(speech) if speech else (0, len(pcm))
                    short = min(b - a, int(chance.choice((0.25, 0.4, 0.6, 1.2)) * RATE))
                    at = a + chance.randrange(0, max(1, b - a - short))
                    where = chance.randrange(start, position)
                    say(other, where, pcm[at : at + short], [(0, short)], chance.uniform(-9, 0))
            if chance.random() < 0.15:
                position = min(position, length) + int(chance.uniform(0.5, 2.5) * RATE)
            else:
                interrupts = chance.random() < lively
                gap = -chance.uniform(0.2, 1.5) if interrupts else chance.uniform(-0.1, 0.6)
                position = max(start + RATE // 4, position + int(gap * RATE))
            last = who
        noises = np.zeros(length, np.float32)
        for _ in range(chance.choice((0, 1, 2, 4))):
            sound = self._sound(chance)
            at = chance.randrange(0, length - len(sound))
            noises[at : at + len(sound)] += sound
        room_s = chance.uniform(0.3, 0.9) if kind == "far" else chance.choice((0.0, 0.0, 0.2, 0.4))
        out = self._in_room(noises, room_s) if room_s else noises
        for track in tracks:
            gain = 10 ** (chance.uniform(-8, 4) / 20)
            out = out + gain * (self._in_room(track, room_s, kind == "far") if room_s else track)
        level = float(np.sqrt(np.square(out).mean()))
        snr_db = chance.choice((25, 20, 15, 10) if kind == "far" else (50, 35, 25, 20))
        out = out + self._hum(length) * (level * 10 ** (-snr_db / 20))
        first = chance.randrange(0, 4 * RATE)
        out = out[first : first + EXCERPT_S * RATE]
        out *= 0.5 / max(1e-6, float(np.abs(out).max()))
        told = [
            SpeakerTurn(f"person{who}", max(0, start - first), min(len(out), end - first))
            for who, spans in turns.items()
            for start, end in _joined(spans)
            if start - first < len(out) and end > first
        ]
        return Meeting(name, kind, out.astype(np.float32), tuple(sorted(told, key=lambda t: t.start_samples)))

    def _sound(self, chance: random.Random) -> np.ndarray:
        """Papers, a cough, something like laughter: noise in bursts, through a filter of its own."""
        samples = int(chance.uniform(0.2, 1.5) * RATE)
        noise = self._noise.standard_normal(samples + 64).astype(np.float32)
        taps = self._noise.standard_normal(chance.choice((2, 8, 32))).astype(np.float32)
        sound = np.convolve(noise, taps, "same")[:samples]
        sound *= np.abs(np.sin(np.pi * chance.uniform(0.5, 5) * np.arange(samples) / RATE)) * np.hanning(samples)
        level = 0.05 * 10 ** (chance.uniform(-10, 3) / 20)
        return np.asarray(sound * (level / max(1e-9, float(np.sqrt(np.square(sound).mean())))), np.float32)

    def _hum(self, samples: int) -> np.ndarray:
        """A ventilator: noise that falls by 6 dB an octave above 200 Hz. Its level is 1."""
        spectrum = np.fft.rfft(self._noise.standard_normal(samples))
        spectrum /= 1 + np.fft.rfftfreq(samples, 1 / RATE) / 200
        noise = np.fft.irfft(spectrum, samples)
        return np.asarray(noise / np.sqrt(np.square(noise).mean()), np.float32)

    def _heard(self, name: str, kind: str, laid: list[tuple[int, int, np.ndarray, list[tuple[int, int]]]]) -> Meeting:
        chance = self._chance
        people = max(who for who, *_ in laid) + 1
        length = max(start + len(pcm) for _, start, pcm, _ in laid) + RATE // 2
        tracks = np.zeros((people, length), np.float32)
        turns: dict[int, list[tuple[int, int]]] = {}
        for who, start, pcm, speech in laid:
            fade = np.minimum(1, np.arange(len(pcm)) / FADE_SAMPLES)
            tracks[who, start : start + len(pcm)] += pcm * fade * fade[::-1]
            turns.setdefault(who, []).extend((start + a, start + b) for a, b in speech)
        room_s = chance.choice((0.0, 0.0, 0.2, 0.4, 0.6))
        out = np.zeros(length, np.float32)
        for track in tracks:
            gain = 10 ** (chance.uniform(-5, 5) / 20)
            out += gain * (self._in_room(track, room_s) if room_s else track)
        level = float(np.sqrt(np.square(out).mean()))
        snr_db = chance.choice((60, 40, 25, 15))
        noise = self._noise.standard_normal(length).astype(np.float32)
        noise = np.convolve(noise, np.ones(8, np.float32) / 8, "same").astype(np.float32)
        out += noise * (level * 10 ** (-snr_db / 20) / float(np.sqrt(np.square(noise).mean())))
        out *= 0.5 / max(1e-6, float(np.abs(out).max()))
        told = [
            SpeakerTurn(f"person{who}", start, end) for who, spans in turns.items() for start, end in _joined(spans)
        ]
        return Meeting(name, kind, out.astype(np.float32), tuple(sorted(told, key=lambda t: t.start_samples)))

    def _in_room(self, track: np.ndarray, room_s: float, far: bool = False) -> np.ndarray:
        """The direct sound, and a tail that falls by 60 dB in so long; far away it is louder than the direct."""
        samples = int(room_s * RATE)
        tail = self._noise.standard_normal(samples).astype(np.float32)
        tail *= np.exp(-6.9 * np.arange(samples) / samples).astype(np.float32)
        tail[: int(0.002 * RATE)] = 0
        tail *= self._chance.uniform(*((0.8, 2.0) if far else (0.3, 1.0))) / float(np.sqrt(np.square(tail).sum()))
        tail[0] = 1.0
        size = 1 << (len(track) + samples - 1).bit_length()
        return np.fft.irfft(np.fft.rfft(track, size) * np.fft.rfft(tail, size), size)[: len(track)].astype(np.float32)


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start - found[-1][1] < JOINED_S * RATE:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def meetings(folder: Path, each: int, seed: int = 7, kinds: Sequence[str] = KINDS, people: int = 251) -> list[Meeting]:
    vad = silero.load()
    voices = [voice(vad, path) for path in sorted((folder / FOLDER).glob("*.flac"))[:people]]
    maker = Maker([v for v in voices if v.pieces], seed)
    return [maker.make(kind, number) for kind in kinds for number in range(each)]
