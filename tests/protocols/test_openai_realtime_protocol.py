"""OpenAI Realtime's transcription sessions, without a server: events read, and items told."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_checked import PARTIAL, checked

from asr_serve.errors import (
    MalformedRequest,
    MissingOption,
    OptionError,
    UnknownOption,
    UnsupportedOption,
)
from asr_serve.pipelines.live.events import (
    FlushDone,
    LiveEvent,
    LivePartial,
    LiveSegmentDone,
    SessionFinished,
    TurnEvent,
)
from asr_serve.protocols.openai import Problem
from asr_serve.protocols.openai_realtime import (
    Append,
    Clear,
    Commit,
    SemanticVad,
    ServerVad,
    Settings,
    Update,
    read,
    sent,
    updated,
)
from asr_serve.protocols.openai_realtime_items import BUFFER, TRANSCRIPTION, Items, Voice
from asr_serve.types import Segment

DELTA, COMPLETED = f"{TRANSCRIPTION}.delta", f"{TRANSCRIPTION}.completed"


def event(kind: str, **members: Any) -> str:
    return json.dumps({"type": kind, **members})


def session(**heard: Any) -> Update:
    return Update({"type": "transcription", "audio": {"input": heard}}, beta=False)


def before(**members: Any) -> Update:
    return Update(members, beta=True)


# --- what a client sends ----------------------------------------------------------------------------------


def test_events_are_read():
    assert read(sent(event("input_audio_buffer.append", audio=base64.b64encode(b"abc").decode()))) == Append(
        b"abc"
    )
    assert read(sent(event("input_audio_buffer.commit", event_id="e1"))) == Commit()
    assert read(sent(event("input_audio_buffer.clear", event_id=None))) == Clear()
    assert read(sent(event("session.update", session={}))) == Update({}, beta=False)
    assert read(sent(event("transcription_session.update", session={}))) == Update({}, beta=True)
    assert sent(event("x", event_id="e1")).event_id == "e1"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"session.update"', "[" * 100_000])
def test_what_is_no_event(text):
    with pytest.raises(MalformedRequest):
        sent(text)


@pytest.mark.parametrize(
    ("text", "error", "param"),
    [
        ("{}", MissingOption, "type"),
        (event("session.update"), MissingOption, "session"),
        (event("session.update", session=3), OptionError, "session"),
        (event("response.create"), OptionError, "type"),
        (event("conversation.item.create", item={}), OptionError, "type"),
        (event("session.updat"), OptionError, "type"),
        ('{"type": 3}', MissingOption, "type"),
        (event("input_audio_buffer.append", audio="§"), OptionError, "audio"),
        (event("input_audio_buffer.append", audio="YQ"), OptionError, "audio"),
        (event("input_audio_buffer.append", audio=[1]), OptionError, "audio"),
        (event("input_audio_buffer.commit", now=True), UnknownOption, "now"),
    ],
)
def test_events_that_are_refused(text, error, param):
    with pytest.raises(error) as refused:
        read(sent(text))
    assert (type(refused.value), refused.value.param) == (error, param)
    assert refused.value.allowed


@given(st.text() | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_whatever_comes_is_read_or_refused(text):
    try:
        came = sent(text)
        asked = read(came)
        if isinstance(asked, Update):
            updated(Settings(), asked)
    except (MalformedRequest, OptionError):
        pass


def test_what_a_session_asks_for():
    asked = updated(
        Settings(),
        session(
            format={"type": "audio/pcm", "rate": 24_000},
            transcription={"model": "m", "language": "English", "prompt": "", "keywords": []},
            turn_detection={"type": "server_vad", "threshold": 0.4, "prefix_padding_ms": 600},
            noise_reduction=None,
        ),
    )
    assert asked == Settings("m", "audio/pcm", "en", turns=ServerVad(0.4, 600, 500))
    assert updated(asked, session()) == asked
    assert updated(asked, session(turn_detection=None)).turns is None
    semantic = updated(asked, session(turn_detection={"type": "semantic_vad", "eagerness": "high"}))
    assert semantic.turns == SemanticVad("high")
    assert updated(asked, session(format={"type": "audio/pcma"})).format == "audio/pcma"
    assert updated(asked, session(transcription={"languages": ["en"]})).language == "en"
    wanted = Update({"type": "transcription", "include": ["item.input_audio_transcription.logprobs"]}, beta=False)
    assert updated(asked, wanted).logprobs
    assert not updated(updated(asked, wanted), Update({"type": "transcription", "include": None}, False)).logprobs


def test_what_a_session_asked_for_before():
    asked = updated(
        Settings(),
        before(
            input_audio_format="g711_ulaw",
            input_audio_transcription={"model": "whisper-1", "language": "en", "prompt": None},
            turn_detection={"type": "server_vad", "silence_duration_ms": 200},
            input_audio_noise_reduction=None,
            include=["item.input_audio_transcription.logprobs"],
            modalities=["text"],
        ),
    )
    assert asked == Settings("whisper-1", "audio/pcmu", "en", turns=ServerVad(0.5, 300, 200), logprobs=True)
    assert updated(asked, before(turn_detection=None)).turns is None


def test_prompts_and_keywords():
    for turns in (None, {"type": "server_vad"}, {"type": "semantic_vad"}):
        asked = updated(
            Settings(), session(transcription={"prompt": "Said.", "keywords": ["Ada"]}, turn_detection=turns)
        )
        listened = asked.listen("smart-turn")
        assert (asked.prompt, asked.hotwords) == (listened.prompt, listened.hotwords) == ("Said.", ("Ada",))
    assert not asked.heard_as(Settings())
    assert updated(asked, session(transcription={"language": "en"})).prompt == "Said."
    gone = updated(asked, session(transcription={"prompt": "", "keywords": None}))
    assert (gone.prompt, gone.hotwords) == ("", ())
    assert updated(Settings(), before(input_audio_transcription={"prompt": "Said."})).prompt == "Said."
    told = json.loads(Voice(beta=False).session("updated", asked, "m", 0))["session"]["audio"]["input"]
    assert told["transcription"] == {"model": "m", "language": None, "prompt": "Said.", "keywords": ["Ada"]}


def test_models_to_which_openai_gives_no_turn_detection():
    for model in ("gpt-realtime-whisper", "gpt-live-transcribe"):
        assert Settings.of(model).turns is None
        assert updated(Settings.of(None), session(transcription={"model": model})).turns is None
    assert Settings.of("gpt-4o-transcribe").turns == ServerVad()
    chosen = updated(Settings.of("gpt-realtime-whisper"), session(turn_detection={"type": "server_vad"}))
    assert updated(chosen, session(transcription={"language": "en"})).turns == ServerVad()


@pytest.mark.parametrize(
    ("update", "error", "param"),
    [
        (Update({}, False), MissingOption, "session.type"),
        (Update({"type": "realtime"}, False), UnsupportedOption, "session.type"),
        (Update({"type": "speech"}, False), OptionError, "session.type"),
        (Update({"type": "transcription", "voice": "ash"}, False), UnknownOption, "session.voice"),
        (Update({"type": "transcription", "include": ["x"]}, False), OptionError, "session.include"),
        (Update({"type": "transcription", "include": "x"}, False), OptionError, "session.include"),
        (session(gain=1), UnknownOption, "session.audio.input.gain"),
        (session(format={"type": "audio/mp3"}), OptionError, "session.audio.input.format.type"),
        (session(format={}), MissingOption, "session.audio.input.format.type"),
        (session(format={"type": "audio/pcm", "rate": 8_000}), OptionError, "session.audio.input.format.rate"),
        (
            session(noise_reduction={"type": "near_field"}),
            UnsupportedOption,
            "session.audio.input.noise_reduction",
        ),
        (session(transcription={"prompt": ["p"]}), OptionError, "session.audio.input.transcription.prompt"),
        (session(transcription={"keywords": "k"}), OptionError, "session.audio.input.transcription.keywords"),
        (session(transcription={"keywords": [1]}), OptionError, "session.audio.input.transcription.keywords"),
        (session(transcription={"delay": "low"}), UnsupportedOption, "session.audio.input.transcription.delay"),
        (session(transcription={"languages": ["en", "fr"]}), UnsupportedOption, None),
        (session(turn_detection={}), MissingOption, "session.audio.input.turn_detection.type"),
        (session(turn_detection={"type": "server_vad", "threshold": 2}), OptionError, None),
        (session(turn_detection={"type": "server_vad", "threshold": True}), OptionError, None),
        (session(turn_detection={"type": "server_vad", "threshold": "0.5"}), OptionError, None),
        (session(turn_detection={"type": "server_vad", "prefix_padding_ms": -1}), OptionError, None),
        (session(turn_detection={"type": "server_vad", "silence_duration_ms": 0.5}), OptionError, None),
        (session(turn_detection={"type": "server_vad", "eagerness": "low"}), UnknownOption, None),
        (session(turn_detection={"type": "server_vad", "create_response": True}), UnsupportedOption, None),
        (session(turn_detection={"type": "server_vad", "idle_timeout_ms": 5_000}), UnsupportedOption, None),
        (session(turn_detection={"type": "semantic_vad", "eagerness": "very"}), OptionError, None),
        (before(input_audio_format="mp3"), OptionError, "session.input_audio_format"),
        (before(modalities=["video"]), OptionError, "session.modalities"),
        (before(type="transcription"), UnknownOption, "session.type"),
        (before(input_audio_noise_reduction={"type": "far_field"}), UnsupportedOption, None),
    ],
)
def test_what_a_session_may_not_ask_for(update, error, param):
    with pytest.raises(error) as refused:
        updated(Settings(), update)
    assert type(refused.value) is error
    assert param is None or refused.value.param == param
    assert refused.value.allowed


def test_turn_detection_says_when_a_segment_ends():
    chosen = Settings(turns=ServerVad(0.4, 600, 350)).listen(None)
    assert (chosen.threshold, chosen.pad_before_ms, str(chosen.silence_schedule)) == (0.4, 600, "inf:350")
    assert Settings(turns=None).listen(None).silence_schedule is None
    semantic = Settings(turns=SemanticVad("low")).listen("smart-turn")
    assert (semantic.turn.model, str(semantic.silence_schedule)) == ("smart-turn", "inf:8000")
    assert semantic.turn.threshold > Settings(turns=SemanticVad("high")).listen("smart-turn").turn.threshold
    with pytest.raises(UnsupportedOption):
        Settings(turns=SemanticVad()).listen(None)


# --- what it is told --------------------------------------------------------------------------------------


class Heard:
    """What a client makes of the events, each held against the SDK's types."""

    def __init__(self, *, beta: bool = False) -> None:
        self.beta, self.events = beta, list[dict[str, Any]]()
        self.deltas: dict[str, str] = {}
        self.completed: dict[str, dict[str, Any]] = {}
        self.committed: list[str] = []

    def take(self, told: list[str]) -> None:
        for text in told:
            event = checked(json.loads(text), beta=self.beta)
            self.events.append(event)
            match event["type"].removeprefix(f"{TRANSCRIPTION}."):
                case "delta":
                    assert event["delta"]
                    assert event["item_id"] not in self.completed
                    self.deltas[event["item_id"]] = self.deltas.get(event["item_id"], "") + event["delta"]
                case "completed":
                    assert event["item_id"] not in self.completed
                    assert event["item_id"] in self.committed
                    self.completed[event["item_id"]] = event
                    assert event["transcript"] == self.deltas.get(event["item_id"], "")
            if event["type"] == f"{BUFFER}.committed":
                assert event["previous_item_id"] == (self.committed[-1] if self.committed else None)
                self.committed.append(event["item_id"])

    @property
    def kinds(self) -> list[str]:
        return [event["type"].rpartition(f"{TRANSCRIPTION}.")[2] for event in self.events]

    @property
    def transcripts(self) -> list[str]:
        return [event["transcript"] for event in self.completed.values()]


