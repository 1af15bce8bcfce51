"""/v1/evaluations: what asr-serve eval has measured. For administrators, where there are admin keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import FileResponse, Response

from asr_serve.evaluation.reader import EvaluationReader
from asr_serve.protocols.schemas.responses import ref
from asr_serve.server import openapi
from asr_serve.server.middleware.error_handlers import JSON
from asr_serve.server.middleware.request_context import expect_admin
from asr_serve.server.openapi import AUTH_ERRORS, error_response_entry

MAX_RUNS = 200
MAX_CLIPS = 100
MAX_OFFSET = 1 << 31

Offset = Annotated[int, Query(ge=0, le=MAX_OFFSET, description="Number of entries to leave out at the beginning.")]
_WRONG = error_response_entry(400, "A parameter is no good.")
_EXAMPLE = {
    "system": "moonshine-tiny-en",
    "model": "moonshine-tiny-en",
    "revision": "ab12cd34",
    "license": "MIT",
    "quantization": "none",
    "dataset": "calls",
    "dataset_sha256": "0" * 64,
    "language": "en",
    "clips": 20,
    "failed": 0,
    "audio_s": 134.2,
    "wer": 16.03,
    "wer_low": 10.06,
    "wer_high": 21.09,
    "cer": 8.59,
    "rtfx": 29.4,
    "latency_p50_s": 0.09,
    "latency_p95_s": 0.18,
    "first_word_p50_ms": None,
    "first_word_p95_ms": None,
    "final_p95_ms": None,
    "der": None,
    "hotword_recall": None,
    "cost_per_audio_hour": None,
    "created": 1_760_000_000,
    "run_id": "6f1e",
    "cer_low": 5.2,
    "cer_high": 11.8,
    "live": False,
    "finished": True,
    "dataset_clips": 20,
}
_CLIP_EXAMPLE = {
    "path": "monday/0001.flac",
    "audio_s": 3.1,
    "reference": "thank you for calling",
    "hypothesis": "Thank you for falling.",
    "words": 4,
    "word_errors": 1,
    "characters": 21,
    "character_errors": 1,
    "seconds": 0.09,
    "first_word_ms": None,
    "final_ms": None,
    "speaker_s": None,
    "speaker_error_s": None,
    "hotwords": None,
    "hotwords_found": None,
    "error": None,
    "differences": [["equal", "thank you for", "thank you for"], ["substitute", "calling", "falling"]],
}

T = TypeVar("T")


def routes(reader: EvaluationReader, *, admins: bool) -> APIRouter:
    """Router of /v1/evaluations. `admins`: whether any admin keys are configured: transcripts and recordings of test
    data may be of real callers, so that a key for transcriptions is not enough then."""
    router = APIRouter(prefix="/v1/evaluations", tags=["Models"])
    # The figures of many clips take a while. A request that is cancelled leaves its work behind: on the threads that
    # all routes share, a client that asks and leaves would fill them.
    thread = ThreadPoolExecutor(1, "evaluations")
    refusals = {
        **AUTH_ERRORS,
        **(error_response_entry(403, "Only with an admin key.") if admins else {}),
        **error_response_entry(503, "The file of evaluations is damaged.", Retry_After="Seconds."),
        **_WRONG,
    }

    async def read(request: Request, work: Callable[[], T]) -> T:
        if admins:
            expect_admin(request, "see evaluations", admins=True)
        return await asyncio.get_running_loop().run_in_executor(thread, work)

    @router.get(
        "",
        summary="List evaluations",
        **openapi.response_entry(
            ref("EvaluationList"),
            "Runs of `asr-serve eval`, newest first, with their figures. Rates are in percent, intervals of 95 %.",
            {**refusals, **error_response_entry(404, "This server has no evaluations.")},
            {"object": "list", "data": [_EXAMPLE], "total": 1},
        ),
    )
    async def runs(
        request: Request, limit: Annotated[int, Query(ge=1, le=MAX_RUNS)] = 50, offset: Offset = 0
    ) -> Response:
        """Lists what `asr-serve eval` has measured, from the file of the setting `evaluations`."""
        return _response(await read(request, lambda: reader.runs(limit, offset)))

    @router.get(
        "/{run_id}",
        summary="Look at an evaluation",
        **openapi.response_entry(
            ref("EvaluationClips"),
            "Figures of a run, and some of its clips.",
            {**refusals, **error_response_entry(404, "No such evaluation.")},
            {"object": "list", "evaluation": _EXAMPLE, "data": [_CLIP_EXAMPLE], "total": 1},
        ),
    )
    async def clips(
        request: Request,
        run_id: str,
        order: Literal["path", "errors", "error_rate", "slowest", "longest"] = "errors",
        limit: Annotated[int, Query(ge=1, le=MAX_CLIPS)] = 40,
        offset: Offset = 0,
    ) -> Response:
        """Shows the clips of a run, those with most errors first, each with its differences from the reference."""
        return _response(await read(request, lambda: reader.clips(run_id, order, limit, offset)))

    @router.get(
        "/{run_id}/audio",
        summary="Get a clip's recording",
        **openapi.response_entry(
            {"type": "string", "format": "binary"},
            "The file as it was evaluated.",
            {**refusals, **error_response_entry(404, "No such clip, or its recording is not on this server.")},
            media_type="audio/*",
        ),
    )
    async def audio(
        request: Request, run_id: str, path: Annotated[str, Query(max_length=4_096, description="`path` of the clip.")]
    ) -> Response:
        """Sends the recording of a clip, if the data set is on this server."""
        file, kind = await read(request, lambda: reader.audio(run_id, path))
        return FileResponse(file, media_type=kind, headers={"X-Content-Type-Options": "nosniff"})

    return router


def _response(found: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(found), media_type=JSON)
