"""Backend with the loop on a thread of this process, as the library uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from asr_serve.config import EngineConfig
from asr_serve.diarization.local_speakers import LocalSpeakers
from asr_serve.diarization.overlapped_speech import SpeakerRanges
from asr_serve.engine.builder import EngineComponents, build_loop, card_of_loaded
from asr_serve.engine.cache.digest import set_chunk_digest, set_request_digests
from asr_serve.engine.client import Connect
from asr_serve.engine.diarization_runner import DiarizationRequest, models_available
from asr_serve.engine.loop import Loop, LoopJob, run_loop
from asr_serve.engine.partial_rate import UNMEASURED_NEW_CALLERS
from asr_serve.engine.remote.handshake import HandshakeSettings
from asr_serve.engine.request import RecognitionRequest, StreamChunk, VadChunk
from asr_serve.engine.speaker_separation import SeparationRequest
from asr_serve.engine.tts.request import TtsRequest
from asr_serve.engine.turn_runner import LoadedTurnModel, TurnRunner
from asr_serve.errors import EngineClosed
from asr_serve.models.registry import AnyCard
from asr_serve.types import LanguageModelChoice


class ThreadBackend:
    """Starts the loop's thread and turns each call into a job in the loop's inbox."""

    def __init__(
        self,
        card: AnyCard,
        build: Callable[[], EngineComponents],
        config: EngineConfig,
        on_done: Callable[[int], None],
        on_stop: Callable[[], None],
        turns: LoadedTurnModel | None,
        meeting: HandshakeSettings | None = None,
    ) -> None:
        """`build` runs on the engine's thread, and its errors are raised here. torch gives every computing thread
        a pool of its own; with two pools, both go to sleep between products. `meeting`: settings for handshakes
        with other engines."""
        self.turn_card, self.speakers = turns.card if turns else None, models_available()
        self._turns: TurnRunner | None = None
        self._on_stop = on_stop
        self._lock = threading.Lock()
        self._ended = False
        self.card: AnyCard = card
        self.new_live_callers: float = config.new_live_callers or UNMEASURED_NEW_CALLERS
        ready: Future[Loop] = Future()

        def make() -> Loop:
            parts = build()
            self.card = card_of_loaded(card, parts)
            loop = build_loop(parts, card, config, on_done, self._stopped, meeting=meeting)
            if turns:
                self._turns = TurnRunner(turns, loop.executor.device, loop.stats)
            return loop

        self._thread = threading.Thread(target=run_loop, args=(make, ready), name=f"asr-serve {card.name}", daemon=True)
        self._thread.start()
        self.loop = ready.result()
        self.device = self.loop.executor.device

    @property
    def state(self) -> str:
        return "closed" if self._ended else "ready"

    def submit(self, utterance: RecognitionRequest) -> None:
        if self.loop.uses_digests:
            set_request_digests(utterance)
        self.call(lambda loop: loop.executor.submit(utterance))

    def synthesize(self, saying: TtsRequest) -> None:
        self.call(lambda loop: loop.tts.submit_sentence(saying))

    def cancel(self, request_id: int) -> None:
        self.call(lambda loop: loop.executor.cancel(request_id))

    def expedite(self, request_id: int, within_ms: int) -> None:
        self.call(lambda loop: loop.executor.expedite(request_id, within_ms))

    def open_vad_session(self, session: int, live: bool, state: bytes | None = None) -> None:
        self.call(lambda loop: loop.vad_scheduler.open(session, live, state))

    def submit_vad_chunk(self, chunk: VadChunk) -> None:
        if self.loop.uses_digests:
            set_chunk_digest(chunk)
        self.call(lambda loop: loop.vad_scheduler.enqueue(chunk))

    def close_session(self, session: int) -> None:
        self.call(lambda loop: loop.vad_scheduler.close(session))

    def open_stream(
        self,
        stream: int,
        live: bool,
        samples: int | None,
        words: bool,
        bias: str,
        language_model: LanguageModelChoice | None,
    ) -> None:
        self.call(
            lambda loop: loop.streams.open_stream(
                stream, live, samples, words=words, bias=bias, language_model=language_model
            )
        )

    def submit_stream_chunk(self, piece: StreamChunk) -> None:
        self.call(lambda loop: loop.streams.append_audio(piece))

    def close_stream(self, stream: int) -> None:
        self.call(lambda loop: loop.streams.close_stream(stream))

    def predict_turn_end(self, pcm: np.ndarray, answer: Future[float]) -> None:
        assert self._turns is not None
        with self._lock:
            self._expect_open()
        self._turns.submit(pcm, answer)

    def diarize_window(self, pcm: np.ndarray, budget_samples: int, live: bool, answer: Future[LocalSpeakers]) -> None:
        self.call(lambda loop: loop.diarization.submit(DiarizationRequest(pcm, budget_samples, live, answer)))

    def separate_speakers(self, pcm: np.ndarray, speaker_ranges: SpeakerRanges, answer: Future[np.ndarray]) -> None:
        self.call(lambda loop: loop.separation.submit(SeparationRequest(pcm, speaker_ranges, answer)))

    def cancel_separation(self, answer: Future[np.ndarray]) -> None:
        self.call(lambda loop: loop.separation.cancel(answer))

    def describe(self) -> dict[str, Any]:
        return self.loop.describe()

    def close(self) -> None:
        with self._lock:
            if not self._ended:
                self.loop.inbox.put(Loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def call(self, job: LoopJob) -> None:
        """Schedules a job between two steps. Raises EngineClosed."""
        with self._lock:  # so that no job arrives after the loop has emptied its inbox for the last time
            self._expect_open()
            self.loop.inbox.put(job)

    def _expect_open(self) -> None:
        if self._ended:
            raise EngineClosed("the engine is closed", todo="load the model again")

    def _stopped(self) -> None:
        with self._lock:
            self._ended = True
        if self._turns is not None:
            self._turns.close()
        self._on_stop()


def thread_backend(
    card: AnyCard,
    build: Callable[[], EngineComponents],
    turns: LoadedTurnModel | None = None,
    meeting: HandshakeSettings | None = None,
) -> Connect:
    """`Connect` of EngineClient: an engine on a thread, with a turn model beside it. `meeting`: settings for
    handshakes with other engines, if it uses any."""
    return lambda config, on_done, on_stop: ThreadBackend(card, build, config, on_done, on_stop, turns, meeting)
