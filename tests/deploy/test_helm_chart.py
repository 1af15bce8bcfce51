"""The Helm chart: what Helm renders is what Kubernetes and the server take, and misspelt values are refused."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from generate_values_schema import BY_THE_CHART, SCHEMA, values_schema_text
from helm_chart import CHART, NAMES, golden, objects, profile, render, rendered_text

from asr_serve.cluster import cluster_config
from asr_serve.cluster.autoscaling import AutoscaleSettings
from asr_serve.config import ServeConfig
from asr_serve.config_sources import all_settings, load_serve_config
from asr_serve.server import run

SERVER_PROFILES = [name for name in NAMES if name != "ray"]
KUBERNETES = ("1.30", "1.34")
"""The oldest that Chart.yaml allows, and a new one."""
CUSTOM = {"ScaledObject", "ServiceMonitor", "RayService"}
"""Kinds that are not of Kubernetes itself."""
SECRET_FILES = {
    "secrets": {
        "apiKeys": {"name": "keys"},
        "adminKeys": {"name": "keys"},
        "sessionKeys": {"name": "keys"},
        "redisPassword": {"name": "redis"},
    },
    "redis": {"url": "rediss://redis:6379/1"},
}


@pytest.fixture(scope="module")
def helm() -> Any:
    return pytest.importorskip("helm_python", reason="no Helm here: pip install --no-deps helm-python-sdk==0.2.2")


def server_config(rendered: str, folder: Path) -> ServeConfig:
    """The settings that the server reads of the rendered ConfigMap, its secrets being files of this machine."""
    kinds = objects(rendered)
    [container] = kinds["Deployment"]["spec"]["template"]["spec"]["containers"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    text = kinds["ConfigMap"]["data"]["asr-serve.toml"]
    for path in mounts:
        if path.startswith("/etc/asr-serve/"):
            assert mounts[path]["readOnly"]
    for name, value in _strings(tomllib.loads(text)):
        if value.startswith("/"):
            assert any(value.startswith(f"{mount}/") for mount in mounts), f"{name}={value} is not mounted"
        if value.startswith("/etc/asr-serve/"):
            file = folder / value.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("a-key-of-some-length\n")
    config = folder / "asr-serve.toml"
    config.write_text(text.replace('"/etc/asr-serve/', f'"{folder}/etc/asr-serve/'))
    [*_, flag, path] = container["command"]
    assert (flag, path) == ("--config", "/etc/asr-serve/config/asr-serve.toml")
    assert path.rpartition("/")[0] in mounts
    assert path.rpartition("/")[2] in kinds["ConfigMap"]["data"]
    return load_serve_config(str(config), {})


def _strings(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _strings(value)
        elif isinstance(value, str):
            yield name, value


# --- what is committed ------------------------------------------------------------------------------------


def test_the_schema_is_that_of_the_servers_config() -> None:
    assert values_schema_text() == SCHEMA.read_text(), "run python tests/deploy/generate_values_schema.py"


def test_the_schema_has_every_setting_but_those_that_the_chart_makes() -> None:
    definitions = json.loads(SCHEMA.read_text())["$defs"]
    tables = {"": "ServeConfig", "engine": "EngineConfig", "sessions": "SessionsConfig", "webrtc": "WebRtcConfig"}
    tables |= {"governance": "GovernanceConfig", "batch": "BatchConfig"}
    for name in all_settings():
        table, _, field = name.rpartition(".")
        made = field in BY_THE_CHART.get(tables[table], ())
        assert made != (field in definitions[tables[table]]["properties"]), name


@pytest.mark.parametrize("name", NAMES)
def test_the_render_of_a_profile_is_the_committed_one(name: str, helm: Any) -> None:
    assert rendered_text(name) == golden(name), "run python tests/deploy/helm_chart.py"


def test_helm_finds_nothing_wrong_with_the_chart(helm: Any) -> None:
    from helm_python.chart import Chart, lint

    for name in NAMES:
        report = lint(CHART, profile(name), strict=True, namespace="speech")
        assert not report["errors"]
        assert [each["error"] for each in report["messages"]] == ["icon is recommended"]
    with Chart.load(CHART) as chart:
        version = tomllib.loads((CHART.parents[2] / "pyproject.toml").read_text())["project"]["version"]
        assert (chart.metadata["appVersion"], chart.version) == (version, version)


# --- what Kubernetes takes --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_kubernetes_takes_every_object(name: str) -> None:
    checker = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate here: pip install it")
    kinds = objects(golden(name))
    checked = [each for kind, each in kinds.items() if kind not in CUSTOM]
    if "RayService" in kinds:  # its own schema is KubeRay's, but pods are pods
        cluster = kinds["RayService"]["spec"]["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
            pod["metadata"] = {**pod["metadata"], "name": "pod"}
            checked.append(pod)
    assert len(checked) >= 3
    for each in checked:
        for version in KUBERNETES:
            checker.validate(each, version, strict=True)
    broken = json.loads(json.dumps(checked[0]))
    broken["metadata"]["nam"] = "x"
    with pytest.raises(checker.ValidationError, match="nam"):
        checker.validate(broken, KUBERNETES[0], strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_everything_selects_the_pods_of_its_release(name: str) -> None:
    kinds = objects(golden(name))
    own = {"app.kubernetes.io/name": "asr-serve", "app.kubernetes.io/instance": "asr-serve"}
    if "Deployment" in kinds:
        pods = [kinds["Deployment"]["spec"]["template"]]
        assert kinds["Deployment"]["spec"]["selector"]["matchLabels"] == own
        assert kinds["Service"]["spec"]["selector"] == own
    else:
        cluster = kinds["RayService"]["spec"]["rayClusterConfig"]
        pods = [cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]]
    for pod in pods:
        assert own.items() <= pod["metadata"]["labels"].items()
    assert kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == own
    for kind, scaled in (("ScaledObject", "scaleTargetRef"), ("HorizontalPodAutoscaler", "scaleTargetRef")):
        if kind in kinds:
            assert kinds[kind]["spec"][scaled]["name"] == kinds["Deployment"]["metadata"]["name"]
            assert "replicas" not in kinds["Deployment"]["spec"], "helm upgrade would undo the autoscaler's"


@pytest.mark.parametrize("name", SERVER_PROFILES)
def test_a_pod_may_do_nothing_that_it_does_not_need(name: str) -> None:
    pod = objects(golden(name))["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] > 0
    assert not pod["automountServiceAccountToken"]
    assert not pod["enableServiceLinks"], "they would be variables that the server reads"
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    variables = {each["name"]: each["value"] for each in container["env"]}
    writable = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
    assert {variables["ASR_SERVE_CACHE"], variables["HOME"]} <= writable
    assert "/dev/shm" in writable, "server and engines share memory there"


# --- what the server takes --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVER_PROFILES)
def test_the_server_reads_the_config_of_a_profile(name: str, tmp_path: Path) -> None:
    config = server_config(golden(name), tmp_path)
    settings = profile(name)["settings"]
    for setting, value in settings.items():
        read = getattr(config, setting)
        if isinstance(read, msgspec.Struct):
            assert {field: getattr(read, field) for field in value} == value
        else:
            assert read == value, setting
    assert (config.host, config.port) == ("0.0.0.0", 8_000)
    if "apiKeys" in profile(name).get("secrets", {}):
        assert config.api_keys == ("a-key-of-some-length",)
    assert (config.sessions.redis_url is not None) == ("redis" in profile(name))


def test_every_setting_reaches_the_server_as_it_is(helm: Any, tmp_path: Path) -> None:
    made = msgspec.to_builtins(
        ServeConfig(
            aliases={"whisper-1": "moonshine-tiny-en", 'quoted"name"\\': "a<b>&c"},
            cors_origins=("https://a.example", "*"),
            upload_idle_s=0.001,
            max_body_bytes=1 << 50,
            concurrent_per_key=3,
            funasr_language="日本語 \n \t \x7f",
            docs=False,
        )
    )
    defaults = {
        table: {name: value for name, value in fields.items() if name not in BY_THE_CHART.get(struct, ())}
        for table, struct, fields in (
            ("", "ServeConfig", made),
            ("engine", "EngineConfig", made["engine"]),
            ("sessions", "SessionsConfig", made["sessions"]),
            ("webrtc", "WebRtcConfig", made["webrtc"]),
            ("governance", "GovernanceConfig", made["governance"]),
            ("batch", "BatchConfig", made["batch"]),
        )
    }
    settings = {**defaults.pop(""), **defaults}
    config = server_config(render(SECRET_FILES | {"settings": settings}), tmp_path)
    read = msgspec.to_builtins(config)
    for name, value in settings.items():
        if isinstance(value, dict) and name in defaults:
            assert {field: read[name][field] for field in value} == value, name
        else:
            assert read[name] == value, name
    assert config.admin_keys == config.api_keys == ("a-key-of-some-length",)
    assert config.sessions.redis_url == "rediss://redis:6379/1"


def test_pods_keep_no_batches_unless_told_to(helm: Any, tmp_path: Path) -> None:
    """Their disk ends with them."""
    assert not server_config(render({}), tmp_path).batch.enabled
    asked = server_config(render({"settings": {"batch": {"concurrent_lines": 8}}}), tmp_path)
    assert (asked.batch.enabled, asked.batch.concurrent_lines) == (True, 8)


@pytest.mark.parametrize("drain_s", [None, 0, 0.5, 90])
def test_a_pod_that_ends_has_the_time_that_its_server_may_take(
    drain_s: float | None, helm: Any, tmp_path: Path
) -> None:
    rendered = render({"settings": {} if drain_s is None else {"drain_s": drain_s}})
    pod = objects(rendered)["Deployment"]["spec"]["template"]["spec"]
    unlisted_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    longest_s = server_config(rendered, tmp_path).drain_s + 2 * run.STOP_S + run.FINAL_RESPONSES_S + run.CLOSE_S
    assert pod["terminationGracePeriodSeconds"] == unlisted_s + math.ceil(drain_s if drain_s is not None else 30) + 15
    assert pod["terminationGracePeriodSeconds"] - unlisted_s >= longest_s


@pytest.mark.parametrize("name", SERVER_PROFILES)
def test_probes_ask_for_what_the_server_answers(name: str) -> None:
    [container] = objects(golden(name))["Deployment"]["spec"]["template"]["spec"]["containers"]
    source = (CHART.parents[2] / "src" / "asr_serve" / "server" / "routes" / "health.py").read_text()
    probes = {kind: container[kind]["httpGet"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startupProbe": "/ready",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",  # a server that drains, or whose engine starts anew, is not to be killed
    }
    assert all(f'"{probe["path"]}"' in source for probe in probes.values())
    tls = "tls" in profile(name).get("secrets", {})
    assert {probe["scheme"] for probe in probes.values()} == {"HTTPS" if tls else "HTTP"}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= AutoscaleSettings(max_replicas=1).start_s


def test_a_cluster_reads_its_config(helm: Any, tmp_path: Path) -> None:
    values = profile("ray")
    values["ray"]["models"] = [{"model": "moonshine-tiny-en", "cpus": 2, "autoscale": {"max_replicas": 4}}]
    serve = yaml.safe_load(objects(render(values))["RayService"]["spec"]["serveConfigV2"])
    [application] = serve["applications"]
    assert application["external_scaler_enabled"] is False, "Ray Serve scales in one way or the other"
    for name in ("api-keys/api-keys", "redis-password/password", "session-keys/session-keys"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("a-key-of-some-length\n")
    text = yaml.safe_dump(application["args"]).replace("/etc/asr-serve", str(tmp_path))
    cluster = cluster_config.from_mapping(yaml.safe_load(text), "the chart")
    assert cluster.autoscales
    assert cluster.server().api_keys == ("a-key-of-some-length",)


# --- what is refused --------------------------------------------------------------------------------------

REFUSED = [
    ({"settings": {"prot": 1}}, "at '/settings': additional properties 'prot' not allowed"),
    ({"replica": 3}, "additional properties 'replica' not allowed"),
    ({"settings": {"engine": {"max_sesions": 3}}}, "at '/settings/engine': additional properties 'max_sesions'"),
    ({"settings": {"drain_s": -1}}, "at '/settings/drain_s': minimum: got -1, want 0"),
    ({"settings": {"drain_s": "30"}}, "at '/settings/drain_s': got string, want number"),
    ({"settings": {"api_keys": ["a-key-of-some-length"]}}, "additional properties 'api_keys' not allowed"),
    ({"autoscaling": {"kind": "kedda"}}, "value must be one of 'none', 'hpa', 'keda'"),
    ({"redis": {"url": "redis://:password@redis"}}, "at '/redis/url'"),
    ({"hugePages": {"amount": "512"}}, "at '/hugePages/amount'"),
    ({"ray": {"models": [{"model": "x", "replcas": 2}]}}, "at '/ray/models/0': additional properties 'replcas'"),
    ({"disruption": {"minAvailable": 1}}, "no node could ever be drained; allowed: less than the pods"),
    ({"secrets": {"sessionKeys": {"name": "keys"}}}, "set redis.url too, or leave them out"),
    ({"kind": "RayService"}, "ray.headInRedis without redis.url"),
    ({"kind": "RayService", "ray": {"headInRedis": False}, "settings": {"model": "x"}}, "models are in ray.models"),
    ({"kind": "RayService", "ray": {"headInRedis": False}, "autoscaling": {"kind": "keda"}}, "Ray scales itself"),
    (
        {"serviceMonitor": {"enabled": True}, "secrets": {"apiKeys": {"name": "keys"}}},
        "serviceMonitor.apiKey.name is empty, and the server asks for a key",
    ),
]


@pytest.mark.parametrize(("values", "said"), REFUSED, ids=lambda each: None if isinstance(each, dict) else each[:40])
def test_wrong_values_are_refused_with_what_is_wrong(values: dict[str, Any], said: str, helm: Any) -> None:
    with pytest.raises(helm.HelmError) as refused:
        render(values)
    assert said in str(refused.value)


def test_no_secret_is_in_a_render() -> None:
    for name in NAMES:
        kinds = objects(golden(name))
        assert "Secret" not in kinds
        for word in ("password:", "api_keys =", "api_keys:", "redis_password ="):
            assert word not in golden(name)


# --- the network and the scalers --------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_pods_reach_what_their_settings_name(name: str) -> None:
    policy = objects(golden(name))["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    reached = {port["port"] for rule in policy["egress"] for port in rule.get("ports", ())}
    values = profile(name)
    wanted = {53}
    if "redis" in values:
        wanted.add(6379)
    if "otel_endpoint" in values["settings"]:
        wanted.add(4318)
    if values.get("kind") == "RayService":
        wanted |= {443, 6443}
    assert reached == wanted
    assert {port["port"] for port in policy["ingress"][0]["ports"]} == {8_000}
    [dns] = [rule for rule in policy["egress"] if {"port": 53, "protocol": "UDP"} in rule.get("ports", ())]
    assert [peer["podSelector"]["matchLabels"] for peer in dns["to"]] == [{"k8s-app": "kube-dns"}]


def test_redis_and_the_collector_are_reached_where_they_are(helm: Any) -> None:
    redis, otel = [{"ipBlock": {"cidr": "10.40.0.0/16"}}], [{"podSelector": {"matchLabels": {"app": "otel"}}}]
    values = {
        "redis": {"url": "rediss://redis:6379/0"},
        "settings": {"otel_endpoint": "http://otel:4318"},
        "networkPolicy": {"redis": redis, "otel": otel},
    }
    egress = objects(render(values))["NetworkPolicy"]["spec"]["egress"]
    reached = {port["port"]: rule["to"] for rule in egress for port in rule["ports"] if port["port"] != 53}
    assert reached == {6_379: redis, 4_318: otel}


def test_the_pod_autoscaler_asks_for_gauges_at_the_thresholds_of_a_cluster() -> None:
    from test_dashboard import KNOWN

    scaler = objects(golden("gpu"))["HorizontalPodAutoscaler"]["spec"]
    rules = AutoscaleSettings(max_replicas=2).scale_out
    max_sessions = profile("gpu")["settings"]["engine"]["max_sessions"]
    wanted = {
        "asr_serve_ingress_queue_fill_ratio": rules.ingress_queue.above,
        "asr_serve_backlog_seconds": rules.backlog_s.above,
        "asr_serve_sessions": int(rules.sessions.above * max_sessions),
    }
    targets = {each["pods"]["metric"]["name"]: each["pods"]["target"] for each in scaler["metrics"]}
    assert {name: float(target["averageValue"]) for name, target in targets.items()} == wanted
    assert not any(KNOWN[name].counts for name in wanted)


def test_huge_pages_and_gpus_are_limits_of_the_pod() -> None:
    pod = objects(golden("gpu"))["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {"hugepages-2Mi": "512Mi", "memory": "16Gi", "nvidia.com/gpu": 1}
    assert container["resources"]["requests"]["hugepages-2Mi"] == "512Mi"
    assert {"name": "hugepages", "emptyDir": {"medium": "HugePages-2Mi"}} in pod["volumes"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
