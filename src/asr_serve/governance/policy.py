"""Policy files: TOML with the routes of a server, what their models must show, and how candidates are rolled out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import msgspec
from msgspec import Meta

from asr_serve.errors import OptionError
from asr_serve.toml_file import describe_invalid, read_toml
from asr_serve.types import suggest_name

MAX_ROUTES = 64
MAX_OUTCOMES = 2_048
"""Outcomes of one model that are remembered, the newest: a rule cannot ask for more of them."""
PARAM = "governance.policy"
"""Setting that names the file, in errors."""

Stage = Literal["stable", "shadow", "canary", "promoted"]
"""Stage of a route's candidate. stable: it gets nothing. shadow: it transcribes copies of uploads, whose text no caller
gets. canary: it serves a share of the callers. promoted: it serves all of them."""

Percent = Annotated[float, Meta(ge=0, le=100)]
Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
Text = Annotated[str, Meta(min_length=1, max_length=200, extra_json_schema={"description": "text, 1 to 200 letters"})]


class Requirements(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requirements for the models of a route: figures of `asr-serve eval`, licence, and region of the server."""

    dataset: Text
    """Name of the dataset whose evaluation counts."""
    dataset_sha256: Text | None = None
    """Digest of that dataset, so that another one of the same name does not count. None: any."""
    wer_percent_below: Positive | None = None
    """Word error rate that the model must be below."""
    wer_upper_percent_below: Positive | None = None
    """The same for the upper end of its 95 % interval: few recordings then show less."""
    cer_percent_below: Positive | None = None
    clips_at_least: Count = 1
    """Number of recordings that were evaluated, those that failed not included."""
    failed_at_most: Annotated[int, Meta(ge=0)] = 0
    """Number of recordings that may have failed."""
    latency_p95_s_below: Positive | None = None
    """95th percentile of the seconds that a recording took."""
    final_p95_ms_below: Positive | None = None
    """95th percentile of the latency of live sentences, from an evaluation of live audio."""
    license_in: tuple[Text, ...] = ()
    """Licences that are allowed. Empty: any."""
    residency: tuple[Text, ...] = ()
    """Regions in which audio may be transcribed; the server's own is the setting `governance.region`. Empty: any."""
    evidence_newer_than_days: Positive | None = None
    """Age up to which an evaluation counts. None: any."""


class Rollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stages and shares by which a candidate comes to serve callers."""

    stages: tuple[Literal["shadow", "canary"], ...] = ("shadow", "canary")
    """Stages that a candidate passes before it is promoted, in this order."""
    shadow_percent: Percent = 10.0
    """Share of the uploads that the candidate transcribes too while it is a shadow."""
    canary_percent: Percent = 5.0
    """Share of the callers that the candidate serves while it is a canary."""
    minimum_requests: Annotated[int, Meta(ge=0)] = 100
    """Recordings and live sessions that the candidate must have finished in a stage before it leaves it."""


class RollbackRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rules by which a candidate is taken back without anybody's doing. A rule whose value is absent is not applied."""

    error_percent_above: Percent | None = 5.0
    """Share of the candidate's requests that failed by its doing."""
    latency_p95_ratio_above: Positive | None = 2.0
    """95th percentile of the candidate's latency, as a multiple of that of the stable model."""
    restarts_above: Annotated[int, Meta(ge=0)] | None = 2
    """Times that the candidate's engine died and was started again, since the stage began."""
    disagreement_percent_above: Positive | None = None
    """Share of the words in which a shadow's texts differ from those of the stable model."""
    minimum_requests: Annotated[int, Meta(ge=1, le=MAX_OUTCOMES)] = 20
    """Requests from which rates and latencies count."""
    window_s: Positive = 600.0
    """Seconds that are looked at; where they hold fewer than `minimum_requests`, the last so many of the stage, so that
    a canary with few callers is watched too."""


