"""One more voice for a model: it is learnt, nothing else changes, and what is written is what was learnt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_fastpitch
import torch
from safetensors.torch import load_file, save_file

from asr_serve import devices
from asr_serve.cloning import fine_tuning
from asr_serve.cloning.acoustic_training import collate
from asr_serve.cloning.base_model import CloningBaseModel, checkpoint_fingerprint
from asr_serve.cloning.clone import pitch_statistics
from asr_serve.cloning.fine_tuning import (
    FineTuningProgress,
    FineTuningResult,
    VoiceFineTuning,
    length_batches,
    split_items,
)
from asr_serve.errors import Cancelled, OptionError, WeightsCorrupt
from asr_serve.models.registry import tts_card
from asr_serve.models.tts import fastpitch
from asr_serve.models.tts.fastpitch import read_voice
from asr_serve.types import PhonemeSpan, Sentence


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_fastpitch.save(tmp_path_factory.mktemp("base"))


def begun(checkpoint: Path, seed: int = 0, count: int = 10) -> VoiceFineTuning:
    base = CloningBaseModel(checkpoint)
    items = tiny_fastpitch.items(base.speaker, count)
    base.norms.pitch["new"] = pitch_statistics(items)
    return VoiceFineTuning(base, "new", "emma", items, seed)


def taught(
    tuned: VoiceFineTuning, minutes: float = 10, told: list[FineTuningProgress] | None = None
) -> FineTuningResult:
    return tuned.train(minutes, (told if told is not None else []).append, lambda: False)


@pytest.fixture(scope="module")
def learnt(checkpoint: Path) -> tuple[VoiceFineTuning, FineTuningResult, list[FineTuningProgress]]:
    told: list[FineTuningProgress] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fine_tuning, "STEPS", 120)
        patch.setattr(fine_tuning, "STEPS_A_SECOND", 0)
        tuned = begun(checkpoint)
        return tuned, taught(tuned, told=told), told


@pytest.mark.parametrize("multiplied", [True, False])
def test_bf16_only_where_the_cpu_multiplies_it(multiplied, checkpoint, monkeypatch):
    """Elsewhere it is emulated: a step takes many times as long as one in float32."""
    monkeypatch.setattr("asr_serve.cloning.acoustic_training.bf16_supported", lambda: multiplied)
    base = CloningBaseModel(checkpoint)
    items = tiny_fastpitch.items(0, 2)
    batch = collate(items, base.norms, tiny_fastpitch.VOICES, tiny_fastpitch.SIZES.chunk)
    products = set()
    base.learner.linears["pre"].register_forward_hook(lambda layer, given, out: products.add(out.dtype))
    base.learner(batch)
    assert products == {torch.bfloat16 if multiplied else torch.float32}


def test_held_out_clips_improve_too(learnt):
    tuned, found, told = learnt
    assert found.after < 0.8 * found.before
    assert found.steps == 120
    assert found.after == pytest.approx(tuned.held_out(), abs=1e-6), "the last is what is kept"
    assert len(told) == 120 / fine_tuning.EVERY
    assert told[-1].held_out == found.after
    shares = [each.share for each in told]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] == 1
    assert told[-1].left_s == 0


def test_other_weights_are_unchanged(learnt, checkpoint):
    """The model's own voices say what they said before, to the bit."""
    tuned, _, _ = learnt
    before = CloningBaseModel(checkpoint)
    for speaker in range(len(tiny_fastpitch.VOICES)):
        mel, frames = tuned.base.synthesize_mel("abc def", speaker)
        other, other_frames = before.synthesize_mel("abc def", speaker)
        assert np.array_equal(mel, other)
        assert np.array_equal(frames, other_frames)
    kept = load_file(checkpoint / "model.safetensors")
    for name, tensor in tuned.base.learner.checkpoint().items():
        assert torch.equal(tensor[: len(kept[name])], kept[name]), name


def test_the_new_voice_differs_from_the_others(learnt):
    tuned, _, _ = learnt
    base = tuned.base
    mine = base.synthesize_prosody("abc def", base.speaker, tuned.delta.changes(), (5.0, 0.1))
    emma = base.synthesize_prosody("abc def", base.number("emma"))
    assert mine[0].shape != emma[0].shape or (mine[0] - emma[0]).abs().max() > 0.1


def test_the_file_is_the_voice(learnt, tmp_path):
    tuned, found, _ = learnt
    save_file({name: t.contiguous() for name, t in found.tensors.items()}, tmp_path / "new.safetensors")
    voice = read_voice(tmp_path / "new.safetensors", tuned.base.config.sizes, torch.device("cpu"))
    assert voice.pitch == pytest.approx(tuned.base.norms.pitch["new"])
    assert torch.equal(voice.encoder, tuned.base.learner.tables["speakers"][-1])
    assert voice.changes is not None
    assert set(voice.changes) == set(tuned.base.config.sizes.adapted())
    for name, (down, up) in tuned.delta.changes().items():
        assert torch.allclose(voice.changes[name][0], down[0], atol=2e-3)
        assert torch.allclose(voice.changes[name][1], up[0], atol=2e-3)
    assert (tmp_path / "new.safetensors").stat().st_size < 200_000


