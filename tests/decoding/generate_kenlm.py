"""Writes fixtures/kenlm.npz: random n-gram models as KenLM's binary files, and KenLM's scores of random sentences.

Run with Python 3.11 in an environment of its own, with the path of KenLM's `build_binary`, which its package for
Python does not hold (https://github.com/kpu/kenlm, compile_query_only.sh):

    pip install numpy==2.4.6 kenlm==0.3.0
    python tests/decoding/generate_kenlm.py kenlm/bin/build_binary
"""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import kenlm
import numpy as np

KINDS = {
    "probing": ["-p", "3", "probing"],
    "trie": ["trie"],
    "quantized_trie": ["-q", "5", "-b", "4", "trie"],
    "compressed_trie": ["-a", "8", "trie"],
    "quantized_compressed_trie": ["-q", "7", "-a", "255", "trie"],
}
WORDS = [*(f"w{number}" for number in range(40)), "Ärger", "日本"]
SENTENCES = 40


def ngrams(drawn: random.Random, order: int, *, unknown: bool, holes: bool) -> list[dict[tuple[str, ...], list[float]]]:
    """N-grams of all orders with random weights. `holes`: some n-grams lack the one without their first word, as
    SRILM's pruning leaves them."""
    words = [*WORDS, "</s>", *(["<unk>"] if unknown else [])]
    tables = [{(word,): [-drawn.uniform(1, 3), drawn.choice([0.0, -drawn.random()])] for word in [*words, "<s>"]}]
    tables[0][("<s>",)][0] = -99.0
    for n in range(2, order + 1):
        table: dict[tuple[str, ...], list[float]] = {}
        contexts = [each for each in tables[-1] if each[-1] != "</s>"]
        while len(table) < 150 * n:
            ngram = (*drawn.choice(contexts), drawn.choice(words))
            if n == 2 or ngram[1:] in tables[-1] or (holes and drawn.random() < 0.1):
                table[ngram] = [-drawn.uniform(0, 2), drawn.choice([0.0, -drawn.random()])]
        tables.append(table)
    return tables


def arpa(tables: list[dict[tuple[str, ...], list[float]]]) -> str:
    file = io.StringIO()
    file.write("\\data\\\n" + "".join(f"ngram {n}={len(table)}\n" for n, table in enumerate(tables, start=1)))
    for n, table in enumerate(tables, start=1):
        file.write(f"\n\\{n}-grams:\n")
        for ngram, (logprob, backoff) in table.items():
            tail = "" if n == len(tables) else f"\t{backoff:.6f}"
            file.write(f"{logprob:.6f}\t{' '.join(ngram)}{tail}\n")
    return file.getvalue() + "\n\\end\\\n"


def main(build_binary: str) -> None:
    drawn = random.Random(23)
    found: dict[str, np.ndarray] = {}
    sentences = [
        [drawn.choice([*WORDS, "never"] if drawn.random() < 0.1 else WORDS[:12]) for _ in range(drawn.randint(0, 12))]
        for _ in range(SENTENCES)
    ]
    models = {
        "bigrams": ngrams(drawn, 2, unknown=True, holes=False),
        "trigrams": ngrams(drawn, 3, unknown=True, holes=False),
        "holes": ngrams(drawn, 4, unknown=False, holes=True),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, tables in models.items():
            path = Path(folder, f"{name}.arpa")
            path.write_text(arpa(tables), encoding="utf-8")
            found[f"{name}.arpa"] = np.frombuffer(path.read_bytes(), np.uint8)
            lower = []
            for n in range(1, len(tables)):
                lower.append(str(Path(folder, f"{name}{n}.arpa")))
                Path(lower[-1]).write_text(arpa(tables[:n]), encoding="utf-8")
            kinds = KINDS | ({"rest_probing": ["-r", " ".join(lower), "probing"]} if name == "trigrams" else {})
            for kind, options in kinds.items():
                binary = Path(folder, f"{name}.{kind}")
                subprocess.run([build_binary, *options, path, binary], check=True, capture_output=True)
                found[f"{name}.{kind}"] = np.frombuffer(binary.read_bytes(), np.uint8)
                model = kenlm.Model(str(binary))
                scores = [[score for score, _, _ in model.full_scores(" ".join(each))] for each in sentences]
                found[f"{name}.{kind}.log10"] = np.concatenate(scores).astype(np.float32)
        without = Path(folder, "without")
        subprocess.run(
            [build_binary, "-v", "trie", Path(folder, "bigrams.arpa"), without], check=True, capture_output=True
        )
        found["bigrams.without_words"] = np.frombuffer(without.read_bytes(), np.uint8)
    header = {"kenlm": version("kenlm"), "sentences": sentences}
    found["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez_compressed(Path(__file__).parent / "fixtures" / "kenlm.npz", **found)


if __name__ == "__main__":
    main(sys.argv[1])
