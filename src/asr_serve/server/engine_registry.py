"""Registry of loaded models by name, each with its engine."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from asr_serve import units
from asr_serve.audio.input_manifest import InputItem
from asr_serve.config import AUTO_MODEL, NO_MODEL, EngineConfig, ServeConfig
from asr_serve.decoding.language_model.sentence_scorer import SentenceScorer
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process.backend import ProcessBackend, process_backend
from asr_serve.engine.process.engine_process import RingSize
from asr_serve.engine.process.handover import HandoverResult
from asr_serve.engine.process.messages import EngineReady, EngineSpec
from asr_serve.engine.replicas.backend import ReplicatedBackend
from asr_serve.errors import (
    AsrServeError,
    EngineClosed,
    ModelNotLoaded,
    ModelUnavailable,
    NotAllowed,
    OptionError,
    ProgramMissing,
    UnknownModel,
    UnsupportedOption,
    WeightsMissing,
    WrongModel,
)
from asr_serve.governance.evidence import GovernedModel
from asr_serve.governance.governor import ModelGovernor
from asr_serve.metrics import MIGRATIONS, ServerMetrics
from asr_serve.models.registry import AUTO_VOICE, MULTILINGUAL, AnyCard, AsrCard, ModelCard, TtsCard, wrong_model
from asr_serve.pipelines.offline import transcribe
from asr_serve.pipelines.offline.audio_reader import OpenReader, open_reader
from asr_serve.pipelines.offline.transcribe import Event, TranscribeCanceller
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.pipelines.stages.language_models import load_scorers
from asr_serve.pipelines.stages.pipeline_file import PipelineSpec, open_pipeline
from asr_serve.pipelines.stages.staged_recognizer import StagedRecognizer, StageEngine
from asr_serve.pipelines.tts.frontend import preload_frontend
from asr_serve.protocols.deepgram.models import is_deepgram_recognition_model, is_deepgram_whisper
from asr_serve.protocols.openai.models import is_openai_recognition_model, is_openai_speech_model
from asr_serve.server.engine_offer import EdgeOffer
from asr_serve.text import tokenizers
from asr_serve.text.tokenizers import Tokenizer
from asr_serve.types import suggest_name

log = logging.getLogger(__name__)


LOAD_RETRY_S, MAX_LOAD_RETRY_S = 10.0, 600.0
"""Time after which an upload has a model loaded again that could not be loaded, and the longest: it doubles with each
failure. A load reads gigabytes, and many a cause, like broken weights, stays until somebody mends it."""


class FailedLoad(NamedTuple):
    """Why a model could not be loaded, and when an upload may have it loaded again."""

    reason: str
    """Message of the error, which itself would hold the frames of the load."""
    wait_s: float
    due_s: float


class EngineParts(NamedTuple):
    """Parts that a ModelEngine is built from."""

    card: AnyCard
    client: EngineClient
    tokenizer: Tokenizer | None
    """None for a synthesis model."""
    cards: Mapping[str, AnyCard]
    """Every known model, by name."""
    multilingual: str = ""
    """Name of the multilingual Whisper whose weights are on this machine; empty: there is none."""
    quantization: str = "none"
    """Quantization that the model computes with, as evaluations record it; of a cluster, that of its first replica."""


class ModelNeeds(NamedTuple):
    """Abilities that a request needs of its model."""

    language: str | None
    task: str
    detects: bool
    """Whether it must tell languages apart."""

    def met_by(self, card: AsrCard) -> bool:
        spoken = self.language is None or self.language in card.languages
        return spoken and self.task in card.tasks and (card.detects or not self.detects)


def engine_spec(name: str, config: ServeConfig) -> EngineSpec:
    """Specification of a model's engine process."""
    return EngineSpec(
        model=name,
        device=config.device,
        dtype=config.dtype,
        weights=config.weights if name == config.model else None,
        turn_model=config.turn_model,
        threads=config.engine_threads,
        listen=(config.host, config.encode_port),
        peer_keys=config.peer_keys,
        config=config.engine if name == config.model else _standalone(config.engine),
    )


def open_engine(name: str, config: ServeConfig) -> EngineParts:
    """Starts an engine process; blocks until its model is loaded. Raises EngineClosed, and errors of loading."""
    spec, ring = engine_spec(name, config), RingSize(config.ring_slots, config.ring_payload_bytes)
    offer = None
    if config.edge_folder is not None and name == config.model:
        offer = EdgeOffer(config.edge_folder, config.edge_sessions)
    try:
        client = EngineClient(spec.config, process_backend(offer.extend(spec) if offer else spec, ring))
    except BaseException:
        if offer is not None:
            offer.close()
        raise
    assert isinstance(client.backend, ProcessBackend)
    if offer is not None:
        offer.publish(client.backend, ring, spec.config)
    ready = client.backend.ready
    return engine_parts(client, ready, Path(ready.tokenizer_folder))._replace(multilingual=ready.multilingual)


