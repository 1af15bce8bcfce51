"""Training of the network that separates two speakers, from recordings of single speakers: no text is needed.

Each step mixes crops of different recordings: two people who overlap at least for half a second, in a quarter of the
mixtures a third one who talks when both are silent, half of the mixtures in rooms that answer, all with noise. Crops
are played up to 12 % slower or faster, which makes more voices of few. The network is told who talks when as
diarization would tell it: pauses joined, boundaries shifted, some stretches missed.

Source  signal-to-noise ratio as the loss: arXiv:1811.02508, here of spectra with compressed magnitudes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from asr_serve import units
from asr_serve.errors import AsrServeError, OptionError
from asr_serve.models.auxiliary import silero
from asr_serve.models.auxiliary.speech_separation import LEVEL, SPEAKERS, SeparationNetwork, activity_of, spectrum_of
from asr_serve_tools.train.audio_corpus import AudioCorpus, CorpusClip

CROP_SAMPLES = units.s_to_samples(5)
COMPRESSION = 0.5
"""Exponent of magnitudes in the loss: a recogniser reads logarithms, in which soft sounds count too."""
WARM_UP, LEAST = 0.05, 0.01
"""Share of the steps in which the learning rate rises, and share of it that is left at the end."""
PAUSE_SAMPLES = units.ms_to_samples(300)
SHIFT_SAMPLES = units.ms_to_samples(80)
"""Deviation of boundaries that the network is told."""
FADE_SAMPLES = units.ms_to_samples(10)
HELD_OUT_BATCHES = 2

HELP = """\
Trains the network that separates two speakers of a recording who talk at once.

  python -m asr_serve_tools.train.speech_separation --audio recordings/ --run runs/separation

