"""Machines of a test's own: each is a network namespace with an address, on one switch, and may run a Ray node.

Machines share the kernel, its clock and its files, so a test must not take two of them for two disks. What they do not
share is the network: each has all ports, and can be cut off from all others or from one, in silence, as by a cable that
is pulled out. Needs root and the command `ip`; tests skip without.

    with Network() as network:
        redis = network.add("redis")
        cluster = RayHosts(network, folder, nodes=2)
        cluster.up(SETTINGS)
        first, second = cluster.ingresses()
        network.cut(first, redis)
        cluster.nodes[1].kill()
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from children import MODULE_LIMIT_S, Child

WAIT_S = 300.0
"""Longer than anything here takes; only a hang reaches it."""
MAIN = [sys.executable, "-c", "from asr_serve.api.cli import main; main()"]
PORT = 8000
"""Port of each ingress."""
RAY_PORT = 6379
NODE_CPUS = 2
REPLICA_CPUS, INGRESS_CPUS = 1.2, 0.6
"""Cores of a Ray node, and `cpus` of a model and of the ingress so that a node has room for one of each."""
QUICK = {
    "worker_niceness": 0,
    # A node that is cut off is noticed after about 4 s instead of 30.
    "health_check_initial_delay_ms": 2_000,
    "health_check_period_ms": 1_000,
    "health_check_timeout_ms": 2_000,
    "health_check_failure_threshold": 3,
}
NOWHERE = "02:00:00:00:00:00"
"""Link address that no machine has: what is sent to it is lost, and nobody is told."""


def run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    if done.returncode and check:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def wait_until(true: Callable[[], Any], what: Callable[[], Any] = lambda: "it never came true") -> Any:
    """Waits for something true, and returns it."""
    end_s = time.monotonic() + WAIT_S
    while not (found := true()):
        assert time.monotonic() < end_s, what()
        time.sleep(0.1)
    return found


class Host:
    """Machine of a test: a network namespace."""

    def __init__(self, name: str, namespace: str, device: str, address: str) -> None:
        self.name, self.namespace, self.device, self.address = name, namespace, device, address
        self.within = ["ip", "netns", "exec", namespace]
        """Command that runs a command on this machine."""

    def processes(self, what: str = "") -> list[psutil.Process]:
        """Processes of this machine whose title or command line has that."""
        found = []
        for pid in run("ip", "netns", "pids", self.namespace, check=False).split():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(int(pid))
                if what in " ".join(process.cmdline()):
                    found.append(process)
        return found

    @property
    def engines(self) -> list[psutil.Process]:
        """Engine processes."""
        return self.processes("asr_serve.engine.process.main")

    @property
    def replicas(self) -> list[psutil.Process]:
        """Actors of models: each supervises an engine process."""
        return [each for each in self.processes("ray::ServeReplica") if each not in self.ingresses]

    @property
    def ingresses(self) -> list[psutil.Process]:
        """The actor of the ingress, where this machine has it."""
        return self.processes("ray::ServeReplica:asr-serve:ingress")

    @property
    def url(self) -> str:
        """Address of the ingress of this machine."""
        return f"http://{self.address}:{PORT}"

    def kill(self) -> None:
        """Kills every process of this machine at once: its power fails, and whoever has a connection hears nothing."""
        run("ip", "link", "set", self.device, "down", check=False)  # or its kernel would still close connections
        found = self.processes()
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, WAIT_S)

    def gauge(self, name: str) -> float:
        """Sum of a metric of its ingress over all labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=WAIT_S).text
        return sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))


