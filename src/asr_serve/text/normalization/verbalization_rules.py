"""Verbalization rules: patterns of expressions with signs, and their readings.

They are applied before the library's rules (`hibari_english.expand_abbreviations`), for expressions that it lacks
or gets wrong. Their order matters: an address may contain any other sign, a telephone number looks like a sum.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from asr_serve.text.normalization import verbalize_signs
from asr_serve.text.normalization.verbalize_addresses import ADDRESS, PATH, address, path, spelled
from asr_serve.text.normalization.verbalize_numbers import NUMBER, cardinal, decade, in_pairs, one_by_one, ordinal
from asr_serve.text.normalization.verbalize_signs import MONTHS, PARTS, SCALES, WEEK, count, telephone

Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]

SIGNS = {"≈": "about", "≤": "at most", "≥": "at least", "≠": "is not", "√": "the square root of", "∞": "infinity"}
SIGNS |= {"%": "percent", "&": "and", "@": "at", "+": "plus", "$": "dollar", "€": "euro", "£": "pound", "¥": "yen"}
NUMBERED = (
    "room|suite|flight|route|highway|interstate|gate|channel|bus|apartment|apt|extension|port|area code|unit|exit"
)
CODES = "code|zip|pin|id|number|account|order|ticket|confirmation|invoice|case|reference"
_days = "Mon|Tues?|Wed|Thur?s?|Fri|Sat|Sun"
_months = "|".join(name[:3] for name in MONTHS)
_inch = r"in(?=\W*$|[,.;:)])"
_parted = "|".join([_inch, *(unit for unit in verbalize_signs.PARTED if unit != "in")])
_sized = "|".join(verbalize_signs.SIZED)
_money = "|".join(map(re.escape, sorted(verbalize_signs.MONEY, key=len, reverse=True)))
_units = "|".join(map(re.escape, [*verbalize_signs.RATES, *verbalize_signs.UNITS]))
_coins = r"[$€£¥]|USD|EUR|GBP|JPY|CHF|AUD|CAD|PLN|z[łl]"
_metric = "kg|km|cm|mm|mg|ml|mph|ft|oz|lbs?|[GMk]Hz|[GMT]B|%|°(?:\\s?[CF])?"
_half = r"[ap](?:\.m\.?|m\b)"
_part = r"(?<![\w./])(\d+ )?(\d)/([2-9]|10|16|32|64|100)"
_shared = "cup|inch|foot|mile|yard|hour|pound|ounce|gallon|pint|quart|teaspoon|tablespoon|acre|meter|kilometer|liter"
_joins = "of|and|or|in|to|from|at|for|with|per|more|less|long|wide|thick|deep|high|tall|away|ago|later|into|then"
_sides = r"\d{1,4}\s?[x×]\s?\d{1,4}(?:\s?[x×]\s?\d{1,4})?"
_times = r"(?=\d{1,2}\b(?:\W*$|[,.;:!?)]| (?:=|equals|is)))"
_no_article = r"(?<!\b[Aa] )(?<!\b[Aa]n )(?<!\b[Tt]he )"
_scale = r"hundred|thousand|million|billion|trillion|bn|mn|mm|tn|[kKmMbBtT]"
_word = r"[\w\ue000]"
_iso = r"(\d{4})-(\d\d)-(\d\d)"
_mixed = re.compile(r"\b(?=\d*[A-Za-z])(?=[A-Za-z]*\d)(?!\d+(?:st|nd|rd|th)\b)[A-Za-z\d]+\b")


def rule(pattern: str, replacement: str | Callable[[re.Match[str]], str]) -> Rule:
    return re.compile(pattern), replacement


def apply_rules(text: str, british: bool) -> str:
    for pattern, reading in BRITISH if british else AMERICAN:
        text = pattern.sub(reading, text)
    return text


def replace_remaining_signs(text: str) -> str:
    """Read signs that remain after all other rules."""
    text = _mixed.sub(verbalize_signs.mixed, re.sub(r" (?='s\b)|\u200b", "", text))
    for sign, words in SIGNS.items():
        if sign in text:
            text = text.replace(sign, f" {words} ")
    return text


def _marks() -> list[Rule]:
    """Rules that remove what is not text: Markdown, emoticons, quotation marks that look like apostrophes."""
    return [
        rule(r"(?<!\S)[:;=]['^-]?[)(DPpOo|3]+(?!\w)|<3+(?!\d)", " "),
        rule(r"\*{1,3}(?=\S)(.+?)(?<=\S)\*{1,3}(?!\w)", lambda m: m[1]),
        rule(r"`+", " "),
        rule(r"^\s*(?:#{1,6}|[-*•>]) +", ""),
        rule(r"\[\^?(\w+)\]|[\[\]{}]", lambda m: f" {m[1]} " if m[1] else " "),
        rule(r"(?<=\w) ?'n' ?(?=\w)", " and "),
        # A pair around words; apostrophes of contractions stay. An OVERRIDE_PLACEHOLDER is a word too.
        rule(rf"(?<!{_word})'(?=\S)((?:[^']|(?<={_word})'(?=\w))+?)(?<=\S)'(?!\w)", lambda m: m[1]),
        rule(r"(?i)(?<!\w)'(tis|twas|em|cause|til|round)\b", lambda m: m[1]),
        rule(rf"(?<!{_word})'(?=[A-Za-z])|(?<=[^\w\s\ue000])'(?!\w)", ""),
    ]


def _foreign() -> list[Rule]:
    """Rules for numbers grouped as in other languages, `5 000`, `1.234,56`, where they have no other reading."""
    return [
        rule(r"(?<![\w+.,/-])(?<!\d )[1-9]\d?(?: \d{3}){2,}(?![\w-]| \d)", _grouped),
        rule(r"(?<![\w+.,/-])(?<!\d )[1-9]\d{0,2}(?: \d{3})* 000(?![\w-]| \d)", _grouped),
        rule(rf"(?<![\w+.,/-])(?<!\d )[1-9]\d{{0,2}}(?: \d{{3}})+(?=(?:[.,]\d\d)?\s?(?:{_coins})(?!\w))", _grouped),
        rule(r"(?<=[$€£¥])\s?[1-9]\d{0,2}(?: \d{3})+(?![\w-]| \d)", _grouped),
        rule(r"(?<![\w.,])\d{1,3}(?:\.\d{3})+,\d\d?(?![\w,]|\.\d)", verbalize_signs.european),
        rule(rf"(?<![\w.,])\d+,\d\d?(?=\s?(?:{_coins}|{_metric}|{_units})(?!\w))", verbalize_signs.european),
        rule(r"(?<=[€£$])\s?\d+,\d\d(?![\w,]|\.\d)", verbalize_signs.european),
    ]


def _grouped(match: re.Match[str]) -> str:
    return match[0].strip().replace(" ", ",")


def _calendar(british: bool) -> list[Rule]:
    return [
        rule(
            rf"\b{_iso}T(\d\d):(\d\d)(?::[\d.]+)?(?:Z|[+-]\d\d:?\d\d)?\b", lambda m: verbalize_signs.moment(m, british)
        ),
        rule(
            r"\b(\d{4})[-/](\d\d)[-/](\d\d)\b",
            lambda m: verbalize_signs.day(int(m[2]), int(m[3]), m[1], british) or m[0],
        ),
        rule(r"(?<![\d/])(\d{1,2})/(\d{1,2})/(\d{4}|\d\d)(?![\d/])", lambda m: verbalize_signs.date(m, british)),
        rule(r"(?<![\d.])(\d{1,2})\.(\d{1,2})\.((?:19|20)\d\d)(?![\d.])", lambda m: verbalize_signs.date(m, True)),
        rule(rf"\b({_days})\.?\s?[-–]\s?({_days})\b\.?", lambda m: f"{WEEK[m[1][:3]]} to {WEEK[m[2][:3]]}"),
        rule(
            rf"\b({_months})([a-z]*)\.? (\d{{1,2}})\s?[-–]\s?(\d{{1,2}})(?!\d)",
            lambda m: f"{m[1]}{m[2]} {ordinal(m[3])} to {ordinal(m[4])}",
        ),
        rule(r"(?<![\w/])9/11(?![\w/])", "nine eleven"),
        rule(r"(?<![\w/])24/7(?![\w/])", "twenty-four seven"),
        rule(r"(?<![\w/])50[/-]50(?![\w/])", "fifty-fifty"),
        rule(r"(?<![\w.])'?(\d0|\d{3}0)'?s\b", lambda m: decade(m[1])),
        rule(
            rf"(?i)(?<![\w.:/-])(\d{{1,2}}(?::\d\d(?: ?{_half})?| ?{_half}))\s?[-–]\s?(?=\d)", lambda m: f"{m[1]} to "
        ),
        rule(
            rf"(?i)(?<![\w.:/-])(\d{{1,2}})\s?[-–]\s?"
            rf"(?=\d{{1,2}}:\d\d|\d{{1,2}}\s?{_half})",
            lambda m: f"{m[1]} to ",
        ),
        rule(r"(\d(?:st|nd|rd|th))\s?[-–]\s?(?=\d+(?:st|nd|rd|th)\b)", lambda m: f"{m[1]} to "),
        rule(r"(?i)(?<![\w:])(\d{1,2}):([0-5]\d):([0-5]\d)\s?([ap])\.?m\b", verbalize_signs.second),
        rule(
            r"(?i)\b(\d{1,2})(?::([0-5]\d))?\s?([ap])(?:\.m\.?|m\b)(?=(\s*$)?)",
            lambda m: verbalize_signs.clock(m[1], m[2], m[3]) + ("." if m[4] is not None and m[0][-1] == "." else ""),
        ),
        rule(r"(?<![\w:])(\d{1,2}:\d\d):00(?![\w:])", lambda m: m[1]),
        rule(r"(?<![\w:.])([01]?\d|2[0-3]):([0-5]\d)(?![\w:])", lambda m: verbalize_signs.clock(m[1], m[2])),
        rule(r"(?<![\w:.])(\d\d):([0-5]\d)(?![\w:])", verbalize_signs.lap),
        rule(r"(?<![\w:.])(\d+):(\d+)(?![\w:])", lambda m: f"{m[1]} to {m[2]}"),
        rule(r"\b(\d+)h ?(\d+)m(?:in)?\b", lambda m: f"{count(m[1], 'hour')} {count(m[2], 'minute')}"),
    ]


def _numbered() -> list[Rule]:
    """Rules for telephone numbers, and other numbers that are not quantities."""

    def read(match: re.Match[str]) -> str:
        return telephone(match[0])

    return [
        rule(r"(?<![\w.])\+\d{1,3}(?:[ .-]?\(?\d{1,5}\)?){2,5}(?!\w)", read),
        rule(r"(?<![\w.-])(?:1[ .-])?(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[.-]\d{4}(?![\w-])", read),
        rule(r"(?<![\w.-])(?:1[ .-])?\d{3} \d{3} \d{4}(?![\w-])", read),
        rule(r"(?<![\w.-])\d{3}-\d{4}(?![\w-])", read),
        rule(r"(?<![\w.-])0\d{2,4} \d{3,4} ?\d{3,4}(?![\w-])", read),
        rule(r"(?<![\w.-])(?:\d{3}-\d\d-\d{4}|\d{4}(?:[ -]\d{4}){3})(?![\w-])", read),
        rule(r"(?i)\b((?:call|dial)(?:ed|ing)?)\s(\d{3})\b", lambda m: f"{m[1]} {one_by_one(m[2])}"),
        rule(
            rf"(?i)\b((?:{CODES})s?(?:\s(?:is|was|no\.?))?:?\s#?)(\d{{4,}})\b(?!,\d)",
            lambda m: m[1].rstrip("#") + one_by_one(m[2]),
        ),
        rule(r"\b([Ee])xt(?:\.\s?|\s)(?=\d)", lambda m: f"{m[1]}xtension "),
        rule(rf"(?i)\b((?:{NUMBERED})\s)(\d{{3,4}})\b", lambda m: m[1] + in_pairs(m[2])),
        rule(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\d)", verbalize_signs.internet),
        rule(r"\bv(?=\d+\.\d)", "version "),
        rule(r"(?<![\w.])\d+(?:\.\d+){2,}(?!\w)", lambda m: " point ".join(map(cardinal, m[0].split(".")))),
    ]


def _money_rules(british: bool) -> list[Rule]:
    return [
        rule(
            rf"(?<![\w])(-?)({_money})\s?({NUMBER})(?:\s?[-–]\s?(?:\2)?({NUMBER}))?"
            rf"(?:\s?({_scale})\b)?(/[a-z]+)?(?!\w)",
            lambda m: verbalize_signs.price(m, british),
        ),
        rule(
            rf"(?<![\w.])({NUMBER})\s?({_scale})?\s?({_coins})(?!\w)",
            lambda m: verbalize_signs.money(m[3], m[1], m[2] or "", british),
        ),
        rule(rf"(?<![\w.])({NUMBER})\s?¢", lambda m: count(m[1], "cent")),
    ]


def _measured(british: bool) -> list[Rule]:
    """Rules for fractions, arithmetic and measures."""
    return [
        rule(r"(?<=\d/\d)-(?=[a-z])", " "),
        rule("[½¼¾⅓-⅞]", lambda m: f" {PARTS[m[0]]}" if m[0] in PARTS else ""),
        rule(rf"(?<![\w./])(\d+ )?(\d{{1,2}}/\d{{1,3}})\s?({_parted})\b(?:\.(?=\W*[a-z\d]))?", verbalize_signs.parted),
        rule(rf"(?<![\w.])({NUMBER})\s?in\.(?=\W*$)", lambda m: f"{verbalize_signs.inch(m)}."),
        rule(rf"(?<![\w.])({NUMBER})\s?in\.(?=\W)", verbalize_signs.inch),
        rule(rf"(?<=\d)(\s?(?:{_parted}))\.(?=\s+[a-z\d(])", lambda m: m[1]),
        rule(rf"\b({_sides})\s?({_inch}|(?:{_sized})\b)", verbalize_signs.sized),
        rule(
            rf"{_no_article}{_part} ({_shared})\b(?=\W*$|[,.;:!?)]| (?:{_joins})\b)",
            lambda m: verbalize_signs.share(m) if not m[1] and m[2] != "1" and int(m[2]) < int(m[3]) else m[0],
        ),
        rule(rf"{_part}(?![\w./]*\d)", verbalize_signs.fraction),
        rule(r"(?<![\w./])(\d+)/(\d+)(?![\w./]*\d)", lambda m: verbalize_signs.over(m, british)),
        rule(r"\band/or\b", "and or"),
        rule(rf"({NUMBER})\s?%?\s?[-–]\s?({NUMBER})\s?%", lambda m: f"{m[1]} to {m[2]} percent"),
        rule(rf"(?<=\d)\s?[-–−]\s?(?={NUMBER}\s?=)", " minus "),
        rule(r"(?<![\w.-])(\d{1,4})\s?[-–]\s?(\d{1,4})(?![\w-]|\.\d)", lambda m: f"{m[1]} to {m[2]}"),
        rule(r"\s?-+>\s?", " to "),
        rule(r"\b(\w+)\s?(>=|<=|≥|≤|(?<=\d)[<>]|(?<=\d )[<>])\s?(?=[-−]?\w)", verbalize_signs.compared),
        rule(rf"(?<=\d)\s?=\s?(?=[-−]?{NUMBER})", " equals "),
        rule(r"(\d) ?\* ?(?=\d)", lambda m: f"{m[1]} times "),
        rule(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)\b", lambda m: f"{m[1]} times 10^{m[2]}"),
        rule(r"\^2\b|²", " squared"),
        rule(r"\^3\b|³", " cubed"),
        rule(r"\s?\^\s?(?=-?\w)", " to the power of "),
        rule(r"(?<!\w)~\s?(?=\d)", "about "),
        rule(r"(?<!\w)[-−](?=\.?\d)", "minus "),
        rule(r"(?<![\w.])(\d+)'\s?(?:(\d+(?:\.\d+)?)(?:\"|'')|(?!\w))", verbalize_signs.feet),
        rule(r'(?<![\w."“])(\d+(?:\.\d+)?)"(?!\w)', verbalize_signs.inches),
        rule(rf"{_no_article}\b(\d{{1,4}}) [x×] {_times}", lambda m: f"{m[1]} times "),
        rule(rf"\b{_sides}\b", verbalize_signs.dimension),
        rule(rf"(?<![\w.])({NUMBER})x\b", lambda m: f"{m[1]} times"),
        rule(rf"(?<![\w.])({NUMBER})\s?({_units})(?![\w'/])", verbalize_signs.measure),
        rule(r"\b([48])K\b(?=$|[ ,.;:!?]+(?:[a-z]|$))", lambda m: f"{m[1]} K"),
        rule(rf"(?<![\w.])({NUMBER})([kKM])\b", lambda m: f"{m[1]} {SCALES[m[2]]}"),
        rule(r"(?<=\d)-(?=[A-Za-z]{2,})|(?<=[A-Za-z])-(?=\d)", " "),
    ]


def _names() -> list[Rule]:
    return [
        rule(r"\b([A-Z]{1,3})&([A-Z]{1,3})\b", lambda m: f"{spelled(m[1])} and {spelled(m[2])}"),
        rule(r"\bC\+\+(?!\w)", "C plus plus"),
        rule(r"\b([CFJ])#(?!\w)", lambda m: f"{m[1]} sharp"),
        rule(r"(?<!\w)\.NET\b", "dot net"),
        rule(r"\b(\w+)\.js\b", lambda m: f"{m[1]} dot J.S"),
        rule(r"\bGen Z\b", "Generation Z"),
        rule(r"\b([Ee])\.g\.?,?(?=\W)", lambda m: "For example," if m[1] == "E" else "for example,"),
        rule(r"\b([Ii])\.e\.?,?(?=\W)", lambda m: "That is," if m[1] == "I" else "that is,"),
        rule(r"\betc\.(?=\s+\S)", "et cetera"),
        rule(r"\betc\b\.?", "et cetera."),
        rule(r"\ba\.k\.a\.?(?=\W)", "also known as"),
        rule(r"\bPh\.? ?D\.?(?=(\W*$)?)", lambda m: "P.H.D" + ("." if m[1] == "" and m[0].endswith(".") else "")),
        rule(r"\bp\. ?(?=\d)", "page "),
        # Separated, so that the library does not miss a Roman number, or read a letter as one;
        # `replace_remaining_signs` joins them again.
        rule(r"(?<=[A-Za-z] )([IVXLC]+)(?='s\b)", r"\1 "),
        rule(r"\b([Tt]ype|[Cc]lass|[Gg]rade|[Ll]evel|[Ss]ection|[Pp]art) (?=[CDLM]\b)", "\\1 \u200b"),
        # At the end of a sentence these are words, which the library would read as `number`, `Sunday`.
        rule(r"\b(no|ed|est|fig|ch|vol|eds|Sun|Sat|Mar|Wed|Dec|Co)\.(?=\W*$)", lambda m: f"{m[1]} ."),
        rule(r"\bno\.(?!\s?\d)", "no ."),
        rule(r"(\w)\\(?=\w)|(?<!\w)\\(?=\w)", lambda m: f"{m[1] or ''} backslash "),
        rule(r"([!?,;:])\1+", lambda m: m[1]),
        rule(r"\.{4,}|…+\.*", "..."),
        rule(r"(?<!\S)(?:[-=_*~#+|.]{2,}|\|)(?!\S)(?<!\.\.\.)", " "),
    ]


def _rules(british: bool) -> list[Rule]:
    return [
        rule(ADDRESS, lambda m: address(m[0])),
        rule(PATH, lambda m: path(m[0])),
        *_marks(),
        *_calendar(british),
        *_numbered(),
        *_foreign(),
        *_money_rules(british),
        *_measured(british),
        *_names(),
    ]


AMERICAN, BRITISH = _rules(british=False), _rules(british=True)
