"""Scores of sentences by a causal language model, through transformers, an optional package that only this file
loads."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asr_serve.config import cache_dir
from asr_serve.devices.cpu import bf16_supported
from asr_serve.errors import ProgramMissing, WeightsCorrupt
from asr_serve.models.checkpoints.gguf_causal_lm import convert
from asr_serve.models.checkpoints.store import make_cache_folder
from asr_serve.transfer.checksum import file_checksum

MAX_BATCH_LOGITS = 1 << 26
"""Most logits computed at once, 256 tokens of a quarter of a million words; one sentence is always computed whole."""
CONVERSION = 2
"""Version of the conversion."""
MAX_SENTENCE_TOKENS = 255
"""Tokens of a sentence that are read; the rest is not scored. Half a minute of speech has less than half as many, and
no window of attention is shorter."""


class PrefixBatch(NamedTuple):
    """Distinct prefixes of sentences, one after another: each is one token after its parent, and is computed once
    however many sentences begin with it."""

    tokens: list[int]
    parents: list[int]
    """Index of each prefix without its last token, smaller than its own; -1: the start token alone."""
    depths: list[int]
    """Tokens before the last one."""
    sentences: list[tuple[int, int]]
    """Number of a sentence, and the index of its whole text."""


def pack_prefixes(rows: Sequence[Sequence[int]], max_prefixes: int) -> list[PrefixBatch]:
    """Returns batches that cover all rows, each with up to `max_prefixes` prefixes, or with one row.

    Neighbours of the sorted rows are compared, so that rows with long prefixes in common share a batch.
    """
    batches: list[PrefixBatch] = []
    path: list[int] = []
    before: Sequence[int] = ()
    for number in sorted(range(len(rows)), key=lambda number: tuple(rows[number])):
        row = rows[number]
        shared = next(
            (at for at, (a, b) in enumerate(zip(before, row, strict=False)) if a != b), min(len(before), len(row))
        )
        if not batches or len(batches[-1].tokens) + len(row) - shared > max_prefixes:
            batches.append(PrefixBatch([], [], [], []))
            shared = 0
        batch = batches[-1]
        del path[shared:]
        for depth in range(shared, len(row)):
            batch.parents.append(path[-1] if path else -1)
            path.append(len(batch.tokens))
            batch.tokens.append(row[depth])
            batch.depths.append(depth)
        batch.sentences.append((number, path[-1]))
        before = row
    return batches


class CausalSentenceScorer:
    """SentenceScorer over a causal language model on the CPU: in bfloat16 where the CPU multiplies it, else float32.

    A sentence follows the tokenizer's start token, or its end token where there is no start token; its end is not
    scored, because a segment may end within a sentence.
    Prefixes that sentences share are computed once, each attending to its own prefixes alone.
    Source: shallow fusion's offline form, n-best rescoring with neural language models, arXiv:1503.03535; attention
    over a tree of tokens as in SpecInfer, arXiv:2305.09781.
    """

    def __init__(self, file: Path, dtype: torch.dtype | None = None) -> None:
        """`file`: GGUF. It is converted once, which takes seconds, and read from the cache afterwards. Raises
        ProgramMissing without transformers, WeightsCorrupt, also for a tokenizer without start and end."""
        try:
            import transformers
        except ImportError as missing:
            raise ProgramMissing(
                f"a causal language model needs {missing.name}", todo="pip install 'asr-serve[rescoring]'"
            ) from missing
        if dtype is None:
            dtype = torch.bfloat16 if bf16_supported() else torch.float32
        try:
            folder = converted_folder(file)
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=dtype)
        except (OSError, ValueError, KeyError) as failure:
            raise WeightsCorrupt(f"the language model {file} cannot be read: {failure}", "a GGUF file") from failure
        ids = (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id)
        start = next((token for token in ids if token is not None), None)
        if start is None:
            raise WeightsCorrupt(
                f"the tokenizer of the language model {file} has neither a start token nor an end token",
                "a causal model with bos_token_id or eos_token_id, which precedes each sentence",
                "take another model, or convert it with one of these tokens",
            )
        self._model, self._start = model.eval(), start

    def score(self, sentences: Sequence[str]) -> list[float]:
        rows = [
            [self._start, *self._tokenizer.encode(sentence, add_special_tokens=False)[:MAX_SENTENCE_TOKENS]]
            for sentence in sentences
        ]
        return score_rows(self._model, rows)


@torch.inference_mode()
def score_rows(model: Any, rows: Sequence[Sequence[int]]) -> list[float]:
    """Natural-log probability of each row of token ids after its first, by a causal model of transformers."""
    scores = [0.0] * len(rows)
    for batch in pack_prefixes(rows, max(1, MAX_BATCH_LOGITS // model.config.vocab_size)):
        tokens, parents = torch.tensor(batch.tokens), torch.tensor(batch.parents)
        continued = torch.unique(parents[parents >= 0])
        if not len(continued):  # start tokens alone
            continue
        places = torch.full((len(tokens),), -1)
        places[continued] = torch.arange(len(continued))
        visible = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
        for index, parent in enumerate(batch.parents):
            if parent >= 0:
                visible[index] = visible[parent]
            visible[index, index] = True
        bias = torch.zeros(visible.shape, dtype=model.dtype).masked_fill(~visible, torch.finfo(model.dtype).min)
        logits = model(
            input_ids=tokens[None],
            attention_mask=bias[None, None],
            position_ids=torch.tensor(batch.depths)[None],
            use_cache=False,
            logits_to_keep=continued,
        ).logits[0]
        rows_of = places[parents.clamp(min=0)]
        chosen = logits[rows_of, tokens].double() - logits.float().logsumexp(1).double()[rows_of]
        totals = [0.0] * len(tokens)
        for index, (parent, logprob) in enumerate(zip(batch.parents, chosen.tolist(), strict=True)):
            totals[index] = totals[parent] + logprob if parent >= 0 else 0.0
        for number, index in batch.sentences:
            scores[number] = totals[index]
    return scores


def converted_folder(file: Path) -> Path:
    """Folder in the cache with the model as transformers loads it fast, in float16; made on first use. Raises
    WeightsCorrupt, CacheNotWritable."""
    folder = cache_dir() / "causal" / f"{file_checksum(file):016x}-v{CONVERSION}"
    if (folder / "config.json").is_file():
        return folder
    make_cache_folder(folder.parent)
    part = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        convert(file, part)
        part.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder
