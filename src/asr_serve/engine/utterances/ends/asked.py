"""What alignment heads ask of the audio while rows are decoded, kept of those that want to know when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from asr_serve.engine.utterances.rows import Row


class Asked:
    """In one pass. Nothing is copied but what rows keep: a row that goes on holds on to no others' for it but to
    theirs that keep too, so all together never hold more than as many rows as there are, as long as they may get.
    """

    def __init__(self, model: Any, layers: Sequence[Tensor], wanted: Tensor | None) -> None:
        """`layers`: queries (positions, heads * head_dim) of each layer that has alignment heads; `wanted`: which
        positions are told of; None: all."""
        self._model, self._layers, self._wanted = model, layers, wanted
        self._kept: list[tuple[Row, int]] = []

    def keep(self, row: Row, told: int) -> None:
        """Of that one among the positions that are told of, for the token that was decided there."""
        if row.hypothesis.options.words:
            self._kept.append((row, told))

    def give(self) -> None:
        """To each row what is kept for it. A copy: the next step writes over what was recorded."""
        if not self._kept:
            return
        model, found = self._model, []
        told = torch.tensor([told for _, told in self._kept])
        told = told if self._wanted is None else self._wanted.cpu()[told]
        for query, heads in zip(self._layers, model.alignment.heads.values(), strict=True):
            where = told.to(query.device)
            found.append(query[where].view(len(told), model.heads, -1)[:, list(heads)])
        for (row, _), asked in zip(self._kept, torch.cat(found, dim=1), strict=True):
            row.asked.append(asked)


class Passed(NamedTuple):
    """What a pass tells of each position: the likeliest token and its natural-log probability, all logits, what
    they were made from, what is asked of the audio, and the natural-log probability that nobody speaks, where
    that is wanted."""

    tokens: Tensor
    logprobs: Tensor
    logits: Tensor
    hidden: Tensor
    asked: Asked
    silence: Tensor | None = None


def passed(model: Any, wanted: Tensor | None, *made: Tensor) -> Passed:
    """`made`: as they come, what was asked between what is always told and what is told at times."""
    tokens, logprobs, logits, hidden, *more = made
    layers = len(model.alignment.heads)
    silence = more[layers] if len(more) > layers else None
    return Passed(tokens, logprobs, logits, hidden, Asked(model, more[:layers], wanted), silence)
