"""/v1/voices: clone a voice and follow its progress; list, rename, delete, export voices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from asr_serve.audio.reader import open_audio
from asr_serve.config import ServeConfig, voices_dir
from asr_serve.errors import AudioError, InvalidKey, MalformedRequest, NotAllowed, OptionError, UnsupportedOption
from asr_serve.protocols import cloned_voices
from asr_serve.protocols.form_fields import reject_query_fields
from asr_serve.protocols.openai.events import server_sent_event
from asr_serve.server.engine_registry import EngineRegistry
from asr_serve.server.middleware.error_handlers import JSON
from asr_serve.server.middleware.request_context import request_context
from asr_serve.server.server_sent_events import EVENT_STREAM, with_keep_alive
from asr_serve.server.uploads.multi_file_form import MultiFileForm, read_form_body
from asr_serve.server.uploads.upload import UploadLimits, read_body
from asr_serve.server.voices import openapi
from asr_serve.server.voices.cloning_queue import CloningJob, CloningQueue
from asr_serve.server.voices.upload_folders import UploadFolder, remove_stale_folders
from asr_serve.voices import transcripts
from asr_serve.voices.cloning_messages import CloneRequest
from asr_serve.voices.voice_store import VoiceStore

MAX_RECORDINGS = 400
MAX_CLONING_BODY_BYTES = 1 << 20
REPEAT_S = 0.5
"""Shortest time between two progress events."""
MODEL = "fastpitch-en"
"""Model that learns voices, where none is named and none is loaded."""


class VoiceDependencies(NamedTuple):
    """Dependencies of these routes."""

    engines: EngineRegistry
    clonings: CloningQueue
    store: VoiceStore
    uploads: UploadLimits
    admins: bool
    vocoder: str | None

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
        vocoder = config.engine.codec
        return cls(engines, CloningQueue(1), VoiceStore(folder), uploads, bool(config.admin_keys), vocoder)


def routes(dependencies: VoiceDependencies) -> APIRouter:
    router = APIRouter(prefix="/v1/voices", tags=["Voices"])

    def expect_admin(request: Request) -> str:
        """Returns the administrator's name. Raises InvalidKey, NotAllowed."""
        client = request_context(request.scope).client
        if client is None or not client.admin:
            todo = "send one" if dependencies.admins else "set admin_keys or admin_keys_file on the server first"
            kind = NotAllowed if "authorization" in request.headers else InvalidKey
            raise kind("only administrators clone voices and manage them", "an admin key, as `Bearer KEY`", todo)
        return client.name

    def is_admin(request: Request) -> bool:
        client = request_context(request.scope).client
        return client is not None and client.admin

    @router.post("", summary="Clone a voice", status_code=202, **openapi.CLONE)
    async def clone(request: Request) -> Response:
        """Takes recordings and the consent of their speaker, and answers when they have arrived. The cloning waits
        for those before it, goes on if the client disconnects, and is followed under `/v1/voices/jobs/{id}`. The
        voice can be used as soon as it is done, without a restart. For administrators."""
        admin = expect_admin(request)
        reject_query_fields(request.url.query, cloned_voices.FIELDS, "the form")
        dependencies.clonings.check_capacity()
        folder, job = UploadFolder(), None
        try:
            form = MultiFileForm(
                request.headers.get("content-type", ""),
                folder.path,
                cloned_voices.FILES,
                MAX_RECORDINGS,
                dependencies.uploads,
            )
            await read_form_body(read_body(request.receive), form, dependencies.uploads)
            parsed = cloned_voices.parse_cloning_form(form.fields, len(form.names), admin)
            clone_request = await asyncio.to_thread(_clone_request, dependencies, parsed, form)
            job = dependencies.clonings.enqueue(clone_request, folder.path, len(form.names), folder.remove)
        finally:
            if job is None:  # otherwise the job owns the folder
                await asyncio.to_thread(folder.remove)
        return _json(dependencies.clonings.describe(job), 202)

    @router.get("", summary="List cloned voices", **openapi.VOICES)
    async def cloned(request: Request) -> Response:
        """Lists cloned voices; `GET /v1/audio/voices` lists all. Only administrators see each one's consent."""
        admin = is_admin(request)
        cards = await asyncio.to_thread(dependencies.store.cards)
        return _json(cloned_voices.ClonedVoices([cloned_voices.ClonedVoice.of(card, admin=admin) for card in cards]))

    @router.get("/jobs", summary="List clonings", **openapi.JOBS)
    async def jobs(request: Request) -> Response:
        """Lists clonings since the server started, latest first: waiting, running, and the last finished ones. For
        administrators."""
        expect_admin(request)
        return _json(cloned_voices.Clonings([dependencies.clonings.describe(job) for job in dependencies.clonings]))

    @router.get("/jobs/{job}", summary="Look at a cloning", **openapi.JOB)
    async def job_of(request: Request, job: str) -> Response:
        """Returns progress and result of a cloning. For administrators."""
        expect_admin(request)
        return _json(dependencies.clonings.describe(dependencies.clonings.get(job)))

    @router.delete("/jobs/{job}", summary="Cancel a cloning", **openapi.JOB)
    async def cancel(request: Request, job: str) -> Response:
        """Answers when the cloning has stopped. A finished one stays as it is. For administrators."""
        expect_admin(request)
        found = dependencies.clonings.get(job)
        await dependencies.clonings.cancel(found)
        return _json(dependencies.clonings.describe(found))

    @router.get("/jobs/{job}/events", summary="Follow a cloning", **openapi.EVENTS)
    async def follow(request: Request, job: str) -> Response:
        """Sends the cloning as server-sent events, at every change until it is over. For administrators."""
        expect_admin(request)
        found = dependencies.clonings.get(job)
        return StreamingResponse(with_keep_alive(_events(dependencies.clonings, found)), media_type=EVENT_STREAM)

    @router.get("/{name}", summary="Look at a cloned voice", **openapi.VOICE)
    async def voice(request: Request, name: str) -> Response:
        card = await asyncio.to_thread(dependencies.store.card, name)
        return _json(cloned_voices.ClonedVoice.of(card, admin=is_admin(request)))

    @router.patch("/{name}", summary="Rename a cloned voice", **openapi.RENAME)
    async def rename(request: Request, name: str) -> Response:
        """Renames a voice; sentences in progress are finished. For administrators."""
        expect_admin(request)
        new_name = cloned_voices.parse_rename_body(await _read_short_body(request))
        card = await asyncio.to_thread(dependencies.store.rename, name, new_name, _own_voices(dependencies))
        return _json(cloned_voices.ClonedVoice.of(card, admin=True))

    @router.delete("/{name}", summary="Delete a cloned voice", **openapi.DELETE)
    async def delete(request: Request, name: str) -> Response:
        """Deletes a voice permanently. For administrators."""
        expect_admin(request)
        card = await asyncio.to_thread(dependencies.store.delete, name)
        return _json(cloned_voices.ClonedVoice.of(card, admin=True))

    @router.get("/{name}/export", summary="Export a cloned voice", **openapi.EXPORT)
    async def export(request: Request, name: str) -> Response:
        """Returns a zip of weights, card and consent, for `asr-serve voices import`. For administrators."""
        expect_admin(request)
        data = await asyncio.to_thread(dependencies.store.export_voice, name)
        headers = {"content-disposition": f'attachment; filename="{name}.zip"'}
        return Response(data, media_type="application/zip", headers=headers)

    return router


