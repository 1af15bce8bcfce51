"""What becomes of rows that have ended: they leave with an answer, or are decoded or encoded again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from asr_serve.engine.utterances.ends.aligning import Aligner, Ended
from asr_serve.errors import OptionError

if TYPE_CHECKING:
    from asr_serve.decoding.attention import Recognition, Reused
    from asr_serve.engine.utterances.flights import Sharing
    from asr_serve.engine.utterances.hot.second_look import SecondLook
    from asr_serve.engine.utterances.requests import Requests
    from asr_serve.engine.utterances.rows import Row
    from asr_serve.engine.utterances.runner import DecodeRunner
    from asr_serve.engine.work import Attempt

Try = Callable[[str, str, list[int]], "Attempt"]
"""A step, what it does, and the requests that it may fail."""


LOOK_TOKENS = 64
"""Tokens of answers that are looked at twice in a turn, or one answer of more: nobody else waits long for that."""


class Settling:
    """Belongs to the loop's thread."""

    def __init__(
        self, runner: DecodeRunner, requests: Requests, sharing: Sharing, second_look: SecondLook, attempt: Try
    ) -> None:
        self._runner, self._requests, self._sharing, self._attempt = runner, requests, sharing, attempt
        self._second_look, self._aligner = second_look, Aligner(runner)
        self._later: list[Ended] = []
        """Those that wait for a second look."""
        self._oldest_first = True

    def settle(self, rows: Sequence[Row]) -> None:
        """Who has hot words waits for `look`."""
        ended = [
            Ended(row, answer, self._requests.open[row.request_id].samples)
            for row in rows
            if (answer := self._answer(row)) is not None
        ]
        asks = self._second_look.asks
        self._tell([each for each in ended if not asks(each)])
        later = [each for each in ended if asks(each)]
        for each in later:
            self._runner.rest(each.row)
        self._later += later

    def look(self) -> bool:
        """A second look at some of those that wait for one. False: nobody did."""
        open_ = self._requests.open
        waiting = [each for each in self._later if each.row.request_id in open_]
        self._oldest_first = not self._oldest_first
        if not self._oldest_first:  # callers', but they do not keep a file from ever having its turn
            waiting.sort(key=lambda each: not open_[each.row.request_id].urgent)
        sizes = accumulate(len(each.answer.tokens) for each in waiting)
        count = max(1, sum(size <= LOOK_TOKENS for size in sizes))
        batch, self._later = waiting[:count], waiting[count:]
        if not batch:
            return False
        started, looked = time.perf_counter(), list[Ended]()
        with self._attempt("hotwords", "looking twice", [each.row.request_id for each in batch]):
            looked = self._second_look.looked(batch)
        fill = min(1.0, sum(len(each.answer.tokens) for each in batch) / LOOK_TOKENS)
        self._requests.stats.step("hotwords", time.perf_counter() - started, len(batch), fill)
        self._tell(looked)
        return True

    @property
    def waiting(self) -> bool:
        """Whether anybody waits for a second look."""
        return bool(self._later)

    def _tell(self, ended: Sequence[Ended]) -> None:
        requests = self._requests
        timed = [each.row.request_id for each in ended if each.row.hypothesis.options.words]
        with self._attempt("decode", "aligning", timed):
            ended = self._aligner.timed(ended)
        for row, answer, _ in ended:
            if (utterance := requests.open.get(row.request_id)) is not None:
                self._runner.leave(row)
                reused: Reused = "audio" if utterance.wanted and not utterance.encoded else ""
                requests.finish(utterance, answer, reused)
                self._sharing.answered(utterance, answer)

    def _answer(self, row: Row) -> Recognition | None:
        """None where it has failed, is decoded again, or is to be encoded again."""
        assert row.finish is not None
        answer: Recognition | None = None
        with self._attempt("decode", "settling", [row.request_id]):
            answer = row.hypothesis.settle(row.finish)
        if row.request_id not in self._requests.open:
            return None
        if len(row.hypothesis.rejected) == 1 and self._ask_again(row):
            return None
        if answer is None:
            self._requests.stats.fell_back()
            self._runner.again(row)
        return answer

    def _ask_again(self, row: Row) -> bool:
        """Have it encoded with all of its window. False: nothing was left out, no room, or one fast try wanted."""
        utterance, options = self._requests.open[row.request_id], row.hypothesis.options
        if not self._requests.leaves_out(utterance) or (options.hurried and len(options.temperatures) == 1):
            return False
        utterance.whole = True
        try:
            self._requests.expect_room(utterance)
        except OptionError:
            utterance.pcm = None
            return False
        self._requests.stats.fell_back()
        self._runner.leave(row)
        self._sharing.seek(utterance)
        return True
