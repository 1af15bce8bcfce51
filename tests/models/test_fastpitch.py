"""FastPitch in chunks says what it says as a whole, in any company; and does what is asked of it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from asr_serve import devices
from asr_serve.errors import OptionError, UnknownVoice, WeightsCorrupt
from asr_serve.models.tts.fastpitch import (
    AFTER,
    BEFORE,
    SAID_BEFORE,
    Config,
    FastPitchSentence,
    FeatureNorms,
    Model,
    read_voice,
    whole_frames,
)
from asr_serve.models.tts.fastpitch_network import FastPitchSizes, frame_positions
from asr_serve.types import PhonemeSpan, Sentence

SIZES = FastPitchSizes(
    phonemes=30, speakers=2, width=32, heads=2, inner=48, encoder_layers=2, decoder_layers=3, chunk=8, past=2
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CONFIG = Config(
    SIZES,
    FeatureNorms((-5.0, 2.0), (0.0, 1.0), {"anna": (5.2, 0.2), "ben": (4.7, 0.15)}),
    1.0,
    ("anna", "ben"),
    {"_": 0, " ": 27, **{letter: at for at, letter in enumerate(LETTERS, 1)}},
)
EQUAL = 1e-4


def tensors(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    found = {name: torch.randn(size) * 0.3 for name, size in SIZES.tables().items()}
    for name, (outputs, inputs) in SIZES.linears().items():
        found |= {f"{name}.weight": torch.randn(outputs, inputs) * inputs**-0.5}
        found |= {f"{name}.bias": torch.randn(outputs) * 0.1}
    for name in SIZES.norms():
        found |= {f"{name}.weight": 1 + 0.1 * torch.randn(SIZES.width), f"{name}.bias": torch.zeros(SIZES.width)}
    found["durations.out.bias"] = torch.tensor([1.6])
    return found


@pytest.fixture(scope="module")
def model() -> Model:
    return Model("test", CONFIG, tensors(), devices.make_device("cpu", "fp32"))


def sentence(length: int, voice: str = "anna", seed: int = 0, **manner: float) -> Sentence:
    letters = "".join(random.Random(seed + length).choice(LETTERS) for _ in range(length))
    return Sentence((PhonemeSpan(letters, **manner),), voice)


def said(model: Model, sentences: list[Sentence], starts: list[int]) -> list[Tensor]:
    """Frames of each, chunk by chunk; the i-th begins at step starts[i], in rows of no order."""
    encoded = model.encode(sentences)
    state = {name: torch.full((9, *spec.shape), 7.0) for name, spec in model.state_specs().items()}
    for tensor in state.values():  # as an engine clears a row before its tenant
        tensor[:8] = 0
    rows = random.Random(1).sample(range(8), len(sentences))
    made: list[list[Tensor]] = [[] for _ in sentences]
    for step in range(10_000):
        live = [i for i, each in enumerate(encoded) if 0 <= (step - starts[i]) * model.chunk_frames < each.frames]
        if not live and step > max(starts):
            break
        if live:
            seen = torch.tensor([(step - starts[i]) * model.chunk_frames for i in live])
            out = model.step([encoded[i] for i in live], torch.tensor([rows[i] for i in live]), seen, state)
            for i, frames in zip(live, out, strict=True):
                made[i].append(frames)
    return [torch.cat(each)[: encoded[i].frames] for i, each in enumerate(made)]


def assert_equal(one: Tensor, other: Tensor) -> None:
    """Mel to 1e-4; F0, which is in Hz, to a millionth."""
    assert one.shape == other.shape
    assert (one - other)[:, :80].abs().max() < EQUAL
    assert torch.allclose(one[:, 80], other[:, 80], rtol=1e-6, atol=EQUAL)


def whole(model: Model, each: Sentence) -> Tensor:
    return model.whole(model.encode([each])[0])[0]


def test_chunks_are_the_whole_alone_and_in_company(model: Model) -> None:
    sentences = [sentence(40), sentence(3, "ben"), sentence(17), sentence(90, "ben", seed=5)]
    for frames, each in zip(said(model, sentences, [0, 4, 1, 9]), sentences, strict=True):
        assert_equal(frames, whole(model, each))
    (alone,) = said(model, sentences[:1], [0])
    assert_equal(alone, whole(model, sentences[0]))


def test_the_past_is_seen_and_no_more_of_it(model: Model) -> None:
    """A frame follows what is up to `past` chunks before it for each layer, and nothing of what follows its
    chunk."""
    encoded = model.encode([sentence(120)])[0]
    changed = encoded._replace(x=encoded.x.clone())
    at = encoded.frames // 2 // SIZES.chunk * SIZES.chunk
    changed.x[at] += torch.randn(SIZES.width, generator=torch.Generator().manual_seed(0))
    differs = (model.whole(changed) - model.whole(encoded))[0].abs().amax(1) > 1e-5
    assert not differs[:at].any()
    assert differs[at]
    reach = at + SIZES.chunk * (1 + (SIZES.past + 1) * SIZES.decoder_layers)  # a convolution reaches into the next
    assert not differs[reach:].any()


def test_rows_do_not_hear_each_other(model: Model) -> None:
    one, two = sentence(30), sentence(30, "ben", seed=3)
    alone = said(model, [one], [0])[0]
    beside = said(model, [one, two], [0, 0])[0]
    assert_equal(alone, beside)


def test_speed_pitch_and_energy(model: Model) -> None:
    plain, fast = model.encode([sentence(40), sentence(40, speed=2.0)])
    assert abs(fast.frames - plain.frames / 2) < 0.1 * plain.frames
    higher = model.encode([sentence(40, pitch=12.0)])[0]
    assert higher.frames == plain.frames
    voiced = plain.base[:, 0] != CONFIG.norms.pitch["anna"][0]
    octave = (higher.base - plain.base)[:, 0][voiced]
    assert torch.allclose(octave, torch.full_like(octave, 0.6931), atol=1e-3)
    louder = model.encode([sentence(40, energy=6.0)])[0]
    gain = model.whole(louder) - model.whole(plain)
    assert torch.allclose(gain[..., :-1], torch.full_like(gain[..., :-1], 0.6908), atol=1e-3), "6 dB in every band"
    assert not gain[..., -1].any(), "at the same pitch"


def test_the_pause_before_is_as_long_however_fast_the_speech(model: Model) -> None:
    """It is not heard, and what begins without it begins with the wrong sound."""
    plain, fast, slow = model.encode([sentence(40), sentence(40, speed=4.0), sentence(40, speed=0.25)])
    assert plain.lead_frames == fast.lead_frames <= slow.lead_frames <= BEFORE - SAID_BEFORE
    assert fast.frames < 0.4 * plain.frames


def test_stretches_have_manners_of_their_own(model: Model) -> None:
    letters = sentence(40).phonemes
    parts = (PhonemeSpan(letters[:20]), PhonemeSpan(letters[20:], speed=4.0))
    both, plain = model.encode([Sentence(parts, "anna"), Sentence((PhonemeSpan(letters),), "anna")])
    assert both.phoneme_ends_samples[19] == plain.phoneme_ends_samples[19]
    assert both.phoneme_ends_samples[-1] - both.phoneme_ends_samples[19] < 0.5 * (
        plain.phoneme_ends_samples[-1] - plain.phoneme_ends_samples[19]
    )


def test_ends_are_of_the_phonemes_without_the_pauses(model: Model) -> None:
    encoded = model.encode([sentence(25)])[0]
    assert len(encoded.phoneme_ends_samples) == 25
    assert list(encoded.phoneme_ends_samples) == sorted(set(encoded.phoneme_ends_samples))
    assert 0 <= encoded.lead_frames <= BEFORE - SAID_BEFORE
    assert (
        encoded.phoneme_ends_samples[0] > SAID_BEFORE * model.hop_samples
    )  # the end of the pause, and the first phoneme
    assert (encoded.frames - encoded.lead_frames) * model.hop_samples - encoded.phoneme_ends_samples[
        -1
    ] <= AFTER * model.hop_samples


@given(st.lists(st.floats(0.01, 40.0), min_size=1, max_size=60))
def test_rounding_loses_no_time_and_no_phoneme(lengths: list[float]) -> None:
    frames = whole_frames(torch.tensor([lengths]))[0]
    assert frames.min() >= 1
    assert frames.sum() >= round(sum(lengths)) - 1
    if min(lengths) >= 1:
        assert abs(int(frames.sum()) - sum(lengths)) <= 1


def test_places() -> None:
    index, position = frame_positions(torch.tensor([[2, 1, 3]]), torch.arange(8)[None])
    assert index.tolist() == [[0, 0, 1, 2, 2, 2, 2, 2]]
    assert position[0, :6, 4].tolist() == [1, 0, 1, 1, 0, 0]
    assert position[0, :6, 5].tolist() == [0, 1, 1, 0, 0, 1]


# --- cloned voices ---------------------------------------------------------------------------------------


def clone(folder: Path, name: str, seed: int, scale: float = 0.3, rank: int = 4, products: str = "") -> Path:
    """`products`: those alone whose names begin so."""
    torch.manual_seed(seed)
    found = {"speaker": torch.randn(SIZES.width), "speaker_decoder": torch.randn(SIZES.width)}
    found["pitch"] = torch.tensor([5.0, 0.2])
    for product, (outputs, inputs) in SIZES.adapted().items():
        if product.startswith(products):
            found |= {
                f"{product}.down": scale * torch.randn(inputs, rank),
                f"{product}.up": scale * torch.randn(rank, outputs),
            }
    save_file(found, folder / f"{name}.safetensors")
    return folder / f"{name}.safetensors"


def test_clones_share_batches_with_other_voices(tmp_path: Path) -> None:
    model = Model("test", CONFIG, tensors(), devices.make_device("cpu", "fp32"))
    for name, seed in (("clara", 1), ("dora", 2)):
        model.register_voice(name, clone(tmp_path, name, seed))
    sentences = [sentence(30, voice) for voice in ("anna", "clara", "ben", "dora", "clara")]
    for frames, each in zip(said(model, sentences, [0, 0, 1, 2, 0]), sentences, strict=True):
        assert_equal(frames, whole(model, each))
    clara, dora = whole(model, sentences[1]), whole(model, sentences[3])
    assert clara.shape != dora.shape or (clara - dora).abs().max() > 0.1


def test_clones_of_other_ranks_and_products_share_batches_too(tmp_path: Path) -> None:
    """Voices come from other machines, cloned with other settings: whoever speaks with one harms nobody."""
    model = Model("test", CONFIG, tensors(), devices.make_device("cpu", "fp32"))
    model.register_voice("clara", clone(tmp_path, "clara", 1))
    model.register_voice("dora", clone(tmp_path, "dora", 2, rank=7))
    model.register_voice("emil", clone(tmp_path, "emil", 3, products="decoder.0"))
    model.register_voice("fred", clone(tmp_path, "fred", 4, products="none"))
    sentences = [sentence(30, voice) for voice in ("anna", "emil", "clara", "dora", "fred", "emil")]
    for frames, each in zip(said(model, sentences, [0, 0, 1, 2, 0, 0]), sentences, strict=True):
        assert_equal(frames, whole(model, each))


def test_a_voice_of_other_weights_is_refused(tmp_path: Path) -> None:
    """With these it would be somebody else's, or noise."""
    found = load_file(clone(tmp_path, "clara", 1))
    model = Model("test", CONFIG, tensors(), devices.make_device("cpu", "fp32"), fingerprint="a" * 64)
    for name, marks in (("own", {"fingerprint": "a" * 64}), ("unmarked", None)):
        save_file(found, tmp_path / name, marks)
        model.register_voice(name, tmp_path / name)
    save_file(found, tmp_path / "other", {"fingerprint": "b" * 64})
    with pytest.raises(UnknownVoice, match=r"'other' was taught to other weights of test .*clone it again"):
        model.register_voice("other", tmp_path / "other")
    assert model.voices[-2:] == ("own", "unmarked")
    save_file(found, tmp_path / "own", {"fingerprint": "b" * 64})
    os.utime(tmp_path / "own", ns=(1, 1))
    with pytest.raises(UnknownVoice):
        model.register_voice("own", tmp_path / "own")


