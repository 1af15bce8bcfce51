"""Messages between the server and its engine process: msgspec structs over a pipe, PCM over the ring.

Samples are matched to messages by order alone: the ring contains the samples that messages announce, in the order
of the messages, and nothing else. A sealed buffer (transfer/sealed_buffer) follows its message in the pipe. Between
machines, the samples follow their message too (engine/process/connection).
"""

from __future__ import annotations

from typing import Any

import msgspec

from asr_serve import errors
from asr_serve.config import EngineConfig
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import DraftTokens, SearchOptions
from asr_serve.diarization.local_speakers import LocalSpeakers
from asr_serve.diarization.overlapped_speech import SpeakerRanges
from asr_serve.engine.partial_rate import UNMEASURED_NEW_CALLERS
from asr_serve.engine.request import HypothesisRequest
from asr_serve.errors import AsrServeError, OptionError
from asr_serve.models.registry import AnyCard, TurnCard
from asr_serve.transfer.sealed_buffer import SealedBufferLabel
from asr_serve.types import LanguageModelChoice, Peer, Priority, SearchResult, Sentence, SentenceAudio


class ListenSpec(msgspec.Struct, frozen=True):
    """Addresses to listen at for servers beside the one that started the process."""

    folder: str
    """Folder for its Unix socket, which only this user may read."""
    host: str | None
    """Address of this machine for servers on others; None: no other machine connects."""
    key: bytes
    """Key that a server must know."""
    max_sessions: int | None = None
    """Voice-activity sessions that they may have together, beside those of the engine's settings; None: they share
    those."""

    def __repr__(self) -> str:
        return f"ListenSpec(folder={self.folder!r}, host={self.host!r})"


class EngineAddress(msgspec.Struct, frozen=True, tag=True):
    """Addresses of an engine process."""

    unix_path: str
    """Path of its Unix socket, for servers on the same machine."""
    tcp: tuple[str, int] | None
    """Host and port, for servers on other machines."""


class EncoderAddress(msgspec.Struct, frozen=True, tag=True):
    """Address of an engine that encodes for others."""

    host: str
    port: int

    @property
    def peer(self) -> str:
        """The address as `EngineConfig.peers` has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Model and settings of an engine process."""

    model: str
    device: str = "auto"
    dtype: str = "auto"
    weights: str | None = None
    turn_model: str = "auto"
    threads: int | None = None
    """CPU threads for computing; None: one for each core."""
    listen: tuple[str, int] = ("127.0.0.1", 0)
    """Address on which an engine that encodes for others listens."""
    peer_keys: tuple[str, ...] = ()
    servers: ListenSpec | None = None
    """Addresses for other servers; None: it listens for none."""
    digest_key: bytes = b""
    """Key of digests of audio that replicas have in common; empty: one of its own."""
    config: EngineConfig = EngineConfig()


# --- to the engine ------------------------------------------------------------------------------------


class SubmitUtterance(msgspec.Struct, frozen=True, tag=True):
    """Submits an utterance; `length` samples of float32 are in the ring, the first `samples` of them without
    padding."""

    id: int
    length: int
    samples: int
    options: SearchOptions
    priority: Priority
    draft: DraftTokens
    within_ms: int | None
    submitted_ns: int


class SubmitSentence(msgspec.Struct, frozen=True, tag=True):
    """Submits a sentence. Answered by SentenceSound messages. `skip_samples`: samples at its start that were
    delivered before."""

    id: int
    sentence: Sentence
    priority: Priority
    slack_ms: int | None
    skip_samples: int
    submitted_ns: int


class CancelRequest(msgspec.Struct, frozen=True, tag=True):
    id: int


class ExpediteRequest(msgspec.Struct, frozen=True, tag=True):
    """Sets the time since its arrival within which an utterance should be encoded, unless it has ended."""

    id: int
    within_ms: int


class OpenVadSession(msgspec.Struct, frozen=True, tag=True):
    """Opens a voice-activity session. `state`: its state from an earlier process."""

    session: int
    live: bool
    state: bytes | None


class OpenStream(msgspec.Struct, frozen=True, tag=True):
    """Opens a stream through a model that carries its state. `samples`: the most that will come. `saved`: snapshot
    from another process, in a sealed buffer that follows this message; answered by StreamOpened. `words`: chunks
    may be timed. `bias`: hotwords. `language_model`: that of its search."""

    session: int
    live: bool
    samples: int | None
    saved: SealedBufferLabel | None = None
    words: bool = False
    bias: str = ""
    language_model: LanguageModelChoice | None = None


class ExportStream(msgspec.Struct, frozen=True, tag=True):
    """Exports a stream, all of whose chunks are answered, from this process. Answered by StreamExported."""

    session: int


class AppendVadAudio(msgspec.Struct, frozen=True, tag=True):
    """Appends windows to a session; `length` samples are in the ring. `chunk` counts within the session. Answered
    by VadResult or RequestFailed."""

    session: int
    chunk: int
    length: int


