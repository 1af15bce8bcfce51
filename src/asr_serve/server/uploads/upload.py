"""Multipart upload, read as it arrives, so that its audio is decoded meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import BinaryIO, Protocol, cast

from starlette.types import Receive

from asr_serve.audio.pcm import wav_header
from asr_serve.errors import AudioTooLarge, Cancelled, ClientGone, MalformedRequest, RequestTimeout
from asr_serve.server.uploads.multipart_form import FormLimits, MultipartForm
from asr_serve.server.uploads.spool import Spool, SpoolReader


class UploadLimits(FormLimits, frozen=True, kw_only=True):
    """Limits of one upload."""

    max_bytes: int
    """Size of the whole body."""
    idle_timeout_s: float = 30.0
    """Longest time without a byte."""
    min_bytes_per_s: int = 0
    """Least mean rate since the start, checked from `idle_timeout_s` on; 0: none."""
    memory_bytes: int = 1 << 20
    """Bytes of the file in memory; the rest goes to disk."""


class BodyParser(Protocol):
    """Parser of a body as it arrives: MultipartForm, RawBody."""

    fields: dict[str, list[str]]
    has_file: bool
    file_field: str | None
    """Name of the field of the file, once it has begun; None where there are no fields."""
    ended: bool
    """Whether the body is whole and well-formed."""
    filename: str | None
    content_type: str | None

    def write(self, data: bytes) -> None:
        """Parses more of the body. Raises MalformedRequest, AtCapacity (the disk is full)."""

    def end_of_body(self) -> None:
        """Takes note that nothing more will come."""


BodyFactory = Callable[[str, Spool, FormLimits], BodyParser]
"""Makes the parser of a body with that Content-Type, whose file goes into the spool."""


class Upload:
    """Form of one request: its fields so far, and its file as a stream that may still be growing.

    A task reads the body from `start` until its end, or until `close`; the caller of `start` closes the upload.
    All methods but those of the readers belong to the event loop's thread.

    fields          name -> values, names as sent, values of the parts that have arrived whole
    filename        as sent: a label, never a path
    content_type    of the file's part, as sent
    has_file        the file's part has begun; it may hold 0 bytes
    file_field      name of its field
    raw_pcm         the file is s16le at 16 kHz, without a header: set by who reads the fields, before `open_bytes`
    complete        the body has arrived, whole and well-formed
    received_bytes  of the body
    """

    def __init__(
        self,
        body: AsyncIterator[bytes],
        content_type: str,
        limits: UploadLimits,
        patience_bytes: int,
        gone: type[Exception] | tuple[type[Exception], ...],
        create_body: BodyFactory,
    ) -> None:
        self.complete = False
        self.handed_over = False
        """Whether another user reads the file now, and closes the upload."""
        self.received_bytes = 0
        self.raw_pcm = False
        self._limits, self._patience_bytes, self._disconnect_error = limits, patience_bytes, gone
        self._spool = Spool(limits.memory_bytes)
        self._form = create_body(content_type, self._spool, limits)
        self._file_started, self._prefix_ready = asyncio.Event(), asyncio.Event()
        self._reading = asyncio.create_task(self._read(body))
        self._reading.add_done_callback(self._on_body_read)

    @classmethod
    async def start(
        cls,
        body: AsyncIterator[bytes],
        content_type: str,
        content_length: int | None,
        limits: UploadLimits,
        *,
        patience_s: float = 0.05,
        patience_bytes: int = 1 << 20,
        gone: type[Exception] | tuple[type[Exception], ...] = (),
        create_body: BodyFactory = MultipartForm,
    ) -> Upload:
        """Reads until the file has begun, and then until the body is complete, `patience_bytes` of the file have
        arrived or `patience_s` have passed: a short upload is complete at the return. Without a file, reads all.

        `gone`: exceptions of `body` for a client that disconnects; they become ClientGone. `create_body`: parser of
        the body.

        Raises  MalformedRequest, RequestTimeout (a kind of it), AudioTooLarge, ClientGone, AtCapacity (the disk
                is full)
        """
        if content_length is not None:
            check_body_size(content_length, limits)
        upload = cls(body, content_type, limits, patience_bytes, gone, create_body)
        with contextlib.ExitStack() as undo:
            undo.callback(upload.close)
            await upload._file_started.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await upload._prefix_ready.wait()
            upload._raise_if_failed()
            undo.pop_all()
        return upload

    @property
    def fields(self) -> dict[str, list[str]]:
        return self._form.fields

    @property
    def has_file(self) -> bool:
        return self._form.has_file

    @property
    def file_field(self) -> str | None:
        return self._form.file_field

    @property
    def filename(self) -> str | None:
        return self._form.filename

    @property
    def content_type(self) -> str | None:
        return self._form.content_type

    @property
    def failure(self) -> BaseException | None:
        """Error of reading the body, if any: the cause of what users of the readers raise."""
        if not self._reading.done() or self._reading.cancelled():
            return None
        return self._reading.exception()

    def open_bytes(self) -> BinaryIO:
        """Opens a reader of the file from its first byte, for any one thread; it waits for bytes to arrive.

        It can seek, and knows its size, once the file is whole. Raises OSError when the upload has failed or is
        closed, even for bytes that have arrived: their text is not needed any more.
        """
        return cast(BinaryIO, SpoolReader(self._spool, wav_header() if self.raw_pcm else b""))

    async def finish(self) -> None:
        """Waits until the body is complete. Raises what `start` does; Cancelled if closed meanwhile."""
        await asyncio.wait({self._reading})
        self._raise_if_failed()

    def close(self) -> None:
        """Stops reading, fails the readers, and frees memory and disk. Idempotent."""
        self._reading.cancel()
        self._spool.close()

    async def _read(self, body: AsyncIterator[bytes]) -> None:
        loop, limits = asyncio.get_running_loop(), self._limits
        start_s = last_s = loop.time()
        while (chunk := await self._next(body, start_s, last_s)) is not None:
            if not chunk:
                continue
            last_s = loop.time()
            self.received_bytes += len(chunk)
            check_body_size(self.received_bytes, limits)
            self._form.write(chunk)
            if self._form.has_file:
                self._file_started.set()
            if self._spool.size_bytes >= self._patience_bytes:
                self._prefix_ready.set()
        self._form.end_of_body()
        if not self._form.ended:
            raise MalformedRequest(
                f"the body ends after {self.received_bytes} bytes, before its closing boundary",
                "a whole form is needed",
                "send it again; it was cut off on the way, or its boundary is not the one in Content-Type",
            )
        self._spool.end()  # for a form without a file
        self.complete = True

    async def _next(self, body: AsyncIterator[bytes], start_s: float, last_s: float) -> bytes | None:
        received_bytes, limits = self.received_bytes, self._limits
        idle_due_s = last_s + limits.idle_timeout_s
        # Deadlines of the idle time and of the least mean rate; each chunk extends both.
        allowed_s = received_bytes / limits.min_bytes_per_s if limits.min_bytes_per_s else math.inf
        rate_due_s = start_s + max(limits.idle_timeout_s, allowed_s)
        try:
            async with asyncio.timeout_at(min(idle_due_s, rate_due_s)):
                return await anext(body, None)
        except TimeoutError:
            if idle_due_s <= rate_due_s:
                raise RequestTimeout(
                    f"no byte came for {limits.idle_timeout_s:g} s after the first {received_bytes}",
                    "an upload must go on",
                    "send it again",
                ) from None
            took_s = asyncio.get_running_loop().time() - start_s
            raise RequestTimeout(
                f"{received_bytes} bytes came in {took_s:.3g} s, {received_bytes / took_s:.3g} a second",
                f"at least {limits.min_bytes_per_s} a second are needed",
                "send it faster",
            ) from None
        except self._disconnect_error as error:
            raise ClientGone(
                f"the client left after {self.received_bytes} bytes of its upload, or went on in what is no HTTP"
            ) from error

    def _on_body_read(self, reading: asyncio.Task[None]) -> None:
        if not self.complete:
            self._spool.fail(f"the upload has failed: {self.failure or 'it was closed'}")
        self._file_started.set()
        self._prefix_ready.set()

    def _raise_if_failed(self) -> None:
        if not self._reading.done():
            return
        if self._reading.cancelled():
            raise Cancelled("the upload was closed before its end")
        self._reading.result()


async def read_body(receive: Receive) -> AsyncIterator[bytes]:
    """Yields a request's body as it arrives. Raises ClientGone."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left while it sent its request")
        yield message.get("body", b"")
        if not message.get("more_body"):
            return


def check_body_size(body_bytes: int, limits: UploadLimits) -> None:
    if body_bytes > limits.max_bytes:
        raise AudioTooLarge(
            f"a body of {body_bytes} bytes or more came",
            f"at most {limits.max_bytes} are allowed",
            "send less, or compress it (flac, opus)",
        )
