"""Which cases of a parametrised test every run has, and which `make test-all` alone; and how long names may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

REPEATS = "repeats"
"""Marker of a test: its cases with all of these parameters (or values of fixtures that have some) show again what
other cases show. They are `exhaustive`: `@pytest.mark.repeats(model="whisper-tiny-en", vad=True)`."""


MAX_ID = 1_000
"""Characters of a test's id. Every process of a run tells each id to the others, several times: one parameter of
megabytes whose id was its text took all memory of a machine."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if len(item.nodeid) > MAX_ID:
        raise pytest.UsageError(f"{item.nodeid[:100]}...: an id of {len(item.nodeid)} characters; give its cases `ids`")
    callspec = getattr(item, "callspec", None)
    chosen = callspec.params if callspec is not None else {}
    for mark in item.iter_markers(REPEATS):
        unknown = sorted(set(mark.kwargs) - set(chosen))
        if unknown or not mark.kwargs:
            raise pytest.UsageError(f"{item.nodeid}: repeats names {unknown}; its parameters are {sorted(chosen)}")
        if all(_is_case(chosen[name], value) for name, value in mark.kwargs.items()):
            item.add_marker(pytest.mark.exhaustive)


def _is_case(value: object, wanted: object) -> bool:
    """Returns whether a parameter is the wanted one, or one of a set of them."""
    if isinstance(wanted, set):
        return any(_is_case(value, each) for each in wanted)
    return type(value) is type(wanted) and value == wanted


def exhaustive_after(count: int, cases: Iterable[Any]) -> list[Any]:
    """Cases for `parametrize`: the first `count` as they are, the others with the marker `exhaustive`.

    For cases that show one behaviour again (seeds, languages, formats): those that differ in kind come first.
    """
    marked = []
    for number, case in enumerate(cases):
        values, marks = (case.values, list(case.marks)) if hasattr(case, "marks") else ((case,), [])
        if not hasattr(case, "marks") and isinstance(case, tuple):
            values = case
        if number >= count:
            marks.append(pytest.mark.exhaustive)
        marked.append(pytest.param(*values, marks=marks, id=getattr(case, "id", None)))
    return marked
