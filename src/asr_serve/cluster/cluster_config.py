"""Settings of a cluster: which models, how many replicas of each, and the server's own settings. YAML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from asr_serve.cluster.autoscaling import AutoscaleSettings, Replicas
from asr_serve.config import ServeConfig
from asr_serve.config_sources import SettingValue, all_settings, build_config, unknown_setting_error
from asr_serve.engine.process.server_handshake import MAX_SERVERS
from asr_serve.errors import OptionError
from asr_serve.models.registry import AUTO_VOICE
from asr_serve.types import DeviceName, DtypeName, Name, NonEmptyText, PositiveInt

Reach = Literal["machine", "network"]
"""Reach of a replica: servers of its machine alone connect to it, or others too."""
MAX_INGRESSES = MAX_SERVERS // 2
"""Every ingress is connected to every engine; while a release replaces them, there may be two of each."""
Ingresses = Annotated[int, Meta(ge=1, le=MAX_INGRESSES)]
Share = Annotated[float, Meta(ge=0, le=1_024)]


class ModelDeployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deployment of a model: equal replicas, each with an engine process."""

    model: Name
    replicas: Replicas = 1
    cpus: Share = 1.0
    """Cores that Ray reserves for each replica."""
    gpus: Share = 0.0
    """GPUs that Ray reserves for each replica."""
    threads: PositiveInt | None = None
    """CPU threads of each engine. None: its whole `cpus`, at least 1."""
    device: DeviceName | None = None
    """Device. None: that of `serve`."""
    dtype: DtypeName | None = None
    """Data type. None: that of `serve`."""
    weights: NonEmptyText | None = None
    """Checkpoint folder, on every machine where a replica may run. None: the model's own weights."""
    autoscale: AutoscaleSettings | None = None
    """Autoscaling. None: `replicas`, or as many as `cluster scale` sets."""

    def __post_init__(self) -> None:
        if self.autoscale is not None and self.replicas != 1:
            raise OptionError(
                f"models: {self.model} with replicas={self.replicas} and autoscale",
                "one of the two",
                "set autoscale.min_replicas: it begins with that many",
                param="models",
            )

    @property
    def first_replicas(self) -> int:
        """Replicas at the start."""
        return self.replicas if self.autoscale is None else self.autoscale.min_replicas


class IngressDeployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deployment of the ingress: the server that callers connect to."""

    replicas: Ingresses = 1
    """Servers, at most one on each machine: they have the same port."""
    cpus: Share = 0.0
    """Cores that Ray reserves for each."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a cluster. `read` reads them."""

    models: Annotated[tuple[ModelDeployment, ...], Meta(min_length=1)] = (ModelDeployment(model=ServeConfig().model),)
    """Models; the first is the default one of requests."""
    ingress: IngressDeployment = IngressDeployment()
    reach: Reach | None = None
    """Reach of all replicas. None: their machine where `cluster up` started Ray, else the network."""
    replica_silent_s: Annotated[float, Meta(ge=0.5, le=600)] = 10.0
    """Seconds without a sign of life after which a replica's work goes to others."""
    serve: dict[str, Any] = {}
    """Settings of the server, as in asr-serve serve, but for those of its models."""

    def __post_init__(self) -> None:
        names = [each.model for each in self.models]
        for name in names:
            if names.count(name) > 1:
                raise OptionError(f"models: {name} comes {names.count(name)} times", "each model once", param="models")

    @property
    def autoscales(self) -> bool:
        """Whether a policy scales a model."""
        return any(each.autoscale is not None for each in self.models)

    def server(self) -> ServeConfig:
        """Settings of the server. Raises OptionError."""
        values: dict[str, SettingValue] = {}
        for name, value in _flat(self.serve):
            if name not in all_settings():
                raise unknown_setting_error(name, "serve")
            if name in ("model", "more_models", "max_models", "weights", "engine_threads", "engine.role"):
                raise OptionError(f"serve: {name}", "settings other than those of models", "set it in models")
            values[name] = SettingValue(tuple(value) if isinstance(value, list) else value, "serve")
        names = [each.model for each in self.models]
        values["model"] = SettingValue(names[0], "models")
        values["more_models"] = SettingValue(tuple(names[1:]), "models")
        values["max_models"] = SettingValue(len(names), "models")
        if values.get("voice", SettingValue(AUTO_VOICE, "")).value == AUTO_VOICE:
            values["voice"] = SettingValue("none", "models")
        config = build_config(values)
        if config.voice != "none" and config.voice not in names:
            raise OptionError(
                f"serve: voice={config.voice}", f"none, or one of models: {', '.join(names)}", "add it to models"
            )
        return config

    def engine_settings(self, chosen: ModelDeployment) -> ServeConfig:
        """Settings of the server as they are for the engines of one model."""
        config = self.server()
        return msgspec.structs.replace(
            config,
            device=chosen.device or config.device,
            dtype=chosen.dtype or config.dtype,
            weights=None,
            engine_threads=chosen.threads or max(1, int(chosen.cpus)),
        )


def _flat(tables: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Settings by name; those of the table `engine` as `engine.NAME`."""
    engine = tables.get("engine", {})
    if not isinstance(engine, Mapping):
        raise OptionError(f"serve: engine={engine!r}", "a table of settings")
    plain = [(str(name), value) for name, value in tables.items() if name != "engine"]
    return [*plain, *((f"engine.{name}", value) for name, value in engine.items())]


def read(file: str | None) -> ClusterConfig:
    """Reads a YAML file; None: the defaults. Raises OptionError."""
    if file is None:
        return ClusterConfig()
    try:
        loaded = yaml.safe_load(Path(file).expanduser().read_text("utf-8"))
    except OSError as failure:
        raise OptionError(f"cluster file {file}: {failure.strerror}", "a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as failure:
        raise OptionError(f"cluster file {file}: {' '.join(str(failure).split())}", "a YAML file") from None
    return from_mapping({} if loaded is None else loaded, f"cluster file {file}")


def from_mapping(settings: object, source: str) -> ClusterConfig:
    """Settings of a cluster from plain data; the server's are checked too. Raises OptionError, with `source`."""
    try:
        config = msgspec.convert(settings, ClusterConfig)
        config.server()
    except msgspec.ValidationError as failure:
        allowed = "see docs/cluster.md for the settings and what they may be"
        raise OptionError(f"{source}: {failure}", allowed) from None
    except OptionError as failure:
        raise failure.located(source) from None
    return config
