"""Token ids to text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from asr_serve.errors import WeightsMissing

SPACE = "\u2581".encode()
"""SentencePiece's mark for a space."""
SPECIAL = 3
"""<unk> <s> </s>: never text."""


class BytePieces:
    """Detokeniser over a list of byte strings, one per id.

    Source: the `tokenizer.bin` of Moonshine: pieces one after another, each behind its length in bytes; a
    length of 128 or more takes two bytes, low seven bits first.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    @classmethod
    def read(cls, path: Path) -> BytePieces:
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

    def text(self, tokens: Iterable[int]) -> str:
        """Ids that are special or out of range say nothing; bytes that are no UTF-8 become U+FFFD."""
        spoken = b"".join(self.pieces[t] for t in tokens if SPECIAL <= t < len(self.pieces))
        return spoken.replace(SPACE, b" ").decode(errors="replace").strip()


class HubTokenizer:
    """Detokeniser over a Hugging Face `tokenizer.json`."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(path))

    def text(self, tokens: Iterable[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()


def load(folder: Path) -> BytePieces | HubTokenizer:
    """The detokeniser of a checkpoint folder. Raises WeightsMissing."""
    if (folder / "tokenizer.bin").is_file():
        return BytePieces.read(folder / "tokenizer.bin")
    if (folder / "tokenizer.json").is_file():
        return HubTokenizer(folder / "tokenizer.json")
    raise WeightsMissing(f"no tokenizer in {folder}", "tokenizer.json or tokenizer.bin beside the weights")
