"""Language models of the rescoring stages of a pipeline, loaded."""

from __future__ import annotations

from asr_serve.decoding.language_model.causal_scorer import CAUSAL_MODELS, CausalSentenceScorer, causal_model_path
from asr_serve.decoding.language_model.ngram_files import read_ngrams
from asr_serve.decoding.language_model.sentence_scorer import NgramSentenceScorer, SentenceScorer
from asr_serve.pipelines.stages.pipeline_file import PipelineSpec, RescoreStage


def load_scorers(spec: PipelineSpec) -> dict[int, SentenceScorer]:
    """Loads the language models of a pipeline, by the index of their stage. Raises WeightsMissing, WeightsCorrupt,
    ProgramMissing."""
    return {
        index: _load_scorer(spec, stage) for index, stage in enumerate(spec.stages) if isinstance(stage, RescoreStage)
    }


def _load_scorer(spec: PipelineSpec, stage: RescoreStage) -> SentenceScorer:
    if stage.language_model in CAUSAL_MODELS:
        return CausalSentenceScorer(causal_model_path(stage.language_model))
    path = spec.path(stage.language_model)
    return CausalSentenceScorer(path) if path.suffix == ".gguf" else NgramSentenceScorer(read_ngrams(path))
