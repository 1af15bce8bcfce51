"""Overlapped speech of a file, with separation and answers that are made up: no word of the file is lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest

from asr_serve import units
from asr_serve.audio.endpointing import EndpointConfig
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.client import Ticket
from asr_serve.errors import AsrServeError, Cancelled, EngineClosed, EngineCrashed, StepFailed
from asr_serve.models.registry import AsrCard, TimestampTokens, asr_card
from asr_serve.pipelines.offline.long_form import SegmentRequest
from asr_serve.pipelines.offline.overlap_recognizer import OverlapRecognizer
from asr_serve.pipelines.offline.parallel import ParallelLongForm
from asr_serve.types import Segment, Span, SpeakerTurn, Word

S = units.RATE_HZ
TIMES = TimestampTokens(50_363, 50_256)
WHISPER = msgspec.structs.replace(asr_card("whisper-tiny-en"), times=TIMES)
MOONSHINE = asr_card("moonshine-tiny-en")
SPAN = Span(0, 10 * S)
TURNS = (SpeakerTurn("A", 0, 6 * S), SpeakerTurn("B", 4 * S, 10 * S))


def original() -> Segment:
    """A word in each second, from o0 to o9."""
    words = tuple(Word(f"o{at}", round((at + 0.2) * S), round((at + 0.8) * S), 0.9) for at in range(10))
    return Segment(0, 10 * S, " ".join(word.text for word in words), words=words)


def answer(*starts_s: float, first: int = 0, ends_s: float | None = None, **fields: Any) -> Recognition:
    """A word of half a second at each start, in seconds since the start of the turn's audio: w0, w1, ..."""
    tokens = tuple(range(first, first + len(starts_s)))
    times = tuple((round(at * S), round((at + 0.5) * S)) for at in starts_s)
    if ends_s is not None:
        tokens, times = (*tokens, TIMES.first + round(50 * ends_s)), (*times, (round(ends_s * S),) * 2)
    options: dict[str, Any] = {"avg_logprob": -0.1, "temperature": 0.0, "finish": "stop", "compression_ratio": 1.0}
    options |= fields
    return Recognition(tokens, logprobs=(-0.1,) * len(tokens), times=times, **options)


EMPTY = answer()
A_WORDS = answer(0.2, 2.2, 4.5, 5.4)
"""Of the audio 0 to 6.25 s."""
B_WORDS = answer(0.5, 2.5, 5, first=10)
"""Of the audio 3.75 to 10 s."""


class Engine:
    """Separates into noise, or fails."""

    def __init__(self, failure: AsrServeError | None = None) -> None:
        self.failure, self.mixtures = failure, 0
        self.cancelled: list[Future[np.ndarray]] = []

    def separate_speakers(self, pcm: np.ndarray, turns: object, **_: object) -> Future[np.ndarray]:
        self.mixtures += 1
        future: Future[np.ndarray] = Future()
        if self.failure is not None:
            future.set_exception(self.failure)
        else:
            future.set_result(np.random.default_rng(1).standard_normal((2, len(pcm))).astype(np.float32))
        return future

    def cancel_separation(self, answer: Future[np.ndarray]) -> None:
        self.cancelled.append(answer)


class Pending(Engine):
    """Never answers."""

    def separate_speakers(self, pcm: np.ndarray, turns: object, **_: object) -> Future[np.ndarray]:
        return Future()


