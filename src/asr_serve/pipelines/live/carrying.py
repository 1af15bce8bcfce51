"""How live segments get their words from a streaming model: it hears them once, as they are spoken.

A `Stream` goes with the audio; what it says is for ever, but for the tail that a wider search may still change. It
begins where a segment does, and ends with it. Where a segment is cut off in the middle of speech the stream goes
on: the words of each side are told apart by when they were said.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from asr_serve import units
from asr_serve.audio.buffers import Kept
from asr_serve.decoding.attention import Recognition
from asr_serve.engine.client import EngineClient
from asr_serve.engine.client import Stream as EngineStream
from asr_serve.errors import Cancelled, EngineCrashed, StepFailed
from asr_serve.pipelines.live.asking import Pace, Place, Spoken
from asr_serve.pipelines.quiet import Quiet
from asr_serve.pipelines.utterance import CONTEXT_SAMPLES, segment
from asr_serve.text.words import sounding
from asr_serve.types import Found, Segment, Span, Token
from asr_serve.vad.endpoint import CALM_MS

PIECE_SAMPLES = units.ms_to_samples(80)
"""What is sent to the engine at once, at least: no chunk is shorter."""
TRIES = 3
"""For a stream that a step of the engine failed."""
LONG_SAMPLES = units.s_to_samples(60)
"""Past this a stream is not carried over a cut that falls into a pause: all its audio is kept, to be heard again
should an engine die."""
LONGEST_SAMPLES = units.s_to_samples(300)
"""And past this over none."""
CALM_SAMPLES = units.ms_to_samples(CALM_MS // 2)
"""So far on each side of such a cut nobody speaks."""
SETTLED_SAMPLES = units.ms_to_samples(1_500)
"""So much further a stream is heard until the last word before a cut is taken for complete, if no other begins."""
Text = Callable[[list[int]], str]


class _Stream:
    """Audio into a streaming model, from where a segment began; its tokens, at places in the caller's audio."""

    def __init__(self, client: EngineClient, text: Text, start: int, wants_words: bool, bias: str) -> None:
        """`bias`: hot words, as SearchOptions has them."""
        self._client, self._text, self._start, self.wants_words = client, text, start, wants_words
        self._bias = bias
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.places: list[int] = []
        """Of every token, the sample at which it was said. They rise."""
        self.words: list[int] = []
        """The tokens that words begin with."""
        self.runs: list[tuple[int, int]] = []
        """Of tokens, as far as they were told: frames."""
        self.tail: tuple[int, ...] = ()
        self.heard = start
        self.piece: Future[Found] | None = None
        self.stops: deque[int] = deque()
        """Pieces end there, so that what is known then does not depend on how the audio came."""
        self._fed = start
        self._told = self._tries = 0
        self._stream: EngineStream | None = None
        self._last = self.over = False

    @property
    def start(self) -> int:
        """Its audio is needed from there on, in case it has to be heard again."""
        return self._start

    @property
    def said_to(self) -> int:
        """What was said before that is among its tokens."""
        lag = self._client.card.lag_samples(self._client.config.chunk_frames or 0)
        return self.heard if self.over else self.heard - lag

    def collect(self) -> None:
        """Raises StepFailed, Cancelled or EngineCrashed when it was tried often enough; AtCapacity at once: there
        is no slot for it."""
        if self.piece is None or not self.piece.done():
            return
        piece, self.piece = self.piece, None
        try:
            found = piece.result()
        except (StepFailed, Cancelled, EngineCrashed) as failure:  # it is lost, or was while nothing was under way
            self.close()
            self._tries += 1
            if self._tries == TRIES or isinstance(failure, EngineCrashed):
                raise
            self._fed, self._told, self._last = self._start, 0, False
            self.runs.clear()
            return
        self.heard, self.over = max(self.heard, self._fed), self._last
        if self.over:
            self.close()
        for token in found.fixed:
            self._told += 1
            if self._told > len(self.tokens):  # not one that was told before a step failed
                self._add(token)
        self.runs += found.runs
        self.tail = tuple(token.id for token in found.tail)

    def feed(self, kept: Kept, end: int, *, last: bool, live: bool, wake: Callable[[], None]) -> None:
        """The audio up to `end`, if nothing is under way and there is enough of it. `last`: and no more."""
        if self.piece is not None or self._last:
            return
        stop = next((at for at in self.stops if self._fed < at <= end), None)
        if stop is not None:
            end, last = stop, False
        if end - self._fed < PIECE_SAMPLES and not last and stop is None:
            return
        silence = np.zeros(CONTEXT_SAMPLES, np.float32)
        parts = [silence] if self._stream is None else []
        if end > self._fed:
            parts.append(kept.cut(Span(self._fed, end)))
        if last:
            parts.append(silence)
        if self._stream is None:
            self._stream = self._client.stream(live=live, words=self.wants_words, bias=self._bias)
        timed = self.wants_words and (last or stop is not None)
        self.piece = self._stream.put(np.concatenate(parts), last=last, timed=timed)
        self._fed, self._last = max(end, self._fed), last
        self.piece.add_done_callback(lambda _: wake())

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = self.piece = None

    def _add(self, token: Token) -> None:
        count = len(self.tokens)
        self.tokens.append(token.id)
        self.logprobs.append(token.logprob)
        at = self._start - CONTEXT_SAMPLES + token.frame * self._client.card.frame_samples
        self.places.append(max(self.places[-1] if self.places else self._start, at))
        if not self.words or self._begins_word():
            self.words.append(count)

    def _begins_word(self) -> bool:
        """The last token does: behind a space, or in a script without any."""
        alone = self._text(self.tokens[-1:])
        return bool(alone) and (_unspaced(alone[0]) or len(self._text(self.tokens[self.words[-1] :]).split()) > 1)

    def times(self, own: slice) -> tuple[tuple[int, int], ...]:
        """When these of its tokens were said, in samples of the caller; empty unless it was told of all."""
        if len(self.runs) < own.stop:
            return ()
        begins = self._start - CONTEXT_SAMPLES
        spoken = sounding(self.runs, self._client.card.frame_samples, self.heard - begins)
        return tuple((begins + start, begins + end) for start, end in spoken[own])

    def word_from(self, position: int) -> int:
        """The token of the first word that was said there, or later."""
        word = bisect_left(self.words, position, key=self.places.__getitem__)
        return self.words[word] if word < len(self.words) else len(self.tokens)


