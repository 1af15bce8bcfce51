"""Files and programs that the stages of a pipeline need, looked for before anything is loaded."""

from __future__ import annotations

from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card
from asr_serve.pipelines.stages.pipeline_file import ItnStage, PipelineSpec
from asr_serve.text.normalization.wetext_grammar import require_wetext


def check_files(spec: PipelineSpec) -> None:
    """Raises WeightsMissing for a recognizer without weights and UnsupportedOption for a stage without its package,
    with the line and the key."""
    for index, stage in spec.recognizers.items():
        with spec.located_errors(index, "weights" if stage.weights else "model"):
            store.find(asr_card(stage.model), spec.path(stage.weights) if stage.weights else None)
    for index, each in enumerate(spec.stages):
        if isinstance(each, ItnStage):
            with spec.located_errors(index, "kind"):
                require_wetext()
