"""Cache of biasing lists: cancelled ones that are not begun are not built, a long one delays no short one, and the
cache is bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from asr_serve.engine.cache import biasing_list_cache
from asr_serve.engine.seq2seq import biasing_queue as biasing
from asr_serve.engine.streaming import biasing_compiler as streams

WAIT_S = 20


class BlockingBuilder:
    """Builder whose first list takes until `go` is set; `made` are those built, in order."""

    def __init__(self) -> None:
        self.begun, self.go, self.made = threading.Event(), threading.Event(), list[str]()

    def __call__(self, bias: str, *_: Any) -> str:
        self.begun.set()
        assert self.go.wait(WAIT_S)
        self.made.append(bias)
        return bias


class StreamLists:
    def __init__(self, build: BlockingBuilder, call: Callable[[Callable[[], None]], None]) -> None:
        self.spelling = streams.StreamBiasingCompiler(build, lambda number, error: None)  # type: ignore[arg-type]
        self.spelling.attach(SimpleNamespace(call=call))  # type: ignore[arg-type]

    def add(self, number: int, bias: str) -> None:
        self.spelling.compile(number, SimpleNamespace(bias=bias, biasing=None))  # type: ignore[arg-type]

    @property
    def waiting(self) -> int:
        return len(self.spelling.waiting_streams)


class RequestLists:
    def __init__(self, build: BlockingBuilder, call: Callable[[Callable[[], None]], None]) -> None:
        self.spelling = biasing.BiasingQueue(lambda text: [1], lambda tokens: "", call, lambda ids, error: None)

    def add(self, number: int, bias: str) -> None:
        request = SimpleNamespace(id=number, options=SimpleNamespace(bias=bias, beam=1), hotwords=None)
        self.spelling.when_ready(request, lambda: None)  # type: ignore[arg-type]

    @property
    def waiting(self) -> int:
        return self.spelling.waiting


@pytest.mark.parametrize("kind", [StreamLists, RequestLists])
def test_lists_that_nobody_waits_for_are_not_built(kind, monkeypatch: pytest.MonkeyPatch):
    build, jobs = BlockingBuilder(), list[Callable[[], None]]()
    monkeypatch.setattr(biasing.RescoringList, "build", build)
    lists = kind(build, jobs.append)
    lists.add(0, "first")
    assert build.begun.wait(WAIT_S)
    threads = lists.spelling._lists._threads
    for number in range(1, 100):
        lists.add(number, f"left {number}")
        lists.spelling.cancel(number)
    lists.add(100, "shared")
    lists.add(101, "shared")
    lists.spelling.cancel(100)
    lists.add(102, "again")
    lists.spelling.cancel(102)
    lists.add(103, "again")
    lists.spelling.cancel(0)  # it is being made
    assert len(lists.spelling._lists) <= 3
    assert lists.waiting == 2
    build.go.set()
    threads[True].submit(int).result(WAIT_S)
    lists.spelling.close()
    for job in jobs:
        job()
    assert build.made == ["first", "shared", "again"]
    assert lists.waiting == 0


@pytest.mark.parametrize("kind", [StreamLists, RequestLists])
def test_a_long_list_keeps_no_short_one_waiting(kind, monkeypatch: pytest.MonkeyPatch):
    build, jobs, long = BlockingBuilder(), list[Callable[[], None]](), "long" * biasing_list_cache.SHORT_LIST_CHARACTERS

    def build_long(bias: str, *_: Any) -> str:
        return build(bias) if bias == long else bias

    monkeypatch.setattr(biasing.RescoringList, "build", build_long)
    lists = kind(build_long, jobs.append)
    lists.add(0, long)
    assert build.begun.wait(WAIT_S)
    lists.add(1, "short")
    lists.spelling._lists.get_or_build("short", str).result(WAIT_S)
    assert not build.made
    build.go.set()
    lists.spelling.close()
    for job in jobs:
        job()
    assert lists.waiting == 0


def test_the_cache_is_bounded_in_lists_and_characters():
    lists = biasing_list_cache.BiasingListCache[int]()
    for number in range(3 * biasing_list_cache.MAX_CACHED_LISTS):
        lists.get_or_build(f"{number}", int)
    assert len(lists) == biasing_list_cache.MAX_CACHED_LISTS
    large = biasing_list_cache.MAX_CACHED_CHARACTERS // 2
    first, _, last = (lists.get_or_build(letter * large, int) for letter in "abc")
    assert len(lists) == 2
    assert lists.characters <= biasing_list_cache.MAX_CACHED_CHARACTERS
    assert lists.get_or_build("c" * large, int) is last
    assert lists.get_or_build("a" * large, int) is not first, "it was let go"
    alone = lists.get_or_build("d" * (biasing_list_cache.MAX_CACHED_CHARACTERS + 1), int)
    assert lists.get_or_build("d" * (biasing_list_cache.MAX_CACHED_CHARACTERS + 1), int) is alone, (
        "the one that is asked for is kept"
    )
    assert len(lists) == 1
    lists.close()
