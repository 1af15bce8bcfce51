"""Body that is the audio itself, without a form around it."""

from __future__ import annotations

from collections.abc import Callable

from asr_serve.server.uploads.multipart_form import FormLimits
from asr_serve.server.uploads.spool import Spool


class RawBody:
    """Passes a body to the spool. Raises what the spool does."""

    def __init__(
        self,
        content_type: str,
        spool: Spool,
        limits: FormLimits,
        *,
        header: Callable[[bytes], bytes],
        on_bytes: Callable[[bytes], object],
    ) -> None:
        """`header`: bytes that the file needs before those of the body, given the first of these. `on_bytes` receives
        the body as it came."""
        del limits  # there are no fields
        self.fields: dict[str, list[str]] = {}
        self.has_file, self.ended = True, False
        self.file_field: str | None = None
        self.filename: str | None = ""
        self.content_type: str | None = content_type
        self._spool, self._header, self._on_bytes = spool, header, on_bytes
        self._started = False

    def write(self, data: bytes) -> None:
        if not self._started:
            self._started = True
            if header := self._header(data):
                self._spool.append(memoryview(header))
        self._on_bytes(data)
        self._spool.append(memoryview(data))

    def end_of_body(self) -> None:
        self._spool.end()
        self.ended = True