def segment(start: int, end: int, text: str) -> LiveSegmentDone:
    return LiveSegmentDone(Segment(start, end, text), end)


def test_a_turn_is_an_item():
    heard, items = Heard(), Items(Voice(beta=False), turns=True, partials=False)
    for event in (
        TurnEvent("started", 1_600),
        LivePartial(1_600, 20_000, "Ever", " tried"),
        LivePartial(1_600, 30_000, "Ever", " tried ever"),
        LivePartial(1_600, 40_000, "Ever tried, ever", " failed"),
        TurnEvent("stopped", 48_000),
        segment(1_600, 48_000, "Ever tried, ever failed."),
        TurnEvent("ended", 48_000),
        LivePartial(50_000, 50_000),
    ):
        heard.take(items.hear(event))
    assert heard.kinds == [
        "input_audio_buffer.speech_started",
        "delta",
        "delta",
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        "delta",
        "completed",
    ]
    assert [event.get("delta") for event in heard.events if "delta" in event] == [
        "Ever",
        " tried, ever",
        " failed.",
    ]
    assert heard.events[0]["audio_start_ms"] == 100
    assert heard.events[3]["audio_end_ms"] == 3_000
    [done] = heard.completed.values()
    assert (done["transcript"], done["usage"]) == (
        "Ever tried, ever failed.",
        {"type": "duration", "seconds": 2.9},
    )
    assert len({event["item_id"] for event in heard.events if "item_id" in event}) == 1
    assert len({event["event_id"] for event in heard.events}) == len(heard.events)


