"""The history of a browser's transcripts, and the file by which one is shared: a real server and a Chromium."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from console_page import Served, Visitor, browsers, devices_and_schemes, needs_axe, words

SEGMENTS = [(0.0, 1.5, "Ever tried."), (1.5, 3.0, "Ever failed."), (3.0, 4.0, "No matter.")]
PUT = """async ([transcripts]) => {
  localStorage.setItem("asr-serve.history", "on");
  const database = await new Promise((resolve, reject) => {
    const opening = indexedDB.open("asr-serve", 1);
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  });
  const store = database.transaction("transcripts", "readwrite").objectStore("transcripts");
  for (const each of transcripts) store.put(each);
  await new Promise((resolve) => (store.transaction.oncomplete = resolve));
  database.close();
}"""
REFUSE_DELETION = """() => {
  for (const name of ["delete", "clear"]) {
    IDBObjectStore.prototype[name] = () => { throw new DOMException("no", "UnknownError"); };
  }
}"""
ABORT_DELETION_OF_THE_OLDEST = """() => {
  const open = IDBIndex.prototype.openCursor;
  IDBIndex.prototype.openCursor = function (...given) {
    IDBIndex.prototype.openCursor = open;
    const request = open.apply(this, given), { transaction } = this.objectStore;
    transaction.addEventListener("abort", () => (window.aborted = true));
    transaction.abort();
    return request;
  };
}"""
COUNT = """async () => {
  const database = await new Promise((resolve) => {
    const opening = indexedDB.open("asr-serve", 1);
    opening.onsuccess = () => resolve(opening.result);
  });
  const asked = database.transaction("transcripts").objectStore("transcripts").getAll();
  return await new Promise((resolve) => (asked.onsuccess = () => (database.close(), resolve(asked.result))));
}"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("history") / "log")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser(packaged_speech: Path) -> Iterator[Any]:
    with browsers() as launch:
        yield launch(packaged_speech / "beckett.wav")


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visitor]]:
    visitors: list[Visitor] = []

    def come(url: str, **context: Any) -> Visitor:
        visitors.append(Visitor(browser, **context))
        visitors[-1].page.goto(url)
        return visitors[-1]

    yield come
    for visitor in visitors:
        visitor.context.close()


def transcript(
    number: int, title: str, texts: list[tuple[float, float, str]] = SEGMENTS, **more: Any
) -> dict[str, Any]:
    """As the history has it."""
    segments = [
        {"index": n, "start": start, "end": end, "text": text, "speaker": f"SPEAKER_0{n % 2}"}
        for n, (start, end, text) in enumerate(texts)
    ]
    found = {
        "id": f"t{number}",
        "savedMs": 1_790_000_000_000 + number * 60_000,
        "kind": "file",
        "title": title,
        "model": "moonshine-tiny-en",
        "language": "en",
        "duration": texts[-1][1],
        "names": [["SPEAKER_00", "Ada"]],
        "segments": segments,
    } | more
    return {"bytes": len(json.dumps(found))} | found


def fill(me: Visitor, *transcripts: dict[str, Any]) -> None:
    """The history has these; the page shows them."""
    me.until("#none:not([hidden])")  # the database is there
    me.page.evaluate(PUT, [list(transcripts)])
    me.page.reload()
    me.page.locator("#list .saved").nth(len(transcripts) - 1).wait_for()


def kept(me: Visitor, count: int) -> None:
    """Waits until so many transcripts are in the history. They are put there after the page is idle."""
    me.holds(f"({COUNT})().then((found) => found.length === {count})")


def titles(me: Visitor) -> list[str]:
    return me.page.locator("#list h2").all_inner_texts()


# --- what is kept -----------------------------------------------------------------------------------------


