"""Language models of the rescoring stages of a pipeline."""

from __future__ import annotations

from pathlib import Path

from asr_serve.decoding.language_model.ngram_files import read_ngrams
from asr_serve.decoding.language_model.ngram_tables import WordNgrams
from asr_serve.decoding.language_model.packaged_models import (
    CAUSAL_MODELS,
    PACKAGED_NGRAMS,
    causal_model_path,
    packaged_ngram_path,
)
from asr_serve.decoding.language_model.sentence_scorer import NgramSentenceScorer, SentenceScorer
from asr_serve.errors import OptionError, WeightsMissing
from asr_serve.pipelines.stages.pipeline_file import PipelineSpec, RescoreStage
from asr_serve.types import suggest_name


def load_scorers(spec: PipelineSpec) -> dict[int, SentenceScorer]:
    """Loads the language models of a pipeline, by the index of their stage. Those that engines search with are only
    read. Raises OptionError, WeightsMissing, WeightsCorrupt, ProgramMissing with the line and the key."""
    scorers: dict[int, SentenceScorer] = {}
    for index, stage in enumerate(spec.stages):
        if isinstance(stage, RescoreStage):
            with spec.located_errors(index, "language_model"):
                if stage.lattice:
                    read_word_ngrams(spec.language_model_path(stage))
                else:
                    scorers[index] = load_scorer(stage.language_model, spec.folder)
    return scorers


def load_scorer(name: str, folder: Path) -> SentenceScorer:
    """Loads a language model by its name, or from its file, relative to `folder`. Raises as `load_scorers` does."""
    if name in PACKAGED_NGRAMS:
        return NgramSentenceScorer(read_word_ngrams(packaged_ngram_path(name)))
    path = causal_model_path(name) if name in CAUSAL_MODELS else folder / Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise WeightsMissing(f"there is no language model {path}", "a GGUF file of a causal model")
        from asr_serve.decoding.language_model.causal_scorer import CausalSentenceScorer  # loads torch, for it alone

        return CausalSentenceScorer(path)
    if not path.is_file() and (similar := suggest_name(name, [*CAUSAL_MODELS, *PACKAGED_NGRAMS])):
        raise WeightsMissing(f"there is no language model {path}", "a file, or the name of a packaged model", similar)
    return NgramSentenceScorer(read_word_ngrams(path))


def read_word_ngrams(path: Path) -> WordNgrams:
    """Reads an n-gram model of words. Raises OptionError for one of tokens, WeightsMissing, WeightsCorrupt."""
    ngrams = read_ngrams(path)
    if ngrams.token is not None:
        raise OptionError(
            f"{path} counts tokens of a recogniser, like {ngrams.token}",
            "n-grams of words",
            "asr-serve lm build without --tokens makes them",
        )
    return ngrams
