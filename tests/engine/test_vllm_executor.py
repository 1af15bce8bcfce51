"""The back end vllm with a worker that speaks its protocol and has no vLLM: answers, cancelling, faults, restarts."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fun_asr_folders
import msgspec
import numpy as np
import pytest
import torch
from engine_clients import WAIT_S, wait_until
from simulated_vllm import EOS, KILLED, REFUSED, SILENT, SLOW, answer, interpreter
from tiny_moonshine import outcome
from tiny_speech_llm import CARD, CLIPS, LANGUAGES, STOP, TinySpeechLlm, decoder, encode, limit, text

from asr_serve import devices
from asr_serve.config import EngineConfig
from asr_serve.decoding.biasing_graph import BiasingPhrase, pack_phrases
from asr_serve.decoding.search_options import DraftTokens, SearchOptions
from asr_serve.engine.builder import AsrCheckpoint, EngineComponents, find_checkpoint
from asr_serve.engine.client import EngineClient
from asr_serve.engine.seq2seq.ctc_token_aligner import CtcTokenAligner
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.engine.vllm import executor as vllm_executor
from asr_serve.engine.vllm import worker_main
from asr_serve.engine.vllm.worker_main import receive_frame, send_frame
from asr_serve.errors import (
    Cancelled,
    EngineClosed,
    EngineCrashed,
    OptionError,
    ProgramFailed,
    ProgramMissing,
    StepFailed,
    UnsupportedOption,
)
from asr_serve.models.auxiliary import silero
from asr_serve.models.interfaces import PROMPT_EMBEDDING

ONCE: dict[str, Any] = {"temperatures": (0.0,), "min_avg_logprob": -1e9, "max_compression_ratio": 1e9}
Begin = Callable[..., EngineClient]


def build() -> EngineComponents:
    device = devices.make_device("cpu", "fp32")
    device.language_models = False
    return EngineComponents(TinySpeechLlm(device), silero.load(), device, text, encode_text=encode)


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, close_later: Any) -> Begin:
    """Starts engines whose worker has the faults given, and closes them."""
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path / "cache"))

    def start(*faults: str, **settings: Any) -> EngineClient:
        python = settings.pop("vllm_python", None) or interpreter(tmp_path, *faults)
        given = {"max_decode_rows": 8, "max_sessions": 2, "prefix_bytes": 0, **settings}
        config = EngineConfig(backend="vllm", vllm_python=python, **given)
        client: EngineClient = close_later(EngineClient(config, thread_backend(CARD, build)))
        return client

    return start


def executor_of(client: EngineClient) -> vllm_executor.VllmExecutor:
    executor: vllm_executor.VllmExecutor = client.backend.loop.executor  # type: ignore[attr-defined]
    return executor


def expected(index: int, options: SearchOptions, given: tuple[int, ...] = ()) -> tuple[tuple[int, ...], str]:
    """Tokens and finish by the worker's arithmetic."""
    alone = decoder(index, options.language, options.prompt)
    most = limit(index, options)
    given = given[: most - 1]
    frames = int(np.frombuffer(alone.frames.numpy().tobytes(), np.uint8).sum())
    following = answer([*alone.prompt, *given], frames, options.seed)
    made = [*given, *following[: most - len(given)]]
    return (tuple(made[:-1]), "stop") if made[-1] in (EOS, STOP) else (tuple(made), "length")


def running(tmp_path: Path) -> str:
    return (tmp_path / "running").read_text()


# --- frames -----------------------------------------------------------------------------------------------


def test_frames_arrive_as_they_were_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for frame, payload in (({"op": "stop"}, b""), ({"op": "é", "ids": [1, 2]}, bytes(range(256)) * 100)):
            send_frame(ours, frame, payload)
            assert receive_frame(theirs) == (frame, bytearray(payload))
        ours.close()
        assert receive_frame(theirs) is None


def test_a_connection_that_ends_within_a_frame_is_over() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(worker_main.LENGTHS.pack(2, 100) + b"{}" + b"x" * 99)
        assert receive_frame(theirs) is None


def test_lengths_of_what_is_no_frame_are_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(ValueError, match="a frame of"):
            receive_frame(theirs)


def test_both_sides_mean_the_same_token() -> None:
    assert worker_main.EMBEDDING == PROMPT_EMBEDDING


# --- answers ----------------------------------------------------------------------------------------------


