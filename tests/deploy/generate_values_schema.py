"""values.schema.json of the Helm chart: its settings of the server are those of the server's own config, with their
limits. Run it after a change of either: python tests/deploy/generate_values_schema.py"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from asr_serve.cluster.cluster_config import IngressDeployment, ModelDeployment
from asr_serve.config import ServeConfig
from asr_serve.types import SECRETS

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "asr-serve"
SCHEMA = CHART / "values.schema.json"

BY_THE_CHART = {
    "ServeConfig": {
        "host",
        "port",
        "api_keys_file",
        "admin_keys_file",
        "tls_cert",
        "tls_key",
        "realtime_port",
        "wyoming_port",
        "riva_port",
        *SECRETS,
    },
    "SessionsConfig": {"redis_url", "redis_password_file", "key_file"},
}
"""Settings that the chart makes of its other values, or that would put a secret into a ConfigMap."""


def table(properties: dict[str, Any], *, required: tuple[str, ...] = ()) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    return found | ({"required": list(required)} if required else {})


def count(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


TEXT, FLAG, ANY_TABLE = {"type": "string"}, {"type": "boolean"}, {"type": "object"}
NAME = {"type": "string", "pattern": r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
LIST = {"type": "array", "items": ANY_TABLE}
QUANTITY = {"type": ["string", "number"], "pattern": r"^\d+(\.\d+)?(m|[KMGT]i?)?$"}
SIZE = {"type": "string", "pattern": r"^\d+(\.\d+)?(Ki|Mi|Gi|Ti)$"}
AMOUNTS = {"type": "object", "additionalProperties": QUANTITY}
RESOURCES = table({"requests": AMOUNTS, "limits": AMOUNTS})
SECRET = table({"name": NAME, "key": {"type": "string", "pattern": r"^[\w.-]+$"}})
REPLICAS = count(0, 1_000)


def server_definitions() -> dict[str, Any]:
    """Schemas of the server's config, as Helm's library reads patterns, without what the chart sets by itself."""
    _, found = msgspec.json.schema_components(
        [ServeConfig, ModelDeployment, IngressDeployment], ref_template="#/$defs/{name}"
    )
    text = json.dumps(found).replace(r"\\A", "^").replace(r"\\Z", "$")
    definitions: dict[str, Any] = json.loads(text)
    for name, definition in definitions.items():
        fields = definition["properties"]
        for field in BY_THE_CHART.get(name, ()):
            del fields[field]
        for field in fields.values():
            field.pop("default", None)
        definition["additionalProperties"] = False
        for part in ("title", "required") if name != "ModelDeployment" and name != "AutoscaleSettings" else ("title",):
            definition.pop(part, None)
        definition["description"] = re.sub(r"\s+", " ", definition["description"]).split(". ")[0]
    return definitions


def values_schema() -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the chart asr-serve",
        **table(
            {
                "kind": {"enum": ["Deployment", "RayService"]},
                "replicas": REPLICAS,
                "image": table(
                    {
                        "repository": TEXT,
                        "tag": TEXT,
                        "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
                        "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
                        "pullSecrets": {"type": "array", "items": NAME},
                    }
                ),
                "settings": {"$ref": "#/$defs/ServeConfig"},
                "secrets": table(
                    {
                        "apiKeys": SECRET,
                        "adminKeys": SECRET,
                        "sessionKeys": SECRET,
                        "redisPassword": SECRET,
                        "tls": table({"name": NAME}),
                    }
                ),
                "redis": table(
                    {
                        # No password: it would be in a ConfigMap.
                        "url": {"type": "string", "pattern": r"^((rediss?(\+cluster)?|unix)://([^\s@:/]+@)?[^\s@]+)?$"}
                    }
                ),
                "weights": table({"claim": NAME, "path": {"type": "string", "pattern": r"^/[\w./-]*$"}}),
                "cache": table({"sizeLimit": SIZE}),
                "sharedMemory": SIZE,
                "resources": RESOURCES,
                "gpu": table(
                    {
                        "count": count(0, 64),
                        "resource": {"type": "string", "pattern": r"^[a-z0-9.-]+/[\w.-]+$"},
                        "nodeSelector": TEXTS,
                        "tolerations": LIST,
                    }
                ),
                "hugePages": table(
                    {"amount": {"type": "string", "pattern": r"^(\d+(Mi|Gi))?$"}, "size": {"enum": ["2Mi", "1Gi"]}}
                ),
                "nodeSelector": TEXTS,
                "tolerations": LIST,
                "affinity": ANY_TABLE,
                "podLabels": TEXTS,
                "podAnnotations": TEXTS,
                "extraEnv": {
                    "type": "array",
                    "items": table({"name": TEXT, "value": TEXT, "valueFrom": ANY_TABLE}, required=("name",)),
                },
                "priorityClassName": NAME,
                "serviceAccount": table({"create": FLAG, "name": NAME, "annotations": TEXTS}),
                "service": table(
                    {
                        "type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
                        "port": count(1, 65_535),
                        "annotations": TEXTS,
                    }
                ),
                "startSeconds": count(5, 86_400),
                "unlistSeconds": count(0, 300),
                "autoscaling": table(
                    {
                        "kind": {"enum": ["none", "hpa", "keda"]},
                        "minReplicas": count(1, 1_000),
                        "maxReplicas": count(1, 1_000),
                        "keda": table(
                            {
                                "prometheus": {"type": "string", "pattern": r"^https?://[^\s]+$"},
                                "selector": {"type": "string", "pattern": r'^\w+=~?"[^"]+"(,\w+=~?"[^"]+")*$'},
                                "pollingInterval": count(1, 3_600),
                            }
                        ),
                    }
                ),
                "disruption": table({"minAvailable": REPLICAS}),
                "networkPolicy": table(
                    {
                        "enabled": FLAG,
                        "from": LIST,
                        "dns": LIST | {"minItems": 1},
                        "redis": LIST,
                        "otel": LIST,
                        "egress": LIST,
                        "operatorNamespace": NAME,
                    }
                ),
                "serviceMonitor": table(
                    {
                        "enabled": FLAG,
                        "interval": {"type": "string", "pattern": r"^\d+(s|m)$"},
                        "labels": TEXTS,
                        "apiKey": SECRET,
                    }
                ),
                "ray": table(
                    {
                        "version": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
                        "models": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/ModelDeployment"}},
                        "ingress": {"$ref": "#/$defs/IngressDeployment"},
                        "headInRedis": FLAG,
                        "head": table({"resources": RESOURCES}),
                        "workers": table({"replicas": REPLICAS, "minReplicas": REPLICAS, "maxReplicas": REPLICAS}),
                    }
                ),
                "global": ANY_TABLE,
            }
        ),
        "$defs": server_definitions(),
    }


def values_schema_text() -> str:
    return json.dumps(values_schema(), indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(values_schema_text())
