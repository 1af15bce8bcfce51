"""Model card of a checkpoint: how it was trained."""

from __future__ import annotations

from collections.abc import Mapping

from asr_serve.cloning.voice_corpus import open_voice_corpora
from asr_serve_tools.train.voice.acoustic_model import AcousticTrainingOptions
from asr_serve_tools.train.voice.synthesize_corpus import SynthesisJob

CARD = "card.md"


def write_card(job: SynthesisJob, options: AcousticTrainingOptions, losses: Mapping[str, float]) -> None:
    """Write the card beside the checkpoint: data, seeds, licences, held-out losses."""
    lines = [
        "# A FastPitch taught by asr-serve train voice",
        "",
        f"{options.minutes:g} minutes on {options.device}, {options.threads} threads, seed {options.seed}"
        + (f", begun from {options.start.name}" if options.start else "")
        + f". Learning rate {options.rate:g}, batches of {options.frames} frames.",
        "",
        f"Sentences from {', '.join(path.name for path in job.texts)}; one in twenty is held out by its letters.",
        "Speech: hibari's voice (Apache-2.0) and Kokoro-82M's English voices (Apache-2.0).",
        "",
        "| voice | minutes | utterances |",
        "|---|---|---|",
        *(
            f"| {corpus.name} | {corpus.minutes:.1f} | {len(corpus.lines)} |"
            for corpus in open_voice_corpora(options.speech)
        ),
        "",
        "Losses on what was held out: " + ", ".join(f"{name} {value:.4f}" for name, value in losses.items()) + ".",
        "",
    ]
    (options.out / CARD).write_text("\n".join(lines), encoding="utf-8")
