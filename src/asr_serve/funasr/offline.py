"""Transcription of recordings with FunASR's classes: `AutoModelVLLM`, and those of its model families."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from asr_serve.api.stream import is_single_source
from asr_serve.audio.input_manifest import LIST_SUFFIXES, InputItem, expand_inputs
from asr_serve.errors import MissingOption, OptionError, UnsupportedOption
from asr_serve.funasr.loading import DEFAULT_MODEL, LoadOptions, load_model
from asr_serve.pipelines.offline.transcribe import FileDone, FileFailed
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.protocols.speaker_names import speaker_number
from asr_serve.types import Segment, Transcript
from asr_serve.units import samples_to_ms

if TYPE_CHECKING:
    from asr_serve.api.library import Model

Result = dict[str, Any]
"""Result of one recording: `key`, `text`, `sentence_info`, and where the model has them `timestamps` and `spk`."""
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
        **options: Any,
    ) -> list[Result]:
        """Transcribes recordings, all at once.

        input, or inputs: one recording or a list: paths, folders, wav.scp, jsonl, bytes, arrays and tensors (samples,)
        at 16 kHz, (array, rate_hz). hotwords: a list, or a text of words. itn: False asks for the spoken form.
        max_new_tokens: most tokens of a segment; None: MAX_NEW_TOKENS, where the model has a decoder. temperature: 0 is
        greedy. silence_schedule: rows of the length of a segment up to which they hold, and the pause that ends it, in
        ms. dynamic_silence: False ends segments at pauses of FIXED_SILENCE_MS. spk: whether to label speakers; None: if
        the model was loaded with spk_model. output: jsonl file, to which each result is written as soon as it is known.
        options: further fields of TranscribeOptions.

        Returns: for each recording, in order, `key` and `text`; `sentence_info`, its segments, with times in ms;
        `timestamps`, its words, with times in seconds, where the model tells them; `spk`, the speaker of each segment,
        where they are labelled. Raises OptionError, and the error of the first recording that fails.
        """
        if (input is None) == (inputs is None):
            came = "no input" if input is None else "input and inputs"
            raise MissingOption(f"{came} came", "one of them", "like generate('audio.wav')", param="input")
        for name, value, none in (("top_p", top_p, (1.0,)), ("top_k", top_k, (-1, 0))):
            if value not in none:
                came, allowed = f"{name}={value}", "tokens are sampled by their temperature alone"
                raise UnsupportedOption(came, allowed, "leave it out", param=name)
        if not dynamic_silence:
            if silence_schedule is not None:
                came = "silence_schedule with dynamic_silence=False"
                raise OptionError(came, "one of them", param="silence_schedule")
            silence_schedule = [(math.inf, FIXED_SILENCE_MS)]
        card = self.model.client.card
        if max_new_tokens is None and not card.streaming:
            max_new_tokens = MAX_NEW_TOKENS
        chosen = TranscribeOptions.of(
            {
                "words": None,
                **options,
                "language": language,
                "hotwords": as_words(hotwords),
                "itn": None if itn else False,
                "max_new_tokens": max_new_tokens,
                "temperatures": (temperature,),
                "repetition_penalty": repetition_penalty,
                "silence_schedule": silence_schedule,
                "speakers": self.labels_speakers if spk is None else spk,
            }
        )
        timed = chosen.words is not False and card.word_times
        results = []
        with contextlib.ExitStack() as stack:
            file = None if output is None else stack.enter_context(Path(output).open("wb"))
            items = expand_inputs(_items(input if inputs is None else inputs))
            for event in stack.enter_context(contextlib.closing(self.model.events(items, chosen))):
                if isinstance(event, FileFailed):
                    raise event.error
                if isinstance(event, FileDone):
                    results.append(render_result(event.transcript, words=timed))
                    if file is not None:
                        file.write(msgspec.json.encode(results[-1]) + b"\n")
                        file.flush()
        return results

    def close(self) -> None:
        """Stops the engine."""
        self.model.close()


class FunASRNanoVLLM(AutoModelVLLM):
    """Fun-ASR-Nano under FunASR's name."""


class GLMASRVLLMEngine(AutoModelVLLM):
    """GLM-ASR-Nano under FunASR's name."""

    default_model = "zai-org/GLM-ASR-Nano-2512"


def _items(given: Any) -> Iterator[Any]:
    """Yields the recordings of `generate`, a path with its name without the suffix as its key, as in FunASR."""
    given = as_samples(given)  # a tensor is iterable
    several = isinstance(given, Iterable) and not is_single_source(given)
    for number, each in enumerate(given if several else [given]):
        if not isinstance(each, str | os.PathLike):
            yield InputItem(f"sample_{number}", as_samples(each))
        elif Path(each).is_file() and Path(each).suffix.lower() not in LIST_SUFFIXES:
            yield InputItem(Path(each).stem, Path(each))
        else:
            yield each


def as_samples(source: Any) -> Any:
    """Returns a tensor as an array, also where it comes with its rate, and other sources as they are."""
    import torch

    if isinstance(source, tuple):
        return tuple(map(as_samples, source))
    return source.detach().cpu().numpy() if isinstance(source, torch.Tensor) else source


def as_words(hotwords: Sequence[str] | str | None) -> tuple[str, ...]:
    """Returns hotwords from a list, or from a text with spaces between them."""
    return tuple(hotwords.split() if isinstance(hotwords, str) else hotwords or ())


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
