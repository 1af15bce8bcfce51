"""Transcription of recordings with FunASR's classes: `AutoModelVLLM`, and those of its model families."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import msgspec
import numpy as np

from asr_serve.api.stream import is_single_source
from asr_serve.audio.input_manifest import AUDIO_SUFFIXES, LIST_SUFFIXES, InputItem, expand_inputs
from asr_serve.decoding.search_options import check_temperatures
from asr_serve.errors import AsrServeError, EngineClosed, MissingOption, OptionError, RankLost, UnsupportedAudio
from asr_serve.funasr.loading import DEFAULT_MODEL, LoadOptions, load_model
from asr_serve.funasr.option_names import ARGUMENTS, renamed_options
from asr_serve.pipelines.offline.transcribe import FileDone, FileFailed
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.protocols.speaker_names import speaker_number
from asr_serve.types import Segment, Transcript
from asr_serve.units import samples_to_ms

if TYPE_CHECKING:
    from asr_serve.api.library import Model

Result = dict[str, Any]
"""Result of one recording: `key`, `text`, `sentence_info`, and where the model has them `timestamps` and `spk`; of one
that failed, `key`, `error` and `error_code`."""
OnError = Literal["raise", "record"]
"""Treatment of a recording that fails: its error is raised, or is its result."""
MAX_NEW_TOKENS = 512
"""Most tokens of a segment, unless `generate` is told another number."""
FIXED_SILENCE_MS = 800
"""Pause that ends a segment with `dynamic_silence=False`: that of FunASR's voice activity detection."""


