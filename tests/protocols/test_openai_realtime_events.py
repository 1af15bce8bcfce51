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

from asr_serve.errors import MalformedRequest, MissingOption, OptionError, UnknownOption, UnsupportedOption
from asr_serve.pipelines.live.events import (
    FlushDone,
    LiveEvent,
    LivePartial,
    LiveSegmentDone,
    SessionFinished,
    TurnEvent,
)
from asr_serve.protocols.openai.events import Problem
from asr_serve.protocols.openai.realtime_client_events import (
    AppendAudio,
    ClearAudio,
    CommitAudio,
    RealtimeSettings,
    SemanticVad,
    ServerVad,
    UpdateSession,
    apply_update,
    decode_client_event,
    parse_command,
)
from asr_serve.protocols.openai.realtime_server_events import BUFFER, TRANSCRIPTION, ItemTracker, ServerEventEncoder
from asr_serve.types import Segment

DELTA, COMPLETED = f"{TRANSCRIPTION}.delta", f"{TRANSCRIPTION}.completed"


def event(kind: str, **members: Any) -> str:
    return json.dumps({"type": kind, **members})


def session(**heard: Any) -> UpdateSession:
    return UpdateSession({"type": "transcription", "audio": {"input": heard}}, beta=False)


def before(**members: Any) -> UpdateSession:
    return UpdateSession(members, beta=True)


# --- what a client sends ----------------------------------------------------------------------------------


def test_events_are_read():
    assert parse_command(
        decode_client_event(event("input_audio_buffer.append", audio=base64.b64encode(b"abc").decode()))
    ) == AppendAudio(b"abc")
    assert parse_command(decode_client_event(event("input_audio_buffer.commit", event_id="e1"))) == CommitAudio()
    assert parse_command(decode_client_event(event("input_audio_buffer.clear", event_id=None))) == ClearAudio()
    assert parse_command(decode_client_event(event("session.update", session={}))) == UpdateSession({}, beta=False)
    assert parse_command(decode_client_event(event("transcription_session.update", session={}))) == UpdateSession(
        {}, beta=True
    )
    assert decode_client_event(event("x", event_id="e1")).event_id == "e1"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"session.update"', "[" * 100_000])
def test_what_is_no_event(text):
    with pytest.raises(MalformedRequest):
        decode_client_event(text)


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
        parse_command(decode_client_event(text))
    assert (type(refused.value), refused.value.param) == (error, param)
    assert refused.value.allowed


