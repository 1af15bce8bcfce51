"""From what a caller heard, and when, to how long its words took.

Times are seconds on the clock of a level; `_ms` of a position is milliseconds of the caller's audio.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import live_speech
import numpy as np
from live_speech import RATE_HZ, WINDOW_MS, WINDOW_SAMPLES, Caller, Voiced

Heard = dict[str, Any]
"""One call, as live_load and live_peers write it."""

PAD_MS = 250
"""How far a sentence's span reaches into the pause that ends it (EndpointConfig.pad_after_ms)."""
SPILL_MS = 200
"""Speech so soon after a sentence's end is still its own: some end at the last phone, before it has faded."""
SLACK_MS = WINDOW_MS
"""One window either way: Silero heard the clip alone here, and in the middle of a call there."""


class Sentence(NamedTuple):
    text: str
    start_ms: float
    end_ms: float
    shows: list[tuple[float, str]]
    """(when, text) of every message since the sentence before that had words of this one; the locked text last."""

    @property
    def arrived_s(self) -> float:
        return self.shows[-1][0]

    @property
    def settled_s(self) -> float:
        """When the words that became final were first shown."""
        return next(when for when, text in self.shows if words(text) == words(self.text))


@cache
def words(text: str) -> str:
    """For comparing: case, punctuation and spelling aside."""
    from asr_serve_tools.evaluate.wer import normalize

    return normalize(text)


def sentences(messages: Sequence[tuple[float, dict[str, Any]]]) -> list[Sentence]:
    """A caller's locked sentences. A partial belongs to the sentence that is locked next."""
    found: list[Sentence] = []
    shows: list[tuple[float, str]] = []
    for when, message in messages:
        for said in message["sentences"]:
            shows.append((when, said["text"]))
            found.append(Sentence(said["text"], said["start"], said["end"], shows))
            shows = []
        if (partial := message.get("partial") or "").strip():
            shows.append((when, partial))
    return found


class Endpoint(NamedTuple):
    pause_ms: float
    """Where the pause began that ended the sentence."""
    decided_ms: float
    """The audio up to here decided it: the pause has lasted as long as the schedule asks."""


def endpoint(start_ms: float, end_ms: float, constant_ms: int | None = None) -> Endpoint:
    """When a sentence with this span was over, in windows of 32 ms: by the streaming table, or after the pause
    that every caller asked for.

    A pause begins with a window. Where that would not be so, the silence was shorter than the padding, and the
    span ends where the last window heard began.
    """
    from asr_serve.audio.silence_schedule import STREAMING_SCHEDULE

    def silence_ms(length_ms: float) -> int:
        asked_ms = STREAMING_SCHEDULE.silence_ms(length_ms) if constant_ms is None else constant_ms
        return math.ceil(asked_ms / WINDOW_MS) * WINDOW_MS

    pause_ms = end_ms - PAD_MS
    silence = silence_ms(pause_ms - start_ms)
    shortest = silence_ms(end_ms - start_ms)
    if pause_ms % WINDOW_MS and shortest - WINDOW_MS < PAD_MS:
        pause_ms, silence = end_ms - (shortest - WINDOW_MS), shortest
    return Endpoint(pause_ms, pause_ms + silence)


