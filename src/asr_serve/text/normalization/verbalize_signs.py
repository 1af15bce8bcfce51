"""Readings of expressions with signs: money, days, times, telephone numbers, fractions, measures.

Each function verbalizes one kind of expression; `verbalization_rules` finds them in a text. Plain numbers may
remain, for `verbalize_numbers`.
"""

from __future__ import annotations

import re

from asr_serve.text.normalization.verbalize_addresses import spelled
from asr_serve.text.normalization.verbalize_numbers import cardinal, decimal, in_pairs, one_by_one, ordinal, plain

Match = re.Match[str]

SCALES = {"k": "thousand", "K": "thousand", "m": "million", "M": "million", "mn": "million", "mm": "million"}
SCALES |= {"b": "billion", "B": "billion", "bn": "billion", "t": "trillion", "tn": "trillion", "T": "trillion"}
MONEY = {
    "$": ("dollar", "cent"), "US$": ("U.S dollar", "cent"), "USD": ("dollar", "cent"),
    "A$": ("Australian dollar", "cent"), "AUD": ("Australian dollar", "cent"),
    "C$": ("Canadian dollar", "cent"), "CAD": ("Canadian dollar", "cent"),
    "£": ("pound", "penny"), "GBP": ("pound", "penny"), "€": ("euro", "cent"), "EUR": ("euro", "cent"),
    "¥": ("yen", ""), "JPY": ("yen", ""), "₩": ("won", ""), "₹": ("rupee", "paisa"), "INR": ("rupee", "paisa"),
    "Rs.": ("rupee", "paisa"), "Rs": ("rupee", "paisa"), "CHF": ("Swiss franc", "cent"),
    "PLN": ("zloty", "grosz"), "zł": ("zloty", "grosz"), "zl": ("zloty", "grosz"),
}  # fmt: skip
PLURALS = {"penny": "pence", "square foot": "square feet", "foot": "feet", "inch": "inches"}
SAME = {"yen", "won", "paisa", "zloty", "grosz"}
UNITS = {
    "m": "meter", "g": "gram", "l": "liter", "L": "liter", "s": "second", "h": "hour", "W": "watt", "V": "volt",
    "dB": "decibel", "mL": "milliliter", "kV": "kilovolt", "mA": "milliamp", "px": "pixel", "gal": "gallon",
    "tsp": "teaspoon", "tbsp": "tablespoon", "kcal": "kilocalorie", "PB": "petabyte", "MP": "megapixel",
    "km²": "square kilometer", "m²": "square meter", "cm²": "square centimeter", "m³": "cubic meter",
    "ft²": "square foot", "km2": "square kilometer", "m2": "square meter", "m3": "cubic meter",
    "kPa": "kilopascal", "hPa": "hectopascal", "ha": "hectare", "GiB": "gibibyte", "MiB": "mebibyte",
}  # fmt: skip
RATES = {
    "m/s": "meters per second", "mi/h": "miles per hour", "MB/s": "megabytes per second",
    "GB/s": "gigabytes per second", "kB/s": "kilobytes per second", "rpm": "R.P.M", "bpm": "beats per minute",
    "mpg": "miles per gallon", "kbps": "kilobits per second", "psi": "P.S.I",
}  # fmt: skip
PARTED = {
    "in": "inch", "ft": "foot", "yd": "yard", "mi": "mile", "oz": "ounce", "lb": "pound", "lbs": "pound",
    "hr": "hour", "qt": "quart", "pt": "pint", "gal": "gallon", "tsp": "teaspoon", "tbsp": "tablespoon",
}  # fmt: skip
"""Units of fractions; after a number each may end with a full stop."""
SIZED = {"m": "meter", "cm": "centimeter", "mm": "millimeter", "km": "kilometer", "ft": "foot", "yd": "yard"}
PARTS = {"½": "1/2", "¼": "1/4", "¾": "3/4", "⅓": "1/3", "⅔": "2/3", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5"}
PARTS |= {"⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"}
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
WEEK = {"Mon": "Monday", "Tue": "Tuesday", "Wed": "Wednesday", "Thu": "Thursday", "Fri": "Friday"}
WEEK |= {"Sat": "Saturday", "Sun": "Sunday"}


def count(number: str, unit: str, many: str = "") -> str:
    return f"{number} {unit if number == '1' else many or unit + 's'}"


def telephone(number: str) -> str:
    """Digit by digit, with a comma between the groups."""
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
    words = [f"{cardinal(units, british)} {_plural(unit, units)}"] if units or not hundredths else []
    if hundredths:
        words.append(f"{cardinal(hundredths, british)} {_plural(hundredth, hundredths)}")
    return " and ".join(words)


def price(match: Match, british: bool) -> str:
    """Price or range of prices, from the groups `-`, `$`, `5`, `10`, `k`, `/month`."""
    minus, sign, low, high, scale, per = match.groups()
    words = money(sign, high or low, scale or "", british)
    if high:
        words = f"{decimal(low.replace(',', ''), british)} to {words}"
    return f"{'minus ' if minus else ''}{words}{' per ' + per[1:] if per else ''}"


def clock(hours: str, minutes: str, half: str = "") -> str:
    """Time of day: `5`, `05`, `p` -> `five oh five P.M`."""
    hour, minute = int(hours), int(minutes or 0)
    words = cardinal(hour) if hour or half else "zero"
    if minute:
        words += f" {'oh ' if minute < 10 else ''}{cardinal(minute)}"
    elif not half:
        words += " o'clock" if 0 < hour < 13 else " hundred"
    return f"{words} {half.upper()}.M" if half else words


def second(match: Match) -> str:
    """Time with seconds: `10`, `05`, `30`, `a` -> `ten oh five and thirty seconds A.M`."""
    hours, minutes, seconds, half = match.groups()
    words = clock(hours, minutes) if int(minutes) else cardinal(int(hours))
    return f"{words} and {count(str(int(seconds)), 'second')} {half.upper()}.M"


def lap(match: Match) -> str:
    """Duration in minutes and seconds, from `45`, `30`; two numbers that sum to 100 are a ratio."""
    minutes, seconds = match[1], match[2]
    if int(minutes) + int(seconds) == 100:
        return f"{minutes} to {seconds}"
    return clock(minutes, seconds) if int(seconds) else f"{minutes} minutes"


def day(month: int, number: int, of: str | None = None, british: bool = False) -> str | None:
    """Day of a month in words, with the year `of` if given; None for a day that does not exist."""
    if not (1 <= month <= 12 and 1 <= number <= 31):
        return None
    name = MONTHS[month - 1]
    words = f"the {ordinal(number)} of {name}" if british else f"{name} {ordinal(number)}"
    return f"{words}, {plain(of)}" if of else words


def date(match: Match, british: bool) -> str:
    """Date from `03`, `04`, `2024`: the American form has the month first; if that is no date, the other order is
    used."""
    first, second, of = int(match[1]), int(match[2]), match[3]
    of = of if len(of) == 4 else f"{19 if int(of) > 50 else 20}{of}"
    month, number = (second, first) if british else (first, second)
    return day(month, number, of, british) or day(number, month, of, british) or match[0]


def moment(match: Match, british: bool) -> str:
    """Date and time from ISO 8601's `2024`, `03`, `15`, `10`, `30`."""
    words = day(int(match[2]), int(match[3]), match[1], british)
    return f"{words}, {match[4]}:{match[5]}" if words else match[0]


def fraction(match: Match) -> str:
    """Fraction, with a whole number if given: `2 `, `1`, `3` -> `two and one third`."""
    whole, numerator, denominator = match[1], int(match[2]), int(match[3])
    if numerator >= denominator and not whole:
        return match[0]
    name = "half" if denominator == 2 else "quarter" if denominator == 4 else ordinal(denominator)
    part = f"{cardinal(numerator)} {name if numerator == 1 else 'halves' if denominator == 2 else name + 's'}"
    if not whole:
        return part
    return f"{cardinal(whole.strip())} and {'a ' + name if numerator == 1 and denominator in (2, 4) else part}"


def over(match: Match, british: bool) -> str:
    """Day or quotient from `3`, `15`: a day if it exists."""
    first, second = int(match[1]), int(match[2])
    words = day(second, first, None, british) if british else day(first, second)
    return words or f"{match[1]} over {match[2]}"


def measure(match: Match) -> str:
    number, unit = match[1], match[2]
    return f"{number} {RATES.get(unit) or _plural(UNITS[unit], 1 if number == '1' else 2)}"


def parted(match: Match) -> str:
    """Fraction of a unit, from `3 `, `1/2`, `in`: writes the unit in words."""
    unit = PARTED[match[3]]
    return f"{match[1] or ''}{match[2]} {_plural(unit, 2 if match[1] else 1)}"


def inch(match: Match) -> str:
    return f"{match[1]} {_plural('inch', 1 if match[1] == '1' else 2)}"


def sized(match: Match) -> str:
    """Dimensions with a unit, from `6x4`, `m`: writes the unit in words."""
    return f"{match[1]} {_plural('inch' if match[2] == 'in' else SIZED[match[2]], 2)}"


def share(match: Match) -> str:
    """Fraction of a thing: `3/4`, `cup` -> `three quarters of a cup`."""
    return f"{fraction(match)} of {'an' if match[4] in ('inch', 'ounce', 'hour', 'acre') else 'a'} {match[4]}"


def compared(match: Match) -> str:
    """Comparison from `7`, `>=`: `is` is added after a number only; after a word the text may already have a
    verb."""
    left, sign = match[1], match[2]
    words = "greater than" if sign[0] in ">≥" else "less than"
    equal = " or equal to" if sign in (">=", "<=", "≥", "≤") else ""
    return f"{left} {'is ' if left.isdigit() else ''}{words}{equal} "


def european(match: Match) -> str:
    """Number in European notation: `1.234,56` -> `1,234.56`."""
    return match[0].translate(str.maketrans(".,", ",."))


def feet(match: Match) -> str:
    """Height from `6`, `2`: inches are read without their unit."""
    whole, inches = match[1], match[2]
    words = f"{cardinal(whole)} {'foot' if whole == '1' else 'feet'}"
    return f"{words} {plain(inches)}" if inches else words


def inches(match: Match) -> str:
    """Inches from a number and `"`, unless the sign closes a quotation."""
    quoted = match.string.count('"', 0, match.start()) % 2
    return match[0] if quoted else count(match[1], "inch", "inches")


def dimension(match: Match) -> str:
    """Dimensions: `2x4`, `1920 x 1080`."""
    sides = re.split(r"\s?[x×]\s?", match[0])
    return " by ".join(in_pairs(side) if len(side) == 4 else plain(side) for side in sides)


def internet(match: Match) -> str:
    """IP address: `192.168.0.1`."""
    return " dot ".join(one_by_one(part) for part in match[0].split("."))


def mixed(match: Match) -> str:
    """Letters and digits together: `AA123`, `MP3`, `B2B`, `H2O`. Up to three capitals are spelled, numbers are
    read like room numbers."""
    words = []
    for part in re.findall(r"[A-Za-z]+|\d+", match[0]):
        if part.isdigit():
            words.append(in_pairs(part))
        else:
            words.append(spelled(part) if len(part) < 4 and part.isupper() else part)
    return " ".join(words)


def _plural(unit: str, number: int) -> str:
    if number == 1 or unit in SAME:
        return unit
    return PLURALS.get(unit, f"{unit}s")
