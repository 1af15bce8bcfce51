"""The list of long test files is today's, and what is listed comes first."""

from types import SimpleNamespace
from typing import Any

from file_order import LONGEST, TESTS, pytest_collection_modifyitems


def test_every_file_exists_once() -> None:
    assert [name for name in LONGEST if not (TESTS / name).is_file()] == []
    assert len(set(LONGEST)) == len(LONGEST)


def test_the_longest_come_first_and_the_others_stay_in_order() -> None:
    names = ["audio/test_a.py", LONGEST[1], "text/test_b.py", LONGEST[0], "audio/test_a.py"]
    items: list[Any] = [SimpleNamespace(path=TESTS / name, name=str(n)) for n, name in enumerate(names)]
    pytest_collection_modifyitems(items)
    assert [item.name for item in items] == ["3", "1", "0", "2", "4"]
