"""Who speaks, words with times, hotwords and exports on the console: the real server, two real speakers."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from console_page import ROOT, ROUTE, Served, Visitor, browsers, devices_and_schemes, needs_axe, words

from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card

CONSOLE = ROOT / "console"
SPEECH_S = 12
LABEL = "label:has(#want-{})"
UNSURE = 0.5
NUMBER = re.compile(r"(?:\d+:)*\d+[.,]\d+")
NUMBERS_DIFFER = 0.045
"""Seconds, or confidence, by which two answers about one recording may differ: an encoder frame of 20 ms at the
start of a turn and at its end. Each answer is computed anew, in batches that depend on what else the engine does
then; sums in another order move a score across a limit now and then."""
MARKED = """() => {
  window.marked = [];
  const note = () => {
    const now = document.querySelector(".word.now");
    if (now && window.marked.at(-1) !== now) window.marked.push(now);
  };
  new MutationObserver(note).observe(document.querySelector("#segments"), { subtree: true, attributes: true });
}"""
"""Every word that was marked as it was heard."""
ROWS = """() => {
  let who = null;
  return [...document.querySelectorAll("#segments .segment")].map((row) => {
    who = row.querySelector(".voice")?.dataset.speaker ?? (row.dataset.voice === undefined ? null : who);
    return [who, row.querySelector(".said").textContent];
  });
}"""
"""Who says what, as somebody reads the page: a name holds until the next."""
SENT = """() => {
  window.sent = [];
  const append = FormData.prototype.append;
  FormData.prototype.append = function (...field) {
    window.sent.push(field.map(String));
    append.apply(this, field);
  };
}"""
"""The fields of every form."""
POSITION = "Number(document.querySelector('#seek').value)"


# --- without a browser --------------------------------------------------------------------------------------


def test_the_parts_that_need_no_page(tmp_path):
    if not shutil.which("npm"):
        pytest.skip("npm is not installed")
    if not (CONSOLE / "node_modules").is_dir():
        pytest.skip("the console's packages are not installed: npm --prefix console ci")
    build = [CONSOLE / "node_modules" / ".bin" / "vite", "build", "--ssr", "test/rich.test.ts", "--outDir", tmp_path]
    subprocess.run([*map(str, build), "--logLevel", "error"], check=True, cwd=CONSOLE)
    found = subprocess.run(["node", "--test", str(tmp_path)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    assert re.search(r"# pass [1-9]", found.stdout)


SEES = {
    "all": np.eye(3),
    "no red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "no blue": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
"""Linear RGB to what is seen of it. Source: Machado, Oliveira and Fernandes 2009, severity 1."""
TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)
"""OKLab. Source: Ottosson 2020."""
LEAST_CONTRAST, LEAST_DISTANCE = 4.5, 0.1


def colours(name: str, sheet: str) -> list[np.ndarray[Any, Any]]:
    """Linear RGB of `--name` in light and in dark."""
    found = re.search(rf"--{name}: light-dark\((#\w{{6}}), (#\w{{6}})\)", sheet)
    assert found, name
    values = [np.array([int(each[at : at + 2], 16) / 255 for at in (1, 3, 5)]) for each in found.groups()]
    return [np.where(each <= 0.04045, each / 12.92, ((each + 0.055) / 1.055) ** 2.4) for each in values]


def contrast(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """WCAG's."""
    dark, light = sorted(float(each @ [0.2126, 0.7152, 0.0722]) for each in (one, other))
    return (light + 0.05) / (dark + 0.05)


