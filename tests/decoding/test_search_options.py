"""Options of one recognition: what callers may pass, and what the engine gets."""

from __future__ import annotations

from asr_serve.decoding.search_options import SearchOptions


def test_temperatures_in_a_list_are_those_in_a_tuple() -> None:
    """The library takes either; the engine's caches hash the options."""
    options = SearchOptions(temperatures=[0.0, 0.4])  # type: ignore[arg-type]
    assert options == SearchOptions(temperatures=(0.0, 0.4))
    assert hash(options) == hash(SearchOptions(temperatures=(0.0, 0.4)))
