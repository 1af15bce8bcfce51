"""Autoscaling policy of a model's deployment, by the interface of Ray Serve.

Ray Serve copies this module to its controller, which calls the policy several times a second: the decision itself is
elsewhere (`autoscaling`).
"""

from __future__ import annotations

import logging
from typing import Any, get_args

import msgspec
from ray.serve.config import AutoscalingContext

from asr_serve.cluster.autoscaling import (
    NEEDED,
    NEEDED_WITHOUT_INGRESS,
    AutoscaleSettings,
    Sample,
    ScalingMemory,
    SignalName,
    Situation,
    decide,
)

log = logging.getLogger("ray.serve")
SIGNALS: tuple[SignalName, ...] = get_args(SignalName)
MEMORY = "asr_serve"
"""Key of the policy's memory in the state that Ray Serve keeps."""


class EngineAutoscalingPolicy:
    """Policy of one deployment."""

    def __init__(self, settings: dict[str, Any], has_ingress: bool = True) -> None:
        """`settings`: AutoscaleSettings as plain data. `has_ingress`: whether ingresses connect to its replicas."""
        self._settings = msgspec.convert(settings, AutoscaleSettings)
        self._needed = NEEDED if has_ingress else NEEDED_WITHOUT_INGRESS

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Returns the number of replicas, and the state for the next call."""
        reported = context.raw_metrics or {}
        last = {name: [series[-1] for series in reported.get(name, {}).values() if series] for name in SIGNALS}
        signals = {name: [Sample(each.timestamp, each.value) for each in points] for name, points in last.items()}
        situation = Situation(
            now_s=context.current_time,
            running=context.current_num_replicas,
            target=context.target_num_replicas,
            signals=signals,
            needed=self._needed,
        )
        memory = msgspec.convert(context.policy_state.get(MEMORY, {}), ScalingMemory)
        decision = decide(self._settings, situation, memory)
        if decision.reason:
            log.info("%s: %d replicas: %s", context.deployment_name, decision.replicas, decision.reason)
        return decision.replicas, {MEMORY: msgspec.to_builtins(decision.memory)}
