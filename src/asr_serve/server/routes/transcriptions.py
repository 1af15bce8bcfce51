"""POST /v1/audio/transcriptions, /v1/audio/translations, /asr: an upload in, its text out, early."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from asr_serve.audio.reader import AudioLimits
from asr_serve.config import ServeConfig
from asr_serve.errors import AsrServeError, ClientGone, EngineClosed, ModelNotLoaded, OptionError
from asr_serve.pipelines.offline.transcribe import SegmentDone
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.protocols.funasr.asr import parse_asr_form, render_asr_answer
from asr_serve.protocols.openai import transcription_form, transcription_response
from asr_serve.protocols.openai.known_speakers import MAX_KNOWN_SPEAKERS, MAX_REFERENCE_BYTES, REFERENCES_FIELD
from asr_serve.protocols.recognition_fields import MAX_HOTWORDS, MAX_HOTWORDS_CHARACTERS
from asr_serve.server import openapi
from asr_serve.server.engine_registry import EngineRegistry, ModelEngine
from asr_serve.server.middleware.error_handlers import JSON
from asr_serve.server.middleware.request_context import RequestContext, request_context
from asr_serve.server.server_sent_events import with_error_event, with_keep_alive
from asr_serve.server.transcription_job import TranscriptionExecutor, TranscriptionJob
from asr_serve.server.uploads.upload import Upload, UploadLimits
from asr_serve.types import Transcript

FIELD_LIMITS: dict[str, Any] = {
    "max_repeats": {"keywords[]": MAX_HOTWORDS + 1},  # one more is counted where hot words are read
    "max_bytes_by_field": {
        "hotwords": 4 * MAX_HOTWORDS_CHARACTERS,
        REFERENCES_FIELD.removesuffix("[]"): MAX_REFERENCE_BYTES,
    },
    "max_text_bytes": 4 * MAX_HOTWORDS_CHARACTERS + MAX_KNOWN_SPEAKERS * MAX_REFERENCE_BYTES + (1 << 20),
}
"""What a form may hold beside its file."""


class ParsedForm(Protocol):
    """What a form asks for."""

    @property
    def model(self) -> str | None: ...
    @property
    def options(self) -> TranscribeOptions: ...
    @property
    def stream(self) -> bool: ...
    @property
    def option_to_field(self) -> Mapping[str, str]:
        """Options to the fields that ask for them, where these have other names."""


RequestT = TypeVar("RequestT", bound=ParsedForm)
RequestT_co = TypeVar("RequestT_co", bound=ParsedForm, covariant=True)


class FormParser(Protocol[RequestT_co]):
    """Reads a form. While it is not `complete`, what a later field can put right is let pass."""

    def __call__(self, sent: Mapping[str, Sequence[str]], *, complete: bool) -> RequestT_co: ...


class TranscriptionDependencies(NamedTuple):
    """What these routes work with."""

    engines: EngineRegistry
    executor: TranscriptionExecutor
    uploads: UploadLimits
    audio: AudioLimits
    max_beam: int

    @classmethod
    def create(
        cls, config: ServeConfig, engines: EngineRegistry, jobs: TranscriptionExecutor
    ) -> TranscriptionDependencies:
        uploads = UploadLimits(
            max_bytes=config.max_body_bytes,
            idle_timeout_s=config.upload_idle_s,
            min_bytes_per_s=config.upload_min_bytes_per_s,
            **FIELD_LIMITS,
        )
        return cls(engines, jobs, uploads, AudioLimits(max_duration_s=config.max_duration_s), config.max_beam)


class UploadTranscription(Generic[RequestT]):
    """One upload and the job that hears it: begun while bytes arrive, with the fields that came before the file,
    and begun again when a later field changes what was asked.

    `engine` is the one that listens. As an async context (`of`) it stops everything at its end, and waits until
    nothing is left.
    """

    transcript: Transcript

    def __init__(
        self,
        desk: TranscriptionDependencies,
        visit: RequestContext,
        upload: Upload,
        read: FormParser[RequestT],
        uploading: contextlib.ExitStack,
        using: contextlib.ExitStack,
    ) -> None:
        """`uploading`: to be closed when the upload is complete; `using`: the engine's, for as long as this lives.
        Raises OptionError, UnknownModel, ModelNotLoaded, EngineClosed."""
        self._dependencies, self._context, self._upload, self._read = desk, visit, upload, read
        self._upload_trace, self._engine_use = uploading, using
        self.request = _parse_fields(upload, read)
        self._text_sent = False
        self._use(desk.engines.get(self.request.model))
        self._job = self._start_job()
        self._form_task: asyncio.Task[None] | None = None
        if upload.complete:
            uploading.close()
        else:
            self._form_task = asyncio.create_task(self._finish_form())
            self._form_task.add_done_callback(self._on_form_done)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, desk: TranscriptionDependencies, request: Request, read: FormParser[RequestT]
    ) -> AsyncIterator[UploadTranscription[RequestT]]:
        """Begin with the request's body. Raises what `Upload.begin` does too."""
        visit, headers = request_context(request.scope), request.headers
        length = headers.get("content-length", "")
        async with contextlib.AsyncExitStack() as held:
            uploading = held.enter_context(contextlib.ExitStack())
            uploading.enter_context(visit.trace.upload())
            using = held.enter_context(contextlib.ExitStack())
            upload = await Upload.start(
                _body(request.receive),
                headers.get("content-type", ""),
                int(length) if length.isdecimal() else None,
                desk.uploads,
                gone=ClientGone,
            )
            held.push_async_callback(_end, upload)
            asked = _parse_fields(upload, read)
            held.enter_context(_errors_named_by_field(asked.option_to_field))
            named = asked.model is not None
            try:
                work = cls(desk, visit, upload, read, uploading, using)
            except (OptionError, ModelNotLoaded, EngineClosed):
                if named or upload.complete:
                    raise
                using.close()
                await upload.finish()  # the model that suits may be named behind the file
                work = cls(desk, visit, upload, read, uploading, using)
            held.push_async_callback(work._close)
            yield work

    async def wait_form(self) -> None:
        """Wait until the whole form is read, and `asked` is what it asks. Raises what is wrong with it."""
        if self._form_task is not None:
            await self._form_task

    async def segments(self) -> AsyncIterator[SegmentDone]:
        """As they are heard, once; then `transcript` is there. Raises what is wrong with form or audio."""
        while True:
            job = self._job
            async for event in job:
                if job is not self._job:
                    break  # heard in another way than was asked for
                self._text_sent = True
                if event.phases is not None:
                    self._context.trace.engine_phases(event.phases)
                yield event
            await self.wait_form()
            if job is self._job:
                self.transcript = await job.transcript
                self._context.audio_s = self.transcript.duration_s
                return

    async def transcribe(self) -> Transcript:
        """The whole of it. Raises what `segments` does."""
        async for _ in self.segments():
            pass
        return self.transcript

    def _use(self, engine: ModelEngine) -> None:
        """Keep this one, and no other, from being closed."""
        before = self._engine_use.pop_all()
        self._engine_use.enter_context(engine.in_use())
        before.close()
        self.engine = engine

    def _start_job(self) -> TranscriptionJob:
        self._context.model = self.engine.name
        options = msgspec.structs.replace(self.request.options, limits=self._dependencies.audio)
        return self._dependencies.executor.start(
            self.engine, self._upload.open_audio(), options, self._upload.filename
        )

    async def _finish_form(self) -> None:
        """Read the form to its end; begin again if that changes what is to be heard."""
        finishing = asyncio.create_task(self._upload.finish())
        try:
            heard: set[asyncio.Future[Any]] = {finishing, self._job.transcript}
            await asyncio.wait(heard, return_when=asyncio.FIRST_COMPLETED)
            if not finishing.done() and self._job.failed and self._upload.failure is None:
                self._job.transcript.result()  # no good, whatever else comes
            await finishing
        finally:
            finishing.cancel()
            self._upload_trace.close()
        before, self.request = self.request, _parse_fields(self._upload, self._read)
        engines = self._dependencies.engines
        # Not got again: it may be on its way out by now, and this request was there before.
        same = engines.resolve(self.request.model) == self.engine.name
        if self._text_sent and not (same and self._output_options(self.request) == self._output_options(before)):
            raise OptionError(
                "a field after the file changes what was asked, and text was sent already",
                "a stream is as the fields before the file say",
                "send the file last",
            )
        if same and self._options(self.request) == self._options(before):
            return
        engine = self.engine if same else engines.get(self.request.model)
        self._job.cancel()
        await self._job.wait_closed()
        self._use(engine)
        self._job = self._start_job()

    def _options(self, asked: RequestT) -> TranscribeOptions:
        """Language and longest segment as this engine takes them where nothing is said."""
        card, options = self.engine.card, asked.options
        options = msgspec.structs.replace(options, language=card.language(options.language))
        if options.long_form == "sequential":  # its windows are the model's
            return options
        return msgspec.structs.replace(options, max_segment_ms=options.max_segment_ms or card.max_segment_ms)

    def _output_options(self, asked: Any) -> dict[str, Any]:
        """All that shapes what is sent; the model may be called by any of its names."""
        return {**msgspec.structs.asdict(asked), "model": None, "options": self._options(asked)}

    def _on_form_done(self, settling: asyncio.Task[None]) -> None:
        if settling.cancelled() or settling.exception():
            self._job.cancel()  # so that whoever waits for its segments comes to hear of it

    async def _close(self) -> None:
        self._job.cancel()
        self._upload.close()  # a job that waits for bytes waits no more
        if self._form_task is not None:
            self._form_task.cancel()
            await asyncio.wait({self._form_task})
        await self._job.wait_closed()


