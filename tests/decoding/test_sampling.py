"""Sampling of tokens: temperature, top-k and top-p give the distribution of transformers' warpers."""

from __future__ import annotations

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from asr_serve.decoding.sampling import sample_token, truncated
from asr_serve.decoding.search_options import check_truncation
from asr_serve.errors import OptionError

VOCAB = 50


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def reference(scores: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Distribution (vocabulary,) of transformers' generate."""
    row, ids = scores.double()[None], torch.zeros(1, 1, dtype=torch.int64)
    row = TemperatureLogitsWarper(temperature)(ids, row) if temperature != 1 else row
    row = TopKLogitsWarper(top_k)(ids, row) if top_k else row
    row = TopPLogitsWarper(top_p)(ids, row) if top_p < 1 else row
    return row.softmax(dim=-1)[0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 0.9), (1.0, 5, 1.0), (1.3, 12, 0.6), (1.0, 1, 1.0), (1.0, 0, 1e-9), (1.0, 500, 0.5)],
)
def test_the_distribution_is_that_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    for seed in range(5):
        scores = logits(seed)
        wanted = reference(scores, temperature, top_k, top_p)
        weights = truncated((scores.double() / temperature).softmax(dim=-1), top_k, top_p)
        torch.testing.assert_close(weights / weights.sum(), wanted)
    generator = torch.Generator().manual_seed(7)
    drawn = [sample_token(scores, temperature, top_k, top_p, generator) for _ in range(3_000)]
    counts = torch.bincount(torch.tensor([token for token, _ in drawn]), minlength=VOCAB)
    assert not counts[wanted == 0].any()
    assert float((counts / len(drawn) - wanted).abs().sum()) < 0.12
    logprobs = scores.double().log_softmax(dim=-1)
    assert all(logprob == pytest.approx(float(logprobs[token])) for token, logprob in drawn[:50])


def test_a_seed_fixes_the_tokens_and_no_truncation_changes_none() -> None:
    def drawn(top_k: int, top_p: float, temperature: float = 1.0) -> list[int]:
        generator = torch.Generator().manual_seed(3)
        return [sample_token(logits(n), temperature, top_k, top_p, generator)[0] for n in range(40)]

    assert drawn(0, 1.0) == drawn(0, 1.0) == drawn(VOCAB, 1.0)
    assert drawn(3, 1.0) != drawn(0, 1.0) != drawn(0, 0.3)
    likeliest = [int(logits(n).argmax()) for n in range(40)]
    assert drawn(1, 1.0) == drawn(0, 1e-9) == drawn(0, 1.0, temperature=1e-6) == likeliest


@pytest.mark.parametrize("wrong", [{"top_k": -1}, {"top_k": 1.0}, {"top_k": True}, {"top_p": 0}, {"top_p": 1.5}])
def test_what_is_no_truncation_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError) as refused:
        check_truncation(**{"top_k": 0, "top_p": 1.0} | wrong)
    assert refused.value.param == next(iter(wrong))
