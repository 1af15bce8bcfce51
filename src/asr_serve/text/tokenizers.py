"""Tokenizers: token ids to text, and text to ids where possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import msgspec

from asr_serve.errors import WeightsCorrupt, WeightsMissing
from asr_serve.transfer.checksum import file_checksum

SPACE = "\u2581".encode()
"""SentencePiece's symbol for a space."""
SPECIAL_TOKENS = 3
"""Number of special tokens at the start of a vocabulary, <unk> <s> </s>, which are never text."""
SPECIAL_TOKEN_MARKS = ("<|", "|>")
"""Start and end of special tokens of Whisper's kind."""


class Tokenizer(Protocol):
    """A model's vocabulary."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of ids. Special ids and ids out of range are ignored; invalid UTF-8 becomes U+FFFD."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, unnormalized. Text that spells a special token is left out, and so may be characters that
        the vocabulary lacks."""

    def token_names(self) -> list[str]:
        """Name of each id in a language model over tokens: the piece as published. Names differ from each other and
        have no space: other ids are called <token:ID>."""


class BytePieceTokenizer:
    """Tokenizer with a vocabulary of byte strings, one per id.

    Source: the `tokenizer.bin` of Moonshine: pieces one after another, each after its length in bytes; a
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
        data = b"".join(self.pieces[t] for t in tokens if SPECIAL_TOKENS <= t < len(self.pieces))
        return data.replace(SPACE, b" ").decode(errors="replace").strip()

    def encode(self, text: str) -> list[int]:
        """Ids of a text by byte-pair encoding: of all neighbours that form a piece, the pair whose piece has the
        lowest id is merged first, since ids are in the order of training. Characters that no piece spells become
        byte tokens.

        Source  byte-pair encoding as in SentencePiece's BPE models (arXiv:1808.06226, section 3.1)
        """
        found: list[int] = []
        for word in text.replace(" ", SPACE.decode()).replace(SPACE.decode(), f"\0{SPACE.decode()}").split("\0"):
            found += self._cut(word)
        return found

    def token_names(self) -> list[str]:
        names = [piece.decode(errors="ignore") for piece in self.pieces]
        return _distinct_names(
            [name if name.encode() == piece else "" for name, piece in zip(names, self.pieces, strict=True)]
        )

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """Id of each piece; of a byte that is in the vocabulary twice, the later id, which is the letter."""
        return {piece: i for i, piece in enumerate(self.pieces) if i >= SPECIAL_TOKENS}

    def _cut(self, word: str) -> list[int]:
        ids, no_rank = self._ids, len(self.pieces)
        parts = [c.encode() for c in word]
        ranks = [ids.get(a + b, no_rank) for a, b in pairwise(parts)]
        """Rank of each part merged with the next."""
        while ranks and (least := min(ranks)) < no_rank:
            at = ranks.index(least)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
            del ranks[at]
            if at:
                ranks[at - 1] = ids.get(parts[at - 1] + parts[at], no_rank)
            if at < len(ranks):
                ranks[at] = ids.get(parts[at] + parts[at + 1], no_rank)
        return [i for part in parts for i in ([ids[part]] if part in ids else [SPECIAL_TOKENS + byte for byte in part])]


class SentencePieceTokenizer:
    """Tokenizer with a vocabulary of strings, one per id, with SentencePiece's symbol for a space: the
    `pieces.json` of converted streaming models, which do not include their segmentation rules."""

    def __init__(self, path: Path) -> None:
        """Reads the pieces. Raises WeightsCorrupt."""
        try:
            self.pieces = msgspec.json.decode(path.read_bytes(), type=list[str])
        except msgspec.MsgspecError as failure:
            raise WeightsCorrupt(f"the pieces {path} cannot be read: {failure}", "a list of texts in JSON") from failure

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {piece: i for i, piece in reversed(list(enumerate(self.pieces))) if piece and not _special(piece)}

    def token_names(self) -> list[str]:
        return _distinct_names(self.pieces)

    @cached_property
    def letters(self) -> frozenset[str]:
        """Letters that are pieces by themselves, in both cases where the vocabulary has one."""
        single = {piece for piece in self._ids if len(piece) == 1}
        single |= {piece[1:] for piece in self._ids if len(piece) == 2 and piece[0] == SPACE.decode()}
        return frozenset(single | {variant for c in single for variant in (c.lower(), c.upper()) if len(variant) == 1})

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)

    def encode(self, text: str) -> list[int]:
        """Ids of a text in the fewest pieces, on ties with longer pieces first, because the checkpoint does not
        define the segmentation used in training. Signs that the vocabulary lacks are left out; a letter whose case
        it lacks is written in the other. Empty where a letter or digit cannot be written."""
        mark, ids = SPACE.decode(), self._ids
        text = "".join(c if c.isalnum() or c in self.letters or c in "'’" else " " for c in text)
        begins = text[:1].isspace()
        text = mark.join(text.split())
        text = mark + text if begins and text else text
        text = "".join(c for c in map(self._letter, text) if c)
        fewest: list[tuple[int, list[int]] | None] = [None] * len(text) + [(0, [])]
        for at in range(len(text) - 1, -1, -1):
            for end in range(min(len(text), at + self._longest), at, -1):
                rest, piece = fewest[end], ids.get(text[at:end])
                if rest is None or piece is None:
                    continue
                best = fewest[at]
                if best is None or rest[0] + 1 < best[0]:
                    fewest[at] = rest[0] + 1, [piece, *rest[1]]
        found = fewest[0] if fewest else None
        return found[1] if found is not None else []

    def _letter(self, c: str) -> str:
        """A character in a case that the vocabulary has; empty for a sign that it lacks."""
        known = self._own
        for variant in (c, c.lower(), c.upper()):
            if variant in known:
                return variant
        return c if c.isalnum() else ""

    @cached_property
    def _own(self) -> frozenset[str]:
        return frozenset("".join(self._ids))

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of ids. Ids out of range are ignored; several spaces, which spelling models emit, become one."""
        text = "".join(self.pieces[t] for t in tokens if 0 <= t < len(self.pieces))
        return " ".join(text.replace(SPACE.decode(), " ").split())


