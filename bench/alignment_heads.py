"""Which of a decoder's cross-attention heads tell best when words begin: how models/alignment/heads was chosen.

    python bench/alignment_heads.py references clips.tsv --json words.json      # pip install pocketsphinx==5.1.1
    python bench/alignment_heads.py choose --model moonshine-tiny-en --words words.json

clips.tsv: lines of path<TAB>what is said. Use development speech; what models are measured with stays unseen.
`references` finds the words of each clip by pocketsphinx's forced alignment, where it knows all of them. `choose`
adds, from the best alone, the head that brings words' starts nearest to those, as long as one does: on every other
clip, and on the rest it is measured. It prints heads, how late they look on the median, which a model's card takes
off again, and how far starts are from there.
"""

from __future__ import annotations

import argparse
import json
import re
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import clips
import numpy as np
import torch
from torch import Tensor

from asr_serve.decoding.dtw import LEAST, first_frames, smoothed
from asr_serve.decoding.hypothesis import Hypothesis
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.engine.seq2seq.decoder import DecodeRunner
from asr_serve.engine.seq2seq.encoder import EncodeRunner
from asr_serve.engine.seq2seq.token_aligner import FinishedRow, TokenAligner
from asr_serve.models.alignment_heads import AlignmentHeads
from asr_serve.models.interfaces import EncoderDecoderModel

RATE_HZ = 16_000
PAUSE_SAMPLES = 3_200
"""Of silence around a clip, as a pipeline has around a segment."""
FRAME_S, WINDOW_S = 0.01, 0.0256
"""pocketsphinx's: a frame is named by where its window begins, and taken to be in the middle of it."""
WORST_S = 0.3
"""An error counts no more than this: what is further off is another word."""
LEAST_GAIN_S = 0.0003
BEST = 16
"""Heads that are tried with others: the best of them alone."""
LONGEST_SAMPLES = 28 * RATE_HZ - 2 * PAUSE_SAMPLES


class Looked(NamedTuple):
    """At a clip. `weights` (layers * heads, tokens + 1, frames); `starts`: index of the token that a word begins
    with, and when it does in seconds; not of the first, before which there is silence."""

    weights: Tensor
    starts: list[tuple[int, float]]


def letters(text: str) -> list[str]:
    found = (re.sub(r"[^a-z']", "", word.lower()) for word in text.replace("-", " ").split())
    return [word for word in found if word.strip("'")]


# --- references ------------------------------------------------------------------------------------------------


def references(table: Path) -> dict[str, list[tuple[str, float]]]:
    """Words of each clip with their starts in seconds. Clips with a word that the lexicon lacks are left out."""
    import pocketsphinx

    decoder = pocketsphinx.Decoder(samprate=RATE_HZ, loglevel="FATAL")
    found = {}
    for line in table.read_text().splitlines():
        path, text = line.split("\t")[:2]
        words = letters(text)
        if not words or any(decoder.lookup_word(word) is None for word in words):
            continue
        pcm = np.clip(clips.decode(Path(path)), -1, 1) * 32_767
        decoder.set_align_text(" ".join(words))
        decoder.start_utt()
        decoder.process_raw(pcm.astype("<i2").tobytes(), full_utt=True)
        decoder.end_utt()
        said = [each for each in decoder.seg() or () if not each.word.startswith(("<", "(", "["))]
        if [re.sub(r"\(\d+\)$", "", each.word) for each in said] == words:
            starts = [each.start_frame * FRAME_S + WINDOW_S / 2 for each in said]
            found[path] = list(zip(words, starts, strict=True))
    return found


# --- heads -----------------------------------------------------------------------------------------------------


