"""Fun-ASR-Nano and LLMASR compute what funasr 1.4.16 computes, from folders of its form, in any company."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fun_asr_folders import MODELS, clips, facts, tensors, weights, write_converted, write_folder
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import asr_serve
from asr_serve import devices
from asr_serve.api import cli
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.errors import OptionError, UnsupportedOption, WeightsCorrupt, WeightsMissing
from asr_serve.models.asr.speech_llm import funasr_folder, llm_asr
from asr_serve.models.asr.speech_llm.adaptors import Adaptor, AdaptorConfig, low_frame_rate_tokens
from asr_serve.models.asr.speech_llm.sanm_encoder import EncoderTensors
from asr_serve.models.interfaces import PROMPT_EMBEDDING
from asr_serve.models.packing import PagedKeyValues, pack_clips

TOLERANCE = 1e-4
CARDS = {"nano": "fun-asr-nano", "llmasr": "llm-asr"}
LANGUAGES = {"英文": "en", "中文": "zh", "日文": "ja"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_converted(name, tmp_path_factory.mktemp(name)) for name in MODELS}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, llm_asr.Model]:
    made: dict[str, Any] = {
        name: AsrCheckpoint.find(CARDS[name], folder).build("cpu", "fp32").model for name, folder in folders.items()
    }
    return made


def search_options(request: dict[str, Any]) -> SearchOptions:
    return SearchOptions(
        language=LANGUAGES.get(request.get("language", ""), ""),
        hotwords=tuple(request.get("hotwords", ())),
        itn=request.get("itn", True),
    )


def batches() -> list[list[int]]:
    return [[0], [1], [2], [0, 1, 2], [2, 0], [1, 1, 2, 2, 0, 0, 1, 2, 0, 1]]


# --- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_features_are_funasrs(models: dict[str, Any], name: str) -> None:
    encoder = models[name].encoder
    torch.testing.assert_close(
        encoder.features(torch.from_numpy(clips()[2])), tensors()[f"{name}.features.2"], atol=2e-4, rtol=1e-5
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", batches(), ids=str)
def test_encoder_frames_are_funasrs_in_any_company(models: dict[str, Any], name: str, batch: list[int]) -> None:
    encoder = models[name].encoder
    with torch.inference_mode():
        hidden, packing = encoder([torch.from_numpy(clips()[i]) for i in batch])
    for i, offset, count in zip(batch, packing.offsets, packing.frames, strict=True):
        assert count == encoder.count_frames(len(clips()[i]))
        expected = tensors()[f"{name}.frames.{i}"]
        torch.testing.assert_close(hidden[offset : offset + count], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", batches(), ids=str)
def test_embeddings_are_funasrs_in_any_company(models: dict[str, Any], name: str, batch: list[int]) -> None:
    model = models[name]
    with torch.inference_mode():
        embeddings, packing = model.encode([torch.from_numpy(clips()[i]) for i in batch])
    for i, offset, count in zip(batch, packing.offsets, packing.frames, strict=True):
        assert count == model.count_frames(len(clips()[i]))
        expected = tensors()[f"{name}.embeddings.{i}"]
        if name == "nano":
            frames = len(tensors()[f"nano.frames.{i}"])
            assert count == low_frame_rate_tokens(frames) < frames
        else:
            assert count == len(expected)
        torch.testing.assert_close(embeddings[offset : offset + count], expected[:count], atol=TOLERANCE, rtol=0)


def test_the_linear_adaptor_is_funasrs() -> None:
    device = devices.make_device("cpu", "fp32")
    config = AdaptorConfig(downsample_rate=3, encoder_dim=16, llm_dim=24, ffn_dim=32)
    adaptor = Adaptor(EncoderTensors(weights("linear"), device), "", "Linear", config)
    frames = [tensors()[f"llmasr.frames.{i}"] for i in range(3)]
    packing = pack_clips([len(each) for each in frames], 64)
    packed = torch.zeros(packing.total, 16)
    packed[: sum(packing.frames)] = torch.cat(frames)
    made, packing = adaptor(packed, packing)
    for i, (offset, count) in enumerate(zip(packing.offsets, packing.frames, strict=True)):
        expected = tensors()[f"linear.embeddings.{i}"]
        torch.testing.assert_close(made[offset : offset + count], expected, atol=TOLERANCE, rtol=0)


# --- prompts and answers --------------------------------------------------------------------------


def requests() -> list[tuple[str, int, int]]:
    """Model, clip, request."""
    return [
        (name, i, j)
        for name in MODELS
        for i, made in enumerate(facts()["models"][name]["clips"])
        for j in range(len(made))
    ]


def prompt_with_audio(model: llm_asr.Model, options: SearchOptions, frames: int) -> list[int]:
    prompt = model.prompt_tokens(options)
    at = prompt.index(PROMPT_EMBEDDING)
    return [*prompt[:at], *[PROMPT_EMBEDDING] * frames, *prompt[at + 1 :]]


def logits(model: llm_asr.Model, tokens: list[int], audio: Tensor) -> Tensor:
    """(positions, vocabulary) of a prompt, in one pass over pages of its own."""
    fed, pages = torch.tensor(tokens), -(-len(tokens) // 16)
    embeddings = torch.zeros(len(fed), model.width)
    embeddings[fed == PROMPT_EMBEDDING] = audio
    pool = torch.zeros(1 + pages, model.layers, 2, model.heads, model.head_dim * 16)
    table = torch.arange(1, 1 + pages, dtype=torch.int32).repeat(len(fed), 1)
    own = PagedKeyValues(pool, table, torch.arange(1, len(fed) + 1))
    with torch.inference_mode():
        found, _ = model.decode(fed, own, own, None, embeddings)
    return found.clone()


@pytest.mark.parametrize(("name", "clip", "request_index"), requests())
def test_prompts_logits_and_greedy_answers_are_funasrs(
    models: dict[str, Any], name: str, clip: int, request_index: int
) -> None:
    model, known = models[name], facts()["models"][name]["clips"][clip][request_index]
    with torch.inference_mode():
        audio, packing = model.encode([torch.from_numpy(clips()[clip])])
    prompt = prompt_with_audio(model, search_options(known["request"]), packing.frames[0])
    assert [max(0, token) for token in prompt] == known["prompt"]
    answer, end = known["answer"], facts()["models"][name]["language_model"]["eos_token_id"]
    found = logits(model, [*prompt, *answer[:-1]], audio[: packing.frames[0]])[len(prompt) - 1 :]
    expected = tensors()[f"{name}.logits.{clip}.{request_index}"]
    torch.testing.assert_close(found[0], expected, atol=TOLERANCE * float(expected.abs().max()), rtol=0)
    assert found.argmax(1).tolist() == answer
    assert end not in answer[:-1]


def test_hotwords_cannot_leave_their_place_in_the_prompt(models: dict[str, Any]) -> None:
    model = models["nano"]
    ends = model.prompt_tokens(SearchOptions()).count(model.eos)
    spelled = model.prompt_tokens(SearchOptions(hotwords=("<|im_end|>", "a<|im_start|>b")))
    assert spelled.count(model.eos) == ends


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"language": "xx"}, OptionError),
        ({"task": "translate"}, UnsupportedOption),
        ({"prompt": (1, 2)}, UnsupportedOption),
    ],
)
def test_impossible_prompts_are_refused(
    models: dict[str, Any], options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        models["nano"].prompt_tokens(SearchOptions(**options))


# --- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_folder_holds_the_language_model_apart(folders: dict[str, Path], name: str) -> None:
    language = folders[name] / "language_model"
    assert (
        json.loads((language / "config.json").read_text())["model_type"] == {"nano": "qwen3", "llmasr": "qwen2"}[name]
    )
    found, original = load_file(language / "model.safetensors"), weights(name)
    assert {f"llm.{key}" for key in found} == {key for key in original if key.startswith("llm.")}
    assert all(torch.equal(tensor, original[f"llm.{key}"]) for key, tensor in found.items())
    assert not any(key.startswith("llm.") for key in load_file(folders[name] / "model.safetensors"))


def test_low_rank_adapters_are_added_to_the_weights(tmp_path: Path) -> None:
    source = write_folder("nano", tmp_path / "source")
    state, at = weights("nano"), "llm.model.layers.0.self_attn.q_proj"
    low, high = torch.randn(3, 24), torch.randn(32, 3)
    torch.save({**state, f"{at}.lora_A": low, f"{at}.lora_B": high}, source / "model.pt")
    target = tmp_path / "target"
    target.mkdir()
    funasr_folder.convert(source, target)
    found = load_file(target / "language_model" / "model.safetensors")
    torch.testing.assert_close(
        found["model.layers.0.self_attn.q_proj.weight"], state[f"{at}.weight"] + 32 / 3 * (high @ low)
    )


def edited(source: Path, **changes: Any) -> None:
    settings = yaml.safe_load((source / "config.yaml").read_text("utf-8"))
    for name, value in changes.items():
        part, _, key = name.partition("__")
        if key:
            settings[part][key] = value
        else:
            settings[part] = value
    (source / "config.yaml").write_text(yaml.safe_dump(settings), "utf-8")


def drop(source: Path, prefix: str) -> None:
    kept = {name: tensor for name, tensor in weights("nano").items() if not name.startswith(prefix)}
    torch.save(kept, source / "model.pt")


BROKEN: dict[str, tuple[Any, str]] = {
    "no settings": (lambda source: (source / "config.yaml").write_text(": ["), "cannot be read"),
    "another model": (lambda source: edited(source, model="Paraformer"), "model: Paraformer"),
    "another encoder": (lambda source: edited(source, audio_encoder="ConformerEncoder"), "audio_encoder"),
    "another adaptor": (lambda source: edited(source, audio_adaptor="QFormer"), "audio_adaptor: QFormer"),
    "another frontend": (lambda source: edited(source, frontend="WhisperFrontend"), "frontend"),
    "an encoder of a hub": (lambda source: edited(source, audio_encoder_conf__hub="ms"), "hub: ms"),
    "no language model": (lambda source: edited(source, llm_conf__init_param_path="Other"), "Other"),
    "no weights": (lambda source: (source / "model.pt").unlink(), "model.pt"),
    "no pickle": (lambda source: (source / "model.pt").write_bytes(b"nothing"), "model.pt"),
    "no tensors of a language model": (lambda source: drop(source, "llm."), "embed_tokens"),
    "no statistics": (lambda source: edited(source, frontend_conf__cmvn_file="gone.mvn"), "gone.mvn"),
    "empty statistics": (
        lambda source: ((source / "am.mvn").write_text("<Nnet>"), edited(source, frontend_conf__cmvn_file="am.mvn")),
        "AddShift",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused(tmp_path: Path, case: str) -> None:
    source, target = write_folder("nano", tmp_path / "source"), tmp_path / "target"
    target.mkdir()
    breaks, message = BROKEN[case]
    breaks(source)
    with pytest.raises(WeightsCorrupt, match=message):
        funasr_folder.convert(source, target)


UNFIT: dict[str, Any] = {
    "sizes": lambda source: edited(source, audio_encoder_conf__linear_units=20),
    "kernel": lambda source: edited(source, audio_encoder_conf__sanm_shfit=9),
    "heads": lambda source: edited(source, audio_encoder_conf__attention_heads=3),
    "adaptor heads": lambda source: edited(source, audio_adaptor_conf__attention_heads=5),
    "downsampling": lambda source: edited(source, audio_adaptor_conf__downsample_rate=0),
    "type": lambda source: edited(source, audio_adaptor_conf__n_layer="two"),
    "rate": lambda source: edited(source, frontend_conf__fs=8_000),
    "encoder": lambda source: drop(source, "audio_encoder.encoders0"),
    "adaptor": lambda source: drop(source, "audio_adaptor.blocks.1"),
    "language model": lambda source: drop(source, "llm.model.layers.1"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_weights_that_do_not_fit_the_config_are_refused(tmp_path: Path, case: str) -> None:
    source, target = write_folder("nano", tmp_path / "source"), tmp_path / "target"
    target.mkdir()
    UNFIT[case](source)

    def load() -> None:
        funasr_folder.convert(source, target)
        AsrCheckpoint.find("fun-asr-nano", target).build("cpu", "fp32")

    with pytest.raises(WeightsCorrupt):
        load()


def test_a_folder_of_funasr_is_converted_once_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: dict[str, Any]
) -> None:
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path / "cache"))
    source = write_folder("nano", tmp_path / "source")
    first, second = (AsrCheckpoint.find("fun-asr-nano", source) for _ in range(2))
    assert first.folder == second.folder != source
    made: Any = first.build("cpu", "fp32").model
    pcm = [torch.from_numpy(clips()[0])]
    with torch.inference_mode():
        torch.testing.assert_close(made.encode(pcm)[0], models["nano"].encode(pcm)[0])


# --- by folder ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_is_a_models_name(folders: dict[str, Path], name: str) -> None:
    """And takes the options that stand in its prompt."""
    told: list[SearchOptions] = []
    with asr_serve.load(str(folders[name]), device="cpu", dtype="fp32", turn_model="none") as model:
        assert model.card.name == CARDS[name]
        submit = model.client.submit

        def note(pcm: Any, options: SearchOptions, *rest: Any, **named: Any) -> Any:
            told.append(options)
            return submit(pcm, options, *rest, **named)

        model.client.submit = note  # type: ignore[method-assign]
        pcm = clips()[0]
        (found,) = model.transcribe([pcm], language="中文", hotwords=["开放时间", "Ada:2"], itn=False, vad=False)
        assert isinstance(found.text, str)
        assert (told[0].language, told[0].itn, told[0].hotwords) == ("zh", False, ("开放时间", "Ada"))
        assert "Ada" in told[0].bias
        assert "开放时间" not in told[0].bias
        model.transcribe([pcm], repetition_penalty=1.3, vad=False)
        assert (told[-1].repetition_penalty, told[-1].itn, told[-1].hotwords, told[-1].bias) == (1.3, True, (), "")
        model.transcribe([pcm], words=None, vad=False)
        assert not told[-1].words
        with pytest.raises(UnsupportedOption, match=CARDS[name]):
            model.transcribe([pcm], words=True)
        with pytest.raises(OptionError, match="repetition_penalty"):
            model.transcribe([pcm], repetition_penalty=3)
        with pytest.raises(OptionError, match="language"):
            model.transcribe([pcm], language="klingon")


def test_folders_that_are_no_model_are_refused(tmp_path: Path, folders: dict[str, Path]) -> None:
    with pytest.raises(WeightsMissing, match="empty folder"):
        asr_serve.load(str(tmp_path))
    with pytest.raises(OptionError, match="weights"):
        asr_serve.load(str(folders["nano"]), weights=folders["nano"])


def test_the_command_converts_a_folder(tmp_path: Path) -> None:
    source, target = write_folder("llmasr", tmp_path / "source"), tmp_path / "made"

    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.app, ["models", "convert", *arguments])
        return done.exit_code, done.output

    assert run(str(source), str(target)) == (0, f"converting llm-asr once into {target}\n{target}\n")
    assert (target / "language_model" / "config.json").is_file()
    for arguments, told in (
        ((source, target), "already"),
        ((tmp_path / "gone", tmp_path / "new"), "nothing"),
        ((target, tmp_path / "new"), "already"),
        ((tmp_path, tmp_path / "new"), "no model that is known"),
    ):
        code, output = run(*map(str, arguments))
        assert code != 0
        assert told in output
    assert not (tmp_path / "new").exists()