class Network:
    """Switch that machines are on. The test itself is on it too, as `address`."""

    def __init__(self) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip("network namespaces need root and the command ip")
        self._mark = secrets.token_hex(3)
        self._net = f"10.{128 + secrets.randbelow(64)}.{secrets.randbelow(256)}"
        self.address = f"{self._net}.254"
        self._bridge = f"asrb{self._mark}"
        self.hosts: list[Host] = []
        self._cuts: set[tuple[Host, Host]] = set()
        try:
            run("ip", "link", "add", self._bridge, "type", "bridge")
            run("ip", "address", "add", f"{self.address}/24", "dev", self._bridge)
            run("ip", "link", "set", self._bridge, "up")
        except OSError as failure:
            self.close()
            pytest.skip(f"no network namespaces here: {failure}")

    def add(self, name: str) -> Host:
        """A machine more. Skips the test where the system forbids it."""
        number = len(self.hosts) + 1
        host = Host(name, f"asr-{self._mark}-{name}", f"asrh{self._mark}{number}", f"{self._net}.{number}")
        self.hosts.append(host)
        try:
            run("ip", "netns", "add", host.namespace)
            run("ip", "link", "add", host.device, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            run("ip", "link", "set", host.device, "master", self._bridge)
            inside = ("ip", "-n", host.namespace)
            run(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
            run(*inside, "link", "set", "lo", "up")
            run(*inside, "link", "set", "eth0", "up")
            # Programs ask for the way to somewhere else to learn their own address.
            run(*inside, "route", "add", "default", "via", self.address)
            run("ip", "link", "set", host.device, "up")
        except OSError as failure:
            self.close()
            pytest.skip(f"no network namespaces here: {failure}")
        return host

    def cut(self, host: Host, other: Host | None = None) -> None:
        """Cuts a machine off from another one, or from everything, the test itself too. Connections stay open on both
        sides, and what they send is lost."""
        if other is None:
            run("ip", "link", "set", host.device, "down")
            return
        self._cuts.add((host, other))
        for here, there in ((host, other), (other, host)):
            place = ("dev", "eth0", "lladdr", NOWHERE, "nud", "permanent")
            run("ip", "-n", here.namespace, "neighbour", "replace", there.address, *place)

    def heal(self, host: Host, other: Host | None = None) -> None:
        """Ends what `cut` began."""
        if other is None:
            run("ip", "link", "set", host.device, "up")
            return
        self._cuts.discard((host, other))
        for here, there in ((host, other), (other, host)):
            run("ip", "-n", here.namespace, "neighbour", "delete", there.address, "dev", "eth0")

    def heal_all(self) -> None:
        """Ends all cuts."""
        for host, other in list(self._cuts):
            self.heal(host, other)
        for host in self.hosts:
            self.heal(host)

    def close(self) -> None:
        """Kills what still runs on the machines, and removes them."""
        for host in self.hosts:
            host.kill()
            run("ip", "link", "delete", host.device, check=False)
            run("ip", "netns", "delete", host.namespace, check=False)
        run("ip", "link", "delete", self._bridge, check=False)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RayHosts:
    """Ray cluster of a head, which runs Ray Serve's controller only, and of nodes, each with room for a replica and an
    ingress. Clients of the test reach an ingress at `host.url`."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        *,
        nodes: int = 2,
        cpus: int = NODE_CPUS,
        environ: Mapping[str, str] = {},
        system: Mapping[str, int] = QUICK,
    ) -> None:
        """`environ`: variables of Ray's processes; `system`: settings of Ray itself."""
        self.network, self._folder = network, folder
        # Ray's sockets are below it, and the path of a socket has 107 bytes at most.
        self._ray_folder = tempfile.mkdtemp(prefix="asr", dir="/tmp")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("ASR_SERVE_", "RAY_"))}
        path = os.pathsep.join(each for each in sys.path if each)
        # Ray makes a token for a cluster that it starts; other nodes have to be given it.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._environ = clean | {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"} | token | dict(environ)
        self._children: dict[Host, Child[Any]] = {}
        self._cpus = cpus
        self.head = network.add("head")
        self.nodes = [network.add(f"node{number}") for number in range(1, nodes + 1)]
        self.address = f"{self.head.address}:{RAY_PORT}"
        options = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false", "--num-cpus=0"]
        self._start(
            self.head, *options, f"--system-config={json.dumps(dict(system))}", f"--temp-dir={self._ray_folder}"
        )
        for node in self.nodes:
            self.start(node)

    def start(self, node: Host) -> None:
        """Starts Ray on a node, for the first time or after it was killed."""
        self.network.heal(node)
        resources = json.dumps({node.name: 1})
        self._start(node, f"--address={self.address}", f"--num-cpus={self._cpus}", f"--resources={resources}")

    def ended(self, node: Host) -> bool:
        """Returns whether Ray has ended on a node by itself, as it does where the head had given the node up."""
        return self._children[node].poll() is not None

    def _start(self, host: Host, *options: str) -> None:
        """Starts Ray's processes on a machine. Ray gives them 30 s, which is too short while other programs want all
        cores: then once more."""
        command = [*host.within, sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start"]
        common = ["--block", f"--node-ip-address={host.address}", f"--object-store-memory={80 << 20}"]
        common += ["--disable-usage-stats", "--include-log-monitor=false", "--log-color=false"]
        file = self._folder / f"{host.name}.log"
        for last in (False, False, True):
            with file.open("wb") as log:
                self._children[host] = child = Child(
                    [*command, *common, *options], stdout=log, stderr=log, env=self._environ, limit_s=MODULE_LIMIT_S
                )
            while b"Ray runtime started" not in file.read_bytes():
                if child.poll() is not None:
                    break
                time.sleep(0.1)
            else:
                return
            text = file.read_text("utf-8", "replace")
            assert "timed out during startup" in text, text
            assert not last, text
            host.kill()
            self.network.heal(host)

    def up(self, settings: Mapping[str, Any]) -> None:
        """Deploys a cluster file with these settings, and waits until every ingress and replica is there."""
        file = self._folder / "cluster.yaml"
        file.write_text(yaml.safe_dump(dict(settings)))
        self.command("up", "--config", str(file), "--wait", f"{WAIT_S:g}")
        ingresses = settings.get("ingress", {}).get("replicas", 1)
        wait_until(lambda: len(self.ingresses()) == ingresses, self.logs)
        for host in self.ingresses():
            wait_until(partial(ready, host), self.logs)

    def command(self, *arguments: str) -> str:
        """Output of `asr-serve cluster ...` on the head."""
        done = subprocess.run(
            [*self.head.within, *MAIN, "cluster", *arguments, "--address", self.address],
            capture_output=True,
            text=True,
            env=self._environ,
            timeout=WAIT_S + 30,
            check=False,
        )
        assert done.returncode == 0, done.stderr + self.logs()
        return done.stdout

    def status(self) -> dict[str, Any]:
        """State of each deployment, by name."""
        return {each["name"]: each for each in json.loads(self.command("status", "--json"))}

    def ingresses(self) -> list[Host]:
        """Machines that have an ingress, whether it is ready or not."""
        return [host for host in self.nodes if host.ingresses]

    def logs(self) -> str:
        """The ends of Ray's own logs of replicas and of workers."""
        found = sorted(Path(self._ray_folder).glob("session_*/logs/**/*replica*.log"))
        found += sorted(Path(self._ray_folder).glob("session_*/logs/worker-*.err"))
        return "\n".join(f"== {each.name}\n{each.read_text('utf-8', 'replace')[-6_000:]}" for each in found)

    def close(self) -> None:
        for host in (*self.nodes, self.head):
            host.kill()
        for child in self._children.values():
            child.wait(WAIT_S)
        shutil.rmtree(self._ray_folder, ignore_errors=True)


def ready(host: Host) -> bool:
    """Returns whether its ingress answers that it is ready."""
    try:
        return httpx.get(f"{host.url}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def ray_hosts(folder: Path, **options: Any) -> Iterator[RayHosts]:
    """A network with a Ray cluster; what it started ends with it."""
    with Network() as network:
        cluster = RayHosts(network, folder, **options)
        try:
            yield cluster
        finally:
            cluster.close()
