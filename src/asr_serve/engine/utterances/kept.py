"""What was heard before, for whoever brings the same audio again: answers, and keys and values in pages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from asr_serve.decoding.attention import Recognition
from asr_serve.engine.prefix.memory import Memory
from asr_serve.engine.prefix.tree import PrefixTree
from asr_serve.engine.stats import Stats
from asr_serve.engine.tiers import Tiers
from asr_serve.engine.utterances.encode import EncoderResult, Held, tensor_of
from asr_serve.engine.utterances.rows import Row
from asr_serve.engine.utterances.runner import DecodeRunner
from asr_serve.engine.work import Attempt
from asr_serve.native import PAGE

ANSWER_BYTES, TOKEN_BYTES, TIMES_BYTES = 600, 72, 128
"""What an answer takes, each of its tokens with its score, and when each was said, where that is told."""
AUDIO = b"audio "
"""Before a root's name in the tiers, where streams sleep too."""
ASKED_BYTES, ASKED_ENTRY = 1 << 16, 100
"""For the names of audio that came again."""


class Kept:
    """Of one engine. Belongs to the loop's thread.

    Whoever sends audio that somebody else sent is answered sooner, and so can tell that it was sent. Where that
    must not be known, give it no memory (EngineConfig.prefix_bytes=0).
    """

    def __init__(
        self, runner: DecodeRunner, answer_bytes: int, page_bytes: int, tiers: Tiers | None = None
    ) -> None:
        """`page_bytes`: for pages that only this holds. They are the runner's own, and its rows get them back
        whenever they need them. `tiers`: for audio that gave way, if it has come again before: to copy what will
        never be asked for costs more than it spares."""
        self._runner, self._page_bytes, self._tiers = runner, runner.pool[0].nbytes, tiers
        self._came_again: Memory[bool] = Memory(ASKED_BYTES)
        self.answers: Memory[Recognition] = Memory(answer_bytes)
        self.tree = PrefixTree(runner.pages, page_bytes // self._page_bytes, self._evicted)
        self.stats: Stats | None = None
        runner.kept = self

    @property
    def nbytes(self) -> int:
        return self.answers.nbytes + self.tree.pages * self._page_bytes

    def _evicted(self, root: bytes, pages: list[int], frames: int) -> None:
        if self.stats is not None:
            self.stats.evicted()
        if self._tiers is not None and root in self._came_again and not self.below(root):
            copy = self._runner.pool[pages]
            _blank(copy, frames)
            data = copy.cpu().reshape(-1).view(torch.uint8).numpy()
            self._tiers.put(AUDIO + root, [frames.to_bytes(8, "little"), data.data], keep=False)

    # --- answers ----------------------------------------------------------------------------------------

    def answered(self, wanted: bytes, answer: Recognition) -> None:
        plain = msgspec.structs.replace(answer, phases=None, reused="")
        nbytes = ANSWER_BYTES + TOKEN_BYTES * len(answer.tokens) + TIMES_BYTES * len(answer.times)
        self.answers.put(wanted, plain, nbytes)

    # --- audio ------------------------------------------------------------------------------------------

    def audio(self, root: bytes) -> Held | None:
        """Its pages, for a row to give back: the tree's, or those of a row that hears the same just now, where the
        tree had no room for them."""
        if (found := self.tree.match(root)) is not None:
            self._came_again.put(root, True, ASKED_ENTRY)
            return Held(found.audio, found.frames)
        if (row := next((row for row in self._runner.held if row.root == root), None)) is None:
            return None
        self._runner.pages.share(row.audio)
        return Held([*row.audio], row.frames)

    def below(self, root: bytes) -> bool:
        """Whether it gave way, and lies in the tiers."""
        return self._tiers is not None and AUDIO + root in self._tiers

    def fetch(self, root: bytes, came: Callable[[list[memoryview] | None], None]) -> None:
        """From there; `came` is called on any thread."""
        assert self._tiers is not None
        self._tiers.get(AUDIO + root, came)

    def restore(self, root: bytes, parts: Sequence[memoryview] | None, room: int) -> None:
        """What came, into pages again, if there are so many; None: it is lost. A step that may fail."""
        if parts is None or root in self.tree or (count := len(parts[1]) // self._page_bytes) > room:
            return
        assert self.stats is not None
        with contextlib.ExitStack() as after, Attempt(self.stats, "encode", "restoring", lambda _: None):
            runner, (head, data) = self._runner, parts
            pages = runner.pages.take(count)
            after.callback(runner.pages.give, pages)
            # Where it lies: it is lent until this returns, and by then the pool has it, on a device too.
            held = tensor_of(np.frombuffer(data, np.uint8)).view(runner.pool.dtype)
            runner.pool[pages] = held.view(count, *runner.pool.shape[1:]).to(runner.pool.device)
            self.tree.insert(root, pages, int.from_bytes(head, "little"))

    def heard(self, row: Row) -> None:
        """The row's audio is in its pages."""
        self.tree.insert(row.root, row.audio, row.frames)

    def encoded(self, root: bytes, result: EncoderResult) -> None:
        """Nobody decodes it, and somebody will. There is room: it was kept for whoever wanted it."""
        pages = self._runner.store(result)
        try:
            self.tree.insert(root, pages, result.frames)
        finally:
            self._runner.pages.give(pages)

    # --- what a row begins with -------------------------------------------------------------------------

    def begin(self, row: Row) -> None:
        """Whole pages of what the row is to be fed first, where the same was fed over the same audio before."""
        if not row.root or row.beams is not None or not (starts := self._shared(row)):
            return
        found = self.tree.match(row.root, starts)
        if found is None:
            return
        self._runner.pages.give(found.audio)  # of these it has references
        if found.own:
            self._runner.begin_at(row, found.own)
            if self.stats is not None:
                self.stats.reused(found.tokens)

    def began(self, rows: Sequence[Row]) -> None:
        """All that they begin with has been fed. These pages are never written again."""
        for row in rows:
            if row.root and row.beams is None and len(starts := self._shared(row)) >= PAGE:
                own = row.table[: len(starts) // PAGE]
                self.tree.insert(row.root, row.audio, row.frames, starts, own)

    def _shared(self, row: Row) -> tuple[int, ...]:
        """Of its start, what others may have too. What tells whether anybody speaks is left: each row asks that
        itself."""
        return row.start[: self._runner.starts.before(row.start)]


def _blank(pages: Tensor, frames: int) -> None:
    """Of a copy of an utterance's pages, what lies behind its frames: whoever had the last page before left that.
    The layout is that of `native`: K (heads, head_dim, PAGE), V (heads, PAGE, head_dim)."""
    if held := frames % PAGE:
        layers, _, heads, _ = pages.shape[1:]
        pages[-1, :, 0].view(layers, heads, -1, PAGE)[..., held:] = 0
        pages[-1, :, 1].view(layers, heads, PAGE, -1)[:, :, held:] = 0
