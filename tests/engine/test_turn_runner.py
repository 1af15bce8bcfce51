"""Questions to a turn model, over both connections to the engine."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from engine_clients import backend_of, engine_pid, start_engine
from tiny_moonshine import CARD, WAIT_S, build, clip, save, start

from asr_serve.config import EngineConfig
from asr_serve.engine import turn_runner
from asr_serve.engine.client import MAX_TURN_REQUESTS, EngineClient
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.errors import (
    AtCapacity,
    EmptyAudio,
    EngineClosed,
    ModelNotLoaded,
    StepFailed,
    UnknownModel,
    UnsupportedAudio,
    WeightsCorrupt,
    WeightsMissing,
)
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import turn_card

CONFIG = EngineConfig(max_decode_rows=8, kv_bytes=1 << 20, max_sessions=6)
SPEECH = clip(3, 16_000 * 9)
Begin = Callable[..., EngineClient]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pipecat") is None, reason="pip install --no-deps pipecat-ai==1.14.0"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def begin(checkpoint: Path) -> Iterator[Begin]:
    """Starts engines, `thread` or `process`, and closes them."""
    started: list[EngineClient] = []

    def start(backend: str, turn_model: str = "smart-turn") -> EngineClient:
        if backend == "process":
            client = start_engine(
                "moonshine-tiny-en", checkpoint, CONFIG, process=True, threads=None, turn_model=turn_model
            )
        else:
            client = EngineClient(CONFIG, thread_backend(CARD, build, turn_runner.load_turn_model(turn_model)))
        started.append(client)
        return client

    yield start
    for client in started:
        client.close()
        assert client._turns.waiting == 0, "somebody still waits"


@pytest.fixture(scope="module")
def model() -> turn_runner.LoadedTurnModel:
    loaded = turn_runner.load_turn_model("smart-turn")
    assert loaded is not None
    return loaded


@pytest.fixture(params=["thread", pytest.param("process", marks=pytest.mark.slow)])
def client(request: pytest.FixtureRequest, begin: Begin) -> EngineClient:
    return begin(request.param)


def send_signal(client: EngineClient, number: int) -> None:
    os.kill(engine_pid(client), number)


def outcome(answer: Future[float]) -> object:
    error = answer.exception(WAIT_S)
    return answer.result() if error is None else type(error)


def test_an_engine_gives_the_models_own_answers(client: EngineClient, model: turn_runner.LoadedTurnModel) -> None:
    assert client.turn_model == "smart-turn"
    clips = [SPEECH[:1], SPEECH[:5_000], SPEECH[:128_000], SPEECH[:128_001], SPEECH, np.zeros(16_000, np.float32)]
    answers = [client.predict_turn_end(pcm) for pcm in clips]
    assert [answer.result(WAIT_S) for answer in answers] == [model.model.finished(pcm) for pcm in clips]
    assert client.describe()["turn_s"] > 0


def test_invalid_audio_is_refused_at_once(client: EngineClient) -> None:
    with pytest.raises(EmptyAudio, match="one sample or more"):
        client.predict_turn_end(SPEECH[:0])
    nan = SPEECH.copy()
    nan[7] = np.nan
    for pcm in (nan, SPEECH.astype(np.float64), SPEECH[None], np.full(9, np.inf, np.float32)):
        with pytest.raises(UnsupportedAudio, match="one row of finite float32 samples"):
            client.predict_turn_end(pcm)


async def test_a_task_that_waits_may_be_cancelled(client: EngineClient) -> None:
    answer = client.predict_turn_end(SPEECH)
    waiting = asyncio.wrap_future(answer)
    await asyncio.sleep(0)
    waiting.cancel()
    assert not answer.cancel()
    assert 0 <= await asyncio.wrap_future(answer) <= 1


@pytest.mark.slow
def test_more_than_a_second_of_requests_is_refused(client: EngineClient) -> None:
    answers: list[Future[float]] = []

    def submit_until_full() -> None:
        while len(answers) < 10 * MAX_TURN_REQUESTS:
            answers.append(client.predict_turn_end(SPEECH))

    with pytest.raises(AtCapacity, match=f"up to {MAX_TURN_REQUESTS}") as full:
        submit_until_full()
    assert full.value.retry_after_ms > 0
    assert len(answers) >= MAX_TURN_REQUESTS
    assert {type(answer.result(WAIT_S)) for answer in answers} == {float}
    assert 0 <= client.predict_turn_end(SPEECH).result(WAIT_S) <= 1


def test_closing_the_client_ends_every_request(client: EngineClient) -> None:
    answers = [client.predict_turn_end(SPEECH) for _ in range(MAX_TURN_REQUESTS)]
    client.close()
    outcomes = [outcome(answer) for answer in answers]
    assert outcomes[-1] is EngineClosed
    assert {type(each) for each in outcomes} <= {float, type}
    with pytest.raises(EngineClosed):
        client.predict_turn_end(SPEECH)
    assert client._turns.waiting == 0


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_without_a_turn_model(begin: Begin, backend: str) -> None:
    client = begin(backend, "none")
    assert client.turn_model is None
    with pytest.raises(ModelNotLoaded, match="turn_model='smart-turn'"):
        client.predict_turn_end(SPEECH)


def test_the_engine_loop_does_not_wait_for_the_turn_model(begin: Begin) -> None:
    client = begin("thread")
    model, entered, leave = client.backend._turns._model, threading.Event(), threading.Event()

    def slow(pcm: np.ndarray) -> float:
        entered.set()
        assert leave.wait(WAIT_S)
        return model.finished(pcm)

    client.backend._turns._model = SimpleNamespace(finished=slow)
    answer = client.predict_turn_end(SPEECH)
    assert entered.wait(WAIT_S)
    try:
        client.submit(SPEECH[:16_000]).future.result(WAIT_S)
        assert not answer.done()
    finally:
        leave.set()
    assert answer.result(WAIT_S) == model.finished(SPEECH)


def test_a_failed_turn_model_fails_its_own_request(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    client = begin("thread")
    model = client.backend._turns._model

    def broken(pcm: np.ndarray) -> float:
        raise ValueError("no such shape")

    client.backend._turns._model = SimpleNamespace(finished=broken)
    with pytest.raises(StepFailed, match="the turn model failed: ValueError: no such shape"):
        client.predict_turn_end(SPEECH).result(WAIT_S)
    assert "a turn model's step failed" in caplog.text
    client.backend._turns._model = model
    assert 0 <= client.predict_turn_end(SPEECH).result(WAIT_S) <= 1


@pytest.mark.slow
def test_a_killed_process_fails_its_turn_requests_and_the_next_one_answers(
    begin: Begin, model: turn_runner.LoadedTurnModel
) -> None:
    client = begin("process")
    send_signal(client, signal.SIGSTOP)
    answers = [
        client.predict_turn_end(SPEECH) for _ in range(MAX_TURN_REQUESTS // 12)
    ]  # what the ring holds, for it reads no more
    send_signal(client, signal.SIGKILL)
    assert {outcome(answer) for answer in answers} == {StepFailed}
    while client.state != "restarting" and backend_of(client).restarts == 0:
        threading.Event().wait(0.001)
    if client.state == "restarting":
        with pytest.raises(StepFailed, match="is being started again"):
            client.predict_turn_end(SPEECH).result(WAIT_S)
    client.submit(SPEECH[:16_000]).future.result(WAIT_S)  # waits for it, unlike a question
    assert client.predict_turn_end(SPEECH).result(WAIT_S) == model.model.finished(SPEECH)
    assert backend_of(client).restarts == 1


# --- which model --------------------------------------------------------------------------------------------


def test_auto_loads_an_installed_turn_model(begin: Begin) -> None:
    assert begin("thread", "auto").turn_model == "smart-turn"


@pytest.fixture
def absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Neither package nor cache has it; returns where the cache would."""
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "package_folder", lambda _: None)
    return tmp_path / "smart-turn"


