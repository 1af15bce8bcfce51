"""Addresses and paths, read aloud: `user@example.com` -> `user at example dot com`."""

from __future__ import annotations

import re

from asr_serve.text.normalization.verbalize_numbers import in_pairs

ENDINGS = "com|org|net|edu|gov|mil|int|info|biz|app|dev|shop|blog|online|site"
ENDINGS += "|io|ai|co|uk|us|de|fr|eu|ca|au|tv|me|ly|jp|in"
FILES = "html?|php|pdf|txt|jpe?g|png|gif|svg|mp3|mp4|wav|csv|tsv|xml|json|ya?ml|toml|css|js|ts|py"
FILES += "|cpp|rs|go|sh|exe|zip|gz|tar|docx?|xlsx?|pptx?|md|log|ini|cfg"
_end = r"(?<![.,;:!?'\")\]])"
ADDRESS = (
    rf"(?:https?|ftp)://[^\s<>\"]+{_end}|\bwww\.[^\s<>\"]+{_end}"
    r"|(?<![\w.+-])[\w.+%-]+@[A-Za-z\d-]+(?:\.[A-Za-z\d-]+)+"
    rf"|(?<![\w.@-])(?:[A-Za-z\d][A-Za-z\d-]*\.)+(?:{ENDINGS})\b(?:[:/][^\s<>\"]*{_end})?(?!\.?\w)"
)
PATH = rf"(?<!\S)(?:~|\.{{1,2}})?/[\w.-]+(?:/[\w.-]*)+{_end}|(?<![\w.])[\w-]+\.(?:{FILES})\b(?!\.\w)"
SIGNS = {
    ".": "dot", "/": "slash", "-": "dash", "_": "underscore", "?": "question mark", "=": "equals", "&": "and",
    "#": "hash", "%": "percent", ":": "colon", "+": "plus", "~": "tilde", "@": "at", "\\": "backslash",
}  # fmt: skip
_named = """
www io ai uk us tv eu edu html htm php pdf txt css xml ftp http https api mp js ts py jpg png svg csv url faq usa
bbc cpp rs sh exe wav docx
"""
NAMED = frozenset(_named.split())
"""Parts of addresses that are spelled, though some could be read as words."""
PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\w\s]|_")


def spelled(letters: str) -> str:
    """Letters as initials, which are read one by one: `uk` -> `U.K`."""
    return ".".join(letters.upper())


def address(text: str) -> str:
    """Address in words, without its scheme."""
    bare = re.sub(r"^(?:https?|ftp)://", "", text)
    return path(bare.rstrip("/"))


def path(text: str) -> str:
    words = []
    for part in PARTS.findall(text):
        if part.isdigit():
            words.append(in_pairs(part))
        elif part.isalpha():
            words.append(_word(part))
        elif part in SIGNS:
            words.append(SIGNS[part])
    return " ".join(words)


def _word(part: str) -> str:
    low = part.lower()
    if len(low) == 1 or low in NAMED or not re.search("[aeiouy]", low):
        return spelled(part)
    return part
