"""FastConformer: NeMo's numbers, the same ones for any chunk and in any company, and NeMo's own files."""

from __future__ import annotations

import io
import json
import math
import random
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import tiny_configs
import torch
import yaml
from safetensors.torch import load_file
from tiny_fastconformer import weights
from torch import Tensor

from asr_serve.devices.cpu import CpuDevice
from asr_serve.errors import OptionError, WeightsCorrupt
from asr_serve.models.asr.nemo import archive, fastconformer
from asr_serve.models.asr.nemo.fastconformer import Config, Model
from asr_serve.models.interfaces import UNBOUNDED_SAMPLES, StreamingChunk
from asr_serve.text.tokenizers import SentencePieceTokenizer

FIXTURES = Path(__file__).parent / "fixtures"
HELD = load_file(FIXTURES / "fastconformer.safetensors")
PCM = [HELD[f"pcm.{i}"].float() / 32_768 for i in range(4)]
CASES = ("hybrid", "ctc", "rnnt", "tdt")
CONTEXTS = [("hybrid", 1), ("hybrid", 3), ("hybrid", 2), ("hybrid", 0), ("ctc", 2), ("rnnt", 1), ("tdt", 1)]
"""Case, frames of look-ahead."""
CLOSE = {"atol": 1e-4, "rtol": 0.0}
"""To other software."""
SAME = {"atol": 1e-5, "rtol": 0.0}
"""To ourselves."""


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def device() -> CpuDevice:
    return CpuDevice(torch.float32)


class Checkpoint(NamedTuple):
    config: Config
    tensors: dict[str, Tensor]
    folder: Path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """What our converter makes of NeMo's archives."""
    found = {}
    for name in CASES:
        folder = tmp_path_factory.mktemp(name)
        fastconformer.convert(FIXTURES / f"fastconformer_{name}.nemo", folder)
        config = Config.of(json.loads((folder / "config.json").read_text()))
        found[name] = Checkpoint(config, load_file(folder / "model.safetensors"), folder)
    return found


@pytest.fixture
def build(checkpoints: dict[str, Checkpoint], device: CpuDevice) -> Any:
    def built(name: str, right: int | None = None, on: CpuDevice = device) -> Model:
        config = checkpoints[name].config
        return Model(config if right is None else config.with_right_context(right), checkpoints[name].tensors, on)

    return built


class Row(NamedTuple):
    """A session in a step."""

    pcm: Tensor
    slot: int
    seen: int


class Sessions:
    """State for a few sessions. What no session may read is not a number."""

    def __init__(self, model: Model, slots: int, longest: int) -> None:
        self.model, self.slots, self.specs = model, slots, model.state_specs(longest)
        self.state = {
            name: torch.full((slots + 1, *spec.shape), math.nan, dtype=spec.dtype) for name, spec in self.specs.items()
        }

    def begin(self, slot: int) -> None:
        for name, spec in self.specs.items():
            if spec.initial_value is not None:
                self.state[name][slot] = spec.initial_value

    def step(self, frames: int, rows: list[Row], fill: int = 0) -> list[Tensor]:
        """A chunk of each; then as many rows as `fill` of nobody's."""
        model, window = self.model, self.model.audio_window(frames)
        pcm = torch.zeros(len(rows) + fill, window.samples)
        counts, ends = [], []
        for into, row in zip(pcm, rows, strict=False):
            at = row.seen * model.frame_samples - window.left_samples
            part = row.pcm[max(0, at) : at + window.samples]
            into[max(0, -at) :][: len(part)] = part
            counts.append(min(frames, model.count_frames(len(row.pcm)) - row.seen))
            # Nobody knows the end before it has come.
            ends.append(UNBOUNDED_SAMPLES if at + window.samples <= len(row.pcm) else len(row.pcm))
        chunk = StreamingChunk(
            pcm,
            torch.tensor([row.slot for row in rows] + [self.slots] * fill),
            torch.tensor([row.seen for row in rows] + [0] * fill),
            torch.tensor(counts + [0] * fill),
            torch.tensor(ends + [UNBOUNDED_SAMPLES] * fill),
        )
        heard = model.step(chunk, self.state)
        return [one[:count] for one, count in zip(heard, counts, strict=False)]


def hear(model: Model, pcm: Tensor, frames: int) -> Tensor:
    """One session alone, in chunks of so many frames."""
    sessions = Sessions(model, 1, frames)
    sessions.begin(0)
    total = model.count_frames(len(pcm))
    return torch.cat([sessions.step(frames, [Row(pcm, 0, seen)])[0] for seen in range(0, total, frames)])