def engine_parts(client: EngineClient, ready: EngineReady, tokenizer_folder: Path) -> EngineParts:
    """Parts of an engine that is loaded; closes `client` for an error. `tokenizer_folder`: on this machine. Raises
    ProgramMissing, WeightsCorrupt."""
    cards = {card.name: card for card in ready.cards}
    try:
        if isinstance(ready.card, AsrCard):
            tokenizer = tokenizers.load_tokenizer(tokenizer_folder)
            return EngineParts(ready.card, client, tokenizer, cards, quantization=ready.quantization)
        preload_frontend(ready.card)
    except AsrServeError:
        client.close()
        raise
    return EngineParts(ready.card, client, None, cards, quantization=ready.quantization)


def _standalone(config: EngineConfig) -> EngineConfig:
    """Settings of the engine of another model than the default one: peers have only that, a decoding graph is of its
    tokens, its decoder alone is split, and vLLM has its language model."""
    return msgspec.structs.replace(
        config, role="both", peers=(), decoding_graph=None, tensor_parallel_size=1, backend="native", vllm_python=None
    )


class FileEngine(Protocol):
    """Transcriber of uploads: a loaded model, or a pipeline of several."""

    @property
    def name(self) -> str: ...

    @property
    def card(self) -> AsrCard:
        """Card of the model, or of the first one."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of its tokens. Raises UnsupportedOption where they are of several models."""

    def in_use(self) -> AbstractContextManager[None]:
        """Context manager around a request's work, which an unload waits for."""

    def events(
        self, items: Iterable[InputItem], options: TranscribeOptions, stop: TranscribeCanceller
    ) -> Generator[Event, None, None]:
        """Transcribes items, see pipelines/offline/transcribe.events. Raises OptionError at once."""


class ModelEngine:
    """A loaded model: the `client` of its engine, its card and, for a recognition model, its `tokenizer`.

    Belongs to the event loop's thread; `client`, the cards and `tokenizer` may be used from any. Properties of the
    other kind of model raise WrongModel.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.card_of_any_kind, self.client, self._tokenizer, self.cards = parts[:4]
        self.multilingual, self.quantization = parts.multilingual, parts.quantization
        self._counted: dict[object, float] = {}
        self._counting = threading.Lock()
        self._draining = False
        self._users = 0
        self._no_users = asyncio.Event()
        self._no_users.set()

    @property
    def name(self) -> str:
        return self.card_of_any_kind.name

    @property
    def is_tts(self) -> bool:
        return isinstance(self.card_of_any_kind, TtsCard)

    @property
    def card(self) -> AsrCard:
        """Card of a recognition model. Raises WrongModel for a synthesis model."""
        if isinstance(self.card_of_any_kind, AsrCard):
            return self.card_of_any_kind
        raise wrong_model(self.name, AsrCard)

    @property
    def tts_card(self) -> TtsCard:
        """Card of a synthesis model. Raises WrongModel for a recognition model."""
        if isinstance(self.card_of_any_kind, TtsCard):
            return self.card_of_any_kind
        raise wrong_model(self.name, TtsCard)

    @property
    def tokenizer(self) -> Tokenizer:
        _ = self.card
        assert self._tokenizer is not None
        return self._tokenizer

    def events(
        self,
        items: Iterable[InputItem],
        options: TranscribeOptions,
        stop: TranscribeCanceller,
        open_reader: OpenReader = open_reader,
    ) -> Generator[Event, None, None]:
        return transcribe.events(self.client, self.tokenizer, items, options, stop, open_reader=open_reader)

    @property
    def state(self) -> str:
        """State: ready, restarting, failed or closed; unloading while its last requests are answered."""
        return "unloading" if self._draining else self.client.state

    def observe(self, metrics: ServerMetrics) -> bytes:
        """Updates the server's metrics of this engine; returns the engine's own, as text. Blocks."""
        backend = self.client.backend
        metrics.engine_up.labels(self.name).set(self.client.state == "ready")
        metrics.live_turnaround.labels(self.name).set(self.client.partial_rate.turnaround_ms / 1_000)
        if not isinstance(backend, ProcessBackend | ReplicatedBackend):
            return b""
        queue, config = backend.queue_state, self.client.config
        metrics.queue_requests.labels(self.name).set(queue.waiting)
        metrics.queue_capacity.labels(self.name).set(config.max_requests)
        fill = queue.fill(config.max_requests, units.s_to_samples(config.max_audio_s))
        metrics.queue_fill.labels(self.name).set(fill)
        metrics.backlog_seconds.labels(self.name).set(units.samples_to_s(queue.backlog_samples))
        metrics.ring_slots.labels(self.name).set(backend.ring.slots)
        metrics.ring_depth.labels(self.name).set(backend.ring_depth)
        counters = {labels: metrics.migrations.labels(self.name, *labels) for labels in MIGRATIONS}
        counts: list[tuple[object, Any, float]] = [
            ("restarts", metrics.engine_restarts.labels(self.name), backend.restarts),
            ("waits", metrics.ring_full_waits.labels(self.name), backend.ring_full_waits),
            ("moving", metrics.migration_seconds.labels(self.name), backend.moved_s),
            *((labels, counter, backend.moved[labels]) for labels, counter in counters.items()),
        ]
        with self._counting:  # concurrent calls would count the same increment twice
            for key, counter, value in counts:
                previous, self._counted[key] = self._counted.get(key, 0), value
                # A new process's ring starts at 0.
                counter.inc(value - previous if value >= previous else value)
        report = backend.report()
        return report.metrics if report else b""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context manager around a request's work, which `drain` waits for."""
        self._users += 1
        self._no_users.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._no_users.set()

    async def drain(self, wait_s: float) -> None:
        """Refuses new requests, and waits up to `wait_s` for those in progress."""
        self._draining = True
        try:
            async with asyncio.timeout(wait_s):
                await self._no_users.wait()
        except TimeoutError:
            log.warning("%s is unloaded under %d requests: they took over %g s", self.name, self._users, wait_s)


