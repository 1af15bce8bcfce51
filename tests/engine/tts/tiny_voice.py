"""A voice and a vocoder of random weights: causal, with state, small enough to run by the hundred."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr_serve import devices
from asr_serve.config import EngineConfig
from asr_serve.engine.client import EngineClient, Ticket
from asr_serve.engine.executor import EngineComponents
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.engine.tts.chunked_runner import fade_in
from asr_serve.engine.tts.executor import to_int16
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.interfaces import (
    FRAME_WIDTH,
    State,
    StateSpec,
    StreamingTtsModel,
    Vocoder,
    validate_phonemes,
    validate_voice,
)
from asr_serve.models.registry import TtsCard
from asr_serve.types import PhonemeSpan, Sentence, SentenceAudio

WAIT_S = 300.0
"""Longer than anything here takes; only a hang reaches it."""
RATE_HZ, CHUNK, HOP, HIDDEN, DELAY = 8_000, 4, 32, 24, 2
ALPHABET = "abcdefghijklmnop ."
CARD = TtsCard(
    name="tiny-voice",
    task="tts",
    kind="tiny",
    languages=("en",),
    parameters=10_000,
    licence="none",
    source="random numbers",
    hub="",
    rate_hz=RATE_HZ,
    alphabet="misaki",
    voices=("low", "high"),
    max_phonemes=200,
    chunk_frames=CHUNK,
    clones=True,
    vocoder="tiny-vocoder",
)


LEAD = 3
"""Frames at the start of every sentence that nobody is to hear."""


class Encoded(NamedTuple):
    x: Tensor
    """(frames, HIDDEN)"""
    frames: int
    lead_frames: int
    phoneme_ends_samples: tuple[int, ...]


class Voice(StreamingTtsModel[Encoded]):
    """A recurrent acoustic model whose state is one vector."""

    rate_hz, chunk_frames, hop_samples, frame_width = RATE_HZ, CHUNK, HOP, FRAME_WIDTH
    voices = CARD.voices

    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(3)
        self.table = torch.randn(len(ALPHABET), HIDDEN, generator=chance)
        self.inner = torch.randn(HIDDEN, HIDDEN, generator=chance) / HIDDEN**0.5
        self.out = torch.randn(HIDDEN, FRAME_WIDTH, generator=chance) / HIDDEN**0.5
        self.cloned: dict[str, bytes] = {}
        self.broken: set[str] = set()
        """Voices whose files cannot be read."""
        self.encodes: list[list[Sentence]] = []
        self.steps: list[list[Sentence]] = []
        self.of: dict[int, Sentence] = {}

    def register_voice(self, name: str, path: Path) -> None:
        if name in self.broken:
            raise WeightsCorrupt(f"{path.name} is no voice")
        self.cloned[name] = path.read_bytes()

    def validate(self, sentence: Sentence) -> None:
        validate_voice(sentence, [*self.voices, *self.cloned], CARD.name)
        validate_phonemes(sentence, ALPHABET, CARD.name, CARD.alphabet)

    def state_specs(self) -> dict[str, StateSpec]:
        return {"memory": StateSpec((HIDDEN,))}

    def encode(self, sentences: Sequence[Sentence]) -> list[Encoded]:
        self.encodes.append(list(sentences))
        return [self._encode(sentence) for sentence in sentences]

    def _encode(self, sentence: Sentence) -> Encoded:
        shift = {"low": 0.0, "high": 1.0}.get(sentence.voice, 0.0)
        if sentence.voice in self.cloned:
            shift = sum(self.cloned[sentence.voice]) / 100
        x, lengths = [torch.zeros(HIDDEN)] * LEAD, []
        for stretch in sentence.spans:
            for phoneme in stretch.phonemes:
                at = ALPHABET.index(phoneme)
                lengths.append(max(1, round((2 + at % 5) / stretch.speed)))
                x += [self.table[at] + shift + stretch.pitch / 12] * lengths[-1]
        made = Encoded(torch.stack(x), len(x), LEAD, tuple(HOP * end for end in accumulate(lengths)))
        self.of[id(made)] = sentence
        return made

    def step(self, encoded: Sequence[Encoded], rows: Tensor, seen: Tensor, state: State) -> Tensor:
        self.steps.append([self.of[id(each)] for each in encoded])
        memory, frames = state["memory"][rows], []
        for at in range(CHUNK):
            places = (seen + at).tolist()
            x = torch.stack([e.x[min(p, e.frames - 1)] for e, p in zip(encoded, places, strict=True)])
            memory = torch.tanh(x + (memory[:, None, :] * self.inner.T).sum(-1))  # row by row the same sum
            frames.append((memory[:, :, None] * self.out).sum(1))
        state["memory"][rows] = memory
        return torch.stack(frames, 1)


class TinyVocoder(Vocoder):
    """Sound of a frame, the one before it and two after; and noise, by place and seed."""

    rate_hz, hop_samples, delay_frames = RATE_HZ, HOP, DELAY

    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(4)
        self.matrix = torch.randn(HOP, (2 + DELAY) * FRAME_WIDTH, generator=chance) / 60

    def state_specs(self, chunk: int) -> dict[str, StateSpec]:
        return {"past": StateSpec((1 + DELAY, FRAME_WIDTH))}

    def step(self, frames: Tensor, rows: Tensor, seen: Tensor, ends: Tensor, seeds: Tensor, state: State) -> Tensor:
        chunk = frames.shape[1]
        there = (seen[:, None] + torch.arange(chunk)) < ends[:, None]
        frames = torch.where(there[..., None], frames, 0.0)
        longer = torch.cat([state["past"][rows], frames], 1)
        state["past"][rows] = longer[:, -(1 + DELAY) :]
        first = (seen - DELAY) * HOP
        return self._sound(longer.unfold(1, 2 + DELAY, 1).transpose(2, 3), first, seeds)

    def vocode(self, frames: Tensor, seed: int = 0) -> Tensor:
        padded = torch.nn.functional.pad(frames, (0, 0, 1, DELAY))
        windows = padded.unfold(1, 2 + DELAY, 1).transpose(2, 3)
        return self._sound(windows, torch.zeros(1, dtype=torch.int64), torch.tensor([seed]))

    def _sound(self, windows: Tensor, first: Tensor, seeds: Tensor) -> Tensor:
        """(n, frames, 2 + DELAY, WIDTH) -> (n, frames * HOP)."""
        flat = windows.flatten(2)
        sound = (flat[:, :, None, :] * self.matrix).sum(-1).flatten(1)
        places = first[:, None] + torch.arange(sound.shape[1])
        noise = torch.frac(torch.sin(places.double() * 12.9898 + seeds[:, None] * 78.233) * 43_758.5453)
        return torch.tanh(sound) * 0.9 + 0.05 * noise.float()


def parts() -> EngineComponents:
    return EngineComponents(Voice(), None, devices.make_device("cpu", "fp32"), lambda _: "", TinyVocoder())


def start(build: Callable[[], EngineComponents] = parts, **settings: Any) -> EngineClient:
    return EngineClient(EngineConfig(**{"max_speaking_rows": 8, **settings}), thread_backend(CARD, build))


def sentence(text: str, voice: str = "low", seed: int = 0, **manner: float) -> Sentence:
    return Sentence((PhonemeSpan(text, **manner),), voice, seed)


def expected(said: Sentence, model: Voice | None = None) -> np.ndarray:
    """Samples of a sentence in one pass over all of it: int16."""
    voice, vocoder = model or Voice(), TinyVocoder()
    [encoded] = [voice._encode(said)]
    memory, frames = torch.zeros(1, HIDDEN), []
    for x in encoded.x:
        memory = torch.tanh(x[None] + (memory[:, None, :] * voice.inner.T).sum(-1))
        frames.append((memory[:, :, None] * voice.out).sum(1))
    return to_int16(fade_in(vocoder.vocode(torch.stack(frames, 1), said.seed)[0, LEAD * HOP :].numpy()))


class SentenceOutput:
    """Receives the pieces of a sentence, and has an event for the first."""

    def __init__(self) -> None:
        self.pieces: list[SentenceAudio] = []
        self.begun = threading.Event()

    def __call__(self, sound: SentenceAudio) -> None:
        self.pieces.append(sound)
        self.begun.set()

    @property
    def pcm(self) -> np.ndarray:
        return np.frombuffer(b"".join(piece.pcm for piece in self.pieces), "<i2")


def synthesize(client: EngineClient, said: Sentence, **options: Any) -> tuple[Ticket, SentenceOutput]:
    heard = SentenceOutput()
    return client.synthesize(said, heard, **options), heard


def result(ticket: Ticket) -> Any:
    future: Future[Any] = ticket.future
    return future.result(WAIT_S)


def expect_pcm(ticket: Ticket, heard: SentenceOutput, want: np.ndarray) -> None:
    """All samples of a sentence arrived, and they are those of `want`."""
    assert result(ticket) == len(want) == len(heard.pcm)
    np.testing.assert_allclose(heard.pcm.astype(int), want.astype(int), atol=1)


def expect_pieces(heard: SentenceOutput) -> None:
    """The first piece has the ends of phonemes, and the last one says that it is the last."""
    assert [bool(piece.phoneme_ends) for piece in heard.pieces] == [True] + [False] * (len(heard.pieces) - 1)
    assert [piece.is_last for piece in heard.pieces] == [False] * (len(heard.pieces) - 1) + [True]
