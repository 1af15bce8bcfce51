"""Selection of a grammar's Chinese and Japanese rewrites, and their form.

Slashes, unspoken seconds and English a.m. or p.m. in the grammar's output are replaced by the language's own
forms. Where the grammar guesses, the spoken form stays.
"""

from __future__ import annotations

import re
from typing import Final

from asr_serve.text.normalization.wetext_grammar import GrammarRewrite

NUMERALS: Final = "零〇一二两三四五六七八九十百千万亿億幺壹贰叁肆伍陆柒捌玖拾佰仟負负分半点点"
"""Characters without which nothing is rewritten."""
_DIGITS = {letter: number for number, letter in enumerate("〇一二三四五六七八九")} | {"零": 0, "两": 2, "兩": 2}
_PLACE_VALUES = {"十": 10, "百": 100, "千": 1_000}
_NUMBER = re.compile("[〇零一二两兩三四五六七八九]?[十百千万萬億亿][〇零一二两兩三四五六七八九十百千万萬億亿]*")
_DATE = re.compile(r"(\d+)/(\d+)/(\d+)")
_MONTH = re.compile(r"(\d{4})/(\d+)")
_DAY = re.compile(r"(\d{1,2})/(\d{1,2})")
_TIME = re.compile(r"(\d+):(\d+):(\d+)(?:[ap]\.m\.)?")
_HALVES = ("早上", "早晨", "上午", "中午", "下午", "傍晚", "晚上", "凌晨", "半夜", "夜里")
_POINTS = "・.点"
NO_NUMBERS = re.compile(
    "[十百千万]+[几来余餘]|[几数數][十百千万]+|(?<![点點时時一二三四五六七八九])十分(?![钟鐘之间間後前])|三十而立|十万火急"
    "|不管三七二十一|千[葉代歳秋]|八百[屋長]|五十[嵐音]|百[合科貨]|万[歳年]"
)
"""Words with numerals that are not numbers: more than ten, very, Chiba, the greengrocer."""
_SPANS = re.compile("(?:小时|小時|分钟|分鐘|秒钟|秒)$")


def select_cjk_rewrite(spoken_text: str, rewrite: GrammarRewrite) -> str | None:
    """Written form of a rewrite's characters in `spoken_text`; None: they stay in spoken form."""
    text, spoken = rewrite.text, spoken_text[rewrite.start : rewrite.end]
    before = spoken_text[rewrite.start - 1 : rewrite.start]
    if (before and before in _POINTS) or "~" in text or "W" in text:
        return None
    if any(word.start() < rewrite.end and word.end() > rewrite.start for word in NO_NUMBERS.finditer(spoken_text)):
        return None
    if rewrite.kind == "date":
        return _date(text, spoken)
    if rewrite.kind == "time" and (found := _TIME.fullmatch(text)):
        hour, minute, second = map(int, found.groups())
        half = next((half for half in _HALVES if spoken.startswith(half)), "")
        return f"{half}{hour}:{minute:02}{f':{second:02}' if second else ''}"
    if rewrite.kind == "money" and text.startswith("¥") and spoken[-1] in "元块塊圆圓円":
        text = f"{text[1:]}{spoken[-1]}"
    text = _checked(text, spoken)
    if (span := _SPANS.search(spoken)) and (number := re.fullmatch(r"(-?[\d.,/]+)[a-z]+", text)):
        return f"{number[1]}{span[0]}"
    if "℃" in text and not any(word in spoken for word in ("摄", "摂")):
        return text.replace("℃", "度")
    return text


def splits_number(spoken_text: str, rewrite: GrammarRewrite, other: GrammarRewrite) -> bool:
    """Returns whether two adjacent rewrites split a number."""
    return (
        rewrite.end == other.start and spoken_text[rewrite.end - 1] in NUMERALS and spoken_text[other.start] in NUMERALS
    )


def _checked(text: str, spoken: str) -> str:
    """Rewrite with its number corrected: a single spoken number with place values (十, 百, 千) has a certain
    value."""
    written, numbers = re.findall(r"\d+", text), _NUMBER.findall(spoken)
    if numbers and re.search("[百千万萬億亿][一二三四五六七八九]$", numbers[0]):  # of thousands, or of ones
        return text
    if re.search("[万萬億亿]", text):  # 300万: its places are partly words
        return text
    if len(written) == len(numbers) == 1 and written[0] != (number := str(cjk_number(numbers[0]))) and number.isdigit():
        return text.replace(written[0], number)
    return text


def cjk_number(spoken: str) -> int:
    """Value of a number with place values.

    >>> cjk_number("二十五"), cjk_number("一万二千"), cjk_number("百二十三"), cjk_number("三千零五")
    (25, 12000, 123, 3005)
    """
    total = part = 0
    digit: int | None = None
    for letter in spoken:
        if letter in _DIGITS:
            digit = _DIGITS[letter]
        elif letter in _PLACE_VALUES:
            part += (1 if digit is None else digit or 1) * _PLACE_VALUES[letter]
            digit = None
        else:
            total = (total + part + (digit or 0)) * 10**4 if letter in "万萬" else (total + part + (digit or 0)) * 10**8
            part, digit = 0, None
    return total + part + (digit or 0)


def _date(text: str, spoken: str) -> str | None:
    day = spoken[-1] if spoken[-1] in "日号號" else "日"
    if found := _DATE.fullmatch(text):
        return f"{found[1]}年{int(found[2])}月{int(found[3])}{day}"
    if found := _MONTH.fullmatch(text):
        return f"{found[1]}年{int(found[2])}月"
    if found := _DAY.fullmatch(text):
        return f"{int(found[1])}月{int(found[2])}{day}"
    return None if "/" in text else text
