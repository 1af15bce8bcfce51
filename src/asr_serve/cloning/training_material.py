"""Clips to speech that a voice is learnt from: who speaks in them, how high, and which frames are which
phoneme's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from asr_serve.audio.features.slaney_mel import SlaneyMel
from asr_serve.audio.input_manifest import InputItem
from asr_serve.cloning.clips import (
    EDGE_SILENCE_S,
    ClipRecognizer,
    CloningClip,
    split_recording,
    to_16k,
    transcript_of,
)
from asr_serve.cloning.phoneme_alignment import ConsensusAlignment, consensus_alignment
from asr_serve.cloning.pitch_tracking import track_pitch
from asr_serve.cloning.voice_corpus import RATE_HZ, CorpusUtterance, VoiceCorpus, normalize_level
from asr_serve.errors import OptionError, TooFewClips
from asr_serve.models.auxiliary.ge2e import Ge2eEncoder, normalize_clip, similarity
from asr_serve.models.tts.fastpitch import PAUSE
from asr_serve.voices.cloning_messages import ClipReport

MOST_CLIPS, MOST_S = 400, 1_800.0
LEAST_CLIPS, LEAST_S = 5, 20.0
"""Of clips that are good, and speech in them. Twenty clips of two minutes make a better voice."""
ANOTHER, NEAR = 0.77, 0.7
"""A clip that is less like the mean of the others than the first is somebody else's, by the speaker encoder's
cosine: of LibriSpeech's speakers one's own clips are at 0.85 or more, 98 of 100 of others' below 0.75. Of two
single clips the second says the same."""
COST = 0.85
APART_FRAMES, APART_SHARE = 9.0, 4.0
"""Of an alignment: above such a cost, or where the voices that it is compared with are so many frames apart and so
many times the clips' median, the text is not what is said."""

Phonemes = Callable[[str], str]
"""Text -> phonemes in the model's alphabet, no pauses around them. Raises OptionError."""
Reference = Callable[[str], Sequence[tuple[np.ndarray, np.ndarray]]]
"""Phonemes -> how known voices say them: of each mel (frames, 80), and frames of each and of the pauses around."""
Told = Callable[[float], None]
"""The share that is done."""


class AcceptedClip(NamedTuple):
    """A clip, and whose voice it is."""

    clip: CloningClip
    voice: np.ndarray


class TrainingMaterial(NamedTuple):
    """`clips` are good; `verdicts` tell of all. `voice` (256,): what they have in common; `ceiling`: the cosine of
    one half of them to the other, which no copy can be expected to pass."""

    clips: list[AcceptedClip]
    verdicts: list[ClipReport]
    voice: np.ndarray
    ceiling: float
    seconds: float


def gather_material(
    items: Iterable[InputItem],
    texts: Mapping[str, str],
    ear: ClipRecognizer,
    encoder: Ge2eEncoder,
    told: Told = lambda _: None,
) -> TrainingMaterial:
    """Hear all recordings, and keep the clips that are good and one speaker's. Raises TooFewClips, OptionError."""
    found: list[AcceptedClip] = []
    verdicts: list[ClipReport] = []
    seconds, listed = 0.0, list(items)
    for number, item in enumerate(listed):
        told(number / len(listed))
        for each in split_recording(item, transcript_of(item.key, texts), ear):
            if isinstance(each, ClipReport):
                verdicts.append(each)
            elif len(found) >= MOST_CLIPS or seconds > MOST_S:
                verdicts.append(ClipReport(each.key, length_s(each), each.text, "there is enough without it"))
            else:
                found.append(AcceptedClip(each, encoder.embed(normalize_clip(to_16k(each.pcm)))))
                seconds += length_s(each)
    found, others = main_speaker_clips(found)
    verdicts += others
    check_enough_clips(found, verdicts)
    verdicts += [ClipReport(good.clip.key, length_s(good.clip), good.clip.text) for good in found]
    voices = np.stack([good.voice for good in found])
    halves = [voices[at::2].mean(0) for at in (0, 1)]
    mean = voices.mean(0)
    told(1.0)
    return TrainingMaterial(
        found,
        verdicts,
        mean / np.linalg.norm(mean),
        similarity(*halves),
        round(sum(length_s(good.clip) for good in found), 2),
    )


