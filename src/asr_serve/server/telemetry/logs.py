"""Logs on standard error, one line per record, as text for people or JSON for machines.

Records hold no keys, no audio and no spoken text. So a field that is not a plain value is logged as its type
only, and libraries are logged from warnings up, since their records below that may hold what clients sent.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the current task's request, which is added to every record."""

LOGGER_NAMES = ("asr_serve", "_granian", "granian.access")
GRANIAN: dict[str, Any] = {
    "formatters": {},
    "handlers": {},
    "loggers": {name: {"handlers": [], "propagate": True} for name in LOGGER_NAMES[1:]},
}
"""Granian's `log_dictconfig`: keeps it from replacing this logging with its own when it starts."""

_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_access = logging.getLogger("asr_serve.access")


def setup(form: LogFormat = "text", level: LogLevel = "info") -> None:
    """Sends every logger of this process through one handler."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    handler.addFilter(_add_request_id)
    handler.addFilter(_is_useful)
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    numeric_level = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(numeric_level, logging.WARNING))
    for name in LOGGER_NAMES:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(numeric_level)


def log_access(
    *,
    method: str,
    route: str,
    status: int,
    duration_ms: float,
    audio_ms: int | None = None,
    model: str | None = None,
    client: str | None = None,
    ended: str | None = None,
    ignored: str | None = None,
) -> None:
    """Logs the one line of an answered request, or of a WebSocket that has `ended`. `route` as in the metrics:
    the template, not the path. `ignored`: fields of the request that had no effect.

    Statuses from 500 on are errors, except 503: a server that is not ready, or going down, answers that.
    """
    fields = {
        "method": method,
        "route": route,
        "status": status,
        "duration_ms": round(duration_ms, 1),
        "audio_ms": audio_ms,
        "model": model,
        "client": client,
        "ended": ended,
        "ignored": ignored,
    }
    _access.log(
        logging.ERROR if status >= 500 and status != 503 else logging.INFO,
        "request",
        extra={name: value for name, value in fields.items() if value is not None},
    )


def _is_useful(record: logging.LogRecord) -> bool:
    """False for granian's warning, at every start, that its embedded server is experimental: no user can act on it."""
    return not (record.name == "_granian" and record.getMessage() == "Embedded server is experimental!")


def _add_request_id(record: logging.LogRecord) -> bool:
    """Adds the request's id to a record that has none."""
    if not hasattr(record, "request_id") and (current := request_id.get()):
        record.request_id = current
    return True


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        first, *more = fields.pop("message").split("\n")
        head = [fields.pop("ts"), f"{fields.pop('level'):<7}", fields.pop("logger"), first]
        lines = [" ".join([*head, *(f"{name}={_quoted(value)}" for name, value in fields.items())]), *more]
        if record.exc_info:
            lines += self.formatException(record.exc_info).split("\n")
        # A record may hold text from clients: it must not look like another record, or move the cursor.
        return "\n    ".join(_CONTROL.sub(_escape, line) for line in lines)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Fields of both formats, in order; extra fields cannot overwrite the standard ones."""
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    standard = {
        "ts": time.replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
    }
    # Names with an underscore are those of libraries: Ray adds a time of its own to every record.
    extra = {
        name: _plain(value)
        for name, value in vars(record).items()
        if name not in _STANDARD and not name.startswith("_")
    }
    return standard | extra | standard


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # not a JSON number
    return value if value is None or isinstance(value, str | int | float) else f"<{type(value).__name__}>"


def _quoted(value: object) -> str:
    text = str(value)
    return text if re.fullmatch(r"[^\s\"=]+", text) else json.dumps(text, ensure_ascii=False)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
