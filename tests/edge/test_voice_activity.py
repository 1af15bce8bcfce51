"""vad.wasm: equal to the torch model, to itself in any batch, and to what its source builds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from asr_serve.audio import read_audio
from asr_serve.edge import voice_activity
from asr_serve.edge.speech_gate import WINDOW_SAMPLES, GatedSilence, GatedSpeech
from asr_serve.edge.voice_activity import VoiceActivityInstance, VoiceActivityModule, VoiceActivityPool
from asr_serve.edge.wasm import build_vad
from asr_serve.errors import AtCapacity, OptionError, ProgramMissing, UnsupportedAudio, WeightsMissing
from asr_serve.models.auxiliary import silero

CLIPS = ("beckett.wav", "two_cities.wav")


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> VoiceActivityModule:
    return VoiceActivityModule(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def instance(module: VoiceActivityModule) -> VoiceActivityInstance:
    return VoiceActivityInstance(module)


def windows_of(path: Path, limit: int | None = None) -> np.ndarray:
    pcm = np.rint(read_audio(path) * 32_767).astype(np.int16)
    return np.pad(pcm, (0, -len(pcm) % WINDOW_SAMPLES)).reshape(-1, WINDOW_SAMPLES)[:limit]


def step(instance: VoiceActivityInstance, slots: list[int], windows: list[np.ndarray]) -> np.ndarray:
    instance.slot_numbers[: len(slots)] = slots
    instance.input[: len(slots)] = windows
    instance.step(len(slots))
    return instance.probabilities[: len(slots)].copy()


def alone(instance: VoiceActivityInstance, windows: np.ndarray) -> np.ndarray:
    """The probabilities of one caller, one window at a time."""
    slot = instance.acquire()
    scores = np.concatenate([step(instance, [slot], [window]) for window in windows])
    instance.release(slot)
    return scores


@pytest.mark.parametrize("name", CLIPS)
def test_equals_the_torch_model_on_real_speech(
    name: str, instance: VoiceActivityInstance, packaged_speech: Path
) -> None:
    windows = windows_of(packaged_speech / name)
    model = silero.load()
    pcm = torch.from_numpy(windows.reshape(1, -1).astype(np.float32) / 32_768)
    expected, state = model.step(pcm, model.state(1), torch.tensor([len(windows)]))
    slot = instance.acquire()
    got = np.concatenate([step(instance, [slot], [window]) for window in windows])
    assert expected.max() > 0.99
    np.testing.assert_allclose(got, expected[0].numpy(), atol=1e-4, rtol=0)
    after = np.concatenate([part[0].numpy() for part in state])
    np.testing.assert_allclose(instance.states[slot], after, atol=1e-3, rtol=1e-3)


def test_noise_and_full_scale_equal_the_torch_model(instance: VoiceActivityInstance, rng: np.random.Generator) -> None:
    windows = rng.integers(-32_768, 32_768, (40, WINDOW_SAMPLES)).astype(np.int16)
    windows[10:20], windows[20:25] = 32_767, -32_768
    windows[30:] //= 1_000
    model = silero.load()
    pcm = torch.from_numpy(windows.reshape(1, -1).astype(np.float32) / 32_768)
    expected, _ = model.step(pcm, model.state(1), torch.tensor([len(windows)]))
    np.testing.assert_allclose(alone(instance, windows), expected[0].numpy(), atol=1e-4, rtol=0)


def test_any_batch_gives_the_same_bits(
    instance: VoiceActivityInstance, rng: np.random.Generator, packaged_speech: Path
) -> None:
    speech = [windows_of(packaged_speech / name) for name in CLIPS]
    callers = [speech[row % 2][row : row + 30] for row in range(70)]
    expected = [alone(instance, windows) for windows in callers[:9]]
    slots = [instance.acquire() for _ in callers]
    at = [0] * len(callers)
    got: list[list[float]] = [[] for _ in callers]
    while any(count < 30 for count in at):
        waiting = [row for row in range(len(callers)) if at[row] < 30]
        chosen = rng.permutation(waiting)[: rng.integers(1, instance.batch_limit + 1)].tolist()
        for row, score in zip(
            chosen,
            step(instance, [slots[row] for row in chosen], [callers[row][at[row]] for row in chosen]),
            strict=True,
        ):
            got[row].append(float(score))
            at[row] += 1
    for row, scores in enumerate(expected):
        assert np.array_equal(np.array(got[row], np.float32), scores), row


def test_a_refused_step_changes_nothing(instance: VoiceActivityInstance) -> None:
    slots = [instance.acquire() for _ in range(3)]
    window = np.full(WINDOW_SAMPLES, 1_000, np.int16)
    step(instance, slots, [window] * 3)
    before = instance.states.copy()
    for wrong in ([slots[0], slots[1], slots[0]], [slots[0], instance.slots], [slots[0], 2**32 - 1]):
        with pytest.raises(AssertionError, match="refused"):
            step(instance, wrong, [window] * len(wrong))
    with pytest.raises(AssertionError, match="refused"):
        instance.step(instance.batch_limit + 1)
    assert np.array_equal(before, instance.states)
    assert instance._reset(instance._store, instance.slots) == 1


def test_the_module_is_a_sandbox_of_a_fixed_size(module: VoiceActivityModule) -> None:
    assert len(module.module.imports) == 0
    (memory,) = (export.type for export in module.module.exports if export.name == "memory")
    assert memory.limits.min == memory.limits.max == build_vad.MEMORY_BYTES // 65_536


def test_the_committed_module_is_what_its_source_builds(
    tmp_path: Path, packaged_speech: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("clang") is None or shutil.which("wasm-ld") is None:
        pytest.skip("no clang or no wasm-ld: apt install clang lld")
    committed, rebuilt = voice_activity.MODULE, tmp_path / "vad.wasm"
    build_vad.build(rebuilt)
    if rebuilt.read_bytes() == committed.read_bytes():
        return
    version = subprocess.run(["clang", "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert f"version {build_vad.CLANG}" not in version, "vad.wasm is not built from vad.c: make vad-wasm"
    windows = windows_of(packaged_speech / CLIPS[0], 100)
    expected = alone(VoiceActivityInstance(VoiceActivityModule(tmp_path)), windows)
    monkeypatch.setattr(voice_activity, "MODULE", rebuilt)
    assert np.array_equal(alone(VoiceActivityInstance(VoiceActivityModule(tmp_path)), windows), expected)


def test_a_compiled_module_is_kept_and_a_broken_one_is_compiled_anew(tmp_path: Path, packaged_speech: Path) -> None:
    windows = windows_of(packaged_speech / CLIPS[0], 20)
    expected = alone(VoiceActivityInstance(VoiceActivityModule(tmp_path)), windows)
    (compiled,) = (tmp_path / "edge").iterdir()
    whole = compiled.read_bytes()
    again = VoiceActivityModule(tmp_path)
    assert np.array_equal(alone(VoiceActivityInstance(again), windows), expected)
    compiled.write_bytes(b"\x7fELF" + bytes(100))
    mended = VoiceActivityModule(tmp_path)
    assert np.array_equal(alone(VoiceActivityInstance(mended), windows), expected)
    assert len(compiled.read_bytes()) == len(whole)


def test_gated_callers_in_batches_are_those_alone(module: VoiceActivityModule, packaged_speech: Path) -> None:
    """Packets of 20 ms of several callers, in steps of all; some of them come late and end early."""
    pool = VoiceActivityPool(2, module)
    pauses = [np.zeros(16_000 * seconds, np.int16) for seconds in (0, 1, 2, 3)]
    speech = [windows_of(packaged_speech / name).ravel() for name in CLIPS]
    clips = [np.concatenate([pauses[row % 4], speech[row % 2][: 40_000 + row * 777], pauses[3]]) for row in range(6)]
    expected = []
    for clip in clips:
        with pool.open() as caller:
            expected.append(flat(caller.feed(clip) + caller.finish()))
    callers = [pool.open() for _ in clips]
    outputs: list[list[GatedSpeech | GatedSilence]] = [[] for _ in clips]
    for at in range(0, max(map(len, clips)), 320):
        live = [row for row, clip in enumerate(clips) if at < len(clip)]
        for row, found in zip(
            live, pool.feed([(callers[row], clips[row][at : at + 320]) for row in live]), strict=True
        ):
            outputs[row] += found
    for row, caller in enumerate(callers):
        got = flat(outputs[row] + caller.finish())
        assert np.array_equal(got, expected[row])
        assert len(got) == len(clips[row])
        assert 0 < (got == 0).sum() < len(got)
        caller.close()
        caller.close()
    assert pool.free_slots == 2 * 1_024


def flat(outputs: list[GatedSpeech | GatedSilence]) -> np.ndarray:
    return np.concatenate(
        [output.samples if isinstance(output, GatedSpeech) else np.zeros(output.count, np.int16) for output in outputs]
    )


def test_slots_end_and_come_back_fresh(module: VoiceActivityModule) -> None:
    pool = VoiceActivityPool(1, module)
    callers = [pool.open() for _ in range(pool.free_slots)]
    with pytest.raises(AtCapacity, match="1024 callers have voice activity"):
        pool.open()
    callers[5].feed(np.full(5_120, 3_000, np.int16))
    slot = callers[5].slot
    assert slot is not None
    assert callers[5].instance.states[slot].any()
    callers[5].close()
    fresh = pool.open()
    assert fresh.slot == slot
    assert not fresh.instance.states[slot].any()


def test_wrong_input_is_refused(module: VoiceActivityModule, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with VoiceActivityPool(1, module).open() as caller, pytest.raises(UnsupportedAudio, match="int16 samples"):
        caller.feed(np.zeros(10, np.float32))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="from 1 to 64"):
        VoiceActivityPool(0, module)
    monkeypatch.setattr(voice_activity, "MODULE", tmp_path / "none.wasm")
    with pytest.raises(WeightsMissing, match="reinstall"):
        VoiceActivityModule()
    monkeypatch.setitem(sys.modules, "wasmtime", None)
    with pytest.raises(ProgramMissing, match=r"asr-serve\[edge\]"):
        VoiceActivityPool()
