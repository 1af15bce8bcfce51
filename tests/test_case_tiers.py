"""Cases that show a behaviour again are exhaustive: those after the first of a list, and those that `repeats` names."""

from types import SimpleNamespace
from typing import Any

import pytest
from case_tiers import exhaustive_after, pytest_itemcollected


def is_exhaustive(marks: list[pytest.MarkDecorator], **chosen: object) -> bool:
    added: list[Any] = []
    item: Any = SimpleNamespace(
        nodeid="test_some.py::test_some",
        callspec=SimpleNamespace(params=chosen),
        iter_markers=lambda name: [each.mark for each in marks if each.mark.name == name],
        add_marker=added.append,
    )
    pytest_itemcollected(item)
    return [each.name for each in added] == ["exhaustive"]


def test_the_first_cases_stay() -> None:
    made = exhaustive_after(1, [(1, "a"), pytest.param(2, "b", marks=pytest.mark.slow), (3, "c")])
    assert [(each.values, [mark.name for mark in each.marks]) for each in made] == [
        ((1, "a"), []),
        ((2, "b"), ["slow", "exhaustive"]),
        ((3, "c"), ["exhaustive"]),
    ]


@pytest.mark.parametrize(
    ("model", "beam", "expected"),
    [("whisper", 1, True), ("whisper", 3, False), ("moonshine", 1, False), ("moonshine", True, False)],
)
def test_all_that_is_named_must_be_so(model: str, beam: int, expected: bool) -> None:
    assert is_exhaustive([pytest.mark.repeats(model="whisper", beam=1)], model=model, beam=beam) == expected


def test_any_of_a_set_and_any_of_several_marks() -> None:
    marks = [pytest.mark.repeats(kind={"a", "b"}), pytest.mark.repeats(kind="d")]
    assert [is_exhaustive(marks, kind=kind) for kind in "abcd"] == [True, True, False, True]
    assert not is_exhaustive([], kind="a")


@pytest.mark.parametrize("mark", [pytest.mark.repeats(modle="whisper"), pytest.mark.repeats()])
def test_a_parameter_that_there_is_not_is_told(mark: pytest.MarkDecorator) -> None:
    with pytest.raises(pytest.UsageError, match=r"test_some.*its parameters are \['model'\]"):
        is_exhaustive([mark], model="whisper")
