"""The live bench: its arithmetic on known answers, and a short run of the whole."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench_modules import bench_modules

from asr_serve.audio.endpointing import EndpointConfig, Endpointer
from asr_serve.audio.silence_schedule import STREAMING_SCHEDULE

ROW_KEYS = {"system", "callers", "first_word_p50_ms", "first_word_p95_ms", "final_p50_ms", "final_p95_ms"}
ROW_KEYS |= {"final_p99_ms", "settled_p50_ms", "realtime_misses", "wer", "offline_wer", "partials_per_s"}
ROW_KEYS |= {"others_cpu", "partial_interval_p50_ms", "errors", "server_cpu", "load_cpu", "duty", "seconds", "audio_s"}
S = 16_000

pytest.importorskip("jiwer")
pytest.importorskip("whisper_normalizer")
pytest.importorskip("websockets")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The bench's files as they import each other when run as scripts."""
    with bench_modules(
        "clips", "live", "live_calls", "live_load", "live_peers", "live_report", "live_speech"
    ) as modules:
        yield modules


# What is said, and when -----------------------------------------------------------------------------------------


def test_sessions_fill_their_time_with_whole_clips(bench: SimpleNamespace) -> None:
    plan, lengths = bench.live_speech.plan, [3 * S, 20 * S, 5 * S + 7]
    caller = plan(itertools.cycle([1, 0, 2]), lengths, pause=2 * S, limit=17 * S)
    assert caller.clips == [0, 2, 0]  # 20 s never fits
    assert caller.starts == [0, 80_384, 192_512]  # whole windows of 512: 157 and 219 of them
    assert caller.samples == 192_512 + 3 * S
    assert all(start % 512 == 0 for start in caller.starts)


@pytest.mark.parametrize("limit", [0, 3 * S - 1])
def test_the_shortest_clip_is_spoken_whatever_the_limit(bench: SimpleNamespace, limit: int) -> None:
    caller = bench.live_speech.plan(itertools.cycle([0, 1]), [4 * S, 3 * S], S, limit)
    assert (caller.clips, caller.starts, caller.samples) == ([1], [0], 3 * S)


def test_a_stream_is_clips_and_silence(bench: SimpleNamespace, tmp_path: Path) -> None:
    made, clips = bench.live_speech, [np.full(700, 5, np.int16), np.full(300, 7, np.int16)]
    made.save(tmp_path / "clips.npz", clips)
    restored = made.restore(tmp_path / "clips.npz")
    assert [clip.tolist() for clip in restored] == [clip.tolist() for clip in clips]
    caller = made.Caller([1, 0], [0, 1_024], 1_724)
    whole = made.stream(caller, restored)
    assert whole.tolist() == [7] * 300 + [0] * 724 + [5] * 700
    heard = made.voiced(caller, [[0.2, 0.9, 0.1], [0.5, 0.49]])
    assert heard.tolist() == [True, False, False, True]


def test_packets_are_due_when_their_last_sample_is_spoken(bench: SimpleNamespace) -> None:
    packets = bench.live_speech.packets(4_000)
    assert packets == [(0, 1_600), (1_600, 3_200), (3_200, 4_000)]
    assert [bench.live_speech.due_s(end) for _, end in packets] == [0.1, 0.2, 0.25]
    assert bench.live_speech.begins_s(4, 60) == [0, 2, 4, 6]
    assert bench.live_speech.begins_s(2, 4) == [0, 0.5]


def test_latency_of_a_late_packet_counts_from_when_it_was_due(bench: SimpleNamespace) -> None:
    pace = bench.live_speech.Pace(10.0)
    pace.took(1_600, 10.103, 10.104)  # we were 3 ms late
    pace.took(3_200, 10.2, 10.45)  # not taken for 250 ms
    pace.took(4_800, 10.45, 10.46)  # due at 10.3, when the one before was still waiting
    pace.took(6_400, 10.47, 10.48)  # the same
    pace.took(8_000, 10.5, 10.5)
    assert pace.moments_s == pytest.approx([10.103, 10.2, 10.3, 10.4, 10.5])
    assert pace.waits_s == pytest.approx([0.001, 0.25, 0.16, 0.08, 0.0])
    assert pace.lags_s == pytest.approx([0.003, 0.0, 0.0, 0.0, 0.0])