def test_a_missing_turn_model_is_an_error_only_by_name(absent: Path) -> None:
    assert turn_runner.load_turn_model("auto") is None
    assert turn_runner.load_turn_model("none") is None
    with pytest.raises(WeightsMissing, match="pip install --no-deps pipecat-ai"):
        turn_runner.load_turn_model("smart-turn")
    with pytest.raises(UnknownModel, match="no turn model 'smarter'"):
        turn_runner.load_turn_model("smarter")


def test_a_corrupt_turn_model_is_an_error_only_by_name(absent: Path, caplog: pytest.LogCaptureFixture) -> None:
    absent.mkdir()
    for name in turn_card("smart-turn").packaged.sha256:
        (absent / name).write_bytes(b"no graph")
    assert turn_runner.load_turn_model("auto") is None
    assert "the turn model smart-turn is not used" in caplog.text
    with pytest.raises(WeightsCorrupt):
        turn_runner.load_turn_model("smart-turn")


def test_an_unknown_turn_model_stops_the_start_of_a_process(begin: Begin) -> None:
    with pytest.raises(UnknownModel, match=r"no turn model 'smarter'.*smart-turn"):
        begin("process", "smarter")


def test_an_engine_has_no_turn_model_by_default(model: turn_runner.LoadedTurnModel) -> None:
    client = start()
    assert client.turn_model is None
    client.close()
