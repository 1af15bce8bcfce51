"""FastPitch with a chunked decoder: many voices, audio before the whole sentence is synthesized.

A sentence is encoded once: phonemes to hidden vectors, durations, pitch and energy, predicted unless the sentence
sets them. Its frames are decoded 16 at a time, for many sentences in a step, with a row of state of fixed size for
each sentence. A voice is a vector for the encoder, one for the decoder, and its pitch statistics; a cloned voice
(asr_serve/cloning) also has low-rank changes to linear layers, separate for each row of a batch.

The network's input has a pause before the first phoneme and after the last. Both are kept short, and of the first
one only the end is played.

Source   FastPitch (arXiv:2006.06873), made incremental in models/tts/fastpitch_network
Weights  our own, trained on Kokoro's and hibari's voices: docs/voices.md. They ship with this package
"""

from __future__ import annotations

import hashlib
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
from asr_serve.models.checkpoints.config_file import read_config
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
    frame_positions,
)
from asr_serve.types import Sentence

ENGLISH = (
    "heart alloy aoede bella jessica kore nicole nova river sarah sky adam echo eric fenrir liam michael onyx "
    "puck santa alice emma isabella lily daniel fable george lewis"
)
"""Voices by number: American women, American men, British women, British men; the first is the default."""
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
        vocoder="source-filter-22k",
    ),
)
PAUSE = "_"
"""Phoneme before the first and after the last."""
BEFORE, AFTER = 14, 6
"""Most frames of these pauses. A sentence without a pause before it sometimes begins with another sound
(bench/speak.py counts misrecognized first words); with 12 frames or more it does not."""
SAID_BEFORE = 2
"""Frames of the first pause that are played; the others would only add latency."""
KEPT_VOICES = 64
"""Cloned voices that stay loaded; the least recently used one is evicted first."""


class FeatureNorms(msgspec.Struct, frozen=True):
    """Statistics in config.json that normalize features (cloning/acoustic_training.AcousticNorms)."""

    mel: tuple[float, float]
    energy: tuple[float, float]
    pitch: dict[str, tuple[float, float]]


class Config(msgspec.Struct, frozen=True):
    """Settings of a checkpoint's config.json."""

    sizes: FastPitchSizes
    norms: FeatureNorms
    lengthen: float
    """Factor of all durations: durations are predicted as logarithms, whose mean is less than the log of the mean."""
    voices: tuple[str, ...]
    vocabulary: dict[str, int]

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Config:
        """Reads config.json. Raises WeightsCorrupt."""
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
    """Parameters of a voice."""

    encoder: Tensor
    """(width,), added to every phoneme."""
    decoder: Tensor
    """(width,), added to every frame."""
    pitch: tuple[float, float]
    """Mean and deviation of the natural log of F0 in Hz."""
    changes: Mapping[str, tuple[Tensor, Tensor]] | None = None
    """Name of a linear layer -> (in, rank) and (rank, out). None: a voice of the model itself."""
    gain: float = 0.0
    """Gain of its frames, natural log."""


class FastPitchSentence(NamedTuple):
    """Encoded sentence, ready to be decoded."""

    x: Tensor
    """(frames, width), padded to whole chunks: the decoder's input."""
    base: Tensor
    """(frames, 2), as long: natural logs of the phoneme's F0, and of the gain."""
    voice: VoiceParameters
    frames: int
    lead_frames: int
    phoneme_ends_samples: tuple[int, ...]


