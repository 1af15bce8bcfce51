"""What may be said next: tokens that are never said, and the order that Whisper keeps its timestamps in.

A rule is four numbers for one position of one row, made of what the row has said; `Rules` applies them to a whole
batch of logits on their device.

Source  the paper's section 4.5 (arXiv:2212.04356), and what openai-whisper and transformers do beyond it, which
        `tests/decoding/test_token_rules.py` compares with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asr_serve.models.interfaces import SpecialTokenIds

FREE, SAID, FIRST = 0, 1, 2
"""What is suppressed: nothing, for the token is given anyway; what is never said; that, and what is not first."""
UNTIMED = -1
MAX_INITIAL = 50
"""The first timestamp is 1.0 s at the latest: what is longer silent is no speech that was missed."""


class TokenRule(NamedTuple):
    """Of one position. `level`: FREE, SAID or FIRST. `text_from`: tokens below it are no choice: 0, end-of-text or
    the first timestamp; UNTIMED: nothing is asked of timestamps, and the rest does not matter. `low`, `high`: the
    timestamps that are a choice."""

    level: int = SAID
    text_from: int = UNTIMED
    low: int = 0
    high: int = 0


GIVEN, PLAIN = TokenRule(FREE), TokenRule(SAID)


class TokenRules:
    """Rules of one model. `vocabulary`: width of its logits."""

    def __init__(self, special: SpecialTokenIds, vocabulary: int, device: torch.device) -> None:
        self.eot, self.no_timestamps, self.times_from = special.eot, special.no_timestamps, special.timestamp_begin
        self.last = vocabulary - 1
        self.times = torch.arange(special.timestamp_begin, vocabulary, device=device)
        self.never = torch.tensor(sorted(special.suppress), dtype=torch.int64, device=device)
        self.not_first = torch.tensor(sorted(special.suppress_first), dtype=torch.int64, device=device)

    def after(self, said: Sequence[int], timestamps: bool) -> TokenRule:
        """Of the position after `said`, the answer so far without what was given.

        Timestamps come in pairs, the end of a segment and the start of the next, but at the very start and before
        end-of-text; none is earlier than the one before, and no segment is empty.
        """
        level = SAID if said else FIRST
        if not timestamps:
            return TokenRule(level)
        first = self.times_from
        if not said:
            return TokenRule(level, first, first, min(first + MAX_INITIAL, self.last))
        ended = said[-1] >= first
        paired = ended and (len(said) < 2 or said[-2] >= first)
        if paired:
            return TokenRule(level, 0, self.last + 1, self.last)
        latest = next((token for token in reversed(said) if token >= first), first - 1)
        return TokenRule(level, self.eot if ended else 0, latest if ended else latest + 1, self.last)

    def always(self, logits: Tensor) -> None:
        """`logits` (rows, vocabulary) in place, every row by PLAIN: nothing a step could tell from none at all."""
        logits.index_fill_(1, self.never, float("-inf"))

    def apply(self, logits: Tensor, rules: Tensor, timed: bool) -> None:
        """`logits` (rows, vocabulary) in place, row r by the Rule in `rules[r]` (rows, 4) int64. `timed`: one of
        them asks something of timestamps."""
        level, text_from, low, high = rules[:, :, None].unbind(1)
        for ids, least in ((self.never, SAID), (self.not_first, FIRST)):
            chosen = logits.index_select(1, ids).masked_fill_(level >= least, float("-inf"))
            logits.index_copy_(1, ids, chosen)
        if not timed:
            return
        asked = text_from > UNTIMED
        words, marks = logits[:, : self.eot], logits[:, self.eot : self.times_from]
        times = logits[:, self.times_from :]
        times.masked_fill_(asked & ((self.times < low) | (self.times > high)), float("-inf"))
        logits[:, self.no_timestamps :][:, :1].masked_fill_(asked, float("-inf"))
        marks.masked_fill_(text_from > self.eot, float("-inf"))
        # Whether it is time for a timestamp is asked of all of them together; which one, of each. Words are most
        # of the vocabulary: they are read once, and written once.
        unsaid = text_from >= self.eot
        likeliest = words.amax(1, keepdim=True).masked_fill_(unsaid, float("-inf"))
        likeliest = torch.maximum(likeliest, marks.amax(1, keepdim=True)).float()
        due = asked & (times.float().logsumexp(1, keepdim=True) > likeliest)
        marks.masked_fill_(due, float("-inf"))
        # As masked_fill, whose mask of a row each is slow on a CPU.
        words.add_(torch.zeros_like(likeliest, dtype=words.dtype).masked_fill_(unsaid | due, float("-inf")))
