"""Pure decisions of a roll-out: who is in the canary, what evidence is enough, and which rule a candidate breaks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import BASE, GOOD, NOW_S, POLICY, changed

from asr_serve.governance.evidence import check_evidence, check_standing
from asr_serve.governance.policy import MAX_OUTCOMES, ModelRoute, Requirements, RollbackRules, Rollout, read_policy
from asr_serve.governance.rollback_monitor import RollbackMonitor, percentile_95
from asr_serve.governance.routing import caller_position, choose_model, is_sampled
from asr_serve.governance.word_differences import split_words, word_differences

REQUIRES = Requirements("calls")


def route(percent: float) -> ModelRoute:
    return ModelRoute("default", "tiny", REQUIRES, "base", rollout=Rollout(canary_percent=percent))


# --- routing -----------------------------------------------------------------------------------------------


def test_the_share_is_that_of_the_policy_and_a_larger_one_keeps_its_callers() -> None:
    callers = [f"caller-{n}" for n in range(4_000)]
    before: set[str] = set()
    for percent in (0, 5, 25, 50, 100):
        chosen = {each for each in callers if choose_model(route(percent), "canary", each).is_candidate}
        assert before <= chosen
        assert abs(100 * len(chosen) / len(callers) - percent) < 2.5
        before = chosen
    assert len(before) == len(callers)


@settings(deadline=None)
@given(st.text(), st.floats(0, 100))
def test_a_caller_always_comes_to_the_same_model(caller: str, percent: float) -> None:
    one = route(percent)
    canary = choose_model(one, "canary", caller, 7)
    assert canary == choose_model(one, "canary", caller, 7)
    assert canary.is_candidate == (caller_position("default", caller) < percent)
    assert canary.model == ("base" if canary.is_candidate else "tiny")
    assert [choose_model(one, stage, caller).model for stage in ("stable", "shadow", "promoted")] == [
        "tiny",
        "tiny",
        "base",
    ]


def test_without_a_candidate_the_stable_model_serves_all() -> None:
    alone = ModelRoute("default", "tiny", REQUIRES)
    assert {choose_model(alone, stage, "a").model for stage in ("stable", "shadow", "canary", "promoted")} == {"tiny"}


def test_requests_are_sampled_at_their_share() -> None:
    taken = sum(is_sampled("default", f"req_{n}", 10) for n in range(4_000))
    assert 320 < taken < 480
    assert not any(is_sampled("default", f"req_{n}", 0) for n in range(100))
    assert all(is_sampled("default", f"req_{n}", 100) for n in range(100))


# --- evidence ----------------------------------------------------------------------------------------------


@pytest.fixture
def requires(tmp_path: Path) -> Requirements:
    (tmp_path / "policy.toml").write_text(POLICY)
    return read_policy(tmp_path / "policy.toml").routes["default"].requires


def test_good_evidence_is_enough(requires: Requirements) -> None:
    assert check_evidence(requires, BASE, [GOOD], NOW_S) == ((GOOD,), ())
    assert check_standing(requires, BASE, "eu-central-1") == ()


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], "there is no evaluation of base on calls"),
        ([changed(dataset="other")], "no evaluation of base on calls; there are some on other"),
        ([changed(model="tiny")], "there is no evaluation of base"),
        ([changed(revision="base==2")], "run-1 is of revision 'base==2' .* and this server has 'base==1'"),
        ([changed(quantization="int8")], "with quantization 'int8', and this server has 'base==1' with 'none'"),
        ([changed(wer=8.0)], "the word error rate in percent is 8, and wer_percent_below = 8"),
        ([changed(wer_high=9.5)], "the upper bound of that rate is 9.5, and wer_upper_percent_below = 9"),
        ([changed(wer=None)], "was not measured, and wer_percent_below"),
        ([changed(clips=99)], "99 recordings were evaluated, and clips_at_least = 100"),
        ([changed(failed=1)], "1 recordings failed"),
        ([changed(latency_p95_s=2.5)], "latency in s is 2.5, and latency_p95_s_below = 2"),
        ([changed(created=int(NOW_S) - 31 * 86_400)], "31.0 days old, and evidence_newer_than_days = 30"),
        ([changed(finished=False, clips=150)], "has 150 of 200 recordings: finish it"),
        ([changed(live=True)], "no evaluation of base on recordings of calls, only of live audio"),
        # The newest decides: nobody picks a better one of before.
        ([GOOD, changed(run_id="run-2", created=GOOD.created + 1, wer=20.0)], "the word error rate in percent is 20"),
    ],
)
def test_evidence_that_is_not_enough(requires: Requirements, found: list, said: str) -> None:
    random.Random(1).shuffle(found)
    decision = check_evidence(requires, BASE, found, NOW_S)
    assert len(decision.refusals) == 1, decision.refusals
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(decision.refusals[0])


def test_live_latency_is_that_of_a_live_evaluation() -> None:
    requires = Requirements("calls", final_p95_ms_below=800.0, dataset_sha256="d" * 64)
    live = changed(live=True, final_p95_ms=700.0, run_id="live-1")
    assert check_evidence(requires, BASE, [GOOD, live], NOW_S) == ((GOOD, live), ())
    assert "on live audio of calls" in check_evidence(requires, BASE, [GOOD], NOW_S).refusals[0]
    slow = changed(live=True, final_p95_ms=900.0)
    assert "in ms, is 900" in check_evidence(requires, BASE, [GOOD, slow], NOW_S).refusals[0]
    other = changed(dataset_sha256="e" * 64)
    assert "dataset_sha256 = dddd" in check_evidence(requires, BASE, [other, live], NOW_S).refusals[0]


def test_licence_and_residency(requires: Requirements) -> None:
    (refusal,) = check_standing(requires, BASE._replace(license="CC-BY-NC-4.0"), "eu-central-1")
    assert refusal == "base has the licence CC-BY-NC-4.0, and license_in = MIT"
    assert "is in us-east-1, and residency = eu-central-1" in check_standing(requires, BASE, "us-east-1")[0]
    assert "names no region" in check_standing(requires, BASE, None)[0]
    assert check_standing(REQUIRES, BASE._replace(license="any"), None) == ()


# --- rollback ----------------------------------------------------------------------------------------------


def test_a_candidate_that_does_as_the_stable_model_stays() -> None:
    monitor = RollbackMonitor(RollbackRules(minimum_requests=4))
    for n in range(100):
        for outcomes in (monitor.stable, monitor.candidate):
            outcomes.add_request(n, failed=n == 50)
            outcomes.add_latency(n, "live", 0.5 + n / 1_000)
        assert monitor.regression(n) is None


def test_errors_count_from_the_minimum_and_within_the_window() -> None:
    rules = RollbackRules(error_percent_above=10, minimum_requests=10, window_s=60)
    monitor = RollbackMonitor(rules)
    for n in range(9):
        monitor.candidate.add_request(n, failed=True)
    assert monitor.regression(9) is None, "too few to say"
    monitor.candidate.add_request(9, failed=False)
    found = monitor.regression(9)
    assert found.rule == "error_percent_above"
    assert "9 of its last 10 requests failed" in found.reason
    assert found.figures["candidate_failed"] == 9
    for n in range(10):  # exactly the rate: not above
        monitor.candidate.add_request(300, failed=n == 0)
    assert monitor.regression(300) is None, "what failed is long ago"


def test_a_candidate_with_few_callers_is_watched_too() -> None:
    monitor = RollbackMonitor(RollbackRules(error_percent_above=10, minimum_requests=10, window_s=60))
    for n in range(9):  # one in five minutes: no window holds two of them
        monitor.candidate.add_request(300 * n, failed=True)
    assert monitor.regression(2_700) is None
    monitor.candidate.add_request(2_700, failed=True)
    assert "10 of its last 10 requests failed" in monitor.regression(2_700).reason
    for n in range(10):
        monitor.candidate.add_request(3_000 + n, failed=False)
    assert monitor.regression(3_010) is None
    assert monitor.candidate.requests(3_010) == (10, 0)


def test_latencies_of_a_kind_are_compared_with_those_of_the_stable_model() -> None:
    monitor = RollbackMonitor(RollbackRules(latency_p95_ratio_above=2.0, minimum_requests=5))
    for n in range(5):
        monitor.stable.add_latency(n, "live", 0.5)
        monitor.candidate.add_latency(n, "upload", 30.0)  # recordings are long, and the stable model had none
        monitor.candidate.add_latency(n, "live", 1.0)
    assert monitor.regression(5) is None
    monitor.candidate.add_latency(5, "live", 1.01)
    found = monitor.regression(5)
    assert found.rule == "latency_p95_ratio_above"
    assert "live latencies are up to 1.010 s" in found.reason


def test_a_promoted_model_is_compared_with_the_one_before() -> None:
    before = RollbackMonitor(RollbackRules(minimum_requests=3))
    for n in range(3):
        before.stable.add_latency(n, "live", 0.4)
    after = RollbackMonitor(RollbackRules(minimum_requests=3), before.baselines_s(3))
    for n in range(3):
        after.candidate.add_latency(n, "live", 1.0)
    assert after.regression(3).rule == "latency_p95_ratio_above"
    assert RollbackMonitor(RollbackRules(minimum_requests=3)).regression(3) is None


def test_restarts_and_disagreement() -> None:
    monitor = RollbackMonitor(RollbackRules(restarts_above=1, disagreement_percent_above=20, minimum_requests=2))
    monitor.restarts = 1
    assert monitor.regression(0) is None
    monitor.restarts = 2
    assert "its engine died 2 times (restarts_above = 1)" in monitor.regression(0).reason
    monitor.restarts = 0
    monitor.add_shadow(100, 90)
    assert monitor.regression(0) is None, "one recording"
    monitor.add_shadow(400, 10)
    assert monitor.regression(0) is None, "20 of 100 words are not above"
    monitor.add_shadow(10, 10)
    assert "110 of 510 words of 3 recordings differ" in monitor.regression(0).reason


def test_rules_without_a_value_are_not_applied() -> None:
    rules = RollbackRules(None, None, None, None, minimum_requests=1)
    monitor = RollbackMonitor(rules, {"live": 0.001})
    monitor.restarts = 9
    monitor.add_shadow(1, 1)
    monitor.candidate.add_request(0, failed=True)
    monitor.candidate.add_latency(0, "live", 9.0)
    assert monitor.regression(0) is None


def test_what_is_remembered_is_bounded() -> None:
    monitor = RollbackMonitor(RollbackRules(window_s=1e9))
    for n in range(MAX_OUTCOMES + 100):
        monitor.candidate.add_request(n, failed=False)
        monitor.candidate.add_latency(n, "live", 1.0)
    assert monitor.candidate.requests(MAX_OUTCOMES)[0] == len(monitor.candidate.latencies(0, "live")) == MAX_OUTCOMES
    assert monitor.candidate.finished == MAX_OUTCOMES + 100


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_the_percentile_is_not_exceeded_by_nineteen_of_twenty(values: list[float]) -> None:
    found = percentile_95(values)
    assert found in values
    assert 100 * sum(value <= found for value in values) >= 95 * len(values)


# --- words -------------------------------------------------------------------------------------------------


def plain_distance(one: list[str], two: list[str]) -> int:
    row = list(range(len(two) + 1))
    for i, word in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(two, 1):
            before, row[j] = row[j], min(before + (word != other), row[j] + 1, row[j - 1] + 1)
    return row[-1]


@settings(deadline=None)
@given(st.lists(st.sampled_from("abcd"), max_size=12), st.lists(st.sampled_from("abcd"), max_size=12))
def test_the_difference_is_the_edit_distance(one: list[str], two: list[str]) -> None:
    assert word_differences(" ".join(one), " ".join(two)) == (len(one), plain_distance(one, two))


def test_case_and_punctuation_are_no_difference() -> None:
    assert word_differences("It was: the BEST of times.", "it was the best of times") == (6, 0)
    assert split_words("你好, world") == ["你", "好", "world"]
    assert word_differences("a " * 5_000, "a") is None
