"""What becomes of rows that have ended: they leave with an answer, or are decoded or encoded again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Settling:
    """Belongs to the loop's thread."""

    def __init__(
        self, runner: DecodeRunner, requests: Requests, sharing: Sharing, second_look: SecondLook, attempt: Try
    ) -> None:
        self._runner, self._requests, self._sharing, self._attempt = runner, requests, sharing, attempt
        self._second_look, self._aligner = second_look, Aligner(runner)

    def settle(self, rows: Sequence[Row]) -> None:
        requests = self._requests
        ended = [
            Ended(row, answer, requests.open[row.request_id].samples)
            for row in rows
            if (answer := self._answer(row)) is not None
        ]
        listed = [each.row.request_id for each in ended if each.row.hotwords is not None]
        with self._attempt("decode", "looking twice", listed):
            ended = self._second_look.looked(ended)
        ended = [each for each in ended if each.row.request_id in requests.open]
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
