"""Files in, text out, with the real packaged model: any source, any order, any failure, bounded memory."""

from __future__ import annotations

import asyncio
import io
import threading
import tracemalloc
import wave
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from case_tiers import exhaustive_after
from loaded_models import expect_idle, load_model

from asr_serve.api.library import Model
from asr_serve.audio import read_audio
from asr_serve.audio.input_manifest import InputItem
from asr_serve.audio.reader import AudioLimits
from asr_serve.config import EngineConfig
from asr_serve.errors import AsrServeError, AudioTooLong, EmptyAudio, NotAudio, OptionError, SourceNotFound
from asr_serve.pipelines.offline import parallel, transcribe
from asr_serve.pipelines.offline.transcribe import FileDone, FileFailed, Progress, SegmentDone
from asr_serve.pipelines.options import ListenOptions, TranscribeOptions
from asr_serve.types import Transcript

RATE_HZ = 16_000
WAIT_S = 120.0
pytestmark = pytest.mark.usefixtures("idle_afterwards")


@pytest.fixture(scope="module")
def cities(packaged_speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first sixteen seconds of two_cities.wav, as a file: enough words, and quick."""
    path = tmp_path_factory.mktemp("speech") / "two_cities.wav"
    with wave.open(str(packaged_speech / "two_cities.wav")) as long, wave.open(str(path), "wb") as short:
        short.setparams(long.getparams())
        short.writeframes(long.readframes(16 * long.getframerate()))
    return path


@pytest.fixture(scope="module")
def speech(cities: Path) -> np.ndarray:
    return read_audio(cities)[: 16 * RATE_HZ]


@pytest.fixture(scope="module")
def whole(model: Model, cities: Path) -> Transcript:
    (transcript,) = model.transcribe(cities)
    return transcript


def spans(transcript: Transcript) -> list[tuple[int, int, str]]:
    return [(s.start_samples, s.end_samples, s.text) for s in transcript.segments]


def items(*sources: object) -> list[InputItem]:
    return [InputItem(f"item-{i}", source) for i, source in enumerate(sources)]


def silence(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * RATE_HZ), np.float32)


# --- one input, however it comes ------------------------------------------------------------------


def test_the_transcript_of_real_speech(whole, speech):
    words = whole.text.lower()
    for phrase in ("best of times", "worst of times", "age of wisdom", "season of light"):
        assert phrase in words
    assert whole.duration_samples == len(speech)
    assert (whole.language, whole.model) == ("en", "moonshine-tiny-en")
    assert whole.text == " ".join(s.text for s in whole.segments)


@pytest.mark.slow
def test_any_kind_of_source_gives_the_same_transcript(model, whole, cities, speech):
    data = cities.read_bytes()
    sources = [str(cities), cities, data, bytearray(data), memoryview(data), io.BytesIO(data)]
    sources += [(speech, RATE_HZ), speech]
    for source in sources:
        (results,) = model.transcribe(source)
        assert spans(results) == spans(whole), type(source)
    for results in model.transcribe([str(cities), data, io.BytesIO(data), speech]):
        assert spans(results) == spans(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "as_", exhaustive_after(3, [list, lambda x: (s for s in x), lambda x: map(Path, x), tuple, iter, dict.fromkeys])
)
def test_any_iterable_of_inputs(model, whole, cities, as_):
    found = model.transcribe(as_([str(cities)]))
    assert [spans(t) for t in found] == [spans(whole)]
    assert found[0].key == str(cities)


def test_segments_are_ordered_disjoint_and_inside_the_audio(whole):
    edges = [edge for s in whole.segments for edge in (s.start_samples, s.end_samples)]
    assert edges == sorted(edges)
    assert edges[0] >= 0
    assert edges[-1] <= whole.duration_samples
    assert all(s.text for s in whole.segments)


def test_the_same_file_twice_gives_the_same_transcript(model, whole, cities):
    assert spans(model.transcribe(cities)[0]) == spans(whole)


# --- many inputs ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_results_keep_the_order_of_inputs(model, speech, whole):
    lengths = [len(speech), 3 * RATE_HZ, 14 * RATE_HZ, 1, 7 * RATE_HZ, 400, 12 * RATE_HZ]
    sources = [speech[:n] for n in lengths]
    alone = [model.transcribe(source)[0] for source in sources]
    together = model.transcribe(sources)
    assert [t.duration_samples for t in together] == lengths
    assert [spans(t) for t in together] == [spans(t) for t in alone]


def test_events_come_in_order(model, speech):
    sources = items(speech[: 20 * RATE_HZ], silence(2), speech[: 9 * RATE_HZ], speech[5 * RATE_HZ : 20 * RATE_HZ])
    events = list(model.events(sources))
    found: dict[int, list] = {}
    for event in events:
        if isinstance(event, SegmentDone):
            found.setdefault(event.index, []).append(event.segment)
    order = [(e.index, isinstance(e, FileDone)) for e in events if isinstance(e, SegmentDone | FileDone)]
    assert order == sorted(order), "segments before their file, files in order"
    done = [e for e in events if isinstance(e, FileDone)]
    assert [(e.index, e.key) for e in done] == [(i, f"item-{i}") for i in range(4)]
    for e in done:
        assert list(e.transcript.segments) == found.get(e.index, [])
    progress = [e for e in events if isinstance(e, Progress)]
    positions = [p.audio_samples for p in progress]
    assert positions == sorted(positions)
    total = sum(len(item.source) for item in sources)
    assert (positions[-1], progress[-1].total_samples) == (total, total)


def test_no_inputs_no_transcripts(model):
    assert model.transcribe([]) == []
    assert list(model.events([])) == []


def test_many_files_share_the_read_ahead(model, speech, monkeypatch):
    """The later files' finished segments do not keep the first one from being read to its end."""
    monkeypatch.setattr(transcribe, "MAX_AHEAD_SAMPLES", 12 * RATE_HZ)
    sources = [speech, *[speech[: 7 * RATE_HZ]] * 4]
    found = model.transcribe(sources)
    assert len(found) == 5
    assert len({tuple(spans(t)) for t in found[1:]}) == 1


def test_more_files_than_sessions_take_turns(speech):
    with load_model(engine=EngineConfig(prefix_bytes=0, max_sessions=2)) as small:
        found = small.transcribe([speech[: 4 * RATE_HZ]] * 5)
        assert len(found) == 5
        expect_idle(small._client)


def test_files_are_not_opened_far_ahead(model, speech, monkeypatch):
    monkeypatch.setattr(transcribe, "MAX_OPEN_FILES", 3)
    taken = 0

    def endless() -> Iterator[InputItem]:
        nonlocal taken
        while True:
            taken += 1
            yield InputItem(f"{taken}", speech[: 3 * RATE_HZ])

    done = 0
    with closing(model.events(endless())) as events:
        for event in events:
            if isinstance(event, FileDone):
                done += 1
                assert taken <= done - 1 + 3
            if done == 8:
                break
    assert taken <= 10


# --- failures -------------------------------------------------------------------------------------


def test_a_bad_file_fails_alone(model, whole, cities, tmp_path):
    text = tmp_path / "notes.wav"
    text.write_text("this is no audio at all " * 50)
    empty = tmp_path / "empty.wav"
    empty.write_bytes(b"")
    truncated = tmp_path / "cut.wav"
    truncated.write_bytes(cities.read_bytes()[:200_000])
    bad = {1: (text, NotAudio), 2: (tmp_path / "absent.wav", SourceNotFound), 4: (empty, EmptyAudio)}
    sources = [bad[i][0] if i in bad else cities for i in range(6)]
    sources.append(truncated)
    ends = [e for e in model.events(items(*sources)) if isinstance(e, FileDone | FileFailed)]
    assert [e.index for e in ends] == list(range(7))
    for event in ends[:6]:
        if event.index in bad:
            assert type(event.error) is bad[event.index][1]
        else:
            assert spans(event.transcript) == spans(whole)
    assert isinstance(ends[6], FileFailed)
    assert isinstance(ends[6].error, AsrServeError)


def test_transcribe_raises_and_cancels_the_rest(model, cities, tmp_path):
    with pytest.raises(SourceNotFound, match="absent"):
        model.transcribe([cities, tmp_path / "absent.wav", *[cities] * 5])


def test_a_duration_limit_fails_its_own_file(model, speech):
    limits = AudioLimits(max_duration_s=5.0)
    events = model.events(items(speech, speech[: 4 * RATE_HZ]), TranscribeOptions(limits=limits))
    ends = [e for e in events if isinstance(e, FileDone | FileFailed)]
    assert isinstance(ends[0].error, AudioTooLong)
    assert ends[1].transcript.text


def test_errors_of_the_input_iterator_are_raised(model, speech):
    def broken() -> Iterator[InputItem]:
        yield InputItem("good", speech)
        raise OptionError("line 2 is no line")

    with pytest.raises(OptionError, match="line 2"):
        list(model.events(broken()))


def test_closing_early_cancels_and_frees_everything(model, speech):
    events = model.events(items(*[speech] * 8))
    for event in events:
        if isinstance(event, SegmentDone):
            break
    events.close()
    expect_idle(model._client)
    assert list(events) == []


def test_closing_before_the_start_opens_nothing(model):
    model.events(items("/nowhere")).close()


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"langauge": "en"}, "did you mean 'language'"),
        ({"language": "fr"}, "unknown language .* 'fr'.*en"),
        ({"language": 5}, "language"),
        ({"priority": "bulky"}, "did you mean 'bulk'"),
        ({"max_segment_ms": 60_000}, "takes up to 28000 ms"),
        ({"max_segment_ms": 10}, "max_segment_ms"),
        ({"temperatures": (3.0,)}, "temperatures"),
        ({"silence_schedule": [(None, 200)]}, "silence schedule"),
        ({"words": "maybe"}, "words='maybe'. True or False"),
        ({"itn": 1}, "itn=1"),
        ({"speakers": True, "min_speakers": 3, "max_speakers": 2}, "1 to 2"),
        ({"speakers": False, "num_speakers": 2}, "num_speakers with speakers=false"),
        ({"num_speakers": 0}, "num_speakers=0. a whole number from 1 to 32"),
        ({"language": "Frensh"}, "unknown language .* 'frensh'"),
        ({"language": "Englisch"}, "did you mean 'en'"),
        ({"hotwords": ["Ada:"]}, "no weight behind its colon"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_read(model, options, match):
    with pytest.raises(OptionError, match=match):
        model.transcribe("/nowhere/at/all.wav", **options)


@pytest.mark.parametrize("options", [TranscribeOptions, ListenOptions])
def test_a_language_is_chosen_by_code_or_name(options):
    for name, code in (("German", "de"), ("deutsch", "de"), ("DE", "de"), ("de-AT", "de"), ("auto", None)):
        assert options(language=name).language == code
        assert options.of({"language": name}).language == code


@pytest.mark.parametrize("name", ["num_speakers", "min_speakers", "max_speakers"])
def test_a_speaker_count_turns_diarization_on(name):
    wanted = TranscribeOptions.of({name: 2})
    assert (wanted.speakers, getattr(wanted, name)) == (True, 2)


def test_without_vad_every_sample_is_speech(model, speech):
    (results,) = model.transcribe(speech, vad=False)
    assert "best of times" in results.text.lower()
    edges = [edge for s in results.segments for edge in (s.start_samples, s.end_samples)]
    assert edges == sorted(edges)
    assert (edges[0], edges[-1]) == (0, len(speech))


def test_segments_can_be_cut_shorter(model, speech):
    (results,) = model.transcribe(speech, max_segment_ms=5_000)
    assert max(s.end_samples - s.start_samples for s in results.segments) <= 5 * RATE_HZ


def test_a_silence_schedule_may_be_a_list(model, speech, whole):
    (results,) = model.transcribe(speech, silence_schedule=[(float("inf"), 200)])
    assert len(results.segments) >= len(whole.segments)


@pytest.mark.parametrize("sound", ["silence", "hum", "noise"])
def test_no_speech_gives_no_text(model, sound, rng):
    pcm = {
        "silence": silence(10),
        "hum": (0.1 * np.sin(np.arange(10 * RATE_HZ) * 0.02)).astype(np.float32),
        "noise": (0.02 * rng.standard_normal(10 * RATE_HZ)).astype(np.float32),
    }[sound]
    (results,) = model.transcribe(pcm)
    assert (results.text, results.segments) == ("", ())
    assert results.duration_samples == len(pcm)


# --- at the same time -----------------------------------------------------------------------------


def test_threads_share_a_model(model, speech):
    pieces = [speech[i * 3 * RATE_HZ : (i * 3 + 9) * RATE_HZ] for i in range(3)]
    expected = [spans(model.transcribe(piece)[0]) for piece in pieces]
    results: dict[int, list] = {}

    def caller(i: int) -> None:
        results[i] = [spans(t) for t in model.transcribe([pieces[i]] * 3, priority="interactive" if i else "bulk")]

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert results == {i: [expected[i]] * 3 for i in range(3)}


async def test_async_gives_the_same_transcript(model, speech, whole):
    one, two = await asyncio.gather(model.atranscribe(speech), model.atranscribe([speech, speech[:RATE_HZ]]))
    assert spans(one[0]) == spans(two[0]) == spans(whole)
    assert len(two) == 2


async def test_async_raises_what_sync_raises(model):
    with pytest.raises(SourceNotFound):
        await model.atranscribe("/nowhere/at/all.wav")
    with pytest.raises(OptionError, match="language"):
        await model.atranscribe("/nowhere/at/all.wav", langauge="en")


@pytest.mark.slow
async def test_cancelling_the_task_cancels_its_requests(model, speech):
    started, short = threading.Event(), speech[: 6 * RATE_HZ]

    def sources() -> Iterator[np.ndarray]:
        for _ in range(6):
            yield short
        started.set()
        for _ in range(10_000):
            yield short

    task = asyncio.create_task(model.atranscribe(sources()))
    await asyncio.to_thread(started.wait, WAIT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while model._client._sessions:  # the step that was under way ends by itself
        await asyncio.sleep(0.005)


def test_an_event_loop_that_ends_cancels_its_requests(model, speech, caplog):
    async def impatient() -> None:
        async with asyncio.timeout(0.05):
            await model.atranscribe([speech[: 6 * RATE_HZ]] * 20)

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    assert [r.getMessage() for r in caplog.records] == []


# --- memory ---------------------------------------------------------------------------------------


def test_audio_is_freed_as_it_is_transcribed(model, speech, tmp_path):
    """Ten minutes, mostly silence: 38 MB as float32, of which a few seconds are held."""
    path = tmp_path / "long.wav"
    spoken = (speech[: 6 * RATE_HZ] * 32_767).astype(np.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE_HZ)
        for _ in range(5):
            file.writeframes(spoken.tobytes())
            file.writeframes(bytes(2 * 114 * RATE_HZ))
    tracemalloc.start()
    try:
        (results,) = model.transcribe(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert results.duration_samples == 600 * RATE_HZ
    assert len(results.segments) >= 5
    assert "best of times" in results.segments[-1].text.lower() or "best of times" in results.text.lower()
    assert peak_bytes < 16 << 20


def test_a_recording_that_ends_with_a_vad_batch_keeps_its_last_words(model: Model, packaged_speech: Path) -> None:
    piece = parallel.VAD_BATCH_WINDOWS * 512
    sound = read_audio(packaged_speech / "two_cities.wav")[:piece]
    whole = model.transcribe(sound)[0]
    ended = whole.segments[-1].end_samples
    assert ended > piece - 48_000, "the clip must be speech to its end for this to prove anything"
    assert model.transcribe([sound, sound])[1].text == whole.text


def test_a_closed_stream_fails_alone(model: Model, packaged_speech: Path) -> None:
    closed = (packaged_speech / "beckett.wav").open("rb")
    closed.close()
    items = [InputItem("closed", closed), InputItem("good", packaged_speech / "beckett.wav")]
    events = list(model.events(items))
    assert [e.key for e in events if isinstance(e, FileFailed)] == ["closed"]
    assert [e.key for e in events if isinstance(e, FileDone)] == ["good"]
