"""Choice of the model of a route that serves a caller: a pure function of the stage and of who calls."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from asr_serve.governance.policy import ModelRoute, Stage


class RoutedModel(NamedTuple):
    """Model that serves a caller of a route."""

    route: str
    model: str
    stage: Stage
    """Stage of the route when it was chosen."""
    is_candidate: bool
    epoch: int = 0
    """Line of the audit log with which that stage began: what comes of the request counts for it alone."""


def caller_position(route: str, caller: str) -> float:
    """Place of a caller among all callers of a route, evenly spread from 0 up to 100. The same on every server; with a
    larger share, those who were within the smaller one stay within.

    >>> caller_position("default", "anna") == caller_position("default", "anna") != caller_position("other", "anna")
    True
    """
    return _position(f"{route}\0{caller}")


def is_sampled(route: str, request_id: str, percent: float) -> bool:
    """Returns whether a request is within that share of the requests of a route, which is spread over all callers."""
    return _position(f"{route}\0sample\0{request_id}") < percent


def _position(text: str) -> float:
    value = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8]
    return 100 * int.from_bytes(value, "big") / (1 << 64)


def choose_model(route: ModelRoute, stage: Stage, caller: str, epoch: int = 0) -> RoutedModel:
    """Model that serves that caller in that stage."""
    candidate = route.candidate
    if candidate is not None and (
        stage == "promoted"
        or (stage == "canary" and caller_position(route.name, caller) < route.rollout.canary_percent)
    ):
        return RoutedModel(route.name, candidate, stage, True, epoch)
    return RoutedModel(route.name, route.stable, stage, False, epoch)
