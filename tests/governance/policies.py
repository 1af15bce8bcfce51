"""Policies, evaluations and governors for the tests."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from asr_serve.evaluation.store import EvaluationSummary
from asr_serve.governance.audit_log import AuditLog
from asr_serve.governance.evidence import GovernedModel
from asr_serve.governance.governor import ModelGovernor
from asr_serve.governance.policy import read_policy

NOW_S = 1_790_000_000.0
POLICY = """
[[route]]
name = "default"
stable = "tiny"
candidate = "base"

[route.requires]
dataset = "calls"
wer_percent_below = 8.0
wer_upper_percent_below = 9.0
clips_at_least = 100
latency_p95_s_below = 2.0
license_in = ["MIT"]
residency = ["eu-central-1"]
evidence_newer_than_days = 30

[route.rollout]
canary_percent = 25
minimum_requests = 2

[route.rollback]
error_percent_above = 10
latency_p95_ratio_above = 2.0
restarts_above = 0
disagreement_percent_above = 30
minimum_requests = 4
window_s = 60
"""
BASE = GovernedModel("base", "base==1", "MIT", "none")
MODELS = {"tiny": GovernedModel("tiny", "tiny==1", "MIT", "none"), "base": BASE}
GOOD = EvaluationSummary(
    system="base",
    model="base",
    revision="base==1",
    license="MIT",
    quantization="none",
    dataset="calls",
    dataset_sha256="d" * 64,
    language="en",
    clips=200,
    failed=0,
    audio_s=900.0,
    wer=7.0,
    wer_low=6.2,
    wer_high=8.1,
    cer=2.0,
    rtfx=30.0,
    latency_p50_s=0.4,
    latency_p95_s=1.1,
    first_word_p50_ms=None,
    first_word_p95_ms=None,
    final_p95_ms=None,
    der=None,
    hotword_recall=None,
    cost_per_audio_hour=None,
    created=int(NOW_S) - 86_400,
    run_id="run-1",
    dataset_clips=200,
)
"""An evaluation that meets POLICY."""


def changed(**fields: object) -> EvaluationSummary:
    return msgspec.structs.replace(GOOD, **fields)


class Governed:
    """A governor over files in a folder, whose clock stands still until it is set."""

    def __init__(self, folder: Path, text: str = POLICY, evaluations: Sequence[EvaluationSummary] = (GOOD,)) -> None:
        self.folder, self.now_s, self.evaluations = folder, NOW_S, list(evaluations)
        self.file, self.log = folder / "policy.toml", folder / "audit.jsonl"
        self.write(text)

    def write(self, text: str) -> None:
        self.file.write_text(text)

    def open(self, region: str | None = "eu-central-1", *, start: bool = True) -> ModelGovernor:
        def clock() -> datetime:
            return datetime.fromtimestamp(self.now_s, UTC)

        log = AuditLog.open(self.log, clock)
        try:
            governor = ModelGovernor(
                read_policy(self.file),
                log,
                lambda model: [each for each in self.evaluations if each.model == model],
                region,
                lambda: self.now_s,
            )
            if start:
                governor.start(MODELS)
        except BaseException:
            log.close()
            raise
        return governor
