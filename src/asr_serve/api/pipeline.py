"""Pipelines of stages as loaded models: `asr_serve.load_pipeline`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Self

import msgspec

from asr_serve.api.library import FileTranscriber, Model
from asr_serve.audio.input_manifest import InputItem
from asr_serve.config import EngineConfig
from asr_serve.errors import UnsupportedOption
from asr_serve.pipelines.offline.transcribe import Event, events
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.pipelines.segments import resolve_language
from asr_serve.pipelines.stages.pipeline_file import (
    ItnStage,
    PipelineSpec,
    RecognizeStage,
    RescoreStage,
    find_pipeline,
    read_pipeline,
)
from asr_serve.pipelines.stages.rescoring import load_scorer
from asr_serve.pipelines.stages.staged_recognizer import StagedRecognizer, StageEngine

STAGE_OPTIONS = ("beam", "temperatures", "task", "prompt", "hotwords", "long_form", "condition_on_previous_text")
"""Options of transcription that depend on the one model of a request; a pipeline refuses them."""


class Pipeline(FileTranscriber):
    """Loaded pipeline with the engines of its stages. Any number of threads and tasks may share one."""

    def __init__(self, recognizer: StagedRecognizer, models: Sequence[Model], itn: bool) -> None:
        """`models`: those of `recognizer`, which end with the pipeline. `itn`: whether all text gets its written
        form."""
        self._recognizer, self._models, self._itn = recognizer, models, itn
        self._finalizer = weakref.finalize(self, _close, recognizer, models)

    @classmethod
    def load(
        cls, name: str, *, device: str = "auto", dtype: str = "auto", engine: EngineConfig | None = None
    ) -> Pipeline:
        """See asr_serve.load_pipeline."""
        spec = read_pipeline(find_pipeline(name))
        scorers = {
            index: load_scorer(spec, stage)
            for index, stage in enumerate(spec.stages)
            if isinstance(stage, RescoreStage)
        }
        with contextlib.ExitStack() as loading:
            models: dict[int, Model] = {}
            for index, stage in enumerate(spec.stages):
                if isinstance(stage, RecognizeStage):
                    config = _engine_config(spec, index, stage, engine or EngineConfig())
                    model = Model.load(
                        stage.model,
                        device=device if stage.device == "auto" else stage.device,
                        dtype=dtype if stage.dtype == "auto" else stage.dtype,
                        weights=spec.path(stage.weights) if stage.weights else None,
                        turn_model="none",
                        engine=config,
                    )
                    models[index] = loading.enter_context(model)
            engines = {index: StageEngine(model.client, model.tokenizer.decode) for index, model in models.items()}
            recognizer = StagedRecognizer(spec, engines, scorers)
            loading.pop_all()
        return cls(recognizer, list(models.values()), any(isinstance(stage, ItnStage) for stage in spec.stages))

    @property
    def name(self) -> str:
        return self._recognizer.name

    def events(
        self, items: Iterable[InputItem], options: TranscribeOptions | None = None
    ) -> Generator[Event, None, None]:
        """Yields the events of Model.events. Raises OptionError, UnsupportedOption for an option of one model alone."""
        chosen, defaults = options or TranscribeOptions(), TranscribeOptions()
        for name in STAGE_OPTIONS:
            if (value := getattr(chosen, name)) != getattr(defaults, name):
                raise UnsupportedOption(
                    f"{name}={value!r}", f"the pipeline {self.name} decides that for each stage", param=name
                )
        for model in self._models:
            resolve_language(model.client, chosen.language)
        chosen = msgspec.structs.replace(chosen, itn=chosen.itn or self._itn)
        first = self._models[0]
        return self._held(events(first.client, first.tokenizer, items, chosen, recognizer=self._recognizer))

    def describe(self) -> dict[str, Any]:
        """Returns the pipeline, how much each stage has processed, and its models."""
        models = [model.describe() for model in self._models]
        return {"pipeline": self.name, "stages": self._recognizer.describe(), "models": models}

    def close(self) -> None:
        """Stops the engines; segments still in them raise EngineClosed."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _engine_config(spec: PipelineSpec, index: int, stage: RecognizeStage, config: EngineConfig) -> EngineConfig:
    """Configuration of a stage's engine: with its decoding graph, and with as many hypotheses as a stage behind it
    rescores."""
    if stage.decoding_graph:
        config = msgspec.structs.replace(config, decoding_graph=str(spec.path(stage.decoding_graph)))
    card, following = spec.cards[index], spec.stages[index + 1 : index + 2]
    if card is not None and card.streaming and following and isinstance(following[0], RescoreStage):
        config = msgspec.structs.replace(config, beam=max(config.beam, following[0].hypotheses))
    return config


def _close(recognizer: StagedRecognizer, models: Sequence[Model]) -> None:
    for model in models:
        model.close()
    recognizer.close()
