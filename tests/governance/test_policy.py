"""Policy files: what they say, and what is refused with the file and the key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from policies import POLICY

from asr_serve.errors import OptionError, SourceNotFound
from asr_serve.governance.policy import read_policy

REQUIRES = 'requires = {dataset = "calls"}\n'
ROUTE = '[[route]]\nname = "default"\nstable = "tiny"\ncandidate = "base"\n'


def read(tmp_path: Path, text: str) -> object:
    file = tmp_path / "policy.toml"
    file.write_text(text)
    return read_policy(file)


def test_a_policy_is_read_with_its_defaults(tmp_path: Path) -> None:
    policy = read(tmp_path, f"only_routes = true\n{ROUTE}default = true\n{REQUIRES}")
    route = policy.routes["default"]
    assert (policy.only_routes, policy.default_route, policy.models) == (True, "default", ("tiny", "base"))
    assert (route.rollout.stages, route.rollout.canary_percent) == (("shadow", "canary"), 5.0)
    assert (route.rollback.error_percent_above, route.rollback.restarts_above) == (5.0, 2)
    assert len(policy.sha256) == 64
    assert read(tmp_path, POLICY).routes["default"].requires.license_in == ("MIT",)


def test_stages_follow_each_other(tmp_path: Path) -> None:
    def ladder(rollout: str) -> list[str]:
        route = read(tmp_path, f"{ROUTE}{REQUIRES}{rollout}").routes["default"]
        found, stage = [], "stable"
        while (stage := route.next_stage(stage)) is not None:
            found.append(stage)
        return found

    assert ladder("") == ["shadow", "canary", "promoted"]
    assert ladder('rollout = {stages = ["canary"]}') == ["canary", "promoted"]
    assert ladder("rollout = {stages = []}") == ["promoted"]
    # The stage of a roll-out that the file has no more: what is left is promotion.
    assert (
        read(tmp_path, f"{ROUTE}{REQUIRES}rollout = {{stages = []}}").routes["default"].next_stage("canary")
        == "promoted"
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["route: 0 routes", r"1 to 64 tables \[\[route\]\]"]),
        ("route = 3", ["route: route = 3"]),
        ("only_route = true", ["only_route is no key", "did you mean 'only_routes'"]),
        (f"only_routes = 1\n{ROUTE}{REQUIRES}", ["only_routes: only_routes = 1", "true or false"]),
        (ROUTE, ["route 1: requires: requires is missing"]),
        ('[[route]]\nname = "a"\n' + REQUIRES, ["route 1.stable: stable is missing"]),
        (f"{ROUTE}{REQUIRES}canary = 3", ["route 1.canary: canary is no key"]),
        (f"{ROUTE}requires = {{}}", ["route 1: requires.dataset: dataset is missing"]),
        (
            f'{ROUTE}requires = {{dataset = "c", wer_below = 3}}',
            ["requires.wer_below: wer_below is no key", "wer_percent"],
        ),
        (f'{ROUTE}requires = {{dataset = "c", wer_percent_below = 0}}', ["requires.wer_percent_below", "more than 0"]),
        (
            f"{ROUTE}{REQUIRES}rollout = {{canary_percent = 101}}",
            ["rollout.canary_percent: canary_percent = 101", "0 to 100"],
        ),
        (f'{ROUTE}{REQUIRES}rollout = {{canary_percent = "5"}}', ["rollout.canary_percent"]),
        (f'{ROUTE}{REQUIRES}rollout = {{stages = ["canary", "shadow"]}}', ["rollout.stages", "in this order"]),
        (f'{ROUTE}{REQUIRES}rollout = {{stages = ["canary", "canary"]}}', ["rollout.stages", "at most once"]),
        (f"{ROUTE}{REQUIRES}rollback = {{error_percent_above = -1}}", ["rollback.error_percent_above"]),
        (f"{ROUTE}{REQUIRES}rollback = {{window_s = 0}}", ["rollback.window_s"]),
        (
            f"{ROUTE}{REQUIRES}rollback = {{minimum_requests = 5000}}",  # more than are remembered: no rule would apply
            ["rollback.minimum_requests = 5000|minimum_requests: minimum_requests = 5000", "1 to 2048"],
        ),
        (f"{ROUTE}{REQUIRES}{ROUTE}{REQUIRES}", ["route 2: name: two routes 'default'"]),
        (ROUTE.replace("base", "tiny") + REQUIRES, ["route 1: candidate: candidate = 'tiny', the stable model"]),
        (ROUTE.replace("base", "default") + REQUIRES, ["its model 'default' is the name of a route"]),
        (
            f"{ROUTE}default = true\n{REQUIRES}{ROUTE.replace('default', 'b')}default = true\n{REQUIRES}",
            ["default = true in default, b", "in one route at most"],
        ),
        ("[[route]\n", ["line 1", "a TOML file"]),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "policy.toml") in str(caught.value)
    for part in parts:
        assert re.search(part, str(caught.value)), caught.value
    assert caught.value.param == "governance.policy"


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="policy file"):
        read_policy(tmp_path / "none.toml")
