"""FastPitch, chunk by chunk: many voices, sound before the sentence is made.

A sentence is encoded once: phonemes to hidden vectors, durations, pitch and energy, which are the model's own
unless the sentence asks for others. Its frames come 16 at a time, of many sentences in a step; what a sentence
must remember is a row of state of fixed size. A voice is a vector for the encoder, one for the decoder and how
high it speaks; one that was cloned (train/voice/clone) has low-rank changes to products besides, its own in each
row of a batch.

The network hears a pause before the first phoneme and after the last. They are kept short, and of the first one
only the end is heard.

Source   FastPitch (arXiv:2006.06873), made incremental in models/tts/fastpitch_network
Weights  our own, taught by Kokoro's and hibari's voices: docs/voices.md. They ship with this package
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from asr_serve.audio.features.slaney_mel import HOP_SAMPLES, RATE_HZ
from asr_serve.devices.interface import Device, Linear
from asr_serve.errors import UnknownVoice, WeightsCorrupt
from asr_serve.models.interfaces import (
    FRAME_WIDTH,
    MELS,
    State,
    StateSpec,
    StreamingTtsModel,
    validate_phonemes,
    validate_voice,
)
from asr_serve.models.registry import TtsCard
from asr_serve.models.tts.fastpitch_layers import LoraChanges
from asr_serve.models.tts.fastpitch_network import (
    F0_SCALE,
    LN10_20,
    SEMITONE,
    FastPitchNetwork,
    FastPitchSizes,
    PhonemeProsody,
    places,
)
from asr_serve.types import Sentence

ENGLISH = (
    "heart alloy aoede bella jessica kore nicole nova river sarah sky adam echo eric fenrir liam michael onyx "
    "puck santa alice emma isabella lily daniel fable george lewis"
)
"""By number. American women, American men, British women, British men; the first is the one to use unless told."""
CARDS = (
    TtsCard(
        name="fastpitch-en",
        task="tts",
        kind="fastpitch",
        languages=("en",),
        parameters=9_900_000,
        licence="Apache-2.0",
        source="arXiv:2006.06873",
        hub="",
        shipped="models/tts/weights/fastpitch-en",
        files=("config.json", "model.safetensors"),
        rate_hz=RATE_HZ,
        alphabet="misaki",
        voices=tuple(ENGLISH.split()),
        max_phonemes=400,
        chunk_frames=16,
        clones=True,
        codec="source-filter-22k",
    ),
)
PAUSE = "_"
"""Before the first phoneme and after the last."""
BEFORE, AFTER = 14, 6
"""Frames that those pauses last at most. What begins without a pause before it begins with another sound
now and then (bench/speak.py counts first words that are misheard); from 12 frames on it does not."""
SAID_BEFORE = 2
"""Frames of the pause before the first phoneme that are heard: nobody should wait for the others."""
KEPT_VOICES = 64
"""Cloned voices that stay loaded; the one that was longest unused goes first."""


class FeatureNorms(msgspec.Struct, frozen=True):
    """Of config.json, what numbers are told from (cloning/acoustic_training.AcousticNorms)."""

    mel: tuple[float, float]
    energy: tuple[float, float]
    pitch: dict[str, tuple[float, float]]


class Config(msgspec.Struct, frozen=True):
    """A checkpoint's config.json."""

    sizes: FastPitchSizes
    norms: FeatureNorms
    lengthen: float
    """What all durations are multiplied with: a mean of logarithms is less than the logarithm of a mean."""
    voices: tuple[str, ...]
    vocabulary: dict[str, int]

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Config:
        """Raises WeightsCorrupt."""
        try:
            return cls(
                FastPitchSizes.of(settings),
                *(
                    msgspec.convert(settings[field.name], field.type)
                    for field in msgspec.structs.fields(cls)
                    if field.name != "sizes"
                ),
            )
        except (KeyError, msgspec.ValidationError) as failure:
            raise WeightsCorrupt(f"config.json of a FastPitch: {failure}") from failure


class VoiceParameters(NamedTuple):
    """Who speaks."""

    encoder: Tensor
    """(width,), added to every phoneme."""
    decoder: Tensor
    """(width,), added to every frame."""
    pitch: tuple[float, float]
    """Mean and deviation of the natural log of F0 in Hz."""
    changes: Mapping[str, tuple[Tensor, Tensor]] | None = None
    """By product: (in, rank) and (rank, out). None: this voice is one of the model's own."""
    gain: float = 0.0
    """Natural log of how much louder its frames are made."""


