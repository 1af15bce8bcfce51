"""asr-serve batch against a real server: submit a folder and JSONL, follow, fetch, cancel."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from running_server import Running
from running_server import parts as parts
from running_server import serve as serve
from running_server import wav as wav
from typer.testing import CliRunner, Result

from asr_serve.api.cli import app


@pytest.fixture(scope="module")
def server(serve: Callable[..., Running]) -> Running:
    return serve(api_keys=("secret-user",))


@pytest.fixture(scope="session")
def cities(packaged_speech: Path) -> Path:
    return packaged_speech / "two_cities.wav"


@pytest.fixture
def run(server: Running, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setattr("asr_serve.api.cli.batch.FOLLOW_S", 0.05)
    where = ["--server", server.url, "--api-key", "secret-user"]
    return lambda *args: CliRunner().invoke(app, ["batch", *map(str, args), *where])


def test_a_folder_is_submitted_and_fetched(run, wav, tmp_path):
    calls = tmp_path / "calls"
    (calls / "monday").mkdir(parents=True)
    for name in ("1.wav", "monday/2.wav"):
        (calls / name).write_bytes(wav(2))
    (calls / "notes.txt").write_text("no recording")
    done = run("submit", calls, "-f", "text", "--follow")
    assert done.exit_code == 0, done.output
    batch = done.stdout.strip()
    done = run("fetch", batch, "-o", tmp_path / "out")
    assert (done.exit_code, "2 answers and 0 errors" in done.stderr) == (0, True), done.output
    answers = [json.loads(line) for line in (tmp_path / "out" / "output.jsonl").read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["1.wav", "monday/2.wav"]
    assert len({answer["response"]["body"] for answer in answers}) == 1
    assert not (tmp_path / "out" / "errors.jsonl").exists()
    listed = run("status")
    assert (listed.exit_code, batch in listed.stdout) == (0, True)
    done = run("cancel", batch)
    assert (done.exit_code, "is completed" in done.stderr) == (1, True)


def test_requests_are_submitted_and_bad_ones_told(run, wav, tmp_path):
    (tmp_path / "clip.wav").write_bytes(wav(2))
    request = {"method": "POST", "url": "/v1/audio/transcriptions"}
    lines = [
        {"custom_id": "good", **request, "body": {"file": "clip.wav"}},
        {"custom_id": "bad", **request, "body": {"file": "clip.wav", "temperature": 9}},
    ]
    requests = tmp_path / "requests.jsonl"
    requests.write_text("\n".join(map(json.dumps, lines)))
    done = run("submit", requests, "--follow", "-q")
    assert done.exit_code == 0, done.output
    batch = done.stdout.strip()
    counts = json.loads(run("status", batch, "--json").stdout)["request_counts"]
    assert counts == {"total": 2, "completed": 1, "failed": 1}
    done = run("fetch", batch, "-o", tmp_path / "out")
    assert (done.exit_code, "1 answers and 1 errors" in done.stderr) == (1, True), done.output
    requests.write_text(json.dumps({**lines[0], "url": "/v1/embeddings"}))
    done = run("submit", requests)
    assert (done.exit_code, "/v1/embeddings" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "has no requests"), ("{", ":1:"), ("[]", "no request"), ('{"custom_id": "1", "body": 3}', "no request")],
)
def test_files_that_are_no_requests(run, tmp_path, text, says):
    requests = tmp_path / "requests.jsonl"
    requests.write_text(text)
    done = run("submit", requests)
    assert (done.exit_code, says in done.stderr) == (2, True), done.output


def test_texts_with_other_line_breaks_are_one_request(run, wav, tmp_path):
    (tmp_path / "clip.wav").write_bytes(wav(1))
    request = {"custom_id": "a\u2028b\x85c", "method": "POST", "url": "/v1/audio/transcriptions"}
    requests = tmp_path / "requests.jsonl"
    text = json.dumps({**request, "body": {"file": "clip.wav"}}, ensure_ascii=False)
    requests.write_bytes(f"\ufeff{text}\r\n".encode())
    done = run("submit", requests, "--follow", "-q")
    assert done.exit_code == 0, done.output


def test_too_many_requests_are_refused_before_an_upload(run, tmp_path):
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"body": {"file": "missing.wav"}}\n' * 50_001)
    done = run("submit", requests)
    assert (done.exit_code, "up to 50000 in a batch" in done.stderr) == (2, True), done.output


def test_sources_that_are_none(run, tmp_path):
    done = run("submit", tmp_path)
    assert (done.exit_code, "has no recordings" in done.stderr) == (2, True)
    done = run("submit", tmp_path / "nothing.jsonl")
    assert (done.exit_code, "nothing.jsonl" in done.stderr) == (1, True)
    done = run("fetch", "batch_0", "-o", tmp_path)
    assert (done.exit_code, "there is no batch" in done.stderr) == (1, True)
