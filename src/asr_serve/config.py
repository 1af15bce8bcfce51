"""Settings. Frozen, strict, printable; the only file that reads the environment."""

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
    DiskBackendName,
    Fraction,
    HandoverPayload,
    Host,
    Name,
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
    Role,
    Url,
    Window,
    coerce_fields,
    is_loopback,
    unknown_name_error,
)

PREFIX = "ASR_SERVE_"
MIN_HOST_BYTES = 1 << 20
"""Of memory, above a file: what goes there or comes back is checked in it, so much at a time (engine/tiers)."""
NON_SETTING_VARIABLES = ("CACHE", "CONFIG", "NATIVE", "THREADS", "API_KEY", "DATA", "MOONSHINE_BASE")
"""Variables with the prefix that are no setting of the server. The last two are for tests."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much the engine takes on at once. Every number is a bound; the defaults suit a laptop CPU.

    Raises OptionError for a value of the wrong type or out of range.
    """

    max_decode_rows: PositiveInt = 64
    """Sequences that share one decoding step; of a streaming model, sessions that share a step; of a voice model,
    sentences."""
    encode_frames: PositiveInt | None = None
    """Encoder frames in one encode batch, padding included. It bounds how long a live step can be held up.
    None: as many as the device needs to be busy."""
    encode_padding: Fraction = 0.15
    """Largest share of an encode batch that may be padding."""
    kv_bytes: PositiveInt = 512 << 20
    """Memory for the decoder's keys and values, self- and cross-attention together; of a streaming model, for what
    it remembers of its sessions, which bounds how many it hears at once."""
    use_chunked_inference: bool = False
    """Whether a streaming model takes a chunk of many sessions in one step, or one session after another."""
    chunk_frames: PositiveInt | None = None
    """Encoder frames of a streaming model's step. None: as its card says."""
    lookahead_frames: Annotated[int, Meta(ge=0)] | None = None
    """Encoder frames that a streaming model hears ahead, of those it was trained for: fewer answer sooner, more
    answer better. None: as the checkpoint says first."""
    chunk_wait_ms: Annotated[float, Meta(ge=0, le=1_000)] | None = None
    """How long a session whose chunk is there waits for others. None: an eighth of a chunk."""
    head: Literal["ctc", "rnnt", "tdt"] | None = None
    """How a streaming model's output is read, where it has more than one way. None: the first on its card."""
    beam: Annotated[int, Meta(ge=1, le=64)] = 1
    """Hypotheses that a streaming model's search follows at once; 1 is greedy."""
    quantize: Quantize = "none"
    """Whether products are held in 8 bits: none; int8, the weights, which takes about half their memory; or
    dynamic, what they are multiplied with too, where this machine is faster for it."""
    window: Window = "checked"
    """How much of the silence that fills a model's window of fixed length is encoded: packed, a part, which stands
    for the rest; checked, the same, but an answer that does not pass is asked for again with all of the window
    before anything else is tried; or whole, all of it, always."""
    prefix_bytes: Annotated[int, Meta(ge=0)] = 128 << 20
    """Memory for what was heard before: an eighth for answers, an eighth for voice activity, and the rest for keys
    and values, in pages of `kv_bytes` that nobody else wants. Audio that somebody sent before is answered sooner,
    and so others can tell that it was. 0: nothing is kept, and nothing is shared."""
    sleep_after_s: PositiveFloat = 10.0
    """A caller's stream to which nothing came for so long gives up its place and sleeps until something does;
    where others wait for a place, after a second."""
    host_bytes: Annotated[int, Meta(ge=0)] = 256 << 20
    """Memory of the host for what sleeps and for what the cache gives up. 0: nothing sleeps."""
    disk_bytes: Annotated[int, Meta(ge=0)] = 0
    """Of a file, for what does not fit there any more; it wants 1 MiB of `host_bytes`, through which all goes. 0:
    there is no file."""
    disk_path: NonEmptyText | None = None
    """Folder of that file, on a disk of this machine. None: the system's folder for temporary files."""
    disk_road: DiskBackendName = "auto"
    """How the file is read and written: uring, past the page cache by io_uring; threads, the same by a few
    threads; nixl, NIXL's POSIX back end; gds, its GPUDirect Storage; or auto, io_uring
    where there is any: as fast as threads within a tenth, by less of a core."""
    disk_key_file: NonEmptyText | None = None
    """File with 32 bytes in hexadecimal: what lies in the file is encrypted with them. None: it is not."""
    role: Role = "both"
    """What the engine does: both; encode, for other engines that ask for it; or decode, what peers encode."""
    peers: tuple[Peer, ...] = ()
    """Engines whose role is to encode, which this one asks to."""
    peer_road: PeerTransportName = "auto"
    """How what they encode comes back: shm, memory shared on one machine; nixl; tcp; or auto, the first of these
    that both have."""
    peer_carries: HandoverPayload = "auto"
    """What comes back: cross, keys and values as the decoder reads them; hidden, the encoder's frames, which are
    smaller and from which this engine makes them; or auto: hidden over a network, cross within a machine."""
    peer_timeout_s: PositiveFloat = 30.0
    """A peer that has not answered by then is taken for dead, and what it had is encoded elsewhere; so is one that
    leaves a single clip unanswered for four times as long, whatever else it answers."""
    max_requests: PositiveInt = 2_048
    """Requests that may be in the engine, waiting or running; one more is refused with AtCapacity."""
    max_audio_s: PositiveFloat = 7_200.0
    """Seconds of audio that may be in the engine, over all requests."""
    max_speaking_rows: PositiveInt = 64
    """Sentences that a voice model may be saying at once, fewer where `kv_bytes` are not enough for what it
    remembers of them; others wait."""
    codec: Name | None = None
    """What makes sound of a voice model's frames: a name, or a checkpoint's folder. None: as its card says."""
    voices_dir: NonEmptyText | None = None
    """Folder of cloned voices. None: asr-serve/voices where programs keep a user's data (XDG_DATA_HOME)."""
    vad_step_windows: PositiveInt = 8_192
    """Windows of 32 ms in one voice-activity step, over all callers, padding included."""
    vad_windows: Annotated[int, Meta(ge=64)] = 1_024
    """Windows one caller may hand in at once; 64 are two seconds."""
    max_sessions: PositiveInt = 1_024
    """Callers with voice-activity state."""
    live_share: Fraction = 0.9
    """Share of the machine that live callers get while other work waits too."""
    interactive_share: Fraction = 0.8
    """Share of the rest that interactive work gets while bulk work waits too."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        for name, without in (("disk_path", None), ("disk_road", "auto"), ("disk_key_file", None)):
            if not self.disk_bytes and getattr(self, name) != without:
                raise OptionError(
                    f"{name}={getattr(self, name)!r} without disk_bytes, and so without a file",
                    "both, or none",
                    "set disk_bytes",
                    param=name,
                )
        if self.disk_bytes and self.role == "encode":
            raise OptionError(
                f"disk_bytes={self.disk_bytes} with role=encode",
                "0: for an engine that encodes, nothing sleeps",
                "set it where the role is to decode",
                param="disk_bytes",
            )
        if self.disk_bytes and self.host_bytes < MIN_HOST_BYTES:
            raise OptionError(
                f"disk_bytes={self.disk_bytes} with host_bytes={self.host_bytes}",
                f"host_bytes={MIN_HOST_BYTES} or more: what goes into the file goes through memory",
                "set host_bytes, or disk_bytes to 0",
                param="disk_bytes",
            )

    @property
    def shares(self) -> dict[Priority, float]:
        """Of the machine, while all of them wait."""
        rest = 1 - self.live_share
        return {
            "live": self.live_share,
            "interactive": rest * self.interactive_share,
            "bulk": rest * (1 - self.interactive_share),
        }

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """From a mapping; an unknown key fails and names the nearest known one."""
        for key in settings:
            if key not in cls.__struct_fields__:
                raise unknown_name_error("engine setting", key, cls.__struct_fields__)
        return cls(**settings)


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is told. `settings.serve_config` reads it from a file, the environment and flags.

    Raises OptionError, whose `param` names the field, for a value of the wrong type or out of range.
    """

    host: Host = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every one this machine has."""
    port: Port = 8_000
    """Port to listen on; 0 takes any free one."""
    realtime_port: Port | None = None
    """Second port, for FunASR's realtime clients: theirs is 10095. None: they use `port`."""
    tls_cert: NonEmptyText | None = None
    """File with the certificate, and those it hangs on, in PEM: all ports then speak TLS. None: none does."""
    tls_key: NonEmptyText | None = None
    """File with the certificate's key, in PEM, without a password."""
    model: Name = "moonshine-tiny-en"
    """Model that answers when a request names none; loaded at start."""
    more_models: tuple[Name, ...] = ()
    """Models loaded at start beside it."""
    aliases: dict[Name, Name] = {}
    """Names that clients may send for a model, like whisper-1 = moonshine-tiny-en."""
    voice: Name = "auto"
    """Model that speaks when a request names none; loaded at start beside the others, in a process of its own.
    auto: fastpitch-en, or hibari, whichever is on this machine, if any; none: nothing speaks."""
    voice_aliases: dict[Name, Name] = {}
    """Names that clients may send for a voice, like coral = bella. OpenAI's are known already."""
    max_models: PositiveInt = 2
    """Models that may be loaded at once, `voice` not counted."""
    device: Name = "auto"
    """Device to compute on: auto, cpu, cuda or cuda:N."""
    dtype: Name = "auto"
    """Numbers to compute in: auto, fp32 or bf16."""
    weights: NonEmptyText | None = None
    """Checkpoint folder for `model`, instead of its own weights."""
    turn_model: Name = "auto"
    """Model that tells whether a live caller has finished: smart-turn; none; or auto, whichever is on this
    machine, if any."""

    api_keys: tuple[ApiKey, ...] = ()
    """Keys that a request must bring one of. Without any, nobody is asked for one."""
    admin_keys: tuple[ApiKey, ...] = ()
    """Keys that may load, renew and unload models. Without any, nobody may."""
    api_keys_file: NonEmptyText | None = None
    """File with more api_keys, one a line; # starts a comment."""
    admin_keys_file: NonEmptyText | None = None
    """File with more admin_keys, one a line; # starts a comment."""
    requests_per_minute_per_key: PositiveInt | None = None
    """Requests a minute that one key may make; one more is told when to try again."""
    concurrent_per_key: PositiveInt | None = None
    """Requests and live sessions that one key may have at once."""

    max_body_bytes: PositiveInt = 1 << 30
    """Largest request body."""
    max_duration_s: PositiveFloat = 4 * 3_600.0
    """Longest audio in one request, in seconds."""
    max_beam: Annotated[int, Meta(ge=1, le=64)] = 8
    """Most hypotheses that a request may have followed at once; each takes a row of the decoder."""
    max_characters: PositiveInt = 50_000
    """Longest text that is spoken in one request, in characters: about an hour. OpenAI's is 4096."""
    max_concurrent: PositiveInt = 256
    """Requests in work at once, of all callers; one more is told when to try again."""
    upload_idle_s: Annotated[float, Meta(gt=0, le=86_400)] = 30.0
    """Seconds that an upload may stand still before it is given up."""
    upload_min_bytes_per_s: Annotated[int, Meta(ge=0)] = 500
    """Mean rate below which an upload is given up, after its first `upload_idle_s`; 0 allows any."""
    max_live_sessions: PositiveInt = 1_024
    """Live sessions at once, of all callers, those that wait for their connection included; one more is told when
    to try again."""
    max_frame_bytes: Annotated[int, Meta(ge=1_024, le=16 << 20)] = 16 << 20
    """Largest frame of audio that a WebSocket may bring."""
    max_session_s: PositiveFloat = 6 * 3_600.0
    """Longest live session, in seconds of audio and of time."""
    session_idle_s: Annotated[float, Meta(gt=0, le=86_400)] = 120.0
    """Seconds that a WebSocket may bring nothing before its text is finished and it is closed."""
    resume_s: Annotated[float, Meta(ge=0, le=3_600)] = 60.0
    """Seconds that a session of /v1/stream waits for its client when the connection is lost, and is kept when it
    has ended."""
    drain_s: Annotated[float, Meta(ge=0, le=86_400)] = 30.0
    """Seconds that accepted requests get to finish after SIGTERM."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins whose pages may call this server from a browser, WebSockets included. Without any, only its own."""
    docs: bool = True
    """Whether to serve the OpenAPI page."""
    console: bool = True
    """Whether to serve the web console, at / and /status."""
    metrics: bool = True
    """Whether to serve /metrics."""

    log_format: Literal["text", "json"] = "text"
    """Form of the log lines."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that is logged."""
    otel_endpoint: Url | None = None
    """OpenTelemetry collector that gets a trace of every request, like http://127.0.0.1:4318."""

    ring_slots: Annotated[
        int, Meta(ge=2, le=1 << 20, description="a whole number, 2 to 1048576, a power of two")
    ] = 1_024
    """Pieces of audio that fit into the shared memory between server and engine."""
    ring_payload_bytes: Annotated[
        int, Meta(ge=64, le=1 << 28, multiple_of=64, description="a whole number, 64 to 268435456, of whole 64s")
    ] = 16_384
    """Size of one of these pieces."""
    encode_port: Port = 8_100
    """Port on which an engine whose role is to encode listens for others; 0 takes any free one."""
    peer_keys: tuple[PeerKey, ...] = ()
    """Keys of which an engine that asks another to encode must know one; it proves that with its own first.
    Without any, whoever reaches the port may ask."""
    peer_keys_file: NonEmptyText | None = None
    """File with more peer_keys, one a line; # starts a comment."""
    engine_threads: PositiveInt | None = None
    """Threads the engine computes on. None: ASR_SERVE_THREADS, else every core this process may use."""
    engine: EngineConfig = EngineConfig()
    """How much the engine takes on at once."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        if self.ring_slots & (self.ring_slots - 1):
            raise OptionError(f"ring_slots={self.ring_slots}", "a power of two", param="ring_slots")
        for name, needed in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, name) is not None and getattr(self, needed) is None:
                raise OptionError(f"{name} without {needed}", "both, or none", f"set {needed}", param=name)
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
        return f"ServeConfig({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)


def environment() -> dict[str, str]:
    """Every variable whose name starts with ASR_SERVE_."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}