class HubTokenizer:
    """Tokenizer over a Hugging Face `tokenizer.json`."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(path))
        added = self.tokenizer.get_added_tokens_decoder().items()
        # Some files of Whisper hold its time tokens, declared as text; others do not hold them at all.
        self.marks = frozenset(
            token
            for token, entry in added
            if entry.special or (entry.content[:2], entry.content[-2:]) == SPECIAL_TOKEN_MARKS
        )

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self.tokenizer.decode([token for token in tokens if token not in self.marks])).strip()

    def encode(self, text: str) -> list[int]:
        return [token for token in self.tokenizer.encode(text, add_special_tokens=False).ids if token not in self.marks]

    def special_token(self, name: str) -> int:
        """Id of a special token, which `encode` leaves out of any text. Raises WeightsCorrupt where there is none."""
        token = self.tokenizer.token_to_id(name)
        if token is None:
            raise WeightsCorrupt(f"the tokenizer has no token {name}", "the tokenizer.json that came with the weights")
        return int(token)

    def token_names(self) -> list[str]:
        pieces = {token: piece for piece, token in self.tokenizer.get_vocab(with_added_tokens=True).items()}
        return _distinct_names([pieces.get(token, "") for token in range(max(pieces, default=-1) + 1)])


def _special(piece: str) -> bool:
    """Returns whether a piece is a special token, like <unk>, which is never text."""
    return len(piece) > 2 and piece[0] == "<" and piece[-1] == ">"


SENTENCE_MARKS = ("<s>", "</s>", "<unk>")
"""Words of language models that stand for the ends of a sentence and for unknown words, and so for no token."""


def _distinct_names(pieces: Sequence[str]) -> list[str]:
    """Names as Tokenizer.token_names returns them; of equal pieces the last has the name."""
    ids = {piece: token for token, piece in enumerate(pieces)}
    return [
        piece
        if ids[piece] == token and piece.split() == [piece] and piece not in SENTENCE_MARKS
        else f"<token:{token}>"
        for token, piece in enumerate(pieces)
    ]


def sentence_encoder(tokenizer: Tokenizer) -> Callable[[str], list[str]]:
    """Function that returns the token names of a sentence as a recogniser emits them: one space between words, and one
    before the first, where the vocabulary has words with a space."""
    names, mark = tokenizer.token_names(), SPACE.decode()
    separates = not any(len(name) > 1 and name[0] == mark for name in names)

    def encode(text: str) -> list[str]:
        words = text.split()
        tokens = [names[token] for token in tokenizer.encode(f" {' '.join(words)}")] if words else []
        return tokens[1:] if separates and tokens[:1] == [mark] else tokens

    return encode


def first_unencodable_letter(tokenizer: Tokenizer, word: str) -> str:
    """First letter or digit of a word that the vocabulary cannot write; empty if it can write them all."""
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return ""  # bytes spell anything
    if missing := next((c for c in word if c.isalnum() and c not in tokenizer.letters), ""):
        return missing
    return "" if tokenizer.encode(word) else word[:1]


def token_texts(tokens: Sequence[int], spell: Callable[[list[int]], str]) -> list[str]:
    """Part of the text that each token adds. Bytes of an incomplete character count for the token that completes
    it; at the very end they count as they are."""
    return [part for part, _ in token_parts(tokens, spell)]


def token_parts(tokens: Sequence[int], spell: Callable[[list[int]], str]) -> Iterator[tuple[str, bool]]:
    """Yields the texts of `token_texts`, each with whether an incomplete character follows it."""
    start = group = emitted = 0
    for count in range(1, len(tokens) + 1):
        # Decoding from the very first token would take quadratic time. One preceding group is enough context, so
        # that the space between two groups is not stripped as the end of a text.
        text = spell(list(tokens[start:count]))
        whole = text if count == len(tokens) else text.rstrip("\ufffd")
        yield whole[emitted:], whole != text
        if len(whole) > emitted:
            emitted = len(whole)
            if whole == text:
                start, group = group, count
                emitted = len(spell(list(tokens[start:count])))


def read_hub_tokenizer(path: Path) -> HubTokenizer:
    """Tokenizer of a file in the form of tokenizer.json. Raises WeightsMissing."""
    if not path.is_file():
        raise WeightsMissing(f"{path} is not there", "config.json names it", "convert or fetch the checkpoint again")
    return HubTokenizer(path)


TOKENIZER_FILES = ("tokenizer.bin", "pieces.json", "tokenizer.json")
"""Files that may hold a vocabulary; the first that exists is read."""


def tokenizer_checksum(folder: Path) -> int:
    """Checksum of the file that `load_tokenizer` reads; 0 without any."""
    path = next((path for name in TOKENIZER_FILES if (path := folder / name).is_file()), None)
    return 0 if path is None else file_checksum(path)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Tokenizer of a checkpoint folder. Raises WeightsMissing, WeightsCorrupt."""
    if (folder / "tokenizer.bin").is_file():
        return BytePieceTokenizer.from_file(folder / "tokenizer.bin")
    if (folder / "pieces.json").is_file():
        return SentencePieceTokenizer(folder / "pieces.json")
    if (folder / "tokenizer.json").is_file():
        return HubTokenizer(folder / "tokenizer.json")
    raise WeightsMissing(f"no tokenizer in {folder}", "tokenizer.json, tokenizer.bin or pieces.json beside the weights")
