"""Token ids to text, and text to ids where a tokeniser can."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from asr_serve.errors import WeightsMissing

SPACE = "\u2581".encode()
"""SentencePiece's mark for a space."""
SPECIAL_TOKENS = 3
"""<unk> <s> </s>: never text."""
SPECIAL_TOKEN_MARKS = ("<|", "|>")
"""How special tokens of Whisper's kind begin and end."""


class Tokenizer(Protocol):
    """A model's vocabulary."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Ids that are special or out of range say nothing; bytes that are no UTF-8 become U+FFFD."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, as it stands; what spells a special token in it is left out, and so may be what it has no
        letter for."""


class BytePieceTokenizer:
    """A vocabulary that is a list of byte strings, one per id.

    Source: the `tokenizer.bin` of Moonshine: pieces one after another, each behind its length in bytes; a
    length of 128 or more takes two bytes, low seven bits first.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    @classmethod
    def from_file(cls, path: Path) -> BytePieceTokenizer:
        data, at, pieces = path.read_bytes(), 0, []
        while at < len(data):
            length = data[at]
            at += 1
            if length >= 128:
                length = data[at] * 128 + length - 128
                at += 1
            pieces.append(data[at : at + length])
            at += length
        return cls(pieces)

    def decode(self, tokens: Iterable[int]) -> str:
        spoken = b"".join(self.pieces[t] for t in tokens if SPECIAL_TOKENS <= t < len(self.pieces))
        return spoken.replace(SPACE, b" ").decode(errors="replace").strip()

    def encode(self, text: str) -> list[int]:
        """As the training of such a vocabulary cut it: of two neighbours that are a piece together, those go
        together first whose piece was learnt first, and ids stand in that order. What no piece spells is told
        in bytes.

        Source  byte-pair encoding as in SentencePiece's BPE models (arXiv:1808.06226, section 3.1)
        """
        found: list[int] = []
        for word in text.replace(" ", SPACE.decode()).replace(SPACE.decode(), f"\0{SPACE.decode()}").split("\0"):
            found += self._cut(word)
        return found

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """Of each piece; a byte that is a piece twice is the later one, a letter, where it is one."""
        return {piece: i for i, piece in enumerate(self.pieces) if i >= SPECIAL_TOKENS}

    def _cut(self, word: str) -> list[int]:
        ids, none = self._ids, len(self.pieces)
        parts = [c.encode() for c in word]
        ranks = [ids.get(a + b, none) for a, b in pairwise(parts)]
        """Of each part and the next together."""
        while ranks and (least := min(ranks)) < none:
            at = ranks.index(least)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
            del ranks[at]
            if at:
                ranks[at - 1] = ids.get(parts[at - 1] + parts[at], none)
            if at < len(ranks):
                ranks[at] = ids.get(parts[at] + parts[at + 1], none)
        return [
            i for part in parts for i in ([ids[part]] if part in ids else [SPECIAL_TOKENS + byte for byte in part])
        ]


class SentencePieceTokenizer:
    """A list of strings, one per id, in which SentencePiece's mark stands for a space: the `pieces.json` of
    converted streaming models, which came without the rules that cut text into it."""

    def __init__(self, path: Path) -> None:
        self.pieces: list[str] = json.loads(path.read_text(encoding="utf-8"))

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {piece: i for i, piece in reversed(list(enumerate(self.pieces))) if piece and not _special(piece)}

    @cached_property
    def letters(self) -> frozenset[str]:
        """Those that it can write by themselves, in either case where it knows one."""
        own = {piece for piece in self._ids if len(piece) == 1}
        own |= {piece[1:] for piece in self._ids if len(piece) == 2 and piece[0] == SPACE.decode()}
        return frozenset(own | {each for c in own for each in (c.lower(), c.upper()) if len(each) == 1})

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)

    def encode(self, text: str) -> list[int]:
        """In as few pieces as there can be, of equals those with longer ones first: how exactly a model's training
        cut text its checkpoint does not tell. What the vocabulary has no letter for is left out; a letter of the
        case that it does not know is written in the other. Nothing where a letter or digit cannot be written."""
        mark, known = SPACE.decode(), self._ids
        text = "".join(c if c.isalnum() or c in self.letters or c in "'’" else " " for c in text)
        begins = text[:1].isspace()
        text = mark.join(text.split())
        text = mark + text if begins and text else text
        text = "".join(c for c in map(self._letter, text) if c)
        fewest: list[tuple[int, list[int]] | None] = [None] * len(text) + [(0, [])]
        for at in range(len(text) - 1, -1, -1):
            for end in range(min(len(text), at + self._longest), at, -1):
                rest, piece = fewest[end], known.get(text[at:end])
                if rest is None or piece is None:
                    continue
                best = fewest[at]
                if best is None or rest[0] + 1 < best[0]:
                    fewest[at] = rest[0] + 1, [piece, *rest[1]]
        found = fewest[0] if fewest else None
        return found[1] if found is not None else []

    def _letter(self, c: str) -> str:
        """As the vocabulary has it; empty for a sign that it does not know."""
        own = self._own
        for each in (c, c.lower(), c.upper()):
            if each in own:
                return each
        return c if c.isalnum() else ""

    @cached_property
    def _own(self) -> frozenset[str]:
        return frozenset("".join(self._ids))

    def decode(self, tokens: Iterable[int]) -> str:
        """Ids out of range say nothing; a model that spells may say several spaces, which are one."""
        spoken = "".join(self.pieces[t] for t in tokens if 0 <= t < len(self.pieces))
        return " ".join(spoken.replace(SPACE.decode(), " ").split())


class HubTokenizer:
    """Tokeniser over a Hugging Face `tokenizer.json`."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(path))
        added = self.tokenizer.get_added_tokens_decoder().items()
        # Whisper's times are in some files, marked as if they were text, and in others not at all.
        self.marks = frozenset(
            token
            for token, entry in added
            if entry.special or (entry.content[:2], entry.content[-2:]) == SPECIAL_TOKEN_MARKS
        )

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self.tokenizer.decode([token for token in tokens if token not in self.marks])).strip()

    def encode(self, text: str) -> list[int]:
        return [
            token for token in self.tokenizer.encode(text, add_special_tokens=False).ids if token not in self.marks
        ]