def _clone_request(
    dependencies: VoiceDependencies, parsed: cloned_voices.CloningForm, form: MultiFileForm
) -> CloneRequest:
    """Builds the request of a cloning. Raises OptionError, UnknownModel, UnsupportedOption; the first file's
    AudioError if no file is audio."""
    cards = {name: card for name, card in dependencies.engines.known_models().items() if getattr(card, "clones", False)}
    model = parsed.model or dependencies.engines.default_tts_model or MODEL
    if parsed.model is None and model not in cards:
        model = MODEL
    if model not in cards:
        dependencies.engines.resolve(model)
        raise UnsupportedOption(
            f"model={model}, which cannot clone voices", f"models that can: {', '.join(cards) or 'none'}", param="model"
        )
    dependencies.store.check_name_free(parsed.name, _own_voices(dependencies))
    _check_audio(form.names)
    return CloneRequest(
        name=parsed.name,
        audio=[str(path) for path in form.names],
        texts=_texts(parsed.texts, form),
        consent=parsed.consent,
        model=model,
        vocoder=dependencies.vocoder,
        voices_dir=str(dependencies.store.folder),
        minutes=parsed.minutes,
        seed=parsed.seed,
        threads=1,
    )


def _texts(source: str, form: MultiFileForm) -> dict[str, str]:
    """Maps stored names of recordings to their texts. Raises OptionError for a text without a recording."""
    if not source:
        return {}
    texts = transcripts.parse_transcripts(source)
    paths = {
        transcripts.recording_stem(label): transcripts.recording_stem(path.name) for path, label in form.names.items()
    }
    unmatched = sorted(texts.keys() - paths.keys())
    if unmatched:
        raise OptionError(
            f"texts are of {', '.join(unmatched[:5])}, which did not come",
            f"recordings that came: {', '.join(sorted(paths)[:20])}",
            param="texts",
        )
    return {paths[name]: text for name, text in texts.items()}


def _check_audio(names: Mapping[Path, str]) -> None:
    """Checks that at least one file is audio; the report lists errors of the others. `names`: the client's names of
    the files. Raises AudioError, with the client's name in it."""
    first: AudioError | None = None
    for path, name in names.items():
        try:
            open_audio(path).close()
            return
        except AudioError as error:
            if first is None:
                first = type(error)(error.came.replace(str(path), name), error.allowed, error.todo)
                first.param = cloned_voices.FILES[0]
    assert first is not None
    raise first


def _own_voices(dependencies: VoiceDependencies) -> set[str]:
    """Names of all models' own voices, which cloned voices must not take."""
    return {voice for card in dependencies.engines.known_models().values() for voice in getattr(card, "voices", ())}


async def _events(clonings: CloningQueue, job: CloningJob) -> AsyncGenerator[bytes, None]:
    async for _ in job.updates():
        yield server_sent_event(clonings.describe(job))
        if job.state == "running":
            await asyncio.sleep(REPEAT_S)


async def _read_short_body(request: Request) -> bytes:
    """Reads a short body. Raises MalformedRequest, ClientGone."""
    parts, count = [], 0
    async for part in read_body(request.receive):
        parts.append(part)
        count += len(part)
        if count > MAX_CLONING_BODY_BYTES:
            raise MalformedRequest(f"a body of over {MAX_CLONING_BODY_BYTES} bytes", '{"name": "another-name"}')
    return b"".join(parts)


def _json(answer: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type=JSON)