# What it took ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speech_ms", [320, 4_480, 5_120, 9_600, 10_240, 14_720, 20_000, 31_008, 44_800, 46_016])
def test_the_end_of_a_sentence_is_where_the_engine_decides_it(bench: SimpleNamespace, speech_ms: int) -> None:
    """The arithmetic against the endpointer itself: the same pause, the same deciding window."""
    endpointer = Endpointer(EndpointConfig(schedule=STREAMING_SCHEDULE))
    lead, spoken = 40, speech_ms // 32
    windows = [0.0] * lead + [0.9] * spoken + [0.0] * 80
    closed = (
        (span, place)
        for place, loud in enumerate(windows)
        for span in endpointer.append_probabilities(np.array([loud]))
    )
    span, window = next(closed)
    found = bench.live_calls.endpoint(span.start_samples / 16, span.end_samples / 16)
    assert found == ((lead + spoken) * 32, (window + 1) * 32)


def heard(bench: SimpleNamespace, messages: list[Any], seconds: float, **more: Any) -> dict[str, Any]:
    """A call that began at 100 s on the level's clock, each packet sent when it was due."""
    packets = bench.live_speech.packets(round(seconds * S))
    return {
        "begun_s": 100.0,
        "moments_s": [100.0 + end / S for _, end in packets],
        "waits_ms": [0.2] * len(packets),
        "lags_ms": [1.0] * len(packets),
        "stop_s": 100.0 + seconds,
        "messages": messages,
        "error": None,
        **more,
    }


def message(partial: str = "", *sentences: tuple[str, int, int]) -> dict[str, Any]:
    named = [{"text": text, "start": start, "end": end} for text, start, end in sentences]
    return {"sentences": named, "partial": partial, "is_final": False}


def call(bench: SimpleNamespace, messages: list[Any], **more: Any) -> Any:
    """Speech 0.64-1.92 s and 5.12-6.08 s of 6.4 s: clips at 0 and 4.608 s."""
    caller = bench.live_speech.Caller([0, 1], [0, 73_728], 102_400)
    voiced = np.zeros(200, np.bool_)
    voiced[20:60] = voiced[160:190] = True
    return bench.live_calls.Call(caller, voiced, heard(bench, messages, 6.4, **more))


MESSAGES = [
    (101.3, message("Yellow")),
    (101.8, message("hello there")),
    (102.1, message("Hello there, Ada.")),
    (104.1, message("", ("Hello there, Ada", 390, 2_170))),
    (105.9, message("Good")),
    (106.45, {"sentences": message("", ("Goodbye.", 4_870, 6_330))["sentences"], "is_final": True}),
]


def test_first_word_final_and_settled_of_a_call(bench: SimpleNamespace) -> None:
    made = call(bench, MESSAGES)
    # Onset 0.64 s is in the packet of 0.7 s; onset 5.12 s in that of 5.2 s.
    assert list(made.first_words_ms(0.0)) == [pytest.approx((600, 1_100)), pytest.approx((700, 1_250))]
    # The pause of 2.016 s from 1.92 s is over at 3.936 s: packet of 4.0 s. The second sentence is ended by STOP.
    (first, silence), (second, none) = made.finals_ms(0.0)
    assert (first, silence, second, none) == pytest.approx((100, 2_016, 50, None))
    # Speech ends at 1.92 s, sent with the packet of 2.0 s; its final words, punctuation aside, came as a partial.
    assert list(made.after_speech_ms(0.0)) == [pytest.approx((100, 2_100)), pytest.approx((350, 350))]
    assert made.partials_s() == [[101.3, 101.8, 102.1], [105.9]]
    assert [text.text for text in made.sentences] == ["Hello there, Ada", "Goodbye."]