# --- NeMo's numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("utterance", range(4))
@pytest.mark.parametrize(("name", "right"), CONTEXTS)
def test_a_whole_utterance_equals_nemo(build: Any, name: str, right: int, utterance: int) -> None:
    ours = build(name, right).encode_utterance(PCM[utterance])
    torch.testing.assert_close(ours[0], HELD[f"{name}.{utterance}.{right}.hidden"], **CLOSE)


@pytest.mark.parametrize(("name", "right"), [(name, right) for name, right in CONTEXTS if right])
def test_every_step_equals_nemo(build: Any, name: str, right: int) -> None:
    # Without look-ahead NeMo's second step has zeros where our first layers remember: it differs from NeMo itself.
    model = build(name, right)
    for utterance in (0, 1):
        theirs = HELD[f"{name}.{utterance}.{right}.stream"]
        torch.testing.assert_close(hear(model, PCM[utterance], model.frame_block), theirs, **CLOSE)


@pytest.mark.parametrize(("name", "right"), [(name, right) for name, right in CONTEXTS if right])
def test_convolutions_remember_what_nemo_remembers(build: Any, name: str, right: int) -> None:
    model = build(name, right)
    sessions = Sessions(model, 1, model.frame_block)
    sessions.begin(0)
    sessions.step(model.frame_block, [Row(PCM[0], 0, 0)])
    theirs = HELD[f"{name}.0.{right}.conv"]
    for layer, tail in enumerate(theirs):
        torch.testing.assert_close(sessions.state[f"conv.{layer}"][0], tail, **CLOSE)


@pytest.mark.parametrize(("name", "factor"), [("hybrid", 8), ("ctc", 4)])
def test_as_many_frames_as_nemo_counts(build: Any, name: str, factor: int) -> None:
    model = build(name)
    for mels, theirs in enumerate(HELD[f"counts.{factor}"].tolist()):
        for samples in (160 * mels, 160 * mels + 159):
            assert model.count_frames(samples) == (theirs if samples else 0)


@pytest.mark.parametrize("name", ["hybrid", "ctc"])
def test_ctc_equals_nemo(build: Any, name: str) -> None:
    model = build(name)
    assert "ctc" in model.heads
    for utterance, pcm in enumerate(PCM):
        ours = model.ctc_logprobs(model.encode_utterance(pcm))
        assert ours.dtype == torch.float32
        assert ours.is_contiguous()
        assert ours.shape[2] == model.vocab_size == model.blank_id + 1
        theirs = HELD[f"{name}.{utterance}.{model.frame_block - 1}.ctc"]
        torch.testing.assert_close(ours[0], theirs, **CLOSE)


def fresh(model: Model, rows: int) -> dict[str, Tensor]:
    return {
        k: torch.zeros(rows, *spec.shape, dtype=spec.dtype)
        for k, spec in model.transducer.predictor_state_specs().items()
    }


@pytest.mark.parametrize("name", ["hybrid", "rnnt", "tdt"])
def test_predictor_and_joint_network_equal_nemo(build: Any, name: str) -> None:
    model = build(name)
    theirs = HELD[f"{name}.joint"]
    projected = model.transducer.project_encoder(HELD[f"{name}.0.1.hidden"][None])[0]
    memory = fresh(model, 1)
    for frame, token in enumerate([model.blank_id, *HELD[f"{name}.tokens"].tolist()]):
        before = {key: value.clone() for key, value in memory.items()}
        predicted, after = model.transducer.predict(torch.tensor([token]), memory)
        assert all(torch.equal(before[key], memory[key]) for key in before)
        ours = model.transducer.joint(projected[frame : frame + 1], predicted)
        assert ours.dtype == torch.float32
        assert ours.shape[1] == model.vocab_size + len(model.transducer.durations)
        torch.testing.assert_close(ours[0], theirs[frame], **CLOSE)
        memory = after


def test_predictor_rows_are_alone(build: Any) -> None:
    model = build("rnnt")
    tokens = torch.tensor([3, 17, model.blank_id])
    memory = {key: torch.rand_like(value) for key, value in fresh(model, 3).items()}
    together, after = model.transducer.predict(tokens, memory)
    for row in range(3):
        alone, own = model.transducer.predict(tokens[row : row + 1], {k: v[row : row + 1] for k, v in memory.items()})
        torch.testing.assert_close(together[row : row + 1], alone, **SAME)
        for key, value in own.items():
            torch.testing.assert_close(after[key][row : row + 1], value, **SAME)


