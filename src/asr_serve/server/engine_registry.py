"""The models this server holds, by name, each with its engine."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asr_serve.config import ServeConfig
from asr_serve.engine.client import EngineClient
from asr_serve.engine.process.client import ProcessBackend, process_backend
from asr_serve.engine.process.messages import EngineSpec
from asr_serve.engine.process.process import RingSize
from asr_serve.engine.process.supervisor import HandoverResult
from asr_serve.errors import (
    EngineClosed,
    ModelNotLoaded,
    NotAllowed,
    ProgramMissing,
    UnknownModel,
    WeightsMissing,
    WrongModel,
)
from asr_serve.metrics import MIGRATIONS, ServerMetrics
from asr_serve.models.registry import AUTO_VOICE, AnyCard, AsrCard, TtsCard
from asr_serve.pipelines.tts.frontend import preload_frontend
from asr_serve.text import tokenizers
from asr_serve.text.tokenizers import Tokenizer
from asr_serve.types import suggest_name

log = logging.getLogger(__name__)


class EngineParts(NamedTuple):
    """What an Engine is made of."""

    card: AnyCard
    client: EngineClient
    tokenizer: Tokenizer | None
    """None of a model that speaks."""
    cards: Mapping[str, AnyCard]
    """Every model there is, by name."""


def open_engine(name: str, config: ServeConfig) -> EngineParts:
    """Start an engine process. Blocks until its model is loaded. Raises what loading raises, EngineClosed."""
    spec = EngineSpec(
        model=name,
        device=config.device,
        dtype=config.dtype,
        weights=config.weights if name == config.model else None,
        turn_model=config.turn_model,
        threads=config.engine_threads,
        listen=(config.host, config.encode_port),
        peer_keys=config.peer_keys,
    )
    connect = process_backend(spec, RingSize(config.ring_slots, config.ring_payload_bytes))
    # Peers have the default model, and no other.
    alone = msgspec.structs.replace(config.engine, role="both", peers=())
    client = EngineClient(config.engine if name == config.model else alone, connect)
    assert isinstance(client.backend, ProcessBackend)
    ready = client.backend.ready
    cards = {card.name: card for card in ready.cards}
    if isinstance(ready.card, AsrCard):
        return EngineParts(ready.card, client, tokenizers.load_tokenizer(Path(ready.folder)), cards)
    try:
        preload_frontend(ready.card)
    except ProgramMissing:
        client.close()
        raise
    return EngineParts(ready.card, client, None, cards)


class ModelEngine:
    """A loaded model: `client` to its engine; of one that hears, `tokenizer` its vocabulary.

    Belongs to the event loop's thread; `client`, the cards and `tokenizer` may be used from any. What is asked of
    a model of the other kind raises WrongModel.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.card_of_any_kind, self.client, self._tokenizer, self.cards = parts
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
        """Of a model that hears."""
        if isinstance(self.card_of_any_kind, AsrCard):
            return self.card_of_any_kind
        raise WrongModel(f"the model {self.name} speaks, and hears nothing", "a model that hears")

    @property
    def tts_card(self) -> TtsCard:
        """Of one that speaks."""
        if isinstance(self.card_of_any_kind, TtsCard):
            return self.card_of_any_kind
        raise WrongModel(f"the model {self.name} hears, and has no voice", "a model that speaks")

    @property
    def tokenizer(self) -> Tokenizer:
        _ = self.card
        assert self._tokenizer is not None
        return self._tokenizer

    @property
    def state(self) -> str:
        """ready, restarting, failed, closed; unloading while its last requests are answered."""
        return "unloading" if self._draining else self.client.state

    def observe(self, metrics: ServerMetrics) -> bytes:
        """Bring the server's metrics of this engine up to date; returns the engine's own, as text. Blocks."""
        link = self.client.backend
        metrics.engine_up.labels(self.name).set(self.client.state == "ready")
        metrics.live_turnaround.labels(self.name).set(self.client.partial_rate.turnaround_ms / 1_000)
        if not isinstance(link, ProcessBackend):
            return b""
        metrics.ring_slots.labels(self.name).set(link.ring.slots)
        metrics.ring_depth.labels(self.name).set(link.ring_depth)
        moved = {how: metrics.migrations.labels(self.name, *how) for how in MIGRATIONS}
        counts: list[tuple[object, Any, float]] = [
            ("restarts", metrics.engine_restarts.labels(self.name), link.restarts),
            ("waits", metrics.ring_full_waits.labels(self.name), link.ring_full_waits),
            ("moving", metrics.migration_seconds.labels(self.name), link.moved_s),
            *((how, counter, link.moved[how]) for how, counter in moved.items()),
        ]
        with self._counting:  # two who ask at once would count the same twice
            for what, counter, now in counts:
                before, self._counted[what] = self._counted.get(what, 0), now
                # A new process begins its ring at 0.
                counter.inc(now - before if now >= before else now)
        report = link.report()
        return report.metrics if report else b""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Around a request's work: an engine is not closed under it."""
        self._users += 1
        self._no_users.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._no_users.set()

    async def drain(self, wait_s: float) -> None:
        """Take no more requests, and wait for those there are, but no longer than that."""
        self._draining = True
        try:
            async with asyncio.timeout(wait_s):
                await self._no_users.wait()
        except TimeoutError:
            log.warning("%s is unloaded under %d requests: they took over %g s", self.name, self._users, wait_s)