def test_only_results_while_all_sessions_are_open_count(bench: SimpleNamespace) -> None:
    made = call(bench, MESSAGES)
    assert [len(list(wait(102.5))) for wait in (made.first_words_ms, made.finals_ms, made.after_speech_ms)] == [1, 2, 1]


def test_a_partial_before_the_onset_does_not_count(bench: SimpleNamespace) -> None:
    made = call(bench, [*MESSAGES[:4], (104.3, message("Uh")), *MESSAGES[4:]])
    assert [first for first, _ in made.first_words_ms(0.0)] == pytest.approx([600, 700])


def test_clips_without_words_or_inside_a_sentence(bench: SimpleNamespace) -> None:
    assert list(call(bench, MESSAGES[:4]).first_words_ms(0.0)) == [pytest.approx((600, 1_100)), None]
    one = [(101.3, message("Hello")), (106.5, message("", ("Hello there, Ada. Goodbye.", 390, 6_330)))]
    assert list(call(bench, one).first_words_ms(0.0)) == [pytest.approx((600, 600))]
    nothing = [(104.1, message("", ("", 390, 2_170)))]
    assert list(call(bench, nothing).first_words_ms(0.0)) == [None, None]


@pytest.mark.parametrize(("arrived_s", "end_ms"), [(103.0, 2_170), (104.1, 1_200)])
def test_a_sentence_that_no_silence_ended_was_cut(bench: SimpleNamespace, arrived_s: float, end_ms: int) -> None:
    """It came before its silence was over; or speech goes on where the silence should be."""
    made = call(bench, [(arrived_s, message("", ("Hello", 390, end_ms)))])
    assert list(made.finals_ms(0.0)) == [None]


def row_of(bench: SimpleNamespace, calls: list[Any], system: str = "asr-serve", **more: Any) -> dict[str, Any]:
    found = {"wall_s": 8.0, "server_cpu": 1.2345, "load_cpu": 0.0567, "others_cpu": 0.5, "rss_mib": 300.4, **more}
    row: dict[str, Any] = bench.live_report.row(system, calls, found, ["hello there ada", "good day"], 6.0)
    return row


def test_a_row(bench: SimpleNamespace) -> None:
    row = row_of(bench, [call(bench, MESSAGES), call(bench, MESSAGES)])
    assert row.keys() >= ROW_KEYS
    assert (row["first_word_p50_ms"], row["first_word_p95_ms"], row["first_right_p50_ms"]) == (600.0, 700.0, 1_100.0)
    assert (row["final_p50_ms"], row["final_p99_ms"], row["silence_mean_ms"]) == (50.0, 100.0, 2_016.0)
    assert (row["settled_p50_ms"], row["after_speech_p95_ms"]) == (100.0, 2_100.0)
    assert (row["wer"], row["realtime_misses"], row["cut"], row["unheard"], row["errors"]) == (40.0, 0, 0, 0, {})
    assert (row["partials_per_s"], row["partial_interval_p50_ms"]) == (1.0, 300.0)
    assert (row["server_cpu"], row["load_cpu"], row["duty"], row["audio_s"]) == (1.234, 0.057, 0.35, 12.8)
    assert row["callers"] == 2
    assert bench.live_report.holds(row)


