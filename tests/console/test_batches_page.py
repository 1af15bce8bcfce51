"""The page of batches as its visitors have it: a real server with a queue, and a Chromium that uploads."""

from __future__ import annotations

import io
import json
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from console_page import KEY, Cable, Served, Visitor, browsers, devices_and_schemes, needs_axe, words

TRANSCRIPTIONS = "/v1/audio/transcriptions"
OTHER_KEY = "k-other"
DONE = ".batch .pill[data-state=completed]"
COUNT_LOOKS = """() => {
  window.looks = 0;
  const ask = window.fetch.bind(window);
  window.fetch = (address, ...given) => {
    if (String(address).includes("v1/batches")) window.looks++;
    return ask(address, ...given);
  };
}"""


def flags(settings: dict[str, Any]) -> list[str]:
    return [flag for name, value in settings.items() for flag in ("--set", f"{name}={value}")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("batches")
    server = Served(folder / "log", *flags({"batch.folder": folder / "queue"}))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """It asks for a key, and has room for three files of each."""
    folder = tmp_path_factory.mktemp("small")
    settings = {"batch.folder": folder / "queue", "batch.files_per_key": 3, "api_keys": f"{KEY},{OTHER_KEY}"}
    server = Served(folder / "log", *flags(settings))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser(packaged_speech: Path) -> Iterator[Any]:
    with browsers() as launch:
        yield launch(packaged_speech / "beckett.wav")


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visitor]]:
    """`visit(url, key)`: a new visitor at the page of batches there."""
    visitors: list[Visitor] = []

    def come(url: str, key: str = "", **context: Any) -> Visitor:
        visitors.append(Visitor(browser, **context))
        page = visitors[-1].page
        if key:
            page.add_init_script(f"sessionStorage.setItem('asr-serve.key', sessionStorage['asr-serve.key'] ?? '{key}')")
        page.goto(f"{url}/batches")
        return visitors[-1]

    yield come
    for visitor in visitors:
        visitor.context.close()


@pytest.fixture
def calls(packaged_speech: Path, tmp_path: Path) -> Path:
    """A folder with two recordings, a text that pretends to be one, and notes."""
    folder = tmp_path / "calls"
    (folder / "monday").mkdir(parents=True)
    shutil.copy(packaged_speech / "beckett.wav", folder / "first.wav")
    shutil.copy(packaged_speech / "beckett.wav", folder / "monday" / "second.wav")
    (folder / "broken.wav").write_text("this is no audio\n" * 20)
    (folder / "notes.md").write_text("notes")
    return folder


