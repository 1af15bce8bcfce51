"""/v1/voices: clone a voice, follow that; list, rename, delete, export."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from asr_serve.audio.reader import open_audio
from asr_serve.config import ServeConfig, voices_dir
from asr_serve.errors import (
    AudioError,
    ClientGone,
    InvalidKey,
    MalformedRequest,
    NotAllowed,
    OptionError,
    UnsupportedOption,
)
from asr_serve.protocols import cloned_voices
from asr_serve.server.engine_registry import EngineRegistry
from asr_serve.server.middleware.error_handlers import JSON
from asr_serve.server.middleware.request_context import request_context
from asr_serve.server.server_sent_events import KEEP_ALIVE, KEEP_ALIVE_S
from asr_serve.server.uploads.multi_file_form import MultiFileForm, read_form_body
from asr_serve.server.uploads.upload import UploadLimits
from asr_serve.server.voices import openapi
from asr_serve.server.voices.cloning_queue import CloningJob, CloningQueue
from asr_serve.server.voices.upload_folders import UploadFolder, remove_stale_folders
from asr_serve.voices import transcripts
from asr_serve.voices.cloning_messages import CloneRequest
from asr_serve.voices.voice_store import VoiceStore

MAX_RECORDINGS = 400
MAX_CLONING_BODY_BYTES = 1 << 20
REPEAT_S = 0.5
"""At most so often an event."""
MODEL = "fastpitch-en"
"""That learns voices, where none is named and none is loaded."""


class VoiceDependencies(NamedTuple):
    """What these routes work with."""

    engines: EngineRegistry
    clonings: CloningQueue
    store: VoiceStore
    uploads: UploadLimits
    admins: bool
    codec: str | None

    @classmethod
    def create(cls, config: ServeConfig, engines: EngineRegistry) -> VoiceDependencies:
        uploads = UploadLimits(
            max_bytes=config.max_body_bytes,
            max_field_bytes=4 * cloned_voices.MAX_TEXTS_CHARACTERS,
            idle_timeout_s=config.upload_idle_s,
            min_bytes_per_s=config.upload_min_bytes_per_s,
        )
        remove_stale_folders()
        folder = voices_dir(config.engine.voices_dir)
        codec = config.engine.codec
        return cls(engines, CloningQueue(1), VoiceStore(folder), uploads, bool(config.admin_keys), codec)


def routes(desk: VoiceDependencies) -> APIRouter:
    router = APIRouter(prefix="/v1/voices", tags=["Voices"])

    def expect_admin(request: Request) -> str:
        """Who it is."""
        caller = request_context(request.scope).client
        if caller is None or not caller.admin:
            todo = "send one" if desk.admins else "set admin_keys or admin_keys_file on the server first"
            kind = NotAllowed if "authorization" in request.headers else InvalidKey
            raise kind("only administrators clone voices and manage them", "an admin key, as `Bearer KEY`", todo)
        return caller.name

    def is_admin(request: Request) -> bool:
        caller = request_context(request.scope).client
        return caller is not None and caller.admin

    @router.post("", summary="Clone a voice", status_code=202, **openapi.CLONE)
    async def clone(request: Request) -> Response:
        """Takes recordings and the words with which their speaker agrees, and answers when they are here. The
        cloning waits for those before it, goes on without the client, and is followed under
        `/v1/voices/jobs/{id}`. The voice can be used as soon as it is done, without a restart. For
        administrators."""
        by = expect_admin(request)
        desk.clonings.check_capacity()
        folder, job = UploadFolder(), None
        try:
            form = MultiFileForm(
                request.headers.get("content-type", ""),
                folder.path,
                cloned_voices.FILES,
                MAX_RECORDINGS,
                desk.uploads,
            )
            await read_form_body(_body(request.receive), form, desk.uploads)
            asked = cloned_voices.parse_cloning_form(form.fields, len(form.names), by)
            order = await asyncio.to_thread(_clone_request, desk, asked, form)
            job = desk.clonings.enqueue(order, folder.path, len(form.names), folder.remove)
        finally:
            if job is None:  # else the folder is the job's
                await asyncio.to_thread(folder.remove)
        return _json(desk.clonings.describe(job), 202)

    @router.get("", summary="List cloned voices", **openapi.VOICES)
    async def cloned(request: Request) -> Response:
        """Those that were cloned; `GET /v1/audio/voices` has all. The consent of each is for administrators."""
        admin = is_admin(request)
        cards = await asyncio.to_thread(desk.store.cards)
        return _json(
            cloned_voices.ClonedVoices([cloned_voices.ClonedVoice.of(card, admin=admin) for card in cards])
        )

    @router.get("/jobs", summary="List clonings", **openapi.JOBS)
    async def jobs(request: Request) -> Response:
        """Since the server began: those that wait, the one that goes on, and the last that are over; the latest
        first. For administrators."""
        expect_admin(request)
        return _json(cloned_voices.Clonings([desk.clonings.describe(job) for job in desk.clonings]))

    @router.get("/jobs/{job}", summary="Look at a cloning", **openapi.JOB)
    async def job_of(request: Request, job: str) -> Response:
        """How far it is, and what became of it. For administrators."""
        expect_admin(request)
        return _json(desk.clonings.describe(desk.clonings.get(job)))

    @router.delete("/jobs/{job}", summary="Cancel a cloning", **openapi.JOB)
    async def cancel(request: Request, job: str) -> Response:
        """Answers when nothing of it is left. One that is over stays as it is. For administrators."""
        expect_admin(request)
        found = desk.clonings.get(job)
        await desk.clonings.cancel(found)
        return _json(desk.clonings.describe(found))

    @router.get("/jobs/{job}/events", summary="Follow a cloning", **openapi.EVENTS)
    async def follow(request: Request, job: str) -> Response:
        """Server-sent events: the cloning, whenever something changes, until it is over. For administrators."""
        expect_admin(request)
        found = desk.clonings.get(job)
        return StreamingResponse(_events(desk.clonings, found), media_type="text/event-stream")

    @router.get("/{name}", summary="Look at a cloned voice", **openapi.VOICE)
    async def voice(request: Request, name: str) -> Response:
        card = await asyncio.to_thread(desk.store.card, name)
        return _json(cloned_voices.ClonedVoice.of(card, admin=is_admin(request)))

    @router.patch("/{name}", summary="Rename a cloned voice", **openapi.RENAME)
    async def rename(request: Request, name: str) -> Response:
        """Whoever speaks with it now finishes the sentence. For administrators."""
        expect_admin(request)
        new = cloned_voices.parse_rename_body(await _read_body(request))
        card = await asyncio.to_thread(desk.store.rename, name, new, _own_voices(desk))
        return _json(cloned_voices.ClonedVoice.of(card, admin=True))

    @router.delete("/{name}", summary="Delete a cloned voice", **openapi.DELETE)
    async def delete(request: Request, name: str) -> Response:
        """For good. For administrators."""
        expect_admin(request)
        card = await asyncio.to_thread(desk.store.delete, name)
        return _json(cloned_voices.ClonedVoice.of(card, admin=True))

    @router.get("/{name}/export", summary="Export a cloned voice", **openapi.EXPORT)
    async def export(request: Request, name: str) -> Response:
        """A zip of its weights, its card and its consent, for `asr-serve voices import`. For administrators."""
        expect_admin(request)
        data = await asyncio.to_thread(desk.store.export_voice, name)
        headers = {"content-disposition": f'attachment; filename="{name}.zip"'}
        return Response(data, media_type="application/zip", headers=headers)

    return router


def _clone_request(desk: VoiceDependencies, asked: cloned_voices.CloningForm, form: MultiFileForm) -> CloneRequest:
    """Raises OptionError, UnknownModel, UnsupportedOption, and what is wrong with the first file where all are no
    audio."""
    cards = {name: card for name, card in desk.engines.known_models().items() if getattr(card, "clones", False)}
    model = asked.model or desk.engines.default_tts_model or MODEL
    if asked.model is None and model not in cards:
        model = MODEL
    if model not in cards:
        desk.engines.resolve(model)
        raise UnsupportedOption(
            f"model={model}, which learns no voices",
            f"models that do: {', '.join(cards) or 'none'}",
            param="model",
        )
    desk.store.check_name_free(asked.name, _own_voices(desk))
    _check_audio(list(form.names))
    return CloneRequest(
        name=asked.name,
        audio=[str(path) for path in form.names],
        texts=_texts(asked.texts, form),
        consent=asked.consent,
        model=model,
        codec=desk.codec,
        voices_dir=str(desk.store.folder),
        minutes=asked.minutes,
        seed=asked.seed,
        threads=1,
    )


def _texts(source: str, form: MultiFileForm) -> dict[str, str]:
    """By the names that the recordings have here. Raises OptionError for a text of no recording."""
    if not source:
        return {}
    told = transcripts.parse_transcripts(source)
    paths = {
        transcripts.recording_stem(label): transcripts.recording_stem(path.name)
        for path, label in form.names.items()
    }
    lost = sorted(told.keys() - paths.keys())
    if lost:
        raise OptionError(
            f"texts are of {', '.join(lost[:5])}, which did not come",
            f"recordings that came: {', '.join(sorted(paths)[:20])}",
            param="texts",
        )
    return {paths[name]: text for name, text in told.items()}


def _check_audio(paths: list[Path]) -> None:
    """One of them at least: the others' faults are told of in the end. Raises AudioError."""
    first: AudioError | None = None
    for path in paths:
        try:
            open_audio(path).close()
            return
        except AudioError as failure:
            first = first or failure
    assert first is not None
    raise first


