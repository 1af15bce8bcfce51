"""Webhooks: signed posts of events as JSON, and a sender that posts them one after the other on a thread of its own.

Source  Standard Webhooks (standardwebhooks.com), as OpenAI's clients verify them
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import http.client
import logging
import queue
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from asr_serve.errors import OptionError

MAX_QUEUED = 10_000
TIMEOUT_S = 5.0
ATTEMPTS = 5
FIRST_RETRY_S = 0.5
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 24, 64
"""Length of a key, as Standard Webhooks recommends it."""

log = logging.getLogger(__name__)


def read_webhook_secret(text: str) -> bytes:
    """Key in `whsec_BASE64`. Raises OptionError, also for one that is too short: anybody signs with an empty one."""
    key: bytes | None = None
    with contextlib.suppress(binascii.Error, ValueError):
        key = base64.b64decode(text.removeprefix("whsec_"), validate=True)
    if key is None or not MIN_SECRET_BYTES <= len(key) <= MAX_SECRET_BYTES:
        raise OptionError(
            "webhook_secret is no base64 behind whsec_"
            if key is None
            else f"webhook_secret has {len(key)} bytes behind whsec_",
            f"{MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} random bytes",
            "whsec_$(openssl rand -base64 32)",
            param="webhook_secret",
        )
    return key


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that follows no redirect: a signed event goes to the URL that was configured, or nowhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


class WebhookPoster:
    """Poster of single events to one URL: signed where it has a key, without redirects. May be used by any thread."""

    def __init__(self, url: str, secret: str | None = None, user_agent: str = "asr-serve") -> None:
        """`secret`: key of the signatures, as `read_webhook_secret` reads it; None: posts are not signed."""
        self._url, self._user_agent = url, user_agent
        self._key = None if secret is None else read_webhook_secret(secret)
        self._opener = urllib.request.build_opener(_NoRedirects)

    def post(self, event_id: str, json: bytes) -> str | None:
        """Posts an event; blocks for up to TIMEOUT_S for each step. None: the receiver has it (2xx); else the reason
        why not."""
        try:
            # A URL that only a request finds to be no URL raises here too.
            request = urllib.request.Request(self._url, json, self._headers(event_id, json), method="POST")
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                return None if 200 <= answer.status < 300 else f"status {answer.status}"
        except (OSError, ValueError, http.client.HTTPException) as error:
            return str(error) or type(error).__name__

    def _headers(self, event_id: str, json: bytes) -> dict[str, str]:
        """Headers of a post; those of Standard Webhooks (standardwebhooks.com) among them."""
        now = str(int(time.time()))
        headers = {"Content-Type": "application/json", "User-Agent": self._user_agent}
        headers |= {"webhook-id": event_id, "webhook-timestamp": now}
        if self._key is not None:
            digest = hmac.digest(self._key, b"%s.%s.%s" % (event_id.encode(), now.encode(), json), hashlib.sha256)
            headers["webhook-signature"] = f"v1,{base64.b64encode(digest).decode()}"
        return headers


class Webhook:
    """Sender of events to one URL, in order. A receiver that answers 2xx has an event; otherwise it is sent again,
    ATTEMPTS times in all, and then dropped and counted, as are events behind MAX_QUEUED that wait."""

    def __init__(self, url: str, secret: str | None = None) -> None:
        """`secret`: key of the signatures, as `read_webhook_secret` reads it; None: posts are not signed."""
        self._poster = WebhookPoster(url, secret, "asr-serve-edge")
        self._queue: queue.Queue[tuple[str, bytes] | None] = queue.Queue(MAX_QUEUED)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._unfinished = 0
        """Events that are queued or in flight."""
        self.delivered = self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="edge-webhook", daemon=True)
        self._thread.start()

    def post(self, event_id: str, json: bytes) -> None:
        """Queues an event, whose id no other has; never waits."""
        with self._lock:
            try:
                self._queue.put_nowait((event_id, json))
            except queue.Full:
                self.dropped += 1
            else:
                self._unfinished += 1

    def close(self, wait_s: float) -> None:
        """Waits until every event has been delivered or dropped, at most so long. Then nothing is tried again."""
        with self._idle:
            self._idle.wait_for(lambda: not self._unfinished, wait_s)
        self._closing.set()
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        while not self._closing.is_set() or not self._queue.empty():
            event = self._queue.get()
            if event is None:
                return
            delivered = self._deliver(*event)
            with self._idle:
                if delivered:
                    self.delivered += 1
                else:
                    self.dropped += 1
                self._unfinished -= 1
                self._idle.notify_all()

    def _deliver(self, event_id: str, json: bytes) -> bool:
        wait_s, reason = FIRST_RETRY_S, ""
        for attempt in range(ATTEMPTS):
            if attempt and self._closing.wait(wait_s):
                break
            wait_s *= 2 if attempt else 1
            if (failure := self._poster.post(event_id, json)) is None:
                return True
            reason = failure
        log.warning("an event was not delivered to the webhook: %s", reason)
        return False
