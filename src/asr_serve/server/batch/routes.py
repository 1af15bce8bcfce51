"""/v1/files and /v1/batches: OpenAI's files and batches, for recognition and for speech."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncGenerator
from typing import BinaryIO, NamedTuple
from urllib.parse import parse_qs, quote

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from asr_serve.config import ServeConfig
from asr_serve.errors import MissingOption, OptionError
from asr_serve.protocols.form_fields import reject_query_fields
from asr_serve.protocols.openai.batches import (
    BATCH_MEMBERS,
    FILE_FIELDS,
    MAX_BATCH_BODY_BYTES,
    BatchList,
    FileDeleted,
    FileList,
    parse_batch_request,
    parse_file_form,
    parse_list_query,
)
from asr_serve.server.batch import openapi
from asr_serve.server.batch.batch_queue import BatchQueue
from asr_serve.server.batch.batch_store import NewFile, new_file_id, open_stored, sync_file
from asr_serve.server.middleware.error_handlers import JSON
from asr_serve.server.middleware.request_context import batch_owner, request_context
from asr_serve.server.transcription_job import recording_key
from asr_serve.server.uploads import request_body
from asr_serve.server.uploads.multi_file_form import MultiFileForm, read_form_body
from asr_serve.server.uploads.upload import UploadLimits, check_body_size, read_body

FILE = "file"
CHUNK_BYTES = 256 << 10
MAX_REQUEST_KEY_CHARACTERS = 255
UPLOADED_TYPE = "application/octet-stream"


class BatchDependencies(NamedTuple):
    """Dependencies of these routes."""

    queue: BatchQueue
    uploads: UploadLimits
    keep_s: float

    @classmethod
    def create(cls, config: ServeConfig, queue: BatchQueue) -> BatchDependencies:
        uploads = UploadLimits(
            max_bytes=config.max_body_bytes,
            idle_timeout_s=config.upload_idle_s,
            min_bytes_per_s=config.upload_min_bytes_per_s,
        )
        return cls(queue, uploads, config.batch.keep_s)


def routes(dependencies: BatchDependencies) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["Batches"])
    queue = dependencies.queue

    @router.post("/files", summary="Upload a file", **openapi.UPLOAD)
    async def upload(request: Request) -> Response:
        """Takes the input of a batch, or audio that its lines name. The answer comes when the file is on disk; it is
        deleted after `expires_after`, or the server's own time."""
        reject_query_fields(request.url.query, FILE_FIELDS, "the form")
        store, owner = await queue.store(), _owner(request)
        length = request.headers.get("content-length", "")
        if length.isdecimal():
            check_body_size(int(length), dependencies.uploads)
        size = int(length) if length.isdecimal() else dependencies.uploads.max_bytes
        reserved, file_id = object(), new_file_id()
        folder = store.part_path(file_id)
        try:
            # Inside: a client that leaves here has it released too.
            await queue.call(store.reserve, reserved, owner, size)
            await asyncio.to_thread(folder.mkdir)
            limits = dependencies.uploads
            form = MultiFileForm(request.headers.get("content-type", ""), folder, (FILE,), 1, limits)
            await read_form_body(read_body(request.receive), form, limits)
            fields = parse_file_form(form.fields)
            if not form.names:
                raise MissingOption(
                    "no file came", "a file, in the field file", "curl -F file=@lines.jsonl", param=FILE
                )
            ((path, label),) = form.names.items()
            size = (await asyncio.to_thread(path.stat)).st_size
            await asyncio.to_thread(sync_file, path)
            keep_s = dependencies.keep_s if fields.expires_after_s is None else fields.expires_after_s
            name = recording_key(label)
            made = NewFile(file_id, path, name, fields.purpose, UPLOADED_TYPE, size, min(keep_s, dependencies.keep_s))
            return _json(await queue.call(store.add_file, owner, made, reserved))
        finally:
            store.release(reserved)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    @router.get("/files", summary="List files", **openapi.FILES)
    async def files(request: Request) -> Response:
        """Lists the files of this key, the newest first: `limit`, `after`, `order`, `purpose`."""
        query = parse_list_query(_query(request), files=True)
        store = await queue.store()
        found = await queue.call(store.list_files, _owner(request), query)
        page = found[: query.limit]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return _json(FileList(page, first, last, len(found) > len(page)))

    @router.get("/files/{file_id}", summary="Look at a file", **openapi.FILE)
    async def file(request: Request, file_id: str) -> Response:
        store = await queue.store()
        return _json((await queue.call(store.file, _owner(request), file_id)).object)

    @router.get("/files/{file_id}/content", summary="Download a file", **openapi.CONTENT)
    async def content(request: Request, file_id: str) -> Response:
        """Sends the bytes of a file: the answers of a batch, its audio, or what was uploaded."""
        store = await queue.store()
        found = await queue.call(store.file, _owner(request), file_id)
        opened = await asyncio.to_thread(open_stored, found.path)
        headers = {
            "content-length": str(os.fstat(opened.fileno()).st_size),
            "content-disposition": f"attachment; filename*=utf-8''{quote(found.object.filename, safe='')}",
        }
        return StreamingResponse(_chunks(opened), media_type=found.content_type, headers=headers)

    @router.delete("/files/{file_id}", summary="Delete a file", **openapi.DELETE)
    async def delete(request: Request, file_id: str) -> Response:
        """Deletes a file for good. The input of a batch that has not ended stays."""
        store = await queue.store()
        await queue.call(store.delete_file, _owner(request), file_id)
        return _json(FileDeleted(file_id))

    @router.post("/batches", summary="Create a batch", **openapi.CREATE)
    async def create(request: Request) -> Response:
        """Takes a batch, which outlives the server. Its lines are answered in any order, whenever callers leave room.
        With `Idempotency-Key`, a request that is sent again is answered with the batch of the first."""
        reject_query_fields(request.url.query, BATCH_MEMBERS, "the JSON body")
        timeout_s = dependencies.uploads.idle_timeout_s
        body = await request_body.read_body(request, "a batch", max_bytes=MAX_BATCH_BODY_BYTES, timeout_s=timeout_s)
        parsed, key = parse_batch_request(body), _request_key(request)
        store, caller = await queue.store(), request_context(request.scope).caller
        made = await queue.call(store.create_batch, _owner(request), caller, parsed, key)
        queue.notify()
        return _json(made)

    @router.get("/batches", summary="List batches", **openapi.BATCHES)
    async def batches(request: Request) -> Response:
        """Lists the batches of this key, the newest first: `limit`, `after`."""
        query = parse_list_query(_query(request), files=False)
        store = await queue.store()
        found = await queue.call(store.list_batches, _owner(request), query)
        page = found[: query.limit]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return _json(BatchList(page, first, last, len(found) > len(page)))

    @router.get("/batches/{batch_id}", summary="Look at a batch", **openapi.BATCH)
    async def batch(request: Request, batch_id: str) -> Response:
        """Returns status and progress of a batch, and the ids of its files once it has ended."""
        store = await queue.store()
        return _json(await queue.call(store.batch, _owner(request), batch_id))

    @router.post("/batches/{batch_id}/cancel", summary="Cancel a batch", **openapi.CANCEL)
    async def cancel(request: Request, batch_id: str) -> Response:
        """Begins no more lines of a batch. It is `cancelling` until what was answered is in its files."""
        store = await queue.store()
        found = await queue.call(store.cancel_batch, _owner(request), batch_id)
        queue.notify()
        return _json(found)

    return router


def _owner(request: Request) -> str:
    """Owner of the files and batches that a request sees."""
    return batch_owner(request_context(request.scope).client)


def _query(request: Request) -> dict[str, list[str]]:
    return parse_qs(request.url.query, keep_blank_values=True)


def _request_key(request: Request) -> str | None:
    """Header Idempotency-Key. Raises OptionError."""
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= MAX_REQUEST_KEY_CHARACTERS:
        raise OptionError(
            f"an Idempotency-Key of {len(key)} characters",
            f"1 to {MAX_REQUEST_KEY_CHARACTERS}",
            param="Idempotency-Key",
        )
    return key


async def _chunks(file: BinaryIO) -> AsyncGenerator[bytes, None]:
    with contextlib.closing(file):
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type=JSON)
