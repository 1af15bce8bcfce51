"""A live session that moves, as data, to another session: its words are those of one that stayed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from live_client import RATE_HZ, LiveClient, packets, run_session
from loaded_models import expect_idle, load_model
from streaming_tokens import FakeClient, ScriptedSession, run_script, script

from asr_serve.api.library import Model
from asr_serve.audio.audio_buffers import AudioHistory
from asr_serve.config import EngineConfig
from asr_serve.pipelines.live.events import TurnEvent
from asr_serve.pipelines.live.live_session import LiveSession
from asr_serve.pipelines.live.session_state import LiveSessionState, SavedLiveSession
from asr_serve.pipelines.live.streaming_recognizer import StreamingRecognizer
from asr_serve.pipelines.options import ListenOptions


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """Its loop reports the state of voice activity, as a server's does, for a cache that has room for nothing."""
    with load_model(engine=EngineConfig(prefix_bytes=4_096)) as model:
        yield model
        expect_idle(model._client)


def move(client: LiveClient, model: Model, **options: object) -> bool:
    """Puts another session, made of what was written down, in the place of the client's. False: not now."""
    old = client.session
    state = old.export_state()
    if state is None:
        return False
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=LiveSessionState)
    start, pcm = old.received_audio(state.audio_from)
    assert start == state.audio_from
    saved = SavedLiveSession(state, pcm.copy())
    received = old.received_samples
    old.close()
    client.session = LiveSession(
        model._client, model.tokenizer, ListenOptions.of(options), client.changed.set, saved=saved
    )
    assert client.session.received_samples == received
    client.changed.set()
    return True


def run_moving(model: Model, pcm: np.ndarray, seed: int, **options: object) -> tuple[LiveClient, int]:
    chance, moves = random.Random(seed), 0
    with LiveClient(model, **options) as client:
        for number, packet in enumerate(packets(pcm, (3_200, 800, 8_000))):
            client.write(packet)
            if number % 5 == 4:
                client.settle()
            if chance.random() < 0.3:
                moves += move(client, model, **options)
                client.advance()
        client.session.finish()
        client.advance()
        moves += move(client, model, **options)
        while client.finished is None:
            client.advance()
            if client.finished is None:
                client.answer()
    return client, moves


def timed_words(client: LiveClient) -> list[tuple[str, int, int]]:
    return [(w.text, w.start_samples, w.end_samples) for segment in client.segments for w in segment.words]


def turn_key(turn: TurnEvent) -> tuple[int, str]:
    return turn.position_samples, turn.state


@pytest.mark.parametrize("options", [{}, {"words": True, "max_segment_ms": 5_000}], ids=str)
def test_words_of_a_session_that_moves(
    model: Model, beckett: np.ndarray, cities: np.ndarray, options: dict[str, object]
):
    talk = np.concatenate([beckett[: 4 * RATE_HZ], np.zeros(2 * RATE_HZ, np.float32), cities[: 7 * RATE_HZ]])
    stays = run_session(model, talk, **options)
    moves, count = run_moving(model, talk, 1, **options)
    assert count > 5
    assert moves.spans == stays.spans
    assert timed_words(moves) == timed_words(stays)
    # "ended" waits for a segment's text, and comes before or after the next "started".
    assert sorted(moves.turns, key=turn_key) == sorted(stays.turns, key=turn_key)


@pytest.mark.parametrize("seed", range(6))
def test_words_of_a_streaming_session_that_moves(seed: int):
    chance = random.Random(seed)
    content = script((6.0, 1.0), (9.0, 0.5), (3.0, 2.5), (7.0, 0.1), chance=chance)
    words = seed % 2 == 0
    options = {"words": words, "max_segment_ms": 4_000}
    stays = run_script(FakeClient(random.Random(seed)), content, [1_600], **options)
    client = FakeClient(random.Random(seed), held=2)
    moves = 0
    with ScriptedSession(client, content, **options) as session:
        for packet in packets(content.pcm, [1_600, 480]):
            session.write(packet)
            for _ in range(chance.randint(0, 4)):
                if client.work():
                    session.advance()
            if chance.random() < 0.2:
                moves += move(session, session, **options)  # type: ignore[arg-type]
                session.advance()
        session.finish()
    assert not client.streams | client.sessions
    assert moves > 3
    assert session.segments == stays.segments


@pytest.mark.parametrize("resolved", [False, True])
def test_the_state_after_a_segment_of_a_shared_stream_was_withdrawn(resolved: bool):
    recognizer = StreamingRecognizer(FakeClient(random.Random(0)), lambda _: "", AudioHistory(), 0, False, lambda: None)
    first = recognizer.open_segment(0, False, None)
    first.end = first.decided_samples = RATE_HZ
    second = recognizer.open_segment(RATE_HZ, False, first)
    first.stream.finished = resolved
    first.resolve_end()
    assert second.start_resolved is resolved
    recognizer.discard(second)
    [state] = recognizer.export_segments([first]).streamed
    assert state.after is None


def test_a_state_that_does_not_fit_leaves_nothing_open(model: Model):
    with LiveClient(model) as client:
        client.write(np.zeros(RATE_HZ, np.float32))
        client.settle()
        state = client.session.export_state()
        assert state is not None
        _, pcm = client.session.received_audio(state.audio_from)
        saved = SavedLiveSession(msgspec.structs.replace(state, endpointer=None), pcm)
        before = model._client.describe()["sessions"]
        with pytest.raises(ValueError, match="does not fit"):
            LiveSession(model._client, model.tokenizer, ListenOptions(), client.changed.set, saved=saved)
        assert model._client.describe()["sessions"] == before
