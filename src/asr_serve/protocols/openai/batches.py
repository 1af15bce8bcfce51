"""OpenAI's files and batches: objects, requests, and the lines of a batch's input and output.

A batch is a JSONL file whose lines are requests of one endpoint. Its answers are two files of the same kind: one line
for each request that was answered, and one for each that failed.

Source  the API reference of /v1/files and /v1/batches, as openai 3.52 for Python sends and reads them
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from asr_serve.errors import MissingOption, OptionError, UnsupportedOption
from asr_serve.protocols.data_urls import decode_data_url
from asr_serve.protocols.form_fields import FormFields, quote_for_message
from asr_serve.protocols.json_members import JsonMembers, decode_json
from asr_serve.protocols.openai.events import Problem

BatchEndpoint = Literal["/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech"]
ENDPOINTS: tuple[BatchEndpoint, ...] = get_args(BatchEndpoint)
SPEECH_ENDPOINT: BatchEndpoint = "/v1/audio/speech"
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED_STATUSES: tuple[BatchStatus, ...] = ("failed", "completed", "expired", "cancelled")
UPLOAD_PURPOSES = ("batch", "user_data")
"""Purposes of uploaded files: `batch` for the lines of a batch, either for audio."""
OUTPUT_PURPOSE = "batch_output"
FILE_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
"""Every field of an upload but the file."""
BATCH_MEMBERS = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")
MAX_LINES = 50_000
"""Limit of the requests in one batch: OpenAI's."""
MAX_INPUT_BYTES = 200 << 20
"""Limit of the input of a batch: OpenAI's."""
MAX_LINE_BYTES = 16 << 20
"""Limit of one line: 12 MB of audio in base64, six minutes of 16 kHz PCM. Longer audio is uploaded."""
MAX_CUSTOM_ID_CHARACTERS = 512
MAX_LINE_ERRORS = 100
"""Errors of lines that a batch names; further ones are left out."""
MIN_EXPIRY_S, MAX_EXPIRY_S = 3_600, 2_592_000
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
MAX_BATCH_BODY_BYTES = 64 << 10
MAX_WINDOW_S = 30 * 86_400
MAX_LIST, DEFAULT_LIST, MAX_FILE_LIST = 100, 20, 10_000
_WINDOW_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def _numbers_up_to(most: int) -> str:
    """Pattern of the whole numbers from 1 to `most`, for a schema that has no ranges of texts.

    >>> _numbers_up_to(30)
    '[1-9][0-9]{0,0}|[1-2][0-9]{1}|30'
    """
    digits = str(most)
    found = [f"[1-9][0-9]{{0,{len(digits) - 2}}}"] if len(digits) > 1 else []
    for place, digit in enumerate(digits):
        low, high, rest = int(place == 0), int(digit) - 1, len(digits) - place - 1
        if high >= low:
            found.append(f"{digits[:place]}[{low}-{high}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return "|".join([*found, digits])


_WINDOWS = (f"({_numbers_up_to(MAX_WINDOW_S // unit_s)}){unit}" for unit, unit_s in _WINDOW_S.items())
WINDOW_PATTERN = f"^({'|'.join(_WINDOWS)})$"
"""Pattern of `completion_window`: a number with s, m, h or d, up to 30 days."""
WINDOWS_ALLOWED = "a number with s, m, h or d, up to 30d, like 24h"
_WINDOW = re.compile(WINDOW_PATTERN)
_FILE_ID = re.compile(r"file-[0-9a-f]{1,64}", re.ASCII)
_LINE_EXAMPLE = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/audio/transcriptions", "body": {"model": "whisper-1", '
    '"file": "file-..."}}'
)


# --- objects ----------------------------------------------------------------------------------------------


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """File of /v1/files."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    """Unix time, as all times here."""
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileDeleted(msgspec.Struct, frozen=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class FileList(msgspec.Struct, frozen=True):
    """Page of files."""

    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class BatchRequestCounts(msgspec.Struct, frozen=True):
    """Number of a batch's requests: all, answered, failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchLineError(msgspec.Struct, frozen=True):
    """Error of a line of an input file, or of all of it."""

    code: str
    message: str
    line: int | None
    """Number of the line, from 1."""
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True):
    data: list[BatchLineError]
    object: Literal["list"] = "list"


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Batch of requests."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: BatchEndpoint
    errors: BatchErrors | None = None
    """Reasons why it failed."""
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None = None
    """File with the answers, once it has ended; None where there are none."""
    error_file_id: str | None = None
    """File with the errors, once it has ended; None where there are none."""
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchRequestCounts = BatchRequestCounts()
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct, frozen=True):
    """Page of batches, the newest first."""

    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class BatchNoticeData(msgspec.Struct, frozen=True):
    id: str


