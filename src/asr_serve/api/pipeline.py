"""Pipelines of stages as loaded models: `asr_serve.load_pipeline`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Self

from asr_serve.api.library import FileTranscriber, Model
from asr_serve.audio.input_manifest import InputItem
from asr_serve.config import EngineConfig
from asr_serve.pipelines.offline.transcribe import Event, events
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.pipelines.stages.language_models import load_scorers
from asr_serve.pipelines.stages.pipeline_file import open_pipeline
from asr_serve.pipelines.stages.stage_files import check_files
from asr_serve.pipelines.stages.staged_recognizer import StagedRecognizer, StageEngine


class Pipeline(FileTranscriber):
    """Loaded pipeline with the engines of its stages. Any number of threads and tasks may share one."""

    def __init__(self, recognizer: StagedRecognizer, models: Sequence[Model]) -> None:
        """`models`: those of `recognizer`, which end with the pipeline."""
        self._recognizer, self._models = recognizer, models
        self._finalizer = weakref.finalize(self, _close, recognizer, models)

    @classmethod
    def load(
        cls, name: str, *, device: str = "auto", dtype: str = "auto", engine: EngineConfig | None = None
    ) -> Pipeline:
        """See asr_serve.load_pipeline."""
        spec = open_pipeline(name)
        check_files(spec)
        scorers = load_scorers(spec)
        with contextlib.ExitStack() as loading:
            models: dict[int, Model] = {}
            for index, stage in spec.recognizers.items():
                with spec.located_loading_errors(index):
                    model = Model.load(
                        stage.model,
                        device=device if stage.device == "auto" else stage.device,
                        dtype=dtype if stage.dtype == "auto" else stage.dtype,
                        weights=spec.path(stage.weights) if stage.weights else None,
                        turn_model="none",
                        engine=spec.engine_config(index, engine or EngineConfig()),
                    )
                models[index] = loading.enter_context(model)
                spec.check_lattice_model(index, model.client.card)
            engines = {index: StageEngine(model.client, model.tokenizer.decode) for index, model in models.items()}
            recognizer = StagedRecognizer(spec, engines, scorers)
            loading.pop_all()
        return cls(recognizer, list(models.values()))

    @property
    def name(self) -> str:
        return self._recognizer.name

    def events(
        self, items: Iterable[InputItem], options: TranscribeOptions | None = None
    ) -> Generator[Event, None, None]:
        """Yields the events of Model.events. Raises OptionError, UnsupportedOption for an option of one model alone."""
        chosen = self._recognizer.transcribe_options(options or TranscribeOptions())
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


def _close(recognizer: StagedRecognizer, models: Sequence[Model]) -> None:
    for model in models:
        model.close()
    recognizer.close()
