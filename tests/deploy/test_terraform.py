"""The Terraform module: terraform's own checks and tests, and what it shares with the doctor."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asr_serve.api.cli.host import HOST_REQUIREMENTS
from asr_serve.config_sources import load_serve_config
from asr_serve.edge.edge_config import load_edge_config
from asr_serve.edge.packet_driver import RECEIVE_BUFFER_BYTES
from asr_serve.edge.xdp.host_checks import MAX_FRAME_MTU
from asr_serve.edge.xdp.xdp_driver import FRAME_BYTES, MAX_FRAMES
from asr_serve.server.run import BACKLOG

MODULE = Path(__file__).resolve().parents[2] / "deploy" / "terraform" / "aws"
PLUGINS = Path(os.environ.get("TF_PLUGINS", "/opt/tf-plugins"))
"""Folder with the AWS provider, as terraform lays out a mirror."""
SOURCES = {file.name: file.read_text() for file in sorted(MODULE.glob("*.tf"))}
USER_DATA = (MODULE / "templates" / "host.sh.tftpl").read_text()
LIMIT_S = 500
HUGE_PAGE_BYTES = 2 << 20


def defaults() -> dict[str, str]:
    """Defaults of the module's variables, as they are written."""
    found = {}
    for name, body in re.findall(r'^variable "(\w+)" \{\n(.*?)^\}', SOURCES["variables.tf"], re.DOTALL | re.MULTILINE):
        if default := re.search(r"^  default\s+= (.*)$", body, re.MULTILINE):
            found[name] = default[1].strip('"')
    return found