def _special(piece: str) -> bool:
    """A sign of the model's own, like <unk>: never text."""
    return len(piece) > 2 and piece[0] == "<" and piece[-1] == ">"


def first_unencodable_letter(tokenizer: Tokenizer, word: str) -> str:
    """The first letter or digit of a word that the vocabulary cannot write; empty if it can write them all."""
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return ""  # bytes spell anything
    if missing := next((c for c in word if c.isalnum() and c not in tokenizer.letters), ""):
        return missing
    return "" if tokenizer.encode(word) else word[:1]


def token_texts(tokens: Sequence[int], spell: Callable[[list[int]], str]) -> list[str]:
    """The part of the text that each token adds. Bytes of a character that is not whole count to the token that
    completes it; at the very end they count as they are."""
    found: list[str] = []
    start = heard = said = 0
    for count in range(1, len(tokens) + 1):
        # Not from the very first: a text of n tokens would be spelt n times. One group before is enough, so that
        # the space between two is no end of a text.
        text = spell(list(tokens[start:count]))
        whole = text if count == len(tokens) else text.rstrip("\ufffd")
        found.append(whole[said:])
        if len(whole) > said:
            said = len(whole)
            if whole == text:
                start, heard = heard, count
                said = len(spell(list(tokens[start:count])))
    return found


TOKENIZER_FILES = ("tokenizer.bin", "pieces.json", "tokenizer.json")
"""Where a vocabulary may lie; the first that is there is read."""


def load_tokenizer(folder: Path) -> Tokenizer:
    """The vocabulary of a checkpoint folder. Raises WeightsMissing."""
    if (folder / "tokenizer.bin").is_file():
        return BytePieceTokenizer.from_file(folder / "tokenizer.bin")
    if (folder / "pieces.json").is_file():
        return SentencePieceTokenizer(folder / "pieces.json")
    if (folder / "tokenizer.json").is_file():
        return HubTokenizer(folder / "tokenizer.json")
    raise WeightsMissing(
        f"no tokenizer in {folder}", "tokenizer.json, tokenizer.bin or pieces.json beside the weights"
    )
