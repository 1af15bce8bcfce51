"""U2++: WeNet's numbers, the same ones for any chunk and in any company, and WeNet's own files."""

from __future__ import annotations

import json
import math
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import tiny_configs
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from asr_serve.devices.cpu import CpuDevice
from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr.wenet import u2pp, wenet
from asr_serve.models.interfaces import UNBOUNDED_SAMPLES, StreamingChunk
from asr_serve.text import tokenizers

FIXTURE = Path(__file__).parent / "fixtures" / "u2pp.safetensors"
with safe_open(FIXTURE, "pt") as file:
    METADATA = file.metadata()
    HELD: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
CONFIGS: dict[str, dict[str, Any]] = json.loads(METADATA["configs"])
GUESSES: list[list[int]] = json.loads(METADATA["guesses"])
PCM = HELD["pcm"].float() / 32_768
CLOSE = {"atol": 1e-4, "rtol": 0.0}
"""To other software."""
SAME = {"atol": 1e-5, "rtol": 0.0}
"""To ourselves."""


def upstream(name: str) -> dict[str, Tensor]:
    """WeNet's tensors by WeNet's names."""
    prefix = f"{name}/weights/"
    return {key.removeprefix(prefix): tensor for key, tensor in HELD.items() if key.startswith(prefix)}


def build(name: str, device: CpuDevice) -> u2pp.Model:
    tensors = {new: tensor for key, tensor in upstream(name).items() if (new := u2pp.rename(key))}
    return u2pp.Model(u2pp.Config.of(CONFIGS[name]), tensors, device)


@pytest.fixture(scope="module")
def device() -> CpuDevice:
    return CpuDevice(torch.float32)


@pytest.fixture(params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str, device: CpuDevice) -> u2pp.Model:
    return build(name, device)


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


class Row(NamedTuple):
    """A session in a step."""

    pcm: Tensor
    slot: int
    seen: int


class Sessions:
    """State for a few sessions; what nothing has written is not a number."""

    def __init__(self, model: u2pp.Model, slots: int, longest: int) -> None:
        self.model, self.slots = model, slots
        self.state = {
            name: torch.full(
                (slots + 1, *spec.shape), math.nan if spec.initial_value is None else spec.initial_value
            ).to(spec.dtype)
            for name, spec in model.state_specs(longest).items()
        }

    def step(self, frames: int, rows: list[Row], fill: int = 0) -> list[Tensor]:
        """A chunk of each; then as many rows as `fill` of nobody's."""
        window = self.model.audio_window(frames)
        pcm = torch.zeros(len(rows) + fill, window.samples)
        counts = []
        for into, row in zip(pcm, rows, strict=False):
            part = row.pcm[row.seen * self.model.frame_samples - window.left_samples :][: window.samples]
            into[: len(part)] = part
            counts.append(max(0, min(frames, self.model.count_frames(len(row.pcm)) - row.seen)))
        chunk = StreamingChunk(
            pcm,
            torch.tensor([row.slot for row in rows] + [self.slots] * fill),
            torch.tensor([row.seen for row in rows] + [0] * fill),
            torch.tensor(counts + [0] * fill),
            torch.tensor([len(row.pcm) for row in rows] + [UNBOUNDED_SAMPLES] * fill),
        )
        heard = self.model.step(chunk, self.state)
        return [one[:count] for one, count in zip(heard, counts, strict=False)]


def hear(model: u2pp.Model, pcm: Tensor, frames: int) -> Tensor:
    """One session alone, in chunks of so many frames."""
    sessions = Sessions(model, 1, frames)
    total = model.count_frames(len(pcm))
    return torch.cat([sessions.step(frames, [Row(pcm, 0, seen)])[0] for seen in range(0, total, frames)])


# --- WeNet's numbers --------------------------------------------------------------------------------------


def test_a_whole_utterance_equals_wenet(name: str, model: u2pp.Model) -> None:
    torch.testing.assert_close(model.encode_utterance(PCM), HELD[f"{name}/masked"], **CLOSE)


@pytest.mark.parametrize("chunks", [1, 2, 8])
def test_every_step_equals_wenet(name: str, model: u2pp.Model, chunks: int) -> None:
    theirs = HELD[f"{name}/chunks"][0]
    ours = hear(model, PCM, chunks * model.frame_block)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(ours, model.encode_utterance(PCM)[0], **SAME)