def _unspaced(letter: str) -> bool:
    """Whether words of that script stand without spaces: Chinese and Japanese."""
    return unicodedata.east_asian_width(letter) == "W" and not "가" <= letter <= "힣"


class Carried:
    """What a stream says of one segment. See Spoken."""

    def __init__(self, start: int, stream: _Stream, text: Text, before: Carried | None) -> None:
        """`before`: the segment that was cut off where this one begins, in the same stream."""
        self.start = self.told_from = start
        self.stream, self._text, self.before = stream, text, before
        self.after: Carried | None = None
        """The one that its stream goes on in."""
        self.end: int | None = None
        self.decided = 0
        self.cut_off = False
        self.until: int | None = None
        """Words that were said from there on are the next one's: it was cut for its length."""
        self._settled = 0
        self._sure = start
        """It is speech up to there, and will not be cut before. Until it is, it may still be taken back."""
        self._first = 0 if before is None else -1
        self._count = -1
        """Tokens of the stream up to its own last one; -1: not known yet."""
        self._texts: dict[tuple[int, int, tuple[int, ...]], str] = {}

    def goes_on_in(self, after: Carried) -> None:
        assert self.end is not None
        self.after = after
        self._settled = max(self.end + SETTLED_SAMPLES, self.decided)
        self.stream.stops.append(self._settled)

    @property
    def closed(self) -> bool:
        return self.end is not None

    @property
    def joined(self) -> bool:
        if self._first < 0 and self.before is not None and self.before.done:
            self._first, self.before = self.before.last, None
        return self._first >= 0

    @property
    def first(self) -> int:
        """Of the stream's tokens, its own begin there."""
        assert self.joined
        return self._first

    @property
    def last(self) -> int:
        """And end there."""
        assert self._count >= 0
        return max(self._count, self.first)

    @property
    def done(self) -> bool:
        return self._count >= 0 and self.joined

    def settle(self) -> None:
        """Look whether its last word is complete: whenever the stream was heard any further."""
        stream = self.stream
        if self._count < 0 and self.closed:
            own = self._words_end
            known = own < len(stream.tokens) and not stream.wants_words  # when it was said is told as it settles
            if stream.over or (self.after is not None and (known or self._is_settled)):
                self._count = own

    @property
    def _is_settled(self) -> bool:
        return self.stream.heard >= self._settled

    @property
    def _words_end(self) -> int:
        """Behind its words, as far as they are known."""
        return len(self.stream.tokens) if self.until is None else self.stream.word_from(self.until)

    @property
    def heard(self) -> int:
        heard = max(self.start, self.stream.heard)
        return heard if self.end is None else min(heard, self.end)

    @property
    def text_to(self) -> int:
        return self.stream.said_to

    @property
    def busy(self) -> bool:
        return self.stream.piece is not None

    @property
    def audio_from(self) -> int:
        return self.stream.start

    @property
    def _fixed(self) -> int:
        """Tokens of words that are complete, for another has begun or nothing more will come; and that no cut can
        part from it any more."""
        if self.done:
            return self.last
        words = self.stream.words
        own = self._words_end if self.closed else self.stream.word_from(self._sure)
        return max(self.first, min(own, words[-1])) if words else self.first

    @property
    def fixed_text(self) -> str:
        return self._said(self._fixed)

    @property
    def fixed_to(self) -> int:
        fixed = self._fixed
        return max(self.start, self.stream.places[fixed - 1]) if fixed > self.first else self.start

    @property
    def shown_text(self) -> str:
        if self.done:
            return self._said(self.last)
        return self._said(len(self.stream.tokens), self.stream.tail)

    def _said(self, end: int, tail: tuple[int, ...] = ()) -> str:
        """Asked for far more often than anything is said."""
        key = self.first, end, tail
        if key not in self._texts:
            if len(self._texts) == 2:
                self._texts.clear()
            self._texts[key] = self._text([*self.stream.tokens[self.first : end], *tail])
        return self._texts[key]

    @property
    def heard_in(self) -> tuple[str, float]:
        return "", 0.0  # a streaming model hears the one that was chosen

    def grow(self, end: int, lock: int) -> None:
        self._sure = end  # the stream grows by itself

    def reach_to(self, position: int) -> None:
        """It ends where it closed, and so does its stream."""

    def segment(self, quiet: Quiet) -> Segment | None:
        assert self.end is not None
        own, span = slice(self.first, self.last), Span(self.start, self.end)
        tokens, logprobs = tuple(self.stream.tokens[own]), tuple(self.stream.logprobs[own])
        mean = sum(logprobs) / max(1, len(logprobs))
        times = self.stream.times(own)
        heard = Recognition(tokens, mean, 0.0, "stop", 1.0, logprobs, times=times)
        return segment(span, heard, self._text, quiet=quiet.within(span))


