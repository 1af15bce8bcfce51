"""Hotwords: how many rare words that a model misses it finds once it is told of them, and what that costs.

    pip install 'asr-serve[bench]' wordfreq whisper-normalizer
    python bench/rich_hotwords.py --data DIR --words LIST --json hotwords.json

DIR holds `transcripts.tsv` (bench/README.md). Rare is a word that is not among the 5,000 most common ones and
stands in LIST (a word a line; of a pronouncing dictionary the first field). The rare words of all transcripts
together are the hotwords, beside so many distractors: other rare words of LIST, drawn by --seed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
from clips import Clip, load

COMMON = 5_000
LEAST_LETTERS = 4


def dictionary(path: Path, common: frozenset[str]) -> list[str]:
    """Its rare words, sorted."""
    first = (line.split()[0].partition("(")[0].lower() for line in path.read_text("utf-8").splitlines() if line.split())
    return sorted({word for word in first if word.isalpha() and len(word) >= LEAST_LETTERS and word not in common})


class Count:
    """Of one run against the plain one, over all clips."""

    def __init__(self, hot: set[str]) -> None:
        self.hot = hot
        self.rare = self.missed = self.recovered = self.lost = self.said = self.wrong = 0
        self.others = self.errors = 0

    def add(self, spoken: list[str], plain: list[str], told: list[str]) -> None:
        before, _, _ = self._heard(spoken, plain)
        after, added, errors = self._heard(spoken, told)
        for word, had, has in zip(spoken, before, after, strict=True):
            if word in self.hot:
                self.rare += 1
                self.missed += not had
                self.recovered += has and not had
                self.lost += had and not has
                self.said += has
            else:
                self.others += 1
        self.wrong += sum(word in self.hot for word in added)
        self.errors += errors

    def _heard(self, spoken: list[str], told: list[str]) -> tuple[list[bool], list[str], int]:
        """Returns whether each word is there; words in place of others or beside them; errors that are not rare
        words'."""
        from rapidfuzz.distance import Levenshtein

        there, added = [False] * len(spoken), list[str]()
        for edit in Levenshtein.opcodes(spoken, told):
            if edit.tag == "equal":
                there[edit.src_start : edit.src_end] = [True] * (edit.src_end - edit.src_start)
            else:
                added += told[edit.dest_start : edit.dest_end]
        rare = sum(word in self.hot and not has for word, has in zip(spoken, there, strict=True))
        return there, added, Levenshtein.distance(spoken, told) - rare

    def row(self) -> dict[str, Any]:
        return {
            "rare_words": self.rare,
            "missed": self.missed,
            "recovered": self.recovered,
            "recall_of_missed": round(self.recovered / max(1, self.missed), 3),
            "lost": self.lost,
            "precision": round(self.said / max(1, self.said + self.wrong), 4),
            "wer_others": round(100 * self.errors / max(1, self.others), 2),
        }


def measure(name: str, clips: Sequence[Clip], asked: argparse.Namespace) -> list[dict[str, Any]]:
    from whisper_normalizer.english import EnglishTextNormalizer
    from wordfreq import top_n_list

    import asr_serve
    from asr_serve.config import EngineConfig

    normal, common = EnglishTextNormalizer(), frozenset(top_n_list("en", COMMON))
    known = dictionary(asked.words, common)
    spoken = [normal(clip.text).split() for clip in clips]
    hot = sorted(set(known) & {word for words in spoken for word in words})
    others = [word for word in known if word not in set(hot)]
    audio, rows, plain = [clip.audio for clip in clips], list[dict[str, Any]](), list[list[str]]()
    with asr_serve.load(name, engine=EngineConfig(prefix_bytes=0)) as model:
        model.transcribe(audio[0])
        for distractors in (None, *asked.distractors):
            words = [] if distractors is None else hot + random.Random(asked.seed).sample(others, distractors)
            began = time.perf_counter()
            texts = [each.text for each in model.transcribe(audio, vad=False, hotwords=words)]
            wall_s = time.perf_counter() - began
            told = [normal(text).split() for text in texts]
            plain = plain or told
            count = Count(set(hot))
            for each in zip(spoken, plain, told, strict=True):
                count.add(*each)
            label = "plain" if distractors is None else f"distractors={distractors}"
            row = {"name": f"asr-serve {name} {label}", "model": name, "hotwords": len(words), **count.row()}
            rows.append({**row, "wall_s": round(wall_s, 2), "wer_others_added": 0.0})
            rows[-1]["wer_others_added"] = round(rows[-1]["wer_others"] - rows[0]["wer_others"], 2)
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if asked.texts:
                lines = (f"{clip.path}\t{text}" for clip, text in zip(clips, texts, strict=True))
                (asked.texts / f"{name}-{label}.tsv").write_text("\n".join(lines) + "\n", "utf-8")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--words", type=Path, required=True)
    parser.add_argument("--models", default="moonshine-tiny-en,whisper-tiny-en")
    parser.add_argument(
        "--distractors", type=lambda text: [int(each) for each in text.split(",")], default=[0, 100, 1000]
    )
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument("--clips", type=int)
    parser.add_argument("--threads", type=int, default=machine.cores())
    parser.add_argument("--texts", type=Path, help="a folder for every run's texts")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    clips = load(asked.data, asked.clips)
    rows = [row for name in asked.models.split(",") for row in measure(name, clips, asked)]
    report = {"bench": "rich_hotwords", "machine": machine.describe(asked.threads), "rows": rows}
    machine.tell(asked.json, report)


if __name__ == "__main__":
    main()
