"""Which cases of a parametrised test every run has, and which `make test-all` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


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