def test_changes_are_products_added(tmp_path: Path) -> None:
    """A voice with changes is a model whose weights have them."""
    path = clone(tmp_path, "clara", 1)
    voice = read_voice(path, SIZES, torch.device("cpu"))
    assert voice.changes is not None
    weights = tensors()
    for name, (down, up) in voice.changes.items():
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + (down @ up).T
    weights["speakers"][0], weights["speakers_decoder"][0] = voice.encoder, voice.decoder
    norms = FeatureNorms((-5.0, 2.0), (0.0, 1.0), {"anna": voice.pitch})
    config = Config(SIZES, norms, 1.0, ("anna",), CONFIG.vocabulary)
    merged = Model("merged", config, weights, devices.make_device("cpu", "fp32"))
    model = Model("test", CONFIG, tensors(), devices.make_device("cpu", "fp32"))
    model.register_voice("clara", path)
    cloned, same = whole(model, sentence(30, "clara")), whole(merged, sentence(30, "anna"))
    assert cloned.shape == same.shape
    assert (cloned - same)[:, :80].abs().max() < 1e-3


def test_a_voice_of_another_model_is_refused(tmp_path: Path) -> None:
    other = {"speaker": torch.zeros(7), "speaker_decoder": torch.zeros(7), "pitch": torch.zeros(2)}
    save_file(other, tmp_path / "v")
    with pytest.raises(WeightsCorrupt, match="another model"):
        read_voice(tmp_path / "v", SIZES, torch.device("cpu"))
    for name, broken in (
        ("pitch", torch.tensor([5.0, 0.0])),
        ("pitch", torch.tensor([float("nan"), 0.2])),
        ("speaker", torch.full((SIZES.width,), float("inf"))),
        ("decoder.0.qkv.down", torch.full((SIZES.width, 4), float("nan"))),
        ("decoder.0.qkv.down", torch.zeros(SIZES.width)),
        ("decoder.0.qkv.down", torch.tensor(1.0)),
        ("speaker", torch.zeros(1)),
    ):
        save_file({**load_file(clone(tmp_path, "clara", 1)), name: broken}, tmp_path / "v")
        with pytest.raises(WeightsCorrupt):
            read_voice(tmp_path / "v", SIZES, torch.device("cpu"))
    (tmp_path / "w").write_bytes(b"nothing")
    with pytest.raises(WeightsCorrupt, match="is no voice"):
        read_voice(tmp_path / "w", SIZES, torch.device("cpu"))


# --- bad input -------------------------------------------------------------------------------------------


def test_what_cannot_be_said(model: Model) -> None:
    with pytest.raises(UnknownVoice, match="anne"):
        model.validate(sentence(3, "anne"))
    with pytest.raises(OptionError, match="U\\+00DF"):
        model.validate(Sentence((PhonemeSpan("straße"),), "anna"))


def test_checkpoints_that_do_not_fit() -> None:
    some = tensors()
    del some["out.bias"]
    with pytest.raises(WeightsCorrupt, match=r"out\.bias"):
        Model("test", CONFIG, some, devices.make_device("cpu", "fp32"))
    some = tensors() | {"out.bias": torch.zeros(3)}
    with pytest.raises(WeightsCorrupt, match=r"config\.json makes it"):
        Model("test", CONFIG, some, devices.make_device("cpu", "fp32"))
    with pytest.raises(WeightsCorrupt, match="norms"):
        Config.of({"width": 32})


def test_encoded_is_what_the_engine_reads(model: Model) -> None:
    encoded = model.encode([sentence(10)])[0]
    assert isinstance(encoded, FastPitchSentence)
    assert encoded.x.shape == (-(-encoded.frames // model.chunk_frames) * model.chunk_frames, SIZES.width)
