"""What a connection to a server keeps of the audio that came over it."""

from __future__ import annotations

import gc
import queue
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asr_serve.audio.endpointing import WINDOW_SAMPLES
from asr_serve.decoding.search_options import NO_DRAFT, SearchOptions
from asr_serve.engine.process import messages
from asr_serve.engine.process.server_link import ServerLink
from asr_serve.engine.request import VadAnswer
from asr_serve.errors import Cancelled

MESSAGES = {
    "voice activity": messages.AppendVadAudio(7, 0, WINDOW_SAMPLES),
    "the end of a stream": messages.AppendStreamAudio(7, 0, WINDOW_SAMPLES, True, None),
    "an utterance": messages.SubmitUtterance(
        7, WINDOW_SAMPLES, WINDOW_SAMPLES, SearchOptions(), "live", NO_DRAFT, None, 0
    ),
}


class Samples:
    """Source of samples that remembers, weakly, what it gave."""

    def __init__(self) -> None:
        self.given: list[weakref.ref[np.ndarray]] = []

    def read_message(self, session: int, samples: int) -> np.ndarray:
        pcm = np.zeros(samples, np.float32)
        self.given.append(weakref.ref(pcm))
        return pcm

    def close(self) -> None: ...


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(("what", "failed"), [("voice activity", False), *((what, True) for what in MESSAGES)])
def test_audio_is_freed_with_its_answer(what: str, failed: bool, no_garbage_collection: None) -> None:
    """Without the garbage collector, which an engine runs seldom: audio of hundreds of chunks was in memory at once."""
    ours, server = Pipe()
    samples, taken = Samples(), []
    link = ServerLink(ours, samples, 0, "test")
    take: Callable[[Any], None] = taken.append
    loop = SimpleNamespace(
        inbox=queue.SimpleQueue(),
        uses_digests=False,
        vad_scheduler=SimpleNamespace(enqueue=take),
        streams=SimpleNamespace(append_audio=take),
        executor=SimpleNamespace(submit=take),
    )
    facts: Any = SimpleNamespace(loop=loop, places=SimpleNamespace(discard=lambda number: None))
    server.send_bytes(messages.encode(MESSAGES[what]))
    server.close()
    link.read_messages(facts)  # up to the end of the connection
    while not loop.inbox.empty():
        job = loop.inbox.get()
        if job.__name__ != "stop":
            job(loop)
    del job
    (request,) = taken
    taken.clear()
    assert samples.given[0]() is request.pcm
    if isinstance(request.future, VadAnswer) and not failed:
        request.future.state = b"state"
        request.future.set_result(np.zeros(1, np.float32))
    else:
        request.future.set_exception(Cancelled("it was closed"))
    del request
    assert samples.given[0]() is None
    link.close()
