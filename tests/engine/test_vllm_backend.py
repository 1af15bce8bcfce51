"""The back end vllm with vLLM itself, on the CPU: the same answers as our decoder for the same weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_clients import wait_until
from other_environments import python_of
from tiny_language_models import FAMILIES, TinyFamilySpeechLlm
from tiny_speech_llm import CARD, CLIPS, LANGUAGES, encode, text

from asr_serve import devices
from asr_serve.config import EngineConfig
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.builder import EngineComponents
from asr_serve.engine.client import EngineClient
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.engine.vllm.executor import VllmExecutor
from asr_serve.errors import Cancelled
from asr_serve.metrics import EngineMetrics
from asr_serve.models.auxiliary import silero
from asr_serve.types import LanguageModelBackend

WAIT_S = 240.0
"""Longer than anything here takes: vLLM starts in half a minute, in two where others use the cores."""
ONCE: dict[str, Any] = {"temperatures": (0.0,), "min_avg_logprob": -1e9, "max_compression_ratio": 1e9}
WANTED = [
    (i, SearchOptions(language=code, prompt=prompt, **ONCE))
    for i in range(len(CLIPS))
    for code in LANGUAGES
    for prompt in ((), (5, 6, 7))
]


def vllm_python() -> Path:
    if chosen := os.environ.get("ASR_SERVE_VLLM_PYTHON"):
        return Path(chosen)
    return python_of(".venv-vllm", "no vLLM here: make vllm, or set ASR_SERVE_VLLM_PYTHON")


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """Before any engine is built."""
    vllm_python()


def build(family: str, backend: LanguageModelBackend) -> EngineComponents:
    device = devices.make_device("cpu", "fp32")
    device.language_models = backend == "native"
    return EngineComponents(TinyFamilySpeechLlm(family, device), silero.load(), device, text, encode_text=encode)


def start(family: str, backend: LanguageModelBackend) -> EngineClient:
    own = {"vllm_python": str(vllm_python())} if backend == "vllm" else {}
    config = EngineConfig(backend=backend, max_decode_rows=16, kv_bytes=16 << 20, max_sessions=2, prefix_bytes=0, **own)
    return EngineClient(config, thread_backend(CARD, partial(build, family, backend)))


@pytest.fixture(scope="module")
def one_thread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The models are tiny: threads would only wait for each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASR_SERVE_THREADS", "1")
        patch.setenv("ASR_SERVE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def client(one_thread: None) -> Iterator[EngineClient]:
    client = start("qwen3", "vllm")
    yield client
    pid = executor_of(client).worker.process.pid
    client.close()
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def executor_of(client: EngineClient) -> VllmExecutor:
    executor: VllmExecutor = client.backend.loop.executor  # type: ignore[attr-defined]
    return executor


def answers(client: EngineClient) -> list[Recognition]:
    tickets = [client.submit(CLIPS[i], options) for i, options in WANTED]
    return [ticket.future.result(WAIT_S) for ticket in tickets]


def expect_equal(found: list[Recognition], wanted: list[Recognition]) -> None:
    for ours, native in zip(found, wanted, strict=True):
        assert (ours.tokens, ours.finish, ours.language) == (native.tokens, native.finish, native.language)
        assert ours.logprobs == pytest.approx(native.logprobs, abs=1e-3)
        assert ours.avg_logprob == pytest.approx(native.avg_logprob, abs=1e-4)


def native_answers(family: str) -> list[Recognition]:
    client = start(family, "native")
    try:
        return answers(client)
    finally:
        client.close()


def test_a_batch_has_the_answers_of_our_decoder(client: EngineClient) -> None:
    wanted = native_answers("qwen3")
    assert len({answer.tokens for answer in wanted}) > len(wanted) // 2
    expect_equal(answers(client), wanted)
    expect_equal(answers(client), wanted)  # what vLLM caches of prompts changes nothing
    counters = executor_of(client).report()
    assert (counters["waiting"], counters["decoding"], counters["pages_used"]) == (0, 0, 0)
    assert counters["pages"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3"])
def test_other_families_have_the_answers_of_our_decoder(family: str, one_thread: None) -> None:
    wanted = native_answers(family)
    client = start(family, "vllm")
    try:
        expect_equal(answers(client), wanted)
    finally:
        client.close()


def test_penalties_count_tokens_of_the_answer(client: EngineClient, one_thread: None) -> None:
    wanted = [(i, SearchOptions(repetition_penalty=1.8, prefix=p, **ONCE)) for i in range(4) for p in ((), (5, 6))]
    native = start("qwen3", "native")
    try:
        tickets = [[each.submit(CLIPS[i], options) for i, options in wanted] for each in (client, native)]
        ours, theirs = ([ticket.future.result(WAIT_S).tokens for ticket in each] for each in tickets)
    finally:
        native.close()
    assert ours == theirs
    plain = [client.submit(CLIPS[i], SearchOptions(**ONCE)).future.result(WAIT_S).tokens for i in range(4)]
    assert ours[::2] != plain


def test_sampled_tries_follow_a_greedy_one(client: EngineClient) -> None:
    hard = SearchOptions(temperatures=(0.0, 0.8), min_avg_logprob=-1e-3, seed=3)
    before = client.describe()["fallbacks"]
    first, second = (client.submit(CLIPS[0], hard).future.result(WAIT_S) for _ in range(2))
    assert first.tokens == second.tokens
    assert client.describe()["fallbacks"] == before + 2


def test_cancelled_requests_leave_the_others_as_they_were(client: EngineClient) -> None:
    options = SearchOptions(**ONCE)
    wanted = client.submit(CLIPS[0], options).future.result(WAIT_S).tokens
    tickets = [client.submit(CLIPS[0], options) for _ in range(16)]
    for ticket in tickets[::2]:
        client.cancel(ticket)
    for ticket in tickets[1::2]:
        assert ticket.future.result(WAIT_S).tokens == wanted
    for ticket in tickets[::2]:
        assert isinstance(ticket.future.exception(WAIT_S), Cancelled | None)
    wait_until(lambda: not executor_of(client)._rows_by_number)


def test_steps_are_measured(client: EngineClient) -> None:
    loop = client.backend.loop  # type: ignore[attr-defined]
    metrics = loop.stats.metrics = EngineMetrics("tiny")
    client.submit(CLIPS[0], SearchOptions(**ONCE)).future.result(WAIT_S)
    shown = metrics.render().decode()
    assert 'asr_serve_step_seconds_count{model="tiny",stage="decode"} 0.0' not in shown
    assert 'asr_serve_step_seconds_count{model="tiny",stage="encode"} 1.0' in shown
    loop.stats.metrics = None


def test_a_killed_vllm_is_replaced(client: EngineClient) -> None:
    options = SearchOptions(**ONCE)
    wanted = client.submit(CLIPS[5], options).future.result(WAIT_S).tokens
    worker = executor_of(client).worker
    os.kill(worker.process.pid, signal.SIGSTOP)  # so that it cannot answer before it dies
    ticket = client.submit(CLIPS[5], options)
    wait_until(lambda: executor_of(client)._rows_by_number)
    os.kill(worker.process.pid, signal.SIGKILL)
    assert ticket.future.result(WAIT_S).tokens == wanted
    assert client.describe()["backend_restarts"] == 1
