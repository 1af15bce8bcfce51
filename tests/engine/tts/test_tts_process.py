"""Speech synthesis by an engine process, through crashes and handovers. Real models: hibari, whole sentences; a
FastPitch of random weights with HiFi-GAN, chunk by chunk."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_clients import RING, backend_of, engine_pid, wait_until
from safetensors.torch import save_file
from tiny_voice import WAIT_S, SentenceOutput, expect_pcm, expect_pieces, result, sentence, synthesize

from asr_serve.config import EngineConfig
from asr_serve.engine.builder import find_checkpoint
from asr_serve.engine.client import EngineClient, Ticket
from asr_serve.engine.process import messages
from asr_serve.engine.process.backend import process_backend
from asr_serve.engine.process.in_flight import MAX_DEATHS
from asr_serve.engine.process.messages import EngineSpec
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.errors import Cancelled, EngineCrashed, OptionError, UnknownVoice, WeightsMissing, WrongModel
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import tts_card, vocoder_card
from asr_serve.models.tts.fastpitch_network import FastPitchSizes
from asr_serve.types import Sentence, SentenceAudio

HELLO = "həlˈO ðˈɛɹ, hˌW ɑɹ ju dˈuɪŋ tədˈA?"
ALPHABET = "abcdef ."
SIZES = FastPitchSizes(
    phonemes=1 + len(ALPHABET), speakers=2, width=32, heads=2, inner=48, encoder_layers=1, decoder_layers=1, past=2
)
Begin = Callable[..., EngineClient]


@pytest.fixture(scope="module", autouse=True)
def require_weights() -> None:
    for card in (tts_card("hibari"), vocoder_card("source-filter-22k")):
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
def begin(close_later: Any, checkpoint: Path) -> Begin:
    def start(model: str = "fastpitch-en", *, thread: bool = False, **settings: Any) -> EngineClient:
        chunked = model == "fastpitch-en"
        config = EngineConfig(**({"codec": "source-filter-22k"} if chunked else {}), **settings)
        own = str(checkpoint) if chunked else None
        if thread:
            found = find_checkpoint(model, own, config)
            connect = thread_backend(found.card, lambda: found.build("cpu", "fp32"))
        else:
            connect = process_backend(EngineSpec(model=model, device="cpu", weights=own, threads=1), RING)
        return close_later(EngineClient(config, connect))

    return start


def expect_idle(client: EngineClient) -> None:
    wait_until(lambda: (stats := client.describe())["requests"] == 0 and stats.get("rows_used") == 0)
    assert client._samples == 0


def heart_sentence(text: str, voice: str = "heart", seed: int = 0) -> Sentence:
    return sentence(text, voice, seed)


def reference_pcm(begin: Begin, *sentences: Sentence, model: str = "fastpitch-en") -> list[np.ndarray]:
    """Samples of each, synthesized by an engine on a thread, one after another."""
    client, found = begin(model, thread=True), []
    for each in sentences:
        ticket, heard = synthesize(client, each)
        assert result(ticket) == len(heard.pcm) > 0
        found.append(heard.pcm)
    return found


def expect_whole(heard: SentenceOutput, want: np.ndarray, ticket: Ticket) -> None:
    """All of it, once, in order."""
    expect_pcm(ticket, heard, want)
    expect_pieces(heard)


@pytest.mark.parametrize(("model", "text"), [("hibari", HELLO), ("fastpitch-en", "abc def cab bed.")])
def test_a_process_sounds_as_an_engine_on_a_thread(begin, model, text):
    [want] = reference_pcm(begin, heart_sentence(text), model=model)
    client = begin(model)
    assert client.voice_card.voices[0] == "heart"
    ticket, heard = synthesize(client, heart_sentence(text))
    expect_whole(heard, want, ticket)
    assert len(heard.pieces[0].phoneme_ends) == len(text)
    expect_idle(client)


def test_errors_arrive_as_they_were_raised(begin):
    client = begin("hibari")
    with pytest.raises(OptionError, match=r"U\+00A7") as strange:
        result(synthesize(client, heart_sentence("a§b"))[0])
    assert strange.value.param == "input"
    with pytest.raises(UnknownVoice, match="did you mean 'heart'") as nobody:
        result(synthesize(client, heart_sentence("a", voice="hart"))[0])
    assert nobody.value.param == "voice"
    with pytest.raises(WrongModel):
        client.submit(np.zeros(16_000, np.float32))
    assert result(synthesize(client, heart_sentence("a"))[0])
    expect_idle(client)


def test_a_killed_process_goes_on_in_mid_sentence(begin):
    sentences = [
        heart_sentence("abc def cab bed. " * 3),
        heart_sentence("fed cab. " * 4, "alloy", 3),
        heart_sentence("bad. " * 5),
    ]
    want = reference_pcm(begin, *sentences)
    client = begin()

    class Killer(SentenceOutput):
        """At its third piece."""

        def __call__(self, sound: SentenceAudio) -> None:
            super().__call__(sound)
            if len(self.pieces) == 3:
                os.kill(engine_pid(client), signal.SIGKILL)

    killer, others = Killer(), [SentenceOutput(), SentenceOutput()]
    tickets = [client.synthesize(each, heard) for each, heard in zip(sentences, (killer, *others), strict=True)]
    for ticket, heard, sound in zip(tickets, (killer, *others), want, strict=True):
        expect_whole(heard, sound, ticket)
    assert backend_of(client).restarts == 1
    expect_idle(client)


def test_sentences_wait_for_the_next_engine(begin):
    [want] = reference_pcm(begin, heart_sentence(HELLO), model="hibari")
    client = begin("hibari")
    os.kill(engine_pid(client), signal.SIGKILL)
    wait_until(lambda: client.state == "restarting")
    ticket, heard = synthesize(client, heart_sentence(HELLO))
    expect_whole(heard, want, ticket)
    expect_idle(client)


def test_a_sentence_that_crashed_three_processes_fails(begin):
    client = begin("hibari")
    os.kill(engine_pid(client), signal.SIGSTOP)
    doomed, bystander = (synthesize(client, heart_sentence(HELLO)), synthesize(client, heart_sentence(HELLO, seed=1)))
    for _ in range(MAX_DEATHS):
        in_flight = backend_of(client)._current
        in_flight.requests[doomed[0].id].started = True  # as the engine says when it encodes it
        backend_of(client)._deliver(in_flight.record_death("signal SIGKILL"))  # as for each death
    os.kill(engine_pid(client), signal.SIGKILL)
    with pytest.raises(EngineCrashed):
        result(doomed[0])
    assert result(bystander[0]) == len(bystander[1].pcm)
    expect_idle(client)


def test_a_cancelled_sentence_sends_no_more_pieces(begin):
    client = begin()
    stayed, gone = (
        synthesize(client, heart_sentence("abc def. " * 4)),
        synthesize(client, heart_sentence("abc def. " * 40)),
    )
    assert gone[1].begun.wait(WAIT_S)
    client.cancel(gone[0])
    with pytest.raises(Cancelled):
        result(gone[0])
    assert result(stayed[0]) == len(stayed[1].pcm)
    count = len(gone[1].pieces)
    expect_idle(client)
    assert len(gone[1].pieces) <= count + 1  # one may have been on its way
    assert not any(piece.is_last for piece in gone[1].pieces)


def test_handover_lets_the_old_process_finish_its_sentence(begin):
    sentences = heart_sentence("abc def cab bed. " * 4)
    [want, after] = reference_pcm(begin, sentences, heart_sentence("fed."))
    client = begin()
    ticket, heard = synthesize(client, sentences)
    assert heard.begun.wait(WAIT_S)
    old = engine_pid(client)
    os.kill(old, signal.SIGSTOP)  # so that it is under way still when the new one is there
    with ThreadPoolExecutor(1) as beside:
        renewed = beside.submit(backend_of(client).renew, WAIT_S)
        wait_until(lambda: engine_pid(client) != old)
        assert not ticket.future.done()
        os.kill(old, signal.SIGCONT)
        expect_whole(heard, want, ticket)
        assert renewed.result(WAIT_S).repeated == 0
    assert backend_of(client).restarts == 0
    ticket, heard = synthesize(client, heart_sentence("fed."))
    expect_whole(heard, after, ticket)
    expect_idle(client)


def test_handover_after_its_timeout_has_the_new_process_go_on(begin, monkeypatch):
    monkeypatch.setattr("asr_serve.engine.process.supervisor.EXIT_TIMEOUT_S", 1.0)
    sentences = heart_sentence("abc def cab bed. " * 4)
    [want] = reference_pcm(begin, sentences)
    client = begin()
    ticket, heard = synthesize(client, sentences)
    assert heard.begun.wait(WAIT_S)
    os.kill(engine_pid(client), signal.SIGSTOP)
    assert backend_of(client).renew(timeout_s=0.0).repeated == 1
    expect_whole(heard, want, ticket)
    expect_idle(client)


def test_report_and_metrics_of_a_process(begin):
    client = begin("hibari")
    total = result(synthesize(client, heart_sentence(HELLO))[0])
    report = backend_of(client).report()
    assert isinstance(report, messages.EngineReport)
    assert report.describe["spoken_s"] == pytest.approx(total / 24_000, abs=0.01)
    text = report.metrics.decode()
    assert 'asr_serve_first_sound_seconds_count{model="hibari"} 1.0' in text
    assert f'asr_serve_spoken_seconds_total{{model="hibari"}} {total / 24_000}' in text
    assert 'asr_serve_engine_requests{model="hibari",state="speaking"} 0.0' in text
