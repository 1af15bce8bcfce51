"""Prefix cache: a radix tree of tokens for each audio, whose nodes hold pages of keys and values."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from asr_serve.engine.cache.page_pool import PagePool
from asr_serve.kernels import PAGE

BLOCK_BYTES = PAGE * array("i").itemsize
"""Bytes of the tokens of one page: runs of tokens are bytes, which compare, hash and lie together."""


class PrefixMatch(NamedTuple):
    """Cached pages for a request. The caller has a reference to each of them, and frees them in the pool."""

    frames: int
    audio_pages: list[int]
    """Pages with the keys and values of `frames` frames; none at the root b""."""
    tokens: int
    """Positions that `token_pages` hold: whole pages."""
    token_pages: list[int]


class _RadixNode:
    """Run of blocks that were always used together, or a root with its audio."""

    __slots__ = ("children", "data", "frames", "newer", "older", "pages", "parent")

    def __init__(self, parent: _RadixNode | None, data: bytes, pages: list[int], frames: int = 0) -> None:
        self.parent, self.data, self.pages, self.frames = parent, data, pages, frames
        """`data`: tokens, or the root's key; a page holds frames in a root, else a block of tokens."""
        self.children: dict[bytes, _RadixNode] = {}
        """Children by their first block."""
        self.older = self.newer = self


