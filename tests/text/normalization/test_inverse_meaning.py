"""What is written never says another thing than what was said."""

from __future__ import annotations

import random
import re
import threading

import pytest
from case_tiers import exhaustive_after

from asr_serve.text.normalization import wetext_grammar
from asr_serve.text.normalization.inverse import inverse_normalize
from asr_serve.types import Segment


def as_written(said: str, language: str = "en") -> str:
    return inverse_normalize(Segment(0, 16_000, said), language).text


@pytest.mark.parametrize(
    "said",
    [
        "one of the two",
        "I have one",
        "testing one two three",
        "a hundred and ten percent",
        "zero seven seven double zero nine hundred one two three",
        "twenty thirty people came",
        "ten twenty percent",
        "may five people come",
        "my two cents",
        "a thirty second delay",
        "the twenty five first graders",
        "nineteen ninety nine ninety nine",
    ],
)
def test_ambiguous_words_stay_as_spoken(said: str) -> None:
    assert as_written(said) == said


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("at seven oh five in the evening", "at 7:05 in the evening"),
        ("in twenty thirty", "in 2030"),
        ("on May five", "on May 5"),
        ("the thirty second street", "the 32nd street"),
        ("fifty cents", "$0.50"),
        ("john dot smith at example dot com please", "john.smith@example.com please"),
        ("it is at example dot com", "it is at example.com"),
        ("one nine two dot one six eight dot one dot one", "192.168.1.1"),
        ("IP one nine two dot one six eight dot one dot one", "IP one nine two dot one six eight dot one dot one"),
    ],
)
def test_times_dates_and_addresses(said: str, wanted: str) -> None:
    assert as_written(said) == wanted


@pytest.mark.parametrize(
    ("language", "said", "wanted"),
    [
        ("zh", "十分好", "十分好"),
        ("zh", "十分钟", "10分钟"),
        ("zh", "三点十分", "3:10"),
        ("zh", "十几个人", "十几个人"),
        ("zh", "几十个", "几十个"),
        ("zh", "三十而立", "三十而立"),
        ("zh", "四十八小时", "48小时"),
        ("zh", "一亿三千万公里", "一亿三千万公里"),
        ("ja", "千葉県", "千葉県"),
        ("ja", "八百屋", "八百屋"),
        ("ja", "十分です", "十分です"),
        ("ja", "三百万円", "300万円"),
        ("ja", "三時十分", "3時10分"),
    ],
)
def test_characters_that_count_and_those_that_do_not(language: str, said: str, wanted: str) -> None:
    assert as_written(said, language) == wanted


_ONES = "zero one two three four five six seven eight nine"
_TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
ONES, TENS = f"{_ONES} {_TEENS}".split(), _TENS.split()


def english(number: int, joined: str) -> list[str]:
    """`joined`: what stands behind hundreds, `and` or nothing."""
    if number < 20:
        return [ONES[number]]
    if number < 100:
        return [TENS[number // 10 - 2], *([ONES[number % 10]] if number % 10 else [])]
    scales = ((10**9, "billion"), (10**6, "million"), (1_000, "thousand"), (100, "hundred"))
    size, name = next(scale for scale in scales if number >= scale[0])
    rest = number % size
    behind = [*([joined] if joined and rest < 100 else []), *english(rest, joined)] if rest else []
    return [*english(number // size, joined), name, *behind]


def japanese(number: int) -> str:
    made = ""
    for size, name in ((10**8, "億"), (10**4, "万"), (1, "")):
        group = number // size % 10**4
        for place, letter in ((1_000, "千"), (100, "百"), (10, "十"), (1, "")):
            if digit := group // place % 10:
                made += ("" if digit == 1 and letter else "〇一二三四五六七八九"[digit]) + letter
        made += name if group else ""
    return made


NUMBERS = [random.Random(seed).randint(10, 10 ** (2 + seed % 8)) for seed in range(80)]
NUMBERS += [int(str(number)[:2].ljust(len(str(number)), "0")) for number in NUMBERS]


def worth(text: str) -> float:
    """Of all that is written in digits."""
    scales = {"": 1, "万": 1e4, "億": 1e8, "thousand": 1e3, "million": 1e6, "billion": 1e9}
    found = re.findall(r"(\d[\d.,]*) ?(万|億|thousand|million|billion)?", text)
    return sum(float(digits.replace(",", "").rstrip(".")) * scales[scale] for digits, scale in found)


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        ("we saw", "people"),
        pytest.param("it cost", "dollars", marks=pytest.mark.slow),
        pytest.param("minus", "percent", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("joined", ["", "and"])
@pytest.mark.repeats(joined="and", before={"it cost", "minus"})
def test_every_english_number_has_the_spoken_value(before: str, behind: str, joined: str) -> None:
    for number in NUMBERS:
        made = as_written(f"{before} {' '.join(english(number, joined))} {behind}")
        assert worth(made) == number, made


@pytest.mark.slow
@pytest.mark.parametrize("behind", exhaustive_after(2, ["", "円", "人", "年"]))
def test_every_japanese_number_has_the_spoken_value(behind: str) -> None:
    changed = 0
    for number in NUMBERS:
        said = f"{japanese(number)}{behind}"
        made = as_written(said, "ja")
        changed += made != said
        assert made == said or worth(made) == number, (said, made)
    assert changed > len(NUMBERS) / 2


@pytest.mark.parametrize("before", range(30))
def test_no_number_is_cut_in_two(before: int) -> None:
    """A long sentence is looked at in parts."""
    said = "one hundred twenty three thousand four hundred fifty six birds and then two hundred ninety nine thousand \
seven hundred twenty one fish"
    assert as_written(f"{'ten more of ' * before}{said}").endswith("123456 birds and then 299721 fish")
    assert as_written(f"{'一二三四五' * 10}，十二", "zh") == f"{'一二三四五' * 10}，12"
    characters = (
        "六十七个" * (before % 16) + "人" * (before % 3) + "十二万三千四百五十六只鸟和二十九万九千七百二十一条鱼"
    )
    made = re.sub("六十七|67", "", as_written(characters, "zh"))
    assert re.findall(r"\d+", made) == ["123456", "299721"]


def test_threads_write_what_one_writes() -> None:
    said = [f"he paid {a} {b} dollars in nineteen {a} {b}" for a in TENS[:2] for b in ONES[1:10]]
    alone = [as_written(text) for text in said]
    wetext_grammar.find_rewrites.cache_clear()
    made: list[list[str]] = []
    threads = [threading.Thread(target=lambda: made.append([as_written(text) for text in said])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert made == [alone] * 4
