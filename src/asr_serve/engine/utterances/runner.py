"""Rows of tokens through a model's decoder: they join with what was encoded for them, and leave with an answer."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from asr_serve.decoding.attention import Finish, Hypothesis, SearchOptions
from asr_serve.decoding.beam import leading
from asr_serve.decoding.rules import GIVEN, PLAIN, SAID, UNTIMED, Rule
from asr_serve.devices.base import Device
from asr_serve.engine.utterances.encode import EncoderResult, Held, Lent
from asr_serve.engine.utterances.ends.asked import Passed, passed
from asr_serve.engine.utterances.hot.biasing import remembered
from asr_serve.engine.utterances.rows import Beams, Row, pages_of
from asr_serve.engine.utterances.seats import Positions, Seats
from asr_serve.engine.utterances.starts import NO_OPTIONS, Starts, rows_needed
from asr_serve.errors import OptionError
from asr_serve.models.batch import Paged
from asr_serve.native import PAGE

if TYPE_CHECKING:
    from asr_serve.engine.utterances.kept import Kept

VERIFY_ROWS = 256
"""Positions of drafts in one pass: enough to fill its products, few enough for the logits to stay in cache."""


class DecodeRunner:
    """Up to `max_rows` sequences, one token each per step; they join and leave between any two steps."""

    def __init__(self, model: Any, device: Device, max_rows: int, kv_bytes: int, longest_frames: int) -> None:
        self.model, self.device, self.max_rows = model, device, max_rows
        self.seats = Seats(model, device, max_rows, kv_bytes, longest_frames)
        self.rows, self.pages, self.pool = self.seats.rows, self.seats.pages, self.seats.pool
        self.resting: list[Row] = []
        """Of those that have ended: without a seat, with all of their pages."""
        self.starts = Starts(model, device)
        self.positions_fed = self.positions_verified = self.positions_held = 0
        """In passes ahead of the rows: all of them; those of drafts, and of these what held."""
        self.kept: Kept | None = None
        """What was heard before; it makes itself known."""
        self._advance = device.step(self._forward)
        self._advance_ruled = device.step(partial(self._forward_ruled, begun=True))
        self._advance_timed = device.step(partial(self._forward_ruled, timed=True))
        self._advance_begun = device.step(partial(self._forward_ruled, timed=True, begun=True))

    # --- room -------------------------------------------------------------------------------------------

    @staticmethod
    def own_pages(tokens: int) -> int:
        return pages_of(tokens)

    def pages_needed(self, frames: int, max_tokens: int, options: SearchOptions = NO_OPTIONS) -> int:
        """Reserved whole when a row joins, so that a row that runs is never short of memory."""
        return pages_of(frames) + pages_of(self.starts.room(options, max_tokens)) * rows_needed(options)

    def check(self, options: SearchOptions) -> None:
        """Raises OptionError for what this model cannot do."""
        self.starts.check(options)

    def expect_room(self, rows: int, pages: int) -> None:
        """Raises OptionError where there will never be so much: of one row without beams there is."""
        if rows > self.max_rows:
            raise OptionError(f"beam={rows}", f"up to max_decode_rows={self.max_rows}", param="beam")
        if pages >= self.pages.pages:
            came, allowed = f"beam={rows} needs {pages} pages of keys and values", f"up to {self.pages.pages - 1}"
            raise OptionError(came, allowed, "ask for fewer, or give the engine more kv_bytes", param="beam")

    @property
    def free_rows(self) -> int:
        return self.seats.free

    @property
    def held(self) -> list[Row]:
        return [*self.rows, *self.resting]

    @property
    def requests(self) -> int:
        return len({row.request_id for row in self.held})

    # --- joining and leaving ----------------------------------------------------------------------------

    def join(
        self, request_id: int, heard: EncoderResult | Lent | Held, hypothesis: Hypothesis, root: bytes = b""
    ) -> Row:
        """`root`: the name of what was heard, where it is kept."""
        options = hypothesis.options
        audio = self.store(heard) if isinstance(heard, EncoderResult) else heard.pages
        taken = [] if isinstance(heard, Lent) else audio
        row = Row(request_id, [*taken], hypothesis)
        self.seats.sit(row)  # from here on `leave` gives the pages back, whatever fails below
        start = self.starts.tokens(options)
        hypothesis.within(self.model.max_tokens - len(start))
        own = self.pages.take(pages_of(self.starts.room(options, hypothesis.max_tokens)) * hypothesis.beam)
        row.pages = own + taken
        if hypothesis.beam > 1:
            own = Beams(row, len(start) + hypothesis.fixed, own, taken).table(0)
        self.seats.own(row, own)
        self.seats.hear(row, audio, heard.frames)
        row.root = root
        special = self.starts.special
        if special is not None:
            hypothesis.words_below = special.eot
        row.start = () if self.starts.hears_language(options) else start
        if special is None and row.beams is None and len(start) == 1:
            row.begun = True  # a step is given the one token
            self.seats.place(row)
        return row

    def store(self, heard: EncoderResult) -> list[int]:
        """Its pages, one reference of each for the caller."""
        pages = self.pages.take(pages_of(heard.frames))
        table = torch.tensor(pages, dtype=torch.int32, device=self.device.torch_device)
        with contextlib.ExitStack() as unless_stored:
            unless_stored.callback(self.pages.give, pages)
            self.device.kernels.store(self.pool, heard.cross, table)
            unless_stored.pop_all()
        return pages

    def begin_at(self, row: Row, pages: list[int]) -> None:
        """What it begins with lies in these pages, as far as they go; it has a reference of each."""
        known = len(pages)
        audio = row.pages[len(row.table) :]
        self.pages.give(row.table[:known])
        self.seats.own(row, pages + row.table[known:])
        row.pages, row.known = row.table + audio, known * PAGE

    def put(self, cross: Tensor, tables: Tensor, positions: Tensor) -> None:
        """Frames of audio that grows: row r of `cross` (rows, layers, 2, width) into position `positions[r]`
        (rows,) int64 of the pages of `tables[r]` (rows, pages) int32."""
        rows, layers, _, width = cross.shape
        spread = cross.new_empty(rows, 3, width)  # as the decoder's own keys and values come, behind a query
        for layer in range(layers):
            spread[:, 1:] = cross[:, layer]
            self.device.kernels.append(self.pool, layer, spread, tables, positions)

    def rest(self, row: Row) -> None:
        """It has ended, and somebody else may have its seat."""
        self.seats.rise(row)
        self.resting.append(row)

    def leave(self, row: Row) -> None:
        """Its pages are free at once; those of beams, when the last one leaves."""
        if row in self.resting:
            self.resting.remove(row)
        else:
            self.seats.rise(row)
        if row.beams is None:
            self.pages.give(row.pages)
            return
        row.beams.rows.remove(row)
        if not row.beams.rows:
            self.pages.give(row.beams.pages)

    def again(self, row: Row) -> None:
        """Decode the row anew, from what is fixed of it; its audio stays where it is."""
        row.left = ()
        del row.asked[len(row.hypothesis.tokens) :]
        self.seats.place(row)

    # --- a step -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """One token for every row; returns the rows whose hypothesis has ended, still joined."""
        rule = self.starts.rule
        passed = self._pass(
            self.seats.step(), [rule(row, row.tokens) for row in self.rows] if self.starts.rules else []
        )
        chosen, scores = passed.tokens.tolist()[: len(self.rows)], passed.logprobs.tolist()
        ended = []
        at: dict[Beams, list[int]] = {}
        for index, row in enumerate(self.rows):
            assert row.begun, "a row was stepped before its start was fed"
            if row.beams is not None:
                at.setdefault(row.beams, [0] * len(row.beams.rows))[row.lane] = index
                continue
            token, score = chosen[index], scores[index]
            if row.hypothesis.temperature > 0:
                token, score = self._sample(passed.logits[index], row)
            elif row.hotwords is not None:
                token, score = remembered(row, passed.logits[index], passed.hidden[index], self.model.head_weight)
            row.finish = row.hypothesis.add(token, score)
            passed.asked.keep(row, index)
            chosen[index] = token
            row.said(token, 0)
            if row.finish:
                ended.append(row)
        passed.asked.give()
        self.seats.stepped(chosen)
        return ended + self._grow(at, passed)

    def _grow(self, at: dict[Beams, list[int]], passed: Passed) -> list[Row]:
        """The next token of every way; `at`: where in the pass each is told. Returns the rows whose search is
        over, alone by then."""
        if not at:
            return []
        where = torch.tensor([position for positions in at.values() for position in positions])
        where = where.to(passed.logits.device)
        most = max(beams.search.choices for beams in at)
        found = iter(leading(passed.logits[where], passed.hidden[where], self.model.head_weight, most))
        ended, copies = [], []
        for beams, positions in at.items():
            search = beams.search
            if sources := search.step([next(found)[: search.choices] for _ in positions]):
                copies += beams.fork(sources)
                self.seats.spread(beams, len(sources))
            else:
                row = self.seats.alone(beams)
                way, row.finish = search.best()
                row.hypothesis.conclude(way.tokens, way.logprobs)
                ended.append(row)
        if copies:
            pages = torch.tensor(copies, device=passed.logits.device)
            self.pool[pages[:, 1]] = self.pool[pages[:, 0]]
        return ended

    # --- starts and drafts ------------------------------------------------------------------------------

    def drafted(self) -> list[Row]:
        """Rows that have to begin, whose draft fixes what comes next, or has more to propose than a step would
        tell."""
        return [row for row in self.rows if row.due]

    @torch.inference_mode()
    def verify(self, rows: Sequence[Row]) -> list[Row]:
        """Feed each row's start, take of what its draft proposes what decoding would have chosen, and the token
        after it; returns the rows whose hypothesis has ended, still joined.

        Every position of a draft is a row of its own over the same pages. All of a layer's keys and values are
        written before any is read, so each position sees what decoding one by one would show it.
        """
        ended = []
        ahead: list[Row] = []
        positions = 0
        unknown = [row for row in rows if not row.start]
        for first in range(0, len(unknown), VERIFY_ROWS):
            self._hear_languages(unknown[first : first + VERIFY_ROWS])
        for row in rows:
            if self.kept is not None and not row.begun:
                self.kept.begin(row)
            wanted = len(row.feed())
            if ahead and positions + wanted > VERIFY_ROWS:
                ended += self._verify(ahead)
                ahead, positions = [], 0
            ahead.append(row)
            positions += wanted
        return ended + (self._verify(ahead) if ahead else [])

    def _hear_languages(self, rows: Sequence[Row]) -> None:
        """The likeliest one after "start" alone, whatever was said before."""
        starts, count = self.starts, len(rows)
        passed = self._pass(self.seats.ahead(rows, [(starts.special.sot,)] * count, [1] * count), [GIVEN] * count)
        logits = passed.logits[:count].index_select(1, starts.language_ids)
        sure, heard = logits.float().softmax(dim=1).max(dim=1)
        for row, language, probability in zip(rows, heard.tolist(), sure.tolist(), strict=True):
            row.hypothesis.language, row.hypothesis.language_prob = starts.languages[language], probability
            row.start = starts.in_language(row.hypothesis.options, row.hypothesis.language)

    def _verify(self, rows: Sequence[Row]) -> list[Row]:
        feeds, drafts = [row.feed() for row in rows], [row.proposal for row in rows]
        fed = [len(feed) for feed in feeds]
        asked = [self.starts.asked(row, n, len(draft)) for row, n, draft in zip(rows, fed, drafts, strict=True)]
        rules: list[Rule] = []
        for row, draft, positions in zip(rows, drafts, asked, strict=True):
            said, free = [*row.tokens, *draft], max(len(row.tokens), row.hypothesis.fixed)
            choices = [self.starts.rule(row, said[:end]) for end in range(free, len(said) + 1)]
            rules += [GIVEN] * (len(positions) - len(choices)) + choices
        firsts = [row.length if row.begun else 1 + row.known for row in rows]
        new = [row for row in rows if not row.begun]
        at = self.seats.ahead(rows, feeds, firsts)
        at.wanted = self.seats.wanted(fed, asked)
        passed = self._pass(at, rules)
        chosen, scores = passed.tokens.tolist(), passed.logprobs.tolist()
        ended, first = [], 0
        opened: dict[Beams, list[int]] = {}
        for row, draft, positions in zip(rows, drafts, asked, strict=True):
            if not row.begun:
                row.begun = True
                if passed.silence is not None:
                    row.hypothesis.no_speech_prob = float(passed.silence[first].exp())
            first += len(positions)
            tail = slice(first - len(draft) - 1, first)
            if self._hold(row, draft, chosen[tail], scores[tail], passed, tail.start):
                ended.append(row)
            elif row.beams is None:
                self.seats.place(row)
            else:
                opened[row.beams] = [first - 1]
            self.positions_verified += len(draft)
        passed.asked.give()
        self.positions_fed += sum(fed)
        if self.kept is not None:
            self.kept.began(new)
        return ended + self._grow(opened, passed)

    def _hold(
        self, row: Row, draft: Sequence[int], chosen: list[int], scores: list[float], passed: Passed, first: int
    ) -> Finish | None:
        """Give the hypothesis what holds of its draft, and the first token that differs; of beams, only what is
        fixed. `first`: where in the pass the draft begins."""
        hypothesis, logits = row.hypothesis, passed.logits[first : first + len(draft) + 1]
        for position in range(len(draft) + 1):
            token, score = chosen[position], scores[position]
            if row.bound:
                if token != draft[position]:
                    token = draft[position]
                    score = float(torch.log_softmax(logits[position].float(), dim=-1)[token])
            elif row.beams is not None:
                row.left = ()
                break
            elif hypothesis.temperature > 0:
                token, score = self._sample(logits[position], row)
            elif row.hotwords is not None:
                token, score = remembered(
                    row, logits[position], passed.hidden[first + position], self.model.head_weight
                )
            row.finish = hypothesis.add(token, score)
            passed.asked.keep(row, first + position)
            if row.finish or position == len(draft) or token != draft[position]:
                row.said(token, position)
                break
            self.positions_held += 1
        return row.finish

    # --- passes -----------------------------------------------------------------------------------------

    def _pass(self, at: Positions, rules: Sequence[Rule]) -> Passed:
        """With tables as wide as the longest row needs; what is told of position i by `rules[i]`."""
        own_width = self.device.width(pages_of(int(at.own_lengths.max())), at.own.shape[1])
        audio_width = self.device.width(pages_of(int(at.audio_lengths.max())), at.audio.shape[1])
        own, audio = at.own[:, :own_width].contiguous(), at.audio[:, :audio_width].contiguous()
        given = at.tokens, own, at.own_lengths, audio, at.audio_lengths
        some = () if at.wanted is None else (at.wanted,)
        if self.starts.rules is None or all(rule == PLAIN for rule in rules):
            return passed(self.model, at.wanted, *self._advance(*given, *some))
        told = len(at.tokens if at.wanted is None else at.wanted)
        padded = torch.tensor([*rules, *[GIVEN] * (told - len(rules))])
        advance = self._advance_ruled
        if any(rule.text_from != UNTIMED for rule in rules):
            advance = self._advance_timed if all(rule.level == SAID for rule in rules) else self._advance_begun
        return passed(self.model, at.wanted, *advance(padded, *given, *some))

    def logits(self, at: Positions, rules: Sequence[Rule]) -> Tensor:
        """(positions, vocabulary) of as many positions as there are rules; their keys and values are written."""
        return self._pass(at, rules).logits[: len(rules)]

    def _forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        logits, hidden, *asked = self._decode(*given)
        if self.starts.rules is not None:
            self.starts.rules.always(logits)
        return (*self._choose(logits, hidden), logits, hidden, *asked)

    def _forward_ruled(
        self, rules: Tensor, *given: Tensor, timed: bool = False, begun: bool = False
    ) -> tuple[Tensor, ...]:
        """Each position by its own rule. `timed`: some ask something of timestamps; `begun`: rows may have their
        start among these positions."""
        assert self.starts.rules is not None
        logits, hidden, *asked = self._decode(*given)
        silence: tuple[Tensor, ...] = ()
        if begun:
            known = logits.float()
            silence = (known[:, self.starts.special.no_speech] - known.logsumexp(dim=1),)
        self.starts.rules.apply(logits, rules, timed)
        return (*self._choose(logits, hidden), logits, hidden, *asked, *silence)

    def _decode(
        self,
        tokens: Tensor,
        own: Tensor,
        own_lengths: Tensor,
        audio: Tensor,
        audio_lengths: Tensor,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = self.model.decode(
            tokens, Paged(self.pool, own, own_lengths), Paged(self.pool, audio, audio_lengths), wanted
        )
        return made

    def _choose(self, logits: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        picked = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        self.device.kernels.pick(logits, hidden, self.model.head_weight, picked, logprobs)
        return picked, logprobs

    def _sample(self, logits: Tensor, row: Row) -> tuple[int, float]:
        scores = torch.log_softmax(logits.double().cpu(), dim=-1)
        # From the top and in double precision: divided by however low a temperature, the best one stays 0.
        weights = torch.softmax((scores - scores.max()) / row.hypothesis.temperature, dim=-1)
        token = int(torch.multinomial(weights, 1, generator=row.generator))
        return token, float(scores[token])