def test_nothing_is_kept_unless_it_is_switched_on(served, visit, packaged_speech):
    me = visit(f"{served.url}/history")
    me.until("#none:has-text('Switch it on above')")
    assert not me.page.is_checked("#keep-history")
    me.page.goto(served.url)
    me.ready()
    me.hear(packaged_speech / "beckett.wav")
    said = me.text()
    assert me.page.evaluate(COUNT) == []
    me.page.locator("label:has(#keep-history)").click()  # those of the tab are kept, too
    kept(me, 1)
    me.page.goto(f"{served.url}/history")
    me.until("#list .saved")
    assert titles(me) == ["beckett.wav"]
    assert me.page.is_checked("#keep-history")
    assert re.match(r"1 transcript, \d+ kB of at most 25.0 MB", me.page.inner_text("#size"))
    (saved,) = me.page.evaluate(COUNT)
    assert " ".join(each["text"] for each in saved["segments"]) == said
    assert "source" not in saved  # no sound
    me.page.locator("label:has(#keep-history)").click()
    me.until("#keep-hint:has-text('Nothing new is kept')")
    me.page.goto(served.url)
    me.ready()
    me.hear(packaged_speech / "beckett.wav")
    assert len(me.page.evaluate(COUNT)) == 1
    me.expect_calm()


def test_a_talk_is_kept_and_opened_again(served, visit):
    me = visit(served.url)
    me.ready()
    me.page.locator("label:has(#keep-history)").click()
    me.page.click("#primary")
    me.mode("live")
    me.until("#segments .said")
    me.page.click("#primary")
    me.mode("idle")
    said = me.text()
    kept(me, 1)
    me.page.goto(f"{served.url}/history")
    me.until("#list .saved a")
    assert titles(me)[0].startswith("Talk at ")
    me.page.click("#list h2 a")
    me.until("#segments .said")
    assert me.text() == said
    assert "#" not in me.page.url  # a page that is loaded again is a new one
    me.expect_calm()


def test_a_new_name_of_a_speaker_is_kept(served, visit):
    me = visit(f"{served.url}/history")
    fill(me, transcript(1, "calls.wav"))
    me.page.click("#list h2 a")
    me.until("#voices button:has-text('Ada')")
    me.page.locator("#voices button", has_text="Speaker 2").click()
    me.page.keyboard.type("Grace")
    me.page.keyboard.press("Enter")
    me.holds(f"({COUNT})().then(([saved]) => new Map(saved.names).get('SPEAKER_01') === 'Grace')")
    me.page.goto(f"{served.url}/history")
    me.until("#list .saved")
    (saved,) = me.page.evaluate(COUNT)
    assert dict(saved["names"]) == {"SPEAKER_00": "Ada", "SPEAKER_01": "Grace"}
    assert saved["savedMs"] == 1_790_000_060_000  # it is still the same one
    with me.page.expect_download() as coming:
        me.page.locator("#list").get_by_text("Download").click()
    text = Path(coming.value.path()).read_text()
    assert "Ada: Ever tried." in text.replace("\n", " ")
    assert "Grace" in text
    me.expect_calm()


def test_other_tabs_switch_the_history_and_delete_from_it(served, visit):
    me = visit(f"{served.url}/history")
    fill(me, transcript(1, "calls.wav"))
    me.page.click("#list h2 a")
    me.until("#voices button:has-text('Ada')")
    other = me.context.new_page()
    other.goto(f"{served.url}/history")
    other.locator("label:has(#keep-history)").click()
    me.holds("!document.querySelector('#keep-history').checked")
    me.page.locator("label:has(#keep-history)").click()
    other.wait_for_selector("#keep-hint:has-text('New transcripts are kept')")
    assert other.is_checked("#keep-history")
    other.locator("#list").get_by_text("Delete").click()
    other.click("dialog[open] .strong")
    other.wait_for_selector(".toast:has-text('Deleted')")
    me.page.locator("#voices button", has_text="Speaker 2").click()
    me.page.keyboard.type("Grace")
    me.page.keyboard.press("Enter")
    me.until("#voices button:has-text('Grace')")
    assert me.page.evaluate(COUNT) == []  # a new name does not bring it back
    me.expect_calm()


def test_the_oldest_go_when_there_is_no_room(served, visit, packaged_speech):
    me = visit(f"{served.url}/history")
    fill(me, transcript(1, "oldest"), transcript(2, "older", bytes=24_999_900), transcript(3, "newer"))
    me.page.goto(served.url)
    me.ready()
    me.hear(packaged_speech / "two_cities.wav")
    kept(me, 2)
    me.page.goto(f"{served.url}/history")
    me.until("#list .saved")
    assert titles(me)[:2] == ["two_cities.wav", "newer"]
    assert "older" not in titles(me)
    assert "oldest" not in titles(me)
    me.expect_calm()


