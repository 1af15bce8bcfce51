"""Folders of language models are what transformers reads, and what they were written from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from test_causal_lm import NAMES, Sequences, cut, load, reference

from asr_serve import devices
from asr_serve.errors import CacheNotWritable, ModelError
from asr_serve.models.causal_lm import CausalConfig, CausalLanguageModel, is_causal_tensor
from asr_serve.models.checkpoints.causal_lm_folder import cached_causal_lm, causal_lm_settings, write_causal_lm


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_holds_the_same_model(name: str, tmp_path: Path) -> None:
    known = reference(name)
    config = CausalConfig.of(known.settings)
    write_causal_lm(tmp_path, config, known.weights)
    read = CausalConfig.of(json.loads((tmp_path / "config.json").read_text()))
    assert read == config
    model = CausalLanguageModel(read, load_file(tmp_path / "model.safetensors"), devices.make_device("cpu", "fp32"))
    logits = [
        Sequences(each, 1, len(known.tokens)).feed([(0, 0, *cut(known, 0, len(known.tokens)))])
        for each in (model, load(name))
    ]
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_computes_the_folder(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    known = reference(name)
    write_causal_lm(tmp_path, CausalConfig.of(known.settings), known.weights)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32)
    tokens = torch.tensor(known.tokens)
    inputs = model.get_input_embeddings()(tokens.clamp(min=0))
    inputs[tokens < 0] = known.embeddings
    with torch.inference_mode():
        logits = model(inputs_embeds=inputs[None]).logits[0]
    torch.testing.assert_close(logits, known.logits, atol=1e-4, rtol=0)


def test_an_equal_head_is_written_once(tmp_path: Path) -> None:
    known = reference("qwen3")
    embedding = known.weights["model.embed_tokens.weight"]
    write_causal_lm(tmp_path, CausalConfig.of(known.settings), {**known.weights, "lm_head.weight": embedding.clone()})
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"attention_scale": 0.3}, "another attention_scale"), ({"embedding_scale": 2.0}, "another embedding_scale")],
)
def test_models_that_transformers_lacks_are_refused(changes: dict[str, Any], told: str) -> None:
    config = msgspec.structs.replace(CausalConfig.of(reference("llama").settings), **changes)
    with pytest.raises(ModelError, match=told):
        causal_lm_settings(config, torch.float32, tied=False)


def test_the_cache_has_a_folder_for_each_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path))
    known = reference("qwen3")
    config = CausalConfig.of(known.settings)
    first = cached_causal_lm(config, known.weights)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert cached_causal_lm(config, known.weights) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    other = {name: tensor + 0.5 for name, tensor in known.weights.items()}
    assert cached_causal_lm(config, other) != first
    assert len(list(first.parent.iterdir())) == 2


def test_a_cache_that_is_a_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path / "file"))
    known = reference("qwen3")
    with pytest.raises(CacheNotWritable, match="cannot be written"):
        cached_causal_lm(CausalConfig.of(known.settings), known.weights)


def test_tensors_of_the_language_model_are_told_by_name() -> None:
    assert all(is_causal_tensor(name) for name in reference("gemma 3").weights)
    assert not any(is_causal_tensor(name) for name in ("audio_encoder.layers.0.weight", "model.encoder.conv1.weight"))
