"""Control of a cluster from the command line: start, state, scale, drain, upgrade, stop."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray import serve
from ray._common.utils import get_default_ray_temp_dir
from ray._private import services, worker
from ray._private.authentication import authentication_token_setup
from ray.exceptions import AuthenticationError, RayError, RpcError
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_LOGGER_NAME
from ray.serve.config import ProxyLocation
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from asr_serve.cluster.application import APPLICATION, INGRESS, build
from asr_serve.cluster.cluster_config import (
    ENCODE_SUFFIX,
    MAX_INGRESSES,
    ClusterConfig,
    check_replicas,
    find_deployment,
)
from asr_serve.cluster.ingress import CONTROL_S
from asr_serve.config import ray_address, ray_auth_mode, set_default_ray_variable
from asr_serve.errors import EngineClosed, NotAllowed, OptionError

OBJECT_STORE_BYTES = 100 << 20
"""Memory of Ray's objects on a machine where `up` starts Ray: control calls need little, and audio none."""
SYSTEM_CONFIG = {
    "worker_niceness": 0,  # by default 15: live audio would wait for all other programs
    "enable_metrics_collection": False,  # Ray's own, which nobody reads here: asr-serve has its metrics by itself
}
"""Settings of Ray where `up` starts it."""
CONTROL_LOOP_S = 0.5
"""Pause of Ray Serve's controller between two looks at its replicas, where `up` starts Ray. By default 0.1, which takes
0.03 cores for nothing."""
PROBE_S = 5.0
"""Longest wait for a Ray cluster to accept a connection."""
AUTO = "auto"
"""Address that stands for the Ray cluster of this machine."""
HOW_TO_START = "start one: asr-serve cluster up, or ray start --head; or name another: --address HOST:PORT"
POLL_S = 0.5
"""Time between two looks at what Ray Serve has done: it offers no event."""
NAMESPACE = "serve"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
OWN_ERROR = re.compile(r"^.*\basr_serve\.errors\.\w+: (.+)$", re.MULTILINE)
"""Last line of the stack of one of our errors, in Ray's messages."""


class ModelStatus(NamedTuple):
    """Deployment of a model, or of the ingress."""

    name: str
    role: str
    """ingress; recognise, stream or speak; encode or decode. Empty while no ingress tells it."""
    state: str
    replicas: int
    wanted: int
    detail: dict[str, Any]
    """State of its replicas as the ingress sees them; empty without an ingress."""
    limits: tuple[int, int] | None = None
    """Fewest and most replicas of a model that a policy scales."""


def start_ray(address: str | None, cpus: int | None) -> bool:
    """Connects to the Ray cluster at `address`, or starts Ray on this machine, which then asks for a token; returns
    whether it was started. Raises EngineClosed; NotAllowed for a cluster that asks nobody for a token, unless
    RAY_AUTH_MODE=disabled says that this is wanted."""
    quiet_ray_serve()
    if address is None:
        set_default_ray_variable("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", str(CONTROL_LOOP_S))
        try:
            ray.init(
                address="local",  # by default it would join a Ray that somebody started on this machine
                num_cpus=cpus,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=True,
                logging_level="warning",
                namespace=NAMESPACE,
                _system_config=SYSTEM_CONFIG,
            )
        except Exception as failure:  # Ray raises plain ones for a node that does not start
            why = " ".join(str(failure).split())
            raise EngineClosed(f"Ray did not start: {why}", todo=f"see the logs of Ray: {logs_folder()}") from None
        return True
    if not _find_token() and ray_auth_mode() != "disabled":
        raise NotAllowed(
            f"deploying to Ray at {address} without a token: who reaches a Ray that asks for none runs programs there",
            "a Ray with a token, which this command has too",
            "ray get-auth-token --generate, copy ~/.ray/auth_token to all machines, and set RAY_AUTH_MODE=token for "
            "ray start and for this command; RAY_AUTH_MODE=disabled where the network keeps all others out",
        )
    connect(address)
    return False


