"""Decode batch: rows, beam groups, page tables and prompts. A row is one answer, or one beam of a request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.decoding.beam_search import BeamSearch, language_state_after
from asr_serve.decoding.biasing_graph import OPEN
from asr_serve.decoding.biasing_list import BOOST, CompiledBiasingList
from asr_serve.decoding.hypothesis import Finish, Hypothesis
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.decoding.token_rules import PLAIN_TOKEN, TokenRule, TokenRules
from asr_serve.devices.interface import Device
from asr_serve.engine.cache.page_pool import PagePool
from asr_serve.engine.seq2seq.prompt_chunks import PromptChunk
from asr_serve.errors import OptionError, UnsupportedOption
from asr_serve.kernels import PAGE
from asr_serve.models.interfaces import PROMPT_EMBEDDING, EncoderDecoderModel, SpeechLanguageModel

DRAFT_RESYNC_TOKENS = 4
"""Draft tokens that are searched for a token that differs from the draft."""
VERIFY_AFTER_MISMATCH_TOKENS = 8
"""Draft tokens verified at once after one has differed."""


class DecodeRow:
    """Decoding sequence: its pages and its hypothesis."""

    def __init__(self, request_id: int, pages: list[int], hypothesis: Hypothesis) -> None:
        """`pages`: those that are freed with the row."""
        self.request_id, self.pages, self.hypothesis = request_id, pages, hypothesis
        self.block_table: list[int] = []
        """Pages of its tokens, in order; leading ones may be shared with other rows."""
        self.audio_key, self.audio_pages, self.frames = b"", list[int](), 0
        """Cache key of its audio, if that is cached; the audio's pages, and the frames in them."""
        self.prompt: tuple[int, ...] = ()
        """Tokens before the answer; empty until the language is detected."""
        self.prefilled = False
        """Whether the keys and values of its prompt, except those of the last token, are in its pages."""
        self.cached_positions = 0
        """Positions of the prompt that are cached before the prefill."""
        self.prompt_positions = 0
        """Positions of a prompt with audio in it whose keys and values are in its pages."""
        self.embeddings: Tensor | None = None
        """Embeddings (frames, width) of the prompt's audio until the prompt has been fed; None: it has none."""
        self.ctc_frames: Tensor | None = None
        """See EncoderResult."""
        self.beams: BeamGroup | None = None
        """Group of the beams that it belongs to, and its place there."""
        self.beam_index = 0
        self.finish: Finish | None = None
        self.alignment_queries: list[Tensor] = []
        """Queries of the alignment heads for each token of the hypothesis and its end, (heads, head_dim) each, if
        times are wanted."""
        self.draft_remaining = hypothesis.draft.tokens
        """Tokens of the draft that may still match."""
        self.draft_skip = 0
        """Leading tokens of `draft_remaining` for which others were decoded."""
        self.max_verify_tokens = hypothesis.max_tokens
        """Draft tokens verified at once: fewer once one has differed."""
        self.top_tokens: dict[int, dict[int, float]] = {}
        """Likeliest tokens at each position and their natural-log probabilities, for a row with hotwords."""
        self.generator = torch.Generator().manual_seed(hypothesis.options.seed)

    @property
    def tokens(self) -> Sequence[int]:
        """Tokens decoded so far."""
        fixed = self.hypothesis.tokens
        return fixed if self.beams is None else (*fixed, *self.beams.search.live[self.beam_index].tokens)

    @property
    def hotwords(self) -> CompiledBiasingList | None:
        return self.hypothesis.hotwords

    @property
    def last_token(self) -> int:
        """Last token, which is fed next."""
        tokens = self.tokens
        return tokens[-1] if tokens else self.prompt[-1]

    @property
    def length(self) -> int:
        """Number of positions, that of `last_token` included."""
        return len(self.prompt) + len(self.tokens)

    @property
    def proposal(self) -> tuple[int, ...]:
        """Draft tokens to verify next."""
        room = self.hypothesis.max_tokens - 1 - len(self.hypothesis.tokens)
        return self.draft_remaining[self.draft_skip : self.draft_skip + min(room, self.max_verify_tokens)]

    @property
    def forced(self) -> bool:
        """Returns whether the next token is fixed."""
        return len(self.hypothesis.tokens) < self.hypothesis.fixed

    @property
    def needs_prefill(self) -> bool:
        """Returns whether it is to be prefilled, or its draft fixes the next token or proposes more than one."""
        return not self.prefilled or bool(self.draft_remaining and (self.forced or len(self.proposal) > 1))

    def prefill_tokens(self) -> tuple[int, ...]:
        """Tokens that a prefill and verification pass feeds, after those in its pages."""
        return (*(self.prompt[self.cached_positions :] if not self.prefilled else (self.last_token,)), *self.proposal)

    def advance_draft(self, token: int, accepted: int) -> None:
        """Moves on in the draft after `accepted` tokens of it and then `token`. One that differs usually replaces one
        of the draft's tokens, is inserted before one, or stands a little later in the draft."""
        if accepted:
            self.draft_remaining, self.draft_skip = self.draft_remaining[self.draft_skip + accepted :], 0
        self.max_verify_tokens = VERIFY_AFTER_MISMATCH_TOKENS
        near = self.draft_remaining[:DRAFT_RESYNC_TOKENS]
        if token in near:
            self.draft_remaining, self.draft_skip = self.draft_remaining[near.index(token) + 1 :], 0
        elif self.draft_skip < DRAFT_RESYNC_TOKENS:
            self.draft_skip += 1
        else:
            self.draft_remaining = ()


