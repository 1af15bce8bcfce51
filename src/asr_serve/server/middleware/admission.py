"""Admission of requests: API keys, origins, rates and capacity, all checked before a body is read."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from re import Pattern
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from asr_serve.config import ServeConfig
from asr_serve.errors import AtCapacity, Draining, InvalidKey, NoSuchRoute, NotAllowed, RateLimited
from asr_serve.protocols.openai.realtime_client_events import KEY_SUBPROTOCOL
from asr_serve.server.middleware.request_context import ApiClient, request_context


class AdmissionClass(Enum):
    """Conditions under which a route's requests are admitted."""

    PUBLIC = auto()
    """Nothing, also while the server drains: these routes reveal its state alone. /metrics is not among them: it
    reveals what a server is used for, and Prometheus can send a key."""
    KEY = auto()
    """A key, where keys are configured. The class of HTTP routes that declare none."""
    WORK = auto()
    """A key, and capacity of the engine: the limits of requests apply."""
    LIVE = auto()
    """A key, and a live session for as long as the WebSocket is open."""
    RESERVES_ITSELF = auto()
    """A key; the WebSocket's session may outlive it, so the route reserves it (`reserve_session`)."""


E = TypeVar("E")


def admitted_as(kind: AdmissionClass) -> Callable[[E], E]:
    """Decorator of a route's endpoint: a function, or a class whose instances are ASGI applications."""

    def declare(endpoint: E) -> E:
        endpoint.admission_class = kind  # type: ignore[attr-defined]
        return endpoint

    return declare


class AdmissionTable:
    """Admission classes of all routes, as their endpoints declare them."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        """Raises TypeError for a route without the limit that it needs: a WebSocket whose endpoint declares no class,
        a class that belongs to the other kind of route, or another method at the path of a PUBLIC route, which is
        public whatever the method."""
        self._http: list[tuple[Pattern[str], Collection[str] | None, AdmissionClass]] = []
        self._sockets: list[tuple[Pattern[str], AdmissionClass]] = []
        self.public_paths, self.socket_paths = set[str](), set[str]()
        for route in routes:
            if not isinstance(route, Route | WebSocketRoute):
                continue
            kind = getattr(route.endpoint, "admission_class", None)
            if isinstance(route, WebSocketRoute):
                if kind in (None, AdmissionClass.PUBLIC, AdmissionClass.WORK):
                    raise TypeError(
                        f"the WebSocket {route.path} declares {kind}, and needs KEY, LIVE or RESERVES_ITSELF"
                    )
                self._sockets.append((route.path_regex, kind))
                self.socket_paths.add(route.path)
            elif kind in (AdmissionClass.LIVE, AdmissionClass.RESERVES_ITSELF):
                raise TypeError(f"{route.path} declares {kind}, which is for WebSockets")
            elif kind is AdmissionClass.PUBLIC:  # whatever the method: a wrong one is refused without a key too
                self._http.append((route.path_regex, None, kind))
                self.public_paths.add(route.path)
            elif kind is not None:
                self._http.append((route.path_regex, route.methods, kind))
        public = [pattern for pattern, _, kind in self._http if kind is AdmissionClass.PUBLIC]
        for route in routes:
            if (
                isinstance(route, Route)
                and getattr(route.endpoint, "admission_class", None) is not AdmissionClass.PUBLIC
                and any(pattern.match(route.path) for pattern in public)
            ):
                raise TypeError(f"{route.path} is public, and another route at that path is not")

    def http(self, method: str, path: str) -> AdmissionClass:
        return next(
            (
                kind
                for pattern, methods, kind in self._http
                if (methods is None or method in methods) and pattern.match(path)
            ),
            AdmissionClass.KEY,
        )

    def socket(self, path: str) -> AdmissionClass:
        """Raises NoSuchRoute where no WebSocket is served."""
        for pattern, kind in self._sockets:
            if pattern.match(path):
                return kind
        raise NoSuchRoute(
            f"no WebSocket is served at {path[:100]!r}", f"WebSockets: {', '.join(sorted(self.socket_paths))}"
        )


ANONYMOUS = ApiClient("anonymous")
"""Client of all requests where no keys are configured; together they have the limits of one key."""
KEY_SCHEME_SUBPROTOCOL = "token"
"""Scheme of Deepgram's clients; a WebSocket may offer it as a subprotocol, followed by the key."""
CALLER_HEADER, CALLER_FIELD = "x-caller-id", "caller_id"
MAX_CALLER_CHARACTERS = 256
DRAIN_RETRY_MS = 5_000
MIN_RETRY_MS, MAX_RETRY_MS = 200, 30_000
SESSION_RETRY_MS = 5_000
"""Retry time where no live session is free: when the next one ends is not known."""


