"""The only door to the engine, the same whether its loop is a thread or a process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from asr_serve import units
from asr_serve.config import EngineConfig
from asr_serve.decoding.attention import Recognition, SearchOptions
from asr_serve.devices.base import Device
from asr_serve.engine.loop import Job, Loop, live
from asr_serve.engine.runner import DecodeRunner, EncodeRunner, VadRunner
from asr_serve.engine.session import Utterance, Windows
from asr_serve.errors import AtCapacity, AudioTooLong, EngineClosed, OptionError, UnsupportedAudio
from asr_serve.models.card import Card
from asr_serve.models.vad.silero import WINDOW_SAMPLES, Silero
from asr_serve.types import Priority

ASSUMED_SPEED = 50.0
"""Seconds of audio a second, until the engine has measured its own speed."""


class Ticket(NamedTuple):
    """A submitted utterance: its answer to come, and the name to cancel it by."""

    id: int
    future: Future[Recognition]


class VadSession:
    """One caller's voice activity: pieces go in, speech probabilities come out, in order."""

    def __init__(self, client: EngineClient, session_id: int) -> None:
        self._client, self._id, self._open = client, session_id, True

    def put(self, pcm: np.ndarray) -> Future[np.ndarray]:
        """`pcm` float32 at 16 kHz, whole windows of 512 samples, at most EngineConfig.vad_windows of them.

        The future holds one probability per window. Keep few in flight: what is put is held until computed.
        """
        windows, odd = divmod(len(pcm), WINDOW_SAMPLES)
        if odd or not 1 <= windows <= self._client.config.vad_windows:
            raise OptionError(
                f"{len(pcm)} samples",
                f"a multiple of {WINDOW_SAMPLES}, up to {self._client.config.vad_windows * WINDOW_SAMPLES}",
            )
        piece = Windows(self._id, pcm, Future())
        self._client._call(lambda loop: loop.put(piece))
        return piece.future

    def close(self) -> None:
        with self._client._room:
            was_open, self._open = self._open, False
            if was_open:
                self._client._close_session(self._id)


class Parts(NamedTuple):
    """What an engine is made of."""

    model: Any
    vad: Silero
    device: Device
    text: Callable[[list[int]], str]


