"""Transcription while audio is read, with FunASR's class: results with a fixed beginning, one for each chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from asr_serve.api.stream import StreamOptions, is_single_source
from asr_serve.errors import OptionError
from asr_serve.funasr.offline import AutoModelVLLM, Result, as_chunk, as_samples, as_words, check_temperature
from asr_serve.funasr.option_names import ARGUMENTS, renamed_options


class FunASRNanoStreamingVLLM(AutoModelVLLM):
    """Streaming recognizer under FunASR's name.

    Each chunk's audio is recognized together with what precedes it in the sentence; words on which three such
    hypotheses agree stay as they are, and a sentence that a pause has ended is fixed.
    """

    def __init__(
        self, model: str | None = None, *, chunk_ms: int = 720, rollback_chars: int = 8, **arguments: Any
    ) -> None:
        """`chunk_ms`: audio between two results. `rollback_chars`: least number of characters at the end of the text
        that are not fixed. Other arguments and errors: those of AutoModelVLLM."""
        StreamOptions(chunk_ms=chunk_ms, rollback_chars=rollback_chars)  # raises before the model is loaded
        super().__init__(model, **arguments)
        self.chunk_ms, self.rollback_chars = chunk_ms, rollback_chars

    def streaming_generate(
        self,
        audio_input: Any,
        *,
        chunk_ms: int | None = None,
        rollback_chars: int | None = None,
        language: str | None = None,
        hotwords: Sequence[str] | str | None = None,
        itn: bool = True,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        repetition_penalty: float = 1.0,
        **options: Any,
    ) -> Iterator[Result]:
        """Yields a result for every chunk of `audio_input`: a path, bytes, an array or a tensor (samples,) at 16 kHz,
        or an iterable of chunks, each an array, a tensor, a list of samples or bytes. max_new_tokens: most tokens of a
        sentence; None: as many as can be said in its time. temperature: that of a sentence's last hypothesis; None:
        greedy, and higher ones where that answer fails its checks. options: further ones of the library's `stream`.

        Each result has `text`, that of all audio so far; `fixed_text`, its beginning, which no later result changes;
        `is_final`; `chunk_idx`, from 1; and `audio_duration_ms`. Raises OptionError, and the errors of the source.
        """
        if not isinstance(itn, bool):
            raise OptionError(f"itn={itn!r}", "True or False", param="itn")
        if temperature is not None:
            check_temperature(temperature)
            options["temperatures"] = (temperature,)
        source = as_samples(audio_input)
        if isinstance(source, Iterable) and not is_single_source(source):
            source = map(as_chunk, source)
        with renamed_options(ARGUMENTS):
            results = self.model.stream(
                source,
                chunk_ms=self.chunk_ms if chunk_ms is None else chunk_ms,
                rollback_chars=self.rollback_chars if rollback_chars is None else rollback_chars,
                language=language,
                hotwords=as_words(hotwords),
                itn=None if itn else False,
                speakers=self.labels_speakers,
                max_new_tokens=max_new_tokens,
                repetition_penalty=repetition_penalty,
                **options,
            )
        for index, result in enumerate(results, 1):
            yield {
                "text": result.text,
                "fixed_text": result.fixed_text,
                "is_final": result.is_final,
                "chunk_idx": index,
                "audio_duration_ms": result.audio_duration_ms,
            }
