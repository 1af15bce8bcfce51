"""Training of the light vocoder, models/tts/vocoders/source_filter, on recorded speech, from its mel and pitch.

The loss is the distance between spectra; in the second half, discriminators are added (spectral_losses). Random
noise cannot match the noise of a recording exactly: so everything is generated twice, and the distance between
the two is subtracted. The checkpoint has the running mean of the weights.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from asr_serve.cloning.voice_corpus import HOP
from asr_serve.devices.cpu import PlainLinear
from asr_serve.errors import OptionError
from asr_serve.models.tts.vocoders import source_filter
from asr_serve_tools.train.predicted_mels import MelPredictor
from asr_serve_tools.train.spectral_losses import Discriminators, SpectralDistance
from asr_serve_tools.train.vocoder_data import VocoderBatch, VocoderCorpus

SPECTRAL = {"stft": 1.0, "mel": 1.0}
JUDGED = {"stft": 2.0, "mel": 4.0, "critic": 1.0, "layers": 2.0}
"""Weights of the losses, without discriminators and with them."""
JUDGED_LR = 0.3
"""Factor on the vocoder's learning rate once discriminators are used; they have the full rate."""
WARM_UP_STEPS = 100
LEAST = 0.05
"""Final share of the learning rate, at the end of each half's cosine."""
MEAN = 0.999
"""Decay of the running mean of the weights per step."""


class VocoderTrainingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a run. `speech`: a folder filled by `asr-serve train voice`. `run`: a folder for log.jsonl,
    checkpoint/ (the model so far, 16-bit) and state.pt (the state to continue from). `crop_frames`: of 11.6 ms."""

    speech: Path
    run: Path
    steps: int = 8_000
    judged_from: int = 4_000
    batch: int = 12
    start: Path | None = None
    """Checkpoint to start from; ignored when the run continues from its state."""
    acoustic: Path | None = None
    """Checkpoint of an acoustic model, whose predicted spectra are used beside recorded ones."""
    crop_frames: int = 64
    judged_frames: int = 32
    """Frames of a crop that discriminators see, which cost most of the time."""
    lr: float = 1e-3
    width: int = 256
    inner: int = 768
    blocks: int = 8
    channels: int = 16
    """Channels of the discriminators."""
    tests: int = 24
    """Held-out recordings to measure on."""
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    """Threads to compute on; 0: the device's default."""
    log_every: int = 50
    save_every: int = 500

    def config(self) -> source_filter.Config:
        return source_filter.Config(width=self.width, inner=self.inner, blocks=self.blocks)


FIXED = ("batch", "crop_frames", "judged_frames", "lr", "width", "inner", "blocks", "channels", "seed")
"""Options that must not change when a run continues."""


