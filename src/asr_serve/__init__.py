"""asr-serve: a speech inference engine.

>>> import asr_serve
>>> with asr_serve.load("moonshine-tiny-en") as model:           # doctest: +SKIP
...     for transcript in model.transcribe(["meeting.mp3", "call.wav"]):
...         print(transcript.text)
>>> with asr_serve.load("hibari") as voice:                      # doctest: +SKIP
...     voice.speak("Hello there.").save("hello.mp3")
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from asr_serve.errors import AsrServeError  # a file that imports nothing

if TYPE_CHECKING:
    from asr_serve.api.library import Model
    from asr_serve.api.pipeline import Pipeline
    from asr_serve.config import EngineConfig

__all__ = ["DEFAULT_MODEL", "AsrServeError", "__version__", "load", "load_pipeline"]
__version__ = "0.1.0"

DEFAULT_MODEL = "moonshine-tiny-en"


def load(
    model: str = DEFAULT_MODEL,
    *,
    device: str = "auto",
    dtype: str = "auto",
    weights: str | os.PathLike[str] | None = None,
    turn_model: str = "auto",
    tensor_parallel_size: int | None = None,
    engine: EngineConfig | None = None,
) -> Model:
    """Load a model that transcribes or speaks; its engine runs on a thread of its own.

    model: a name from `asr-serve models list`; auto is the best voice on this machine. device: auto, cpu, cuda,
    cuda:N. dtype: auto, fp32, bf16. weights: a checkpoint folder, instead of the cache, the installed package or
    the hub. turn_model: detects whether a speaker has finished: smart-turn, none, or auto for whichever is on this
    machine, if any. tensor_parallel_size: processes, each with a GPU of its own, over which the decoder is split; None:
    as `engine` has it.

    Raises UnknownModel, WeightsMissing, WeightsCorrupt, OptionError.
    """
    from asr_serve.config import limit_openmp_spinning

    limit_openmp_spinning()
    from asr_serve.api.library import Model  # torch is loaded here, not by `import asr_serve`

    return Model.load(
        model,
        device=device,
        dtype=dtype,
        weights=weights,
        turn_model=turn_model,
        tensor_parallel_size=tensor_parallel_size,
        engine=engine,
    )


def load_pipeline(
    name: str, *, device: str = "auto", dtype: str = "auto", engine: EngineConfig | None = None
) -> Pipeline:
    """Load a pipeline of stages, which transcribes files like a model.

    name: chain-lm, chain-then-whisper, ctc-graph-lm, or the path of a TOML file; behind it the values of its variables,
    like `ctc-graph-lm,model=armspeech-hy,graph=FOLDER,language_model=FILE`. device, dtype: for stages that name none.
    engine: settings of each stage's engine.

    Raises OptionError, UnknownModel, WeightsMissing, WeightsCorrupt, ProgramMissing, with the line and key in the file
    that is wrong; MissingOption for a variable without a value.
    """
    from asr_serve.config import limit_openmp_spinning

    limit_openmp_spinning()
    from asr_serve.api.pipeline import Pipeline

    return Pipeline.load(name, device=device, dtype=dtype, engine=engine)
