"""Where heads look becomes where tokens begin."""

from __future__ import annotations

import numpy as np
import torch

from asr_serve.decoding.dtw import costs, first_frames, smoothed


def test_smoothing_is_the_median_of_three() -> None:
    x = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(1))
    inner = torch.stack([x[..., :-2], x[..., 1:-1], x[..., 2:]]).median(dim=0).values
    assert torch.equal(smoothed(x)[..., 1:-1], inner)
    assert torch.equal(smoothed(x)[..., [0, -1]], x[..., [1, -2]])
    assert torch.equal(smoothed(x[..., :1]), x[..., :1])


def test_tokens_begin_where_heads_attend() -> None:
    begins = [0, 5, 6, 20]
    scores = torch.zeros(2, 4, 30)
    for token, (first, end) in enumerate(zip(begins, [*begins[1:], 30], strict=True)):
        scores[0, token, first:end] = 9.0  # one head knows; the other looks everywhere
    assert first_frames(costs(scores).numpy()).tolist() == begins


def test_costs_are_not_negative_and_fall_with_attention() -> None:
    scores = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(2)) * 4
    found = costs(scores).numpy()
    assert (found >= 0).all()
    mean = smoothed(scores.softmax(dim=2)).mean(dim=0).numpy()
    assert (np.argsort(found, axis=1, kind="stable") == np.argsort(-mean, axis=1, kind="stable")).all()
