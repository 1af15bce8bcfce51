"""The work of one line of a batch: its request, answered by the same code as that of the endpoint's route, with the
priority bulk."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from asr_serve.audio.reader import AudioLimits
from asr_serve.config import ServeConfig
from asr_serve.errors import (
    AsrServeError,
    AtCapacity,
    EngineClosed,
    EngineCrashed,
    MalformedRequest,
    ModelNotLoaded,
    ProgramFailed,
    RankLost,
    StepFailed,
    StoreUnavailable,
    UnsupportedOption,
)
from asr_serve.protocols.form_fields import errors_named_by_field
from asr_serve.protocols.ignored_fields import IgnoredFields, collect_ignored_fields
from asr_serve.protocols.openai import transcription_form, transcription_response
from asr_serve.protocols.openai.batches import (
    SPEECH_ENDPOINT,
    LineResponse,
    LineSpeech,
    OutputLine,
    line_fields,
    parse_line,
    parse_line_body,
    pop_line_audio,
)
from asr_serve.protocols.openai.events import ErrorAnswer, TokenTexts
from asr_serve.protocols.openai.speech import SpeechRequest, parse_speech_request
from asr_serve.server.batch.batch_store import (
    STORE_RETRY_MS,
    BatchLine,
    BatchStore,
    NewFile,
    OpenBatch,
    new_file_id,
    open_stored,
    output_file,
    sync_file,
    unreadable,
)
from asr_serve.server.caller_models import CallerModels
from asr_serve.server.engine_registry import EngineRegistry, FileEngine
from asr_serve.server.middleware.admission import ANONYMOUS
from asr_serve.server.middleware.error_handlers import JSON, error_mapping, problem_for
from asr_serve.server.middleware.request_context import RequestContext
from asr_serve.server.routes.speech import SpeechDependencies, SpeechSynthesizer
from asr_serve.server.routes.transcriptions import recognition_needs
from asr_serve.server.telemetry.tracing import RequestTrace
from asr_serve.server.transcription_job import TranscriptionExecutor
from asr_serve.server.tts.audio_stream import SpeechStream
from asr_serve.types import Transcript

ROUTE = "/v1/batches"
RETRIED = (AtCapacity, EngineClosed)
"""Errors after which a line waits and is tried again: the engine is full, starting or going down, or its model could
not be loaded and is not tried again yet."""
RETRIED_TWICE = (StepFailed, RankLost, ProgramFailed)
"""Errors after which a line is tried again twice: what failed may have been another request of the same step."""
WAITED_FOR = (ModelNotLoaded,)
"""Errors after which a line waits for a while: a model is loaded again, or by hand after a restart."""
OK = 200

Parse = Callable[..., transcription_form.TranscriptionRequest]


class LineAnswer(NamedTuple):
    """Answer of a line."""

    outcome: str
    """completed or failed."""
    line: bytes
    """Line of the output, or of the errors."""
    file: NewFile | None = None
    """Audio that was synthesized."""


class _Body(NamedTuple):
    body: bytes
    file: NewFile | None = None


class LineRunner:
    """Runner of lines, on threads of its own. Belongs to the event loop's thread."""

    def __init__(
        self, config: ServeConfig, engines: EngineRegistry, executor: TranscriptionExecutor, speech: SpeechDependencies
    ) -> None:
        """`executor`: threads of lines, beside those of callers' requests."""
        self._config, self._engines, self._executor = config, engines, executor
        self._speech = speech._replace(executor=executor)
        self._limits = AudioLimits(max_duration_s=config.max_duration_s)
        self._parsers: dict[str, Parse] = {
            "/v1/audio/transcriptions": partial(
                transcription_form.parse_transcription_form, complete=True, max_beam=config.max_beam
            ),
            "/v1/audio/translations": partial(
                transcription_form.parse_translation_form, complete=True, max_beam=config.max_beam
            ),
        }

    async def run(self, store: BatchStore, batch: OpenBatch, line: BatchLine) -> LineAnswer:
        """Answers a line; an error of its request is an answer too. Raises what is in RETRIED,
        RETRIED_TWICE and WAITED_FOR, and EngineCrashed."""
        request_id = line_request_id(batch, line)
        context = RequestContext(
            request_id=request_id,
            route=ROUTE,
            method="POST",
            trace=RequestTrace(),
            client=ANONYMOUS,
            caller=batch.caller,
            ignored=IgnoredFields(strict=self._config.strict_fields),
        )
        with collect_ignored_fields(context.ignored):
            try:
                body = await asyncio.to_thread(_read_body, store.path(batch.input_file), line, batch.endpoint)
                answered = await (
                    self._speak(store, line, body, context)
                    if batch.endpoint == SPEECH_ENDPOINT
                    else self._transcribe(store, batch, body, context)
                )
            except (*RETRIED, *RETRIED_TWICE, *WAITED_FOR, EngineCrashed):
                raise
            except AsrServeError as error:
                return failed_line(line, error, request_id)
        response = LineResponse(OK, request_id, msgspec.Raw(answered.body), str(context.ignored))
        output = OutputLine(request_id, line.custom_id, response, None)
        return LineAnswer("completed", msgspec.json.encode(output), answered.file)

    async def _transcribe(
        self, store: BatchStore, batch: OpenBatch, body: dict[str, Any], context: RequestContext
    ) -> _Body:
        named = await asyncio.to_thread(pop_line_audio, body)
        request = await asyncio.to_thread(lambda: self._parsers[batch.endpoint](line_fields(body)))
        name, path = None, None
        if named.file_id is not None:
            found = await asyncio.to_thread(store.file, batch.owner, named.file_id)
            name, path = found.object.filename, found.path
        models = CallerModels(self._engines, context)
        needs = recognition_needs(request)
        await self._engines.load_substitute(request.model, needs)
        model = self._engines.substitute(request.model, needs) or request.model
        watch = models.watch(model, "upload")
        engine = models.get_for_files(model)
        with errors_named_by_field(request.option_to_field):
            while True:
                audio = io.BytesIO(named.data) if path is None else await asyncio.to_thread(open_stored, path)
                try:
                    answer = await self._transcript(engine, audio, request, name)
                except AsrServeError as error:
                    if (stable := models.fall_back(model, error)) is None:
                        watch.finish(error)
                        raise
                    engine = stable
                else:
                    models.watch(model, "upload").finish()
                    return _Body(answer)

    async def _transcript(
        self, engine: FileEngine, audio: BinaryIO, request: transcription_form.TranscriptionRequest, name: str | None
    ) -> bytes:
        options = msgspec.structs.replace(request.options, priority="bulk", limits=self._limits)
        if request.logprobs:
            _ = engine.tokenizer  # raises UnsupportedOption
        with audio, engine.in_use():
            job = self._executor.start(engine, audio, options, name)
            try:
                transcript = await job.transcript
            finally:
                job.cancel()
                await job.wait_closed()
        texts = engine.tokenizer.decode if request.logprobs else lambda _: ""
        return await asyncio.to_thread(_render, transcript, request, texts)

    async def _speak(
        self, store: BatchStore, line: BatchLine, body: Mapping[str, Any], context: RequestContext
    ) -> _Body:
        request = await asyncio.to_thread(_parse_speech, body, self._config.max_characters)
        if request.sse:
            raise UnsupportedOption(
                "stream_format=sse in a batch", "audio is written as a file", "leave it out", param="stream_format"
            )
        speaker = SpeechSynthesizer.resolve(self._speech, request)
        speaker = speaker._replace(options=msgspec.structs.replace(speaker.options, priority="bulk"))
        context.ignored.add(request.ignored)
        stream = SpeechStream(self._executor.threads, partial(speaker.start_session, request.text), speaker.encoder)
        file_id = new_file_id()
        part = store.part_path(file_id)
        written = 0
        with contextlib.ExitStack() as undo:
            undo.callback(part.unlink, missing_ok=True)
            try:
                with speaker.engine.in_use(), part.open("wb") as file:
                    try:
                        await stream.start()
                        async for piece in stream:
                            written += await asyncio.to_thread(file.write, piece.audio)
                    finally:
                        await stream.close()
                await asyncio.to_thread(sync_file, part)
            except OSError as error:
                raise StoreUnavailable(
                    f"the audio cannot be written: {error.strerror}", "room in the folder of batches", STORE_RETRY_MS
                ) from error
            undo.pop_all()
        kind = speaker.encoder.content_type
        name = f"{_file_stem(line.custom_id)}.{request.format}"
        made = output_file(file_id, part, name, written, kind, self._config.batch.keep_s)
        told = LineSpeech(file_id, written, kind, round(stream.seconds, 3), speaker.engine.name, speaker.voice)
        return _Body(msgspec.json.encode(told), made)