class EngineRegistry:
    """Loads, finds and unloads. Belongs to the event loop's thread."""

    def __init__(
        self, config: ServeConfig, open_engine: Callable[[str, ServeConfig], EngineParts] = open_engine
    ) -> None:
        self._config, self._open = config, open_engine
        self._expected = [config.model, *config.more_models]
        self._cards: dict[str, AnyCard] = {}
        self._engines: dict[str, ModelEngine] = {}
        self._default_tts: str | None = None
        """Model that speaks unless a request names another, once it is there."""
        self.tts_expected = config.voice != "none" and config.engine.role != "encode"
        """It may come yet."""
        self._loading: dict[str, asyncio.Task[ModelEngine]] = {}
        self._unloading: dict[str, asyncio.Task[None]] = {}
        self._renewing: set[asyncio.Task[HandoverResult]] = set()

    async def start(self) -> None:
        """Load what the configuration names, one after another. Raises what loading raises; where the voice is
        `auto` and there is none, nothing speaks."""
        while self._expected:
            await self.load(self._expected[0])
            self._expected.pop(0)
        if not self.tts_expected:
            return
        there = [engine.name for engine in self if engine.is_tts]
        self._default_tts = next((name for name in there if self._config.voice in (AUTO_VOICE, name)), None)
        try:
            if self._default_tts is None:
                self._default_tts = (await self._load(self._config.voice)).name
        except (WeightsMissing, ProgramMissing) as missing:
            if self._config.voice != AUTO_VOICE:
                raise
            log.info("nothing speaks here: %s", missing)
        self.tts_expected = False

    @property
    def default_tts_model(self) -> str | None:
        """The model that speaks unless a request names another."""
        return self._default_tts

    def __iter__(self) -> Iterator[ModelEngine]:
        return iter(list(self._engines.values()))

    def known_models(self) -> dict[str, AnyCard]:
        """Every model that could be loaded. Only an engine can tell: none, until the first one is there."""
        return dict(self._cards)

    def state(self, name: str) -> str:
        """Of a known model: an engine's, or loading, or not_loaded."""
        if name in self._engines:
            return self._engines[name].state
        return "loading" if name in self._loading or name in self._expected else "not_loaded"

    def aliases(self, name: str) -> list[str]:
        return [alias for alias, model in self._config.aliases.items() if model == name]

    def resolve(self, name: str | None) -> str:
        """The model's own name: for an alias, and for None. Raises UnknownModel."""
        if name is None:
            return self._config.model
        own = self._config.aliases.get(name, name)
        known = self.known_models()
        if own in known or own in self._expected:
            return own
        if not known:
            raise EngineClosed("the server is still loading its models", todo="try again in a few seconds")
        names = [*self._config.aliases, *sorted(known)]
        raise UnknownModel(
            f"there is no model {name[:100]!r}", f"models: {', '.join(names)}", suggest_name(name, names)
        )

    def get(self, name: str | None = None) -> ModelEngine:
        """The engine of a model that hears and takes work. Raises UnknownModel, ModelNotLoaded, WrongModel,
        EngineClosed."""
        engine = self.get_any(name)
        _ = engine.card
        return engine

    def get_tts(self, name: str | None = None) -> ModelEngine:
        """The same of one that speaks; None: the server's. Raises ModelNotLoaded too where nothing speaks."""
        chosen = name or self._default_tts
        if chosen is None:
            chosen = next((engine.name for engine in self if engine.is_tts), None)
        if chosen is None:
            if self.tts_expected:
                raise EngineClosed("the server is still loading its voice", todo="try again in a few seconds")
            raise ModelNotLoaded(
                "no model is loaded that speaks",
                todo="start the server with --voice, and the weights of a voice: asr-serve models list",
            )
        engine = self.get_any(chosen)
        _ = engine.tts_card
        return engine

    def get_any(self, name: str | None = None) -> ModelEngine:
        """The same, whatever it does."""
        own = self.resolve(name)
        state = self.state(own)
        if state in ("ready", "restarting"):  # who comes while it restarts waits for it
            return self._engines[own]
        if state in ("not_loaded", "unloading"):
            ready = [engine.name for engine in self if engine.state == "ready"]
            raise ModelNotLoaded(
                f"the model {own} is not loaded",
                f"loaded: {', '.join(ready) or 'none'}",
                f"an administrator loads it with POST /v1/models/{own}/load",
            )
        raise EngineClosed(f"the engine of {own} is {state}", todo="try again in a few seconds")

    async def load(self, name: str) -> ModelEngine:
        """Wait until the model is loaded. Raises UnknownModel, NotAllowed (no place), and what loading raises."""
        own = self.resolve(name)
        if unloading := self._unloading.get(own):
            await asyncio.shield(unloading)
        if own in self._engines:
            return self._engines[own]
        if own not in self._loading:
            held = len({*self._engines, *self._loading} - {self._default_tts, own})
            if held >= self._config.max_models and own != self._default_tts:
                raise NotAllowed(
                    f"{held} models are loaded",
                    f"max_models={self._config.max_models}",
                    "unload one first",
                )
            self._loading[own] = asyncio.create_task(self._load(own))
        # Whoever asked may leave; others may wait for the same.
        return await asyncio.shield(self._loading[own])

    async def _load(self, own: str) -> ModelEngine:
        try:
            engine = ModelEngine(await asyncio.to_thread(self._open, own, self._config))
            self._engines[engine.name] = engine
            self._cards.update(engine.cards)
            return engine
        finally:
            self._loading.pop(own, None)

    async def unload(self, name: str) -> None:
        """Wait for the model's requests, for up to `drain_s`, then let it go: those still in it fail with
        EngineClosed. Raises UnknownModel, ModelNotLoaded."""
        own = self.resolve(name)
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
        """Have another engine process take the place of a model's, while people speak; wait until the old one is
        gone: `drain_s` after the new one is there at the latest. Raises UnknownModel, ModelNotLoaded, NotAllowed
        (one is under way), EngineClosed, and what loading raises; then the old one stays."""
        link = self.get_any(name).client.backend
        assert isinstance(link, ProcessBackend)
        renewing = asyncio.create_task(asyncio.to_thread(link.renew, self._config.drain_s))
        self._renewing.add(renewing)
        renewing.add_done_callback(self._finish_renewal)
        return await asyncio.shield(renewing)  # it goes on without whoever asked

    def _finish_renewal(self, renewing: asyncio.Task[HandoverResult]) -> None:
        self._renewing.discard(renewing)
        failure = None if renewing.cancelled() else renewing.exception()
        if failure is not None and not isinstance(failure, NotAllowed):  # that one was not begun
            log.warning("a renewal failed: %s", failure)

    async def observe(self, metrics: ServerMetrics) -> list[bytes]:
        """What `Engine.observe` does, for each; of models that are not loaded, nothing is left to see."""
        found = await asyncio.gather(*(asyncio.to_thread(engine.observe, metrics) for engine in self))
        for name in self._cards.keys() - self._engines.keys():
            metrics.remove_model(name)
        return found

    def describe(self) -> dict[str, Any]:
        """State of each loaded model, for /ready."""
        return {engine.name: engine.state for engine in self}

    async def close(self) -> None:
        """Close every engine; requests still in them fail with EngineClosed."""
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(engine.client.close) for engine in self))
        await asyncio.gather(*self._renewing, return_exceptions=True)
        self._engines.clear()
