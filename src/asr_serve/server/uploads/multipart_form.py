"""Push parser of a multipart form: separates fields from the bytes of the file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from urllib.parse import unquote

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from asr_serve.errors import MalformedRequest
from asr_serve.server.uploads.spool import Spool

FILE_FIELD = "file"
"""Field of the file, unless a protocol names another."""
PREAMBLE_BYTES = 4_096
"""Longest text before the first boundary. Mail clients write a line there, HTTP clients nothing."""

_PARAMETER = re.compile(r';\s*([^\s=;"]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;"]*))', re.DOTALL)
_ESCAPED = re.compile(r'\\(["\\])')  # only these: the backslash in "C:\new.wav" is literal
_FORM = "send the audio as multipart/form-data, as curl -F file=@audio.wav does"


class FormLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the fields of one form, which are all held in memory."""

    max_fields: int = 64
    max_repeats: dict[str, int] = {}
    """Name -> most repetitions of a field that is sent once per list item; `max_fields` does not count these."""
    max_field_bytes: int = 65_536
    max_bytes_by_field: dict[str, int] = {}
    """Name without trailing brackets -> size limit of a field that may be longer."""
    max_text_bytes: int | None = None
    """Size of all fields together. None: limited only by their number and sizes."""


class MultipartForm:
    """Parses a body as it arrives: fields into `fields`, the file's bytes into the spool.

    Wraps a push parser that copies nothing; adds the meaning of a part's headers, and the text before the first
    boundary.

    Raises  MalformedRequest, from `write` too, which also raises what the spool does
    """

    def __init__(
        self, content_type: str, spool: Spool, limits: FormLimits, file_fields: Sequence[str] = (FILE_FIELD,)
    ) -> None:
        """`file_fields`: names of which one may be the file's."""
        self.fields: dict[str, list[str]] = {}
        self.file_field: str | None = None
        self.has_file = self.ended = False
        self.filename: str | None = None
        self.content_type: str | None = None
        self._spool, self._limits, self._file_fields = spool, limits, tuple(file_fields)
        self._boundary = _boundary(content_type)
        self._preamble: bytearray | None = bytearray(b"\r\n")  # so that the first boundary also begins a line
        self._field: str | None = None  # name of the current part; None for the file
        self._text_bytes = 0
        self._counts = Counter[str]()
        """Number of fields: by name for those that may be repeated, under "" for all others."""
        self._value = bytearray()
        self._header, self._headers = (bytearray(), bytearray()), dict[str, str]()
        try:
            self._parser = MultipartParser(
                self._boundary.encode(),
                {
                    "on_part_begin": lambda: self._headers.clear(),
                    "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._part_begin,
                    "on_part_data": self._part_data,
                    "on_part_end": self._part_end,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise MalformedRequest(f"the boundary in Content-Type cannot be used: {error}", todo=_FORM) from error

    def write(self, data: bytes) -> None:
        if self._preamble is not None:
            data = self._after_preamble(self._preamble, data)
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise MalformedRequest(f"the body is no well-formed multipart: {error}", todo=_FORM) from error

    def end_of_body(self) -> None:
        """Does nothing: the closing boundary ends a form."""

    def _after_preamble(self, preamble: bytearray, data: bytes) -> bytes:
        preamble += data
        start = preamble.find(f"\r\n--{self._boundary}".encode())
        if start >= 0:
            self._preamble = None
            return bytes(preamble[start:])
        if len(preamble) > PREAMBLE_BYTES:
            raise MalformedRequest(
                f"the body's first {len(preamble) - 2} bytes hold no boundary",
                f"it must begin with --{self._boundary}, as Content-Type says",
                _FORM,
            )
        return b""

    def _header_end(self) -> None:
        name, value = (part.decode(errors="replace").strip() for part in self._header)
        self._headers[name.lower()] = value
        for part in self._header:
            part.clear()

    def _part_begin(self) -> None:
        name, filename = self._named()
        if name in self._file_fields:
            if self.has_file:
                raise MalformedRequest("a second file came", "one file a request is allowed", "send a request for each")
            self.has_file, self._field, self.file_field, self.filename = True, None, name, filename
            self.content_type = self._headers.get("content-type")
            return
        if filename is not None:
            raise MalformedRequest(
                f"a file came as {_field(name)}", f"one file is allowed, in the field {self._file_names}", _FORM
            )
        self._begin_field(name)

    def _begin_field(self, name: str) -> None:
        self._field = name
        repeats = self._limits.max_repeats.get(name)
        key, limit = ("", self._limits.max_fields) if repeats is None else (name, repeats)
        self._counts[key] += 1
        if self._counts[key] > limit:
            fields = f"fields {name!r}" if key else "fields"
            raise MalformedRequest(f"more than {limit} {fields} came", "that many are allowed", "send fewer")

    def _named(self) -> tuple[str, str | None]:
        """Returns the field name of the current part, and its file name, if it has one."""
        parameters = _parameters(self._headers.get("content-disposition", ""))
        name, filename = parameters.get("name"), _filename(parameters)
        if name is None or "\ufffd" in name:
            raise MalformedRequest(
                "a part of the form has no name, or one that is not UTF-8",
                'each needs a line Content-Disposition: form-data; name="..."',
                _FORM,
            )
        encoding = self._headers.get("content-transfer-encoding", "binary").lower()
        if encoding not in ("binary", "8bit", "7bit"):
            raise MalformedRequest(
                f"{_field(name)} is encoded as {encoding[:80]!r}", "none is allowed in a form", _FORM
            )
        return name, filename

    @property
    def _file_names(self) -> str:
        return " or ".join(map(repr, self._file_fields))

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._spool.append(memoryview(data)[start:end])
            return
        limits, name = self._limits, self._field.removesuffix("[]")
        limit = limits.max_bytes_by_field.get(name, limits.max_field_bytes)
        if len(self._value) + end - start > limit:
            raise MalformedRequest(
                f"{_field(self._field)} holds more than {limit} bytes",
                "that many are allowed",
                f"send less; audio goes into the field {self._file_names}",
            )
        self._text_bytes += end - start
        if limits.max_text_bytes is not None and self._text_bytes > limits.max_text_bytes:
            raise MalformedRequest(
                f"the fields hold more than {limits.max_text_bytes} bytes", "that many in all", "send less"
            )
        self._value += memoryview(data)[start:end]

    def _part_end(self) -> None:
        if self._field is None:
            self._spool.end()
            return
        try:
            value = self._value.decode()
        except UnicodeDecodeError as error:
            raise MalformedRequest(
                f"{_field(self._field)} is not UTF-8: {error}", "text is UTF-8", "encode it so"
            ) from error
        self.fields.setdefault(self._field, []).append(value)
        self._value.clear()

    def _end(self) -> None:
        self.ended = True


def _boundary(content_type: str) -> str:
    kind = content_type.partition(";")[0].strip()
    boundary = _parameters(content_type).get("boundary", "")
    if kind.lower() != "multipart/form-data":
        raise MalformedRequest(
            f"a body of type {kind[:80]!r} came" if kind else "a body without a Content-Type came",
            "multipart/form-data is allowed",
            _FORM,
        )
    if not boundary or not boundary.isascii():
        raise MalformedRequest(
            "Content-Type names no boundary, or not in ASCII",
            "multipart/form-data; boundary=... is needed",
            "let the HTTP library write that header",
        )
    return boundary


def _parameters(header: str) -> dict[str, str]:
    """`form-data; Name="a\\"b"` -> {"name": 'a"b'}"""
    return {
        name.lower(): _ESCAPED.sub(r"\1", quoted) or token.strip() for name, quoted, token in _PARAMETER.findall(header)
    }


def _filename(parameters: dict[str, str]) -> str | None:
    """File name of a part. RFC 5987's form is preferred: the other is for servers that do not support it."""
    charset, _, rest = parameters.get("filename*", "").partition("'")
    if charset.lower() in ("utf-8", "iso-8859-1"):
        return unquote(rest.partition("'")[2], charset, "replace")
    return parameters.get("filename")


def _field(name: str) -> str:
    return f"the field {name[:80]!r}"
