"""`asr-serve eval`: scores, lists, and runs of a model of ours, of our server, and of one that is killed in between."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
import wave
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
from children import Child
from hypothesis import given, settings
from hypothesis import strategies as st
from running_server import Running
from typer.testing import CliRunner

from asr_serve.api.cli import app
from asr_serve.errors import OptionError, SourceNotFound, UnsupportedOption
from asr_serve.evaluation.store import EvaluatedDataset, EvaluationResult, EvaluationStore, RunSettings
from asr_serve.governance.evidence import GovernedModel, check_evidence
from asr_serve.governance.policy import Requirements
from asr_serve.models.registry import asr_card
from asr_serve.types import SpeakerTurn
from asr_serve_tools.evaluate import evaluated_systems
from asr_serve_tools.evaluate.clip_lists import read_clips
from asr_serve_tools.evaluate.clip_scores import guess_language, score_text, text_differences
from asr_serve_tools.evaluate.diarization_error import best_assignment, diarization_error, read_rttm
from asr_serve_tools.evaluate.evaluated_systems import check_key, check_system, open_system
from asr_serve_tools.evaluate.evaluation_run import RunOptions, evaluate
from asr_serve_tools.evaluate.rate_differences import differences_to_best
from asr_serve_tools.evaluate.wer import cer, wer

pytest.importorskip("jiwer")
pytest.importorskip("whisper_normalizer")

MODEL = "moonshine-tiny-en"
TEXTS = (
    "It was the best of times, it was the worst of times,",
    "it was the age of wisdom, it was the age of foolishness,",
    "it was the epoch of belief, it was the epoch of unbelief,",
)
WAIT_S = 120.0
words = st.lists(st.sampled_from(["a", "cat", "sat", "Mr. Smith", "on", "21", "colours"]), max_size=12).map(" ".join)


@pytest.fixture(scope="module")
def folder(packaged_speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three clips of the packaged reading."""
    made = tmp_path_factory.mktemp("reading")
    with wave.open(str(packaged_speech / "two_cities.wav")) as long:
        for name in "abc":
            with wave.open(str(made / f"{name}.wav"), "wb") as short:
                short.setparams(long.getparams())
                short.writeframes(long.readframes(4 * long.getframerate()))
    write_list(made)
    return made


def write_list(folder: Path) -> None:
    lines = (f"{name}.wav\t{text}\n" for name, text in zip("abc", TEXTS, strict=True))
    (folder / "transcripts.tsv").write_text("".join(lines), "utf-8")


# --- scores -----------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(words.filter(bool), words), min_size=1, max_size=5))
def test_clips_add_up_to_the_rates_of_the_corpus(pairs: list[tuple[str, str]]) -> None:
    scores = [score_text(reference, hypothesis, "en") for reference, hypothesis in pairs]
    references, hypotheses = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    corpus, letters = wer(references, hypotheses), cer(references, hypotheses)
    assert (sum(s.word_errors or 0 for s in scores), sum(s.words or 0 for s in scores)) == (
        corpus.errors,
        corpus.reference,
    )
    assert sum(s.character_errors for s in scores) == letters.errors
    assert sum(s.characters for s in scores) == letters.reference


def test_words_of_a_clip_without_speech_are_insertions() -> None:
    score = score_text("", "thank you", "en")
    assert (score.words, score.word_errors, score.characters, score.character_errors) == (0, 2, 0, 9)


def test_chinese_is_counted_in_characters() -> None:
    score = score_text("广州市房地产,中介", "广州 市房地长中介吗", "zh")
    assert (score.words, score.word_errors, score.characters, score.character_errors) == (None, None, 8, 2)


@pytest.mark.parametrize(
    ("texts", "language"),
    [(["广州市房地产中介", "ok"], "zh"), (["今日はいい天気です"], "ja"), (["guten Tag"], "en"), ([], "en")],
)
def test_the_script_tells_the_language(texts: list[str], language: str) -> None:
    assert guess_language(texts) == language


