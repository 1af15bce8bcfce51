"""Token rules for the next position: tokens that are never generated, and Whisper's order of timestamps.

A rule is four numbers for one position of one row, derived from the row's tokens; `TokenRules` applies them to a
whole batch of logits on their device.

Source  the paper's section 4.5 (arXiv:2212.04356), and the additions of openai-whisper and transformers, which
        `tests/decoding/test_token_rules.py` compares with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asr_serve.models.interfaces import SpecialTokenIds

NO_SUPPRESSION, SUPPRESS, BEGIN_SUPPRESS = 0, 1, 2
"""Levels of suppression: NO_SUPPRESSION, since the token is forced; SUPPRESS: tokens that are never generated;
BEGIN_SUPPRESS: also those not allowed at the start."""
UNTIMED = -1
MAX_INITIAL = 50
"""Latest first timestamp, 1.0 s, in steps of 20 ms: after a longer silence no speech was missed."""


class TokenRule(NamedTuple):
    """Rule of one position. `level`: NO_SUPPRESSION, SUPPRESS or BEGIN_SUPPRESS. `text_from`: tokens below it are
    suppressed: 0, end-of-text or the first timestamp; UNTIMED: no timestamp rule applies, and the other fields are
    ignored. `low`, `high`: range of allowed timestamps."""

    level: int = SUPPRESS
    text_from: int = UNTIMED
    low: int = 0
    high: int = 0


FORCED_TOKEN, PLAIN_TOKEN = TokenRule(NO_SUPPRESSION), TokenRule(SUPPRESS)


class TokenRules:
    """Token rules of one model. `vocabulary`: width of its logits."""

    def __init__(self, special: SpecialTokenIds, vocabulary: int, device: torch.device) -> None:
        self.eot, self.no_timestamps, self.times_from = special.eot, special.no_timestamps, special.timestamp_begin
        self.last = vocabulary - 1
        self.times = torch.arange(special.timestamp_begin, vocabulary, device=device)
        self.never = torch.tensor(sorted(special.suppress), dtype=torch.int64, device=device)
        self.not_first = torch.tensor(sorted(special.suppress_first), dtype=torch.int64, device=device)

    def after(self, tokens: Sequence[int], timestamps: bool) -> TokenRule:
        """Returns the rule of the position after `tokens`, the answer so far without the forced tokens.

        Timestamps come in pairs, the end of a segment and the start of the next, except at the very start and
        before end-of-text; none is earlier than the one before, and no segment is empty.
        """
        level = SUPPRESS if tokens else BEGIN_SUPPRESS
        if not timestamps:
            return TokenRule(level)
        first = self.times_from
        if not tokens:
            return TokenRule(level, first, first, min(first + MAX_INITIAL, self.last))
        ended = tokens[-1] >= first
        paired = ended and (len(tokens) < 2 or tokens[-2] >= first)
        if paired:
            return TokenRule(level, 0, self.last + 1, self.last)
        latest = next((token for token in reversed(tokens) if token >= first), first - 1)
        return TokenRule(level, self.eot if ended else 0, latest if ended else latest + 1, self.last)

    def always(self, logits: Tensor) -> None:
        """Applies PLAIN_TOKEN to every row of `logits` (rows, vocabulary) in place, at no measurable cost to a step."""
        logits.index_fill_(1, self.never, float("-inf"))

    def apply(self, logits: Tensor, rules: Tensor, timed: bool) -> None:
        """Applies the TokenRule in `rules[r]` (rows, 4) int64 to row r of `logits` (rows, vocabulary) in place.
        `timed`: whether any of them restricts timestamps."""
        level, text_from, low, high = rules[:, :, None].unbind(1)
        for ids, least in ((self.never, SUPPRESS), (self.not_first, BEGIN_SUPPRESS)):
            chosen = logits.index_select(1, ids).masked_fill_(level >= least, float("-inf"))
            logits.index_copy_(1, ids, chosen)
        if not timed:
            return
        restricted = text_from > UNTIMED
        text, specials = logits[:, : self.eot], logits[:, self.eot : self.times_from]
        times = logits[:, self.times_from :]
        times.masked_fill_(restricted & ((self.times < low) | (self.times > high)), float("-inf"))
        logits[:, self.no_timestamps :][:, :1].masked_fill_(restricted, float("-inf"))
        specials.masked_fill_(text_from > self.eot, float("-inf"))
        # A timestamp is due by the total probability of all of them. Text tokens are most of the vocabulary: they
        # are read once and written once.
        no_text = text_from >= self.eot
        likeliest = text.amax(1, keepdim=True).masked_fill_(no_text, float("-inf"))
        likeliest = torch.maximum(likeliest, specials.amax(1, keepdim=True)).float()
        due = restricted & (times.float().logsumexp(1, keepdim=True) > likeliest)
        specials.masked_fill_(due, float("-inf"))
        # Same as masked_fill, which is slow on a CPU with one mask value per row.
        text.add_(torch.zeros_like(likeliest, dtype=text.dtype).masked_fill_(no_text | due, float("-inf")))
