"""/v1/files and /v1/batches by OpenAI's unmodified client: answers, errors, isolation, cancel, expiry, webhooks."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI
from running_server import Running, eventually

from asr_serve.audio.encode.stream_encoder import AudioEncoder
from asr_serve.audio.reader import open_audio
from asr_serve.config import BatchConfig

TRANSCRIPTIONS, SPEECH = "/v1/audio/transcriptions", "/v1/audio/speech"
USER, OTHER = "secret-user", "secret-other"
ENDED = ("completed", "failed", "expired", "cancelled")
SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()


class Receiver(ThreadingHTTPServer):
    """Receiver of notices: it fails the first one, then accepts."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.came = list[tuple[bytes, dict[str, str]]]()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.came.append((body, {name.lower(): value for name, value in self.headers.items()}))
        self.send_response(500 if len(self.server.came) == 1 else 204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture(scope="module")
def running(
    serve_voice: Callable[..., Running], tmp_path_factory: pytest.TempPathFactory, receiver: Receiver
) -> Running:
    folder = tmp_path_factory.mktemp("batch")
    (folder / "secret").write_text(SECRET)
    batch = BatchConfig(
        folder=str(folder / "queue"),
        webhook=f"http://127.0.0.1:{receiver.server_port}/ends",
        webhook_key_file=str(folder / "secret"),
        bytes_per_key=30_000_000,
        batches_per_key=2,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asr_serve.server.batch.notice_sender.FIRST_RETRY_S", 0.01)
        return serve_voice(api_keys=(USER, OTHER), batch=batch)


@pytest.fixture
def server(running: Running) -> Iterator[Running]:
    yield running
    for key in (USER, OTHER):
        client = running.openai(key)
        for batch in client.batches.list(limit=10):
            if batch.status not in ENDED:
                client.batches.cancel(batch.id)
                ended(client, batch.id)
        for file in client.files.list():
            client.files.delete(file.id)
    running.expect_empty()


@pytest.fixture
def client(server: Running) -> OpenAI:
    return server.openai(USER)


def line(custom_id: str, body: dict[str, Any], url: str = TRANSCRIPTIONS, /, **members: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body} | members).encode()


def upload(client: OpenAI, *lines: bytes, name: str = "lines.jsonl") -> str:
    return client.files.create(file=(name, io.BytesIO(b"\n".join(lines))), purpose="batch").id


def submit(client: OpenAI, *lines: bytes, endpoint: str = TRANSCRIPTIONS, window: str = "24h", **more: Any) -> Any:
    file = upload(client, *lines)
    return client.batches.create(input_file_id=file, endpoint=endpoint, completion_window=window, **more)


def ended(client: OpenAI, batch_id: str) -> Any:
    found: Any = None

    def is_over() -> bool:
        nonlocal found
        found = client.batches.retrieve(batch_id)
        return found.status in ENDED

    eventually(is_over, lambda: str(found))
    return found


def read(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def code(ask: Callable[[], object]) -> tuple[int, str | None]:
    """Status and code of the error that a request is answered with."""
    with pytest.raises(openai.APIStatusError) as refused:
        ask()
    return refused.value.status_code, refused.value.code


def data_url(audio: bytes) -> str:
    return f"data:audio/wav;base64,{base64.b64encode(audio).decode()}"


def test_files_are_kept_and_deleted(client):
    made = client.files.create(file=("talk.wav", b"RIFF"), purpose="user_data")
    assert (made.filename, made.bytes, made.purpose, made.object, made.status) == (
        *("talk.wav", 4, "user_data", "file", "processed"),
    )
    assert made.expires_at == made.created_at + 30 * 86_400
    others = [upload(client, b"{}") for _ in range(3)]
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == b"RIFF"
    assert [file.id for file in client.files.list(limit=2)] == [*others[::-1], made.id]  # over two pages
    assert [file.id for file in client.files.list(order="asc", purpose="batch")] == others
    assert client.files.delete(made.id).deleted
    assert code(lambda: client.files.content(made.id)) == (404, "unknown_file")


def test_lines_are_answered_as_their_route_answers(client, server, wav, receiver):
    audio = wav(3)
    clip = client.files.create(file=("cities.wav", audio), purpose="batch").id
    batch = submit(
        client,
        line("by id", {"model": "whisper-1", "file": clip, "user": "somebody"}),
        line("inline", {"file": data_url(audio), "response_format": "verbose_json",
                        "timestamp_granularities": ["word"]}),
        b"",
        line("subtitles", {"file_id": clip, "response_format": "srt"}),
        line("bad option", {"file": clip, "temperature": 7}),
        line("no audio", {"file": data_url(b"nothing")}),
        line("other's", {"file": f"file-{'0' * 32}"}),
        line("streamed", {"file": clip, "stream": True}),
        metadata={"project": "archive"},
    )  # fmt: skip
    assert (batch.status, batch.request_counts.total, batch.metadata) == ("validating", 0, {"project": "archive"})
    over = ended(client, batch.id)
    assert over.status == "completed"
    counts = over.request_counts
    assert (counts.total, counts.completed, counts.failed) == (7, 3, 4)
    assert over.created_at <= over.in_progress_at <= over.finalizing_at <= over.completed_at
    asked = {
        form: client.audio.transcriptions.create(
            file=("cities.wav", audio), model="whisper-1", response_format=form, **more
        )
        for form, more in (("json", {}), ("verbose_json", {"timestamp_granularities": ["word"]}), ("srt", {}))
    }
    answers = {each["custom_id"]: each for each in read(client, over.output_file_id)}
    assert list(answers) == ["by id", "inline", "subtitles"]
    assert {each["response"]["status_code"] for each in answers.values()} == {200}
    assert answers["by id"]["response"]["body"]["text"] == asked["json"].text
    assert answers["by id"]["response"]["ignored"] == "user"
    words = answers["inline"]["response"]["body"]["words"]
    assert [word["word"] for word in words] == [word.word for word in asked["verbose_json"].words]
    assert answers["subtitles"]["response"]["body"] == asked["srt"]
    errors = {
        each["custom_id"]: (each["response"]["status_code"], each["response"]["body"]["error"])
        for each in read(client, over.error_file_id)
    }
    assert {name: (status, error["code"], error["param"]) for name, (status, error) in errors.items()} == {
        "bad option": (400, "option_error", "temperature"),
        "no audio": (400, "not_audio", None),
        "other's": (404, "unknown_file", None),
        "streamed": (400, "unsupported_option", "stream"),
    }
    assert server.counted("asr_serve_batch_lines_total", endpoint=TRANSCRIPTIONS, outcome="completed") == 3
    # The first notice is refused, and comes again with the same id and a signature that OpenAI's client accepts.
    eventually(lambda: len(receiver.came) >= 2)
    (first, headers), (second, again) = receiver.came[:2]
    assert (first, headers["webhook-id"]) == (second, again["webhook-id"])
    event = client.webhooks.unwrap(second.decode(), again, secret=SECRET)
    assert (event.type, event.data.id) == ("batch.completed", batch.id)


def test_speech_is_written_as_files(client):
    said = {"model": "tts-1", "voice": "alloy", "input": "Ever tried.", "response_format": "wav"}
    batch = submit(
        client,
        line("a/1", said, SPEECH),
        line("2", {**said, "input": ""}, SPEECH),
        line("3", {**said, "stream_format": "sse"}, SPEECH),
        endpoint=SPEECH,
    )
    over = ended(client, batch.id)
    (answer,) = read(client, over.output_file_id)
    told = answer["response"]["body"]
    file = client.files.retrieve(told["file_id"])
    assert (file.filename, file.purpose, file.bytes) == ("a_1.wav", "batch_output", told["bytes"])
    sound = client.files.content(told["file_id"])
    assert sound.response.headers["content-type"] == told["content_type"] == "audio/wav"
    assert sound.read() == client.audio.speech.create(**said).read()
    codes = {each["custom_id"]: each["response"]["body"]["error"]["code"] for each in read(client, over.error_file_id)}
    assert codes == {"2": "empty_text", "3": "unsupported_option"}


GOOD = line("1", {"file": f"file-{'0' * 32}"})
INPUTS: dict[str, tuple[list[bytes], int | None, str, str | None]] = {
    "empty": ([b""], None, "empty_file", None),
    "no JSON": ([GOOD, b"{"], 2, "malformed_request", None),
    "no object": ([GOOD, b"[]"], 2, "malformed_request", None),
    "no UTF-8": ([b'{"custom_id": "\xff"}'], 1, "malformed_request", None),
    "no custom_id": ([b'{"method": "POST", "url": "/v1/audio/speech", "body": {}}'], 1, "malformed_request", None),
    "long custom_id": ([line("x" * 513, {})], 1, "option_error", "custom_id"),
    "the same custom_id": ([GOOD, GOOD], 2, "duplicate_custom_id", "custom_id"),
    "GET": ([line("1", {}, method="GET")], 1, "option_error", "method"),
    "another url": ([line("1", {}, SPEECH)], 1, "option_error", "url"),
    "body of text": ([line("1", {}, body="x")], 1, "option_error", "body"),
    "nested": ([b'{"custom_id": ' + b"[" * 90_000], 1, "malformed_request", None),
}


@pytest.mark.parametrize("name", INPUTS)
def test_bad_inputs_fail_their_batch(client, name):
    lines, number, code, param = INPUTS[name]
    over = ended(client, submit(client, *lines).id)
    assert (over.status, over.output_file_id, over.error_file_id) == ("failed", None, None)
    error = over.errors.data[-1]
    assert (error.line, error.code, error.param) == (number, code, param)
    assert len(error.message) < 600


def test_keys_see_their_own_alone(client, server, wav):
    other = server.openai(OTHER)
    clip = upload(client, wav(1))
    batch = submit(client, line("1", {"file": clip}))
    assert list(other.files.list()) == list(other.batches.list()) == []
    for refused in (
        lambda: other.files.retrieve(clip),
        lambda: other.files.content(clip),
        lambda: other.files.delete(clip),
        lambda: other.files.list(after=clip),
        lambda: other.batches.create(input_file_id=clip, endpoint=TRANSCRIPTIONS, completion_window="24h"),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.batches.list(after=batch.id),
    ):
        assert code(refused) in [(404, "unknown_file"), (404, "unknown_batch")]
    stolen = ended(other, submit(other, line("1", {"file": clip})).id)
    (failed,) = read(other, stolen.error_file_id)
    assert failed["response"]["body"]["error"]["code"] == "unknown_file"
    assert server.http.get("/v1/files").status_code == 401


def test_cancel_and_what_it_leaves(client, wav):
    lines = [line(str(number), {"file": data_url(wav(10))}) for number in range(6)]
    batch = submit(client, *lines)
    assert code(lambda: client.files.delete(batch.input_file_id)) == (409, "file_in_use")
    eventually(lambda: client.batches.retrieve(batch.id).request_counts.total)
    assert client.batches.cancel(batch.id).status == "cancelling"
    over = ended(client, batch.id)
    assert over.status == "cancelled"
    assert over.cancelling_at <= over.cancelled_at
    answers, errors = read(client, over.output_file_id), read(client, over.error_file_id)
    assert sorted(int(each["custom_id"]) for each in answers + errors) == list(range(6))
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    assert len(answers) == over.request_counts.completed
    assert code(lambda: client.batches.cancel(batch.id)) == (409, "batch_ended")
    client.files.delete(batch.input_file_id)


def test_a_window_ends(client, cities):
    """Twenty minutes of speech do not fit a second."""
    encoder = AudioEncoder("opus", 16_000)
    talk = np.concatenate(list(open_audio(cities)))[: 16_000 * 30]
    audio = data_url(encoder.encode(talk) + encoder.finish())
    lines = [line(str(number), {"file": audio}) for number in range(40)]
    over = ended(client, submit(client, *lines, window="1s").id)
    assert over.status == "expired"
    assert over.expires_at == over.created_at + 1
    answers, errors = read(client, over.output_file_id), read(client, over.error_file_id)
    assert sorted(int(each["custom_id"]) for each in answers + errors) == list(range(40))
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}


def test_quotas_and_repeated_requests(client, server):
    assert code(lambda: upload(client, bytes(30_000_000))) == (413, "quota_exceeded")
    file = upload(client, *(line(str(n), {"file": "data:,x"}) for n in range(2)))
    ask = {"input_file_id": file, "endpoint": TRANSCRIPTIONS, "completion_window": "24h"}
    made = [client.batches.create(**ask, extra_headers={"Idempotency-Key": "one"}).id for _ in range(3)]
    assert len(set(made)) == 1
    for other in ({"endpoint": SPEECH}, {"completion_window": "1h"}, {"metadata": {"a": "b"}}):
        with pytest.raises(openai.BadRequestError, match="Idempotency-Key"):
            client.batches.create(**(ask | other), extra_headers={"Idempotency-Key": "one"})
    ended(client, made[0])
    assert server.counted("asr_serve_batch_stored_bytes") >= 0