class BatchNotice(msgspec.Struct, frozen=True):
    """Event of a webhook: a batch has ended."""

    id: str
    created_at: int
    type: str
    """`batch.completed`, `batch.failed`, `batch.expired` or `batch.cancelled`."""
    data: BatchNoticeData
    object: Literal["event"] = "event"


# --- requests ---------------------------------------------------------------------------------------------


class FileForm(NamedTuple):
    """Fields of an upload."""

    purpose: str
    expires_after_s: int | None


class BatchRequest(msgspec.Struct, frozen=True):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: BatchEndpoint
    completion_window: str
    window_s: int
    metadata: dict[str, str] | None
    output_expires_after_s: int | None


def parse_file_form(sent: Mapping[str, Sequence[str]]) -> FileForm:
    """Parses the fields of an upload. Raises OptionError."""
    fields = FormFields(sent, FILE_FIELDS)
    purpose = fields.choice("purpose", UPLOAD_PURPOSES)
    if purpose is None:
        raise MissingOption("purpose is missing", f"one of: {', '.join(UPLOAD_PURPOSES)}", param="purpose")
    anchor = fields.choice("expires_after[anchor]", ["created_at"])
    seconds = fields.integer("expires_after[seconds]", MIN_EXPIRY_S, MAX_EXPIRY_S)
    if (anchor is None) != (seconds is None):
        missing = "anchor" if anchor is None else "seconds"
        raise MissingOption(
            f"expires_after[{missing}] is missing", "anchor and seconds, or none", param=f"expires_after[{missing}]"
        )
    return FileForm(purpose, seconds)


def parse_batch_request(body: bytes) -> BatchRequest:
    """Parses the body of POST /v1/batches. Raises MalformedRequest, OptionError."""
    example = 'a body is like {"input_file_id": "file-...", "endpoint": "/v1/audio/speech", "completion_window": "24h"}'
    members = JsonMembers(decode_json(body, dict[str, Any], "a body came that is no JSON object", example))
    input_file = members.text("input_file_id")
    if input_file is None:
        raise MissingOption(
            "input_file_id is missing", "the id of a file of /v1/files, with the purpose batch", param="input_file_id"
        )
    endpoint: Any = members.required("endpoint", ENDPOINTS)
    window, window_s = _window(members)
    metadata = _metadata(members)
    output_s = _output_expiry(members)
    members.refuse_or_ignore_unknown()
    return BatchRequest(input_file, endpoint, window, window_s, metadata, output_s)


def _window(members: JsonMembers) -> tuple[str, int]:
    text = members.text("completion_window")
    if text is None:
        raise MissingOption("completion_window is missing", WINDOWS_ALLOWED, param="completion_window")
    return text, parse_window(text)


def parse_window(text: str) -> int:
    """Parses a completion window; returns seconds. Raises OptionError.

    >>> parse_window("90m")
    5400
    """
    if not _WINDOW.fullmatch(text):
        raise OptionError(f"completion_window={quote_for_message(text)}", WINDOWS_ALLOWED, param="completion_window")
    return int(text[:-1]) * _WINDOW_S[text[-1]]


def _metadata(members: JsonMembers) -> dict[str, str] | None:
    sent = members.pop("metadata")
    if sent is None:
        return None
    allowed = (
        f"an object of up to {MAX_METADATA} texts of up to {MAX_METADATA_VALUE} characters,"
        f" with names of up to {MAX_METADATA_KEY}"
    )
    valid = isinstance(sent, dict) and len(sent) <= MAX_METADATA
    if not valid or any(
        not isinstance(value, str) or len(name) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE
        for name, value in sent.items()
    ):
        raise OptionError(f"metadata is {quote_for_message(str(sent))}", allowed, param="metadata")
    return dict(sent)


def _output_expiry(members: JsonMembers) -> int | None:
    sent = members.object("output_expires_after")
    if sent is None:
        return None
    sent.required("anchor", ("created_at",))
    seconds = sent.integer("seconds", MAX_EXPIRY_S, 0)
    if not seconds:
        raise MissingOption(
            "output_expires_after.seconds is missing",
            f"{MIN_EXPIRY_S} to {MAX_EXPIRY_S}",
            param="output_expires_after.seconds",
        )
    if seconds < MIN_EXPIRY_S:
        raise OptionError(
            f"output_expires_after.seconds is {seconds}",
            f"{MIN_EXPIRY_S} to {MAX_EXPIRY_S}",
            param="output_expires_after.seconds",
        )
    sent.refuse_or_ignore_unknown()
    return seconds