def test_before_an_item_was_created():
    heard, items = Heard(beta=True), Items(Voice(beta=True), turns=True, partials=False)
    for event in (TurnEvent("started", 0), TurnEvent("stopped", 16_000), TurnEvent("ended", 16_000)):
        heard.take(items.hear(event))
    assert heard.kinds[2:4] == ["input_audio_buffer.committed", "conversation.item.created"]
    assert heard.transcripts == [""]


def test_the_client_commits():
    heard, items = Heard(), Items(Voice(beta=False), turns=False, partials=False)
    items.arrive()
    for event in (TurnEvent("started", 0), LivePartial(0, 16_000, "Ever", " tried"), TurnEvent("stopped", 16_000)):
        heard.take(items.hear(event))
    heard.take(items.commit(32_000))
    items.arrive()
    heard.take(items.commit(48_000))
    for event in (segment(0, 16_000, "Ever tried."), segment(17_000, 30_000, "Ever."), FlushDone("", 32_000)):
        heard.take(items.hear(event))
    heard.take(items.hear(FlushDone("", 48_000)))
    assert heard.transcripts == ["Ever tried. Ever.", ""]
    assert [event["usage"]["seconds"] for event in heard.completed.values()] == [2.0, 1.0]
    assert heard.kinds[:2] == ["delta", "input_audio_buffer.committed"]


