"""When each token of an answer was said: from where its heads looked while it was decoded, or, where that is not
known, as with beams, while it is gone through once more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.decoding.attention import Recognition
from asr_serve.decoding.dtw import costs, first_frames
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
        wanted = [each for each in ended if each.row.hypothesis.options.words and each.answer.tokens]
        if not wanted:
            return list(ended)
        times = {
            id(each): self._times(each, scores) for each, scores in zip(wanted, self.looks(wanted), strict=True)
        }
        return [
            each._replace(answer=msgspec.structs.replace(each.answer, times=times[id(each)]))
            if id(each) in times
            else each
            for each in ended
        ]

    def looks(self, ended: Sequence[Ended]) -> list[Tensor]:
        """Where the alignment heads look as each token of text is decided, and what comes after the last: of each
        (heads, tokens + 1, frames) float32, scaled products; one fewer where there was no room for the end."""
        found = {id(each): self._kept(each) for each in ended if self._has_kept(each)}
        left = [each for each in ended if id(each) not in found]
        while left:
            batch = [left.pop(0)]
            positions = len(batch[0].answer.tokens)
            while left and (positions := positions + len(left[0].answer.tokens)) <= MOST_POSITIONS:
                batch.append(left.pop(0))
            found |= {id(each): scores for each, scores in zip(batch, self._again(batch), strict=True)}
        return [found[id(each)] for each in ended]

    # --- from what was kept while it was decoded ----------------------------------------------------------

    def _has_kept(self, each: Ended) -> bool:
        """Whether just this answer was decoded last, along one way."""
        tokens = each.row.hypothesis.tokens
        return tuple(tokens) == each.answer.tokens and len(each.row.asked) >= len(tokens) > 0

    def _kept(self, each: Ended) -> Tensor:
        model, row, tokens = self._runner.model, each.row, each.answer.tokens
        decided = [i for i, token in enumerate(tokens) if self._is_text(token)]
        decided += [len(tokens)] if len(row.asked) > len(tokens) else []
        query = torch.stack([row.asked[i] for i in decided]).transpose(0, 1)
        audio, frames, scores, first = self._audio([each]), self._frames(each), [], 0
        for layer, heads in model.alignment.heads.items():
            keys = audio.keys(layer, heads, 0, frames)
            asked = query[first : first + len(heads)]
            scores.append(asked.float() @ keys.float() * model.decoder[layer].scale)
            first += len(heads)
        return torch.cat(scores)

    # --- gone through once more ---------------------------------------------------------------------------

    def _again(self, ended: Sequence[Ended]) -> list[Tensor]:
        """Their answers are said again, all at once, without what was said before and without tokens for times."""
        model, device = self._runner.model, self._runner.device
        starts = [self._start(each) for each in ended]
        fed = [
            [*start, *(token for token in each.answer.tokens if self._is_text(token))][: model.max_tokens]
            for start, each in zip(starts, ended, strict=True)
        ]
        packing = pack([len(tokens) for tokens in fed], 1)
        packing.total = device.rows(packing.total)
        tokens = torch.tensor([token for each in fed for token in each])
        tokens = F.pad(tokens, (0, packing.total - len(tokens))).to(device.torch_device)
        scores = model.align(tokens, packing, self._audio(ended), [self._frames(each) for each in ended])
        return [each[:, len(start) - 1 :] for start, each in zip(starts, scores, strict=True)]

    def _start(self, each: Ended) -> tuple[int, ...]:
        starts, hypothesis = self._runner.starts, each.row.hypothesis
        options = msgspec.structs.replace(hypothesis.options, prompt=(), timestamps=False)
        return starts.in_language(options, hypothesis.language)

    def _is_text(self, token: int) -> bool:
        special = self._runner.starts.special
        return special is None or token < special.eot

    def _frames(self, each: Ended) -> int:
        """Those of its audio: what fills a window is silence."""
        frame_samples: int = self._runner.model.frame_samples
        return min(each.row.frames, max(1, -(-each.samples // frame_samples)))

    def _audio(self, ended: Sequence[Ended]) -> Paged:
        pool = self._runner.pool
        tables = torch.zeros(len(ended), max(len(each.row.audio) for each in ended), dtype=torch.int32)
        for row, each in enumerate(ended):
            tables[row, : len(each.row.audio)] = torch.tensor(each.row.audio, dtype=torch.int32)
        lengths = torch.tensor([each.row.frames for each in ended])
        return Paged(pool, tables.to(pool.device), lengths.to(pool.device))

    # --- times --------------------------------------------------------------------------------------------

    def _times(self, each: Ended, scores: Tensor) -> tuple[tuple[int, int], ...]:
        """Of all tokens of the answer; those that are no text take no time, where the next one begins."""
        model = self._runner.model
        begins = first_frames(costs(scores).cpu().numpy()) * model.frame_samples + model.alignment.shift_samples
        edges = np.append(begins, scores.shape[2] * model.frame_samples).clip(0, each.samples).tolist()
        times, at = [], 0
        for token in each.answer.tokens:
            end = at + self._is_text(token)
            times.append((edges[at], edges[end]))
            at = end
        return tuple(times)
