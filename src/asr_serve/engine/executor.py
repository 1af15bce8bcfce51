"""What a loop and its work know of each other: the loop keeps the time, the work is what a kind of model does."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from asr_serve.errors import StepFailed

if TYPE_CHECKING:
    from asr_serve.devices.interface import Device
    from asr_serve.engine.request import RecognitionRequest, VadScheduler
    from asr_serve.engine.stats import EngineStats
    from asr_serve.models.auxiliary.silero import Silero
    from asr_serve.models.interfaces import Vocoder
    from asr_serve.models.model_files import AsrModel, SpeechModel


CHECKS_PER_IDLE, MAX_CHECKS = 32, 8_192
"""Things that are looked through at an idle moment: on average, and at all. Tests have all of them looked through
each time."""


class LoopContext(Protocol):
    """The loop, as its work sees it. On the loop's thread, but for `call`."""

    vad_scheduler: VadScheduler
    stats: EngineStats

    @property
    def running(self) -> bool: ...
    def drain(self) -> None:
        """Take what callers want meanwhile."""

    def step_vad(self) -> bool:
        """Voice activity of whoever has waited long enough."""

    def call(self, job: Callable[[], None]) -> None:
        """From any thread: have the loop do it between two steps."""


class EngineComponents(NamedTuple):
    """What an engine is made of."""

    model: AsrModel | SpeechModel
    vad: Silero | None
    """None of a model that speaks."""
    device: Device
    decode_text: Callable[[list[int]], str]
    codec: Vocoder | None = None
    """Vocoder of an acoustic model."""
    encode_text: Callable[[str], list[int]] | None = None
    """A text's tokens, of a model whose hot words are spelt in them."""


class ModelExecutor(Protocol):
    """What a kind of model does with utterances. On the loop's thread."""

    device: Device

    def attach(self, keeper: LoopContext) -> None:
        """Before anything else."""

    def submit(self, utterance: RecognitionRequest) -> None: ...
    def cancel(self, request_id: int) -> None:
        """At any moment; what the request held is free before the next step."""

    def step(self) -> bool:
        """One turn; False when there was nothing to do."""

    @property
    def due_s(self) -> float | None:
        """When, on the monotonic clock, to step although nobody has called; None: never."""

    @property
    def idle(self) -> bool:
        """Nothing is held for anybody but what `check` may count."""

    def check(self) -> None:
        """Everything that was lent has a holder. When idle."""

    def shutdown(self, error: Exception) -> None:
        """Reject whatever is left, even when what is left is broken: nobody may wait for ever."""

    def report(self) -> dict[str, int]:
        """Single numbers that may be read from any thread: waiting, decoding, pages, pages_used."""

    def describe(self) -> dict[str, Any]: ...


class CheckThrottle:
    """Whether an idle moment is one to look through so many things: at every one where they are few, at some where
    they are many, and never where somebody who comes just then would notice. What costs the same however much
    there is needs no such question.

    One thing takes a quarter of a microsecond.
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
    """A step that fails fails the requests in it, and the loop goes on:

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
        if not isinstance(failure, Exception):
            return False
        self._stats.record_failed_step(self._stage)
        error = StepFailed(
            f"{self._what} failed: {type(failure).__name__}: {failure}", todo="try again; if it stays, report it"
        )
        error.__cause__ = failure
        self._fail(error)
        return True