def test_what_is_cleared_is_never_told():
    heard, items = Heard(), Items(Voice(beta=False), turns=False, partials=False)
    items.arrive()
    heard.take(items.clear(16_000))
    items.arrive()
    heard.take(items.hear(segment(0, 16_000, "No.")))
    heard.take(items.hear(FlushDone("", 16_000)))
    heard.take(items.commit(32_000))
    heard.take(items.hear(segment(16_000, 30_000, "Yes.")))
    heard.take(items.hear(FlushDone("", 32_000)))
    assert heard.transcripts == ["Yes."]
    assert heard.kinds[0] == "input_audio_buffer.cleared"
    assert heard.kinds.count("delta") == 1


def test_a_turn_that_is_cleared_or_committed_by_the_client():
    heard, items = Heard(), Items(Voice(beta=False), turns=True, partials=False)
    heard.take(items.hear(TurnEvent("started", 0)))
    heard.take(items.clear(16_000))
    for event in (
        TurnEvent("stopped", 15_000),
        segment(0, 15_000, "No."),
        TurnEvent("ended", 15_000),
        FlushDone("", 16_000),
    ):
        heard.take(items.hear(event))
    kinds = ["speech_started", "cleared", "speech_stopped"]  # it is told that nobody speaks any more
    assert heard.kinds == [f"input_audio_buffer.{kind}" for kind in kinds]
    heard.take(items.hear(TurnEvent("started", 17_000)))
    heard.take(items.commit(30_000))
    for event in (TurnEvent("stopped", 30_000), segment(17_000, 30_000, "Yes."), TurnEvent("ended", 30_000)):
        heard.take(items.hear(event))
    heard.take(items.hear(FlushDone("", 30_000)))
    assert heard.transcripts == ["Yes."]
    heard.take(items.commit(46_000))  # nothing was said
    heard.take(items.hear(FlushDone("", 46_000)))
    assert heard.transcripts == ["Yes.", ""]
    assert heard.events[-1]["usage"]["seconds"] == 1.0


def test_a_turn_that_begins_just_before_it_is_cleared_goes_on():
    heard, items = Heard(), Items(Voice(beta=False), turns=True, partials=False)
    heard.take(items.clear(16_000))
    for event in (TurnEvent("started", 15_900), FlushDone("", 16_000), segment(15_900, 30_000, "Yes.")):
        heard.take(items.hear(event))
    for event in (TurnEvent("stopped", 30_000), TurnEvent("ended", 30_000)):
        heard.take(items.hear(event))
    assert heard.transcripts == ["Yes."]


