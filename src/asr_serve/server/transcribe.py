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
from asr_serve.protocols.transcriptions import answers, funasr, openai
from asr_serve.protocols.transcriptions.known import MOST, MOST_BYTES, REFERENCES
from asr_serve.protocols.transcriptions.wants import HOTWORDS_CHARACTERS, MOST_HOTWORDS
from asr_serve.server import documents
from asr_serve.server.bodies.uploads import Upload, UploadLimits
from asr_serve.server.engines import Engine, Engines
from asr_serve.server.jobs import Job, Jobs
from asr_serve.server.layers.replies import JSON, told_in_stream
from asr_serve.server.layers.visits import Visit, visit_of
from asr_serve.types import Transcript

FIELD_LIMITS: dict[str, Any] = {
    "max_repeats": {"keywords[]": MOST_HOTWORDS + 1},  # one more is counted where hot words are read
    "wider_bytes": {"hotwords": 4 * HOTWORDS_CHARACTERS, REFERENCES.removesuffix("[]"): MOST_BYTES},
    "max_text_bytes": 4 * HOTWORDS_CHARACTERS + MOST * MOST_BYTES + (1 << 20),
}
"""What a form may hold beside its file."""
KEEP_ALIVE_S = 15.0
"""A stream that has nothing to say says so this often, for proxies that close what is quiet."""
KEEP_ALIVE = b": still listening\n\n"


class Asked(Protocol):
    """What a form asks for."""

    @property
    def model(self) -> str | None: ...
    @property
    def options(self) -> TranscribeOptions: ...
    @property
    def stream(self) -> bool: ...
    @property
    def params(self) -> Mapping[str, str]:
        """Options to the fields that ask for them, where these have other names."""


A = TypeVar("A", bound=Asked)
A_co = TypeVar("A_co", bound=Asked, covariant=True)


class Read(Protocol[A_co]):
    """Reads a form. While it is not `complete`, what a later field can put right is let pass."""

    def __call__(self, sent: Mapping[str, Sequence[str]], *, complete: bool) -> A_co: ...


class Desk(NamedTuple):
    """What these routes work with."""

    engines: Engines
    jobs: Jobs
    uploads: UploadLimits
    audio: AudioLimits
    max_beam: int

    @classmethod
    def of(cls, config: ServeConfig, engines: Engines, jobs: Jobs) -> Desk:
        uploads = UploadLimits(
            max_bytes=config.max_body_bytes,
            idle_timeout_s=config.upload_idle_s,
            min_bytes_per_s=config.upload_min_bytes_per_s,
            **FIELD_LIMITS,
        )
        return cls(engines, jobs, uploads, AudioLimits(max_duration_s=config.max_duration_s), config.max_beam)


class Work(Generic[A]):
    """One upload and the job that hears it: begun while bytes arrive, with the fields that came before the file,
    and begun again when a later field changes what was asked.

    `engine` is the one that listens. As an async context (`of`) it stops everything at its end, and waits until
    nothing is left.
    """

    transcript: Transcript

    def __init__(
        self,
        desk: Desk,
        visit: Visit,
        upload: Upload,
        read: Read[A],
        uploading: contextlib.ExitStack,
        using: contextlib.ExitStack,
    ) -> None:
        """`uploading`: to be closed when the upload is complete; `using`: the engine's, for as long as this lives.
        Raises OptionError, UnknownModel, ModelNotLoaded, EngineClosed."""
        self._desk, self._visit, self._upload, self._read = desk, visit, upload, read
        self._uploading, self._using = uploading, using
        self.asked = _asked(upload, read)
        self._said = False
        self._use(desk.engines.get(self.asked.model))
        self._job = self._begin()
        self._settling: asyncio.Task[None] | None = None
        if upload.complete:
            uploading.close()
        else:
            self._settling = asyncio.create_task(self._settle())
            self._settling.add_done_callback(self._settled)

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, desk: Desk, request: Request, read: Read[A]) -> AsyncIterator[Work[A]]:
        """Begin with the request's body. Raises what `Upload.begin` does too."""
        visit, headers = visit_of(request.scope), request.headers
        length = headers.get("content-length", "")
        async with contextlib.AsyncExitStack() as held:
            uploading = held.enter_context(contextlib.ExitStack())
            uploading.enter_context(visit.trace.upload())
            using = held.enter_context(contextlib.ExitStack())
            upload = await Upload.begin(
                _body(request.receive),
                headers.get("content-type", ""),
                int(length) if length.isdecimal() else None,
                desk.uploads,
                gone=ClientGone,
            )
            held.push_async_callback(_end, upload)
            asked = _asked(upload, read)
            held.enter_context(_by_field(asked.params))
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

    async def settled(self) -> None:
        """Wait until the whole form is read, and `asked` is what it asks. Raises what is wrong with it."""
        if self._settling is not None:
            await self._settling

    async def segments(self) -> AsyncIterator[SegmentDone]:
        """As they are heard, once; then `transcript` is there. Raises what is wrong with form or audio."""
        while True:
            job = self._job
            async for event in job:
                if job is not self._job:
                    break  # heard in another way than was asked for
                self._said = True
                if event.phases is not None:
                    self._visit.trace.engine_phases(event.phases)
                yield event
            await self.settled()
            if job is self._job:
                self.transcript = await job.transcript
                self._visit.audio_s = self.transcript.duration_s
                return

    async def heard(self) -> Transcript:
        """The whole of it. Raises what `segments` does."""
        async for _ in self.segments():
            pass
        return self.transcript

    def _use(self, engine: Engine) -> None:
        """Keep this one, and no other, from being closed."""
        before = self._using.pop_all()
        self._using.enter_context(engine.used())
        before.close()
        self.engine = engine

    def _begin(self) -> Job:
        self._visit.model = self.engine.name
        options = msgspec.structs.replace(self.asked.options, limits=self._desk.audio)
        return self._desk.jobs.begin(self.engine, self._upload.audio(), options, self._upload.filename)

    async def _settle(self) -> None:
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
            self._uploading.close()
        before, self.asked = self.asked, _asked(self._upload, self._read)
        engines = self._desk.engines
        # Not got again: it may be on its way out by now, and this request was there before.
        same = engines.resolve(self.asked.model) == self.engine.name
        if self._said and not (same and self._as_heard(self.asked) == self._as_heard(before)):
            raise OptionError(
                "a field after the file changes what was asked, and text was sent already",
                "a stream is as the fields before the file say",
                "send the file last",
            )
        if same and self._options(self.asked) == self._options(before):
            return
        engine = self.engine if same else engines.get(self.asked.model)
        self._job.cancel()
        await self._job.over()
        self._use(engine)
        self._job = self._begin()

    def _options(self, asked: A) -> TranscribeOptions:
        """Language and longest segment as this engine takes them where nothing is said."""
        card, options = self.engine.card, asked.options
        options = msgspec.structs.replace(options, language=card.language(options.language))
        if options.long_form == "sequential":  # its windows are the model's
            return options
        return msgspec.structs.replace(options, max_segment_ms=options.max_segment_ms or card.max_segment_ms)

    def _as_heard(self, asked: Any) -> dict[str, Any]:
        """All that shapes what is sent; the model may be called by any of its names."""
        return {**msgspec.structs.asdict(asked), "model": None, "options": self._options(asked)}

    def _settled(self, settling: asyncio.Task[None]) -> None:
        if settling.cancelled() or settling.exception():
            self._job.cancel()  # so that whoever waits for its segments comes to hear of it

    async def _close(self) -> None:
        self._job.cancel()
        self._upload.close()  # a job that waits for bytes waits no more
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.wait({self._settling})
        await self._job.over()


