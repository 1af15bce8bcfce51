"""Where rows sit: dense in every tensor of a step, and their keys and values in pages of one pool."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.devices.base import Device
from asr_serve.engine.utterances.pages import PagePool
from asr_serve.engine.utterances.rows import Beams, Row, pages_of
from asr_serve.native import PAGE


class Positions:
    """What a pass is given of each position: the token; the row's pages of tokens and of audio; how many positions
    of either hold something, this one counted. `wanted`: which positions it tells something of; None: all."""

    def __init__(
        self, tokens: Tensor, own: Tensor, own_lengths: Tensor, audio: Tensor, audio_lengths: Tensor
    ) -> None:
        self.tokens, self.own, self.own_lengths = tokens, own, own_lengths
        self.audio, self.audio_lengths = audio, audio_lengths
        self.wanted: Tensor | None = None


class Seats:
    """Rows are kept dense: the last one moves into the gap of one that leaves."""

    def __init__(self, model: Any, device: Device, max_rows: int, kv_bytes: int, longest_frames: int) -> None:
        self.device, self.max_rows = device, max_rows
        shape = (model.layers, 2, model.heads, model.head_dim * PAGE)
        page_bytes = int(np.prod(shape)) * device.dtype.itemsize
        own_width, audio_width = pages_of(model.max_tokens), pages_of(longest_frames)
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

    @property
    def free(self) -> int:
        """Seats that nobody has and no beams will take."""
        groups = {row.beams for row in self.rows if row.beams is not None}
        return self.max_rows - len(self.rows) - sum(beams.width - len(beams.rows) for beams in groups)

    def sit(self, row: Row) -> None:
        self.rows.append(row)

    def own(self, row: Row, pages: Sequence[int]) -> None:
        """Its tokens go there."""
        row.table = [*pages]
        self.own_tables[self.rows.index(row), : len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def hear(self, row: Row, pages: Sequence[int], frames: int) -> None:
        """Its audio lies there."""
        row.audio, row.frames = [*pages], frames
        index = self.rows.index(row)
        self.audio_lengths[index] = frames
        self.audio_tables[index, : len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def place(self, row: Row) -> None:
        """Go on after what the row has said. Keys and values of all but the last token are in its pages."""
        index = self.rows.index(row)
        self.tokens[index], self.own_lengths[index] = row.last, row.length

    def rise(self, row: Row) -> None:
        index, last = self.rows.index(row), len(self.rows) - 1
        for state in (self.tokens, self.own_tables, self.audio_tables, self.own_lengths, self.audio_lengths):
            state[index] = state[last]
            state[last] = 0 if state.dim() == 2 else 1
        self.rows[index] = self.rows[last]
        self.rows.pop()

    # --- beams ------------------------------------------------------------------------------------------

    def spread(self, beams: Beams, count: int) -> None:
        """So many rows, each with its table and what it goes on after."""
        first = beams.rows[0]
        while len(beams.rows) > count:
            self.rise(beams.rows.pop())
        while len(beams.rows) < count:
            row = beams.another()
            self.sit(row)
            index, source = self.rows.index(row), self.rows.index(first)
            for state in (self.audio_tables, self.audio_lengths):
                state[index] = state[source]
        for lane, row in enumerate(beams.rows):
            self.own(row, beams.table(lane))
            self.place(row)

    def alone(self, beams: Beams) -> Row:
        """Their search is over: one row is left, with room for another try."""
        while len(beams.rows) > 1:
            self.rise(beams.rows.pop())
        row = beams.rows[0]
        table, spare = beams.alone()
        self.own(row, table)
        self.pages.give(spare)
        return row

    # --- passes -----------------------------------------------------------------------------------------

    def step(self) -> Positions:
        """One position of every row."""
        rows = self.device.rows(len(self.rows))
        return Positions(
            self.tokens[:rows],
            self.own_tables[:rows],
            self.own_lengths[:rows],
            self.audio_tables[:rows],
            self.audio_lengths[:rows],
        )

    def stepped(self, tokens: Sequence[int]) -> None:
        """What each row has said in it."""
        self.tokens[: len(tokens)] = torch.tensor(tokens)
        self.own_lengths[: len(tokens)] += 1

    def ahead(self, rows: Sequence[Row], feeds: Sequence[Sequence[int]], firsts: Sequence[int]) -> Positions:
        """As many positions of each row as it is fed tokens; `firsts`: how many it has with the first of them."""
        index = torch.tensor([self.rows.index(row) for row in rows])
        seated = self.own_tables[index], self.audio_tables[index], self.audio_lengths[index]
        return self._ahead(feeds, firsts, *seated)

    def behind(self, rows: Sequence[Row], feeds: Sequence[Sequence[int]], firsts: Sequence[int]) -> Positions:
        """The same of rows that may have risen."""
        own = _tables([row.table for row in rows], self.own_tables.shape[1])
        audio = _tables([row.audio for row in rows], self.audio_tables.shape[1])
        return self._ahead(feeds, firsts, own, audio, torch.tensor([row.frames for row in rows]))

    def _ahead(
        self,
        feeds: Sequence[Sequence[int]],
        firsts: Sequence[int],
        own: Tensor,
        audio: Tensor,
        audio_lengths: Tensor,
    ) -> Positions:
        """Tables and lengths: of each row."""
        counts = torch.tensor([len(feed) for feed in feeds])
        total = int(counts.sum())
        padding = self.device.rows(total) - total
        spread = F.pad(torch.arange(len(feeds)).repeat_interleave(counts), (0, padding))
        spans = [torch.arange(first, first + len(feed)) for first, feed in zip(firsts, feeds, strict=True)]
        own, audio = own[spread], audio[spread]
        own[total:] = audio[total:] = 0
        return Positions(
            F.pad(torch.tensor([token for feed in feeds for token in feed]), (0, padding)),
            own,
            F.pad(torch.cat(spans), (0, padding), value=1),
            audio,
            audio_lengths[spread],
        )

    def wanted(self, fed: Sequence[int], asked: Sequence[Sequence[int]]) -> Tensor | None:
        """Positions of rows that are fed so many tokens each, counted over all of them: of row r `asked[r]`.
        None for all."""
        if sum(fed) == sum(map(len, asked)):
            return None
        starts = accumulate(fed, initial=0)
        found = [start + each for start, positions in zip(starts, asked, strict=False) for each in positions]
        return F.pad(torch.tensor(found), (0, self.device.rows(len(found)) - len(found)))


def _tables(pages: Sequence[Sequence[int]], width: int) -> Tensor:
    found = torch.zeros(len(pages), width, dtype=torch.int32)
    for row, each in enumerate(pages):
        found[row, : len(each)] = torch.tensor(each, dtype=torch.int32)
    return found
