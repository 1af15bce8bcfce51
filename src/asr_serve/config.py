"""Settings. Frozen, strict, printable; the only file that reads the environment."""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, inspect

from asr_serve.errors import OptionError

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, lt=1)]
Name = Annotated[str, Meta(pattern=r"\A[^\s,=]+\Z", description="a name without spaces, commas or =")]
Text = Annotated[str, Meta(min_length=1)]
Host = Annotated[
    str,
    Meta(
        pattern=r"\A([\w.-]+|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[\w:.%]*)\Z",
        description="a host name or an IP address, without port or scheme",
    ),
]
Key = Annotated[
    str, Meta(pattern=r"\A[!-+\--~]+\Z", description="a key of visible ASCII, without spaces or commas")
]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Url = Annotated[str, Meta(pattern=r"\Ahttps?://[^\s/]\S*\Z", description="a URL, http:// or https://")]
Origin = Annotated[
    str, Meta(pattern=r"\A(\*|https?://[^\s/,]+)\Z", description="an origin like https://example.org, or *")
]

SECRETS = ("api_keys", "admin_keys")
"""Fields of ServeConfig that are never printed."""

PREFIX = "ASR_SERVE_"
OTHER_VARIABLES = ("CACHE", "CONFIG", "NATIVE", "THREADS", "DATA", "MOONSHINE_BASE")
"""Variables with the prefix that are no setting of the server. The last two are for tests."""


def settle(config: msgspec.Struct) -> None:
    """Bring every field to its declared type: a list to a tuple, an int to a float.

    Raises OptionError, with the field as `param`, for what does not fit.
    """
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        try:
            msgspec.structs.force_setattr(config, field.name, msgspec.convert(value, field.type))
        except msgspec.ValidationError:
            shown = "***" if field.name in SECRETS else repr(value)
            kind = inspect.type_info(field.type)
            near = nearest(value, map(str, kind.values)) if isinstance(kind, inspect.LiteralType) else ""
            raise OptionError(f"{field.name}={shown}", allowed(kind), near, param=field.name) from None


def allowed(kind: inspect.Type) -> str:
    """What a type takes, in words: `a whole number, 1 or more; or none`."""
    match kind:
        case inspect.Metadata():
            return str((kind.extra_json_schema or {})["description"])
        case inspect.UnionType():
            return f"{allowed(next(t for t in kind.types if not isinstance(t, inspect.NoneType)))}; or none"
        case inspect.IntType():
            return f"a whole number, {span(kind)}"
        case inspect.FloatType():
            return f"a number, {span(kind)}"
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "text"
        case inspect.LiteralType():
            return ", ".join(map(str, kind.values))
        case inspect.VarTupleType():
            return f"a list; each one {allowed(kind.item_type)}"
        case inspect.DictType():
            return "pairs name=model"
        case _:
            return "a table of settings"


def span(kind: inspect.IntType | inspect.FloatType) -> str:
    """`0 to 65535`, `1 or more`, `more than 0, less than 1`."""
    if kind.ge is not None:
        return f"{kind.ge:g} to {kind.le:g}" if kind.le is not None else f"{kind.ge:g} or more"
    most = f", less than {kind.lt:g}" if kind.lt is not None else ""
    most = f", up to {kind.le:g}" if kind.le is not None else most
    return f"more than {kind.gt:g}{most}"


