"""Hotwords as a graph: against a list that is searched word by word; how they are written; what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asr_serve.decoding import biasing_graph as biasing
from asr_serve.decoding.beam_search import BeamSearch
from asr_serve.decoding.biasing_graph import (
    MOST_CHARACTERS,
    OPEN,
    WITHIN,
    BiasingGraph,
    BiasingPhrase,
    TokenizedPhrase,
    pack_phrases,
    parse_phrase,
    token_bonus,
    tokenize_phrases,
    unpack_phrases,
    written_forms,
)
from asr_serve.decoding.phonetic_index import PhoneticIndex
from asr_serve.engine.seq2seq.biasing_queue import RescoringList
from asr_serve.errors import OptionError


class Clock:
    """Every look at it takes a fifth of a millisecond."""

    def __init__(self) -> None:
        self.now_s, self.rested_s = 0.0, 0.0

    def perf_counter(self) -> float:
        self.now_s += 0.000_2
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.rested_s += seconds


def test_a_long_list_is_made_with_rests(monkeypatch: pytest.MonkeyPatch):
    """Half of the time others have the interpreter to themselves, in every part of the work."""
    for count, work in (
        (2_000, lambda words: RescoringList.build(pack_phrases(words), lambda text: [*map(ord, text)], str, False)),
        (2_000, lambda words: RescoringList.build(pack_phrases(words), lambda text: [*map(ord, text)], str, True)),
        (2_000, lambda words: PhoneticIndex([word.text for word in words])),
        (2_000, lambda words: BiasingGraph(tokenize_phrases(words, lambda text: [*map(ord, text)]))),
    ):
        monkeypatch.setattr(biasing, "time", clock := Clock())
        work([BiasingPhrase(f"word{number}") for number in range(count)])
        assert clock.rested_s > 0.4 * clock.now_s
        monkeypatch.setattr(biasing, "time", clock := Clock())
        assert list(biasing.yield_between(range(2))) == [0, 1]
        assert clock.rested_s == 0, "a short one does not wait"


phrases = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
lists = st.dictionaries(phrases, st.sampled_from((0.5, 1.0, 2.0)), min_size=1, max_size=6)


def begun(words: dict[tuple[int, ...], float], text: tuple[int, ...]) -> tuple[int, ...]:
    """The longest end of a text that begins a word."""
    ends = (text[at:] for at in range(len(text) + 1))
    return next(end for end in ends if any(word[: len(end)] == end for word in words))


def paid(words: dict[tuple[int, ...], float], part: tuple[int, ...]) -> int:
    """Tokens of the longest word that it begins with, and is longer than."""
    return max((len(word) for word in words if len(word) < len(part) and part[: len(word)] == word), default=0)


def kept(words: dict[tuple[int, ...], float], part: tuple[int, ...]) -> float:
    """Of the longest end of it that is a word."""
    for at in range(len(part)):
        if (end := part[at:]) in words:
            return words[end] * (len(end) - paid(words, end))
    return 0.0


def hoped(words: dict[tuple[int, ...], float], part: tuple[int, ...]) -> float:
    if not part or part in words:
        return 0.0
    weight = max(weight for word, weight in words.items() if word[: len(part)] == part)
    return weight * (len(part) - paid(words, part))


@given(lists, st.lists(st.integers(0, 3), max_size=12))
def test_a_text_is_worth_what_it_says_of_the_list(words, text):
    graph = BiasingGraph(TokenizedPhrase(word, weight) for word, weight in words.items())
    node, total, plain = WITHIN, 0.0, 0.0
    for at, token in enumerate(text, start=1):
        node, gain = graph.step(node, token)
        total += gain
        part = begun(words, tuple(text[:at]))
        plain += kept(words, part)
        assert total == pytest.approx(plain + hoped(words, part))
    assert total + graph.final_cost(node) == pytest.approx(plain)


def test_a_part_that_comes_to_nothing_is_worth_nothing():
    graph = BiasingGraph([TokenizedPhrase((1, 2, 3)), TokenizedPhrase((1, 2), 2.0)])
    gains, node = [], WITHIN
    for token in (1, 2, 9, 1, 9):
        node, gain = graph.step(node, token)
        gains.append(gain)
    assert gains == [2.0, 2.0, 0.0, 2.0, -2.0]


def test_without_its_space_a_word_begins_where_nothing_else_is_said():
    graph = BiasingGraph([TokenizedPhrase((5, 6), inside=True)], lambda token: token == 0)
    assert graph.step(graph.walk([7]), 5)[1] == 0
    assert graph.step(graph.walk([7, 0]), 5)[1] == graph.step(OPEN, 5)[1] == 1


def test_every_spelling_is_matched():
    assert written_forms("quilter") == ["quilter", "Quilter"]
    assert written_forms("QUILTER") == ["QUILTER", "Quilter", "quilter"]
    assert written_forms("Quilter") == ["Quilter"]
    assert written_forms("NATO") == ["NATO", "Nato", "nato"]
    assert written_forms("AMI") == ["AMI"]
    forms = tokenize_phrases([BiasingPhrase("ada", 2.0)], lambda text: [ord(c) for c in text])
    said = {("".join(map(chr, each.tokens)), each.weight, each.inside) for each in forms}
    worth = token_bonus(2.0)
    assert token_bonus(0.1) < token_bonus(1.0) == 1 < worth < 2
    assert said == {(" ada", worth, False), ("ada", worth, True), (" Ada", worth, False), ("Ada", worth, True)}


@pytest.mark.parametrize(
    ("given", "text", "weight"),
    [
        ("Ada", "Ada", 1.0),
        (" Ada  Lovelace : 2.5", "Ada Lovelace", 2.5),
        ("Re: Zero", "Re: Zero", 1.0),
        ("16:9:1", "16:9", 1.0),
        ("Re:Zero:1", "Re:Zero", 1.0),
        ("Boeing 747", "Boeing 747", 1.0),
        ("O'Brien:0.1", "O'Brien", 0.1),
    ],
)
def test_parsing_of_words_and_weights(given, text, weight):
    assert parse_phrase(given) == BiasingPhrase(text, weight)
    assert unpack_phrases(pack_phrases([parse_phrase(given)] * 2)) == [BiasingPhrase(text, weight)] * 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "a word with a letter"),
        (" \t", "a word with a letter"),
        (":2", "a word with a letter"),
        ("...", "a word with a letter"),
        ("Ada\udfff", "a word with a letter"),
        ("x" * (MOST_CHARACTERS + 1), f"up to {MOST_CHARACTERS}"),
        ("Ada:0", "0.1 to 10"),
        ("Ada:-1", "0.1 to 10"),
        ("Ada:11", "0.1 to 10"),
        ("Ada:nan", "0.1 to 10"),
        ("Ada:", "word:weight"),
        ("Ada: ", "word:weight"),
        ("Ada:high", "word:weight"),
        ("Ada:2x", "word:weight"),
        (":", "word:weight"),
    ],
)
def test_invalid_hotwords_are_refused(given, says):
    with pytest.raises(OptionError) as refused:
        parse_phrase(given)
    assert refused.value.param == "hotwords"
    assert says in str(refused.value)
    assert len(str(refused.value)) < 300


CHAIN = {
    (): {1: -0.1, 3: -2.4},
    (1,): {2: -0.2, 9: -1.7},
    (3,): {4: -0.1, 9: -2.4},
    (1, 2): {9: -0.1},
    (3, 4): {9: -0.1},
}


@pytest.mark.parametrize(("boost", "said"), [(0.0, (1, 2)), (1.0, (1, 2)), (2.0, (3, 4))])
def test_beams_say_what_is_best_with_the_list_as_a_language_model(boost, said):
    """All ways of four tokens, each tried, against the beams."""
    graph, end = BiasingGraph([TokenizedPhrase((3, 4))]), 9
    search = BeamSearch(3, end, 4, graph=graph, boost=boost)
    while search.advance([sorted(CHAIN[way.tokens].items(), key=lambda pair: -pair[1]) for way in search.live]):
        pass
    (way, *_), _ = search.n_best()
    totals = {}
    for first, a in CHAIN[()].items():
        for second, b in CHAIN[first,].items():
            path = (first,) if second == end else (first, second)
            score = a + b + (0 if second == end else CHAIN[path][end])
            worth = 2.0 if path == (3, 4) else 0.0
            totals[path] = (score + boost * worth) / len(path)
    assert way.tokens == said == max(totals, key=lambda path: totals[path])
    assert way.score == pytest.approx(totals[said])