Each recording is to hold one speaker, another in each. The same command continues an interrupted run.
"""


class SeparationTrainingSettings(NamedTuple):
    """Settings that a resumed run must share with the first."""

    lr: float
    batch: int
    held_out: float
    seed: int


class Mixture(NamedTuple):
    pcm: np.ndarray
    """(samples,) float32."""
    tracks: np.ndarray
    """(2, samples) float32: what each speaker contributes."""
    activity: np.ndarray
    """(2, frames) float32, as diarization tells it."""


class MixtureMaker:
    """Mixtures of crops of recordings, the same for the same number."""

    def __init__(
        self, corpus: AudioCorpus, clips: Sequence[CorpusClip], speech: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        """`speech`: (start, end) in samples of the stretches of each clip in which somebody talks."""
        self._corpus, self._clips, self._speech = corpus, clips, speech

    def make(self, chance: np.random.Generator) -> Mixture:
        people = 3 if chance.random() < 0.25 else 2
        chosen = chance.choice(len(self._clips), people, replace=False)
        spans = _layout(chance)
        tracks = np.zeros((people, CROP_SAMPLES), np.float32)
        talks = np.zeros((people, CROP_SAMPLES), bool)
        for person, (start, end) in enumerate(spans[:people]):
            pcm, speaks = self._crop(int(chosen[person]), end - start, chance)
            tracks[person, start : start + len(pcm)] = pcm * 10 ** (chance.uniform(-4, 4) / 20)
            talks[person, start : start + len(pcm)] = speaks
        if people > SPEAKERS:  # when the two are silent
            silent = ~_widened(talks[:SPEAKERS].any(0), PAUSE_SAMPLES)
            tracks[2] *= np.convolve(silent, np.ones(FADE_SAMPLES, np.float32) / FADE_SAMPLES, "same")
        if chance.random() < 0.5:
            room_s = float(chance.uniform(0.1, 0.6))
            tracks = np.stack([_in_room(track, room_s, chance) for track in tracks])
        level = float(np.sqrt(np.square(tracks.sum(0)).mean()))
        noise = _noise(chance) * level * 10 ** (-chance.uniform(15, 60) / 20)
        pcm = tracks.sum(0) + noise
        scale = LEVEL / max(1e-6, float(np.sqrt(np.square(pcm).mean())))
        activity = np.stack([_told(each, chance) for each in talks[:SPEAKERS]])
        if chance.random() < 0.25:
            _miss(activity, chance)
        return Mixture(pcm * scale, tracks[:SPEAKERS] * scale, activity)

    def _crop(self, number: int, samples: int, chance: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """A crop of at most so many samples, and in which of them there is speech."""
        clip, tempo = self._clips[number], float(chance.uniform(0.88, 1.12))
        source = min(clip.samples, int(samples * tempo))
        begin = int(chance.integers(0, clip.samples - source + 1))
        pcm = self._corpus.read(clip, begin, source)
        speaks = np.zeros(len(pcm), np.float32)
        for start, end in self._speech[number]:
            speaks[max(0, start - begin) : max(0, end - begin)] = 1
        places = np.arange(int(len(pcm) / tempo)) * tempo
        played = np.interp(places, np.arange(len(pcm)), pcm).astype(np.float32)
        spoken = speaks[places.astype(np.int64)] > 0
        fade = np.minimum(1, np.arange(len(played), dtype=np.float32) / FADE_SAMPLES)
        played *= fade * fade[::-1]
        loud = float(np.sqrt(np.square(played[spoken]).mean())) if spoken.any() else 1.0
        return played * (LEVEL / max(1e-6, loud)), spoken


def _layout(chance: np.random.Generator) -> list[tuple[int, int]]:
    """(start, end) of two people, who overlap for half a second at least, and of a third one, in samples."""
    half = units.ms_to_samples(500)
    start = 0 if chance.random() < 0.5 else int(chance.integers(0, CROP_SAMPLES // 2))
    end = CROP_SAMPLES if chance.random() < 0.5 else int(chance.integers(CROP_SAMPLES // 2 + half, CROP_SAMPLES))
    length = int(chance.integers(2 * half, CROP_SAMPLES))
    other = int(chance.integers(max(0, start + half - length), min(end - half, CROP_SAMPLES - half)))
    spans = [(start, end), (other, min(CROP_SAMPLES, other + length))]
    if chance.random() < 0.5:
        spans.reverse()
    return [*spans, (0, CROP_SAMPLES)]


def _told(talks: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    """Activity by frame, (frames,) float32: pauses joined, boundaries shifted."""
    edges = np.flatnonzero(np.diff(talks.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    joined: list[list[int]] = []
    for start, end in edges.tolist():
        if joined and start - joined[-1][1] <= PAUSE_SAMPLES:
            joined[-1][1] = end
        else:
            joined.append([start, end])
    turns = [
        (start + round(chance.normal(0, SHIFT_SAMPLES)), end + round(chance.normal(0, SHIFT_SAMPLES)))
        for start, end in joined
    ]
    activity: np.ndarray = activity_of([turns], len(talks))[0].numpy()
    return activity


def _miss(activity: np.ndarray, chance: np.random.Generator) -> None:
    """Takes a stretch from one of two who talk at once: diarization misses it."""
    both = np.flatnonzero(activity.all(0))
    if len(both):
        first = int(chance.choice(both))
        activity[int(chance.integers(0, 2)), first : first + int(chance.integers(10, 100))] = 0


def _widened(where: np.ndarray, samples: int) -> np.ndarray:
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(where)])
    places = np.arange(len(where))
    return sums[np.minimum(places + samples, len(where))] > sums[np.maximum(places - samples, 0)]


def _in_room(track: np.ndarray, room_s: float, chance: np.random.Generator) -> np.ndarray:
    """The direct sound, and a tail that falls by 60 dB in room_s."""
    samples = int(room_s * units.RATE_HZ)
    tail = chance.standard_normal(samples, np.float32) * np.exp(-6.9 * np.arange(samples, dtype=np.float32) / samples)
    tail[:32] = 0
    tail *= chance.uniform(0.2, 1.0) / float(np.sqrt(np.square(tail).sum()))
    tail[0] = 1.0
    size = 1 << (len(track) + samples - 1).bit_length()
    answer = np.fft.irfft(np.fft.rfft(track, size) * np.fft.rfft(tail, size), size)
    return answer[: len(track)].astype(np.float32)


def _noise(chance: np.random.Generator) -> np.ndarray:
    """White noise, or noise that falls with frequency, of level 1."""
    noise = chance.standard_normal(CROP_SAMPLES, np.float32)
    if chance.random() < 0.5:
        noise = np.convolve(noise, np.ones(8, np.float32), "same").astype(np.float32)
    return noise / np.float32(np.sqrt(np.square(noise).mean()))


class _Batches(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Batches by the number of their step, made in another process: pcm (rows, samples), tracks (rows, 2, samples),
    activity (rows, 2, frames)."""

    def __init__(self, maker: MixtureMaker, settings: SeparationTrainingSettings, first: int, last: int) -> None:
        self._maker, self._settings, self._first, self._count = maker, settings, first, last - first

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        if index >= self._count:
            raise IndexError(index)
        chance = np.random.default_rng((self._settings.seed, self._first + index))
        made = [self._maker.make(chance) for _ in range(self._settings.batch)]
        pcm, tracks, activity = (torch.from_numpy(np.stack(each)) for each in zip(*made, strict=True))
        return pcm.float(), tracks.float(), activity


