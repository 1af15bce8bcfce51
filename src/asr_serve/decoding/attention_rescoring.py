"""Second-pass rescoring of a streaming search's n-best list with an attention decoder over the whole session.

Source  two-pass decoding: U2, arXiv:2012.05481
"""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from asr_serve.decoding.biasing_list import BiasingSearch, StreamingBiasingList
from asr_serve.decoding.language_model.scorer import LanguageModelFusion
from asr_serve.models.interfaces import (
    NBestHypothesis,
    RescoringModel,
    RowValidatingSearch,
    SearchResult,
    SearchToken,
    State,
    StateSpec,
    StreamingChunk,
    StreamingSearch,
)

MOST_FRAMES = 1 << 14
"""Encoder frames of a session that are stored for rescoring: ten minutes. A longer session keeps the order of its
search."""


class _SavedRescoring(NamedTuple):
    """Rescoring state of a saved session."""

    width: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    dtype: Literal["fp32", "bf16"]
    fixed: list[SearchToken]


class AttentionRescoringSearch:
    """Search wrapper that orders the final n-best list with `rescore`. See models/interfaces.StreamingSearch.

    Fixed tokens stay: only what the search had not decided at the end is rescored. Unlike the search's own state,
    the encoder output of a session grows with it, and is stored here until its row is reused.
    """

    def __init__(self, search: StreamingSearch, model: RescoringModel) -> None:
        self.search, self.model = search, model
        self._hidden: dict[int, list[Tensor]] = defaultdict(list)
        self._fixed: dict[int, list[SearchToken]] = defaultdict(list)

    def state_specs(self) -> dict[str, StateSpec]:
        return self.search.state_specs()

    def step(self, hidden: Tensor, chunk: StreamingChunk, state: State) -> list[SearchResult]:
        results = self.search.step(hidden, chunk, state)
        spans = zip(chunk.rows.tolist(), chunk.start_frames.tolist(), chunk.frames.tolist(), strict=True)
        for index, (row, seen, frames) in enumerate(spans):
            if not seen:
                self.free(row)
            if seen + frames <= MOST_FRAMES:
                self._hidden[row].append(hidden[index, :frames].clone())  # step outputs are reused
            else:
                self._hidden.pop(row, None)
            self._fixed[row] += results[index].fixed_tokens
        return results

    def set_biasing(
        self, row: int, words: StreamingBiasingList | None, fusion: LanguageModelFusion | None = None
    ) -> None:
        if isinstance(self.search, BiasingSearch):
            self.search.set_biasing(row, words, fusion)

    def validate_row(self, row: int, state: State) -> None:
        if isinstance(self.search, RowValidatingSearch):
            self.search.validate_row(row, state)

    @torch.inference_mode()
    def finish(self, row: int, state: State) -> list[NBestHypothesis]:
        guesses = self.search.finish(row, state)
        hidden, fixed = self._hidden.get(row, []), self._fixed.get(row, [])
        self.free(row)
        if len(guesses) > 1 and hidden:
            sequences = [[token.id for token in (*fixed, *guess.tokens)] for guess in guesses]
            scores = self.model.rescore(torch.cat(hidden), sequences)
            totals = [
                score + self.model.ctc_weight * guess.logprob + guess.gain
                for score, guess in zip(scores, guesses, strict=True)
            ]
            guesses = [guesses[i] for i in sorted(range(len(guesses)), key=lambda i: -totals[i])]
        return guesses

    def export_state(self, row: int) -> tuple[bytes, Tensor]:
        hidden = self._hidden.get(row, [])
        joined = torch.cat(hidden) if hidden else torch.empty(0, 0)
        saved = _SavedRescoring(
            joined.shape[1], "bf16" if joined.dtype == torch.bfloat16 else "fp32", self._fixed.get(row, [])
        )
        return msgspec.msgpack.encode(saved), joined

    def import_state(self, row: int, numbers: bytes, tensor: bytes, seen: int, device: torch.device) -> None:
        try:
            saved = msgspec.msgpack.decode(numbers, type=_SavedRescoring)
        except msgspec.MsgspecError as failure:
            raise ValueError(f"numbers of a saved search that cannot be read: {failure}") from failure
        dtype = torch.bfloat16 if saved.dtype == "bf16" else torch.float32
        frames = seen if saved.width and seen <= MOST_FRAMES else 0
        if len(tensor) != frames * saved.width * dtype.itemsize:
            raise ValueError(f"{len(tensor)} bytes of {seen} frames, each {saved.width} numbers in {saved.dtype}")
        self.free(row)
        if saved.fixed:
            self._fixed[row] = saved.fixed
        if frames:
            hidden = torch.frombuffer(bytearray(tensor), dtype=dtype)
            self._hidden[row] = [hidden.view(frames, saved.width).to(device)]

    def free(self, row: int) -> None:
        self._hidden.pop(row, None)
        self._fixed.pop(row, None)
