"""How often Whisper says something else when only part of the silence in its window is encoded, and what tells.

    python bench/padding.py --speech DIR --speech DIR --json padding.json
    python bench/padding.py --data DIR --model whisper-base --margin 0.1 --json padding-check.json

--speech: folders with FLAC files; what was said need not be known, the text of the whole window is the truth.
--data: a folder with transcripts.tsv; error rates of the same texts beside it.

A clip at a time, greedy, first try only. Of every answer the least certain token is kept, by its probability and
by its margin before the second; a table then says for several limits how many clips would be encoded again, whole,
because a token was less certain, and how many texts would then be those of the whole window.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import clips
import machine
import torch
from clips import Audio
from torch import Tensor

from asr_serve.decoding.hypothesis import Hypothesis
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.kernels import PAGE
from asr_serve.models.asr.whisper.encoder_window import AFTER_POSITIONS, END_POSITIONS, SILENCE_STRIDE, WhisperWindow
from asr_serve.models.asr.whisper.whisper import Model as WhisperModel
from asr_serve.models.packing import PagedKeyValues
from asr_serve_tools.evaluate.wer import cer, normalize, wer

Table = dict[str, Any]

LEAST = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
"""Probabilities of an answer's least certain token, below which it is not believed."""
MARGINS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
"""The same by the logarithm of how many times likelier it was than the second."""
UP_TO_S = (3.0, 6.0, 10.0, 15.0, 30.0)
LONGEST_S = 30.0
ONCE = SearchOptions(temperatures=(0.0,))


class Variant(NamedTuple):
    stride: int
    after: int = AFTER_POSITIONS
    before_end: int = END_POSITIONS

    @property
    def name(self) -> str:
        return (
            "whole" if self.stride == 1 else f"stride {self.stride}, {self.after} after, {self.before_end} at the end"
        )


WHOLE = Variant(1)
DEFAULT = Variant(SILENCE_STRIDE)


class Answer(NamedTuple):
    tokens: tuple[int, ...]
    text: str
    least: float
    """Probability of the least certain token."""
    margin: float
    accepted: bool
    """Whether no other temperature would be tried."""
    frames: int
    encode_s: float
    """By the thread's own clock."""
    decode_s: float