def greedy(model: Model, hidden: Tensor) -> list[int]:
    """Frame by frame, at most five tokens of each."""
    projected = model.transducer.project_encoder(hidden[None])[0]
    predicted, memory = model.transducer.predict(torch.tensor([model.blank_id]), fresh(model, 1))
    found: list[int] = []
    frame = 0
    while frame < len(projected):
        skip = said = 0
        while not skip and said < 5:
            logits = model.transducer.joint(projected[frame : frame + 1], predicted)[0]
            token = int(logits[: model.vocab_size].argmax())
            if model.transducer.durations:
                skip = model.transducer.durations[int(logits[model.vocab_size :].argmax())]
            if token == model.blank_id:
                break
            said += 1
            found.append(token)
            predicted, memory = model.transducer.predict(torch.tensor([token]), memory)
        frame += max(1, skip)
    return found


@pytest.mark.parametrize("name", ["hybrid", "rnnt", "tdt"])
def test_steps_say_what_nemo_says(build: Any, name: str) -> None:
    model = build(name)
    for utterance, pcm in enumerate(PCM):
        theirs = HELD[f"{name}.{utterance}.1.tokens"].tolist()
        assert greedy(model, hear(model, pcm, 2 * model.frame_block)) == theirs


# --- the same in any company ------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2, 3, 7])
@pytest.mark.parametrize(("name", "right"), CONTEXTS)
def test_chunks_of_any_length_give_the_same(build: Any, name: str, right: int, blocks: int) -> None:
    model = build(name, right)
    for pcm in PCM[:2]:
        torch.testing.assert_close(hear(model, pcm, blocks * model.frame_block), model.encode_utterance(pcm)[0], **SAME)


def test_a_model_that_has_heard_longer_chunks_gives_the_same(build: Any) -> None:
    model = build("hybrid")
    hear(model, PCM[0], 8 * model.frame_block)
    torch.testing.assert_close(hear(model, PCM[0], model.frame_block), model.encode_utterance(PCM[0])[0], **SAME)


@pytest.mark.parametrize("name", CASES)
def test_a_session_may_end_anywhere(build: Any, name: str) -> None:
    model = build(name)
    ends = (1, 159, 160, 161, 1_279, 1_280, 1_479, 1_480, 1_481, 2_559, 2_561, 2_720, 5_119, 5_320, 6_401)
    for samples in ends:
        pcm = PCM[0][3_000:][:samples]
        torch.testing.assert_close(hear(model, pcm, 2 * model.frame_block), model.encode_utterance(pcm)[0], **SAME)


@pytest.mark.parametrize("name", CASES)
def test_rows_stand_anywhere_and_end_anywhere(build: Any, name: str) -> None:
    model, chance = build(name), random.Random(11)
    chunk = 2 * model.frame_block
    pcms = [pcm[100 * i :] * (1 - 0.1 * i) for i, pcm in enumerate(PCM + PCM)]
    wanted = [model.encode_utterance(pcm)[0] for pcm in pcms]
    sessions = Sessions(model, 3, chunk)
    heard: list[list[Tensor]] = [[] for _ in pcms]
    waiting, live = list(range(len(pcms))), dict.fromkeys(range(3), -1)
    while waiting or any(session >= 0 for session in live.values()):
        for slot in [slot for slot, session in live.items() if session < 0 and waiting]:
            live[slot] = waiting.pop(0)
            sessions.begin(slot)
        taken = [slot for slot, session in live.items() if session >= 0]
        taken = chance.sample(taken, chance.randint(1, len(taken)))
        kept = {
            name: tensor[[slot for slot in range(3) if slot not in taken]].clone()
            for name, tensor in sessions.state.items()
        }
        rows = [Row(pcms[live[slot]], slot, sum(map(len, heard[live[slot]]))) for slot in taken]
        for slot, frames in zip(taken, sessions.step(chunk, rows, fill=chance.randint(0, 2)), strict=True):
            heard[live[slot]].append(frames)
            if sum(map(len, heard[live[slot]])) == len(wanted[live[slot]]):
                live[slot] = -1
        for key, before in kept.items():
            now = sessions.state[key][[slot for slot in range(3) if slot not in taken]]
            assert torch.equal(before.nan_to_num(-9), now.nan_to_num(-9)), f"{key} of a row that did not run"
    for ours, whole in zip(heard, wanted, strict=True):
        torch.testing.assert_close(torch.cat(ours), whole, **SAME)


