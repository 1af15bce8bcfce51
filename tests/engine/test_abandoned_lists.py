"""Lists of hot words whose callers have left: what was not begun is not made, and keeps nobody waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from asr_serve.engine.chunked import spelling as streams
from asr_serve.engine.utterances.hot import biasing

WAIT_S = 20


class Maker:
    """The first list takes until `go` is set; what was made, in order."""

    def __init__(self) -> None:
        self.begun, self.go, self.made = threading.Event(), threading.Event(), list[str]()

    def __call__(self, bias: str, *_: Any) -> str:
        self.begun.set()
        assert self.go.wait(WAIT_S)
        self.made.append(bias)
        return bias


class OfStreams:
    def __init__(self, make: Maker, call: Callable[[Callable[[], None]], None]) -> None:
        self.spelling = streams.Spelling(make, lambda number, error: None)  # type: ignore[arg-type]
        self.spelling.begin(SimpleNamespace(call=call))  # type: ignore[arg-type]

    def come(self, number: int, bias: str) -> None:
        self.spelling.spell(number, SimpleNamespace(bias=bias, hot=None))  # type: ignore[arg-type]

    @property
    def waiting(self) -> int:
        return len(self.spelling.waiting)


class OfRequests:
    def __init__(self, make: Maker, call: Callable[[Callable[[], None]], None]) -> None:
        self.spelling = biasing.Spelling(lambda text: [1], lambda tokens: "", call, lambda ids, error: None)

    def come(self, number: int, bias: str) -> None:
        asked = SimpleNamespace(id=number, options=SimpleNamespace(bias=bias, beam=1), hotwords=None)
        self.spelling.then(asked, lambda: None)  # type: ignore[arg-type]

    @property
    def waiting(self) -> int:
        return self.spelling.waiting


@pytest.mark.parametrize("kind", [OfStreams, OfRequests])
def test_lists_that_nobody_waits_for_are_not_made(kind, monkeypatch: pytest.MonkeyPatch):
    make, jobs = Maker(), list[Callable[[], None]]()
    monkeypatch.setattr(biasing.Listed, "made", make)
    some = kind(make, jobs.append)
    some.come(0, "first")
    assert make.begun.wait(WAIT_S)
    for number in range(1, 100):
        some.come(number, f"left {number}")
        some.spelling.leave(number)
    some.come(100, "shared")
    some.come(101, "shared")
    some.spelling.leave(100)
    some.come(102, "again")
    some.spelling.leave(102)
    some.come(103, "again")
    some.spelling.leave(0)  # it is being made
    assert len(some.spelling._lists) <= 3
    assert some.waiting == 2
    make.go.set()
    some.spelling._thread.submit(int).result(WAIT_S)
    some.spelling.close()
    for job in jobs:
        job()
    assert make.made == ["first", "shared", "again"]
    assert some.waiting == 0
