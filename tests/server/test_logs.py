"""Log lines as they reach standard error."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Callable
from datetime import UTC, datetime

import numpy as np
import pytest
from granian.log import LogLevels, configure_logging
from hypothesis import given
from hypothesis import strategies as st

from asr_serve.server.telemetry import logs

log = logging.getLogger("asr_serve.here")
Read = Callable[[], list[str]]


@pytest.fixture(autouse=True)
def no_request() -> None:
    """The context that tests run in is shared too."""
    logs.request_id.set("")


@pytest.fixture
def read(capsys: pytest.CaptureFixture[str]) -> Read:
    return lambda: capsys.readouterr().err.splitlines()


def only(lines: list[str]) -> dict[str, object]:
    (line,) = lines
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_the_line_of_a_request_as_json(read: Read) -> None:
    logs.setup("json")
    before = datetime.now(UTC)
    logs.request_id.set("req-1")
    logs.log_access(
        method="POST",
        route="/v1/audio/transcriptions",
        status=200,
        duration_ms=123.456,
        audio_ms=44_000,
        model="moonshine-tiny-en",
        client="127.0.0.1",
    )
    fields = only(read())
    stamp = str(fields.pop("ts"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", stamp)
    assert abs(datetime.fromisoformat(stamp) - before).total_seconds() < 5
    assert fields == {
        "level": "info",
        "logger": "asr_serve.access",
        "message": "request",
        "method": "POST",
        "route": "/v1/audio/transcriptions",
        "status": 200,
        "duration_ms": 123.5,
        "audio_ms": 44_000,
        "model": "moonshine-tiny-en",
        "client": "127.0.0.1",
        "request_id": "req-1",
    }


def test_granians_warning_at_every_start_is_left_out(read: Read) -> None:
    logs.setup("text")
    logging.getLogger("_granian").warning("Embedded server is experimental!")
    logging.getLogger("_granian").warning("Another warning")
    (line,) = read()
    assert "Another warning" in line


def test_the_line_of_a_request_as_text(read: Read) -> None:
    logs.setup("text")
    logs.request_id.set("req-1")
    logs.log_access(method="GET", route="/health", status=200, duration_ms=0.2, client="a client")
    (line,) = read()
    stamp, rest = line.split(" ", 1)
    assert stamp.endswith("Z")
    assert rest == (
        "info    asr_serve.access request method=GET route=/health status=200 duration_ms=0.2"
        ' client="a client" request_id=req-1'
    )


@pytest.mark.parametrize(
    ("status", "level"), [(200, "info"), (429, "info"), (499, "info"), (500, "error"), (503, "info")]
)
def test_only_our_own_failures_are_errors(read: Read, status: int, level: str) -> None:
    logs.setup("json")
    logs.log_access(method="GET", route="/", status=status, duration_ms=1)
    assert only(read())["level"] == level


async def test_each_request_carries_its_own_id(read: Read) -> None:
    logs.setup("json")
    turn = asyncio.Barrier(3)

    async def request(name: str) -> None:
        logs.request_id.set(name)
        await turn.wait()  # all three are under way
        await asyncio.to_thread(log.info, "%s", name)
        log.info("%s", name)

    await asyncio.gather(*(request(f"req-{number}") for number in range(3)))
    log.info("nobody's")
    *lines, last = [json.loads(line) for line in read()]
    assert len(lines) == 6
    assert all(line["request_id"] == line["message"] for line in lines)
    assert "request_id" not in last


def test_a_record_may_bring_its_id_from_elsewhere(read: Read) -> None:
    logs.setup("json")
    logs.request_id.set("mine")
    log.info("from the engine", extra={"request_id": "theirs"})
    assert only(read())["request_id"] == "theirs"


@pytest.mark.parametrize("form", ["text", "json"])
def test_granian_goes_through_the_same_handler(read: Read, form: logs.LogFormat) -> None:
    logs.setup(form)
    configure_logging(LogLevels.info, logs.GRANIAN)
    configure_logging(LogLevels.info, logs.GRANIAN)  # a worker's, after the server's
    logging.getLogger("_granian").info("Starting")
    logging.getLogger("_granian.asgi").warning("from Rust")
    logging.getLogger("granian.access").info("%(path)s", {"path": "/asr"})
    lines = read()
    assert len(lines) == 3
    if form == "json":
        assert [json.loads(line)["message"] for line in lines] == ["Starting", "from Rust", "/asr"]


def test_setup_twice_is_setup_once(read: Read) -> None:
    logs.setup("text")
    logs.setup("json")
    log.info("once")
    assert only(read())["message"] == "once"


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_levels_are_ours_and_libraries_speak_from_warnings_up(read: Read, level: logs.LogLevel) -> None:
    logs.setup("json", level)
    for logger in (log, logging.getLogger("python_multipart")):
        for said in ("debug", "info", "warning", "error"):
            logger.log(logging.getLevelNamesMapping()[said.upper()], said)
    heard: dict[str, list[str]] = {"asr_serve.here": [], "python_multipart": []}
    for line in map(json.loads, read()):
        heard[line["logger"]].append(line["message"])
    names = ["debug", "info", "warning", "error"]
    assert heard["asr_serve.here"] == names[names.index(level) :]
    assert heard["python_multipart"] == names[max(2, names.index(level)) :]


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize(
    "value", [b"Bearer sk-secret", np.ones(3, np.float32), ["said this"], {"text": "said this"}, {"sk-secret"}]
)
def test_what_is_not_plain_shows_its_type_only(read: Read, form: logs.LogFormat, value: object) -> None:
    logs.setup(form)
    log.info("got", extra={"value": value})
    (line,) = read()
    assert f"<{type(value).__name__}>" in line
    assert not re.search("secret|said|1[.]", line.split("got")[1])


def test_numbers_that_json_has_no_word_for(read: Read) -> None:
    logs.setup("json")
    log.info("x", extra={"a": math.nan, "b": -math.inf, "c": None, "d": True, "e": 1.5})
    fields = only(read())
    assert [fields[name] for name in "abcde"] == ["nan", "-inf", None, True, 1.5]


def test_what_is_ours_cannot_be_overwritten(read: Read) -> None:
    logs.setup("json")
    log.info("true", extra={"ts": "false", "level": "false", "logger": "false"})
    fields = only(read())
    assert "false" not in fields.values()


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_exception_comes_with_its_traceback(read: Read, form: logs.LogFormat) -> None:
    logs.setup(form)
    try:
        raise ValueError("one\ntwo")
    except ValueError:
        log.exception("failed")
    if form == "json":
        traceback = str(only(read())["traceback"])
        assert traceback.startswith("Traceback")
        assert traceback.endswith("ValueError: one\ntwo")
    else:
        first, *more = read()
        assert first.endswith("error   asr_serve.here failed")
        assert more[-2:] == ["    ValueError: one", "    two"]


@given(message=st.text(), value=st.text())
def test_no_text_passes_for_a_line_of_its_own(message: str, value: str) -> None:
    """Whatever a client managed to get into a record."""
    record = logging.makeLogRecord({"name": "n", "msg": message, "levelname": "INFO", "value": value})
    lines = logs._TextFormatter().format(record).split("\n")
    assert all(line.startswith("    ") for line in lines[1:])
    assert len(lines) == 1 + message.count("\n")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]", "".join(lines))
    fields = json.loads(logs._JsonFormatter().format(record))
    assert (fields["message"], fields["value"]) == (message, value)
    assert logs._JsonFormatter().format(record).isascii()
