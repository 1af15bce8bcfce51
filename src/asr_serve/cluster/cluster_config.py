"""Settings of a cluster: which models, how many replicas of each, and the server's own settings. YAML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import yaml
from msgspec import Meta, inspect

from asr_serve.cluster.autoscaling import MAX_REPLICAS, AutoscaleSettings, Replicas
from asr_serve.config import EngineConfig, ServeConfig
from asr_serve.config_sources import TABLES, SettingValue, all_settings, build_config, unknown_setting_error
from asr_serve.engine.process.server_handshake import MAX_SERVERS
from asr_serve.engine.process.startup_checks import check_split
from asr_serve.engine.remote.handshake import MAX_CLIENTS
from asr_serve.errors import OptionError, SourceNotFound
from asr_serve.models.registry import AUTO_VOICE
from asr_serve.types import DeviceName, DtypeName, Name, NonEmptyText, PositiveInt, describe_allowed, suggest_name

Reach = Literal["machine", "network"]
"""Reach of a replica: servers of its machine alone connect to it, or others too."""
MAX_INGRESSES = MAX_SERVERS // 2
"""Every ingress is connected to every engine; while a release replaces them, there may be two of each."""
Ingresses = Annotated[int, Meta(ge=1, le=MAX_INGRESSES)]
SplitRole = Literal["encode", "decode"]
SPLIT_ROLES: tuple[SplitRole, ...] = ("encode", "decode")
ENCODE_SUFFIX = ":encode"
"""Suffix of the deployment of a model's encoder. That of its decoder has the model's name, so that a model is split, or
joined again, without another ingress."""
MAX_DECODERS = MAX_CLIENTS // 2
"""Decode replicas of a model: each may be connected to every encode replica, and an upgrade doubles them."""
CLUSTER_HAS = ("engine.peers", "encode_port", "peer_keys", "peer_keys_file", "edge_folder", "edge_sessions")
"""Settings of the server that a cluster chooses by itself."""
MODELS_HAVE = ("model", "more_models", "max_models", "weights", "engine_threads", "engine.role")
"""Settings of the server that stand in `models`."""
Share = Annotated[float, Meta(ge=0, le=1_024)]


class ModelDeployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deployment of a model, or of its encoder or its decoder: equal replicas, each with an engine process."""

    model: Name
    role: SplitRole | None = None
    """Work of a model that is split: `encode`, or `decode`, which callers' requests go to. None: all of it."""
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
        for role in SPLIT_ROLES:
            if self.model.endswith(f":{role}"):
                model = self.model.removesuffix(f":{role}")
                raise OptionError(f"model={self.model}", f"model={model} and role={role}", param="models")
        check_replicas(self.deployment, self.role, self.autoscale.max_replicas if self.autoscale else self.replicas)
        if self.autoscale is not None and self.replicas != 1:
            raise OptionError(
                f"models: {self.deployment} with replicas={self.replicas} and autoscale",
                "one of the two",
                "set autoscale.min_replicas: it begins with that many",
                param="models",
            )

    @property
    def first_replicas(self) -> int:
        """Replicas at the start."""
        return self.replicas if self.autoscale is None else self.autoscale.min_replicas

    @property
    def deployment(self) -> str:
        """Name of the deployment."""
        return deployment_name(self.model, self.role)


def deployment_name(model: str, role: SplitRole | None) -> str:
    """Name of the deployment of a model, or of a role of it."""
    return f"{model}{ENCODE_SUFFIX}" if role == "encode" else model


def find_deployment(name: str) -> str:
    """Name of the deployment that MODEL, MODEL:encode or MODEL:decode names."""
    return name.removesuffix(":decode")


