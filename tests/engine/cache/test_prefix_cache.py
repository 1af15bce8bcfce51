"""The tree finds what a dictionary of all prefixes would, gives up what is oldest there, and never shows anybody
what is not theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from asr_serve.engine.cache.page_pool import PagePool
from asr_serve.engine.cache.prefix_cache import PrefixCache
from asr_serve.kernels import PAGE

PAGES, MOST = 40, 18
AUDIO = {b"": 0, b"ours": 2, b"theirs": 3}
"""Pages of audio of each root."""
FRAMES = {root: pages * PAGE - 5 * bool(pages) for root, pages in AUDIO.items()}
LETTERS = st.text("abc", max_size=5)
"""A block of tokens each."""
FREED, DIRTY = "freed", "of a row that is under way"


def tokens_of(letters: str) -> list[int]:
    """A block for each, which differ from each other at one token of sixteen."""
    return [token for letter in letters for token in [7] * (PAGE - 4) + [ord(letter)] + [9] * 3]


class Row:
    """Somebody who holds pages: those with the audio of a root and those with what each letter says."""

    def __init__(self, root: bytes, letters: str, audio: list[int], own: list[int]) -> None:
        self.root, self.letters, self.audio, self.own = root, letters, audio, own
        self.own_words = False
        """It wrote something into its pages that is not what the letters say."""


def contents(cache: PrefixCache) -> Iterator[tuple[tuple[bytes, str], list[int]]]:
    """What is there under each prefix, by looking at every node: nothing is used by that."""
    for root, top in cache._roots.items():
        yield (root, ""), list(top.pages)
        waiting = [("", node) for node in top.children.values()]
        while waiting:
            before, node = waiting.pop()
            size = len(node.data) // len(node.pages)
            for at, page in enumerate(node.pages):
                block = memoryview(node.data[at * size : (at + 1) * size]).cast("i").tolist()
                before += chr(block[-4])
                assert block == tokens_of(before[-1])
                yield (root, before), [page]
            waiting += [(before, child) for child in node.children.values()]


class Cache(RuleBasedStateMachine):
    """Rows that come with some audio and some words, take what is there, leave what they know, and go, beside a
    dictionary of all prefixes with the time each was last used."""

    rows = Bundle("rows")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.tree = PrefixCache(self.pool, MOST, self.evicted)
        self.pool.on_free = self.freed
        self.memory: list[object] = [FREED] * PAGES
        self.known: dict[tuple[bytes, str], list[int]] = {}
        self.used: dict[tuple[bytes, str], int] = {}
        self.now = 0
        self.holders: Counter[int] = Counter()
        self.told: list[bytes] = []
        self.expected: list[bytes] = []

    # --- the memory -------------------------------------------------------------------------------------

    def freed(self, pages: Sequence[int]) -> None:
        for page in pages:
            assert self.holders[page] == 0, "a page that somebody holds became free"
            self.memory[page] = FREED

    def evicted(self, root: bytes, audio: list[int], frames: int) -> None:
        assert frames == FRAMES[root]
        assert [self.memory[page] for page in audio] == self.heard(root), "it is told too late"
        self.told.append(root)

    @staticmethod
    def heard(root: bytes) -> list[object]:
        return [(root, "audio", at) for at in range(AUDIO[root])]

    @staticmethod
    def said(root: bytes, letters: str) -> list[object]:
        return [(root, letters[: at + 1]) for at in range(len(letters))]

    def take(self, count: int, contents: Sequence[object]) -> list[int]:
        self.forget_for(count - (PAGES - 1 - self.lent()))
        pages = self.pool.allocate(count)
        assert not any(self.holders[page] for page in pages), "a page that is held was lent again"
        assert all(self.memory[page] == FREED for page in pages)
        self.holders.update(pages)
        for page, content in zip(pages, contents, strict=True):
            self.memory[page] = content
        return pages

    def give(self, pages: Sequence[int]) -> None:
        self.holders.subtract(pages)
        self.pool.free_pages(pages)

    # --- the dictionary ---------------------------------------------------------------------------------

    def kept(self) -> list[int]:
        return [page for pages in self.known.values() for page in pages]

    def lent(self) -> int:
        return len(set(self.kept()) | set(+self.holders))

    def idle(self, pages: Sequence[int]) -> bool:
        return not any(self.holders[page] for page in pages)

    def use(self, root: bytes, letters: str) -> None:
        self.now += 1
        for end in range(len(letters) + 1):
            if (root, letters[:end]) in self.known:
                self.used[root, letters[:end]] = self.now

    def drop(self, root: bytes, letters: str) -> int:
        """That prefix and all that go on from it; how many pages are free for that."""
        gone = [key for key in self.known if key[0] == root and key[1].startswith(letters)]
        if not letters and AUDIO[root]:
            self.expected.append(root)
        free = sum(self.idle([page]) for key in gone for page in self.known[key])
        for key in gone:
            del self.known[key], self.used[key]
        return free

    def ends(self, key: tuple[bytes, str]) -> bool:
        """Nothing goes on from there."""
        return sum(root == key[0] and letters.startswith(key[1]) for root, letters in self.known) == 1

    def oldest(self, candidates: list[tuple[bytes, str]]) -> tuple[bytes, str]:
        return min(candidates, key=lambda key: (self.used[key], -len(key[1])))

    def evict(self, count: int, staying: tuple[bytes, str] | None = None) -> int:
        """The longest unused of what nothing goes on from and nobody else holds, until so many pages are free."""
        free = 0
        while free < count:
            ends = [key for key, pages in self.known.items() if pages and self.idle(pages) and self.ends(key)]
            ends = [key for key in ends if key != staying]
            if not ends:
                break
            free += self.drop(*self.oldest(ends))
        self.without_empty_roots(staying)
        return free

    def without_empty_roots(self, staying: tuple[bytes, str] | None = None) -> None:
        if (b"", "") in self.known and staying != (b"", "") and sum(root == b"" for root, _ in self.known) == 1:
            del self.known[b"", ""], self.used[b"", ""]

    def forget_for(self, count: int) -> int:
        free = self.evict(count)
        while free < count:
            idle = [key for key, pages in self.known.items() if any(self.idle([page]) for page in pages)]
            if not idle:
                break
            free += self.drop(*self.oldest(idle))
        self.without_empty_roots()
        return free

    # --- what happens -----------------------------------------------------------------------------------

    @rule(target=rows, root=st.sampled_from([*AUDIO]), letters=LETTERS, rest=st.integers(0, PAGE - 1))
    def come(self, root: bytes, letters: str, rest: int) -> Row:
        """With what is there, and pages of its own for the rest."""
        longest = max((end for end in range(len(letters) + 1) if (root, letters[:end]) in self.known), default=None)
        found = self.tree.match(root, tokens_of(letters) + [7] * rest)
        audio: list[int] = []
        own: list[int] = []
        if longest is None or (root == b"" and longest == 0):
            assert found is None
        else:
            assert found is not None
            self.use(root, letters)
            audio, own = found.audio_pages, found.token_pages
            assert (found.frames, found.tokens) == (FRAMES[root], longest * PAGE)
            assert audio == self.known[root, ""]
            assert own == [self.known[root, letters[: end + 1]][0] for end in range(longest)]
            assert [self.memory[page] for page in audio] == self.heard(root)
            assert [self.memory[page] for page in own] == self.said(root, letters[:longest])
            self.holders.update(audio + own)
        new = len(letters) - len(own)
        if (AUDIO[root] - len(audio)) + new > self.pool.free_count:
            letters, new = letters[: len(own)], 0
        if AUDIO[root] - len(audio) > self.pool.free_count:
            self.give(audio + own)
            return multiple()
        audio += self.take(AUDIO[root] - len(audio), self.heard(root)[len(audio) :])
        own += self.take(new, self.said(root, letters)[len(own) :])
        return Row(root, letters, audio, own)

    @rule(row=rows, rest=st.integers(0, PAGE - 1))
    def leave_what_it_knows(self, row: Row, rest: int) -> None:
        if row.own_words:
            return
        self.expect_inserted(row)
        before = Counter(self.holders)
        self.tree.insert(row.root, row.audio, FRAMES[row.root], tokens_of(row.letters) + [7] * rest, row.own)
        assert self.holders == before

    def expect_inserted(self, row: Row) -> None:
        root, letters = row.root, row.letters
        if (root, "") not in self.known:
            if len(row.audio) > MOST - sum(self.holders[page] > 0 for page in self.kept()):
                return
            self.evict(len(self.kept()) + len(row.audio) - MOST)
            if len(self.kept()) + len(row.audio) > MOST:
                return
            self.known[root, ""], self.used[root, ""] = list(row.audio), self.now
        longest = max(end for end in range(len(letters) + 1) if (root, letters[:end]) in self.known)
        missing = len(letters) - longest
        self.evict(len(self.kept()) + missing - MOST, staying=(root, letters[:longest]))
        for end in range(longest, min(len(letters), longest + MOST - len(self.kept()))):
            self.known[root, letters[: end + 1]] = [row.own[end]]
        self.use(root, letters)
        self.without_empty_roots()

    @rule(row=rows, letter=st.sampled_from("abc"))
    def go_on(self, row: Row, letter: str) -> None:
        if self.pool.free_count and len(row.letters) < 8 and not row.own_words:
            row.letters += letter
            row.own += self.take(1, self.said(row.root, row.letters)[-1:])

    @rule(row=rows, data=st.data())
    def write(self, row: Row, data: st.DataObject) -> None:
        """Something else into one of its pages, which becomes its own for that."""
        if not row.own:
            return
        at = data.draw(st.integers(0, len(row.own) - 1))
        old = row.own[at]
        shared = self.holders[old] + (old in self.kept()) > 1
        if shared and not self.pool.free_count:
            return
        if shared and self.lent() == PAGES - 1:
            self.forget_for(1)
            shared = self.holders[old] + (old in self.kept()) > 1
        page, copy_from = self.pool.copy_on_write(row.own, at)
        assert copy_from == (old if shared else None)
        assert (page == old) is not shared
        if shared:
            assert self.memory[page] == FREED
            self.holders.update([page])
            self.holders.subtract([old])
        assert self.holders[page] == 1
        assert page not in self.kept()
        row.own[at], row.own_words = page, True
        self.memory[page] = DIRTY

    @rule(row=consumes(rows))
    def go(self, row: Row) -> None:
        self.give(row.audio + row.own)

    @rule(row=rows, left=st.integers(0, 5))
    def give_the_end_back(self, row: Row, left: int) -> None:
        self.give(row.own[left:])
        row.own, row.letters = row.own[:left], row.letters[:left]

    @rule(row=rows, data=st.data())
    def give_anything_back(self, row: Row, data: st.DataObject) -> None:
        """Pages whose successors it keeps; what it has left is no use to the tree."""
        for pages in (row.audio, row.own):
            gone = data.draw(st.sets(st.sampled_from(pages))) if pages else set()
            self.give(sorted(gone))
            pages[:] = [page for page in pages if page not in gone]
            row.own_words = row.own_words or bool(gone)

    @rule(count=st.integers(0, MOST))
    def reclaim(self, count: int) -> None:
        free = self.tree.reclaim(count)
        assert free == self.forget_for(count)
        assert free >= count or self.pool.reclaimable_count == 0

    @rule(target=rows, part=st.floats(0, 1))
    def take_for_something_else(self, part: float) -> Row:
        """Up to all that is called free."""
        count = int(self.pool.free_count * part + 0.5)
        row = Row(b"", "", [], self.take(count, [DIRTY] * count))
        row.own_words = True
        return row

    @rule(chance=st.integers(0, 9))
    def clear(self, chance: int) -> None:
        if chance == 0:
            self.tree.clear()
            self.known.clear()
            self.used.clear()

    # --- what always holds ------------------------------------------------------------------------------

    @invariant()
    def it_is_what_the_dictionary_is(self) -> None:
        assert dict(contents(self.tree)) == self.known
        assert self.told == self.expected
        assert [root for root in AUDIO if root in self.tree] == [root for root in AUDIO if (root, "") in self.known]

    @invariant()
    def every_reference_is_somebodys(self) -> None:
        kept = Counter(self.kept())
        assert max(kept.values(), default=1) == 1
        assert self.pool._references == [self.holders[page] + kept[page] for page in range(PAGES)]
        assert self.pool.cached_count == self.tree.pages == len(kept) <= MOST
        assert self.pool.used_count == len(+self.holders)
        assert self.pool.free_count == PAGES - 1 - len(+self.holders)
        assert self.pool.reclaimable_count == sum(self.holders[page] == 0 for page in kept)

    @invariant()
    def what_is_there_is_what_was_written(self) -> None:
        for (root, letters), pages in self.known.items():
            wanted = self.said(root, letters)[-1:] if letters else self.heard(root)
            assert [self.memory[page] for page in pages] == wanted

    @invariant()
    def it_checks_itself(self) -> None:
        self.pool.check()
        self.tree.check()


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


# --- one by one -----------------------------------------------------------------------------------------


def make_cache(most: int = 30, pages: int = 64) -> tuple[PagePool, PrefixCache, list[bytes]]:
    """And the roots whose audio it gave up."""
    evicted: list[bytes] = []
    pool = PagePool(pages)
    return pool, PrefixCache(pool, most, lambda root, audio, frames: evicted.append(root)), evicted


def insert_pages(pool: PagePool, cache: PrefixCache, root: bytes, letters: str = "", audio: int = 2) -> list[int]:
    """Somebody comes, leaves that and goes; the pages, those of the audio first."""
    pages = pool.allocate(audio * bool(root) + len(letters))
    heard = audio * bool(root)
    cache.insert(root, pages[:heard], heard * PAGE, tokens_of(letters), pages[heard:])
    pool.free_pages(pages)
    cache.check()
    pool.check()
    return pages


def count_found(pool: PagePool, cache: PrefixCache, root: bytes, letters: str = "") -> tuple[int, int]:
    """How many pages of audio and of tokens are found."""
    found = cache.match(root, tokens_of(letters))
    if found is None:
        return 0, 0
    pool.free_pages(found.audio_pages + found.token_pages)
    return len(found.audio_pages), len(found.token_pages)


def test_tokens_are_found_under_their_own_audio_only():
    pool, cache, _ = make_cache()
    insert_pages(pool, cache, b"ours", "abc")
    insert_pages(pool, cache, b"theirs", "b")
    assert count_found(pool, cache, b"theirs", "abc") == (2, 0)
    assert count_found(pool, cache, b"nobody's", "abc") == (0, 0)
    assert cache.match(b"") is None


def test_only_whole_blocks_are_cached():
    pool, cache, _ = make_cache()
    audio, own = pool.allocate(1), pool.allocate(2)
    tokens = list(range(2 * PAGE - 1))
    cache.insert(b"ours", audio, PAGE, tokens, own)
    assert cache.pages == 2
    found = cache.match(b"ours", tokens)
    assert found == (PAGE, audio, PAGE, own[:1])
    assert cache.match(b"ours", tokens[: PAGE - 1]) == (PAGE, audio, 0, [])


def test_every_token_of_a_block_counts():
    pool, cache, _ = make_cache()
    pages = pool.allocate(3)
    cache.insert(b"", [], 0, [1] * 3 * PAGE, pages)
    for at in range(3 * PAGE):
        other = [1] * at + [2] + [1] * (3 * PAGE - at - 1)
        found = cache.match(b"", other)
        assert (found.token_pages if found else []) == pages[: at // PAGE]
    cache.check()


def test_duplicate_pages_stay_with_the_caller():
    pool, cache, _ = make_cache()
    first = insert_pages(pool, cache, b"ours", "ab")
    pages = pool.allocate(5)
    cache.insert(b"ours", pages[:2], 2 * PAGE, tokens_of("abc"), pages[2:])
    assert cache.match(b"ours", tokens_of("abc")) == (2 * PAGE, first[:2], 3 * PAGE, [*first[2:], pages[4]])
    assert pool.free_pages(pages) == pages[:4]


def test_a_second_answer_shares_the_prefix_of_the_first():
    """As temperature fall-back does: the prompt is the same, and so is some of the answer."""
    pool, cache, _ = make_cache()
    first, second = insert_pages(pool, cache, b"ours", "aabb"), insert_pages(pool, cache, b"ours", "aacc")
    assert cache.pages == len(first) + 2
    assert cache.match(b"ours", tokens_of("aacc")) == (2 * PAGE, first[:2], 4 * PAGE, [*first[2:4], *second[4:]])


def test_eviction_is_least_recently_used_and_audio_goes_after_its_tokens():
    pool, cache, evicted = make_cache()
    for root in (b"1", b"2", b"3"):
        insert_pages(pool, cache, root, "ab")
    count_found(pool, cache, b"1", "a")
    assert cache.reclaim(1) == 1
    assert (count_found(pool, cache, b"1", "ab"), evicted) == ((2, 1), [])  # b of 1 was not asked for again
    assert cache.reclaim(2) == 2
    assert (count_found(pool, cache, b"2", "ab"), evicted) == ((2, 0), [])
    assert cache.reclaim(4) == 4  # all of 3, since the others were asked for just now
    assert evicted == [b"3"]
    assert cache.reclaim(2) == 3  # audio goes whole
    assert (evicted, count_found(pool, cache, b"2")) == ([b"3", b"1"], (2, 0))


def test_held_pages_are_not_evicted():
    pool, cache, evicted = make_cache()
    insert_pages(pool, cache, b"1", "abc")
    insert_pages(pool, cache, b"2", "a")
    held = cache.match(b"1", tokens_of("ab"))
    assert held is not None
    assert cache.reclaim(60) == 4
    assert evicted == [b"2"]
    assert count_found(pool, cache, b"1", "abc") == (2, 2)
    pool.free_pages(held.audio_pages + held.token_pages)
    assert cache.reclaim(60) == 4
    assert (evicted, len(cache), cache.pages) == ([b"2", b"1"], 0, 0)


def test_everything_counted_as_free_can_be_allocated():
    pool, cache, _ = make_cache(most=60)
    for root in range(12):
        insert_pages(pool, cache, b"%d" % root, "abc")
    assert (pool.free_count, pool.used_count, pool.cached_count, len(cache)) == (63, 0, 60, 12)
    pages = pool.allocate(40)
    assert (pool.free_count, pool.used_count) == (23, 40)
    cache.check()
    pool.allocate(23)
    assert (pool.free_count, pool.cached_count, len(cache)) == (0, 0, 0)
    pool.free_pages(pages)
    pool.check()


def test_pages_above_a_foreign_held_page_are_reclaimable():
    """Two begin at once with the same; the second one's pages are its own, but what it says further is new."""
    pool, cache, evicted = make_cache()
    insert_pages(pool, cache, b"1", "ab")
    pages = pool.allocate(5)
    cache.insert(b"1", pages[:2], 2 * PAGE, tokens_of("abc"), pages[2:])
    assert (pool.reclaimable_count, pool.cached_count) == (4, 5)
    taken = pool.allocate(pool.free_count)
    assert (evicted, cache.pages, pool.free_count) == ([b"1"], 0, 0)
    assert not set(taken) & set(pages)
    assert pool.free_pages(pages) == pages
    cache.check()
    pool.check()