class Recognizer:
    """Answers in the order of requests."""

    def __init__(self, *answers: Recognition | AsrServeError) -> None:
        self.answers, self.priorities, self.cancelled = list(answers), list[str](), 0

    def submit(self, pcm: np.ndarray, search: SearchOptions, priority: str, check: Callable[[], None]) -> Ticket:
        self.priorities.append(priority)
        future: Future[Recognition] = Future()
        outcome = self.answers.pop(0)
        if isinstance(outcome, AsrServeError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
        return Ticket(len(self.priorities), future)

    def cancel(self, ticket: Ticket) -> None:
        self.cancelled += 1


class Diarizer:
    known_samples = SPAN.end_samples

    def may_overlap(self, span: Span) -> bool:
        return True


def started(
    recognizer: Recognizer,
    engine: Engine | None = None,
    turns: tuple[SpeakerTurn, ...] = TURNS,
    card: AsrCard = MOONSHINE,
    words: bool = True,
) -> OverlapRecognizer:
    """The recognizer of a file, one segment, whose turns have just become known."""
    endpoint, search = EndpointConfig(max_segment_ms=20_000), SearchOptions(words=True)
    spell = lambda tokens: " ".join(f"w{token}" for token in tokens)  # noqa: E731
    form = ParallelLongForm(card, endpoint, search, None, 512, spell, lambda _: None)
    overlaps = OverlapRecognizer(
        engine or Engine(),  # type: ignore[arg-type]
        recognizer,  # type: ignore[arg-type]
        form,
        Diarizer(),  # type: ignore[arg-type]
        lambda _: None,
        lambda: None,
        words=words,
        priority=lambda span: "interactive" if span.start_samples < 2 * S else "bulk",
    )
    overlaps.keep(SegmentRequest(SPAN, np.zeros(SPAN.samples, np.float32), search))
    overlaps.start(turns)
    return overlaps


def finished(overlaps: OverlapRecognizer) -> OverlapRecognizer:
    """The same recognizer after its file was recognized."""
    for _ in range(10):
        if overlaps.finished:
            return overlaps
        overlaps.advance()
    raise AssertionError("the overlapped turns are not finished")


def merged(overlaps: OverlapRecognizer, whole: Segment | None = None) -> list[tuple[str, str]]:
    """Speakers and texts in order of time. Checks that segments of one speaker, and of none, never overlap, and that
    words lie in their segments."""
    whole = whole or original()
    overlaps.replace([whole])
    found = sorted([*overlaps.outside_turns(whole), *overlaps.segments()], key=lambda each: each.start_samples)
    for each in found:
        for word in each.words:
            assert each.start_samples <= word.start_samples <= word.end_samples <= each.end_samples
        for other in found:
            apart = each.end_samples <= other.start_samples or other.end_samples <= each.start_samples
            assert each is other or apart or {each.speaker, other.speaker} == {"A", "B"}
    return [(each.speaker, each.text) for each in found]


def test_both_turns_replace_the_words_of_the_file() -> None:
    recognizer = Recognizer(A_WORDS, B_WORDS)
    assert merged(finished(started(recognizer))) == [("A", "w0 w1 w2 w3"), ("B", "w10 w11 w12")]
    assert recognizer.priorities == ["interactive", "bulk"]


def test_the_result_has_words_only_if_requested() -> None:
    overlaps = finished(started(Recognizer(A_WORDS, B_WORDS), words=False))
    assert merged(overlaps) == [("A", "w0 w1 w2 w3"), ("B", "w10 w11 w12")]
    assert all(segment.words == () for segment in overlaps.segments())


def test_words_of_a_turn_in_which_nothing_is_recognized_stay() -> None:
    assert merged(finished(started(Recognizer(A_WORDS, EMPTY)))) == [("A", "w0 w1"), ("", "o4 o5 o6 o7 o8 o9")]
    assert merged(finished(started(Recognizer(EMPTY, B_WORDS)))) == [("", "o0 o1 o2 o3 o4 o5"), ("B", "w11 w12")]
    assert merged(finished(started(Recognizer(EMPTY, EMPTY)))) == [("", original().text)]


@pytest.mark.parametrize("finish", ["length", "repetition"])
def test_words_of_a_turn_in_which_the_model_lost_its_place_stay(finish: str) -> None:
    broken = msgspec.structs.replace(B_WORDS, finish=finish)
    assert merged(finished(started(Recognizer(A_WORDS, broken)))) == [("A", "w0 w1"), ("", "o4 o5 o6 o7 o8 o9")]


def test_words_behind_the_end_of_an_answer_stay() -> None:
    early = answer(0.5, 1.5, first=10, ends_s=3.25)  # 7 s in the file
    assert merged(finished(started(Recognizer(answer(0.2, 2.2, ends_s=6.2), early), card=WHISPER))) == [
        ("A", "w0 w1"),
        ("B", "w10 w11"),
        ("", "o7 o8 o9"),
    ]


def test_words_of_margins_are_not_of_the_turn() -> None:
    in_margins = answer(0.2, 5.8)  # the middle of the second one is at 6.05 s
    assert merged(finished(started(Recognizer(in_margins, answer(0, 1, first=10))))) == [("A", "w0"), ("B", "w10 w11")]
    before = answer(-0.1, 1, first=10)
    assert merged(finished(started(Recognizer(in_margins, before)))) == [("A", "w0"), ("B", "w11")]


def test_a_turn_with_words_in_its_margins_only_has_none() -> None:
    assert merged(finished(started(Recognizer(A_WORDS, answer(-0.1, first=10))))) == [
        ("A", "w0 w1"),
        ("", "o4 o5 o6 o7 o8 o9"),
    ]


def test_a_segment_without_times_of_words_stays() -> None:
    whole = msgspec.structs.replace(original(), words=())
    assert merged(finished(started(Recognizer(A_WORDS, B_WORDS))), whole) == [("", whole.text)]
    untimed = msgspec.structs.replace(B_WORDS, times=())
    assert merged(finished(started(Recognizer(A_WORDS, untimed)))) == [("A", "w0 w1"), ("", "o4 o5 o6 o7 o8 o9")]


def test_what_neither_speaks_alone_is_not_separated() -> None:
    engine, turns = Engine(), (SpeakerTurn("A", 0, 10 * S), SpeakerTurn("B", S // 2, 10 * S))
    assert merged(finished(started(Recognizer(), engine, turns))) == [("", original().text)]
    assert engine.mixtures == 0


@pytest.mark.parametrize("failure", [StepFailed("it failed"), EngineCrashed("it died")])
def test_a_segment_that_fails_stays(failure: AsrServeError) -> None:
    assert merged(finished(started(Recognizer(), Engine(failure)))) == [("", original().text)]
    assert merged(finished(started(Recognizer(A_WORDS, failure)))) == [("", original().text)]


def test_a_file_that_is_given_up_withdraws_its_separations() -> None:
    engine = Pending()
    overlaps = started(Recognizer(), engine)
    assert overlaps.advance()
    assert not overlaps.finished
    overlaps.abandon()
    assert len(engine.cancelled) == 1
    assert overlaps.finished


@pytest.mark.parametrize("failure", [EngineClosed("it is closed"), Cancelled("it was cancelled")])
def test_what_ends_the_file_is_raised(failure: AsrServeError) -> None:
    with pytest.raises(type(failure)):
        finished(started(Recognizer(), Engine(failure)))
    with pytest.raises(type(failure)):
        finished(started(Recognizer(A_WORDS, failure)))