def logs_folder() -> str:
    """Folder of Ray's logs on this machine: that of the session, or where the next one has them."""
    node = worker._global_node
    return str(
        node.get_logs_dir_path() if node is not None else Path(get_default_ray_temp_dir(), "session_latest", "logs")
    )


def _find_token() -> bool:
    """Makes this process show Ray's token where there is one, as Ray's own commands do; returns whether it does."""
    logging.getLogger(authentication_token_setup.__name__).setLevel(logging.ERROR)  # it tells that as a warning
    return bool(authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False))


def connect(address: str) -> None:
    """Connects to a Ray cluster that runs; `auto`: the one of this machine. Raises EngineClosed; NotAllowed for one
    with another token; OptionError for an address of another form, and where several run on this machine."""
    _find_token()
    quiet_ray_serve()
    if address == AUTO:
        address = _address_of_this_machine()
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise OptionError(f"--address {address}", f"HOST:PORT, or {AUTO}", param="address")
    try:  # Ray would try for minutes
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    except OSError as failure:
        why = failure.strerror or str(failure) or type(failure).__name__
        raise EngineClosed(f"no Ray answers at {address}: {why}", todo=HOW_TO_START) from None
    _check_token(address)
    with _handlers_restored():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="warning", namespace=NAMESPACE)
        except (ConnectionError, RuntimeError, ValueError) as failure:
            raise EngineClosed(f"no Ray cluster at {address}: {failure}", todo=HOW_TO_START) from None


def quiet_ray_serve() -> None:
    """Drops what Ray Serve tells this process of its own work, below warnings: it goes to a command's output."""
    logging.getLogger(SERVE_LOGGER_NAME).setLevel(logging.WARNING)


@contextlib.contextmanager
def _handlers_restored() -> Iterator[None]:
    """Keeps this process' handlers of signals. Ray's own, native ones included, print a stack."""
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _check_token(address: str) -> None:
    """Asks the Ray cluster at `address` once, of which `ray.init` makes twenty attempts, each with a warning. Raises
    NotAllowed where it takes another token than this command has; EngineClosed."""
    try:
        authentication_token_setup.ensure_token_if_auth_enabled(None, create_token_if_missing=False)
        with _stderr_dropped():
            services.GcsClient(address=address)
    except AuthenticationError:
        raise NotAllowed(
            f"Ray at {address} asks for another token than this command has",
            "the token of that cluster",
            "copy ~/.ray/auth_token from its machines, or set RAY_AUTH_TOKEN_PATH to such a file, or RAY_AUTH_TOKEN to "
            "the token itself; RAY_AUTH_MODE=token, or not set",
        ) from None
    except RpcError as failure:
        raise EngineClosed(f"no Ray cluster at {address}: {failure}", todo=HOW_TO_START) from None