class ApiKeys:
    """API keys. Hashes are compared, and always all of them, so that timing reveals nothing of a key."""

    def __init__(self, api_keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        self.required = bool(api_keys)
        self._known = [(_digest(key), ApiClient(f"key-{n}", owner=_owner(key))) for n, key in enumerate(api_keys, 1)]
        self._known += [
            (_digest(key), ApiClient(f"admin-{n}", admin=True, owner=_owner(key)))
            for n, key in enumerate(admin_keys, 1)
        ]

    @property
    def clients(self) -> list[ApiClient]:
        """Clients of all keys, in their order."""
        return [client for _, client in self._known]

    def authenticate(self, authorization: str) -> ApiClient:
        """Client of an `Authorization` header, `Bearer KEY` or, as Deepgram's clients send it, `Token KEY`. Raises
        InvalidKey."""
        scheme, _, key = authorization.partition(" ")
        key = key.strip() if scheme.lower() in ("bearer", KEY_SCHEME_SUBPROTOCOL) else ""
        digest, found = _digest(key), None
        for known, client in self._known:
            if hmac.compare_digest(known, digest):
                found = client
        if found is None and self.required:
            raise InvalidKey(
                "the key sent is not one of this server's" if key else "no key came",
                "a key of this server, in the header `Authorization: Bearer KEY`",
                "ask whoever runs it for one",
            )
        return found or ANONYMOUS


def _owner(key: str) -> str:
    """Hash of a key that is stored: another than the one that requests are compared with."""
    return hashlib.sha256(b"owner\0" + key.encode()).hexdigest()[:32]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class TokenBucket:
    """Token bucket: `per_minute` tokens at once, and as many again over the minute that follows."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._tokens, self._at_s = float(per_minute), clock()

    def acquire(self) -> float:
        """Takes one token and returns 0; without one, returns the seconds until there is one."""
        self._refill()
        if self._tokens < 1:
            return (1 - self._tokens) * 60 / self._per_minute
        self._tokens -= 1
        return 0.0

    def taken(self) -> int:
        """Tokens that were taken and have not come again."""
        self._refill()
        return math.ceil(self._per_minute - self._tokens)

    def _refill(self) -> None:
        now_s = self._clock()
        self._tokens = min(self._per_minute, self._tokens + (now_s - self._at_s) * self._per_minute / 60)
        self._at_s = now_s


class AdmissionController:
    """Admits requests and counts those in progress. Belongs to the event loop's thread."""

    def __init__(self, config: ServeConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.keys = ApiKeys(config.api_keys, config.admin_keys)
        self.draining = False
        self._config, self._clock = config, clock
        self._buckets: dict[ApiClient, TokenBucket] = {}
        self._in_use_by_client: Counter[ApiClient] = Counter()
        self._in_flight_requests = self._live_sessions = self._active_work = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._mean_s = 1.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._drain_callbacks: set[Callable[[], None]] = set()
        self._cancelled = False

    @property
    def in_flight_requests(self) -> int:
        """WebSockets in progress, and requests except those to public routes."""
        return self._in_flight_requests

    @property
    def live_sessions(self) -> int:
        """Reserved live sessions."""
        return self._live_sessions

    @property
    def active_work(self) -> int:
        """Work in progress: of requests, and of WebSockets that reserve it."""
        return self._active_work

    def in_use(self, client: ApiClient) -> int:
        """Requests and live sessions of a client in work."""
        return self._in_use_by_client[client]

    def recent_requests(self, client: ApiClient) -> int:
        """Requests of a client that its rate still remembers; 0 where rates are not limited."""
        bucket = self._buckets.get(client)
        return 0 if bucket is None else bucket.taken()

    def drain(self) -> None:
        """Admits no more requests, and calls the callbacks of `on_drain`."""
        self.draining = True
        for callback in list(self._drain_callbacks):
            callback()

    async def wait_idle(self) -> None:
        """Waits until no request is in progress."""
        await self._empty.wait()

    def cancel_all(self) -> None:
        """Cancels all work in progress, which raises Draining. No more requests are admitted."""
        self.draining = self._cancelled = True
        for task in self._tasks:
            task.cancel()

    @contextmanager
    def cancellable(self) -> Iterator[None]:
        """Context manager around the work of the current task. Raises Draining on `cancel_all`."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            task.uncancel()
            raise Draining("the server is going down", "it waits no longer for requests", DRAIN_RETRY_MS) from None
        finally:
            self._tasks.discard(task)

    @contextmanager
    def on_drain(self, callback: Callable[[], None]) -> Iterator[None]:
        """Context manager around work that ends when notified: `drain` calls `callback`, at once if draining."""
        if self.draining:
            callback()
        self._drain_callbacks.add(callback)
        try:
            yield
        finally:
            self._drain_callbacks.discard(callback)

    @contextmanager
    def admit(self, client: ApiClient, *, work: bool = False, live: bool = False) -> Iterator[None]:
        """Admits one request or WebSocket. Raises Draining and, for work and live, RateLimited and AtCapacity."""
        if self.draining:
            raise Draining("the server is going down", "it takes no new requests", DRAIN_RETRY_MS)
        if work:
            self._check_work_capacity()
            self._check_client_share(client)
            self._check_rate(client)
        with self.reserve_session(client) if live else contextlib.nullcontext():
            self._in_use_by_client[client] += work
            self._in_flight_requests += 1
            self._empty.clear()
            try:
                with self._count_work() if work else contextlib.nullcontext():
                    yield
            finally:
                self._in_use_by_client[client] -= work
                self._in_flight_requests -= 1
                if not self._in_flight_requests:
                    self._empty.set()

    @contextmanager
    def reserve_session(self, client: ApiClient) -> Iterator[None]:
        """Context manager around a live session. Raises AtCapacity, RateLimited."""
        self._check_session_capacity()
        self._check_client_share(client)
        self._check_rate(client)
        self._in_use_by_client[client] += 1
        self._live_sessions += 1
        try:
            yield
        finally:
            self._in_use_by_client[client] -= 1
            self._live_sessions -= 1

    @contextmanager
    def reserve_work(self) -> Iterator[None]:
        """Context manager around work of an admitted client. Raises AtCapacity."""
        self._check_work_capacity()
        with self._count_work():
            yield

    @contextmanager
    def _count_work(self) -> Iterator[None]:
        self._active_work += 1
        began_s = self._clock()
        try:
            yield
        finally:
            self._mean_s += (self._clock() - began_s - self._mean_s) / 16
            self._active_work -= 1

    def _check_work_capacity(self) -> None:
        places = self._config.max_concurrent
        if self.active_work >= places:
            raise AtCapacity(
                f"{self.active_work} requests are in work", f"up to {places} at once", self._retry_after_ms(places)
            )

    def _check_session_capacity(self) -> None:
        places = self._config.max_live_sessions
        if self.live_sessions >= places:
            raise AtCapacity(
                f"{self.live_sessions} live sessions are open", f"up to {places} at once", SESSION_RETRY_MS
            )

    def _check_client_share(self, client: ApiClient) -> None:
        allowed, count = self._config.concurrent_per_key, self._in_use_by_client[client]
        if allowed is not None and count >= allowed:
            raise AtCapacity(
                f"{count} requests and live sessions with this key are in work",
                f"up to {allowed} at once with one key",
                self._retry_after_ms(allowed),
            )

    def _check_rate(self, client: ApiClient) -> None:
        per_minute = self._config.requests_per_minute_per_key
        if per_minute is None:
            return
        bucket = self._buckets.setdefault(client, TokenBucket(per_minute, self._clock))
        if wait_s := bucket.acquire():
            raise RateLimited(
                "too many requests came with this key", f"{per_minute} a minute", max(1, round(1_000 * wait_s))
            )

    def _retry_after_ms(self, places: int) -> int:
        """Approximate time until one of `places` is free."""
        return round(min(MAX_RETRY_MS, max(MIN_RETRY_MS, 1_000 * self._mean_s / places)))


class AdmissionMiddleware:
    """ASGI middleware: authenticates and admits requests and WebSockets, or raises as AdmissionController does."""

    def __init__(
        self, app: ASGIApp, gate: AdmissionController, table: AdmissionTable, origins: Sequence[str] = ()
    ) -> None:
        """`origins`: other origins whose pages may call this server; `*` allows all."""
        self.app, self.admission, self.table, self.origins = app, gate, table, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send)
            return
        kind = self.table.http(scope["method"], scope["path"]) if scope["type"] == "http" else None
        if kind in (None, AdmissionClass.PUBLIC):
            await self.app(scope, receive, send)
            return
        context, headers = request_context(scope), Headers(scope=scope)
        context.client = self.admission.keys.authenticate(headers.get("authorization", ""))
        context.caller = caller_identity(scope, headers, context.client)
        if scope["method"] == "POST":
            self._check_origin(headers)
        work = kind is AdmissionClass.WORK
        with self.admission.admit(context.client, work=work), self.admission.cancellable():
            await self.app(scope, receive, send)

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, headers = request_context(scope), Headers(scope=scope)
        key = headers.get("authorization", "")
        if not key and (keys := parse_qs(scope["query_string"].decode("latin-1")).get("api_key")):
            key = f"Bearer {keys[0]}"  # a browser's WebSocket has no such header
        subprotocols = list(scope.get("subprotocols", ()))
        if not key and len(subprotocols) == 2 and subprotocols[0].lower() in ("bearer", KEY_SCHEME_SUBPROTOCOL):
            key = f"Bearer {subprotocols[1]}"  # a page with Deepgram's client
        for offered in () if key else subprotocols:
            if offered.startswith(KEY_SUBPROTOCOL):
                key = f"Bearer {offered.removeprefix(KEY_SUBPROTOCOL)}"
        context.client = self.admission.keys.authenticate(key)
        context.caller = caller_identity(scope, headers, context.client)
        self._check_origin(headers)
        live = self.table.socket(scope["path"]) is AdmissionClass.LIVE
        with self.admission.admit(context.client, live=live), self.admission.cancellable():
            await self.app(scope, receive, send)

    def _check_origin(self, headers: Headers) -> None:
        """Refuses pages of other origins: browsers let any page open WebSockets and post forms anywhere, and only
        hide a form's response from it. Raises NotAllowed."""
        origin = headers.get("origin")
        host = origin_host(origin)
        if origin is None or "*" in self.origins or origin in self.origins:
            return
        if host != headers.get("host"):
            raise NotAllowed(
                f"a page of {origin[:100]} called",
                f"pages of: {', '.join(('this server', *self.origins))}",
                "allow others with the setting cors_origins",
            )


def caller_identity(scope: Scope, headers: Headers, client: ApiClient) -> str:
    """Identity of a caller among those of its key: the header `x-caller-id`, the query's `caller_id` where no header
    can be sent, or else the key; without a key, the address."""
    sent = headers.get(CALLER_HEADER, "")
    if not sent and (found := parse_qs(scope["query_string"].decode("latin-1")).get(CALLER_FIELD)):
        sent = found[0]
    if sent:
        return f"{client.name}\0{sent[:MAX_CALLER_CHARACTERS]}"
    if client != ANONYMOUS:
        return client.name
    return f"{client.name}\0{(scope.get('client') or ('',))[0]}"


def origin_host(origin: str | None) -> str | None:
    """Host, with its port, of an Origin header; None where there is none, as from clients other than browsers.

    Raises NotAllowed for an origin that is no URL, such as `http://[`.
    """
    if origin is None:
        return None
    try:
        return urlsplit(origin).netloc
    except ValueError as error:
        raise NotAllowed(
            f"the Origin header {origin[:100]!r} is no URL: {error}",
            "an origin like https://example.org, or no such header",
            "send the origin that the page has",
        ) from error