def length_s(clip: CloningClip) -> float:
    """Of what is spoken in it."""
    return round(len(clip.pcm) / RATE_HZ - 2 * EDGE_SILENCE_S, 2)


def main_speaker_clips(found: list[AcceptedClip]) -> tuple[list[AcceptedClip], list[ClipReport]]:
    """Whose clips are most alike; the others' are left out. Raises OptionError where that would be every third."""
    if len(found) < 3:
        return found, []
    voices = np.stack([good.voice for good in found])
    alike = voices @ voices.T
    # The clip most like all others is the speaker's; the mean of all may be nobody's.
    centre = voices[alike[int(np.median(alike, axis=1).argmax())] > NEAR].mean(0)
    near = np.array([similarity(voice, centre) for voice in voices])
    kept = [good for good, cosine in zip(found, near, strict=True) if cosine >= ANOTHER]
    if len(kept) < 2 / 3 * len(found):
        raise OptionError(
            f"{len(found) - len(kept)} of {len(found)} clips are of other speakers than the rest",
            "clips of one speaker",
            "leave the others' out",
            param="audio",
        )
    out = [
        ClipReport(good.clip.key, length_s(good.clip), good.clip.text, f"another voice (likeness {cosine:.2f})")
        for good, cosine in zip(found, near, strict=True)
        if cosine < ANOTHER
    ]
    return kept, out


def check_enough_clips(found: Sequence[AcceptedClip], verdicts: Sequence[ClipReport]) -> None:
    seconds = sum(length_s(good.clip) for good in found)
    if len(found) >= LEAST_CLIPS and seconds >= LEAST_S:
        return
    wrong = [f"{verdict.clip}: {verdict.left_out}" for verdict in verdicts if verdict.left_out]
    more = f" Left out: {'; '.join(wrong[:8])}{' and more' if len(wrong) > 8 else ''}" if wrong else ""
    raise TooFewClips(
        f"{len(found)} good clips, {seconds:.0f} s of speech",
        f"at least {LEAST_CLIPS} and {LEAST_S:g} s; 20 clips of 5 s are a good number",
        f"record more, in a quiet room.{more}",
    )


def write_material(
    material: TrainingMaterial,
    phonemes: Phonemes,
    reference: Reference,
    folder: Path,
    name: str,
    told: Told = lambda _: None,
) -> tuple[VoiceCorpus, list[ClipReport]]:
    """A voice's files in `folder`, of the clips whose frames could be laid upon their phonemes; and what became of
    every clip. Raises TooFewClips."""
    mels = SlaneyMel()
    laid: list[tuple[AcceptedClip, CorpusUtterance, ConsensusAlignment, np.ndarray]] = []
    verdicts = [verdict for verdict in material.verdicts if verdict.left_out]
    for number, good in enumerate(material.clips):
        told(number / len(material.clips))
        clip = good.clip
        pcm = normalize_level(clip.pcm)
        mel = mels(torch.from_numpy(pcm)[None])[0].numpy()
        try:
            said = phonemes(clip.text)
            found = consensus_alignment(mel, reference(said)) if said.strip() else None
        except OptionError as failure:
            verdicts.append(ClipReport(clip.key, length_s(clip), clip.text, f"its text cannot be read: {failure}"))
            continue
        if found is None:
            verdicts.append(
                ClipReport(clip.key, length_s(clip), clip.text, "its text is longer than what is said")
            )
            continue
        line = CorpusUtterance(clip.text, f"{PAUSE}{said}{PAUSE}", len(pcm), found.frames.tolist())
        laid.append((good, line, found, pcm))
    usual = float(np.median([found.apart for _, _, found, _ in laid])) if laid else 0.0
    most = max(APART_FRAMES, APART_SHARE * usual)
    voice, kept = VoiceCorpus(folder, name, write=True), []
    for good, line, found, pcm in laid:
        length = length_s(good.clip)
        if found.cost > COST or found.apart > most:
            wrong = f"its text is not what is said (cost {found.cost:.2f}, {found.apart:.1f} frames apart)"
            verdicts.append(ClipReport(good.clip.key, length, line.text, wrong))
            continue
        voice.append(line, pcm, track_pitch(pcm))
        verdicts.append(ClipReport(good.clip.key, length, line.text))
        kept.append(good)
    check_enough_clips(kept, verdicts)
    told(1.0)
    return voice, verdicts