def loss_of(network: SeparationNetwork, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Negative signal-to-noise ratio, in dB, of spectra whose magnitudes are compressed; the mean of all speakers."""
    pcm, tracks, activity = batch
    mixture = spectrum_of(pcm)
    spectra = torch.stack([spectrum_of(track) for track in tracks.unbind(1)], 1)
    with torch.autocast("cpu", torch.bfloat16):
        masks = network(mixture, activity)
    loud = mixture.abs()[:, None]
    cosine = (spectra * mixture.conj()[:, None]).real / (spectra.abs() * loud + 1e-8)
    wanted = spectra.abs() ** COMPRESSION
    found = (masks + 1e-4) ** COMPRESSION * loud**COMPRESSION
    power = wanted.square().sum((2, 3))
    wrong = (found * (found - 2 * wanted * cosine)).sum((2, 3)) + power  # the square of the complex difference
    return -(10 * torch.log10((power + 1e-2) / (wrong + 1e-2))).mean()


@torch.no_grad()
def improvement_db(network: SeparationNetwork, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Signal-to-noise ratio of each speaker where both talk, in excess of that in the mixture, in dB: (rows, 2)."""
    pcm, tracks, activity = batch
    mixture, both = spectrum_of(pcm)[:, None], activity.prod(1)[:, None, :, None]
    spectra = torch.stack([spectrum_of(track) for track in tracks.unbind(1)], 1) * both
    masked = network(mixture[:, 0], activity) * mixture * both
    left, at_first = ((spectra - each).abs().square().sum((2, 3)) for each in (masked, mixture * both))
    return 10 * torch.log10((at_first + 1e-4) / (left + 1e-4))


def spoken(vad: silero.Silero, pcm: np.ndarray) -> list[tuple[int, int]]:
    """(start, end) in samples of the stretches in which somebody talks."""
    windows = len(pcm) // silero.WINDOW_SAMPLES
    audio = torch.from_numpy(np.ascontiguousarray(pcm[None, : windows * silero.WINDOW_SAMPLES]))
    scores, _ = vad.step(audio, vad.state(1), torch.tensor([windows]))
    edges = np.flatnonzero(np.diff((scores[0].numpy() > 0.5).astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    return [(int(start), int(end)) for start, end in edges * silero.WINDOW_SAMPLES]


def rate(step: int, steps: int) -> float:
    """Learning rate at a step, as a share of the highest."""
    done = step / steps
    return min(1.0, (done + 1 / steps) / WARM_UP) * (LEAST + (1 - LEAST) * (1 + math.cos(math.pi * done)) / 2)


class SeparationTraining:
    """Resumable training in a run folder."""

    def __init__(self, folder: Path, settings: SeparationTrainingSettings, corpus: AudioCorpus, steps: int) -> None:
        self.folder, self.settings, self.steps, self.step = folder, settings, steps, 0
        torch.manual_seed(settings.seed)
        self.network = SeparationNetwork()
        self.optimizer = torch.optim.AdamW(self.network.parameters(), settings.lr, (0.9, 0.98), weight_decay=1e-2)
        vad = silero.load()
        learning, held = (
            MixtureMaker(corpus, clips, [spoken(vad, corpus.read(clip, 0, clip.samples)) for clip in clips])
            for clips in corpus.split(settings.held_out)
        )
        self._learning = learning
        self._held = list(_Batches(held, settings._replace(seed=settings.seed + 1), 0, HELD_OUT_BATCHES))
        if (folder / "state.pt").is_file():
            self._resume()

    def _resume(self) -> None:
        state = torch.load(self.folder / "state.pt", map_location="cpu", weights_only=True)
        for name, value in self.settings._asdict().items():
            if value != state["settings"][name]:
                raise OptionError(
                    f"{name}: {value}", f"{self.folder} began with {state['settings'][name]}", "take another run folder"
                )
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def save(self) -> None:
        state = {"settings": self.settings._asdict(), "network": self.network.state_dict(), "step": self.step}
        torch.save(state | {"optimizer": self.optimizer.state_dict()}, self.folder / "state.part")
        os.replace(self.folder / "state.part", self.folder / "state.pt")
        weights = {name: each.half().contiguous() for name, each in self.network.state_dict().items()}
        save_file(weights, self.folder / "speech_separation.safetensors")

    def train(self, log_every: int, save_every: int) -> Iterator[dict[str, Any]]:
        """Train up to the last step. Yields lines of the log."""
        batches = _Batches(self._learning, self.settings, self.step, self.steps)
        since, sums = time.monotonic(), list[float]()
        for batch in DataLoader(batches, batch_size=None, num_workers=1, prefetch_factor=4):
            share = rate(self.step, self.steps)
            for group in self.optimizer.param_groups:
                group["lr"] = self.settings.lr * share
            loss = loss_of(self.network, batch)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            self.optimizer.step()
            self.step += 1
            sums.append(loss.item())
            last = self.step == self.steps
            if last or self.step % log_every == 0 or self.step % save_every == 0:
                line: dict[str, Any] = {"step": self.step, "steps": self.steps, "loss": round(sum(sums) / len(sums), 3)}
                line["step_s"] = round((time.monotonic() - since) / len(sums), 2)
                if last or self.step % save_every == 0:
                    line["held_out_db"] = round(self.held_out(), 2)
                    self.save()
                yield line
                since, sums = time.monotonic(), []

    def held_out(self) -> float:
        """Mean improvement, in dB, where both talk, on mixtures of recordings that are not learnt from."""
        return float(torch.cat([improvement_db(self.network, batch) for batch in self._held]).mean())


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m asr_serve_tools.train.speech_separation",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--audio", nargs="+", required=True, metavar="PATH", help="files, folders or lists")
    add("--run", type=Path, required=True, metavar="FOLDER", help="everything that is written goes here")
    add("--steps", type=int, default=2_400, help="when to stop; the learning rate falls towards it (%(default)s)")
    add("--batch", type=int, default=12, help="mixtures of 5 s in a step (%(default)s)")
    add("--lr", type=float, default=1e-3, help="highest learning rate (%(default)s)")
    add("--held-out", type=float, default=0.1, help="share of the recordings to measure on (%(default)s)")
    add("--threads", type=int, default=1, help="threads of the products (%(default)s)")
    add("--seed", type=int, default=0)
    add("--log-every", type=int, default=25, metavar="STEPS", help="(%(default)s)")
    add("--save-every", type=int, default=100, metavar="STEPS", help="(%(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments()
    options = parser.parse_args(argv)
    for name in ("steps", "batch", "lr", "held_out", "threads", "log_every", "save_every"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be greater than 0")
    try:
        run_training(options)
    except AsrServeError as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped: the same command goes on from the last save", file=sys.stderr)
        return 130
    return 0


def run_training(options: argparse.Namespace) -> None:
    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    torch.set_num_threads(options.threads)
    settings = SeparationTrainingSettings(options.lr, options.batch, options.held_out, options.seed)
    corpus = AudioCorpus.build(options.audio, options.run / "audio", say)
    run = SeparationTraining(options.run, settings, corpus, options.steps)
    with (options.run / "log.jsonl").open("a") as log:
        for line in run.train(options.log_every, options.save_every):
            text = json.dumps(line)
            log.write(text + "\n")
            log.flush()
            say(text)


if __name__ == "__main__":
    sys.exit(main())