def test_what_may_change_on_request():
    heard, items = Heard(), Items(Voice(beta=False), turns=True, partials=True)
    for event in (
        TurnEvent("started", 0),
        LivePartial(0, 10, "", "Ever"),
        LivePartial(0, 20, "", "Ever"),
        segment(0, 30, "Ever tried."),
        LivePartial(40, 50, "Ever", " failed"),
        TurnEvent("stopped", 60),
        LivePartial(40, 70, "Ever", " failed now"),
    ):
        heard.take(items.hear(event))
    assert [event["transcript"] for event in heard.events if event["type"] == PARTIAL] == [
        "Ever",
        "Ever tried. Ever failed",
    ]


def test_when_nothing_more_will_be_heard():
    heard, items = Heard(), Items(Voice(beta=False), turns=True, partials=False)
    for event in (
        TurnEvent("started", 0),
        TurnEvent("stopped", 9),
        TurnEvent("started", 20),
        segment(20, 30, "Ever."),
    ):
        heard.take(items.hear(event))
    heard.take(items.failed(Problem("It broke.", "server_error", None, "internal_error")))
    assert heard.kinds[-2:] == ["failed", "failed"]
    assert heard.events[-1]["error"]["code"] == "internal_error"


@pytest.mark.parametrize("beta", [False, True])
def test_sessions_are_told_as_the_sdk_reads_them(beta):
    for settings_ in (
        Settings(),
        Settings("whisper-1", "audio/pcmu", "en", None, logprobs=True),
        Settings(format="audio/pcma", turns=SemanticVad("high")),
    ):
        text = Voice(beta=beta).session("updated", settings_, "gpt-4o-transcribe", 2_000_000_000)
        told = checked(json.loads(text), beta=beta)["session"]
        assert told["object"] == "realtime.transcription_session"
        assert told["id"].startswith("sess_")


WORDS = st.sampled_from(["Ever", "tried,", "no", "matter.", "fail", "better"])


@st.composite
def spoken(draw: st.DrawFn) -> tuple[bool, list[LiveEvent | str]]:
    """What a caller says and a client does: segments whose words lock one by one, in turns, and between them
    commits and clears. Positions rise."""
    turns, now, story = draw(st.booleans()), 0, list[LiveEvent | str]()
    for _ in range(draw(st.integers(1, 5))):
        start, now = now, now + 16_000
        story += ["audio", TurnEvent("started", start)]
        for _ in range(draw(st.integers(0, 3))):
            words = draw(st.lists(WORDS, min_size=1, max_size=5))
            for fixed in sorted(draw(st.lists(st.integers(0, len(words)), max_size=3))):
                unfixed = draw(st.lists(WORDS, max_size=2))
                story.append(LivePartial(now, now, " ".join(words[:fixed]), " ".join(unfixed)))
            if words and draw(st.booleans()):
                story.append(segment(now, now + 8_000, " ".join(words) + draw(st.sampled_from(["", ",", "."]))))
            else:
                story.append(segment(now, now + 8_000, " ".join(words)))
            now += 8_000
        ends: list[LiveEvent | str] = [TurnEvent("stopped", now), TurnEvent("ended", now)]
        story += [draw(st.sampled_from(["commit", "clear"])), *ends, "flushed"] if draw(st.booleans()) else ends
    return turns, story


@settings(max_examples=300)
@given(spoken(), st.booleans())
def test_the_deltas_of_an_item_are_its_transcript(told, partials):
    """`Heard` checks each item as it is completed."""
    turns, story = told
    heard, items = Heard(), Items(Voice(beta=False), turns=turns, partials=partials)
    received = 0
    for event in story:
        heard.take(list(_step(items, event, received)))
        received = max(received, getattr(event, "position_samples", 0))
    if not turns and items.taken_samples < received:
        items.arrive()
        heard.take(items.commit(received))
    heard.take(items.hear(SessionFinished(received)))
    assert not items.busy
    assert set(heard.completed) == set(heard.committed)


def _step(items: Items, event: LiveEvent | str, received: int) -> Iterator[str]:
    match event:
        case "audio":
            items.arrive()
        case "commit":
            items.arrive()
            yield from items.commit(received)
        case "clear":
            items.arrive()
            yield from items.clear(received)
        case "flushed":
            yield from items.hear(FlushDone("", received))
        case _:
            yield from items.hear(event)  # type: ignore[arg-type]
