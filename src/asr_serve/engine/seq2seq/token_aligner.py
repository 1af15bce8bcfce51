"""Times of tokens from an attention decoder's own cross-attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.decoding.dtw import costs, first_frames
from asr_serve.decoding.hypothesis import Recognition, RecognitionHypothesis
from asr_serve.models.packing import PagedKeyValues, pack_clips

if TYPE_CHECKING:
    from asr_serve.engine.seq2seq.decode_batch import DecodeRow
    from asr_serve.engine.seq2seq.decoder import DecodeRunner

MAX_ALIGN_POSITIONS = 512
"""Positions of an alignment pass: enough to fill its products, few enough that it is short."""


Answer = TypeVar("Answer", Recognition, RecognitionHypothesis)


class FinishedRow(NamedTuple):
    """Row with the answer that it leaves with; `samples`: length of its audio."""

    row: DecodeRow
    recognition: Recognition
    samples: int


class TokenAligner:
    """Token times from cross-attention. Reads the audio in a runner's pages, and writes none."""

    def __init__(self, runner: DecodeRunner) -> None:
        self._runner = runner

    @torch.inference_mode()
    def add_times(self, ended: Sequence[FinishedRow]) -> list[FinishedRow]:
        """Returns the rows, with token times in answers and hypotheses that need them."""
        wanted = {
            (index, tokens): each._replace(recognition=msgspec.structs.replace(each.recognition, tokens=tokens))
            for index, each in enumerate(ended)
            if each.row.hypothesis.options.words
            for tokens in (each.recognition.tokens, *(other.tokens for other in each.recognition.hypotheses))
            if tokens
        }
        if not wanted:
            return list(ended)
        rows = list(wanted.values())
        times = {
            key: self._times(row, scores)
            for (key, row), scores in zip(wanted.items(), self.attention_scores(rows), strict=True)
        }

        def timed(index: int, answer: Answer) -> Answer:
            return msgspec.structs.replace(answer, times=times.get((index, answer.tokens), ()))

        return [
            each._replace(
                recognition=msgspec.structs.replace(
                    timed(index, each.recognition),
                    hypotheses=tuple(timed(index, other) for other in each.recognition.hypotheses),
                )
            )
            for index, each in enumerate(ended)
        ]

    def attention_scores(self, ended: Sequence[FinishedRow]) -> list[Tensor]:
        """Returns scaled products of the alignment heads for each text token as it is decided, and for the end:
        for each row (heads, tokens + 1, frames) float32; one fewer if there was no room for the end."""
        found = {id(each): self._scores_from_queries(each) for each in ended if self._has_queries(each)}
        remaining = [each for each in ended if id(each) not in found]
        while remaining:
            batch = [remaining.pop(0)]
            positions = len(batch[0].recognition.tokens)
            while remaining and (positions := positions + len(remaining[0].recognition.tokens)) <= MAX_ALIGN_POSITIONS:
                batch.append(remaining.pop(0))
            found |= {id(each): scores for each, scores in zip(batch, self._scores_by_forward(batch), strict=True)}
        return [found[id(each)] for each in ended]

    # --- from recorded queries ----------------------------------------------------------------------------

    def _has_queries(self, each: FinishedRow) -> bool:
        """Returns whether queries of exactly this answer were recorded, as in decoding without beams."""
        tokens = each.row.hypothesis.tokens
        return tuple(tokens) == each.recognition.tokens and len(each.row.alignment_queries) >= len(tokens) > 0

    def _scores_from_queries(self, each: FinishedRow) -> Tensor:
        model, row, tokens = self._runner.model, each.row, each.recognition.tokens
        positions = [i for i, token in enumerate(tokens) if self._is_text(token)]
        positions += [len(tokens)] if len(row.alignment_queries) > len(tokens) else []
        query = torch.stack([row.alignment_queries[i] for i in positions]).transpose(0, 1)
        audio, frames, scores, first = self._audio([each]), self._frames(each), [], 0
        for layer, heads in model.alignment.heads.items():
            keys = audio.keys(layer, heads, 0, frames)
            layer_query = query[first : first + len(heads)]
            scores.append(layer_query.float() @ keys.float() * model.attention_scale)
            first += len(heads)
        return torch.cat(scores)

    # --- by another forward pass --------------------------------------------------------------------------

    def _scores_by_forward(self, ended: Sequence[FinishedRow]) -> list[Tensor]:
        """Feeds the answers again, all in one pass, without previous text and timestamp tokens."""
        model, device = self._runner.model, self._runner.device
        prompts = [self._prompt(each) for each in ended]
        inputs = [
            [*prompt, *(token for token in each.recognition.tokens if self._is_text(token))][: model.max_tokens]
            for prompt, each in zip(prompts, ended, strict=True)
        ]
        packing = pack_clips([len(tokens) for tokens in inputs], 1)
        packing.total = device.padded_rows(packing.total)
        tokens = torch.tensor([token for tokens in inputs for token in tokens])
        tokens = F.pad(tokens, (0, packing.total - len(tokens))).to(device.torch_device)
        audio = self._audio(ended)
        frames = [self._frames(each) for each in ended]
        scores = self._runner.decoder.align(tokens, packing, audio.block_tables, audio.lengths, frames)
        return [row_scores[:, len(prompt) - 1 :] for prompt, row_scores in zip(prompts, scores, strict=True)]

    def _prompt(self, each: FinishedRow) -> tuple[int, ...]:
        prompts, hypothesis = self._runner.prompts, each.row.hypothesis
        options = msgspec.structs.replace(hypothesis.options, prompt=(), timestamps=False)
        return prompts.prompt_in_language(options, hypothesis.language)

    def _is_text(self, token: int) -> bool:
        special = self._runner.prompts.special
        return special is None or token < special.eot

    def _frames(self, each: FinishedRow) -> int:
        """Frames of the row's audio, without the silence that fills a window."""
        return min(each.row.frames, max(1, -(-each.samples // self._runner.model.frame_samples)))

    def _audio(self, ended: Sequence[FinishedRow]) -> PagedKeyValues:
        pool = self._runner.kv_cache
        tables = torch.zeros(len(ended), max(len(each.row.audio_pages) for each in ended), dtype=torch.int32)
        for row, each in enumerate(ended):
            tables[row, : len(each.row.audio_pages)] = torch.tensor(each.row.audio_pages, dtype=torch.int32)
        lengths = torch.tensor([each.row.frames for each in ended])
        return self._runner.decoder.audio(tables.to(pool.device), lengths.to(pool.device))

    # --- times --------------------------------------------------------------------------------------------

    def _times(self, each: FinishedRow, scores: Tensor) -> tuple[tuple[int, int], ...]:
        """Start and end in samples of all tokens of the answer; tokens that are not text take no time, where the
        next one begins."""
        model = self._runner.model
        starts = first_frames(costs(scores).cpu().numpy()) * model.frame_samples + model.alignment.shift_samples
        edges = np.append(starts, scores.shape[2] * model.frame_samples).clip(0, each.samples).tolist()
        times, at = [], 0
        for token in each.recognition.tokens:
            end = at + self._is_text(token)
            times.append((edges[at], edges[end]))
            at = end
        return tuple(times)
