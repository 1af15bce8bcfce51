"""Governor of a server's models: which model serves whom, what a candidate must show before its next stage, and its
way back. The stage of each route is that of the last line of the audit log."""

from __future__ import annotations

import logging
import os
import pwd
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from asr_serve.config import GovernanceConfig
from asr_serve.errors import AsrServeError, GovernanceError, PromotionRefused, UnknownRoute
from asr_serve.evaluation.store import EvaluationStore, EvaluationSummary
from asr_serve.governance.audit_log import AuditEntry, AuditLog
from asr_serve.governance.evidence import (
    EvidenceDecision,
    FindEvaluations,
    GovernedModel,
    check_evidence,
    check_standing,
)
from asr_serve.governance.policy import ModelRoute, Policy, Stage, read_policy
from asr_serve.governance.rollback_monitor import KINDS, Regression, RequestKind, RollbackMonitor
from asr_serve.governance.routing import RoutedModel, choose_model
from asr_serve.metrics import GovernanceMetrics
from asr_serve.types import suggest_name

log = logging.getLogger(__name__)


class RouteState(NamedTuple):
    """Stage of a route, and the watch since it began."""

    stage: Stage
    epoch: int
    """Number of the line of the audit log with which it began."""
    monitor: RollbackMonitor


class RouteStatus(msgspec.Struct, frozen=True):
    """State of a route, for operators."""

    name: str
    stage: Stage
    next_stage: Stage | None
    """Stage after the next promotion; None: there is none, or no candidate."""
    stable: str
    candidate: str | None
    since_utc: str
    by: str
    """Author of its last change."""
    reason: str
    figures: dict[str, float]
    """Measured since the stage began."""
    blocked_by: tuple[str, ...] = ()
    """Why the next promotion would be refused now."""