def test_speakers_colours_differ_for_everybody():
    sheet = "".join(path.read_text() for path in (CONSOLE / "src" / "styles").glob("*.css"))
    voices = [colours(f"voice-{n}", sheet) for n in range(8)]
    for theme in (0, 1):
        for ground in ("card", "accent-wash"):
            behind = colours(ground, sheet)[theme]
            assert all(contrast(each[theme], behind) >= LEAST_CONTRAST for each in voices), ground
        for name, sees in SEES.items():
            seen = [np.cbrt(np.clip(sees @ each[theme], 0, None) @ TO_LMS.T) @ TO_LAB.T for each in voices]
            for one, other in itertools.combinations(range(8), 2):
                apart = float(np.linalg.norm(seen[one] - seen[other]))
                assert apart >= LEAST_DISTANCE, (name, theme, one, other, apart)


# --- with one -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def endgame(packaged_speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two people: three sentences of each."""
    path = tmp_path_factory.mktemp("two") / "endgame_nagg_nell.wav"
    with wave.open(str(packaged_speech / path.name)) as long, wave.open(str(path), "wb") as short:
        short.setparams(long.getparams())
        short.writeframes(long.readframes(SPEECH_S * long.getframerate()))
    return path


@pytest.fixture(scope="module")
def served(endgame: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("rich") / "log", voice="hibari")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser(endgame: Path) -> Iterator[Any]:
    with browsers() as launch:
        yield launch(endgame)


@pytest.fixture
def visit(browser: Any, served: Served) -> Iterator[Callable[..., Visitor]]:
    visitors: list[Visitor] = []

    def come(**context: Any) -> Visitor:
        visitors.append(Visitor(browser, **context))
        visitors[-1].page.goto(served.url)
        visitors[-1].ready()
        return visitors[-1]

    yield come
    for visitor in visitors:
        visitor.context.close()


