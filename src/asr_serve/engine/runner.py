"""Batches in, tensors through the model, plain numbers out. Three runners, one per kind of work.

`EncodeRunner` and `DecodeRunner` meet only in `EncoderResult`, so that they may live in different processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.decoding.attention import Finish, Hypothesis
from asr_serve.devices.base import Device
from asr_serve.engine.pages import PagePool
from asr_serve.engine.states import Slot, StateCacheManager
from asr_serve.models.batch import Paged
from asr_serve.models.vad.silero import WINDOW_SAMPLES, Silero, SileroState
from asr_serve.native import PAGE


class EncoderResult(NamedTuple):
    """All a decoder needs of one utterance: cross-attention keys and values, (frames, layers, 2, width)."""

    cross: Tensor

    @property
    def frames(self) -> int:
        return self.cross.shape[0]


class VadRunner:
    """Voice activity of many callers in one step."""

    def __init__(self, model: Silero, rows: int) -> None:
        self.model = model
        self.states = StateCacheManager(tuple(model.state(rows)))

    @torch.inference_mode()
    def run(self, batch: Sequence[tuple[Slot, np.ndarray]]) -> list[np.ndarray]:
        """Probabilities of each caller's windows; its state moves on."""
        slots = [slot for slot, _ in batch]
        counts = [len(pcm) // WINDOW_SAMPLES for _, pcm in batch]
        padded = np.zeros((len(batch), max(counts) * WINDOW_SAMPLES), np.float32)
        for row, (_, pcm) in enumerate(batch):
            padded[row, : len(pcm)] = pcm
        state = SileroState(*self.states.load(slots))
        probabilities, state = self.model.step(torch.from_numpy(padded), state, torch.tensor(counts))
        self.states.save(slots, tuple(state))
        return [probabilities[row, :count].numpy() for row, count in enumerate(counts)]


class EncodeRunner:
    """Utterances to EncoderResults, in one batch."""

    def __init__(self, model: Any, device: Device) -> None:
        self.model, self.device = model, device

    @torch.inference_mode()
    def run(self, batch: Sequence[np.ndarray]) -> list[EncoderResult]:
        hidden, packing = self.model.encode([_tensor(pcm) for pcm in batch])
        cross = self.model.cross(hidden)
        return [
            EncoderResult(cross[offset : offset + frames])
            for offset, frames in zip(packing.offsets, packing.frames, strict=True)
        ]


def _tensor(pcm: np.ndarray) -> Tensor:
    """Without a copy, unless the array is read-only, which torch has no notion of."""
    return torch.from_numpy(pcm if pcm.flags.writeable else pcm.copy())


VERIFY_ROWS = 256
"""Positions of drafts in one pass: enough to fill its products, few enough for the logits to stay in cache."""
REACH = 4
"""Tokens of a draft among which the next one is looked for when another was said."""
AFTER_A_MISS = 8
"""Tokens of a draft that are verified at once when it was wrong before."""


class Row:
    """One decoding sequence: its pages and its hypothesis."""

    def __init__(self, request_id: int, own: list[int], audio: list[int], hypothesis: Hypothesis) -> None:
        self.request_id, self.own, self.audio, self.hypothesis = request_id, own, audio, hypothesis
        self.finish: Finish | None = None
        self.left = hypothesis.draft.tokens
        """Of the draft, what may still be said."""
        self.skip = 0
        """Tokens at its start that something else was said for."""
        self.trusted = hypothesis.max_tokens
        """How many tokens of the draft are verified at once: fewer once it was wrong."""
        self.generator = torch.Generator().manual_seed(hypothesis.options.seed)

    @property
    def proposal(self) -> tuple[int, ...]:
        """What is to be verified next."""
        room = self.hypothesis.max_tokens - 1 - len(self.hypothesis.tokens)
        return self.left[self.skip : self.skip + min(room, self.trusted)]

    @property
    def bound(self) -> bool:
        """The next token is fixed."""
        return len(self.hypothesis.tokens) < self.hypothesis.fixed

    def said(self, token: int, held: int) -> None:
        """`held` tokens of the proposal, and then this one: what may come after it? Most often it stands for one
        of the draft's, or for none of them, or the draft goes on a little later."""
        if held:
            self.left, self.skip = self.left[self.skip + held :], 0
        self.trusted = AFTER_A_MISS
        near = self.left[:REACH]
        if token in near:
            self.left, self.skip = self.left[near.index(token) + 1 :], 0
        elif self.skip < REACH:
            self.skip += 1
        else:
            self.left = ()


class DecodeRunner:
    """Up to `max_rows` sequences, one token each per step; they join and leave between any two steps.

    Rows are kept dense: the last one moves into the gap of one that leaves.
    """

    def __init__(self, model: Any, device: Device, max_rows: int, kv_bytes: int, longest_frames: int) -> None:
        self.model, self.device = model, device
        self.max_rows = max_rows
        shape = (model.layers, 2, model.heads, model.head_dim * PAGE)
        page_bytes = int(np.prod(shape)) * device.dtype.itemsize
        own_width, audio_width = self.own_pages(model.max_tokens), -(-longest_frames // PAGE)
        # At least one sequence of the greatest length, and the scratch page.
        pages = max(kv_bytes // page_bytes, 1 + own_width + audio_width)
        self.pages = PagePool(pages)
        self.pool = device.memory(pages, *shape)
        self.pool[0].zero_()
        rows = device.rows(max_rows)
        self.rows: list[Row] = []
        self.tokens = torch.full((rows,), model.bos, dtype=torch.int64)
        self.own_tables = torch.zeros(rows, own_width, dtype=torch.int32)
        self.audio_tables = torch.zeros(rows, audio_width, dtype=torch.int32)
        self.own_lengths = torch.ones(rows, dtype=torch.int64)
        self.audio_lengths = torch.ones(rows, dtype=torch.int64)
        self.positions_verified = self.positions_held = 0
        self._advance = device.step(self._forward)

    @staticmethod
    def own_pages(tokens: int) -> int:
        return -(-tokens // PAGE)

    def pages_needed(self, frames: int, max_tokens: int) -> int:
        """Reserved whole when a row joins, so that a row that runs is never short of memory."""
        return -(-frames // PAGE) + self.own_pages(max_tokens)

    def join(self, request_id: int, result: EncoderResult, hypothesis: Hypothesis) -> Row:
        audio = self.pages.take(-(-result.frames // PAGE))
        own = self.pages.take(self.own_pages(hypothesis.max_tokens))
        row, index = Row(request_id, own, audio, hypothesis), len(self.rows)
        self.rows.append(row)  # from here on `leave` gives the pages back, whatever fails below
        self.audio_tables[index, : len(audio)] = torch.tensor(audio, dtype=torch.int32)
        self.own_tables[index, : len(own)] = torch.tensor(own, dtype=torch.int32)
        self.audio_lengths[index] = result.frames
        table = self.audio_tables[index, : len(audio)].to(self.device.torch_device)
        self.device.kernels.store(self.pool, result.cross, table)
        self._place(index)
        return row

    def leave(self, row: Row) -> None:
        """Its pages are free at once."""
        index, last = self.rows.index(row), len(self.rows) - 1
        for state in (self.tokens, self.own_tables, self.audio_tables, self.own_lengths, self.audio_lengths):
            state[index] = state[last]
            state[last] = 0 if state.dim() == 2 else 1
        self.rows[index] = self.rows[last]
        self.rows.pop()
        self.pages.give(row.own + row.audio)

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """One token for every row; returns the rows whose hypothesis has ended, still joined."""
        live = len(self.rows)
        rows = self.device.rows(live)
        tokens, logprobs, logits = self._pass(
            self.tokens[:rows],
            self.own_tables[:rows],
            self.own_lengths[:rows],
            self.audio_tables[:rows],
            self.audio_lengths[:rows],
        )
        chosen, scores = tokens.tolist(), logprobs.tolist()
        ended = []
        for index, row in enumerate(self.rows):
            token, score = chosen[index], scores[index]
            if row.hypothesis.temperature > 0:
                token, score = self._sample(logits[index], row)
            row.finish = row.hypothesis.add(token, score)
            chosen[index] = token
            row.said(token, 0)
            if row.finish:
                ended.append(row)
        self.tokens[:live] = torch.tensor(chosen[:live])
        self.own_lengths[:live] += 1
        return ended

    def drafted(self) -> list[Row]:
        """Rows whose draft fixes what comes next, or has more to propose than a step would tell."""
        return [row for row in self.rows if row.left and (row.bound or len(row.proposal) > 1)]

    @torch.inference_mode()
    def verify(self, rows: Sequence[Row]) -> list[Row]:
        """Take of what each row's draft proposes what decoding would have chosen, and the token after it;
        returns the rows whose hypothesis has ended, still joined.

        Every position of a draft is a row of its own over the same pages. All of a layer's keys and values are
        written before any is read, so each position sees what decoding one by one would show it.
        """
        ended = []
        ahead: list[Row] = []
        positions = 0
        for row in rows:
            wanted = len(row.proposal) + 1
            if ahead and positions + wanted > VERIFY_ROWS:
                ended += self._verify(ahead)
                ahead, positions = [], 0
            ahead.append(row)
            positions += wanted
        return ended + (self._verify(ahead) if ahead else [])

    def _verify(self, rows: Sequence[Row]) -> list[Row]:
        drafts = [row.proposal for row in rows]
        counts = torch.tensor([len(draft) + 1 for draft in drafts])
        index = torch.tensor([self.rows.index(row) for row in rows])
        total = int(counts.sum())
        padding = self.device.rows(total) - total
        spread = F.pad(index.repeat_interleave(counts), (0, padding))
        begun = [len(row.hypothesis.tokens) + 1 for row in rows]
        spans = [torch.arange(at, at + len(draft) + 1) for at, draft in zip(begun, drafts, strict=True)]
        lengths = F.pad(torch.cat(spans), (0, padding), value=1)
        own, audio = self.own_tables[spread], self.audio_tables[spread]
        own[total:] = audio[total:] = 0
        last = self.tokens[index].tolist()
        given = F.pad(
            torch.tensor([token for at, draft in zip(last, drafts, strict=True) for token in (at, *draft)]),
            (0, padding),
        )
        tokens, logprobs, logits = self._pass(given, own, lengths, audio, self.audio_lengths[spread])
        chosen, scores = tokens.tolist(), logprobs.tolist()
        ended, first = [], 0
        for row, draft, at in zip(rows, drafts, index.tolist(), strict=True):
            if self._hold(row, draft, chosen[first:], scores[first:], logits[first:]):
                ended.append(row)
            else:
                self._place(at)
            self.positions_verified += len(draft)
            first += len(draft) + 1
        return ended

    def _hold(
        self, row: Row, draft: Sequence[int], chosen: list[int], scores: list[float], logits: Tensor
    ) -> Finish | None:
        """Give the hypothesis what holds of its draft, and the first token that differs."""
        hypothesis = row.hypothesis
        for position in range(len(draft) + 1):
            token, score = chosen[position], scores[position]
            if row.bound:
                if token != draft[position]:
                    token = draft[position]
                    score = float(torch.log_softmax(logits[position].float(), dim=-1)[token])
            elif hypothesis.temperature > 0:
                token, score = self._sample(logits[position], row)
            row.finish = hypothesis.add(token, score)
            if row.finish or position == len(draft) or token != draft[position]:
                row.said(token, position)
                break
            self.positions_held += 1
        return row.finish

    def again(self, row: Row) -> None:
        """Decode the row anew, from what is fixed of it; its audio stays where it is."""
        row.left = ()
        self._place(self.rows.index(row))

    def _place(self, index: int) -> None:
        """Go on after the hypothesis's tokens. Keys and values of all but the last are in the row's pages."""
        said = self.rows[index].hypothesis.tokens
        self.tokens[index] = said[-1] if said else self.model.bos
        self.own_lengths[index] = len(said) + 1

    def _pass(
        self, tokens: Tensor, own: Tensor, own_lengths: Tensor, audio: Tensor, audio_lengths: Tensor
    ) -> tuple[Tensor, ...]:
        """One position of each row, with tables as wide as the longest row needs."""
        own_width = self.device.width(self.own_pages(int(own_lengths.max())), own.shape[1])
        audio_width = self.device.width(-(-int(audio_lengths.max()) // PAGE), audio.shape[1])
        own, audio = own[:, :own_width].contiguous(), audio[:, :audio_width].contiguous()
        return self._advance(tokens, own, own_lengths, audio, audio_lengths)

    def _forward(
        self, tokens: Tensor, own: Tensor, own_lengths: Tensor, audio: Tensor, audio_lengths: Tensor
    ) -> tuple[Tensor, ...]:
        logits, hidden = self.model.decode(
            tokens, Paged(self.pool, own, own_lengths), Paged(self.pool, audio, audio_lengths)
        )
        picked = torch.empty_like(tokens)
        logprobs = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device)
        self.device.kernels.pick(logits, hidden, self.model.head_weight, picked, logprobs)
        return picked, logprobs, logits

    def _sample(self, logits: Tensor, row: Row) -> tuple[int, float]:
        scores = torch.log_softmax(logits.double().cpu(), dim=-1)
        # From the top and in double precision: divided by however low a temperature, the best one stays 0.
        weights = torch.softmax((scores - scores.max()) / row.hypothesis.temperature, dim=-1)
        token = int(torch.multinomial(weights, 1, generator=row.generator))
        return token, float(scores[token])
