"""The Helm chart as Helm renders it. Run it to write the renders of deploy/helm/rendered anew:
python tests/deploy/helm_chart.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

HELM = Path(__file__).resolve().parents[2] / "deploy" / "helm"
CHART, PROFILES, RENDERED = HELM / "asr-serve", HELM / "profiles", HELM / "rendered"
NAMES = ("laptop", "gpu", "cluster", "ray")


def profile(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((PROFILES / f"{name}.yaml").read_text())
    return values


def render(values: dict[str, Any], release: str = "asr-serve") -> str:
    """The objects that Helm makes of these values, as one text. Raises helm_python.HelmError."""
    from helm_python.chart import Chart

    with Chart.load(CHART) as chart:
        files = chart.render(values, name=release, namespace="speech")
    parts = {name: text.strip() for name, text in sorted(files.items()) if name.endswith(".yaml") and text.strip()}
    return "".join(f"---\n# Source: {name}\n{text}\n" for name, text in parts.items())


def objects(text: str) -> dict[str, dict[str, Any]]:
    """Objects of Kubernetes by their kinds; this chart has one of each kind."""
    found = list(yaml.safe_load_all(text))
    by_kind = {each["kind"]: each for each in found}
    assert len(by_kind) == len(found)
    return by_kind


def golden(name: str) -> str:
    return (RENDERED / f"{name}.yaml").read_text()


def rendered_text(name: str) -> str:
    """What the golden file of a profile has to be."""
    head = (
        f"# Rendered by Helm from deploy/helm/profiles/{name}.yaml, to read, or to apply without Helm. Do not edit.\n"
    )
    return head + render(profile(name))


if __name__ == "__main__":
    RENDERED.mkdir(exist_ok=True)
    for each in NAMES:
        (RENDERED / f"{each}.yaml").write_text(rendered_text(each))
