"""The RayService of the Helm chart: what Ray, asr-serve and KubeRay's probes read of it agrees with the code."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import golden, objects

from asr_serve.cluster import cluster_config
from asr_serve.errors import UnsupportedOption
from asr_serve.server.sessions.cipher import AesGcmCipher, NoCipher
from asr_serve.server.sessions.redis_store import RedisSessionStore

ROOT = Path(__file__).resolve().parents[2]
MANIFEST: dict[str, Any] = objects(golden("ray"))["RayService"]
SPEC: dict[str, Any] = MANIFEST["spec"]
CLUSTER: dict[str, Any] = SPEC["rayClusterConfig"]
SERVE: dict[str, Any] = yaml.safe_load(SPEC["serveConfigV2"])
HEAD: dict[str, Any] = CLUSTER["headGroupSpec"]
WORKERS: dict[str, Any] = CLUSTER["workerGroupSpecs"][0]
PODS = [HEAD["template"]["spec"], WORKERS["template"]["spec"]]


def config(secrets: Path) -> cluster_config.ClusterConfig:
    """The cluster that the manifest asks for, with its secrets in a folder of this machine."""
    for name in ("api-keys/api-keys", "session-keys/session-keys", "redis-password/password"):
        (secrets / name).parent.mkdir(exist_ok=True)
        (secrets / name).write_text("a-key-of-some-length\n")
    text = yaml.safe_dump(SERVE["applications"][0]["args"]).replace("/etc/asr-serve", str(secrets))
    return cluster_config.from_mapping(yaml.safe_load(text), "the manifest")


@pytest.mark.filterwarnings("ignore")  # Ray Serve's own, when it is imported
def test_ray_and_asr_serve_take_the_serve_config(tmp_path: Path) -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="no Ray here: pip install 'asr-serve[cluster]'")
    deployed = schema.ServeDeploySchema.model_validate(SERVE)
    [application] = deployed.applications
    assert (deployed.proxy_location, application.import_path) == ("Disabled", "asr_serve.cluster:app")
    assert (application.route_prefix, application.external_scaler_enabled) == (None, True)
    wrong = SERVE | {"applications": [application.model_dump() | {"import_path": "asr_serve"}]}
    with pytest.raises(ValueError, match="import_path"):
        schema.ServeDeploySchema.model_validate(wrong)
    server = config(tmp_path).server()
    assert (server.host, server.api_keys) == ("0.0.0.0", ("a-key-of-some-length",))


def test_callers_reach_the_port_of_the_ingress_and_only_pods_with_one(tmp_path: Path) -> None:
    cluster = config(tmp_path)
    port = cluster.server().port
    [published] = SPEC["serveService"]["spec"]["ports"]
    assert (published["port"], published["targetPort"]) == (port, port)
    for pod in PODS:
        [container] = pod["containers"]
        assert {"name": "serve", "containerPort": port} in container["ports"], "KubeRay looks for the port by its name"
    assert WORKERS["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"] == {
        "path": "/ready",
        "port": "serve",
        "scheme": "HTTP",
    }
    # The head has KubeRay's own probe, so that no ingress may be there.
    assert HEAD["rayStartParams"]["num-cpus"] == "0"
    assert SPEC["excludeHeadPodFromServeSvc"]
    assert cluster.ingress.cpus > 0


def test_a_pod_that_ends_has_the_time_that_its_replicas_may_take(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")
    from asr_serve.cluster.application import SHUTDOWN_MARGIN_S

    longest_s = 2 * (config(tmp_path).server().drain_s + SHUTDOWN_MARGIN_S)
    pod = WORKERS["template"]["spec"]
    [command] = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][2:]
    for waits in (f"--deadline-remaining-seconds {longest_s + 10:g}", f"seq {longest_s + 10:g}"):
        assert waits in command
    assert pod["terminationGracePeriodSeconds"] > longest_s + 10


def test_replicas_fit_on_the_pods(tmp_path: Path) -> None:
    cluster = config(tmp_path)
    cores = float(WORKERS["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    [model] = cluster.models
    assert model.cpus + cluster.ingress.cpus <= cores, "a pod has room for a replica and an ingress"
    assert max(model.replicas, cluster.ingress.replicas) <= WORKERS["replicas"]
    assert WORKERS["minReplicas"] <= WORKERS["replicas"] <= WORKERS["maxReplicas"]


def test_secrets_and_weights_are_mounted_where_they_are_read() -> None:
    [application] = SERVE["applications"]
    args = application["args"]
    sessions = args["serve"]["sessions"]
    paths = [args["models"][0]["weights"], args["serve"]["api_keys_file"], sessions["key_file"]]
    for pod in PODS:  # any of them builds the application, and reads its files
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert set(mounts.values()) == volumes
        for path in (*paths, sessions["redis_password_file"]):
            assert any(path.startswith(f"{mount}/") for mount in mounts), path
    secret = CLUSTER["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]["secretKeyRef"]
    mounted = {volume["name"]: volume["secret"]["secretName"] for volume in PODS[1]["volumes"] if "secret" in volume}
    assert mounted["redis-password"] == secret["name"]
    assert sessions["redis_password_file"].endswith(f"/{secret['key']}")


def test_ray_asks_for_a_token() -> None:
    assert CLUSTER["authOptions"] == {"mode": "token"}
    # KubeRay refuses that for an older one.
    assert tuple(map(int, CLUSTER["rayVersion"].split("."))) >= (2, 52, 0)


def test_the_image_has_the_packages_that_the_settings_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dockerfile = (ROOT / "deploy" / "kuberay" / "Dockerfile").read_text()
    [extras] = re.findall(r"'/src\[([\w,]+)\]'", dockerfile)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= known.keys()
    needed = {"cluster"}
    for package, setting, opened in (
        ("cryptography", "key_file", lambda: AesGcmCipher([bytes(32)])),
        ("redis", "redis_url", lambda: RedisSessionStore("redis://here", "", 1.0, NoCipher())),
    ):
        monkeypatch.setitem(sys.modules, package, None)  # not installed
        with pytest.raises(UnsupportedOption) as refused:
            opened()
        assert refused.value.param == f"sessions.{setting}"
        if getattr(config(tmp_path).server().sessions, setting) is not None:
            needed |= set(re.findall(r"asr-serve\[(\w+)\]", refused.value.todo))
    assert config(tmp_path).server().otel_endpoint is None
    assert needed == set(extras.split(",")), "and no others"


def test_versions_and_images_agree() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"ray=={CLUSTER['rayVersion']}" in constraints
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cluster"]
    [needed] = [each for each in extra if each.startswith("ray[serve]>=")]
    least = [int(part) for part in needed.partition(">=")[2].split(".")]
    assert [int(part) for part in CLUSTER["rayVersion"].split(".")] >= least
    assert {container["image"] for pod in PODS for container in pod["containers"]} == {f"asr-serve-ray:{version}"}
    assert f"-t asr-serve-ray:{version} ." in (ROOT / "deploy" / "kuberay" / "Dockerfile").read_text()


def test_pods_run_without_root_on_a_read_only_file_system() -> None:
    dockerfile = (ROOT / "deploy" / "kuberay" / "Dockerfile").read_text()
    [user] = re.findall(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE)
    for pod in PODS:
        context = pod["securityContext"]
        assert context["runAsNonRoot"]
        assert (str(context["runAsUser"]), str(context["runAsGroup"])) == user
        [container] = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert {"/tmp", "/dev/shm", "/var/cache/asr-serve"} <= writable, "Ray and models are written there"
