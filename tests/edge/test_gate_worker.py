"""Gates of many sessions on one thread: every sample once and in order, whatever comes, ends or fails meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running_server import WAIT_S, eventually

from asr_serve.audio import read_audio
from asr_serve.edge import voice_activity
from asr_serve.edge.gate_worker import GateQueue, GateWorker
from asr_serve.edge.speech_gate import GatedSilence, GatedSpeech, GateOutput
from asr_serve.edge.voice_activity import VoiceActivityPool

Expected = list[tuple[str, Any]]


class Caller:
    """Caller of a worker, and what it has forwarded."""

    def __init__(self, worker: GateWorker) -> None:
        self.outputs: list[GateOutput] = []
        self.ungated_samples = 0
        self.over = threading.Event()
        self.queue: GateQueue = worker.open(self._forward)

    def _forward(self, outputs: list[GateOutput], ended: bool, ungated_samples: int) -> None:
        assert not self.over.is_set(), "audio after the end"
        self.outputs += outputs
        self.ungated_samples += ungated_samples
        if ended:
            self.over.set()

    def pcm(self) -> np.ndarray:
        """What an engine hears: silence as zeros."""
        assert self.over.wait(WAIT_S)
        return audible(self.outputs)


def audible(outputs: list[GateOutput]) -> np.ndarray:
    parts = [each.samples if isinstance(each, GatedSpeech) else np.zeros(each.count, np.int16) for each in outputs]
    return np.concatenate([np.zeros(0, np.int16), *parts])


@pytest.fixture(scope="module")
def pool() -> VoiceActivityPool:
    return VoiceActivityPool()


@pytest.fixture
def worker(pool: VoiceActivityPool) -> Iterator[GateWorker]:
    """On a clock that stands still: nothing waits too long, however slow the machine is."""
    before = pool.free_slots
    made = GateWorker(pool, clock=lambda: 0.0)
    yield made
    made.close()
    assert pool.free_slots == before


@pytest.fixture
def speech(cities: Path) -> np.ndarray:
    quiet = np.random.default_rng(7).normal(0, 20, 16_000)
    return np.rint(np.concatenate([quiet, read_audio(cities)[: 2 * 16_000] * 32_767, quiet])).astype(np.int16)


def packets(pcm: np.ndarray, samples: int = 320) -> list[GateOutput]:
    return [GatedSpeech(pcm[at : at + samples]) for at in range(0, len(pcm), samples)]


def alone(pool: VoiceActivityPool, pcm: np.ndarray) -> np.ndarray:
    with pool.open() as caller:
        return audible(caller.feed(pcm) + caller.finish())


def test_callers_in_batches_forward_what_each_does_alone(
    worker: GateWorker, pool: VoiceActivityPool, speech: np.ndarray
) -> None:
    """Each begins elsewhere in the speech; one has a pause told as a count."""
    sounds = [np.roll(speech, 4_000 * number) for number in range(6)]
    paused = np.concatenate([sounds[0], np.zeros(24_000, np.int16), sounds[1]])
    callers = [Caller(worker) for _ in range(7)]
    with_pause = [*packets(sounds[0]), GatedSilence(24_000), *packets(sounds[1])]
    for each in with_pause:
        worker.append(callers[6].queue, [each])
    for parts in zip(*map(packets, sounds), strict=True):
        for caller, part in zip(callers, parts, strict=False):
            worker.append(caller.queue, [part])
    for caller in callers:
        worker.finish(caller.queue)
    for caller, sound in zip(callers, [*sounds, paused], strict=True):
        np.testing.assert_array_equal(caller.pcm(), alone(pool, sound))
        assert any(isinstance(each, GatedSilence) for each in caller.outputs)


def test_many_callers_are_one_batch(worker: GateWorker, speech: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    feed = VoiceActivityPool.feed
    entered, proceed = threading.Event(), threading.Event()

    def counted(self: VoiceActivityPool, turns: list[Any]) -> list[list[GateOutput]]:
        batches.append(len(turns))
        entered.set()
        assert proceed.wait(WAIT_S)
        return feed(self, turns)

    monkeypatch.setattr(VoiceActivityPool, "feed", counted)
    callers = [Caller(worker) for _ in range(20)]
    worker.append(callers[0].queue, packets(speech)[:1])
    assert entered.wait(WAIT_S)
    for caller in callers:  # none of these waits for the step that stands still
        worker.append(caller.queue, packets(speech)[:3])
        worker.append(caller.queue, packets(speech)[3:5])
        worker.finish(caller.queue)
    assert len(batches) == 1
    proceed.set()
    for caller in callers:
        assert len(caller.pcm()) == (6 if caller is callers[0] else 5) * 320
    assert batches[1] == 20


def test_what_waits_longer_than_a_second_is_forwarded_as_it_is(pool: VoiceActivityPool, speech: np.ndarray) -> None:
    """Its age counts, and not its length: what comes at once is gated, and so is what others wait for."""
    now_s = 0.0
    worker = GateWorker(pool, clock=lambda: now_s)
    caller, late, other = Caller(worker), Caller(worker), Caller(worker)
    worker.append(caller.queue, packets(np.tile(speech, 4)))  # 16 s
    worker.append(other.queue, packets(speech[:320]))
    for each, count in ((caller, 4 * len(speech)), (other, 320)):
        eventually(lambda: (made := each.queue.caller) is not None and made.gate.received_samples == count)  # noqa: B023
    assert worker.ungated_samples == 0
    (instance,) = pool._instances
    with instance.lock:  # voice activity stands still
        worker.append(other.queue, packets(speech[320:640]))
        eventually(lambda: not other.queue.audio)  # it is in the step
        worker.append(late.queue, [GatedSilence(100_000), *packets(speech)])
        now_s = 1.5
        worker.append(caller.queue, packets(speech))
        now_s = 2.0
    for each in (caller, late, other):
        worker.finish(each.queue)
    assert len(caller.pcm()) == 5 * len(speech)
    np.testing.assert_array_equal(late.pcm(), np.concatenate([np.zeros(100_000, np.int16), speech]))
    assert len(other.pcm()) == 640
    assert [each.ungated_samples for each in (caller, late, other)] == [0, len(speech), 0]  # counted silence is none
    assert worker.ungated_samples == len(speech)
    worker.close()


@pytest.mark.parametrize("failing", ["step", "feed"])
def test_a_failure_of_voice_activity_loses_no_sample(
    worker: GateWorker, speech: np.ndarray, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    caller = Caller(worker)
    worker.append(caller.queue, packets(speech)[:40])
    eventually(lambda: (made := caller.queue.caller) is not None and made.gate.received_samples == 40 * 320)
    target = voice_activity.VoiceActivityInstance if failing == "step" else VoiceActivityPool

    def fail(*_: object) -> None:
        raise AssertionError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(target, failing, fail)
        worker.append(caller.queue, packets(speech)[40:80])
        eventually(lambda: len(audible(caller.outputs)) == 80 * 320)
    assert worker.ungated_samples == caller.ungated_samples == 40 * 320
    worker.append(caller.queue, packets(speech)[80:])
    worker.finish(caller.queue)
    heard = caller.pcm()
    assert len(heard) == len(speech)
    np.testing.assert_array_equal(heard[40 * 320 : 80 * 320], speech[40 * 320 : 80 * 320])


def test_nothing_is_taken_behind_the_end(worker: GateWorker, speech: np.ndarray) -> None:
    caller = Caller(worker)
    worker.finish(caller.queue)
    worker.append(caller.queue, packets(speech))
    worker.finish(caller.queue)
    assert len(caller.pcm()) == 0


def test_nothing_waits_for_the_instance(worker: GateWorker, pool: VoiceActivityPool, speech: np.ndarray) -> None:
    """A batch holds the lock of the instance: callers are opened, fed and ended meanwhile."""
    (instance,) = pool._instances
    opened: list[Caller] = []

    def use() -> None:
        opened.append(Caller(worker))
        worker.append(opened[0].queue, packets(speech)[:3])
        worker.finish(opened[0].queue)

    with instance.lock:
        user = threading.Thread(target=use, daemon=True)
        user.start()
        user.join(WAIT_S)
        assert not user.is_alive(), "opening a caller waited for the instance"
    assert len(opened[0].pcm()) == 3 * 320


def test_without_a_place_audio_is_forwarded_as_it_is(
    worker: GateWorker, pool: VoiceActivityPool, speech: np.ndarray
) -> None:
    taken = [pool.open() for _ in range(pool.free_slots)]
    caller = Caller(worker)
    worker.append(caller.queue, packets(speech))
    worker.finish(caller.queue)
    np.testing.assert_array_equal(caller.pcm(), speech)
    assert worker.ungated_samples == caller.ungated_samples == len(speech)
    for each in taken:
        each.close()


def test_counted_silence_is_no_overload(pool: VoiceActivityPool, speech: np.ndarray) -> None:
    now_s = 0.0
    worker = GateWorker(pool, clock=lambda: now_s)
    caller = Caller(worker)
    with pool._instances[0].lock:
        worker.append(caller.queue, [GatedSilence(400_000)])
        now_s = 5.0
        worker.append(caller.queue, packets(speech[:16_000]))
    worker.finish(caller.queue)
    assert len(caller.pcm()) == 416_000
    assert worker.ungated_samples == 0
    worker.close()


def test_instances_are_stepped_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voice_activity, "usable_cores", lambda: 2)
    pool, both = VoiceActivityPool(2), threading.Barrier(2)
    step = voice_activity.VoiceActivityInstance.step

    def together(self: voice_activity.VoiceActivityInstance, count: int) -> None:
        both.wait(WAIT_S)
        step(self, count)

    monkeypatch.setattr(voice_activity.VoiceActivityInstance, "step", together)
    with pool.open() as one, pool.open() as other:
        assert one.instance is not other.instance
        pool.feed([(one, np.zeros(512, np.int16)), (other, np.zeros(512, np.int16))])