def test_ctc_equals_wenet(name: str, model: u2pp.Model) -> None:
    ours = model.ctc_logprobs(model.encode_utterance(PCM))
    assert ours.dtype == torch.float32
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, HELD[f"{name}/ctc"], **CLOSE)


def test_rescoring_equals_wenet(name: str, model: u2pp.Model) -> None:
    hidden = HELD[f"{name}/masked"][0]
    scores = model.rescore(hidden, GUESSES)
    torch.testing.assert_close(torch.tensor(scores), HELD[f"{name}/scores"], **CLOSE)
    heard = json.loads(METADATA["ctc_logprobs"])
    sums = [score + model.ctc_weight * logprob for score, logprob in zip(scores, heard, strict=True)]
    assert sums.index(max(sums)) == json.loads(METADATA["best"])[name]


def test_a_guess_is_scored_alike_in_any_list(model: u2pp.Model) -> None:
    hidden = model.encode_utterance(PCM)[0]
    together = model.rescore(hidden, GUESSES)
    alone = [model.rescore(hidden, [guess])[0] for guess in GUESSES]
    assert together == pytest.approx(alone, abs=1e-4)
    assert model.rescore(hidden, []) == []


def test_one_decoder_is_enough(device: CpuDevice) -> None:
    config = msgspec.structs.replace(tiny_configs.u2pp_config(), reverse_layers=0)
    tensors = {
        new: tensor
        for key, tensor in upstream("conv2d").items()
        if not key.startswith("decoder.right_decoder.")
        and (new := u2pp.rename(key.replace("decoder.left_decoder.", "decoder.")))
    }
    hidden = HELD["conv2d/masked"][0]
    model, both = u2pp.Model(config, tensors, device), build("conv2d", device)
    both.config = msgspec.structs.replace(both.config, reverse_weight=0.0)
    assert model.rescore(hidden, GUESSES) == pytest.approx(both.rescore(hidden, GUESSES), abs=1e-5)


# --- the same in any company ------------------------------------------------------------------------------


