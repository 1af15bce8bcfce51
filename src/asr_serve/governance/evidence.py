"""Whether a model has shown what a route requires: its licence, where it runs, and its newest evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from asr_serve.evaluation.store import EvaluationSummary
from asr_serve.governance.policy import Requirements

DAY_S = 86_400


class GovernedModel(NamedTuple):
    """Facts about a model as this server serves it."""

    name: str
    revision: str
    license: str
    quantization: str


class EvidenceDecision(NamedTuple):
    """Result of the check of a model's evaluations."""

    summaries: tuple[EvaluationSummary, ...]
    """Evaluations that were looked at."""
    refusals: tuple[str, ...]
    """Requirements that are not met, each in words; empty: all are."""


def check_standing(requires: Requirements, model: GovernedModel, region: str | None) -> tuple[str, ...]:
    """Requirements that hold whatever a model can do, and that are not met: licence and residency."""
    refusals = []
    if requires.license_in and model.license not in requires.license_in:
        refusals.append(f"{model.name} has the licence {model.license}, and license_in = {_list(requires.license_in)}")
    if requires.residency and region not in requires.residency:
        where = "names no region (governance.region)" if region is None else f"is in {region}"
        refusals.append(f"this server {where}, and residency = {_list(requires.residency)}")
    return tuple(refusals)


def check_evidence(
    requires: Requirements, model: GovernedModel, summaries: Sequence[EvaluationSummary], now_s: float
) -> EvidenceDecision:
    """Checks the newest evaluation of exactly this model, and the newest one of live audio where that counts: older
    ones are not asked, so that nobody picks one out. `summaries`: evaluations of models of that name. `now_s`: seconds
    since 1970."""
    of_model = [each for each in summaries if each.model == model.name]
    of_dataset = [each for each in of_model if each.dataset == requires.dataset]
    if not of_dataset:
        known = sorted({each.dataset for each in of_model})
        others = f"; there are some on {_list(known)}" if known else ""
        return EvidenceDecision((), (f"there is no evaluation of {model.name} on {requires.dataset}{others}",))
    exact = [each for each in of_dataset if each.revision == model.revision and each.quantization == model.quantization]
    if not exact:
        newest = _newest(of_dataset)
        return EvidenceDecision(
            (newest,),
            (
                f"the evaluation {newest.run_id} is of revision {newest.revision!r} with quantization "
                f"{newest.quantization!r}, and this server has {model.revision!r} with {model.quantization!r}",
            ),
        )
    looked_at: list[EvaluationSummary] = []
    refusals: list[str] = []
    if recordings := [each for each in exact if not each.live]:
        looked_at.append(_newest(recordings))
        refusals += _refusals(requires, looked_at[-1], now_s)
    else:
        refusals.append(
            f"there is no evaluation of {model.name} on recordings of {requires.dataset}, only of live audio"
        )
    if requires.final_p95_ms_below is not None:
        if live := [each for each in exact if each.live]:
            looked_at.append(_newest(live))
            refusals += _common_refusals(requires, looked_at[-1], now_s)
            refusals += _refusal_of_bound(
                "the 95th percentile of live sentences' latency, in ms,",
                "final_p95_ms_below",
                looked_at[-1].final_p95_ms,
                requires.final_p95_ms_below,
            )
        else:
            bound = f"final_p95_ms_below = {requires.final_p95_ms_below:g}"
            refusals.append(f"there is no evaluation of {model.name} on live audio of {requires.dataset}, and {bound}")
    return EvidenceDecision(tuple(looked_at), tuple(refusals))


def _newest(summaries: Sequence[EvaluationSummary]) -> EvaluationSummary:
    return max(summaries, key=lambda each: each.created)


def _refusals(requires: Requirements, found: EvaluationSummary, now_s: float) -> list[str]:
    bounds = (
        ("the word error rate in percent", "wer_percent_below", found.wer, requires.wer_percent_below),
        ("the upper bound of that rate", "wer_upper_percent_below", found.wer_high, requires.wer_upper_percent_below),
        ("the character error rate in percent", "cer_percent_below", found.cer, requires.cer_percent_below),
        (
            "the 95th percentile of latency in s",
            "latency_p95_s_below",
            found.latency_p95_s,
            requires.latency_p95_s_below,
        ),
    )
    refusals = _common_refusals(requires, found, now_s)
    for what, key, value, bound in bounds:
        refusals += _refusal_of_bound(what, key, value, bound)
    return refusals


def _common_refusals(requires: Requirements, found: EvaluationSummary, now_s: float) -> list[str]:
    refusals = []
    if not found.finished:
        refusals.append(
            f"the evaluation {found.run_id} has {found.clips} of {found.dataset_clips} recordings: finish it"
        )
    if requires.dataset_sha256 is not None and found.dataset_sha256 != requires.dataset_sha256:
        came = f"{found.dataset} has the digest {found.dataset_sha256[:16]}"
        refusals.append(f"{came}, and dataset_sha256 = {requires.dataset_sha256[:16]}")
    if found.clips < requires.clips_at_least:
        refusals.append(f"{found.clips} recordings were evaluated, and clips_at_least = {requires.clips_at_least}")
    if found.failed > requires.failed_at_most:
        refusals.append(f"{found.failed} recordings failed, and failed_at_most = {requires.failed_at_most}")
    age_days = (now_s - found.created) / DAY_S
    newest = requires.evidence_newer_than_days
    if newest is not None and age_days > newest:
        refusals.append(f"the evaluation is {age_days:.1f} days old, and evidence_newer_than_days = {newest:g}")
    return refusals


def _refusal_of_bound(what: str, key: str, value: float | None, bound: float | None) -> list[str]:
    if bound is None:
        return []
    if value is None:
        return [f"{what} was not measured, and {key} = {bound:g}"]
    return [] if value < bound else [f"{what} is {value:.4g}, and {key} = {bound:g}"]


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)


FindEvaluations = Callable[[str], Sequence[EvaluationSummary]]
"""Finds the evaluations of a model by its name. Blocks."""