def test_idle_pages_of_a_partly_held_prefix_are_evicted_last():
    """What is idle counts as free, and is given up once nothing else is left to give up."""
    pool, cache, evicted = make_cache()
    first = insert_pages(pool, cache, b"1", "abc")
    insert_pages(pool, cache, b"2")
    pool.share([first[1], first[4]])  # a page of audio, and the last block
    assert (cache.reclaim(1), evicted) == (2, [b"2"])
    assert (cache.reclaim(1), evicted) == (1, [b"2"])
    assert count_found(pool, cache, b"1", "abc") == (2, 1)
    assert (cache.reclaim(1), evicted) == (1, [b"2"])
    assert count_found(pool, cache, b"1", "abc") == (2, 0)
    assert (cache.reclaim(1), evicted, len(cache)) == (1, [b"2", b"1"], 0)
    assert pool.free_pages([first[1], first[4]]) == [first[1], first[4]]
    pool.check()


def test_partly_held_audio_is_evicted_after_idle_audio():
    pool, cache, evicted = make_cache()
    first = insert_pages(pool, cache, b"1")
    insert_pages(pool, cache, b"2")
    pool.share(first[:1])
    assert (cache.reclaim(1), evicted) == (2, [b"2"])
    assert (cache.reclaim(1), evicted) == (1, [b"2", b"1"])
    assert pool.free_pages(first[:1]) == first[:1]