class AppendStreamAudio(msgspec.Struct, frozen=True, tag=True):
    """Appends audio to a stream; as AppendVadAudio. `last`: the stream ends with it. `wanted`: requests a
    hypothesis. `timed`: the result includes token times. Answered by StreamOutput or RequestFailed."""

    session: int
    chunk: int
    length: int
    last: bool
    wanted: HypothesisRequest | None
    timed: bool = False


class CloseSession(msgspec.Struct, frozen=True, tag=True):
    """Closes a voice-activity session or a stream."""

    session: int


class TurnQuery(msgspec.Struct, frozen=True, tag=True):
    """Query whether the speaker has finished; `length` samples are in the ring. Answered by TurnAnswer or
    QueryFailed."""

    number: int
    length: int


class SpeakersQuery(msgspec.Struct, frozen=True, tag=True):
    """Query who speaks; `length` samples are in the ring. Answered by SpeakersAnswer or QueryFailed."""

    number: int
    length: int
    budget_samples: int
    live: bool


class SeparationQuery(msgspec.Struct, frozen=True, tag=True):
    """Query what each of two speakers says; `length` samples are in the ring. Answered by SeparatedSpeech or
    QueryFailed."""

    number: int
    length: int
    speaker_ranges: SpeakerRanges


class CancelSeparation(msgspec.Struct, frozen=True, tag=True):
    """Withdraws a SeparationQuery that has not begun. It is answered by QueryFailed, or as if nothing had come."""

    number: int


class ReportQuery(msgspec.Struct, frozen=True, tag=True):
    """Requests an EngineReport of that number, answered without the loop."""

    number: int


class SetPeers(msgspec.Struct, frozen=True, tag=True):
    """Sets the engines that encode for this one, which has the role decode. Answered by PeersSet."""

    number: int
    addresses: tuple[Peer, ...]


class EnginePing(msgspec.Struct, frozen=True, tag=True):
    """Requests an EnginePong, answered by the loop between two steps; for a server that did not start the engine, by
    the thread that reads its messages. `silent_s`: time without a message after which this server counts as dead.
    `backlog_samples`: audio that this server has for this engine and that is not answered. `queue_fill`: used share,
    0..1, of this server's queue for all engines of the model. `sessions`: its open sessions and streams here."""

    silent_s: float | None = None
    backlog_samples: int = 0
    queue_fill: float = 0.0
    sessions: int = 0


class StopEngine(msgspec.Struct, frozen=True, tag=True):
    pass


# --- to the server ------------------------------------------------------------------------------------


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """Reports that the model is loaded. `cards`: every model this installation knows; only the engine can read
    them."""

    card: AnyCard
    turn_card: TurnCard | None
    cards: tuple[AnyCard, ...]
    tokenizer_folder: str
    """Folder of the tokenizer of what a recogniser returns; of a voice, that of its weights."""
    fingerprint: int
    """Checksum of the model's files."""
    tokenizer_checksum: int
    """Checksum of the tokenizer's file; 0: the model has none."""
    device: dict[str, Any]
    load_s: float
    speakers: bool = False
    """Whether the diarization models are on this machine."""
    address: EngineAddress | EncoderAddress | None = None
    """Address for other servers, or for engines that this one encodes for; None: it listens for none."""
    free_sessions: int = 0
    """Voice-activity sessions for which there is room, for a server that did not start the engine."""
    servers: int = 1
    """Connected servers that did not start the engine, for one of them; it is counted."""
    multilingual: str = ""
    """Name of the multilingual Whisper whose weights are on this machine; empty: there is none."""
    quantization: str = "none"
    """Quantization that the model computes with, see devices/interface.Device.quantize."""
    new_live_callers: int = UNMEASURED_NEW_CALLERS
    """Live callers who may be new at the same time, as configured or measured."""


class RequestsStarted(msgspec.Struct, frozen=True, tag=True):
    """Reports utterances or sentences whose processing began."""

    ids: tuple[int, ...]


class EnginePong(msgspec.Struct, frozen=True, tag=True):
    """Answer to EnginePing. `free_sessions`: voice-activity sessions for which there is room. `servers`: servers that
    did not start the engine and are connected to it. `others_samples`, `others_sessions`: audio that is not answered
    and open sessions of those servers but for the one that asks, as they reported them last."""

    free_sessions: int = 0
    servers: int = 1
    others_samples: int = 0
    others_sessions: int = 0


class SessionRefused(msgspec.Struct, frozen=True, tag=True):
    """Reports that there is no room for a voice-activity session: several servers have more than their engine."""

    session: int
    failure: ErrorMessage


class UtteranceDone(msgspec.Struct, frozen=True, tag=True):
    id: int
    recognition: Recognition


