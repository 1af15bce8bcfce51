"""`asr-serve batch`: submits recordings to a server's queue, follows them, fetches their answers, cancels."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import typer

from asr_serve.api.cli.exit_codes import FAILED, exit_on_error, print_error
from asr_serve.api.cli.io.upload_record import UploadRecord, upload_record
from asr_serve.api.cli.models import as_text, print_table
from asr_serve.api.cli.options import AsJson
from asr_serve.api.cli.progress import WorkProgress
from asr_serve.config import client_key, submissions_dir
from asr_serve.errors import OptionError, Refused, SourceNotFound, Unreachable
from asr_serve.output_file import replaced_file

app = typer.Typer(
    no_args_is_help=True, help="Recordings that a server answers whenever it has time: submit, status, fetch, cancel."
)

SERVER = "http://127.0.0.1:8000"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
ENDED = ("completed", "failed", "expired", "cancelled")
UNSUCCESSFUL = ("failed", "expired", "cancelling", "cancelled")
CHUNK_BYTES = 1 << 20
FOLLOW_S = 2.0
"""Time between two looks at a batch."""
ATTEMPTS, RETRY_S = 8, 1.0
MAX_LISTED_FILES = 100
"""Number of the server's newest files that are searched for one whose upload has no known result."""
MAX_NAME_CHARACTERS = 200
"""Length of the file names that servers store; they cut longer ones at the start."""
T = TypeVar("T")

Server = Annotated[str, typer.Option(metavar="URL", help="Server with the queue.")]
Key = Annotated[
    str | None, typer.Option("--api-key", metavar="KEY", help="API key; safer in the variable ASR_SERVE_API_KEY.")
]
BatchId = Annotated[str, typer.Argument(metavar="BATCH", help="Id of a batch: batch_...", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


@app.command("submit", no_args_is_help=True)
@exit_on_error
def submit(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER|FILE.jsonl",
            help="Folder of recordings; or requests, one on a line: custom_id, method, url, body. A body's `file` "
            "that is the path of a recording is uploaded.",
            show_default=False,
        ),
    ],
    model: Annotated[str | None, typer.Option("--model", "-m", help="Model. Default: the server's own.")] = None,
    language: Annotated[str | None, typer.Option("--language", "-l", help="Language, like en.")] = None,
    response_format: Annotated[
        str, typer.Option("--format", "-f", help="Format of the answers: json, text, srt, vtt, verbose_json, ...")
    ] = "json",
    window: Annotated[
        str, typer.Option(metavar="TIME", help="Time after which open requests are given up: 24h, 90m, 7d.")
    ] = "24h",
    follow: Annotated[bool, typer.Option("--follow", help="Wait for the end of the batch.")] = False,
    server: Server = SERVER,
    api_key: Key = None,
    quiet: Quiet = False,
) -> int:
    """Upload recordings and have them answered whenever the server has time.

    Callers of the server come first; the batch takes what they leave, and goes
    on after a restart. The id of the batch is written on stdout. Answers of a
    folder have the path of their recording as custom_id. The same command
    resumes an interrupted submission: files that the server has are not
    uploaded again.

    \b
    Examples
      asr-serve batch submit calls/
      asr-serve batch submit calls/ -f verbose_json -l en --window 7d --follow
      asr-serve batch submit requests.jsonl
      asr-serve batch fetch $(asr-serve batch submit calls/ --follow) -o answers/

    \b
    A line of requests.jsonl
      {"custom_id": "1", "method": "POST", "url": "/v1/audio/transcriptions",
       "body": {"file": "calls/1.wav", "response_format": "verbose_json"}}
    """
    from asr_serve.protocols.openai.batches import MAX_LINES, parse_window

    window_s = parse_window(window)
    if source.is_dir():
        options = {"model": model, "language": language, "response_format": response_format}
        requests, endpoint = _folder_requests(source, options), TRANSCRIPTIONS
        base = Path()
    else:
        requests, endpoint = _file_requests(source)
        base = source.parent
    if len(requests) > MAX_LINES:
        raise OptionError(
            f"{source} has {len(requests)} requests", f"up to {MAX_LINES} in a batch", "submit it in several parts"
        )
    session = _Session(server, api_key)
    with upload_record(submissions_dir(), server, session.key, source) as record, _resume_hint(record):
        lines, uploads = [], _Uploads(session, record, window_s)
        with WorkProgress(print_error, shown=not quiet) as progress:
            for number, request in enumerate(requests):
                body = request["body"]
                path = base / body["file"] if isinstance(body.get("file"), str) and not _is_sent(body["file"]) else None
                if path is not None:
                    progress.update(number / len(requests), "uploading", f"{number} of {len(requests)}")
                    body = {**body, "file": uploads.file_id(path)}
                lines.append(json.dumps({**request, "body": body}, ensure_ascii=False))
            input_id = uploads.lines_id("\n".join(lines).encode())
        if uploads.resumed and not quiet:
            print_error(f"{uploads.resumed} of {len(requests)} recordings were there from an interrupted submission")

        def create() -> Any:
            return session.ask(
                "POST",
                "/v1/batches",
                {"input_file_id": input_id, "endpoint": endpoint, "completion_window": window},
                {"Idempotency-Key": record.idempotency_key(input_id, endpoint, window)},
                repeatable=True,
            )

        created = create()
        if created["status"] in UNSUCCESSFUL:  # the batch of the interrupted submission, which is of no use any more
            record.renew_token()
            created = create()
        print(created["id"], flush=True)
    return _follow(session, created["id"], quiet) if follow else 0