def test_only_english_loses_fillers() -> None:
    """`um` is a filler in English, and "at" or "around" in German."""
    assert score_text("um sechs Uhr", "sechs Uhr", "de").word_errors == 1
    assert score_text("um six o'clock", "six o'clock", "en").word_errors == 0
    assert score_text("Grüße, Jürgen!", "grüße jürgen", "de").word_errors == 0
    assert score_text("Grüße", "Gruße", "de").character_errors == 1


def test_differences_are_marked() -> None:
    assert [tuple(part) for part in text_differences("the cat sat on mats", "the dog sat on big mats", "en")] == [
        ("equal", ("the",), ("the",)),
        ("substitute", ("cat",), ("dog",)),
        ("equal", ("sat", "on"), ("sat", "on")),
        ("insert", (), ("big",)),
        ("equal", ("mats",), ("mats",)),
    ]
    assert [tuple(part) for part in text_differences("gone", "", "en")] == [("delete", ("gone",), ())]
    assert text_differences("", "", "en") == []


def test_hotwords_count_where_they_are_said() -> None:
    score = score_text("Ada Lovelace met Babbage and Babbage", "ada loveless met babbage and cabbage", "en",
                       ["Babbage", "Ada Lovelace", "Turing"])  # fmt: skip
    assert (score.hotwords, score.hotwords_found) == (3, 1)


# --- speakers ---------------------------------------------------------------------------------------------


def turn(speaker: str, start: int, end: int) -> SpeakerTurn:
    return SpeakerTurn(speaker, start, end)


def test_diarization_error_known_by_hand() -> None:
    said = [turn("A", 0, 100), turn("B", 80, 200)]  # 220 of speakers' time, 20 of them both at once
    assert diarization_error(said, said, 200) == (220, 0)
    assert diarization_error(said, [turn("x", 80, 200), turn("y", 0, 100)], 200) == (220, 0)
    assert diarization_error(said, [], 200) == (220, 220)
    assert diarization_error(said, [turn("x", 0, 200)], 200) == (220, 100)  # B is x: A's 80 confused, 20 missed
    assert diarization_error([], [turn("x", 0, 50)], 40) == (0, 40)
    assert diarization_error(said, [*said, turn("z", 150, 400)], 200) == (220, 50)  # nothing counts behind the end


def test_the_best_assignment_is_the_best_of_all() -> None:
    chance = random.Random(20)
    for _ in range(60):
        rows, columns = chance.randint(1, 4), chance.randint(1, 5)
        weights = [[chance.randint(0, 30) for _ in range(columns)] for _ in range(rows)]
        wide = weights if rows <= columns else [list(column) for column in zip(*weights, strict=True)]
        best = max(
            sum(row[place] for row, place in zip(wide, order, strict=True))
            for order in itertools.permutations(range(len(wide[0])), len(wide))
        )
        assert best_assignment(weights) == best
    assert best_assignment([]) == 0


# --- lists ------------------------------------------------------------------------------------------------


def test_what_makes_another_dataset(folder: Path, tmp_path: Path) -> None:
    found = read_clips(folder)
    assert (found.dataset.name, found.dataset.language, found.dataset.clips) == (folder.name, "en", 3)
    assert [(clip.path, clip.reference, clip.turns) for clip in found.clips] == [
        (f"{name}.wav", text, None) for name, text in zip("abc", TEXTS, strict=True)
    ]
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    digest = found.dataset.sha256
    assert read_clips(copy).dataset.sha256 == digest
    assert read_clips(folder, most_clips=2).dataset.sha256 != digest
    with (copy / "b.wav").open("ab") as file:
        file.write(b"\0\0")
    assert read_clips(copy).dataset.sha256 != digest


