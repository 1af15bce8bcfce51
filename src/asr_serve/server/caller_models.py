"""Models as one caller comes to them: the policy's choice, made once for a request or a connection, and what came of
it."""

from __future__ import annotations

from asr_serve.engine.process.backend import ProcessBackend
from asr_serve.engine.replicas.backend import ReplicatedBackend
from asr_serve.errors import (
    Cancelled,
    Draining,
    EngineClosed,
    EngineError,
    ModelNotLoaded,
    NotAllowed,
    RateLimited,
    StoreUnavailable,
)
from asr_serve.governance.governor import ModelGovernor
from asr_serve.governance.rollback_monitor import RequestKind
from asr_serve.governance.routing import RoutedModel
from asr_serve.models.registry import AsrCard
from asr_serve.server.engine_registry import EngineRegistry, FileEngine, ModelEngine
from asr_serve.server.middleware.request_context import RequestContext
from asr_serve.server.spoken_language import IdentifyingEngine, SpokenLanguage


class CallerModels:
    """Recognition models for one request, or for all sessions of one connection. A name that is a route stands for the
    same model throughout: promotions and rollbacks apply to those who come later. Belongs to the event loop's thread.
    """

    def __init__(self, engines: EngineRegistry, context: RequestContext) -> None:
        self._engines, self._context = engines, context
        self._routed: dict[str, RoutedModel] = {}

    def resolve_for_files(self, name: str | None) -> str:
        """Name of the model, or pipeline, for files. Raises as `EngineRegistry.resolve`, NotAllowed where the policy
        has callers name routes."""
        routed = self.routed(name)
        return self._engines.resolve_for_files(name) if routed is None else routed.model

    def get_for_files(self, name: str | None) -> FileEngine:
        """Raises as `EngineRegistry.get_for_files`, NotAllowed."""
        if self.routed(name) is not None:
            return self.get(name)
        engine, language = self._engines.get_for_files(name), self._spoken_language(name)
        if language is None or language.default is not engine:
            return engine
        return IdentifyingEngine(language, self._engines)

    def identifies_language(self, name: str | None) -> bool:
        """Returns whether the language of requests under that name, which name none, is identified."""
        return self._spoken_language(name) is not None

    def _spoken_language(self, name: str | None) -> SpokenLanguage | None:
        """Identification of the language of requests under that name; None: it is not identified."""
        found = self._engines.language_identifier(name)
        return None if found is None else SpokenLanguage(self._engines, *found, self._context)

    def get(self, name: str | None) -> ModelEngine:
        """Engine of the model that serves this caller under that name. Where a candidate's engine is not ready, the
        stable model serves it, and the candidate has failed. Raises as `EngineRegistry.get`, NotAllowed."""
        routed = self.routed(name)
        if routed is None:
            return self._engines.get(name)
        try:
            return self._engines.get(routed.model)
        except (EngineClosed, ModelNotLoaded) as error:
            if (stable := self.fall_back(name, error)) is None:
                raise
            return stable

    def fall_back(self, name: str | None, error: BaseException) -> ModelEngine | None:
        """Takes a caller whose candidate failed to the stable model, and counts the failure; None: it is no candidate,
        or the failure is not its own. Raises as `EngineRegistry.get`."""
        routed, governor = self.routed(name), self._engines.governor
        if routed is None or governor is None or not routed.is_candidate or not is_model_failure(error):
            return None
        governor.record_request(routed, failed=True)
        stable = governor.policy.routes[routed.route].stable
        self._routed[routed.route] = routed._replace(model=stable, is_candidate=False)
        return self._engines.get(stable)

    def routed(self, name: str | None) -> RoutedModel | None:
        """The policy's choice for that name; None: it is no route. Raises NotAllowed, UnknownModel."""
        governor = self._engines.governor
        if governor is None:
            return None
        if name is None or self._engines.means_default(name):
            wanted = governor.policy.default_route
        else:
            wanted = self._engines.without_alias(name)
        route = governor.policy.routes.get(wanted) if wanted is not None else None
        if route is None:
            self._check_named(governor, name)
            return None
        if route.name not in self._routed:
            if route.candidate is not None:
                observe_restarts(governor, self._engines, route.candidate)
            routed = governor.choose(route.name, self._context.caller)
            assert routed is not None, "it is a route"
            self._routed[route.name] = routed
        return self._routed[route.name]

    def _check_named(self, governor: ModelGovernor, name: str | None) -> None:
        client = self._context.client
        if not governor.policy.only_routes or (client is not None and client.admin):
            return
        if name is not None:
            self._engines.resolve(name, AsrCard)  # a name that nothing has is refused as such
        raise NotAllowed(
            "no model was named" if name is None else f"the model {name[:100]!r} was named itself",
            f"routes: {', '.join(governor.policy.routes)}",
            "send one of them as the model",
        )

    def watch(self, name: str | None, kind: RequestKind) -> RequestWatch:
        """Watch over the next request or live session under that name."""
        routed = self.routed(name)
        governor = self._engines.governor
        watched = None if routed is None else governor
        return RequestWatch(self._engines, watched, routed, kind, self._spoken_language(name))


class RequestWatch:
    """Outcome of one recording or live session of a route, for the policy's rules. Without a route, it is idle."""

    def __init__(
        self,
        engines: EngineRegistry,
        governor: ModelGovernor | None,
        routed: RoutedModel | None,
        kind: RequestKind,
        language: SpokenLanguage | None = None,
    ) -> None:
        self._engines, self._governor, self.routed, self._kind = engines, governor, routed, kind
        self.language = language
        """Identification of its language; None: it is not identified."""
        self._finished = False

    def file_engine(self, engine: FileEngine) -> FileEngine:
        """Returns the transcriber of a recording for which `engine` was found: one that identifies its language first,
        where that is not known."""
        if self.language is None or self.language.default is not engine:
            return engine
        return IdentifyingEngine(self.language, self._engines)

    def note_latency(self, latency_s: float) -> None:
        """Takes the time that a recording, or a sentence of a live session, took."""
        if self._governor is not None and self.routed is not None:
            self._governor.record_latency(self.routed, self._kind, latency_s)
            self._observe_restarts()

    def finish(self, error: BaseException | None = None) -> None:
        """Ends the request: done, or failed by its model. Failures of the caller's doing do not count. Idempotent."""
        if self._governor is None or self.routed is None or self._finished:
            return
        self._finished = True
        self._observe_restarts()
        if error is None or is_model_failure(error):
            self._governor.record_request(self.routed, failed=error is not None)

    def _observe_restarts(self) -> None:
        assert self._governor is not None
        assert self.routed is not None
        if self.routed.is_candidate:
            observe_restarts(self._governor, self._engines, self.routed.model)


def observe_restarts(governor: ModelGovernor, engines: EngineRegistry, model: str) -> None:
    """Tells the governor how often a model's engine was started again."""
    for engine in engines:
        backend = engine.client.backend
        if engine.name == model and isinstance(backend, ProcessBackend | ReplicatedBackend):
            governor.record_restarts(model, backend.restarts)


def is_model_failure(error: BaseException) -> bool:
    """Returns whether a request failed by the model or its engine, and not by what was asked or by whoever asked."""
    ours = isinstance(error, EngineError | ModelNotLoaded)
    return ours and not isinstance(error, Cancelled | RateLimited | Draining | StoreUnavailable)