def test_the_same_seed_is_the_same_voice(checkpoint, monkeypatch):
    monkeypatch.setattr(fine_tuning, "MOST_STEPS", 24)
    one, same, other = (taught(begun(checkpoint, seed)) for seed in (3, 3, 4))

    def difference(first: FineTuningResult, second: FineTuningResult) -> float:
        return max(float((first.tensors[name] - second.tensors[name]).abs().max()) for name in first.tensors)

    # Products of some CPUs depend on where in memory their factors lie: MKL's on Intel, by the last bits.
    assert difference(one, same) < difference(one, other) / 50


def test_more_speech_takes_more_steps(checkpoint, monkeypatch):
    few, many = begun(checkpoint, count=10).steps(), begun(checkpoint, count=30).steps()
    assert fine_tuning.STEPS < few < many < fine_tuning.MOST_STEPS
    monkeypatch.setattr(fine_tuning, "MOST_STEPS", 24)
    assert begun(checkpoint, count=30).steps() == 24


def test_a_diverged_run_is_not_saved(checkpoint, monkeypatch):
    monkeypatch.setattr(fine_tuning, "MOST_STEPS", 36)
    tuned, heard = begun(checkpoint), iter([1.0, 0.8, 0.9, 0.8 * fine_tuning.WORSE + 0.01])
    monkeypatch.setattr(tuned, "held_out", lambda: next(heard))
    found = taught(tuned)
    assert (found.steps, found.before, found.after) == (12, 1.0, 0.8)
    tuned, heard = begun(checkpoint), iter([1.0, float("nan"), 0.9, float("nan")])
    monkeypatch.setattr(tuned, "held_out", lambda: next(heard))
    assert (taught(tuned).steps, next(heard, None)) == (24, None)


def test_a_voice_has_the_standard_loudness(learnt, tmp_path):
    _, found, _ = learnt
    path = tmp_path / "new.safetensors"
    card = tts_card("fastpitch-en")
    folder = tiny_fastpitch.save(tmp_path / "base")
    model = fastpitch.load(folder, card, devices.make_device("cpu", "fp32"))
    heard = []
    for gain in (0.0, 0.5):
        save_file({name: t.contiguous() for name, t in found.tensors.items()} | {"gain": torch.tensor([gain])}, path)
        model.remove_voice("new")
        model.register_voice("new", path)
        (said,) = model.encode([Sentence((PhonemeSpan("abc"),), "new")])
        heard.append(model.whole(said)[0])
    assert torch.allclose(heard[1][:, :80], heard[0][:, :80] + 0.5, atol=1e-4)
    assert torch.equal(heard[1][:, 80], heard[0][:, 80])


def test_training_time_is_bounded(checkpoint):
    told: list[FineTuningProgress] = []
    found = taught(begun(checkpoint), minutes=1e-9, told=told)
    assert found.steps == 0
    assert found.after == found.before
    assert not told


def test_training_can_be_stopped(checkpoint):
    asked: list[bool] = []

    def stop() -> bool:
        asked.append(True)
        return len(asked) > 5

    with pytest.raises(Cancelled):
        begun(checkpoint).train(10, lambda _: None, stop)
    assert len(asked) == 6


def test_short_and_long_ones_are_held_out():
    items = tiny_fastpitch.items(3, 40)
    learnt, held = split_items(items)
    assert len(held) == 6
    assert len(learnt) + len(held) == 40
    assert not {id(each) for each in learnt} & {id(each) for each in held}
    lengths = sorted(len(each.mel) for each in held)
    assert lengths[0] < np.median([len(each.mel) for each in items]) < lengths[-1]
    assert [len(part) for part in split_items(items[:5])] == [4, 1]


def test_batches_hold_all_and_no_more_than_fits(monkeypatch):
    monkeypatch.setattr(fine_tuning, "BATCH_FRAMES", 300)
    items = tiny_fastpitch.items(3, 30)
    made = length_batches(items)
    assert sorted(id(each) for part in made for each in part) == sorted(map(id, items))
    assert all(len(part) * max(len(each.mel) for each in part) <= 300 for part in made)


def test_the_nearest_voice(tmp_path):
    by_pitch = CloningBaseModel(tiny_fastpitch.save(tmp_path / "pitch"))
    assert by_pitch.nearest_voices(np.ones(4), 4.8) == ["adam", "heart", "emma"]
    assert by_pitch.nearest_voices(np.ones(4), 5.5)[0] == "emma"
    like = np.zeros((3, 4), np.float32)
    like[0, 0] = like[2, 1] = 1
    by_ear = CloningBaseModel(tiny_fastpitch.save(tmp_path / "ear", like))
    assert by_ear.nearest_voices(np.array([0.2, 0.9, 0, 0]), 5.5) == ["adam", "heart"], (
        "of emma nobody has heard anything"
    )
    assert by_ear.nearest_voices(np.array([0.9, 0.2, 0, 0]), 4.7)[0] == "heart"
    assert by_ear.fingerprint == checkpoint_fingerprint(tmp_path / "ear") == by_pitch.fingerprint


def test_unknown_phonemes_are_named(checkpoint):
    with pytest.raises(OptionError, match="ʃ"):
        CloningBaseModel(checkpoint).phoneme_ids("aʃ")


def test_a_broken_checkpoint_is_an_error(tmp_path):
    with pytest.raises(WeightsCorrupt):
        CloningBaseModel(tmp_path)
