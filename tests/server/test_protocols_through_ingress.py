"""Each protocol through the ingress of a real Ray cluster: some of the tests of one server, again. All of them run with
`make test-cluster`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_server import VOICE, ClusterServer, IngressHost
from test_asr_route import test_the_answer_has_exactly_this_shape  # noqa: F401
from test_funasr_websocket import beckett_pcm, cities_pcm, test_sentences_are_locked_for_ever  # noqa: F401
from test_openai_realtime import ALIASES, speech, test_turns_are_items  # noqa: F401
from test_openai_transcriptions import (  # noqa: F401
    long_text,
    long_wav,
    test_many_clients_get_their_own,
    test_stream,
    test_text_comes_while_the_upload_goes_on,
    test_verbose_json,
)
from test_speech_routes import test_events  # noqa: F401
from test_speech_socket import test_tokens_are_spoken_as_they_come  # noqa: F401
from test_stream_resume import pcm, test_missed_events_are_told_at_once_and_the_text_goes_on_meanwhile  # noqa: F401
from test_stream_transports import test_curl_sends_and_reads_at_once, test_words_come_while_they_are_spoken, transport  # noqa: F401

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared_server(ingress_host: IngressHost) -> Iterator[ClusterServer]:
    running = ingress_host.ingress(aliases=ALIASES)
    yield running
    running.stop()


@pytest.fixture
def server(shared_server: ClusterServer) -> Iterator[ClusterServer]:
    """An ingress in front of two replicas. Whatever a test does, nothing of it is left."""
    yield shared_server
    shared_server.expect_empty()


@pytest.fixture
def speaker(ingress_host: IngressHost) -> Iterator[ClusterServer]:
    """An ingress that speaks."""
    running = ingress_host.ingress(voice=VOICE)
    yield running
    running.expect_empty()
    running.stop()
