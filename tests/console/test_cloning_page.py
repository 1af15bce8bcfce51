"""Cloning from the microphone: the real server, a Chromium whose microphone reads sentences, and the real cloning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from case_tiers import exhaustive_after
from console_page import ASKED_LATE, MICROPHONE_OFF, WAIT_S, Cable, Served, Visitor, browsers, needs_axe

from asr_serve.models.auxiliary import ge2e
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import tts_card
from asr_serve.voices.voice_store import VoiceStore

ADMIN, USER = "k-admin", "k-user"
READ_ALOUD = """() => {
  navigator.mediaDevices.getUserMedia = async () => {
    const [context, sentence] = [new AudioContext(), document.querySelector("#sentence")];
    const answer = await fetch("/v1/audio/speech", {
      method: "POST",
      headers: { Authorization: "Bearer %s", "Content-Type": "application/json" },
      body: JSON.stringify({ input: sentence.textContent, voice: "emma", response_format: "wav" }),
    });
    const source = context.createBufferSource();
    source.buffer = await context.decodeAudioData(await answer.arrayBuffer());
    const microphone = context.createMediaStreamDestination();
    source.connect(microphone);
    source.start(context.currentTime + 0.3);
    window.read = new Promise((resolve) => (source.onended = resolve));
    return microphone.stream;
  };
}"""
"""A microphone in whose room a voice of the server reads the sentence that is shown."""
READ: dict[str, bytes] = {}
"""What the server has read aloud, by the request: every test has the first sentences read."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("voices")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Served]:
    if store.published_folder(tts_card("fastpitch-en")) is None or store.published_folder(ge2e.CARDS[0]) is None:
        pytest.skip("the weights of fastpitch-en or of the speaker encoder are not here")
    log = tmp_path_factory.mktemp("clones") / "log"
    flags = ("--api-key", USER, "--set", f"admin_keys={ADMIN}", "--set", f"engine.voices_dir={folder}")
    server = Served(log, *flags, voice="fastpitch-en")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def launch() -> Iterator[Callable[..., Any]]:
    with browsers() as found:
        yield found


TRAINING_S = 480.0
"""Limit in seconds. A voice is trained for half a minute on two free cores, and for minutes beside other tests."""


def read_once(route: Any) -> None:
    """Answers with what the server has said to the same request before. Cloned voices are always asked for."""
    asked = route.request.post_data or ""
    if json.loads(asked)["voice"] != "emma":
        route.continue_()
        return
    if asked not in READ:
        answer = route.fetch()
        assert answer.ok, answer.text()
        READ[asked] = answer.body()
    route.fulfill(body=READ[asked], content_type="audio/wav")


def at_the_page(browser: Any, url: str, key: str = ADMIN, read_aloud: bool = True) -> Visitor:
    visitor = Visitor(browser)
    reads = f"({READ_ALOUD % ADMIN})();" if read_aloud else ""
    visitor.page.add_init_script(f"sessionStorage.setItem('asr-serve.key', '{key}'); {reads}")
    visitor.page.route("**/v1/audio/speech", read_once)
    visitor.page.goto(f"{url}/speak")
    visitor.page.wait_for_selector("#voice-list input[value=emma]", state="attached")
    return visitor


@pytest.fixture
def me(launch: Callable[..., Any], served: Served, packaged_speech: Path) -> Iterator[Visitor]:
    visitor = at_the_page(launch(packaged_speech / "beckett.wav"), served.url)
    yield visitor
    visitor.context.close()


def read(me: Visitor, sentences: int) -> None:
    """The first sentences are read aloud and recorded."""
    for number in range(sentences):
        me.page.click("#read")
        me.until("#read[aria-pressed=true]")
        me.holds("document.querySelector('#read-state').textContent.startsWith('Recording, ')")
        me.page.evaluate("read")
        me.page.click("#read")
        me.until(f"#read-state:has-text('{number + 1} sentence')")
        me.page.click("#read-next")


def test_nothing_is_sent_without_consent_or_enough_speech(me):
    me.page.click("#clone")
    assert me.page.evaluate("document.activeElement.id") == "speaker"
    me.page.fill("#speaker", "Ada Lovelace")
    assert me.page.input_value("#voice-name") == "ada-lovelace"
    assert me.page.input_value("#consent").startswith("I, Ada Lovelace, am the speaker in these recordings and agree")
    me.page.check("#agree")
    assert me.page.is_disabled("#clone-make"), "nothing is recorded"
    read(me, 6)
    assert me.page.is_enabled("#clone-make")
    me.page.uncheck("#agree")
    assert me.page.is_disabled("#clone-make")
    me.page.check("#agree")
    me.page.fill("#voice-name", "Ada!")
    assert "small letters" in me.page.inner_text("#voice-name-problem")
    assert me.page.is_disabled("#clone-make")
    me.page.fill("#voice-name", "emma")
    me.page.click("#clone-make")
    me.until("#voice-name-problem:has-text('emma')")  # the server's: a voice of the model has the name
    me.page.fill("#voice-name", "ada")
    me.page.fill("#consent", "Go on then, whatever it may be.")
    assert not me.page.is_checked("#agree"), "to another statement nobody has agreed"
    me.page.check("#agree")
    me.page.click("#clone-make")
    me.until("#consent-problem:has-text('does not say who agrees')")
    assert me.page.evaluate("document.activeElement.id") == "consent"
    me.page.keyboard.press("Escape")
    me.page.click("#clone")
    assert "6 sentences" in me.page.inner_text("#read-state"), "what was recorded is kept"
    me.expect_calm("400")