def test_prompts_and_answers_pass_through_the_worker(begin: Begin) -> None:
    client = begin()
    wanted = [(i, SearchOptions(language=code, seed=i, **ONCE)) for i in range(len(CLIPS)) for code in LANGUAGES]
    # Answers of every length that the worker's arithmetic has, whatever this CPU's encoder makes of the clip.
    shortest = min(range(len(CLIPS)), key=lambda i: len(CLIPS[i]))
    wanted += [(shortest, SearchOptions(language=next(iter(LANGUAGES)), seed=seed, **ONCE)) for seed in range(7)]
    tickets = [client.submit(CLIPS[i], options) for i, options in wanted]
    finishes = set()
    for (i, options), ticket in zip(wanted, tickets, strict=True):
        result = ticket.future.result(WAIT_S)
        assert (result.tokens, result.finish) == expected(i, options)
        assert result.avg_logprob == -0.25
        assert (result.language, result.temperature) == (options.language, 0.0)
        finishes.add(result.finish)
    assert finishes == {"stop", "length"}


def test_given_tokens_come_first(begin: Begin) -> None:
    client = begin()
    options = SearchOptions(prefix=(5, 6, 7), **ONCE)
    result = client.submit(CLIPS[0], options).future.result(WAIT_S)
    assert (result.tokens, result.finish) == expected(0, options, (5, 6, 7))
    assert result.logprobs == (0.0,) * 3 + (-0.25,) * (len(result.tokens) - 3)
    assert result.avg_logprob == -0.25
    draft = DraftTokens((8, 9, 10), 2)
    result = client.submit(CLIPS[0], SearchOptions(**ONCE), draft=draft).future.result(WAIT_S)
    assert (result.tokens, result.finish) == expected(0, SearchOptions(**ONCE), (8, 9))


def test_answers_that_fail_their_checks_are_decoded_again(begin: Begin) -> None:
    client = begin()
    result = client.submit(CLIPS[0], SearchOptions(temperatures=(0.0, 0.5, 1.0), min_avg_logprob=-0.1))
    assert result.future.result(WAIT_S).temperature == 0.0  # all tries are alike: the first of the best
    assert client.describe()["fallbacks"] == 2


def test_the_worker_samples_from_the_likeliest_too(begin: Begin, tmp_path: Path) -> None:
    client = begin()
    client.submit(CLIPS[0], SearchOptions(**{**ONCE, "temperatures": (0.5,)}, top_k=7, top_p=0.25)).future.result(
        WAIT_S
    )
    assert (tmp_path / "sampling").read_text() == "0.5 7 0.25"
    client.submit(CLIPS[1], SearchOptions(**ONCE)).future.result(WAIT_S)
    assert (tmp_path / "sampling").read_text() == "0.0 0 1.0"


def test_counters_are_those_of_the_worker(begin: Begin, tmp_path: Path) -> None:
    client = begin()
    ticket = client.submit(CLIPS[0], SearchOptions(seed=SLOW, **ONCE))
    wait_until(lambda: executor_of(client).report()["pages_used"] == 50)
    assert executor_of(client).report() == {"waiting": 0, "decoding": 1, "pages": 100, "pages_used": 50}
    ticket.future.result(WAIT_S)
    found = client.describe()
    assert (found["backend"], found["backend_version"], found["backend_restarts"]) == ("vllm", "simulated", 0)
    assert found["steps"] > 0
    assert found["pages_used"] == 0