def _asked(upload: Upload, read: Read[A]) -> A:
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
def _by_field(params: Mapping[str, str]) -> Iterator[None]:
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


class EventStream(Response):
    """Server-sent events: the text of a segment when it is heard. Takes over what `held` holds."""

    media_type = "text/event-stream"

    def __init__(self, work: Work[openai.Ask], held: contextlib.AsyncExitStack) -> None:
        self.status_code = 200
        self.background: BackgroundTask | None = None
        self._work, self._held = work, held
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held, contextlib.aclosing(_never_quiet(self._events(visit_of(scope)))) as pieces:
            first = await anext(pieces)  # what fails before it is answered with a status of its own
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for piece in told_in_stream(pieces, scope):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, visit: Visit) -> AsyncGenerator[bytes, None]:
        work = self._work
        deltas: answers.Deltas | None = None
        async for event in work.segments():
            # Not before: until its first segment, a later field may still change what is asked.
            deltas = deltas or answers.Deltas(work.asked, work.engine.tokenizer.decode)
            visit.text_is_out()
            yield deltas.segment(event.segment)
        deltas = deltas or answers.Deltas(work.asked, work.engine.tokenizer.decode)
        yield deltas.done(work.transcript)


async def _never_quiet(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The same, with a comment wherever nothing comes for long."""
    async with contextlib.aclosing(pieces):
        while True:
            coming = asyncio.ensure_future(anext(pieces, None))
            try:
                while not (await asyncio.wait({coming}, timeout=KEEP_ALIVE_S))[0]:
                    yield KEEP_ALIVE
            finally:
                coming.cancel()
                await asyncio.wait({coming})
            if (piece := coming.result()) is None:
                return
            yield piece


def _answer(request: Request, transcript: Transcript, work: Work[openai.Ask]) -> Response:
    visit_of(request.scope).text_is_out()
    body = answers.render(transcript, work.asked, work.engine.tokenizer.decode)
    return Response(body, media_type=openai.FORMATS[work.asked.response_format])


def routes(desk: Desk) -> APIRouter:
    router = APIRouter(tags=["Transcription"])
    ask = partial(openai.ask, max_beam=desk.max_beam)
    ask_translation = partial(openai.ask_translation, max_beam=desk.max_beam)

    @router.post("/v1/audio/transcriptions", summary="Transcribe audio", **documents.TRANSCRIPTIONS)
    async def transcriptions(request: Request) -> Response:
        """OpenAI's route. Audio is heard while it arrives; with `stream=true` before the file, its text comes
        back while it arrives, too."""
        async with contextlib.AsyncExitStack() as held:
            work = await held.enter_async_context(Work.of(desk, request, ask))
            if not work.asked.stream:
                await work.settled()
            if work.asked.stream:
                return EventStream(work, held.pop_all())
            return _answer(request, await work.heard(), work)

    @router.post("/v1/audio/translations", summary="Translate audio into English", **documents.TRANSLATIONS)
    async def translations(request: Request) -> Response:
        """OpenAI's route. For models that translate; the others refuse it by name."""
        async with Work.of(desk, request, ask_translation) as work:
            await work.settled()
            return _answer(request, await work.heard(), work)

    @router.post("/asr", summary="Transcribe audio, as FunASR does", **documents.ASR)
    async def asr(request: Request) -> Response:
        """FunASR's route. What it offers and no model here does is refused by name."""
        visit = visit_of(request.scope)
        async with Work.of(desk, request, funasr.ask) as work:
            await work.settled()
            transcript = await work.heard()
            visit.text_is_out()
            return Response(funasr.render(transcript, work.asked, visit.age_s()), media_type=JSON)

    return router