class EngineClient:
    """Starts the loop on a thread of its own. Every method may be called from any thread."""

    def __init__(self, card: Card, build: Callable[[], Parts], config: EngineConfig) -> None:
        """`build` runs on the engine's thread and what it raises is raised here. torch gives every thread that
        computes a pool of its own; two pools, and both go to sleep between products."""
        self.card, self.config = card, config
        self.max_samples = units.ms_to_samples(card.max_segment_ms)
        self.min_samples = units.ms_to_samples(card.min_segment_ms)
        self._ids = itertools.count()
        self._room = threading.Condition()
        self._requests = self._samples = self._sessions = 0
        self._closed = False
        ready: Future[Loop] = Future()
        self._thread = threading.Thread(
            target=live, args=(lambda: self._make(build()), ready), name=f"asr-serve {card.name}", daemon=True
        )
        self._thread.start()
        self._loop = ready.result()
        self.device: Device = self._loop.encode_runner.device

    def _make(self, parts: Parts) -> Loop:
        model, vad, device, text = parts
        config = self.config
        longest = model.frames(self.max_samples)
        decode = DecodeRunner(model, device, config.max_decode_rows, config.kv_bytes, longest)
        return Loop(
            model,
            EncodeRunner(model, device),
            decode,
            VadRunner(vad, config.max_sessions),
            config,
            text,
            self.card.tokens_per_s,
            on_done=self._done,
            on_stop=self._stopped,
        )

    def submit(
        self,
        pcm: np.ndarray,
        options: SearchOptions | None = None,
        priority: Priority = "interactive",
        *,
        wait: bool = False,
    ) -> Ticket:
        """Recognise one utterance: `pcm` (samples,) float32, 16 kHz, not longer than the model's limit.

        Full: raises AtCapacity, or waits for room when `wait`. Raises AudioTooLong, UnsupportedAudio,
        EngineClosed.
        """
        if pcm.ndim != 1 or pcm.dtype != np.float32 or not np.isfinite(pcm.sum()):
            raise UnsupportedAudio(
                f"an array of {pcm.dtype}, shape {pcm.shape}",
                "one row of finite float32 samples",
                "open_audio turns anything into that",
            )
        if len(pcm) > self.max_samples:
            raise AudioTooLong(
                f"an utterance of {units.samples_to_s(len(pcm)):.1f} s",
                f"{self.card.name} hears up to {self.card.max_segment_ms / 1_000:.0f} s at once",
                "cut it into segments",
            )
        samples = len(pcm)
        if samples < self.min_samples:
            pcm = np.pad(pcm, (0, self.min_samples - samples))
        future: Future[Recognition] = Future()
        utterance = Utterance(next(self._ids), pcm, samples, options or SearchOptions(), priority, future)
        with self._room:
            while not self._closed and self._full(samples):
                if not wait:
                    raise AtCapacity(
                        f"{self._requests} requests with {units.samples_to_s(self._samples):.0f} s of audio wait",
                        f"up to {self.config.max_requests} requests and {self.config.max_audio_s:.0f} s",
                        self.retry_after_ms(),
                    )
                self._room.wait()
            self._call(lambda loop: loop.submit(utterance))
            self._requests += 1
            self._samples += samples
        return Ticket(utterance.id, future)

    def cancel(self, ticket: Ticket) -> None:
        """Stop the work at its next step and free what it holds; its future raises Cancelled."""
        with self._room:
            if not self._closed:
                self._call(lambda loop: loop.cancel(ticket.id))

    def session(self, *, wait: bool = False) -> VadSession:
        """A caller's voice-activity state. Full: raises AtCapacity, or waits for one when `wait`. Raises
        EngineClosed."""
        session_id = next(self._ids)
        with self._room:
            while wait and not self._closed and self._sessions >= self.config.max_sessions:
                self._room.wait()
            if self._sessions >= self.config.max_sessions:
                raise AtCapacity(
                    f"{self._sessions} sessions are open",
                    f"up to {self.config.max_sessions}",
                    self.retry_after_ms(),
                )
            self._call(lambda loop: loop.open(session_id))
            self._sessions += 1
        return VadSession(self, session_id)

    def retry_after_ms(self) -> int:
        """When about a tenth of what is waiting will be done."""
        stats = self._loop.stats
        spent = stats.vad_s + stats.encode_s + stats.decode_s
        speed = units.samples_to_s(stats.samples) / spent if spent > 1 else ASSUMED_SPEED
        return max(100, int(100 * units.samples_to_s(self._samples) / speed))

    def describe(self) -> dict[str, Any]:
        """What the engine has done so far."""
        stats, pages = self._loop.stats, self._loop.decode_runner.pages
        return {
            "requests": self._requests,
            "steps": stats.steps,
            "rows_per_step": round(stats.step_rows / max(1, stats.steps), 2),
            "fallbacks": stats.fallbacks,
            "audio_s": round(units.samples_to_s(stats.samples), 2),
            "vad_s": round(stats.vad_s, 4),
            "encode_s": round(stats.encode_s, 4),
            "decode_s": round(stats.decode_s, 4),
            "pages": pages.pages,
            "pages_used": pages.used,
        }

    def close(self) -> None:
        """Stop the loop; requests still in it raise EngineClosed."""
        with self._room:
            if not self._closed:
                self._call(Loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _call(self, job: Job) -> None:
        with self._room:
            if self._closed:
                raise EngineClosed("the engine is closed", todo="load the model again")
            self._loop.inbox.put(job)

    def _close_session(self, session_id: int) -> None:
        with self._room:
            if not self._closed:
                # The inbox keeps its order: whoever is let in from here on opens after this one is gone.
                self._call(lambda loop: loop.close(session_id))
                self._sessions -= 1
                self._room.notify_all()

    def _full(self, samples: int) -> bool:
        over = self._samples + samples > units.s_to_samples(self.config.max_audio_s)
        # One utterance always fits an empty engine, whatever the bound says.
        return self._requests >= self.config.max_requests or (over and self._requests > 0)

    def _done(self, samples: int) -> None:
        with self._room:
            self._requests -= 1
            self._samples -= samples
            self._room.notify_all()

    def _stopped(self) -> None:
        with self._room:
            self._closed = True
            self._room.notify_all()
