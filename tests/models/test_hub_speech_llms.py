"""GLM-ASR, Voxtral and Qwen3-ASR compute what transformers computes, from hub folders, in any company."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hub_speech_llm_folders import CARDS, LENGTHS, audio, clips, facts, tensors, tokenizer, write_folder, write_shards
from safetensors.torch import load_file, save_file
from torch import Tensor

from asr_serve.config import EngineConfig
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.engine.client import EngineClient
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.errors import OptionError, UnsupportedOption, WeightsCorrupt, WeightsMissing
from asr_serve.models.asr.speech_llm import tekken
from asr_serve.models.asr.speech_llm.hub_speech_llm import HubSpeechLlm
from asr_serve.models.checkpoints import store
from asr_serve.models.interfaces import PROMPT_EMBEDDING
from asr_serve.models.packing import PagedKeyValues
from asr_serve.models.registry import asr_card
from asr_serve.text.tokenizers import HubTokenizer

TOLERANCE = 1e-4
KNOWN = range(len(LENGTHS) - 1)
"""Clips that transformers encoded; the last is too short for it."""
WAIT_S = 180.0
ONCE: dict[str, Any] = {"temperatures": (0.0,), "min_avg_logprob": -1e9, "max_compression_ratio": 1e9}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_folder(family, tmp_path_factory.mktemp(family)) for family in CARDS}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, Any]:
    return {family: load(family, folder) for family, folder in folders.items()}


def load(family: str, folder: Path) -> Any:
    return AsrCheckpoint.find(CARDS[family], folder).build("cpu", "fp32").model


def options_of(request: dict[str, Any]) -> SearchOptions:
    return SearchOptions(language=request.get("language", ""), hotwords=tuple(request.get("hotwords", ())), **ONCE)


# --- parity ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CARDS)
@pytest.mark.parametrize("batch", [[0], [1], [2], [2, 0, 1], [3, 1], [0] * 5 + [2, 3, 2, 2, 1]], ids=str)
def test_embeddings_are_those_of_transformers_in_any_company(
    models: dict[str, Any], family: str, batch: list[int]
) -> None:
    model = models[family]
    with torch.inference_mode():
        embeddings, packing = model.encode([audio(i) for i in batch])
        alone = {i: model.encode([audio(i)])[0] for i in set(batch) - set(KNOWN)}
    assert packing.total == len(embeddings)
    for i, offset, count in zip(batch, packing.offsets, packing.frames, strict=True):
        assert count == model.count_frames(LENGTHS[i]) >= 1
        expected = tensors()[f"{family}.embeddings.{i}"] if i in KNOWN else alone[i][:count]
        torch.testing.assert_close(embeddings[offset : offset + count], expected, atol=TOLERANCE, rtol=0)


def logits(model: HubSpeechLlm, tokens: list[int], embedded: Tensor) -> Tensor:
    """(positions, vocabulary) of a prompt, in one pass over pages of its own."""
    fed, pages = torch.tensor(tokens), -(-len(tokens) // 16)
    embeddings = torch.zeros(len(fed), model.width)
    embeddings[fed == PROMPT_EMBEDDING] = embedded
    pool = torch.zeros(1 + pages, model.layers, 2, model.heads, model.head_dim * 16)
    table = torch.arange(1, 1 + pages, dtype=torch.int32).repeat(len(fed), 1)
    own = PagedKeyValues(pool, table, torch.arange(1, len(fed) + 1))
    with torch.inference_mode():
        return model.decode(fed, own, own, None, embeddings)[0].clone()


@pytest.mark.parametrize("family", CARDS)
@pytest.mark.parametrize("clip", KNOWN)
def test_prompts_logits_and_greedy_answers_are_those_of_transformers(
    models: dict[str, Any], family: str, clip: int
) -> None:
    model = models[family]
    with torch.inference_mode():
        embedded, packing = model.encode([audio(clip)])
    count = packing.frames[0]
    for j, known in enumerate(facts()[family]["clips"][clip]):
        prompt = list(model.prompt_tokens(options_of(known["request"])))
        at = prompt.index(PROMPT_EMBEDDING)
        prompt[at : at + 1] = [PROMPT_EMBEDDING] * count
        assert prompt == known["prompt"]
        found = logits(model, [*prompt, *known["answer"][:-1]], embedded[:count])[len(prompt) - 1 :]
        expected = tensors()[f"{family}.logits.{clip}.{j}"]
        torch.testing.assert_close(found[: len(expected)], expected, atol=TOLERANCE, rtol=1e-5)
        assert found.argmax(1).tolist() == known["answer"]


# --- engine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CARDS)
@pytest.mark.parametrize("prefix_bytes", [0, 1 << 20])
def test_the_engine_answers_the_same_with_and_without_a_prefix_cache(
    folders: dict[str, Path], family: str, prefix_bytes: int
) -> None:
    found = AsrCheckpoint.find(CARDS[family], folders[family])
    card = msgspec.structs.replace(found.card, tokens_per_s=100.0)
    config = EngineConfig(max_decode_rows=8, kv_bytes=4 << 20, max_sessions=2, prefix_bytes=prefix_bytes)
    client = EngineClient(config, thread_backend(card, lambda: found.build("cpu", "fp32")))
    try:
        requests = [(i, known) for i in KNOWN for known in facts()[family]["clips"][i]]
        tickets = [client.submit(clips()[i], options_of(known["request"])) for i, known in requests * 2]
        for (_, known), ticket in zip(requests * 2, tickets, strict=True):
            tokens = list(ticket.future.result(WAIT_S).tokens)
            shared = min(len(tokens), len(known["answer"]))
            assert tokens[:shared] == known["answer"][:shared]
            assert shared or known["answer"][0] in found.config.eos_tokens
    finally:
        client.close()


# --- detected languages ---------------------------------------------------------------------------


def test_qwen3_names_the_language_itself_where_none_is_chosen(models: dict[str, Any]) -> None:
    model = models["qwen3"]
    tag = model.special["<asr_text>"]
    detecting, chosen = (model.prompt_tokens(SearchOptions(language=language)) for language in ("", "th"))
    assert chosen == (*detecting, *model.encode_text("language Thai"), tag)
    said = model.encode_text("Ada")
    for header, language in (("language Thai", "th"), ("language THAI ", "th"), ("language None", ""), ("", "")):
        leading = (*model.encode_text(header), tag)
        assert model.read_header((*leading, *said)) == (language, len(leading)), header
    assert model.read_header(said) == ("", 0)
    assert model.read_header((*said * model.max_header_tokens, tag)) == ("", 0), "too late for a header"


def test_a_detected_language_is_reported_and_is_no_text(folders: dict[str, Path], models: dict[str, Any]) -> None:
    """Alone and together with requests that choose one, greedily and with beams, over and over from the cache."""
    found, model = AsrCheckpoint.find(CARDS["qwen3"], folders["qwen3"]), models["qwen3"]
    assert found.card.detects
    header = (*model.encode_text("language Thai"), model.special["<asr_text>"])
    card = msgspec.structs.replace(found.card, tokens_per_s=20.0)
    config = EngineConfig(max_decode_rows=8, kv_bytes=4 << 20, max_sessions=2, prefix_bytes=1 << 20)
    client = EngineClient(config, thread_backend(card, lambda: found.build("cpu", "fp32")))
    detecting, chosen = SearchOptions(prefix=header, **ONCE), SearchOptions(language="th", **ONCE)
    try:
        for options in (detecting, msgspec.structs.replace(detecting, beam=3, hypotheses=2)):
            plain = msgspec.structs.replace(options, prefix=(), language="th")
            tickets = [(client.submit(clips()[i], options), client.submit(clips()[i], plain)) for i in (0, 1, 0, 2, 1)]
            for named, given in tickets:
                answer, expected = named.future.result(WAIT_S), given.future.result(WAIT_S)
                assert answer.language == expected.language == "th"
                shared = min(len(answer.tokens), len(expected.tokens))
                if options.beam == 1:  # a search of beams ends at another length
                    assert answer.tokens[:shared] == expected.tokens[:shared]
                assert shared or not expected.tokens
                assert len(answer.logprobs) == len(answer.tokens)
                assert all(model.special["<asr_text>"] not in each.tokens[:1] for each in answer.hypotheses)
        assert client.submit(clips()[0], chosen).future.result(WAIT_S).language == "th"
        whole = client.submit(clips()[0], detecting).future.result(WAIT_S)
        for limit in (1, 5):  # of tokens of text: a short one leaves no part of the header
            limited = msgspec.structs.replace(detecting, max_new_tokens=limit)
            answer = client.submit(clips()[0], limited).future.result(WAIT_S)
            assert (answer.language, answer.tokens) == ("th", whole.tokens[:limit])
            assert len(answer.tokens) == len(answer.logprobs) == limit
    finally:
        client.close()


# --- prompts --------------------------------------------------------------------------------------


def test_hotwords_cannot_leave_their_place_in_the_prompt(models: dict[str, Any]) -> None:
    model = models["qwen3"]
    spelled = model.prompt_tokens(SearchOptions(hotwords=("<|im_end|>", "a<|im_start|>b", "<asr_text>")))
    for token in ("<|im_end|>", "<|im_start|>", "<asr_text>"):
        plain = model.prompt_tokens(SearchOptions()).count(model.special[token])
        assert spelled.count(model.special[token]) == plain


@pytest.mark.parametrize("family", CARDS)
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"language": "xx"}, OptionError),
        ({"task": "translate"}, UnsupportedOption),
        ({"prompt": (1, 2)}, UnsupportedOption),
    ],
)
def test_impossible_prompts_are_refused(
    models: dict[str, Any], family: str, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        models[family].prompt_tokens(SearchOptions(**options))


# --- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CARDS)
def test_a_family_is_recognized_by_its_config_also_in_shards(
    tmp_path: Path, folders: dict[str, Path], family: str
) -> None:
    for folder in (folders[family], write_shards(family, tmp_path / "shards")):
        assert asr_card(store.model_of_folder(folder)).kind == asr_card(CARDS[family]).kind


@pytest.mark.parametrize("family", CARDS)
def test_shards_are_joined_once(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: dict[str, Any]
) -> None:
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path / "cache"))
    source = write_shards(family, tmp_path / "source")
    first, second = (AsrCheckpoint.find(CARDS[family], source) for _ in range(2))
    assert first.folder == second.folder != source
    made: Any = first.build("cpu", "fp32").model
    with torch.inference_mode():
        torch.testing.assert_close(made.encode([audio(0)])[0], models[family].encode([audio(0)])[0])


def test_the_first_layout_of_qwen3_asr_is_read(tmp_path: Path, models: dict[str, Any]) -> None:
    settings = facts()["qwen3"]["config"]
    text = settings["text_config"] | {"model_type": "qwen3_asr_text"}
    thinker = {"audio_config": settings["audio_config"], "text_config": text}
    folder = write_folder("qwen3", tmp_path, thinker_config=thinker, audio_config=None, text_config=None)
    names = (
        ("model.audio_tower.", "thinker.audio_tower."),
        ("model.multi_modal_projector.linear_", "thinker.audio_tower.proj"),
        ("model.language_model.", "thinker.model."),
    )
    renamed = load_file(folder / "model.safetensors")
    for old, new in names:
        renamed = {name.replace(old, new): tensor for name, tensor in renamed.items()}
    save_file(renamed, folder / "model.safetensors")
    with torch.inference_mode():
        found = load("qwen3", folder).encode([audio(2)])[0]
        torch.testing.assert_close(found, models["qwen3"].encode([audio(2)])[0])


@pytest.mark.parametrize("family", CARDS)
@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "whisper"},
        {"audio_config": 3},
        {"audio_config": {"hidden_act": "relu"}},
        {"audio_config": {"num_mel_bins": -1}},
        {"audio_config": {}},
        {"text_config": {"model_type": "mamba"}},
        {"text_config": {"hidden_size": 25}},
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    known = facts()[family]["config"]
    changed = {
        name: {**known[name], **value} if isinstance(value, dict) and value else value
        for name, value in settings.items()
    }
    with pytest.raises(WeightsCorrupt):
        load(family, write_folder(family, tmp_path, **changed))


@pytest.mark.parametrize("family", CARDS)
@pytest.mark.parametrize("part", ["conv", "layers.1.fc1.weight", "linear_2", "lm_head", "embed_tokens", "norm.weight"])
def test_missing_tensors_are_refused(family: str, part: str, tmp_path: Path) -> None:
    folder = write_folder(family, tmp_path)
    found = load_file(folder / "model.safetensors")
    if not any(part in name for name in found) or part == "lm_head":
        part = "k_proj"
    save_file({name: tensor for name, tensor in found.items() if part not in name}, folder / "model.safetensors")
    with pytest.raises(WeightsCorrupt, match="has no tensor"):
        load(family, folder)


def test_a_folder_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_folder("glm", tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(WeightsMissing):
        load("glm", folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    text = (folder / "tokenizer.json").read_text().replace("<|user|>", "<|other|>")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(WeightsCorrupt, match="user"):
        load("glm", folder)


# --- tokenizers -----------------------------------------------------------------------------------


def write_tekken(path: Path) -> list[bytes]:
    """Writes a tekken.json of the bytes and a few joined ones; returns the pieces by rank."""
    pieces = [bytes([i]) for i in range(256)] + [b"he", b"ll", b"hell", b" w", b"or", b"hello", "é".encode(), b"lo"]
    entries = [{"rank": i, "token_bytes": base64.b64encode(piece).decode()} for i, piece in enumerate(pieces)]
    content = {
        "config": {"pattern": r" ?\p{L}+|\s+|.", "default_vocab_size": 280, "default_num_special_tokens": 10},
        "vocab": entries,
        "special_tokens": [{"rank": i, "token_str": f"[S{i}]"} for i in range(8)],
    }
    path.write_text(json.dumps(content))
    return pieces


def test_a_tekken_vocabulary_becomes_a_tokenizer(tmp_path: Path) -> None:
    pieces = write_tekken(tmp_path / "tekken.json")
    (tmp_path / "tokenizer.json").write_text(tekken.tokenizer_json(tmp_path / "tekken.json"))
    made = HubTokenizer(tmp_path / "tokenizer.json")
    tokens = made.encode("hello world é\u00a0!")
    split = [b"hello", b" w", b"or", b"l", b"d", b" ", "é".encode(), b"\xc2", b"\xa0", b"!"]
    assert [pieces[token - 10] for token in tokens] == split
    assert made.decode(tokens) == "hello world é\u00a0!"
    assert (made.special_token("[S3]"), made.special_token("<SPECIAL_9>")) == (3, 9)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"config": {}, "vocab": 3}'])
def test_a_broken_tekken_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tekken.json").write_text(text)
    with pytest.raises(WeightsCorrupt):
        tekken.tokenizer_json(tmp_path / "tekken.json")


def test_text_of_the_fixtures_tokenizer_comes_back(folders: dict[str, Path]) -> None:
    made = HubTokenizer(folders["glm"] / "tokenizer.json")
    for text in ("language transcription", "Zoë 你好, naïve", "a\nb"):
        assert made.decode(made.encode(text)) == text
