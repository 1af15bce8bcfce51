"""Selection of training clips of one speaker, with their pitch and the alignment of their phonemes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from asr_serve.audio.features.slaney_mel import SlaneyMel
from asr_serve.audio.input_manifest import InputItem
from asr_serve.cloning.clips import EDGE_SILENCE_S, ClipRecognizer, CloningClip, split_recording, to_16k, transcript_of
from asr_serve.cloning.phoneme_alignment import ConsensusAlignment, consensus_alignment
from asr_serve.cloning.pitch_tracking import track_pitch
from asr_serve.cloning.voice_corpus import RATE_HZ, CorpusUtterance, VoiceCorpus, normalize_level
from asr_serve.errors import OptionError, TooFewClips
from asr_serve.models.auxiliary.ge2e import Ge2eEncoder, normalize_clip, similarity
from asr_serve.models.tts.fastpitch import PAUSE
from asr_serve.voices.cloning_messages import ClipReport

MOST_CLIPS, MOST_S = 400, 1_800.0
LEAST_CLIPS, LEAST_S = 5, 20.0
"""Least number of good clips, and of seconds of speech in them. Twenty clips of two minutes make a better voice."""
ANOTHER, NEAR = 0.77, 0.7
"""Least cosine, by the speaker encoder, of a clip with the mean of the others, and of two single clips of one
speaker. Of LibriSpeech's speakers one's own clips are at 0.85 or more, 98 of 100 of others' below 0.75."""
COST = 0.85
APART_FRAMES, APART_SHARE = 9.0, 4.0
"""Limits of an alignment's cost, and of the deviation between the reference voices (in frames, and relative to the
clips' median): above them the text does not match the recording."""

Phonemes = Callable[[str], str]
"""Text -> phonemes in the model's alphabet, no pauses around them. Raises OptionError."""
Reference = Callable[[str], Sequence[tuple[np.ndarray, np.ndarray]]]
"""Phonemes -> utterances of reference voices: mel (frames, 80), and frames of the phonemes and the pauses around."""
OnShareDone = Callable[[float], None]
"""Callback with the completed fraction."""


class AcceptedClip(NamedTuple):
    """Clip with its speaker embedding."""

    clip: CloningClip
    voice: np.ndarray


class TrainingMaterial(NamedTuple):
    """Selected material. `clips` are good; `verdicts` cover all. `voice` (256,): mean speaker embedding;
    `ceiling`: cosine of one half of the clips with the other, which no clone can be expected to exceed."""

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
    on_progress: OnShareDone = lambda _: None,
) -> TrainingMaterial:
    """Recognizes all recordings, and selects the good clips of one speaker. Raises TooFewClips, OptionError."""
    accepted: list[AcceptedClip] = []
    verdicts: list[ClipReport] = []
    seconds, listed = 0.0, list(items)
    for number, item in enumerate(listed):
        on_progress(number / len(listed))
        for each in split_recording(item, transcript_of(item.key, texts), ear):
            if isinstance(each, ClipReport):
                verdicts.append(each)
            elif len(accepted) >= MOST_CLIPS or seconds > MOST_S:
                verdicts.append(ClipReport(each.key, length_s(each), each.text, "there is enough without it"))
            else:
                accepted.append(AcceptedClip(each, encoder.embed(normalize_clip(to_16k(each.pcm)))))
                seconds += length_s(each)
    accepted, others = main_speaker_clips(accepted)
    verdicts += others
    check_enough_clips(accepted, verdicts)
    verdicts += [ClipReport(good.clip.key, length_s(good.clip), good.clip.text) for good in accepted]
    voices = np.stack([good.voice for good in accepted])
    half_means = [voices[at::2].mean(0) for at in (0, 1)]
    mean = voices.mean(0)
    on_progress(1.0)
    return TrainingMaterial(
        accepted,
        verdicts,
        mean / np.linalg.norm(mean),
        similarity(*half_means),
        round(sum(length_s(good.clip) for good in accepted), 2),
    )


def length_s(clip: CloningClip) -> float:
    """Returns the duration of the clip without its edges of silence."""
    return round(len(clip.pcm) / RATE_HZ - 2 * EDGE_SILENCE_S, 2)


