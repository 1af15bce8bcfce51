"""Submissions that are interrupted: the same command goes on, and nothing is sent twice. The server is a process, which
is killed; between it and the command is a relay, which decides when."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cli_process import invoke, start_cli
from running_server import WAIT_S, eventually
from running_server import wav as wav
from server_process import Serving

from asr_serve.api.cli.batch import TRANSCRIPTIONS, _Content
from asr_serve.api.cli.io.upload_record import MAX_RECORD_AGE_S, UploadRecord, upload_record
from asr_serve.config import submissions_dir

NAMES = ["1.wav", "2.wav", "3.wav", "4.wav"]
ENDED = ("completed", "failed", "cancelled", "expired")
KEEP_DAYS = 20
"""Age at which the server deletes files."""


class Relay:
    """TCP port before a server. The command opens a connection for each request."""

    def __init__(self) -> None:
        self.server_port, self.requests = 0, 0
        self.lost: int | None = None
        """Number of the request whose answer the client never gets."""
        self.stalled: int | None = None
        """Number of the request that the server never gets."""
        self.on_loss: Callable[[], object] = lambda: None
        self.before: dict[int, Callable[[], object]] = {}
        """Calls before the server gets a request, by its number."""
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self, lost: int | None = None, stalled: int | None = None) -> None:
        """Numbers requests from 1 again."""
        self.requests, self.lost, self.stalled = 0, lost, stalled
        self.on_loss, self.before = (lambda: None), {}

    def close(self) -> None:
        for each in [self._listener, *self._open]:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(client)
            self.requests += 1
            threading.Thread(target=self._relay, args=(client, self.requests), daemon=True).start()

    def _relay(self, client: socket.socket, number: int) -> None:
        if number == self.stalled:
            return
        self.before.get(number, lambda: None)()
        try:
            server = socket.create_connection(("127.0.0.1", self.server_port), WAIT_S)
        except OSError:
            client.close()
            return
        self._open.append(server)
        threading.Thread(target=_copy, args=(client, server), daemon=True).start()
        if number != self.lost:
            _copy(server, client)
            return
        server.recv(1)  # it has done what it was to do
        self.on_loss()
        # Closing alone would not end the connection while the other thread reads from it.
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)
        client.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        target.close()


class Batches:
    """A server with a folder of batches, which can be killed and started again, behind a relay."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.relay = folder, Relay()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.relay.server_port = probe.getsockname()[1]
        self.start()

    def start(self) -> None:
        port, folder = self.relay.server_port, self._folder / "batch"
        self.process = Serving(
            self._folder / "log",
            f"--port={port}",
            f"--set=batch.folder={folder}",
            f"--set=batch.keep_s={KEEP_DAYS * 86_400}",
        )
        self.http = httpx.Client(base_url=self.process.url, timeout=WAIT_S)

    def kill(self) -> None:
        self.http.close()
        self.process.kill()

    def close(self) -> None:
        self.http.close()
        self.relay.close()
        self.process.close()

    def names(self) -> list[str]:
        """Names of the files that clients uploaded, sorted."""
        found = self.http.get("/v1/files", params={"purpose": "batch"}).json()["data"]
        return sorted(file["filename"] for file in found)

    def batches(self) -> list[str]:
        return [each["id"] for each in self.http.get("/v1/batches").json()["data"]]

    def clear(self) -> None:
        """Cancels all batches and deletes all files."""
        self.relay.reset()
        for batch in self.batches():
            self.http.post(f"/v1/batches/{batch}/cancel")
        eventually(lambda: all(each["status"] in ENDED for each in self.http.get("/v1/batches").json()["data"]))
        for file in self.http.get("/v1/files").json()["data"]:
            self.http.delete(f"/v1/files/{file['id']}").raise_for_status()


@pytest.fixture(scope="session")
def cities(packaged_speech: Path) -> Path:
    return packaged_speech / "two_cities.wav"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Batches]:
    made = Batches(tmp_path_factory.mktemp("served"))
    yield made
    made.close()


@pytest.fixture
def server(served: Batches) -> Iterator[Batches]:
    served.clear()
    for record in submissions_dir().glob("*.jsonl"):  # of other tests' submissions, which fail
        record.unlink()
    yield served
    assert not list(submissions_dir().glob("*.jsonl")), "each submission of these tests ends"


@pytest.fixture
def calls(tmp_path: Path, wav: Callable[[float], bytes]) -> Path:
    """Recordings of one size, which differ in their last sample."""
    folder = tmp_path / "calls"
    folder.mkdir()
    for number, name in enumerate(NAMES):
        (folder / name).write_bytes(wav(1)[:-2] + bytes([number, 0]))
    return folder