class ListQuery(NamedTuple):
    """Page of a list that is requested."""

    after: str | None
    limit: int
    ascending: bool = False
    purpose: str | None = None


def parse_list_query(sent: Mapping[str, Sequence[str]], *, files: bool) -> ListQuery:
    """Parses the query of GET /v1/files or /v1/batches. Raises OptionError."""
    fields = FormFields(sent, ("after", "limit", *(("order", "purpose") if files else ())))
    limit = fields.integer("limit", 1, MAX_FILE_LIST if files else MAX_LIST)
    if not files:
        return ListQuery(fields.text("after"), limit or DEFAULT_LIST)
    order = fields.choice("order", ["asc", "desc"])
    purpose = fields.choice("purpose", [*UPLOAD_PURPOSES, OUTPUT_PURPOSE])
    return ListQuery(fields.text("after"), limit or MAX_FILE_LIST, order == "asc", purpose)


# --- lines ------------------------------------------------------------------------------------------------


class InputLine(msgspec.Struct, frozen=True):
    """Request of a line of a batch's input."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class LineAudio(NamedTuple):
    """Audio that a line names: the id of a file, or the bytes themselves."""

    file_id: str | None
    data: bytes = b""


def parse_line(line: bytes, endpoint: str) -> InputLine:
    """Parses a line of a batch for `endpoint`, but not the body of its request. Raises MalformedRequest,
    OptionError."""
    found = decode_json(line, InputLine, "a line that is no request", f"a line is like {_LINE_EXAMPLE}")
    if not 0 < len(found.custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
        raise OptionError(
            f"custom_id has {len(found.custom_id)} characters", f"1 to {MAX_CUSTOM_ID_CHARACTERS}", param="custom_id"
        )
    if found.method != "POST":
        raise OptionError(f"method={quote_for_message(found.method)}", "POST", param="method")
    if found.url != endpoint:
        raise OptionError(
            f"url={quote_for_message(found.url)} in a batch for {endpoint}", f"{endpoint} in every line", param="url"
        )
    if not bytes(found.body).startswith(b"{"):
        raise OptionError("body is no object", "the members of one request", param="body")
    return found


def parse_line_body(line: InputLine) -> dict[str, Any]:
    """Decodes the body of a line. Raises MalformedRequest."""
    return decode_json(
        bytes(line.body), dict[str, Any], "the body is no JSON object", f"a line is like {_LINE_EXAMPLE}"
    )


def pop_line_audio(body: dict[str, Any]) -> LineAudio:
    """Removes the audio from the body of a transcription, and returns it: `file`, the id of an uploaded file or a data
    URL; `file_id`, the id. Raises OptionError."""
    sent = {name: body.pop(name) for name in ("file", "file_id") if body.get(name) is not None}
    allowed = "the id of a file of /v1/files, or the audio as data:audio/wav;base64,..."
    if not sent:
        raise MissingOption("file is missing", allowed, param="file")
    if len(sent) > 1:
        raise OptionError("file came beside file_id", "one of them", param="file_id")
    ((name, value),) = sent.items()
    if isinstance(value, str) and _FILE_ID.fullmatch(value):
        return LineAudio(value)
    if isinstance(value, str) and name == "file" and value[:5].casefold() == "data:":
        return LineAudio(None, decode_data_url(value, "file"))
    raise OptionError(f"{name} is {quote_for_message(str(value))}", allowed, param=name)


def line_fields(body: Mapping[str, Any]) -> dict[str, list[str]]:
    """Fields of a form that say the same as the members of a line's body: a list is a field that comes more than once.
    Raises UnsupportedOption for a stream."""
    if body.get("stream"):
        raise UnsupportedOption(
            "stream=true in a batch", "answers are written whole", "leave stream out", param="stream"
        )
    fields: dict[str, list[str]] = {}
    for name, value in body.items():
        if value is not None:
            fields[name] = [_form_value(item) for item in (value if isinstance(value, list) else [value])]
    return fields


def _form_value(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


class LineResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """Response to the request of a line."""

    status_code: int
    request_id: str
    body: msgspec.Raw
    ignored: str = ""
    """Fields of the request that had no effect. Ours."""


class OutputLine(msgspec.Struct, frozen=True):
    """Line of a batch's output, or of its errors: a response, or the reason why there is none."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: Problem | None


class LineSpeech(msgspec.Struct, frozen=True):
    """Body of the response of a line for /v1/audio/speech: its audio is a file."""

    file_id: str
    bytes: int
    content_type: str
    seconds: float
    """Duration of the audio."""
    model: str
    voice: str
    object: Literal["audio.speech"] = "audio.speech"