@given(st.text() | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_whatever_comes_is_read_or_refused(text):
    try:
        came = decode_client_event(text)
        asked = parse_command(came)
        if isinstance(asked, UpdateSession):
            apply_update(RealtimeSettings(), asked)
    except (MalformedRequest, OptionError):
        pass


def test_what_a_session_asks_for():
    asked = apply_update(
        RealtimeSettings(),
        session(
            format={"type": "audio/pcm", "rate": 24_000},
            transcription={"model": "m", "language": "English", "prompt": "", "keywords": []},
            turn_detection={"type": "server_vad", "threshold": 0.4, "prefix_padding_ms": 600},
            noise_reduction=None,
        ),
    )
    assert asked == RealtimeSettings("m", "audio/pcm", "en", turn_detection=ServerVad(0.4, 600, 500))
    assert apply_update(asked, session()) == asked
    assert apply_update(asked, session(turn_detection=None)).turn_detection is None
    semantic = apply_update(asked, session(turn_detection={"type": "semantic_vad", "eagerness": "high"}))
    assert semantic.turn_detection == SemanticVad("high")
    assert apply_update(asked, session(format={"type": "audio/pcma"})).format == "audio/pcma"
    assert apply_update(asked, session(transcription={"languages": ["en"]})).language == "en"
    wanted = UpdateSession(
        {"type": "transcription", "include": ["item.input_audio_transcription.logprobs"]}, beta=False
    )
    assert apply_update(asked, wanted).logprobs
    assert not apply_update(
        apply_update(asked, wanted), UpdateSession({"type": "transcription", "include": None}, False)
    ).logprobs


def test_what_a_session_asked_for_before():
    asked = apply_update(
        RealtimeSettings(),
        before(
            input_audio_format="g711_ulaw",
            input_audio_transcription={"model": "whisper-1", "language": "en", "prompt": None},
            turn_detection={"type": "server_vad", "silence_duration_ms": 200},
            input_audio_noise_reduction=None,
            include=["item.input_audio_transcription.logprobs"],
            modalities=["text"],
        ),
    )
    assert asked == RealtimeSettings(
        "whisper-1", "audio/pcmu", "en", turn_detection=ServerVad(0.5, 300, 200), logprobs=True
    )
    assert apply_update(asked, before(turn_detection=None)).turn_detection is None


def test_prompts_and_keywords():
    for turns in (None, {"type": "server_vad"}, {"type": "semantic_vad"}):
        asked = apply_update(
            RealtimeSettings(), session(transcription={"prompt": "Said.", "keywords": ["Ada"]}, turn_detection=turns)
        )
        listened = asked.listen_options("smart-turn")
        assert (asked.prompt, asked.hotwords) == (listened.prompt, listened.hotwords) == ("Said.", ("Ada",))
    assert not asked.same_recognition(RealtimeSettings())
    assert apply_update(asked, session(transcription={"language": "en"})).prompt == "Said."
    gone = apply_update(asked, session(transcription={"prompt": "", "keywords": None}))
    assert (gone.prompt, gone.hotwords) == ("", ())
    assert apply_update(RealtimeSettings(), before(input_audio_transcription={"prompt": "Said."})).prompt == "Said."
    told = json.loads(ServerEventEncoder(beta=False).session("updated", asked, "m", 0))["session"]["audio"]["input"]
    assert told["transcription"] == {"model": "m", "language": None, "prompt": "Said.", "keywords": ["Ada"]}


def test_models_to_which_openai_gives_no_turn_detection():
    for model in ("gpt-realtime-whisper", "gpt-live-transcribe"):
        assert RealtimeSettings.initial(model).turn_detection is None
        assert (
            apply_update(RealtimeSettings.initial(None), session(transcription={"model": model})).turn_detection is None
        )
    assert RealtimeSettings.initial("gpt-4o-transcribe").turn_detection == ServerVad()
    chosen = apply_update(
        RealtimeSettings.initial("gpt-realtime-whisper"), session(turn_detection={"type": "server_vad"})
    )
    assert apply_update(chosen, session(transcription={"language": "en"})).turn_detection == ServerVad()


@pytest.mark.parametrize(
    ("update", "error", "param"),
    [
        (UpdateSession({}, False), MissingOption, "session.type"),
        (UpdateSession({"type": "realtime"}, False), UnsupportedOption, "session.type"),
        (UpdateSession({"type": "speech"}, False), OptionError, "session.type"),
        (UpdateSession({"type": "transcription", "voice": "ash"}, False), UnknownOption, "session.voice"),
        (UpdateSession({"type": "transcription", "include": ["x"]}, False), OptionError, "session.include"),
        (UpdateSession({"type": "transcription", "include": "x"}, False), OptionError, "session.include"),
        (session(gain=1), UnknownOption, "session.audio.input.gain"),
        (session(format={"type": "audio/mp3"}), OptionError, "session.audio.input.format.type"),
        (session(format={}), MissingOption, "session.audio.input.format.type"),
        (session(format={"type": "audio/pcm", "rate": 8_000}), OptionError, "session.audio.input.format.rate"),
        (session(noise_reduction={"type": "near_field"}), UnsupportedOption, "session.audio.input.noise_reduction"),
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
        apply_update(RealtimeSettings(), update)
    assert type(refused.value) is error
    assert param is None or refused.value.param == param
    assert refused.value.allowed


def test_turn_detection_says_when_a_segment_ends():
    chosen = RealtimeSettings(turn_detection=ServerVad(0.4, 600, 350)).listen_options(None)
    assert (chosen.threshold, chosen.pad_before_ms, str(chosen.silence_schedule)) == (0.4, 600, "inf:350")
    assert RealtimeSettings(turn_detection=None).listen_options(None).silence_schedule is None
    semantic = RealtimeSettings(turn_detection=SemanticVad("low")).listen_options("smart-turn")
    assert (semantic.turn.model, str(semantic.silence_schedule)) == ("smart-turn", "inf:8000")
    assert (
        semantic.turn.threshold
        > RealtimeSettings(turn_detection=SemanticVad("high")).listen_options("smart-turn").turn.threshold
    )
    with pytest.raises(UnsupportedOption):
        RealtimeSettings(turn_detection=SemanticVad()).listen_options(None)


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
    heard, items = Heard(), ItemTracker(ServerEventEncoder(beta=False), turns=True, partials=False)
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
        heard.take(items.on_event(event))
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
    assert [event.get("delta") for event in heard.events if "delta" in event] == ["Ever", " tried, ever", " failed."]
    assert heard.events[0]["audio_start_ms"] == 100
    assert heard.events[3]["audio_end_ms"] == 3_000
    [done] = heard.completed.values()
    assert (done["transcript"], done["usage"]) == ("Ever tried, ever failed.", {"type": "duration", "seconds": 2.9})
    assert len({event["item_id"] for event in heard.events if "item_id" in event}) == 1
    assert len({event["event_id"] for event in heard.events}) == len(heard.events)


def test_before_an_item_was_created():
    heard, items = Heard(beta=True), ItemTracker(ServerEventEncoder(beta=True), turns=True, partials=False)
    for event in (TurnEvent("started", 0), TurnEvent("stopped", 16_000), TurnEvent("ended", 16_000)):
        heard.take(items.on_event(event))
    assert heard.kinds[2:4] == ["input_audio_buffer.committed", "conversation.item.created"]
    assert heard.transcripts == [""]


def test_the_client_commits():
    heard, items = Heard(), ItemTracker(ServerEventEncoder(beta=False), turns=False, partials=False)
    items.on_audio()
    for event in (TurnEvent("started", 0), LivePartial(0, 16_000, "Ever", " tried"), TurnEvent("stopped", 16_000)):
        heard.take(items.on_event(event))
    heard.take(items.commit(32_000))
    items.on_audio()
    heard.take(items.commit(48_000))
    for event in (segment(0, 16_000, "Ever tried."), segment(17_000, 30_000, "Ever."), FlushDone("", 32_000)):
        heard.take(items.on_event(event))
    heard.take(items.on_event(FlushDone("", 48_000)))
    assert heard.transcripts == ["Ever tried. Ever.", ""]
    assert [event["usage"]["seconds"] for event in heard.completed.values()] == [2.0, 1.0]
    assert heard.kinds[:2] == ["delta", "input_audio_buffer.committed"]


def test_what_is_cleared_is_never_told():
    heard, items = Heard(), ItemTracker(ServerEventEncoder(beta=False), turns=False, partials=False)
    items.on_audio()
    heard.take(items.clear(16_000))
    items.on_audio()
    heard.take(items.on_event(segment(0, 16_000, "No.")))
    heard.take(items.on_event(FlushDone("", 16_000)))
    heard.take(items.commit(32_000))
    heard.take(items.on_event(segment(16_000, 30_000, "Yes.")))
    heard.take(items.on_event(FlushDone("", 32_000)))
    assert heard.transcripts == ["Yes."]
    assert heard.kinds[0] == "input_audio_buffer.cleared"
    assert heard.kinds.count("delta") == 1


def test_a_turn_that_is_cleared_or_committed_by_the_client():
    heard, items = Heard(), ItemTracker(ServerEventEncoder(beta=False), turns=True, partials=False)
    heard.take(items.on_event(TurnEvent("started", 0)))
    heard.take(items.clear(16_000))
    for event in (
        TurnEvent("stopped", 15_000),
        segment(0, 15_000, "No."),
        TurnEvent("ended", 15_000),
        FlushDone("", 16_000),
    ):
        heard.take(items.on_event(event))
    kinds = ["speech_started", "cleared", "speech_stopped"]  # it is told that nobody speaks any more
    assert heard.kinds == [f"input_audio_buffer.{kind}" for kind in kinds]
    heard.take(items.on_event(TurnEvent("started", 17_000)))
    heard.take(items.commit(30_000))
    for event in (TurnEvent("stopped", 30_000), segment(17_000, 30_000, "Yes."), TurnEvent("ended", 30_000)):
        heard.take(items.on_event(event))
    heard.take(items.on_event(FlushDone("", 30_000)))
    assert heard.transcripts == ["Yes."]
    heard.take(items.commit(46_000))  # nothing was said
    heard.take(items.on_event(FlushDone("", 46_000)))
    assert heard.transcripts == ["Yes.", ""]
    assert heard.events[-1]["usage"]["seconds"] == 1.0


def test_a_turn_that_begins_just_before_it_is_cleared_goes_on():
    heard, items = Heard(), ItemTracker(ServerEventEncoder(beta=False), turns=True, partials=False)
    heard.take(items.clear(16_000))
    for event in (TurnEvent("started", 15_900), FlushDone("", 16_000), segment(15_900, 30_000, "Yes.")):
        heard.take(items.on_event(event))
    for event in (TurnEvent("stopped", 30_000), TurnEvent("ended", 30_000)):
        heard.take(items.on_event(event))
    assert heard.transcripts == ["Yes."]


def test_what_may_change_on_request():
    heard, items = Heard(), ItemTracker(ServerEventEncoder(beta=False), turns=True, partials=True)
    for event in (
        TurnEvent("started", 0),
        LivePartial(0, 10, "", "Ever"),
        LivePartial(0, 20, "", "Ever"),
        segment(0, 30, "Ever tried."),
        LivePartial(40, 50, "Ever", " failed"),
        TurnEvent("stopped", 60),
        LivePartial(40, 70, "Ever", " failed now"),
    ):
        heard.take(items.on_event(event))
    assert [event["transcript"] for event in heard.events if event["type"] == PARTIAL] == [
        "Ever",
        "Ever tried. Ever failed",
    ]


def test_when_nothing_more_will_be_heard():
    heard, items = Heard(), ItemTracker(ServerEventEncoder(beta=False), turns=True, partials=False)
    for event in (TurnEvent("started", 0), TurnEvent("stopped", 9), TurnEvent("started", 20), segment(20, 30, "Ever.")):
        heard.take(items.on_event(event))
    heard.take(items.fail(Problem("It broke.", "server_error", None, "internal_error")))
    assert heard.kinds[-2:] == ["failed", "failed"]
    assert heard.events[-1]["error"]["code"] == "internal_error"


@pytest.mark.parametrize("beta", [False, True])
def test_sessions_are_told_as_the_sdk_reads_them(beta):
    for settings_ in (
        RealtimeSettings(),
        RealtimeSettings("whisper-1", "audio/pcmu", "en", None, logprobs=True),
        RealtimeSettings(format="audio/pcma", turn_detection=SemanticVad("high")),
    ):
        text = ServerEventEncoder(beta=beta).session("updated", settings_, "gpt-4o-transcribe", 2_000_000_000)
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
    heard, items = Heard(), ItemTracker(ServerEventEncoder(beta=False), turns=turns, partials=partials)
    received = 0
    for event in story:
        heard.take(list(_step(items, event, received)))
        received = max(received, getattr(event, "position_samples", 0))
    if not turns and items.accepted_samples < received:
        items.on_audio()
        heard.take(items.commit(received))
    heard.take(items.on_event(SessionFinished(received)))
    assert not items.busy
    assert set(heard.completed) == set(heard.committed)


def _step(items: ItemTracker, event: LiveEvent | str, received: int) -> Iterator[str]:
    match event:
        case "audio":
            items.on_audio()
        case "commit":
            items.on_audio()
            yield from items.commit(received)
        case "clear":
            items.on_audio()
            yield from items.clear(received)
        case "flushed":
            yield from items.on_event(FlushDone("", received))
        case _:
            yield from items.on_event(event)  # type: ignore[arg-type]
