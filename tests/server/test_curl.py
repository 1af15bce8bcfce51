"""The curl binary: formats, streams, every way it sends a file, and refusals while it still sends.

That HTTP/1.1 and HTTP/2 answer alike, and clients that leave, are in test_visits.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from case_tiers import exhaustive_after
from children import Child
from running_server import MODEL, Running

CURL = shutil.which("curl")
pytestmark = pytest.mark.skipif(CURL is None, reason="curl is not installed")
FEATURES = subprocess.run([CURL, "-V"], capture_output=True, text=True).stdout if CURL else ""

ROUTE = "/v1/audio/transcriptions"
BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."
WAIT_S = 180.0
MIB = 1 << 20


class Answer(NamedTuple):
    status: int
    kind: str
    body: str
    facts: dict[str, Any]
    """What curl says of the transfer."""


def curl(server: Running, *args: str | Path, path: str = ROUTE, stdin: bytes | None = None) -> Answer:
    command = ["curl", "-sS", "-w", "%{stderr}%{json}", *map(str, args), server.url + path]
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr.decode()
    facts = json.loads(done.stderr)
    return Answer(facts["response_code"], facts["content_type"], done.stdout.decode(), facts)


def said(answer: Answer) -> str:
    """The text of a stream, whose deltas make it up."""
    assert (answer.status, answer.kind) == (200, "text/event-stream; charset=utf-8")
    events = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    assert "".join(event["delta"] for event in events[:-1]) == events[-1]["text"]
    return str(events[-1]["text"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "file_first"),
    exhaustive_after(
        2, [("--http1.1", True), ("--http2-prior-knowledge", False), ("--http1.0", False), ("--http2", False)]
    ),
)
def test_every_format(server, beckett, version, file_first):
    if version.startswith("--http2") and "HTTP2" not in FEATURES:
        pytest.skip("this curl speaks no HTTP/2")

    def ask(form: str) -> Answer:
        fields = ["-F", f"file=@{beckett}", "-F", f"response_format={form}"]
        return curl(server, version, *(fields if file_first else fields[2:] + fields[:2]))

    for form, kind, begins in (
        ("text", "text/plain; charset=utf-8", BECKETT + "\n"),
        ("srt", "application/x-subrip; charset=utf-8", "1\n00:00:00,102 --> 00:00:"),
        ("vtt", "text/vtt; charset=utf-8", "WEBVTT\n\n00:00:00.102 --> 00:00:"),
        ("json", "application/json", f'{{"text":"{BECKETT}","usage":'),
        ("verbose_json", "application/json", '{"task":"transcribe","language":"en","duration":9.96'),
    ):
        found = ask(form)
        assert (found.status, found.kind) == (200, kind)
        assert found.body.startswith(begins)


@pytest.mark.parametrize("version", ["--http1.1", "--http1.0", "--http2-prior-knowledge"])
@pytest.mark.parametrize("file_first", [True, False], ids=["file-first", "file-last"])
def test_streams(server, beckett, version, file_first):
    if version.startswith("--http2") and "HTTP2" not in FEATURES:
        pytest.skip("this curl speaks no HTTP/2")
    fields = ["-F", f"file=@{beckett}", "-F", "stream=true"]
    assert said(curl(server, "-N", version, *(fields if file_first else fields[2:] + fields[:2]))) == BECKETT


def test_text_comes_while_curl_sends(server, wav, tmp_path):
    once = wav(16, 4)
    long = tmp_path / "long.wav"
    long.write_bytes(once + once[44:] * 2)  # a header that is too short is nothing to a stream
    command = ["curl", "-sSN", "--limit-rate", "2M", "-w", "%{stderr}%{json}"]
    command += ["-F", f"model={MODEL}", "-F", "stream=true", "-F", f"file=@{long}", server.url + ROUTE]
    with Child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert b"best of times" in running.stdout.readline()
        rest, facts = running.stdout.read(), json.loads(running.stderr.read())
    assert rest.count(b'"transcript.text.done"') == 1
    assert facts["size_upload"] > len(once) * 2
    assert facts["time_starttransfer"] < 0.7 * facts["time_total"]


@pytest.mark.parametrize("stream", ["false", "true"])
def test_from_standard_input_in_chunks(server, beckett, stream):
    found = curl(server, "-F", "file=@-;filename=talk.wav", "-F", f"stream={stream}", stdin=beckett.read_bytes())
    assert (said(found) if stream == "true" else json.loads(found.body)["text"]) == BECKETT


def test_what_is_typed_wrong(server, beckett):
    """-F file=PATH, -F file=<PATH and --data-binary: curl sends no file."""
    for args, says in (
        (("-F", f"file={beckett}"), "curl -F file=@audio.wav, with the @"),
        (("-F", "file=<-;type=text/plain"), "with the @"),
        (("--data-binary", f"@{beckett}"), "urlencoded' came"),
        (("-H", "Content-Type: audio/wav", "--data-binary", f"@{beckett}"), "'audio/wav' came"),
        (("-F", f"audio=@{beckett}"), "one file is allowed, in the field 'file'"),
        (("-X", "POST"), "without a Content-Type"),
        (("-F", f"file=@{beckett}", "-F", f"file=@{beckett}"), "a second file came"),
    ):
        found = curl(server, *args, stdin=b"talk.wav")
        assert found.status == 400
        assert says in json.loads(found.body)["error"]["message"]


@pytest.fixture(scope="module")
def guarded(serve: Callable[..., Running]) -> Running:
    return serve(api_keys=("secret",), max_body_bytes=8 * MIB)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, wav: Callable[..., bytes]) -> Path:
    """6 MiB: the silence after 2 s of speech is long."""
    path = tmp_path_factory.mktemp("curl") / "large.wav"
    path.write_bytes(wav(2, 63))
    assert path.stat().st_size > 6_000_000
    return path


def test_expect_100_continue(guarded, large):
    """curl asks first where a body is larger than a mebibyte: it is told to go on, or spared the way."""
    sent = ("--oauth2-bearer", "secret", "-F", f"file=@{large}")
    head = subprocess.run(
        ["curl", "-sv", "--http1.1", *sent, guarded.url + ROUTE], capture_output=True, text=True, timeout=WAIT_S
    )
    assert re.search("> Expect: 100-continue.*< HTTP/1.1 100 Continue.*< HTTP/1.1 200 OK", head.stderr, re.DOTALL)
    assert json.loads(head.stdout)["text"].startswith("It was the best")

    refused = curl(guarded, "--http1.1", "-F", f"file=@{large}")
    assert (refused.status, json.loads(refused.body)["error"]["code"]) == (401, "invalid_api_key")
    assert refused.facts["size_upload"] == 0
    refused = curl(guarded, "--http1.1", *sent, "-F", f"more=@{large}")
    assert (refused.status, json.loads(refused.body)["error"]["code"]) == (413, "audio_too_large")
    assert refused.facts["size_upload"] == 0


@pytest.mark.parametrize("version", ["--http1.1", "--http2-prior-knowledge"])
@pytest.mark.parametrize(
    ("field", "key", "status", "code"),
    [
        ("temperature=9", "secret", 400, "option_error"),
        ("model=nobody", "secret", 404, "model_not_found"),
        ("language=en", "wrong", 401, "invalid_api_key"),
    ],
)
def test_refused_while_it_sends(guarded, large, version, field, key, status, code):
    """Without asking first: curl reads the answer, stops sending and is content."""
    if version.startswith("--http2") and "HTTP2" not in FEATURES:
        pytest.skip("this curl speaks no HTTP/2")
    for _ in range(5):
        found = curl(guarded, version, "-H", "Expect:", "--oauth2-bearer", key, "-F", field, "-F", f"file=@{large}")
        assert (found.status, json.loads(found.body)["error"]["code"]) == (status, code)
    guarded.expect_empty()


def test_exit_codes_for_scripts(guarded, beckett):
    command = ["curl", "-sS", "--fail-with-body", "-F", f"file=@{beckett}", guarded.url + ROUTE]
    refused = subprocess.run(command, capture_output=True, timeout=WAIT_S)
    assert (refused.returncode, json.loads(refused.stdout)["error"]["code"]) == (22, "invalid_api_key")
    assert subprocess.run([*command, "-H", "Authorization: Bearer secret"], capture_output=True).returncode == 0