@contextlib.contextmanager
def _stderr_dropped() -> Iterator[None]:
    """Drops what Ray's native code writes to stderr: the error that follows says it once."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _address_of_this_machine() -> str:
    """Address in RAY_ADDRESS; else of the cluster that `ray start` joined last, if it runs; else of the only one that
    runs here: Ray would take any of several. Raises EngineClosed, OptionError."""
    if named := ray_address():
        return named
    running = sorted(services.find_gcs_addresses())
    started = services.find_bootstrap_address(None)
    if started in running:
        return str(started)
    if not running:
        raise EngineClosed("no Ray runs on this machine", todo=HOW_TO_START)
    if len(running) > 1:
        came, allowed = f"{len(running)} Ray clusters run on this machine", f"one of: {', '.join(running)}"
        raise OptionError(came, allowed, "name it: --address HOST:PORT", param="address")
    return str(running[0])


def address() -> str:
    """Address of the Ray cluster that this process is connected to."""
    return str(ray.get_runtime_context().gcs_address)


def deploy(config: ClusterConfig, stop: threading.Event, *, local: bool, wait_s: float) -> dict[str, Any]:
    """Deploys the application, or replaces its replicas one by one where it runs, and waits until it serves. Returns
    the ingress's description. Raises OptionError; EngineClosed, also where `stop` is set meanwhile."""
    application = build(config, "machine" if local else "network")
    # The ingress has a listener of its own: Ray Serve's proxy speaks no HTTP/2 (docs/decisions/0038).
    serve.start(proxy_location=ProxyLocation.Disabled)
    target = serve.RunTarget(
        application,
        name=APPLICATION,
        route_prefix=None,
        # Ray Serve has one or the other: `scale`, or policies.
        external_scaler_enabled=not config.autoscales,
        logging_config={"enable_access_log": False},
    )
    serve.run_many([target], wait_for_applications_running=False)
    end_s = time.monotonic() + wait_s
    while True:
        status = serve.status().applications.get(APPLICATION)
        if status is not None and status.status == ApplicationStatus.RUNNING:
            return describe()
        failed = status is not None and status.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)
        if failed or time.monotonic() > end_s:
            parts = [] if status is None else [status, *status.deployments.values()]
            raise EngineClosed(
                f"the cluster did not start{'' if failed else f' within {wait_s:g} s'}: "
                + failure_reason([each.message for each in parts]),
                todo=f"see the logs of Ray: {logs_folder()}",
            )
        if stop.wait(POLL_S):
            raise EngineClosed("the cluster was stopped while it was starting")


def failure_reason(messages: Iterable[str]) -> str:
    """Reason in Ray Serve's messages of a failure: the last line of each of our errors, without the stacks before it;
    else all that they say, on one line."""
    found = list(messages)
    own = [line for text in found for line in OWN_ERROR.findall(text)]
    if own:
        return " ".join(dict.fromkeys(own))
    return " ".join(" ".join(text.split()) for text in found if text)[:2_000]


def _how_to_deploy() -> str:
    return f"start the cluster: asr-serve cluster up --config FILE --address {address()}"


def describe() -> dict[str, Any]:
    """Description of the ingress. Raises EngineClosed where there is none."""
    try:
        handle = serve.get_app_handle(APPLICATION)
        described: dict[str, Any] = handle.describe.remote().result(timeout_s=CONTROL_S)
    except (RayError, RayServeException, TimeoutError, ValueError) as failure:
        raise EngineClosed(f"no ingress answers: {failure}", todo=_how_to_deploy()) from None
    return described


def statuses() -> list[ModelStatus]:
    """State of each deployment. Raises EngineClosed where no application runs."""
    application = serve.status().applications.get(APPLICATION)
    if application is None:
        raise EngineClosed("no asr-serve runs in this Ray cluster", todo=_how_to_deploy())
    described: dict[str, Any] = {}
    with contextlib.suppress(EngineClosed):
        described = describe()
    found = []
    models = described.get("models", {})
    for name, status in application.deployments.items():
        role, details = _describe_deployment(name, application.deployments.keys(), models)
        if name == INGRESS:
            role, details = INGRESS, described
        running = sum(count for state, count in status.replica_states.items() if str(state).endswith("RUNNING"))
        wanted = sum(status.replica_states.values())
        found.append(ModelStatus(name, role, str(status.status.value), running, wanted, details, _limits(name)))
    return found


