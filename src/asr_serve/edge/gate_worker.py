"""Thread that gates the audio of all sessions: what came of each meanwhile is one batch of voice activity."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from asr_serve.edge.speech_gate import GatedSilence, GatedSpeech, GateOutput
from asr_serve.edge.voice_activity import GatedCaller, VoiceActivityPool
from asr_serve.errors import AtCapacity
from asr_serve.units import RATE_HZ, s_to_samples

TURN_SAMPLES = RATE_HZ
"""Most samples of a caller in one batch: one who has much to catch up on does not hold up the others."""
MAX_WAITING_SAMPLES = s_to_samples(10.0)
"""Audible samples of a caller that may wait; silence that is a count costs nobody anything. When there are more, all
are forwarded as they are: that costs bandwidth, and neither memory nor words."""
GATHER_S = 0.01
"""Time for which a batch is gathered, a third of a window: in a step of 64 callers each costs half of one alone."""

log = logging.getLogger(__name__)

ForwardAudio = Callable[[list[GateOutput], bool], None]
"""Takes what a caller forwards, in order, and whether it was the last; on the thread."""


class GateQueue:
    """Audio of one caller that waits for its gate, in order. Its worker's lock guards it."""

    def __init__(self, forward: ForwardAudio) -> None:
        self.forward = forward
        self.caller: GatedCaller | None = None
        """Place of the session, which the thread takes: it alone waits for voice activity. None: it has none yet."""
        self.audio: deque[GateOutput] = deque()
        self.samples = self.audible = 0
        """Samples that wait, and those of them that are no counted silence."""
        self.ended = self.finished = False


class GateWorker:
    """Worker with a thread of its own. Any thread may call its methods, none of which waits for voice activity.

    >>> import numpy as np
    >>> from asr_serve.edge.speech_gate import GatedSilence, GatedSpeech
    >>> from asr_serve.edge.voice_activity import VoiceActivityPool
    >>> worker, counts, over = GateWorker(VoiceActivityPool()), [], threading.Event()
    >>> def forward(outputs, ended):
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

    def __init__(self, pool: VoiceActivityPool) -> None:
        self._pool = pool
        self._changed = threading.Condition()
        self._pending: dict[int, GateQueue] = {}
        """Queues with audio, or at their end, the longest wait first."""
        self._closing = False
        self.ungated_samples = 0
        """Samples that were forwarded without voice activity, as they came faster than it is stepped."""
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
            for each in audio:
                queue.audio.append(each)
                queue.samples += _length(each)
                queue.audible += _audible(each)
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
        while True:
            with self._changed:
                while not self._pending and not self._closing:
                    self._changed.wait()
                if not self._pending:
                    return
            if not self._closing:
                time.sleep(GATHER_S)
            self._step()

    def _step(self) -> None:
        """One batch: a turn of every caller that waits, then what each of them forwards."""
        plain: list[tuple[GateQueue, list[GateOutput]]] = []
        turns: list[tuple[GateQueue, NDArray[np.int16]]] = []
        with self._changed:
            pending, self._pending = self._pending, {}
        for queue in pending.values():
            self._take_place(queue)
        with self._changed:
            for queue in pending.values():
                if queue.samples and (queue.caller is None or queue.audible > MAX_WAITING_SAMPLES):
                    self.ungated_samples += queue.audible
                    plain.append((queue, list(queue.audio)))
                    queue.audio.clear()
                    queue.samples = queue.audible = 0
                elif queue.samples:
                    turns.append((queue, _take_turn(queue)))
        for queue, audio in plain:
            self._forward(queue, [*_flush(queue), *audio])
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

    def _take_place(self, queue: GateQueue) -> None:
        if queue.caller is None and queue.audio:
            with contextlib.suppress(AtCapacity):
                queue.caller = self._pool.open()

    def _gate(self, turns: list[tuple[GateQueue, NDArray[np.int16]]]) -> None:
        callers = [(queue.caller, pcm) for queue, pcm in turns if queue.caller is not None]
        received = [caller.gate.received_samples for caller, _ in callers]
        try:
            forwarded = self._pool.feed(callers)
        except Exception:  # the thread is everybody's: it must not end for one
            log.exception(
                "voice activity failed on a batch of %d callers, whose audio is forwarded as it is", len(turns)
            )
            forwarded = []
            for (caller, pcm), before in zip(callers, received, strict=True):
                rest = pcm[caller.gate.received_samples - before :]
                forwarded.append([*caller.flush(), *([GatedSpeech(rest)] if len(rest) else [])])
        for (queue, _), outputs in zip(turns, forwarded, strict=True):
            self._forward(queue, outputs)

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

    def _forward(self, queue: GateQueue, outputs: list[GateOutput], *, ended: bool = False) -> None:
        if not outputs and not ended:
            return
        try:
            queue.forward(outputs, ended)
        except Exception:
            log.exception("audio behind voice activity could not be forwarded")


def _flush(queue: GateQueue) -> list[GateOutput]:
    return [] if queue.caller is None else queue.caller.flush()


def _take_turn(queue: GateQueue) -> NDArray[np.int16]:
    """Takes up to TURN_SAMPLES of what waits."""
    parts: list[NDArray[np.int16]] = []
    room = TURN_SAMPLES
    while room and queue.audio:
        first = queue.audio.popleft()
        if isinstance(first, GatedSpeech):
            part, rest = first.samples[:room], first.samples[room:]
            queue.audible -= len(part)
            if len(rest):
                queue.audio.appendleft(GatedSpeech(rest))
        else:
            part = np.zeros(min(room, first.count), np.int16)
            if first.count > room:
                queue.audio.appendleft(GatedSilence(first.count - room))
        parts.append(part)
        room -= len(part)
    queue.samples -= TURN_SAMPLES - room
    return np.concatenate(parts)


def _audible(audio: GateOutput) -> int:
    return len(audio.samples) if isinstance(audio, GatedSpeech) else 0


def _length(audio: GateOutput) -> int:
    return len(audio.samples) if isinstance(audio, GatedSpeech) else audio.count