def check_replicas(deployment: str, role: SplitRole | None, replicas: int) -> None:
    """Raises OptionError for more replicas than a deployment may have."""
    most = MAX_DECODERS if role == "decode" else MAX_REPLICAS
    if not 1 <= replicas <= most:
        raise OptionError(
            f"{replicas} replicas of {deployment}" + (f" with role={role}" if role else ""),
            f"1 to {most}",
            "for more, deploy another cluster" if replicas > most else "asr-serve cluster drain ends them all",
            param="replicas",
        )


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
        for name in dict.fromkeys(each.model for each in self.models):
            self._check_model(name, [each for each in self.models if each.model == name])

    def _check_model(self, name: str, deployments: list[ModelDeployment]) -> None:
        """Raises OptionError for deployments of one model that do not fit together."""
        roles = [each.role for each in deployments]
        if roles == [None]:
            return
        for role in roles:
            if (count := roles.count(role)) > 1:
                what = f"{name} with role={role}" if role else name
                raise OptionError(f"models: {what} comes {count} times", "each model and role once", param="models")
        if set(roles) != set(SPLIT_ROLES):
            raise OptionError(
                f"models: {name} with {' and '.join(f'role={role}' if role else 'no role' for role in roles)}",
                "both role=encode and role=decode, or no role, which is all of its work",
                "add the other one, or leave role out",
                param="models",
            )
        for setting in ("weights", "dtype"):
            values = [getattr(each, setting) for each in deployments]
            if values[0] != values[1]:
                raise OptionError(
                    f"models: {name} with {setting}={values[0]} for role={roles[0]} and {values[1]} for {roles[1]}",
                    "the same for both: one decodes what the other has encoded",
                    param="models",
                )

    @property
    def served(self) -> tuple[ModelDeployment, ...]:
        """Deployments that callers' requests go to, one for each model."""
        return tuple(each for each in self.models if each.role != "encode")

    def encoders(self, model: str) -> ModelDeployment | None:
        """Deployment that encodes for that model's decode replicas; None for a model that is not split."""
        return next((each for each in self.models if each.model == model and each.role == "encode"), None)

    @property
    def autoscales(self) -> bool:
        """Returns whether a policy scales a model."""
        return any(each.autoscale is not None for each in self.models)

    def check_split(self) -> None:
        """Checks that models with roles may be split, in a process of its own. Raises OptionError for one that cannot,
        like a streaming model."""
        if not (split := tuple(each.model for each in self.served if each.role == "decode")):
            return
        try:
            check_split(split)
        except OptionError as failure:
            todo = _without_role(failure)
            raise OptionError(f"models: {failure.came}", failure.allowed, todo, param="models") from None

    def server(self) -> ServeConfig:
        """Settings of the server. Raises OptionError."""
        values: dict[str, SettingValue] = {}
        for name, value in _flat(self.serve):
            if name not in all_settings():
                raise unknown_setting_error(name, "serve", (*MODELS_HAVE, *CLUSTER_HAS))
            if name in MODELS_HAVE:
                raise OptionError(f"serve: {name}", "settings other than those of models", "set it in models")
            if name in CLUSTER_HAS:
                raise OptionError(
                    f"serve: {name}", "no such setting in a cluster", "give models the roles encode, decode"
                )
            values[name] = SettingValue(tuple(value) if isinstance(value, list) else value, "serve")
        if "governance.policy" in values:
            # Each ingress would have stages of its own.
            raise OptionError(
                "serve: governance.policy",
                "no policy in a cluster: the stages of its routes are in the audit log of one server",
                "govern models on a server of its own: asr-serve serve",
                param="governance.policy",
            )
        if values.get("batch.enabled", SettingValue(False, "")).value:
            # Each ingress would have files and batches of its own.
            raise OptionError(
                "serve: batch.enabled",
                "no batches in a cluster: their files and queue are in a folder of one server",
                "run batches on a server of its own: asr-serve serve",
                param="batch.enabled",
            )
        values["batch.enabled"] = SettingValue(False, "a cluster")
        names = [each.model for each in self.served]
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
        """Settings of the server as they are for the engines of one deployment, but for its role."""
        config = self.server()
        return msgspec.structs.replace(
            config,
            device=chosen.device or config.device,
            dtype=chosen.dtype or config.dtype,
            weights=None,
            engine_threads=chosen.threads or max(1, int(chosen.cpus)),
        )


def _without_role(failure: OptionError) -> str:
    """Advice about a model that cannot be split; for another failure its own."""
    return "leave role out: one entry has all of the model's work" if failure.param == "role" else failure.todo


def engine_config(chosen: ModelDeployment, engine: EngineConfig) -> EngineConfig:
    """Settings of the engines of one deployment. Raises OptionError for some that its role does not allow."""
    if chosen.role is None:
        return engine
    # An engine that only encodes has no streams to offload.
    disk_bytes = 0 if chosen.role == "encode" else engine.disk_bytes
    return msgspec.structs.replace(engine, role=chosen.role, disk_bytes=disk_bytes)


