"""Which pages hold the keys and values of what comes again: a tree of what was heard, and tokens below it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from asr_serve.engine.cache.page_pool import PagePool
from asr_serve.kernels import PAGE

BLOCK_BYTES = PAGE * array("i").itemsize
"""Of the tokens of one page: a run of tokens is held as bytes, which compare, hash and lie together."""


class PrefixMatch(NamedTuple):
    """What is there of an utterance. The caller holds every page of it, and gives them back to the pool."""

    frames: int
    audio_pages: list[int]
    """Pages with the keys and values of so many frames; none at the root b""."""
    tokens: int
    """Positions that `own` holds: whole pages."""
    token_pages: list[int]


class _RadixNode:
    """A run of blocks that were always used together, or a root with its audio."""

    __slots__ = ("children", "data", "frames", "newer", "older", "pages", "parent")

    def __init__(self, parent: _RadixNode | None, data: bytes, pages: list[int], frames: int = 0) -> None:
        self.parent, self.data, self.pages, self.frames = parent, data, pages, frames
        """`data`: tokens, or the root's name; a page of a root holds frames, of another node a block of tokens."""
        self.children: dict[bytes, _RadixNode] = {}
        """By their first block."""
        self.older = self.newer = self


class PrefixCache:
    """Radix tree over blocks of PAGE tokens for each root, with the root's audio above them.

    Of an encoder-decoder model a root must be the digest of the audio. From the second layer on, the keys and
    values of its tokens depend on the audio too, because what enters a layer has passed through the
    cross-attention of the layer before: the same tokens after other audio have other ones, and must not be found.
    A model that decodes from tokens alone has the one root b"", without audio.

    The tree is one more holder of each of its pages (`PagePool.keep`), of `most_pages` at most. What was used the
    longest ago goes first, over all roots; a node before what it hangs from; no page that somebody else holds. It
    belongs to one thread.

    Source  D. R. Morrison, PATRICIA, 1968 (runs on a tree's edges); arXiv:2312.07104 (such a tree over pages)
    """

    def __init__(
        self, pool: PagePool, most_pages: int, on_evict: Callable[[bytes, list[int], int], None] | None = None
    ) -> None:
        """`on_evict(root, audio pages, frames)`: while these still hold what they hold, before a root's audio is
        given up. It must not call the tree, nor the pool."""
        assert pool.reclaim is None, "a pool has one cache"
        pool.reclaim = self.reclaim
        self.pool, self.max_pages, self._on_evict = pool, most_pages, on_evict
        self._roots: dict[bytes, _RadixNode] = {}
        self._evicting = False
        self._extending: _RadixNode | None = None
        """To which something is about to be added."""
        # All nodes with pages in a ring: `newer` of this one is the oldest. What is used moves to the new end with
        # all that it hangs from, itself first: so a node is always older than its parent.
        self._lru_ring = _RadixNode(None, b"", [])

    def __contains__(self, root: bytes) -> bool:
        return root in self._roots

    def __len__(self) -> int:
        """Roots."""
        return len(self._roots)

    @property
    def pages(self) -> int:
        """That it holds, whoever else does."""
        return self.pool.cached_count

    # --- use --------------------------------------------------------------------------------------------

    def match(self, root: bytes, tokens: Sequence[int] = ()) -> PrefixMatch | None:
        """The longest there is, now shared with the caller; None: nothing. What follows the last of the tokens is
        told only to whoever feeds it, so ask without it."""
        assert not self._evicting, "the tree is giving something up"
        top = self._roots.get(root)
        if top is None:
            return None
        node, known = self._walk(top, _block_bytes(tokens))
        if not known and not top.pages:
            return None
        self._touch(node)
        own = [page for each in reversed([*_ancestors(node)]) if each is not top for page in each.pages]
        found = PrefixMatch(top.frames, [*top.pages], known // BLOCK_BYTES * PAGE, own)
        self.pool.share(found.audio_pages)
        self.pool.share(found.token_pages)
        return found

    def insert(
        self, root: bytes, audio: Sequence[int], frames: int, tokens: Sequence[int] = (), own: Sequence[int] = ()
    ) -> None:
        """What the caller holds, for those who come after: tokens[i * PAGE:(i + 1) * PAGE] lie in own[i], which
        nobody may write any more. The tree holds only what it did not have; the rest is the caller's alone, as
        before. Without room, since others hold what the tree has, it takes the first of the tokens, or nothing.
        """
        assert not self._evicting, "the tree is giving something up"
        assert root or not audio, 'the root b"" has no audio'
        data = _block_bytes(tokens)
        assert len(own) * BLOCK_BYTES >= len(data), f"{len(own)} pages for {len(data) // BLOCK_BYTES} blocks"
        top = self._roots.get(root)
        if top is None:
            if len(audio) > self.max_pages - self.pages + self.pool.reclaimable_count:
                return  # nothing that could be given up for it would do
            if len(audio) > self._make_room(len(audio)):
                return
            top = self._add_root(root, audio, frames)
        assert (top.frames, len(top.pages)) == (frames, len(audio)), "a root has other audio than before"
        node, known = self._walk(top, data)
        new = own[known // BLOCK_BYTES : len(data) // BLOCK_BYTES]
        self._extending = node  # what it hangs from has a child, and stays for that
        try:
            new = new[: self._make_room(len(new))]
        finally:
            self._extending = None
        if new:
            node = self._add_child(node, data[known : known + len(new) * BLOCK_BYTES], new)
            self._roots[root] = top
        self._touch(node)

    def _add_root(self, root: bytes, audio: Sequence[int], frames: int) -> _RadixNode:
        """One without audio is no root of the tree before something hangs from it."""
        top = _RadixNode(None, root, [*audio], frames)
        if audio:
            self.pool.add_cache_reference(audio)
            self._link(top, self._lru_ring)
            self._roots[root] = top
        return top

    def _add_child(self, parent: _RadixNode, data: bytes, pages: Sequence[int]) -> _RadixNode:
        node = parent.children[data[:BLOCK_BYTES]] = _RadixNode(parent, data, [*pages])
        self.pool.add_cache_reference(pages)
        self._link(node, self._lru_ring)
        return node

    def _walk(self, top: _RadixNode, data: bytes) -> tuple[_RadixNode, int]:
        """As far as the tree goes along these tokens: the node that ends there, and how many bytes of them. A node
        that only begins so is split, and so all that a node holds was always used together."""
        node, known = top, 0
        while child := node.children.get(data[known : known + BLOCK_BYTES]):
            same = _common_prefix_bytes(child.data, data, known)
            node, known = child if same == len(child.data) else self._split(child, same), known + same
        return node, known

    def _split(self, node: _RadixNode, at: int) -> _RadixNode:
        """The part before, as a node of its own that the rest hangs from."""
        assert node.parent is not None, "a root has no part before"
        before = _RadixNode(node.parent, node.data[:at], node.pages[: at // BLOCK_BYTES])
        node.parent.children[node.data[:BLOCK_BYTES]] = before
        node.parent, node.data, node.pages = before, node.data[at:], node.pages[at // BLOCK_BYTES :]
        before.children[node.data[:BLOCK_BYTES]] = node
        self._link(before, node.newer)
        return before

    # --- age --------------------------------------------------------------------------------------------

    def _link(self, node: _RadixNode, newer: _RadixNode) -> None:
        node.older, node.newer = newer.older, newer
        node.older.newer = newer.older = node

    def _unlink(self, node: _RadixNode) -> None:
        node.older.newer, node.newer.older = node.newer, node.older

    def _touch(self, node: _RadixNode) -> None:
        for each in _ancestors(node):
            if each.pages:
                self._unlink(each)
                self._link(each, self._lru_ring)

    def _oldest(self) -> Iterator[_RadixNode]:
        """All nodes with pages. The one that came last may leave the tree, with whatever hangs from it."""
        node = self._lru_ring.newer
        while node is not self._lru_ring:
            yield node
            node = node.newer

    # --- giving up --------------------------------------------------------------------------------------

    def reclaim(self, pages: int) -> int:
        """Free at least so many pages, if that many are only the tree's; how many became free. A root's audio goes
        whole."""
        assert not self._evicting, "the tree is giving something up"
        freed = self._evict(pages)
        return freed + (self._evict_subtrees(pages - freed) if freed < pages else 0)

    def clear(self) -> None:
        """Forget all; `on_evict` is not asked."""
        for node in [*self._oldest()]:
            self._truncate(node, 0)

    def _make_room(self, wanted: int) -> int:
        """Of so many more pages, how many the tree may hold now, after it gave up what it could for them."""
        if (missing := self.pages + wanted - self.max_pages) > 0:
            self._evict(missing)
        return min(wanted, self.max_pages - self.pages)

    def _evict(self, pages: int) -> int:
        freed = 0
        for node in self._oldest():
            if freed >= pages or not self.pool.reclaimable_count:
                break
            if node.children or node is self._extending:
                continue
            if node.parent is None:
                if all(map(self.pool.only_cached, node.pages)):
                    freed += self._evict_node(node, 0)
                continue
            kept = len(node.pages)
            while kept and len(node.pages) - kept < pages - freed and self.pool.only_cached(node.pages[kept - 1]):
                kept -= 1
            freed += self._truncate(node, kept)
        return freed

    def _evict_subtrees(self, pages: int) -> int:
        """Free pages with nodes below them that others hold: these are forgotten, and stay with their holders. It
        happens when somebody's own copy of what was there already got a child that was new."""
        freed = 0
        for node in self._oldest():
            while freed < pages and any(idle := [*map(self.pool.only_cached, node.pages)]):
                for each in reversed([*_descendants(node)][1:]):
                    freed += self._truncate(each, 0)
                freed += self._evict_node(node, len(idle) - 1 - idle[::-1].index(True))
            if freed >= pages or not self.pool.reclaimable_count:
                break
        return freed

    def _evict_node(self, node: _RadixNode, kept: int) -> int:
        if node.parent is not None:
            return self._truncate(node, kept)
        if self._on_evict is not None:
            self._evicting = True
            try:
                self._on_evict(node.data, [*node.pages], node.frames)
            finally:
                self._evicting = False
        return self._truncate(node, 0)

    def _truncate(self, node: _RadixNode, kept: int) -> int:
        """Hold only so many of its pages, the first; none: the node is gone. How many became free."""
        freed = self.pool.drop_cache_reference(node.pages[kept:])
        if kept:
            node.pages, node.data = node.pages[:kept], node.data[: kept * BLOCK_BYTES]
            return len(freed)
        node.pages = []
        self._unlink(node)
        if node.parent is None:
            del self._roots[node.data]
            return len(freed)
        del node.parent.children[node.data[:BLOCK_BYTES]]
        if not (node.parent.pages or node.parent.children):
            del self._roots[node.parent.data]
        return len(freed)

    def check(self) -> None:
        """Every page is there once and kept in the pool; every node is older than its parent. Run when idle."""
        assert self._extending is None, "something is still to be added"
        ages = {id(node): age for age, node in enumerate(self._oldest())}
        pages: list[int] = []
        for root, top in self._roots.items():
            assert top.data == root, "a root has another name"
            assert top.pages or top.children, "a root is empty"
            for node in _descendants(top):
                pages += node.pages
                assert (id(node) in ages) == bool(node.pages), "a node with pages has no age"
                if node.parent is None:
                    continue
                assert len(node.data) == len(node.pages) * BLOCK_BYTES > 0, "a page without its tokens"
                assert node.parent.children[node.data[:BLOCK_BYTES]] is node, "a node hangs elsewhere"
                assert ages[id(node)] < ages.get(id(node.parent), len(ages)), "a node is younger than its parent"
        assert len(pages) == len(set(pages)) == self.pages <= self.max_pages, "a page is there twice, or too many"
        assert len(ages) == sum(bool(node.pages) for top in self._roots.values() for node in _descendants(top))


def _block_bytes(tokens: Sequence[int]) -> bytes:
    """Of whole blocks."""
    return array("i", tokens[: len(tokens) // PAGE * PAGE]).tobytes()


def _common_prefix_bytes(held: bytes, data: bytes, start: int) -> int:
    """How many bytes of `held` are those of `data` from there on, in whole blocks."""
    if data.startswith(held, start):
        return len(held)
    at = 0
    while held[at : at + BLOCK_BYTES] == data[start + at : start + at + BLOCK_BYTES]:
        at += BLOCK_BYTES
    return at


def _ancestors(node: _RadixNode) -> Iterator[_RadixNode]:
    """It, and what it hangs from."""
    each: _RadixNode | None = node
    while each is not None:
        yield each
        each = each.parent


def _descendants(node: _RadixNode) -> Iterator[_RadixNode]:
    """It, and what hangs from it, parents first."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += each.children.values()
