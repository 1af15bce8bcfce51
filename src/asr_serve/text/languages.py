"""Names of languages as people and clients write them, to ISO 639-1 codes."""

from __future__ import annotations

import unicodedata

_NAMES = {
    "ar": "arabic العربية 阿拉伯文",
    "de": "german deutsch 德文 德语",
    "en": "english 英文 英语",
    "es": "spanish español castellano 西班牙文 西班牙语",
    "fr": "french français 法文 法语",
    "hi": "hindi हिन्दी",
    "it": "italian italiano",
    "ja": "japanese 日本語 日文 日语",
    "ko": "korean 한국어 韩文 韩语",
    "nl": "dutch nederlands",
    "pl": "polish polski",
    "pt": "portuguese português",
    "ru": "russian русский 俄文 俄语",
    "tr": "turkish türkçe",
    "uk": "ukrainian українська",
    "vi": "vietnamese 越南文 越南语",
    "yue": "cantonese 粤语 廣東話",
    "zh": "chinese mandarin 中文 汉语 普通话",
}
_CODES = {name: code for code, names in _NAMES.items() for name in names.split()}

_LATIN = "cs da de en es et fi fr hr hu id it lt lv ms nl no pl pt ro sk sl sv sw tl tr vi"
SCRIPTS = {
    **dict.fromkeys(_LATIN.split(), ("LATIN",)),
    **dict.fromkeys(("be", "bg", "ru", "uk"), ("CYRILLIC",)),
    **dict.fromkeys(("ar", "fa", "ur"), ("ARABIC",)),
    "el": ("GREEK",),
    "hi": ("DEVANAGARI",),
    "hy": ("ARMENIAN",),
    "ja": ("CJK", "HIRAGANA", "KATAKANA", "LATIN"),
    "ko": ("HANGUL", "LATIN"),
    "yue": ("CJK", "LATIN"),
    "zh": ("CJK", "LATIN"),
}
"""What languages are written in; of others nothing is known."""


def script(letter: str) -> str:
    """What a letter belongs to, as Unicode names it.

    >>> script("é"), script("語"), script("ж")
    ('LATIN', 'CJK', 'CYRILLIC')
    """
    return unicodedata.name(letter, "OTHER").replace("-", " ").partition(" ")[0]


def code(name: str) -> str:
    """The code of a language; what is no name comes back as it is, in lower case.

    >>> code("English"), code("中文"), code("EN"), code("en-GB"), code("klingon")
    ('en', 'zh', 'en', 'en', 'klingon')
    """
    folded = name.strip().casefold()
    tag = folded.replace("_", "-").partition("-")[0]
    return _CODES.get(folded, tag if len(tag) <= 3 else folded)
