"""Speech with its text, as frames of a frozen encoder: computed once, kept on disk, memory-mapped.

frames.f16      frames of all clips, one after another, half precision
clips.jsonl     position, length and text of each clip, written after its frames
encoded.json    what the clips come from: a run goes on with the same only, and may have more minutes synthesized
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

import asr_serve
from asr_serve import units
from asr_serve.audio.reader import open_audio
from asr_serve.devices.interface import Device
from asr_serve.errors import AudioError, EmptyAudio, OptionError, WeightsCorrupt
from asr_serve.models.asr.speech_llm.funasr_folder import whisper_tensors
from asr_serve.models.asr.speech_llm.whisper_windows import WhisperSizes, WhisperWindowsEncoder
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card, tts_card
from asr_serve_tools.label.label_store import KEPT, LabelRow
from asr_serve_tools.train.speech_llm.spoken_text import spoken_form
from asr_serve_tools.train.voice.sentences import reading_order, sentences

VOICES = "fastpitch-en"
"""Model that synthesizes sentences, with all of its voices in turn."""
CLIP_CHARACTERS = (40, 220)
"""Sentences are joined up to a random length between these, because each clip costs a window of the encoder."""
LONGEST_SENTENCE = 200
PACES = (0.85, 1.2)
CLIP_S = (0.5, 28.0)
"""Shortest and longest clip that is used."""
HELD_OUT = 20
"""Period of held-out clips: one in this many is never trained on."""
BATCH_CLIPS = 8
SYNTHESIZED = re.compile(r"speech \d+")
"""Keys of clips that our voices speak."""
TOLD_EVERY_S = 20.0


class EncodedClip(msgspec.Struct, frozen=True):
    """Frames and text of one clip."""

    key: str
    text: str
    """Spoken form."""
    first: int
    """Index of its first frame."""
    frames: int
    samples: int
    labeled: bool
    """Whether it is a recording; else a voice of ours speaks."""

    @property
    def held_out(self) -> bool:
        return int(hashlib.sha256(self.key.encode()).hexdigest(), 16) % HELD_OUT == 0


class SpeechSources(msgspec.Struct, frozen=True, kw_only=True):
    """Labelled recordings and texts that a run is trained on."""

    labels: tuple[Path, ...] = ()
    """Manifests that `asr-serve label` writes, or the folders that hold them."""
    sentences: tuple[Path, ...] = ()
    """Texts that our voices speak."""
    speech_minutes: float = 0.0
    """Minutes of synthesized speech."""
    seed: int = 0


class FrozenEncoder:
    """Whisper's encoder in a checkpoint folder of Whisper."""

    def __init__(self, name: str, device: Device, say: Callable[[str], None]) -> None:
        """`name`: a Whisper's, or the folder of its checkpoint. Raises OptionError, WeightsMissing, WeightsCorrupt."""
        path = Path(name).expanduser()
        card = asr_card("whisper-base" if path.is_dir() else name)
        if card.kind != "whisper":
            raise OptionError(f"--encoder {name}", "a Whisper, like whisper-base, or the folder of one")
        folder = store.resolve(card, path if path.is_dir() else None, say)
        try:
            settings = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
            tensors = load_file(folder / "model.safetensors")
        except (OSError, msgspec.MsgspecError, SafetensorError) as failure:
            raise WeightsCorrupt(f"{folder} cannot be read: {failure}", "a checkpoint folder of Whisper") from failure
        self.tensors = {
            f"audio_{key}": value
            for name, value in tensors.items()
            if (key := name.removeprefix("model.")).startswith("encoder.")
        }
        """Tensors by the names of a speech LLM's checkpoint."""
        encoder = whisper_tensors(self.tensors)
        self.sizes = WhisperSizes.of(encoder, settings.get("encoder_attention_heads"))
        self.encoder = WhisperWindowsEncoder(encoder, self.sizes, device)

    @torch.inference_mode()
    def __call__(self, batch: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Frames (n, width) float16 of clips (samples,) float32."""
        device = self.encoder.device.torch_device
        x, packing = self.encoder([torch.from_numpy(pcm).to(device) for pcm in batch])
        frames = x.half().cpu().numpy()
        spans = zip(packing.offsets, packing.frames, strict=True)
        return [frames[offset : offset + count] for offset, count in spans]


class SpokenClip(NamedTuple):
    """A clip before it is encoded. `pcm` (samples,) float32 at 16 kHz."""

    key: str
    text: str
    labeled: bool
    pcm: np.ndarray


class EncodedSpeech:
    """Clips of a folder that `encode_speech` filled."""

    def __init__(self, folder: Path) -> None:
        lines = (folder / "clips.jsonl").read_bytes().splitlines()
        self.clips = [msgspec.json.decode(line, type=EncodedClip) for line in lines]
        encoded = msgspec.json.decode((folder / "encoded.json").read_bytes(), type=dict[str, Any])
        self.width = int(encoded["width"])
        self._frames = np.memmap(folder / "frames.f16", np.float16, "r").reshape(-1, self.width)

    def frames(self, clip: EncodedClip) -> Tensor:
        """Frames (n, width) float32 of a clip."""
        return torch.from_numpy(self._frames[clip.first : clip.first + clip.frames].astype(np.float32))

    def split(self) -> tuple[list[EncodedClip], list[EncodedClip]]:
        """Clips to train on, and those held out. Raises OptionError where one of both would be empty."""
        kept = [clip for clip in self.clips if not clip.held_out]
        held = [clip for clip in self.clips if clip.held_out]
        if not held:
            kept, held = kept[1:], kept[:1]
        if not kept:
            raise OptionError(f"{len(self.clips)} clips of speech", "two or more: one is held out")
        return kept, held


def encode_speech(
    sources: SpeechSources, encoder: FrozenEncoder, name: str, folder: Path, say: Callable[[str], None]
) -> EncodedSpeech:
    """Encode all clips that are not in the folder yet. `name`: of the encoder. Recordings that cannot be decoded are
    reported and left out. Raises OptionError for sources that cannot be read, or other ones than the folder was begun
    with; EmptyAudio where nothing is left."""
    folder.mkdir(parents=True, exist_ok=True)
    width = encoder.sizes.width
    settings = {
        **{
            field: [str(path) for path in paths]
            for field, paths in (("labels", sources.labels), ("sentences", sources.sentences))
        },
        "seed": sources.seed,
        "encoder": name,
        "width": width,
    }
    _expect_same(folder / "encoded.json", settings)
    done = _whole_clips(folder, width)
    known = {clip.key: clip.samples for clip in done}
    at = sum(clip.frames for clip in done)
    progress = _Progress(len(done), sum(clip.samples for clip in done), say)
    with (folder / "frames.f16").open("ab") as frames, (folder / "clips.jsonl").open("ab") as clips:
        for batch in _batches(_clips(sources, known, say)):
            lines = []
            for clip, encoded in zip(batch, encoder([clip.pcm for clip in batch]), strict=True):
                samples = len(clip.pcm)
                frames.write(encoded.tobytes())
                row = EncodedClip(clip.key, clip.text, at, len(encoded), samples, clip.labeled)
                lines.append(msgspec.json.encode(row) + b"\n")
                at += len(encoded)
                progress.add(samples)
            frames.flush()
            clips.write(b"".join(lines))
            clips.flush()
    progress.finish()
    if at == 0:
        raise EmptyAudio(
            "no clip of speech with a text that can be spoken", "labels, or sentences and --speech-minutes"
        )
    return EncodedSpeech(folder)


def _expect_same(path: Path, settings: dict[str, Any]) -> None:
    if path.is_file():
        was = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        for name, value in settings.items():
            if was.get(name) != value:
                raise OptionError(f"{name}: {value}", f"{path.parent} began with {was.get(name)}", "take another --run")
        return
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(settings))
    os.replace(part, path)


def _whole_clips(folder: Path, width: int) -> list[EncodedClip]:
    """Clips that were written whole; what follows them in the files is cut off."""
    lines, frames = folder / "clips.jsonl", folder / "frames.f16"
    if not lines.is_file():
        return []
    size, kept, done = frames.stat().st_size // (2 * width), 0, list[EncodedClip]()
    for line in lines.read_bytes().splitlines(keepends=True):
        try:
            clip = msgspec.json.decode(line, type=EncodedClip)
        except msgspec.DecodeError:
            break
        if not line.endswith(b"\n") or clip.first + clip.frames > size:
            break
        done.append(clip)
        kept += len(line)
    for path, length in ((lines, kept), (frames, 2 * width * sum(clip.frames for clip in done))):
        with path.open("ab") as file:
            file.truncate(length)
    return done


def _batches(clips: Iterable[SpokenClip]) -> Iterator[list[SpokenClip]]:
    batch: list[SpokenClip] = []
    for clip in clips:
        if not CLIP_S[0] <= units.samples_to_s(len(clip.pcm)) <= CLIP_S[1]:
            continue
        batch.append(clip)
        if len(batch) == BATCH_CLIPS:
            yield batch
            batch = []
    if batch:
        yield batch


def _clips(sources: SpeechSources, known: Mapping[str, int], say: Callable[[str], None]) -> Iterator[SpokenClip]:
    """Clips that are not known yet: first the labelled ones. `known`: samples of clips by their keys."""
    for manifest in sources.labels:
        yield from _labeled_clips(manifest, known, say)
    if sources.sentences:
        yield from _synthesized_clips(sources, known)


def label_rows(manifest: Path) -> list[LabelRow]:
    """Rows of a manifest, or of the one in a folder of labels. Raises OptionError."""
    path = manifest / KEPT if manifest.is_dir() else manifest
    try:
        return [msgspec.json.decode(line, type=LabelRow) for line in path.read_bytes().splitlines()]
    except (OSError, msgspec.MsgspecError) as failure:
        raise OptionError(
            f"{path}: {failure}", "kept.jsonl of `asr-serve label`, or its folder", param="labels"
        ) from failure


def _labeled_clips(manifest: Path, known: Mapping[str, int], say: Callable[[str], None]) -> Iterator[SpokenClip]:
    for row in label_rows(manifest):
        key, text = f"{row.audio_filepath} {row.offset:.3f}", spoken_form(row.text)
        if text is None or key in known:
            continue
        try:
            pcm = _read(row)
        except AudioError as failure:
            say(f"{row.audio_filepath}: {failure}")
            continue
        yield SpokenClip(key, text, True, pcm)


def _read(row: LabelRow) -> np.ndarray:
    """Samples of a labelled segment."""
    first, count = units.s_to_samples(row.offset), units.s_to_samples(row.duration)
    parts, at = [np.zeros(0, np.float32)], 0
    with open_audio(row.audio_filepath) as stream:
        for chunk in stream:
            parts.append(chunk[max(0, first - at) : max(0, first + count - at)])
            at += len(chunk)
            if at >= first + count:
                break
    return np.concatenate(parts).astype(np.float32)


def _synthesized_clips(sources: SpeechSources, known: Mapping[str, int]) -> Iterator[SpokenClip]:
    """Clips of synthesized speech, until there are minutes enough. What clip i says, and how, depends on i alone."""
    wanted, keys = units.s_to_samples(60 * sources.speech_minutes), (f"speech {i}" for i in itertools.count())
    if sum(samples for key, samples in known.items() if SYNTHESIZED.fullmatch(key)) >= wanted:
        return
    order = reading_order(sentences(sources.sentences, LONGEST_SENTENCE), sources.seed)
    spoken = (sentence for sentence in order if spoken_form(sentence) is not None)
    voices = tts_card(VOICES).voices
    with asr_serve.load(VOICES) as model:
        total = 0
        for index, key in enumerate(keys):
            if total >= wanted:
                return
            chance = random.Random(f"{sources.seed} {index}")
            text, length = next(spoken), chance.randint(*CLIP_CHARACTERS)
            while len(text) < length:
                text = f"{text} {next(spoken)}"
            voice, pace = chance.choice(voices), chance.uniform(*PACES)
            if key not in known:
                speech = model.speak(text, voice=voice, speed=round(pace, 3), seed=index, rate_hz=units.RATE_HZ)
                pcm = speech.read().astype(np.float32) / 32_768
                yield SpokenClip(key, spoken_form(text) or "", False, pcm)
                total += len(pcm)
            total += known.get(key, 0)


class _Progress:
    """Progress of encoding, reported at most once in TOLD_EVERY_S seconds."""

    def __init__(self, clips: int, samples: int, say: Callable[[str], None]) -> None:
        self._clips, self._samples, self._say = clips, samples, say
        self._before, self._began_s = samples, time.monotonic()
        self._told_s = self._began_s

    def add(self, samples: int) -> None:
        self._clips, self._samples = self._clips + 1, self._samples + samples
        if time.monotonic() - self._told_s >= TOLD_EVERY_S:
            self._told_s = time.monotonic()
            speed = units.samples_to_s(self._samples - self._before) / (self._told_s - self._began_s)
            self._say(f"encoded {self._line} ({speed:.1f} s of audio a second)")

    @property
    def _line(self) -> str:
        return f"{self._clips} clips, {units.samples_to_s(self._samples) / 60:.1f} minutes"

    def finish(self) -> None:
        self._say(f"speech: {self._line}")