def _parse_fields(upload: Upload, read: FormParser[RequestT]) -> RequestT:
    """What the fields ask for, as far as they are here. Raises OptionError."""
    if upload.complete and not upload.has_file:
        raise OptionError("no file came", "audio, in the field file", "curl -F file=@audio.wav", param="file")
    if upload.has_file and upload.filename is None:
        raise OptionError(
            "the field file came as text, without a filename",
            "the audio itself: nothing is fetched from paths or addresses",
            "curl -F file=@audio.wav, with the @",
            param="file",
        )
    return read(upload.fields, complete=upload.complete)


@contextlib.contextmanager
def _errors_named_by_field(params: Mapping[str, str]) -> Iterator[None]:
    """An option that is refused is named as the form names it."""
    try:
        yield
    except OptionError as error:
        if error.param is not None:
            error.param = params.get(error.param, error.param)
        raise


async def _end(upload: Upload) -> None:
    upload.close()
    with contextlib.suppress(AsrServeError):
        await upload.finish()  # its reader has let go of the connection


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left while it sent its request")
        yield message.get("body", b"")
        if not message.get("more_body"):
            return


class TranscriptEventStream(Response):
    """Server-sent events: the text of a segment when it is heard. Takes over what `held` holds."""

    media_type = "text/event-stream"

    def __init__(
        self, work: UploadTranscription[transcription_form.TranscriptionRequest], held: contextlib.AsyncExitStack
    ) -> None:
        self.status_code = 200
        self.background: BackgroundTask | None = None
        self._transcription, self._resources = work, held
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with (
            self._resources,
            contextlib.aclosing(with_keep_alive(self._events(request_context(scope)))) as pieces,
        ):
            first = await anext(pieces)  # what fails before it is answered with a status of its own
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for piece in with_error_event(pieces, scope):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, visit: RequestContext) -> AsyncGenerator[bytes, None]:
        work = self._transcription
        deltas: transcription_response.TranscriptEventEncoder | None = None
        async for event in work.segments():
            # Not before: until its first segment, a later field may still change what is asked.
            deltas = deltas or transcription_response.TranscriptEventEncoder(
                work.request, work.engine.tokenizer.decode
            )
            visit.mark_first_text()
            yield deltas.encode_segment(event.segment)
        deltas = deltas or transcription_response.TranscriptEventEncoder(
            work.request, work.engine.tokenizer.decode
        )
        yield deltas.encode_done(work.transcript)


