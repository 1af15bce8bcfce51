"""Causal language models of transformers: prefixes that are computed once, and the same scores as row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from asr_serve.decoding.language_model import causal_scorer
from asr_serve.decoding.language_model.causal_scorer import pack_prefixes, score_rows

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
ROWS = st.lists(st.lists(st.integers(1, 4), max_size=6).map(lambda tokens: [0, *tokens]), max_size=12)


@pytest.fixture(scope="module", params=["llama", "gemma"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(5)
    if request.param == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=256)).eval()


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