def client_key() -> str | None:
    """ASR_SERVE_API_KEY: what a client of ours brings to a server."""
    return os.environ.get("ASR_SERVE_API_KEY") or None


OPENMP_SPIN_VARIABLES = {"GOMP_SPINCOUNT": "3000"}
"""How long OpenMP's threads spin before they sleep: some 30 us, decision 0009. By default it is milliseconds, and
two programs that spin for the same cores get a twentieth of the work done."""


def limit_openmp_spinning() -> None:
    """Before torch is loaded, which brings OpenMP along. What the user has set stays."""
    if "OMP_WAIT_POLICY" not in os.environ:
        for name, value in OPENMP_SPIN_VARIABLES.items():
            os.environ.setdefault(name, value)


def disable_ucx_infiniband() -> None:
    """Before NIXL loads UCX: on a machine without InfiniBand, UCX leaves out its modules for it, which crash the
    process as it ends where the system has libibverbs of its own (nixl 1.5.1). What the user has set stays."""
    if not any(Path("/sys/class/infiniband").glob("*")):
        os.environ.setdefault("UCX_MODULES", "^ib")


def engine_environment(threads: int | None) -> dict[str, str]:
    """What an engine process is started with: ours, and its own number of threads."""
    limit_openmp_spinning()
    own = {} if threads is None else {"ASR_SERVE_THREADS": str(threads)}
    return {**os.environ, **own}


def cache_dir() -> Path:
    """Where converted and fetched weights are kept: ASR_SERVE_CACHE, else XDG_CACHE_HOME/asr-serve."""
    chosen = os.environ.get("ASR_SERVE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "asr-serve"


def voices_dir(chosen: str | None) -> Path:
    """Where cloned voices are kept: `EngineConfig.voices_dir`, else XDG_DATA_HOME/asr-serve/voices."""
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "asr-serve" / "voices"


def native_kernels_enabled() -> bool:
    """False when ASR_SERVE_NATIVE=0 asks for the Python twins."""
    return os.environ.get("ASR_SERVE_NATIVE", "1") != "0"


def thread_limit() -> int | None:
    """ASR_SERVE_THREADS, or None to use every core this process may run on."""
    text = os.environ.get("ASR_SERVE_THREADS")
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise OptionError(f"ASR_SERVE_THREADS={text!r}", "a whole number of threads, 1 or more")
    return int(text)