def _answer(
    request: Request, transcript: Transcript, work: UploadTranscription[transcription_form.TranscriptionRequest]
) -> Response:
    request_context(request.scope).mark_first_text()
    body = transcription_response.render_transcription(transcript, work.request, work.engine.tokenizer.decode)
    return Response(body, media_type=transcription_form.RESPONSE_FORMATS[work.request.response_format])


def routes(desk: TranscriptionDependencies) -> APIRouter:
    router = APIRouter(tags=["Transcription"])
    ask = partial(transcription_form.parse_transcription_form, max_beam=desk.max_beam)
    ask_translation = partial(transcription_form.parse_translation_form, max_beam=desk.max_beam)

    @router.post("/v1/audio/transcriptions", summary="Transcribe audio", **openapi.TRANSCRIPTIONS)
    async def transcriptions(request: Request) -> Response:
        """OpenAI's route. Audio is heard while it arrives; with `stream=true` before the file, its text comes
        back while it arrives, too."""
        async with contextlib.AsyncExitStack() as held:
            work = await held.enter_async_context(UploadTranscription.open(desk, request, ask))
            if not work.request.stream:
                await work.wait_form()
            if work.request.stream:
                return TranscriptEventStream(work, held.pop_all())
            return _answer(request, await work.transcribe(), work)

    @router.post("/v1/audio/translations", summary="Translate audio into English", **openapi.TRANSLATIONS)
    async def translations(request: Request) -> Response:
        """OpenAI's route. For models that translate; the others refuse it by name."""
        async with UploadTranscription.open(desk, request, ask_translation) as work:
            await work.wait_form()
            return _answer(request, await work.transcribe(), work)

    @router.post("/asr", summary="Transcribe audio, as FunASR does", **openapi.ASR)
    async def asr(request: Request) -> Response:
        """FunASR's route. What it offers and no model here does is refused by name."""
        visit = request_context(request.scope)
        async with UploadTranscription.open(desk, request, parse_asr_form) as work:
            await work.wait_form()
            transcript = await work.transcribe()
            visit.mark_first_text()
            return Response(render_asr_answer(transcript, work.request, visit.elapsed_s()), media_type=JSON)

    return router
