"""Cluster files: what they set, and what they are refused for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import Child
from engine_clients import wait_until
from typer.testing import CliRunner

from asr_serve.api.cli import app
from asr_serve.api.cli.exit_codes import FAILED, USAGE
from asr_serve.cluster.autoscaling import MAX_REPLICAS
from asr_serve.cluster.cluster_config import (
    MAX_DECODERS,
    ClusterConfig,
    check_replicas,
    engine_config,
    find_deployment,
    from_mapping,
    read,
)
from asr_serve.engine.process.server_handshake import MAX_SERVERS
from asr_serve.errors import OptionError, SourceNotFound

FILE = """
models:
  - model: moonshine-tiny-en
    replicas: 2
    cpus: 2.5
  - {model: hibari, threads: 3, device: cpu}
replica_silent_s: 4
serve:
  port: 9000
  voice: hibari
  api_keys: [a-key-of-some-length]
  engine: {max_decode_rows: 32}
  sessions: {redis_url: "redis://127.0.0.1:6379/0", prefix: calls}
"""


SPLIT = [{"model": "a", "role": "encode"}, {"model": "a", "role": "decode", "replicas": 2}]


def test_a_model_is_split_in_two_deployments():
    settings = {"models": [*SPLIT, {"model": "b"}], "serve": {"engine": {"disk_bytes": 1 << 30, "host_bytes": 1 << 30}}}
    config = from_mapping(settings, "the file")
    assert [each.deployment for each in config.models] == ["a:encode", "a", "b"]
    assert [(each.model, each.replicas) for each in config.served] == [("a", 2), ("b", 1)]
    assert config.encoders("a") == config.models[0]
    assert config.encoders("b") is None
    server = config.server()
    assert (server.model, server.more_models, server.max_models) == ("a", ("b",), 2)
    engines = [engine_config(each, server.engine) for each in config.models]
    assert [each.role for each in engines] == ["encode", "decode", "both"]
    assert [each.disk_bytes for each in engines] == [0, 1 << 30, 1 << 30], "an encoder has nothing to offload"
    assert list(map(find_deployment, ("a", "a:decode", "a:encode"))) == ["a", "a", "a:encode"]


def test_a_file_says_all(tmp_path: Path):
    (tmp_path / "cluster.yaml").write_text(FILE)
    config = read(str(tmp_path / "cluster.yaml"))
    server = config.server()
    assert (server.model, server.more_models, server.voice, server.port) == (
        "moonshine-tiny-en",
        ("hibari",),
        "hibari",
        9000,
    )
    assert server.api_keys == ("a-key-of-some-length",)
    assert server.engine.max_decode_rows == 32
    assert (server.sessions.redis_url, server.sessions.prefix) == ("redis://127.0.0.1:6379/0", "calls")
    assert [config.engine_settings(each).engine_threads for each in config.models] == [2, 3]
    assert config.replica_silent_s == 4


def test_nothing_given_is_the_embedded_model_once():
    config = read(None)
    assert config == from_mapping({}, "nothing") == ClusterConfig()
    assert [(each.model, each.replicas) for each in config.models] == [("moonshine-tiny-en", 1)]
    assert config.server().voice == "none"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"modles": []}, "modles"),
        ({"models": []}, "models"),
        ({"models": [{"model": "a", "replicas": 0}]}, "replicas"),
        ({"models": [{"model": "a", "replicas": MAX_REPLICAS + 1}]}, "replicas"),
        ({"models": [{"model": "a", "autoscale": {"max_replicas": MAX_REPLICAS + 1}}]}, "max_replicas"),
        ({"models": [{"model": "a"}, {"model": "a"}]}, "a comes 2 times"),
        ({"models": [{"model": "a", "gpu": 1}]}, "gpu"),
        ({"serve": {"prot": 1}}, "did you mean 'port'"),
        ({"serve": {"port": "x"}}, "port"),
        ({"serve": {"model": "a"}}, "set it in models"),
        ({"serve": {"voice": "hibari"}}, "add it to models"),
        ({"serve": {"engine": 1}}, "a table of settings"),
        ({"serve": {"sessions": {"redis": "x"}}}, "did you mean 'sessions.redis_url'"),
        ({"replica_silent_s": 0}, "replica_silent_s"),
        ({"ingress": {"replicas": MAX_SERVERS // 2 + 1}}, "replicas"),
        ([], "file: []. a table with: models, ingress"),
        ({"models": [{"model": "a", "role": "listen"}]}, "models[0].role='listen'. decode, encode"),
        ({"models": [{"model": "a"}, {"model": "b", "replica": 2}]}, "did you mean 'replicas'"),
        ({"models": [{"replicas": 2}]}, "models[0] without model"),
        ({"models": [{"model": "a", "autoscale": {"max_replica": 2}}]}, "did you mean 'max_replicas'"),
        ({"models": [{"model": "a", "cpus": "x"}]}, "models[0].cpus='x'. a number, 0 to 1024"),
        ({"models": {"model": "a"}}, "a list; each one a table of settings"),
        ({"reach": "world"}, "reach='world'. machine, network"),
        ({"serve": [1]}, "serve=[1]. a table of settings"),
        ({"models": [{"model": "a", "role": "both"}]}, "role"),
        ({"models": [{"model": "a", "role": "encode"}]}, "add the other one"),
        ({"models": [{"model": "a", "role": "decode"}]}, "add the other one"),
        ({"models": [{"model": "a"}, {"model": "a", "role": "encode"}]}, "a with no role and role=encode"),
        ({"models": [*SPLIT, {"model": "a", "role": "decode"}]}, "a with role=decode comes 2 times"),
        ({"models": [{"model": "a", "role": "encode", "weights": "/w"}, SPLIT[1]]}, "weights=/w for role=encode"),
        ({"models": [SPLIT[0], {"model": "a", "role": "decode", "dtype": "bf16"}]}, "the same for both"),
        ({"models": [SPLIT[0], {**SPLIT[1], "replicas": MAX_DECODERS + 1}]}, f"1 to {MAX_DECODERS}"),
        ({"models": [{"model": "a:encode"}]}, "model=a and role=encode"),
        ({"models": SPLIT, "serve": {"engine": {"tensor_parallel_size": 2}}}, "role=both and no peers"),
        ({"serve": {"engine": {"peers": ["h:1"]}}}, "give models the roles"),
        ({"serve": {"engine": {"role": "decode"}}}, "set it in models"),
        ({"serve": {"governance": {"policy": "p.toml", "audit_log": "a.jsonl"}}}, "no policy in a cluster"),
        ({"serve": {"peer_keys": ["sixteen-or-more-letters"]}}, "no such setting in a cluster"),
    ],
)
def test_what_is_wrong_is_named(settings, told):
    with pytest.raises(OptionError, match="the file") as refused:
        from_mapping(settings, "the file")
    assert told.lower() in str(refused.value).lower()


def test_no_setting_is_suggested_that_a_cluster_does_not_have():
    with pytest.raises(OptionError, match="unknown setting 'peers'") as refused:
        from_mapping({"serve": {"peers": "x"}}, "the file")
    assert "did you mean" not in str(refused.value)


def test_a_model_that_streams_has_no_roles():
    split = [{"model": "vosk-small-en", "role": role} for role in ("encode", "decode")]
    with pytest.raises(OptionError, match=r"vosk-small-en is a streaming model.*leave role out"):
        from_mapping({"models": split}, "the file").check_split()


def test_limits_of_replicas_are_told_with_what_to_do():
    check_replicas("m", None, MAX_REPLICAS)
    for role, most in ((None, MAX_REPLICAS), ("decode", MAX_DECODERS)):
        for replicas, todo in ((most + 1, "deploy another cluster"), (0, "drain ends them all")):
            with pytest.raises(OptionError, match=f"1 to {most}.*{todo}"):
                check_replicas("m", role, replicas)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("models: [", "line 1, column 10: while parsing a flow node expected the node content"),
        ("serve:\n  port: 1\n bad: 2\n", "line 3, column 2: "),
        ("serve:\n\xff", "line 2: not UTF-8"),
        ("a: \x07", "special characters are not allowed"),
    ],
)
def test_a_file_that_is_no_yaml_is_refused(tmp_path: Path, text: str, told: str):
    (tmp_path / "bad.yaml").write_text(text, "latin-1")
    with pytest.raises(OptionError) as refused:
        read(str(tmp_path / "bad.yaml"))
    assert f"bad.yaml{', ' if told.startswith('line') else ': '}" in str(refused.value)
    assert told in str(refused.value)
    assert "^" not in str(refused.value)


def test_a_missing_file_is_a_failure_as_any_other(tmp_path: Path):
    with pytest.raises(SourceNotFound, match=r"none\.yaml cannot be read: No such file"):
        read(str(tmp_path / "none.yaml"))


def test_without_ray_an_error_says_what_to_install():
    code = "import sys; sys.modules['ray'] = None; from asr_serve.api.cli import main; main()"
    for command in (["up"], ["scale", "a", "1"]):
        done = subprocess.run(
            [sys.executable, "-c", code, "cluster", *command], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 1, done.stderr
        assert done.stderr.strip() == (
            "error: a cluster needs Ray, and the package ray is not installed. pip install 'asr-serve[cluster]'."
        )


def invoke(*arguments: str) -> tuple[int, str]:
    """Exit code, and the line on stderr. Nothing here starts Ray."""
    pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")
    done = CliRunner().invoke(app, ["cluster", *arguments])
    assert done.stdout == ""
    return done.exit_code, done.stderr


@pytest.mark.filterwarnings("ignore")  # Ray Serve's own, when it is imported
def test_up_says_what_is_wrong_before_it_starts_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")
    from asr_serve.cluster import control

    monkeypatch.setattr(control, "start_ray", lambda *_: pytest.fail("Ray was to be started"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for text, said in (
            ("models: [", "a YAML file"),
            ("models: [{model: moonshine-tini-en}]", "did you mean 'moonshine-tiny-en'"),
            (f"serve: {{port: {port}}}", f"127.0.0.1:{port} cannot be listened on: Address already in use"),
            (f"serve: {{port: {port}}}", "choose another with serve.port in the cluster file"),
        ):
            (tmp_path / "cluster.yaml").write_text(text)
            code, line = invoke("up", "--config", str(tmp_path / "cluster.yaml"))
            assert (code, line.count("\n")) == (USAGE, 1), line
            assert line.startswith("error: ")
            assert said in line


@pytest.mark.filterwarnings("ignore")
def test_an_upgrade_says_what_is_wrong_before_it_replaces_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")
    from asr_serve.cluster import control

    monkeypatch.setattr(control, "connect", lambda address: None)
    monkeypatch.setattr(control, "describe", lambda: {"reach": "machine"})
    monkeypatch.setattr(control, "deploy", lambda *_, **__: pytest.fail("something was replaced"))
    (tmp_path / "keys").write_text("zz")
    for text, said in (
        ("models: [{model: moonshine-tini-en}]", "did you mean 'moonshine-tiny-en'"),
        (
            f"serve: {{sessions: {{redis_url: 'redis://127.0.0.1/0', key_file: '{tmp_path}/keys'}}}}",
            "a file with one or more keys, each 32 bytes in hexadecimal on its own line",
        ),
    ):
        (tmp_path / "cluster.yaml").write_text(text)
        code, line = invoke("upgrade", "--config", str(tmp_path / "cluster.yaml"))
        assert (code, line.count("\n")) == (USAGE, 1), line
        assert said in line


@pytest.mark.parametrize(
    ("token", "said"),
    [(False, "without a token"), (True, "no Ray answers at 127.0.0.1:1: Connection refused")],
    ids=["no token", "a token"],
)
def test_a_ray_that_asks_nobody_for_a_token_is_refused(tmp_path: Path, token: bool, said: str):
    pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")
    if token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("0" * 32)
    assert said in run(tmp_path, "up", "--address", "127.0.0.1:1")


def environ_of(home: Path, **variables: str) -> dict[str, str]:
    """Environment of a process whose user has that home."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ASR_SERVE_", "RAY_"))}
    path = os.pathsep.join(each for each in sys.path if each)
    return environ | {"HOME": str(home), "PYTHONPATH": path} | variables