def test_lists_of_other_kinds(folder: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "list.jsonl"
    rows = [{"audio_filepath": str(folder / f"{n}.wav"), "text": t} for n, t in zip("abc", TEXTS, strict=True)]
    manifest.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    assert [clip.reference for clip in read_clips(manifest).clips] == list(TEXTS)
    (tmp_path / "wav.scp").write_text(f"one {folder / 'a.wav'}\n", "utf-8")
    (tmp_path / "text").write_text("one it was\n", "utf-8")
    assert [(clip.file, clip.reference) for clip in read_clips(tmp_path / "wav.scp").clips] == [
        (folder / "a.wav", "it was")
    ]
    (tmp_path / "a.wav").write_bytes((folder / "a.wav").read_bytes())
    (tmp_path / "a.rttm").write_text("SPEAKER other 1 0.5 1.0 <NA> <NA> ada <NA> <NA>\n", "utf-8")
    (clip,) = read_clips(tmp_path).clips
    assert (clip.path, clip.reference, clip.turns) == ("a.wav", None, (turn("ada", 8_000, 24_000),))
    (tmp_path / "a.rttm").write_text("SPEAKER other 1 half\n", "utf-8")
    with pytest.raises(OptionError, match=r"a\.rttm, line 1"):
        read_rttm(tmp_path / "a.rttm")


@pytest.mark.parametrize(
    ("table", "kind", "message"),
    [
        (None, SourceNotFound, "no transcripts.tsv"),
        ("a.wav it was\n", OptionError, "line 1"),
        ("\n", OptionError, "lists no clip"),
        ("gone.wav\tit was\n", SourceNotFound, "gone.wav"),
        ("a.wav\tit\na.wav\twas\n", OptionError, "twice"),
    ],
)
def test_lists_that_are_wrong(tmp_path: Path, table: str | None, kind: type[Exception], message: str) -> None:
    (tmp_path / "a.wav").write_bytes(b"")
    if table is not None:
        (tmp_path / "transcripts.tsv").write_text(table, "utf-8")
    with pytest.raises(kind, match=message):
        read_clips(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("moonshine-tiny-xx", "moonshine-tiny"),
        ("moonshine-tiny-en@int4", "int8, dynamic, fp32, bf16"),
        ("hibari", "hibari"),
        ("http://localhost:8000/v1", "names no model"),
        ("vosk:", "names no model"),
        ("kaldi:tiny", "faster-whisper:NAME"),
    ],
)
def test_systems_that_are_none(name: str, message: str) -> None:
    done = CliRunner().invoke(app, ["eval", "run", "--systems", name, "--data", "nowhere"])
    assert (done.exit_code in (1, 2), message in done.stderr) == (True, True), done.stderr


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluated_systems, "_PACKAGES", {"vosk": ("no_such_module", "vosk")})
    with pytest.raises(UnsupportedOption, match="pip install vosk"):
        check_system("vosk:small-en")


# --- runs -------------------------------------------------------------------------------------------------


def bench_result(texts: list[str], audio_s: float) -> dict[str, object]:
    """A result as bench/worker.py writes it."""
    zeros = dict.fromkeys(("load_s", "first_text_s", "peak_mib"), 0)
    return {"facts": {}, "walls_s": [1.0], "cpus_s": [1.0], "audio_s": audio_s, "texts": texts, **zeros}