class ModelGovernor:
    """Routes callers, watches candidates, and changes stages. The methods that block say so; all may be called from any
    thread. A change of stage is made in order: written to disk by one thread, then in force; but a rollback is in force
    at once, and then written."""

    def __init__(
        self,
        policy: Policy,
        audit_log: AuditLog,
        find_evaluations: FindEvaluations | None,
        region: str | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`find_evaluations`: None: there are none, and nothing can be promoted. `clock`: seconds since 1970. Raises
        GovernanceError where the models of a route were changed in the middle of a roll-out."""
        self.policy, self._log, self._find = policy, audit_log, find_evaluations
        self._region, self._clock = region, clock
        self._models: Mapping[str, GovernedModel] = {}
        self._metrics: GovernanceMetrics | None = None
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "asr-serve audit log")
        self._last = {entry.route: entry for entry in audit_log.entries}
        self._restarts: dict[str, int] = {}
        self._states = {name: self._resumed_state(route) for name, route in policy.routes.items()}

    @classmethod
    def open(cls, config: GovernanceConfig, evaluations: str | None) -> Self:
        """Reads the policy of these settings, and opens the log. `evaluations`: file of evaluations. Raises
        OptionError, SourceNotFound, AuditLogCorrupt, AuditLogInUse, GovernanceError."""
        assert config.policy is not None
        assert config.audit_log is not None, "neither is set without the other"
        policy = read_policy(Path(config.policy))
        with ExitStack() as undo:
            opened = AuditLog.open(Path(config.audit_log))
            undo.callback(opened.close)
            find = None if evaluations is None else partial(find_evaluations, Path(evaluations))
            governor = cls(policy, opened, find, config.region)
            undo.pop_all()
        return governor

    def _resumed_state(self, route: ModelRoute) -> RouteState:
        last = self._last.get(route.name)
        if last is None or _settled(route, last):
            return RouteState("stable", 0, RollbackMonitor(route.rollback))
        if (last.stable, last.candidate) != (route.stable, route.candidate):
            raise GovernanceError(
                f"{self.policy.file}: route {route.name} has the models {route.stable} and {route.candidate}, and "
                f"{last.candidate} is in the stage {last.stage} of {last.stable}",
                f"the same models until it is promoted and stable = {last.candidate!r}, or rolled back",
                f"put the file back, and roll back first: asr-serve policy rollback {route.name}",
            )
        baselines: dict[RequestKind, float] = {
            kind: last.figures[key] for kind in KINDS if (key := f"baseline_{kind}_latency_p95_s") in last.figures
        }
        return RouteState(last.stage, last.number, RollbackMonitor(route.rollback, baselines))

    def start(self, models: Mapping[str, GovernedModel]) -> None:
        """Takes the facts of the models of all routes, and writes what the file changes. Blocks. Raises
        GovernanceError for one whose licence or region is not allowed, errors of the audit log."""
        for route in self.policy.routes.values():
            for name in route.models:
                if refusals := check_standing(route.requires, models[name], self._region):
                    raise GovernanceError(
                        f"{self.policy.file}: route {route.name} may not serve {name}: {'; '.join(refusals)}",
                        "what [route.requires] allows",
                        "choose another model or server, or change the policy",
                    )
        self._models = models
        self._writer.submit(self._adopt_policy).result()
        for name in self.policy.routes:
            self._show_stage(name)

    def _adopt_policy(self) -> None:
        for name, route in self.policy.routes.items():
            last = self._last.get(name)
            if last is None or (_settled(route, last) and _models_differ(route, last)):
                self._append(route, "adopted", "stable", by=_own_name())
            elif last.policy_sha256 != self.policy.sha256:
                self._adopt_change(route, last)

    def _adopt_change(self, route: ModelRoute, last: AuditEntry) -> None:
        """Goes on with the same models under another file; back, where that asks for more than the candidate showed."""
        stage = self._states[route.name].stage
        if stage == "stable":
            self._append(route, "policy_changed", "stable", by=_own_name())
            return
        decision = self._decide(route)
        if decision.refusals:
            reason = f"the policy was changed, and refuses it: {'; '.join(decision.refusals)}"
            self._append(route, "rolled_back", "stable", by="server", evidence=_evidence(decision), reason=reason)
            self._states[route.name] = RouteState(
                "stable", self._log.entries[-1].number, RollbackMonitor(route.rollback)
            )
            return
        # Baselines are those of before: a restart must not make a slow candidate the measure of itself.
        baselines = {name: value for name, value in last.figures.items() if name.startswith("baseline_")}
        self._append(route, "policy_changed", stage, by=_own_name(), evidence=_evidence(decision), figures=baselines)

    def set_metrics(self, metrics: GovernanceMetrics) -> None:
        self._metrics = metrics
        for name in self.policy.routes:
            self._show_stage(name)

    def close(self) -> None:
        """Writes what is waiting, and closes the log. Blocks."""
        self._writer.shutdown()
        self._log.close()

    # --- routing -----------------------------------------------------------------------------------------

    def choose(self, name: str, caller: str) -> RoutedModel | None:
        """Model that serves a caller of that route; None: no route has that name."""
        route = self.policy.routes.get(name)
        if route is None:
            return None
        state = self._states[name]
        return choose_model(route, state.stage, caller, state.epoch)

    def serving(self, name: str) -> str | None:
        """Model that serves most callers of that route; None: no route has that name."""
        route = self.policy.routes.get(name)
        if route is None:
            return None
        promoted = self._states[name].stage == "promoted"
        return route.candidate if promoted and route.candidate is not None else route.stable

    def shadow_of(self, routed: RoutedModel) -> str | None:
        """Candidate that is the shadow of that model now; None: none is."""
        route, state = self.policy.routes[routed.route], self._states[routed.route]
        return route.candidate if state.stage == "shadow" and not routed.is_candidate else None

    # --- what came of requests ---------------------------------------------------------------------------

    def record_request(self, routed: RoutedModel, *, failed: bool) -> None:
        """Counts a finished recording or live session. `failed`: by the model's doing."""
        if self._metrics is not None:
            outcome = "failed" if failed else "done"
            self._metrics.requests.labels(routed.route, routed.stage, routed.model, outcome).inc()
        with self._lock:
            state = self._current(routed)
            if state is not None:
                _outcomes(state, routed).add_request(self._clock(), failed=failed)
        if routed.is_candidate:
            self._check(routed.route)

    def record_latency(self, routed: RoutedModel, kind: RequestKind, latency_s: float) -> None:
        """Counts the latency of a recording, or of one sentence of a live session."""
        with self._lock:
            state = self._current(routed)
            if state is not None:
                _outcomes(state, routed).add_latency(self._clock(), kind, latency_s)
        if routed.is_candidate:
            self._check(routed.route)

    def record_shadow(self, routed: RoutedModel, words: int, differences: int, *, failed: bool) -> None:
        """Counts a recording that the shadow transcribed too: words of the stable model, and those that differ."""
        if self._metrics is not None:
            self._metrics.shadow_words.labels(routed.route).inc(words)
            self._metrics.shadow_different_words.labels(routed.route).inc(differences)
        with self._lock:
            state = self._current(routed)
            if state is not None:
                state.monitor.candidate.add_request(self._clock(), failed=failed)
                if not failed:
                    state.monitor.add_shadow(words, differences)
        self._check(routed.route)

    def record_restarts(self, model: str, restarts: int) -> None:
        """Takes the number of times that the engine of a model was started again, in all."""
        with self._lock:
            new = restarts - self._restarts.get(model, 0)
            self._restarts[model] = restarts
            affected = [name for name, route in self.policy.routes.items() if new > 0 and route.candidate == model]
            for name in affected:
                self._states[name].monitor.restarts += new
        for name in affected:
            self._check(name)

    def _current(self, routed: RoutedModel) -> RouteState | None:
        """State of the request's stage; None: that stage has ended."""
        state = self._states[routed.route]
        return state if state.epoch == routed.epoch else None

    def _check(self, name: str) -> None:
        """Takes the candidate back if it breaks a rule."""
        state = self._states[name]
        if state.stage == "stable":
            return
        with self._lock:
            regression = state.monitor.regression(self._clock())
            broken = regression is not None and self._states[name] is state
            if broken:
                self._states[name] = self._stable_state(name)
        if broken:
            assert regression is not None
            self._take_back(name, regression)

    def _stable_state(self, name: str) -> RouteState:
        """State of a route whose candidate is taken back. Its epoch is of no line: what still comes of earlier requests
        counts for nothing."""
        return RouteState("stable", -1, RollbackMonitor(self.policy.routes[name].rollback))

    def _take_back(self, name: str, regression: Regression) -> None:
        route = self.policy.routes[name]
        log.error("route %s: %s is rolled back to %s: %s", name, route.candidate, route.stable, regression.reason)
        if self._metrics is not None:
            self._metrics.rollbacks.labels(name, "server").inc()
        self._show_stage(name)
        self._writer.submit(
            self._write_rollback, route, by="server", reason=regression.reason, figures=regression.figures
        )

    def _write_rollback(self, route: ModelRoute, **fields: Any) -> None:
        try:
            self._append(route, "rolled_back", "stable", **fields)
        except (OSError, GovernanceError):
            # It is in force all the same. After a restart the stage would be the one before.
            log.exception("route %s was rolled back, and the audit log could not be written", route.name)
            raise

    # --- changes by operators ----------------------------------------------------------------------------

    def promote(
        self, name: str, *, by: str, operator: str = "", reason: str = "", to: str | None = None
    ) -> RouteStatus:
        """Brings a candidate to its next stage. Blocks. `to`: that stage, if it is to be no other. Raises UnknownRoute,
        PromotionRefused with all that is missing, errors of the audit log."""
        route = self._route(name)
        state = self._states[name]
        next_stage = self._next_stage(route, state)
        if to is not None and to != next_stage:
            raise PromotionRefused(
                f"route {name} is in the stage {state.stage}, and {to!r} was asked for", f"next is {next_stage}"
            )
        self._check_file()
        decision = self._decide(route)
        if refusals := (*self._unripe(route, state), *decision.refusals):
            raise PromotionRefused(
                f"{route.candidate} may not become {next_stage} on route {name}: {'; '.join(refusals)}",
                "what [route.requires] and [route.rollout] ask for",
                "evaluate it (asr-serve eval), or wait until it has served more",
            )
        change = {"by": by, "operator": operator, "reason": reason, "evidence": _evidence(decision)}
        self._writer.submit(self._write_promotion, route, state, next_stage, change).result()
        return self.status(name)

    def _write_promotion(self, route: ModelRoute, state: RouteState, stage: Stage, change: dict[str, Any]) -> None:
        now_s = self._clock()
        with self._lock:
            if self._states[route.name] is not state:
                raise PromotionRefused(
                    f"route {route.name} came to the stage {self._states[route.name].stage} meanwhile", "", "look again"
                )
            figures, baselines_s = state.monitor.figures(now_s), state.monitor.baselines_s(now_s)
        entry = self._append(route, "promoted", stage, figures=figures, **change)
        with self._lock:
            if self._states[route.name] is state:  # else it was rolled back meanwhile, which the next line tells
                monitor = RollbackMonitor(route.rollback, baselines_s)
                self._states[route.name] = RouteState(stage, entry.number, monitor)
        self._show_stage(route.name)
        log.info("route %s: %s is %s now, by %s", route.name, route.candidate, stage, entry.by)

    def roll_back(self, name: str, *, by: str, operator: str = "", reason: str = "") -> RouteStatus:
        """Takes a candidate back, whatever its stage. Blocks. Raises UnknownRoute, PromotionRefused where there is
        nothing to take back, errors of the audit log."""
        route = self._route(name)
        with self._lock:
            state = self._states[name]
            if state.stage == "stable":
                raise PromotionRefused(f"route {name} is in the stage stable", "one with a candidate in use")
            figures = state.monitor.figures(self._clock())
            self._states[name] = self._stable_state(name)
        if self._metrics is not None:
            self._metrics.rollbacks.labels(name, "admin").inc()
        self._show_stage(name)
        fields = {"by": by, "operator": operator, "reason": reason, "figures": figures}
        self._writer.submit(self._write_rollback, route, **fields).result()
        return self.status(name)

    def _next_stage(self, route: ModelRoute, state: RouteState) -> Stage:
        if route.candidate is None:
            raise PromotionRefused(f"route {route.name} has no candidate", "", "name one in the policy, and restart")
        found = route.next_stage(state.stage)
        if found is None:
            raise PromotionRefused(
                f"{route.candidate} is promoted on route {route.name} already",
                "",
                f"make it the stable model in the policy: stable = {route.candidate!r}",
            )
        return found

    def _check_file(self) -> None:
        """Refuses changes by a policy that is not the one in the file any more."""
        try:
            same = read_policy(self.policy.file).sha256 == self.policy.sha256
        except AsrServeError:
            same = False
        if not same:
            raise PromotionRefused(
                f"{self.policy.file} is not as it was when this server started",
                "the same file",
                "restart the server, which then takes the new policy, or put the file back",
            )

    def _unripe(self, route: ModelRoute, state: RouteState) -> tuple[str, ...]:
        least = route.rollout.minimum_requests
        if state.stage == "stable":
            return ()
        monitor = state.monitor
        with self._lock:
            finished = monitor.shadow_clips if state.stage == "shadow" else monitor.candidate.finished
            # What was enough to go on is enough to be judged by, even if a rollback asks for more requests.
            regression = monitor.regression(self._clock(), min(least, route.rollback.minimum_requests))
        if finished < least:
            return (f"it has finished {finished} requests as {state.stage}, and minimum_requests = {least}",)
        return () if regression is None else (regression.reason,)

    def _decide(self, route: ModelRoute) -> EvidenceDecision:
        candidate = route.candidate
        if candidate is None or candidate not in self._models:
            return EvidenceDecision((), ("its models are still being loaded",))
        if self._find is None:
            return EvidenceDecision((), ("this server knows no evaluations: set evaluations",))
        try:
            found = self._find(candidate)
        except AsrServeError as error:
            return EvidenceDecision((), (f"the evaluations cannot be read: {error}",))
        return check_evidence(route.requires, self._models[candidate], found, self._clock())

    def _route(self, name: str) -> ModelRoute:
        route = self.policy.routes.get(name)
        if route is None:
            names = list(self.policy.routes)
            raise UnknownRoute(
                f"there is no route {name[:100]!r}", f"routes: {', '.join(names)}", suggest_name(name, names)
            )
        return route

    # --- state -------------------------------------------------------------------------------------------

    def status(self, name: str) -> RouteStatus:
        """State of a route. Blocks. Raises UnknownRoute."""
        route, state, last = self._route(name), self._states[name], self._last.get(name)
        try:
            next_stage: Stage | None = self._next_stage(route, state)
            blocked = (*self._unripe(route, state), *self._decide(route).refusals)
        except PromotionRefused:
            next_stage, blocked = None, ()
        with self._lock:
            figures = state.monitor.figures(self._clock())
        return RouteStatus(
            name=name,
            stage=state.stage,
            next_stage=next_stage,
            stable=route.stable,
            candidate=route.candidate,
            since_utc=last.at_utc if last else "",
            by=last.by if last else "",
            reason=last.reason if last else "",
            figures=figures,
            blocked_by=blocked,
        )

    @property
    def head(self) -> str:
        """Digest of the last line of the audit log."""
        return self._log.head

    def _append(self, route: ModelRoute, action: str, stage: Stage, **fields: Any) -> AuditEntry:
        entry = self._log.append(
            action=action,
            route=route.name,
            stage=stage,
            stable=route.stable,
            candidate=route.candidate,
            policy_sha256=self.policy.sha256,
            **fields,
        )
        self._last[route.name] = entry
        # The digest stands in another log then, so that lines cut off at the end are missed.
        log.info("audit log: line %d, %s of %s by %s, digest %s", entry.number, action, route.name, entry.by, self.head)
        return entry

    def _show_stage(self, name: str) -> None:
        if self._metrics is not None:
            current = self._states[name].stage
            for stage in ("stable", "shadow", "canary", "promoted"):
                self._metrics.stage.labels(name, stage).set(stage == current)


def find_evaluations(file: Path, model: str) -> list[EvaluationSummary]:
    """Evaluations of a model in a file of `asr-serve eval`. Blocks. Raises SourceNotFound, OptionError."""
    with EvaluationStore(file) as store:
        return store.summaries(model=model)


def _settled(route: ModelRoute, last: AuditEntry) -> bool:
    """Returns whether the models of a route may be others than in its last line: its candidate served nobody, or it
    serves all and has become the stable one."""
    return last.stage == "stable" or (last.stage == "promoted" and route.stable == last.candidate)


def _models_differ(route: ModelRoute, last: AuditEntry) -> bool:
    return (last.stable, last.candidate) != (route.stable, route.candidate)


def _outcomes(state: RouteState, routed: RoutedModel) -> Any:
    return state.monitor.candidate if routed.is_candidate else state.monitor.stable


def _evidence(decision: EvidenceDecision) -> tuple[dict[str, Any], ...]:
    return tuple(msgspec.to_builtins(summary) for summary in decision.summaries)


def _own_name() -> str:
    """Name in the audit log of whoever runs this process."""
    try:
        return f"os:{pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:  # a container's user without an entry
        return f"os:{os.getuid()}"
