"""What was heard before, for whoever brings the same audio again: answers, and keys and values in pages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from asr_serve.decoding.seq2seq import Recognition
from asr_serve.engine.cache import TieredStore
from asr_serve.engine.cache.lru import LruCache
from asr_serve.engine.cache.prefix import PrefixCache
from asr_serve.engine.executor import StepGuard
from asr_serve.engine.seq2seq.decode_batch import DecodeRow
from asr_serve.engine.seq2seq.decoder import DecodeRunner
from asr_serve.engine.seq2seq.encoder import EncoderResult, OwnedPages, tensor_from_array
from asr_serve.engine.stats import EngineStats
from asr_serve.kernels import PAGE

ANSWER_BYTES, TOKEN_BYTES, TIMES_BYTES = 600, 72, 128
"""What an answer takes, each of its tokens with its score, and when each was said, where that is told."""
OFFLOAD_PREFIX = b"audio "
"""Before a root's name in the tiers, where streams sleep too."""
REUSED_KEYS_BYTES, REUSED_KEY_BYTES = 1 << 16, 100
"""For the names of audio that came again."""


class EncoderCache:
    """Of one engine. Belongs to the loop's thread.

    Whoever sends audio that somebody else sent is answered sooner, and so can tell that it was sent. Where that
    must not be known, give it no memory (EngineConfig.prefix_bytes=0).
    """

    def __init__(
        self, runner: DecodeRunner, answer_bytes: int, page_bytes: int, tiers: TieredStore | None = None
    ) -> None:
        """`page_bytes`: for pages that only this holds. They are the runner's own, and its rows get them back
        whenever they need them. `tiers`: for audio that gave way, if it has come again before: to copy what will
        never be asked for costs more than it spares."""
        self._runner, self._page_bytes, self._offload = runner, runner.kv_cache[0].nbytes, tiers
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
            copy = self._runner.kv_cache[pages]
            _zero_tail(copy, frames)
            data = copy.cpu().reshape(-1).view(torch.uint8).numpy()
            self._offload.put(OFFLOAD_PREFIX + root, [frames.to_bytes(8, "little"), data.data], keep=False)

    # --- answers ----------------------------------------------------------------------------------------

    def store_answer(self, wanted: bytes, answer: Recognition) -> None:
        plain = msgspec.structs.replace(answer, phases=None, reused="")
        nbytes = ANSWER_BYTES + TOKEN_BYTES * len(answer.tokens) + TIMES_BYTES * len(answer.times)
        self.answers.insert(wanted, plain, nbytes)

    # --- audio ------------------------------------------------------------------------------------------

    def lookup_audio(self, root: bytes) -> OwnedPages | None:
        """Its pages, for a row to give back: the tree's, or those of a row that hears the same just now, where the
        tree had no room for them."""
        if (found := self.prefix_cache.match(root)) is not None:
            self._reused_keys.insert(root, True, REUSED_KEY_BYTES)
            return OwnedPages(found.audio_pages, found.frames)
        if (row := next((row for row in self._runner.all_rows if row.audio_key == root), None)) is None:
            return None
        self._runner.page_pool.share(row.audio_pages)
        return OwnedPages([*row.audio_pages], row.frames)

    def is_offloaded(self, root: bytes) -> bool:
        """Whether it gave way, and lies in the tiers."""
        return self._offload is not None and OFFLOAD_PREFIX + root in self._offload

    def fetch_offloaded(self, root: bytes, came: Callable[[list[memoryview] | None], None]) -> None:
        """From there; `came` is called on any thread."""
        assert self._offload is not None
        self._offload.get(OFFLOAD_PREFIX + root, came)

    def insert_fetched(self, root: bytes, parts: Sequence[memoryview] | None, room: int) -> None:
        """What came, into pages again, if there are so many; None: it is lost. A step that may fail."""
        if parts is None or root in self.prefix_cache or (count := len(parts[1]) // self._page_bytes) > room:
            return
        assert self.stats is not None
        with contextlib.ExitStack() as after, StepGuard(self.stats, "encode", "restoring", lambda _: None):
            runner, (head, data) = self._runner, parts
            pages = runner.page_pool.allocate(count)
            after.callback(runner.page_pool.free_pages, pages)
            # Where it lies: it is lent until this returns, and by then the pool has it, on a device too.
            held = tensor_from_array(np.frombuffer(data, np.uint8)).view(runner.kv_cache.dtype)
            runner.kv_cache[pages] = held.view(count, *runner.kv_cache.shape[1:]).to(runner.kv_cache.device)
            self.prefix_cache.insert(root, pages, int.from_bytes(head, "little"))

    def store_row_audio(self, row: DecodeRow) -> None:
        """The row's audio is in its pages."""
        self.prefix_cache.insert(row.audio_key, row.audio_pages, row.frames)

    def store_encoder_result(self, root: bytes, result: EncoderResult) -> None:
        """Nobody decodes it, and somebody will. There is room: it was kept for whoever wanted it."""
        pages = self._runner.store_encoder_result(result)
        try:
            self.prefix_cache.insert(root, pages, result.frames)
        finally:
            self._runner.page_pool.free_pages(pages)

    # --- what a row begins with -------------------------------------------------------------------------

    def attach_prefix(self, row: DecodeRow) -> None:
        """Whole pages of what the row is to be fed first, where the same was fed over the same audio before."""
        if not row.audio_key or row.beams is not None or not (starts := self._shareable_prompt(row)):
            return
        found = self.prefix_cache.match(row.audio_key, starts)
        if found is None:
            return
        self._runner.page_pool.free_pages(found.audio_pages)  # of these it has references
        if found.token_pages:
            self._runner.attach_prefix(row, found.token_pages)
            if self.stats is not None:
                self.stats.record_reused_positions(found.tokens)

    def store_prefix(self, rows: Sequence[DecodeRow]) -> None:
        """All that they begin with has been fed. These pages are never written again."""
        for row in rows:
            if row.audio_key and row.beams is None and len(starts := self._shareable_prompt(row)) >= PAGE:
                own = row.block_table[: len(starts) // PAGE]
                self.prefix_cache.insert(row.audio_key, row.audio_pages, row.frames, starts, own)

    def _shareable_prompt(self, row: DecodeRow) -> tuple[int, ...]:
        """Of its start, what others may have too. What tells whether anybody speaks is left: each row asks that
        itself."""
        return row.prompt[: self._runner.prompts.tokens_before_sot(row.prompt)]


def _zero_tail(pages: Tensor, frames: int) -> None:
    """Of a copy of an utterance's pages, what lies behind its frames: whoever had the last page before left that.
    The layout is that of `native`: K (heads, head_dim, PAGE), V (heads, PAGE, head_dim)."""
    if held := frames % PAGE:
        layers, _, heads, _ = pages.shape[1:]
        pages[-1, :, 0].view(layers, heads, -1, PAGE)[..., held:] = 0
        pages[-1, :, 1].view(layers, heads, PAGE, -1)[:, :, held:] = 0
