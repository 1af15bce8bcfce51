"""Mistral's tekken.json, a byte-level BPE vocabulary, as a tokenizer.json.

Source: the format that mistral_common reads.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr.speech_llm import byte_level

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
    return byte_level.tokenizer_json(pieces, pattern, [names.get(i, f"<SPECIAL_{i}>") for i in range(specials)])
