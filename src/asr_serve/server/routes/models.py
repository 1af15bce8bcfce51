"""/v1/models: list, load, unload and renew models."""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from asr_serve import units
from asr_serve.errors import EngineClosed
from asr_serve.models.registry import TtsCard
from asr_serve.pipelines.stages.pipeline_file import PipelineSpec, RecognizeStage, RescoreStage, StageSpec
from asr_serve.protocols.openai.models import ModelEntry, ModelList, ModelRenewal, ModelStage
from asr_serve.protocols.schemas.responses import ref
from asr_serve.server import openapi
from asr_serve.server.engine_registry import EngineRegistry
from asr_serve.server.middleware.error_handlers import JSON
from asr_serve.server.middleware.request_context import expect_admin
from asr_serve.server.openapi import AUTH_ERRORS, error_response_entry
from asr_serve.text.normalization.wetext_grammar import GRAMMAR_LANGUAGES, is_wetext_installed

_EXAMPLE = {
    "id": "moonshine-tiny-en",
    "created": 1_760_000_000,
    "owned_by": "UsefulSensors",
    "state": "ready",
    "languages": ["en"],
    "parameters": 27_100_000,
    "licence": "MIT",
    "aliases": ["whisper-1"],
    "default": True,
    "auto": False,
    "streaming": False,
    "heads": [],
    "chunk_ms": None,
    "lag_ms": None,
    "prompts": False,
    "words": True,
    "hotwords": True,
    "language_models": [],
    "speakers": True,
    "itn": ["en"],
    "speaks": False,
    "voices": [],
    "stages": [],
    "revision": "moonshine-voice==0.1.0",
    "quantization": "none",
    "object": "model",
}
_RENEWAL_RESPONSE = {
    "id": "moonshine-tiny-en",
    "state": "ready",
    "sessions": 12,
    "streams": 0,
    "replayed": 0,
    "repeated": 0,
    "load_s": 2.153,
    "total_s": 2.41,
    "object": "model.renewal",
}
_NOT_FOUND = error_response_entry(404, "No such model.")
_ADMIN = {**AUTH_ERRORS, **error_response_entry(403, "Not with this key, or not now."), **_NOT_FOUND}