def test_a_sentence_is_heard_again_and_recorded_anew(me):
    me.page.click("#clone")
    me.page.click("#read")
    me.holds("document.querySelector('#read-state').textContent.startsWith('Recording, ')")
    me.page.keyboard.press("Escape")  # ends the recording, and leaves the dialog open
    me.until("#read[aria-pressed=false]")
    assert me.page.evaluate("document.querySelector('#clone-dialog').open")
    assert "too short" in me.page.inner_text("#read-problem")
    read(me, 1)
    me.page.click("#read-before")
    assert me.page.inner_text("#read-text") == "Record again"
    me.page.click("#read-listen")
    assert me.page.is_disabled("#read-before")
    me.expect_calm()


def test_no_permission_for_the_microphone(launch, served, packaged_speech):
    me = at_the_page(launch(packaged_speech / "beckett.wav", False), served.url, read_aloud=False)
    me.page.click("#clone")
    me.page.click("#read")
    me.until("#read-problem:has-text('not allowed to use the microphone')")
    assert me.page.get_attribute("#read", "aria-pressed") == "false"
    me.expect_calm()
    me.context.close()


@pytest.mark.parametrize("stopped", ["#read", "#clone-close", "Escape"])
def test_the_microphone_is_allowed_after_the_recording_was_stopped(launch, served, packaged_speech, stopped):
    me = at_the_page(launch(packaged_speech / "beckett.wav"), served.url, read_aloud=False)
    me.page.evaluate(ASKED_LATE)
    me.page.click("#clone")
    me.page.click("#read")
    me.until("#read[aria-pressed=true]")
    if stopped == "Escape":
        me.page.keyboard.press(stopped)
    else:
        me.page.click(stopped)
    me.holds("document.querySelector('#read').getAttribute('aria-pressed') === 'false'")
    me.page.evaluate("allow()")
    me.holds(MICROPHONE_OFF)
    assert me.page.text_content("#read-state").startswith("0 sentences")
    assert me.page.text_content("#read-problem") == ""
    me.expect_calm()
    me.context.close()


@contextmanager
def cloning_of_another(served: Served, speech: Path) -> Iterator[dict[str, Any]]:
    """A cloning that another administrator begins."""
    consent = "I, Carl, am the speaker in these recordings and agree that my voice is cloned and used to speak."
    with httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=WAIT_S) as http:
        with speech.open("rb") as file:
            answer = http.post("/v1/voices", data={"name": "carl", "consent": consent}, files={"files": file})
        assert answer.status_code == 202, answer.text
        job = answer.json()
        try:
            yield job
        finally:
            ended = http.delete(f"/v1/voices/jobs/{job['id']}").json()
        assert ended["state"] == "cancelled"


def answer_events(me: Visitor, body: str) -> None:
    """Whoever follows a cloning gets these events, and then the stream ends."""
    event_stream = "text/event-stream"
    me.page.route("**/v1/voices/jobs/*/events", lambda route: route.fulfill(body=body, content_type=event_stream))


def test_what_was_read_and_chosen_stays_when_the_cloning_of_another_ends(me, served, packaged_speech):
    chosen = me.page.locator("#voice-list input:not(:checked)").first.get_attribute("value")
    me.page.check(f"#voice-list input[value={chosen}]", force=True)
    me.page.click("#clone")
    read(me, 1)
    me.page.click("#clone-close")
    me.page.evaluate("window.listed = document.querySelector('#voice-list ul')")
    with cloning_of_another(served, packaged_speech / "two_cities.wav") as job:
        for state, end in (
            ("running", "#cloning-state:has-text('The connection is lost')"),
            ("done", ".toast:has-text('The voice carl is made')"),
        ):
            body = f"data: {json.dumps(job | {'state': state})}\n\n"
            answer_events(me, body)
            me.page.click("#clone")  # the cloning is found
            me.until(end)
            assert "1 sentence," in me.page.inner_text("#read-state")
            me.page.click("#clone-close")
    me.holds("!window.listed.isConnected")  # the list was loaded again, and is shown
    assert me.page.locator("#voice-list input:checked").get_attribute("value") == chosen
    assert me.page.is_hidden("#cloning")
    me.expect_calm()