@pytest.fixture(scope="module")
def told(served: Served, endgame: Path) -> Callable[..., httpx.Response]:
    """`told(response_format="vtt")`: what the server answers about the recording."""

    def ask(**form: Any) -> httpx.Response:
        fields = {"model": "moonshine-tiny-en", "language": "en", **form}
        with endgame.open("rb") as audio:
            answer = httpx.post(served.url + ROUTE, data=fields, files={"file": audio}, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer

    return ask


@pytest.fixture(scope="module")
def whole(told: Callable[..., httpx.Response]) -> dict[str, Any]:
    """All of it, with speakers and words."""
    found: dict[str, Any] = told(response_format="verbose_json", spk="true").json()
    assert len({each["speaker"] for each in found["segments"]}) == 2
    return found


def switch(me: Visitor, name: str) -> None:
    if me.page.locator("#settings").is_visible() and not me.page.locator("#rail.shown").count():
        me.page.click("#settings")
    me.page.locator(LABEL.format(name)).click()


def hear(me: Visitor, recording: Path) -> None:
    me.hear(recording)
    me.until("button.stamp")


def download(me: Visitor, form: str) -> tuple[str, str]:
    """Name and text of the file."""
    me.page.click("#download")
    with me.page.expect_download() as coming:
        me.page.click(f"[data-format={form}]")
    return coming.value.suggested_filename, Path(coming.value.path()).read_text()


def split_numbers(text: str) -> tuple[str, list[float]]:
    """The text without its times and confidences, and these: times in seconds."""
    numbers = [
        sum(60**place * float(part) for place, part in enumerate(reversed(found.replace(",", ".").split(":"))))
        for found in NUMBER.findall(text)
    ]
    return NUMBER.sub("#", text), numbers


def test_who_says_what_in_a_recording(visit, endgame, whole):
    me = visit()
    switch(me, "speakers")
    me.page.set_input_files("#file", endgame)
    me.until("#progress-what:has-text('the text comes when all is heard')")
    me.until("#segments .said")
    me.mode("idle")
    ids = {"SPK0": "SPEAKER_00", "SPK1": "SPEAKER_01"}
    assert me.page.evaluate(ROWS) == [[ids[each["speaker"]], each["text"]] for each in whole["segments"]]
    legend = me.page.locator("#voices button")
    assert [name.split("\n")[0] for name in legend.all_inner_texts()] == ["Speaker 1", "Speaker 2"]
    first, second = (legend.nth(n).evaluate("each => getComputedStyle(each).color") for n in (0, 1))
    assert first != second
    assert " 2 speakers " in me.page.inner_text("#subtitle")
    me.expect_calm()


def test_a_speaker_gets_a_name(visit, endgame, whole):
    me = visit()
    switch(me, "speakers")
    hear(me, endgame)
    me.page.click("#voices [data-speaker=SPEAKER_01]")
    me.page.keyboard.type("Nell & Co")
    me.page.keyboard.press("Enter")
    second = me.page.locator("[data-speaker=SPEAKER_01] b")
    assert set(second.all_inner_texts()) == {"Nell & Co"}
    assert second.count() > 2  # in the legend, and beside the text
    assert me.page.evaluate("document.activeElement.dataset.speaker") == "SPEAKER_01"
    me.page.locator("#segments [data-speaker=SPEAKER_00]").first.click()
    me.page.keyboard.type("never mind")
    me.page.keyboard.press("Escape")
    assert set(me.page.locator("[data-speaker=SPEAKER_00] b").all_inner_texts()) == {"Speaker 1"}

    names = {"SPK0": "Speaker 1", "SPK1": "Nell & Co"}
    _, text = download(me, "txt")
    spoken = [(each["speaker"], each["text"]) for each in whole["segments"]]
    wanted = [
        f"{names[who]}: {line}" if who != before else line
        for (who, line), before in zip(spoken, [None, *(who for who, _ in spoken)], strict=False)
    ]
    assert text.splitlines() == wanted
    _, subtitles = download(me, "vtt")
    assert "<v Nell &amp; Co>" in subtitles
    assert "SPEAKER_01" not in subtitles
    assert re.search(r"<\d\d:\d\d:\d\d\.\d{3}>", subtitles), "words light up as they are said"
    _, table = download(me, "rttm")
    assert {line.split()[7] for line in table.splitlines()} == {"SPEAKER_00", "Nell_&_Co"}
    me.page.click("#voices [data-speaker=SPEAKER_01]")
    me.page.keyboard.press("Delete")  # all is selected
    me.page.keyboard.press("Enter")
    assert set(second.all_inner_texts()) == {"Speaker 2"}
    me.expect_calm()


def test_words_are_marked_as_they_are_heard(visit, endgame, told):
    me = visit()
    hear(me, endgame)
    found = [word for each in told(response_format="verbose_json").json()["segments"] for word in each["words"]]
    shown = me.page.locator("#segments .word")
    assert shown.all_inner_texts() == [word["word"] for word in found]
    marks = shown.evaluate_all("each => each.map((word) => word.classList.contains('unsure'))")
    assert marks == [word["confidence"] < UNSURE for word in found]

    me.page.evaluate(MARKED)
    at = 4
    shown.nth(at).click()
    me.until("#primary[aria-label=Pause]")
    assert me.page.evaluate(POSITION) >= found[at]["start"] - 0.01
    sure = f"{round(100 * found[at]['confidence'])} % sure"
    assert sure in me.page.inner_text("#word-tip")
    me.holds("marked.length > 3")
    me.page.keyboard.press("Escape")
    assert me.page.locator("#word-tip").is_hidden()
    me.page.click("#primary")
    heard = me.page.evaluate("marked.map((each) => [...document.querySelectorAll('.word')].indexOf(each))")
    assert heard == list(range(at, at + len(heard)))
    assert me.page.locator(".word.now").count() <= 1
    me.expect_calm()


def test_words_by_keyboard(visit, packaged_speech):
    me = visit()
    hear(me, packaged_speech / "endgame_nagg_nell.wav")  # more than one segment, whoever speaks
    me.page.locator("#segments button.stamp").first.focus()
    me.page.keyboard.press("Tab")
    label = "document.activeElement.getAttribute('aria-label')"
    number = "[...document.querySelectorAll('.word')].indexOf(document.activeElement)"
    assert me.page.evaluate(number) == 0
    assert re.search(r", 0:00\.\d · \d+ % sure$", me.page.evaluate(label))
    for key, at in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("Home", 0), ("ArrowLeft", 0)):
        me.page.keyboard.press(key)
        assert me.page.evaluate(number) == at, key
    me.page.keyboard.press("End")
    last = me.page.evaluate(number)
    me.page.keyboard.press("ArrowDown")
    assert me.page.evaluate(number) == last + 1
    me.page.keyboard.press("ArrowUp")
    assert me.page.evaluate(number) == 0
    assert me.page.locator(".word[tabindex]").count() == 1
    assert me.page.locator("#word-tip").is_visible()
    me.page.keyboard.press("Escape")
    assert me.page.locator("#word-tip").is_hidden()
    me.page.keyboard.press("ArrowRight")
    assert not me.page.evaluate(POSITION)  # arrows have not moved the sound
    me.page.keyboard.press("Enter")
    me.until("#primary[aria-label=Pause]")
    assert me.page.evaluate(POSITION) > 0
    me.expect_calm()


