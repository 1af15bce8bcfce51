"""POST /v1/audio/transcriptions, /v1/audio/translations: transcription of uploads while they arrive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from asr_serve.audio.reader import AudioLimits
from asr_serve.config import AUTO_MODEL, ServeConfig
from asr_serve.errors import AsrServeError, ClientGone, EngineClosed, ModelNotLoaded, OptionError, UnsupportedOption
from asr_serve.models.registry import AsrCard
from asr_serve.pipelines.offline.transcribe import SegmentDone
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.protocols.form_fields import errors_named_by_field, reject_query_fields
from asr_serve.protocols.openai import transcription_form, transcription_response
from asr_serve.protocols.openai.events import TokenTexts
from asr_serve.protocols.openai.known_speakers import MAX_KNOWN_SPEAKERS, MAX_REFERENCE_BYTES, REFERENCES_FIELD
from asr_serve.protocols.recognition_fields import MAX_HOTWORDS, MAX_HOTWORDS_CHARACTERS
from asr_serve.server import openapi
from asr_serve.server.caller_models import CallerModels, is_model_failure
from asr_serve.server.engine_registry import EngineRegistry, FileEngine, ModelNeeds
from asr_serve.server.middleware.admission import AdmissionClass, admitted_as
from asr_serve.server.middleware.request_context import RequestContext, request_context
from asr_serve.server.server_sent_events import EVENT_STREAM, StreamedResponse, with_keep_alive
from asr_serve.server.shadow_transcriber import ShadowTranscriber
from asr_serve.server.spoken_language import IdentifyingEngine
from asr_serve.server.transcription_job import TranscriptionExecutor, TranscriptionJob
from asr_serve.server.uploads.multipart_form import FILE_FIELD, MultipartForm
from asr_serve.server.uploads.upload import BodyFactory, Upload, UploadLimits, read_body
from asr_serve.text.languages import MULTILINGUAL_COMMAND
from asr_serve.types import Transcript

log = logging.getLogger(__name__)

FIELD_LIMITS: dict[str, Any] = {
    "max_repeats": {"keywords[]": MAX_HOTWORDS + 1},  # one more, so that the parser of hotwords refuses it
    "max_bytes_by_field": {
        "hotwords": 4 * MAX_HOTWORDS_CHARACTERS,
        REFERENCES_FIELD.removesuffix("[]"): MAX_REFERENCE_BYTES,
    },
    "max_text_bytes": 4 * MAX_HOTWORDS_CHARACTERS + MAX_KNOWN_SPEAKERS * MAX_REFERENCE_BYTES + (1 << 20),
}
"""Limits of the fields beside the file."""


class ParsedForm(Protocol):
    """Parsed options of a form."""

    @property
    def model(self) -> str | None: ...
    @property
    def options(self) -> TranscribeOptions: ...
    @property
    def stream(self) -> bool: ...
    @property
    def raw_pcm(self) -> bool:
        """Returns whether the file is s16le at 16 kHz without a header."""

    @property
    def detects_language(self) -> bool:
        """Returns whether its model must tell languages apart."""

    @property
    def option_to_field(self) -> Mapping[str, str]:
        """Option -> name of its field, where they differ."""


RequestT = TypeVar("RequestT", bound=ParsedForm)
RequestT_co = TypeVar("RequestT_co", bound=ParsedForm, covariant=True)


class FormParser(Protocol[RequestT_co]):
    """Parser of a form. Until it is `complete`, errors that a later field can correct are ignored."""

    def __call__(self, sent: Mapping[str, Sequence[str]], *, complete: bool) -> RequestT_co: ...


class UploadForm(NamedTuple, Generic[RequestT_co]):
    """Form of a protocol, as its route reads it."""

    parse: FormParser[RequestT_co]
    fields: Collection[str]
    """Every field but the file."""
    file_field: str = FILE_FIELD
    has_query_fields: bool = False
    """Whether fields may come in the address, too; `parse` then has them."""


class TranscriptionDependencies(NamedTuple):
    """Dependencies of these routes."""

    engines: EngineRegistry
    executor: TranscriptionExecutor
    shadows: ShadowTranscriber
    uploads: UploadLimits
    audio: AudioLimits
    max_beam: int

    @classmethod
    def create(
        cls, config: ServeConfig, engines: EngineRegistry, jobs: TranscriptionExecutor, shadows: ShadowTranscriber
    ) -> TranscriptionDependencies:
        uploads = UploadLimits(
            max_bytes=config.max_body_bytes,
            idle_timeout_s=config.upload_idle_s,
            min_bytes_per_s=config.upload_min_bytes_per_s,
            **FIELD_LIMITS,
        )
        return cls(engines, jobs, shadows, uploads, AudioLimits(max_duration_s=config.max_duration_s), config.max_beam)


class UploadTranscription(Generic[RequestT]):
    """One upload and its transcription job: started while bytes arrive, with the fields before the file, and
    restarted if a later field changes the request.

    `engine` is the one that transcribes. The async context `open` stops everything at its end, and waits for it.
    """

    transcript: Transcript

    def __init__(
        self,
        dependencies: TranscriptionDependencies,
        context: RequestContext,
        upload: Upload,
        form: UploadForm[RequestT],
        upload_trace: contextlib.ExitStack,
        engine_use: contextlib.ExitStack,
        models: CallerModels,
    ) -> None:
        """`upload_trace`: closed when the upload is complete. `engine_use`: held as long as this exists.
        Raises OptionError, UnknownModel, ModelNotLoaded, EngineClosed, NotAllowed."""
        self._models = models
        self._dependencies, self._context, self._upload, self._form = dependencies, context, upload, form
        self._upload_trace, self._engine_use = upload_trace, engine_use
        self.request = _parse_fields(upload, form)
        self._model_named = not self._names_default(self.request.model)
        """Whether a field before the file names a model, which no later field changes."""
        self._text_sent = self._repeated = False
        self._uploaded_s = time.perf_counter()
        self._use(self._models.get_for_files(self._model_name(self.request)))
        self._job = self._start_job()
        self._form_task: asyncio.Task[None] | None = None
        if upload.complete:
            upload_trace.close()
        else:
            self._form_task = asyncio.create_task(self._finish_form())
            self._form_task.add_done_callback(self._on_form_done)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        dependencies: TranscriptionDependencies,
        request: Request,
        *forms: UploadForm[RequestT],
        create_body: BodyFactory | None = None,
        models: CallerModels | None = None,
    ) -> AsyncIterator[UploadTranscription[RequestT]]:
        """Starts reading the request's body. `forms`: of protocols that share the route, told apart by the field of
        their file. `create_body`: parser of the body; None: one of multipart forms. `models`: the caller's, where some
        were looked up before. Raises what `__init__` and `Upload.start` do; OptionError for fields in the address."""
        context, headers = request_context(request.scope), request.headers
        models = models or CallerModels(dependencies.engines, context)
        length = headers.get("content-length", "")
        async with contextlib.AsyncExitStack() as resources:
            upload_trace = resources.enter_context(contextlib.ExitStack())
            upload_trace.enter_context(context.trace.upload())
            engine_use = resources.enter_context(contextlib.ExitStack())
            upload = await Upload.start(
                read_body(request.receive),
                headers.get("content-type", ""),
                int(length) if length.isdecimal() else None,
                dependencies.uploads,
                gone=ClientGone,
                create_body=create_body or partial(MultipartForm, file_fields=[form.file_field for form in forms]),
            )
            resources.push_async_callback(_end, upload)
            form = next((form for form in forms if form.file_field == upload.file_field), forms[0])
            if not form.has_query_fields:
                reject_query_fields(request.url.query, form.fields, "the form")
            parsed = _parse_fields(upload, form)
            resources.enter_context(errors_named_by_field(parsed.option_to_field))
            model_named = parsed.model is not None
            await _load_substitute(dependencies.engines, parsed)
            try:
                work = cls(dependencies, context, upload, form, upload_trace, engine_use, models)
            except (OptionError, ModelNotLoaded, EngineClosed):
                if model_named or upload.complete:
                    raise
                engine_use.close()
                await upload.finish()  # a suitable model may be named after the file
                await _load_substitute(dependencies.engines, _parse_fields(upload, form))
                work = cls(dependencies, context, upload, form, upload_trace, engine_use, models)
            resources.push_async_callback(work._close)
            yield work

    @property
    def filename(self) -> str | None:
        """Name of the file, as the client sent it."""
        return self._upload.filename

    async def wait_form(self) -> None:
        """Waits until the whole form is read, and `request` is final. Raises what is wrong with the form."""
        if self._form_task is not None:
            await self._form_task

    @property
    def model_known(self) -> bool:
        """Returns whether no field that follows, nor the language that is spoken, can choose another model than
        `engine`."""
        form_read = self._form_task is None or self._form_task.done()
        if not (form_read or self._text_sent or self._model_named):
            return False
        return not isinstance(self.engine, IdentifyingEngine) or self.engine.identified.is_set()

    async def segments(self) -> AsyncIterator[SegmentDone]:
        """Yields segments as they are recognized, once; sets `transcript`. Raises errors of form and audio."""
        while True:
            job = self._job
            async for event in job:
                if job is not self._job:
                    break  # recognized with other options than requested
                self._text_sent = True
                if event.phases is not None:
                    self._context.trace.engine_phases(event.phases)
                yield event
            await self.wait_form()
            if job is not self._job:
                continue
            try:
                self.transcript = await job.transcript
            except AsrServeError as error:
                if await self._fall_back(error):
                    continue
                raise
            self._context.audio_s = self.transcript.duration_s
            self._finish_watch()
            return

    async def _fall_back(self, error: AsrServeError) -> bool:
        """Starts again with the stable model where the candidate of a route has failed, and nothing was sent yet.
        False: the failure stands."""
        watch = self._models.watch(self.request.model, "upload")
        if self._text_sent or (engine := self._models.fall_back(self.request.model, error)) is None:
            watch.finish(error)
            return False
        log.warning("the candidate %s failed, and %s transcribes its upload: %s", self.engine.name, engine.name, error)
        await self._job.wait_closed()
        self._use(engine)
        self._job, self._repeated = self._start_job(), True
        return True

    def _finish_watch(self) -> None:
        """Counts the upload for the policy, and offers it to the shadow of its route."""
        watch = self._models.watch(self.request.model, "upload")
        if not self._repeated:  # the candidate's time is in it, and it would be the stable model's
            watch.note_latency(time.perf_counter() - self._uploaded_s)
        watch.finish()
        self._upload.handed_over = self._dependencies.shadows.offer(
            watch.routed, self._context.request_id, self._upload, self._job_options(), self.transcript.text
        )

    async def transcribe(self) -> Transcript:
        """Returns the whole transcript. Raises what `segments` does."""
        async for _ in self.segments():
            pass
        return self.transcript

    def _model_name(self, request: RequestT) -> str | None:
        """Name of the model that serves a request: the one that it names, or one in place of the default."""
        return self._dependencies.engines.substitute(request.model, recognition_needs(request)) or request.model

    def _use(self, engine: FileEngine) -> None:
        """Sets `engine`, and holds this one, and no other, in use."""
        previous = self._engine_use.pop_all()
        self._engine_use.enter_context(engine.in_use())
        previous.close()
        self.engine = engine

    def _start_job(self) -> TranscriptionJob:
        if self.request.detects_language:
            check_detects_language(self.engine.card)
        self._context.model, self._context.identified_language = self.engine.name, ""
        options = self._job_options()
        self._upload.raw_pcm = self.request.raw_pcm
        return self._dependencies.executor.start(self.engine, self._upload.open_bytes(), options, self._upload.filename)

    def _job_options(self) -> TranscribeOptions:
        options = self.request.options
        limits = msgspec.structs.replace(self._dependencies.audio, head_s=options.limits.head_s)
        return msgspec.structs.replace(options, limits=limits)

    async def _finish_form(self) -> None:
        """Reads the form to its end; restarts the job if later fields change the request."""
        finishing = asyncio.create_task(self._upload.finish())
        try:
            tasks: set[asyncio.Future[Any]] = {finishing, self._job.transcript}
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not finishing.done() and self._job.failed and self._upload.failure is None:
                failure = self._job.transcript.exception()
                if failure is not None and not is_model_failure(failure):
                    raise failure  # no later field can help
            await finishing
        finally:
            finishing.cancel()
            self._upload_trace.close()
            self._uploaded_s = time.perf_counter()
        previous, self.request = self.request, _parse_fields(self._upload, self._form)
        await _load_substitute(self._dependencies.engines, self.request)
        # The engine is not looked up again: it may be unloading by now, but still serves this request.
        name = self._model_name(self.request)
        same = self._models.resolve_for_files(name) == self.engine.name
        identified = isinstance(self.engine, IdentifyingEngine)
        if (identified or self._models.identifies_language(name)) and (
            self._identification_fields(self.request) != self._identification_fields(previous)
        ):
            same = False  # the language is to be identified, or not any more, whichever model that ends with
        if self._text_sent and not (same and self._output_options(self.request) == self._output_options(previous)):
            raise OptionError(
                "a field after the file changes what was asked, and text was sent already",
                "a stream is as the fields before the file say",
                "send the file last",
            )
        same_audio = self.request.raw_pcm == previous.raw_pcm
        if same and same_audio and self._options(self.request) == self._options(previous):
            return
        # An IdentifyingEngine serves one job.
        reused = same and not identified
        engine = self.engine if reused else self._models.get_for_files(name)
        self._job.cancel()
        await self._job.wait_closed()
        self._use(engine)
        self._job = self._start_job()

    def _identification_fields(self, request: RequestT) -> tuple[str | None, str | None, str]:
        """Model, language and task as requested, each of which decides whether the language is identified; None as the
        model for the names of the default one, but `auto`."""
        model = request.model
        named = model == AUTO_MODEL or not self._names_default(model)
        return model if named else None, request.options.language, request.options.task

    def _names_default(self, model: str | None) -> bool:
        return model is None or self._dependencies.engines.means_default(model)

    def _options(self, request: RequestT) -> TranscribeOptions:
        """Options with language and longest segment as this engine takes them by default."""
        card, options = self.engine.card, request.options
        options = msgspec.structs.replace(options, language=card.language(options.language))
        if options.long_form == "sequential":  # its windows are the model's
            return options
        return msgspec.structs.replace(options, max_segment_ms=options.max_segment_ms or card.max_segment_ms)

    def _output_options(self, request: Any) -> dict[str, Any]:
        """All that determines the output, except the model, which may be named by any alias."""
        return {**msgspec.structs.asdict(request), "model": None, "options": self._options(request)}

    def _on_form_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception():
            self._job.cancel()  # so that the reader of its segments gets the error

    async def _close(self) -> None:
        self._job.cancel()
        if not self._upload.handed_over:
            self._upload.close()  # ends the job's wait for bytes
        if self._form_task is not None:
            self._form_task.cancel()
            await asyncio.wait({self._form_task})
        await self._job.wait_closed()


def recognition_needs(request: ParsedForm) -> ModelNeeds:
    """Needs by which a request of no named model is served by another than the default one."""
    return ModelNeeds(request.options.language, request.options.task, request.detects_language)


def check_detects_language(card: AsrCard) -> None:
    """Raises UnsupportedOption for a model that cannot tell which language is spoken."""
    if not card.detects:
        raise UnsupportedOption(
            f"{card.name} does not tell languages apart",
            f"it is for {', '.join(card.languages)}",
            MULTILINGUAL_COMMAND,
            param="model",
        )


async def _load_substitute(engines: EngineRegistry, request: ParsedForm) -> None:
    """Loads the model that serves a request in place of the default one, if there is one. Raises errors of loading."""
    await engines.load_substitute(request.model, recognition_needs(request))


def _parse_fields(upload: Upload, form: UploadForm[RequestT]) -> RequestT:
    """Parses the fields that have arrived. Raises OptionError."""
    field = form.file_field
    if upload.complete and not upload.has_file:
        raise OptionError("no file came", f"audio, in the field {field}", f"curl -F {field}=@audio.wav", param=field)
    if upload.has_file and upload.filename is None:
        raise OptionError(
            f"the field {field} came as text, without a filename",
            "the audio itself: nothing is fetched from paths or addresses",
            f"curl -F {field}=@audio.wav, with the @",
            param=field,
        )
    return form.parse(upload.fields, complete=upload.complete)


async def _end(upload: Upload) -> None:
    if upload.handed_over:
        return
    upload.close()
    with contextlib.suppress(AsrServeError):
        await upload.finish()  # so that its reader has released the connection


class TranscriptEventStream(StreamedResponse):
    """Server-sent events, with the text of each segment once recognized. Closes `stack`."""

    def __init__(
        self, work: UploadTranscription[transcription_form.TranscriptionRequest], stack: contextlib.AsyncExitStack
    ) -> None:
        super().__init__(EVENT_STREAM, {}, stack)
        self._transcription = work

    def pieces(self, context: RequestContext) -> AsyncGenerator[bytes, None]:
        # The head of the response names the model, and goes out with the first piece.
        return with_keep_alive(self._events(context), lambda: self._transcription.model_known)

    async def _events(self, context: RequestContext) -> AsyncGenerator[bytes, None]:
        work = self._transcription
        encoder: transcription_response.TranscriptEventEncoder | None = None
        async for event in work.segments():
            # Not before the first segment: until then a later field may still change the request.
            encoder = encoder or transcription_response.TranscriptEventEncoder(work.request, _token_texts(work))
            context.mark_first_text()
            yield encoder.encode_segment(event.segment)
        encoder = encoder or transcription_response.TranscriptEventEncoder(work.request, _token_texts(work))
        yield encoder.encode_done(work.transcript)


def _token_texts(work: UploadTranscription[transcription_form.TranscriptionRequest]) -> TokenTexts:
    """Texts of tokens, which log-probabilities are told with. Raises UnsupportedOption where those were requested of
    a pipeline with the tokens of several models."""
    if not work.request.logprobs:
        return lambda _: ""
    _ = work.engine.tokenizer  # raises
    return lambda tokens: work.engine.tokenizer.decode(tokens)  # which it is, is known once they are recognized


async def _answer(request: Request, work: UploadTranscription[transcription_form.TranscriptionRequest]) -> Response:
    texts = _token_texts(work)
    transcript = await work.transcribe()
    request_context(request.scope).mark_first_text()
    body = transcription_response.render_transcription(transcript, work.request, texts)
    return Response(body, media_type=transcription_form.RESPONSE_FORMATS[work.request.response_format])


def routes(dependencies: TranscriptionDependencies) -> APIRouter:
    router = APIRouter(tags=["Transcription"])
    parse = partial(transcription_form.parse_transcription_form, max_beam=dependencies.max_beam)
    parse_translation = partial(transcription_form.parse_translation_form, max_beam=dependencies.max_beam)
    form = UploadForm(parse, transcription_form.TRANSCRIPTION_FIELDS)
    translation_form = UploadForm(parse_translation, transcription_form.TRANSLATION_FIELDS)

    @router.post("/v1/audio/transcriptions", summary="Transcribe audio", **openapi.TRANSCRIPTIONS)
    @admitted_as(AdmissionClass.WORK)
    async def transcriptions(request: Request) -> Response:
        """OpenAI's route. Audio is transcribed while it arrives; with `stream=true` before the file, its text is
        returned meanwhile, too."""
        async with contextlib.AsyncExitStack() as resources:
            work = await resources.enter_async_context(UploadTranscription.open(dependencies, request, form))
            if not work.request.stream:
                await work.wait_form()
            if work.request.stream:
                return TranscriptEventStream(work, resources.pop_all())
            return await _answer(request, work)

    @router.post("/v1/audio/translations", summary="Translate audio into English", **openapi.TRANSLATIONS)
    @admitted_as(AdmissionClass.WORK)
    async def translations(request: Request) -> Response:
        """OpenAI's route, for models that translate. Other models are refused by name."""
        async with UploadTranscription.open(dependencies, request, translation_form) as work:
            await work.wait_form()
            return await _answer(request, work)

    return router