class SentenceSound(msgspec.Struct, frozen=True, tag=True):
    """Part of a sentence's audio; the last part completes the request."""

    id: int
    sound: SentenceAudio


class VadResult(msgspec.Struct, frozen=True, tag=True):
    """Speech probabilities of a chunk, float32, one per window, and the session's state after them."""

    session: int
    chunk: int
    probabilities: bytes
    state: bytes


class StreamOutput(msgspec.Struct, frozen=True, tag=True):
    """Result of a stream's chunk: its new tokens, or the requested hypothesis."""

    session: int
    chunk: int
    found: SearchResult | Recognition


class StreamExported(msgspec.Struct, frozen=True, tag=True):
    """Answer to ExportStream. `saved`: the snapshot, in a sealed buffer that follows this message; None: there is
    none, and the stream must be replayed from its start."""

    session: int
    saved: SealedBufferLabel | None


class StreamOpened(msgspec.Struct, frozen=True, tag=True):
    """Answer to an OpenStream with a snapshot. `failure`: the stream cannot continue from it."""

    session: int
    failure: ErrorMessage | None = None


class ErrorMessage(msgspec.Struct, frozen=True):
    """Serialized AsrServeError."""

    kind: str
    came: str
    allowed: str
    todo: str
    retry_after_ms: int = 0
    param: str | None = None
    """Parameter of an OptionError."""

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
    """Reports that request `id`, or chunk `chunk` of session `id`, failed."""

    id: int
    failure: ErrorMessage
    chunk: int | None = None


class TurnAnswer(msgspec.Struct, frozen=True, tag=True):
    """Probability that the speaker has finished."""

    number: int
    probability: float


class SpeakersAnswer(msgspec.Struct, frozen=True, tag=True):
    number: int
    voices: LocalSpeakers


class SeparatedSpeech(msgspec.Struct, frozen=True, tag=True):
    """Audio of each of two speakers, (2, samples) float32."""

    number: int
    tracks: bytes


class QueryFailed(msgspec.Struct, frozen=True, tag=True):
    """Reports that a query failed."""

    number: int
    failure: ErrorMessage


class PeersSet(msgspec.Struct, frozen=True, tag=True):
    """Answer to SetPeers, once engines that are no longer peers have nothing of this one in flight."""

    number: int


class AudioCached(msgspec.Struct, frozen=True, tag=True):
    """Reports audio whose encoder results are cached, or no longer, by its digests. For servers that connected: a new
    one is first told of all there is."""

    inserted: tuple[bytes, ...]
    evicted: tuple[bytes, ...] = ()


class EngineLoadFailed(msgspec.Struct, frozen=True, tag=True):
    """Reports that loading failed; the process ends."""

    failure: ErrorMessage


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of an engine over its last seconds: what scaling decides by. None: not measured, or there is none."""

    occupancy: float | None = None
    """Used share of the capacity of its steps, 0..1."""
    queue_s: float | None = None
    """Mean queue time of requests that somebody waits for."""
    backlog_s: float | None = None
    """Audio that its servers have for it and that is not answered. None without a server."""
    ingress_queue: float | None = None
    """Used share, 0..1, of the fullest queue among its servers. None without a server."""
    sessions: float | None = None
    """Used share, 0..1, of its places for sessions or streams."""
    accelerator: float | None = None
    """Share of time, 0..1, in which its accelerator computes."""
    collectives: float | None = None
    """Share of time, 0..1, in collectives of a decoder that is split over processes."""


class EngineReport(msgspec.Struct, frozen=True, tag=True):
    """Counters of the engine, its metrics as Prometheus text, and its load."""

    number: int
    describe: dict[str, Any]
    metrics: bytes
    load: EngineLoad = EngineLoad()


class EngineLog(msgspec.Struct, frozen=True, tag=True):
    """Line of the engine's log, for the server's handlers."""

    name: str
    level: int
    text: str


ToEngine = (
    SubmitUtterance
    | SubmitSentence
    | CancelRequest
    | ExpediteRequest
    | OpenVadSession
    | OpenStream
    | ExportStream
    | AppendVadAudio
    | AppendStreamAudio
    | CloseSession
    | TurnQuery
    | SpeakersQuery
    | SeparationQuery
    | CancelSeparation
    | ReportQuery
    | SetPeers
    | EnginePing
    | StopEngine
)
ToServer = (
    EngineReady
    | EngineLoadFailed
    | RequestsStarted
    | EnginePong
    | SessionRefused
    | UtteranceDone
    | SentenceSound
    | VadResult
    | StreamOutput
    | StreamExported
    | StreamOpened
    | RequestFailed
    | TurnAnswer
    | SpeakersAnswer
    | SeparatedSpeech
    | QueryFailed
    | EngineReport
    | PeersSet
    | AudioCached
    | EngineLog
)

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_server = msgspec.msgpack.Decoder(ToServer).decode
decode_spec = msgspec.msgpack.Decoder(EngineSpec).decode