def test_times_come_from_the_ctc_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, close_later: Any) -> None:
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path / "cache"))
    folder = fun_asr_folders.write_ctc_converted(tmp_path / "ctc")
    config = EngineConfig(backend="vllm", vllm_python=interpreter(tmp_path), max_sessions=2, prefix_bytes=0)
    found = AsrCheckpoint.find("fun-asr-nano", folder).with_backend(config)
    card = msgspec.structs.replace(found.card, tokens_per_s=9.0)  # answers are full before the worker's end
    backend = thread_backend(card, lambda: found.build("cpu", "fp32"))
    client: EngineClient = close_later(EngineClient(config, backend))
    model: Any = executor_of(client).model
    aligner = CtcTokenAligner(model.ctc_head, found.tokenizer.decode)
    prefix = tuple(found.tokenizer.encode("now world now"))
    wanted = [(pcm, words) for pcm in fun_asr_folders.clips() for words in (True, False)] * 2
    tickets = [client.submit(pcm, SearchOptions(prefix=prefix, words=words, **ONCE)) for pcm, words in wanted]
    timed = 0
    for (pcm, words), ticket in zip(wanted, tickets, strict=True):
        answer = ticket.future.result(WAIT_S)
        (frames,) = model.encode_timed([torch.from_numpy(pcm)], [True])[2]
        assert answer.times == (aligner.token_times(answer.tokens, frames, len(pcm)) if words else ())
        timed += len(answer.times) == len(answer.tokens)
    assert timed >= 2


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"beam": 4}, "beam"),
        ({"hypotheses": 2}, "hypotheses"),
        ({"bias": pack_phrases([BiasingPhrase("w3", 1.0)])}, "bias"),
        ({"words": True}, "words"),
    ],
)
def test_what_vllm_does_not_do_is_refused_by_name(begin: Begin, options: dict[str, Any], param: str) -> None:
    client = begin()
    error = client.submit(CLIPS[0], SearchOptions(**ONCE | options)).future.exception(WAIT_S)
    assert isinstance(error, UnsupportedOption)
    assert error.param == param
    assert executor_of(client)._last_number == 0  # the worker never saw it


def test_a_request_that_vllm_refuses_fails_alone(begin: Begin) -> None:
    client = begin()
    tickets = [client.submit(CLIPS[0], SearchOptions(seed=seed, **ONCE)) for seed in (1, REFUSED, 2)]
    error = tickets[1].future.exception(WAIT_S)
    assert isinstance(error, StepFailed)
    assert "ValueError: not this one" in str(error)
    for ticket, seed in ((tickets[0], 1), (tickets[2], 2)):
        assert ticket.future.result(WAIT_S).tokens == expected(0, SearchOptions(seed=seed))[0]


@pytest.mark.parametrize("settings", [{"backend": "vllm"}, {"vllm_python": "python"}])
def test_the_back_end_and_its_interpreter_belong_together(settings: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="both, or none"):
        EngineConfig(**settings)


def test_a_split_decoder_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match="backend=vllm with tensor_parallel_size=2"):
        EngineConfig(backend="vllm", vllm_python="python", tensor_parallel_size=2)


def test_models_without_a_language_model_are_refused_by_name() -> None:
    config = EngineConfig(backend="vllm", vllm_python="python")
    for model in ("moonshine-tiny-en", "hibari"):
        with pytest.raises(OptionError, match=f"backend=vllm for {model}"):
            find_checkpoint(model, None, config)


def test_eight_bit_weights_are_refused_by_name(begin: Begin) -> None:
    with pytest.raises(UnsupportedOption, match="quantize=int8 with backend=vllm"):
        begin(quantize="int8")


# --- cancelling and closing -------------------------------------------------------------------------------


def test_a_cancelled_request_leaves_the_worker(begin: Begin, tmp_path: Path) -> None:
    client = begin()
    ticket = client.submit(CLIPS[0], SearchOptions(seed=SLOW, **ONCE))
    wait_until(lambda: running(tmp_path))
    client.cancel(ticket)
    assert isinstance(ticket.future.exception(WAIT_S), Cancelled)
    wait_until(lambda: not running(tmp_path))
    assert executor_of(client).rows == {}
    options = SearchOptions(**ONCE)
    assert client.submit(CLIPS[1], options).future.result(WAIT_S).tokens == expected(1, options)[0]


def test_many_mixed_requests_with_cancellations(begin: Begin) -> None:
    client, chance = begin(), random.Random(5)
    wanted = []
    for seed in range(64):
        options = SearchOptions(language=chance.choice(["", *LANGUAGES]), seed=seed, **ONCE)
        index = chance.randrange(len(CLIPS))
        ticket = client.submit(CLIPS[index], options, chance.choice(["live", "interactive", "bulk"]))
        wanted.append((index, options, ticket))
        if chance.random() < 0.3:
            client.cancel(chance.choice(wanted)[2])
    answered = 0
    for index, options, ticket in wanted:
        result = outcome(ticket)
        if result is not Cancelled:
            assert (result.tokens, result.finish) == expected(index, options)
            answered += 1
    assert answered >= 32
    assert executor_of(client).report()["decoding"] == 0


