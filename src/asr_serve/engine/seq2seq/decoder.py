"""Decoder of encoder-decoder models: rows join with encoded audio, decode a token per step, leave with an
answer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from asr_serve.decoding.beam_search import language_scores, top_tokens
from asr_serve.decoding.hypothesis import Finish, Hypothesis, RecognitionHypothesis
from asr_serve.decoding.repetition_penalty import PenalizedLogits, PenalizedPosition
from asr_serve.decoding.sampling import sample_token
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.decoding.token_rules import FORCED_TOKEN, PLAIN_TOKEN, SUPPRESS, UNTIMED, TokenRule
from asr_serve.devices.interface import Device
from asr_serve.engine.seq2seq.biasing_queue import pick_and_record
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
from asr_serve.engine.seq2seq.paged_decoder import PagedDecoder, TensorParallelDecoder
from asr_serve.engine.seq2seq.prompt_chunks import STEP_POSITIONS, PromptChunk, schedule_chunks
from asr_serve.errors import OptionError
from asr_serve.kernels import PAGE
from asr_serve.models.interfaces import EncoderDecoderModel

if TYPE_CHECKING:
    from asr_serve.engine.seq2seq.decode_batch import DecodeRow
    from asr_serve.engine.seq2seq.encoder_cache import EncoderCache
    from asr_serve.engine.tensor_parallel.rank_processes import RankProcesses


class AlignmentQueries:
    """Queries of the alignment heads in one pass. Only those of rows that need word times are copied, into a tensor
    that these rows share; all tensors together hold no more than the batch's rows at their greatest length."""

    def __init__(self, model: EncoderDecoderModel, layers: Sequence[Tensor], logit_positions: Tensor | None) -> None:
        """`layers`: queries (positions, heads * head_dim) of each layer with alignment heads; none where a decoder
        returns no queries. `logit_positions`: positions with logits; None: all."""
        self._model, self._layers, self._logit_positions = model, layers, logit_positions
        self._recorded: list[tuple[DecodeRow, int]] = []

    def record(self, row: DecodeRow, logit_position: int) -> None:
        """Records the query of logit position `logit_position` for the row's token that was decided there."""
        if row.hypothesis.options.words and self._layers:
            self._recorded.append((row, logit_position))

    def flush(self) -> None:
        """Appends copies of the recorded queries to their rows; the next step overwrites its outputs."""
        if not self._recorded:
            return
        model, layer_queries = self._model, []
        positions = torch.tensor([position for _, position in self._recorded])
        positions = positions if self._logit_positions is None else self._logit_positions.cpu()[positions]
        for query, heads in zip(self._layers, model.alignment.heads.values(), strict=True):
            index = positions.to(query.device)
            layer_queries.append(query[index].view(len(positions), model.heads, -1)[:, list(heads)])
        for (row, _), queries in zip(self._recorded, torch.cat(layer_queries, dim=1), strict=True):
            row.alignment_queries.append(queries)


class ForwardOutputs(NamedTuple):
    """Outputs of a pass at each logit position: the likeliest token (int64) and its natural-log probability
    (float32), logits (positions, vocabulary), the hidden states (positions, width) behind them, alignment queries,
    and the natural-log probability of no speech, if it was computed."""

    tokens: Tensor
    logprobs: Tensor
    logits: Tensor
    hidden: Tensor
    alignment_queries: AlignmentQueries
    no_speech_logprobs: Tensor | None = None


def forward_outputs(decoder: PagedDecoder, logit_positions: Tensor | None, *outputs: Tensor) -> ForwardOutputs:
    """Names the outputs of a pass. `outputs`: tokens, logprobs, logits, hidden; queries of each alignment layer, if the
    decoder returns any; no-speech log-probabilities, if any."""
    tokens, logprobs, logits, hidden, *extra = outputs
    layers = decoder.query_layers
    no_speech = extra[layers] if len(extra) > layers else None
    queries = AlignmentQueries(decoder.model, extra[:layers], logit_positions)
    return ForwardOutputs(tokens, logprobs, logits, hidden, queries, no_speech)


MAX_VERIFY_POSITIONS = 256
"""Maximum positions in a verification pass: enough to fill its products, few enough for the logits to stay in
cache."""