def test_a_window_holds_all_that_a_chunk_needs(build: Any) -> None:
    model = build("hybrid")
    chunk, seen = 2 * model.frame_block, 2 * model.frame_block
    window = model.audio_window(chunk)
    begin = seen * model.frame_samples - window.left_samples
    pcm = PCM[0].clone()
    whole = model.encode_utterance(pcm)[0][seen : seen + chunk]
    pcm[begin + window.samples :] = 0.5
    torch.testing.assert_close(model.encode_utterance(pcm)[0][seen : seen + chunk], whole, **SAME)
    pcm = PCM[0].clone()
    pcm[begin + window.samples - 40 :] = 0.5  # fewer would hardly count: the last are at the edge of a Hann window
    assert not torch.allclose(model.encode_utterance(pcm)[0][seen : seen + chunk], whole, **SAME)


# --- other numbers, other sizes ---------------------------------------------------------------------------


def test_bf16_is_near(build: Any) -> None:
    exact, rounded = build("hybrid"), build("hybrid", on=CpuDevice(torch.bfloat16))
    assert {spec.dtype for spec in rounded.state_specs(2).values()} == {torch.float32, torch.bfloat16}
    wanted, ours = exact.encode_utterance(PCM[0])[0], hear(rounded, PCM[0], 2 * rounded.frame_block)
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - wanted).square().mean().sqrt() < 0.05 * wanted.std()
    logits = rounded.ctc_logprobs(ours[None])
    assert logits.dtype == torch.float32
    predicted, memory = rounded.transducer.predict(torch.tensor([3]), fresh(rounded, 1))
    assert all(value.dtype == torch.float32 for value in memory.values())
    joint = rounded.transducer.joint(rounded.transducer.project_encoder(ours[None])[0, :1], predicted)
    assert joint.dtype == torch.float32


@pytest.mark.parametrize("changes", [{}, {"conv_norm_type": "batch_norm", "use_bias": False}])
def test_the_tiny_model_has_every_part(device: CpuDevice, changes: Mapping[str, Any]) -> None:
    config = msgspec.structs.replace(tiny_configs.fastconformer_config(), **changes)
    assert Config.of(json.loads(msgspec.json.encode(config))) == config
    tensors = weights(config)
    assert {fastconformer.rename(name) for name in tensors} == set(tensors)
    model = Model(config, tensors, device)
    assert model.heads == ("rnnt", "ctc")
    torch.testing.assert_close(hear(model, PCM[1], 4), model.encode_utterance(PCM[1])[0], **SAME)
    assert greedy(model, model.encode_utterance(PCM[1])[0])


@pytest.mark.parametrize("missing", ["encoder.layers.1.conv.depthwise_conv.weight", "joint.enc.bias", "ctc.weight"])
def test_a_tensor_that_is_missing_is_named(device: CpuDevice, missing: str) -> None:
    tensors = weights(tiny_configs.fastconformer_config())
    del tensors[missing]
    with pytest.raises(WeightsCorrupt, match=missing):
        Model(tiny_configs.fastconformer_config(), tensors, device)


def test_cards_are_streaming() -> None:
    assert len({card.name for card in fastconformer.CARDS}) == len(fastconformer.CARDS)
    for card in fastconformer.CARDS:
        assert card.streaming
        assert card.files == ("*.nemo",)


# --- NeMo's own files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "heads", "contexts", "durations"),
    [
        ("hybrid", ("rnnt", "ctc"), ((8, 1), (8, 3), (9, 2), (8, 0)), ()),
        ("ctc", ("ctc",), ((6, 2),), ()),
        ("rnnt", ("rnnt",), ((4, 1),), ()),
        ("tdt", ("tdt",), ((10, 1),), (0, 1, 2, 4)),
    ],
)
def test_an_archive_becomes_a_checkpoint(
    checkpoints: dict[str, Checkpoint], name: str, heads: Any, contexts: Any, durations: Any
) -> None:
    config, _, folder = checkpoints[name]
    assert (config.heads, config.att_context_size, config.durations) == (heads, contexts, durations)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "pieces.json"]
    assert json.loads((folder / "config.json").read_text())["model_type"] == "fastconformer"
    pieces = SentencePieceTokenizer(folder / "pieces.json")
    assert len(pieces.pieces) == config.vocab_size == 23 + 1
    assert pieces.decode([1, 2, 0, 4, 5]) == "ab de"


def test_an_archive_is_found_by_itself_and_in_a_folder(tmp_path: Path) -> None:
    one = FIXTURES / "fastconformer_ctc.nemo"
    assert fastconformer.is_package_folder(one)
    assert not fastconformer.is_package_folder(tmp_path)
    assert not fastconformer.is_package_folder(tmp_path / "absent.nemo")
    (tmp_path / "a.nemo").write_bytes(one.read_bytes())
    assert fastconformer.is_package_folder(tmp_path)
    (tmp_path / "b.nemo").write_bytes(one.read_bytes())
    assert not fastconformer.is_package_folder(tmp_path)  # which?


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {Path(m.name).name: tar.extractfile(m).read() for m in tar.getmembers() if m.isfile()}  # type: ignore[union-attr]