def test_a_named_root_without_audio():
    """Of a model whose decoder is fed frames in the place of tokens."""
    pool, cache, evicted = make_cache()
    insert_pages(pool, cache, b"1", "ab", audio=0)
    insert_pages(pool, cache, b"2", "a", audio=0)
    assert (count_found(pool, cache, b"1", "ab"), count_found(pool, cache, b"2", "ab")) == ((0, 2), (0, 1))
    assert (cache.reclaim(9), len(cache), evicted) == (3, 0, [])


def test_evicting_the_page_to_copy_makes_the_copy_needless():
    pool, cache, _ = make_cache(pages=8)
    insert_pages(pool, cache, b"", "a")
    pages = pool.allocate(2)
    cache.insert(b"", [], 0, tokens_of("ab"), pages)  # its own a is a duplicate; of b it is one of two holders
    pool.allocate(pool.free_count - 1)
    assert (pool.free_count, pool.reclaimable_count) == (1, 1)
    assert pool.copy_on_write(pages, 1) == (pages[1], None)
    assert (pool.free_count, len(cache)) == (1, 0)
    pool.free_pages(pages)
    pool.check()


def test_a_cached_page_is_copied_on_write():
    pool, cache, _ = make_cache()
    (page,) = insert_pages(pool, cache, b"", "a")
    held = cache.match(b"", tokens_of("a"))
    assert held is not None
    fresh, copy_from = pool.copy_on_write(held.token_pages, 0)
    assert (fresh != page, copy_from) == (True, page)
    assert count_found(pool, cache, b"", "a") == (0, 1)
    assert pool.free_pages([fresh]) == [fresh]
    with pytest.raises(AssertionError, match="not the caller's"):
        pool.copy_on_write([page], 0)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.free_pages([page])
    pool.check()