def test_without_words(visit, endgame):
    me = visit()
    switch(me, "words")
    me.page.evaluate(SENT)
    hear(me, endgame)
    assert ["timestamp_granularities[]", "segment"] in me.page.evaluate("sent")  # no time is spent on words
    assert me.page.locator(".word").count() == 0
    me.page.click("#download")
    for form in ("ctm", "textgrid", "rttm"):
        assert me.page.get_attribute(f"[data-format={form}]", "aria-disabled") == "true"
    me.page.click("[data-format=ctm]", force=True)
    me.until(".toast:has-text('This needs words with times')")
    me.page.reload()
    assert not me.page.is_checked("#want-words")  # the browser remembers
    me.expect_calm()


def test_numbers_in_digits(visit, served, told, tmp_path):
    said = "It costs twenty dollars, and we open at nine."
    spoken = httpx.post(
        f"{served.url}/v1/audio/speech",
        json={"model": "hibari", "voice": "heart", "input": said, "response_format": "wav"},
        timeout=120,
    )
    assert spoken.status_code == 200, spoken.text
    recording = tmp_path / "costs.wav"
    recording.write_bytes(spoken.content)
    me = visit()
    hear(me, recording)
    before = me.text()
    assert "$20" not in before
    switch(me, "itn")
    me.page.set_input_files("#file", recording)
    me.until("#segments .word:has-text('$20')")
    me.mode("idle")
    assert me.text() != before
    me.until("button.stamp")
    me.page.locator(".word", has_text="$20").hover()
    me.until("#word-tip:has-text('said: twenty dollars')")
    me.expect_calm()


@pytest.mark.parametrize(
    "forms",
    [
        ("vtt", "json"),
        pytest.param(("rttm", "textgrid"), marks=pytest.mark.slow),
        pytest.param(("srt", "jsonl", "ctm"), marks=pytest.mark.exhaustive),
    ],
    ids=",".join,
)
def test_a_file_of_a_recording_is_the_servers(visit, endgame, told, forms):
    me = visit()
    switch(me, "speakers")
    hear(me, endgame)
    for form in forms:
        wanted = {"json": "verbose_json"}.get(form, form)
        chosen = {"timestamp_granularities[]": "word"} if form in ("srt", "vtt", "jsonl") else {}
        answer = told(response_format=wanted, spk="true", **chosen)
        name, text = download(me, form)
        assert name == f"endgame_nagg_nell.{'TextGrid' if form == 'textgrid' else form}"
        if form == "json":
            text, told_text = (json.dumps(each["segments"]) for each in (json.loads(text), answer.json()))
        else:
            told_text = answer.text
        (got, got_numbers), (expected, expected_numbers) = split_numbers(text), split_numbers(told_text)
        assert got == expected, form
        assert got_numbers == pytest.approx(expected_numbers, abs=NUMBERS_DIFFER), form
    me.expect_calm()


