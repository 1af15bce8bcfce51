"""Garbage collection of processes that serve requests."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000
"""Containers allocated, less those freed, between two collections of the youngest. Python's own is 700."""


def exclude_loaded_objects() -> None:
    """Excludes all objects that exist from garbage collection, and has the rest collected less often. For a process
    that has loaded what it serves with, and keeps that until its end: modules and models are most of its objects, and
    each full collection visits them while no other thread of Python runs."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
