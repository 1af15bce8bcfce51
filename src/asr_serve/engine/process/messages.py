"""What the server and its engine process say to each other: msgspec structs over a pipe, PCM over the ring.

Order is all the agreement there is: the samples that messages announce lie in the ring in the order of the
messages, and nothing else does. A parcel (transfer/sealed_buffer) follows its message in the pipe.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asr_serve import errors
from asr_serve.config import EngineConfig
from asr_serve.decoding.seq2seq import DraftTokens, Recognition, SearchOptions
from asr_serve.diarization.local_speakers import LocalSpeakers
from asr_serve.engine.request import HypothesisRequest
from asr_serve.errors import AsrServeError, OptionError
from asr_serve.models.registry import AnyCard, TurnCard
from asr_serve.transfer.sealed_buffer import SealedBufferLabel
from asr_serve.types import Priority, SearchResult, Sentence, SentenceAudio


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which model an engine process is to run, and how."""

    model: str
    device: str = "auto"
    dtype: str = "auto"
    weights: str | None = None
    turn_model: str = "auto"
    threads: int | None = None
    """CPU threads that compute; None: a thread for every core."""
    listen: tuple[str, int] = ("127.0.0.1", 0)
    """Where an engine that encodes for others listens for them."""
    peer_keys: tuple[str, ...] = ()
    config: EngineConfig = EngineConfig()


# --- to the engine ------------------------------------------------------------------------------------


class SubmitUtterance(msgspec.Struct, frozen=True, tag=True):
    """An utterance; `length` samples of float32 are in the ring, the first `samples` of them spoken."""

    id: int
    length: int
    samples: int
    options: SearchOptions
    priority: Priority
    draft: DraftTokens
    within_ms: int | None
    submitted_ns: int


class SubmitSentence(msgspec.Struct, frozen=True, tag=True):
    """A sentence. Answered by Sounded, a piece at a time. `skip`: samples at its start that were heard."""

    id: int
    sentence: Sentence
    priority: Priority
    within_ms: int | None
    skip_samples: int
    submitted_ns: int


class CancelRequest(msgspec.Struct, frozen=True, tag=True):
    id: int


class OpenVadSession(msgspec.Struct, frozen=True, tag=True):
    """Voice activity for a caller. `state`: where it stood in an engine that is gone."""

    session: int
    live: bool
    state: bytes | None


class OpenStream(msgspec.Struct, frozen=True, tag=True):
    """Through a model that carries its state. `samples`: the most that will come. `saved`: where it stood in
    another process, in a parcel that follows this message; answered by an Opened. `words`: pieces may be timed.
    `bias`: hot words."""

    session: int
    live: bool
    samples: int | None
    saved: SealedBufferLabel | None = None
    words: bool = False
    bias: str = ""


class ExportStream(msgspec.Struct, frozen=True, tag=True):
    """A stream all of whose pieces are answered leaves this process. Answered by an Exported."""

    session: int


class AppendVadAudio(msgspec.Struct, frozen=True, tag=True):
    """Windows of a session; `length` samples are in the ring. `piece` counts within the session."""

    session: int
    chunk: int
    length: int


class AppendStreamAudio(msgspec.Struct, frozen=True, tag=True):
    """The same of a stream. `last`: it ends with these. `wanted`: a hypothesis of it. `timed`: the answer tells
    when tokens were said."""

    session: int
    chunk: int
    length: int
    last: bool
    wanted: HypothesisRequest | None
    timed: bool = False


class CloseSession(msgspec.Struct, frozen=True, tag=True):
    """One of either kind."""

    session: int


class TurnQuery(msgspec.Struct, frozen=True, tag=True):
    """Has the speaker finished? `length` samples are in the ring. Answered by a Turn or an Unanswered."""

    number: int
    length: int


class SpeakersQuery(msgspec.Struct, frozen=True, tag=True):
    """Who speaks? `length` samples are in the ring. Answered by a VoicesHeard or an Unanswered."""

    number: int
    length: int
    budget_samples: int
    live: bool


class ReportQuery(msgspec.Struct, frozen=True, tag=True):
    """Answered by a Report of that number, without troubling the loop."""

    number: int


class EnginePing(msgspec.Struct, frozen=True, tag=True):
    """Answered by a Pong, by the loop itself, between two steps."""


class StopEngine(msgspec.Struct, frozen=True, tag=True):
    pass