def test_a_file_when_the_server_is_gone(visit, endgame):
    me = visit()
    switch(me, "speakers")
    hear(me, endgame)
    me.context.set_offline(True)
    _, table = download(me, "ctm")
    me.until(".toast:has-text('Made from what this page knows')")
    assert [line.split()[4] for line in table.splitlines()] == me.page.locator(".word").all_inner_texts()
    me.expect_calm("ERR_INTERNET_DISCONNECTED")


def test_hotwords_are_kept_and_counted(visit):
    me = visit()
    me.page.fill("#hotwords", "Nagg:2, Nell\nEndgame\n\nNell")
    assert me.page.inner_text("#hotwords-count") == "3 of 10,000"
    me.page.reload()
    assert me.page.input_value("#hotwords") == "Nagg:2, Nell\nEndgame\n\nNell"
    assert me.page.inner_text("#hotwords-count") == "3 of 10,000"
    me.page.fill("#hotwords", "a" * 201)
    assert "longer than 200" in me.page.inner_text("#hotwords-problem")
    assert me.page.get_attribute("#hotwords", "aria-invalid") == "true"
    me.page.fill("#hotwords", ",".join(f"word{n}" for n in range(10_001)))
    assert "at most 10,000" in me.page.inner_text("#hotwords-problem")
    me.page.fill("#hotwords", "")
    assert me.page.inner_text("#hotwords-problem") == ""
    me.page.focus("#hotwords")
    me.page.keyboard.type("to r")  # single keys are the box's
    assert me.page.get_attribute("body", "data-mode") == "idle"
    me.expect_calm()


def test_how_many_speak_is_told(visit, endgame):
    me = visit()
    assert me.page.is_disabled("#num-speakers")
    switch(me, "speakers")
    me.page.evaluate(SENT)
    me.page.fill("#num-speakers", "1")
    me.hear(endgame)
    sent = me.page.evaluate("window.sent")
    assert ["spk", "true"] in sent
    assert ["num_speakers", "1"] in sent
    assert me.page.locator("#voices button").count() == 1
    me.page.reload()
    me.ready()
    assert me.page.input_value("#num-speakers") == "1"
    me.page.fill("#num-speakers", "0")
    assert "from 1 to 32" in me.page.inner_text("#speakers-problem")
    assert me.page.get_attribute("#num-speakers", "aria-invalid") == "true"
    me.page.set_input_files("#file", endgame)
    me.until("#speakers-problem:has-text('num_speakers')")
    me.page.fill("#num-speakers", "")
    assert me.page.inner_text("#speakers-problem") == ""
    me.page.evaluate(SENT)
    me.hear(endgame)
    assert not [field for field in me.page.evaluate("window.sent") if field[0] == "num_speakers"]
    me.expect_calm("400")


def test_what_the_server_refuses_is_said_beside_it(visit, endgame):
    me = visit()
    me.page.fill("#hotwords", "Nagg:99")
    me.page.set_input_files("#file", endgame)
    me.until("#hotwords-problem:not(:empty)")
    me.until("#banner-text:not(:empty)")
    assert "0.1 to 10" in me.page.inner_text("#hotwords-problem")
    assert me.page.locator("#empty").is_visible()
    me.page.fill("#hotwords", "")
    assert me.page.inner_text("#hotwords-problem") == ""
    me.page.fill("#hotwords", "Nagg:99")
    me.page.click("#primary")
    me.until("#hotwords-problem:not(:empty)")
    me.mode("idle")
    me.page.fill("#hotwords", ",".join(f"wörd{n}" for n in range(9_000)))
    me.page.click("#primary")
    me.until("#hotwords-problem:has-text('Too many to talk with')")
    me.mode("idle")
    me.expect_calm("400")