class BeamGroup:
    """Group of the rows of one request's beams: they share full pages, and each has its own page to write to.

    All pages that they could ever need are reserved at the start, so that they never run short.
    """

    def __init__(self, row: DecodeRow, begun: int, own: list[int], audio: list[int], device: torch.device) -> None:
        """`begun`: positions before the first token that is searched; `own`: pages for the tokens of every beam;
        `audio`: pages of the audio, if they are to be freed; `device`: of language models."""
        hypothesis = row.hypothesis
        self.rows, self.width = [row], hypothesis.beam
        graph = hypothesis.hotwords.graph if hypothesis.hotwords is not None else None
        fixed, text_below = hypothesis.draft.tokens[: hypothesis.fixed], hypothesis.words_below
        fusion = hypothesis.language_model
        text = [token for token in fixed if text_below is None or token < text_below]
        self.search = BeamSearch(
            self.width,
            hypothesis.eos,
            hypothesis.max_tokens - hypothesis.fixed,
            graph=graph,
            node=graph.walk(fixed) if graph else OPEN,
            boost=BOOST,
            fusion=fusion,
            language_state=language_state_after(fusion, text, device) if fusion else 0,
            text_below=text_below,
            stop_tokens=hypothesis.stop_tokens,
        )
        self.pages = own + audio
        """Pages of the whole group."""
        self._token_pages, self._audio_pages = own, audio
        self._pool = PagePool(1 + len(own))
        """Pool whose page p is `own[p - 1]`."""
        self._tables = [self._pool.allocate(pages_for(begun))]
        row.beams, row.pages = self, []

    def block_table(self, lane: int) -> list[int]:
        return [self._token_pages[page - 1] for page in self._tables[lane]]

    def fork(self, sources: list[int]) -> list[tuple[int, int]]:
        """Makes beam i continue beam `sources[i]`. Returns pages to copy before the next write, from and to."""
        position = self.rows[0].length - 1
        old, self._tables = self._tables, [list(self._tables[source]) for source in sources]
        for table in self._tables:
            self._pool.share(table)
        for table in old:
            self._pool.free_pages(table)
        copies = []
        for table in self._tables:
            if position // PAGE == len(table):
                table += self._pool.allocate(1)
                continue
            table[-1], shared = self._pool.copy_on_write(table, len(table) - 1)
            if shared is not None:
                copies.append((self._token_pages[shared - 1], self._token_pages[table[-1] - 1]))
        return copies

    def add_row(self) -> DecodeRow:
        """Adds a row, for a beam that has none."""
        first = self.rows[0]
        row = DecodeRow(first.request_id, [], first.hypothesis)
        row.prompt, row.prefilled, row.draft_remaining = first.prompt, True, ()
        row.beams, row.beam_index = self, len(self.rows)
        self.rows.append(row)
        return row

    def collapse(self) -> tuple[list[int], list[int]]:
        """Makes the one row left independent, with pages for its longest answer, first those of the beams' common
        beginning. Returns its table, and the pages that are no longer needed."""
        (row,) = self.rows
        table = self.block_table(0)
        spare = [page for page in self._token_pages if page not in table]
        count = len(self._token_pages) // self.width - len(table)
        table += spare[:count]
        row.beams, row.pages = None, table + self._audio_pages
        return table, spare[count:]