class DecodeRunner:
    """Decodes up to `max_rows` sequences, one token each per step; they join and leave between steps."""

    def __init__(
        self,
        model: EncoderDecoderModel,
        device: Device,
        max_rows: int,
        kv_bytes: int,
        longest_frames: int,
        ranks: RankProcesses | None = None,
    ) -> None:
        """`ranks`: other processes that the decoder is split over. Raises RankLost."""
        self.model, self.device, self.max_rows = model, device, max_rows
        self.batch = DecodeBatch(model, device, max_rows, kv_bytes, longest_frames)
        self.rows, self.page_pool = self.batch.rows, self.batch.page_pool
        pages = self.page_pool.pages
        self.decoder = (
            PagedDecoder(model, device, pages) if ranks is None else TensorParallelDecoder(model, device, pages, ranks)
        )
        self.kv_cache = self.decoder.kv_cache
        self.finished_rows: list[DecodeRow] = []
        """Rows that have ended: without a slot in the batch, with all of their pages."""
        self.prompts = DecoderPrompts(model, device)
        self.embeds_audio = self.prompts.embeds_audio
        self.prefilling: list[DecodeRow] = []
        """Rows whose prompts, with audio in them, are being fed: they join the batch with their last prompt token."""
        self.step_positions = STEP_POSITIONS
        """Positions of a step while prompts are fed, those of decoding rows included."""
        self.positions_fed = self.positions_verified = self.positions_accepted = 0
        """Positions in prefill and verification passes: all; those of drafts; and those of drafts that were
        accepted."""
        self.encoder_cache: EncoderCache | None = None
        """Cache of audio and prompts, which registers itself here."""
        capture = self.decoder.capture
        self._step_plain = capture(self._forward)
        self._step_ruled = capture(partial(self._forward_ruled, begun=True))
        self._step_timed = capture(partial(self._forward_ruled, timed=True))
        self._step_timed_prefill = capture(partial(self._forward_ruled, timed=True, begun=True))

    # --- capacity ---------------------------------------------------------------------------------------

    def pages_needed(self, frames: int, max_tokens: int, options: SearchOptions = NO_OPTIONS) -> int:
        """Pages reserved as a row joins, so that a running row is never short of memory. Raises OptionError for audio
        that leaves no room for an answer in the prompt that holds it."""
        own = pages_for(self.prompts.positions_needed(options, max_tokens, frames)) * rows_for(options)
        return own if self.embeds_audio else pages_for(frames) + own

    def validate(self, options: SearchOptions) -> None:
        """Raises OptionError for what this model cannot do."""
        self.prompts.validate(options)

    def validate_capacity(self, rows: int, pages: int) -> None:
        """Raises OptionError for more rows or pages than there are. One row without beams always fits."""
        if rows > self.max_rows:
            raise OptionError(f"beam={rows}", f"up to max_decode_rows={self.max_rows}", param="beam")
        if pages >= self.page_pool.pages:
            requested, allowed = (
                f"beam={rows} needs {pages} pages of keys and values",
                f"up to {self.page_pool.pages - 1}",
            )
            raise OptionError(requested, allowed, "ask for fewer, or give the engine more kv_bytes", param="beam")

    @property
    def free_rows(self) -> int:
        return self.batch.free_rows - sum(row.hypothesis.beam for row in self.prefilling)

    @property
    def all_rows(self) -> list[DecodeRow]:
        return [*self.rows, *self.prefilling, *self.finished_rows]

    @property
    def request_count(self) -> int:
        return len({row.request_id for row in self.all_rows})

    # --- joining and leaving ----------------------------------------------------------------------------

    def add_row(
        self,
        request_id: int,
        encoded: EncoderResult | BorrowedPages | OwnedPages,
        hypothesis: Hypothesis,
        root: bytes = b"",
    ) -> DecodeRow:
        """Adds a row, with pages for its longest answer. `root`: cache key of its audio; empty: not cached."""
        options = hypothesis.options
        if self.embeds_audio:
            assert isinstance(encoded, EncoderResult), "audio in a prompt has no pages of its own"
            return self._add_prompt(request_id, encoded, hypothesis)
        audio = self.store_encoder_result(encoded) if isinstance(encoded, EncoderResult) else encoded.pages
        owned_audio = [] if isinstance(encoded, BorrowedPages) else audio
        row = DecodeRow(request_id, [*owned_audio], hypothesis)
        self.batch.add_row(row)  # from here on `remove_row` frees the pages, whatever fails below
        prompt = self.prompts.prompt_tokens(options)
        hypothesis.limit_tokens(self.model.max_tokens - len(prompt))
        token_pages = self.page_pool.allocate(
            pages_for(self.prompts.positions_needed(options, hypothesis.max_tokens)) * hypothesis.beam
        )
        row.pages = token_pages + owned_audio
        special = self.prompts.special
        if special is not None:
            hypothesis.words_below = special.eot
        if hypothesis.beam > 1:
            begun, target = len(prompt) + hypothesis.fixed, self.device.torch_device
            token_pages = BeamGroup(row, begun, token_pages, owned_audio, target).block_table(0)
        self.batch.set_token_pages(row, token_pages)
        self.batch.set_audio_pages(row, audio, encoded.frames)
        row.audio_key = root
        row.prompt = () if self.prompts.detects_language(options) else prompt
        if special is None and row.beams is None and len(prompt) == 1:
            row.prefilled = True  # the first step feeds the one token
            self.batch.set_position(row)
        return row

    def _add_prompt(self, request_id: int, encoded: EncoderResult, hypothesis: Hypothesis) -> DecodeRow:
        """Adds a row whose prompt holds the audio; steps feed the prompt, then the row joins the batch."""
        row = DecodeRow(request_id, [], hypothesis)
        self.prefilling.append(row)  # from here on `remove_row` frees the pages, whatever fails below
        row.prompt = self.prompts.prompt_tokens(hypothesis.options, encoded.frames)
        row.embeddings, row.ctc_frames = encoded.decoder_input, encoded.ctc_frames
        hypothesis.limit_tokens(self.model.max_tokens - len(row.prompt))
        needed = self.prompts.positions_needed(hypothesis.options, hypothesis.max_tokens, encoded.frames)
        row.pages = row.block_table = self.page_pool.allocate(pages_for(needed) * hypothesis.beam)
        if hypothesis.beam > 1:
            begun = len(row.prompt) + hypothesis.fixed
            row.block_table = BeamGroup(row, begun, row.pages, [], self.device.torch_device).block_table(0)
        if self.encoder_cache is not None:
            self.encoder_cache.attach_prefix(row)
            row.prompt_positions = row.cached_positions
        return row

    def store_encoder_result(self, result: EncoderResult) -> list[int]:
        """Copies encoded audio into new pages, with a reference to each for the caller."""
        pages = self.page_pool.allocate(pages_for(result.frames))
        with contextlib.ExitStack() as unless_stored:
            unless_stored.callback(self.page_pool.free_pages, pages)
            self.decoder.store(result.decoder_input, pages)
            unless_stored.pop_all()
        return pages

    def attach_prefix(self, row: DecodeRow, pages: list[int]) -> None:
        """Replaces the row's first token pages by cached ones, to which it has references."""
        count = len(pages)
        audio = row.pages[len(row.block_table) :]
        self.page_pool.free_pages(row.block_table[:count])
        row.block_table = pages + row.block_table[count:]
        if row not in self.prefilling:
            self.batch.set_token_pages(row, row.block_table)
        row.pages, row.cached_positions = row.block_table + audio, count * PAGE

    def write_cross_kv(self, cross: Tensor, tables: Tensor, positions: Tensor) -> None:
        """Writes frames of growing audio: row r of `cross` (rows, layers, 2, width) into position `positions[r]`
        (rows,) int64 of the pages of `tables[r]` (rows, pages) int32."""
        rows, layers, _, width = cross.shape
        qkv = cross.new_empty(rows, 3, width)  # laid out like the decoder's own keys and values, after a query
        for layer in range(layers):
            qkv[:, 1:] = cross[:, layer]
            self.device.kernels.append(self.kv_cache, layer, qkv, tables, positions)

    def release_row_slot(self, row: DecodeRow) -> None:
        """Frees the batch slot of a row that has ended; the row keeps its pages."""
        self.batch.remove_row(row)
        self.finished_rows.append(row)

    def remove_row(self, row: DecodeRow) -> None:
        """Removes a row and frees its pages; those of beams are freed with the last row."""
        for waiting in (self.finished_rows, self.prefilling):
            if row in waiting:
                waiting.remove(row)
                break
        else:
            self.batch.remove_row(row)
        if row.beams is None:
            self.page_pool.free_pages(row.pages)
            return
        row.beams.rows.remove(row)
        if not row.beams.rows:
            self.page_pool.free_pages(row.beams.pages)

    def restart_row(self, row: DecodeRow) -> None:
        """Restarts a row after its fixed tokens; its audio stays in its pages."""
        row.draft_remaining = ()
        del row.alignment_queries[len(row.hypothesis.tokens) :]
        self.batch.set_position(row)

    # --- a step -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[DecodeRow]:
        """Decodes one token of every row, and feeds parts of the prompts that are being fed; returns the rows whose
        hypothesis has ended, which stay in the batch."""
        if self.prefilling:
            return self._step_with_prompts()
        rule = self.prompts.rule
        outputs = self._run_forward(
            self.batch.step_inputs(), [rule(row, row.tokens) for row in self.rows] if self.prompts.rules else []
        )
        chosen, scores = outputs.tokens.tolist()[: len(self.rows)], outputs.logprobs.tolist()
        penalized = self._penalize(outputs, ((index, row, row.tokens) for index, row in enumerate(self.rows)))
        penalized.choose(chosen, scores)
        ended = []
        beam_positions: dict[BeamGroup, list[int]] = {}
        for index, row in enumerate(self.rows):
            assert row.prefilled, "a row was stepped before its start was fed"
            if row.beams is not None:
                beam_positions.setdefault(row.beams, [0] * len(row.beams.rows))[row.beam_index] = index
                continue
            token, score = chosen[index], scores[index]
            logits = penalized.row(index, outputs.logits)
            if row.hypothesis.temperature > 0:
                token, score = self._sample(logits, row)
            elif row.hotwords is not None:
                token, score = pick_and_record(row, logits, outputs.hidden[index], self.model.head_weight)
            row.finish = row.hypothesis.append_token(token, score)
            outputs.alignment_queries.record(row, index)
            chosen[index] = token
            row.advance_draft(token, 0)
            if row.finish:
                ended.append(row)
        outputs.alignment_queries.flush()
        self.batch.advance(chosen)
        return ended + self._advance_beams(beam_positions, outputs, penalized)

    def _step_with_prompts(self) -> list[DecodeRow]:
        """One pass over a position of every row, its draft included, and over parts of prompts."""
        chunks = schedule_chunks(self.prefilling, self.step_positions - len(self.rows))
        for chunk in chunks:
            chunk.row.prompt_positions = chunk.first + chunk.positions
        fed = [row for row in self.prefilling if row.prompt_positions == len(row.prompt) - 1]
        for row in fed:
            self.prefilling.remove(row)
            row.prefilled = True
            self.batch.add_row(row)
            self.batch.set_token_pages(row, row.block_table)
            self.batch.set_position(row)
        ended = self._verify_batch([*self.rows], chunks)
        for row in fed:
            row.embeddings = None
        if self.encoder_cache is not None:
            self.encoder_cache.store_prefix(fed)
        return ended

    @staticmethod
    def _penalize(
        outputs: ForwardOutputs, positions: Iterable[tuple[int, DecodeRow, Sequence[int]]]
    ) -> PenalizedLogits:
        """Logits of those `positions` whose row penalizes repetition; each with its row and the answer before it."""
        return PenalizedLogits(
            outputs.logits,
            {
                position: PenalizedPosition(tokens, penalty)
                for position, row, tokens in positions
                if (penalty := row.hypothesis.options.repetition_penalty) != 1.0
            },
        )

    def _leading_tokens(
        self, positions: Sequence[int], outputs: ForwardOutputs, penalized: PenalizedLogits, count: int
    ) -> list[list[tuple[int, float]]]:
        """Likeliest tokens at each logit position, as decoding/beam_search.top_tokens returns them."""
        leading: dict[int, list[tuple[int, float]]] = {}
        for chosen in ([p for p in positions if p not in penalized], [p for p in positions if p in penalized]):
            if chosen:
                index = torch.tensor(chosen, device=outputs.logits.device)
                logits = penalized.rows(chosen) if chosen[0] in penalized else outputs.logits[index]
                best = top_tokens(logits, outputs.hidden[index], self.model.head_weight, count)
                leading |= dict(zip(chosen, best, strict=True))
        return [leading[position] for position in positions]

    def _advance_beams(
        self, group_positions: dict[BeamGroup, list[int]], outputs: ForwardOutputs, penalized: PenalizedLogits
    ) -> list[DecodeRow]:
        """Advances every beam by one token. `group_positions`: logit positions of each group's beams. Returns the rows
        whose search is over, now one for each group."""
        if not group_positions:
            return []
        max_choices = max(beams.search.choices for beams in group_positions)
        positions = [position for own in group_positions.values() for position in own]
        choices = iter(self._leading_tokens(positions, outputs, penalized, max_choices))
        leading = {
            beams: [next(choices)[: beams.search.choices] for _ in own] for beams, own in group_positions.items()
        }
        fused = [beams for beams in group_positions if beams.search.fusion is not None]
        scores = language_scores(
            [beams.search for beams in fused], [leading[beams] for beams in fused], outputs.logits.device
        )
        language = dict(zip(fused, scores, strict=True))
        ended, copies = [], []
        for beams in group_positions:
            search = beams.search
            if sources := search.advance(leading[beams], language.get(beams)):
                copies += beams.fork(sources)
                self.batch.resize_beams(beams, len(sources))
            else:
                row = self.batch.collapse_beams(beams)
                ranked, row.finish = search.n_best()
                row.hypothesis.append_n_best(
                    [RecognitionHypothesis(each.tokens, each.total, each.logprobs) for each in ranked]
                )
                ended.append(row)
        if copies:
            self.decoder.copy_pages(copies)
        return ended

    # --- prefill and verification -----------------------------------------------------------------------

    def rows_to_prefill(self) -> list[DecodeRow]:
        """Rows that are to be prefilled, or whose draft fixes the next token or proposes more than one."""
        return [row for row in self.rows if row.needs_prefill]

    def rows_beside(self, drafted: Sequence[DecodeRow]) -> list[DecodeRow]:
        """Rows that decode their next token in the pass that verifies `drafted`. Empty where there is not room for all
        of them, where prompts with audio are fed, and in a beam search: those need a step of their own."""
        rows = [row for row in self.rows if not row.needs_prefill]
        positions = sum(len(row.prefill_tokens()) for row in (*drafted, *rows))
        apart = self.prefilling or any(row.beams is not None for row in self.rows)
        return [] if apart or positions > MAX_VERIFY_POSITIONS else rows

    @torch.inference_mode()
    def prefill_and_verify(self, rows: Sequence[DecodeRow], beside: Sequence[DecodeRow] = ()) -> list[DecodeRow]:
        """Feeds each row's prompt, accepts the tokens of its draft that decoding would have chosen, and the token
        after them; returns the rows whose hypothesis has ended, which stay in the batch. `beside`: rows that decode
        one token in the last pass.

        Every position of a draft is a row of its own over the same pages. All of a layer's keys and values are
        written before any is read, so each position sees what decoding one by one would show it.
        """
        ended = []
        batch: list[DecodeRow] = []
        positions = 0
        unknown = [row for row in rows if not row.prompt]
        for first in range(0, len(unknown), MAX_VERIFY_POSITIONS):
            self._detect_languages(unknown[first : first + MAX_VERIFY_POSITIONS])
        for row in rows:
            if self.encoder_cache is not None and not row.prefilled:
                self.encoder_cache.attach_prefix(row)
            count = len(row.prefill_tokens())
            if batch and positions + count > MAX_VERIFY_POSITIONS:
                ended += self._verify_batch(batch)
                batch, positions = [], 0
            batch.append(row)
            positions += count
        return ended + self._verify_batch([*batch, *beside])

    def _detect_languages(self, rows: Sequence[DecodeRow]) -> None:
        """Sets each row's language and prompt: the likeliest language after start-of-transcript alone."""
        prompts, count = self.prompts, len(rows)
        assert prompts.special is not None
        outputs = self._run_forward(
            self.batch.prefill_inputs(rows, [(prompts.special.sot,)] * count, [1] * count), [FORCED_TOKEN] * count
        )
        logits = outputs.logits[:count].index_select(1, prompts.language_ids)
        probabilities, languages = logits.float().softmax(dim=1).max(dim=1)
        for row, language, probability in zip(rows, languages.tolist(), probabilities.tolist(), strict=True):
            row.hypothesis.language, row.hypothesis.language_prob = prompts.languages[language], probability
            row.prompt = prompts.prompt_in_language(row.hypothesis.options, row.hypothesis.language)

    def _verify_batch(self, rows: Sequence[DecodeRow], chunks: Sequence[PromptChunk] = ()) -> list[DecodeRow]:
        """One pass over the positions that each row feeds, and over parts of prompts, which yield no tokens."""
        feeds, drafts = [row.prefill_tokens() for row in rows], [row.proposal for row in rows]
        offsets = [
            self.prompts.logit_offsets(row, len(feed), len(draft))
            for row, feed, draft in zip(rows, feeds, drafts, strict=True)
        ]
        rules: list[TokenRule] = []
        for row, draft, positions in zip(rows, drafts, offsets, strict=True):
            rules += self._draft_rules(row, draft, len(positions))
        new_rows = [row for row in rows if not row.prefilled]
        outputs = self._run_forward(self._verify_inputs(rows, feeds, offsets, chunks), rules)
        chosen, scores = outputs.tokens.tolist(), outputs.logprobs.tolist()
        ends = [*accumulate(map(len, offsets))]
        penalized = self._penalize(
            outputs,
            (
                (end - len(draft) - 1 + count, row, [*row.tokens, *draft[:count]])
                for row, draft, end in zip(rows, drafts, ends, strict=True)
                for count in range(len(draft) + 1)
            ),
        )
        penalized.choose(chosen, scores)
        ended, first = [], 0
        beam_positions: dict[BeamGroup, list[int]] = {}
        for row, draft, positions in zip(rows, drafts, offsets, strict=True):
            if not row.prefilled:
                row.prefilled = True
                if outputs.no_speech_logprobs is not None:
                    row.hypothesis.no_speech_prob = float(outputs.no_speech_logprobs[first].exp())
            first += len(positions)
            tail = slice(first - len(draft) - 1, first)
            if self._accept_draft(row, draft, chosen[tail], scores[tail], outputs, penalized, tail.start):
                ended.append(row)
            elif row.beams is None:
                self.batch.set_position(row)
            else:
                beam_positions.setdefault(row.beams, [0] * len(row.beams.rows))[row.beam_index] = first - 1
            self.positions_verified += len(draft)
        outputs.alignment_queries.flush()
        self.positions_fed += sum(map(len, feeds)) + sum(chunk.positions for chunk in chunks)
        if self.encoder_cache is not None:
            self.encoder_cache.store_prefix(new_rows)
        return ended + self._advance_beams(beam_positions, outputs, penalized)

    def _draft_rules(self, row: DecodeRow, draft: Sequence[int], count: int) -> list[TokenRule]:
        """Token rules of a row's `count` logit positions. Those before the first token that is free have none of their
        own: start-of-transcript, and tokens that the draft fixes."""
        tokens, first_free = [*row.tokens, *draft], max(len(row.tokens), row.hypothesis.fixed)
        free_rules = [self.prompts.rule(row, tokens[:end]) for end in range(first_free, len(tokens) + 1)]
        return [FORCED_TOKEN] * (count - len(free_rules)) + free_rules

    def _verify_inputs(
        self,
        rows: Sequence[DecodeRow],
        feeds: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
        chunks: Sequence[PromptChunk],
    ) -> ForwardInputs:
        """Inputs of a pass that feeds `feeds[r]` to row r, with logits at its `offsets[r]`, and feeds prompt chunks."""
        firsts = [row.length if row.prefilled else 1 + row.cached_positions for row in rows]
        fed = [len(feed) for feed in feeds]
        if not chunks:
            inputs = self.batch.prefill_inputs(rows, feeds, firsts)
            inputs.logit_positions = self.batch.logit_positions(fed, offsets)
            return inputs
        inputs = self.batch.rescoring_inputs(
            [*rows, *(chunk.row for chunk in chunks)],
            [*feeds, *(chunk.tokens for chunk in chunks)],
            [*firsts, *(chunk.first + 1 for chunk in chunks)],
        )
        self.batch.set_embeddings(inputs, chunks)
        # Every pass has logits: where no row decodes, those of one position, which are not used.
        inputs.logit_positions = self.batch.scored_positions(fed or [1], offsets or [[0]])
        return inputs

    def _accept_draft(
        self,
        row: DecodeRow,
        draft: Sequence[int],
        chosen: list[int],
        scores: list[float],
        outputs: ForwardOutputs,
        penalized: PenalizedLogits,
        first: int,
    ) -> Finish | None:
        """Appends to the hypothesis the draft tokens that decoding would have chosen, and the token after them; with
        beams, only fixed tokens. `first`: logit position at which the draft begins."""
        hypothesis = row.hypothesis
        for position in range(len(draft) + 1):
            token, score = chosen[position], scores[position]
            logits = penalized.row(first + position, outputs.logits)
            if row.forced:
                if token != draft[position]:
                    token = draft[position]
                    score = float(torch.log_softmax(logits.float(), dim=-1)[token])
            elif row.beams is not None:
                row.draft_remaining = ()
                break
            elif hypothesis.temperature > 0:
                token, score = self._sample(logits, row)
            elif row.hotwords is not None:
                token, score = pick_and_record(row, logits, outputs.hidden[first + position], self.model.head_weight)
            row.finish = hypothesis.append_token(token, score)
            outputs.alignment_queries.record(row, first + position)
            if row.finish or position == len(draft) or token != draft[position]:
                row.advance_draft(token, position)
                break
            self.positions_accepted += 1
        return row.finish

    # --- passes -----------------------------------------------------------------------------------------

    def _run_forward(self, inputs: ForwardInputs, rules: Sequence[TokenRule]) -> ForwardOutputs:
        """Runs a pass. `rules[i]`: token rule of logit position i."""
        token_tables = self._trim_tables(inputs.token_tables, inputs.token_lengths)
        audio_tables = self._trim_tables(inputs.audio_tables, inputs.audio_lengths)
        tensors = inputs.tokens, token_tables, inputs.token_lengths, audio_tables, inputs.audio_lengths
        selected = tuple(each for each in (inputs.logit_positions, inputs.embeddings) if each is not None)
        if self.prompts.rules is None or all(rule == PLAIN_TOKEN for rule in rules):
            return forward_outputs(self.decoder, inputs.logit_positions, *self._step_plain(*tensors, *selected))
        count = len(inputs.tokens if inputs.logit_positions is None else inputs.logit_positions)
        padded_rules = torch.tensor([*rules, *[FORCED_TOKEN] * (count - len(rules))])
        step = self._step_ruled
        if any(rule.text_from != UNTIMED for rule in rules):
            step = self._step_timed if all(rule.level == SUPPRESS for rule in rules) else self._step_timed_prefill
        return forward_outputs(self.decoder, inputs.logit_positions, *step(padded_rules, *tensors, *selected))

    def _trim_tables(self, tables: Tensor, lengths: Tensor) -> Tensor:
        """Page tables as wide as the longest row needs, padded as the device requires."""
        width = self.device.padded_pages(pages_for(int(lengths.max())), tables.shape[1])
        return tables[:, :width].contiguous()

    def logits(self, inputs: ForwardInputs, rules: Sequence[TokenRule]) -> Tensor:
        """Returns logits (positions, vocabulary) of as many positions as there are rules; writes keys and
        values."""
        return self._run_forward(inputs, rules).logits[: len(rules)]

    def _forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        logits, hidden, *queries = self.decoder.decode(*inputs)
        if self.prompts.rules is not None:
            self.prompts.rules.always(logits)
        return (*self._argmax(logits, hidden), logits, hidden, *queries)

    def _forward_ruled(
        self, rules: Tensor, *inputs: Tensor, timed: bool = False, begun: bool = False
    ) -> tuple[Tensor, ...]:
        """Forward pass with a rule for each position. `timed`: some rules concern timestamps; `begun`: positions
        may include start-of-transcript."""
        assert self.prompts.rules is not None
        assert self.prompts.special is not None
        logits, hidden, *queries = self.decoder.decode(*inputs)
        no_speech: tuple[Tensor, ...] = ()
        if begun:
            scores = logits.float()
            no_speech = (scores[:, self.prompts.special.no_speech] - scores.logsumexp(dim=1),)
        self.prompts.rules.apply(logits, rules, timed)
        return (*self._argmax(logits, hidden), logits, hidden, *queries, *no_speech)

    def _argmax(self, logits: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        picked = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        self.device.kernels.pick(logits, hidden, self.model.head_weight, picked, logprobs)
        return picked, logprobs

    @staticmethod
    def _sample(logits: Tensor, row: DecodeRow) -> tuple[int, float]:
        hypothesis = row.hypothesis
        options = hypothesis.options
        return sample_token(logits, hypothesis.temperature, options.top_k, options.top_p, row.generator)
