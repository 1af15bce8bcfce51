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
from asr_serve.engine.cache.prefix import PrefixCache
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


def contents(tree: PrefixCache) -> Iterator[tuple[tuple[bytes, str], list[int]]]:
    """What is there under each prefix, by looking at every node: nothing is used by that."""
    for root, top in tree._roots.items():
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
        longest = max(
            (end for end in range(len(letters) + 1) if (root, letters[:end]) in self.known), default=None
        )
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
        assert [root for root in AUDIO if root in self.tree] == [
            root for root in AUDIO if (root, "") in self.known
        ]

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


def a_tree(most: int = 30, pages: int = 64) -> tuple[PagePool, PrefixCache, list[bytes]]:
    """And the roots whose audio it gave up."""
    told: list[bytes] = []
    pool = PagePool(pages)
    return pool, PrefixCache(pool, most, lambda root, audio, frames: told.append(root)), told


def leave(pool: PagePool, tree: PrefixCache, root: bytes, letters: str = "", audio: int = 2) -> list[int]:
    """Somebody comes, leaves that and goes; the pages, those of the audio first."""
    pages = pool.allocate(audio * bool(root) + len(letters))
    heard = audio * bool(root)
    tree.insert(root, pages[:heard], heard * PAGE, tokens_of(letters), pages[heard:])
    pool.free_pages(pages)
    tree.check()
    pool.check()
    return pages


def there(pool: PagePool, tree: PrefixCache, root: bytes, letters: str = "") -> tuple[int, int]:
    """How many pages of audio and of tokens are found."""
    found = tree.match(root, tokens_of(letters))
    if found is None:
        return 0, 0
    pool.free_pages(found.audio_pages + found.token_pages)
    return len(found.audio_pages), len(found.token_pages)


def test_the_same_words_after_other_audio_are_not_found():
    pool, tree, _ = a_tree()
    leave(pool, tree, b"ours", "abc")
    leave(pool, tree, b"theirs", "b")
    assert there(pool, tree, b"theirs", "abc") == (2, 0)
    assert there(pool, tree, b"nobody's", "abc") == (0, 0)
    assert tree.match(b"") is None


def test_only_whole_blocks_are_kept_and_found():
    pool, tree, _ = a_tree()
    audio, own = pool.allocate(1), pool.allocate(2)
    tokens = list(range(2 * PAGE - 1))
    tree.insert(b"ours", audio, PAGE, tokens, own)
    assert tree.pages == 2
    found = tree.match(b"ours", tokens)
    assert found == (PAGE, audio, PAGE, own[:1])
    assert tree.match(b"ours", tokens[: PAGE - 1]) == (PAGE, audio, 0, [])


