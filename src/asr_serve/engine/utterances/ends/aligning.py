"""When each token of an answer was said: rows that have ended are gone through once more, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.nn import functional as F

from asr_serve.decoding.attention import Recognition
from asr_serve.decoding.dtw import first_frames, looked
from asr_serve.models.batch import Paged, pack

if TYPE_CHECKING:
    from asr_serve.engine.utterances.rows import Row
    from asr_serve.engine.utterances.runner import DecodeRunner

MOST_POSITIONS = 512
"""In one pass: enough to fill its products, few enough that nobody waits long for it."""


class Ended(NamedTuple):
    """A row with the answer that it leaves with; `samples`: how long its audio is."""

    row: Row
    answer: Recognition
    samples: int


class Aligner:
    """Over the pages of a runner, of which it reads those of audio, and writes none."""

    def __init__(self, runner: DecodeRunner) -> None:
        self._runner = runner

    @torch.inference_mode()
    def timed(self, ended: Sequence[Ended]) -> list[Ended]:
        """The same, with times in their answers where they want some."""
        told = list(ended)
        wanted = [i for i, each in enumerate(ended) if self._wants(each)]
        while wanted:
            batch = [wanted.pop(0)]
            positions = len(ended[batch[0]].answer.tokens)
            while wanted and (positions := positions + len(ended[wanted[0]].answer.tokens)) <= MOST_POSITIONS:
                batch.append(wanted.pop(0))
            times = self._align([ended[i] for i in batch])
            for i, found in zip(batch, times, strict=True):
                told[i] = told[i]._replace(answer=msgspec.structs.replace(told[i].answer, times=found))
        return told

    def _wants(self, each: Ended) -> bool:
        return each.row.hypothesis.options.words and bool(each.answer.tokens)

    def _align(self, ended: Sequence[Ended]) -> list[tuple[tuple[int, int], ...]]:
        return [self._spans(each, self._begins(scores)) for each, scores in zip(ended, self.looks(ended), strict=True)]

    @torch.inference_mode()
    def looks(self, ended: Sequence[Ended]) -> list[np.ndarray]:
        """Where the alignment heads look as each token of text is decided, and what comes after the last: of each
        (heads, tokens + 1, frames) float32, scaled products."""
        model, device = self._runner.model, self._runner.device
        starts = [self._start(each) for each in ended]
        # Said again without what was said before, and without tokens that stand for times: those look elsewhere.
        fed = [[*start, *self._text(each.answer.tokens)] for start, each in zip(starts, ended, strict=True)]
        fed = [tokens[: model.max_tokens] for tokens in fed]
        frames = [min(each.row.frames, max(1, -(-each.samples // model.frame_samples))) for each in ended]
        packing = pack([len(tokens) for tokens in fed], 1)
        packing.total = device.rows(packing.total)
        tokens = torch.tensor([token for each in fed for token in each])
        tokens = F.pad(tokens, (0, packing.total - len(tokens))).to(device.torch_device)
        scores = model.align(tokens, packing, self._audio(ended), frames)
        return [each[:, len(start) - 1 :].cpu().numpy() for start, each in zip(starts, scores, strict=True)]

    def _start(self, each: Ended) -> tuple[int, ...]:
        starts, hypothesis = self._runner.starts, each.row.hypothesis
        options = msgspec.structs.replace(hypothesis.options, prompt=(), timestamps=False)
        return starts.in_language(options, hypothesis.language)

    def _text(self, tokens: Sequence[int]) -> list[int]:
        special = self._runner.starts.special
        return [token for token in tokens if special is None or token < special.eot]

    def _audio(self, ended: Sequence[Ended]) -> Paged:
        pool = self._runner.pool
        tables = torch.zeros(len(ended), max(len(each.row.audio) for each in ended), dtype=torch.int32)
        for row, each in enumerate(ended):
            tables[row, : len(each.row.audio)] = torch.tensor(each.row.audio, dtype=torch.int32)
        lengths = torch.tensor([each.row.frames for each in ended])
        return Paged(pool, tables.to(pool.device), lengths.to(pool.device))

    def _begins(self, scores: np.ndarray) -> np.ndarray:
        """The first sample of each token, and then of what comes after them."""
        model = self._runner.model
        begins = first_frames(-looked(scores)) * model.frame_samples + model.alignment_shift
        return np.append(begins, scores.shape[2] * model.frame_samples)

    def _spans(self, each: Ended, begins: np.ndarray) -> tuple[tuple[int, int], ...]:
        """Of all tokens of the answer; those that are no text take no time, where the next one begins."""
        special = self._runner.starts.special
        edges = begins.clip(0, each.samples).tolist()
        spans, at = [], 0
        for token in each.answer.tokens:
            if special is not None and token >= special.eot:
                spans.append((edges[at], edges[at]))
            else:
                spans.append((edges[at], edges[at + 1]))
                at += 1
        return tuple(spans)
