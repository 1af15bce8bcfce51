"""Protocols of a server whose model has two replicas, as behind the ingress of a cluster: tests of one, again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from running_server import MODEL, Running, eventually
from test_funasr_websocket import (  # noqa: F401
    beckett_pcm,
    cities_pcm,
    test_offline_is_what_post_asr_answers,
    test_sentences_are_locked_for_ever,
)
from test_openai_realtime import ALIASES, speech, test_turns_are_items  # noqa: F401
from test_openai_transcriptions import (  # noqa: F401
    long_text,
    long_wav,
    test_a_client_that_leaves_stops_the_work,
    test_many_clients_get_their_own,
    test_stream,
    test_text_comes_while_the_upload_goes_on,
    test_verbose_json,
)
from test_stream_resume import pcm, test_missed_events_are_told_at_once_and_the_text_goes_on_meanwhile  # noqa: F401
from test_stream_transports import (  # noqa: F401
    test_curl_sends_and_reads_at_once,
    test_who_asks_for_100_is_told_to_continue_before_the_response,
    test_words_come_while_they_are_spoken,
    transport,
)

from asr_serve.config import EngineConfig, ServeConfig
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process.backend import ProcessBackend, process_backend
from asr_serve.engine.process.engine_process import RingSize
from asr_serve.engine.process.messages import ListenSpec
from asr_serve.engine.replicas.backend import ReplicatedBackend, replicated_backend
from asr_serve.server.engine_registry import EngineParts, engine_parts, engine_spec

pytestmark = pytest.mark.slow
KEY = b"a key of these tests"


class Settings(NamedTuple):
    key: bytes = KEY
    digest_key: bytes = KEY
    ring: RingSize = RingSize()
    silent_s: float = 60.0


class Replicas:
    """Two engine processes, as a directory."""

    def __init__(self, folder: Path) -> None:
        config = ServeConfig(engine_threads=1, engine=EngineConfig(prefix_bytes=0, quantize="none"))
        spec = msgspec.structs.replace(engine_spec(MODEL, config), servers=ListenSpec(str(folder), None, KEY))
        self.owners = [EngineClient(config.engine, process_backend(spec, RingSize(2, 64))) for _ in range(2)]

    def start(self, backend: ReplicatedBackend) -> None:
        for number, owner in enumerate(self.owners):
            assert isinstance(owner.backend, ProcessBackend)
            assert owner.backend.address is not None
            backend.connect(str(number), owner.backend.address, same_machine=True)

    def close(self) -> None:
        """Does nothing: its maker ends the processes."""


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    replicas = Replicas(tmp_path_factory.mktemp("sockets"))
    client = EngineClient(EngineConfig(prefix_bytes=0), replicated_backend(replicas, Settings()))
    backend = client.backend
    assert isinstance(backend, ReplicatedBackend)
    eventually(lambda: len(backend.loads) == 2)
    parts: EngineParts = engine_parts(client, backend.ready, Path(backend.ready.tokenizer_folder))
    running = Running(ServeConfig(voice="none", aliases=ALIASES), lambda name, config: parts)
    yield running
    running.stop()
    client.close()
    for owner in replicas.owners:
        owner.close()


@pytest.fixture
def server(shared_server: Running) -> Iterator[Running]:
    """A server of two replicas. Whatever a test does, nothing of it is left."""
    yield shared_server
    shared_server.expect_empty()
