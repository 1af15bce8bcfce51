"""What the server and its engine process say to each other: msgspec structs over a pipe, PCM over the ring.

Order is all the agreement there is: the samples that messages announce lie in the ring in the order of the
messages, and nothing else does.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asr_serve import errors
from asr_serve.config import EngineConfig
from asr_serve.decoding.attention import Draft, Recognition, SearchOptions
from asr_serve.errors import AsrServeError
from asr_serve.models.card import Card
from asr_serve.types import Priority


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which model an engine process is to run, and how."""

    model: str
    device: str = "auto"
    dtype: str = "auto"
    weights: str | None = None
    threads: int | None = None
    """CPU threads that compute; None: a thread for every core."""
    config: EngineConfig = EngineConfig()


# --- to the engine ------------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, tag=True):
    """An utterance; `length` samples of float32 are in the ring, the first `samples` of them spoken."""

    id: int
    length: int
    samples: int
    options: SearchOptions
    priority: Priority
    draft: Draft
    within_ms: int | None
    submitted_ns: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    id: int


class OpenSession(msgspec.Struct, frozen=True, tag=True):
    """Voice activity for a caller. `state`: where it stood in an engine that is gone."""

    session: int
    live: bool
    state: bytes | None


class Put(msgspec.Struct, frozen=True, tag=True):
    """Windows of a session; `length` samples are in the ring. `piece` counts within the session."""

    session: int
    piece: int
    length: int


class CloseSession(msgspec.Struct, frozen=True, tag=True):
    session: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Answered by a Report of that number, without troubling the loop."""

    number: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered by a Pong, by the loop itself, between two steps."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    pass


# --- to the server ------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded. `cards`: every model this installation knows; only the engine can read them."""

    card: Card
    cards: tuple[Card, ...]
    folder: str
    """Where the weights lie, and the tokeniser beside them."""
    device: dict[str, Any]
    load_s: float


class Started(msgspec.Struct, frozen=True, tag=True):
    """These utterances are worked on."""

    ids: tuple[int, ...]


class Pong(msgspec.Struct, frozen=True, tag=True):
    pass


class Done(msgspec.Struct, frozen=True, tag=True):
    id: int
    recognition: Recognition


class Heard(msgspec.Struct, frozen=True, tag=True):
    """Speech probabilities, float32, one per window, and the session's state after them."""

    session: int
    piece: int
    probabilities: bytes
    state: bytes


class Failure(msgspec.Struct, frozen=True):
    """An error of ours on its way through the wire."""

    kind: str
    came: str
    allowed: str
    todo: str
    retry_after_ms: int = 0

    @classmethod
    def of(cls, error: AsrServeError) -> Failure:
        retry_ms = getattr(error, "retry_after_ms", 0)
        return cls(type(error).__name__, error.came, error.allowed, error.todo, retry_ms)

    def error(self) -> AsrServeError:
        kind: type[AsrServeError] = getattr(errors, self.kind)
        if issubclass(kind, errors.AtCapacity):
            return kind(self.came, self.allowed, self.retry_after_ms)
        return kind(self.came, self.allowed, self.todo)


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Request `id` failed; or piece `piece` of session `id`."""

    id: int
    failure: Failure
    piece: int | None = None


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The model could not be loaded; the process ends."""

    failure: Failure


class Report(msgspec.Struct, frozen=True, tag=True):
    """What the engine has done so far, and its metrics as Prometheus text."""

    number: int
    describe: dict[str, Any]
    metrics: bytes


class Log(msgspec.Struct, frozen=True, tag=True):
    """A line of the engine's log, for the server's handlers."""

    name: str
    level: int
    text: str


ToEngine = Submit | Cancel | OpenSession | Put | CloseSession | Ask | Ping | Stop
ToServer = Ready | Broken | Started | Pong | Done | Heard | Failed | Report | Log

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_server = msgspec.msgpack.Decoder(ToServer).decode
decode_spec = msgspec.msgpack.Decoder(EngineSpec).decode