def test_rows_stand_anywhere_and_end_anywhere(model: u2pp.Model) -> None:
    chunk = 2 * model.frame_block
    lengths = [len(PCM), len(PCM) * 2 // 3, len(PCM) // 2 + 333, len(PCM) // 4]
    pcms = [PCM[len(PCM) - length :] * (1 - 0.2 * i) for i, length in enumerate(lengths)]
    wanted = [hear(model, pcm, chunk) for pcm in pcms]
    sessions = Sessions(model, 3, chunk)
    heard: list[list[Tensor]] = [[] for _ in pcms]
    # The second begins a step later, the third two; the fourth gets the row of the second when that is over.
    slots, begins = [2, 0, 1, 0], [0, 1, 2, None]
    seen = [0] * len(pcms)
    for turn in range(40):
        if begins[3] is None and seen[1] >= len(wanted[1]):
            begins[3] = turn
            for spec, tensor in zip(model.state_specs(chunk).values(), sessions.state.values(), strict=True):
                if spec.initial_value is not None:
                    tensor[0] = spec.initial_value
        live = [i for i, at in enumerate(begins) if at is not None and at <= turn and seen[i] < len(wanted[i])]
        if not live:
            break
        steps = sessions.step(chunk, [Row(pcms[i], slots[i], seen[i]) for i in live], fill=turn % 3)
        for i, frames in zip(live, steps, strict=True):
            heard[i].append(frames)
            seen[i] += chunk
    for ours, alone in zip(heard, wanted, strict=True):
        torch.testing.assert_close(torch.cat(ours), alone, **SAME)


def test_rows_that_are_not_in_a_step_keep_their_state(model: u2pp.Model) -> None:
    sessions = Sessions(model, 2, model.frame_block)
    sessions.step(model.frame_block, [Row(PCM, 0, 0), Row(PCM.flip(0), 1, 0)])
    before = {name: tensor.clone() for name, tensor in sessions.state.items()}
    sessions.step(model.frame_block, [Row(PCM, 0, model.frame_block)], fill=2)
    for key, tensor in sessions.state.items():
        torch.testing.assert_close(tensor[1], before[key][1], atol=0, rtol=0, equal_nan=True)
        assert not torch.equal(tensor[0].nan_to_num(), before[key][0].nan_to_num())


def test_the_reach_of_attention_is_bounded(model: u2pp.Model) -> None:
    """Past all that the layers reach back to, the beginning of a session changes nothing."""
    reach = model.config.layers * (model.left + model.config.kernel - 1) + model.frame_block
    far = (-(-reach // model.frame_block) + 1) * model.frame_block
    samples = (far + 2 * model.frame_block) * model.frame_samples
    pcm = PCM.repeat(-(-samples // len(PCM)))[:samples]
    other = pcm.clone()
    other[: model.frame_samples] += 0.5
    ours, theirs = (hear(model, each, model.frame_block) for each in (pcm, other))
    assert not torch.allclose(ours[: model.frame_block], theirs[: model.frame_block], atol=1e-3)
    torch.testing.assert_close(ours[far:], theirs[far:], **SAME)


def test_places_are_exact_however_long_a_session(name: str, model: u2pp.Model) -> None:
    """Days in: float32 could not tell one frame from the next."""
    config, left, frames, seen = model.config, model.left, model.frame_block, 40_000_003
    at = torch.arange(seen - left, seen + frames, dtype=torch.float64)[:, None]
    speeds = 10_000.0 ** (-torch.arange(0, config.width, 2, dtype=torch.float64) / config.width)
    waves = torch.stack([(at * speeds).sin(), (at * speeds).cos()], dim=-1).flatten(1)
    shifts, biases = model.positions.split(*model.positions(torch.tensor([0, seen]), left, frames))
    tensors = upstream(name)
    for i in range(config.layers):
        weight, u, v = (
            tensors[f"encoder.encoders.{i}.self_attn.{part}"].double()
            for part in ("linear_pos.weight", "pos_bias_u", "pos_bias_v")
        )
        places = (waves @ weight.T).unflatten(1, (config.heads, -1))
        torch.testing.assert_close(shifts[i][1].double(), places[left:], **CLOSE)
        wanted = torch.einsum("thd,hd->ht", places, v - u)
        torch.testing.assert_close(biases[i][1, :, 0].double(), wanted, **CLOSE)


def test_bf16_is_near(name: str) -> None:
    model = build(name, CpuDevice(torch.bfloat16))
    wanted = HELD[f"{name}/masked"][0]
    for ours in (hear(model, PCM, model.frame_block), model.encode_utterance(PCM)[0]):
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - wanted).abs().mean() < 0.05 * wanted.abs().mean()
    scores = torch.tensor(model.rescore(wanted.bfloat16(), GUESSES))
    torch.testing.assert_close(scores, HELD[f"{name}/scores"], atol=0.1, rtol=0.02)


# --- lengths ----------------------------------------------------------------------------------------------


def test_windows_hold_what_their_frames_need(model: u2pp.Model) -> None:
    for frames in (model.frame_block, 3 * model.frame_block):
        window = model.audio_window(frames)
        assert window.left_samples == 0
        assert model.count_frames(window.samples) == frames
        assert model.count_frames(window.samples - 1) == frames - 1
        assert window.samples > frames * model.frame_samples


@pytest.mark.parametrize("samples", [0, 1, 399, 1_000, 2_500, 5_000])
def test_short_utterances(model: u2pp.Model, samples: int) -> None:
    assert model.encode_utterance(PCM[:samples]).shape == (1, model.count_frames(samples), model.config.width)


def test_a_row_without_frames_changes_nothing(model: u2pp.Model) -> None:
    sessions = Sessions(model, 1, model.frame_block)
    before = {name: tensor.clone() for name, tensor in sessions.state.items()}
    assert len(sessions.step(model.frame_block, [Row(PCM[:300], 0, 0)])[0]) == 0
    for key, tensor in sessions.state.items():
        torch.testing.assert_close(tensor[0], before[key][0], atol=0, rtol=0, equal_nan=True)


# --- WeNet's files ----------------------------------------------------------------------------------------

PIECES = ["<blank>", "<unk>", "\u2581THE", "S", "<space>", *[f"w{i}" for i in range(5, 22)], "<sos/eos>"]


def experiment(folder: Path, name: str = "conv2d", **encoder: Any) -> Path:
    """A folder as WeNet's training leaves it."""
    config = CONFIGS[name]
    folder.mkdir(exist_ok=True)
    settings = {
        "encoder": "conformer",
        "encoder_conf": {
            "output_size": config["width"],
            "attention_heads": config["heads"],
            "linear_units": config["inner"],
            "num_blocks": config["layers"],
            "input_layer": name,
            "cnn_module_kernel": config["kernel"],
            "cnn_module_norm": config.get("conv_norm", "layer_norm"),
            "causal": True,
            "use_dynamic_chunk": True,
            "dropout_rate": 0.1,
            **encoder,
        },
        "decoder": "bitransformer",
        "decoder_conf": {
            "attention_heads": config["decoder_heads"],
            "linear_units": config["decoder_inner"],
            "num_blocks": config["decoder_layers"],
            "r_num_blocks": config["reverse_layers"],
        },
        "model_conf": {"ctc_weight": config.get("ctc_weight", 0.3), "reverse_weight": config["reverse_weight"]},
        "dataset_conf": {"fbank_conf": {"num_mel_bins": config["mels"]}},
    }
    (folder / "train.yaml").write_bytes(msgspec.yaml.encode(settings))
    (folder / "units.txt").write_text("".join(f"{piece} {i}\n" for i, piece in enumerate(PIECES)))
    torch.save({f"module.{key}": tensor.clone() for key, tensor in upstream(name).items()}, folder / "final.pt")
    return folder


def read(folder: Path, device: CpuDevice) -> u2pp.Model:
    config = u2pp.Config.of(json.loads((folder / "config.json").read_text()))
    return u2pp.Model(config, load_file(folder / "model.safetensors"), device)


def test_an_experiment_becomes_a_checkpoint(tmp_path: Path, name: str, device: CpuDevice) -> None:
    source = experiment(tmp_path / "exp", name, static_chunk_size=0)
    assert u2pp.is_package_folder(source)
    u2pp.convert(source, tmp_path)
    model = read(tmp_path, device)
    # Models that were trained for any chunk come with one of ours.
    assert (model.frame_block, model.left) == (16, 64)
    chosen = {key: CONFIGS[name][key] for key in ("chunk", "left_chunks")}
    model = u2pp.Model(
        msgspec.structs.replace(model.config, **chosen), load_file(tmp_path / "model.safetensors"), device
    )
    assert model.config == u2pp.Config.of(CONFIGS[name])
    torch.testing.assert_close(model.encode_utterance(PCM), HELD[f"{name}/masked"], **CLOSE)
    assert tokenizers.load_tokenizer(tmp_path).decode([0, 2, 3, 0, 4, 1, 7, 22]) == "THES w7"


def test_an_archive_becomes_a_checkpoint(tmp_path: Path, device: CpuDevice) -> None:
    source = tmp_path / "hub"
    source.mkdir()
    with tarfile.open(source / "aishell_u2pp_conformer_exp.tar.gz", "w:gz") as archive:
        archive.add(experiment(tmp_path / "exp"), "../20210601_u2pp_conformer_exp")
    assert u2pp.is_package_folder(source)
    u2pp.convert(source, tmp_path)
    assert read(tmp_path, device).count_frames(len(PCM)) == HELD["conv2d/masked"].shape[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json", "exp", "hub", "model.safetensors", "pieces.json"
    ]  # fmt: skip


def test_a_static_chunk_is_kept(tmp_path: Path) -> None:
    u2pp.convert(experiment(tmp_path / "exp", use_dynamic_chunk=False, static_chunk_size=8), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["chunk"] == 8


def test_the_last_average_is_taken_where_nothing_is_final(tmp_path: Path) -> None:
    source = experiment(tmp_path / "exp")
    (source / "avg_9.pt").write_bytes(b"not this one")
    (source / "final.pt").rename(source / "avg_30.pt")
    assert u2pp.is_package_folder(source)
    u2pp.convert(source, tmp_path)
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.parametrize("form", ["json", "kaldi"])
def test_feature_statistics_may_lie_beside(tmp_path: Path, form: str) -> None:
    source = experiment(tmp_path / "exp")
    weights = torch.load(source / "final.pt", weights_only=True)
    mean, istd = (weights.pop(f"module.encoder.global_cmvn.{part}").double() for part in ("mean", "istd"))
    torch.save(weights, source / "final.pt")
    count = 4_000
    sums, squares = (mean * count).tolist(), ((istd**-2 + mean**2) * count).tolist()
    if form == "json":
        text = json.dumps({"mean_stat": sums, "var_stat": squares, "frame_num": count})
    else:
        first, second = (" ".join(f"{number!r}" for number in numbers) for numbers in (sums, squares))
        text = f" [\n  {first} {count} \n  {second} 0 ]\n"
    (source / "global_cmvn").write_text(text)
    u2pp.convert(source, tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(held["encoder.global_cmvn.mean"], mean.float())
    torch.testing.assert_close(held["encoder.global_cmvn.istd"], istd.float())


def test_without_statistics_features_are_left_as_they_are(tmp_path: Path) -> None:
    source = experiment(tmp_path / "exp")
    weights = torch.load(source / "final.pt", weights_only=True)
    torch.save({key: each for key, each in weights.items() if "global_cmvn" not in key}, source / "final.pt")
    u2pp.convert(source, tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    assert held["encoder.global_cmvn.mean"].eq(0).all()
    assert held["encoder.global_cmvn.istd"].eq(1).all()


@pytest.mark.parametrize(
    ("encoder", "named"),
    [
        ({"causal": False}, "causal=False"),
        ({"pos_enc_layer_type": "abs_pos"}, "pos_enc_layer_type=abs_pos"),
        ({"activation_type": "relu"}, "activation_type=relu"),
        ({"input_layer": "linear"}, "input_layer=linear"),
        ({"use_dynamic_chunk": False}, "whole utterances"),
        ({"linear_units": 32}, "feed_forward.w_1.weight"),
    ],
)
def test_what_is_not_computed_here_is_refused(tmp_path: Path, encoder: dict[str, Any], named: str) -> None:
    with pytest.raises(WeightsCorrupt, match=named):
        u2pp.convert(experiment(tmp_path / "exp", **encoder), tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


class Trap:
    """What a checkpoint must not be able to make: anything at all."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("caught",)


@pytest.mark.parametrize("content", ["code", "noise", "list"])
def test_a_broken_checkpoint_is_refused(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = experiment(tmp_path / "exp")
    if content == "noise":
        (source / "final.pt").write_bytes(bytes(range(256)))
    else:
        torch.save({"code": Trap()} if content == "code" else [torch.zeros(1)], source / "final.pt")
    with pytest.raises(WeightsCorrupt, match=r"final\.pt"):
        u2pp.convert(source, tmp_path)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[ 1 2", "{}", '{"mean_stat": [1], "var_stat": [1], "frame_num": 0}', "[ a ]"])
def test_broken_statistics_are_refused(text: str) -> None:
    with pytest.raises(WeightsCorrupt, match="global_cmvn"):
        wenet.cmvn(text)


@pytest.mark.parametrize("text", ["- 1\n", "a: [", "a: !!python/object/apply:print [caught]\n"])
def test_broken_settings_are_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = experiment(tmp_path / "exp")
    (source / "train.yaml").write_text(text)
    with pytest.raises(WeightsCorrupt, match=r"train\.yaml"):
        u2pp.convert(source, tmp_path)
    assert not capsys.readouterr().out


def test_a_broken_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x_conformer_exp.tar.gz").write_bytes(b"not gzip")
    with pytest.raises(WeightsCorrupt, match=r"x_conformer_exp\.tar\.gz"):
        u2pp.convert(tmp_path, tmp_path)


def test_other_folders_are_none_of_ours(tmp_path: Path) -> None:
    assert not u2pp.is_package_folder(tmp_path)
    source = experiment(tmp_path / "exp")
    for name in ("train.yaml", "units.txt", "final.pt"):
        held = (source / name).read_bytes()
        (source / name).unlink()
        assert not u2pp.is_package_folder(source)
        (source / name).write_bytes(held)
    assert u2pp.is_package_folder(source)


@pytest.mark.parametrize(
    "odd", [{"vocab": None}, {"subsampling": 5}, {"conv_norm": "group_norm"}, {"sos": None}], ids=str
)
def test_an_odd_config_is_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(WeightsCorrupt):
        u2pp.Config.of(CONFIGS["conv2d"] | odd)


def test_a_missing_tensor_is_named(device: CpuDevice) -> None:
    tensors = {new: tensor for key, tensor in upstream("conv2d").items() if (new := u2pp.rename(key))}
    del tensors["encoder.encoders.1.self_attn.pos_bias_v"]
    with pytest.raises(WeightsCorrupt, match=r"encoder\.encoders\.1\.self_attn\.pos_bias_v"):
        u2pp.Model(tiny_configs.u2pp_config(), tensors, device)


def test_tiny_is_the_first_of_the_fixture() -> None:
    assert u2pp.Config.of(CONFIGS["conv2d"]) == tiny_configs.u2pp_config()


def test_cards_say_how_they_stream() -> None:
    for card in u2pp.CARDS:
        assert card.streaming
        assert card.heads == u2pp.Model.heads
        assert card.chunk % wenet.CHUNK == 0
