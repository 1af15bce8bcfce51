"""One streaming search as tests drive it: a model whose frames are posteriors, its state, its chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asr_serve.models.interfaces import UNBOUNDED_SAMPLES, StreamingChunk
from asr_serve.types import NBestHypothesis, SearchResult, SearchToken


class PosteriorModel:
    """As much of a streaming model as a CTC search needs: its hidden frames are the posteriors themselves."""

    def __init__(self, vocab: int, blank: int = 0) -> None:
        self.vocab_size, self.blank_id = vocab, blank

    def ctc_logprobs(self, hidden: Tensor) -> Tensor:
        return hidden


def posteriors(seed: int, *shape: int, sharp: float = 2.0) -> Tensor:
    logits = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (logits * sharp).log_softmax(-1)


def state_of(search: Any, sessions: int, poison: float = 77, device: str = "cpu") -> dict[str, Tensor]:
    """Rows of new sessions and one more; what no session may read before it writes is poison."""
    return {
        name: torch.full(
            (sessions + 1, *spec.shape),
            poison if spec.initial_value is None else spec.initial_value,
            dtype=spec.dtype,
            device=device,
        )
        for name, spec in search.state_specs().items()
    }


def chunk_of(rows: list[int], seen: list[int], frames: list[int], device: str = "cpu") -> StreamingChunk:
    numbers = (torch.tensor(x, dtype=torch.int64, device=device) for x in (rows, seen, frames))
    return StreamingChunk(torch.zeros(len(rows), 0), *numbers, torch.full((len(rows),), UNBOUNDED_SAMPLES))


def run_search(
    search: Any, hidden: Tensor, widths: list[int] | None = None, words: Any = None, fusion: Any = None
) -> tuple[list[SearchToken], list[SearchToken], list[NBestHypothesis]]:
    """One session on its own: the fixed tokens, the last tail, and the n-best list. `words`: a biasing list;
    `fusion`: a language model."""
    state, fixed, at, found = state_of(search, 1), [], 0, SearchResult([], [])
    more = (words, fusion) if fusion is not None else () if words is None else (words,)
    for width in widths or [len(hidden)]:
        [found] = search.step(hidden[None, at : at + width], chunk_of([0], [at], [width]), state, *more)
        fixed += found.fixed_tokens
        at += width
    return fixed, found.tail_tokens, search.finish(0, state, *more)