class Call:
    """One caller: what it said, where it spoke, what it heard."""

    def __init__(self, caller: Caller, voiced: Voiced, heard: Heard, silence_ms: int | None = None) -> None:
        """`silence_ms`: the pause that was asked for; None: the streaming table's."""
        self.caller, self.voiced, self.heard, self.silence_ms = caller, voiced, heard, silence_ms
        self.moments_s: list[float] = heard["moments_s"]
        self.sentences = sentences(heard["messages"])
        self.total_ms = 1_000 * caller.samples / RATE_HZ

    def sent_s(self, at_ms: float, *, before: bool = False) -> float | None:
        """When the sample at `at_ms` was sent, or the one before it; None when it never was."""
        sample = round(at_ms * RATE_HZ / 1_000) - before
        packet = max(0, sample) // live_speech.PACKET_SAMPLES
        return self.moments_s[packet] if packet < len(self.moments_s) and sample < self.caller.samples else None

    def silent(self, start_ms: float, end_ms: float) -> bool:
        """No speech in any window that lies wholly inside."""
        first, last = math.ceil(start_ms / WINDOW_MS), int(end_ms // WINDOW_MS)
        return not self.voiced[max(0, first) : max(0, last)].any()

    def spoken_ms(self, start_ms: float, end_ms: float) -> float | None:
        """End of the last window with speech that begins in this span; None when there is none."""
        first, last = max(0, int(start_ms // WINDOW_MS)), math.ceil(end_ms / WINDOW_MS)
        found = np.flatnonzero(self.voiced[first:last])
        return float(WINDOW_MS * (first + found[-1] + 1)) if len(found) else None

    def first_words_ms(self, since_s: float) -> Iterator[tuple[float, float] | None]:
        """For every clip that opens a sentence, from its onset being sent to (the first text, the first text that
        begins with the locked sentence's first word); None if it had no text.

        A clip that was spoken into a sentence still open has no first word to tell from the others.
        """
        ends = [*self.caller.starts[1:], self.caller.samples]
        for place, (start, end) in enumerate(zip(self.caller.starts, ends, strict=True)):
            found = np.flatnonzero(self.voiced[start // WINDOW_SAMPLES : end // WINDOW_SAMPLES])
            if not len(found):
                continue
            onset_ms = 1_000 * start / RATE_HZ + WINDOW_MS * float(found[0])
            moment = self.sent_s(onset_ms)
            if moment is None or moment < since_s:
                continue
            its = next((said for said in self.sentences if said.end_ms > onset_ms), None)
            if its is None or its.start_ms >= 1_000 * end / RATE_HZ:
                yield None
            elif place and self.voiced[int(max(0, its.start_ms) // WINDOW_MS) : start // WINDOW_SAMPLES].any():
                continue
            else:
                shown = [(when, words(text)) for when, text in its.shows if when >= moment and text.strip()]
                right = [when for when, text in shown if text.split()[:1] == words(its.text).split()[:1]]
                yield (1_000 * (shown[0][0] - moment), 1_000 * (right[0] - moment)) if right else None

    def finals_ms(self, since_s: float) -> Iterator[tuple[float, float | None] | None]:
        """For every sentence (wait for the final, silence that was waited for before it); None where it was cut.

        The wait starts when the audio was sent that decides the end, or STOP. The silence is None at STOP. A
        sentence is cut when speech went on, or when it came before its silence was over: it was too long.
        """
        stop_s = self.heard["stop_s"]
        for said in self.sentences:
            pause_ms, decided_ms = endpoint(said.start_ms, said.end_ms, self.silence_ms)
            moment = self.sent_s(decided_ms, before=True) if decided_ms <= self.total_ms else None
            by_stop = moment is None or (stop_s is not None and stop_s < moment)
            moment = stop_s if by_stop else moment
            if moment is None or moment < since_s:
                continue
            clear = self.silent(pause_ms + SLACK_MS, min(decided_ms, self.total_ms) - SLACK_MS)
            if said.arrived_s < moment or not (by_stop or clear):
                yield None
            else:
                yield 1_000 * (said.arrived_s - moment), None if by_stop else decided_ms - pause_ms

    def after_speech_ms(self, since_s: float) -> Iterator[tuple[float, float]]:
        """For every sentence with a pause after it, from end of speech to (its final words shown, it locked)."""
        for said in self.sentences:
            spoken_ms = self.spoken_ms(said.start_ms, said.end_ms + SPILL_MS)
            if spoken_ms is None or not self.silent(spoken_ms, spoken_ms + 3 * WINDOW_MS):
                continue
            moment = self.sent_s(spoken_ms, before=True)
            if moment is not None and moment >= since_s:
                yield 1_000 * (said.settled_s - moment), 1_000 * (said.arrived_s - moment)

    def partials_s(self) -> list[list[float]]:
        """When each sentence's text changed before it was locked."""
        return [
            [
                when
                for (when, text), (_, before) in zip(said.shows[:-1], [(0.0, ""), *said.shows], strict=False)
                if text != before
            ]
            for said in self.sentences
        ]