@pytest.mark.one_server("the engine of this process is asked beside it")
def test_the_numbers_of_library_and_server_are_the_benchs(folder: Path, server: Running, tmp_path: Path) -> None:
    path = tmp_path / "e.sqlite"
    url, library = f"{server.url}/v1#{MODEL}", f"{MODEL}@none"  # both with the products of the tests' servers
    command = ["eval", "run", "-s", f"{library},{url}", "-d", str(folder), "--store", str(path), "--jobs", "2"]
    done = CliRunner().invoke(app, [*command, "--cost-per-hour", "0.5", "--quiet"])
    assert done.exit_code == 0, done.stderr
    with EvaluationStore(path) as store:
        remote, local = store.summaries()
        rows = {each.run_id: store.results(each.run_id) for each in (remote, local)}
    assert (local.system, local.model, local.clips, local.failed, local.finished) == (library, MODEL, 3, 0, True)
    card, requires = asr_card(MODEL), Requirements(dataset=local.dataset, wer_percent_below=60.0, clips_at_least=3)
    as_served = GovernedModel(MODEL, card.weights_revision, card.licence, server.engines.get(MODEL).quantization)
    # The server tells which weights it has: both are evidence of what it serves.
    assert (remote.model, remote.revision, remote.quantization) == (MODEL, local.revision, local.quantization)
    for summary in (local, remote):
        decision = check_evidence(requires, as_served, [summary], time.time())
        assert (decision.refusals, decision.summaries) == ((), (summary,))
    for summary in (local, remote):  # the server finds speech first, the library takes clips whole
        assert summary.wer is not None
        assert summary.wer < 60
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))
    try:
        report = importlib.import_module("report")
    finally:
        sys.path.pop(0)
    for summary in (local, remote):
        result = bench_result([row.hypothesis or "" for row in rows[summary.run_id]], summary.audio_s)
        assert round(summary.wer or 0, 2) == report.row("x", [result], list(TEXTS))["wer"]
    for summary in (local, remote):
        assert summary.rtfx is not None
        assert summary.cost_per_audio_hour == pytest.approx(0.5 / summary.rtfx)
        assert all(row.seconds is not None for row in rows[summary.run_id])
    # Again: nothing is computed, no figure changes.
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0
    assert "0 clips done, 3 already there" in again.stderr
    listed = json.loads(CliRunner().invoke(app, ["eval", "list", "--store", str(path), "--json"]).stdout)
    assert [each["wer"] for each in listed["evaluations"]] == [remote.wer, local.wer]


@pytest.mark.one_server("its engine is this process' own")
def test_live_words_have_times(folder: Path, server: Running, tmp_path: Path) -> None:
    clips = read_clips(folder, most_clips=1)
    with EvaluationStore(tmp_path / "e.sqlite", create=True) as store:
        system = open_system(f"{server.url}/v1#{MODEL}")
        outcome = evaluate(store, system, clips, RunOptions(live=True))
        (row,) = store.results(outcome.run.run_id)
        (summary,) = store.summaries()
        refused = evaluate(store, system, clips, RunOptions(live=True, hotwords=("你好",)))
        (failed,) = store.results(refused.run.run_id)
    assert "hotword" in (failed.error or ""), "they are sent"
    card = asr_card(MODEL)
    requires = Requirements(dataset=summary.dataset, final_p95_ms_below=60_000.0)
    recorded = msgspec.structs.replace(summary, live=False)
    as_served = GovernedModel(MODEL, card.weights_revision, card.licence, server.engines.get(MODEL).quantization)
    decision = check_evidence(requires, as_served, [recorded, summary], time.time())
    assert decision.summaries == (recorded, summary), "what was measured live is evidence for a policy"
    assert row.error is None
    assert row.first_word_ms is not None
    assert row.first_word_ms > 0
    assert (summary.live, summary.rtfx, summary.first_word_p50_ms) == (True, None, row.first_word_ms)
    assert summary.wer is not None
    assert summary.wer < 50


def test_live_needs_a_server(folder: Path, tmp_path: Path) -> None:
    class Local(evaluated_systems.AsrSystem):
        info = evaluated_systems.EvaluatedSystem("tiny", "tiny")

        def transcribe(self, clips: object, request: object) -> Iterator[evaluated_systems.ClipAnswer]:
            raise AssertionError

    with (
        EvaluationStore(tmp_path / "e.sqlite", create=True) as store,
        pytest.raises(UnsupportedOption, match="asr-serve serve --model tiny"),
    ):
        evaluate(store, Local(), read_clips(folder), RunOptions(live=True))


