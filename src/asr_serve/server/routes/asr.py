"""POST /asr, as FunASR and as whisper-asr-webservice have it, the latter's POST /detect-language, and whisper.cpp's
POST /inference."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from asr_serve.protocols.funasr.asr import ASR_FIELDS, AsrRequest, parse_asr_form, render_asr_answer
from asr_serve.protocols.whisper_asr import asr as whisper_asr
from asr_serve.protocols.whisper_asr.asr import WhisperAsrRequest
from asr_serve.protocols.whisper_cpp.inference import INFERENCE_FIELDS, parse_inference_form, render_inference
from asr_serve.server import openapi
from asr_serve.server.middleware.admission import AdmissionClass, admitted_as
from asr_serve.server.middleware.error_handlers import JSON
from asr_serve.server.middleware.request_context import request_context
from asr_serve.server.routes.transcriptions import TranscriptionDependencies, UploadForm, UploadTranscription
from asr_serve.text.formats.registry import PLAIN_TEXT


def routes(dependencies: TranscriptionDependencies) -> APIRouter:
    router = APIRouter(tags=["Transcription"])
    inference_form = UploadForm(partial(parse_inference_form, max_beam=dependencies.max_beam), INFERENCE_FIELDS)

    @router.post("/asr", summary="Transcribe audio, as FunASR does", **openapi.ASR)
    @admitted_as(AdmissionClass.WORK)
    async def asr(request: Request) -> Response:
        """FunASR's route, whose file is the field `file`. Its options that no model here supports are refused by name.
        With a file in the field `audio_file` it is whisper-asr-webservice's: its options are in the query."""
        context = request_context(request.scope)
        forms: tuple[UploadForm[AsrRequest | WhisperAsrRequest], ...] = (
            UploadForm(parse_asr_form, ASR_FIELDS),
            UploadForm(
                partial(whisper_asr.parse_whisper_asr, query=request.url.query),
                whisper_asr.ASR_FIELDS,
                whisper_asr.FILE_FIELD,
                has_query_fields=True,
            ),
        )
        async with UploadTranscription.open(dependencies, request, *forms) as work:
            await work.wait_form()
            transcript = await work.transcribe()
            context.mark_first_text()
            if isinstance(work.request, AsrRequest):
                return Response(render_asr_answer(transcript, work.request, context.elapsed_s()), media_type=JSON)
            body = whisper_asr.render_whisper_asr(transcript, work.request)
            headers = whisper_asr.response_headers(work.filename, work.request.output)
            return Response(body, headers=headers, media_type=PLAIN_TEXT)

    @router.post("/detect-language", summary="Detect the language of audio", **openapi.DETECT_LANGUAGE)
    @admitted_as(AdmissionClass.WORK)
    async def detect_language(request: Request) -> Response:
        """whisper-asr-webservice's route: the language of the first 30 seconds, by a model that tells languages
        apart."""
        form = UploadForm(
            partial(whisper_asr.parse_detection, query=request.url.query),
            whisper_asr.DETECTION_FIELDS,
            whisper_asr.FILE_FIELD,
            has_query_fields=True,
        )
        async with UploadTranscription.open(dependencies, request, form) as work:
            await work.wait_form()
            transcript = await work.transcribe()
            request_context(request.scope).mark_first_text()
            return Response(whisper_asr.render_detection(transcript), media_type=JSON)

    @router.post("/inference", summary="Transcribe audio, as whisper.cpp does", **openapi.INFERENCE)
    @admitted_as(AdmissionClass.WORK)
    async def inference(request: Request) -> Response:
        """whisper.cpp's route. Settings of its own decoder have no effect, and are named in `x-ignored`."""
        async with UploadTranscription.open(dependencies, request, inference_form) as work:
            await work.wait_form()
            transcript = await work.transcribe()
            request_context(request.scope).mark_first_text()
            body, media_type = render_inference(transcript, work.request)
            return Response(body, media_type=media_type)

    return router
