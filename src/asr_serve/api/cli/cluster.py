"""`asr-serve cluster`: starts a cluster on Ray, shows it, scales it, drains it."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asr_serve.api.cli.exit_codes import INTERRUPTED, TERMINATED, exit_on_error, print_error
from asr_serve.api.cli.models import print_table
from asr_serve.api.cli.options import AsJson, whole_number
from asr_serve.cluster import require_ray

if TYPE_CHECKING:
    from asr_serve.cluster.control import ModelStatus

GOES_ON = "interrupted: the cluster goes on with"
SEE = "see asr-serve cluster status"

app = typer.Typer(no_args_is_help=True, help="Serve on several machines, with Ray.")

Address = Annotated[str, typer.Option(metavar="HOST:PORT", help="Ray cluster; auto: the one of this machine.")]
ConfigFile = Annotated[str | None, typer.Option("--config", "-c", metavar="FILE", help="Cluster file, in YAML.")]
WaitS = Annotated[float, typer.Option("--wait", metavar="SECONDS", help="Longest wait.")]


@app.command("up")
@exit_on_error
def up(
    config: ConfigFile = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Ray cluster to deploy to; auto: the one of this machine. Default: start Ray here.",
        ),
    ] = None,
    cpus: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Cores of this machine for Ray. Default: all.")
    ] = None,
    wait_s: WaitS = 1_800.0,
) -> None:
    """Start a cluster: an ingress, which callers connect to, and replicas of each model.

    It runs until ctrl-C or SIGTERM, and drains then. With --address, it is
    deployed to Ray and this command returns.

    \b
    Examples
      asr-serve cluster up
      asr-serve cluster up --config cluster.yaml
      asr-serve cluster up --config cluster.yaml --address auto
    """
    require_ray()
    from asr_serve.cluster import cluster_config, control
    from asr_serve.server.run import prepare

    chosen = cluster_config.read(config)
    chosen.check_split()
    server = chosen.server()
    if address is None:  # before minutes of starting: names of models, the port and the certificate
        prepare(server, in_cluster=True)
    local = control.start_ray(address, cpus)
    names = ", ".join(f"{each.first_replicas} x {each.deployment}" for each in chosen.models)
    where = f"{server.host}:{server.port}" if server.port else f"{server.host} and a free port"
    print_error(f"asr-serve cluster starts {names}, with an ingress on {where}")
    # Ray has handlers of its own, which are replaced.
    with control.signals() if local else _interruptible(f"{GOES_ON} what it has begun to start. {SEE}") as stop:
        described = control.deploy(chosen, stop, local=local, wait_s=wait_s)
        url = described["url"]
        print_error(f"asr-serve cluster serves {names} on {url} {'(stop with ctrl-C)' if local else ''}")
        print_error("")
        upload = f"-F model={chosen.served[0].model} -F file=@talk.wav"
        print_error(f"  try it    curl {url}/v1/audio/transcriptions {upload}")
        print_error(f"  live      ws{url.removeprefix('http')}   (FunASR's; OpenAI's: /v1/realtime; ours: /v1/stream)")
        print_error(f"  health    {url}/ready   metrics   {url}/metrics")
        print_error(f"  control   asr-serve cluster status   (of Ray at {control.address()})")
        if not local:
            return
        stop.wait()
        print_error("stopping: requests in progress are still answered")
        control.drain()
        control.shut_down()


@app.command("status")
@exit_on_error
def status(address: Address = "auto", as_json: AsJson = False) -> None:
    """Show the deployments of a cluster, and the load of each replica.

    \b
    Examples
      asr-serve cluster status
      asr-serve cluster status --json | jq '.[].detail'
    """
    require_ray()
    from asr_serve.cluster import control

    with _interruptible("interrupted"):
        control.connect(address)
        found = control.statuses()
    if as_json:
        print(json.dumps([each._asdict() for each in found], indent=2))
        return
    loads = ("QUEUED S", "SESSIONS", "WAIT S", "BUSY", "GPU", "COLLECTIVES")
    print_table(("DEPLOYMENT", "ROLE", "STATE", "RUNNING", "REPLICA", *loads), list(_rows(found)))


@app.command("scale")
@exit_on_error
def scale(
    name: Annotated[str, typer.Argument(help="A model; one that is split: MODEL:encode or MODEL:decode; or ingress.")],
    replicas: Annotated[int, typer.Argument(help="Number of replicas.", parser=whole_number)],
    address: Address = "auto",
    wait_s: WaitS = 600.0,
) -> None:
    """Set the number of replicas of a deployment, and wait until it has them.

    Replicas that go are drained: they finish their requests, and live callers
    move to the others in the middle of their sentence.

    \b
    Examples
      asr-serve cluster scale moonshine-tiny-en 4
      asr-serve cluster scale whisper-tiny-en:encode 2
    """
    require_ray()
    from asr_serve.cluster import control

    with _interruptible("interrupted"):
        control.connect(address)
        deployment = control.scale(name, replicas)
    with _interruptible(f"{GOES_ON} it, until {deployment} has {replicas} replicas. {SEE}"):
        control.wait_scaled(deployment, replicas, wait_s)
    print_error(f"{deployment} has {replicas} replicas")


@app.command("upgrade")
@exit_on_error
def upgrade(
    config: Annotated[str, typer.Option("--config", "-c", metavar="FILE", help="Cluster file, in YAML.")],
    address: Address = "auto",
    wait_s: WaitS = 1_800.0,
) -> None:
    """Replace the replicas of all models, one after another, under their callers.

    New replicas have the settings and weights of the file, and the release
    that is installed now. Live callers move in the middle of their sentence.
    The ingress stays unless its own settings, the release, a tokenizer, or
    the list of models have changed; then it is replaced too, and connections
    to it end. A model that is split into roles, or joined, leaves it.

    \b
    Example
      asr-serve cluster upgrade --config cluster.yaml
    """
    require_ray()
    from asr_serve.cluster import cluster_config, control
    from asr_serve.server.run import check_settings

    chosen = cluster_config.read(config)
    control.connect(address)
    local = control.describe()["reach"] == "machine"
    if local:  # before anything is replaced
        check_settings(chosen.server())
    with _interruptible(f"{GOES_ON} what it has begun of the upgrade. {SEE}") as stop:
        control.deploy(chosen, stop, local=local, wait_s=wait_s)
    print_error("all replicas were replaced")


@app.command("drain")
@exit_on_error
def drain(address: Address = "auto") -> None:
    """Refuse new callers, finish those in progress, and end the ingress and all replicas.

    Ray itself runs on where it was started by another command.

    \b
    Example
      asr-serve cluster drain
    """
    require_ray()
    from asr_serve.cluster import control

    with _interruptible(f"{GOES_ON} it, if it has begun to drain. {SEE}"):
        control.connect(address)
        control.drain()


@contextlib.contextmanager
def _interruptible(told: str) -> Iterator[threading.Event]:
    """Ends the command at SIGTERM or SIGINT, with a line that tells what the cluster does. Its event is never set."""
    from asr_serve.cluster import control

    try:
        with control.interruptible() as never:
            yield never
    except control.Stopped as stopped:
        print_error(told)
        raise typer.Exit(INTERRUPTED if stopped.number == signal.SIGINT else TERMINATED) from None


def _rows(found: list[ModelStatus]) -> Any:
    for each in found:
        limits = "" if each.limits is None else " ({} to {})".format(*each.limits)
        head = (each.name, each.role, each.state, f"{each.replicas} of {each.wanted}{limits}")
        replicas = each.detail.get("replicas", {})
        if not replicas:
            peers = each.detail.get("peers")
            connected = [f"{address}: {counts.get('ready', 0)} connected" for address, counts in (peers or {}).items()]
            yield (*head, each.detail.get("url", ", ".join(connected)), *6 * ("",))
        for replica_id, replica in replicas.items():
            load = replica["load"]
            backlog_s = load.get("backlog_s")  # of all ingresses
            if backlog_s is None:
                backlog_s = replica["queued_samples"] / 16_000
            shares = (load.get(name) for name in ("occupancy", "accelerator", "collectives"))
            yield (
                *head,
                replica_id if replica["answers"] else f"{replica_id}: no answer",
                f"{backlog_s:.1f}",
                str(replica["sessions"]),
                "" if load.get("queue_s") is None else f"{load['queue_s']:.2f}",
                *("" if share is None else f"{share:.0%}" for share in shares),
            )
            head = ("", "", "", "")
