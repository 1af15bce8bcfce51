"""The n-best list of a search, put in order once more by a decoder that hears the whole.

Source  two-pass decoding: U2, arXiv:2012.05481
"""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from asr_serve.decoding.biasing_list import BiasingSearch, StreamingBiasingList
from asr_serve.models.interfaces import (
    NBestHypothesis,
    RescoringModel,
    SearchResult,
    SearchToken,
    State,
    StateSpec,
    StreamingChunk,
    StreamingSearch,
)

MOST_FRAMES = 1 << 14
"""Of a session, that are kept for its end: ten minutes. One that lasts longer keeps the order of its search."""


class _SavedRescoring(NamedTuple):
    """Of a saved session."""

    width: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    dtype: Literal["fp32", "bf16"]
    fixed: list[SearchToken]


class RescoringSearch:
    """Another search, whose last answer is chosen with `rescore`. See models/interfaces.StreamingSearch.

    What was fixed on the way stays: the choice is among what the search had not decided at the end. Unlike the
    search's own state the encoder output of a session grows with it, and is kept here until its row is used again.
    """

    def __init__(self, search: StreamingSearch, model: RescoringModel) -> None:
        self.search, self.model = search, model
        self._hidden: dict[int, list[Tensor]] = defaultdict(list)
        self._fixed: dict[int, list[SearchToken]] = defaultdict(list)

    def state_specs(self) -> dict[str, StateSpec]:
        return self.search.state_specs()

    def step(self, hidden: Tensor, chunk: StreamingChunk, state: State) -> list[SearchResult]:
        found = self.search.step(hidden, chunk, state)
        places = zip(chunk.rows.tolist(), chunk.start_frames.tolist(), chunk.frames.tolist(), strict=True)
        for index, (row, seen, frames) in enumerate(places):
            if not seen:
                self.free(row)
            if seen + frames <= MOST_FRAMES:
                self._hidden[row].append(hidden[index, :frames].clone())  # what a step returns is lent
            else:
                self._hidden.pop(row, None)
            self._fixed[row] += found[index].fixed_tokens
        return found

    def set_biasing(self, row: int, words: StreamingBiasingList | None) -> None:
        if isinstance(self.search, BiasingSearch):
            self.search.set_biasing(row, words)

    @torch.inference_mode()
    def finish(self, row: int, state: State) -> list[NBestHypothesis]:
        guesses = self.search.finish(row, state)
        hidden, fixed = self._hidden.get(row, []), self._fixed.get(row, [])
        self.free(row)
        if len(guesses) > 1 and hidden:
            texts = [[token.id for token in (*fixed, *guess.tokens)] for guess in guesses]
            scores = self.model.rescore(torch.cat(hidden), texts)
            total = [
                score + self.model.ctc_weight * guess.logprob + guess.gain
                for score, guess in zip(scores, guesses, strict=True)
            ]
            guesses = [guesses[i] for i in sorted(range(len(guesses)), key=lambda i: -total[i])]
        return guesses

    def export_state(self, row: int) -> tuple[bytes, Tensor]:
        hidden = self._hidden.get(row, [])
        joined = torch.cat(hidden) if hidden else torch.empty(0, 0)
        kept = _SavedRescoring(
            joined.shape[1], "bf16" if joined.dtype == torch.bfloat16 else "fp32", self._fixed.get(row, [])
        )
        return msgspec.msgpack.encode(kept), joined

    def import_state(self, row: int, numbers: bytes, tensor: bytes, seen: int, device: torch.device) -> None:
        try:
            kept = msgspec.msgpack.decode(numbers, type=_SavedRescoring)
        except msgspec.MsgspecError as failure:
            raise ValueError(f"numbers of a saved search that cannot be read: {failure}") from failure
        dtype = torch.bfloat16 if kept.dtype == "bf16" else torch.float32
        frames = seen if kept.width and seen <= MOST_FRAMES else 0
        if len(tensor) != frames * kept.width * dtype.itemsize:
            raise ValueError(f"{len(tensor)} bytes of {seen} frames, each {kept.width} numbers in {kept.dtype}")
        self.free(row)
        if kept.fixed:
            self._fixed[row] = kept.fixed
        if frames:
            hidden = torch.frombuffer(bytearray(tensor), dtype=dtype)
            self._hidden[row] = [hidden.view(frames, kept.width).to(device)]

    def free(self, row: int) -> None:
        self._hidden.pop(row, None)
        self._fixed.pop(row, None)
