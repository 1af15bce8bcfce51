"""Cache of requests with the same audio: answers, and encoder keys and values in pages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from asr_serve.decoding.hypothesis import Recognition, RecognitionHypothesis
from asr_serve.engine.cache import TieredStore
from asr_serve.engine.cache.lru_cache import LruCache
from asr_serve.engine.cache.prefix_cache import PrefixCache
from asr_serve.engine.executor import StepGuard
from asr_serve.engine.seq2seq.decode_batch import DecodeRow
from asr_serve.engine.seq2seq.decoder import DecodeRunner
from asr_serve.engine.seq2seq.encoder import EncoderResult, OwnedPages, tensor_from_array
from asr_serve.engine.stats import EngineStats
from asr_serve.kernels import PAGE
from asr_serve.kernels.paging import zero_unused
from asr_serve.models.interfaces import PROMPT_EMBEDDING

ANSWER_BYTES, TOKEN_BYTES, TIMES_BYTES = 600, 72, 128
"""Bytes counted for an answer, for each token with its score, and for each token's times if it has them; tokens of its
hypotheses are counted too."""
OFFLOAD_PREFIX = b"audio "
"""Prefix of audio keys in the tiered store, which holds offloaded streams too."""
REUSED_KEYS_BYTES, REUSED_KEY_BYTES = 1 << 16, 100
"""Bytes of the keys of reused audio: bound of all, and bytes counted for each."""


class EncoderCache:
    """Encoder and answer cache of one engine; belongs to the loop's thread.

    Audio that another client has sent is answered sooner, so a client can find out that it was sent. Where that must
    not be known, give the cache no memory (EngineConfig.prefix_bytes=0).
    """

    def __init__(
        self, runner: DecodeRunner, answer_bytes: int, page_bytes: int, tiers: TieredStore | None = None
    ) -> None:
        """`page_bytes`: bound of pages that only this cache references. They are the runner's own, and its rows
        reclaim them when they need them. `tiers`: for evicted audio that was reused before: copying what is never
        requested again costs more than it saves."""
        self._runner, self._page_bytes, self._offload = runner, runner.decoder.page_bytes, tiers
        self._reused_keys: LruCache[bool] = LruCache(REUSED_KEYS_BYTES)
        self.answers: LruCache[Recognition] = LruCache(answer_bytes)
        self.prefix_cache = PrefixCache(runner.page_pool, page_bytes // self._page_bytes, self._on_evict)
        self.stats: EngineStats | None = None
        runner.encoder_cache = self

    @property
    def nbytes(self) -> int:
        return self.answers.nbytes + self.prefix_cache.pages * self._page_bytes

    def _on_evict(self, root: bytes, pages: list[int], frames: int) -> None:
        if self.stats is not None:
            self.stats.record_eviction()
        if self._offload is not None and root in self._reused_keys and not self.is_offloaded(root):
            decoder = self._runner.decoder
            copy = decoder.read_pages(pages)
            zero_unused(copy, frames, int8=decoder.int8_audio)
            data = copy.reshape(-1).view(torch.uint8).numpy()
            self._offload.put(OFFLOAD_PREFIX + root, [frames.to_bytes(8, "little"), data.data], pinned=False)

    # --- answers ----------------------------------------------------------------------------------------

    def store_answer(self, digest: bytes, answer: Recognition) -> None:
        plain = msgspec.structs.replace(answer, phases=None, reused="")
        found: list[Recognition | RecognitionHypothesis] = [answer, *answer.hypotheses]
        nbytes = ANSWER_BYTES + sum(TOKEN_BYTES * len(each.tokens) + TIMES_BYTES * len(each.times) for each in found)
        self.answers.insert(digest, plain, nbytes)

    # --- audio ------------------------------------------------------------------------------------------

    def lookup_audio(self, root: bytes) -> OwnedPages | None:
        """Returns the audio's pages, with references for a row to free: the tree's, or those of a row that decodes
        the same audio, if the tree had no room for them. None: there are none."""
        if (found := self.prefix_cache.match(root)) is not None:
            self._reused_keys.insert(root, True, REUSED_KEY_BYTES)
            return OwnedPages(found.audio_pages, found.frames)
        if (row := next((row for row in self._runner.all_rows if row.audio_key == root), None)) is None:
            return None
        self._runner.page_pool.share(row.audio_pages)
        return OwnedPages([*row.audio_pages], row.frames)

    def is_offloaded(self, root: bytes) -> bool:
        """Returns whether the audio was evicted to the tiered store."""
        return self._offload is not None and OFFLOAD_PREFIX + root in self._offload

    def fetch_offloaded(self, root: bytes, came: Callable[[list[memoryview] | None], None]) -> None:
        """Fetches audio from the tiered store; `came` is called on any thread."""
        assert self._offload is not None
        self._offload.get(OFFLOAD_PREFIX + root, came)

    def insert_fetched(self, root: bytes, parts: Sequence[memoryview] | None, free_pages: int) -> None:
        """Copies fetched audio into pages, if `free_pages` are enough. `parts`: None if it is lost. A failed copy is
        counted, and fails no request: the audio is encoded."""
        decoder = self._runner.decoder
        if parts is None or root in self.prefix_cache:
            return
        if (count := len(parts[1]) // decoder.saved_page_bytes) > free_pages:
            return
        assert self.stats is not None
        with contextlib.ExitStack() as after, StepGuard(self.stats, "encode", "restoring cached audio", lambda _: None):
            runner, (head, data) = self._runner, parts
            pages = runner.page_pool.allocate(count)
            after.callback(runner.page_pool.free_pages, pages)
            # Not copied: the memory is valid until this returns, and by then the pages are written, on a device too.
            source = tensor_from_array(np.frombuffer(data, np.uint8)).view(runner.kv_cache.dtype)
            layers, two, _, block = runner.kv_cache.shape[1:]
            decoder.write_pages(pages, source.view(count, layers, two, -1, block))
            self.prefix_cache.insert(root, pages, int.from_bytes(head, "little"))

    def store_row_audio(self, row: DecodeRow) -> None:
        """Adds the audio of a row, which is in the row's pages; that of a prompt is not cached."""
        if row.audio_key:
            self.prefix_cache.insert(row.audio_key, row.audio_pages, row.frames)

    def store_encoder_result(self, root: bytes, result: EncoderResult) -> None:
        """Adds encoded audio whose request has left, for others that wait for it, into the pages that were reserved for
        that request. Audio for a prompt is not cached: it is encoded again."""
        if self._runner.embeds_audio:
            return
        pages = self._runner.store_encoder_result(result)
        try:
            self.prefix_cache.insert(root, pages, result.frames)
        finally:
            self._runner.page_pool.free_pages(pages)

    # --- prefixes ---------------------------------------------------------------------------------------

    def attach_prefix(self, row: DecodeRow) -> None:
        """Attaches cached pages for the beginning of the row's prompt, if it was fed before, over the same audio or
        before any."""
        if not self._shares_prompt(row) or not (prompt := self._shareable_prompt(row)):
            return
        match = self.prefix_cache.match(row.audio_key, prompt)
        if match is None:
            return
        self._runner.page_pool.free_pages(match.audio_pages)  # the row has references already
        if match.token_pages:
            self._runner.attach_prefix(row, match.token_pages)
            if self.stats is not None:
                self.stats.record_reused_positions(match.tokens)

    def store_prefix(self, rows: Sequence[DecodeRow]) -> None:
        """Adds the prompts of rows that have been prefilled. These pages are never written again."""
        for row in rows:
            if self._shares_prompt(row) and len(prompt := self._shareable_prompt(row)) >= PAGE:
                pages = row.block_table[: len(prompt) // PAGE]
                self.prefix_cache.insert(row.audio_key, row.audio_pages, row.frames, prompt, pages)

    def _shares_prompt(self, row: DecodeRow) -> bool:
        return row.beams is None and (bool(row.audio_key) or self._runner.embeds_audio)

    def _shareable_prompt(self, row: DecodeRow) -> tuple[int, ...]:
        """Tokens of the row's prompt that others may share: those before start-of-transcript, which each row feeds
        itself, since its logits tell whether anybody speaks; or those before the audio that is in the prompt."""
        if self._runner.embeds_audio:
            fed = row.prompt[:-1]
            return fed[: fed.index(PROMPT_EMBEDDING)] if PROMPT_EMBEDDING in fed else fed
        return row.prompt[: self._runner.prompts.tokens_before_sot(row.prompt)]