# --- to the server ------------------------------------------------------------------------------------


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded. `cards`: every model this installation knows; only the engine can read them."""

    card: AnyCard
    turn_card: TurnCard | None
    cards: tuple[AnyCard, ...]
    folder: str
    """Where the weights lie, and the tokeniser beside them."""
    fingerprint: int
    """Of what lies there."""
    device: dict[str, Any]
    load_s: float
    speakers: bool = False
    """The models that hear who speaks are on this machine."""


class RequestsStarted(msgspec.Struct, frozen=True, tag=True):
    """These utterances or sentences are worked on."""

    ids: tuple[int, ...]


class EnginePong(msgspec.Struct, frozen=True, tag=True):
    pass


class UtteranceDone(msgspec.Struct, frozen=True, tag=True):
    id: int
    recognition: Recognition


class SentenceSound(msgspec.Struct, frozen=True, tag=True):
    """A piece of a sentence; it is answered with the last one."""

    id: int
    sound: SentenceAudio


class VadResult(msgspec.Struct, frozen=True, tag=True):
    """Speech probabilities, float32, one per window, and the session's state after them."""

    session: int
    chunk: int
    probabilities: bytes
    state: bytes


class StreamOutput(msgspec.Struct, frozen=True, tag=True):
    """What a stream says, with that piece of it; or the hypothesis that was wanted."""

    session: int
    chunk: int
    found: SearchResult | Recognition


class StreamExported(msgspec.Struct, frozen=True, tag=True):
    """A stream has left. `saved`: where it stood, in a parcel that follows this message; None: that can't be told,
    and it is to be heard again from its start."""

    session: int
    saved: SealedBufferLabel | None


class StreamOpened(msgspec.Struct, frozen=True, tag=True):
    """A stream goes on from where it stood in another process; or cannot, `failure`."""

    session: int
    failure: ErrorMessage | None = None


class ErrorMessage(msgspec.Struct, frozen=True):
    """An error of ours on its way through the wire."""

    kind: str
    came: str
    allowed: str
    todo: str
    retry_after_ms: int = 0
    param: str | None = None
    """Of an OptionError."""

    @classmethod
    def from_error(cls, error: AsrServeError) -> ErrorMessage:
        retry_ms = getattr(error, "retry_after_ms", 0)
        param = error.param if isinstance(error, OptionError) else None
        return cls(type(error).__name__, error.came, error.allowed, error.todo, retry_ms, param)

    def to_error(self) -> AsrServeError:
        kind: type[AsrServeError] = getattr(errors, self.kind)
        if issubclass(kind, errors.AtCapacity):
            return kind(self.came, self.allowed, self.retry_after_ms)
        if issubclass(kind, OptionError):
            return kind(self.came, self.allowed, self.todo, param=self.param)
        return kind(self.came, self.allowed, self.todo)


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """Request `id` failed; or piece `piece` of session `id`."""

    id: int
    failure: ErrorMessage
    chunk: int | None = None


class TurnAnswer(msgspec.Struct, frozen=True, tag=True):
    """How likely the speaker has finished."""

    number: int
    probability: float


class SpeakersAnswer(msgspec.Struct, frozen=True, tag=True):
    number: int
    voices: LocalSpeakers


class QueryFailed(msgspec.Struct, frozen=True, tag=True):
    """A question that could not be answered."""

    number: int
    failure: ErrorMessage


class EngineLoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The model could not be loaded; the process ends."""

    failure: ErrorMessage


class EngineReport(msgspec.Struct, frozen=True, tag=True):
    """What the engine has done so far, and its metrics as Prometheus text."""

    number: int
    describe: dict[str, Any]
    metrics: bytes


class EngineLog(msgspec.Struct, frozen=True, tag=True):
    """A line of the engine's log, for the server's handlers."""

    name: str
    level: int
    text: str


ToEngine = (
    SubmitUtterance
    | SubmitSentence
    | CancelRequest
    | OpenVadSession
    | OpenStream
    | ExportStream
    | AppendVadAudio
    | AppendStreamAudio
    | CloseSession
    | TurnQuery
    | SpeakersQuery
    | ReportQuery
    | EnginePing
    | StopEngine
)
ToServer = (
    EngineReady
    | EngineLoadFailed
    | RequestsStarted
    | EnginePong
    | UtteranceDone
    | SentenceSound
    | VadResult
    | StreamOutput
    | StreamExported
    | StreamOpened
    | RequestFailed
    | TurnAnswer
    | SpeakersAnswer
    | QueryFailed
    | EngineReport
    | EngineLog
)

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_server = msgspec.msgpack.Decoder(ToServer).decode
decode_spec = msgspec.msgpack.Decoder(EngineSpec).decode
