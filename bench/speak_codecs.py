"""What is lost between frames and sound: each codec says what teachers said, from its spectra and pitch alone.

Clips are of all voices that taught, of sentences that no run learnt from. Every codec gets the same frames.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from asr_serve.audio.features.slaney_mel import RATE_HZ, SlaneyMel
from asr_serve.audio.resample import resample_clip
from asr_serve.devices.cpu import CpuDevice
from asr_serve.engine.tts.builder import find_vocoder
from asr_serve.models.auxiliary import ge2e
from asr_serve.models.interfaces import Vocoder
from asr_serve.models.registry import model_modules
from asr_serve.units import RATE_HZ as HEARD_HZ
from asr_serve_tools.evaluate import voice_quality as measures
from asr_serve_tools.evaluate.wer import wer
from asr_serve_tools.train.voice.teacher_voices import (
    ENGLISH,
    HeartTeacher,
    KokoroTeacher,
    TeacherPhonemizer,
    TeacherVoice,
    corpus_utterance,
)

Row = dict[str, Any]
CODECS = ("source-filter-22k", "hifigan-universal")
CHUNK = 16
"""Frames of a step, as the engine has them."""


class Clip(NamedTuple):
    text: str
    pcm: np.ndarray
    frames: torch.Tensor
    """(1, T, 81): mel and F0."""


def measure(texts: Sequence[str], listener: measures.EvaluationRecognizer, say: Callable[[str], None]) -> list[Row]:
    """A row for the teachers' own speech, and one for each codec. Raises WeightsMissing."""
    clips = recorded(texts)
    say(f"codecs  {len(clips)} clips of {len(ENGLISH.split()) + 1} voices")
    rows = [row("the teachers themselves", clips, [clip.pcm for clip in clips], listener)]
    for name in CODECS:
        codec = loaded(name)
        said, cpu_s = [], 0.0
        for clip in clips:
            started = time.process_time()
            said.append(spoken(codec, clip.frames))
            cpu_s += time.process_time() - started
        length_s = sum(len(clip.pcm) for clip in clips) / RATE_HZ
        rows.append(row(name, clips, said, listener) | {"rtf": round(cpu_s / length_s, 4)})
        say(f"codecs  {rows[-1]}")
    return rows


def recorded(texts: Sequence[str]) -> list[Clip]:
    """Each read by the next voice, round and round."""
    reader, mel, session = TeacherPhonemizer(), SlaneyMel(), None
    voices: list[TeacherVoice] = [HeartTeacher()]
    for name in ENGLISH.split():
        kokoro = KokoroTeacher(name, session)
        session = kokoro.session
        voices.append(kokoro)
    clips = []
    for at, text in enumerate(texts):
        phonemes = reader.phonemes(text)
        read = voices[at % len(voices)].read(reader.ids(phonemes), 1.0)
        if (kept := corpus_utterance(text, reader.spoken(phonemes), read)) is not None:
            _, pcm, f0 = kept
            with torch.inference_mode():
                spectra = mel(torch.from_numpy(pcm)[None])
            clips.append(Clip(text, pcm, torch.cat([spectra, torch.from_numpy(f0)[None, :, None]], 2)))
    return clips


def loaded(name: str) -> Vocoder:
    card, folder = find_vocoder(name)
    found: Vocoder = model_modules("vocoder")[card.kind].load(folder, card, CpuDevice())
    torch.set_num_threads(1)
    return found


@torch.inference_mode()
def spoken(codec: Vocoder, frames: torch.Tensor) -> np.ndarray:
    """In steps of one row, as a caller alone is served."""
    count = frames.shape[1]
    state = {name: torch.zeros(1, *spec.shape, dtype=spec.dtype) for name, spec in codec.state_specs(CHUNK).items()}
    padded = torch.nn.functional.pad(frames, (0, 0, 0, -(count + codec.delay_frames) % CHUNK + codec.delay_frames))
    row, ends, seeds = (torch.tensor([value]) for value in (0, count, 0))
    parts = [
        codec.step(padded[:, seen : seen + CHUNK], row, torch.tensor([seen]), ends, seeds, state)
        for seen in range(0, padded.shape[1] - CHUNK + 1, CHUNK)
    ]
    late = codec.delay_frames * codec.hop_samples
    return torch.cat(parts, 1)[0, late : late + count * codec.hop_samples].float().numpy()


def row(name: str, clips: Sequence[Clip], said: Sequence[np.ndarray], listener: measures.EvaluationRecognizer) -> Row:
    """`similarity`: mean cosine of each clip's voice to its original's."""
    errors = wer([clip.text for clip in clips], listener.transcribe(said, RATE_HZ))
    speaker = ge2e.load()
    pairs = zip(clips, said, strict=True)
    voices = [
        [speaker.embed(resample_clip(each, RATE_HZ, HEARD_HZ)) for each in (clip.pcm, pcm)] for clip, pcm in pairs
    ]
    likeness = [measures.voice_distance(pcm, clip.pcm) for clip, pcm in zip(clips, said, strict=True)]
    mean = measures.mean_voice_distance(likeness)
    return {
        "codec": name,
        "clips": len(clips),
        "wer": round(errors.percent, 2),
        "similarity": round(float(np.mean([ge2e.similarity(*pair) for pair in voices])), 4),
        "mcd_db": round(mean.mcd_db, 3),
        "mel": round(mean.mel, 3),
    }