@app.command("status")
@exit_on_error
def status(
    batch: Annotated[
        str | None, typer.Argument(metavar="[BATCH]", help="Id of a batch. Default: the last twenty.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for the end of the batch.")] = False,
    server: Server = SERVER,
    api_key: Key = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Show how far a batch is, or list batches.

    Exit code 1: the batch failed, expired or was cancelled.

    \b
    Examples
      asr-serve batch status
      asr-serve batch status batch_0123 --follow
    """
    session = _Session(server, api_key)
    code = 0
    if batch is None:
        found = session.ask("GET", "/v1/batches")["data"]
    else:
        code = _follow(session, batch, quiet) if follow else 0
        found = [session.batch(batch)]
    if as_json:
        print(as_text(found if batch is None else found[0]))
        return code
    columns = ("BATCH", "STATUS", "DONE", "FAILED", "TOTAL", "ENDPOINT")
    rows = []
    for each in found:
        counts = each["request_counts"]
        numbers = (str(counts[name]) for name in ("completed", "failed", "total"))
        rows.append((each["id"], each["status"], *numbers, each["endpoint"].rpartition("/")[2]))
    print_table(columns, rows)
    for each in found if batch is not None else ():
        for error in (each["errors"] or {"data": []})["data"]:
            print_error(f"line {error['line']}: {error['message']}" if error["line"] else error["message"])
    return code if batch is None or found[0]["status"] not in ENDED[1:] else FAILED


@app.command("fetch")
@exit_on_error
def fetch(
    batch: BatchId,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder of the answers.")],
    server: Server = SERVER,
    api_key: Key = None,
    quiet: Quiet = False,
) -> int:
    """Write the answers of a batch that has ended: output.jsonl, errors.jsonl, and audio of speech.

    Exit code 1: some requests failed.

    \b
    Example
      asr-serve batch fetch batch_0123 -o answers/
    """
    session = _Session(server, api_key)
    found = session.batch(batch)
    if found["status"] not in ENDED:
        raise OptionError(
            f"the batch is {found['status']}", "one that has ended", f"asr-serve batch status {batch} --follow"
        )
    output.mkdir(parents=True, exist_ok=True)
    for name, file_id in (("output.jsonl", found["output_file_id"]), ("errors.jsonl", found["error_file_id"])):
        if file_id is not None:
            session.download(file_id, output / name)
    if found["endpoint"] == "/v1/audio/speech" and found["output_file_id"] is not None:
        with (
            WorkProgress(print_error, shown=not quiet) as progress,
            (output / "output.jsonl").open(encoding="utf-8") as answers,
        ):
            for number, line in enumerate(answers, 1):
                file_id = json.loads(line)["response"]["body"]["file_id"]
                name = session.ask("GET", f"/v1/files/{quote(file_id, safe='')}")["filename"]
                progress.update(number / max(1, found["request_counts"]["completed"]), "downloading", name)
                session.download(file_id, output / f"{number:06}-{Path(name).name}")
    counts = found["request_counts"]
    print_error(f"{counts['completed']} answers and {counts['failed']} errors of {batch} in {output}")
    return FAILED if counts["failed"] or found["status"] != "completed" else 0


@app.command("cancel")
@exit_on_error
def cancel(batch: BatchId, server: Server = SERVER, api_key: Key = None) -> None:
    """Cancel a batch. What was answered stays, and can be fetched.

    \b
    Example
      asr-serve batch cancel batch_0123
    """
    found = _Session(server, api_key).ask("POST", f"/v1/batches/{quote(batch, safe='')}/cancel")
    print(f"{found['id']} is {found['status']}")


class _Content:
    """Content of an upload: a recording on disk, or lines in memory."""

    def __init__(self, path: Path | None, data: bytes = b"") -> None:
        """Raises SourceNotFound."""
        self._path, self._data = path, data
        if path is None:
            self.name, self.size, self.key = "lines.jsonl", len(data), hashlib.sha256(data).hexdigest()
            return
        try:
            status = path.stat()
        except OSError as error:
            raise SourceNotFound(f"{path}: {error.strerror}", "recordings that can be read") from None
        shown = "".join("_" if c in '\\"' or not c.isprintable() else c for c in path.name)
        self.name, self.size = shown[-MAX_NAME_CHARACTERS:].strip() or "_", status.st_size
        """File name that servers store unchanged, and size in bytes."""
        self.key = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
        """Key of the upload, which changes with the content."""

    def chunks(self) -> Iterator[bytes]:
        """Returns the bytes in parts."""
        return iter([self._data]) if self._path is None else _chunks(self._path)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the bytes, in hexadecimal."""
        summed = hashlib.sha256()
        for chunk in self.chunks():
            summed.update(chunk)
        return summed.hexdigest()


class _Uploads:
    """Uploads of a submission: each file once, files of the interrupted submission that it resumes included."""

    def __init__(self, session: _Session, record: UploadRecord, window_s: int) -> None:
        """`window_s`: completion window of the batch, for which the server has to keep the files."""
        self._session, self._record, self._window_s = session, record, window_s
        self._unchecked = set(record.ids)
        """Ids from the interrupted submission whose files the server may have deleted meanwhile."""
        self.resumed = 0
        """Number of recordings that the interrupted submission uploaded."""

    def file_id(self, path: Path) -> str:
        """Id of a recording, which is uploaded unless the server has it. Raises SourceNotFound, Refused,
        Unreachable."""
        file_id, resumed = self._id(_Content(path))
        self.resumed += resumed
        return file_id

    def lines_id(self, data: bytes) -> str:
        """Id of the lines of a batch, which are uploaded unless the server has them. Raises Refused, Unreachable."""
        return self._id(_Content(None, data))[0]

    def _id(self, content: _Content) -> tuple[str, bool]:
        """Returns the id, and whether the interrupted submission uploaded the file."""
        file_id = self._record.file_id(content.key)
        if file_id is not None and file_id not in self._unchecked:
            return file_id, False
        if file_id is not None and self._session.has(file_id, self._window_s):
            self._unchecked.discard(file_id)
            return file_id, True
        # The answer to an upload may be lost though the server has the file.
        if self._record.is_pending(content.key):
            file_id = self._session.find(content, self._record, self._window_s)
            if file_id is not None:
                self._record.finish_upload(content.key, file_id)
                return file_id, True
        self._record.start_upload(content.key)
        file_id = self._session.upload(content)
        self._record.finish_upload(content.key, file_id)
        return file_id, False


class _Session:
    """Requests to one server with one key."""

    def __init__(self, server: str, api_key: str | None) -> None:
        self._server, self.key = server, api_key or client_key()
        self._clock_offset_s = 0.0
        """Difference of the server's clock to this machine's, by the Date header of the last answer that has one."""

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, repeatable: bool = False
    ) -> Any:
        """Answer in JSON. `repeatable`: it is sent again while no server answers. Raises Refused, Unreachable."""
        from asr_serve.api.cli.backends import server_answer

        content = None if body is None else json.dumps(body).encode()

        def send() -> Any:
            with server_answer(self._server, self.key, method, path, content, headers) as answer:
                with contextlib.suppress(ValueError):
                    date = parsedate_to_datetime(answer.headers.get("Date", ""))
                    self._clock_offset_s = date.timestamp() - time.time()
                return json.loads(answer.read())

        return _retried(send, repeatable)

    def batch(self, batch_id: str, repeatable: bool = False) -> Any:
        return self.ask("GET", f"/v1/batches/{quote(batch_id, safe='')}", repeatable=repeatable)

    def upload(self, content: _Content) -> str:
        """Uploads a file; returns its id. Raises Refused, Unreachable."""
        from asr_serve.api.cli.backends import server_answer

        boundary = secrets.token_hex(16)
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{boundary}\r\n'
            f'Content-Disposition: form-data; name="file"; filename="{content.name}"\r\n\r\n'
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()

        def parts() -> Iterator[bytes]:
            yield head
            yield from content.chunks()
            yield tail

        headers = {
            "Content-Type": f"multipart/form-data; boundary={boundary}",
            "Content-Length": str(len(head) + content.size + len(tail)),
        }

        def send() -> str:
            with server_answer(self._server, self.key, "POST", "/v1/files", parts(), headers) as answer:
                return str(json.loads(answer.read())["id"])

        return _retried(send)

    def has(self, file_id: str, window_s: int) -> bool:
        """Returns whether the server has a file, and keeps it for `window_s` seconds. Raises Refused, Unreachable."""
        try:
            file = self.ask("GET", f"/v1/files/{quote(file_id, safe='')}")
        except Refused as refusal:
            if refusal.code != "unknown_file":
                raise
            return False
        return self._expires_after(file, window_s)

    def find(self, content: _Content, record: UploadRecord, window_s: int) -> str | None:
        """Finds the file of an upload whose result is not in the record, among the newest of the server. Returns the
        id; None where there is no such file that the server keeps for `window_s` seconds. Raises SourceNotFound,
        Refused, Unreachable."""
        files, known = self.ask("GET", f"/v1/files?purpose=batch&limit={MAX_LISTED_FILES}")["data"], record.ids
        # Unix times of files and of Date are in whole seconds, rounded down.
        started_at = record.started_at + self._clock_offset_s - 1
        for file in files:
            is_candidate = (
                (file["bytes"], file["filename"]) == (content.size, content.name)
                and file["created_at"] > started_at
                and file["id"] not in known
                and self._expires_after(file, window_s)
            )
            if is_candidate and self._has_content(file["id"], content):
                return str(file["id"])
        return None

    def _expires_after(self, file: dict[str, Any], window_s: int) -> bool:
        """Returns whether the server keeps a file for more than `window_s` seconds from now."""
        return bool(file["expires_at"] > time.time() + self._clock_offset_s + window_s)

    def _has_content(self, file_id: str, content: _Content) -> bool:
        """Returns whether a file of the server has that content; not where it was deleted meanwhile. Raises
        SourceNotFound, Refused, Unreachable."""
        from asr_serve.api.cli.backends import server_answer

        received = hashlib.sha256()
        route = f"/v1/files/{quote(file_id, safe='')}/content"
        try:
            with server_answer(self._server, self.key, "GET", route, None) as answer:
                while chunk := answer.read(CHUNK_BYTES):
                    received.update(chunk)
        except Refused as refusal:
            if refusal.code != "unknown_file":
                raise
            return False
        return received.hexdigest() == content.digest

    def download(self, file_id: str, path: Path) -> None:
        """Writes a file, whole or not at all. Raises Refused, Unreachable."""
        from asr_serve.api.cli.backends import server_answer

        route = f"/v1/files/{quote(file_id, safe='')}/content"
        with (
            replaced_file(path) as part,
            part.open("wb") as file,
            server_answer(self._server, self.key, "GET", route, None) as answer,
        ):
            while chunk := answer.read(CHUNK_BYTES):
                file.write(chunk)


