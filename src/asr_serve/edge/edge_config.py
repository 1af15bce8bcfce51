"""Settings of the edge: a TOML file, and the flags of `asr-serve edge`. Frozen; everything is a bound or an address."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asr_serve.edge.packet_driver import GATHER_MS
from asr_serve.edge.payload_format import parse_payload_types
from asr_serve.edge.sip_config import SipConfig, load_sip_config
from asr_serve.errors import OptionError, UnknownOption
from asr_serve.protocols.stream.client_messages import QUERY, RESUME, START, NewSessionRequest, parse_query
from asr_serve.toml_file import read_toml
from asr_serve.types import (
    ApiKey,
    Host,
    Port,
    PositiveInt,
    Url,
    WebhookSecret,
    coerce_fields,
    is_loopback,
    suggest_name,
)
from asr_serve.webhook import read_webhook_secret

UplinkName = Literal["websocket", "http2"]
DriverName = Literal["auto", "af_xdp", "recvmmsg"]
SET_BY_EDGE = {*RESUME, START, "encoding", "rate"}
STREAM_OPTIONS = tuple(name for name in QUERY if name not in SET_BY_EDGE)
"""Parameters of /v1/stream that a session may choose; the edge itself sets the others."""
LANGUAGE = "[a-z]{2,3}"
"""Form of the codes of languages; which of them a server has, it alone knows."""
DEFAULT_PAYLOAD_TYPES = {"96": "opus/48000/2", "97": "L16/16000", "101": "telephone-event/8000"}


class EdgeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `asr-serve edge`. Raises OptionError for a value of the wrong type or out of range."""

    server: Url = "http://127.0.0.1:8000"
    """Server that recognizes, by /v1/stream. Its key is ASR_SERVE_API_KEY."""
    uplink: UplinkName = "websocket"
    """Connections to the server: a WebSocket for each session, or HTTP/2, on whose connections a hundred sessions are
    together."""
    engine: Annotated[str, Meta(min_length=1)] | None = None
    """Folder that a server on this host has as `edge_folder`: its engine is handed the audio through shared memory, and
    `server` is not used."""
    host: Host = "127.0.0.1"
    """Address of this machine for RTP; 0.0.0.0 or :: is every one."""
    port: Port = 5_004
    """UDP port for the RTP of all sessions; 0 takes any free one."""
    driver: DriverName = "auto"
    """Packet driver. auto: AF_XDP where `interface` is set and the host allows it, else recvmmsg, and why."""
    interface: Annotated[str, Meta(min_length=1, max_length=15)] | None = None
    """Network interface for AF_XDP. Its packets pass the host's firewall by."""
    gather_ms: Annotated[float, Meta(ge=0, le=20)] = GATHER_MS
    """Time for which a receiver that a packet has woken waits for more."""
    busy_poll_us: Annotated[int, Meta(ge=0, le=1_000)] = 0
    """AF_XDP: time for which the kernel polls the network card when it is asked for packets; 0: it interrupts."""
    control_host: Host = "127.0.0.1"
    """Address for the control API, results and metrics."""
    control_port: Port = 8_004
    """TCP port of them; 0 takes any free one."""
    api_keys: tuple[ApiKey, ...] = ()
    """Keys of the control API. They are required beyond this machine."""
    payload_types: dict[str, str] = msgspec.field(default_factory=lambda: dict(DEFAULT_PAYLOAD_TYPES))
    """Dynamic payload types, like 96 = "opus/48000/2", of sessions that name none."""
    options: dict[str, str | int | float | bool] = {}
    """Parameters of /v1/stream of all sessions, like language = "en"."""
    webhook: Url | None = None
    """URL that every event but partial text is posted to. None: none is."""
    webhook_secret: WebhookSecret | None = None
    """Secret by which every post to the webhook is signed, in the way of Standard Webhooks. None: none is."""
    max_sessions: PositiveInt = 512
    """Sessions at once."""
    packets_per_s: Annotated[int, Meta(ge=10, le=10_000)] = 200
    """Packets per second that one session may send; four times those of 20 ms."""
    idle_s: Annotated[float, Meta(ge=1, le=86_400)] = 60.0
    """Seconds without a packet after which a session ends."""
    window_ms: Annotated[int, Meta(ge=20, le=2_000)] = 200
    """Longest wait for a missing packet."""
    spool_s: Annotated[float, Meta(ge=35, le=3_600)] = 120.0
    """Seconds of audio that each session keeps while the server is away or slow: 32 kB a second."""
    require_srtp: bool = False
    """Whether sessions must be encrypted. SRTP needs the extra `edge`."""
    voice_activity: bool = False
    """Whether silence is found here, by vad.wasm, and sent as its length. It needs the extra `edge`."""
    drift: bool = True
    """Whether the drift of senders' clocks is resampled away."""
    sip: SipConfig | None = None
    """Telephone. None: calls are not answered."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        check_stream_options(self.options)
        parse_payload_types(self.payload_types)
        if self.driver == "af_xdp" and self.interface is None:
            raise OptionError(
                "driver=af_xdp without interface",
                "AF_XDP is of an interface",
                "add --interface NAME",
                param="interface",
            )
        if self.sip is not None and is_loopback(self.host) and not is_loopback(self.sip.host):
            raise OptionError(
                f"sip.host={self.sip.host!r} with host={self.host!r}",
                "calls from other machines send their RTP to host",
                "set host too, like --host 0.0.0.0",
                param="host",
            )
        if self.webhook_secret is not None:
            read_webhook_secret(self.webhook_secret)
        if not is_loopback(self.control_host) and not self.api_keys:
            raise OptionError(
                f"control_host={self.control_host!r} without api_keys",
                "a control API that others reach has keys",
                "set api_keys, or leave control_host at 127.0.0.1",
                param="api_keys",
            )


def check_stream_options(*tables: Mapping[str, Any]) -> NewSessionRequest:
    """Parses the options of a session as its server will; later tables come first. Raises UnknownOption for a parameter
    that a session cannot choose, OptionError for a value that no server takes."""
    for table in tables:
        for name in table:
            if name not in STREAM_OPTIONS:
                raise UnknownOption(
                    f"options has {str(name)[:60]!r}",
                    f"parameters of /v1/stream: {', '.join(STREAM_OPTIONS)}",
                    suggest_name(str(name)[:60], STREAM_OPTIONS),
                    param="options",
                )
    query = stream_query(*tables)
    request = parse_query({name: [value] for name, value in query.items()}, packets=True)
    assert isinstance(request, NewSessionRequest)
    language = request.options.language
    if language is not None and re.fullmatch(LANGUAGE, language) is None:
        raise OptionError(
            f"language={query['language'][:60]!r}", "the code or the name of a language", param="language"
        )
    return request


def stream_query(*tables: Mapping[str, str | int | float | bool]) -> dict[str, str]:
    """Joins tables of options, later ones first, as a query."""
    joined: dict[str, str | int | float | bool] = {}
    for table in tables:
        joined |= table
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in joined.items()}


def load_edge_config(path: str | None, flags: Mapping[str, object]) -> EdgeConfig:
    """Reads a file, and puts flags over it; None is no flag. Raises OptionError, SourceNotFound."""
    content: dict[str, Any] = {}
    if path is not None:
        _, content = read_toml(Path(path).expanduser(), "edge", "config")
    known = EdgeConfig.__struct_fields__
    for name in content:
        if name not in known:
            raise UnknownOption(f"{path} has {name!r}", f"settings: {', '.join(known)}", suggest_name(name, known))
    content |= {name: value for name, value in flags.items() if value is not None and name != "sip"}
    sip = content.get("sip", {}), flags.get("sip") or {}
    if any(sip):
        content["sip"] = load_sip_config(*sip)
    return EdgeConfig(**content)
