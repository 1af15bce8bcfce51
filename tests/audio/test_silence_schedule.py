"""Silence schedules: FunASR's tables, and every invalid one refused."""

from __future__ import annotations

from math import inf, nan

import pytest

from asr_serve.audio.silence_schedule import OFFLINE_SCHEDULE, STREAMING_SCHEDULE, SilenceSchedule
from asr_serve.errors import OptionError


@pytest.mark.parametrize(
    ("accumulated_s", "offline_ms", "streaming_ms"),
    [
        (0, 2_000, 2_000),
        (5, 2_000, 2_000),
        (5.001, 2_000, 1_500),
        (10, 2_000, 1_500),
        (12, 1_000, 1_000),
        (15.001, 1_000, 800),
        (20, 1_000, 800),
        (25, 800, 800),
        (40, 600, 400),
        (50, 400, 100),
        (55, 200, 100),
        (60, 200, 100),
        (60.001, 100, 100),
        (1e6, 100, 100),
    ],
)
def test_source_tables(accumulated_s: float, offline_ms: int, streaming_ms: int) -> None:
    assert OFFLINE_SCHEDULE.silence_ms(accumulated_s * 1_000) == offline_ms
    assert STREAMING_SCHEDULE.silence_ms(accumulated_s * 1_000) == streaming_ms


def test_parse_text_and_back() -> None:
    from_list = SilenceSchedule.parse([(5_000, 1_500), (20_000, 800), (float("inf"), 300)])
    assert from_list == SilenceSchedule.from_text("5000:1500, 20000:800, inf:300")
    assert str(from_list) == "5000:1500,20000:800,inf:300"
    for table in (OFFLINE_SCHEDULE, STREAMING_SCHEDULE, from_list):
        assert SilenceSchedule.from_text(str(table)) == table


WRONG_TEXTS = ("", " ", "5000", "5000:", "5000:a,inf:3", "5000:1:2,inf:3", "5000:100", "inf:-3")


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([], "empty"),
        ([(5_000, 100)], "up to inf"),
        ([(inf, 100), (5_000, 100)], "must rise"),
        ([(5_000, 100), (5_000, 50), (inf, 10)], "must rise"),
        ([(9_000, 100), (5_000, 50), (inf, 10)], "must rise"),
        ([(0, 100), (inf, 10)], "above 0"),
        ([(-1, 100), (inf, 10)], "above 0"),
        ([(nan, 100), (inf, 10)], "must rise"),
        ([(inf, -1)], "0 or more"),
        ([(inf, 0.5)], "whole milliseconds"),
        ([(inf, inf)], "two numbers"),
        ([(inf, nan)], "two numbers"),
        ([(inf, 1, 2)], "two numbers"),
        ([(inf, "soon")], "two numbers"),
        ([7], "two numbers"),
        *((text, "inf:300") for text in WRONG_TEXTS),
    ],
)
def test_invalid_schedules(rows: list[tuple[float, float]] | str, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        SilenceSchedule.from_text(rows) if isinstance(rows, str) else SilenceSchedule.parse(rows)