def _retried(send: Callable[[], T], repeatable: bool = False) -> T:
    """Result of a request, which is sent again while the server is full, starting or going down. `repeatable`: also
    while no server answers, as in a restart."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return send()
        except Refused as refusal:
            if attempt == ATTEMPTS or not refusal.is_retryable:
                raise
            time.sleep((refusal.retry_after_ms or 0) / 1_000 or RETRY_S * attempt)
        except Unreachable:
            if attempt == ATTEMPTS or not repeatable:
                raise
            time.sleep(RETRY_S * attempt)
    raise AssertionError("the last attempt returns or raises")


@contextlib.contextmanager
def _resume_hint(record: UploadRecord) -> Iterator[None]:
    """Context manager around a submission: where it fails or is interrupted, prints that the same command resumes
    it."""
    try:
        yield
    except (KeyboardInterrupt, Refused, Unreachable):
        if record.is_persistent and record.ids:
            print_error(f"{len(record.ids)} files are uploaded; the same command goes on from there")
        raise


def _follow(session: _Session, batch_id: str, quiet: bool) -> int:
    """Shows the progress of a batch until its end. Returns the exit code."""
    with WorkProgress(print_error, shown=not quiet) as progress:
        found: Any = None
        while True:
            found = session.batch(batch_id, repeatable=found is not None)  # a server with the batch may restart
            counts = found["request_counts"]
            done = counts["completed"] + counts["failed"]
            progress.update(done / max(1, counts["total"]), found["status"], f"{done} of {counts['total']}")
            if found["status"] in ENDED:
                return 0 if found["status"] == "completed" else FAILED
            time.sleep(FOLLOW_S)


def _folder_requests(folder: Path, options: dict[str, str | None]) -> list[dict[str, Any]]:
    """Requests for the recordings of a folder. Raises OptionError where it has none."""
    from asr_serve.audio.input_manifest import AUDIO_SUFFIXES

    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in AUDIO_SUFFIXES and path.is_file())
    if not paths:
        raise OptionError(f"{folder} has no recordings", f"files like {', '.join(sorted(AUDIO_SUFFIXES)[:6])}")
    given = {name: value for name, value in options.items() if value is not None}
    return [
        {
            # Names that are not UTF-8 have their other bytes escaped, as in caf\\xe9.wav.
            "custom_id": os.fsencode(path.relative_to(folder)).decode("utf-8", "backslashreplace"),
            "method": "POST",
            "url": TRANSCRIPTIONS,
            "body": {"file": str(path), **given},
        }
        for path in paths
    ]


def _file_requests(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Requests of a JSONL file, and their endpoint. Raises SourceNotFound, OptionError."""
    try:
        # By line feeds alone: a text in JSON may hold the other characters at which `splitlines` splits.
        lines: Iterable[str] = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise SourceNotFound(f"{path}: {reason}", "a folder of recordings, or requests in JSONL") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
        except ValueError as error:
            raise OptionError(f"{path}:{number}: {error}", "a JSON object on each line") from None
        if not isinstance(request, dict) or not isinstance(request.get("body"), dict):
            raise OptionError(f"{path}:{number}: no request", "custom_id, method, url and body on each line")
        found.append(request)
    if not found:
        raise OptionError(f"{path} has no requests", "a request on each line")
    return found, str(found[0].get("url", TRANSCRIPTIONS))


def _is_sent(file: str) -> bool:
    """Returns whether a body's `file` is what a server takes, and no path."""
    return file.startswith("data:") or (file.startswith("file-") and "." not in file and "/" not in file)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
