"""Settings: frozen, strict and printable. The only file that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asr_serve.errors import OptionError
from asr_serve.types import (
    SECRETS,
    ApiKey,
    DeviceName,
    DiskBackendName,
    DtypeName,
    Fraction,
    HandoverPayload,
    Host,
    IpAddress,
    LanguageModelBackend,
    Name,
    NamedFile,
    NonEmptyText,
    Origin,
    Peer,
    PeerKey,
    PeerTransportName,
    Port,
    PositiveFloat,
    PositiveInt,
    Priority,
    Quantize,
    RedisUrl,
    Role,
    Url,
    Window,
    coerce_fields,
    is_loopback,
    unknown_name_error,
    without_secrets,
)

PREFIX = "ASR_SERVE_"
MIN_HOST_BYTES = 1 << 20
"""Least host memory for offload to disk: entries are checked in it, this much at a time (engine/cache)."""
NON_SETTING_VARIABLES = (
    *("CACHE", "CONFIG", "NATIVE", "THREADS", "API_KEY", "SIP_PASSWORD"),
    *("DATA", "MOONSHINE_BASE", "VLLM_PYTHON"),
)
"""Variables with the prefix that are not settings of the server. The last three are for tests."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits and modes of the engine. Every number is a bound; the defaults suit a laptop CPU.

    Raises OptionError for a value of the wrong type or out of range.
    """

    max_decode_rows: PositiveInt = 64
    """Sequences in one decoding step: utterances, sessions of a streaming model, or sentences of a voice model."""
    encode_frames: PositiveInt | None = None
    """Encoder frames in one encode batch, padding included. This bounds how long a live step can be delayed.
    None: as many as keep the device busy."""
    encode_padding: Fraction = 0.15
    """Largest share of an encode batch that may be padding."""
    kv_bytes: PositiveInt = 512 << 20
    """Memory for the decoder's keys and values, self- and cross-attention together, on each rank where the decoder is
    split; for a streaming model, memory for the state of its sessions, which bounds how many run at once."""
    use_chunked_inference: bool = False
    """Whether a streaming model computes a chunk of many sessions in one step, or one session after another."""
    chunk_frames: PositiveInt | None = None
    """Encoder frames in one step of a streaming model. None: the value on its card."""
    lookahead_frames: Annotated[int, Meta(ge=0)] | None = None
    """Encoder frames of look-ahead of a streaming model, one of the numbers it was trained for: fewer mean less
    latency, more mean fewer errors. None: the first that the checkpoint lists."""
    chunk_wait_ms: Annotated[float, Meta(ge=0, le=1_000)] | None = None
    """Milliseconds that a session with a complete chunk waits for others to join its batch. None: an eighth of a
    chunk."""
    head: Literal["ctc", "rnnt", "tdt", "wfst"] | None = None
    """Output head of a streaming model that has more than one. None: the first on its card."""
    beam: Annotated[int, Meta(ge=1, le=128)] = 1
    """Beam width of a streaming model's search; 1 is greedy. For a decoding graph: length of the n-best list."""
    graph_beam: PositiveFloat | None = None
    """Beam of a search of a decoding graph: largest difference in cost, a natural log, to the best path. A wider beam
    means fewer errors and more time. None: the model's own."""
    graph_max_active: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    """Largest number of active paths in a frame of a search of a decoding graph. None: the model's own."""
    graph_min_active: Annotated[int, Meta(ge=0, le=1 << 20)] = 50
    """Number of active paths in a frame of a search of a decoding graph below which the beam does not prune, unless the
    model asks for fewer. Kaldi's number is 200; fewer take less time, and few words depend on it."""
    language_models: tuple[NamedFile, ...] = ()
    """Language models that requests may name, each with its file, like talks=talks.ngram.safetensors: n-grams of a
    recognizer's tokens, as asr-serve lm build --tokens writes them. All are loaded at start."""
    graph_epsilon_backoffs: bool = False
    """Whether a word that is likelier by way of a language model's back-off has that probability, as in Kaldi's
    decoders: for words equal to theirs. By default every n-gram keeps its own."""
    graph_lattice_beam: PositiveFloat | None = None
    """Lattice beam of a decoding graph: largest difference in cost, a natural log, between the best path and an entry
    of the n-best list. None: the model's own."""
    decoding_graph: str | None = None
    """Folder of a decoding graph for a streaming CTC model, as `asr-serve graph build` writes it: the model then
    recognizes the words of the graph's lexicon and language model. For a server, it applies to the default model. None:
    the model's own search."""
    quantize: Quantize = "auto"
    """8-bit quantization: auto, of weights and activations, where this processor computes that faster, in the layers of
    a model whose error rate stays the same, where no dtype is chosen and engines do not encode for each other; none;
    int8, of all weights, which takes about half their memory; or dynamic, of the activations too, where that is
    faster."""
    backend: LanguageModelBackend = "native"
    """Engine of a speech LLM's language model: native, this one; or vllm, vLLM in a process of its own under
    `vllm_python`, which decodes greedily or samples, and has no beams, no biasing and no other language models. For a
    server, it applies to the default model."""
    vllm_python: NonEmptyText | None = None
    """Python interpreter of an environment that has vLLM, for the back end vllm."""
    tensor_parallel_size: PositiveInt = 1
    """Processes over which the decoder of Whisper or of a speech LLM is split, each with a part of its heads and of its
    pages: on CUDA one for each device, from `device` on; on a CPU each has its part of the cores. It must divide the
    decoder's attention heads and its heads of keys and values. For a server, it applies to the default model."""
    window: Window = "checked"
    """Padding of a model's fixed-length window with silence. packed: a part of the silence is encoded for all of it;
    checked: the same, but a result that fails its checks is decoded again with the whole window first; whole: all
    of the silence is encoded."""
    prefix_bytes: Annotated[int, Meta(ge=0)] = 128 << 20
    """Memory for the cache of earlier audio: an eighth for results, an eighth for voice activity, and the rest for
    keys and values, in unused pages of `kv_bytes`. Audio that was sent before is answered sooner, so response
    times reveal to other clients that it was. 0: nothing is cached, and nothing is shared."""
    offload_after_s: PositiveFloat = 10.0
    """Seconds without audio after which a live stream gives up its slot and is offloaded until more audio comes;
    one second where other streams wait for a slot."""
    host_bytes: Annotated[int, Meta(ge=0)] = 256 << 20
    """Host memory for offloaded streams and for entries evicted from the cache. 0: no offload."""
    disk_bytes: Annotated[int, Meta(ge=0)] = 0
    """Size of a file for offloaded entries that no longer fit in `host_bytes`. It needs 1 MiB of `host_bytes`,
    through which all entries pass. 0: no file."""
    disk_path: NonEmptyText | None = None
    """Folder of the file of `disk_bytes`, on a local disk. None: the system's folder for temporary files."""
    disk_backend: DiskBackendName = "auto"
    """I/O backend of the file of `disk_bytes`: uring, direct I/O by io_uring; threads, direct I/O by a few
    threads; nixl, NIXL's POSIX backend; gds, its GPUDirect Storage; or auto, io_uring where it is available:
    within a tenth of the speed of threads, with less CPU time."""
    disk_key_file: NonEmptyText | None = None
    """File with 32 bytes in hexadecimal, the key that encrypts entries on disk. None: no encryption."""
    role: Role = "both"
    """Work of this engine: both, encoding and decoding; encode, for other engines; or decode, what peers encode."""
    peers: tuple[Peer, ...] = ()
    """Engines with the role encode, to which this engine sends its encoding."""
    peer_transport: PeerTransportName = "auto"
    """Transport of encoder results from peers: shm, shared memory on one machine; nixl; tcp; or auto, the first of
    these that both engines support."""
    peer_carries: HandoverPayload = "auto"
    """Payload of encoder results from peers: cross, the decoder's cross-attention keys and values; hidden, the
    encoder's hidden states, which are smaller and from which this engine computes those; or auto: hidden over a
    network, cross within a machine."""
    peer_timeout_s: PositiveFloat = 30.0
    """Seconds without a reply after which a peer counts as dead and its clips are encoded elsewhere; so does a
    peer that leaves a single clip unanswered for four times as long, whatever else it answers."""
    max_requests: PositiveInt = 2_048
    """Requests that may be in the engine, waiting or running; one more is refused with AtCapacity."""
    max_audio_s: PositiveFloat = 7_200.0
    """Seconds of audio that may be in the engine, summed over all requests."""
    max_speaking_rows: PositiveInt = 64
    """Sentences that a voice model may synthesize at once, fewer where their state does not fit in `kv_bytes`;
    others wait."""
    codec: Name | None = None
    """Vocoder that turns a voice model's frames into samples: a name, or a checkpoint's folder. None: the one on
    its card."""
    voices_dir: NonEmptyText | None = None
    """Folder of cloned voices. None: asr-serve/voices in the user's data folder (XDG_DATA_HOME)."""
    vad_step_windows: PositiveInt = 8_192
    """Windows of 32 ms in one voice-activity step, summed over all callers, padding included."""
    vad_windows: Annotated[int, Meta(ge=64)] = 1_024
    """Windows that one caller may submit at once; 64 are two seconds."""
    max_sessions: PositiveInt = 1_024
    """Callers with voice-activity state."""
    new_live_callers: PositiveInt | None = None
    """Live callers who may be new at the same time: callers without a result on time so far. None: a server measures
    the encoder when it loads, and takes a twelfth of the seconds of audio that it encodes in a second, 4 at least. It
    takes 32 with models that encode audio once or are language models, and with peers, and so does the library."""
    live_share: Fraction = 0.9
    """Share of the machine for live callers while other work waits."""
    interactive_share: Fraction = 0.8
    """Share of the rest for interactive work while bulk work waits."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        for name, unset in (("disk_path", None), ("disk_backend", "auto"), ("disk_key_file", None)):
            if not self.disk_bytes and getattr(self, name) != unset:
                raise OptionError(
                    f"{name}={getattr(self, name)!r} without disk_bytes, and so without a file",
                    "both, or none",
                    "set disk_bytes",
                    param=name,
                )
        if len(self.language_model_files) < len(self.language_models):
            raise OptionError(
                f"language_models={','.join(self.language_models)}", "each name once", param="language_models"
            )
        if (self.backend == "vllm") != (self.vllm_python is not None):
            raise OptionError(
                f"backend={self.backend} {'without' if self.vllm_python is None else 'with'} vllm_python",
                "both, or none: vLLM has a Python environment of its own",
                "set backend to vllm, and vllm_python to the environment's interpreter (docs/vllm.md)",
                param="backend",
            )
        if self.backend == "vllm" and self.tensor_parallel_size > 1:
            raise OptionError(
                f"backend=vllm with tensor_parallel_size={self.tensor_parallel_size}",
                "1: vLLM computes the language model in one process",
                "leave one of them out",
                param="tensor_parallel_size",
            )
        if self.tensor_parallel_size > 1 and (self.role != "both" or self.peers):
            raise OptionError(
                f"tensor_parallel_size={self.tensor_parallel_size} with role={self.role} and {len(self.peers)} peers",
                "role=both and no peers: an engine that is split over processes encodes for itself",
                param="tensor_parallel_size",
            )
        if self.disk_bytes and self.role == "encode":
            raise OptionError(
                f"disk_bytes={self.disk_bytes} with role=encode",
                "0: an engine that encodes for others has no streams to offload",
                "set it for engines with the role decode",
                param="disk_bytes",
            )
        if self.disk_bytes and self.host_bytes < MIN_HOST_BYTES:
            raise OptionError(
                f"disk_bytes={self.disk_bytes} with host_bytes={self.host_bytes}",
                f"host_bytes={MIN_HOST_BYTES} or more: entries pass through memory on their way to disk",
                "set host_bytes, or disk_bytes to 0",
                param="disk_bytes",
            )

    @property
    def language_model_files(self) -> dict[str, str]:
        """Files of `language_models` by name."""
        return {name: path for name, _, path in (each.partition("=") for each in self.language_models)}

    @property
    def shares(self) -> dict[Priority, float]:
        """Share of the machine for each priority while all of them wait."""
        rest = 1 - self.live_share
        return {
            "live": self.live_share,
            "interactive": rest * self.interactive_share,
            "bulk": rest * (1 - self.interactive_share),
        }

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """Build from a mapping. Raises OptionError for an unknown key, with the nearest known one."""
        for key in settings:
            if key not in cls.__struct_fields__:
                raise unknown_name_error("engine setting", key, cls.__struct_fields__)
        return cls(**settings)


class SessionsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Storage of the sessions of /v1/stream outside the server.

    Raises OptionError for a value of the wrong type or out of range.
    """

    redis_url: RedisUrl | None = None
    """Redis, or MemoryDB, that stores the sessions of /v1/stream, like redis://host:6379/0, or rediss:// with TLS: any
    server with the same Redis, models and keys continues a session. None: a session is in the memory of its server."""
    redis_password_file: NonEmptyText | None = None
    """File with the password of Redis, so that redis_url need not have it. None: that of redis_url, or none."""
    key_file: NonEmptyText | None = None
    """File with keys that encrypt text and audio in Redis, each 32 bytes in hexadecimal on its own line. The first
    encrypts, and all decrypt, so that keys can be replaced. None: no encryption."""
    timeout_ms: Annotated[int, Meta(ge=10, le=60_000)] = 500
    """Milliseconds without an answer after which Redis counts as away, and sessions continue in memory."""
    checkpoint_ms: Annotated[int, Meta(ge=100, le=60_000)] = 2_000
    """Milliseconds of audio after which a session's state is stored though it has reported no words: longer intervals
    cost less, and more audio is recognized again after a failure."""
    prefix: Name = "asr-serve"
    """Start of the names of all keys in Redis, for several installations that share one."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        for name in ("key_file", "redis_password_file"):
            if self.redis_url is None and (file := getattr(self, name)) is not None:
                raise OptionError(f"{name}={file!r} without redis_url", "both, or none", "set redis_url", param=name)


class WebRtcConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Calls over WebRTC.

    Raises OptionError for a value of the wrong type or out of range.
    """

    udp_port: Port | None = None
    """UDP port of all calls, opened with the first; 0 takes any free one. None: the number of the server's port."""
    addresses: tuple[IpAddress, ...] = ()
    """Addresses at which callers reach that port, like the public one where the network translates addresses. Empty:
    those of this machine that `host` listens on."""
    max_calls: Annotated[int, Meta(ge=0, le=65_535)] = 256
    """Concurrent calls, each of which is a live session too; one more is refused with a retry time. 0: no calls."""
    connect_s: Annotated[float, Meta(gt=0, le=300)] = 15.0
    """Seconds from its answer in which a call must be connected."""

    def __post_init__(self) -> None:
        coerce_fields(self)


class GovernanceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policy by which models are rolled out.

    Raises OptionError for a value of the wrong type or out of range.
    """

    policy: NonEmptyText | None = None
    """TOML file with routes: names that callers send as their model, what the models behind them must show, and how
    a candidate is rolled out. Their models are loaded at start. None: no routes."""
    audit_log: NonEmptyText | None = None
    """File to which every change of a route is appended; it holds the stages, so it must outlive the server."""
    region: NonEmptyText | None = None
    """Region of this server, like eu-central-1, for the policy's residency. None: no region."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        if (self.policy is None) != (self.audit_log is None):
            raise OptionError(
                "policy without audit_log" if self.audit_log is None else "audit_log without policy",
                "both, or none",
                "set governance.policy and governance.audit_log",
                param="policy",
            )


class BatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files and batches of /v1/files and /v1/batches, which outlive the server.

    Raises OptionError for a value of the wrong type or out of range.
    """

    enabled: bool = True
    """Whether to serve /v1/files and /v1/batches. Nothing is written before a client uploads a file there."""
    folder: NonEmptyText | None = None
    """Folder of the files and the queue of batches, on a local disk, for one server at a time. None: asr-serve/batch in
    the user's data folder (XDG_DATA_HOME)."""
    concurrent_lines: Annotated[int, Meta(ge=1, le=4_096)] = 4
    """Lines of all batches in work at once, with the priority bulk: those of callers come first. The default suits two
    cores; a GPU needs more to be busy."""
    max_bytes: PositiveInt = 32 << 30
    """Bytes of all files and answers together; an upload that does not fit is refused."""
    bytes_per_key: PositiveInt = 16 << 30
    """Bytes of the files and answers of one API key."""
    files_per_key: PositiveInt = 200_000
    """Files of one API key, those of answers included."""
    batches_per_key: PositiveInt = 100
    """Batches of one API key that have not ended; one more is refused with a retry time."""
    keep_s: PositiveFloat = 30 * 86_400.0
    """Seconds after which a file is deleted, unless it is the input of a batch that has not ended, and after which an
    ended batch is forgotten."""
    webhook: Url | None = None
    """URL to which the end of every batch is posted. None: none is."""
    webhook_key_file: NonEmptyText | None = None
    """File with the key by which those posts are signed, in the way of Standard Webhooks: whsec_BASE64. None: they
    are not signed."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        if self.webhook is None and self.webhook_key_file is not None:
            raise OptionError(
                f"webhook_key_file={self.webhook_key_file!r} without webhook",
                "both, or the webhook alone",
                "set batch.webhook",
                param="webhook_key_file",
            )


AUTO_MODEL, NO_MODEL = "auto", "none"
"""Values of `auto_model`; the first of `model` too."""


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a server. `config_sources.load_serve_config` reads them from a file, the environment and flags.

    Raises OptionError, whose `param` names the field, for a value of the wrong type or out of range.
    """

    host: Host = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every address of this machine."""
    port: Port = 8_000
    """Port to listen on; 0 takes any free one."""
    realtime_port: Port | None = None
    """Second port, for FunASR's realtime clients, which use 10095 by default. None: they use `port`."""
    wyoming_port: Port | None = None
    """Port for Wyoming, Home Assistant's protocol, which has no keys and no TLS: not beside `api_keys`. None: it is not
    served."""
    riva_port: Port | None = None
    """Port for Riva's gRPC services, 50051 by default in its clients; it needs the extra riva. None: they are not
    served."""
    funasr_language: NonEmptyText | None = None
    """Language, a code or a name, of sessions of FunASR's WebSockets that send no LANGUAGE:, where
    their model has it. None: the model's own."""
    funasr_hotwords_file: NonEmptyText | None = None
    """File with the hotwords, one per line, of sessions of FunASR's WebSockets that send no HOTWORDS:, where
    their model takes them."""
    tls_cert: NonEmptyText | None = None
    """File with the certificate and its chain in PEM: all ports then use TLS. None: none does."""
    tls_key: NonEmptyText | None = None
    """File with the certificate's key, in PEM, without a password."""
    model: Name = "moonshine-tiny-en"
    """Model that answers when a request names none; loaded at start. auto: the multilingual Whisper whose weights are
    on this machine."""
    more_models: tuple[Name, ...] = ()
    """Further models loaded at start."""
    pipeline: NonEmptyText | None = None
    """Pipeline of stages: the name of a shipped one, or a TOML file. Files of requests that name no model pass through
    it. Its models are loaded at start, and the first is the default of `model`."""
    aliases: dict[Name, Name] = {}
    """Names that clients may send for a model, like whisper-1 = moonshine-tiny-en."""
    voice: Name = "auto"
    """Voice model used when a request names none; loaded at start beside the others, in a process of its own.
    auto: the first of fastpitch-en and hibari that is on this machine; none: no speech synthesis."""
    voice_aliases: dict[Name, Name] = {}
    """Names that clients may send for a voice, like coral = bella. OpenAI's names are built in."""
    strict_fields: bool = False
    """Refuse requests with fields that nobody knows. false: such fields are ignored, and named in the header x-ignored
    of the answer and in the log; misspellings of known fields are refused either way."""
    auto_model: Name = AUTO_MODEL
    """Model for uploads that name none, in a language that the default model does not speak, or to be translated:
    loaded when the first one comes. auto: the multilingual Whisper whose weights are on this machine; none: such
    uploads are refused."""
    max_models: PositiveInt = 2
    """Models that may be loaded at once, not counting `voice` and `auto_model`."""
    device: DeviceName = "auto"
    """Device to compute on: auto, cpu, cuda or cuda:N."""
    dtype: DtypeName = "auto"
    """Data type to compute in: auto, fp32 or bf16."""
    weights: NonEmptyText | None = None
    """Checkpoint folder for `model`, instead of its own weights."""
    turn_model: Name = "auto"
    """Model that detects whether a live caller has finished: smart-turn; none; or auto, smart-turn if it is on this
    machine."""

    api_keys: tuple[ApiKey, ...] = ()
    """Keys, one of which every request must carry. Without any, no key is needed."""
    admin_keys: tuple[ApiKey, ...] = ()
    """Keys that may load, renew and unload models. Without any, no client may."""
    api_keys_file: NonEmptyText | None = None
    """File with more api_keys, one per line; # starts a comment."""
    admin_keys_file: NonEmptyText | None = None
    """File with more admin_keys, one per line; # starts a comment."""
    requests_per_minute_per_key: PositiveInt | None = None
    """Requests per minute for one key; one more is refused with a retry time."""
    concurrent_per_key: PositiveInt | None = None
    """Concurrent requests and live sessions for one key."""

    max_body_bytes: PositiveInt = 1 << 30
    """Largest request body."""
    max_duration_s: PositiveFloat = 4 * 3_600.0
    """Longest audio in one request, in seconds."""
    max_beam: Annotated[int, Meta(ge=1, le=64)] = 8
    """Largest beam that a request may ask for; each hypothesis takes a row of the decoder."""
    max_characters: PositiveInt = 50_000
    """Longest text of one speech request, in characters: about an hour of audio. OpenAI's limit is 4096."""
    max_concurrent: PositiveInt = 256
    """Concurrent requests of all clients; one more is refused with a retry time."""
    upload_idle_s: Annotated[float, Meta(gt=0, le=86_400)] = 30.0
    """Seconds without data after which an upload is aborted."""
    upload_min_bytes_per_s: Annotated[int, Meta(ge=0)] = 500
    """Mean rate below which an upload is aborted, after its first `upload_idle_s`; 0 allows any."""
    max_live_sessions: PositiveInt = 1_024
    """Concurrent live sessions of all clients, including those that wait for their client to reconnect; one more
    is refused with a retry time."""
    max_frame_bytes: Annotated[int, Meta(ge=1_024, le=16 << 20)] = 16 << 20
    """Largest frame of audio on a WebSocket."""
    max_session_s: PositiveFloat = 6 * 3_600.0
    """Longest live session, in seconds of audio and in seconds of wall-clock time."""
    session_idle_s: Annotated[float, Meta(gt=0, le=86_400)] = 120.0
    """Seconds without a message after which a WebSocket's text is finished and it is closed."""
    resume_s: Annotated[float, Meta(ge=0, le=3_600)] = 60.0
    """Seconds that a session of /v1/stream waits for its client after the connection is lost, and stays available
    after it has ended."""
    drain_s: Annotated[float, Meta(ge=0, le=86_400)] = 30.0
    """Seconds that accepted requests have to finish after SIGTERM."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins whose pages may call this server from a browser, WebSockets included. Empty: only its own pages."""
    docs: bool = True
    """Whether to serve the OpenAPI page."""
    console: bool = True
    """Whether to serve the web console: /, /speak, /models and /status."""
    metrics: bool = True
    """Whether to serve /metrics."""
    evaluations: NonEmptyText | None = None
    """SQLite file in which asr-serve eval stores its results: shown at /models, and evidence for governance.policy. It
    need not be there yet. None: none are shown, and no model can be promoted."""

    log_format: Literal["text", "json"] = "text"
    """Format of the log lines."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    otel_endpoint: Url | None = None
    """OpenTelemetry collector that receives a trace of every request, like http://127.0.0.1:4318."""

    ring_slots: Annotated[int, Meta(ge=2, le=1 << 20, description="a whole number, 2 to 1048576, a power of two")] = (
        1_024
    )
    """Slots for audio in the shared memory between server and engine."""
    ring_payload_bytes: Annotated[
        int, Meta(ge=64, le=1 << 28, multiple_of=64, description="a whole number, 64 to 268435456, of whole 64s")
    ] = 16_384
    """Size of one slot, in bytes."""
    edge_folder: NonEmptyText | None = None
    """Folder, of this user alone, in which edges on this host find the engine of the default model, to hand it audio
    through shared memory. None: they use /v1/stream."""
    edge_sessions: PositiveInt = 512
    """Sessions that those edges may have together, beside `max_live_sessions`."""
    encode_port: Port = 8_100
    """Port on which an engine with the role encode listens for others; 0 takes any free one."""
    peer_keys: tuple[PeerKey, ...] = ()
    """Keys, one of which an engine that requests encoding must have; it authenticates with the first of its own.
    Without any, every engine that reaches the port may request encoding."""
    peer_keys_file: NonEmptyText | None = None
    """File with more peer_keys, one per line; # starts a comment."""
    engine_threads: PositiveInt | None = None
    """Threads the engine computes on. None: ASR_SERVE_THREADS, else every core this process may use, of a CPU quota
    the whole ones."""
    engine: EngineConfig = EngineConfig()
    """Limits and modes of the engine."""
    sessions: SessionsConfig = SessionsConfig()
    """Storage of live sessions outside the server."""
    webrtc: WebRtcConfig = WebRtcConfig()
    """Calls over WebRTC."""
    governance: GovernanceConfig = GovernanceConfig()
    """Policy by which models are rolled out."""
    batch: BatchConfig = BatchConfig()
    """Files and batches."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        if self.governance.policy is not None and (self.pipeline is not None or self.engine.role == "encode"):
            raise OptionError(
                f"governance.policy beside {'pipeline' if self.pipeline is not None else 'role=encode'}",
                "one of them: a policy routes callers to models",
                param="governance",
            )
        if self.sessions.redis_url is not None and not self.resume_s:
            raise OptionError(
                "resume_s=0 with sessions.redis_url", "above 0: Redis stores sessions to be resumed", param="resume_s"
            )
        if self.wyoming_port is not None and self.api_keys:
            raise OptionError(
                f"wyoming_port={self.wyoming_port} beside api_keys",
                "one of them: clients of Wyoming can send no key",
                "serve Wyoming by a second server without keys, on a network that may use it",
                param="wyoming_port",
            )
        if self.ring_slots & (self.ring_slots - 1):
            raise OptionError(f"ring_slots={self.ring_slots}", "a power of two", param="ring_slots")
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise OptionError(f"{name} without {other}", "both, or none", f"set {other}", param=name)
        if self.pipeline is not None and self.weights is not None:
            raise OptionError("weights beside pipeline", "the file names the weights of each stage", param="weights")
        if self.pipeline is not None and self.engine.role == "encode":
            raise OptionError(
                "role=encode beside pipeline", "a model: who asks for encoding names none", param="pipeline"
            )
        at_start = {self.model, *self.more_models}
        if len(at_start) > self.max_models:
            raise OptionError(
                f"max_models={self.max_models} and {len(at_start)} models to load at start: "
                + ", ".join(sorted(at_start)),
                f"max_models={len(at_start)} or more, or fewer models",
                param="max_models",
            )
        for alias, name in self.aliases.items():
            if name in self.aliases:
                raise OptionError(
                    f"the alias {alias} is for {name}, an alias itself",
                    "the name of a model",
                    f"make it {alias}={self.aliases[name]}",
                    param="aliases",
                )

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown |= {name: f"<{len(shown[name])} keys>" for name in SECRETS}
        if self.sessions.redis_url is not None:  # it may hold a password
            shown["sessions"] = msgspec.structs.replace(
                self.sessions, redis_url=without_secrets(self.sessions.redis_url)
            )
        return f"ServeConfig({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def loopback(self) -> bool:
        """Returns whether only this machine can reach the server."""
        return is_loopback(self.host)


def environment() -> dict[str, str]:
    """Every variable whose name starts with ASR_SERVE_."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}


