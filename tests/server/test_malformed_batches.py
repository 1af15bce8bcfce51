"""Files and batches that are no good, over the real server: each is answered in OpenAI's shape and by name, and nothing
is left of it.

Inputs whose lines are no good are in test_batches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from raw_http import told
from running_server import Running
from test_malformed_bodies import BODIES, MALFORMED, MOST_BYTES, parts, post

FILES = "/v1/files"


@pytest.fixture(scope="module")
def small(serve: Callable[..., Running]) -> Iterator[Running]:
    """A server that takes little."""
    server = serve(max_body_bytes=MOST_BYTES)
    yield server
    server.expect_empty()


@pytest.mark.parametrize("name", BODIES)
def test_bodies(small, name):
    body, kind, says = BODIES[name]
    status, code, param, message = post(small, body, kind, FILES)
    assert (status, code, param) == (400, MALFORMED, None)
    assert re.search(says, message), message
    assert len(message) < 600


UPLOADS: dict[str, tuple[list[tuple[str, str]], str, str | None, str]] = {
    "no purpose": ([], "missing_option", "purpose", "purpose is missing"),
    "another purpose": ([("purpose", "fine-tune")], "option_error", "purpose", "'fine-tune'. one of: batch"),
    "purposes": ([("purpose", "batch")] * 2, "option_error", "purpose", "came 2 times"),
    "half an expiry": (
        [("purpose", "batch"), ("expires_after[anchor]", "created_at")], "missing_option", "expires_after[seconds]",
        "anchor and seconds",
    ),
    "another anchor": (
        [("purpose", "batch"), ("expires_after[anchor]", "now")], "option_error", "expires_after[anchor]", "'now'"
    ),
    "a short expiry": (
        [("purpose", "batch"), ("expires_after[seconds]", "60")], "option_error", "expires_after[seconds]",
        "3600 to 2592000",
    ),
    "a misspelt field": ([("purpose", "batch"), ("purpos", "batch")], "option_error", "purpos", "unknown field"),
}  # fmt: skip


@pytest.mark.parametrize("name", UPLOADS)
def test_uploads_of_files(small, name):
    fields, code, param, says = UPLOADS[name]
    status, *told_, message = post(small, parts(*fields), path=FILES)
    assert (status, *told_) == (400, code, param)
    assert says in message


BATCHES: dict[str, tuple[str, str, str | None, str]] = {
    "no JSON": ("{", MALFORMED, None, "no JSON object"),
    "a list": ("[]", MALFORMED, None, "no JSON object"),
    "nested": ('{"metadata": ' + "[" * 20_000, MALFORMED, None, "nested|truncated"),
    "long": ('{"x": "' + "x" * 70_000 + '"}', MALFORMED, None, "over 65536 bytes"),
    "no file": ("{}", "missing_option", "input_file_id", "input_file_id is missing"),
    "a number for a file": ('{"input_file_id": 7}', "option_error", "input_file_id", "it must be text"),
    "no endpoint": ('{"input_file_id": "file-0"}', "missing_option", "endpoint", "/v1/audio/speech"),
    "another endpoint": (
        '{"input_file_id": "file-0", "endpoint": "/v1/embeddings"}', "option_error", "endpoint", "'/v1/embeddings'"
    ),
    **{
        name: ('{"input_file_id": "file-0", "endpoint": "/v1/audio/speech", ' + members + "}", code, param, says)
        for name, members, code, param, says in (
            ("no window", '"metadata": null', "missing_option", "completion_window", "like 24h"),
            ("a long window", '"completion_window": "31d"', "option_error", "completion_window", "'31d'"),
            ("no unit", '"completion_window": "24"', "option_error", "completion_window", "'24'"),
            ("metadata", '"completion_window": "1h", "metadata": {"a": 1}', "option_error", "metadata", "texts"),
            (
                "an output's expiry", '"completion_window": "1h", "output_expires_after": {"anchor": "created_at"}',
                "missing_option", "output_expires_after.seconds", "3600 to 2592000",
            ),
            (
                "a misspelt member", '"completion_window": "1h", "metdata": {}', "unknown_option", "metdata",
                "'metadata'",
            ),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_batches(small, name):
    body, code, param, says = BATCHES[name]
    status, *told_, message = post(small, body.encode(), "application/json", "/v1/batches")
    assert (status, *told_) == (400, code, param)
    assert re.search(says, message), message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("path", "status", "code", "param"),
    [
        ("/v1/files?limit=0", 400, "option_error", "limit"),
        ("/v1/files?limit=x", 400, "option_error", "limit"),
        ("/v1/files?order=up", 400, "option_error", "order"),
        ("/v1/files?after=file-0", 404, "unknown_file", None),
        ("/v1/files/..%2Fqueue.sqlite/content", 404, None, None),
        ("/v1/files/queue.sqlite/content", 404, "unknown_file", None),
        ("/v1/batches?limit=101", 400, "option_error", "limit"),
        ("/v1/batches?after=batch_0", 404, "unknown_batch", None),
        ("/v1/batches/batch_0", 404, "unknown_batch", None),
    ],
)
def test_files_and_batches_that_are_none(small, path, status, code, param):
    answer = small.http.get(path)
    found = told(answer.status_code, dict(answer.headers), answer.content)
    assert found[0] == status
    assert code is None or found[1:3] == (code, param)


def test_nothing_is_left_of_uploads_that_were_refused(small):
    assert small.http.get("/v1/files").json()["data"] == []
    assert list((Path(small.config.batch.folder) / "files").iterdir()) == []
    made = small.http.post(FILES, data={"purpose": "batch"}, files={"file": ("a.jsonl", b"{}")})
    assert made.status_code == 200, made.text
    assert small.http.delete(f"{FILES}/{made.json()['id']}").json()["deleted"]
