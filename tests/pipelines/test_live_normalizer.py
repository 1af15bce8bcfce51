"""Segments of a live caller that are written as one writes: in order, and not by whoever hears everybody."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from asr_serve.errors import UnsupportedOption
from asr_serve.pipelines.live.events import LiveEvent, LivePartial, LiveSegmentDone, SessionFinished
from asr_serve.pipelines.live.live_normalizer import MAX_PENDING_SEGMENTS, LiveNormalizer
from asr_serve.text.normalization import inverse
from asr_serve.types import Segment

pytest.importorskip("wetext", reason="wetext is not installed: pip install 'asr-serve[itn]'")
SAID = ("It was twenty five dollars.", "Nothing to write.", "On the third of March.")
WRITTEN = ("It was $25.", "Nothing to write.", "On the 3rd of March.")
WAIT_S = 60


class Gate(threading.Event):
    """The grammars work once it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        """Texts that they were given."""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    opened, real = Gate(), inverse.find_edits

    def held(text: str, language: str) -> list[inverse.TextEdit]:
        assert threading.current_thread() is not threading.main_thread()
        opened.asked.append(text)
        assert opened.wait(WAIT_S)
        return real(text, language)

    monkeypatch.setattr(inverse, "find_edits", held)
    yield opened
    opened.set()


def done(text: str, language: str = "en") -> LiveSegmentDone:
    return LiveSegmentDone(Segment(0, 16_000, text), 16_000, language)


def rest(writing: LiveNormalizer, woken: threading.Semaphore) -> list[LiveEvent]:
    events = writing.ready_events()
    while writing.busy:
        assert woken.acquire(timeout=WAIT_S), "nobody was woken"
        events += writing.ready_events()
    return events


def test_what_is_told_keeps_its_order(gate: Gate) -> None:
    woken = threading.Semaphore(0)
    writing = LiveNormalizer("en", woken.release)
    partial, end = LivePartial(0, 16_000, "It was"), SessionFinished(48_000)
    writing.enqueue([partial, done(SAID[0]), partial, done(SAID[1])])
    writing.enqueue([done(SAID[2]), end])
    assert writing.ready_events() == [partial]
    assert writing.ready_events() == []
    gate.set()
    first, between, second, third, last = rest(writing, woken)
    assert (between, last) == (partial, end)
    segments = [each.segment for each in (first, second, third) if isinstance(each, LiveSegmentDone)]
    assert tuple(each.text for each in segments) == WRITTEN
    assert [each.spoken for each in segments] == [SAID[0], "", SAID[2]]


def test_each_is_written_in_the_language_that_was_heard() -> None:
    woken = threading.Semaphore(0)
    writing = LiveNormalizer("", woken.release)
    writing.enqueue([done(SAID[0], "fr"), done("二十五个", "zh")])
    texts = [each.segment.text for each in rest(writing, woken) if isinstance(each, LiveSegmentDone)]
    assert texts == [SAID[0], "25个"]


def test_who_waits_for_too_many_is_not_heard_on(gate: Gate) -> None:
    woken = threading.Semaphore(0)
    writing = LiveNormalizer("en", woken.release)
    for number in range(MAX_PENDING_SEGMENTS):
        assert not writing.full, number
        writing.enqueue([LivePartial(0, 0), done(SAID[0])])
    assert writing.full
    gate.set()
    assert len(rest(writing, woken)) == 2 * MAX_PENDING_SEGMENTS
    assert not writing.full


def test_who_has_gone_is_written_no_more(gate: Gate) -> None:
    going, woken = LiveNormalizer("en", lambda: None), threading.Semaphore(0)
    going.enqueue([done(f"{SAID[0]} {number}") for number in range(MAX_PENDING_SEGMENTS)])
    staying = LiveNormalizer("en", woken.release)
    staying.enqueue([done(SAID[2])])
    going.close()
    gate.set()
    assert [each.segment.text for each in rest(staying, woken) if isinstance(each, LiveSegmentDone)] == [WRITTEN[2]]
    assert len(gate.asked) <= 2, "the one that was under way, and that of who has stayed"


def test_a_language_without_grammars_is_refused_at_once() -> None:
    with pytest.raises(UnsupportedOption, match="language=hy"):
        LiveNormalizer("hy", lambda: None)