def client_key() -> str | None:
    """ASR_SERVE_API_KEY: the key that our own clients send to a server."""
    return os.environ.get("ASR_SERVE_API_KEY") or None


def sip_password() -> str | None:
    """ASR_SERVE_SIP_PASSWORD: the password of the edge's account at a telephone exchange."""
    return os.environ.get("ASR_SERVE_SIP_PASSWORD") or None


def ray_address() -> str | None:
    """RAY_ADDRESS: the cluster that Ray's own commands find."""
    return os.environ.get("RAY_ADDRESS") or None


def set_default_ray_variable(name: str, value: str) -> None:
    """Sets a variable for Ray's processes, which this one starts. One that the user has set stays."""
    os.environ.setdefault(name, value)


def ray_auth_mode() -> str | None:
    """RAY_AUTH_MODE: whether Ray's programs ask each other for a token."""
    return os.environ.get("RAY_AUTH_MODE") or None


OPENMP_SPIN_VARIABLES = {"GOMP_SPINCOUNT": "300"}
"""Spins after which OpenMP's threads sleep, decision 0009. By OpenMP's default they spin for milliseconds, and two
engines on the same cores do a twelfth to a half of the work of one."""


def limit_openmp_spinning() -> None:
    """Limit the spinning of OpenMP's threads; call before torch loads OpenMP. Variables the user has set stay."""
    if "OMP_WAIT_POLICY" not in os.environ:
        for name, value in OPENMP_SPIN_VARIABLES.items():
            os.environ.setdefault(name, value)


