"""Thread that gates the audio of all sessions: what came of each meanwhile is one batch of voice activity."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asr_serve.edge.speech_gate import GatedSilence, GatedSpeech, GateOutput
from asr_serve.edge.voice_activity import GatedCaller, VoiceActivityPool
from asr_serve.errors import AtCapacity
from asr_serve.units import RATE_HZ

TURN_SAMPLES = RATE_HZ
"""Most samples of a caller in one batch: one who has much to catch up on does not hold up the others."""
MAX_WAIT_S = 1.0
"""Time for which audio of a caller may wait; silence that is a count costs nobody anything. When the oldest has waited
longer, all that waits is forwarded as it is: that costs bandwidth, and neither memory nor words. It is counted, and
told."""
GATHER_S = 0.01
"""Time for which a batch is gathered, a third of a window: in a step of 64 callers each costs half of one alone."""

log = logging.getLogger(__name__)


class QueuedAudio(NamedTuple):
    """Audio that waits, and since when."""

    audio: GateOutput
    queued_s: float


ForwardAudio = Callable[[list[GateOutput], bool, int], None]
"""Takes what a caller forwards, in order, whether it was the last, and how many samples of it voice activity has not
looked at; on the thread."""


class GateQueue:
    """Audio of one caller that waits for its gate, in order. Its worker's lock guards it."""

    def __init__(self, forward: ForwardAudio) -> None:
        self.forward = forward
        self.caller: GatedCaller | None = None
        """Place of the session, which the thread takes: it alone waits for voice activity. None: it has none yet."""
        self.audio: deque[QueuedAudio] = deque()
        self.ended = self.finished = False

    @property
    def waits_since_s(self) -> float | None:
        """Time at which the oldest audio was queued that is no counted silence; None: none waits."""
        return next((queued_s for each, queued_s in self.audio if isinstance(each, GatedSpeech)), None)


