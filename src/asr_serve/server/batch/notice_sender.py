"""Sender of notices: the ends of batches, posted to the webhook of the server, and tried again for days."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from asr_serve.config import BatchConfig
from asr_serve.errors import OptionError, StoreUnavailable
from asr_serve.metrics import BatchMetrics
from asr_serve.server.batch.batch_store import BatchStore
from asr_serve.webhook import WebhookPoster, read_webhook_secret

FIRST_RETRY_S, MAX_RETRY_S = 5.0, 3_600.0
MAX_ATTEMPTS = 80
"""Attempts before a notice is given up: three days."""
NOTICES_AT_ONCE = 16

log = logging.getLogger(__name__)


def open_poster(config: BatchConfig) -> WebhookPoster | None:
    """Poster to the webhook of the settings; None without one. Raises OptionError for a secret that is none."""
    if config.webhook is None:
        return None
    secret = None
    if config.webhook_key_file is not None:
        try:
            secret = Path(config.webhook_key_file).expanduser().read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise OptionError(
                f"batch.webhook_key_file={config.webhook_key_file!r}: {reason}",
                "a file that may be read, with whsec_BASE64 in it",
                "echo whsec_$(openssl rand -base64 32) > FILE",
                param="webhook_key_file",
            ) from None
        read_webhook_secret(secret)
    return WebhookPoster(config.webhook, secret)


class NoticeSender:
    """Sender of the notices of a store. Belongs to the event loop's thread."""

    def __init__(
        self, store: BatchStore, poster: WebhookPoster, call: Callable[..., Awaitable[Any]], metrics: BatchMetrics
    ) -> None:
        """`call`: runs a method of the store on its thread."""
        self._store, self._poster, self._call, self._metrics = store, poster, call, metrics
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """Looks for notices that are due."""
        self._wake.set()

    async def close(self) -> None:
        """Sends nothing more; what was not delivered stays in the store."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            wait_s: float | None = MAX_RETRY_S
            with contextlib.suppress(StoreUnavailable):
                for notice in await self._call(self._store.due_notices, time.time(), NOTICES_AT_ONCE):
                    failure = await asyncio.to_thread(self._poster.post, notice.id, notice.event)
                    if failure is None or notice.attempts + 1 >= MAX_ATTEMPTS:
                        await self._call(self._store.remove_notice, notice.id)
                        self._metrics.notices.labels("dropped" if failure else "delivered").inc()
                    else:
                        retry_s = min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** min(notice.attempts, 16))
                        await self._call(self._store.postpone_notice, notice.id, time.time() + retry_s)
                    if failure is not None:
                        log.warning("attempt %d to post %s failed: %s", notice.attempts + 1, notice.id, failure)
                due = await self._call(self._store.next_notice_due)
                wait_s = None if due is None else max(1.0, due - time.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