def test_what_is_missed(bench: SimpleNamespace) -> None:
    late = [*MESSAGES[:3], (105.1, MESSAGES[3][1]), *MESSAGES[4:]]
    waits = [0.0] * 60 + [150.0, 101.0, 99.0, 1_500.0]
    lost = {"error": "closed 1011", "stop_s": None}
    row = row_of(bench, [call(bench, late), call(bench, MESSAGES, waits_ms=waits), call(bench, [], **lost)])
    assert row["misses"] == {"late_finals": 1, "late_packets": 3, "lost_sessions": 1}
    assert (row["realtime_misses"], row["errors"]) == (5, {"closed 1011": 1})
    assert not bench.live_report.holds(row)
    peer = row_of(bench, [call(bench, late), call(bench, MESSAGES, waits_ms=waits)], system="vosk", load_cpu=None)
    assert peer["misses"] == {"late_finals": 0, "late_packets": 1, "lost_sessions": 0}
    assert (peer["final_p95_ms"], peer["load_cpu"]) == (None, None)


def test_callers_of_a_burst_who_were_refused_are_counted_and_not_measured(bench: SimpleNamespace) -> None:
    made = bench.live.Bench.__new__(bench.live.Bench)
    made.args = bench.live.parse(["--data", "x", "--at-once", "--retry", "--seconds", "6"])
    made.speech = [SimpleNamespace(text="hello there ada"), SimpleNamespace(text="good day")]
    made.probabilities = [[1.0] * 40, [1.0] * 30]
    callers = [call(bench, []).caller] * 3
    calls = [heard(bench, MESSAGES, 6.4, retries=2), heard(bench, [], 6.4, error="at_capacity", stop_s=None)]
    calls.append(heard(bench, [], 6.4, begun_s=109.0))
    found = {"callers": calls, "wall_s": 8.0, "server_cpu": 1.0, "load_cpu": 0.0, "others_cpu": 0.0, "rss_mib": 1.0}
    row = made.row("asr-serve", callers, found)
    assert set(bench.live_report.KEYS) <= row.keys()
    assert (row["callers"], row["refused"], row["retries"], row["admitted"]) == (3, 1, 2, [0, 2])
    assert (row["errors"], row["admitted_p95_s"]) == ({}, 109.0)
    assert row["final_p50_ms"] is not None, "finals before the last caller was admitted count"

    asked: list[Any] = []
    made.callers = lambda count, seconds: [f"caller {number}" for number in range(count)]
    made.work = lambda script, job: asked.extend(job["callers"]) or {"failed": "enough"}
    bench.live.alone(made, [row])
    assert asked == ["caller 0", "caller 2"], "the WER of whole recordings is that of the same callers"


@pytest.mark.parametrize("line", ["--at-once --find-max", "--retry", "--retry --find-max"])
def test_options_that_contradict_each_other(bench: SimpleNamespace, line: str) -> None:
    with pytest.raises(SystemExit):
        bench.live.parse(["--data", "x", *line.split()])


def test_the_highest_level_that_holds(bench: SimpleNamespace) -> None:
    def search(limit: int, tried: dict[int, bool]) -> tuple[int, list[int]]:
        asked: list[int] = []

        def holds(count: int) -> bool:
            asked.append(count)
            return count <= limit

        return bench.live.most(holds, tried), asked

    assert search(20, {}) == (20, [1, 2, 4, 8, 16, 32, 24, 20, 22, 21])
    assert search(20, {1: True, 8: True, 32: False}) == (20, [20, 26, 23, 21])
    assert search(100, {32: True})[0] in range(94, 101)  # to a sixteenth
    assert search(0, {}) == (0, [1])
    assert search(3, {8: False})[0] == 3
    assert search(10**9, {})[0] == bench.live.MOST_CALLERS


def test_levels_and_what_is_tried_beyond_them(bench: SimpleNamespace) -> None:
    def levels(system: str, limit: int, line: str) -> dict[int, Any]:
        def level(count: int) -> dict[str, Any]:
            blank = bench.live_report.blank(system, count)
            return {**blank, "final_p95_ms": 9.0, "first_word_p50_ms": 9.0, "realtime_misses": count > limit}

        rows = bench.live.levels(system, level, bench.live.parse(["--data", "x", *line.split()]))
        return {row["callers"]: row.get("skipped") or bench.live_report.holds(row) for row in rows}

    assert levels("asr-serve", 4, "--callers 1,8,32") == {1: True, 8: False, 32: False}
    assert levels("vosk", 4, "--callers 32,8,1") == {1: True, 8: False, 32: "8 were too many already"}
    found = levels("vosk", 5, "--callers 1,8,32 --find-max")
    assert found == {1: True, 4: True, 5: True, 6: False, 8: False, 32: "8 were too many already"}
    assert levels("asr-serve", 3, "--callers 1 --find-max") == {1: True, 2: True, 3: True, 4: False}


