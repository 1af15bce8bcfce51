"""Webhook: redirects are no deliveries, and closing waits for what is in flight."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from running_server import WAIT_S

from asr_serve import webhook
from asr_serve.errors import OptionError
from asr_serve.webhook import Webhook, read_webhook_secret


class Receiver(ThreadingHTTPServer):
    """Receiver that gives its answers in order, the last one for ever; `came` has method and path of each request."""

    def __init__(self, answers: list[int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers, self.came = answers, list[tuple[str, str]]()
        self.arrived = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/words"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.came.append((self.command, self.path))
        answers = self.server.answers
        self.send_response(answers.pop(0) if len(answers) > 1 else answers[0])
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()
        self.server.arrived.set()

    do_POST = do_GET = _answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receivers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Receiver]]:
    monkeypatch.setattr(webhook, "FIRST_RETRY_S", 0.01)
    made: list[Receiver] = []
    yield made
    for each in made:
        each.shutdown()
        each.server_close()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_failed_attempts(status: int, receivers: list[Receiver]) -> None:
    receivers.append(Receiver([status, 204]))
    sender = Webhook(receivers[0].url)
    sender.post("one", b"{}")
    sender.close(WAIT_S)
    assert receivers[0].came == [("POST", "/words")] * 2
    assert (sender.delivered, sender.dropped) == (1, 0)


def test_closing_waits_for_the_event_in_flight(receivers: list[Receiver]) -> None:
    """Its first attempt has failed when the webhook is closed: it gets the others."""
    receivers.append(Receiver([500, 500, 500, 204]))
    sender = Webhook(receivers[0].url)
    sender.post("one", b"{}")
    assert receivers[0].arrived.wait(WAIT_S)
    sender.close(WAIT_S)
    assert (sender.delivered, sender.dropped, len(receivers[0].came)) == (1, 0, 4)


@pytest.mark.parametrize("text", ["", "whsec_", "whsec_c2hvcnQ=", "whsec_x", "whsec_\u00e4", "whsec_" + "QUJD" * 22])
def test_secrets_that_could_be_guessed_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="24 to 64 random bytes"):
        read_webhook_secret(text)
    assert read_webhook_secret("whsec_" + "QUJD" * 8) == b"ABC" * 8