def ask(served: Served, method: str, path: str, key: str = "", **body: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = httpx.request(method, f"{served.url}{path}", headers=headers, timeout=30, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def submit(served: Served, lines: bytes, window: str = "24h", name: str = "", key: str = "") -> str:
    """Submits a batch past the page; returns its id."""
    files = {"file": ("lines.jsonl", lines)}
    file_id = ask(served, "POST", "/v1/files", key, data={"purpose": "batch"}, files=files)["id"]
    body = {"input_file_id": file_id, "endpoint": TRANSCRIPTIONS, "completion_window": window}
    return str(
        ask(served, "POST", "/v1/batches", key, json=body | ({"metadata": {"name": name}} if name else {}))["id"]
    )


def long_lines(served: Served, recording: Path, count: int, key: str = "") -> bytes:
    """So many requests of one recording."""
    files = {"file": (recording.name, recording.read_bytes())}
    file_id = ask(served, "POST", "/v1/files", key, data={"purpose": "batch"}, files=files)["id"]
    return b"\n".join(
        json.dumps(
            {"custom_id": f"part {n}", "method": "POST", "url": TRANSCRIPTIONS, "body": {"file": file_id}}
        ).encode()
        for n in range(count)
    )


def card(me: Visitor, name: str) -> Any:
    return me.page.locator(f".batch:has(h3:text-is('{name}'))")


def downloaded(me: Visitor, button: Any) -> tuple[str, bytes]:
    with me.page.expect_download() as coming:
        button.click()
    return coming.value.suggested_filename, Path(coming.value.path()).read_bytes()


def test_a_folder_becomes_transcripts(served, visit, calls, packaged_speech):
    me = visit(served.url)
    me.until("#teach:has-text('asr-serve batch submit calls/')")
    assert served.url in me.page.inner_text("#teach pre")
    me.page.set_input_files("#folder", calls)
    me.until("#chosen-count:has-text('3 recordings'):has-text('1 other file left out')")
    assert me.page.input_value("#name") == "calls"
    me.page.select_option("#model", "moonshine-tiny-en")
    me.page.click("#submit")
    mine = card(me, "calls")
    mine.locator(".pill[data-state=completed]").wait_for()
    assert mine.locator(".batch-facts").inner_text().startswith("3 recordings, 1 failed")
    assert me.page.locator("#form").is_hidden()
    mine.locator("summary").click()
    mine.locator(".answers li").nth(2).wait_for()
    wrong = mine.locator(".answers .wrong")
    assert "calls/broken.wav" in wrong.inner_text()
    assert "no audio or video that the server can read" in wrong.inner_text()
    spoken = mine.locator(".answers li", has_text="calls/first.wav").locator("p").inner_text()
    assert {"ever", "tried", "failed"} <= set(words(spoken))
    assert "deletes these results on" in mine.inner_text()
    name, archive = downloaded(me, mine.get_by_text("Transcripts (.zip)"))
    with zipfile.ZipFile(io.BytesIO(archive)) as found:
        assert found.testzip() is None
        assert sorted(found.namelist()) == ["calls/first.txt", "calls/monday/second.txt"]
        assert found.read("calls/first.txt").decode() == f"{spoken}\n"
    assert name == "calls.zip"
    name, one = downloaded(me, mine.locator(".answers li", has_text="second.wav").get_by_text("Download"))
    assert (name, one.decode()) == ("second.txt", f"{spoken}\n")
    name, lines = downloaded(me, mine.get_by_text("All answers (.jsonl)"))
    assert name == "calls.jsonl"
    assert {json.loads(line)["custom_id"] for line in lines.splitlines()} == {
        "calls/first.wav",
        "calls/monday/second.wav",
    }
    name, lines = downloaded(me, mine.get_by_text("Errors (.jsonl)"))
    assert json.loads(lines)["response"]["body"]["error"]["code"] == "not_audio"
    me.expect_calm()


def test_what_is_chosen_is_asked_for(served, visit, packaged_speech):
    me = visit(served.url)
    me.until("#choose-files")
    me.page.set_input_files("#files", [packaged_speech / "beckett.wav"])
    me.page.select_option("#model", "moonshine-tiny-en")
    me.page.select_option("#format", "srt")
    me.page.select_option("#window", "1h")
    me.page.fill("#name", "subtitles of a clip")
    me.page.click("#submit")
    mine = card(me, "subtitles of a clip")
    mine.locator(".pill[data-state=completed]").wait_for()
    mine.locator("summary").click()
    mine.locator(".answers li").wait_for()
    name, text = downloaded(me, mine.locator(".answers").get_by_text("Download"))
    assert name == "beckett.srt"
    assert text.decode().startswith("1\n00:00:0")
    batch = next(
        each
        for each in ask(served, "GET", "/v1/batches")["data"]
        if each["metadata"] == {"name": "subtitles of a clip"}
    )
    lines = httpx.get(f"{served.url}/v1/files/{batch['input_file_id']}/content").text.splitlines()
    body = json.loads(lines[0])["body"]
    file = ask(served, "GET", f"/v1/files/{body.pop('file')}")
    assert body == {"model": "moonshine-tiny-en", "response_format": "srt"}
    assert batch["completion_window"] == "1h"
    assert file["expires_at"] - file["created_at"] == 3_600 + 2 * 86_400  # the recording does not stay for a month
    me.expect_calm()


def test_a_recording_that_would_expire_before_its_batch_is_uploaded_again(served, visit, packaged_speech):
    me = visit(served.url)
    me.until("#choose-files")
    me.page.route("**/v1/batches", lambda route: route.fulfill(status=503, body=""), times=1)
    me.page.set_input_files("#files", [packaged_speech / "beckett.wav"])
    me.page.select_option("#window", "1h")
    me.page.fill("#name", "later")
    me.page.click("#submit")
    me.until("#problem:has-text('answered with status 503')")
    me.page.select_option("#window", "7d")
    me.page.click("#again")
    card(me, "later").locator(".batch-facts").first.wait_for()
    made = [each for each in ask(served, "GET", "/v1/batches")["data"] if each["metadata"] == {"name": "later"}]
    # After a 503 there may be a batch: what was asked for first is cancelled before another is made.
    batch, before = sorted(made, key=lambda each: each["completion_window"], reverse=True)
    assert (batch["completion_window"], before["completion_window"]) == ("7d", "1h")
    assert before["status"] == "cancelled"
    (line,) = httpx.get(f"{served.url}/v1/files/{batch['input_file_id']}/content").text.splitlines()
    file = ask(served, "GET", f"/v1/files/{json.loads(line)['body']['file']}")
    assert file["expires_at"] - file["created_at"] == (7 + 2) * 86_400
    assert file["expires_at"] > batch["expires_at"] + 86_400
    me.expect_calm("503")


def test_a_transcript_with_segments_is_downloaded_and_read_whole(served, visit, packaged_speech):
    me = visit(served.url, viewport={"width": 360, "height": 740})
    me.until("#choose-files")
    me.page.set_input_files("#files", [packaged_speech / "two_cities.wav"])
    me.page.select_option("#format", "verbose_json")
    me.page.fill("#name", "segments")
    me.page.click("#submit")
    mine = card(me, "segments")
    mine.locator(".pill[data-state=completed]").wait_for()
    mine.locator("summary").click()
    text = mine.locator(".answer")
    name, file = downloaded(me, mine.locator(".answers").get_by_text("Download"))
    assert name == "two_cities.json"
    told = json.loads(file)
    assert told["segments"]
    assert words(told["text"]) == words(text.inner_text())
    _, archive = downloaded(me, mine.get_by_text("Transcripts (.zip)"))
    with zipfile.ZipFile(io.BytesIO(archive)) as found:
        assert found.namelist() == ["two_cities.json"]
        assert json.loads(found.read("two_cities.json")) == told
    cut = "element => element.scrollHeight > element.clientHeight"
    assert text.evaluate(cut)
    mine.get_by_text("Show all").click()
    assert not text.evaluate(cut)
    mine.get_by_text("Show less").click()
    assert text.evaluate(cut)
    me.expect_calm()


def test_a_folder_is_dropped(served, visit, calls):
    me = visit(served.url)
    me.until("#choose-files")
    devtools = me.context.new_cdp_session(me.page)
    dragged = {"items": [], "files": [str(calls)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver"):
        devtools.send("Input.dispatchDragEvent", {"type": kind, "x": 300, "y": 300, "data": dragged})
    me.until("#drop:not([hidden])")
    devtools.send("Input.dispatchDragEvent", {"type": "drop", "x": 300, "y": 300, "data": dragged})
    me.until("#chosen-count:has-text('3 recordings')")
    assert "calls/monday/second.wav" in me.page.inner_text("#chosen-list")
    assert me.page.locator("#drop").is_hidden()
    me.page.click("#clear")
    me.until("#pick:not([hidden])")
    me.page.set_input_files("#files", [calls / "notes.md"])
    me.until(".toast:has-text('notes.md is no recording')")
    me.expect_calm()


def test_it_is_cancelled_and_the_page_looks_while_something_runs(served, visit, packaged_speech):
    submit(served, long_lines(served, packaged_speech / "two_cities.wav", 200), name="long")
    me = visit(served.url)
    me.page.evaluate(COUNT_LOOKS)
    mine = card(me, "long")
    mine.locator(".pill[data-state=in_progress]").wait_for()
    me.holds("looks >= 2")  # by itself
    me.holds("Number(document.querySelector('.batch .track').getAttribute('aria-valuenow')) > 0")
    assert "until" in mine.locator(".batch-facts").inner_text()
    mine.get_by_text("Cancel", exact=True).click()
    me.until("dialog[open]:has-text('keep their transcripts')")
    me.page.click("dialog .plain")
    assert mine.locator(".pill").get_attribute("data-state") == "in_progress"
    mine.get_by_text("Cancel", exact=True).click()
    me.page.click("dialog[open] .strong")
    mine.locator(".pill[data-state=cancelled]").wait_for()
    me.holds("document.querySelector('#told').textContent.startsWith('long: cancelled')")
    mine.locator("summary").click()
    mine.locator(".answers .wrong").first.wait_for()
    assert "The batch was cancelled before this one" in mine.locator(".answers .wrong").first.inner_text()
    assert mine.locator(".answers li").count() == 50
    mine.get_by_text("Show 50 more").click()
    assert mine.locator(".answers li").count() == 100
    looks = me.page.evaluate("looks")
    me.page.wait_for_timeout(2_500)
    assert me.page.evaluate("looks") == looks  # nothing runs: it looks no more
    me.expect_calm()


def test_a_batch_whose_input_is_no_good(served, visit):
    submit(served, b'{"custom_id": "1"}\n', name="no good")
    me = visit(served.url)
    mine = card(me, "no good")
    mine.locator(".pill[data-state=failed]").wait_for()
    assert mine.locator(".line-errors").inner_text().startswith("Line 1: A line that is no request")
    assert mine.locator("summary").is_hidden()
    me.expect_calm()


def test_a_batch_that_ran_out_of_time(served, visit, packaged_speech):
    submit(served, long_lines(served, packaged_speech / "two_cities.wav", 100), window="1s", name="too slow")
    me = visit(served.url)
    mine = card(me, "too slow")
    mine.locator(".pill[data-state=expired]").wait_for()
    mine.locator("summary").click()
    mine.locator(".answers .wrong").first.wait_for()
    assert "ran out of time" in mine.locator(".answers .wrong").first.inner_text()
    me.expect_calm()


def test_a_server_that_is_gone_for_a_while(served, visit, packaged_speech):
    batch = submit(served, long_lines(served, packaged_speech / "two_cities.wav", 200), name="cut")
    cable = Cable(served.port)
    try:
        me = visit(cable.url)
        mine = card(me, "cut")
        mine.locator(".pill[data-state=in_progress]").wait_for()
        cable.cut()
        me.until("#problem:has-text('The server does not answer')")
        assert mine.is_visible()
        cable.mend()
        me.holds("document.querySelector('#notice').hidden")
        ask(served, "POST", f"/v1/batches/{batch}/cancel")
        mine.locator(".pill[data-state=cancelled]").wait_for()
        me.expect_calm("ERR_")
    finally:
        cable.close()


def test_an_upload_is_cancelled_and_leaves_nothing(small, visit, packaged_speech):
    me = visit(small.url, KEY)
    me.until("#choose-files")
    devtools = me.context.new_cdp_session(me.page)
    slow = {"offline": False, "latency": 5, "downloadThroughput": -1, "uploadThroughput": 300_000}
    me.page.set_input_files("#files", [packaged_speech / "beckett.wav", packaged_speech / "two_cities.wav"])
    devtools.send("Network.emulateNetworkConditions", slow)
    me.page.click("#submit")
    me.until("#sending:has-text('1 of 2 recordings')")
    me.page.click("#stop")
    me.until(".toast:has-text('Cancelled')")
    assert me.page.locator("#form").is_hidden()
    assert ask(small, "GET", "/v1/files", KEY)["data"] == []
    assert ask(small, "GET", "/v1/batches", KEY)["data"] == []
    me.expect_calm()


HOLD_CREATION = """(lost) => {
  const ask = window.fetch.bind(window);
  window.fetch = async (address, init) => {
    const answer = await ask(address, init);
    if (init?.method !== "POST" || !String(address).endsWith("v1/batches") || window.answer) return answer;
    await new Promise((resolve) => (window.answer = resolve));
    if (lost) throw new TypeError("network");
    return answer;
  };
}"""
"""The server has created the batch, and its answer is on the way until `answer()`, or gets lost there."""


@pytest.mark.parametrize("lost", [False, True])
def test_a_batch_that_is_being_created_is_cancelled(served, visit, packaged_speech, tmp_path, lost):
    name = f"cancelled while created, {lost}"
    # So many that they are not all transcribed before the test cancels, however slow the browser is.
    clips = [shutil.copy(packaged_speech / "two_cities.wav", tmp_path / f"long {n} {lost}.wav") for n in range(40)]
    me = visit(served.url)
    me.until("#choose-files")
    me.page.evaluate(HOLD_CREATION, lost)
    me.page.set_input_files("#files", clips)
    me.page.fill("#name", name)
    me.page.click("#submit")
    me.holds("window.answer !== undefined")
    me.page.click("#stop")
    me.until("#pick:not([hidden])")
    assert not card(me, name).count()
    me.page.evaluate("answer()")
    me.until(".toast:has-text('Cancelled')")
    card(me, name).locator(".pill[data-state=cancelled]").wait_for()
    (batch,) = [each for each in ask(served, "GET", "/v1/batches")["data"] if each["metadata"] == {"name": name}]
    assert batch["status"] == "cancelled"
    assert batch["request_counts"]["completed"] < len(clips)
    left = {each["filename"] for each in ask(served, "GET", "/v1/files")["data"]}
    assert not left & {Path(clip).name for clip in clips}
    me.expect_calm()


HURRY = """() => {
  const make = AbortSignal.timeout.bind(AbortSignal);
  AbortSignal.timeout = (ms) => make(ms / 50);
}"""
"""What the page waits for it waits for a fiftieth of the time."""


def named(served: Served, name: str) -> list[dict[str, Any]]:
    return [each for each in ask(served, "GET", "/v1/batches")["data"] if each["metadata"] == {"name": name}]


def test_a_creation_that_hangs_is_cancelled_within_a_limit(served, visit, packaged_speech):
    me = visit(served.url)
    me.until("#choose-files")
    me.page.evaluate(HURRY)
    creations: list[str] = []

    def hang(route: Any) -> None:
        """It never answers, as behind a proxy whose server is gone."""
        if route.request.method == "POST":
            creations.append(route.request.headers["idempotency-key"])
        else:
            route.continue_()

    me.page.route("**/v1/batches", hang)
    me.page.set_input_files("#files", [packaged_speech / "two_cities.wav"])
    me.page.fill("#name", "hangs")
    with me.page.expect_request(lambda request: request.method == "POST" and request.url.endswith("/v1/batches")):
        me.page.click("#submit")
    me.page.click("#stop")
    me.until(".toast:has-text('Cancelling')")
    me.until("#problem:has-text('The batch may go on: The server does not answer')")
    assert len(creations) == 2, "asked again, once"
    assert len(set(creations)) == 1, "it stays one batch"
    me.page.unroute("**/v1/batches")
    me.page.click("#again")
    card(me, "hangs").locator(".pill[data-state=cancelled], .pill[data-state=completed]").wait_for()
    assert len(named(served, "hangs")) == 1
    me.expect_calm()


def test_an_error_of_the_server_leaves_open_whether_there_is_a_batch(served, visit, packaged_speech):
    """The server made the batch and failed after that: it is found and cancelled, and not taken for refused."""
    me = visit(served.url)
    me.until("#choose-files")
    error = {"code": "store_unavailable", "type": "server_error", "message": "the disk is gone"}

    def fail_afterwards(route: Any) -> None:
        route.fetch()
        route.fulfill(status=503, json={"error": error})

    creation = lambda url: url.endswith("/v1/batches")  # noqa: E731
    me.page.route(creation, fail_afterwards, times=1)
    me.page.set_input_files("#files", [packaged_speech / "two_cities.wav"])
    me.page.fill("#name", "made before it failed")
    me.page.click("#submit")
    me.until("#problem:has-text('cannot read its files and batches')")
    me.page.click("#clear")
    card(me, "made before it failed").locator(".pill[data-state=cancelled], .pill[data-state=completed]").wait_for()
    assert len(named(served, "made before it failed")) == 1
    me.expect_calm("503")


def test_another_order_after_a_lost_answer_makes_no_second_batch(served, visit, packaged_speech, tmp_path):
    clips = [shutil.copy(packaged_speech / "two_cities.wav", tmp_path / f"again {n}.wav") for n in range(20)]
    me = visit(served.url)
    me.until("#choose-files")
    me.page.evaluate(HOLD_CREATION, True)
    me.page.set_input_files("#files", clips)
    me.page.fill("#name", "first order")
    me.page.click("#submit")
    me.holds("window.answer !== undefined")
    me.page.evaluate("answer()")
    me.until("#problem:has-text('The server does not answer')")
    me.page.fill("#name", "second order")
    me.page.click("#again")
    card(me, "second order").wait_for()
    (first,), (second,) = named(served, "first order"), named(served, "second order")
    assert first["status"] == "cancelled"
    ask(served, "POST", f"/v1/batches/{second['id']}/cancel")
    me.expect_calm()


def test_a_batch_that_may_go_on_is_told(served, visit, packaged_speech):
    """Its creation and its cancellation got lost, until the page is told to try again."""
    me = visit(served.url)
    me.until("#choose-files")
    me.page.evaluate(HOLD_CREATION, True)
    me.page.set_input_files("#files", [packaged_speech / "two_cities.wav"])
    me.page.fill("#name", "cancelled twice")
    me.page.click("#submit")
    me.holds("window.answer !== undefined")
    me.page.route("**/v1/batches", lambda route: route.abort() if route.request.method == "POST" else route.continue_())
    me.page.click("#stop")
    me.page.evaluate("answer()")
    me.until("#problem:has-text('The batch may go on: The server does not answer')")
    me.page.unroute("**/v1/batches")
    me.page.click("#again")
    card(me, "cancelled twice").locator(".pill[data-state=cancelled], .pill[data-state=completed]").wait_for()
    assert me.page.locator("#notice").is_hidden()
    me.expect_calm("ERR_FAILED")


def test_what_could_not_be_deleted_is_told(small, visit, packaged_speech):
    me = visit(small.url, KEY)
    me.until("#choose-files")
    uploads = iter([True])

    def answer(route: Any) -> None:
        """One upload succeeds, the other never ends, and no deletion succeeds."""
        if route.request.method == "DELETE":
            route.fulfill(status=503, body="")
        elif next(uploads, False):
            route.continue_()

    me.page.route(re.compile("/v1/files"), answer)
    me.page.set_input_files("#files", [packaged_speech / "beckett.wav", packaged_speech / "two_cities.wav"])
    me.page.click("#submit")
    me.until("#sending:has-text('1 of 2 recordings')")
    me.page.click("#stop")
    me.until(".toast:has-text('1 of 1 uploaded file could not be deleted')")
    (left,) = ask(small, "GET", "/v1/files", KEY)["data"]
    ask(small, "DELETE", f"/v1/files/{left['id']}", KEY)
    me.expect_calm("503")


def test_a_batch_of_another_key_leaves_the_list(small, visit, packaged_speech):
    lines = long_lines(small, packaged_speech / "two_cities.wav", 200, OTHER_KEY)
    batch = submit(small, lines, name="of another", key=OTHER_KEY)
    me = visit(small.url, OTHER_KEY)
    mine = card(me, "of another")
    mine.locator(".pill[data-state=in_progress]").wait_for()
    me.page.evaluate(f"sessionStorage.setItem('asr-serve.key', '{KEY}')")
    mine.wait_for(state="detached")
    assert me.page.locator("#notice").is_hidden()
    ask(small, "POST", f"/v1/batches/{batch}/cancel", OTHER_KEY)
    me.expect_calm("404")


def test_a_quota_and_another_try(small, visit, packaged_speech, tmp_path):
    clips = [shutil.copy(packaged_speech / "beckett.wav", tmp_path / f"{n}.wav") for n in range(2)]
    stored = [
        ask(small, "POST", "/v1/files", KEY, data={"purpose": "batch"}, files={"file": ("x", b"x")})["id"]
        for _ in range(2)
    ]
    me = visit(small.url, KEY)
    me.until("#choose-files")
    me.page.set_input_files("#files", clips)
    me.page.click("#submit")
    me.until("#problem:has-text('There is no room for more files with this key')")
    for file_id in stored:
        ask(small, "DELETE", f"/v1/files/{file_id}", KEY)
    me.page.click("#again")
    me.until(".batch .pill[data-state]")
    names = sorted(
        each["filename"] for each in ask(small, "GET", "/v1/files", KEY)["data"] if each["purpose"] == "batch"
    )
    assert names == ["0.wav", "1.wav", "lines.jsonl"]  # nothing was uploaded twice
    me.expect_calm("413")


def test_a_key_that_is_refused(small, visit):
    me = visit(small.url, "wrong")
    me.until("dialog[open] #key-problem:has-text('does not know that key')")
    me.page.get_by_text("Not now").click()
    me.until("#problem:has-text('This server asks for a key')")
    me.page.click("#again")
    me.until("dialog[open] #key")
    me.page.fill("#key", KEY)
    me.page.keyboard.press("Enter")
    me.until("#create:not([hidden])")
    assert me.page.locator("#notice").is_hidden()
    me.expect_calm("401")


def test_batches_are_off(visit, tmp_path):
    server = Served(tmp_path / "log", *flags({"batch.enabled": "false"}))
    try:
        me = visit(server.url)
        me.until("#problem:has-text('This server keeps no batches')")
        for room in ("#create", "#list-room", "#teach"):
            assert me.page.locator(room).is_hidden()
        me.expect_calm("404")
    finally:
        server.stop()


@needs_axe
@devices_and_schemes
def test_axe_finds_nothing_serious(served, visit, calls, scheme, device):
    submit(served, b"{}\n", name="axe")
    me = visit(served.url, color_scheme=scheme, reduced_motion="reduce", **device)
    me.until("#choose-files")
    me.until(".batch")
    me.expect_accessible("the list")
    me.page.set_input_files("#folder", calls)
    me.until("#submit")
    me.expect_accessible("the form")
    me.page.fill("#name", f"axe {scheme} {bool(device)}")
    me.page.click("#submit")
    mine = card(me, f"axe {scheme} {bool(device)}")
    mine.locator(".pill[data-state=completed]").wait_for()
    mine.locator("summary").click()
    mine.locator(".answers li").nth(2).wait_for()
    me.expect_accessible("the results")
    me.expect_calm()


def test_by_keyboard_alone(served, visit, packaged_speech):
    me = visit(served.url)
    me.until("#choose-files")
    with me.page.expect_file_chooser() as choosing:
        me.page.focus("#choose-files")
        me.page.wait_for_timeout(100)  # until the browser's own chooser is switched off
        me.page.keyboard.press("Enter")
    choosing.value.set_files(packaged_speech / "beckett.wav")
    me.holds("document.activeElement.id === 'submit'")
    me.page.keyboard.press("Enter")
    me.until(".batch")
    me.page.locator(DONE).first.wait_for()
    me.page.locator(".batch summary").first.focus()
    me.page.keyboard.press("Enter")
    me.until(".batch .answers li")
    me.page.keyboard.press("Tab")
    assert me.page.evaluate("document.activeElement.textContent") == "Transcripts (.zip)"
    me.expect_calm()