class ServedPipeline:
    """Pipeline of stages over loaded models, which other requests use too."""

    def __init__(self, spec: PipelineSpec, engines: Mapping[int, ModelEngine], recognizer: StagedRecognizer) -> None:
        """`engines`: by the index of their stage."""
        self.name, self.engines, self.recognizer = spec.name, tuple(engines.values()), recognizer

    @property
    def card(self) -> AsrCard:
        return self.engines[0].card

    @property
    def tokenizer(self) -> Tokenizer:
        if len(self.engines) > 1:
            models = " and ".join(engine.name for engine in self.engines)
            raise UnsupportedOption(
                f"tokens of the pipeline {self.name}", f"words: its tokens are those of {models}", param="include[]"
            )
        return self.engines[0].tokenizer

    @property
    def state(self) -> str:
        """State of the model that is least able to work."""
        states = [engine.state for engine in self.engines]
        return next((state for state in ("failed", "closed", "restarting") if state in states), "ready")

    @contextmanager
    def in_use(self) -> Iterator[None]:
        with ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.in_use())
            yield

    def events(
        self, items: Iterable[InputItem], options: TranscribeOptions, stop: TranscribeCanceller
    ) -> Generator[Event, None, None]:
        first, chosen = self.engines[0], self.recognizer.transcribe_options(options)
        return transcribe.events(first.client, first.tokenizer, items, chosen, stop, self.recognizer)


def _identifies_languages(card: AnyCard | None) -> bool:
    """Returns whether a model can identify the language of requests for others: a multilingual Whisper."""
    return isinstance(card, AsrCard) and card.kind == "whisper" and card.detects