def line_request_id(batch: OpenBatch, line: BatchLine) -> str:
    """Id of the request of a line: the same whenever it is asked."""
    return f"batch_req_{batch.id.removeprefix('batch_')}_{line.number}"


def failed_line(line: BatchLine, error: Exception, request_id: str) -> LineAnswer:
    """Answer of a line whose request failed."""
    status = error_mapping(error).status if isinstance(error, AsrServeError) else 500
    body = msgspec.json.encode(ErrorAnswer(problem_for(error, request_id)))
    response = LineResponse(status, request_id, msgspec.Raw(body))
    return LineAnswer("failed", msgspec.json.encode(OutputLine(request_id, line.custom_id, response, None)))


def _read_body(path: Path, line: BatchLine, endpoint: str) -> dict[str, Any]:
    with open_stored(path) as file:
        try:
            file.seek(line.start)
            data = file.read(line.length)
        except OSError as error:
            raise unreadable(error) from error
    if len(data) < line.length:
        raise MalformedRequest(f"the input ends in line {line.number}", "the file that was uploaded")
    return parse_line_body(parse_line(data, endpoint))


def _render(transcript: Transcript, request: transcription_form.TranscriptionRequest, texts: TokenTexts) -> bytes:
    """Body of an answer, as JSON."""
    rendered = transcription_response.render_transcription(transcript, request, texts)
    is_json = transcription_form.RESPONSE_FORMATS[request.response_format] == JSON
    return rendered if is_json else msgspec.json.encode(rendered.decode())


def _parse_speech(body: Mapping[str, Any], most_characters: int) -> SpeechRequest:
    """Raises OptionError, TextTooLong."""
    return parse_speech_request(msgspec.json.encode(body), most_characters)


def _file_stem(custom_id: str) -> str:
    """Name of a file of audio: printable, and no path."""
    return "".join(c if c.isprintable() and c not in '/\\"' else "_" for c in custom_id)[:100]