def main_speaker_clips(found: list[AcceptedClip]) -> tuple[list[AcceptedClip], list[ClipReport]]:
    """Selects the clips of the most frequent speaker. Raises OptionError where a third or more are of others."""
    if len(found) < 3:
        return found, []
    voices = np.stack([item.voice for item in found])
    cosines = voices @ voices.T
    # The clip most similar to all others is the speaker's; the mean of all may be no speaker's.
    centre = voices[cosines[int(np.median(cosines, axis=1).argmax())] > NEAR].mean(0)
    cosines_to_centre = np.array([similarity(voice, centre) for voice in voices])
    selected = [item for item, cosine in zip(found, cosines_to_centre, strict=True) if cosine >= ANOTHER]
    if len(selected) < 2 / 3 * len(found):
        raise OptionError(
            f"{len(found) - len(selected)} of {len(found)} clips are of other speakers than the rest",
            "clips of one speaker",
            "leave the others' out",
            param="audio",
        )
    left_out = [
        ClipReport(item.clip.key, length_s(item.clip), item.clip.text, f"another voice (likeness {cosine:.2f})")
        for item, cosine in zip(found, cosines_to_centre, strict=True)
        if cosine < ANOTHER
    ]
    return selected, left_out


def check_enough_clips(found: Sequence[AcceptedClip], verdicts: Sequence[ClipReport]) -> None:
    seconds = sum(length_s(item.clip) for item in found)
    if len(found) >= LEAST_CLIPS and seconds >= LEAST_S:
        return
    wrong = [f"{verdict.clip}: {verdict.left_out}" for verdict in verdicts if verdict.left_out]
    more = f" Left out: {'; '.join(wrong[:8])}{' and more' if len(wrong) > 8 else ''}" if wrong else ""
    raise TooFewClips(
        f"{len(found)} usable clip{'s' * (len(found) != 1)}, {seconds:.0f} s of speech",
        f"at least {LEAST_CLIPS} and {LEAST_S:g} s; 20 clips of 5 s are a good number",
        f"record more, in a quiet room.{more}",
    )


def write_material(
    material: TrainingMaterial,
    phonemes: Phonemes,
    reference: Reference,
    folder: Path,
    name: str,
    on_progress: OnShareDone = lambda _: None,
) -> tuple[VoiceCorpus, list[ClipReport]]:
    """Writes a voice's files in `folder` from the clips that could be aligned, and returns a report on every clip.
    Raises TooFewClips."""
    mels = SlaneyMel()
    aligned: list[tuple[AcceptedClip, CorpusUtterance, ConsensusAlignment, np.ndarray]] = []
    verdicts = [verdict for verdict in material.verdicts if verdict.left_out]
    for number, accepted in enumerate(material.clips):
        on_progress(number / len(material.clips))
        clip = accepted.clip
        pcm = normalize_level(clip.pcm)
        mel = mels(torch.from_numpy(pcm)[None])[0].numpy()
        try:
            clip_phonemes = phonemes(clip.text)
            alignment = consensus_alignment(mel, reference(clip_phonemes)) if clip_phonemes.strip() else None
        except OptionError as failure:
            verdicts.append(ClipReport(clip.key, length_s(clip), clip.text, f"its text cannot be read: {failure}"))
            continue
        if alignment is None:
            verdicts.append(ClipReport(clip.key, length_s(clip), clip.text, "its text is longer than what is said"))
            continue
        line = CorpusUtterance(clip.text, f"{PAUSE}{clip_phonemes}{PAUSE}", len(pcm), alignment.frames.tolist())
        aligned.append((accepted, line, alignment, pcm))
    usual = float(np.median([found.apart for _, _, found, _ in aligned])) if aligned else 0.0
    most = max(APART_FRAMES, APART_SHARE * usual)
    voice, used = VoiceCorpus(folder, name, write=True), []
    for accepted, line, alignment, pcm in aligned:
        length = length_s(accepted.clip)
        if alignment.cost > COST or alignment.apart > most:
            wrong = f"its text is not what is said (cost {alignment.cost:.2f}, {alignment.apart:.1f} frames apart)"
            verdicts.append(ClipReport(accepted.clip.key, length, line.text, wrong))
            continue
        voice.append(line, pcm, track_pitch(pcm))
        verdicts.append(ClipReport(accepted.clip.key, length, line.text))
        used.append(accepted)
    check_enough_clips(used, verdicts)
    on_progress(1.0)
    return voice, verdicts