def test_a_transcript_is_kept_where_the_oldest_cannot_be_deleted(served, visit, packaged_speech):
    """The next one deletes them."""
    me = visit(f"{served.url}/history")
    fill(me, transcript(1, "oldest", bytes=24_999_900))
    me.page.goto(served.url)
    me.ready()
    me.page.evaluate(ABORT_DELETION_OF_THE_OLDEST)
    me.hear(packaged_speech / "two_cities.wav")
    me.holds("window.aborted")
    me.page.evaluate("() => new Promise((resolve) => setTimeout(resolve))")  # what follows an abort has been done
    assert not me.page.locator(".toast:has-text('keeps no history')").count()
    kept(me, 2)
    me.hear(packaged_speech / "beckett.wav")
    me.holds(f"({COUNT})().then((found) => found.some(({{ title }}) => title === 'beckett.wav'))")
    kept(me, 2)
    me.page.goto(f"{served.url}/history")
    me.until("#list .saved")
    assert titles(me) == ["beckett.wav", "two_cities.wav"]
    me.expect_calm()


def test_a_browser_that_keeps_nothing(served, visit, browser, packaged_speech):
    me = visit("about:blank")
    me.page.add_init_script("IDBFactory.prototype.open = () => { throw new DOMException('no', 'SecurityError'); };")
    me.page.goto(f"{served.url}/history")
    me.until("#problem:has-text('does not let the page store anything')")
    me.page.goto(served.url)
    me.ready()
    me.page.locator("label:has(#keep-history)").click()
    me.hear(packaged_speech / "beckett.wav")
    me.until(".toast:has-text('keeps no history')")
    me.expect_calm()


# --- search, deletion, export -----------------------------------------------------------------------------


def test_search_marks_what_was_found(served, visit):
    me = visit(f"{served.url}/history")
    long = [(float(n), n + 1.0, f"Word number {n} was said in a café.") for n in range(200)]
    fill(me, transcript(1, "calls.wav"), transcript(2, "long.wav", long), transcript(3, "Résumé.wav"))
    assert titles(me) == ["Résumé.wav", "long.wav", "calls.wav"]
    me.page.fill("#query", "FAILED ever")
    me.until("#found:has-text('2 of 3 transcripts')")
    assert titles(me) == ["Résumé.wav", "calls.wav"]
    assert me.page.locator("#list .saved").first.locator("mark").all_inner_texts() == ["Ever", "failed", "Ever"]
    me.page.fill("#query", "resume")
    me.until("#found:has-text('1 of 3')")
    assert me.page.locator("#list mark").all_inner_texts() == ["Résumé"]
    me.page.fill("#query", "cafe 150")
    me.until("#found:has-text('1 of 3')")
    me.until("#list:has-text('and 197 more places')")
    assert me.page.locator("#list .snippet").first.inner_text().endswith("Word number 150 was said in a café.")
    me.page.fill("#query", "nothing like that")
    me.until("#none:has-text('Nothing that is kept')")
    assert titles(me) == []
    me.page.fill("#query", "number 150")
    me.page.locator("#list .snippet", has_text="number 150").locator("a").click()  # opens the transcript there
    me.until(".segment.found")
    assert me.page.inner_text(".segment.found .said") == "Word number 150 was said in a café."
    assert me.page.evaluate("document.activeElement.classList.contains('found')")
    me.expect_calm()


def test_one_is_deleted_and_all_are(served, visit):
    me = visit(f"{served.url}/history")
    fill(me, *(transcript(n, f"{n}.wav") for n in range(4)))
    me.page.locator("#list .saved", has_text="2.wav").get_by_text("Delete").click()
    me.until("dialog[open]:has-text('Delete 2.wav?')")
    me.page.click("dialog[open] .plain")
    assert len(titles(me)) == 4
    me.page.evaluate(REFUSE_DELETION)
    me.page.locator("#list .saved", has_text="2.wav").get_by_text("Delete").click()
    me.page.click("dialog[open] .strong")
    me.until(".toast:has-text('did not delete it')")
    me.page.evaluate("document.querySelector('#toasts').replaceChildren()")
    me.page.click("#delete-all")
    me.page.click("dialog[open] .strong")
    me.until(".toast:has-text('did not delete it')")
    assert len(me.page.evaluate(COUNT)) == 4
    me.page.reload()  # which the page says, and which ends the refusal
    me.page.locator("#list .saved").nth(3).wait_for()
    me.page.locator("#list .saved", has_text="2.wav").get_by_text("Delete").click()
    me.page.click("dialog[open] .strong")
    me.until(".toast:has-text('Deleted')")
    assert titles(me) == ["3.wav", "1.wav", "0.wav"]
    assert me.page.evaluate("document.activeElement.textContent") == "1.wav"  # the next one has the focus
    me.page.click("#delete-all")
    me.until("dialog[open]:has-text('Delete 3 transcripts?')")
    me.page.click("dialog[open] .strong")
    me.until("#none:not([hidden])")
    assert me.page.evaluate(COUNT) == []
    assert me.page.locator("#search-room").is_hidden()
    me.expect_calm()