class AutoModelVLLM:
    """Recognizer with FunASR's interface. The model's family is found by its folder or its name.

    model, or model_dir: a folder of FunASR (Fun-ASR-Nano, LLMASR) or of a hub (GLM-ASR-Nano, Qwen3-ASR, Voxtral), a
    hub's name, or a name of `asr-serve models list`; neither: the default of the class. spk_model: any name labels
    speakers in every `generate`. Other arguments: the fields of LoadOptions; those for a GPU that is not there are left
    out with a warning.

    Raises UnknownModel, WeightsMissing, WeightsCorrupt, OptionError.
    """

    default_model = DEFAULT_MODEL

    def __init__(
        self, model: str | None = None, *, model_dir: str | None = None, spk_model: str | None = None, **arguments: Any
    ) -> None:
        if model is not None and model_dir is not None:
            raise OptionError("model and model_dir", "one of them: they are the same", param="model_dir")
        self.labels_speakers = bool(spk_model)
        self.model_dir = model or model_dir or self.default_model
        with renamed_options(ARGUMENTS):
            self.model: Model = load_model(self.model_dir, LoadOptions.of(arguments))
        """The model in this library's own interface."""

    @classmethod
    def from_pretrained(cls, *arguments: Any, **named: Any) -> Self:
        """Loads a model. Arguments and errors: those of the class."""
        return cls(*arguments, **named)

    def generate(
        self,
        input: Any = None,
        *,
        inputs: Any = None,
        language: str | None = None,
        hotwords: Sequence[str] | str | None = None,
        itn: bool = True,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = -1,
        repetition_penalty: float = 1.0,
        silence_schedule: Sequence[tuple[float, float]] | None = None,
        dynamic_silence: bool = True,
        spk: bool | None = None,
        output: str | os.PathLike[str] | None = None,
        on_error: OnError = "raise",
        **options: Any,
    ) -> list[Result]:
        """Transcribes recordings, all at once.

        input, or inputs: one recording or a list: paths, folders, wav.scp, jsonl, bytes, arrays and tensors (samples,)
        at 16 kHz, (array, rate_hz). hotwords: a list, or a text of words. itn: False asks for the spoken form.
        max_new_tokens: most tokens of a segment; None: MAX_NEW_TOKENS, where the model has a decoder. temperature: 0 is
        greedy; above it, tokens are sampled, of the `top_k` likeliest (-1: all) and the likeliest with `top_p` of their
        probability. silence_schedule: rows of the length of a segment up to which they hold, and the pause that ends
        it, in ms. dynamic_silence: False ends segments at pauses of FIXED_SILENCE_MS. spk: whether to label speakers;
        None: if the model was loaded with spk_model. output: jsonl file, to which each result is written as soon as it
        is known. on_error: `record` makes the error of a recording that fails its result, and goes on. options: further
        fields of TranscribeOptions.

        Returns: for each recording, in order, `key` and `text`; `sentence_info`, its segments, with times in ms;
        `timestamps`, its words, with times in seconds, where the model tells them; `spk`, the speaker of each segment,
        where they are labelled. With on_error="record", one that failed has `key`, `error` and `error_code` instead.
        Raises OptionError, also for a malformed list; the error of the first recording that fails, unless it is
        recorded; EngineClosed, RankLost where the engine has ended.
        """
        if (input is None) == (inputs is None):
            came = "no input" if input is None else "input and inputs"
            raise MissingOption(f"{came} came", "one of them", "like generate('audio.wav')", param="input")
        for name, switch in (("itn", itn), ("dynamic_silence", dynamic_silence), ("spk", spk)):
            if not isinstance(switch, bool) and not (name == "spk" and switch is None):
                raise OptionError(f"{name}={switch!r}", "True or False", param=name)
        check_temperature(temperature)
        if on_error not in get_args(OnError):
            raise OptionError(f"on_error={on_error!r}", f"one of: {', '.join(get_args(OnError))}", param="on_error")
        if not dynamic_silence:
            if silence_schedule is not None:
                came = "silence_schedule with dynamic_silence=False"
                raise OptionError(came, "one of them", param="silence_schedule")
            silence_schedule = [(math.inf, FIXED_SILENCE_MS)]
        card = self.model.client.card
        if max_new_tokens is None and not card.streaming:
            max_new_tokens = MAX_NEW_TOKENS
        with renamed_options(ARGUMENTS):
            chosen = TranscribeOptions.of(
                {
                    "words": None,
                    **options,
                    "language": language,
                    "hotwords": as_words(hotwords),
                    "itn": None if itn else False,
                    "max_new_tokens": max_new_tokens,
                    "temperatures": (temperature,),
                    "top_p": top_p,
                    "top_k": 0 if top_k == -1 else top_k,
                    "repetition_penalty": repetition_penalty,
                    "silence_schedule": silence_schedule,
                    "speakers": self.labels_speakers if spk is None else spk,
                }
            )
        timed = chosen.words is not False and card.word_times
        results: list[Result] = []
        with contextlib.ExitStack() as stack:
            items = expand_inputs(_items(input if inputs is None else inputs, output, record=on_error == "record"))
            file = None
            stack.enter_context(renamed_options(ARGUMENTS))
            for event in stack.enter_context(contextlib.closing(self.model.events(items, chosen))):
                if isinstance(event, FileFailed):
                    if on_error == "raise" or isinstance(event.error, EngineClosed | RankLost):
                        raise event.error
                    results.append(render_failure(event.key, event.error))
                elif isinstance(event, FileDone):
                    results.append(render_result(event.transcript, words=timed))
                else:
                    continue
                if output is not None:
                    # Not before there is a result: what an earlier run wrote outlives a mistake in this one.
                    file = file or stack.enter_context(Path(output).open("wb", buffering=0))
                    file.write(msgspec.json.encode(results[-1]) + b"\n")
        if output is not None and not results:
            Path(output).write_bytes(b"")
        return results

    def close(self) -> None:
        """Stops the engine."""
        self.model.close()


class FunASRNanoVLLM(AutoModelVLLM):
    """Fun-ASR-Nano under FunASR's name."""


class GLMASRVLLMEngine(AutoModelVLLM):
    """GLM-ASR-Nano under FunASR's name."""

    default_model = "zai-org/GLM-ASR-Nano-2512"