def pages_for(positions: int) -> int:
    """Returns the number of pages that this many positions fill."""
    return -(-positions // PAGE)


class ForwardInputs:
    """Inputs of a pass for each position: tokens (positions,) int64; tables of the row's token and audio pages
    (positions, pages) int32; and how many positions are filled in either, this one included, (positions,) int64."""

    def __init__(
        self, tokens: Tensor, token_tables: Tensor, token_lengths: Tensor, audio_tables: Tensor, audio_lengths: Tensor
    ) -> None:
        self.tokens, self.token_tables, self.token_lengths = tokens, token_tables, token_lengths
        self.audio_tables, self.audio_lengths = audio_tables, audio_lengths
        self.logit_positions: Tensor | None = None
        """Positions with outputs; None: all."""
        self.embeddings: Tensor | None = None
        """(positions, width): inputs where the token is PROMPT_EMBEDDING. None: there is no such token. Set only with
        `logit_positions`."""


class DecodeBatch:
    """Batch of rows and their tables, without gaps: when a row leaves, the last one takes its place."""

    def __init__(
        self, model: EncoderDecoderModel, device: Device, max_rows: int, kv_bytes: int, longest_frames: int
    ) -> None:
        self.device, self.max_rows = device, max_rows
        shape = (model.layers, 2, model.heads, model.head_dim * PAGE)
        page_bytes = int(np.prod(shape)) * device.dtype.itemsize
        own_width, audio_width = pages_for(model.max_tokens), pages_for(longest_frames)
        # At least one sequence of the greatest length, and the scratch page.
        pages = max(kv_bytes // page_bytes, 1 + own_width + audio_width)
        self.page_pool = PagePool(pages)
        rows = device.padded_rows(max_rows)
        self.rows: list[DecodeRow] = []
        self.tokens = torch.full((rows,), model.bos, dtype=torch.int64)
        self.token_tables = torch.zeros(rows, own_width, dtype=torch.int32)
        self.audio_tables = torch.zeros(rows, audio_width, dtype=torch.int32)
        self.token_lengths = torch.ones(rows, dtype=torch.int64)
        self.audio_lengths = torch.ones(rows, dtype=torch.int64)

    @property
    def free_rows(self) -> int:
        """Rows that are neither taken nor reserved for beams."""
        groups = {row.beams for row in self.rows if row.beams is not None}
        return self.max_rows - len(self.rows) - sum(beams.width - len(beams.rows) for beams in groups)

    def add_row(self, row: DecodeRow) -> None:
        self.rows.append(row)

    def set_token_pages(self, row: DecodeRow, pages: Sequence[int]) -> None:
        """Sets the pages of the row's tokens."""
        row.block_table = [*pages]
        self.token_tables[self.rows.index(row), : len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def set_audio_pages(self, row: DecodeRow, pages: Sequence[int], frames: int) -> None:
        """Sets the pages of the row's audio."""
        row.audio_pages, row.frames = [*pages], frames
        index = self.rows.index(row)
        self.audio_lengths[index] = frames
        self.audio_tables[index, : len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def set_position(self, row: DecodeRow) -> None:
        """Continues after the row's last token. Keys and values of all tokens before it are in its pages."""
        index = self.rows.index(row)
        self.tokens[index], self.token_lengths[index] = row.last_token, row.length

    def remove_row(self, row: DecodeRow) -> None:
        index, last = self.rows.index(row), len(self.rows) - 1
        for state in (self.tokens, self.token_tables, self.audio_tables, self.token_lengths, self.audio_lengths):
            state[index] = state[last]
            state[last] = 0 if state.dim() == 2 else 1
        self.rows[index] = self.rows[last]
        self.rows.pop()

    # --- beams ------------------------------------------------------------------------------------------

    def resize_beams(self, beams: BeamGroup, count: int) -> None:
        """Resizes a group to `count` rows, each with its table and last token."""
        first = beams.rows[0]
        while len(beams.rows) > count:
            self.remove_row(beams.rows.pop())
        while len(beams.rows) < count:
            row = beams.add_row()
            self.add_row(row)
            index, source = self.rows.index(row), self.rows.index(first)
            for state in (self.audio_tables, self.audio_lengths):
                state[index] = state[source]
        for lane, row in enumerate(beams.rows):
            self.set_token_pages(row, beams.block_table(lane))
            self.set_position(row)

    def collapse_beams(self, beams: BeamGroup) -> DecodeRow:
        """Ends the search of a group: one row is left, with room for another attempt."""
        while len(beams.rows) > 1:
            self.remove_row(beams.rows.pop())
        row = beams.rows[0]
        table, spare = beams.collapse()
        self.set_token_pages(row, table)
        self.page_pool.free_pages(spare)
        return row

    # --- passes -----------------------------------------------------------------------------------------

    def step_inputs(self) -> ForwardInputs:
        """Inputs with one position of every row."""
        rows = self.device.padded_rows(len(self.rows))
        return ForwardInputs(
            self.tokens[:rows],
            self.token_tables[:rows],
            self.token_lengths[:rows],
            self.audio_tables[:rows],
            self.audio_lengths[:rows],
        )

    def advance(self, tokens: Sequence[int]) -> None:
        """Sets the token that each row decoded."""
        self.tokens[: len(tokens)] = torch.tensor(tokens)
        self.token_lengths[: len(tokens)] += 1

    def prefill_inputs(
        self, rows: Sequence[DecodeRow], feeds: Sequence[Sequence[int]], firsts: Sequence[int]
    ) -> ForwardInputs:
        """Inputs with a position for each token fed; `firsts`: length of each row with the first of them."""
        index = torch.tensor([self.rows.index(row) for row in rows])
        tables = self.token_tables[index], self.audio_tables[index], self.audio_lengths[index]
        return self._multi_token_inputs(feeds, firsts, *tables)

    def rescoring_inputs(
        self, rows: Sequence[DecodeRow], feeds: Sequence[Sequence[int]], firsts: Sequence[int]
    ) -> ForwardInputs:
        """Inputs like those of `prefill_inputs`, for rows that may have left the batch or not yet joined it."""
        own = _pad_tables([row.block_table for row in rows], self.token_tables.shape[1])
        audio = _pad_tables([row.audio_pages for row in rows], self.audio_tables.shape[1])
        return self._multi_token_inputs(feeds, firsts, own, audio, torch.tensor([row.frames for row in rows]))

    def _multi_token_inputs(
        self, feeds: Sequence[Sequence[int]], firsts: Sequence[int], own: Tensor, audio: Tensor, audio_lengths: Tensor
    ) -> ForwardInputs:
        """Inputs from the tables and lengths of each row."""
        counts = torch.tensor([len(feed) for feed in feeds])
        total = int(counts.sum())
        padding = self.device.padded_rows(total) - total
        row_index = F.pad(torch.arange(len(feeds)).repeat_interleave(counts), (0, padding))
        spans = [torch.arange(first, first + len(feed)) for first, feed in zip(firsts, feeds, strict=True)]
        own, audio = own[row_index], audio[row_index]
        own[total:] = audio[total:] = 0
        return ForwardInputs(
            F.pad(torch.tensor([token for feed in feeds for token in feed]), (0, padding)),
            own,
            F.pad(torch.cat(spans), (0, padding), value=1),
            audio,
            audio_lengths[row_index],
        )

    @staticmethod
    def set_embeddings(inputs: ForwardInputs, chunks: Sequence[PromptChunk]) -> None:
        """Sets the embeddings of the prompt chunks among the inputs, in their order, if they have any."""
        parts = [part for chunk in chunks if (part := chunk.embeddings) is not None]
        if not parts:
            return
        positions = (inputs.tokens == PROMPT_EMBEDDING).nonzero()[:, 0].to(parts[0].device)
        inputs.embeddings = parts[0].new_zeros(len(inputs.tokens), parts[0].shape[1])
        inputs.embeddings[positions] = torch.cat(parts)

    def logit_positions(self, fed: Sequence[int], scored_offsets: Sequence[Sequence[int]]) -> Tensor | None:
        """Returns logit positions, counted over all rows; row r is fed `fed[r]` tokens and needs logits at
        `scored_offsets[r]`. None: all."""
        return None if sum(fed) == sum(map(len, scored_offsets)) else self.scored_positions(fed, scored_offsets)

    def scored_positions(self, fed: Sequence[int], scored_offsets: Sequence[Sequence[int]]) -> Tensor:
        """Returns what `logit_positions` does, but never None."""
        starts = accumulate(fed, initial=0)
        positions = [
            start + offset for start, offsets in zip(starts, scored_offsets, strict=False) for offset in offsets
        ]
        return F.pad(torch.tensor(positions), (0, self.device.padded_rows(len(positions)) - len(positions)))


def _pad_tables(pages: Sequence[Sequence[int]], width: int) -> Tensor:
    tables = torch.zeros(len(pages), width, dtype=torch.int32)
    for row, table in enumerate(pages):
        tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
    return tables


NO_OPTIONS = SearchOptions()
MAX_CACHED_PROMPTS = 64
"""Maximum cached prompts: many requests have the same one, and each looks it up several times."""


def rows_for(options: SearchOptions) -> int:
    """Returns the number of rows that a request takes."""
    return options.beam if options.temperatures[0] == 0 else 1


class DecoderPrompts:
    """Prompts and token rules of one model. `special`: ids of its special tokens; None: its answers are text alone."""

    def __init__(self, model: EncoderDecoderModel, device: Device) -> None:
        self._model, self.vocab_size, self.special = model, model.vocab_size, model.special_tokens
        self.rules: TokenRules | None = None
        self.languages: list[str] = []
        if self.special is not None:
            target = device.torch_device
            self.rules = TokenRules(self.special, self.vocab_size, target)
            self.languages = list(self.special.languages)
            self.language_ids = torch.tensor(list(self.special.languages.values()), device=target)
        self._cached_prompt = lru_cache(MAX_CACHED_PROMPTS)(self._build_prompt)
        self.embeds_audio = isinstance(model, SpeechLanguageModel)
        self._times_words = not isinstance(model, SpeechLanguageModel) or model.ctc_head is not None

    def detects_language(self, options: SearchOptions) -> bool:
        """Returns whether the model detects the language."""
        return self.special is not None and self.special.multilingual and not options.language

    def prompt_tokens(self, options: SearchOptions, frames: int = 0) -> tuple[int, ...]:
        """Prompt of a row; before its language is detected, one of the same length. `frames`: encoder frames, which
        are in the prompt of a model that embeds audio. Raises OptionError."""
        language = self.languages[0] if self.detects_language(options) else options.language
        prompt = self.prompt_in_language(options, language)
        if not self.embeds_audio:
            return prompt
        at = prompt.index(PROMPT_EMBEDDING)
        return (*prompt[:at], *(PROMPT_EMBEDDING,) * frames, *prompt[at + 1 :])

    def prompt_in_language(self, options: SearchOptions, language: str) -> tuple[int, ...]:
        return self._cached_prompt(options, language)

    def _build_prompt(self, options: SearchOptions, language: str) -> tuple[int, ...]:
        return self._model.prompt_tokens(msgspec.structs.replace(options, language=language))

    def positions_needed(self, options: SearchOptions, max_tokens: int, frames: int = 0) -> int:
        """Positions of a row with an answer of `max_tokens` at most, the last of which is never fed. Raises OptionError
        for a prompt with audio that leaves no room for an answer."""
        prompt_length, max_positions = len(self.prompt_tokens(options, frames)), self._model.max_tokens
        if self.embeds_audio and prompt_length >= max_positions:
            raise OptionError(
                f"a prompt of {prompt_length} positions, {frames} of them audio",
                f"up to {max_positions - 1}",
                "send less audio at once, fewer hotwords, or a shorter prompt",
            )
        return prompt_length - 1 + min(max_tokens, max_positions - prompt_length)

    def validate(self, options: SearchOptions) -> None:
        """Raises OptionError for what this model cannot do."""
        if self.embeds_audio:
            if options.words and not self._times_words:
                raise UnsupportedOption("words=True", "this model has no times of words", "leave it out", param="words")
        elif self.special is None:
            for name in ("task", "prompt", "timestamps"):
                if (value := getattr(options, name)) != getattr(NO_OPTIONS, name):
                    raise UnsupportedOption(f"{name}={value!r}", "this model has no such choice", param=name)
        if options.hypotheses > rows_for(options):
            allowed = f"up to {rows_for(options)}, the beam of the first try at temperature 0"
            raise UnsupportedOption(f"hypotheses={options.hypotheses}", allowed, param="hypotheses")
        for token in options.prefix:
            if not 0 <= token < self.vocab_size or token in (self._model.eos, *self._model.stop_tokens):
                raise OptionError(
                    f"prefix has token {token}", "tokens of text, none that ends an answer", param="prefix"
                )
        self.prompt_tokens(options)

    def logit_offsets(self, row: DecodeRow, fed: int, drafted: int) -> list[int]:
        """Offsets, among the positions that a row is fed, of those with logits: after its whole prompt and each
        draft token; in a prefill also start-of-transcript, whose logits give the probability of no speech."""
        tail = range(fed - drafted - 1, fed)
        if row.prefilled or self.special is None:
            return [*tail]
        start = self.tokens_before_sot(row.prompt) - row.cached_positions
        return [*tail] if start in tail else [start, *tail]

    def tokens_before_sot(self, start: Sequence[int]) -> int:
        """Number of tokens before start-of-transcript: previous text, if there is any."""
        return 0 if self.special is None else len(start) - 1 - start[::-1].index(self.special.sot)

    def rule(self, row: DecodeRow, tokens: Sequence[int]) -> TokenRule:
        """Token rule after `tokens`, which may be longer than what the row has decoded."""
        if self.rules is None:
            return PLAIN_TOKEN
        return self.rules.after(tokens[row.hypothesis.first_free_position :], row.hypothesis.options.timestamps)