def submit(server: Batches, source: Path, window: str = "24h") -> Any:
    return invoke("batch", "submit", source, "--server", server.relay.url, "--window", window)


def upload(server: Batches, name: str, data: bytes) -> str:
    """Uploads a file as another program does; returns its id."""
    answer = server.http.post("/v1/files", data={"purpose": "batch"}, files={"file": (name, data)})
    return str(answer.raise_for_status().json()["id"])


def lose_upload(server: Batches, calls: Path) -> None:
    """Submits; the server gets three recordings, and its answer to the third is lost."""
    server.relay.reset(lost=3)
    assert submit(server, calls).exit_code == 1
    eventually(lambda: server.names() == NAMES[:3])
    server.relay.reset()


def limit_file_sizes(limit: int) -> None:
    """Has writes fail past so many bytes of a file, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def input_of(server: Batches, batch: str) -> list[dict[str, Any]]:
    """Requests of a batch."""
    input_file = server.http.get(f"/v1/batches/{batch}").json()["input_file_id"]
    return [json.loads(line) for line in server.http.get(f"/v1/files/{input_file}/content").text.splitlines()]


def expect_submitted(server: Batches, batch: str, calls: Path) -> None:
    """All recordings are there once, and each request has its own."""
    assert server.batches()[0] == batch
    assert server.names() == sorted([*NAMES, "lines.jsonl"])
    requests = input_of(server, batch)
    assert [request["custom_id"] for request in requests] == NAMES
    for request in requests:
        content = server.http.get(f"/v1/files/{request['body']['file']}/content").content
        assert content == (calls / request["custom_id"]).read_bytes()


def test_a_server_that_is_killed_before_it_answers_an_upload(server, calls):
    """It has the third recording, and nobody knows."""
    server.relay.reset(lost=3)
    server.relay.on_loss = server.kill
    done = submit(server, calls)
    assert done.exit_code == 1
    assert "2 files are uploaded; the same command goes on" in done.stderr
    done = submit(server, calls)
    assert (done.exit_code, "2 files are uploaded" in done.stderr) == (1, True), "the server is still down"
    server.start()
    server.relay.reset()
    done = submit(server, calls)
    assert done.exit_code == 0, done.stderr
    assert "3 of 4 recordings were there" in done.stderr
    expect_submitted(server, done.stdout.strip(), calls)
    again = submit(server, calls)
    assert again.stdout != done.stdout, "a submission that has ended is not continued"
    assert "were there" not in again.stderr


def test_ctrl_c(server, calls):
    server.relay.reset(stalled=3)
    with start_cli("batch", "submit", calls, "--server", server.relay.url) as command:
        eventually(lambda: server.relay.requests == 3)
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=WAIT_S)
    assert command.returncode == 130
    assert b"2 files are uploaded; the same command goes on" in errors
    assert server.names() == ["1.wav", "2.wav"]
    (calls / "1.wav").write_bytes((calls / "4.wav").read_bytes())  # one of them has changed since
    os.utime(calls / "1.wav", ns=(1, 1))
    server.relay.reset()
    done = submit(server, calls)
    assert (done.exit_code, "1 of 4 recordings were there" in done.stderr) == (0, True), done.stderr
    assert server.names() == sorted([*NAMES, "1.wav", "lines.jsonl"])
    contents = [
        server.http.get(f"/v1/files/{request['body']['file']}/content").content
        for request in input_of(server, done.stdout.strip())
    ]
    assert contents == [(calls / name).read_bytes() for name in NAMES]


def test_a_command_and_a_server_that_are_killed_at_the_last_step(server, calls):
    """The batch is made, and nobody knows."""
    server.relay.reset(lost=6)
    died = threading.Event()
    with start_cli("batch", "submit", calls, "--server", server.relay.url) as command:

        def end() -> None:
            command.kill()
            server.kill()
            died.set()

        server.relay.on_loss = end
        assert died.wait(WAIT_S)
    server.start()
    (made,) = server.batches()[:1]
    before = len(server.batches())
    server.relay.reset()
    done = submit(server, calls)
    assert (done.exit_code, done.stdout.strip()) == (0, made), done.stderr
    assert len(server.batches()) == before
    expect_submitted(server, made, calls)


def test_files_that_the_server_has_no_more_are_sent_again(server, calls):
    server.relay.reset(lost=4)
    assert submit(server, calls).exit_code == 1
    for file in server.http.get("/v1/files").json()["data"]:
        if file["filename"] in ("2.wav", "4.wav"):
            server.http.delete(f"/v1/files/{file['id']}").raise_for_status()
    server.relay.reset()
    done = submit(server, calls)
    assert (done.exit_code, "2 of 4 recordings were there" in done.stderr) == (0, True), done.stderr
    expect_submitted(server, done.stdout.strip(), calls)


def test_an_upload_whose_answer_was_lost_is_found_though_others_start_first(server, calls):
    lose_upload(server, calls)
    (calls / "0.wav").write_bytes((calls / "1.wav").read_bytes())
    done = submit(server, calls)
    assert (done.exit_code, "3 of 5 recordings were there" in done.stderr) == (0, True), done.stderr
    assert server.names() == sorted(["0.wav", *NAMES, "lines.jsonl"])


def test_an_upload_whose_answer_was_lost_is_told_from_other_files(server, calls):
    """Neither older files, nor those of another name, size or content, nor one that is deleted meanwhile."""
    content = (calls / "3.wav").read_bytes()
    older = upload(server, "3.wav", content)
    uploaded_s = time.time()
    eventually(lambda: time.time() > uploaded_s + 4)
    server.relay.reset(lost=3)
    assert submit(server, calls).exit_code == 1
    eventually(lambda: len(server.names()) == 4)
    (lost,) = {file["id"] for file in server.http.get("/v1/files").json()["data"] if file["filename"] == "3.wav"} - {
        older
    }
    upload(server, "other.wav", content)
    upload(server, "3.wav", content[:-1])
    upload(server, "3.wav", content[:-1] + b"x")
    server.relay.reset()
    # Of 1.wav, of 2.wav, the list, the content of 3.wav with an x, the content of the lost one.
    server.relay.before[5] = lambda: server.http.delete(f"/v1/files/{lost}").raise_for_status()
    done = submit(server, calls)
    assert (done.exit_code, "2 of 4 recordings were there" in done.stderr) == (0, True), done.stderr
    assert server.relay.requests == 9, "3.wav, 4.wav, the lines and the batch are sent"
    (request,) = (each for each in input_of(server, done.stdout.strip()) if each["custom_id"] == "3.wav")
    assert server.http.get(f"/v1/files/{request['body']['file']}/content").content == content


def test_a_recording_is_hashed_once(calls):
    content = _Content(calls / "1.wav")
    digest = content.digest
    (calls / "1.wav").unlink()
    assert content.digest == digest == hashlib.sha256((calls / "2.wav").read_bytes()[:-2] + bytes(2)).hexdigest()


def test_a_batch_that_was_made_and_has_failed_is_made_again(server, calls, tmp_path):
    source = tmp_path / "requests.jsonl"
    source.write_text(json.dumps({"custom_id": "no method", "url": TRANSCRIPTIONS, "body": {"file": "calls/1.wav"}}))
    server.relay.reset(lost=3)
    died = threading.Event()
    with start_cli("batch", "submit", source, "--server", server.relay.url) as command:

        def end() -> None:
            command.kill()
            died.set()

        server.relay.on_loss = end
        assert died.wait(WAIT_S)
    failed = server.batches()[0]
    eventually(lambda: server.http.get(f"/v1/batches/{failed}").json()["status"] == "failed")
    server.relay.reset()
    done = submit(server, source)
    assert (done.exit_code, "1 of 1 recordings were there" in done.stderr) == (0, True), done.stderr
    assert server.batches()[:2] == [done.stdout.strip(), failed]
    assert server.names() == ["1.wav", "lines.jsonl"], "no file is sent again"


def test_files_that_expire_before_the_batch_does_are_sent_again(server, calls):
    lose_upload(server, calls)
    done = submit(server, calls, f"{KEEP_DAYS + 1}d")
    assert (done.exit_code, "were there" in done.stderr) == (0, False), done.stderr
    assert server.names() == sorted([*NAMES, *NAMES[:3], "lines.jsonl"])


def test_files_that_expire_after_the_batch_does_are_used(server, calls):
    lose_upload(server, calls)
    done = submit(server, calls, f"{KEEP_DAYS - 1}d")
    assert (done.exit_code, "3 of 4 recordings were there" in done.stderr) == (0, True), done.stderr


def test_a_window_that_no_server_takes_is_refused_before_an_upload(server, calls):
    done = submit(server, calls, "31d")
    assert (done.exit_code, "up to 30d" in done.stderr) == (2, True), done.stderr
    assert server.names() == []


@pytest.mark.parametrize("limit", [0, 150], ids=["at its start", "in an upload"])
def test_where_the_disk_is_full_it_is_submitted_all_the_same(server, calls, limit):
    server.relay.reset()
    command = ("batch", "submit", calls, "--server", server.relay.url)
    with start_cli(*command, preexec_fn=lambda: limit_file_sizes(limit)) as process:
        batch, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors.decode()
    expect_submitted(server, batch.decode().strip(), calls)


def test_names_that_are_not_utf_8(server, calls, tmp_path):
    folder, name = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")), os.fsdecode(b'"caf\xe9".wav')
    calls.rename(folder)
    (folder / "3.wav").rename(folder / name)
    server.relay.reset(lost=1)
    assert submit(server, folder).exit_code == 1
    eventually(lambda: server.names() == ["_caf__.wav"])
    server.relay.reset()
    done = submit(server, folder)
    assert (done.exit_code, "1 of 4 recordings were there" in done.stderr) == (0, True), done.stderr
    assert server.names() == sorted(["1.wav", "2.wav", "4.wav", "_caf__.wav", "lines.jsonl"])
    names = [each["custom_id"] for each in input_of(server, done.stdout.strip())]
    assert sorted(names) == sorted(["1.wav", "2.wav", "4.wav", '"caf\\xe9".wav'])


def test_a_damaged_record_is_no_record(server, calls):
    lose_upload(server, calls)
    (record,) = submissions_dir().glob("*.jsonl")
    record.write_bytes(b"\xff" + record.read_bytes()[1:])
    server.relay.reset(lost=2)
    done = submit(server, calls)
    assert (done.exit_code, "1 files are uploaded" in done.stderr) == (1, True), done.stderr
    server.relay.reset()
    done = submit(server, calls)
    assert (done.exit_code, "2 of 4 recordings were there" in done.stderr) == (0, True), done.stderr


def test_a_recording_of_two_requests_is_sent_once(server, calls, tmp_path):
    lines = [
        {"custom_id": str(at), "method": "POST", "url": "/v1/audio/transcriptions", "body": {"file": "calls/1.wav"}}
        for at in range(2)
    ]
    source = tmp_path / "requests.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    done = submit(server, source)
    assert done.exit_code == 0, done.stderr
    assert server.names() == ["1.wav", "lines.jsonl"]


def test_two_commands_at_once(server, calls):
    with upload_record(submissions_dir(), server.relay.url, None, calls):
        done = submit(server, calls)
    assert (done.exit_code, "another process is submitting" in done.stderr) == (2, True)
    assert server.names() == []


def test_where_no_record_can_be_written_it_is_submitted_all_the_same(server, calls, tmp_path, monkeypatch):
    (tmp_path / "state").write_text("no folder")
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        server.relay.reset(lost=2)
        done = submit(server, calls)
        assert (done.exit_code, "the same command" in done.stderr) == (1, False)
        done = submit(server, calls)
    assert done.exit_code == 0, done.stderr
    assert server.names() == sorted([*NAMES, "1.wav", "2.wav", "lines.jsonl"])


@contextlib.contextmanager
def interrupted_record(*where: Any) -> Iterator[UploadRecord]:
    with contextlib.suppress(KeyboardInterrupt), upload_record(*where) as record:
        yield record
        raise KeyboardInterrupt


def test_records_are_of_one_server_key_and_source_and_are_not_kept_for_ever(tmp_path):
    folder = tmp_path / "records"
    wheres = [("http://a", None), ("http://b", None), ("http://a", "key")]
    for number, (url, key) in enumerate(wheres):
        with interrupted_record(folder, url, key, tmp_path) as record:
            assert record.ids == frozenset()
            record.start_upload("recording")
            record.finish_upload("recording", f"file-{number}")
    assert len(list(folder.iterdir())) == 3
    cut = max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    cut.write_text(f'{cut.read_text()}{{"key": "oth')  # as a kill leaves it
    with interrupted_record(folder, *wheres[2], tmp_path) as record:
        assert (record.file_id("recording"), record.is_pending("other")) == ("file-2", False)
        record.start_upload("other")
    for path in folder.iterdir():
        if path != cut:
            os.utime(path, (1, path.stat().st_mtime - MAX_RECORD_AGE_S - 1))
    with upload_record(folder, *wheres[2], tmp_path) as record:
        assert (record.file_id("recording"), record.is_pending("other")) == ("file-2", True)
        assert list(folder.iterdir()) == [cut]
    assert list(folder.iterdir()) == []