class FastPitchSentence(NamedTuple):
    """A sentence that is about to be said."""

    x: Tensor
    """(frames, width), filled up to whole chunks: what the decoder hears."""
    base: Tensor
    """(frames, 2), as long: natural logs of F0, as the pitch of its phoneme has it, and of how much louder."""
    voice: VoiceParameters
    frames: int
    lead_frames: int
    phoneme_ends_samples: tuple[int, ...]


class Model(StreamingTtsModel[FastPitchSentence]):
    """The acoustic model, with the voices that it knows and those that were registered."""

    hop_samples, frame_width, rate_hz = HOP_SAMPLES, FRAME_WIDTH, RATE_HZ

    def __init__(
        self, name: str, config: Config, tensors: Mapping[str, Tensor], device: Device, fingerprint: str = ""
    ) -> None:
        """`fingerprint`: sha256 of the checkpoint, of which cloned voices must be; empty: of any. Raises
        WeightsCorrupt for tensors that the sizes do not make."""
        self._name, self.config, self._device, self._fingerprint = name, config, device, fingerprint
        parts = _FastPitchTensors(config.sizes, tensors, device)
        self.network, self.chunk_frames = FastPitchNetwork(config.sizes, parts), config.sizes.chunk
        speakers, speakers_decoder = parts.vector("speakers"), parts.vector("speakers_decoder")
        self._voices = {
            voice: VoiceParameters(speakers[at], speakers_decoder[at], config.norms.pitch[voice])
            for at, voice in enumerate(config.voices)
            if voice in config.norms.pitch
        }
        self._cloned: OrderedDict[str, tuple[int, VoiceParameters]] = OrderedDict()

    @property
    def voices(self) -> tuple[str, ...]:
        """All that may be asked for."""
        return (*self._voices, *self._cloned)

    def register_voice(self, name: str, path: Path) -> None:
        """Know a cloned voice by its file, from here on; read again when it has changed. Raises WeightsCorrupt;
        UnknownVoice of one that was taught to other weights: with these it would be another voice, or noise."""
        changed = path.stat().st_mtime_ns
        if name in self._cloned and self._cloned[name][0] == changed:
            self._cloned.move_to_end(name)
            return
        validate_fingerprint(path, self._fingerprint, self._name)
        self._cloned[name] = (changed, read_voice(path, self.config.sizes, self._device.torch_device))
        self._cloned.move_to_end(name)
        while len(self._cloned) > KEPT_VOICES:
            self._cloned.popitem(last=False)

    def remove_voice(self, name: str) -> None:
        """A cloned voice is gone; sentences under way are said to their end."""
        self._cloned.pop(name, None)

    def validate(self, sentence: Sentence) -> None:
        validate_voice(sentence, self.voices, self._name)
        validate_phonemes(sentence, self.config.vocabulary, self._name, "misaki")

    def state_specs(self) -> dict[str, StateSpec]:
        return {name: StateSpec(shape) for name, shape in self.network.state_specs().items()}

    @torch.inference_mode()
    def encode(self, sentences: Sequence[Sentence]) -> list[FastPitchSentence]:
        """One after another: a sentence is a product large enough, and its durations are then the same, to the
        frame, whoever else comes with it."""
        return [self._encode(sentence) for sentence in sentences]

    @torch.inference_mode()
    def step(self, encoded: Sequence[FastPitchSentence], rows: Tensor, seen: Tensor, state: State) -> Tensor:
        starts = seen.tolist()
        cut = [slice(start, start + self.chunk_frames) for start in starts]
        x = torch.stack([each.x[part] for each, part in zip(encoded, cut, strict=True)])
        frames = torch.tensor([each.frames for each in encoded], device=x.device)
        changes = _changes([each.voice for each in encoded])
        out = self.network.step(x, frames, seen, rows, state, changes)
        base = torch.stack([each.base[part] for each, part in zip(encoded, cut, strict=True)])
        return self._frames(out, base)

    @torch.inference_mode()
    def whole(self, encoded: FastPitchSentence) -> Tensor:
        """All frames of a sentence at once, (1, frames, width): what the steps make, for comparison."""
        out = self.network.decode(
            encoded.x[None],
            torch.tensor([encoded.frames], device=encoded.x.device),
            _changes([encoded.voice]),
        )
        return self._frames(out, encoded.base[None])[:, : encoded.frames]

    def _encode(self, sentence: Sentence) -> FastPitchSentence:
        config, where = self.config, self._device.torch_device
        voice = self._voices.get(sentence.voice) or self._cloned[sentence.voice][1]
        phonemes = f"{PAUSE}{sentence.phonemes}{PAUSE}"
        ids = torch.tensor([[config.vocabulary[each] for each in phonemes]], device=where)
        speed, semitones, decibels = (
            torch.tensor([[wanted[0], *wanted, wanted[-1]]], device=where)
            for wanted in (
                [value for each in sentence.spans for value in [getattr(each, name)] * len(each.phonemes)]
                for name in ("speed", "pitch", "energy")
            )
        )
        # Of that pause next to nothing is heard, and a short one spoils the first word.
        speed[:, 0].clamp_(max=1.0)
        there, changes = torch.ones_like(ids, dtype=torch.bool), _changes([voice])
        hidden = self.network.encode(ids, there, voice.encoder[None], changes)
        pitch, voiced, energy = self.network.prosody(hidden, there, changes)
        mean, deviation = voice.pitch
        pitch = pitch + semitones * SEMITONE / deviation
        prosody = PhonemeProsody(pitch, (voiced > 0).float(), energy)
        lengths = self.network.log_durations(hidden, there, changes).exp() * config.lengthen / speed
        durations = whole_frames(lengths)
        durations[:, 0].clamp_(max=BEFORE)
        durations[:, -1].clamp_(max=AFTER)
        frames = int(durations.sum())
        padded = -(-frames // self.chunk_frames) * self.chunk_frames
        index, place = places(durations, torch.arange(padded, device=where)[None])
        said = self.network.condition(hidden, prosody)[0][index[0]]
        # What is asked for on top is a gain: more energy in the prosody would be two thirds of that.
        louder = decibels * LN10_20 + voice.gain
        base = torch.cat([prosody.pitch * prosody.voiced * deviation + mean, louder])[:, index[0]].T
        lead = max(0, int(durations[0, 0]) - SAID_BEFORE)
        ends = (durations[0].cumsum(0)[1:-1] - lead) * HOP_SAMPLES
        x = self.network.decoder_input(said[None], place, voice.decoder[None])[0]
        return FastPitchSentence(x, base, voice, frames, lead, tuple(ends.tolist()))

    def _frames(self, out: Tensor, base: Tensor) -> Tensor:
        """The network's numbers (n, chunk, MELS + 2) to frames as codecs hear them."""
        mean, deviation = self.config.norms.mel
        f0 = torch.where(out[..., MELS + 1] > 0, torch.exp(base[..., 0] + out[..., MELS] / F0_SCALE), 0.0)
        return torch.cat([out[..., :MELS] * deviation + mean + base[..., 1:], f0[..., None]], -1)


def whole_frames(lengths: Tensor) -> Tensor:
    """(rows, phonemes) float -> int64, one at least; what rounding takes from one the next gets."""
    number = torch.arange(lengths.shape[1], device=lengths.device)
    ends = lengths.double().cumsum(1).round().long()
    ends = torch.cummax(ends - number, 1).values.clamp(min=1) + number
    return torch.diff(ends, dim=1, prepend=torch.zeros_like(ends[:, :1]))


def _changes(voices: Sequence[VoiceParameters]) -> LoraChanges | None:
    """Of each row's voice; None where nobody has any."""
    different = list({id(voice): voice for voice in voices}.values())
    if all(voice.changes is None for voice in different):
        return None
    numbers = {id(voice): at for at, voice in enumerate(different)}
    return _StackedChanges(different, [numbers[id(voice)] for voice in voices])


class _StackedChanges(Mapping[str, tuple[Tensor, Tensor]]):
    """The changes of some rows, side by side when a product asks for them."""

    def __init__(self, voices: Sequence[VoiceParameters], rows: Sequence[int]) -> None:
        self._voices, self._rows = [voice.changes or {} for voice in voices], rows
        self._names = dict.fromkeys(name for changes in self._voices for name in changes)

    def __getitem__(self, name: str) -> tuple[Tensor, Tensor]:
        """Zeros where a voice has none to this product, or fewer of them than another."""
        pairs = [changes.get(name) for changes in self._voices]
        some = [pair for pair in pairs if pair is not None]
        rank = max(down.shape[1] for down, _ in some)
        inputs, outputs = some[0][0].shape[0], some[0][1].shape[1]
        downs = some[0][0].new_zeros(len(pairs), inputs, rank)
        ups = some[0][1].new_zeros(len(pairs), rank, outputs)
        for at, pair in enumerate(pairs):
            if pair is not None:
                own = pair[0].shape[1]
                downs[at, :, :own], ups[at, :own] = pair
        return (downs, ups) if len(self._rows) == 1 else (downs[self._rows], ups[self._rows])

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def validate_fingerprint(path: Path, fingerprint: str, model: str) -> None:
    """A voice's file says which weights were taught it. Raises UnknownVoice where those are others,
    WeightsCorrupt."""
    try:
        with safe_open(path, "pt") as file:
            came = (file.metadata() or {}).get("fingerprint", "")
    except (OSError, SafetensorError) as failure:
        raise WeightsCorrupt(f"{path} is no voice: {failure}", todo="clone it again") from failure
    if came and fingerprint and came != fingerprint:
        raise UnknownVoice(
            f"the voice {path.stem!r} was taught to other weights of {model} (sha256 {came[:12]})",
            f"voices of those that are loaded (sha256 {fingerprint[:12]})",
            "clone it again, or load those weights",
            param="voice",
        )


def read_voice(path: Path, sizes: FastPitchSizes, where: torch.device) -> VoiceParameters:
    """A cloned voice's file: `speaker`, `speaker_decoder` (width,), `pitch` (2,), `gain` (1,) if it has
    any, and `NAME.down` (in, rank), `NAME.up` (rank, out) of each product. Raises WeightsCorrupt."""
    try:
        found = {name: tensor.float().to(where) for name, tensor in load_file(path).items()}
        mean, deviation = found["pitch"].tolist()
        (gain,) = found.get("gain", torch.zeros(1)).tolist()
        encoder, decoder = found["speaker"], found["speaker_decoder"]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as failure:
        raise WeightsCorrupt(f"{path} is no voice: {failure}", todo="clone it again") from failure
    if encoder.shape != (sizes.width,) or decoder.shape != (sizes.width,):
        raise WeightsCorrupt(f"{path} is a voice of another model", f"vectors of {sizes.width}", "clone it again")
    strange = next((name for name, tensor in found.items() if not tensor.isfinite().all()), None)
    if strange is not None or deviation <= 0:
        raise WeightsCorrupt(
            f"{path}: {strange or f'the pitch deviates by {deviation:g}'}",
            "numbers; more than 0",
            "clone it again",
        )
    changes = {}
    for name, (outputs, inputs) in sizes.adapted().items():
        down, up = found.get(f"{name}.down"), found.get(f"{name}.up")
        if down is None or up is None:
            continue
        if down.shape[:1] != (inputs,) or up.shape[1:] != (outputs,) or down.shape[1:] != up.shape[:1]:
            raise WeightsCorrupt(
                f"{path}: {name} is changed by {tuple(down.shape)} and {tuple(up.shape)}",
                f"({inputs}, rank) and (rank, {outputs})",
                "it was cloned from another model: clone it again",
            )
        changes[name] = (down, up)
    return VoiceParameters(encoder, decoder, (mean, deviation), changes or None, gain)


class _FastPitchTensors:
    """A checkpoint's tensors as the device multiplies with them. In float32: in bf16 a chunk would differ from the
    whole by more than can be told from an error."""

    def __init__(self, sizes: FastPitchSizes, tensors: Mapping[str, Tensor], device: Device) -> None:
        self._tensors, self._device = tensors, device
        wanted: dict[str, tuple[int, ...]] = {**sizes.tables()}
        for name, (outputs, inputs) in sizes.linears().items():
            wanted |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
        for name in sizes.norms():
            wanted |= {f"{name}.weight": (sizes.width,), f"{name}.bias": (sizes.width,)}
        for name, shape in wanted.items():
            if name not in tensors:
                raise WeightsCorrupt(f"the checkpoint has no tensor {name}", "a FastPitch checkpoint has it")
            if tensors[name].shape != shape:
                raise WeightsCorrupt(f"{name} is {tuple(tensors[name].shape)}", f"config.json makes it {shape}")

    def linear(self, name: str) -> Linear:
        return self._device.linear(self.vector(f"{name}.weight"), self.vector(f"{name}.bias"), torch.float32)

    def vector(self, name: str) -> Tensor:
        return self._tensors[name].float().to(self._device.torch_device)


def load(folder: Path, card: TtsCard, device: Device) -> Model:
    """Raises WeightsCorrupt."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "model.safetensors")
        with (folder / "model.safetensors").open("rb") as file:
            fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, json.JSONDecodeError, SafetensorError) as failure:
        raise WeightsCorrupt(f"{folder} holds no FastPitch: {failure}", todo="get it again") from failure
    return Model(card.name, Config.of(settings), tensors, device, fingerprint)