@pytest.mark.parametrize("seed", [0, SLOW])
def test_closing_leaves_no_process_and_no_request(begin: Begin, seed: int, tmp_path: Path) -> None:
    client = begin()
    pid, ticket = executor_of(client).worker.process.pid, client.submit(CLIPS[0], SearchOptions(seed=seed, **ONCE))
    if seed:
        wait_until(lambda: running(tmp_path))
    client.close()
    assert isinstance(ticket.future.exception(WAIT_S), EngineClosed) or ticket.future.done()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_worker_ends_with_its_engine(tmp_path: Path) -> None:
    """The connection is all that it has of the engine, which may be killed."""
    from asr_serve.engine.vllm.worker_process import WorkerProcess, WorkerSettings

    process = WorkerProcess.start(WorkerSettings(interpreter(tmp_path), 1, {"max_rows": 1}))
    process.wait_ready()
    process._connection.shutdown(socket.SHUT_RDWR)
    assert process.process.wait(WAIT_S) == 0
    process.join_or_kill()


# --- faults -----------------------------------------------------------------------------------------------


def test_a_killed_worker_is_replaced_and_its_request_answered(begin: Begin, tmp_path: Path) -> None:
    client = begin()
    options = SearchOptions(seed=SLOW, **ONCE)
    ticket = client.submit(CLIPS[0], options)
    wait_until(lambda: running(tmp_path))
    os.kill(executor_of(client).worker.process.pid, signal.SIGKILL)
    assert ticket.future.result(WAIT_S).tokens == expected(0, options)[0]
    assert client.describe()["backend_restarts"] == 1


def test_a_request_of_which_workers_die_is_given_up(begin: Begin) -> None:
    client = begin()
    error = client.submit(CLIPS[0], SearchOptions(seed=KILLED, **ONCE)).future.exception(WAIT_S)
    assert isinstance(error, EngineCrashed)
    assert "exit code 3" in str(error)
    options = SearchOptions(**ONCE)
    assert client.submit(CLIPS[1], options).future.result(WAIT_S).tokens == expected(1, options)[0]
    assert client.describe()["backend_restarts"] == vllm_executor.MAX_DEATHS


def test_a_silent_worker_is_killed(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_executor, "HANG_TIMEOUT_S", 0.2)
    client = begin()
    error = client.submit(CLIPS[0], SearchOptions(seed=SILENT, **ONCE)).future.exception(WAIT_S)
    assert isinstance(error, EngineCrashed)
    assert "SIGKILL" in str(error)


def test_a_worker_that_cannot_start_again_fails_what_waits(begin: Begin, tmp_path: Path) -> None:
    client = begin("restart")
    ticket = client.submit(CLIPS[0], SearchOptions(seed=SLOW, **ONCE))
    wait_until(lambda: running(tmp_path))
    os.kill(executor_of(client).worker.process.pid, signal.SIGKILL)
    error = ticket.future.exception(WAIT_S)
    assert isinstance(error, EngineClosed)
    assert "RuntimeError: no memory" in str(error)
    assert isinstance(client.submit(CLIPS[0], SearchOptions(**ONCE)).future.exception(WAIT_S), EngineClosed)
    interpreter(tmp_path)  # starts are still tried
    wait_until(lambda: client.describe()["backend_restarts"] == 1)
    options = SearchOptions(**ONCE)
    assert client.submit(CLIPS[1], options).future.result(WAIT_S).tokens == expected(1, options)[0]


def test_errors_of_the_first_start_are_told(begin: Begin, tmp_path: Path) -> None:
    with pytest.raises(ProgramFailed, match="RuntimeError: no memory"):
        begin("start")
    with pytest.raises(ProgramMissing, match="vllm_python=/nowhere/python is not there"):
        begin(vllm_python="/nowhere/python")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 7\n")
    broken.chmod(0o755)
    with pytest.raises(ProgramFailed, match="exit code 7"):
        begin(vllm_python=str(broken))


def test_an_interpreter_without_vllm_is_told(begin: Begin) -> None:
    with pytest.raises(ProgramMissing, match="No module named 'vllm'"):
        begin(vllm_python=sys.executable)


# --- the language model -----------------------------------------------------------------------------------


def test_the_language_model_is_written_once_and_not_kept(begin: Begin, tmp_path: Path) -> None:
    client = begin()
    folders = list((tmp_path / "cache" / "language-models").iterdir())
    assert len(folders) == 1
    assert json.loads((folders[0] / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert executor_of(client).model.language_model.exported == {}  # type: ignore[attr-defined]
    begin()
    assert list((tmp_path / "cache" / "language-models").iterdir()) == folders