def _flat(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Settings by name; those of a table as `TABLE.NAME`."""
    plain = [(str(name), value) for name, value in settings.items() if name not in TABLES]
    for table in TABLES:
        found = settings.get(table, {})
        if not isinstance(found, Mapping):
            raise OptionError(f"serve: {table}={found!r}", "a table of settings")
        plain += [(f"{table}.{name}", value) for name, value in found.items()]
    return plain


def read(file: str | None) -> ClusterConfig:
    """Reads a YAML file; None: the defaults. Raises OptionError; SourceNotFound."""
    if file is None:
        return ClusterConfig()
    try:
        loaded = yaml.safe_load(Path(file).expanduser().read_text("utf-8"))
    except OSError as failure:
        raise SourceNotFound(
            f"the cluster file {file} cannot be read: {failure.strerror}", todo="check the path"
        ) from None
    except UnicodeDecodeError as failure:
        line = failure.object.count(b"\n", 0, failure.start) + 1
        raise OptionError(f"cluster file {file}, line {line}: not UTF-8", "a YAML file") from None
    except yaml.YAMLError as failure:
        raise OptionError(f"cluster file {file}{_describe_yaml_error(failure)}", "a YAML file") from None
    return from_mapping({} if loaded is None else loaded, f"cluster file {file}")


def from_mapping(settings: object, source: str) -> ClusterConfig:
    """Settings of a cluster from plain data; the server's are checked too. Raises OptionError, with `source`."""
    try:
        _check_values(settings, ClusterConfig, "")
        config = msgspec.convert(settings, ClusterConfig)
        engine = config.server().engine
        for each in config.models:
            engine_config(each, engine)
    except msgspec.ValidationError as failure:
        allowed = "see docs/cluster.md for the settings and what they may be"
        raise OptionError(f"{source}: {failure}", allowed) from None
    except OptionError as failure:
        raise failure.located(source) from None
    return config


def _check_values(value: object, kind: Any, place: str) -> None:
    """Checks names and values of plain data against a type, one by one, since the library's own message names neither
    what is allowed nor what is near. Raises OptionError with the place, as `models[0].role`."""
    members = [each for each in get_args(kind) if each is not type(None)] if _is_union(kind) else [kind]
    if value is None and len(members) < len(get_args(kind)):
        return
    kind = members[0]
    plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if isinstance(plain, type) and issubclass(plain, msgspec.Struct):
        _check_table(value, plain, place)
    elif get_origin(plain) is tuple and isinstance(value, list):
        if not value:
            raise OptionError(f"{place}=[]", "one or more", param=place)
        for number, each in enumerate(value):
            _check_values(each, get_args(plain)[0], f"{place}[{number}]")
    else:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            known = inspect.type_info(kind)
            near = suggest_name(value, map(str, known.values)) if isinstance(known, inspect.LiteralType) else ""
            allowed = "a table of settings" if isinstance(known, inspect.DictType) else describe_allowed(known)
            raise OptionError(f"{place}={value!r}", allowed, near, param=place) from None


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _check_table(value: object, kind: type[msgspec.Struct], place: str) -> None:
    """Checks a table of settings. Raises OptionError."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    if not isinstance(value, Mapping):
        raise OptionError(f"{place}={value!r}" if place else f"{value!r}", f"a table with: {', '.join(fields)}")
    prefix = f"{place}." if place else ""
    for name, each in value.items():
        if name not in fields:
            raise OptionError(
                f"unknown setting '{prefix}{name}'", f"allowed: {', '.join(fields)}", suggest_name(name, list(fields))
            )
        _check_values(each, fields[name].type, f"{prefix}{name}")
    for name, field in fields.items():
        if field.required and name not in value:
            raise OptionError(f"{place} without {name}", f"{name}: {describe_allowed(inspect.type_info(field.type))}")


def _describe_yaml_error(failure: yaml.YAMLError) -> str:
    """Place of what is wrong in a YAML file, and what it is: `, line 3, column 5: expected ...`."""
    if isinstance(failure, yaml.MarkedYAMLError):
        mark = failure.problem_mark or failure.context_mark
        what = " ".join(each for each in (failure.context, failure.problem) if each)
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        return f"{place}: {what}"
    return f": {' '.join(str(failure).split())}"