def look(name: str, words: dict[str, list[tuple[str, float]]]) -> tuple[Any, list[Looked]]:
    """With all heads of all layers, over what the model hears in each clip."""
    checkpoint = AsrCheckpoint.find(name, None)
    parts = checkpoint.build("cpu", "auto")
    model = parts.model
    assert isinstance(model, EncoderDecoderModel)
    model.alignment = AlignmentHeads({layer: tuple(range(model.heads)) for layer in range(model.layers)})
    runner = DecodeRunner(model, parts.device, 8, 256 << 20, model.count_frames(28 * RATE_HZ))
    encoder, aligner = EncodeRunner(model, parts.device), TokenAligner(runner)
    special = model.special_tokens
    options = SearchOptions(words=True, language="en" if special and special.multilingual else "")
    found = []
    for path, reference in words.items():
        pcm = clips.decode(Path(path))
        if len(pcm) > LONGEST_SAMPLES:
            continue
        pcm = np.pad(pcm, PAUSE_SAMPLES)
        hypothesis = Hypothesis(options, model.eos, model.max_tokens - 8, parts.decode_text)
        row = runner.add_row(0, encoder.encode([pcm])[0], hypothesis)
        ended = runner.prefill_and_verify([row]) if row.needs_prefill else []
        while not ended:
            ended = runner.step()
        assert row.finish is not None
        answer = hypothesis.finalize(row.finish)
        if answer is not None and answer.tokens:
            scores = aligner.attention_scores([FinishedRow(row, answer, len(pcm))])[0]
            texts = [parts.decode_text(list(answer.tokens[:end])) for end in range(len(answer.tokens) + 1)]
            weights = smoothed(torch.softmax(scores, dim=2))
            found.append(Looked(weights, starts(texts, reference)))
        runner.remove_row(row)
    return model, found


def starts(texts: list[str], reference: list[tuple[str, float]]) -> list[tuple[int, float]]:
    """`texts`: what the first so many tokens say."""
    heard = [(match[0].lower(), match.start()) for match in re.finditer(r"[A-Za-z']+", texts[-1])]
    tokens = [next(i for i, text in enumerate(texts[1:]) if len(text) > at) for _, at in heard]
    same = SequenceMatcher(None, [word for word, _ in heard], [word for word, _ in reference], autojunk=False)
    pairs = [(a + i, b + i) for a, b, count in same.get_matching_blocks() for i in range(count)]
    return [(tokens[a], reference[b][1] + PAUSE_SAMPLES / RATE_HZ) for a, b in pairs if b]


def errors_s(heads: list[int], looked: list[Looked], frame_s: float) -> np.ndarray:
    """Of all words' starts."""
    found = []
    for weights, words in looked:
        begins = first_frames(-torch.log(weights[heads].mean(dim=0) + LEAST).numpy())
        found += [begins[token] * frame_s - start_s for token, start_s in words]
    return np.array(found)


def spread_s(errors: np.ndarray) -> float:
    """How far starts are from their median, on average."""
    return float(np.minimum(np.abs(errors - np.median(errors)), WORST_S).mean())


def choose(name: str, words: dict[str, list[tuple[str, float]]]) -> dict[str, Any]:
    model, looked = look(name, words)
    chosen_on, measured_on, frame_s = looked[::2], looked[1::2], model.frame_samples / RATE_HZ
    alone = sorted((spread_s(errors_s([h], chosen_on, frame_s)), h) for h in range(model.layers * model.heads))
    left, heads, best = [head for _, head in alone[:BEST]], list[int](), WORST_S
    while left:
        spread, head = min((spread_s(errors_s([*heads, head], chosen_on, frame_s)), head) for head in left)
        if spread > best - LEAST_GAIN_S:
            break
        heads, best = [*heads, head], spread
        left.remove(head)
    rest = errors_s(heads, measured_on, frame_s)
    off = np.abs(rest - np.median(rest))
    return {
        "model": name,
        "heads": sorted(divmod(head, model.heads) for head in heads),
        "shift_ms": round(-1_000 * float(np.median(rest))),
        "words": len(rest),
        "p50_ms": round(1_000 * float(np.median(off)), 1),
        "p90_ms": round(1_000 * float(np.percentile(off, 90)), 1),
        "chosen_on": len(chosen_on),
        "measured_on": len(measured_on),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    jobs = parser.add_subparsers(dest="job", required=True)
    aligned = jobs.add_parser("references")
    aligned.add_argument("table", type=Path)
    aligned.add_argument("--json", type=Path, required=True)
    chosen = jobs.add_parser("choose")
    chosen.add_argument("--model", required=True)
    chosen.add_argument("--words", type=Path, required=True)
    args = parser.parse_args()
    if args.job == "references":
        found = references(args.table)
        args.json.write_text(json.dumps(found))
        print(f"{len(found)} clips, {sum(map(len, found.values()))} words")
    else:
        print(json.dumps(choose(args.model, json.loads(args.words.read_text()))))


if __name__ == "__main__":
    main()
