"""How things are read that are written in signs: addresses, telephone numbers, money, times, sums.

Rules of our own, each a pattern and what it is read as. They come before those of the library (`english.expanded`),
for what it leaves out or gets wrong, and leave the plain numbers in them to `numerals`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from asr_serve.text.spoken.addresses import ADDRESS, PATH, address, path, spelled
from asr_serve.text.spoken.numerals import NUMBER, cardinal, decade, decimal, in_pairs, one_by_one, ordinal, plain

Match = re.Match[str]
Rule = tuple[re.Pattern[str], str | Callable[[Match], str]]

SCALES = {"k": "thousand", "K": "thousand", "m": "million", "M": "million", "mn": "million", "mm": "million"}
SCALES |= {"b": "billion", "B": "billion", "bn": "billion", "t": "trillion", "tn": "trillion", "T": "trillion"}
MONEY = {
    "$": ("dollar", "cent"), "US$": ("U.S dollar", "cent"), "USD": ("dollar", "cent"),
    "A$": ("Australian dollar", "cent"), "AUD": ("Australian dollar", "cent"),
    "C$": ("Canadian dollar", "cent"), "CAD": ("Canadian dollar", "cent"),
    "£": ("pound", "penny"), "GBP": ("pound", "penny"), "€": ("euro", "cent"), "EUR": ("euro", "cent"),
    "¥": ("yen", ""), "JPY": ("yen", ""), "₩": ("won", ""), "₹": ("rupee", "paisa"), "INR": ("rupee", "paisa"),
    "Rs.": ("rupee", "paisa"), "Rs": ("rupee", "paisa"), "CHF": ("Swiss franc", "cent"),
}  # fmt: skip
SAME = {"yen", "won", "paisa"}
UNITS = {
    "m": "meter", "g": "gram", "l": "liter", "L": "liter", "s": "second", "h": "hour", "W": "watt", "V": "volt",
    "dB": "decibel", "mL": "milliliter", "kV": "kilovolt", "mA": "milliamp", "px": "pixel", "gal": "gallon",
    "tsp": "teaspoon", "tbsp": "tablespoon", "kcal": "kilocalorie", "PB": "petabyte", "MP": "megapixel",
    "km²": "square kilometer", "m²": "square meter", "cm²": "square centimeter", "m³": "cubic meter",
    "ft²": "square foot", "km2": "square kilometer", "m2": "square meter", "m3": "cubic meter", "acre": "acre",
    "kPa": "kilopascal", "hPa": "hectopascal", "ha": "hectare", "GiB": "gibibyte", "MiB": "mebibyte",
}  # fmt: skip
RATES = {
    "m/s": "meters per second", "mi/h": "miles per hour", "MB/s": "megabytes per second",
    "GB/s": "gigabytes per second", "kB/s": "kilobytes per second", "rpm": "R.P.M", "bpm": "beats per minute",
    "mpg": "miles per gallon", "kbps": "kilobits per second", "psi": "P.S.I",
}  # fmt: skip
PARTS = {"½": "1/2", "¼": "1/4", "¾": "3/4", "⅓": "1/3", "⅔": "2/3", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5"}
PARTS |= {"⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"}
SIGNS = {"≈": "about", "≤": "at most", "≥": "at least", "≠": "is not", "√": "the square root of", "∞": "infinity"}
SIGNS |= {"%": "percent", "&": "and", "@": "at", "+": "plus", "$": "dollar", "€": "euro", "£": "pound", "¥": "yen"}
DAYS = "Mon Tues Tue Wed Thurs Thur Thu Fri Sat Sun".split()
WEEK = {day[:3]: f"{name}day" for day, name in zip(DAYS, [
    "Mon", "Tues", "Tues", "Wednes", "Thurs", "Thurs", "Thurs", "Fri", "Satur", "Sun"], strict=True)}  # fmt: skip
NUMBERED = "room|suite|flight|route|highway|interstate|gate|channel|bus|apartment|apt|extension|area code|unit|exit"
CODES = "code|zip|pin|id|number|account|order|ticket|confirmation|invoice|case|reference"
_days = "|".join(DAYS)
_money = "|".join(map(re.escape, sorted(MONEY, key=len, reverse=True)))
_mixed = re.compile(r"\b(?=\d*[A-Za-z])(?=[A-Za-z]*\d)(?!\d+(?:st|nd|rd|th)\b)[A-Za-z\d]+\b")
_scale = r"hundred|thousand|million|billion|trillion|bn|mn|mm|tn|[kKmMbBtT]"


def one(pattern: str, said: str | Callable[[Match], str], *, any_case: bool = False) -> Rule:
    return re.compile(pattern, re.IGNORECASE if any_case else 0), said


def apply(text: str, british: bool) -> str:
    for pattern, said in BRITISH if british else AMERICAN:
        text = pattern.sub(said, text)
    return text


def rest(text: str) -> str:
    """What is left of signs, after all that knew more about them."""
    text = _mixed.sub(_letters_and_digits, text)
    for sign, said in SIGNS.items():
        if sign in text:
            text = text.replace(sign, f" {said} ")
    return text


def telephone(number: str) -> str:
    """Digit by digit, with a rest between the groups."""
    groups = re.findall(r"\d+", number)
    return ("plus " if number.lstrip().startswith("+") else "") + ", ".join(one_by_one(group) for group in groups)


def money(sign: str, amount: str, scale: str = "", british: bool = False) -> str:
    unit, hundredth = MONEY[sign]
    amount = amount.replace(",", "")
    if scale:
        return f"{decimal(amount, british)} {SCALES.get(scale, scale)} {_plural(unit, 2)}"
    whole, _, part = amount.partition(".")
    if len(part) > 2 or (part and not hundredth):
        return f"{decimal(amount, british)} {_plural(unit, 2)}"
    units, hundredths = int(whole or 0), int(part.ljust(2, "0") or 0)
    said = [f"{cardinal(units, british)} {_plural(unit, units)}"] if units or not hundredths else []
    if hundredths:
        said.append(f"{cardinal(hundredths, british)} {_plural(hundredth, hundredths)}")
    return " and ".join(said)


def clock(hours: str, minutes: str, half: str = "") -> str:
    """`5`, `05`, `p` -> `five oh five P.M.`"""
    hour, minute = int(hours), int(minutes or 0)
    said = cardinal(hour) if hour or half else "zero"
    if minute:
        said += f" {'oh ' if minute < 10 else ''}{cardinal(minute)}"
    elif not half:
        said += " o'clock" if 0 < hour < 13 else " hundred"
    return f"{said} {half.upper()}.M" if half else said


def day(month: int, number: int, of: str | None = None, british: bool = False) -> str | None:
    """None where there is no such day."""
    if not (1 <= month <= 12 and 1 <= number <= 31):
        return None
    name = MONTHS[month - 1]
    said = f"the {ordinal(number)} of {name}" if british else f"{name} {ordinal(number)}"
    return f"{said}, {plain(of)}" if of else said


MONTHS = (
    "January February March April May June July August September October November December".split()
)  # fmt: skip


def _plural(unit: str, count: int) -> str:
    if count == 1 or unit in SAME:
        return unit
    return "pence" if unit == "penny" else "square feet" if unit == "square foot" else f"{unit}s"


def _unit(match: Match) -> str:
    number, unit = match[1], match[2]
    return f"{number} {RATES.get(unit) or _plural(UNITS[unit], 1 if number == '1' else 2)}"


def _date(match: Match, british: bool) -> str:
    first, second, of = int(match[1]), int(match[2]), match[3]
    of = of if len(of) == 4 else f"{19 if int(of) > 50 else 20}{of}"
    a, b = (second, first) if british or first > 12 else (first, second)
    return day(a, b, of, british) or day(b, a, of, british) or match[0]


def _moment(match: Match, british: bool) -> str:
    date = day(int(match[2]), int(match[3]), match[1], british)
    return f"{date}, {match[4]}:{match[5]}" if date else match[0]


def _fraction(match: Match) -> str:
    whole, over, under = match[1], int(match[2]), int(match[3])
    if under == 0 or (over >= under and not whole):
        return match[0]
    name = "half" if under == 2 else "quarter" if under == 4 else ordinal(under)
    part = f"{cardinal(over)} {name if over == 1 else 'halves' if under == 2 else name + 's'}"
    if not whole:
        return part
    return f"{cardinal(whole.strip())} and {'a ' + name if over == 1 and under in (2, 4) else part}"


def _letters_and_digits(match: Match) -> str:
    """`AA123`, `MP3`, `B2B`, `H2O`: letters by name, numbers as rooms have them."""
    parts = re.findall(r"[A-Za-z]+|\d+", match[0])
    said = (in_pairs(part) if part.isdigit() else spelled(part) if len(part) < 4 and part.isupper() else part
            for part in parts)  # fmt: skip
    return " ".join(said)


def _feet(match: Match) -> str:
    feet, inches = match[1], match[2]
    said = f"{cardinal(feet)} {'foot' if feet == '1' else 'feet'}"
    return f"{said} {plain(inches)}" if inches else said


def _inches(match: Match) -> str:
    """But where the sign closes a quotation."""
    quoted = match.string.count('"', 0, match.start()) % 2
    return match[0] if quoted else _count(match[1], "inch", "inches")


def _dimension(match: Match) -> str:
    """`2x4`, `1920 x 1080`."""
    return " by ".join(in_pairs(n) if len(n) == 4 else plain(n) for n in re.split(r"\s?[x×]\s?", match[0]))


def _rules(british: bool) -> list[Rule]:
    return [
        # Addresses first: all other signs may be part of them.
        one(ADDRESS, lambda m: address(m[0])),
        one(PATH, lambda m: path(m[0])),
        one(r"(?<!\S)[:;=]['^-]?[)(DPpOo|3]+(?!\w)|<3+(?!\d)", " "),
        one(r"\*{1,3}(?=\S)(.+?)(?<=\S)\*{1,3}(?!\w)", lambda m: m[1]),  # Markdown's emphasis
        one(r"`+", " "),
        one(r"^\s*(?:#{1,6}|[-*•>]) +", ""),
        one(r"\[\^?(\w+)\]|[\[\]{}]", lambda m: f" {m[1]} " if m[1] else " "),
        one(r"(?<!\w)'(tis|twas|em|cause|til|round)\b", lambda m: m[1], any_case=True),
        one(r"(?<=\w) ?'n' ?(?=\w)", " and "),
        one(r"(?<!\w)'(?=[A-Za-z])|(?<=[^\w\s])'(?!\w)", ""),
        # Days and times
        one(r"\b(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d)(?::[\d.]+)?(?:Z|[+-]\d\d:?\d\d)?\b", lambda m: _moment(m, british)),
        one(r"\b(\d{4})[-/](\d\d)[-/](\d\d)\b", lambda m: day(int(m[2]), int(m[3]), m[1], british) or m[0]),
        one(r"(?<![\d/])(\d{1,2})/(\d{1,2})/(\d{4}|\d\d)(?![\d/])", lambda m: _date(m, british)),
        one(r"(?<![\d.])(\d{1,2})\.(\d{1,2})\.((?:19|20)\d\d)(?![\d.])", lambda m: _date(m, True)),
        one(rf"\b({_days})\.?\s?[-–]\s?({_days})\b\.?", lambda m: f"{WEEK[m[1][:3]]} to {WEEK[m[2][:3]]}"),
        one(
            rf"\b({'|'.join(name[:3] for name in MONTHS)})([a-z]*)\.? (\d{{1,2}})\s?[-–]\s?(\d{{1,2}})(?!\d)",
            lambda m: f"{m[1]}{m[2]} {ordinal(m[3])} to {ordinal(m[4])}",
        ),
        one(r"(?<![\w/])9/11(?![\w/])", "nine eleven"),
        one(r"(?<![\w/])24/7(?![\w/])", "twenty-four seven"),
        one(r"(?<![\w/])50[/-]50(?![\w/])", "fifty-fifty"),
        one(r"\b(\d{1,2}:\d\d(?: ?[ap]\.?m\b\.?)?)\s?[-–]\s?(?=\d{1,2}:\d\d)", lambda m: f"{m[1]} to ", any_case=True),
        one(
            r"\b(\d{1,2})(?::([0-5]\d))?\s?([ap])(?:\.m\.?|m\b)(?=(\s*$)?)",
            lambda m: clock(m[1], m[2], m[3]) + ("." if m[4] is not None and m[0].endswith(".") else ""),
            any_case=True,
        ),
        one(r"(?<![\w:])(\d{1,2}:\d\d):00(?![\w:])", lambda m: m[1]),
        one(r"(?<![\w:.])([01]?\d|2[0-3]):([0-5]\d)(?![\w:])", lambda m: clock(m[1], m[2])),
        one(r"(?<![\w:.])(\d+):(\d+)(?![\w:])", lambda m: f"{m[1]} to {m[2]}"),
        one(r"\b(\d+)h ?(\d+)m(?:in)?\b", lambda m: f"{_count(m[1], 'hour')} {_count(m[2], 'minute')}"),
        one(r"(?<![\w.])'?(\d0|\d{3}0)'?s\b", lambda m: decade(m[1])),
        # Telephones, and numbers that count nothing
        one(r"(?<![\w.])\+\d{1,3}(?:[ .-]?\(?\d{1,5}\)?){2,5}(?!\w)", lambda m: telephone(m[0])),
        one(r"(?<![\w.-])(?:1[ .-])?(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[.-]\d{4}(?![\w-])", lambda m: telephone(m[0])),
        one(r"(?<![\w.-])(?:1[ .-])?\d{3} \d{3} \d{4}(?![\w-])", lambda m: telephone(m[0])),
        one(r"(?<![\w.-])\d{3}-\d{4}(?![\w-])", lambda m: telephone(m[0])),
        one(r"(?<![\w.-])0\d{2,4} \d{3,4} ?\d{3,4}(?![\w-])", lambda m: telephone(m[0])),
        one(r"(?<![\w.-])\d{3}-\d\d-\d{4}(?![\w-])|(?<![\w.-])\d{4}(?:[ -]\d{4}){3}(?![\w-])", lambda m: telephone(m[0])),
        one(r"\b(call(?:ed|ing)?|dial(?:ed|ing)?)\s(\d{3})\b", lambda m: f"{m[1]} {one_by_one(m[2])}", any_case=True),
        one(
            rf"\b((?:{CODES})s?(?:\s(?:is|was|no\.?))?:?\s#?)(\d{{4,}})\b(?!,\d)",
            lambda m: m[1].rstrip("#") + one_by_one(m[2]),
            any_case=True,
        ),
        one(rf"\b((?:{NUMBERED})\s)(\d{{3,4}})\b", lambda m: m[1] + in_pairs(m[2]), any_case=True),
        one(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\d)", lambda m: " dot ".join(map(one_by_one, m[0].split(".")))),
        one(r"\bv(?=\d+\.\d)", "version "),
        one(r"(?<![\w.])\d+(?:\.\d+){2,}(?!\w)", lambda m: " point ".join(map(cardinal, m[0].split(".")))),
        # Money
        one(
            rf"(?<![\w])(-?)({_money})\s?({NUMBER})(?:\s?[-–]\s?(?:\2)?({NUMBER}))?(?:\s?({_scale})\b)?(/[a-z]+)?(?!\w)",
            lambda m: _price(m, british),
        ),
        one(
            rf"(?<![\w.])({NUMBER})\s?({_scale})?\s?([$€£¥]|USD|EUR|GBP|JPY|CHF)(?!\w)",
            lambda m: money(m[3], m[1], m[2] or "", british),
        ),
        one(rf"(?<![\w.])({NUMBER})\s?¢", lambda m: _count(m[1], "cent")),
        # Parts, sums and measures
        one("[½¼¾⅓-⅞]", lambda m: f" {PARTS[m[0]]}" if m[0] in PARTS else ""),
        one(r"(?<![\w./])(\d+ )?(\d)/([2-9]|10|16|32|64|100)(?![\w./]*\d)", _fraction),
        one(r"(?<![\w./])(\d+)/(\d+)(?![\w./]*\d)", lambda m: f"{m[1]} over {m[2]}"),
        one(r"\band/or\b", "and or"),
        one(rf"({NUMBER})\s?%?\s?[-–]\s?({NUMBER})\s?%", lambda m: f"{m[1]} to {m[2]} percent"),
        one(rf"(?<=\d)\s?[-–−]\s?(?={NUMBER}\s?=)", " minus "),
        one(r"(?<![\w.-])(\d{1,4})\s?[-–]\s?(\d{1,4})(?![\w-]|\.\d)", lambda m: f"{m[1]} to {m[2]}"),
        one(rf"(?<=\d)\s?=\s?(?=[-−]?{NUMBER})", " equals "),
        one(r"(\d) ?\* ?(?=\d)", lambda m: f"{m[1]} times "),
        one(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)\b", lambda m: f"{m[1]} times 10^{m[2]}"),
        one(r"\^2\b|²", " squared"),
        one(r"\^3\b|³", " cubed"),
        one(r"\s?\^\s?(?=-?\w)", " to the power of "),
        one(r"(?<!\w)~\s?(?=\d)", "about "),
        one(r"(?<!\w)[-−](?=\.?\d)", "minus "),
        one(r"(?<![\w.])(\d+)'\s?(?:(\d+(?:\.\d+)?)(?:\"|'')|(?!\w))", _feet),
        one(r'(?<![\w."“])(\d+(?:\.\d+)?)"(?!\w)', _inches),
        one(r"\b\d{1,4}\s?[x×]\s?\d{1,4}(?:\s?[x×]\s?\d{1,4})?\b", _dimension),
        one(rf"(?<![\w.])({NUMBER})x\b", lambda m: f"{m[1]} times"),
        one(rf"(?<![\w.])({NUMBER})\s?({'|'.join(map(re.escape, [*RATES, *UNITS]))})(?![\w'/])", _unit),
        one(r"\b([48])K\b(?=$|[ ,.;:!?]+(?:[a-z]|$))", lambda m: f"{m[1]} K"),
        one(rf"(?<![\w.])({NUMBER})([kKM])\b", lambda m: f"{m[1]} {SCALES[m[2]]}"),
        one(r"(?<=\d)-(?=[A-Za-z]{2,})|(?<=[A-Za-z])-(?=\d)", " "),
        # Names
        one(r"\b([A-Z]{1,3})&([A-Z]{1,3})\b", lambda m: f"{spelled(m[1])} and {spelled(m[2])}"),
        one(r"\bC\+\+(?!\w)", "C plus plus"),
        one(r"\b([CFJ])#(?!\w)", lambda m: f"{m[1]} sharp"),
        one(r"(?<!\w)\.NET\b", "dot net"),
        one(r"\b(\w+)\.js\b", lambda m: f"{m[1]} dot J.S"),
        one(r"\bGen Z\b", "Generation Z"),
        one(r"\be\.g\.?,?(?=\W)", "for example,"),
        one(r"\bi\.e\.?,?(?=\W)", "that is,"),
        one(r"\betc\.(?=\s+\S)", "et cetera"),
        one(r"\betc\b\.?", "et cetera."),
        one(r"\ba\.k\.a\.?(?=\W)", "also known as"),
        one(r"\bPh\.? ?D\.?(?=(\W*$)?)", lambda m: "P.H.D" + ("." if m[1] == "" and m[0].endswith(".") else "")),
        one(r"\bp\. ?(?=\d)", "page "),
        one(r"\b(no|ed|est|fig|ch|vol|eds|Sun|Sat|Mar|Wed|Dec|Co)\.(?=\W*$)", lambda m: f"{m[1]} ."),
        one(r"\bno\.(?!\s?\d)", "no ."),
        one(r"(\w)\\(?=\w)|(?<!\w)\\(?=\w)", lambda m: f"{m[1] or ''} backslash "),
        one(r"([!?,;:])\1+", lambda m: m[1]),
        one(r"\.{4,}|…+\.*", "..."),
        one(r"(?<!\S)(?:[-=_*~#+|.]{2,}|\|)(?!\S)(?<!\.\.\.)", " "),
    ]  # fmt: skip


def _count(number: str, unit: str, many: str = "") -> str:
    return f"{number} {unit if number == '1' else many or unit + 's'}"


def _price(match: Match, british: bool) -> str:
    minus, sign, low, high, scale, per = match.groups()
    said = money(sign, high or low, scale or "", british)
    if high:
        said = f"{decimal(low.replace(',', ''), british)} to {said}"
    return f"{'minus ' if minus else ''}{said}{' per ' + per[1:] if per else ''}"


AMERICAN, BRITISH = _rules(british=False), _rules(british=True)
