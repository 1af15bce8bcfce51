"""How many of the committed cases are written as people write them: `python bench/rich_itn.py [--wrong]`.

The cases of itn_cases.tsv were written down by hand, before and after looking at what the grammars do; what is
wrong among them stays in the list. Prints, by language, how many are right with what we take of its rewrites
and, beside it, with the grammar alone: wetext, given the same text in lower case without marks, and compared so.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import machine

from asr_serve.text.normalization.inverse import inverse_normalize
from asr_serve.text.normalization.wetext_grammar import load_wetext
from asr_serve.types import Segment

CASES = Path(__file__).parent / "itn_cases.tsv"


def cases() -> list[tuple[str, str, str]]:
    rows = (line.split("\t") for line in CASES.read_text("utf-8").splitlines() if line and not line.startswith("#"))
    return [(language, said, wanted) for language, said, wanted in rows]


def ours(said: str, language: str) -> str:
    return inverse_normalize(Segment(0, 16_000, said), language).text


def alone(said: str, language: str) -> str:
    """By the grammar, as its users call it."""
    normalise, _ = load_wetext()
    return str(normalise(bare(said), lang=language, operator="itn").output_text)


def bare(text: str) -> str:
    """Without marks at the ends of words, in lower case."""
    return re.sub(r"(?<=\w)[-](?=\w)", " ", re.sub(r"[.,!?。，]+(?=\s|$)", "", text.lower()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--wrong", action="store_true", help="tell what is wrong")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    load_wetext()
    rows = []
    for chosen in ("en", "zh", "ja"):
        own = [(said, wanted) for language, said, wanted in cases() if language == chosen]
        began = time.perf_counter()
        made = [ours(said, chosen) for said, _ in own]
        took_ms = 1_000 * (time.perf_counter() - began) / len(own)
        rows.append(
            {
                "name": chosen,
                "cases": len(own),
                "right": sum(found == wanted for found, (_, wanted) in zip(made, own, strict=True)),
                "right_by_grammar_alone": sum(alone(said, chosen) == bare(wanted) for said, wanted in own),
                "ms_each": round(took_ms, 1),
            }
        )
        for found, (said, wanted) in zip(made, own, strict=True):
            if args.wrong and found != wanted:
                print(f"{chosen}: {said} -> {found}, not {wanted}", file=sys.stderr)
    machine.tell(args.json, {"bench": "rich_itn", "machine": machine.describe(machine.cores()), "rows": rows})


if __name__ == "__main__":
    main()