@pytest.fixture(scope="module")
def terraform(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of an initialized terraform, whose files are not in the module's folder."""
    if shutil.which("terraform") is None or not PLUGINS.is_dir():
        pytest.skip("no terraform here: terraform, and TF_PLUGINS with the AWS provider")
    folder = tmp_path_factory.mktemp("terraform")
    copy = folder / "terraform" / "aws"
    shutil.copytree(MODULE, copy)
    shutil.copytree(MODULE.parents[1] / "otel", folder / "otel")
    config = folder / "rc"
    config.write_text(f'provider_installation {{\n  filesystem_mirror {{\n    path = "{PLUGINS}"\n  }}\n}}\n')
    environment = os.environ | {"TF_CLI_CONFIG_FILE": str(config), "CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1"}
    environment |= {"MODULE": str(copy), "AWS_EC2_METADATA_DISABLED": "true"}
    done = run(environment, "init", "-backend=false", "-input=false")
    assert done.returncode == 0, done.stdout + done.stderr
    return environment


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["terraform", f"-chdir={environment['MODULE']}", *arguments, "-no-color"],
        env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def test_the_module_is_valid_and_formatted(terraform: dict[str, str]) -> None:
    for arguments in (("validate",), ("fmt", "-check", "-recursive", "-diff")):
        done = run(terraform, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_terraforms_own_tests_pass(terraform: dict[str, str]) -> None:
    done = run(terraform, "test")
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"Success! (\d+) passed, 0 failed", done.stdout)
    runs = sum(len(re.findall(r'^run "', file.read_text(), re.MULTILINE)) for file in MODULE.glob("tests/*.tftest.hcl"))
    assert passed is not None
    assert int(passed[1]) == runs > 5


@pytest.mark.parametrize("role", ["edge", "serve"])
def test_user_data_is_a_script_that_bash_reads(role: str, terraform: dict[str, str], tmp_path: Path) -> None:
    shutil.copy(MODULE / "templates" / "host.sh.tftpl", tmp_path)
    host = "{" + ", ".join(f'{each.name} = "{each.default}"' for each in HOST_REQUIREMENTS.values()) + "}"
    mtu = MAX_FRAME_MTU if role == "edge" else "null"
    given = (
        f'{{role = "{role}", host = {host}, package = {{url = "https://example.org/a-1.whl", sha256 = "00"}}, '
        f'extras = "edge", region = "eu-central-1", log_group = "/x", group = "asr-serve-x", '
        f'mtu = {mtu}, health_port = 8004, command = "serve", settings = "port = 8000", '
        'collector = "receivers: {}", secrets = {"api-keys" = "arn:aws:x"}, capability = "CAP_BPF"}'
    )
    done = subprocess.run(
        ["terraform", f"-chdir={tmp_path}", "console"], input=f'templatefile("host.sh.tftpl", {given})\n',
        env=terraform, capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    script = done.stdout.removeprefix("<<EOT\n").removesuffix("EOT\n\n").removesuffix("EOT\n")
    assert script.startswith("#!/bin/bash\n")
    for each in (script, *re.findall(r"<<'END'\n(#!/bin/bash\n.*?)^END$", script, re.DOTALL | re.MULTILINE)):
        read = subprocess.run(["bash", "-n"], input=each, capture_output=True, text=True, timeout=60, check=False)
        assert (read.returncode, read.stderr) == (0, "")
    assert ("--expect huge_pages=24576" in script) == (role == "edge")
    assert "umask 077" in script
    assert (f"mtu {MAX_FRAME_MTU} " in script) == (role == "edge")
    pattern = r"^cat > /usr/local/sbin/asr-serve-secrets <<'END'\n(.*?)^END$"
    secrets = re.search(pattern, script, re.DOTALL | re.MULTILINE)
    assert secrets is not None
    _check_files_of_a_start(secrets[1], role, tmp_path)


@pytest.mark.exhaustive
def test_checkov_finds_nothing_without_a_reason() -> None:
    checkov = os.environ.get("CHECKOV") or shutil.which("checkov")
    if checkov is None:
        pytest.skip("no checkov here: pip install checkov, in an environment of its own, and CHECKOV=its program")
    done = subprocess.run(
        [checkov, "--directory", MODULE, "--compact", "--quiet", "--skip-download"],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert re.search(r"Passed checks: \d{2,}, Failed checks: 0", done.stdout)


def test_every_exception_of_checkov_has_a_reason() -> None:
    skipped = [line for text in SOURCES.values() for line in text.splitlines() if "checkov:skip" in line]
    assert skipped
    assert all(re.search(r"checkov:skip=CKV2?_AWS_\d+:\w.*", line) for line in skipped)


def test_the_doctor_expects_what_the_module_makes() -> None:
    module = defaults()
    assert {name: module.get(name) for name in HOST_REQUIREMENTS} == {
        name: each.default for name, each in HOST_REQUIREMENTS.items()
    }
    made = set(re.findall(r"^    (\w+)\s+= (?:tostring\()?var\.", SOURCES["main.tf"], re.MULTILINE))
    assert made == HOST_REQUIREMENTS.keys(), "local.host is what user data tells the doctor to expect"
    used = set(re.findall(r"host\.(\w+)", USER_DATA))
    assert used == HOST_REQUIREMENTS.keys() - {"min_kernel", "enable_mlpf"}, "the image and the template have these"


def test_limits_are_those_of_the_code() -> None:
    module = defaults()
    assert int(module["rmem_max"]) == RECEIVE_BUFFER_BYTES
    assert int(module["somaxconn"]) >= BACKLOG
    assert int(module["huge_pages"]) * HUGE_PAGE_BYTES >= MAX_FRAMES * FRAME_BYTES
    assert f"  xdp_mtu = {MAX_FRAME_MTU}\n" in SOURCES["main.tf"]
    assert module["enable_mlpf"] == "true"


def test_every_refusal_says_what_came_and_what_is_allowed() -> None:
    text = SOURCES["variables.tf"] + SOURCES["hosts.tf"]
    messages = re.findall(r'^ +error_message = "(.*)"$', text, re.MULTILINE)
    assert len(messages) == text.count("error_message")
    for message in messages:
        assert "${" in message or "holds 0.0.0.0/0" in message, message
        assert "allowed: " in message or "Set certificate_arn" in message, message
    checked = set(re.findall(r'^variable "(\w+)"', SOURCES["variables.tf"], re.MULTILINE))
    for name, body in re.findall(r'^variable "(\w+)" \{\n(.*?)^\}', SOURCES["variables.tf"], re.DOTALL | re.MULTILINE):
        if "validation {" not in body:
            checked.remove(name)
    refused = set(re.findall(r"var\.(\w+)", (MODULE / "tests" / "refused.tftest.hcl").read_text()))
    assert refused == checked, "each validation is seen to refuse something"


def test_the_servers_and_the_edge_read_the_settings_that_hosts_get(tmp_path: Path) -> None:
    for name in ("api-keys", "session-keys", "redis-password"):
        (tmp_path / name).write_text("a-key-of-some-length\n")
    settings = _settings("server_settings", tmp_path)
    file = tmp_path / "asr-serve.toml"
    file.write_text(settings)
    config = load_serve_config(str(file), {})
    assert (config.host, config.port, config.drain_s) == ("0.0.0.0", 8_000, 60.0)
    assert config.sessions.redis_url == "rediss+cluster://user@host:6379"
    assert not config.batch.enabled
    file.write_text(_settings("edge_settings", tmp_path))
    edge = load_edge_config(str(file), {})
    assert (edge.server, edge.port) == ("http://host:8000", 5_004)
    (rtp,) = re.findall(r'name = "rtp", .* port = (\d+),', SOURCES["network.tf"])
    assert int(rtp) == edge.port


def _check_files_of_a_start(script: str, role: str, folder: Path) -> None:
    """Runs the script that a host runs before its service, and reads what it wrote as the service does."""
    tools, written, file = folder / "tools", folder / "run", folder / "asr-serve.toml"
    tools.mkdir()
    written.mkdir()
    file.write_text('host = "0.0.0.0"\nport = 5004\n\n[sip]\nhost = "0.0.0.0"\nallow = ["10.0.0.0/8"]\n')
    for name, text in {
        "aws": "printf '# callers\\n\\n a-key-of-some-length  # the first\\n\\nanother-key-of-some-length\\n'",
        "hostname": "echo 10.40.128.7 fe80::1",
        "python3.11": f'exec {sys.executable} "$@"',
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    text = script.replace("/run/asr-serve", str(written)).replace("/etc/asr-serve/asr-serve.toml", str(file))
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", text], env=environment, check=True, timeout=60)
    assert (written / "metrics-key").read_text() == "a-key-of-some-length\n"
    assert {each.stat().st_mode & 0o077 for each in written.iterdir()} == {0}
    assert (written / "edge.toml").exists() == (role == "edge")
    if role == "edge":
        assert (written / "api-key").read_text() == "a-key-of-some-length\n"
        config = load_edge_config(str(written / "edge.toml"), {})
        assert (config.control_host, config.port) == ("10.40.128.7", 5_004)
        assert config.api_keys == ("a-key-of-some-length", "another-key-of-some-length")
        assert config.sip is not None


def _settings(name: str, folder: Path) -> str:
    """The TOML file of a local value of the module, its expressions replaced."""
    call = _until_end(SOURCES["hosts.tf"], SOURCES["hosts.tf"].index(f"  {name} = join("))
    text = "\n".join(re.findall(r'^\s+"(.*)",?$', call, re.MULTILINE)).replace('\\"', '"')
    text = text.replace("${local.memorydb_user}", "user").replace("${var.model}", "moonshine-tiny-en")
    text = re.sub(r"\$\{var\.engine\.accelerator.*?\}\"", 'cpu"', text)
    text = text.replace("${var.sip.user}", "asr-serve").replace("${jsonencode(var.rtp_cidrs)}", '["10.0.0.0/8"]')
    text = re.sub(r"\$\{(?:one\(|aws_lb)[^}]*\}", "host", text)
    assert "${" not in text
    return text.replace("/run/asr-serve", str(folder))


def _until_end(text: str, start: int) -> str:
    """A call's text, from its first to its last parenthesis."""
    depth = 0
    for at in range(text.index("(", start), len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if not depth:
            return text[start:at]
    raise AssertionError("no end")
