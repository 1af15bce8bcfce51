"""`asr-serve serve` up to the server's door: flags, what is printed, what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import typer.main
from typer.testing import CliRunner, Result

from asr_serve.api.cli import app
from asr_serve.api.cli.exit_codes import FAILED, USAGE
from asr_serve.api.cli.serve import FLAGS
from asr_serve.config import EngineConfig, ServeConfig
from asr_serve.config_sources import all_settings


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ASR_SERVE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """What the server would have been started with; here it stops at once, with exit code 3."""
    found: list[ServeConfig] = []

    def serve(config: ServeConfig) -> NoReturn:
        found.append(config)
        raise SystemExit(3)

    monkeypatch.setitem(sys.modules, "asr_serve.server.run", SimpleNamespace(serve=serve))
    return found


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["serve", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_without_flags_the_defaults_are_served(started: list[ServeConfig]) -> None:
    result = invoke()
    assert started == [ServeConfig()]
    assert (result.stdout, result.stderr, result.exit_code) == ("", "", 3)


def test_every_flag_reaches_the_settings(started: list[ServeConfig], tmp_path: Path) -> None:
    file = tmp_path / "more.toml"
    file.write_text("port = 1\nmax_models = 3\nlog_level = 'debug'")
    result = invoke(
        *("--config", str(file), "--host", "::1", "--port", "0", "--realtime-port", "10095"),
        *("--model", "a", "--model", "b", "-m", "c"),
        *[
            "--voice",
            "d",
            "--alias",
            "x=a",
            "--alias",
            "y=b",
            "--device",
            "cpu",
            "--dtype",
            "fp32",
            "--weights",
            "folder",
        ],
        *("--api-key", "k1", "--api-key", "k2", "--admin-key", "k3", "--max-concurrent", "5"),
        *("--log-format", "json", "--otel-endpoint", "http://here:4318"),
        *("--role", "decode", "--peer", "one:8100", "--peer", "[::1]:8100", "--encode-port", "8101"),
        *("--set", "engine.max_decode_rows=32", "--set", "cors_origins=https://a.org,*"),
    )
    assert result.exit_code == 3, result.stderr
    expected = ServeConfig(
        host="::1",
        port=0,
        realtime_port=10_095,
        model="a",
        more_models=("b", "c"),
        voice="d",
        aliases={"x": "a", "y": "b"},
        max_models=3,
        device="cpu",
        dtype="fp32",
        weights="folder",
        api_keys=("k1", "k2"),
        admin_keys=("k3",),
        max_concurrent=5,
        log_format="json",
        log_level="debug",
        otel_endpoint="http://here:4318",
        cors_origins=("https://a.org", "*"),
        encode_port=8_101,
        engine=EngineConfig(max_decode_rows=32, role="decode", peers=("one:8100", "[::1]:8100")),
    )
    assert started == [expected]


def test_one_model_leaves_the_others_of_the_file(started: list[ServeConfig], tmp_path: Path) -> None:
    file = tmp_path / "more.toml"
    file.write_text('model = "a"\nmore_models = ["b"]')
    invoke("-c", str(file), "--model", "c")
    assert (started[0].model, started[0].more_models) == ("c", ("b",))


def test_the_environment_is_read(started: list[ServeConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_SERVE_PORT", "9000")
    monkeypatch.setenv("ASR_SERVE_DRAIN_S", "1")
    invoke("--port", "9001")
    assert (started[0].port, started[0].drain_s) == (9001, 1.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "eighty"], "port='eighty' (flag --port). a whole number, 0 to 65535"),
        (["--set", "prot=1"], "unknown setting 'prot' (flag --set)"),
        (["--set", "prot=1"], "did you mean 'port'"),
        (["--set", "port"], "--set port. NAME=VALUE"),
        (["--port", "1", "--set", "port=1"], "port is set twice: by flag --port and by flag --set"),
        (["--set", "docs=true", "--set", "docs=false"], "docs is given twice"),
        (["--alias", "whisper-1"], "aliases='whisper-1' (flag --alias)"),
        (["-m", "a", "-m", "b", "-m", "c"], "max_models=3 or more"),
        (["--api-key", ""], "api_keys is empty (flag --api-key)"),
        (["--role", "half"], "engine.role='half' (flag --role). both, decode, encode"),
        (["--peer", "here"], "engine.peers=('here',) (flag --peer). a list; each one host:port"),
        (["--set", "engine.kv_bytes=0"], "engine.kv_bytes=0 (flag --set). a whole number, 1 or more"),
    ],
)
def test_invalid_settings_stop_the_server(started: list[ServeConfig], arguments: list[str], said: str) -> None:
    result = invoke(*arguments)
    assert said in result.stderr
    assert (started, result.stdout, result.exit_code) == ([], "", USAGE)


def test_a_config_file_that_is_not_there_stops_the_server(started: list[ServeConfig]) -> None:
    result = invoke("--config", "no-such.toml")
    assert "no-such.toml cannot be read: No such file" in result.stderr
    assert (started, result.stdout, result.exit_code) == ([], "", FAILED)


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        (["--host", "0.0.0.0"], ["listening on 0.0.0.0 without API keys"]),
        (
            ["--api-key", "secret"],
            ["api_keys is visible to all users of this machine in the list of processes; use ASR_SERVE_API_KEYS"],
        ),
        (["--host", "0.0.0.0", "--set", "admin_keys=secret"], ["admin_keys is visible", "without API keys"]),
        (["--host", "localhost"], []),
        (["--role", "encode", "--host", "0.0.0.0", "--api-key", "k"], ["api_keys is visible", "set peer_keys"]),
        (["--role", "encode"], []),
        (
            ["--peer", "one:8100", "--peer", "127.0.0.1:8100", "--peer", "[2001:db8::1]:8100"],
            ["audio of callers is sent to one:8100, [2001:db8::1]:8100 without"],
        ),
        (["--peer", "127.0.0.1:8100", "--peer", "[::1]:8100", "--peer", "localhost:8100"], []),
        (["--peer", "one:8100", "--set", "peer_keys=secret-of-these-two"], ["peer_keys is visible"]),
        (["--encode-port", "8100"], ["encode_port=8100 has no effect with role=both"]),
        (["--peer", "localhost:1", "--encode-port", "0"], ["encode_port=0 has no effect with role=both"]),
        (["--role", "encode", "--encode-port", "8101"], []),
        (["--set", "engine.peer_transport=tcp"], ["engine.peer_transport has no effect without peers"]),
        (["--role", "encode", "--set", "engine.peer_transport=tcp"], []),
        (["--peer", "localhost:1", "--set", "engine.peer_transport=tcp"], []),
    ],
)
def test_unsafe_settings_are_warned_about(started: list[ServeConfig], arguments: list[str], warned: list[str]) -> None:
    lines = invoke(*arguments).stderr.splitlines()
    assert len(started) == 1
    assert len(lines) == len(warned)
    assert all(line.startswith("warning: ") and part in line for line, part in zip(lines, warned, strict=True))
    assert "secret" not in "".join(lines)


def test_keys_of_the_environment_are_not_warned_about(
    started: list[ServeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASR_SERVE_API_KEYS", "secret")
    assert invoke("--host", "0.0.0.0").stderr == ""
    assert started[0].api_keys == ("secret",)


def test_keys_for_peers_without_any_peer(started: list[ServeConfig], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret-of-these-two\n")
    keys = ("--set", f"peer_keys_file={tmp_path / 'keys'}")
    said = invoke(*keys).stderr
    assert "warning: peer_keys has no effect without peers" in said
    assert "secret" not in said
    assert invoke(*keys, "--role", "encode").stderr == ""
    assert invoke(*keys, "--role", "decode", "--peer", "one:8100").stderr == ""


def test_printed_settings_are_a_file_for_config(started: list[ServeConfig], tmp_path: Path) -> None:
    flags = ("--port", "9000", "--alias", "whisper-1=moonshine-tiny-en", "--set", "engine.max_requests=9")
    page = invoke(*flags, "--print-config").stdout
    assert "port = 9000  # flag --port\n" in page
    assert tomllib.loads(page)["engine"]["max_requests"] == 9
    assert not started
    file = tmp_path / "asr-serve.toml"
    file.write_text(page)
    assert invoke("--config", str(file)).stderr == "", "nobody asked for what is as it always is"
    invoke(*flags)
    assert started[0] == started[1]


@pytest.mark.parametrize(("arguments", "code"), [(["--print-config"], 0), (["--port", "eighty"], USAGE)])
def test_printing_and_refusing_load_neither_torch_nor_the_server(arguments: list[str], code: int) -> None:
    script = (
        "import sys, asr_serve.api.cli\n"
        "try: asr_serve.api.cli.main()\n"
        "finally: print({'torch', 'numpy', 'fastapi', 'granian'} & set(sys.modules), file=sys.stderr)\n"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, "serve", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.endswith("set()\n")


def test_help_has_examples() -> None:
    page = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["serve", "--help"]).stdout
    assert all(flag in page for flag in FLAGS)
    assert "curl http://127.0.0.1:8000/v1/audio/transcriptions \\" in page
    assert all_settings()["port"].help in page
    assert "Default: 8000." in page


def test_flags_and_settings_agree() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    assert options - {"--config", "--set", "--print-config", "--help"} == set(FLAGS)
    assert set(FLAGS.values()) <= set(all_settings())