def _own_voices(desk: VoiceDependencies) -> set[str]:
    """Of all models: a name must not be two voices."""
    return {voice for card in desk.engines.known_models().values() for voice in getattr(card, "voices", ())}


async def _events(clonings: CloningQueue, job: CloningJob) -> AsyncIterator[bytes]:
    changes = job.updates()
    coming: asyncio.Future[None] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(changes))
            done, _ = await asyncio.wait({coming}, timeout=KEEP_ALIVE_S)
            if not done:
                yield KEEP_ALIVE
                continue
            try:
                coming.result()
            except StopAsyncIteration:
                return
            finally:
                coming = None
            yield b"data: " + msgspec.json.encode(clonings.describe(job)) + b"\n\n"
            if job.state == "running":
                await asyncio.sleep(REPEAT_S)
    finally:
        if coming is not None:
            coming.cancel()


async def _read_body(request: Request) -> bytes:
    """The body, which is short. Raises MalformedRequest, ClientGone."""
    parts, count = [], 0
    async for part in _body(request.receive):
        parts.append(part)
        count += len(part)
        if count > MAX_CLONING_BODY_BYTES:
            raise MalformedRequest(f"a body of over {MAX_CLONING_BODY_BYTES} bytes", '{"name": "another-name"}')
    return b"".join(parts)


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left while it sent its request")
        yield message.get("body", b"")
        if not message.get("more_body"):
            return


def _json(answer: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type=JSON)