def disable_ucx_infiniband() -> None:
    """Disable UCX's InfiniBand modules on a machine without InfiniBand; call before NIXL loads UCX. They crash the
    process at exit where the system has its own libibverbs (nixl 1.5.1). A variable the user has set stays."""
    if not any(Path("/sys/class/infiniband").glob("*")):
        os.environ.setdefault("UCX_MODULES", "^ib")


def engine_environment(threads: int | None) -> dict[str, str]:
    """Environment of an engine process: ours, and its own number of threads."""
    limit_openmp_spinning()
    own = {} if threads is None else {"ASR_SERVE_THREADS": str(threads)}
    return {**os.environ, **own}


def vllm_environment(threads: int) -> dict[str, str]:
    """Environment of a vLLM worker: ours, with vLLM's engine in one process and a number of threads. Other variables
    that the user has set stay."""
    limit_openmp_spinning()
    unless_set = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores are shared with this engine's encoder
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(threads)}
    return {**unless_set, **os.environ, **own}


def cache_dir() -> Path:
    """Folder of converted and fetched weights: ASR_SERVE_CACHE, else XDG_CACHE_HOME/asr-serve."""
    configured = os.environ.get("ASR_SERVE_CACHE")
    if configured:
        return Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "asr-serve"


def voices_dir(chosen: str | None) -> Path:
    """Folder of cloned voices: `EngineConfig.voices_dir`, else XDG_DATA_HOME/asr-serve/voices."""
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "asr-serve" / "voices"


def batch_dir(chosen: str | None) -> Path:
    """Folder of files and batches: `BatchConfig.folder`, else XDG_DATA_HOME/asr-serve/batch."""
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "asr-serve" / "batch"


def submissions_dir() -> Path:
    """Folder of the upload records of `asr-serve batch submit`: XDG_STATE_HOME/asr-serve/submissions."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "asr-serve" / "submissions"


def native_kernels_enabled() -> bool:
    """False when ASR_SERVE_NATIVE=0 selects the Python reference kernels."""
    return os.environ.get("ASR_SERVE_NATIVE", "1") != "0"


def thread_limit() -> int | None:
    """ASR_SERVE_THREADS, or None to use `cores.usable_cores`."""
    text = os.environ.get("ASR_SERVE_THREADS")
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise OptionError(f"ASR_SERVE_THREADS={text!r}", "a whole number of threads, 1 or more")
    return int(text)
