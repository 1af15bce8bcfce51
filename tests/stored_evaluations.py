"""Evaluations for the tests of those who show them: the report, the server and its page."""

from __future__ import annotations

import wave
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("jiwer")
pytest.importorskip("whisper_normalizer")

from asr_serve.evaluation.store import EvaluatedDataset, EvaluatedSystem, EvaluationResult, EvaluationStore, RunSettings
from asr_serve_tools.evaluate.clip_scores import score_text

EVIL = "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 2'>"
CLIPS = (
    ("one.wav", "the cat sat on the mat today", "the dog sat on the big mat"),
    ("two.wav", "all is well", "all is well"),
    ("three.wav", "script", f"script {EVIL}"),
)


def store_evaluations(folder: Path) -> Path:
    """File with two systems over three clips, `slow` with few errors and `fast` with many, and a run that failed."""
    for name, _, _ in CLIPS:
        with wave.open(str(folder / name), "wb") as file:
            file.setparams((1, 2, 16_000, 0, "NONE", ""))
            file.writeframes(b"\0\1" * 8_000)
    dataset = EvaluatedDataset("calls", str(folder), "0" * 64, "en", 3)
    with EvaluationStore(folder / "e.sqlite", create=True) as store:
        for system, seconds in (("slow", 2.0), ("fast", 0.1)):
            run = store.begin_run(EvaluatedSystem(system, system, license="MIT"), dataset, RunSettings())
            for name, reference, hypothesis in CLIPS:
                text = hypothesis if system == "fast" else reference
                score = msgspec.structs.asdict(score_text(reference, text, "en"))
                store.add_result(run.run_id, EvaluationResult(name, 0.5, reference, text, seconds=seconds, **score))
            store.add_pass(run.run_id, 3, 1.5, seconds)
            store.finish_run(run.run_id)
        other = EvaluatedDataset("<b>other</b>", str(folder), "1" * 64, "en", 1)
        run = store.begin_run(EvaluatedSystem("fast", "fast"), other, RunSettings())
        store.add_result(run.run_id, EvaluationResult("gone.wav", 0.0, "a", error="it <i>broke</i>"))
        return store.path
