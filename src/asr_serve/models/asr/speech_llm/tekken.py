"""Mistral's tekken.json, a byte-level BPE vocabulary, as a tokenizer.json.

Source: the format that mistral_common reads; byte-level BPE: Radford et al. 2019, section 2.2.
"""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from asr_serve.errors import WeightsCorrupt

NAME = "tekken.json"


def tokenizer_json(path: Path) -> str:
    """Text of the tokenizer.json. Raises WeightsCorrupt."""
    try:
        content = json.loads(path.read_text("utf-8"))
        config = content["config"]
        specials = int(config["default_num_special_tokens"])
        pieces = [base64.b64decode(entry["token_bytes"]) for entry in content["vocab"]]
        pieces = pieces[: int(config["default_vocab_size"]) - specials]
        names = {int(entry["rank"]): str(entry["token_str"]) for entry in content.get("special_tokens") or ()}
        pattern = str(config["pattern"])
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise WeightsCorrupt(
            f"{path} is no vocabulary: {failure!r}", "the tekken.json that came with the weights"
        ) from (failure)
    letters = byte_letters()
    spelled = ["".join(letters[byte] for byte in piece) for piece in pieces]
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [_special(i, names.get(i, f"<SPECIAL_{i}>")) for i in range(specials)],
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
                "vocab": {names.get(i, f"<SPECIAL_{i}>"): i for i in range(specials)}
                | {text: specials + rank for rank, text in enumerate(spelled)},
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
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def merges(pieces: list[bytes]) -> list[tuple[int, int]]:
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
