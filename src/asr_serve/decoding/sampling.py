"""Sampling of tokens from logits: temperature, top-k and top-p, in this order, as in vLLM and transformers.

Source  nucleus sampling: arXiv:1904.09751; top-k sampling: arXiv:1805.04833
"""

from __future__ import annotations

import torch
from torch import Tensor


def sample_token(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> tuple[int, float]:
    """Samples a token of `logits` (vocabulary,), with a temperature above 0. Returns it with its natural-log
    probability, that of the model: before temperature, top-k and top-p."""
    scores = torch.log_softmax(logits.double().cpu(), dim=-1)
    # Relative to the best and in double precision: divided by however low a temperature, that one stays 0.
    weights = torch.softmax((scores - scores.max()) / temperature, dim=-1)
    token = int(torch.multinomial(truncated(weights, top_k, top_p), 1, generator=generator))
    return token, float(scores[token])


def truncated(weights: Tensor, top_k: int, top_p: float) -> Tensor:
    """Sets the weights (vocabulary,) of all but the `top_k` likeliest tokens to 0 (0: none), then those of all but the
    fewest likeliest that together have `top_p` of the rest; one always stays.

    >>> truncated(torch.tensor([0.1, 0.4, 0.2, 0.3]), 3, 0.7).tolist()
    [0.0, 0.4000000059604645, 0.0, 0.30000001192092896]
    """
    if top_p >= 1 and not 0 < top_k < len(weights):
        return weights
    count = top_k if 0 < top_k < len(weights) else len(weights)
    likeliest, tokens = weights.topk(count)
    if top_p < 1:
        before = likeliest.cumsum(0) - likeliest
        kept = int((before < top_p * likeliest.sum()).sum())
        likeliest, tokens = likeliest[: max(1, kept)], tokens[: max(1, kept)]
    return torch.zeros_like(weights).scatter(0, tokens, likeliest)