@needs_axe
@devices_and_schemes
def test_axe_finds_nothing_serious(visit, endgame, device, scheme):
    me = visit(color_scheme=scheme, reduced_motion="reduce", **device)
    switch(me, "speakers")
    me.page.fill("#hotwords", "a" * 201)
    me.expect_accessible("the settings")
    me.page.fill("#hotwords", "")
    me.page.keyboard.press("Escape")
    me.page.locator("#words").click(position={"x": 5, "y": 5})
    hear(me, endgame)
    me.expect_accessible("speakers")
    me.page.locator(".word").nth(3).click()
    me.until(".word.now")
    me.page.click("#primary")
    me.expect_accessible("a word")
    me.page.locator("#voices button").first.click()
    me.expect_accessible("a name")
    me.page.keyboard.press("Escape")
    me.page.click("#download")
    me.expect_accessible("the formats")
    me.expect_calm()


@pytest.mark.slow
def test_the_language_that_is_heard(browser, packaged_speech, tmp_path):
    if store.locate(asr_card("whisper-base")) is None:
        pytest.skip("no weights of whisper-base: asr-serve models fetch whisper-base")
    server = Served(tmp_path / "log", "--model", "whisper-base")
    me = Visitor(browser)
    try:
        me.page.goto(server.url)
        me.page.wait_for_selector("#language option[value=de]", state="attached")
        assert me.page.input_value("#language") == ""  # as it is spoken
        hear(me, packaged_speech / "beckett.wav")
        assert re.search(r" English \(\d\d %\) ", me.page.inner_text("#subtitle"))
        me.page.select_option("#language", "en")
        me.page.set_input_files("#file", packaged_speech / "beckett.wav")
        me.until("#earlier li:nth-child(2)")
        me.mode("idle")
        assert " English · " in me.page.inner_text("#subtitle")  # nobody had to find out
        me.expect_calm()
    finally:
        me.context.close()
        server.stop()


# --- talking ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_who_says_what_while_they_speak(visit):
    me = visit()
    frames: list[dict[str, Any]] = []
    me.page.on("websocket", lambda line: line.on("framereceived", lambda text: frames.append(json.loads(text))))
    switch(me, "speakers")
    me.page.locator("#words").focus()
    me.page.keyboard.press("Space")
    me.talked(SPEECH_S + 2)
    me.page.keyboard.press("Space")
    me.mode("idle")
    segments = [event for event in frames if event["type"] == "segment"]
    who = {event["index"]: event["speaker"] for event in segments}
    assert len(set(who.values())) == 2
    for event in frames:
        if event["type"] == "speakers":
            who |= {each["index"]: each["speaker"] for each in event["segments"]}
    assert [event["type"] for event in frames].count("speakers") == 1
    assert me.page.evaluate(ROWS) == [[who[event["index"]], event["text"]] for event in segments]
    shown = me.page.locator("#segments .word").all_inner_texts()
    assert shown == [word["text"] for event in segments for word in event["words"]]

    me.page.locator("#voices button").first.click()
    me.page.keyboard.type("Nagg")
    me.page.keyboard.press("Enter")
    first = min(who.values())
    _, table = download(me, "rttm")
    names = {first: "Nagg"} | {each: f"Speaker_{int(each[-2:]) + 1}" for each in who.values() if each != first}
    assert [line.split()[7] for line in table.splitlines()] == [names[who[each["index"]]] for each in segments]
    _, table = download(me, "ctm")
    assert len(table.splitlines()) == len(shown)
    _, text = download(me, "json")
    assert [each["text"] for each in json.loads(text)["segments"]] == [each["text"] for each in segments]
    assert "Nagg: " in download(me, "txt")[1]
    assert "<v Nagg>" in download(me, "vtt")[1]
    assert words(download(me, "srt")[1])
    assert 'text = "Nagg"' in download(me, "textgrid")[1]
    me.expect_calm()