def test_the_summary_and_the_table(bench: SimpleNamespace) -> None:
    made = bench.live_report
    good = {"final_p95_ms": 300.0, "first_word_p50_ms": 700.0, "realtime_misses": 0}
    rows = [{**made.blank("asr-serve", count), **good} for count in (1, 8, 32)]
    rows[2] |= {"final_p95_ms": 600.0}
    rows += [{**made.blank("vosk", 8), "realtime_misses": 0}]
    rows += [{**made.blank("vosk", 32), "skipped": "why"}, {**made.blank("gone", 1), "skipped": "no such package"}]
    assert made.summarize(rows) == [
        {"system": "asr-serve", "protocol": None, "held_callers": 8, "broken_callers": 32},
        {"system": "vosk", "protocol": None, "held_callers": 8, "broken_callers": None},
    ]
    shown = made.table(rows)
    assert "gone 1: skipped: no such package" in shown
    assert len(shown.splitlines()) == 1 + len(rows) + 2


def test_a_plot(bench: SimpleNamespace, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, blank = importlib.import_module("live_plot"), bench.live_report.blank
    rows = [
        {**blank("asr-serve", count), "final_p50_ms": 90.0, "final_p95_ms": 200.0, "final_p99_ms": 300.0}
        | {"first_word_p50_ms": 600.0, "first_word_p95_ms": 800.0, "realtime_misses": count // 8}
        for count in (1, 2, 8)
    ]
    rows += [{**blank("vosk", 8), "first_word_p50_ms": 500.0, "realtime_misses": 0}]
    rows += [{**blank("moonshine-voice", 8), "skipped": "why"}]
    found = {"rows": rows, "machine": {"gpu": None, "cpu": "a processor", "threads": 2}}
    (tmp_path / "live.json").write_text(json.dumps(found))
    plot.main(str(tmp_path / "live.json"), str(tmp_path / "img" / "live.png"))
    assert (tmp_path / "img" / "live.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "line", ["--callers 0", "--callers 1,x", "--peers nobody", "--seconds 0", "--pause 0", "--clips 0"]
)
def test_bad_live_options(bench: SimpleNamespace, line: str) -> None:
    with pytest.raises(SystemExit):
        bench.live.parse(["--data", "x", *line.split()])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_short_run_of_the_whole(bench: SimpleNamespace, speech_data: Path, tmp_path: Path) -> None:
    data, found_at = speech_data / "librispeech-test-other", tmp_path / "out" / "live.json"
    if not data.is_dir():
        pytest.skip(f"no {data.name} in {speech_data}")
    line = f"--data {data} --callers 2 --seconds 8 --device cpu --json {found_at}"
    assert bench.live.main(line.split()) == 0
    found = json.loads(found_at.read_text())
    assert list(found) == ["bench", "machine", "settings", "rows", "summary"]
    (row,) = found["rows"]
    assert row.keys() >= ROW_KEYS
    assert (row["system"], row["callers"], row["errors"]) == ("asr-serve", 2, {})
    assert row["misses"]["lost_sessions"] == 0 <= row["misses"]["late_packets"]
    assert row["sentences"] >= 2
    assert row["first_word_p50_ms"] > 0
    assert 0 < row["final_p50_ms"] <= row["final_p95_ms"] <= row["final_p99_ms"]
    assert row["offline_wer"] < 60
    assert row["wer"] < 60
