"""What is looked through at an idle moment costs little, however much there is."""

from __future__ import annotations

import pytest

from asr_serve.engine import executor
from asr_serve.engine.executor import CheckThrottle


@pytest.fixture(autouse=True)
def _as_in_production(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "CHECKS_PER_IDLE", 32)
    monkeypatch.setattr(executor, "MAX_CHECKS", 8_192)


@pytest.mark.parametrize("things", [0, 1, 31, 32, 33, 1_000, 8_192])
def test_the_mean_cost_of_checks_is_bounded(things: int) -> None:
    look = CheckThrottle()
    looked = sum(look(things) for _ in range(10_000))
    assert looked > 0
    assert looked * things <= 32 * 10_000
    assert looked == 10_000 // max(1, -(-things // 32))


def test_very_many_entries_are_never_checked() -> None:
    look = CheckThrottle()
    assert not any(look(8_193) for _ in range(10_000))


def test_what_was_saved_up_is_spent_at_once() -> None:
    look = CheckThrottle()
    assert not any(look(8_192) for _ in range(255))
    assert [look(64), look(64), look(64)] == [True, False, True]