def test_the_size_limit_never_evicts_what_is_being_inserted():
    pool, cache, evicted = make_cache(most=7)
    insert_pages(pool, cache, b"1", "ab")
    insert_pages(pool, cache, b"1", "abc")
    assert count_found(pool, cache, b"1", "abc") == (2, 3)
    insert_pages(pool, cache, b"1", "abcdef")  # there is room for two more, and nothing else to give up
    assert count_found(pool, cache, b"1", "abcdef") == (2, 5)
    insert_pages(pool, cache, b"1", "abx")  # c, d and e are the oldest, and one is enough
    assert count_found(pool, cache, b"1", "abx") == (2, 3)
    assert count_found(pool, cache, b"1", "abcdef") == (2, 4)
    insert_pages(pool, cache, b"2", "a")
    assert (evicted, count_found(pool, cache, b"2", "a"), cache.pages) == ([], (2, 1), 7)
    insert_pages(pool, cache, b"3", "abcdefgh", audio=8)  # its audio alone is too much
    assert (b"3" in cache, cache.pages) == (False, 7)  # and nothing is given up for it


def test_insert_takes_what_fits_when_all_pages_are_held():
    pool, cache, evicted = make_cache(most=4)
    pages = pool.allocate(8)
    cache.insert(b"1", pages[:2], 2 * PAGE, tokens_of("a"), pages[2:3])
    cache.insert(b"2", pages[3:5], 2 * PAGE)
    assert b"2" not in cache
    cache.insert(b"1", pages[:2], 2 * PAGE, tokens_of("bcd"), pages[5:])
    assert count_found(pool, cache, b"1", "bcd") == (2, 1)
    assert count_found(pool, cache, b"1", "a") == (2, 1)
    assert evicted == []