def _describe_deployment(name: str, names: Collection[str], models: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Role of a model's deployment, and the state of its replicas as far as an ingress knows it."""
    if name.endswith(ENCODE_SUFFIX):
        # No ingress is connected to it: decode replicas are.
        decoders = models.get(name.removesuffix(ENCODE_SUFFIX), {}).get("replicas", {}).values()
        states: dict[str, list[str]] = {}
        for decoder in decoders:
            for address, state in (decoder["peers"] or {}).items():
                states.setdefault(address, []).append(state)
        return "encode", {"peers": {address: dict(Counter(found)) for address, found in states.items()}}
    details = dict(models.get(name, {}))
    role: str = details.pop("role", "")
    return "decode" if f"{name}{ENCODE_SUFFIX}" in names else role, details


def scale(name: str, replicas: int) -> str:
    """Sets the number of replicas of a deployment: a model, MODEL:encode or MODEL:decode. Those that go are drained
    first. Returns the deployment's name. Raises OptionError, EngineClosed."""
    found = {status.name: status.role for status in statuses()}
    deployment = find_deployment(name)
    if deployment not in found or (deployment != name and found[deployment] != "decode"):
        raise OptionError(f"no deployment {name!r}", f"one of: {', '.join(found)}")
    if deployment == INGRESS and replicas > MAX_INGRESSES:
        raise OptionError(f"{replicas} ingresses", f"1 to {MAX_INGRESSES}")
    check_replicas(deployment, "decode" if found[deployment] == "decode" else None, replicas)
    controller = _get_global_client()._controller
    if not ray.get(controller.get_external_scaler_enabled.remote(APPLICATION)) or _limits(deployment) is not None:
        raise NotAllowed(
            f"scaling {deployment} by hand: a policy scales models of this cluster",
            "one of both in a cluster, since Ray Serve has no mixture",
            "change replicas or autoscale in the cluster file, then: asr-serve cluster upgrade",
        )
    ray.get(controller.update_deployment_replicas.remote(DeploymentID(deployment, APPLICATION), replicas))
    return deployment


def _limits(deployment: str) -> tuple[int, int] | None:
    """Fewest and most replicas of a deployment that a policy scales; None for another."""
    controller = _get_global_client()._controller
    config = ray.get(controller.get_deployment_config.remote(DeploymentID(deployment, APPLICATION)))
    scaled = None if config is None else config.autoscaling_config
    return None if scaled is None else (scaled.min_replicas, scaled.max_replicas)


def wait_scaled(model: str, replicas: int, wait_s: float) -> None:
    """Waits until a model has that many replicas, all of them running. Raises EngineClosed."""
    end_s = time.monotonic() + wait_s
    while True:
        status = next((each for each in statuses() if each.name == model), None)
        if status is not None and status.replicas == status.wanted == replicas:
            return
        if time.monotonic() > end_s:
            have = 0 if status is None else status.replicas
            raise EngineClosed(
                f"{model} has {have} of {replicas} replicas after {wait_s:g} s{_why_not_scaled(model, have, replicas)}",
                f"it stays at the target of {replicas}, and gets them once there is room",
                f"see asr-serve cluster status, or take it back: asr-serve cluster scale {model} {max(1, have)}",
            )
        time.sleep(POLL_S)


def _why_not_scaled(deployment: str, have: int, wanted: int) -> str:
    """Reason why a deployment lacks replicas, as far as Ray tells it, to follow a sentence."""
    if have >= wanted:
        return ""
    machines = sum(bool(node["Alive"]) for node in ray.nodes())
    if deployment == INGRESS and wanted > machines:
        return f": each ingress needs another machine, and Ray has {machines}"
    free = ray.available_resources()
    return f": free in Ray are {free.get('CPU', 0):g} cores and {free.get('GPU', 0):g} GPUs"


def drain() -> None:
    """Refuses new callers, finishes those in progress, and ends the application. Raises EngineClosed."""
    if serve.status().applications.get(APPLICATION) is None:
        raise EngineClosed("no asr-serve runs in this Ray cluster", todo=_how_to_deploy())
    serve.delete(APPLICATION)


def shut_down() -> None:
    """Ends Ray Serve, and Ray where this process started it."""
    serve.shutdown()
    ray.shutdown()


@contextlib.contextmanager
def signals() -> Iterator[threading.Event]:
    """Event that is set by SIGTERM and SIGINT."""
    stop = threading.Event()
    with _handlers_restored():
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: stop.set())
        yield stop


class Stopped(BaseException):
    """SIGTERM or SIGINT, where it ends a command, but nothing in the cluster."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Raises Stopped at SIGTERM and SIGINT. Its event is never set: what a cluster has begun goes on without this
    process."""

    def stop(number: int, _: object) -> None:
        raise Stopped(number)

    with _handlers_restored():
        for number in STOP_SIGNALS:
            signal.signal(number, stop)
        yield threading.Event()