class PrefixCache:
    """Radix tree over blocks of PAGE tokens for each root, with the root's audio above them.

    The root of an encoder-decoder model must be the digest of the audio. From the second layer on, the keys and
    values of its tokens depend on the audio too, because what enters a layer has passed through the
    cross-attention of the layer before: the same tokens over other audio have other keys and values, and must not
    match. A model that decodes from tokens alone has the one root b"", without audio.

    The tree has a reference to each of its pages (`PagePool.add_cache_reference`), `most_pages` at most. The least
    recently used is evicted first, over all roots; a node before its parent; no page with other references.
    Belongs to one thread.

    Source  D. R. Morrison, PATRICIA, 1968 (runs on a tree's edges); arXiv:2312.07104 (such a tree over pages)
    """

    def __init__(
        self, pool: PagePool, most_pages: int, on_evict: Callable[[bytes, list[int], int], None] | None = None
    ) -> None:
        """`on_evict(root, audio pages, frames)` is called before a root's audio is evicted, while the pages still
        hold it. It must not call the tree or the pool."""
        assert pool.reclaim is None, "a pool has one cache"
        pool.reclaim = self.reclaim
        self.pool, self.max_pages, self._on_evict = pool, most_pages, on_evict
        self.on_root: Callable[[bytes, bool], None] | None = None
        """Called with the key of a root that was added or removed, and whether it is there. It must not call the
        tree."""
        self._roots: dict[bytes, _RadixNode] = {}
        self._evicting = False
        self._extending: _RadixNode | None = None
        """Node to which a child is about to be added."""
        # All nodes with pages form a ring: `newer` of this one is the oldest. A node that is used moves to the new
        # end with its ancestors, itself first, so a node is always older than its parent.
        self._lru_ring = _RadixNode(None, b"", [])

    def __contains__(self, root: bytes) -> bool:
        return root in self._roots

    def __len__(self) -> int:
        """Number of roots."""
        return len(self._roots)

    @property
    def roots(self) -> list[bytes]:
        """Keys of all roots."""
        return [*self._roots]

    @property
    def pages(self) -> int:
        """Pages that the tree references, whoever else does."""
        return self.pool.cached_count

    # --- use --------------------------------------------------------------------------------------------

    def match(self, root: bytes, tokens: Sequence[int] = ()) -> PrefixMatch | None:
        """Returns the longest cached prefix, now shared with the caller; None: nothing. Only feeding the last
        token yields logits for the next one, so leave it out of `tokens`."""
        assert not self._evicting, "the tree is giving something up"
        top = self._roots.get(root)
        if top is None:
            return None
        node, matched = self._walk(top, _block_bytes(tokens))
        if not matched and not top.pages:
            return None
        self._touch(node)
        token_pages = [
            page for ancestor in reversed([*_ancestors(node)]) if ancestor is not top for page in ancestor.pages
        ]
        found = PrefixMatch(top.frames, [*top.pages], matched // BLOCK_BYTES * PAGE, token_pages)
        self.pool.share(found.audio_pages)
        self.pool.share(found.token_pages)
        return found

    def insert(
        self, root: bytes, audio: Sequence[int], frames: int, tokens: Sequence[int] = (), own: Sequence[int] = ()
    ) -> None:
        """Adds what the caller holds: tokens[i * PAGE:(i + 1) * PAGE] lie in own[i], which nobody may write any
        more. The tree references only pages for what it lacked; the rest stays the caller's alone. Without room,
        since others hold the tree's pages, it adds the first of the tokens, or nothing."""
        assert not self._evicting, "the tree is giving something up"
        assert root or not audio, 'the root b"" has no audio'
        data = _block_bytes(tokens)
        assert len(own) * BLOCK_BYTES >= len(data), f"{len(own)} pages for {len(data) // BLOCK_BYTES} blocks"
        top = self._roots.get(root)
        if top is None:
            if len(audio) > self.max_pages - self.pages + self.pool.reclaimable_count:
                return  # evicting all that can be evicted would not make room
            if len(audio) > self._make_room(len(audio)):
                return
            top = self._add_root(root, audio, frames)
        assert (top.frames, len(top.pages)) == (frames, len(audio)), "a root has other audio than before"
        node, matched = self._walk(top, data)
        new_pages = own[matched // BLOCK_BYTES : len(data) // BLOCK_BYTES]
        self._extending = node  # its ancestors have a child, and stay for that
        try:
            new_pages = new_pages[: self._make_room(len(new_pages))]
        finally:
            self._extending = None
        if new_pages:
            node = self._add_child(node, data[matched : matched + len(new_pages) * BLOCK_BYTES], new_pages)
            self._roots[root] = top
        self._touch(node)

    def _add_root(self, root: bytes, audio: Sequence[int], frames: int) -> _RadixNode:
        """Adds a root; one without audio joins the tree with its first child."""
        top = _RadixNode(None, root, [*audio], frames)
        if audio:
            self.pool.add_cache_reference(audio)
            self._link(top, self._lru_ring)
            self._roots[root] = top
            self._report(root, True)
        return top

    def _add_child(self, parent: _RadixNode, data: bytes, pages: Sequence[int]) -> _RadixNode:
        node = parent.children[data[:BLOCK_BYTES]] = _RadixNode(parent, data, [*pages])
        self.pool.add_cache_reference(pages)
        self._link(node, self._lru_ring)
        return node

    def _walk(self, top: _RadixNode, data: bytes) -> tuple[_RadixNode, int]:
        """Follows the tokens as far as the tree goes; returns the node that ends there and the bytes that matched.
        A node that matches in part is split, so all that a node holds was always used together."""
        node, matched = top, 0
        while child := node.children.get(data[matched : matched + BLOCK_BYTES]):
            same = _common_prefix_bytes(child.data, data, matched)
            node, matched = child if same == len(child.data) else self._split(child, same), matched + same
        return node, matched

    def _split(self, node: _RadixNode, at: int) -> _RadixNode:
        """Makes the part before `at` a node of its own, the parent of the rest."""
        assert node.parent is not None, "a root has no part before"
        before = _RadixNode(node.parent, node.data[:at], node.pages[: at // BLOCK_BYTES])
        node.parent.children[node.data[:BLOCK_BYTES]] = before
        node.parent, node.data, node.pages = before, node.data[at:], node.pages[at // BLOCK_BYTES :]
        before.children[node.data[:BLOCK_BYTES]] = node
        self._link(before, node.newer)
        return before

    # --- LRU order --------------------------------------------------------------------------------------

    def _link(self, node: _RadixNode, newer: _RadixNode) -> None:
        node.older, node.newer = newer.older, newer
        node.older.newer = newer.older = node

    def _unlink(self, node: _RadixNode) -> None:
        node.older.newer, node.newer.older = node.newer, node.older

    def _touch(self, node: _RadixNode) -> None:
        for ancestor in _ancestors(node):
            if ancestor.pages:
                self._unlink(ancestor)
                self._link(ancestor, self._lru_ring)

    def _oldest(self) -> Iterator[_RadixNode]:
        """Yields all nodes with pages, oldest first. The last one yielded may be removed with its descendants."""
        node = self._lru_ring.newer
        while node is not self._lru_ring:
            yield node
            node = node.newer

    # --- eviction ---------------------------------------------------------------------------------------

    def reclaim(self, pages: int) -> int:
        """Frees at least `pages` pages, if so many are only the tree's; returns how many became free. A root's
        audio is evicted whole."""
        assert not self._evicting, "the tree is giving something up"
        freed = self._evict(pages)
        return freed + (self._evict_subtrees(pages - freed) if freed < pages else 0)

    def clear(self) -> None:
        """Removes all nodes, without calling `on_evict`."""
        for node in [*self._oldest()]:
            self._truncate(node, 0)

    def _make_room(self, wanted: int) -> int:
        """Evicts what it can for `wanted` more pages; returns how many of them the tree may reference now."""
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
            remaining = len(node.pages)
            while (
                remaining
                and len(node.pages) - remaining < pages - freed
                and self.pool.only_cached(node.pages[remaining - 1])
            ):
                remaining -= 1
            freed += self._truncate(node, remaining)
        return freed

    def _evict_subtrees(self, pages: int) -> int:
        """Frees pages above nodes that others hold: the tree drops these, and their holders keep them. This
        happens when a caller with its own copy of a cached prefix added a new child to it."""
        freed = 0
        for node in self._oldest():
            while freed < pages and any(reclaimable := [*map(self.pool.only_cached, node.pages)]):
                for descendant in reversed([*_descendants(node)][1:]):
                    freed += self._truncate(descendant, 0)
                freed += self._evict_node(node, len(reclaimable) - 1 - reclaimable[::-1].index(True))
            if freed >= pages or not self.pool.reclaimable_count:
                break
        return freed

    def _evict_node(self, node: _RadixNode, page_count: int) -> int:
        if node.parent is not None:
            return self._truncate(node, page_count)
        if self._on_evict is not None:
            self._evicting = True
            try:
                self._on_evict(node.data, [*node.pages], node.frames)
            finally:
                self._evicting = False
        return self._truncate(node, 0)

    def _truncate(self, node: _RadixNode, page_count: int) -> int:
        """Drops all but the first `page_count` pages; with none the node is removed. Returns how many became free."""
        freed = self.pool.drop_cache_reference(node.pages[page_count:])
        if page_count:
            node.pages, node.data = node.pages[:page_count], node.data[: page_count * BLOCK_BYTES]
            return len(freed)
        node.pages = []
        self._unlink(node)
        if node.parent is None:
            del self._roots[node.data]
            self._report(node.data, False)
            return len(freed)
        del node.parent.children[node.data[:BLOCK_BYTES]]
        if not (node.parent.pages or node.parent.children):
            del self._roots[node.parent.data]
        return len(freed)

    def _report(self, root: bytes, cached: bool) -> None:
        if self.on_root is not None:
            self.on_root(root, cached)

    def check(self) -> None:
        """Asserts that every page is in one node, and every node is older than its parent. Run when idle."""
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
    """Bytes of the whole blocks of `tokens`."""
    return array("i", tokens[: len(tokens) // PAGE * PAGE]).tobytes()


def _common_prefix_bytes(held: bytes, data: bytes, start: int) -> int:
    """Number of leading bytes of `held` that equal `data` from `start` on, in whole blocks."""
    if data.startswith(held, start):
        return len(held)
    at = 0
    while held[at : at + BLOCK_BYTES] == data[start + at : start + at + BLOCK_BYTES]:
        at += BLOCK_BYTES
    return at


def _ancestors(node: _RadixNode) -> Iterator[_RadixNode]:
    """Yields the node and its ancestors."""
    ancestor: _RadixNode | None = node
    while ancestor is not None:
        yield ancestor
        ancestor = ancestor.parent


def _descendants(node: _RadixNode) -> Iterator[_RadixNode]:
    """Yields the node and its descendants, parents first."""
    waiting = [node]
    while waiting:
        descendant = waiting.pop()
        yield descendant
        waiting += descendant.children.values()