class Carrying:
    """See Words."""

    def __init__(
        self,
        client: EngineClient,
        text: Text,
        kept: Kept,
        wants_words: bool,
        wake: Callable[[], None],
        bias: str = "",
    ) -> None:
        self._client, self._text, self._kept, self._wake = client, text, kept, wake
        self._wants_words, self._bias = wants_words, bias
        self.due_s: float | None = None
        self._pace = Pace()

    def begin(self, start: int, torn: bool, before: Spoken | None) -> Carried:
        if before is None:
            stream = _Stream(self._client, self._text, start, self._wants_words, self._bias)
            return Carried(start, stream, self._text, None)
        assert isinstance(before, Carried)
        if start - before.stream.start >= (LONGEST_SAMPLES if torn else LONG_SAMPLES):
            before.until = start if torn else start + CALM_SAMPLES
            return self.begin(start, torn, None)
        before.until = start
        carried = Carried(start, before.stream, self._text, before)
        before.goes_on_in(carried)
        return carried

    def collect(self, each: Spoken) -> None:
        assert isinstance(each, Carried)
        each.stream.collect()
        each.settle()

    def join(self, left: Spoken, right: Spoken) -> None:
        """They are one stream, or have nothing in common."""

    def ask(self, each: Spoken, at: Place) -> None:
        """Once the last segment of a stream closes, that hears what it was closed by, and no more: so its words
        depend on the audio alone."""
        assert isinstance(each, Carried)
        while each.after is not None:
            each = each.after
        live = self._pace.priority(at.received) == "live"
        end = each.decided if each.closed else min(at.now, at.received)
        each.stream.feed(self._kept, end, last=each.closed, live=live, wake=self._wake)

    def drop(self, each: Spoken) -> None:
        assert isinstance(each, Carried)
        if each.joined:
            each.stream.close()
        elif each.before is not None:  # the stream is still the one before's, and all its words
            each.before.after = each.before.until = None
