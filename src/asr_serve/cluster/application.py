"""The Ray Serve application of a cluster: an ingress, and a deployment for each model, or for each of its roles."""

from __future__ import annotations

import hashlib
import secrets
import warnings
from collections.abc import Mapping
from typing import Any

import msgspec
import ray
from ray import serve
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from asr_serve import __version__
from asr_serve.cluster.autoscaling_policy import EngineAutoscalingPolicy
from asr_serve.cluster.cluster_config import ClusterConfig, ModelDeployment, engine_config
from asr_serve.cluster.engine_replica import EngineReplica
from asr_serve.cluster.ingress import Ingress
from asr_serve.cluster.request_router import AudioRequestRouter
from asr_serve.server.engine_registry import engine_spec

INGRESS, APPLICATION = "ingress", "asr-serve"
KEY_NAME = b"asr-serve cluster key"
MAX_CONTROL_CALLS = 1_024
"""Control calls of one replica at once: an attached ingress is one."""
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 30.0
LOOK_BACK_REPORTS = 3
"""Reports that Ray Serve keeps of a replica; the policy reads the last one."""
SHUTDOWN_MARGIN_S = 15.0
"""Time beyond `drain_s` after which Ray Serve ends a replica under callers."""


def build(config: ClusterConfig, reach: str = "network") -> Application:
    """Builds the application. `reach`: where `config` leaves it open. Where the application runs, Ray Serve replaces
    the replicas of models, one after another, and the ingress if its settings or this release are others than before.
    Raises OptionError."""
    config.check_split()
    if not ray.is_initialized():
        ray.init()
    key = cluster_key()
    reach = config.reach or reach
    handles = {each.model: _served(config, each, key, reach) for each in config.served}
    return ingress(config, reach, key, handles)


def ingress(config: ClusterConfig, reach: str, key: bytes, handles: Mapping[str, Any]) -> Application:
    """Builds an ingress in front of deployments of models: applications of `build`, or handles of those that run.
    Raises OptionError."""
    settings = config.server()
    own = msgspec.structs.replace(config, reach=reach, models=tuple(_without_numbers(each) for each in config.served))
    encoded = msgspec.msgpack.encode(own)
    deployment = serve.deployment(
        Ingress,
        name=INGRESS,
        num_replicas=config.ingress.replicas,
        max_replicas_per_node=1 if config.ingress.replicas > 1 else None,
        max_ongoing_requests=MAX_CONTROL_CALLS,
        ray_actor_options={"num_cpus": config.ingress.cpus},
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=settings.drain_s + SHUTDOWN_MARGIN_S,
    )
    version = hashlib.sha256(__version__.encode() + b"\0" + encoded).hexdigest()[:16]
    # An ingress that need not be replaced keeps its callers.
    return deployment.options(version=version, _internal=True).bind(encoded, key, handles)


def _without_numbers(chosen: ModelDeployment) -> ModelDeployment:
    """Settings of a model that concern an ingress."""
    return ModelDeployment(model=chosen.model)


def cluster_key() -> bytes:
    """Key that the servers and engines of this Ray cluster share, made at the first call. It stays when the application
    is deployed again, so that old and new replicas know each other."""
    _internal_kv_put(KEY_NAME, secrets.token_bytes(32), overwrite=False)
    key = _internal_kv_get(KEY_NAME)
    assert key is not None
    return bytes(key)


def replica_options(chosen: ModelDeployment) -> dict[str, Any]:
    """Options of a deployment: the number of its replicas, or the policy that decides it."""
    if (settings := chosen.autoscale) is None:
        return {"num_replicas": chosen.replicas}
    policy = AutoscalingPolicy(
        policy_function=f"{EngineAutoscalingPolicy.__module__}:{EngineAutoscalingPolicy.__name__}",
        policy_kwargs={"settings": msgspec.to_builtins(settings), "has_ingress": chosen.role != "encode"},
    )
    with warnings.catch_warnings():
        # Without metrics_interval_s, replicas report every 10 s, or as the environment of each process says.
        warnings.simplefilter("ignore", DeprecationWarning)
        config = AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            policy=policy,
            metrics_interval_s=settings.report_s,
            look_back_period_s=LOOK_BACK_REPORTS * settings.report_s,
            # Delays are the policy's own.
            upscale_delay_s=0,
            downscale_delay_s=0,
        )
    return {"autoscaling_config": config}


def _served(config: ClusterConfig, chosen: ModelDeployment, key: bytes, reach: str) -> Application:
    """Deployment that requests go to, with the one that encodes for it where the model is split."""
    encoders = config.encoders(chosen.model)
    return _model(config, chosen, key, reach, None if encoders is None else _model(config, encoders, key, reach))


def _model(
    config: ClusterConfig, chosen: ModelDeployment, key: bytes, reach: str, encoders: Application | None = None
) -> Application:
    settings = config.engine_settings(chosen)
    spec = engine_spec(chosen.model, settings)
    spec = msgspec.structs.replace(
        spec,
        weights=chosen.weights,
        config=engine_config(chosen, spec.config),
        turn_model="none" if chosen.role == "encode" else spec.turn_model,
    )
    deployment = serve.deployment(
        EngineReplica,
        name=chosen.deployment,
        **replica_options(chosen),
        max_ongoing_requests=MAX_CONTROL_CALLS,
        ray_actor_options={"num_cpus": chosen.cpus, "num_gpus": chosen.gpus},
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=settings.drain_s + SHUTDOWN_MARGIN_S,
        request_router_config=RequestRouterConfig(
            request_router_class=f"{AudioRequestRouter.__module__}:{AudioRequestRouter.__name__}"
        ),
    )
    return deployment.bind(msgspec.msgpack.encode(spec), key, reach, encoders)