class EngineRegistry:
    """Loads, finds and unloads models. Belongs to the event loop's thread."""

    def __init__(
        self,
        config: ServeConfig,
        open_engine: Callable[[str, ServeConfig], EngineParts] = open_engine,
        *,
        scorers: Mapping[int, SentenceScorer] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`scorers`: language models of the pipeline, by the index of their stage; None: they are loaded with it.
        Raises OptionError, SourceNotFound for a pipeline file or a policy that is wrong, and as ModelGovernor.open."""
        if config.model == AUTO_MODEL:
            config = msgspec.structs.replace(config, model=MULTILINGUAL)
        self._config, self._open, self._scorers, self._clock = config, open_engine, scorers, clock
        self.governor = (
            None if config.governance.policy is None else ModelGovernor.open(config.governance, config.evaluations)
        )
        """Governor of the models of the policy, if there is one."""
        self._expected = [config.model, *config.more_models]
        if self.governor is not None:
            self._expected += [name for name in self.governor.policy.models if name not in self._expected]
            try:
                self._check_policy(self.governor)
            except OptionError:
                self.governor.close()
                raise
        self._cards: dict[str, AnyCard] = {}
        self._engines: dict[str, ModelEngine] = {}
        self.pipeline_spec = None if config.pipeline is None else open_pipeline(config.pipeline)
        self.pipeline: ServedPipeline | None = None
        """Pipeline of files, once it is loaded."""
        self._default_tts: str | None = None
        """Default synthesis model, once it is loaded."""
        self.tts_expected = config.voice != "none" and config.engine.role != "encode"
        """Whether the default synthesis model may still be loaded."""
        self._folders: dict[str, str] = {}
        """Path of a folder that is configured as a model -> the model's name."""
        self._loading: dict[str, asyncio.Task[ModelEngine]] = {}
        self._failed_loads: dict[str, FailedLoad] = {}
        self._unloading: dict[str, asyncio.Task[None]] = {}
        self._renewing: set[asyncio.Task[HandoverResult]] = set()
        self._on_demand: set[str] = set()
        """Models that an upload had loaded, and that nobody chose to serve."""
        self._identifications: Counter[tuple[str, str]] = Counter()
        """Identifications of languages since the last `observe`, by outcome and language."""

    def _check_policy(self, governor: ModelGovernor) -> None:
        """Raises OptionError for a policy that does not fit the other settings."""
        if len(self._expected) > self._config.max_models:
            raise OptionError(
                f"max_models={self._config.max_models} and {len(self._expected)} models to load at start, those of the "
                f"policy included: {', '.join(self._expected)}",
                f"max_models={len(self._expected)} or more, or fewer models",
                param="max_models",
            )
        for alias in self._config.aliases:
            if alias in governor.policy.routes:
                raise OptionError(f"the alias {alias} is a route of the policy too", "two names", param="aliases")

    async def start(self) -> None:
        """Loads the configured models, one after another. Raises errors of loading, GovernanceError for a model that
        the policy does not allow here; but where the voice is `auto` and its weights or program are missing, goes on
        without speech synthesis."""
        while self._expected:
            await self.load(self._expected[0])
            self._expected.pop(0)
        if self.governor is not None:
            await asyncio.to_thread(self.governor.start, self._governed_models(self.governor))
        if self.pipeline_spec is not None:
            self.pipeline = await self._load_pipeline(self.pipeline_spec)
        if not self.tts_expected:
            return
        tts_models = [engine.name for engine in self if engine.is_tts]
        self._default_tts = next((name for name in tts_models if self._config.voice in (AUTO_VOICE, name)), None)
        try:
            if self._default_tts is None:
                self._default_tts = (await self._load(self._config.voice)).name
        except (WeightsMissing, ProgramMissing) as error:
            if self._config.voice != AUTO_VOICE:
                raise
            log.info("no speech synthesis model is loaded: %s", error)
        self.tts_expected = False

    def _governed_models(self, governor: ModelGovernor) -> dict[str, GovernedModel]:
        """Facts about the models of the policy. Raises OptionError for a route with the name of a model, WrongModel
        for one that synthesizes."""
        for name in governor.policy.routes:
            if name in self._cards:
                raise OptionError(
                    f"{governor.policy.file}: a route of the name of the model {name}",
                    "a name of its own",
                    param="governance.policy",
                )
        found = {}
        for name in governor.policy.models:
            engine = self.get(name)
            revision = self.weights_revision(engine) or f"weights={self._config.weights}"
            found[name] = GovernedModel(name, revision, engine.card.licence, engine.quantization)
        return found

    def weights_revision(self, engine: ModelEngine) -> str:
        """Revision of a model's weights, as evaluations record it; empty for weights of the setting `weights`."""
        configured = engine.name == self._config.model and self._config.weights is not None
        return "" if configured else engine.card.weights_revision

    async def _load_pipeline(self, spec: PipelineSpec) -> ServedPipeline:
        """Loads the models of a pipeline. Raises errors of loading, NotAllowed (`max_models`)."""
        engines: dict[int, ModelEngine] = {}
        for index, stage in spec.recognizers.items():
            with spec.located_loading_errors(index):
                engines[index] = await self.load(stage.model)
            spec.check_lattice_model(index, engines[index].client.card)
        if spec.name in self._cards:
            raise OptionError(
                f"a pipeline of the name of the model {spec.name}",
                "a name of its own",
                "rename the file",
                param="pipeline",
            )
        if self._scorers is None:
            self._scorers = await asyncio.to_thread(load_scorers, spec)
        stages = {index: StageEngine(engine.client, engine.tokenizer.decode) for index, engine in engines.items()}
        return ServedPipeline(spec, engines, StagedRecognizer(spec, stages, self._scorers))

    def _settings(self, name: str) -> ServeConfig:
        """Settings of a model's engine: those of its stage, where the pipeline has it."""
        config, spec = self._config, self.pipeline_spec
        if spec is None:
            return config
        for index, stage in spec.recognizers.items():
            if stage.model == name:
                engine = config.engine if name == config.model else _standalone(config.engine)
                return msgspec.structs.replace(
                    config,
                    pipeline=None,
                    model=name,
                    weights=str(spec.path(stage.weights)) if stage.weights else None,
                    device=config.device if stage.device == "auto" else stage.device,
                    dtype=config.dtype if stage.dtype == "auto" else stage.dtype,
                    engine=spec.engine_config(index, engine),
                )
        return config

    @property
    def default_tts_model(self) -> str | None:
        """The synthesis model of requests that name none."""
        return self._default_tts

    def __iter__(self) -> Iterator[ModelEngine]:
        return iter(list(self._engines.values()))

    def known_models(self) -> dict[str, AnyCard]:
        """Cards of all models that can be loaded, by name. Engines report them: none until the first is loaded."""
        return dict(self._cards)

    def state(self, name: str) -> str:
        """State of a known model: its engine's, `loading` or `not_loaded`."""
        if name in self._engines:
            return self._engines[name].state
        return "loading" if name in self._loading or name in self._expected else "not_loaded"

    def aliases(self, name: str) -> list[str]:
        """Other names of a model: aliases, and routes of which it serves most callers."""
        routes = [route for route in self._routes if self._serving(route) == name]
        return [*routes, *(alias for alias, model in self._config.aliases.items() if model in (name, *routes))]

    @property
    def _routes(self) -> list[str]:
        return [] if self.governor is None else list(self.governor.policy.routes)

    def _serving(self, name: str) -> str | None:
        """Model that serves most callers of a route; None: no route has that name."""
        return None if self.governor is None else self.governor.serving(name)

    def without_alias(self, name: str) -> str:
        """Name that an alias stands for; any other name itself."""
        return self._config.aliases.get(name, name)

    def resolve(self, name: str | None, kind: type[ModelCard] = ModelCard) -> str:
        """Resolves an alias, or a route, to the model's name; None, and names of OpenAI's and Deepgram's recognition
        models: the default model, or for Deepgram's Whisper the one that serves those. Callers of a route come to their
        model by CallerModels. `kind`: class of the cards of models that an error lists. Raises UnknownModel,
        EngineClosed, WrongModel for the pipeline."""
        if name is None or self.means_default(name):
            name = self._config.model
        elif self._is_foreign_name(name, is_deepgram_whisper):
            name = self._served_whisper or name
        own = self.without_alias(name)
        own = self._serving(own) or own
        own = self._folders.get(own, own)
        if self.pipeline_spec is not None and own == self.pipeline_spec.name:
            first = self.pipeline_spec.recognizers[0].model
            raise WrongModel(
                f"{own} is a pipeline, which transcribes files alone", "a model", f"name its first one, {first}"
            )
        known = self.known_models()
        if own in known or own in self._expected:
            return own
        if not known:
            raise EngineClosed("the server is still loading its models", todo="try again in a few seconds")
        suited = sorted(model for model, card in known.items() if isinstance(card, kind))
        pipeline = self.pipeline_spec
        if pipeline is not None and kind is AsrCard:
            suited.append(pipeline.name)
        routes = self._routes if issubclass(AsrCard, kind) else []
        aliases = [alias for alias, model in self._config.aliases.items() if model in suited or model in routes]
        names = [*routes, *aliases, *suited]
        raise UnknownModel(
            f"there is no model {name[:100]!r}", f"models: {', '.join(names)}", suggest_name(name, names)
        )

    def _is_foreign_name(self, name: str, is_foreign_model: Callable[[str], bool]) -> bool:
        """Returns whether a name is that of a model of another service, and neither an alias nor a model here."""
        return is_foreign_model(name) and not any(
            name in names for names in (self._config.aliases, self._cards, self._expected, self._folders, self._routes)
        )

    def means_default(self, name: str) -> bool:
        """Returns whether a name as the recognition model of a request stands for the default one, as no name does."""
        kinds = [is_openai_recognition_model, is_deepgram_recognition_model]
        if self._served_whisper is None:
            kinds.append(is_deepgram_whisper)
        return self._is_auto(name) or any(self._is_foreign_name(name, is_foreign_model) for is_foreign_model in kinds)

    def _is_auto(self, name: str) -> bool:
        """Returns whether a name leaves the model to the server, and is no alias or route of that name."""
        return name == AUTO_MODEL and name not in self._config.aliases and name not in self._routes

    @property
    def _served_whisper(self) -> str | None:
        """Name of the Whisper that serves Deepgram's names of it: of those that are loaded one that takes requests, of
        those one that tells languages apart, as Deepgram's does, and the first. None: there is none, or the policy
        decides which models serve callers."""
        if self.governor is not None:
            return None
        loaded = [engine for engine in self if not engine.is_tts and engine.card.kind == "whisper"]

        def suitability(engine: ModelEngine) -> tuple[bool, bool, bool]:
            return engine.state in ("ready", "restarting"), engine.card.detects, engine.state == "ready"

        return max(loaded, key=suitability).name if loaded else None

    @property
    def auto_model(self) -> str | None:
        """Name of the model that serves uploads in place of the default one; None: there is none. It may not be loaded
        yet."""
        if self._config.auto_model == AUTO_MODEL:
            return next((engine.multilingual for engine in self if engine.multilingual), None)
        return None if self._config.auto_model == NO_MODEL else self._config.auto_model

    def substitute(self, name: str | None, needs: ModelNeeds) -> str | None:
        """Name of the model that serves an upload in place of the default model, which does not meet its needs: one
        that is loaded, or `auto_model`. None: none does, or the upload names its model. Raises as `resolve`."""
        chosen = name is not None and not self.means_default(name)
        if chosen or self.governor is not None or self._config.auto_model == NO_MODEL:
            return None
        card = self._cards.get(self.resolve_for_files(name))
        if not isinstance(card, AsrCard) or needs.met_by(card):
            return None
        for engine in self:
            if not engine.is_tts and engine.state == "ready" and needs.met_by(engine.card):
                return engine.name
        auto = self.auto_model
        card = self._cards.get(auto) if auto is not None else None
        return auto if isinstance(card, AsrCard) and needs.met_by(card) else None

    async def load_substitute(self, name: str | None, needs: ModelNeeds) -> None:
        """Loads what `substitute` names, if it is not loaded, or is being unloaded; for the name `auto` and no language
        the model that identifies it. Raises as `load`, but ModelUnavailable where the load fails, and at once until
        another one is due: what failed passes, or somebody mends it."""
        identifies = name == AUTO_MODEL and needs.language is None and needs.task == "transcribe"
        if identifies:
            needs = needs._replace(detects=True)
        substitute = self.substitute(name, needs)
        if identifies and substitute is not None and not _identifies_languages(self._cards.get(substitute)):
            auto = self.auto_model
            substitute = auto if auto is not None and _identifies_languages(self._cards.get(auto)) else None
        if substitute is None or (state := self.state(substitute)) not in ("not_loaded", "loading", "unloading"):
            return
        if state == "not_loaded":
            self._check_failed_load(substitute)
        try:
            engine = await self.load(substitute)
        except Exception:
            self._check_failed_load(substitute)
            raise
        if state != "loading":  # else it is served anyway: at start, or because an administrator asked for it
            self._on_demand.add(engine.name)

    def _check_failed_load(self, model: str) -> None:
        """Raises ModelUnavailable where a load of that model failed, and the next one is not due."""
        failed = self._failed_loads.get(model)
        if failed is not None and (left_s := failed.due_s - self._clock()) > 0:
            raise ModelUnavailable(
                f"the model {model} could not be loaded, and is tried again with the next request after"
                f" {math.ceil(left_s)} s: {failed.reason}",
                "",
                math.ceil(left_s * 1_000),
            )

    def language_identifier(self, name: str | None) -> tuple[ModelEngine, ModelEngine] | None:
        """Engines of the default model, and of the one that identifies the language of requests under that name. None:
        nothing identifies it. A multilingual Whisper does that where it is served beside a default model that does not
        tell languages apart; not one that was loaded for an upload in another language, unless the name is `auto`; not
        for a request that names its model, with a policy, or with `auto_model` none."""
        chosen = name is not None and not self.means_default(name)
        if chosen or self.governor is not None or self._config.auto_model == NO_MODEL:
            return None
        default = self._engines.get(self._folders.get(self._config.model, self._config.model))
        if default is None or default.is_tts or default.card.detects:
            return None
        able = (engine for engine in self if not engine.is_tts and _identifies_languages(engine.card))
        named = name == AUTO_MODEL
        identifier = next((engine for engine in able if named or engine.name not in self._on_demand), None)
        return None if identifier is None else (default, identifier)

    def count_identification(self, outcome: str, language: str) -> None:
        """Counts an identification for the metrics. `language`: empty where none was identified."""
        self._identifications[outcome, language] += 1

    @property
    def pipeline_state(self) -> str:
        """State of the pipeline: its models', or `loading`."""
        return "loading" if self.pipeline is None else self.pipeline.state

    def resolve_for_files(self, name: str | None) -> str:
        """Resolves as `resolve` does, also to the pipeline, which is the default of files where there is one."""
        spec = self.pipeline_spec
        if spec is not None and (name is None or self.without_alias(name) == spec.name or self.means_default(name)):
            return spec.name
        return self.resolve(name, AsrCard)

    def get_for_files(self, name: str | None = None) -> FileEngine:
        """Returns what transcribes files under that name. Raises as `get` does."""
        spec = self.pipeline_spec
        if spec is None or self.resolve_for_files(name) != spec.name:
            return self.get(name)
        if self.pipeline is None:
            raise EngineClosed("the server is still loading its pipeline", todo="try again in a few seconds")
        if self.pipeline.state in ("failed", "closed"):
            raise EngineClosed(f"an engine of {spec.name} is {self.pipeline.state}", todo="try again in a few seconds")
        return self.pipeline

    def get(self, name: str | None = None) -> ModelEngine:
        """Returns the engine of a recognition model that takes requests. Raises UnknownModel, ModelNotLoaded,
        WrongModel, EngineClosed."""
        return self._get(name, AsrCard)

    def get_tts(self, name: str | None = None) -> ModelEngine:
        """Returns the engine of a synthesis model; None, `auto`, and the names of OpenAI's speech models: the default
        one. Raises as `get` does."""
        if name and (self._is_auto(name) or self._is_foreign_name(name, is_openai_speech_model)):
            name = None
        model = name or self._default_tts
        if model is None:
            model = next((engine.name for engine in self if engine.is_tts), None)
        if model is None:
            if self.tts_expected:
                raise EngineClosed("the server is still loading its voice", todo="try again in a few seconds")
            raise ModelNotLoaded(
                "no speech synthesis model is loaded",
                todo="start the server with --voice NAME; asr-serve models list shows the models and where to get them",
            )
        return self._get(model, TtsCard)

    def get_any(self, name: str | None = None) -> ModelEngine:
        """Returns the engine of a model of either kind. Raises UnknownModel, ModelNotLoaded, EngineClosed."""
        return self._get(name, ModelCard)

    def _get(self, name: str | None, kind: type[ModelCard]) -> ModelEngine:
        """Returns the engine of a model whose card is of that class. Raises UnknownModel, ModelNotLoaded, WrongModel,
        EngineClosed."""
        own = self.resolve(name, kind)
        ready = [
            engine.name for engine in self if engine.state == "ready" and isinstance(engine.card_of_any_kind, kind)
        ]
        if own in self._cards and not isinstance(self._cards[own], kind):
            raise wrong_model(own, kind, ready)
        state = self.state(own)
        if state in ("ready", "restarting"):  # requests wait for a restart
            return self._engines[own]
        if state in ("not_loaded", "unloading"):
            raise ModelNotLoaded(
                f"the model {own} is not loaded",
                f"loaded: {', '.join(ready) or 'none'}",
                f"an administrator loads it with POST /v1/models/{own}/load",
            )
        raise EngineClosed(f"the engine of {own} is {state}", todo="try again in a few seconds")

    async def load(self, name: str) -> ModelEngine:
        """Waits until the model is loaded. Raises UnknownModel, NotAllowed (`max_models`), errors of loading."""
        own = self.resolve(name)
        self._on_demand.discard(own)
        if unloading := self._unloading.get(own):
            await asyncio.shield(unloading)
        if own in self._engines:
            return self._engines[own]
        if own not in self._loading:
            uncounted = (self._default_tts, self.auto_model)
            loaded = len({*self._engines, *self._loading} - {*uncounted, own})
            if loaded >= self._config.max_models and own not in uncounted:
                raise NotAllowed(
                    f"{loaded} models are loaded", f"max_models={self._config.max_models}", "unload one first"
                )
            self._loading[own] = asyncio.create_task(self._load(own))
        # Shielded: the caller may be cancelled while others wait for the same load.
        return await asyncio.shield(self._loading[own])

    async def _load(self, own: str) -> ModelEngine:
        try:
            place = next((path for path, name in self._folders.items() if name == own), own)
            try:
                parts = await asyncio.to_thread(self._open, place, self._settings(place))
            except Exception as error:
                self._note_failed_load(own, error)
                raise
            engine = ModelEngine(parts)
            if engine.name in self._engines:
                await asyncio.to_thread(engine.client.close)
                raise OptionError(
                    f"{place} holds the model {engine.name}, which is loaded already",
                    "one set of weights of each model",
                    "leave one of them out, or serve it by a process of its own",
                    param="more_models",
                )
            self._engines[engine.name] = engine
            if place not in engine.cards:
                self._folders[place] = engine.name
            self._cards.update(engine.cards)
            self._failed_loads.pop(own, None)
            return engine
        finally:
            self._loading.pop(own, None)

    def _note_failed_load(self, own: str, error: Exception) -> None:
        before = self._failed_loads.get(own)
        wait_s = LOAD_RETRY_S if before is None else min(2 * before.wait_s, MAX_LOAD_RETRY_S)
        is_typed = isinstance(error, AsrServeError)
        log.error("the model %s could not be loaded: %s", own, error, exc_info=None if is_typed else error)
        # Messages of other errors are not written for callers.
        reason = str(error) if is_typed else f"{type(error).__name__}; the server's log has the details"
        self._failed_loads[own] = FailedLoad(reason, wait_s, self._clock() + wait_s)

    async def unload(self, name: str) -> None:
        """Waits up to `drain_s` for the model's requests, then closes its engine: requests still in it fail with
        EngineClosed. Raises UnknownModel, ModelNotLoaded, NotAllowed for a model of the pipeline or the policy."""
        own, spec = self.resolve(name), self.pipeline_spec
        # By the specification: a model must stay while the pipeline is still loading, too.
        if spec is not None and any(stage.model == own for stage in spec.recognizers.values()):
            raise NotAllowed(f"the pipeline {spec.name} uses {own}", "a model of no pipeline")
        if self.governor is not None and own in self.governor.policy.models:
            # A rollback must find it loaded.
            raise NotAllowed(f"the policy has routes to {own}", "a model of no route")
        if own not in self._unloading:
            if own not in self._engines:
                raise ModelNotLoaded(f"the model {own} is not loaded", "only what is loaded can be unloaded")
            self._unloading[own] = asyncio.create_task(self._unload(self._engines[own]))
        await asyncio.shield(self._unloading[own])

    async def _unload(self, engine: ModelEngine) -> None:
        await engine.drain(self._config.drain_s)
        await asyncio.to_thread(engine.client.close)
        del self._engines[engine.name], self._unloading[engine.name]

    async def renew(self, name: str) -> HandoverResult:
        """Replaces a model's engine process while sessions run; waits until the old one ends, at most `drain_s`
        after the new one is ready. Raises UnknownModel, ModelNotLoaded, NotAllowed (a renewal is in progress),
        EngineClosed, and errors of loading; then the old one stays."""
        backend = self.get_any(name).client.backend
        assert isinstance(backend, ProcessBackend | ReplicatedBackend)
        renewing = asyncio.create_task(asyncio.to_thread(backend.renew, self._config.drain_s))
        self._renewing.add(renewing)
        renewing.add_done_callback(self._finish_renewal)
        return await asyncio.shield(renewing)  # continues if the caller is cancelled

    def _finish_renewal(self, renewing: asyncio.Task[HandoverResult]) -> None:
        self._renewing.discard(renewing)
        error = None if renewing.cancelled() else renewing.exception()
        if error is not None and not isinstance(error, NotAllowed):  # NotAllowed: it was not started
            log.warning("a renewal failed: %s", error)

    async def observe(self, metrics: ServerMetrics) -> list[bytes]:
        """Calls `ModelEngine.observe` of every engine, and removes the metrics of models that are not loaded."""
        reports = await asyncio.gather(*(asyncio.to_thread(engine.observe, metrics) for engine in self))
        for name in self._cards.keys() - self._engines.keys():
            metrics.remove_model(name)
        counted, self._identifications = self._identifications, Counter()
        for labels, count in counted.items():
            metrics.language_identifications.labels(*labels).inc(count)
        return reports

    def describe(self) -> dict[str, Any]:
        """State of each loaded model, for /ready."""
        return {engine.name: engine.state for engine in self}

    async def close(self) -> None:
        """Closes every engine; requests still in them fail with EngineClosed."""
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(engine.client.close) for engine in self))
        if self.pipeline is not None:
            await asyncio.to_thread(self.pipeline.recognizer.close)
        await asyncio.gather(*self._renewing, return_exceptions=True)
        self._engines.clear()
        if self.governor is not None:
            await asyncio.to_thread(self.governor.close)