def test_a_cache_of_size_0():
    pool, cache, evicted = make_cache(most=0)
    insert_pages(pool, cache, b"1", "ab")
    insert_pages(pool, cache, b"", "ab")
    assert (len(cache), pool.cached_count, evicted, pool.free_count) == (0, 0, [], 63)


def test_the_root_of_bare_tokens_goes_with_the_last_of_them():
    pool, cache, evicted = make_cache()
    insert_pages(pool, cache, b"", "ab")
    assert (count_found(pool, cache, b"", "abc"), count_found(pool, cache, b"", "b")) == ((0, 2), (0, 0))
    assert b"" in cache
    assert cache.reclaim(1) == 1
    assert b"" in cache
    assert cache.reclaim(5) == 1
    assert (b"" in cache, evicted) == (False, [])
    insert_pages(pool, cache, b"", "c")
    assert count_found(pool, cache, b"", "c") == (0, 1)


def test_bare_tokens_make_room_for_others():
    """Their root is empty for a moment, and must not go for that."""
    pool, cache, _ = make_cache(most=2)
    insert_pages(pool, cache, b"", "aa")
    insert_pages(pool, cache, b"", "bb")
    assert (count_found(pool, cache, b"", "bb"), count_found(pool, cache, b"", "a"), cache.pages) == ((0, 2), (0, 0), 2)