class GateWorker:
    """Worker with a thread of its own. Any thread may call its methods, none of which waits for voice activity.

    >>> import numpy as np
    >>> from asr_serve.edge.speech_gate import GatedSilence, GatedSpeech
    >>> from asr_serve.edge.voice_activity import VoiceActivityPool
    >>> worker, counts, over = GateWorker(VoiceActivityPool()), [], threading.Event()
    >>> def forward(outputs, ended, ungated):
    ...     counts.extend(output.count for output in outputs if isinstance(output, GatedSilence))
    ...     if ended:
    ...         over.set()
    >>> queue = worker.open(forward)
    >>> worker.append(queue, [GatedSpeech(np.zeros(16_000, np.int16))])
    >>> worker.finish(queue)
    >>> over.wait(60) and sum(counts)  # the first 512 ms of a call are forwarded whatever they are
    7808
    >>> worker.close()
    """

    def __init__(self, pool: VoiceActivityPool, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool, self._clock = pool, clock
        self._changed = threading.Condition()
        self._pending: dict[int, GateQueue] = {}
        """Queues with audio, or at their end, the longest wait first."""
        self._closing = False
        self.ungated_samples = 0
        """Samples that were forwarded without voice activity: they waited too long, or it had no place, or failed."""
        self._thread = threading.Thread(target=self._run, name="edge-gates", daemon=True)
        self._thread.start()

    def open(self, forward: ForwardAudio) -> GateQueue:
        """Opens a caller. While all places are taken, its audio is forwarded as it is."""
        return GateQueue(forward)

    def append(self, queue: GateQueue, audio: list[GateOutput]) -> None:
        """Queues audio; silence is a count of zeros. After `finish` it is dropped."""
        with self._changed:
            if queue.ended:
                return
            now_s = self._clock()
            queue.audio.extend(QueuedAudio(each, now_s) for each in audio)
            self._wake(queue)

    def finish(self, queue: GateQueue) -> None:
        """Ends a caller behind what waits: the rest of its audio is forwarded. Idempotent."""
        with self._changed:
            if not queue.ended:
                queue.ended = True
                self._wake(queue)

    def close(self) -> None:
        """Gates what waits, and ends."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _wake(self, queue: GateQueue) -> None:
        self._pending.setdefault(id(queue), queue)
        self._changed.notify()

    # --- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        is_behind = False
        while True:
            with self._changed:
                while not self._pending and not self._closing:
                    self._changed.wait()
                if not self._pending:
                    return
            if not self._closing and not is_behind:
                time.sleep(GATHER_S)
            is_behind = self._step()

    def _step(self) -> bool:
        """One batch: a turn of every caller that waits, then what each of them forwards. Returns whether there is more
        than a turn of any."""
        plain: list[tuple[GateQueue, list[GateOutput]]] = []
        turns: list[tuple[GateQueue, NDArray[np.int16]]] = []
        with self._changed:
            pending, self._pending = self._pending, {}
        for queue in pending.values():
            self._take_place(queue)
        with self._changed:
            now_s = self._clock()
            for queue in pending.values():
                since_s = queue.waits_since_s
                if queue.audio and (queue.caller is None or (since_s is not None and now_s - since_s > MAX_WAIT_S)):
                    plain.append((queue, [each for each, _ in queue.audio]))
                    queue.audio.clear()
                elif queue.audio:
                    turns.append((queue, _take_turn(queue)))
            is_behind = any(queue.audio for queue, _ in turns)
        for queue, audio in plain:
            self._forward(queue, [*_flush(queue), *audio], ungated=sum(map(_audible, audio)))
        self._gate(turns)
        with self._changed:
            ended = [queue for queue in pending.values() if queue.ended and not queue.audio and not queue.finished]
            for queue in pending.values():
                if queue.audio:
                    self._wake(queue)
            for queue in ended:
                queue.finished = True
        for queue in ended:
            self._finish(queue)
        return is_behind

    def _take_place(self, queue: GateQueue) -> None:
        if queue.caller is None and queue.audio:
            with contextlib.suppress(AtCapacity):
                queue.caller = self._pool.open()

    def _gate(self, turns: list[tuple[GateQueue, NDArray[np.int16]]]) -> None:
        callers = [(queue.caller, pcm) for queue, pcm in turns if queue.caller is not None]
        received = [caller.gate.received_samples for caller, _ in callers]
        ungated = [0] * len(turns)
        try:
            forwarded = self._pool.feed(callers)
        except Exception:  # the thread is everybody's: it must not end for one
            log.exception(
                "voice activity failed on a batch of %d callers, whose audio is forwarded as it is", len(turns)
            )
            forwarded = []
            ungated = [len(pcm) for _, pcm in turns]
            for (caller, pcm), before in zip(callers, received, strict=True):
                rest = pcm[caller.gate.received_samples - before :]
                forwarded.append([*caller.flush(), *([GatedSpeech(rest)] if len(rest) else [])])
        for (queue, _), outputs, count in zip(turns, forwarded, ungated, strict=True):
            self._forward(queue, outputs, ungated=count)

    def _finish(self, queue: GateQueue) -> None:
        outputs: list[GateOutput] = []
        if queue.caller is not None:
            try:
                outputs = queue.caller.finish()
            except Exception:
                log.exception("voice activity failed at the end of a caller, whose audio is forwarded as it is")
                outputs = queue.caller.flush()
            queue.caller.close()
        self._forward(queue, outputs, ended=True)

    def _forward(self, queue: GateQueue, outputs: list[GateOutput], *, ended: bool = False, ungated: int = 0) -> None:
        self.ungated_samples += ungated
        if not outputs and not ended:
            return
        try:
            queue.forward(outputs, ended, ungated)
        except Exception:
            log.exception("audio behind voice activity could not be forwarded")


def _flush(queue: GateQueue) -> list[GateOutput]:
    return [] if queue.caller is None else queue.caller.flush()


def _take_turn(queue: GateQueue) -> NDArray[np.int16]:
    """Takes up to TURN_SAMPLES of what waits."""
    parts: list[NDArray[np.int16]] = []
    room = TURN_SAMPLES
    while room and queue.audio:
        first, queued_s = queue.audio.popleft()
        rest: GateOutput | None = None
        if isinstance(first, GatedSpeech):
            part = first.samples[:room]
            if len(first.samples) > room:
                rest = GatedSpeech(first.samples[room:])
        else:
            part = np.zeros(min(room, first.count), np.int16)
            if first.count > room:
                rest = GatedSilence(first.count - room)
        if rest is not None:
            queue.audio.appendleft(QueuedAudio(rest, queued_s))
        parts.append(part)
        room -= len(part)
    return np.concatenate(parts)


def _audible(audio: GateOutput) -> int:
    return len(audio.samples) if isinstance(audio, GatedSpeech) else 0
