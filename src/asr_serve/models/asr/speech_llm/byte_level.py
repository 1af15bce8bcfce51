"""Byte-level BPE vocabularies, which publishers write as lists of byte strings by rank, as a tokenizer.json.

Source: byte-level BPE: Radford et al. 2019, section 2.2; the file of tiktoken: a line for each piece, base64 and rank.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from asr_serve.errors import WeightsCorrupt

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Pattern by which Whisper's vocabularies cut a text before pieces are joined."""
BYTES = 256


def read_tiktoken(path: Path) -> list[bytes]:
    """Pieces by rank of a file of tiktoken. Raises WeightsCorrupt."""
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line.strip()]
        ranked = {int(rank): base64.b64decode(piece, validate=True) for piece, rank in lines}
    except (OSError, ValueError) as failure:
        raise WeightsCorrupt(f"{path} is no vocabulary: {failure!r}", "the file beside the weights") from failure
    pieces = [ranked.get(rank, b"") for rank in range(len(lines))]
    if not all(pieces) or len(set(pieces)) < len(pieces) or not {bytes([byte]) for byte in range(BYTES)} <= {*pieces}:
        raise WeightsCorrupt(f"{path} has {len(lines)} pieces", "all bytes, and each piece and rank once")
    return pieces


def tokenizer_json(pieces: Sequence[bytes], pattern: str, specials: Sequence[str] = ()) -> str:
    """Text of a tokenizer.json. `pieces`: all single bytes among them, by rank. `specials`: special tokens, whose ids
    precede those of the pieces."""
    letters = byte_letters()
    spelled = ["".join(letters[byte] for byte in piece) for piece in pieces]
    first = len(specials)
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [_special(i, name) for i, name in enumerate(specials)],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
                ],
            },
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "ignore_merges": True,  # a piece that is a token as a whole is that token
                "vocab": {name: i for i, name in enumerate(specials)}
                | {text: first + rank for rank, text in enumerate(spelled)},
                "merges": [[spelled[left], spelled[right]] for left, right in merges(pieces)],
            },
        },
        ensure_ascii=False,
    )


def _special(token: int, name: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token, "content": name, **flags}


def byte_letters() -> list[str]:
    """The letter that stands for each byte: the printable ones of Latin-1 for themselves, others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTES)]


def merges(pieces: Sequence[bytes]) -> list[tuple[int, int]]:
    """Pairs of ranks that are joined to one piece, those that are joined first first: for each piece of several bytes
    the two that merging in the order of ranks leaves before it."""
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    found = []
    for rank, piece in enumerate(pieces):
        if len(piece) == 1:
            continue
        parts = [piece[i : i + 1] for i in range(len(piece))]
        while len(parts) > 2:
            joined = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
            at = min(range(len(joined)), key=joined.__getitem__)
            if joined[at] >= rank:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2 and all(part in ranks for part in parts):
            found.append((ranks[parts[0]], ranks[parts[1]]))
    return found
