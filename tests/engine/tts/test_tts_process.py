"""Sentences said by an engine process, through its death and another's birth. Real models: hibari, whole
sentences; a FastPitch of random weights with HiFi-GAN, chunk by chunk."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_voice import WAIT_S, Heard, result, say, sentence

from asr_serve.config import EngineConfig
from asr_serve.engine.builder import find_checkpoint
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process import messages
from asr_serve.engine.process.client import ProcessBackend, process_backend
from asr_serve.engine.process.in_flight import MAX_DEATHS
from asr_serve.engine.process.messages import EngineSpec
from asr_serve.engine.process.process import RingSize
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.errors import Cancelled, EngineCrashed, OptionError, UnknownVoice, WeightsMissing, WrongModel
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import tts_card, vocoder_card
from asr_serve.models.tts.fastpitch_network import FastPitchSizes
from asr_serve.types import Sentence, SentenceAudio

RING = RingSize(64, 16_384)
HELLO = "həlˈO ðˈɛɹ, hˌW ɑɹ ju dˈuɪŋ tədˈA?"
ALPHABET = "abcdef ."
SIZES = FastPitchSizes(
    phonemes=1 + len(ALPHABET), speakers=2, width=32, heads=2, inner=48, encoder_layers=1, decoder_layers=1, past=2
)
Begin = Callable[..., EngineClient]


@pytest.fixture(scope="module", autouse=True)
def there() -> None:
    for card in (tts_card("hibari"), vocoder_card("hifigan-universal")):
        try:
            store.verified_published_folder(card)
        except WeightsMissing as missing:
            pytest.skip(str(missing))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FastPitch of random weights, as another process can load it."""
    folder = tmp_path_factory.mktemp("fastpitch")
    chance = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(shape, generator=chance) / 4 for name, shape in SIZES.tables().items()}
    for name, (outputs, inputs) in SIZES.linears().items():
        tensors[f"{name}.weight"] = torch.randn(outputs, inputs, generator=chance) / inputs**0.5
        tensors[f"{name}.bias"] = torch.zeros(outputs)
    for name in SIZES.norms():
        tensors |= {f"{name}.weight": torch.ones(SIZES.width), f"{name}.bias": torch.zeros(SIZES.width)}
    tensors["durations.out.bias"] = torch.full((1,), 1.1)  # three frames, about
    save_file(tensors, folder / "model.safetensors")
    settings = {name: getattr(SIZES, name) for name in SIZES.__struct_fields__} | {
        "norms": {"mel": (-5.0, 1.0), "energy": (0.0, 1.0), "pitch": {"heart": (5.2, 0.2), "alloy": (4.8, 0.2)}},
        "lengthen": 1.0,
        "voices": ["heart", "alloy"],
        "vocabulary": {"_": 0} | {each: 1 + at for at, each in enumerate(ALPHABET)},
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def begin(checkpoint: Path) -> Iterator[Begin]:
    started: list[EngineClient] = []

    def starting(model: str = "fastpitch-en", *, thread: bool = False, **settings: Any) -> EngineClient:
        chunked = model == "fastpitch-en"
        config = EngineConfig(**({"codec": "hifigan-universal"} if chunked else {}), **settings)
        own = str(checkpoint) if chunked else None
        if thread:
            found = find_checkpoint(model, own, config)
            connect = thread_backend(found.card, lambda: found.build("cpu", "fp32"))
        else:
            connect = process_backend(EngineSpec(model=model, device="cpu", weights=own, threads=1), RING)
        started.append(EngineClient(config, connect))
        return started[-1]

    yield starting
    for client in started:
        client.close()


def link(client: EngineClient) -> ProcessBackend:
    assert isinstance(client.backend, ProcessBackend)
    return client.backend


def process(client: EngineClient) -> int:
    return link(client)._current.process.pid


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def expect_idle(client: EngineClient) -> None:
    until(lambda: (told := client.describe())["requests"] == 0 and told.get("rows_used") == 0)
    assert client._samples == 0


def spoken(text: str, voice: str = "heart", seed: int = 0) -> Sentence:
    return sentence(text, voice, seed)


def alone(begin: Begin, *said: Sentence, model: str = "fastpitch-en") -> list[np.ndarray]:
    """What each sounds like, said by an engine on a thread of ours, one after another."""
    client, found = begin(model, thread=True), []
    for each in said:
        ticket, heard = say(client, each)
        assert result(ticket) == len(heard.pcm) > 0
        found.append(heard.pcm)
    return found


def expect_whole(heard: Heard, want: np.ndarray, total: int) -> None:
    """All of it, once, in order."""
    assert total == len(want) == len(heard.pcm)
    np.testing.assert_allclose(heard.pcm.astype(int), want.astype(int), atol=1)
    assert [bool(piece.phoneme_ends) for piece in heard.pieces] == [True] + [False] * (len(heard.pieces) - 1)
    assert [piece.is_last for piece in heard.pieces] == [False] * (len(heard.pieces) - 1) + [True]


@pytest.mark.parametrize(("model", "text"), [("hibari", HELLO), ("fastpitch-en", "abc def cab bed.")])
def test_the_same_sound_as_on_a_thread(begin, model, text):
    [want] = alone(begin, spoken(text), model=model)
    client = begin(model)
    assert client.voice_card.voices[0] == "heart"
    ticket, heard = say(client, spoken(text))
    expect_whole(heard, want, result(ticket))
    assert len(heard.pieces[0].phoneme_ends) == len(text)
    expect_idle(client)


def test_what_cannot_be_said_comes_back_as_it_was_raised(begin):
    client = begin("hibari")
    with pytest.raises(OptionError, match=r"U\+00A7") as strange:
        result(say(client, spoken("a§b"))[0])
    assert strange.value.param == "input"
    with pytest.raises(UnknownVoice, match="did you mean 'heart'") as nobody:
        result(say(client, spoken("a", voice="hart"))[0])
    assert nobody.value.param == "voice"
    with pytest.raises(WrongModel):
        client.submit(np.zeros(16_000, np.float32))
    assert result(say(client, spoken("a"))[0])
    expect_idle(client)


def test_killed_in_mid_sentence_it_goes_on_where_it_was_heard(begin):
    said = [spoken("abc def cab bed. " * 3), spoken("fed cab. " * 4, "alloy", 3), spoken("bad. " * 5)]
    want = alone(begin, *said)
    client = begin()

    class Killer(Heard):
        """At its third piece."""

        def __call__(self, sound: SentenceAudio) -> None:
            super().__call__(sound)
            if len(self.pieces) == 3:
                os.kill(process(client), signal.SIGKILL)

    killer, others = Killer(), [Heard(), Heard()]
    tickets = [client.synthesize(each, heard) for each, heard in zip(said, (killer, *others), strict=True)]
    for ticket, heard, sound in zip(tickets, (killer, *others), want, strict=True):
        expect_whole(heard, sound, result(ticket))
    assert link(client).restarts == 1
    expect_idle(client)


def test_what_waits_for_an_engine_is_said_by_the_next(begin):
    [want] = alone(begin, spoken(HELLO), model="hibari")
    client = begin("hibari")
    os.kill(process(client), signal.SIGKILL)
    until(lambda: client.state == "restarting")
    ticket, heard = say(client, spoken(HELLO))
    expect_whole(heard, want, result(ticket))
    expect_idle(client)


def test_what_three_processes_died_over_is_given_up(begin):
    client = begin("hibari")
    os.kill(process(client), signal.SIGSTOP)
    doomed, bystander = say(client, spoken(HELLO)), say(client, spoken(HELLO, seed=1))
    for _ in range(MAX_DEATHS):
        given = link(client)._current
        given.requests[doomed[0].id].started = True  # as the engine says when it encodes it
        link(client)._deliver(given.record_death("signal SIGKILL"))  # as for each death
    os.kill(process(client), signal.SIGKILL)
    with pytest.raises(EngineCrashed):
        result(doomed[0])
    assert result(bystander[0]) == len(bystander[1].pcm)
    expect_idle(client)


def test_cancelled_it_is_told_no_more(begin):
    client = begin()
    stayed, gone = say(client, spoken("abc def. " * 4)), say(client, spoken("abc def. " * 40))
    assert gone[1].begun.wait(WAIT_S)
    client.cancel(gone[0])
    with pytest.raises(Cancelled):
        result(gone[0])
    assert result(stayed[0]) == len(stayed[1].pcm)
    told = len(gone[1].pieces)
    expect_idle(client)
    assert len(gone[1].pieces) <= told + 1  # one may have been on its way
    assert not any(piece.is_last for piece in gone[1].pieces)


def test_renewed_a_sentence_is_said_to_its_end_by_the_old_process(begin):
    said = spoken("abc def cab bed. " * 4)
    [want, after] = alone(begin, said, spoken("fed."))
    client = begin()
    ticket, heard = say(client, said)
    assert heard.begun.wait(WAIT_S)
    old = process(client)
    os.kill(old, signal.SIGSTOP)  # so that it is under way still when the new one is there
    with ThreadPoolExecutor(1) as beside:
        renewed = beside.submit(link(client).renew, WAIT_S)
        until(lambda: process(client) != old)
        assert not ticket.future.done()
        os.kill(old, signal.SIGCONT)
        expect_whole(heard, want, result(ticket))
        assert renewed.result(WAIT_S).repeated == 0
    assert link(client).restarts == 0
    ticket, heard = say(client, spoken("fed."))
    expect_whole(heard, after, result(ticket))
    expect_idle(client)


def test_a_renewal_out_of_patience_has_the_new_process_go_on(begin, monkeypatch):
    monkeypatch.setattr("asr_serve.engine.process.supervisor.EXIT_TIMEOUT_S", 1.0)
    said = spoken("abc def cab bed. " * 4)
    [want] = alone(begin, said)
    client = begin()
    ticket, heard = say(client, said)
    assert heard.begun.wait(WAIT_S)
    os.kill(process(client), signal.SIGSTOP)
    assert link(client).renew(timeout_s=0.0).repeated == 1
    expect_whole(heard, want, result(ticket))
    expect_idle(client)


def test_a_process_tells_what_it_has_said(begin):
    client = begin("hibari")
    total = result(say(client, spoken(HELLO))[0])
    report = link(client).report()
    assert isinstance(report, messages.EngineReport)
    assert report.describe["spoken_s"] == pytest.approx(total / 24_000, abs=0.01)
    text = report.metrics.decode()
    assert 'asr_serve_first_sound_seconds_count{model="hibari"} 1.0' in text
    assert f'asr_serve_spoken_seconds_total{{model="hibari"}} {total / 24_000}' in text
    assert 'asr_serve_engine_requests{model="hibari",state="speaking"} 0.0' in text