class Model(StreamingTtsModel[FastPitchSentence]):
    """FastPitch, with its own voices and registered ones."""

    hop_samples, frame_width, rate_hz = HOP_SAMPLES, FRAME_WIDTH, RATE_HZ

    def __init__(
        self, name: str, config: Config, tensors: Mapping[str, Tensor], device: Device, fingerprint: str = ""
    ) -> None:
        """Builds the model. `fingerprint`: sha256 of the checkpoint, which cloned voices must match; empty: any
        matches. Raises WeightsCorrupt for tensors that do not have the sizes of `config`."""
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
        """Names of all voices, cloned ones included."""
        return (*self._voices, *self._cloned)

    def register_voice(self, name: str, path: Path) -> None:
        """Loads a cloned voice's file, again when it has changed. Raises WeightsCorrupt; UnknownVoice for one that
        was trained with other weights: with these it would be another voice, or noise."""
        modified_ns = path.stat().st_mtime_ns
        if name in self._cloned and self._cloned[name][0] == modified_ns:
            self._cloned.move_to_end(name)
            return
        validate_fingerprint(path, self._fingerprint, self._name)
        self._cloned[name] = (modified_ns, read_voice(path, self.config.sizes, self._device.torch_device))
        self._cloned.move_to_end(name)
        while len(self._cloned) > KEPT_VOICES:
            self._cloned.popitem(last=False)

    def remove_voice(self, name: str) -> None:
        """Removes a cloned voice; sentences in progress keep their copy."""
        self._cloned.pop(name, None)

    def validate(self, sentence: Sentence) -> None:
        validate_voice(sentence, self.voices, self._name)
        validate_phonemes(sentence, self.config.vocabulary, self._name, "misaki")

    def state_specs(self) -> dict[str, StateSpec]:
        return {name: StateSpec(shape) for name, shape in self.network.state_specs().items()}

    @torch.inference_mode()
    def encode(self, sentences: Sequence[Sentence]) -> list[FastPitchSentence]:
        """Encodes sentences one by one, large enough products: so durations do not depend on the batch."""
        return [self._encode(sentence) for sentence in sentences]

    @torch.inference_mode()
    def step(self, encoded: Sequence[FastPitchSentence], rows: Tensor, seen: Tensor, state: State) -> Tensor:
        starts = seen.tolist()
        parts = [slice(start, start + self.chunk_frames) for start in starts]
        x = torch.stack([each.x[part] for each, part in zip(encoded, parts, strict=True)])
        frames = torch.tensor([each.frames for each in encoded], device=x.device)
        changes = _changes([each.voice for each in encoded])
        out = self.network.step(x, frames, seen, rows, state, changes)
        base = torch.stack([each.base[part] for each, part in zip(encoded, parts, strict=True)])
        return self._frames(out, base)

    @torch.inference_mode()
    def whole(self, encoded: FastPitchSentence) -> Tensor:
        """Decodes all frames of a sentence at once, (1, frames, width). Reference for tests of the steps."""
        out = self.network.decode(
            encoded.x[None], torch.tensor([encoded.frames], device=encoded.x.device), _changes([encoded.voice])
        )
        return self._frames(out, encoded.base[None])[:, : encoded.frames]

    def _encode(self, sentence: Sentence) -> FastPitchSentence:
        config, device = self.config, self._device.torch_device
        voice = self._voices.get(sentence.voice) or self._cloned[sentence.voice][1]
        phonemes = f"{PAUSE}{sentence.phonemes}{PAUSE}"
        ids = torch.tensor([[config.vocabulary[each] for each in phonemes]], device=device)
        speed, semitones, decibels = (
            torch.tensor([[per_phoneme[0], *per_phoneme, per_phoneme[-1]]], device=device)
            for per_phoneme in (
                [value for each in sentence.spans for value in [getattr(each, name)] * len(each.phonemes)]
                for name in ("speed", "pitch", "energy")
            )
        )
        # Little of that pause is played, and a short one spoils the first word.
        speed[:, 0].clamp_(max=1.0)
        mask, changes = torch.ones_like(ids, dtype=torch.bool), _changes([voice])
        hidden = self.network.encode(ids, mask, voice.encoder[None], changes)
        pitch, voiced, energy = self.network.prosody(hidden, mask, changes)
        mean, deviation = voice.pitch
        pitch = pitch + semitones * SEMITONE / deviation
        prosody = PhonemeProsody(pitch, (voiced > 0).float(), energy)
        lengths = self.network.log_durations(hidden, mask, changes).exp() * config.lengthen / speed
        durations = whole_frames(lengths)
        durations[:, 0].clamp_(max=BEFORE)
        durations[:, -1].clamp_(max=AFTER)
        frames = int(durations.sum())
        padded = -(-frames // self.chunk_frames) * self.chunk_frames
        index, position = frame_positions(durations, torch.arange(padded, device=device)[None])
        conditioned = self.network.condition(hidden, prosody)[0][index[0]]
        # Requested energy is a gain: more energy in the prosody would have two thirds of the effect.
        log_gains = decibels * LN10_20 + voice.gain
        base = torch.cat([prosody.pitch * prosody.voiced * deviation + mean, log_gains])[:, index[0]].T
        lead = max(0, int(durations[0, 0]) - SAID_BEFORE)
        ends = (durations[0].cumsum(0)[1:-1] - lead) * HOP_SAMPLES
        x = self.network.decoder_input(conditioned[None], position, voice.decoder[None])[0]
        return FastPitchSentence(x, base, voice, frames, lead, tuple(ends.tolist()))

    def _frames(self, out: Tensor, base: Tensor) -> Tensor:
        """Converts the network's output (n, chunk, MELS + 2) to frames for vocoders."""
        mean, deviation = self.config.norms.mel
        f0 = torch.where(out[..., MELS + 1] > 0, torch.exp(base[..., 0] + out[..., MELS] / F0_SCALE), 0.0)
        return torch.cat([out[..., :MELS] * deviation + mean + base[..., 1:], f0[..., None]], -1)


def whole_frames(lengths: Tensor) -> Tensor:
    """Rounds (rows, phonemes) float to int64, one at least; the rounding error carries over to the next phoneme."""
    number = torch.arange(lengths.shape[1], device=lengths.device)
    ends = lengths.double().cumsum(1).round().long()
    ends = torch.cummax(ends - number, 1).values.clamp(min=1) + number
    return torch.diff(ends, dim=1, prepend=torch.zeros_like(ends[:, :1]))


def _changes(voices: Sequence[VoiceParameters]) -> LoraChanges | None:
    """Returns the low-rank changes of each row's voice; None where no voice has any."""
    distinct = list({id(voice): voice for voice in voices}.values())
    if all(voice.changes is None for voice in distinct):
        return None
    numbers = {id(voice): at for at, voice in enumerate(distinct)}
    return _StackedChanges(distinct, [numbers[id(voice)] for voice in voices])


class _StackedChanges(Mapping[str, tuple[Tensor, Tensor]]):
    """Low-rank changes of some rows, stacked when a layer requests them."""

    def __init__(self, voices: Sequence[VoiceParameters], rows: Sequence[int]) -> None:
        self._voices, self._rows = [voice.changes or {} for voice in voices], rows
        self._names = dict.fromkeys(name for changes in self._voices for name in changes)

    def __getitem__(self, name: str) -> tuple[Tensor, Tensor]:
        """Stacks the changes of a layer: zeros where a voice has none, or a smaller rank than another."""
        pairs = [changes.get(name) for changes in self._voices]
        present = [pair for pair in pairs if pair is not None]
        rank = max(down.shape[1] for down, _ in present)
        inputs, outputs = present[0][0].shape[0], present[0][1].shape[1]
        downs = present[0][0].new_zeros(len(pairs), inputs, rank)
        ups = present[0][1].new_zeros(len(pairs), rank, outputs)
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
    """Raises UnknownVoice where a cloned voice was not trained with these weights, WeightsCorrupt."""
    try:
        with safe_open(path, "pt") as file:
            trained_on = (file.metadata() or {}).get("fingerprint", "")
    except (OSError, SafetensorError) as failure:
        raise WeightsCorrupt(f"{path} is no voice: {failure}", todo="clone it again") from failure
    if trained_on and fingerprint and trained_on != fingerprint:
        raise UnknownVoice(
            f"the voice {path.stem!r} was taught to other weights of {model} (sha256 {trained_on[:12]})",
            f"voices of those that are loaded (sha256 {fingerprint[:12]})",
            "clone it again, or load those weights",
            param="voice",
        )


def read_voice(path: Path, sizes: FastPitchSizes, where: torch.device) -> VoiceParameters:
    """Reads a cloned voice's file: `speaker`, `speaker_decoder` (width,), `pitch` (2,), optional `gain` (1,), and
    `NAME.down` (in, rank), `NAME.up` (rank, out) of each changed layer. Raises WeightsCorrupt."""
    try:
        tensors = {name: tensor.float().to(where) for name, tensor in load_file(path).items()}
        mean, deviation = tensors["pitch"].tolist()
        (gain,) = tensors.get("gain", torch.zeros(1)).tolist()
        encoder, decoder = tensors["speaker"], tensors["speaker_decoder"]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as failure:
        raise WeightsCorrupt(f"{path} is no voice: {failure}", todo="clone it again") from failure
    if encoder.shape != (sizes.width,) or decoder.shape != (sizes.width,):
        raise WeightsCorrupt(f"{path} is a voice of another model", f"vectors of {sizes.width}", "clone it again")
    strange = next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), None)
    if strange is not None or deviation <= 0:
        raise WeightsCorrupt(
            f"{path}: {strange or f'the pitch deviates by {deviation:g}'}", "numbers; more than 0", "clone it again"
        )
    changes = {}
    for name, (outputs, inputs) in sizes.adapted().items():
        down, up = tensors.get(f"{name}.down"), tensors.get(f"{name}.up")
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
    """Tensors of a checkpoint on the device, in float32: in bf16 a chunk would differ from the whole sentence."""

    def __init__(self, sizes: FastPitchSizes, tensors: Mapping[str, Tensor], device: Device) -> None:
        self._tensors, self._device = tensors, device
        shapes: dict[str, tuple[int, ...]] = {**sizes.tables()}
        for name, (outputs, inputs) in sizes.linears().items():
            shapes |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
        for name in sizes.norms():
            shapes |= {f"{name}.weight": (sizes.width,), f"{name}.bias": (sizes.width,)}
        for name, shape in shapes.items():
            if name not in tensors:
                raise WeightsCorrupt(f"the checkpoint has no tensor {name}", "a FastPitch checkpoint has it")
            if tensors[name].shape != shape:
                raise WeightsCorrupt(f"{name} is {tuple(tensors[name].shape)}", f"config.json makes it {shape}")

    def linear(self, name: str) -> Linear:
        return self._device.linear(self.vector(f"{name}.weight"), self.vector(f"{name}.bias"), torch.float32)

    def vector(self, name: str) -> Tensor:
        return self._tensors[name].float().to(self._device.torch_device)


def load(folder: Path, card: TtsCard, device: Device) -> Model:
    """Loads the model from a checkpoint folder. Raises WeightsCorrupt."""
    config = read_config(folder, "fastpitch", Config.of)
    try:
        tensors = load_file(folder / "model.safetensors")
        with (folder / "model.safetensors").open("rb") as file:
            fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, SafetensorError) as failure:
        raise WeightsCorrupt(f"{folder} holds no FastPitch: {failure}", todo="get it again") from failure
    return Model(card.name, config, tensors, device, fingerprint)
