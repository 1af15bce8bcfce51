"""Rows of tokens through a model's decoder: they join with what was encoded for them, and leave with an answer."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from asr_serve.decoding.beam_search import top_tokens
from asr_serve.decoding.seq2seq import Finish, Hypothesis, SearchOptions
from asr_serve.decoding.token_rules import GIVEN, PLAIN, SAID, UNTIMED, TokenRule
from asr_serve.devices.interface import Device
from asr_serve.engine.seq2seq.biasing import pick_and_record
from asr_serve.engine.seq2seq.decode_batch import (
    NO_OPTIONS,
    BeamGroup,
    DecodeBatch,
    DecodeRow,
    DecoderPrompts,
    ForwardInputs,
    pages_for,
    rows_for,
)
from asr_serve.engine.seq2seq.encoder import BorrowedPages, EncoderResult, OwnedPages
from asr_serve.errors import OptionError
from asr_serve.kernels import PAGE
from asr_serve.models.interfaces import EncoderDecoderModel
from asr_serve.models.packing import PagedKeyValues

if TYPE_CHECKING:
    from asr_serve.engine.seq2seq.decode_batch import DecodeRow
    from asr_serve.engine.seq2seq.encoder_cache import EncoderCache


class AlignmentQueries:
    """In one pass. Nothing is copied but what rows keep: a row that goes on holds on to no others' for it but to
    theirs that keep too, so all together never hold more than as many rows as there are, as long as they may get.
    """

    def __init__(self, model: EncoderDecoderModel, layers: Sequence[Tensor], wanted: Tensor | None) -> None:
        """`layers`: queries (positions, heads * head_dim) of each layer that has alignment heads; `wanted`: which
        positions are told of; None: all."""
        self._model, self._layers, self._logit_positions = model, layers, wanted
        self._recorded: list[tuple[DecodeRow, int]] = []

    def record(self, row: DecodeRow, told: int) -> None:
        """Of that one among the positions that are told of, for the token that was decided there."""
        if row.hypothesis.options.words:
            self._recorded.append((row, told))

    def flush(self) -> None:
        """To each row what is kept for it. A copy: the next step writes over what was recorded."""
        if not self._recorded:
            return
        model, found = self._model, []
        told = torch.tensor([told for _, told in self._recorded])
        told = told if self._logit_positions is None else self._logit_positions.cpu()[told]
        for query, heads in zip(self._layers, model.alignment.heads.values(), strict=True):
            where = told.to(query.device)
            found.append(query[where].view(len(told), model.heads, -1)[:, list(heads)])
        for (row, _), asked in zip(self._recorded, torch.cat(found, dim=1), strict=True):
            row.alignment_queries.append(asked)


class ForwardOutputs(NamedTuple):
    """What a pass tells of each position: the likeliest token and its natural-log probability, all logits, what
    they were made from, what is asked of the audio, and the natural-log probability that nobody speaks, where
    that is wanted."""

    tokens: Tensor
    logprobs: Tensor
    logits: Tensor
    hidden: Tensor
    alignment_queries: AlignmentQueries
    no_speech_logprobs: Tensor | None = None


def forward_outputs(model: EncoderDecoderModel, wanted: Tensor | None, *made: Tensor) -> ForwardOutputs:
    """`made`: as they come, what was asked between what is always told and what is told at times."""
    tokens, logprobs, logits, hidden, *more = made
    layers = len(model.alignment.heads)
    silence = more[layers] if len(more) > layers else None
    return ForwardOutputs(
        tokens, logprobs, logits, hidden, AlignmentQueries(model, more[:layers], wanted), silence
    )


MAX_VERIFY_POSITIONS = 256
"""Positions of drafts in one pass: enough to fill its products, few enough for the logits to stay in cache."""


class DecodeRunner:
    """Up to `max_rows` sequences, one token each per step; they join and leave between any two steps."""

    def __init__(
        self, model: EncoderDecoderModel, device: Device, max_rows: int, kv_bytes: int, longest_frames: int
    ) -> None:
        self.model, self.device, self.max_rows = model, device, max_rows
        self.batch = DecodeBatch(model, device, max_rows, kv_bytes, longest_frames)
        self.rows, self.page_pool, self.kv_cache = self.batch.rows, self.batch.page_pool, self.batch.kv_cache
        self.finished_rows: list[DecodeRow] = []
        """Of those that have ended: without a seat, with all of their pages."""
        self.prompts = DecoderPrompts(model, device)
        self.positions_fed = self.positions_verified = self.positions_accepted = 0
        """In passes ahead of the rows: all of them; those of drafts, and of these what held."""
        self.encoder_cache: EncoderCache | None = None
        """What was heard before; it makes itself known."""
        self._step_plain = device.capture(self._forward)
        self._step_ruled = device.capture(partial(self._forward_ruled, begun=True))
        self._step_timed = device.capture(partial(self._forward_ruled, timed=True))
        self._step_timed_prefill = device.capture(partial(self._forward_ruled, timed=True, begun=True))

    # --- room -------------------------------------------------------------------------------------------

    @staticmethod
    def token_pages(tokens: int) -> int:
        return pages_for(tokens)

    def pages_needed(self, frames: int, max_tokens: int, options: SearchOptions = NO_OPTIONS) -> int:
        """Reserved whole when a row joins, so that a row that runs is never short of memory."""
        return pages_for(frames) + pages_for(self.prompts.positions_needed(options, max_tokens)) * rows_for(
            options
        )

    def validate(self, options: SearchOptions) -> None:
        """Raises OptionError for what this model cannot do."""
        self.prompts.validate(options)

    def validate_capacity(self, rows: int, pages: int) -> None:
        """Raises OptionError where there will never be so much: of one row without beams there is."""
        if rows > self.max_rows:
            raise OptionError(f"beam={rows}", f"up to max_decode_rows={self.max_rows}", param="beam")
        if pages >= self.page_pool.pages:
            came, allowed = (
                f"beam={rows} needs {pages} pages of keys and values",
                f"up to {self.page_pool.pages - 1}",
            )
            raise OptionError(came, allowed, "ask for fewer, or give the engine more kv_bytes", param="beam")

    @property
    def free_rows(self) -> int:
        return self.batch.free_rows

    @property
    def all_rows(self) -> list[DecodeRow]:
        return [*self.rows, *self.finished_rows]

    @property
    def request_count(self) -> int:
        return len({row.request_id for row in self.all_rows})

    # --- joining and leaving ----------------------------------------------------------------------------

    def add_row(
        self,
        request_id: int,
        heard: EncoderResult | BorrowedPages | OwnedPages,
        hypothesis: Hypothesis,
        root: bytes = b"",
    ) -> DecodeRow:
        """`root`: the name of what was heard, where it is kept."""
        options = hypothesis.options
        audio = self.store_encoder_result(heard) if isinstance(heard, EncoderResult) else heard.pages
        taken = [] if isinstance(heard, BorrowedPages) else audio
        row = DecodeRow(request_id, [*taken], hypothesis)
        self.batch.add_row(row)  # from here on `leave` gives the pages back, whatever fails below
        start = self.prompts.prompt_tokens(options)
        hypothesis.limit_tokens(self.model.max_tokens - len(start))
        own = self.page_pool.allocate(
            pages_for(self.prompts.positions_needed(options, hypothesis.max_tokens)) * hypothesis.beam
        )
        row.pages = own + taken
        if hypothesis.beam > 1:
            own = BeamGroup(row, len(start) + hypothesis.fixed, own, taken).block_table(0)
        self.batch.set_token_pages(row, own)
        self.batch.set_audio_pages(row, audio, heard.frames)
        row.audio_key = root
        special = self.prompts.special
        if special is not None:
            hypothesis.words_below = special.eot
        row.prompt = () if self.prompts.detects_language(options) else start
        if special is None and row.beams is None and len(start) == 1:
            row.prefilled = True  # a step is given the one token
            self.batch.set_position(row)
        return row

    def store_encoder_result(self, heard: EncoderResult) -> list[int]:
        """Its pages, one reference of each for the caller."""
        pages = self.page_pool.allocate(pages_for(heard.frames))
        table = torch.tensor(pages, dtype=torch.int32, device=self.device.torch_device)
        with contextlib.ExitStack() as unless_stored:
            unless_stored.callback(self.page_pool.free_pages, pages)
            self.device.kernels.store(self.kv_cache, heard.cross_kv, table)
            unless_stored.pop_all()
        return pages

    def attach_prefix(self, row: DecodeRow, pages: list[int]) -> None:
        """What it begins with lies in these pages, as far as they go; it has a reference of each."""
        known = len(pages)
        audio = row.pages[len(row.block_table) :]
        self.page_pool.free_pages(row.block_table[:known])
        self.batch.set_token_pages(row, pages + row.block_table[known:])
        row.pages, row.cached_positions = row.block_table + audio, known * PAGE

    def write_cross_kv(self, cross: Tensor, tables: Tensor, positions: Tensor) -> None:
        """Frames of audio that grows: row r of `cross` (rows, layers, 2, width) into position `positions[r]`
        (rows,) int64 of the pages of `tables[r]` (rows, pages) int32."""
        rows, layers, _, width = cross.shape
        spread = cross.new_empty(rows, 3, width)  # as the decoder's own keys and values come, behind a query
        for layer in range(layers):
            spread[:, 1:] = cross[:, layer]
            self.device.kernels.append(self.kv_cache, layer, spread, tables, positions)

    def release_row_slot(self, row: DecodeRow) -> None:
        """It has ended, and somebody else may have its seat."""
        self.batch.remove_row(row)
        self.finished_rows.append(row)

    def remove_row(self, row: DecodeRow) -> None:
        """Its pages are free at once; those of beams, when the last one leaves."""
        if row in self.finished_rows:
            self.finished_rows.remove(row)
        else:
            self.batch.remove_row(row)
        if row.beams is None:
            self.page_pool.free_pages(row.pages)
            return
        row.beams.rows.remove(row)
        if not row.beams.rows:
            self.page_pool.free_pages(row.beams.pages)

    def restart_row(self, row: DecodeRow) -> None:
        """Decode the row anew, from what is fixed of it; its audio stays where it is."""
        row.draft_remaining = ()
        del row.alignment_queries[len(row.hypothesis.tokens) :]
        self.batch.set_position(row)

    # --- a step -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[DecodeRow]:
        """One token for every row; returns the rows whose hypothesis has ended, still joined."""
        rule = self.prompts.rule
        passed = self._run_forward(
            self.batch.step_inputs(), [rule(row, row.tokens) for row in self.rows] if self.prompts.rules else []
        )
        chosen, scores = passed.tokens.tolist()[: len(self.rows)], passed.logprobs.tolist()
        ended = []
        at: dict[BeamGroup, list[int]] = {}
        for index, row in enumerate(self.rows):
            assert row.prefilled, "a row was stepped before its start was fed"
            if row.beams is not None:
                at.setdefault(row.beams, [0] * len(row.beams.rows))[row.beam_index] = index
                continue
            token, score = chosen[index], scores[index]
            if row.hypothesis.temperature > 0:
                token, score = self._sample(passed.logits[index], row)
            elif row.hotwords is not None:
                token, score = pick_and_record(
                    row, passed.logits[index], passed.hidden[index], self.model.head_weight
                )
            row.finish = row.hypothesis.append_token(token, score)
            passed.alignment_queries.record(row, index)
            chosen[index] = token
            row.advance_draft(token, 0)
            if row.finish:
                ended.append(row)
        passed.alignment_queries.flush()
        self.batch.advance(chosen)
        return ended + self._advance_beams(at, passed)

    def _advance_beams(self, at: dict[BeamGroup, list[int]], passed: ForwardOutputs) -> list[DecodeRow]:
        """The next token of every way; `at`: where in the pass each is told. Returns the rows whose search is
        over, alone by then."""
        if not at:
            return []
        where = torch.tensor([position for positions in at.values() for position in positions])
        where = where.to(passed.logits.device)
        most = max(beams.search.choices for beams in at)
        found = iter(top_tokens(passed.logits[where], passed.hidden[where], self.model.head_weight, most))
        ended, copies = [], []
        for beams, positions in at.items():
            search = beams.search
            if sources := search.advance([next(found)[: search.choices] for _ in positions]):
                copies += beams.fork(sources)
                self.batch.resize_beams(beams, len(sources))
            else:
                row = self.batch.collapse_beams(beams)
                way, row.finish = search.best()
                row.hypothesis.append_rest(way.tokens, way.logprobs)
                ended.append(row)
        if copies:
            pages = torch.tensor(copies, device=passed.logits.device)
            self.kv_cache[pages[:, 1]] = self.kv_cache[pages[:, 0]]
        return ended

    # --- starts and drafts ------------------------------------------------------------------------------

    def rows_to_prefill(self) -> list[DecodeRow]:
        """Rows that have to begin, whose draft fixes what comes next, or has more to propose than a step would
        tell."""
        return [row for row in self.rows if row.needs_prefill]

    @torch.inference_mode()
    def prefill_and_verify(self, rows: Sequence[DecodeRow]) -> list[DecodeRow]:
        """Feed each row's start, take of what its draft proposes what decoding would have chosen, and the token
        after it; returns the rows whose hypothesis has ended, still joined.

        Every position of a draft is a row of its own over the same pages. All of a layer's keys and values are
        written before any is read, so each position sees what decoding one by one would show it.
        """
        ended = []
        ahead: list[DecodeRow] = []
        positions = 0
        unknown = [row for row in rows if not row.prompt]
        for first in range(0, len(unknown), MAX_VERIFY_POSITIONS):
            self._detect_languages(unknown[first : first + MAX_VERIFY_POSITIONS])
        for row in rows:
            if self.encoder_cache is not None and not row.prefilled:
                self.encoder_cache.attach_prefix(row)
            wanted = len(row.prefill_tokens())
            if ahead and positions + wanted > MAX_VERIFY_POSITIONS:
                ended += self._verify_batch(ahead)
                ahead, positions = [], 0
            ahead.append(row)
            positions += wanted
        return ended + (self._verify_batch(ahead) if ahead else [])

    def _detect_languages(self, rows: Sequence[DecodeRow]) -> None:
        """The likeliest one after "start" alone, whatever was said before."""
        starts, count = self.prompts, len(rows)
        assert starts.special is not None
        passed = self._run_forward(
            self.batch.prefill_inputs(rows, [(starts.special.sot,)] * count, [1] * count), [GIVEN] * count
        )
        logits = passed.logits[:count].index_select(1, starts.language_ids)
        sure, heard = logits.float().softmax(dim=1).max(dim=1)
        for row, language, probability in zip(rows, heard.tolist(), sure.tolist(), strict=True):
            row.hypothesis.language, row.hypothesis.language_prob = starts.languages[language], probability
            row.prompt = starts.prompt_in_language(row.hypothesis.options, row.hypothesis.language)

    def _verify_batch(self, rows: Sequence[DecodeRow]) -> list[DecodeRow]:
        feeds, drafts = [row.prefill_tokens() for row in rows], [row.proposal for row in rows]
        fed = [len(feed) for feed in feeds]
        asked = [
            self.prompts.logit_offsets(row, n, len(draft)) for row, n, draft in zip(rows, fed, drafts, strict=True)
        ]
        rules: list[TokenRule] = []
        for row, draft, positions in zip(rows, drafts, asked, strict=True):
            said, free = [*row.tokens, *draft], max(len(row.tokens), row.hypothesis.fixed)
            choices = [self.prompts.rule(row, said[:end]) for end in range(free, len(said) + 1)]
            rules += [GIVEN] * (len(positions) - len(choices)) + choices
        firsts = [row.length if row.prefilled else 1 + row.cached_positions for row in rows]
        new = [row for row in rows if not row.prefilled]
        at = self.batch.prefill_inputs(rows, feeds, firsts)
        at.logit_positions = self.batch.logit_positions(fed, asked)
        passed = self._run_forward(at, rules)
        chosen, scores = passed.tokens.tolist(), passed.logprobs.tolist()
        ended, first = [], 0
        opened: dict[BeamGroup, list[int]] = {}
        for row, draft, positions in zip(rows, drafts, asked, strict=True):
            if not row.prefilled:
                row.prefilled = True
                if passed.no_speech_logprobs is not None:
                    row.hypothesis.no_speech_prob = float(passed.no_speech_logprobs[first].exp())
            first += len(positions)
            tail = slice(first - len(draft) - 1, first)
            if self._accept_draft(row, draft, chosen[tail], scores[tail], passed, tail.start):
                ended.append(row)
            elif row.beams is None:
                self.batch.set_position(row)
            else:
                opened[row.beams] = [first - 1]
            self.positions_verified += len(draft)
        passed.alignment_queries.flush()
        self.positions_fed += sum(fed)
        if self.encoder_cache is not None:
            self.encoder_cache.store_prefix(new)
        return ended + self._advance_beams(opened, passed)

    def _accept_draft(
        self,
        row: DecodeRow,
        draft: Sequence[int],
        chosen: list[int],
        scores: list[float],
        passed: ForwardOutputs,
        first: int,
    ) -> Finish | None:
        """Give the hypothesis what holds of its draft, and the first token that differs; of beams, only what is
        fixed. `first`: where in the pass the draft begins."""
        hypothesis, logits = row.hypothesis, passed.logits[first : first + len(draft) + 1]
        for position in range(len(draft) + 1):
            token, score = chosen[position], scores[position]
            if row.forced:
                if token != draft[position]:
                    token = draft[position]
                    score = float(torch.log_softmax(logits[position].float(), dim=-1)[token])
            elif row.beams is not None:
                row.draft_remaining = ()
                break
            elif hypothesis.temperature > 0:
                token, score = self._sample(logits[position], row)
            elif row.hotwords is not None:
                token, score = pick_and_record(
                    row, logits[position], passed.hidden[first + position], self.model.head_weight
                )
            row.finish = hypothesis.append_token(token, score)
            passed.alignment_queries.record(row, first + position)
            if row.finish or position == len(draft) or token != draft[position]:
                row.advance_draft(token, position)
                break
            self.positions_accepted += 1
        return row.finish

    # --- passes -----------------------------------------------------------------------------------------

    def _run_forward(self, at: ForwardInputs, rules: Sequence[TokenRule]) -> ForwardOutputs:
        """With tables as wide as the longest row needs; what is told of position i by `rules[i]`."""
        own_width = self.device.padded_pages(pages_for(int(at.token_lengths.max())), at.token_tables.shape[1])
        audio_width = self.device.padded_pages(pages_for(int(at.audio_lengths.max())), at.audio_tables.shape[1])
        own, audio = at.token_tables[:, :own_width].contiguous(), at.audio_tables[:, :audio_width].contiguous()
        given = at.tokens, own, at.token_lengths, audio, at.audio_lengths
        some = () if at.logit_positions is None else (at.logit_positions,)
        if self.prompts.rules is None or all(rule == PLAIN for rule in rules):
            return forward_outputs(self.model, at.logit_positions, *self._step_plain(*given, *some))
        told = len(at.tokens if at.logit_positions is None else at.logit_positions)
        padded = torch.tensor([*rules, *[GIVEN] * (told - len(rules))])
        advance = self._step_ruled
        if any(rule.text_from != UNTIMED for rule in rules):
            advance = self._step_timed if all(rule.level == SAID for rule in rules) else self._step_timed_prefill
        return forward_outputs(self.model, at.logit_positions, *advance(padded, *given, *some))

    def logits(self, at: ForwardInputs, rules: Sequence[TokenRule]) -> Tensor:
        """(positions, vocabulary) of as many positions as there are rules; their keys and values are written."""
        return self._run_forward(at, rules).logits[: len(rules)]

    def _forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        logits, hidden, *asked = self._decode(*given)
        if self.prompts.rules is not None:
            self.prompts.rules.always(logits)
        return (*self._argmax(logits, hidden), logits, hidden, *asked)

    def _forward_ruled(
        self, rules: Tensor, *given: Tensor, timed: bool = False, begun: bool = False
    ) -> tuple[Tensor, ...]:
        """Each position by its own rule. `timed`: some ask something of timestamps; `begun`: rows may have their
        start among these positions."""
        assert self.prompts.rules is not None
        assert self.prompts.special is not None
        logits, hidden, *asked = self._decode(*given)
        silence: tuple[Tensor, ...] = ()
        if begun:
            known = logits.float()
            silence = (known[:, self.prompts.special.no_speech] - known.logsumexp(dim=1),)
        self.prompts.rules.apply(logits, rules, timed)
        return (*self._argmax(logits, hidden), logits, hidden, *asked, *silence)

    def _decode(
        self,
        tokens: Tensor,
        own: Tensor,
        own_lengths: Tensor,
        audio: Tensor,
        audio_lengths: Tensor,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        return self.model.decode(
            tokens,
            PagedKeyValues(self.kv_cache, own, own_lengths),
            PagedKeyValues(self.kv_cache, audio, audio_lengths),
            wanted,
        )

    def _argmax(self, logits: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        picked = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        self.device.kernels.pick(logits, hidden, self.model.head_weight, picked, logprobs)
        return picked, logprobs

    def _sample(self, logits: Tensor, row: DecodeRow) -> tuple[int, float]:
        scores = torch.log_softmax(logits.double().cpu(), dim=-1)
        # From the top and in double precision: divided by however low a temperature, the best one stays 0.
        weights = torch.softmax((scores - scores.max()) / row.hypothesis.temperature, dim=-1)
        token = int(torch.multinomial(weights, 1, generator=row.generator))
        return token, float(scores[token])