def nearest(came: object, names: Iterable[str]) -> str:
    """`did you mean 'port'?`, or nothing where no name is near. Of a mapping, the value is what is shown."""
    shown = names if isinstance(names, Mapping) else {name: name for name in names}
    near = difflib.get_close_matches(str(came), shown, n=1)
    return f"did you mean {shown[near[0]]!r}?" if near else ""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much the engine takes on at once. Every number is a bound; the defaults suit a laptop CPU.

    Raises OptionError for a value of the wrong type or out of range.
    """

    max_decode_rows: Count = 64
    """Sequences that share one decoding step."""
    encode_frames: Count | None = None
    """Encoder frames in one encode batch, padding included. It bounds how long a live step can be held up.
    None: as many as the device needs to be busy."""
    encode_padding: Share = 0.15
    """Largest share of an encode batch that may be padding."""
    kv_bytes: Count = 512 << 20
    """Memory for the decoder's keys and values, self- and cross-attention together."""
    max_requests: Count = 2_048
    """Requests that may be in the engine, waiting or running; one more is refused with AtCapacity."""
    max_audio_s: Positive = 7_200.0
    """Seconds of audio that may be in the engine, over all requests."""
    vad_step_windows: Count = 8_192
    """Windows of 32 ms in one voice-activity step, over all callers, padding included."""
    vad_windows: Annotated[int, Meta(ge=64)] = 1_024
    """Windows one caller may hand in at once; 64 are two seconds."""
    max_sessions: Count = 1_024
    """Callers with voice-activity state."""
    live_share: Share = 0.9
    """Share of the machine that live callers get while other work waits too."""
    interactive_share: Share = 0.8
    """Share of the rest that interactive work gets while bulk work waits too."""

    def __post_init__(self) -> None:
        settle(self)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """From a mapping; an unknown key fails and names the nearest known one."""
        for key in settings:
            if key not in cls.__struct_fields__:
                raise unknown("engine setting", key, cls.__struct_fields__)
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
    model: Name = "moonshine-tiny-en"
    """Model that answers when a request names none; loaded at start."""
    more_models: tuple[Name, ...] = ()
    """Models loaded at start beside it."""
    aliases: dict[Name, Name] = {}
    """Names that clients may send for a model, like whisper-1 = moonshine-tiny-en."""
    max_models: Count = 2
    """Models that may be loaded at once."""
    device: Name = "auto"
    """Device to compute on: auto, cpu, cuda or cuda:N."""
    dtype: Name = "auto"
    """Numbers to compute in: auto, fp32 or bf16."""
    weights: Text | None = None
    """Checkpoint folder for `model`, instead of its own weights."""

    api_keys: tuple[Key, ...] = ()
    """Keys that a request must bring one of. Without any, nobody is asked for one."""
    admin_keys: tuple[Key, ...] = ()
    """Keys that may load and unload models. Without any, nobody may."""
    api_keys_file: Text | None = None
    """File with more api_keys, one a line; # starts a comment."""
    admin_keys_file: Text | None = None
    """File with more admin_keys, one a line; # starts a comment."""
    requests_per_minute_per_key: Count | None = None
    """Requests a minute that one key may make; one more is told when to try again."""
    concurrent_per_key: Count | None = None
    """Requests and live sessions that one key may have at once."""

    max_body_bytes: Count = 1 << 30
    """Largest request body."""
    max_duration_s: Positive = 4 * 3_600.0
    """Longest audio in one request, in seconds."""
    max_concurrent: Count = 256
    """Requests in work at once, of all callers; one more is told when to try again."""
    upload_idle_s: Annotated[float, Meta(gt=0, le=86_400)] = 30.0
    """Seconds that an upload may stand still before it is given up."""
    upload_min_bytes_per_s: Annotated[int, Meta(ge=0)] = 500
    """Mean rate below which an upload is given up, after its first `upload_idle_s`; 0 allows any."""
    max_live_sessions: Count = 1_024
    """WebSockets open at once, of all callers; one more is told when to try again."""
    max_frame_bytes: Annotated[int, Meta(ge=1_024, le=16 << 20)] = 16 << 20
    """Largest frame of audio that a WebSocket may bring."""
    max_session_s: Positive = 6 * 3_600.0
    """Longest live session, in seconds of audio and of time."""
    session_idle_s: Annotated[float, Meta(gt=0, le=86_400)] = 120.0
    """Seconds that a WebSocket may bring nothing before its text is finished and it is closed."""
    drain_s: Annotated[float, Meta(ge=0, le=86_400)] = 30.0
    """Seconds that accepted requests get to finish after SIGTERM."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins whose pages may call this server from a browser, WebSockets included. Without any, only its own."""
    docs: bool = True
    """Whether to serve the OpenAPI page."""
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
    engine_threads: Count | None = None
    """Threads the engine computes on. None: ASR_SERVE_THREADS, else every core this process may use."""
    engine: EngineConfig = EngineConfig()
    """How much the engine takes on at once."""

    def __post_init__(self) -> None:
        settle(self)
        if self.ring_slots & (self.ring_slots - 1):
            raise OptionError(f"ring_slots={self.ring_slots}", "a power of two", param="ring_slots")
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
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name
            return self.host == "localhost"


def unknown(what: str, came: str, allowed: tuple[str, ...] | list[str]) -> OptionError:
    """The error for a name that is not one of `allowed`, with the nearest one first."""
    return OptionError(f"unknown {what} {came!r}", f"allowed: {', '.join(allowed)}", nearest(came, allowed))


def environment() -> dict[str, str]:
    """Every variable whose name starts with ASR_SERVE_."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}


SPINS = {"GOMP_SPINCOUNT": "3000"}
"""How long OpenMP's threads spin before they sleep: some 30 us, decision 0009. By default it is milliseconds, and
two programs that spin for the same cores get a twentieth of the work done."""


def limit_spinning() -> None:
    """Before torch is loaded, which brings OpenMP along. What the user has set stays."""
    if "OMP_WAIT_POLICY" not in os.environ:
        for name, value in SPINS.items():
            os.environ.setdefault(name, value)


def engine_environment(threads: int | None) -> dict[str, str]:
    """What an engine process is started with: ours, and its own number of threads."""
    limit_spinning()
    own = {} if threads is None else {"ASR_SERVE_THREADS": str(threads)}
    return {**os.environ, **own}


def cache_dir() -> Path:
    """Where converted and fetched weights are kept: ASR_SERVE_CACHE, else XDG_CACHE_HOME/asr-serve."""
    chosen = os.environ.get("ASR_SERVE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "asr-serve"


def native_wanted() -> bool:
    """False when ASR_SERVE_NATIVE=0 asks for the Python twins."""
    return os.environ.get("ASR_SERVE_NATIVE", "1") != "0"


def threads_wanted() -> int | None:
    """ASR_SERVE_THREADS, or None to use every core this process may run on."""
    text = os.environ.get("ASR_SERVE_THREADS")
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise OptionError(f"ASR_SERVE_THREADS={text!r}", "a whole number of threads, 1 or more")
    return int(text)