class Vendor:
    """Somebody's server with OpenAI's route: it tells how much it was asked of each file, and answers `most` requests;
    the others wait. A second request of one file is how a repeated clip would show. `refusal`: what all get at once."""

    def __init__(self, most: int, refusal: bytes | None = None) -> None:
        self.asked: Counter[int] = Counter()
        self._answers = threading.Semaphore(most)
        vendor = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = len(self.rfile.read(int(self.headers["Content-Length"])))
                vendor.asked[size] += 1
                if refusal is None and not vendor._answers.acquire(timeout=WAIT_S):
                    return
                body = b'{"text": "it was"}' if size % 2 == 0 else b'{"text": "it was the"}'
                body = body if refusal is None else refusal
                self.send_response(200 if refusal is None else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Silent."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1#theirs"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer_all(self) -> None:
        for _ in range(100):
            self._answers.release()

    def close(self) -> None:
        self.answer_all()
        self.server.shutdown()
        self.server.server_close()


def test_a_killed_run_goes_on(folder: Path, tmp_path: Path) -> None:
    clips = tmp_path / "clips"
    clips.mkdir()
    for number, name in enumerate("abc"):
        data = (folder / f"{name}.wav").read_bytes()
        (clips / f"{name}.wav").write_bytes(data + b"\0" * number)  # sizes by which the vendor tells them apart
    write_list(clips)
    path = tmp_path / "e.sqlite"
    vendor = Vendor(most=2)  # the clip that warms up, and one more
    try:
        command = ["eval", "run", "-s", vendor.url, "-d", str(clips), "--store", str(path), "--jobs", "1", "-q"]
        source = "import sys; from asr_serve.api.cli import app; app()"
        with Child([sys.executable, "-c", source, *command], env=dict(os.environ)) as child:
            end_s = time.monotonic() + WAIT_S
            while done_clips(path) < 1:
                assert child.poll() is None
                assert time.monotonic() < end_s
                time.sleep(0.02)
            child.send_signal(signal.SIGKILL)
            child.wait()
        with EvaluationStore(path) as store:
            (first,) = store.summaries()
        assert (first.clips, first.finished, first.rtfx) == (1, False, None)
        vendor.asked.clear()
        vendor.answer_all()
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.stderr
        with EvaluationStore(path) as store:
            (second,) = store.summaries()
        assert (second.run_id, second.clips, second.finished, second.rtfx) == (first.run_id, 3, True, None)
        assert sorted(vendor.asked.values()) == [1, 2]  # one of the two clips was the one to warm up with
    finally:
        vendor.close()


def done_clips(path: Path) -> int:
    try:
        with EvaluationStore(path) as store:
            return sum(each.clips for each in store.summaries())
    except (OptionError, SourceNotFound):  # not made yet
        return 0


def test_a_server_that_is_not_there(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "e.sqlite"
    vendor = Vendor(most=0)
    vendor.close()
    done = CliRunner().invoke(app, ["eval", "run", "-s", vendor.url, "-d", str(folder), "--store", str(path), "-q"])
    assert (done.exit_code, "no server answers" in done.stderr, path.exists()) == (1, True, False), done.stderr


def test_clips_that_fail_are_told_with_their_reason(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "e.sqlite"
    vendor = Vendor(most=0, refusal=b'{"error": {"message": "no such model", "code": "model_not_found"}}')
    try:
        done = CliRunner().invoke(app, ["eval", "run", "-s", vendor.url, "-d", str(folder), "--store", str(path), "-q"])
    finally:
        vendor.close()
    assert done.exit_code == 1
    assert "and 2 more: 404: no such model" in done.stderr
    assert "3 clips failed" in done.stderr
    with EvaluationStore(path) as store:
        (summary,) = store.summaries()
    assert (summary.clips, summary.failed, summary.wer) == (0, 3, None)


def test_one_key_is_for_the_servers_of_one_host() -> None:
    here, there = "http://127.0.0.1:8000/v1#a", "https://api.example.org/v1#b"
    check_key([here, there, MODEL], None)
    check_key([here, "http://127.0.0.1:9000/v1#a", MODEL], "secret")
    with pytest.raises(OptionError, match=r"127\.0\.0\.1, api\.example\.org"):
        check_key([here, there], "secret")


class Batched(evaluated_systems.AsrSystem):
    """A system that works on all clips together, and tells how many it was asked each time. `most`: answers before it
    ends, as a process does that is killed."""

    info = evaluated_systems.EvaluatedSystem("batched", "batched")
    batches = True

    def __init__(self, most: int = 1_000) -> None:
        self.asked, self._most = list[int](), most

    def transcribe(
        self, clips: Sequence[evaluated_systems.ClipInput], request: object
    ) -> Generator[evaluated_systems.ClipAnswer, None, None]:
        self.asked.append(len(clips))
        for place in range(len(clips)):
            self._most -= 1
            if self._most < 0:
                raise KeyboardInterrupt
            yield evaluated_systems.ClipAnswer(place, "it was")


def test_a_pass_warms_up_before_the_one_that_is_timed(folder: Path, tmp_path: Path) -> None:
    with EvaluationStore(tmp_path / "e.sqlite", create=True) as store:
        system = Batched()
        evaluate(store, system, read_clips(folder), RunOptions())
        assert system.asked == [3, 3, 1, 1, 1, 1]  # then each clip alone, the first one twice
        (summary,) = store.summaries()
        assert summary.rtfx is not None
        assert summary.latency_p95_s is not None


def test_a_run_that_is_killed_while_clips_are_timed_alone_times_the_others(folder: Path, tmp_path: Path) -> None:
    with EvaluationStore(tmp_path / "e.sqlite", create=True) as store:
        with pytest.raises(KeyboardInterrupt):
            evaluate(store, Batched(most=8), read_clips(folder), RunOptions())
        (first,) = store.summaries()
        assert (first.clips, first.finished) == (3, False)
        system = Batched()
        evaluate(store, system, read_clips(folder), RunOptions())
        assert system.asked == [1, 1, 1]
        (second,) = store.summaries()
        assert (second.finished, second.rtfx) == (True, first.rtfx)
        assert all(row.seconds is not None for row in store.results(second.run_id))
        evaluate(store, system, read_clips(folder), RunOptions())
        assert system.asked == [1, 1, 1], "nothing is left"


def test_the_difference_of_two_systems_is_told_clip_by_clip(tmp_path: Path) -> None:
    """Clips differ widely, and one system has one error more in each: rates overlap, their difference is certain."""
    dataset = EvaluatedDataset("calls", "/calls", "0" * 64, "en", 20)
    with EvaluationStore(tmp_path / "e.sqlite", create=True) as store:
        for name, more in (("one", 0), ("two", 1), ("three", 0)):
            run = store.begin_run(evaluated_systems.EvaluatedSystem(name, name), dataset, RunSettings())
            for clip in range(20):
                # the third has as many errors as the first, two more here and two fewer there
                errors = clip % 7 + more + (0 if name != "three" else 2 * (-1) ** clip)
                store.add_result(run.run_id, EvaluationResult(f"{clip:02}", 4.0, "a", "b", 20, errors, 80, errors))
        found = {each.system: each for each in differences_to_best(store, store.summaries())}
        summaries = {each.system: each for each in store.summaries()}
    best = ({"one", "three"} - set(found)).pop()
    two, same = found["two"], found[({"one", "three"} - {best}).pop()]
    assert (two.points, two.measure, two.clips) == (5.0, "WER", 20)
    assert (same.points, same.is_certain) == (0.0, False)
    assert same.low < 0 < same.high
    assert summaries["two"].wer_low < summaries["one"].wer_high, "the intervals overlap"
    if best == "one":
        assert (two.low, two.high, two.is_certain) == (5.0, 5.0, True)


def test_weights_of_hotwords_are_not_part_of_them(folder: Path, tmp_path: Path) -> None:
    system = Batched()
    system.takes_hotwords = True
    with EvaluationStore(tmp_path / "e.sqlite", create=True) as store:
        outcome = evaluate(store, system, read_clips(folder), RunOptions(hotwords=("it was:3", "wisdom")))
        rows = store.results(outcome.run.run_id)
    assert [(row.hotwords, row.hotwords_found) for row in rows] == [(2, 1), (3, 1), (2, 1)]
