"""Settings of the telephone: the table `[sip]` of the edge's file, and flags. Frozen."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from asr_serve.config import sip_password
from asr_serve.edge.sip.digest import DIGEST_ALGORITHMS, DigestAlgorithm
from asr_serve.edge.sip.message import MalformedSip, SipUri, parse_uri
from asr_serve.edge.sip.session_description import CALL_ENCODINGS, CallEncoding
from asr_serve.errors import OptionError, UnknownOption
from asr_serve.types import Host, Port, PositiveInt, coerce_fields, is_loopback, suggest_name

SipUser = Annotated[str, Meta(pattern=r"\A[\w.+~-]{1,64}\Z", description="a user's name, without its host")]
Secret = Annotated[str, Meta(pattern=r"\A[ !#-\[\]-~]{0,128}\Z", description="visible ASCII without quotes, up to 128")]


class SipConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the telephone. Raises OptionError for a value of the wrong type or out of range."""

    host: Host = "127.0.0.1"
    """Address of this machine for SIP; 0.0.0.0 or :: is every one."""
    port: Port = 5_060
    """UDP and TCP port for it; 0 takes any free one."""
    tcp: bool = True
    """Whether connections are taken too."""
    public_host: Host | None = None
    """IP address that others reach this machine at. None: the one that it reaches them from."""
    user: SipUser = "asr-serve"
    """Name of this telephone, and of its account."""
    registrar: str | None = None
    """Exchange that the account is registered at, like sip:pbx.example.org;transport=tcp. None: none is."""
    auth_user: SipUser | None = None
    """Name in credentials, where it is not `user`."""
    password: Secret = ""
    """Password of the account. ASR_SERVE_SIP_PASSWORD comes before it."""
    expires_s: Annotated[int, Meta(ge=30, le=86_400)] = 300
    """Seconds for which a registration is wanted."""
    allow: tuple[str, ...] = ()
    """Networks whose messages are read, like 10.0.0.0/24, besides the registrar's address."""
    callers: dict[SipUser, Secret] = {}
    """Users and passwords of callers. With any, a call that does not come from the registrar needs one of them."""
    digests: tuple[DigestAlgorithm, ...] = DIGEST_ALGORITHMS
    """Algorithms of their digests, the first offered first: old telephones read one challenge only."""
    max_calls: PositiveInt = 64
    """Calls at once; one more is told that the line is busy."""
    ring_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """Seconds for which it rings before a call is answered."""
    hold_s: Annotated[float, Meta(ge=1, le=86_400)] = 3_600.0
    """Seconds for which a call may be on hold before it is ended."""
    encodings: tuple[CallEncoding, ...] = CALL_ENCODINGS
    """Encodings of calls, the preferred first."""

    def __post_init__(self) -> None:
        coerce_fields(self)
        for network in self.allow:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise OptionError(
                    f"sip.allow has {network[:60]!r}: {error}",
                    "networks or addresses",
                    "like 10.0.0.0/24",
                    param="allow",
                ) from None
        if self.registrar is not None:
            self.registrar_uri()
        for name, known in (("encodings", CALL_ENCODINGS), ("digests", DIGEST_ALGORITHMS)):
            if not getattr(self, name):
                raise OptionError(f"sip.{name} is empty", f"any of: {', '.join(known)}", param=name)
        if not is_loopback(self.host) and not (self.allow or self.callers or self.registrar):
            raise OptionError(
                f"sip.host={self.host!r} without allow, callers or registrar",
                "a telephone that others reach says who may call",
                'set allow = ["10.0.0.0/24"], callers or registrar, or leave host at 127.0.0.1',
                param="allow",
            )

    def registrar_uri(self) -> SipUri:
        """Address of the registrar. Raises OptionError."""
        try:
            uri = parse_uri(self.registrar or "")
        except MalformedSip as malformed:
            raise OptionError(
                f"sip.registrar={self.registrar!r}: {malformed}",
                "a SIP URI without a user",
                "like sip:pbx.example.org:5060;transport=tcp",
                param="registrar",
            ) from None
        if uri.scheme != "sip" or uri.user or uri.transport not in ("udp", "tcp"):
            raise OptionError(
                f"sip.registrar={self.registrar!r}",
                "sip:HOST, with a port and transport=udp or tcp; the user is sip.user; TLS is not spoken",
                param="registrar",
            )
        return uri


def load_sip_config(table: object, flags: object) -> SipConfig:
    """Joins the table of a file with flags. Raises OptionError, UnknownOption."""
    if not isinstance(table, Mapping) or not isinstance(flags, Mapping):
        raise OptionError(f"sip={str(table)[:60]!r}", "a table", "like [sip]", param="sip")
    fields: dict[str, Any] = {**table, **{name: value for name, value in flags.items() if value is not None}}
    known = SipConfig.__struct_fields__
    for name in fields:
        if name not in known:
            raise UnknownOption(f"sip has {name[:60]!r}", f"settings: {', '.join(known)}", suggest_name(name, known))
    if (password := sip_password()) is not None:
        fields["password"] = password
    return SipConfig(**fields)
