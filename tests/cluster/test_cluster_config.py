"""Cluster files: what they set, and what they are refused for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asr_serve.cluster.cluster_config import ClusterConfig, from_mapping, read
from asr_serve.engine.process.server_handshake import MAX_SERVERS
from asr_serve.errors import OptionError

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
"""


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
        ({"models": [{"model": "a"}, {"model": "a"}]}, "a comes 2 times"),
        ({"models": [{"model": "a", "gpu": 1}]}, "gpu"),
        ({"serve": {"prot": 1}}, "did you mean 'port'"),
        ({"serve": {"port": "x"}}, "port"),
        ({"serve": {"model": "a"}}, "set it in models"),
        ({"serve": {"voice": "hibari"}}, "add it to models"),
        ({"serve": {"engine": 1}}, "a table of settings"),
        ({"replica_silent_s": 0}, "replica_silent_s"),
        ({"ingress": {"replicas": MAX_SERVERS // 2 + 1}}, "replicas"),
        ([], "file"),
    ],
)
def test_what_is_wrong_is_named(settings, told):
    with pytest.raises(OptionError, match="the file") as refused:
        from_mapping(settings, "the file")
    assert told.lower() in str(refused.value).lower()


@pytest.mark.parametrize("text", ["models: [", "\xff"])
def test_a_file_that_is_no_yaml_is_refused(tmp_path: Path, text: str):
    (tmp_path / "bad.yaml").write_text(text, "latin-1")
    with pytest.raises(OptionError, match=r"bad\.yaml"):
        read(str(tmp_path / "bad.yaml"))
    with pytest.raises(OptionError, match="No such file"):
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
