"""The governor: stages, what they need, and the line of the audit log for each change."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from policies import GOOD, MODELS, POLICY, Governed, changed

from asr_serve.errors import AuditLogInUse, GovernanceError, PromotionRefused, UnknownRoute
from asr_serve.governance.audit_log import AuditEntry, verify_log
from asr_serve.governance.governor import ModelGovernor
from asr_serve.governance.routing import RoutedModel, caller_position

IN_CANARY = next(f"c{n}" for n in range(1_000) if caller_position("default", f"c{n}") < 25)
OUTSIDE = next(f"c{n}" for n in range(1_000) if caller_position("default", f"c{n}") > 25)


@pytest.fixture
def governed(tmp_path: Path) -> Governed:
    return Governed(tmp_path)


def chosen(governor: ModelGovernor, caller: str) -> RoutedModel:
    found = governor.choose("default", caller)
    assert found is not None
    return found


def serve(governor: ModelGovernor, caller: str, count: int, *, failed: bool = False) -> None:
    for _ in range(count):
        governor.record_request(chosen(governor, caller), failed=failed)


def to_canary(governor: ModelGovernor) -> None:
    governor.promote("default", by="admin-1")
    for _ in range(2):
        governor.record_shadow(chosen(governor, OUTSIDE), 50, 2, failed=False)
    governor.promote("default", by="admin-1", to="canary")


def lines(governed: Governed) -> list[AuditEntry]:
    return verify_log(governed.log).entries


def test_from_shadow_to_promoted(governed: Governed) -> None:
    governor = governed.open()
    assert governor.choose("other", "a") is None
    assert chosen(governor, IN_CANARY).model == "tiny"
    assert governor.promote("default", by="admin-1", operator="anna", reason="figures hold").stage == "shadow"
    assert chosen(governor, IN_CANARY).model == governor.serving("default") == "tiny"
    assert governor.shadow_of(chosen(governor, IN_CANARY)) == "base"
    with pytest.raises(PromotionRefused, match="finished 0 requests as shadow, and minimum_requests = 2"):
        governor.promote("default", by="admin-1")
    for _ in range(2):
        governor.record_shadow(chosen(governor, OUTSIDE), 50, 2, failed=False)
    with pytest.raises(PromotionRefused, match="in the stage shadow, and 'promoted' was asked for"):
        governor.promote("default", by="admin-1", to="promoted")
    governor.promote("default", by="admin-2", to="canary")
    assert [chosen(governor, caller).model for caller in (IN_CANARY, OUTSIDE)] == ["base", "tiny"]
    assert governor.shadow_of(chosen(governor, OUTSIDE)) is None
    serve(governor, OUTSIDE, 3)
    with pytest.raises(PromotionRefused, match="finished 0 requests as canary"):
        governor.promote("default", by="admin-1")
    serve(governor, IN_CANARY, 2)
    status = governor.promote("default", by="admin-1")
    assert (status.stage, status.next_stage, governor.serving("default")) == ("promoted", None, "base")
    assert {chosen(governor, caller).model for caller in (IN_CANARY, OUTSIDE)} == {"base"}
    with pytest.raises(PromotionRefused, match="stable = 'base'"):
        governor.promote("default", by="admin-1")
    governor.close()
    assert [(each.action, each.stage, each.by) for each in lines(governed)] == [
        ("adopted", "stable", lines(governed)[0].by),
        ("promoted", "shadow", "admin-1"),
        ("promoted", "canary", "admin-2"),
        ("promoted", "promoted", "admin-1"),
    ]
    assert lines(governed)[0].by.startswith("os:")
    first = lines(governed)[1]
    assert (first.operator, first.reason, first.stable, first.candidate) == ("anna", "figures hold", "tiny", "base")
    assert (first.evidence[0]["run_id"], first.evidence[0]["wer"], first.evidence[0]["dataset"]) == (
        "run-1",
        7.0,
        "calls",
    )
    assert lines(governed)[2].figures["shadow_words"] == 100
    assert lines(governed)[3].figures["candidate_finished"] == 2


def test_a_promotion_needs_evidence(governed: Governed) -> None:
    governed.evaluations = [changed(wer=8.5, wer_high=9.2)]
    governor = governed.open()
    with pytest.raises(PromotionRefused, match=r"rate in percent is 8\.5, .*upper bound of that rate is 9\.2"):
        governor.promote("default", by="admin-1")
    assert governor.status("default").blocked_by[0].startswith("the word error rate")
    governed.evaluations = []
    with pytest.raises(PromotionRefused, match="there is no evaluation of base on calls"):
        governor.promote("default", by="admin-1")
    with pytest.raises(UnknownRoute, match="did you mean 'default'"):
        governor.promote("defualt", by="admin-1")
    with pytest.raises(PromotionRefused, match="in the stage stable"):
        governor.roll_back("default", by="admin-1")
    governor.close()
    assert [each.action for each in lines(governed)] == ["adopted"]


def test_a_regression_is_rolled_back_and_the_log_says_why(governed: Governed) -> None:
    governor = governed.open()
    to_canary(governor)
    session = chosen(governor, IN_CANARY)
    serve(governor, IN_CANARY, 3)
    serve(governor, IN_CANARY, 1, failed=True)  # one of four, and 10 % may
    assert chosen(governor, IN_CANARY).model == "tiny"
    assert governor.status("default").stage == "stable"
    governor.record_request(session, failed=True)  # began before: counts for nothing, and breaks nothing
    governor.close()
    last = lines(governed)[-1]
    assert (last.action, last.stage, last.by) == ("rolled_back", "stable", "server")
    assert "1 of its last 4 requests failed (error_percent_above = 10)" in last.reason
    assert (last.figures["candidate_requests"], last.figures["candidate_failed"]) == (4, 1)
    # The way up begins anew.
    governor = governed.open()
    assert governor.promote("default", by="admin-1").stage == "shadow"
    governor.close()


def test_a_candidate_is_not_promoted_on_requests_that_failed(governed: Governed) -> None:
    """Two requests are enough for the next stage here, and a rollback asks for four."""
    governor = governed.open()
    to_canary(governor)
    serve(governor, IN_CANARY, 1)
    serve(governor, IN_CANARY, 1, failed=True)
    assert governor.status("default").stage == "canary"
    with pytest.raises(PromotionRefused, match=r"1 of its last 2 requests failed \(error_percent_above = 10\)"):
        governor.promote("default", by="admin-1")
    serve(governor, IN_CANARY, 1)
    assert "1 of its last 3 requests failed" in governor.status("default").blocked_by[0]
    governor.close()


def test_a_promoted_model_that_becomes_slow_is_rolled_back(governed: Governed) -> None:
    governor = governed.open()
    to_canary(governor)
    serve(governor, IN_CANARY, 2)
    for _ in range(4):
        governor.record_latency(chosen(governor, OUTSIDE), "live", 0.5)
    governor.promote("default", by="admin-1")
    governor.close()
    assert lines(governed)[-1].figures["baseline_live_latency_p95_s"] == 0.5
    governor = governed.open()  # the measure survives a restart
    assert governor.status("default").stage == "promoted"
    for _ in range(3):
        governor.record_latency(chosen(governor, OUTSIDE), "live", 1.4)
    assert chosen(governor, OUTSIDE).model == "base"
    governor.record_latency(chosen(governor, OUTSIDE), "live", 1.4)
    assert chosen(governor, OUTSIDE).model == "tiny"
    governor.close()
    assert "latency_p95_ratio_above" in lines(governed)[-1].reason


def test_a_shadow_that_hears_something_else_is_rolled_back(governed: Governed) -> None:
    governor = governed.open()
    governor.promote("default", by="admin-1")
    for _ in range(4):
        governor.record_shadow(chosen(governor, OUTSIDE), 10, 9, failed=False)
    assert governor.status("default").stage == "stable"
    governor.close()
    assert "36 of 40 words of 4 recordings differ" in lines(governed)[-1].reason


def test_an_engine_that_dies_is_rolled_back(governed: Governed) -> None:
    governor = governed.open()
    governor.record_restarts("base", 3)  # before: they are not of this stage
    to_canary(governor)
    governor.record_restarts("base", 3)
    governor.record_restarts("tiny", 8)
    assert governor.status("default").stage == "canary"
    governor.record_restarts("base", 4)
    assert governor.status("default").stage == "stable"
    governor.close()
    assert "its engine died 1 times" in lines(governed)[-1].reason


def test_an_administrator_rolls_back(governed: Governed) -> None:
    governor = governed.open()
    to_canary(governor)
    assert governor.roll_back("default", by="admin-1", operator="anna", reason="callers complain").stage == "stable"
    assert chosen(governor, IN_CANARY).model == "tiny"
    governor.close()
    last = lines(governed)[-1]
    assert (last.action, last.by, last.operator, last.reason) == ("rolled_back", "admin-1", "anna", "callers complain")


def test_the_stage_is_that_of_the_log_after_a_restart(governed: Governed) -> None:
    governor = governed.open()
    to_canary(governor)
    with pytest.raises(AuditLogInUse):
        governed.open()
    governor.close()
    governor = governed.open(start=False)
    assert chosen(governor, IN_CANARY).model == "base", "while the models still load"
    governor.start(MODELS)
    governor.close()
    assert [each.action for each in lines(governed)] == ["adopted", "promoted", "promoted"], "nothing was changed"


def test_other_models_in_the_middle_of_a_roll_out_are_refused(governed: Governed) -> None:
    governor = governed.open()
    to_canary(governor)
    governor.close()
    governed.write(POLICY.replace('"base"', '"large"'))
    with pytest.raises(GovernanceError, match=r"base is in the stage canary .*policy rollback default"):
        governed.open()
    governed.write(POLICY)
    governor = governed.open()
    governor.roll_back("default", by="admin-1")
    governor.close()
    governed.write(POLICY.replace('"base"', '"other"'))
    governor = governed.open(start=False)
    governor.start(MODELS | {"other": MODELS["base"]._replace(name="other")})
    governor.close()
    assert (lines(governed)[-1].action, lines(governed)[-1].candidate) == ("adopted", "other")


def test_a_promoted_model_becomes_the_stable_one(governed: Governed) -> None:
    governor = governed.open()
    to_canary(governor)
    serve(governor, IN_CANARY, 2)
    governor.promote("default", by="admin-1")
    governor.close()
    governed.write(POLICY.replace('stable = "tiny"\ncandidate = "base"', 'stable = "base"'))
    governor = governed.open()
    assert (chosen(governor, OUTSIDE).model, governor.status("default").stage) == ("base", "stable")
    with pytest.raises(PromotionRefused, match="no candidate"):
        governor.promote("default", by="admin-1")
    governor.close()
    assert (lines(governed)[-1].action, lines(governed)[-1].stable) == ("adopted", "base")


@pytest.mark.parametrize(
    ("bound", "action", "stage"), [("7.5", "policy_changed", "canary"), ("6.5", "rolled_back", "stable")]
)
def test_a_changed_policy_asks_again(governed: Governed, bound: str, action: str, stage: str) -> None:
    governor = governed.open()
    to_canary(governor)
    governed.write(POLICY.replace("wer_percent_below = 8.0", f"wer_percent_below = {bound}"))
    serve(governor, IN_CANARY, 2)
    with pytest.raises(PromotionRefused, match="is not as it was when this server started"):
        governor.promote("default", by="admin-1")
    governor.close()
    governor = governed.open()
    assert governor.status("default").stage == stage
    governor.close()
    last = lines(governed)[-1]
    assert (last.action, last.stage, last.evidence[0]["run_id"]) == (action, stage, "run-1")
    assert last.policy_sha256 != lines(governed)[0].policy_sha256


def test_licence_and_region_are_asked_at_the_start(governed: Governed) -> None:
    for region in (None, "us-east-1"):
        with pytest.raises(GovernanceError, match="may not serve tiny: this server"):
            governed.open(region)
    governor = governed.open(start=False)
    with pytest.raises(GovernanceError, match="may not serve base: base has the licence GPL"):
        governor.start(MODELS | {"base": MODELS["base"]._replace(license="GPL")})
    governor.close()
    assert lines(governed) == []


def test_two_promotions_at_once_make_one(governed: Governed) -> None:
    governor = governed.open()
    found: list[object] = []

    def promote() -> None:
        try:
            found.append(governor.promote("default", by="admin-1", to="shadow").stage)
        except PromotionRefused as refused:
            found.append(refused)

    threads = [threading.Thread(target=promote) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    governor.close()
    assert [each for each in found if not isinstance(each, PromotionRefused)] == ["shadow"]
    assert [each.stage for each in lines(governed)] == ["stable", "shadow"]


def test_a_rollback_during_a_promotion_wins(governed: Governed) -> None:
    """In force at once, and the last line of the log."""
    governor = governed.open()
    to_canary(governor)
    serve(governor, IN_CANARY, 3)
    append, reached, go = governor._log.append, threading.Event(), threading.Event()

    def slow(**fields: object) -> AuditEntry:
        reached.set()
        assert go.wait(30)
        return append(**fields)

    governor._log.append = slow  # a disk that takes its time
    thread = threading.Thread(target=governor.promote, args=("default",), kwargs={"by": "admin-1"})
    thread.start()
    assert reached.wait(30)
    serve(governor, IN_CANARY, 1, failed=True)
    assert chosen(governor, IN_CANARY).model == "tiny"
    go.set()
    thread.join(30)
    governor.close()
    assert [each.stage for each in lines(governed)[-2:]] == ["promoted", "stable"]
    assert chosen(governor, IN_CANARY).model == "tiny"
    assert GOOD.run_id == lines(governed)[-2].evidence[0]["run_id"]