def test_all_are_exported(served, visit):
    me = visit(f"{served.url}/history")
    fill(me, transcript(1, "calls.wav"), transcript(2, "calls.wav"))
    with me.page.expect_download() as coming:
        me.page.click("#export")
    with zipfile.ZipFile(io.BytesIO(Path(coming.value.path()).read_bytes())) as found:
        assert found.testzip() is None
        assert sorted(found.namelist()) == ["calls (2).json", "calls (2).txt", "calls.json", "calls.txt"]
        told = json.loads(found.read("calls.json"))
    assert [each["text"] for each in told["segments"]] == [text for *_, text in SEGMENTS]
    assert told["segments"][0]["speaker"] == "Ada"
    me.expect_calm()


def test_the_page_asks_the_server_for_nothing(served, visit):
    me = visit(f"{served.url}/history")
    asked: list[str] = []
    me.page.on("request", lambda request: asked.append(request.url))
    fill(me, transcript(1, "calls.wav"))
    me.page.fill("#query", "ever")
    me.until("#list mark")
    assert asked
    assert not [url for url in asked if "/v1/" in url]
    assert all(url.startswith(served.url) for url in asked)


def test_one_that_is_gone(served, visit):
    me = visit(f"{served.url}/#saved=none")
    me.until("#banner-text:has-text('not in the history')")
    me.expect_calm()


# --- the file that is shared ------------------------------------------------------------------------------


def shared(me: Visitor, folder: Path, *, audio: bool) -> Path:
    me.page.click("#share")
    me.until("#share-dialog[open]")
    if audio:
        me.page.check("#share-audio")
    with me.page.expect_download() as coming:
        me.page.click("#share-download")
    path = folder / coming.value.suggested_filename
    coming.value.save_as(path)
    return path


def test_a_recording_is_shared_as_one_file(served, visit, packaged_speech, tmp_path):
    me = visit(served.url)
    me.ready()
    me.hear(packaged_speech / "two_cities.wav")
    said = me.page.locator("#segments .said").all_inner_texts()
    me.until("button.stamp")
    file = shared(me, tmp_path, audio=True)
    assert file.name == "two_cities.html"
    assert "two_cities.wav" in file.read_text()
    reader = visit("about:blank", color_scheme="dark")
    asked: list[str] = []
    reader.page.on("request", lambda request: asked.append(request.url))
    refused: list[str] = []
    reader.page.on("requestfailed", lambda request: refused.append(str(request.failure)))
    reader.context.set_offline(True)
    reader.page.goto(file.as_uri())
    assert [text.strip() for text in reader.page.locator(".said").all_inner_texts()] == said
    assert reader.page.title() == "two_cities.wav"
    reader.page.locator("button.time").last.click()
    last = reader.page.locator("li").last
    reader.holds("[...document.querySelectorAll('li')].at(-1).classList.contains('now')")
    reader.holds("!document.querySelector('audio').paused")
    start = float(last.get_attribute("data-start"))
    assert reader.page.evaluate("document.querySelector('audio').currentTime") >= start - 0.1
    assert {url.split(":")[0] for url in asked} <= {"file", "data"}
    # Its own policy stops what somebody could add to it.
    reader.page.evaluate(
        "document.body.append(Object.assign(document.createElement('img'), {src: 'https://example.org/x.png'}))"
    )
    reader.page.evaluate("""() => {
      document.body.append(Object.assign(document.createElement("script"), {textContent: "window.ran = 1"}));
    }""")
    reader.page.wait_for_timeout(200)
    assert reader.page.evaluate("window.ran") is None
    assert refused == ["csp"]
    reader.expect_calm("Content Security Policy", "img-src", "script-src")
    me.expect_calm()