def run(home: Path, *arguments: str, **variables: str) -> str:
    """The line on stderr of a command that fails, in a process of its own: Ray reads the environment once."""
    done = subprocess.run(
        [sys.executable, "-c", "from asr_serve.api.cli import main; main()", "cluster", *arguments],
        env=environ_of(home, **variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (FAILED, USAGE)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1), done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "variables", [{"RAY_AUTH_TOKEN": "f" * 32}, {"RAY_AUTH_MODE": "disabled"}], ids=["another token", "no token"]
)
def test_a_ray_with_another_token_is_an_error_that_says_so(started_with_a_token: int, tmp_path: Path, variables):
    line = run(tmp_path, "status", "--address", f"127.0.0.1:{started_with_a_token}", **variables)
    assert line.startswith(f"error: Ray at 127.0.0.1:{started_with_a_token} asks for another token")
    assert "RAY_AUTH_TOKEN" in line


@pytest.fixture(scope="module")
def started_with_a_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of what commands connect to first: Ray's store of its state, without the rest of Ray."""
    ray = pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")
    folder = tmp_path_factory.mktemp("ray")
    (folder / "logs").mkdir()
    program = Path(ray.__path__[0], "core", "src", "ray", "gcs", "gcs_server")
    command = [program, f"--log_dir={folder}/logs", "--gcs_server_port=0", "--node-ip-address=127.0.0.1"]
    environ = environ_of(folder, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 32)
    with (folder / "out").open("w") as out:
        store = Child(
            [*map(str, command), "--session-name=test", f"--session-dir={folder}"],
            stdout=out,
            stderr=out,
            env=environ,
            limit_s=300,
        )
    try:
        name = "gcs_server_port_*[!.tmp]"  # it has the ending until it is written
        wait_until(lambda: list(folder.glob(name)))
        [port] = folder.glob(name)
        yield int(port.read_text())
    finally:
        store.kill()
        store.wait()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("running", "arguments", "code", "said"),
    [
        ([], ["status"], FAILED, "no Ray runs on this machine. start one: asr-serve cluster up"),
        (
            [],
            ["drain", "--address", "127.0.0.1:{free}"],
            FAILED,
            "no Ray answers at 127.0.0.1:{free}: Connection refused",
        ),
        ([], ["scale", "m", "2", "--address", "nowhere"], USAGE, "--address nowhere. HOST:PORT, or auto"),
        (
            ["10.0.0.1:1", "10.0.0.1:2"],
            ["status"],
            USAGE,
            "2 Ray clusters run on this machine. one of: 10.0.0.1:1, 10.0.0.1:2",
        ),
    ],
)
def test_without_a_ray_to_talk_to_commands_say_which_there_are(monkeypatch, running, arguments, code, said):
    pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")
    from asr_serve.cluster import control

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # this process' own, which a token of this user would change
    monkeypatch.setattr(control.services, "find_gcs_addresses", lambda: set(running))  # others may run Ray here
    monkeypatch.setattr(control.services, "find_bootstrap_address", lambda folder: None)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        free = closed.getsockname()[1]
        found, line = invoke(*(each.format(free=free) for each in arguments))
    assert found == code
    assert said.format(free=free) in line
