"""What commands of a cluster tell: Ray's part is replaced, and none is started."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asr_serve.api.cli import app
from asr_serve.cluster.cluster_config import from_mapping
from asr_serve.errors import EngineClosed

pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray Serve's own, when it is imported

STACK = """Failed to start replica 'x':
Traceback (most recent call last):
  File "replica.py", line 1, in start
ray.exceptions.RayTaskError(EngineClosed): ray::ServeReplica:asr-serve:ingress.initialize() (pid=1)
  File "ingress.py", line 2, in __init__
    self._ready.result()
asr_serve.errors.EngineClosed: there is no room for 8 models. fewer models.
"""


def test_the_reason_of_a_failure_is_told_without_stacks():
    from asr_serve.cluster.control import failure_reason

    assert failure_reason([STACK, "", STACK]) == "there is no room for 8 models. fewer models."
    assert failure_reason(["no room\n  in Ray", ""]) == "no room in Ray"


def test_logs_of_ray_are_where_its_temporary_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from asr_serve.cluster import control

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert control.logs_folder().startswith(str(tmp_path))
    assert control.logs_folder().endswith("session_latest/logs")


def test_missing_replicas_are_explained(monkeypatch: pytest.MonkeyPatch):
    from asr_serve.cluster import control

    monkeypatch.setattr(control.ray, "nodes", lambda: [{"Alive": True}, {"Alive": False}])
    monkeypatch.setattr(control.ray, "available_resources", lambda: {"CPU": 0.5})
    found = [
        control.ModelStatus("ingress", "ingress", "UPDATING", 1, 2, {}),
        control.ModelStatus("m", "stream", "UPDATING", 1, 2, {}),
    ]
    monkeypatch.setattr(control, "statuses", lambda: found)
    for name, why in (
        ("ingress", "each ingress needs another machine, and Ray has 1"),
        ("m", "free in Ray are 0.5 cores and 0 GPUs"),
    ):
        with pytest.raises(EngineClosed, match=f"{name} has 1 of 2 replicas after 0 s: {why}.*target of 2"):
            control.wait_scaled(name, 2, 0.0)


def test_without_an_ingress_the_command_is_told_with_the_address(monkeypatch: pytest.MonkeyPatch):
    from asr_serve.cluster import control

    def missing(name: str) -> None:
        raise control.RayServeException("no such application")

    monkeypatch.setattr(control.serve, "get_app_handle", missing)
    monkeypatch.setattr(control, "address", lambda: "10.0.0.1:6379")
    with pytest.raises(EngineClosed, match=r"asr-serve cluster up --config FILE --address 10\.0\.0\.1:6379"):
        control.describe()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize(
    ("boundary", "arguments", "told"),
    [
        ("statuses", ["status"], "interrupted\n"),
        ("wait_scaled", ["scale", "m", "2"], "the cluster goes on with it, until m has 2 replicas"),
        ("deploy", ["upgrade", "--config", "FILE"], "the cluster goes on with what it has begun of the upgrade"),
        ("drain", ["drain"], "the cluster goes on with it, if it has begun to drain"),
    ],
)
def test_an_interrupted_command_tells_what_the_cluster_does(
    boundary: str,
    arguments: list[str],
    told: str,
    number: signal.Signals,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    from asr_serve.cluster import control

    handlers = [signal.getsignal(each) for each in control.STOP_SIGNALS]
    (tmp_path / "cluster.yaml").write_text("{}")
    monkeypatch.setattr(control, "connect", lambda address: None)
    monkeypatch.setattr(control, "describe", lambda: {"reach": "machine"})
    monkeypatch.setattr(control, "scale", lambda name, replicas: name)
    monkeypatch.setattr(control, boundary, lambda *_, **__: os.kill(os.getpid(), number))
    given = [str(tmp_path / "cluster.yaml") if each == "FILE" else each for each in arguments]
    done = CliRunner().invoke(app, ["cluster", *given])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.output
    assert told in done.stderr
    assert [signal.getsignal(each) for each in control.STOP_SIGNALS] == handlers


def test_ray_serve_tells_a_command_nothing_below_warnings(monkeypatch: pytest.MonkeyPatch):
    from asr_serve.cluster import control

    control.quiet_ray_serve()
    assert not control.logging.getLogger("ray.serve").isEnabledFor(control.logging.INFO)


def test_an_ingress_is_replaced_for_another_list_of_models_and_not_for_roles():
    from asr_serve.cluster.application import ingress

    def version(*models: dict[str, str]) -> str:
        config = from_mapping({"models": list(models)}, "the file")
        return str(ingress(config, "machine", b"key", {})._bound_deployment.version)

    whole = version({"model": "a"}, {"model": "b"})
    assert whole == version({"model": "a", "role": "encode"}, {"model": "a", "role": "decode"}, {"model": "b"})
    assert whole == version({"model": "a", "dtype": "bf16"}, {"model": "b", "weights": "/w"})
    assert len({whole, version({"model": "a"}), version({"model": "b"}, {"model": "a"})}) == 3


def test_a_number_that_is_none_is_shown():
    for arguments in (["cluster", "scale", "m", "x"], ["plan", "--callers", "x", "--mix", "mix.toml"]):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 2
        assert "'x' is no whole number" in done.stderr