def test_without_the_recording_there_is_no_script(served, visit, tmp_path):
    me = visit(f"{served.url}/history")
    fill(me, transcript(1, "calls <b>.wav"))
    me.page.click("#list h2 a")
    me.until("#segments .said")
    me.page.locator("body").press("s")
    me.until("#share-dialog[open]")
    assert me.page.locator("#share-audio-room").is_hidden()  # the history has no sound
    me.page.click("#share-cancel")
    file = shared(me, tmp_path, audio=False)
    page = file.read_text()
    assert "<script" not in page
    reader = visit(file.as_uri())
    assert reader.page.inner_text("h1") == "calls <b>.wav"
    assert reader.page.locator(".who").all_inner_texts() == ["Ada", "Speaker 2", "Ada"]
    assert reader.page.locator("audio").count() == 0
    reader.expect_calm()
    me.expect_calm()


def test_a_recording_that_is_too_large_is_left_out(served, visit, packaged_speech, tmp_path):
    large = tmp_path / "large.wav"
    wav = (packaged_speech / "beckett.wav").read_bytes()
    large.write_bytes(wav + b"JUNK" + (20_000_000).to_bytes(4, "little") + bytes(20_000_000))
    me = visit(served.url)
    me.ready()
    me.hear(large)
    me.until("button.stamp")
    me.page.click("#share")
    assert me.page.is_disabled("#share-audio")
    assert "larger than 20.0 MB" in me.page.inner_text("#share-audio-room")
    me.expect_calm()


def test_it_is_sent_where_the_browser_can(served, visit, packaged_speech):
    me = visit("about:blank")
    me.page.add_init_script("""
      navigator.canShare = ({files}) => files[0].type === "text/html";
      navigator.share = async ({files, title}) => {
        if (window.refuse) throw new DOMException("no", window.refuse);
        window.sent = [files[0].name, title, await files[0].text()];
      };
    """)
    me.page.goto(served.url)
    me.ready()
    me.hear(packaged_speech / "beckett.wav")
    me.page.click("#share")
    me.page.evaluate("window.refuse = 'AbortError'")  # closed by whoever shares
    me.page.click("#share-send")
    me.page.wait_for_timeout(100)
    assert me.page.locator("#share-dialog[open]").is_visible()
    assert me.page.locator(".toast").count() == 0
    me.page.evaluate("window.refuse = 'NotAllowedError'")
    me.page.click("#share-send")
    me.until(".toast:has-text('Download the file instead')")
    me.page.evaluate("window.refuse = ''")
    me.page.click("#share-send")
    me.holds("window.sent !== undefined")
    name, title, page = me.page.evaluate("window.sent")
    assert (name, title) == ("beckett.html", "beckett.wav")
    assert {"ever", "tried"} <= set(words(page))
    me.holds("!document.querySelector('#share-dialog').open")
    me.expect_calm()


# --- for everybody ----------------------------------------------------------------------------------------


@needs_axe
@devices_and_schemes
def test_axe_finds_nothing_serious(served, visit, tmp_path, scheme, device):
    me = visit(f"{served.url}/history", color_scheme=scheme, reduced_motion="reduce", **device)
    me.until("#none:not([hidden])")
    me.expect_accessible("an empty history")
    fill(me, *(transcript(n, f"call {n}.wav") for n in range(3)))
    me.page.fill("#query", "ever")
    me.until("#list mark")
    me.expect_accessible("a search")
    me.page.click("#delete-all")
    me.expect_accessible("a question")
    me.page.click("dialog[open] .plain")
    me.page.locator("#list h2 a").first.click()
    me.until("#segments .said")
    me.page.click("#share")
    me.expect_accessible("the dialog for sharing")
    with me.page.expect_download() as coming:
        me.page.click("#share-download")
    coming.value.save_as(tmp_path / "shared.html")
    reader = visit((tmp_path / "shared.html").as_uri(), color_scheme=scheme, **device)
    reader.expect_accessible("the file")
    me.expect_calm()