class TrainableProducts:
    """Linear layers over trainable tensors, unpacked. Implements a part of devices/interface.Device."""

    dtype = torch.float32

    def __init__(self, at: torch.device) -> None:
        self.torch_device = at

    def linear(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> PlainLinear:
        return PlainLinear(weight, bias)


class VocoderTraining:
    """Resumable training of a vocoder in a run folder."""

    def __init__(self, options: VocoderTrainingOptions, speech: VocoderCorpus, at: torch.device, bf16: bool) -> None:
        self.options, self.speech, self.at, self.bf16 = options, speech, at, bf16
        self.config = options.config()
        first = (
            source_filter.initial_tensors(self.config, options.seed)
            if options.start is None
            else load_start_tensors(options)
        )
        self.tensors = {name: tensor.to(at).requires_grad_() for name, tensor in first.items()}
        self.averaged_tensors = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        self.model = self._model(self.tensors)
        self.distance = SpectralDistance().to(at)
        torch.manual_seed(options.seed)
        self.critics = Discriminators(options.channels).to(at)
        self.optimizer = torch.optim.AdamW(self.tensors.values(), options.lr, (0.8, 0.99), weight_decay=0.0)
        self.critics_optimizer = torch.optim.AdamW(self.critics.parameters(), options.lr, (0.8, 0.99), weight_decay=0.0)
        self.step = 0
        if (options.run / "state.pt").is_file():
            self._resume()

    def _model(self, tensors: dict[str, Tensor]) -> source_filter.Model:
        return source_filter.Model(self.config, tensors, TrainableProducts(self.at))  # type: ignore[arg-type]

    def _state(self) -> dict[str, Any]:
        return {
            "tensors": {name: tensor.detach() for name, tensor in self.tensors.items()},
            "means": self.averaged_tensors,
            "critics": self.critics.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "critics_optimizer": self.critics_optimizer.state_dict(),
            "step": self.step,
            "fixed": {name: getattr(self.options, name) for name in FIXED},
        }

    def _resume(self) -> None:
        state = torch.load(self.options.run / "state.pt", map_location=self.at, weights_only=True)
        for name, was in state["fixed"].items():
            if (current := getattr(self.options, name)) != was:
                raise OptionError(
                    f"{name}: {current}", f"{self.options.run} began with {was}", "take another run folder"
                )
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(state["tensors"][name])
        self.averaged_tensors = state["means"]
        self.critics.load_state_dict(state["critics"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.critics_optimizer.load_state_dict(state["critics_optimizer"])
        self.step = state["step"]

    def save(self) -> None:
        part = self.options.run / "state.part"
        torch.save(self._state(), part)
        part.replace(self.options.run / "state.pt")
        write_checkpoint(self.options.run / "checkpoint", self.config, self.averaged_tensors, {"steps": self.step})

    def batch(self, step: int) -> tuple[VocoderBatch, Tensor, slice]:
        """Speech of a step, seeds of its noise and samples for discriminators; all depend on its number alone."""
        options = self.options
        chance = random.Random(options.seed * 1_000_003 + step)
        found = self.speech.batch(options.batch, chance)
        seeds = torch.tensor([chance.getrandbits(31) for _ in range(2 * options.batch)])
        first = chance.randint(0, options.crop_frames - options.judged_frames) * HOP
        seen = slice(first, first + options.judged_frames * HOP)
        return VocoderBatch(*(tensor.to(self.at) for tensor in found)), seeds.to(self.at), seen

    def rate(self) -> float:
        """Learning rate of this step, as a share of the highest; it rises and falls in each half separately."""
        options = self.options
        judged = self.step >= options.judged_from
        first, last = (options.judged_from, options.steps) if judged else (0, min(options.judged_from, options.steps))
        progress = (self.step - first) / max(1, last - first)
        warm = min(1.0, (self.step - first + 1) / WARM_UP_STEPS)
        return warm * (LEAST + (1 - LEAST) * (1 + math.cos(math.pi * progress)) / 2)

    def train_step(self) -> dict[str, float]:
        """Train one step. Returns the losses."""
        judged = self.step >= self.options.judged_from
        (frames, target), seeds, seen = self.batch(self.step)
        for optimizer, share in ((self.optimizer, JUDGED_LR if judged else 1.0), (self.critics_optimizer, 1.0)):
            for group in optimizer.param_groups:
                group["lr"] = self.options.lr * self.rate() * share
        with torch.autocast(self.at.type, torch.bfloat16, enabled=self.bf16):
            generated, again = self.model.takes(frames, seeds.chunk(2))
        found: dict[str, Tensor] = {}
        if judged:
            with torch.autocast(self.at.type, torch.bfloat16, enabled=self.bf16):
                loss = self.critics.discriminator_loss(generated.detach()[:, seen], target[:, seen])
            self._down(loss, self.critics_optimizer, list(self.critics.parameters()))
            found["judged"] = loss.detach()
            self.critics.requires_grad_(False)
            with torch.autocast(self.at.type, torch.bfloat16, enabled=self.bf16):
                found |= self.critics.generator_loss(generated[:, seen], target[:, seen])
            self.critics.requires_grad_(True)
        found |= self.distance(generated, target, again)
        weights = JUDGED if judged else SPECTRAL
        total = torch.stack([share * found[name] for name, share in weights.items()]).sum()
        self._down(total, self.optimizer, list(self.tensors.values()))
        self.step += 1
        decay = min(MEAN, self.step / (self.step + 9))
        with torch.no_grad():
            for name, mean in self.averaged_tensors.items():
                mean.lerp_(self.tensors[name], 1 - decay)
        return {name: loss.item() for name, loss in found.items()}

    def _down(self, loss: Tensor, optimizer: torch.optim.Optimizer, tensors: list[Tensor]) -> None:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(tensors, 5.0)
        optimizer.step()

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        """Mean distances of the averaged model on held-out recordings."""
        model = self._model(self.averaged_tensors)

        def say(frames: Tensor, seed: int) -> Tensor:
            return model.vocode(frames.to(self.at), torch.tensor([seed], device=self.at)).cpu()

        return mean_distances(self.speech, self.options.tests, say)

    def train(self) -> Iterator[dict[str, Any]]:
        """Train up to the last step. Yields lines of the log."""
        options = self.options
        since, sums, count = time.monotonic(), dict[str, float](), 0
        while self.step < options.steps:
            for name, loss in self.train_step().items():
                sums[name] = sums.get(name, 0.0) + loss
            count += 1
            last = self.step == options.steps or self.step == options.judged_from
            if last or self.step % options.log_every == 0 or self.step % options.save_every == 0:
                wall_s = time.monotonic() - since
                line: dict[str, Any] = {"step": self.step, "steps": options.steps}
                line |= {name: round(value / count, 4) for name, value in sums.items()}
                line |= {"steps_per_s": round(count / wall_s, 3)}
                if last or self.step % options.save_every == 0:
                    line["held_out"] = self.held_out()
                    self.save()
                yield line
                since, sums, count = time.monotonic(), {}, 0


def load_start_tensors(options: VocoderTrainingOptions) -> dict[str, Tensor]:
    """Tensors of the checkpoint to start from. Raises OptionError if it has other sizes, or cannot be read."""
    assert options.start is not None
    try:
        tensors = load_file(options.start / "model.safetensors")
    except (OSError, SafetensorError) as failure:
        raise OptionError(f"{options.start}: {failure}", "the folder of a checkpoint", param="start") from failure
    shapes = options.config().shapes()
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != shapes:
        raise OptionError(f"{options.start} is of other sizes", "the same width, inner and blocks", param="start")
    # In the same order as in a resumed run, because the optimizer identifies tensors by their position.
    return {name: tensors[name].float() for name in shapes}


def mean_distances(speech: VocoderCorpus, tests: int, say: Callable[[Tensor, int], Tensor]) -> dict[str, float]:
    """Mean distances between recordings and the output of `say`, which gets frames (1, T, 81) and a seed: energy
    distances, and as "stft_once" and "mel_once" those of one output, which noise keeps above 0."""
    distance, sums = SpectralDistance(), dict[str, float]()
    recordings = speech.test_recordings(tests)
    for recording in recordings:
        frames, target = speech.whole(recording)
        generated, again = say(frames, 0), say(frames, 1)
        found = distance(generated, target, again)
        found |= {f"{name}_once": value for name, value in distance(generated, target).items()}
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + float(value) / len(recordings)
    return {name: round(value, 4) for name, value in sums.items()}


def write_checkpoint(
    folder: Path, config: source_filter.Config, tensors: dict[str, Tensor], more: dict[str, Any]
) -> None:
    """Write a checkpoint: 16-bit tensors, then config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "model.part"
    save_file({name: tensor.detach().half().cpu().contiguous() for name, tensor in tensors.items()}, part)
    part.chmod(0o644)  # the server may run as another user
    part.replace(folder / "model.safetensors")
    settings = {"model_type": "source_filter", **msgspec.to_builtins(config), **more}
    (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n")


def train_vocoder(options: VocoderTrainingOptions, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Train to the last step, from the last save if there is one. Returns the log's last line. Raises OptionError."""
    from asr_serve import devices

    device = devices.make_device(options.device, options.dtype)
    if options.threads:
        device.set_threads(options.threads)
    options.run.mkdir(parents=True, exist_ok=True)
    acoustic = MelPredictor(options.acoustic) if options.acoustic else None
    speech = VocoderCorpus(options.speech, options.crop_frames, acoustic)
    say(f"{sum(speech.minutes.values()):.0f} minutes of {len(speech.minutes)} voices")
    run = VocoderTraining(options, speech, device.torch_device, device.dtype == torch.bfloat16)
    say(f"step {run.step} of {options.steps} on {device.name} {device.dtype_name}")
    line: dict[str, Any] = {}
    with (options.run / "log.jsonl").open("a") as log:
        for line in run.train():
            text = json.dumps(line)
            log.write(text + "\n")
            log.flush()
            say(text)
    return line