def pack(path: Path, files: Mapping[str, bytes], mode: Any = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, data in files.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
    return path


def test_an_archive_may_be_compressed(tmp_path: Path, checkpoints: dict[str, Checkpoint]) -> None:
    path = pack(tmp_path / "c.nemo", members(FIXTURES / "fastconformer_ctc.nemo"), "w:gz")
    (tmp_path / "to").mkdir()
    fastconformer.convert(path, tmp_path / "to")
    ours = load_file(tmp_path / "to" / "model.safetensors")
    assert ours.keys() == checkpoints["ctc"].tensors.keys()
    assert all(torch.equal(tensor, checkpoints["ctc"].tensors[name]) for name, tensor in ours.items())


def torch_bytes(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_weights.ckpt": None}, "holds no model_weights.ckpt"),
        ({"model_config.yaml": None}, "holds no model_config.yaml"),
        ({"model_config.yaml": b"a: [1"}, "no YAML"),
        ({"model_config.yaml": b"- 1"}, "holds a list"),
        ({"model_weights.ckpt": b"PK\x03\x04 no"}, "holds no tensors"),
        ({"model_weights.ckpt": torch_bytes({"state_dict": 3})}, "no mapping of names to tensors"),
        ({"model_weights.ckpt": torch_bytes({"prompt_kernel.weight": torch.ones(2)})}, "a tensor prompt_kernel.weight"),
    ],
)
def test_an_archive_that_is_none_is_refused(tmp_path: Path, change: Mapping[str, Any], says: str) -> None:
    files = members(FIXTURES / "fastconformer_ctc.nemo") | change
    path = pack(tmp_path / "x.nemo", {name: data for name, data in files.items() if data is not None})
    with pytest.raises(WeightsCorrupt, match=says):
        fastconformer.convert(path, tmp_path)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.nemo").write_bytes(b"no tar at all")
    with pytest.raises(WeightsCorrupt, match="no tar file"):
        fastconformer.convert(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("section", "name", "value", "says"),
    [
        ("preprocessor", "normalize", "per_feature", "normalize='per_feature'"),
        ("preprocessor", "window_size", 0.02, "window_size=0.02"),
        ("encoder", "att_context_style", "regular", "att_context_style='regular'"),
        ("encoder", "causal_downsampling", False, "causal_downsampling=False"),
        ("encoder", "conv_context_size", None, "conv_context_size=None"),
        ("encoder", "subsampling", "striding", "subsampling='striding'"),
        ("encoder", "self_attention_model", "abs_pos", "self_attention_model='abs_pos'"),
        ("encoder", "reduction", "pooling", "reduction='pooling'"),
        ("encoder", "feat_out", 128, "feat_out=128"),
        ("encoder", "att_context_size", [-1, 1], r"att_context_size=\[-1, 1\]"),
        ("encoder", "att_context_size", [[8, 1], [8, 2]], r"att_context_size=\[8, 2\]"),
        ("encoder", "att_context_size", None, "att_context_size"),
        ("encoder", "n_layers", "two", "n_layers"),
        ("decoding", "big_blank_durations", [2, 4], "big_blank_durations"),
        ("joint", "vocabulary", [], "no vocabulary"),
        ("joint", "jointnet", {"joint_hidden": 20, "activation": "gelu"}, "activation='gelu'"),
    ],
)
def test_a_model_that_is_not_computed_here_is_refused(section: str, name: str, value: Any, says: str) -> None:
    settings = archive.settings(FIXTURES / "fastconformer_hybrid.nemo")
    settings[section][name] = value
    if section == "joint" and name == "vocabulary":
        del settings["labels"]
        settings["decoder"].pop("vocabulary", None)
    with pytest.raises(WeightsCorrupt, match=says):
        Config.of(settings)


def test_settings_are_read_as_nemo_writes_them() -> None:
    written = yaml.safe_load(members(FIXTURES / "fastconformer_hybrid.nemo")["model_config.yaml"])
    assert Config.of(written).feat_in == 16


def test_a_look_ahead_is_one_of_those_trained_for() -> None:
    config = tiny_configs.fastconformer_config()
    assert config.with_right_context(3).att_context_size == ((8, 3), (8, 1), (8, 0))
    with pytest.raises(OptionError, match="this model was trained for 0, 1, 3"):
        config.with_right_context(13)
