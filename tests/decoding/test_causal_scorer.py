"""Causal language models of transformers: prefixes that are computed once, and the same scores as row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from asr_serve.decoding.language_model import causal_scorer
from asr_serve.decoding.language_model.causal_scorer import CONVERSION, CausalSentenceScorer, pack_prefixes, score_rows
from asr_serve.errors import WeightsCorrupt
from asr_serve.transfer.checksum import file_checksum

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
# The models of `transformers` are read when they are used: they take seconds, in every process that collects tests.
ROWS = st.lists(st.lists(st.integers(1, 4), max_size=6).map(lambda tokens: [0, *tokens]), max_size=12)


@pytest.fixture(scope="module", params=["llama", "gemma"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(5)
    if request.param == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SHAPE, sliding_window=256)).eval()


@torch.inference_mode()
def one_by_one(model: Any, row: list[int]) -> float:
    logprobs = model(input_ids=torch.tensor([row])).logits[0].double().log_softmax(1)
    return float(sum(logprobs[place, token] for place, token in enumerate(row[1:])))


@given(ROWS, st.integers(1, 20))
def test_batches_hold_each_prefix_once_and_every_row(rows: list[list[int]], most: int) -> None:
    found: dict[int, list[int]] = {}
    for batch in pack_prefixes(rows, most):
        spelled: list[list[int]] = []
        for token, parent, depth in zip(batch.tokens, batch.parents, batch.depths, strict=True):
            assert parent < len(spelled)
            spelled.append([*(spelled[parent] if parent >= 0 else []), token])
            assert depth == len(spelled[-1]) - 1
        assert len({tuple(each) for each in spelled}) == len(spelled)
        assert len(spelled) <= max(most, *(len(rows[number]) for number, _ in batch.sentences))
        for number, index in batch.sentences:
            assert number not in found
            found[number] = spelled[index]
    assert found == dict(enumerate(rows))


@pytest.mark.parametrize("most", [4, 16, 1_000])
def test_scores_are_those_of_rows_alone(model: Any, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(causal_scorer, "MAX_BATCH_LOGITS", most * SHAPE["vocab_size"])
    drawn = torch.Generator().manual_seed(1)
    rows = [[0, *torch.randint(1, 4, (length,), generator=drawn).tolist()] for length in (5, 0, 9, 5, 1, 12, 7, 7)]
    rows += [rows[2], rows[5][:6]]
    assert score_rows(model, rows) == pytest.approx([one_by_one(model, row) for row in rows], abs=1e-4)
    assert score_rows(model, []) == []


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    """A model file whose conversion is in the cache, and a function that saves its tokenizer with special tokens."""
    monkeypatch.setenv("ASR_SERVE_CACHE", str(tmp_path))
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"tiny")
    folder = tmp_path / "causal" / f"{file_checksum(file):016x}-v{CONVERSION}"
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(folder)

    def save_tokenizer(**special: str) -> None:
        words = WordLevel({"<s>": 0, "i": 1, "know": 2, "</s>": 3, "<unk>": 4}, unk_token="<unk>")
        tokenizer = Tokenizer(words)
        tokenizer.pre_tokenizer = Whitespace()
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)

    return file, save_tokenizer


@pytest.mark.parametrize(
    ("special", "start"), [({"bos_token": "<s>", "eos_token": "</s>"}, 0), ({"eos_token": "</s>"}, 3)]
)
def test_sentences_follow_the_start_token_or_else_the_end_token(
    converted: tuple[Path, Any], special: dict[str, str], start: int
) -> None:
    file, save_tokenizer = converted
    save_tokenizer(**special)
    scorer = CausalSentenceScorer(file, torch.float32)
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
    rows = [[start, 1, 2], [start, 2], [start]]
    expected = [one_by_one(model, row) for row in rows]
    assert scorer.score(["i know", "know", ""]) == pytest.approx(expected, abs=1e-4)


def test_a_tokenizer_without_start_and_end_is_refused_at_load(converted: tuple[Path, Any]) -> None:
    file, save_tokenizer = converted
    save_tokenizer()
    with pytest.raises(WeightsCorrupt, match="neither a start token nor an end token"):
        CausalSentenceScorer(file, torch.float32)