class Row:
    """One clip's pages."""

    def __init__(self, model: Any, pool: Tensor, cross: Tensor) -> None:
        self.model, self.pool, self.fed = model, pool, 0
        tables, pages = torch.arange(1, len(pool), dtype=torch.int32), -(-len(cross) // PAGE)
        self.heard, self.frames, self.own = tables[:pages], len(cross), tables[pages:]
        model.kernels.store(pool, cross, self.heard)

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Logits in float32 after each of them, all in one pass."""
        count = len(tokens)
        lengths = torch.arange(self.fed + 1, self.fed + count + 1)
        own = PagedKeyValues(self.pool, self.own.repeat(count, 1), lengths)
        audio = PagedKeyValues(self.pool, self.heard.repeat(count, 1), torch.full((count,), self.frames))
        self.fed += count
        logits: Tensor = self.model.decode(torch.tensor(tokens), own, audio)[0].float()
        return logits

    def back(self, tokens: int) -> None:
        """The last so many were not said."""
        self.fed -= tokens


class Heard:
    """One model, one clip after another."""

    def __init__(self, name: str, dtype: str, threads: int) -> None:
        found = AsrCheckpoint.find(name, None)
        self.card, self.text = found.card, found.tokenizer.decode
        parts = found.build("cpu", dtype)
        parts.device.set_threads(threads)
        assert isinstance(parts.model, WhisperModel)
        self.model, self.device = parts.model, parts.device
        self.positions = int(self.model.config.max_source_positions)
        most = -(-self.model.max_tokens // PAGE) + -(-self.positions // PAGE)
        self.pool = self.device.allocate(1 + most, self.model.layers, 2, self.model.heads, self.model.head_dim * PAGE)

    @torch.inference_mode()
    def answer(self, clip: Audio, variant: Variant, draft: Sequence[int] = ()) -> Answer:
        """`draft`: what it may say, looked at in one pass as far as it holds; the answer is the same without."""
        model = self.model
        model.encoder.window = WhisperWindow(self.positions, *variant)
        began = time.thread_time()
        hidden, packing = model.encode([torch.from_numpy(clip)])
        frames = packing.frames[0]
        step = Row(model, self.pool, model.cross_keys_values(hidden[:frames]))
        encoded = time.thread_time()
        start = self._start(step)
        limit = 4 + int(len(clip) / clips.RATE_HZ * self.card.tokens_per_s)
        hypothesis = Hypothesis(ONCE, model.eos, min(limit, model.max_tokens - len(start)), self.text)
        hypothesis.words_below = model.special_tokens.eot
        token, finish, margin = start[-1], None, math.inf
        ahead = list(draft)
        while finish is None:
            logits = step([token, *ahead])
            logits[:, list(model.special_tokens.suppress)] = -math.inf
            if not hypothesis.tokens:
                logits[0, list(model.special_tokens.suppress_first)] = -math.inf
            best = logits.log_softmax(1).topk(2)
            for place, (values, (token, _)) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
                margin = min(margin, values[0] - values[1])
                finish = hypothesis.append_token(token, values[0])
                if finish or place == len(ahead) or token != ahead[place]:
                    step.back(len(ahead) - place)
                    break
            ahead = []
        least = math.exp(min(hypothesis.logprobs, default=0.0))
        settled = hypothesis.finalize(finish)
        assert settled is not None
        return Answer(
            settled.tokens,
            self.text([token for token in settled.tokens if token < model.special_tokens.eot]),
            least,
            margin,
            not hypothesis.rejected,
            frames,
            encoded - began,
            time.thread_time() - encoded,
        )

    def _start(self, step: Row) -> tuple[int, ...]:
        """Fed but for its last token. The language is heard where the model has several."""
        model, language = self.model, "en"
        if model.special_tokens.multilingual:
            names = list(model.special_tokens.languages)
            logits = step([model.special_tokens.sot])[0]
            language = names[int(logits[list(model.special_tokens.languages.values())].argmax())]
        start: tuple[int, ...] = model.prompt_tokens(SearchOptions(language=language))
        step(start[step.fed : -1])
        return start


def variant_row(
    variant: Variant, truth: Sequence[Answer], heard: Sequence[Answer], lengths_s: Sequence[float]
) -> Table:
    """What a variant costs and how often it says the same, by length too."""
    same = [mine.text == theirs.text for mine, theirs in zip(heard, truth, strict=True)]
    row: Table = {
        "variant": variant.name,
        **variant._asdict(),
        "clips": len(same),
        "frames": round(sum(mine.frames for mine in heard) / len(heard), 1),
        "encode_s": round(sum(mine.encode_s for mine in heard), 2),
        "decode_s": round(sum(mine.decode_s for mine in heard), 2),
        "same": sum(same),
        "same_percent": percent(sum(same), len(same)),
        "same_words": sum(normalize(a.text) == normalize(b.text) for a, b in zip(heard, truth, strict=True)),
        "by_length": [],
    }
    for least_s, most_s in zip((0.0, *UP_TO_S), UP_TO_S, strict=False):
        mine = [ok for ok, length in zip(same, lengths_s, strict=True) if least_s < length <= most_s]
        if mine:
            row["by_length"].append({"up_to_s": most_s, "clips": len(mine), "same": sum(mine)})
    return row


def limits(truth: Sequence[Answer], heard: Sequence[Answer]) -> list[Table]:
    """For each limit: how many clips would be encoded again, and how many texts be those of the whole window."""
    whole_s, once_s = (sum(mine.encode_s for mine in each) for each in (truth, heard))
    table: list[Table] = []
    for kind, values in (("least", LEAST), ("margin", MARGINS)):
        for value in values:
            again = [not mine.accepted or float(getattr(mine, kind)) < value for mine in heard]
            pairs = list(zip(heard, truth, again, strict=True))
            same = sum(anew or mine.text == theirs.text for mine, theirs, anew in pairs)
            paid_s = once_s + sum(theirs.encode_s for _, theirs, anew in pairs if anew)
            table.append(
                {
                    kind: value,
                    "again": sum(again),
                    "again_percent": percent(sum(again), len(again)),
                    "same": same,
                    "same_percent": percent(same, len(again)),
                    "encode_of_whole_percent": percent(paid_s, whole_s),
                }
            )
    return table


def error_rates(said: Sequence[str], answers: Mapping[str, Sequence[Answer]]) -> list[Table]:
    rows: list[Table] = []
    for name, heard in answers.items():
        texts = [mine.text for mine in heard]
        words, letters = wer(said, texts), cer(said, texts)
        rows.append(
            {
                "answers": name,
                "wer_percent": round(words.percent, 2),
                "word_errors": words.errors,
                "words": words.reference,
                "cer_percent": round(letters.percent, 2),
            }
        )
    return rows


def percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 1)


def run(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    about = machine.describe(args.threads)
    model = Heard(args.model, args.dtype, args.threads)
    found: list[Table] = []
    for folder in args.speech:
        heard: dict[Variant, list[Answer]] = {variant: [] for variant in (WHOLE, *args.variant)}
        loaded = clips.without_text(folder, args.clips)
        for number, clip in enumerate(loaded, 1):
            for variant, answers in heard.items():  # turn about
                draft = heard[WHOLE][-1].tokens if variant != WHOLE else ()
                answers.append(model.answer(clip.audio, variant, draft))
            if number % 10 == 0:
                say(f"{folder.name}: {number}/{len(loaded)}")
        lengths_s = [len(clip.audio) / clips.RATE_HZ for clip in loaded]
        truth = heard[WHOLE]
        for variant, answers in heard.items():
            row = {"data": folder.name, **variant_row(variant, truth, answers, lengths_s)}
            if variant != WHOLE:
                row["limits"] = limits(truth, answers)
                row["differ"] = [
                    {"clip": clip.path, "whole": b.text, "packed": a.text, "least": a.least, "margin": a.margin}
                    for clip, a, b in zip(loaded, answers, truth, strict=True)
                    if a.text != b.text
                ]
            found.append(row)
            say(f"{folder.name}, {variant.name}: {row['same']} of {row['clips']} the same, {row['frames']} frames")
    checked: list[Table] = []
    for folder in args.data:
        loaded_clips = [clip for clip in clips.load(folder, args.clips) if len(clip.audio) <= LONGEST_S * clips.RATE_HZ]
        whole = [model.answer(clip.audio, WHOLE) for clip in loaded_clips]
        packed = [model.answer(c.audio, DEFAULT, w.tokens) for c, w in zip(loaded_clips, whole, strict=True)]
        sure = [
            mine if mine.accepted and mine.margin >= args.margin else b for mine, b in zip(packed, whole, strict=True)
        ]
        named = {"whole": whole, "packed": packed, f"packed, again below {args.margin}": sure}
        again = sum(mine is not first for mine, first in zip(sure, packed, strict=True))
        checked.append(
            {
                "data": folder.name,
                "clips": len(whole),
                "again": again,
                "packed_same": sum(a.text == b.text for a, b in zip(packed, whole, strict=True)),
                "checked_same": sum(a.text == b.text for a, b in zip(sure, whole, strict=True)),
                "rates": error_rates([clip.text for clip in loaded_clips], named),
            }
        )
        say(json.dumps(checked[-1]))
    return {
        "bench": "padding",
        "model": args.model,
        "dtype": args.dtype,
        "machine": about,
        "rows": found,
        "checked": checked,
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def variant(text: str) -> Variant:
    try:
        return Variant(*map(int, text.split(",")))
    except (TypeError, ValueError) as wrong:
        raise argparse.ArgumentTypeError(f"{text!r}: expected STRIDE,AFTER,END") from wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--speech", type=Path, action="append", default=[], metavar="DIR", help="clips without text")
    add("--data", type=Path, action="append", default=[], metavar="DIR", help="folder with transcripts.tsv")
    add("--model", default="whisper-tiny-en")
    add("--dtype", default="fp32", choices=("fp32", "bf16"))
    add("--variant", type=variant, action="append", metavar="STRIDE,AFTER,END", help="default: the model's")
    add("--margin", type=float, default=0.1, help="for --data: the limit that is checked (0.1)")
    add("--clips", type=int, metavar="N", help="only N clips of each folder, spread evenly")
    add("--threads", type=int, default=1)
    add("--json", type=Path, metavar="FILE", help="where the result goes, which is printed too")
    args = parser.parse_args()
    args.variant = args.variant or [DEFAULT]
    machine.tell(args.json, run(args))


if __name__ == "__main__":
    main()