def routes(engines: EngineRegistry, *, admins: bool) -> APIRouter:
    """Router of /v1/models. `admins`: whether any admin keys are configured.

    Names are paths: aliases such as `openai/whisper-large-v3` have a slash, which OpenAI's clients send as it is.
    """
    router = APIRouter(prefix="/v1/models", tags=["Models"])
    created = int(time.time())

    def entry(name: str) -> ModelEntry:
        card, chunk, speakers = engines.known_models()[name], 0, False
        revision = quantization = ""
        for engine in engines:
            speakers |= engine.client.has_diarization  # known for the machine, by any engine
            if engine.name == name:  # the loaded card and the configured chunk
                card, chunk = engine.card_of_any_kind, engine.client.config.chunk_frames or 0
                if not engine.is_tts:
                    revision, quantization = engines.weights_revision(engine), engine.quantization
        default = name == (engines.default_tts_model if isinstance(card, TtsCard) else engines.resolve_for_files(None))
        base = ModelEntry(
            id=name,
            created=created,
            owned_by=card.hub.partition("/")[0] or card.name,
            state=engines.state(name),
            languages=card.languages,
            parameters=card.parameters,
            licence=card.licence,
            aliases=engines.aliases(name),
            default=default,
            auto=not default and engines.governor is None and name == engines.auto_model,
            revision=revision,
            quantization=quantization,
        )
        if isinstance(card, TtsCard):
            return msgspec.structs.replace(base, speaks=True, streaming=card.chunk_frames > 0, voices=card.voices)
        chunk = chunk or card.chunk
        return msgspec.structs.replace(
            base,
            streaming=card.streaming or card.incremental_encoder,
            heads=card.heads,
            chunk_ms=units.samples_to_ms(chunk * card.frame_samples) if card.chunk else None,
            lag_ms=units.samples_to_ms(card.lag_samples(chunk)) if card.chunk else None,
            prompts=card.prompts,
            words=card.word_times,
            hotwords=card.heads != ("wfst",),
            language_models=card.language_models,
            speakers=speakers,
            itn=tuple(sorted(set(card.languages) & set(GRAMMAR_LANGUAGES))) if is_wetext_installed() else (),
        )

    def pipeline_entry(spec: PipelineSpec) -> ModelEntry:
        """Entry of the pipeline: what all of its models can do."""
        recognizers = [entry(stage.model) for stage in spec.recognizers.values()]
        first, *others = recognizers
        return ModelEntry(
            id=spec.name,
            created=created,
            owned_by=first.owned_by,
            state=engines.pipeline_state,
            languages=tuple(code for code in first.languages if all(code in each.languages for each in others)),
            parameters=sum(each.parameters for each in recognizers),
            licence=", ".join(dict.fromkeys(each.licence for each in recognizers)),
            aliases=engines.aliases(spec.name),
            default=True,
            words=all(each.words for each in recognizers),
            speakers=first.speakers,
            itn=first.itn,
            stages=tuple(_stage(stage) for stage in spec.stages),
        )

    def model_response(name: str) -> Response:
        return Response(msgspec.json.encode(entry(name)), media_type=JSON)

    @router.get(
        "",
        summary="List models",
        **openapi.response_entry(
            ref("ModelList"), "Every model there is.", AUTH_ERRORS, {"object": "list", "data": [_EXAMPLE]}
        ),
    )
    async def models() -> Response:
        """Loaded models, in the state `ready`, come first; only they take work. So does a pipeline."""
        entries = [entry(name) for name in engines.known_models()]
        if entries and engines.pipeline_spec is not None:
            entries.insert(0, pipeline_entry(engines.pipeline_spec))
        found = ModelList(sorted(entries, key=lambda model: model.state == "not_loaded"))
        return Response(msgspec.json.encode(found), media_type=JSON)

    @router.post(
        "/{model:path}/load",
        summary="Load a model",
        **openapi.response_entry(ref("ModelEntry"), "It is loaded.", _ADMIN, _EXAMPLE),
    )
    async def load(request: Request, model: str) -> Response:
        """Answers when the model is ready; loading goes on if the client disconnects. For administrators."""
        expect_admin(request, "load models", admins=admins)
        return model_response((await engines.load(model)).name)

    @router.post(
        "/{model:path}/unload",
        summary="Unload a model",
        **openapi.response_entry(
            ref("ModelEntry"), "It is not loaded any more.", _ADMIN, {**_EXAMPLE, "state": "not_loaded"}
        ),
    )
    async def unload(request: Request, model: str) -> Response:
        """Refuses new requests for the model, waits for those in progress, and unloads it. For administrators."""
        expect_admin(request, "unload models", admins=admins)
        name = engines.resolve(model)
        found = entry(name)
        await engines.unload(name)
        unloaded = msgspec.structs.replace(found, state=engines.state(name))
        return Response(msgspec.json.encode(unloaded), media_type=JSON)

    @router.post(
        "/{model:path}/renew",
        summary="Renew a model's engine",
        **openapi.response_entry(ref("ModelRenewal"), "Another process has taken over.", _ADMIN, _RENEWAL_RESPONSE),
    )
    async def renew(request: Request, model: str) -> Response:
        """Starts another engine process for the model and moves live sessions to it, even in mid-sentence. Answers
        when the old process has ended; goes on if the client disconnects. For administrators."""
        expect_admin(request, "renew models", admins=admins)
        name = engines.resolve(model)
        found = await engines.renew(name)
        renewal = ModelRenewal(name, engines.state(name), *found)
        return Response(msgspec.json.encode(renewal), media_type=JSON)

    # Last: its path also matches those above, and the first route that matches a path tells which methods it has.
    @router.get(
        "/{model:path}",
        summary="Look at a model",
        **openapi.response_entry(ref("ModelEntry"), "The model.", {**AUTH_ERRORS, **_NOT_FOUND}, _EXAMPLE),
    )
    async def model_of(model: str) -> Response:
        """Finds a model or a pipeline by its name or an alias."""
        name, spec = engines.resolve_for_files(model), engines.pipeline_spec
        if spec is not None and name == spec.name:
            if not engines.known_models():
                raise EngineClosed("the server is still loading its models", todo="try again in a few seconds")
            return Response(msgspec.json.encode(pipeline_entry(spec)), media_type=JSON)
        return model_response(name)

    return router


def _stage(stage: StageSpec) -> ModelStage:
    """Stage as the list of models shows it: of a language model in a file, the file's name alone."""
    match stage:
        case RecognizeStage():
            model: str | None = stage.model
        case RescoreStage():
            model = stage.language_model.rpartition("/")[2]
        case _:
            model = None
    return ModelStage(str(stage.__struct_config__.tag), model)
