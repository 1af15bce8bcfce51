"""Writes fixtures/sphinx_trie.npz: random n-gram models as CMU Sphinx's binary files, and PocketSphinx's scores of
random sentences.

Run with Python 3.11 in an environment of its own:

    pip install numpy==2.4.6 pocketsphinx==5.1.1
    python tests/decoding/generate_sphinx_trie.py
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
from pocketsphinx import Config, LogMath, NGramModel

WORDS = [*(f"w{number}" for number in range(40)), "Ärger", "日本"]
SENTENCES = 40


def arpa(drawn: random.Random, order: int) -> str:
    """ARPA file with random weights."""
    tables = [{(word,): (-drawn.uniform(1, 3), drawn.choice([0.0, -drawn.random()])) for word in (*WORDS, "</s>")}]
    tables[0]["<s>",] = (-99.0, -0.5)
    for n in range(2, order + 1):
        table: dict[tuple[str, ...], tuple[float, float]] = {}
        contexts = [each for each in tables[-1] if each[-1] != "</s>"]
        while len(table) < 150 * n:
            ngram = (*drawn.choice(contexts), drawn.choice([*WORDS, "</s>"]))
            if n == 2 or ngram[1:] in tables[-1]:
                table[ngram] = (-drawn.uniform(0, 2), drawn.choice([0.0, -drawn.random()]))
        tables.append(table)
    text = "\\data\\\n" + "".join(f"ngram {n}={len(table)}\n" for n, table in enumerate(tables, start=1))
    for n, table in enumerate(tables, start=1):
        text += f"\n\\{n}-grams:\n"
        for ngram, (logprob, backoff) in sorted(table.items()):
            tail = "" if n == order else f" {backoff:.4f}"
            text += f"{logprob:.4f} {' '.join(ngram)}{tail}\n"
    return text + "\n\\end\\\n"


def scores(path: Path, sentences: list[list[str]], order: int) -> list[float]:
    """Natural-log probability of each word and each end, one query after another."""
    base = LogMath(1.0001)
    model = NGramModel(Config(), base, str(path))
    found = []
    for sentence in sentences:
        said = ["<s>"]
        for word in (*sentence, "</s>"):
            said.append(word)
            found.append(model.prob(said[: -order - 1 : -1]) * math.log(1.0001))
    return found


def main() -> None:
    drawn = random.Random(23)
    sentences = [[drawn.choice(WORDS[:12]) for _ in range(drawn.randint(0, 12))] for _ in range(SENTENCES)]
    found: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for order in (2, 3, 4):
            text, binary = Path(folder, f"{order}.arpa"), Path(folder, f"{order}.lm.bin")
            text.write_text(arpa(drawn, order), encoding="utf-8")
            NGramModel(Config(), LogMath(1.0001), str(text)).write(str(binary))
            found[f"{order}"] = np.frombuffer(binary.read_bytes(), np.uint8)
            found[f"{order}.logprobs"] = np.array(scores(binary, sentences, order), np.float32)
    header = {"pocketsphinx": version("pocketsphinx"), "sentences": sentences}
    found["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez_compressed(Path(__file__).parent / "fixtures" / "sphinx_trie.npz", **found)


if __name__ == "__main__":
    main()
