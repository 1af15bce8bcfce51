"""Protocols between the loop, which schedules steps, and the executor, which implements them for a kind of
model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from asr_serve.errors import RankLost, StepFailed

if TYPE_CHECKING:
    from asr_serve.decoding.language_model.token_models import TokenLanguageModel
    from asr_serve.devices.interface import Device
    from asr_serve.engine.request import RecognitionRequest
    from asr_serve.engine.stats import EngineStats
    from asr_serve.engine.tensor_parallel.rank_processes import RankProcesses
    from asr_serve.models.auxiliary.silero import Silero
    from asr_serve.models.decoding_graph import DecodingGraph
    from asr_serve.models.interfaces import Vocoder
    from asr_serve.models.model_files import AsrModel, SpeechModel


CHECKS_PER_IDLE, MAX_CHECKS = 32, 8_192
"""Items that invariant checks visit per idle moment, on average; and the largest check that runs at all. Tests
raise both, so that every check runs."""


class LoopContext(Protocol):
    """Interface of the loop for its executor. Only `call` may be used from other threads."""

    stats: EngineStats

    @property
    def running(self) -> bool: ...
    @property
    def live_sessions(self) -> int:
        """Open voice-activity sessions of live callers."""

    def drain(self) -> None:
        """Runs the jobs that arrived in the inbox."""

    def step_vad(self) -> bool:
        """Starts a voice-activity step, if one is due and none is in flight; returns whether it did."""

    def call(self, job: Callable[[], None]) -> None:
        """Schedules a job that the loop runs between two steps. May be called from any thread."""


class EngineComponents(NamedTuple):
    """Components of an engine: model, voice activity, device, tokenizer functions."""

    model: AsrModel | SpeechModel
    vad: Silero | None
    """None for a speech synthesis model."""
    device: Device
    decode_text: Callable[[list[int]], str]
    vocoder: Vocoder | None = None
    """Vocoder of a model that generates acoustic frames."""
    encode_text: Callable[[str], list[int]] | None = None
    """Encodes text as tokens, for models whose hotwords are spelt in them."""
    language_models: Mapping[str, TokenLanguageModel] = {}  # of a tuple, never changed
    """Language models of the model's tokens by name."""
    graph: DecodingGraph | None = None
    """Decoding graph of a model whose head is wfst."""
    ranks: RankProcesses | None = None
    """Other ranks of a model whose decoder is split over processes."""


class ModelExecutor(Protocol):
    """Executor of one kind of model. All methods but `report` run on the loop's thread."""

    device: Device

    def attach(self, context: LoopContext) -> None:
        """Sets the loop. Called before every other method."""

    def submit(self, utterance: RecognitionRequest) -> None: ...
    def cancel(self, request_id: int) -> None:
        """Cancels a request at any time; its resources are free before the next step."""

    def expedite(self, request_id: int, within_ms: int) -> None:
        """Sets the time since its arrival within which an open utterance should be encoded. Does nothing for other
        requests, and where requests never overtake others."""

    def step(self) -> bool:
        """Runs one iteration; returns False when there was nothing to do."""

    @property
    def due_s(self) -> float | None:
        """Time on the monotonic clock of the next step without a new message; None: never."""

    @property
    def idle(self) -> bool:
        """Returns whether no request holds resources beyond those that `check` can account for."""

    def check(self) -> None:
        """Asserts that every allocated resource has an owner. Called when idle."""

    def shutdown(self, error: Exception) -> None:
        """Rejects all remaining requests, even in a broken state, so that no caller waits forever."""

    def report(self) -> dict[str, int]:
        """Counters that may be read from any thread: waiting, decoding, pages, pages_used."""

    def describe(self) -> dict[str, Any]: ...

    def cached_audio(self) -> list[bytes]:
        """Digests of the audio whose encoder results are cached."""

    def watch_audio(self, on_change: Callable[[bytes, bool], None]) -> None:
        """Calls `on_change` with the digest of audio that is cached from now on, or no longer, and which of the two."""


class CheckThrottle:
    """Limits the cost of invariant checks at idle moments. Small checks run every time, larger ones at some idle
    moments, and checks of more than MAX_CHECKS items never, because a request that arrives meanwhile would notice
    the delay. Checks of constant cost need no throttle.

    One item takes a quarter of a microsecond.
    """

    def __init__(self) -> None:
        self._budget = 0

    def __call__(self, things: int) -> bool:
        if things > MAX_CHECKS:
            return False
        self._budget += CHECKS_PER_IDLE
        if self._budget < things:
            return False
        self._budget = 0
        return True


class StepGuard:
    """Context of a step: if it fails, its requests fail and the loop continues. A lost rank ends the loop.

    with StepGuard(stats, "encode", "encoding", fail):
        ...
    """

    def __init__(self, stats: EngineStats, stage: str, what: str, fail: Callable[[StepFailed], None]) -> None:
        self._stats, self._stage, self._what, self._fail = stats, stage, what, fail

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(failure, Exception) or isinstance(failure, RankLost):
            return False
        self._stats.record_failed_step(self._stage)
        error = StepFailed(
            f"{self._what} failed: {type(failure).__name__}: {failure}",
            todo="try again; if it happens again, report it",
        )
        error.__cause__ = failure
        self._fail(error)
        return True
