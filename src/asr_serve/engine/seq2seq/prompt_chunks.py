"""Chunked prefill: which positions of which prompts are fed in a step, beside one position of each decoding row.

A prompt that holds audio is hundreds of positions long. Fed whole, it would hold up every row that decodes; fed in
parts, it adds a bounded number of positions to steps that run anyway.

Source: arXiv:2403.02310 (chunked prefill that shares steps with decoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from asr_serve.models.interfaces import PROMPT_EMBEDDING

if TYPE_CHECKING:
    from asr_serve.engine.seq2seq.decode_batch import DecodeRow

STEP_POSITIONS = 256
"""Positions of a step while prompts are fed: enough to fill its products, few enough that rows decode steadily."""
MIN_CHUNK_POSITIONS = 16
"""Minimum positions of prompts in a step, however many rows decode, so that every prompt advances."""


class PromptChunk(NamedTuple):
    """Positions of a row's prompt that are fed together."""

    row: DecodeRow
    first: int
    positions: int

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of the positions, PROMPT_EMBEDDING where an embedding is fed."""
        return self.row.prompt[self.first : self.first + self.positions]

    @property
    def embeddings(self) -> Tensor | None:
        """Embeddings (n, width) of the positions that have one, in order; None: none has."""
        count = self.tokens.count(PROMPT_EMBEDDING)
        if not count:
            return None
        assert self.row.embeddings is not None, "a prompt has no embeddings"
        before = self.row.prompt[: self.first].count(PROMPT_EMBEDDING)
        return self.row.embeddings[before : before + count]


def schedule_chunks(rows: Sequence[DecodeRow], positions: int) -> list[PromptChunk]:
    """Chunks to feed next, of `positions` positions at most, and MIN_CHUNK_POSITIONS at least. Rows for which a client
    waits go first, then in order of arrival. The last token of a prompt is left out: the row decodes with it in the
    same step, which counts."""
    chunks, room = [], max(positions, MIN_CHUNK_POSITIONS)
    for row in sorted(rows, key=lambda row: not row.hypothesis.options.hurried):
        missing = len(row.prompt) - 1 - row.prompt_positions
        if (count := min(missing, room - 1)) > 0:
            chunks.append(PromptChunk(row, row.prompt_positions, count))
            room -= count + (count == missing)
        if room < 2:
            break
    return chunks
