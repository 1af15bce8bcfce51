"""Log of events: who listens, from where on."""

from __future__ import annotations

import pytest

from asr_serve.edge.event_log import EdgeEventLog


@pytest.mark.parametrize(("after", "numbers"), [(0, [1, 2, 3]), (2, [3]), (3, []), (50, [1, 2, 3])])
async def test_a_number_of_before_a_restart_means_from_the_first_event(after: int, numbers: list[int]) -> None:
    log = EdgeEventLog()
    for _ in range(3):
        log.append("call", b"{}")
    log.close()
    assert [event.number async for event in log.listen(after, 1.0) if event is not None] == numbers
