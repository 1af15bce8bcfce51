"""Checks of a run's requirements before it starts, because synthesis takes hours before a failure would show."""

from __future__ import annotations

import tempfile
from pathlib import Path

from asr_serve.errors import OptionError
from asr_serve.models.auxiliary import ge2e
from asr_serve.models.checkpoints.store import verified_published_folder
from asr_serve.models.registry import tts_card
from asr_serve_tools.train.voice.acoustic_model import AcousticTrainingOptions
from asr_serve_tools.train.voice.sentences import sentences
from asr_serve_tools.train.voice.synthesize_corpus import SynthesisJob
from asr_serve_tools.train.voice.teacher_voices import TeacherPhonemizer

CHECKPOINT = ("config.json", "model.safetensors")


def check_requirements(job: SynthesisJob, options: AcousticTrainingOptions) -> None:
    """Check sizes, start checkpoint, texts, folders, packages and weights. Raises OptionError, WeightsMissing,
    WeightsCorrupt, and OSError for a folder that cannot be written."""
    sizes = options.sizes
    if sizes.width % (2 * sizes.heads):
        raise OptionError(f"width {sizes.width}", f"a multiple of {2 * sizes.heads}: {sizes.heads} heads share it")
    if options.start is not None:
        for name in CHECKPOINT:
            if not (options.start / name).is_file():
                raise OptionError(f"{options.start} has no {name}", "a folder that a run before has made as model/")
    sentences(job.texts, min(job.characters, job.heart_characters))
    for folder in (job.folder, options.out):
        _expect_writable(folder)
    TeacherPhonemizer()
    if job.voices:
        verified_published_folder(tts_card("kokoro"))
    ge2e.load()


def _expect_writable(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
