"""SIP messages: parsed from bytes of unknown origin, and built. Source: RFC 3261, sections 7, 19, 20 and 25."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, Self

MAX_MESSAGE_BYTES = 65_535
MAX_HEADERS = 128
MAX_VALUE_CHARACTERS = 4_096
MAX_BODY_BYTES = 32_768
VERSION = "SIP/2.0"
MAGIC_COOKIE = "z9hG4bK"
"""Beginning of branches that are unique (RFC 3261, section 8.1.1.7)."""
DEFAULT_PORT = 5_060
_COMPACT = {"v": "via", "f": "from", "t": "to", "i": "call-id", "m": "contact", "l": "content-length"}
COMPACT_NAMES = _COMPACT | {"c": "content-type", "k": "supported", "s": "subject", "e": "content-encoding"}
LISTS = ("via", "route", "record-route", "contact", "allow", "supported", "require", "proxy-require")
"""Headers whose values are joined by commas as well as repeated. Those of digest have commas of their own."""
REQUIRED = ("via", "from", "to", "call-id", "cseq")
REASONS = dict(
    line.split(" ", 1)
    for line in (
        *("100 Trying", "180 Ringing", "200 OK", "400 Bad Request", "401 Unauthorized", "403 Forbidden"),
        *("405 Method Not Allowed", "408 Request Timeout", "415 Unsupported Media Type", "416 Unsupported URI Scheme"),
        *("420 Bad Extension", "480 Temporarily Unavailable", "481 Call/Transaction Does Not Exist"),
        *("482 Loop Detected", "486 Busy Here", "487 Request Terminated", "488 Not Acceptable Here"),
        *("500 Server Internal Error", "503 Service Unavailable"),
    )
)
"""Status as text -> its reason."""
_TOKEN = re.compile(r"[A-Za-z0-9!%*_+`'~.-]{1,64}")
_CSEQ = re.compile(r"(\d{1,10})[ \t]+(\S{1,64})", re.ASCII)
_STATUS = re.compile(r"SIP/2\.0 ([1-6]\d\d)(?: (.*))?")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,64}\]")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_VISIBLE = re.compile(r"[!-~]+")
_USER = re.compile(r"[A-Za-z0-9_.!~*'()%&=+$,;?/#:-]{1,256}")
_URI_VALUE = re.compile(r"[A-Za-z0-9_.!~*'()%&+$/:\[\]-]{0,256}")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


class MalformedSip(ValueError):
    """Bytes that are no SIP message. The text says what is wrong; the message is dropped."""


class SipUri(NamedTuple):
    """URI of the schemes sip and sips. `host` has no brackets."""

    host: str
    port: int | None = None
    user: str = ""
    params: tuple[tuple[str, str], ...] = ()
    scheme: str = "sip"

    @property
    def transport(self) -> str:
        return dict(self.params).get("transport", "udp").lower()

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}:{user}{bracketed(self.host)}{port}{_format_params(self.params)}"


class SipAddress(NamedTuple):
    """Value of From, To, Contact or Route: a URI, with a display name and parameters."""

    uri: str
    params: tuple[tuple[str, str], ...] = ()
    name: str = ""

    @property
    def tag(self) -> str:
        return dict(self.params).get("tag", "")

    def with_param(self, name: str, value: str) -> SipAddress:
        return self._replace(params=(*(each for each in self.params if each[0] != name), (name, value)))

    def __str__(self) -> str:
        name = '"' + self.name.replace("\\", "\\\\").replace('"', '\\"') + '" ' if self.name else ""
        return f"{name}<{self.uri}>{_format_params(self.params)}"


class SipVia(NamedTuple):
    """Value of Via: one hop of a request's way."""

    transport: str
    host: str
    port: int | None
    params: tuple[tuple[str, str], ...]

    @property
    def branch(self) -> str:
        return dict(self.params).get("branch", "")

    def __str__(self) -> str:
        port = "" if self.port is None else f":{self.port}"
        return f"{VERSION}/{self.transport.upper()} {bracketed(self.host)}{port}{_format_params(self.params)}"


