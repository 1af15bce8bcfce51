"""`completion_window` of batches: the schema's pattern is the server's check."""

from __future__ import annotations

import re

import pytest

from asr_serve.protocols.openai.batches import MAX_WINDOW_S, WINDOW_PATTERN

UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


@pytest.mark.parametrize("unit", UNITS_S)
def test_the_pattern_has_all_windows_up_to_thirty_days_and_no_other(unit: str) -> None:
    pattern, most = re.compile(WINDOW_PATTERN), MAX_WINDOW_S // UNITS_S[unit]
    step = max(1, most // 5_000)
    numbers = {*range(0, most + 2, step), *range(most - 12, most + 12), *(10**digits for digits in range(8))}
    for number in sorted(number for number in numbers if number >= 0):
        assert bool(pattern.fullmatch(f"{number}{unit}")) == (1 <= number <= most), number
    for other in (f"01{unit}", f"{unit}", f"1 {unit}", f"1{unit}\n", f"-1{unit}", "1w", "24", "٣h"):
        assert not pattern.fullmatch(other), other
