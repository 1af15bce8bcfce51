"""Garbage collection of serving processes, each measured in a process of its own: it is a setting of a process."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import gc, json, weakref
from asr_serve.garbage_collection import YOUNG_OBJECTS, exclude_loaded_objects

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

before = cycle()
loaded = [Node() for _ in range(1_000)]
exclude_loaded_objects()
visited = {id(each) for each in gc.get_objects()}
young = cycle()
nodes = []
for _ in range(2 * YOUNG_OBJECTS):
    nodes.append(Node())
by_itself = young() is None
print(json.dumps({
    "garbage_before": before() is not None,
    "loaded_visited": sum(id(node) in visited for node in loaded),
    "collected_by_itself": by_itself,
    "enabled": gc.isenabled(),
}))
"""


def test_loaded_objects_are_excluded_and_later_garbage_is_collected() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == {
        "garbage_before": False,
        "loaded_visited": 0,
        "collected_by_itself": True,
        "enabled": True,
    }