class SipMessage:
    """Request or response. Names of headers are in lower case and in full."""

    def __init__(self, headers: Iterable[tuple[str, str]], body: bytes = b"") -> None:
        self.headers: list[tuple[str, str]] = list(headers)
        self.body = body

    @property
    def start_line(self) -> str:
        raise NotImplementedError

    def get(self, name: str) -> str:
        """First value of a header; nothing where there is none."""
        return next((value for each, value in self.headers if each == name), "")

    def get_all(self, name: str) -> list[str]:
        return [value for each, value in self.headers if each == name]

    def set(self, name: str, value: str) -> Self:
        """Replaces a header, in its place; adds it where there is none."""
        at = next((number for number, (each, _) in enumerate(self.headers) if each == name), len(self.headers))
        self.headers = [header for header in self.headers if header[0] != name]
        self.headers.insert(at, (name, value))
        return self

    def add(self, name: str, value: str) -> Self:
        self.headers.append((name, value))
        return self

    @property
    def call_id(self) -> str:
        return self.get("call-id")

    @property
    def cseq(self) -> tuple[int, str]:
        """Number and method."""
        number, method = self.get("cseq").split(None, 1)
        return int(number), method

    @property
    def sender(self) -> SipAddress:
        """Address in From."""
        return parse_address(self.get("from"))

    @property
    def recipient(self) -> SipAddress:
        """Address in To."""
        return parse_address(self.get("to"))

    @property
    def via(self) -> SipVia:
        """First Via."""
        return parse_via(self.get("via"))

    def encode(self) -> bytes:
        lines = [self.start_line]
        lines += [f"{_display_name(name)}: {value}" for name, value in self.headers if name != "content-length"]
        lines.append(f"Content-Length: {len(self.body)}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + self.body


class SipRequest(SipMessage):
    """Request of a method to a URI."""

    def __init__(self, method: str, uri: str, headers: Iterable[tuple[str, str]], body: bytes = b"") -> None:
        super().__init__(headers, body)
        self.method, self.uri = method, uri

    @property
    def start_line(self) -> str:
        return f"{self.method} {self.uri} {VERSION}"


class SipResponse(SipMessage):
    """Response with a status from 100 to 699."""

    def __init__(self, status: int, reason: str, headers: Iterable[tuple[str, str]], body: bytes = b"") -> None:
        super().__init__(headers, body)
        self.status, self.reason = status, reason

    @property
    def start_line(self) -> str:
        return f"{VERSION} {self.status} {self.reason}"


def respond_to(request: SipRequest, status: int, tag: str = "", reason: str = "") -> SipResponse:
    """Response with the headers that it takes from its request. `tag`: ours, for To."""
    headers = [(name, value) for name, value in request.headers if name in ("via", "from", "call-id", "cseq")]
    recipient = request.get("to")
    if tag and status > 100 and not parse_address(recipient).tag:
        recipient = f"{recipient};tag={tag}"
    headers.insert(-2, ("to", recipient))
    headers += [("record-route", value) for value in request.get_all("record-route")]
    return SipResponse(status, reason or REASONS.get(str(status), "Unknown"), headers)


# --- parsing -----------------------------------------------------------------------------------------------


def parse_sip(data: bytes) -> SipRequest | SipResponse:
    """Parses a datagram, or what SipFrameSplitter cut from a stream. Raises MalformedSip, and nothing else."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedSip(f"{len(data)} bytes")
    head, separator, body = data.lstrip(b"\r\n").partition(b"\r\n\r\n")
    if not separator:
        head, _, body = data.lstrip(b"\r\n").partition(b"\n\n")
    try:
        text = head.decode()
    except UnicodeDecodeError:
        raise MalformedSip("headers that are not UTF-8") from None
    first, *lines = re.split(r"\r?\n", text)
    headers = _parse_headers(lines)
    body = _cut_body(headers, body)
    message: SipRequest | SipResponse
    if first.startswith("SIP/"):
        match = _STATUS.fullmatch(first)
        if match is None or _CONTROL.search(first):
            raise MalformedSip("a status line")
        message = SipResponse(int(match[1]), match[2] or "", headers, body)
    else:
        parts = first.split(" ")
        if len(parts) != 3 or parts[2] != VERSION or not _TOKEN.fullmatch(parts[0]) or not parts[1]:
            raise MalformedSip("a request line")
        if _CONTROL.search(parts[1]) or len(parts[1]) > MAX_VALUE_CHARACTERS:
            raise MalformedSip("a request URI")
        message = SipRequest(parts[0], parts[1], headers, body)
    _check(message)
    return message


def _parse_headers(lines: list[str]) -> list[tuple[str, str]]:
    unfolded: list[str] = []
    for line in lines:
        if line[:1] in (" ", "\t") and unfolded:
            unfolded[-1] += " " + line.strip()
        elif line:
            unfolded.append(line)
    if len(unfolded) > MAX_HEADERS:
        raise MalformedSip(f"{len(unfolded)} headers")
    headers: list[tuple[str, str]] = []
    for line in unfolded:
        name, colon, value = line.partition(":")
        name = name.rstrip(" \t").lower()
        value = value.strip(" \t")
        if not colon or not _TOKEN.fullmatch(name) or len(value) > MAX_VALUE_CHARACTERS or _CONTROL.search(value):
            raise MalformedSip("a header")
        name = COMPACT_NAMES.get(name, name)
        headers += [(name, each) for each in (split_list(value) if name in LISTS else [value])]
        if len(headers) > MAX_HEADERS:
            raise MalformedSip("too many values of headers")
    return headers


def _cut_body(headers: list[tuple[str, str]], body: bytes) -> bytes:
    lengths = {value for name, value in headers if name == "content-length"}
    if not lengths:
        return body[:MAX_BODY_BYTES]
    length = next(iter(lengths))
    if len(lengths) > 1 or not (length.isascii() and length.isdigit()) or len(length) > 6:
        raise MalformedSip("a length of the body")
    if int(length) > len(body) or int(length) > MAX_BODY_BYTES:
        raise MalformedSip("a body that is shorter than its length, or too long")
    return body[: int(length)]


def _check(message: SipRequest | SipResponse) -> None:
    for name in REQUIRED:
        values = message.get_all(name)
        if not values or not values[0] or (len(values) > 1 and name != "via"):
            raise MalformedSip(f"no {name}, or several")
    match = _CSEQ.fullmatch(message.get("cseq"))
    if match is None or int(match[1]) >= 1 << 31:
        raise MalformedSip("a cseq")
    if isinstance(message, SipRequest) and match[2] != message.method:
        raise MalformedSip("a cseq of another method")
    message.via  # noqa: B018  # parsed for its errors, as are these
    message.recipient  # noqa: B018
    if not message.sender.tag and isinstance(message, SipRequest) and message.method in ("INVITE", "BYE"):
        raise MalformedSip("no tag in From")


def split_list(value: str) -> list[str]:
    """Parts between commas that are not inside quotes or angle brackets."""
    parts, depth, quoted, start, skip = [], 0, False, 0, False
    for at, character in enumerate(value):
        if skip:
            skip = False
        elif quoted:
            skip = character == "\\"
            quoted = character != '"'
        elif character == '"':
            quoted = True
        elif character in "<>":
            depth += 1 if character == "<" else -1
        elif character == "," and depth <= 0:
            parts.append(value[start:at].strip())
            start = at + 1
    parts.append(value[start:].strip())
    return [part for part in parts if part]


def parse_params(text: str) -> tuple[tuple[str, str], ...]:
    """Parameters like `;tag=1;lr`, names in lower case, values without quotes."""
    params = []
    for part in _split_outside_quotes(text, ";"):
        name, _, value = part.partition("=")
        if name := name.strip().lower():
            params.append((name, unquoted(value.strip())))
    return tuple(params)


def _split_outside_quotes(text: str, separator: str) -> list[str]:
    """Parts between separators that are in no quoted string."""
    masked = _QUOTED.sub(lambda match: "\0" * len(match[0]), text)
    parts, start = [], 0
    for at, character in enumerate(masked):
        if character == separator:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] == '"':
        return re.sub(r"\\(.)", r"\1", value[1:-1])
    return value


def parse_address(value: str) -> SipAddress:
    """Parses `"Name" <sip:a@b>;tag=1`. Raises MalformedSip."""
    name = ""
    rest = value.strip()
    if rest.startswith('"'):
        match = _QUOTED.match(rest)
        if match is None:
            raise MalformedSip("a display name")
        name, rest = unquoted(match[0]), rest[match.end() :].strip()
    before, bracket, after = rest.partition("<")
    if bracket:
        uri, closed, params = after.partition(">")
        if not closed:
            raise MalformedSip("an address")
        name = name or before.strip()
    else:  # what follows is of the header, not of the URI
        uri, _, params = rest.partition(";")
    uri = uri.strip()
    if not uri or " " in uri or not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:|\*", uri):
        raise MalformedSip("an address")
    return SipAddress(uri, parse_params(params), name)


def parse_uri(text: str) -> SipUri:
    """Parses `sip:alice@10.0.0.1:5060;transport=tcp`, without headers behind `?`. Raises MalformedSip for another
    scheme, too."""
    if not _VISIBLE.fullmatch(text):
        raise MalformedSip("a URI with spaces, control characters or letters beyond ASCII")
    scheme, colon, rest = text.partition(":")
    scheme = scheme.lower()
    if not colon or scheme not in ("sip", "sips"):
        raise MalformedSip("a URI of another scheme")
    user, at, tail = rest.rpartition("@")  # a user may have a `?`, and headers have no `@`
    tail, _, _ = tail.partition("?")
    place, _, text = tail.partition(";")
    host, port = _split_port(place)
    if at and not _USER.fullmatch(user):
        raise MalformedSip("the user of a URI")
    params = parse_params(text)
    if any(not _TOKEN.fullmatch(name) or not _URI_VALUE.fullmatch(value) for name, value in params):
        raise MalformedSip("a parameter of a URI")
    return SipUri(host, port, user.partition(":")[0], params, scheme)


def parse_via(value: str) -> SipVia:
    """Parses `SIP/2.0/UDP 10.0.0.1:5060;branch=z9hG4bK1`. Raises MalformedSip."""
    place, _, params = value.partition(";")
    match = re.fullmatch(r"SIP\s*/\s*2\.0\s*/\s*([A-Za-z]{1,8})\s+(\S+(?:\s*:\s*\d+)?)\s*", place)
    if match is None:
        raise MalformedSip("a Via")
    host, port = _split_port(re.sub(r"\s", "", match[2]))
    return SipVia(match[1].lower(), host, port, parse_params(params))


def _split_port(place: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(.+?)(?::(\d{1,5}))?", place.strip(), re.ASCII)
    if match is None or not _HOST.fullmatch(match[1]) or int(match[2] or 1) not in range(1, 1 << 16):
        raise MalformedSip("a host and port")
    return match[1].strip("[]"), int(match[2]) if match[2] else None


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _format_params(params: tuple[tuple[str, str], ...]) -> str:
    def shown(value: str) -> str:
        plain = re.fullmatch(r"[A-Za-z0-9!%*_+`'~.:\[\]/-]+", value)
        return value if plain else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'

    return "".join(f";{name}={shown(value)}" if value else f";{name}" for name, value in params)


def _display_name(name: str) -> str:
    special = {"call-id": "Call-ID", "cseq": "CSeq", "www-authenticate": "WWW-Authenticate"}
    return special.get(name) or "-".join(part.capitalize() for part in name.split("-"))


class SipFrameSplitter:
    """Splitter of a TCP stream into messages, by their Content-Length. Raises MalformedSip, after which the stream
    cannot be followed any more."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Whole messages so far. Pings, which are blank lines (RFC 5626), are passed over."""
        self._buffer += data
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        if len(self._buffer) > MAX_MESSAGE_BYTES:
            raise MalformedSip(f"a message beyond {MAX_MESSAGE_BYTES} bytes")
        return messages

    def _next(self) -> bytes | None:
        blank = len(self._buffer) - len(self._buffer.lstrip(b"\r\n"))
        del self._buffer[:blank]
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = bytes(self._buffer[:end]).lower()
        match = re.search(rb"\r\n(?:content-length|l)[ \t]*:[ \t]*(\d{1,6})[ \t]*(?=\r\n|$)", head)
        if match is None:
            raise MalformedSip("no length of the body")
        whole = end + 4 + int(match[1])
        if whole > MAX_MESSAGE_BYTES:
            raise MalformedSip(f"a message of {whole} bytes")
        if len(self._buffer) < whole:
            return None
        message = bytes(self._buffer[:whole])
        del self._buffer[:whole]
        return message