class ModelRoute(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One name that callers send as their model, and the models behind it."""

    name: Text
    stable: Text
    requires: Requirements
    candidate: Text | None = None
    default: bool = False
    """Whether requests that name no model take this route."""
    rollout: Rollout = Rollout()
    rollback: RollbackRules = RollbackRules()

    @property
    def models(self) -> tuple[str, ...]:
        return (self.stable,) if self.candidate is None else (self.stable, self.candidate)

    def next_stage(self, stage: Stage) -> Stage | None:
        """Stage after that one; None: there is none."""
        ladder: list[Stage] = ["stable", *self.rollout.stages, "promoted"]
        if stage not in ladder:  # the policy was changed, and has it no more
            return "promoted"
        after = ladder.index(stage) + 1
        return ladder[after] if after < len(ladder) else None


class Policy(NamedTuple):
    """Checked policy file."""

    routes: Mapping[str, ModelRoute]
    only_routes: bool
    """Whether callers reach recognition models by routes alone; administrators may still name any."""
    sha256: str
    file: Path

    @property
    def default_route(self) -> str | None:
        return next((route.name for route in self.routes.values() if route.default), None)

    @property
    def models(self) -> tuple[str, ...]:
        """Models of all routes, each once."""
        return tuple(dict.fromkeys(model for route in self.routes.values() for model in route.models))


TABLES: dict[str, type[msgspec.Struct]] = {"requires": Requirements, "rollout": Rollout, "rollback": RollbackRules}
"""Tables of a route."""


def read_policy(path: Path) -> Policy:
    """Reads and checks a policy file. Raises OptionError with the file and the key of what is wrong, SourceNotFound."""
    text, content = read_toml(path, "policy", PARAM)
    for key in content:
        if key not in ("route", "only_routes"):
            _refuse(path, key, f"{key} is no key", "route, only_routes", suggest_name(key, ["route", "only_routes"]))
    only_routes = content.get("only_routes", False)
    if not isinstance(only_routes, bool):
        _refuse(path, "only_routes", f"only_routes = {only_routes!r}", "true or false")
    tables = content.get("route", [])
    if not isinstance(tables, list) or not 1 <= len(tables) <= MAX_ROUTES:
        count = f"{len(tables)} routes" if isinstance(tables, list) else f"route = {tables!r}"
        _refuse(path, "route", count, f"1 to {MAX_ROUTES} tables [[route]]")
    routes: dict[str, ModelRoute] = {}
    for number, table in enumerate(tables, 1):
        route = _read_route(path, number, table)
        if route.name in routes:
            _refuse(path, f"route {number}: name", f"two routes {route.name!r}", "each name once")
        routes[route.name] = route
    _check_routes(path, routes)
    return Policy(routes, only_routes, hashlib.sha256(text.encode()).hexdigest(), path)


def _read_route(path: Path, number: int, table: object) -> ModelRoute:
    place = f"route {number}"
    if not isinstance(table, dict):
        _refuse(path, place, f"{table!r}", "a table [[route]]")
    values = dict(table)
    if "requires" not in values:
        _refuse(path, f"{place}: requires", "requires is missing", "a table [route.requires]", "write one with dataset")
    for name, kind in TABLES.items():
        if name in values:
            values[name] = _convert(path, f"{place}: {name}", values[name], kind)
    route: ModelRoute = _convert(path, place, values, ModelRoute)
    stages = route.rollout.stages
    if list(stages) != [stage for stage in ("shadow", "canary") if stage in stages]:
        came, allowed = f"stages = {list(stages)}", 'of "shadow" and "canary", in this order, each at most once'
        _refuse(path, f"{place}: rollout.stages", came, allowed)
    if route.candidate == route.stable:
        _refuse(path, f"{place}: candidate", f"candidate = {route.candidate!r}, the stable model", "another model")
    return route


def _convert(path: Path, place: str, table: object, kind: type[Any]) -> Any:
    if not isinstance(table, dict):
        _refuse(path, place, f"{table!r}", "a table")
    known = [field.name for field in msgspec.structs.fields(kind)]
    for key in table:
        if key not in known:
            _refuse(path, f"{place}.{key}", f"{key} is no key", f"keys: {', '.join(known)}", suggest_name(key, known))
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as failure:
        key, came, allowed = describe_invalid(failure, table, kind)
        _refuse(path, f"{place}.{key}", came, allowed)


def _check_routes(path: Path, routes: Mapping[str, ModelRoute]) -> None:
    """Refuses routes that do not fit together: a name that is a model would mean two things."""
    defaults = [route.name for route in routes.values() if route.default]
    if len(defaults) > 1:
        _refuse(path, "route: default", f"default = true in {', '.join(defaults)}", "in one route at most")
    for route in routes.values():
        for model in route.models:
            if model in routes:
                _refuse(path, f"route {route.name}", f"its model {model!r} is the name of a route", "names of models")


def _refuse(path: Path, key: str, came: str, allowed: str, todo: str = "") -> NoReturn:
    raise OptionError(f"{path}: {key}: {came}", allowed, todo, param=PARAM)