def test_one_token_of_a_block_decides():
    pool, tree, _ = a_tree()
    pages = pool.allocate(3)
    tree.insert(b"", [], 0, [1] * 3 * PAGE, pages)
    for at in range(3 * PAGE):
        other = [1] * at + [2] + [1] * (3 * PAGE - at - 1)
        found = tree.match(b"", other)
        assert (found.token_pages if found else []) == pages[: at // PAGE]
    tree.check()


def test_what_is_there_already_is_taken_once_and_duplicates_stay_with_the_caller():
    pool, tree, _ = a_tree()
    first = leave(pool, tree, b"ours", "ab")
    pages = pool.allocate(5)
    tree.insert(b"ours", pages[:2], 2 * PAGE, tokens_of("abc"), pages[2:])
    assert tree.match(b"ours", tokens_of("abc")) == (2 * PAGE, first[:2], 3 * PAGE, [*first[2:], pages[4]])
    assert pool.free_pages(pages) == pages[:4]


def test_another_try_shares_what_the_first_began_with():
    """As temperature fall-back does: the prompt is the same, and so is some of the answer."""
    pool, tree, _ = a_tree()
    first, second = leave(pool, tree, b"ours", "aabb"), leave(pool, tree, b"ours", "aacc")
    assert tree.pages == len(first) + 2
    assert tree.match(b"ours", tokens_of("aacc")) == (2 * PAGE, first[:2], 4 * PAGE, [*first[2:4], *second[4:]])


def test_the_oldest_goes_first_whatever_root_it_is_of_and_audio_after_its_words():
    pool, tree, told = a_tree()
    for root in (b"1", b"2", b"3"):
        leave(pool, tree, root, "ab")
    there(pool, tree, b"1", "a")
    assert tree.reclaim(1) == 1
    assert (there(pool, tree, b"1", "ab"), told) == ((2, 1), [])  # b of 1 was not asked for again
    assert tree.reclaim(2) == 2
    assert (there(pool, tree, b"2", "ab"), told) == ((2, 0), [])
    assert tree.reclaim(4) == 4  # all of 3, since the others were asked for just now
    assert told == [b"3"]
    assert tree.reclaim(2) == 3  # audio goes whole
    assert (told, there(pool, tree, b"2")) == ([b"3", b"1"], (2, 0))


def test_what_somebody_holds_stays():
    pool, tree, told = a_tree()
    leave(pool, tree, b"1", "abc")
    leave(pool, tree, b"2", "a")
    held = tree.match(b"1", tokens_of("ab"))
    assert held is not None
    assert tree.reclaim(60) == 4
    assert told == [b"2"]
    assert there(pool, tree, b"1", "abc") == (2, 2)
    pool.free_pages(held.audio_pages + held.token_pages)
    assert tree.reclaim(60) == 4
    assert (told, len(tree), tree.pages) == ([b"2", b"1"], 0, 0)


def test_all_that_is_called_free_can_be_taken():
    pool, tree, _ = a_tree(most=60)
    for root in range(12):
        leave(pool, tree, b"%d" % root, "abc")
    assert (pool.free_count, pool.used_count, pool.cached_count, len(tree)) == (63, 0, 60, 12)
    pages = pool.allocate(40)
    assert (pool.free_count, pool.used_count) == (23, 40)
    tree.check()
    pool.allocate(23)
    assert (pool.free_count, pool.cached_count, len(tree)) == (0, 0, 0)
    pool.free_pages(pages)
    pool.check()


def test_what_is_above_a_page_that_somebody_else_holds_can_be_taken_too():
    """Two begin at once with the same; the second one's pages are its own, but what it says further is new."""
    pool, tree, told = a_tree()
    leave(pool, tree, b"1", "ab")
    pages = pool.allocate(5)
    tree.insert(b"1", pages[:2], 2 * PAGE, tokens_of("abc"), pages[2:])
    assert (pool.reclaimable_count, pool.cached_count) == (4, 5)
    taken = pool.allocate(pool.free_count)
    assert (told, tree.pages, pool.free_count) == ([b"1"], 0, 0)
    assert not set(taken) & set(pages)
    assert pool.free_pages(pages) == pages
    tree.check()
    pool.check()


def test_who_holds_a_part_only_gets_no_more_for_it():
    """What is idle counts as free, and is given up once nothing else is left to give up."""
    pool, tree, told = a_tree()
    first = leave(pool, tree, b"1", "abc")
    leave(pool, tree, b"2")
    pool.share([first[1], first[4]])  # a page of audio, and the last block
    assert (tree.reclaim(1), told) == (2, [b"2"])
    assert (tree.reclaim(1), told) == (1, [b"2"])
    assert there(pool, tree, b"1", "abc") == (2, 1)
    assert (tree.reclaim(1), told) == (1, [b"2"])
    assert there(pool, tree, b"1", "abc") == (2, 0)
    assert (tree.reclaim(1), told, len(tree)) == (1, [b"2", b"1"], 0)
    assert pool.free_pages([first[1], first[4]]) == [first[1], first[4]]
    pool.check()


def test_audio_of_which_somebody_holds_a_part_goes_after_what_nobody_holds():
    pool, tree, told = a_tree()
    first = leave(pool, tree, b"1")
    leave(pool, tree, b"2")
    pool.share(first[:1])
    assert (tree.reclaim(1), told) == (2, [b"2"])
    assert (tree.reclaim(1), told) == (1, [b"2", b"1"])
    assert pool.free_pages(first[:1]) == first[:1]


def test_a_root_with_a_name_may_have_no_audio():
    """Of a model whose decoder is fed frames in the place of tokens."""
    pool, tree, told = a_tree()
    leave(pool, tree, b"1", "ab", audio=0)
    leave(pool, tree, b"2", "a", audio=0)
    assert (there(pool, tree, b"1", "ab"), there(pool, tree, b"2", "ab")) == ((0, 2), (0, 1))
    assert (tree.reclaim(9), len(tree), told) == (3, 0, [])


def test_a_page_that_the_tree_forgets_to_make_room_for_its_copy_needs_none():
    pool, tree, _ = a_tree(pages=8)
    leave(pool, tree, b"", "a")
    pages = pool.allocate(2)
    tree.insert(b"", [], 0, tokens_of("ab"), pages)  # its own a is a duplicate; of b it is one of two holders
    pool.allocate(pool.free_count - 1)
    assert (pool.free_count, pool.reclaimable_count) == (1, 1)
    assert pool.copy_on_write(pages, 1) == (pages[1], None)
    assert (pool.free_count, len(tree)) == (1, 0)
    pool.free_pages(pages)
    pool.check()


def test_a_page_of_the_tree_is_copied_before_it_is_written():
    pool, tree, _ = a_tree()
    (page,) = leave(pool, tree, b"", "a")
    held = tree.match(b"", tokens_of("a"))
    assert held is not None
    fresh, copy_from = pool.copy_on_write(held.token_pages, 0)
    assert (fresh != page, copy_from) == (True, page)
    assert there(pool, tree, b"", "a") == (0, 1)
    assert pool.free_pages([fresh]) == [fresh]
    with pytest.raises(AssertionError, match="not the caller's"):
        pool.copy_on_write([page], 0)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.free_pages([page])
    pool.check()


def test_it_holds_no_more_than_it_may_and_never_gives_up_what_it_takes():
    pool, tree, told = a_tree(most=7)
    leave(pool, tree, b"1", "ab")
    leave(pool, tree, b"1", "abc")
    assert there(pool, tree, b"1", "abc") == (2, 3)
    leave(pool, tree, b"1", "abcdef")  # there is room for two more, and nothing else to give up
    assert there(pool, tree, b"1", "abcdef") == (2, 5)
    leave(pool, tree, b"1", "abx")  # c, d and e are the oldest, and one is enough
    assert there(pool, tree, b"1", "abx") == (2, 3)
    assert there(pool, tree, b"1", "abcdef") == (2, 4)
    leave(pool, tree, b"2", "a")
    assert (told, there(pool, tree, b"2", "a"), tree.pages) == ([], (2, 1), 7)
    leave(pool, tree, b"3", "abcdefgh", audio=8)  # its audio alone is too much
    assert (b"3" in tree, tree.pages) == (False, 7)  # and nothing is given up for it


def test_it_takes_what_there_is_room_for_while_others_hold_all_it_has():
    pool, tree, told = a_tree(most=4)
    pages = pool.allocate(8)
    tree.insert(b"1", pages[:2], 2 * PAGE, tokens_of("a"), pages[2:3])
    tree.insert(b"2", pages[3:5], 2 * PAGE)
    assert b"2" not in tree
    tree.insert(b"1", pages[:2], 2 * PAGE, tokens_of("bcd"), pages[5:])
    assert there(pool, tree, b"1", "bcd") == (2, 1)
    assert there(pool, tree, b"1", "a") == (2, 1)
    assert told == []


def test_without_room_nothing_is_kept():
    pool, tree, told = a_tree(most=0)
    leave(pool, tree, b"1", "ab")
    leave(pool, tree, b"", "ab")
    assert (len(tree), pool.cached_count, told, pool.free_count) == (0, 0, [], 63)


def test_tokens_alone_have_one_root_which_goes_with_the_last_of_them():
    pool, tree, told = a_tree()
    leave(pool, tree, b"", "ab")
    assert (there(pool, tree, b"", "abc"), there(pool, tree, b"", "b")) == ((0, 2), (0, 0))
    assert b"" in tree
    assert tree.reclaim(1) == 1
    assert b"" in tree
    assert tree.reclaim(5) == 1
    assert (b"" in tree, told) == (False, [])
    leave(pool, tree, b"", "c")
    assert there(pool, tree, b"", "c") == (0, 1)


def test_the_last_words_without_audio_make_room_for_others():
    """Their root is empty for a moment, and must not go for that."""
    pool, tree, _ = a_tree(most=2)
    leave(pool, tree, b"", "aa")
    leave(pool, tree, b"", "bb")
    assert (there(pool, tree, b"", "bb"), there(pool, tree, b"", "a"), tree.pages) == ((0, 2), (0, 0), 2)


def test_audio_without_words_and_then_with():
    pool, tree, _ = a_tree()
    first = leave(pool, tree, b"1")
    second = leave(pool, tree, b"1", "a")
    assert tree.match(b"1", tokens_of("a")) == (2 * PAGE, first, PAGE, second[2:])


def test_clear_forgets_all_and_what_is_held_stays_with_its_holder():
    pool, tree, told = a_tree()
    leave(pool, tree, b"", "ab")
    leave(pool, tree, b"1", "ab")
    held = tree.match(b"1", tokens_of("a"))
    assert held is not None
    tree.clear()
    assert (len(tree), pool.cached_count, pool.used_count, told) == (0, 0, 3, [])
    assert pool.free_pages(held.audio_pages + held.token_pages) == held.audio_pages + held.token_pages
    tree.check()
    pool.check()


def test_where_telling_fails_the_audio_is_there_still():
    pool = PagePool(16)

    def full(root: bytes, audio: list[int], frames: int) -> None:
        raise OSError("no room")

    tree = PrefixCache(pool, 8, full)
    leave(pool, tree, b"1", "a")
    with pytest.raises(OSError, match="no room"):
        tree.reclaim(3)
    assert there(pool, tree, b"1", "a") == (2, 0)
    tree.check()
    pool.check()
    pages = pool.allocate(7)
    with pytest.raises(OSError, match="no room"):
        tree.insert(b"", [], 0, tokens_of("abcdefg"), pages)
    assert (pool.free_pages(pages), b"" in tree) == (pages, False)
    tree.check()
    pool.check()


def test_who_is_told_may_not_ask_the_tree():
    pool = PagePool(16)
    tree = PrefixCache(pool, 8, lambda root, audio, frames: pool.free_pages([*tree.match(root).audio_pages]))
    leave(pool, tree, b"1")
    with pytest.raises(AssertionError, match="giving something up"):
        tree.reclaim(1)
    assert there(pool, tree, b"1") == (2, 0)


@pytest.mark.parametrize(
    ("root", "audio", "frames", "own"),
    [(b"", 1, 16, 1), (b"1", 1, 16, 1), (b"1", 2, 31, 1), (b"1", 2, 32, 0)],
    ids=["audio without a name", "other audio", "other frames", "too few pages"],
)
def test_what_cannot_be_is_a_bug_that_shouts(root, audio, frames, own):
    pool, tree, _ = a_tree()
    leave(pool, tree, b"1")
    with pytest.raises(AssertionError):
        tree.insert(root, pool.allocate(audio), frames, tokens_of("a"), pool.allocate(own))
    tree.check()


def test_a_pool_has_one_cache():
    pool, _, _ = a_tree()
    with pytest.raises(AssertionError, match="one cache"):
        PrefixCache(pool, 4)