def test_a_cloning_is_cancelled_after_its_connection_was_lost(launch, served, packaged_speech):
    cable = Cable(served.port)
    me = at_the_page(launch(packaged_speech / "beckett.wav"), cable.url, read_aloud=False)
    with cloning_of_another(served, packaged_speech / "two_cities.wav") as job:
        me.page.click("#clone")
        me.until("#cloning-state:has-text('Cloning carl')")
        me.page.click("#clone-close")
        cable.cut()
        me.until("#cloning-state:has-text('The cloning goes on if the server does')")
        cable.mend()
        me.page.click("#cloning-cancel")
        me.until(".toast:has-text('The cloning was cancelled')")
        assert me.page.is_hidden("#cloning")
        found = httpx.get(f"{served.url}/v1/voices/jobs/{job['id']}", headers={"Authorization": f"Bearer {ADMIN}"})
        assert found.json()["state"] == "cancelled"
    me.expect_calm("ERR_", "Failed to load")
    me.context.close()
    cable.close()


def test_only_administrators_clone_and_delete(launch, served, packaged_speech):
    me = at_the_page(launch(packaged_speech / "beckett.wav"), served.url, USER)
    me.page.click("#clone")
    me.until("#clone-problem:has-text('Only administrators clone voices')")
    me.page.click("#clone-key")
    me.page.fill("#key", ADMIN)
    me.page.click("dialog:has(#key) [type=submit]")
    me.holds("document.querySelector('#clone-problem').textContent === ''")
    assert me.page.is_hidden("#clone-key")
    me.expect_calm("403")
    me.context.close()


@pytest.mark.slow
def test_the_server_is_gone(launch, served, packaged_speech):
    cable = Cable(served.port)
    me = at_the_page(launch(packaged_speech / "beckett.wav"), cable.url)
    me.page.click("#clone")
    me.page.fill("#speaker", "Ada")
    read(me, 6)
    me.page.check("#agree")
    cable.cut()
    me.page.click("#clone-make")
    me.until("#clone-problem:has-text('does not answer')")
    assert me.page.is_enabled("#clone-make")
    assert "6 sentences" in me.page.inner_text("#read-state")
    me.expect_calm("ERR_", "Failed to load")
    me.context.close()
    cable.close()


@pytest.mark.slow
def test_a_voice_is_made_heard_and_deleted(me, served, folder):
    me.page.click("#clone")
    me.page.fill("#speaker", "Ada")
    read(me, 8)
    me.page.check("#agree")
    me.page.click("#clone-make")
    me.until("#cloning-state:has-text('Cloning ada')")
    assert not me.page.evaluate("document.querySelector('#clone-dialog').open")
    me.until("#voice-list input[value=ada]:checked", TRAINING_S)
    assert me.page.is_hidden("#cloning")
    card = VoiceStore(folder).card("ada")
    assert card.consent.statement == (
        "I, Ada, am the speaker in these recordings and agree that my voice is cloned and used to speak."
    )
    me.page.click("[data-sample=ada]")
    me.mode("speaking")
    me.mode("idle")
    me.page.click("[aria-label='Delete the voice ada']")
    me.page.click("#delete-dialog [value=keep]")
    assert me.page.locator("#voice-list input[value=ada]").count() == 1
    me.page.click("[aria-label='Delete the voice ada']")
    me.page.click("#delete-dialog [value=delete]")
    me.page.wait_for_selector("#voice-list input[value=ada]", state="detached")
    assert httpx.get(f"{served.url}/v1/voices", headers={"Authorization": f"Bearer {USER}"}).json()["data"] == []
    me.expect_calm()


@pytest.mark.slow
def test_a_cloning_is_cancelled_from_a_page_that_was_opened_anew(me, served):
    me.page.click("#clone")
    me.page.fill("#speaker", "Bob")
    read(me, 6)
    me.page.check("#agree")
    me.page.click("#clone-make")
    me.until("#cloning-state:has-text('Cloning bob')")
    me.page.reload()
    me.page.wait_for_selector("#voice-list input[value=emma]", state="attached")
    me.page.click("#clone")  # it is found again
    me.until("#cloning-state:has-text('Cloning bob')")
    me.page.click("#clone-close")
    me.page.click("#cloning-cancel")
    me.until(".toast:has-text('The cloning was cancelled')")
    assert me.page.is_hidden("#cloning")
    me.expect_calm()


@needs_axe
@pytest.mark.parametrize(
    ("scheme", "width"), exhaustive_after(2, [("light", 1280), ("dark", 320), ("dark", 1280), ("light", 320)])
)
def test_axe_finds_nothing_serious(me, scheme, width):
    me.page.emulate_media(color_scheme=scheme)
    me.page.set_viewport_size({"width": width, "height": 740})
    if width == 320:
        me.page.click("#settings")
    me.page.click("#clone")
    me.page.fill("#voice-name", "Not a name")
    me.expect_accessible("the dialog that clones")