def _items(given: Any, output: str | os.PathLike[str] | None, *, record: bool) -> Iterator[Any]:
    """Yields the recordings of `generate`, a path with its name without the suffix as its key, as in FunASR. `record`:
    whether an empty path fails as a recording. Raises OptionError for an empty path else, and for one that `output`
    would overwrite."""
    given = as_samples(given)  # a tensor is iterable
    several = isinstance(given, Iterable) and not is_single_source(given)
    for number, each in enumerate(given if several else [given]):
        if not isinstance(each, str | os.PathLike):
            yield InputItem(f"sample_{number}", as_samples(each))
            continue
        path = Path(each)
        if not os.fspath(each):
            if not record:
                raise OptionError("an empty path", "the path of a recording, a folder or a list", param="input")
            yield InputItem(f"sample_{number}", each)
            continue
        if output is not None and Path(output).exists() and path.exists() and Path(output).samefile(path):
            raise OptionError(f"output={os.fspath(output)!r} is an input", "another file", param="output")
        if path.suffix.lower() not in LIST_SUFFIXES and (path.is_file() or _is_missing_recording(path)):
            yield InputItem(path.stem, path)
        else:
            yield each


def _is_missing_recording(path: Path) -> bool:
    """Returns whether a path that is not there would be that of one recording, and no pattern."""
    return path.suffix.lower() in AUDIO_SUFFIXES and not path.exists() and not glob.has_magic(str(path))


def check_temperature(temperature: object) -> None:
    """Raises OptionError for what is no temperature."""
    try:
        check_temperatures((temperature,))
    except OptionError:
        raise OptionError(f"temperature={temperature!r}", "a number from 0 to 2", param="temperature") from None


def as_samples(source: Any) -> Any:
    """Returns a tensor as an array, also where it comes with its rate, and other sources as they are."""
    import torch

    if isinstance(source, tuple):
        return tuple(map(as_samples, source))
    if not isinstance(source, torch.Tensor):
        return source
    source = source.detach().cpu()
    return (source.float() if source.dtype in (torch.float16, torch.bfloat16) else source).numpy()


def as_chunk(chunk: Any) -> Any:
    """Returns a chunk of a stream as an array where it is a tensor or a list of numbers: int16 if all are whole. Raises
    UnsupportedAudio for whole numbers that are no int16."""
    if not isinstance(chunk, list | tuple):
        return as_samples(chunk)
    try:
        samples = np.asarray(chunk)
    except ValueError:  # lists of different lengths
        return chunk
    if samples.dtype.kind not in "iu":
        return samples if len(samples) else samples.astype(np.float32)
    limits = np.iinfo(np.int16)
    if samples.min() < limits.min or samples.max() > limits.max:
        came = f"a list of whole numbers from {samples.min()} to {samples.max()}"
        raise UnsupportedAudio(came, f"{limits.min} to {limits.max}, or numbers with a point from -1 to 1")
    return samples.astype(np.int16)


def as_words(hotwords: Sequence[str] | str | None) -> tuple[str, ...]:
    """Returns hotwords from a list, or from a text with spaces or commas between them. Raises OptionError."""
    if isinstance(hotwords, str):
        return tuple(filter(None, re.split(r"[\s,，、]+", hotwords)))
    if hotwords is not None and not isinstance(hotwords, list | tuple):
        raise OptionError(f"hotwords={hotwords!r}", "a list of words, or a text of them", param="hotwords")
    return tuple(hotwords or ())


def render_result(transcript: Transcript, *, words: bool) -> Result:
    """Returns a transcript as FunASR has it."""
    segments = transcript.segments
    result: Result = {
        "key": transcript.key,
        "text": transcript.text,
        "sentence_info": [_sentence(segment) for segment in segments],
    }
    if words:
        result["timestamps"] = [
            {"token": word.text, "start_time": word.start_s, "end_time": word.end_s}
            for segment in segments
            for word in segment.words
        ]
    if any(segment.speaker for segment in segments):
        result["spk"] = [sentence["spk"] for sentence in result["sentence_info"]]
    return result


def render_failure(key: str, error: AsrServeError) -> Result:
    """Returns the result of a recording that failed."""
    return {"key": key, "error": str(error), "error_code": error.code}


def _sentence(segment: Segment) -> dict[str, Any]:
    sentence: dict[str, Any] = {
        "text": segment.text,
        "start": samples_to_ms(segment.start_samples),
        "end": samples_to_ms(segment.end_samples),
    }
    if segment.speaker:
        number = speaker_number(segment.speaker)
        sentence["spk"] = segment.speaker if number is None else number
    return sentence
