"""What sounds like a hotword."""

from __future__ import annotations

import random

import pytest

from asr_serve.decoding.phonetic_index import PhoneticIndex, phonetic_key

WORDS = ["Quilter", "Leighton", "bifurcation", "Rodin", "Niamh Kelly", "Łódź", "東京"]


@pytest.mark.parametrize(
    ("heard", "word"),
    [
        ("quilta", "Quilter"),
        ("quill to", "Quilter"),
        ("Layton", "Leighton"),
        ("by forcation", "bifurcation"),
        ("Rodden", "Rodin"),
        ("Niamh Kelley", "Niamh Kelly"),
        ("Lodz", "Łódź"),
        ("東京", "東京"),
    ],
)
def test_the_nearest_word(heard, word):
    (found,) = PhoneticIndex(WORDS).nearest([heard], 3, 0.5)
    assert WORDS[found[0][0]] == word
    assert [far for _, far in found] == sorted(far for _, far in found)


def test_equal_sounds_have_distance_zero_in_any_list():
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghijklmnoprstuvw", k=rng.randint(5, 9))) for _ in range(2_000)]
    index = PhoneticIndex(words)
    for i, found in enumerate(index.nearest(words[:50], 4, 0.5)):
        assert words[i] in {words[word] for word, far in found if far == 0}


def test_distant_words_are_not_returned():
    assert PhoneticIndex(WORDS).nearest(["elephant", "", "...", "ж"], 5, 0.3) == [[], [], [], []]


def test_a_list_may_have_thousands_of_letters():
    """What is held of them does not grow with their square: 20 000 would be 1.6 GB."""
    words = [chr(0x4E00 + 3 * i) + chr(0x4E01 + 3 * i) + chr(0x4E02 + 3 * i) for i in range(1_000)] + ["Quilter"]
    index = PhoneticIndex(words)
    assert index._sounds.change.size < 10_000
    other = words[7][:2] + words[8][0]
    assert index.distances([words[7], other, "quilta", "丐"], [(0, 7), (1, 7), (2, 1_000), (3, 7)]) == pytest.approx(
        [0, 1 / 3, PhoneticIndex(["Quilter"]).distances(["quilta"], [(0, 0)])[0], 1]
    )


def test_spaces_and_punctuation_have_no_sound():
    assert phonetic_key("Wood-Cutters") == phonetic_key("woodcutters") == phonetic_key("wood cutters")
    assert phonetic_key("phone") == phonetic_key("fone")
    assert phonetic_key("") == phonetic_key("'") == ""


def test_distance_of_any_pair():
    index, heard = PhoneticIndex(WORDS), ["quilta", "by forcation", "東京", ""]
    for i, found in enumerate(index.nearest(heard, len(WORDS), 0.5)):
        assert [far for _, far in found] == index.distances(heard, [(i, word) for word, _ in found])
    every = index.distances(heard, [(i, word) for i in range(len(heard)) for word in range(len(WORDS))])
    assert len(every) == len(heard) * len(WORDS)
    assert index.distances(["東京"], [(0, 0)])[0] > 0.5
    assert index.distances([], []) == []
