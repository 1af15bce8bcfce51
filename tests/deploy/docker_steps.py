"""Execution of a Dockerfile's steps without a container engine: each stage is a root folder, a RUN is a chroot.

The base image is a folder that debootstrap made of the same release. What is not reproduced: layers, the isolation of
processes and networks, and cgroups.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from children import Child


class Instruction(NamedTuple):
    """One instruction of a Dockerfile: its name in capitals, and the rest of it as one line."""

    name: str
    text: str


def parse(text: str) -> list[Instruction]:
    """Instructions of a Dockerfile, without comments, continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [Instruction(*line.split(None, 1)) for line in joined.splitlines()]


class Stage:
    """One stage of an image: its root folder, and what its instructions have set."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root = name, root
        self.environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.arguments: dict[str, str] = {}
        self.user = "0:0"
        self.entrypoint: list[str] = []
        self.command: list[str] = []
        self.health: list[str] = []


class Builder:
    """Builds the stages of a Dockerfile below a folder. `bases`: image -> root folder that stands for it.
    `build_arguments`: as of `docker build --build-arg`. `binds`: folders of the host that a RUN sees, read-only."""

    def __init__(
        self,
        context: Path,
        work: Path,
        bases: Mapping[str, Path],
        build_arguments: Mapping[str, str],
        binds: list[Path],
    ) -> None:
        self.context, self.work, self.bases = context, work, bases
        self.build_arguments, self.binds = build_arguments, binds
        self.stages: list[Stage] = []
        self.executed: list[str] = []
        """Names of the instructions, in the order in which they were executed."""

    def build(self, instructions: list[Instruction]) -> Stage:
        """Executes all instructions and returns the last stage. Raises CalledProcessError for a step that fails."""
        for name, text in instructions:
            getattr(self, f"_{name.lower()}")(text)
            self.executed.append(name)
        return self.stages[-1]

    def _from(self, text: str) -> None:
        image, *alias = text.split()
        name = alias[1] if alias else str(len(self.stages))
        root = self.work / name
        subprocess.run(["cp", "-a", self.bases[image], root], check=True)
        self.stages.append(Stage(name, root))

    def _arg(self, text: str) -> None:
        name, _, default = text.partition("=")
        self.stages[-1].arguments[name] = self.build_arguments.get(name, "".join(shlex.split(default)))

    def _env(self, text: str) -> None:
        stage = self.stages[-1]
        for name, value in (pair.split("=", 1) for pair in shlex.split(text)):
            stage.environment[name] = value

    def _run(self, text: str) -> None:
        stage = self.stages[-1]
        run_in(stage, ["/bin/sh", "-c", text], self.binds)

    def _copy(self, text: str) -> None:
        stage, words = self.stages[-1], text.split()
        source = self.context
        if words[0].startswith("--from="):
            source = next(each.root for each in self.stages if each.name == words.pop(0).removeprefix("--from="))
        *names, target = words
        for name in names:
            origin, into = source / name.lstrip("/"), stage.root / target.lstrip("/")
            if target.endswith("/"):
                into = into / origin.name
            into.parent.mkdir(parents=True, exist_ok=True)
            if origin.is_dir():
                ignore = None if source is not self.context else _ignored
                shutil.copytree(origin, into, symlinks=True, ignore=ignore)
            else:
                shutil.copy2(origin, into)

    def _user(self, text: str) -> None:
        self.stages[-1].user = text

    def _healthcheck(self, text: str) -> None:
        self.stages[-1].health = json.loads(text.partition("CMD ")[2])

    def _entrypoint(self, text: str) -> None:
        self.stages[-1].entrypoint = json.loads(text)

    def _cmd(self, text: str) -> None:
        self.stages[-1].command = json.loads(text)

    def _expose(self, text: str) -> None:
        assert text.split("/")[0].isdigit()

    def _stopsignal(self, text: str) -> None:
        assert text == "SIGTERM"


def _ignored(folder: str, names: list[str]) -> set[str]:
    """What .dockerignore leaves out of `src`."""
    return {name for name in names if name == "__pycache__" or fnmatch(name, "*.so")}


def run_in(stage: Stage, command: list[str], binds: list[Path], environment: Mapping[str, str] = os.environ) -> None:
    """Runs a step as root in the stage's root folder, in a mount namespace of its own. `environment`: that of pip."""
    given = {name: value for name, value in environment.items() if name.startswith("PIP_")}
    certificates = given.get("PIP_CERT")
    if certificates:
        given["PIP_CERT"] = "/run/pip-cert.pem"
    variables = given | stage.arguments | stage.environment
    script = 'mount -t proc proc "$0/proc"; mount --rbind /dev "$0/dev"; cp /etc/resolv.conf "$0/etc/"\n'
    for folder in binds:
        script += f'if [ -e {folder} ]; then mkdir -p "$0{folder}"; mount --bind {folder} "$0{folder}"; fi\n'
    if certificates:
        script += f'touch "$0/run/pip-cert.pem"; mount --bind {certificates} "$0/run/pip-cert.pem"\n'
    script += 'root=$0; exec chroot "$root" /usr/bin/env -i "$@"'
    pairs = [f"{name}={value}" for name, value in variables.items()]
    subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-ec", script, stage.root, *pairs, *command],
        check=True,
    )


def start_read_only(stage: Stage, environment: Mapping[str, str]) -> Child[bytes]:
    """Starts the image's command as its user; its root file system is read-only but for /tmp and /dev/shm."""
    return Child(_read_only(stage, [*stage.entrypoint, *stage.command], environment))


def check_health(stage: Stage, environment: Mapping[str, str]) -> int:
    """Runs the image's HEALTHCHECK, with the same root, and returns its exit code."""
    return subprocess.run(
        _read_only(stage, stage.health, environment), stderr=subprocess.DEVNULL, timeout=60
    ).returncode


def _read_only(stage: Stage, command: list[str], environment: Mapping[str, str]) -> list[str]:
    user, group = stage.user.split(":")
    # chroot wants privileges; setpriv, which every Debian has, drops them inside.
    script = (
        'mount --bind "$0" "$0"; mount -o remount,bind,ro "$0"; mount -t proc proc "$0/proc"; '
        'mount --bind /dev "$0/dev"; mount -t tmpfs tmpfs "$0/tmp" -o mode=1777; '
        'mount -t tmpfs tmpfs "$0/dev/shm" -o mode=1777; '
        'root=$0; exec chroot "$root" /usr/bin/setpriv --reuid '
        f'{user} --regid {group} --clear-groups --no-new-privs --bounding-set=-all /usr/bin/env -i "$@"'
    )
    pairs = [f"{name}={value}" for name, value in (stage.environment | dict(environment)).items()]
    return [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "/bin/sh",
        "-ec",
        script,
        str(stage.root),
        *pairs,
        *command,
    ]
