"""Multipart form with several files, which are written into a folder as they arrive."""

from __future__ import annotations

import asyncio
import errno
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from asr_serve.errors import AtCapacity, MalformedRequest, RequestTimeout
from asr_serve.server.uploads.multipart_form import MultipartForm
from asr_serve.server.uploads.spool import RETRY_MS, Spool
from asr_serve.server.uploads.thread_work import finished
from asr_serve.server.uploads.upload import UploadLimits, check_body_size

UNSAFE_NAME_CHARACTERS = re.compile(r"[^\w.-]+")
NAME_CHARACTERS = 80
NAME_BYTES = 200
"""Length in UTF-8 of a file name that every disk accepts, with the number that is put before it."""


class MultiFileForm(MultipartForm):
    """Parses a body: fields into `fields`, files into the folder.

    names   path -> the client's name of the file, in the order of arrival

    Raises  MalformedRequest, AtCapacity if the disk is full
    """

    def __init__(
        self, content_type: str, folder: Path, kinds: tuple[str, ...], max_files: int, limits: UploadLimits
    ) -> None:
        """`kinds`: names of the file fields."""
        super().__init__(content_type, Spool(0), limits)
        self.names: dict[Path, str] = {}
        self._folder, self._kinds, self._most = folder, kinds, max_files
        self._file: BinaryIO | None = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _part_begin(self) -> None:
        name, filename = self._named()
        if name not in self._kinds:
            if filename is not None:
                raise MalformedRequest(
                    f"a file came as the field {name[:80]!r}", f"files come as {self._kinds[0]!r}", "send it as that"
                )
            self._begin_field(name)
            return
        if len(self.names) >= self._most:
            raise MalformedRequest(f"more than {self._most} files came", "that many are allowed", "send fewer")
        label = filename or f"recording-{len(self.names) + 1}"
        safe_name = UNSAFE_NAME_CHARACTERS.sub("_", Path(label).name)[-NAME_CHARACTERS:].lstrip(".") or "recording"
        path = self._folder / f"{len(self.names):03}-{safe_name}"
        self._field, self.has_file, self.names[path] = None, True, label
        try:
            self._file = path.open("wb")
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            # A disk limits bytes, and a character has up to four.
            raise MalformedRequest(
                "the file name of a recording is too long for the server's disk",
                f"names of up to {NAME_BYTES} bytes in UTF-8",
                "send the recording under a shorter name",
            ) from error

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._file is None:
            super()._part_data(data, start, end)
            return
        try:
            self._file.write(memoryview(data)[start:end])
        except OSError as error:
            raise AtCapacity(
                f"the server cannot keep the upload: {error.strerror}", "its disk needs room", RETRY_MS
            ) from error

    def _part_end(self) -> None:
        if self._file is None:
            super()._part_end()
        else:
            self.close()


async def read_form_body(body: AsyncIterator[bytes], form: MultiFileForm, limits: UploadLimits) -> None:
    """Reads all of it into the form. Raises what MultiFileForm does, RequestTimeout, AudioTooLarge, ClientGone."""
    count, start_s = 0, time.monotonic()
    try:
        while True:
            try:
                async with asyncio.timeout(limits.idle_timeout_s):
                    chunk = await anext(body, None)
            except TimeoutError:
                raise RequestTimeout(
                    f"no byte came for {limits.idle_timeout_s:g} s after the first {count}", "an upload must go on"
                ) from None
            if chunk is None:
                break
            count += len(chunk)
            check_body_size(count, limits)
            took_s = time.monotonic() - start_s
            if took_s > limits.idle_timeout_s and count < limits.min_bytes_per_s * took_s:
                raise RequestTimeout(
                    f"{count} bytes came in {took_s:.3g} s", f"at least {limits.min_bytes_per_s} a second are needed"
                )
            # A disk that is behind with gigabytes of recordings would hold up the event loop, and every live session.
            await finished(asyncio.get_running_loop().run_in_executor(None, form.write, chunk))
        if not form.ended:
            raise MalformedRequest(
                f"the body ends after {count} bytes, before its closing boundary",
                "a whole form is needed",
                "send it again; it was cut off on the way, or its boundary is not the one in Content-Type",
            )
    finally:
        form.close()
