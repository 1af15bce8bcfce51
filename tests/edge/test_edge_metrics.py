"""The edge's metrics: names as everywhere, all of them in docs/edge.md, and counted once."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from asr_serve.edge.rtp import DropReason
from asr_serve.metrics import EDGE_DROPS, EdgeMetrics

PAGE = Path(__file__).resolve().parents[2] / "docs" / "edge.md"


def test_the_page_describes_every_metric() -> None:
    families = list(text_string_to_metric_families(EdgeMetrics("1").render().decode()))
    found = {
        family.name + "_total" * (family.type == "counter"): {
            label for sample in family.samples for label in sample.labels if label != "le"
        }
        for family in families
    }
    described = {
        match[1]: set((match[2] or "").split(",")) - {""}
        for match in re.finditer(r"^\| `(asr_serve_edge_\w+)(?:\{([\w,]+)\})?` \|", PAGE.read_text(), re.MULTILINE)
    }
    assert described == found
    assert all(family.documentation.endswith(".") for family in families)


def test_every_reason_to_drop_is_counted_and_on_the_page() -> None:
    assert set(EDGE_DROPS) == {str(reason) for reason in DropReason}
    assert all(f"`{reason}`" in PAGE.read_text() for reason in EDGE_DROPS)


def test_totals_of_a_session_are_counted_once() -> None:
    metrics = EdgeMetrics("1")
    metrics.count_stream(1, (1.0, 0.5, 0.25, 0.0), 2)
    metrics.count_stream(1, (3.0, 0.5, 0.25, 1.0), 5)
    metrics.count_stream(2, (1.0, 0.0, 0.0, 0.0), 1)
    metrics.forget_stream(1)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    kinds = {kind: value("asr_serve_edge_audio_seconds_total", kind=kind) for kind in ("received", "discarded")}
    assert kinds == {"received": 4.0, "discarded": 1.0}
    assert value("asr_serve_edge_lost_packets_total") == 6