def test_audio_first_without_tokens_and_then_with():
    pool, cache, _ = make_cache()
    first = insert_pages(pool, cache, b"1")
    second = insert_pages(pool, cache, b"1", "a")
    assert cache.match(b"1", tokens_of("a")) == (2 * PAGE, first, PAGE, second[2:])


def test_clear_leaves_held_pages_to_their_holder():
    pool, cache, evicted = make_cache()
    insert_pages(pool, cache, b"", "ab")
    insert_pages(pool, cache, b"1", "ab")
    held = cache.match(b"1", tokens_of("a"))
    assert held is not None
    cache.clear()
    assert (len(cache), pool.cached_count, pool.used_count, evicted) == (0, 0, 3, [])
    assert pool.free_pages(held.audio_pages + held.token_pages) == held.audio_pages + held.token_pages
    cache.check()
    pool.check()


def test_a_failed_eviction_callback_leaves_the_audio():
    pool = PagePool(16)

    def full(root: bytes, audio: list[int], frames: int) -> None:
        raise OSError("no room")

    cache = PrefixCache(pool, 8, full)
    insert_pages(pool, cache, b"1", "a")
    with pytest.raises(OSError, match="no room"):
        cache.reclaim(3)
    assert count_found(pool, cache, b"1", "a") == (2, 0)
    cache.check()
    pool.check()
    pages = pool.allocate(7)
    with pytest.raises(OSError, match="no room"):
        cache.insert(b"", [], 0, tokens_of("abcdefg"), pages)
    assert (pool.free_pages(pages), b"" in cache) == (pages, False)
    cache.check()
    pool.check()


def test_the_eviction_callback_may_not_use_the_cache():
    pool = PagePool(16)
    cache = PrefixCache(pool, 8, lambda root, audio, frames: pool.free_pages([*cache.match(root).audio_pages]))
    insert_pages(pool, cache, b"1")
    with pytest.raises(AssertionError, match="giving something up"):
        cache.reclaim(1)
    assert count_found(pool, cache, b"1") == (2, 0)


@pytest.mark.parametrize(
    ("root", "audio", "frames", "own"),
    [(b"", 1, 16, 1), (b"1", 1, 16, 1), (b"1", 2, 31, 1), (b"1", 2, 32, 0)],
    ids=["audio without a name", "other audio", "other frames", "too few pages"],
)
def test_inconsistent_inserts_raise(root, audio, frames, own):
    pool, cache, _ = make_cache()
    insert_pages(pool, cache, b"1")
    with pytest.raises(AssertionError):
        cache.insert(root, pool.allocate(audio), frames, tokens_of("a"), pool.allocate(own))
    cache.check()


def test_a_pool_has_one_cache():
    pool, _, _ = make_cache()
    with pytest.raises(AssertionError, match="one cache"):
        PrefixCache(pool, 4)
