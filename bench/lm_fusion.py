"""Language model fusion: error rate of a beam with and without an n-gram model of the recogniser's tokens.

    pip install 'asr-serve[bench]' jiwer whisper-normalizer
    python bench/lm_fusion.py --data DIR --texts NOVELS --json lm-fusion.json

DIR holds `transcripts.tsv` (bench/README.md). NOVELS is text in UTF-8 to train on: a file, or a folder of .txt files,
like books of Project Gutenberg, whose headers are left out. Texts that the transcripts come from are left out too:
those with eight words in a row of a transcript. No weight is chosen here: every one is a row.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import machine
from clips import Clip, load

SHARED_WORDS = 8
"""Words in a row that a text and a transcript share by common descent, and not by chance."""
HELD_OUT_EVERY, MOST_HELD_OUT = 500, 2_000
HEADER_END, FOOTER_START = re.compile(r"\*\*\* ?START OF[^\n]*\n"), re.compile(r"\*\*\* ?END OF")
SENTENCE_END = re.compile(r"""(?<=[.!?])(["')]*)\s+(?=["'(]*[A-Z])""")
PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "_": "", "*": ""})


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def runs_of(text: str) -> set[tuple[str, ...]]:
    words = words_of(text)
    return {tuple(words[at : at + SHARED_WORDS]) for at in range(len(words) - SHARED_WORDS + 1)}


def read_book(path: Path) -> str:
    text = path.read_text("utf-8", errors="replace").translate(PLAIN).replace("--", ", ")
    if start := HEADER_END.search(text):
        text = text[start.end() :]
    return text[: end.start()] if (end := FOOTER_START.search(text)) else text


def sentences_of(text: str) -> Iterator[str]:
    """Sentences of paragraphs of prose; lines of capitals, numbers and tables are none."""
    for paragraph in re.split(r"\n\s*\n", text):
        if not any(c.islower() for c in paragraph):
            continue
        for sentence in SENTENCE_END.sub(r"\1\n", " ".join(paragraph.split())).split("\n"):
            if sentence and sentence[-1] in ".!?\"')":
                yield sentence


def training_text(asked: argparse.Namespace, clips: Sequence[Clip]) -> tuple[list[str], int, int]:
    """Sentences, how many books they are of, and how many were left out."""
    transcripts = set[tuple[str, ...]]().union(*(runs_of(clip.text) for clip in clips))
    paths = sorted(asked.texts.glob("**/*.txt")) if asked.texts.is_dir() else [asked.texts]
    sentences, characters, books, left_out = list[str](), 0, 0, 0
    for path in paths[:: asked.every]:
        book = read_book(path)
        if transcripts & runs_of(book):
            left_out += 1
            continue
        found = list(sentences_of(book))
        sentences, characters, books = sentences + found, characters + sum(map(len, found)), books + 1
        if characters > asked.most_mb * 1_000_000:
            break
    return sentences, books, left_out


def train_model(asked: argparse.Namespace, sentences: Sequence[str], path: Path) -> dict[str, Any]:
    """Train a model of the recogniser's tokens, write it to `path`, and describe it."""
    from asr_serve.decoding.language_model.kneser_ney import perplexity, train
    from asr_serve.decoding.language_model.ngram_files import write_ngrams
    from asr_serve.models.checkpoints.store import resolve
    from asr_serve.models.registry import asr_card
    from asr_serve.text.tokenizers import load_tokenizer, sentence_encoder

    encode = sentence_encoder(load_tokenizer(resolve(asr_card(asked.model), None)))
    began = time.perf_counter()
    held_out = sentences[::HELD_OUT_EVERY][:MOST_HELD_OUT]
    trained = train(
        (encode(text) for index, text in enumerate(sentences) if index % HELD_OUT_EVERY), asked.order, asked.prune
    )
    train_s = time.perf_counter() - began
    write_ngrams(trained, path)
    measured = perplexity(trained.to_model(), map(encode, held_out))
    return {
        "training_mb": round(sum(map(len, sentences)) / 1e6, 1),
        "order": asked.order,
        "ngrams": [len(table.words) for table in trained.tables],
        "file_mb": round(path.stat().st_size / 1e6, 1),
        "train_s": round(train_s, 1),
        "perplexity_of_held_out_tokens": round(measured.perplexity, 2),
    }


def measure(asked: argparse.Namespace, clips: Sequence[Clip], path: Path) -> list[dict[str, Any]]:
    import asr_serve
    from asr_serve.config import EngineConfig
    from asr_serve_tools.evaluate.wer import normalize, wer

    references, audio, rows = [normalize(clip.text) for clip in clips], [clip.audio for clip in clips], []
    runs: list[tuple[str, dict[str, Any]]] = [("greedy", {}), (f"beam={asked.beam}", {"beam": asked.beam})]
    for weight in asked.weights:
        fused = {"beam": asked.beam, "language_model": "bench", "language_model_weight": weight}
        runs.append((f"beam={asked.beam} weight={weight:g}", fused))
    engine = EngineConfig(prefix_bytes=0, language_models=(f"bench={path}",))
    with asr_serve.load(asked.model, engine=engine) as model:
        model.transcribe(audio[0], vad=False)
        for label, options in runs:
            began = time.perf_counter()
            texts = [each.text for each in model.transcribe(audio, vad=False, **options)]
            wall_s = time.perf_counter() - began
            found = wer(references, [normalize(text) for text in texts])
            rows.append(
                {
                    "name": f"asr-serve {asked.model} {label}",
                    "wer": round(found.percent, 2),
                    "words": found.reference,
                    "substitutions": found.substitutions,
                    "deletions": found.deletions,
                    "insertions": found.insertions,
                    "wall_s": round(wall_s, 2),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if asked.text_folder:
                lines = (f"{clip.path}\t{text}" for clip, text in zip(clips, texts, strict=True))
                (asked.text_folder / f"{label}.tsv").write_text("\n".join(lines) + "\n", "utf-8")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="take one in so many texts")
    parser.add_argument("--most-mb", type=float, default=100.0, help="train on as much text")
    parser.add_argument("--model", default="whisper-tiny-en")
    parser.add_argument("--order", type=int, default=5)
    parser.add_argument("--prune", type=lambda text: [int(each) for each in text.split(",")], default=[0, 0, 1, 1, 1])
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument(
        "--weights", type=lambda text: [float(each) for each in text.split(",")], default=[0.05, 0.1, 0.15, 0.2, 0.3]
    )
    parser.add_argument("--clips", type=int)
    parser.add_argument("--threads", type=int, default=machine.cores())
    parser.add_argument("--text-folder", type=Path, help="a folder for every run's texts")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ["ASR_SERVE_THREADS"] = str(asked.threads)
    clips = load(asked.data, asked.clips)
    sentences, books, left_out = training_text(asked, clips)
    if not sentences:
        raise SystemExit(f"{asked.texts}: no sentence to train on")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bench.ngram.safetensors")
        about = {"books": books, "books_left_out": left_out, **train_model(asked, sentences, path)}
        print(json.dumps(about), file=sys.stderr, flush=True)
        rows = measure(asked, clips, path)
    report = {"bench": "lm_fusion", "machine": machine.describe(asked.threads), "language_model": about, "rows": rows}
    machine.tell(asked.json, report)


if __name__ == "__main__":
    main()
