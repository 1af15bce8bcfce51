"""OpenAI Realtime through the plugins of voice-agent frameworks, as they are published: `make clients` installs
them. Words arrive through each one's own interface."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from other_environments import python_of
from running_server import WAIT_S, Running

from asr_serve_tools.evaluate.wer import wer

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests/clients"
BECKETT = "Ever tried, ever failed, no matter, try again, fail again, fail better."
ALIASES = dict.fromkeys(("gpt-4o-transcribe", "gpt-realtime-whisper"), "moonshine-tiny-en")


@pytest.fixture(scope="session")
def python() -> Path:
    return python_of(".venv-clients", "no .venv-clients here: `make clients` builds it")


@pytest.fixture(scope="session")
def agents_server(serve: Callable[..., Running]) -> Running:
    return serve(aliases=ALIASES)


def told(python: Path, script: str, *arguments: object) -> list[tuple[str, str | None]]:
    """(event, text), as the plugin tells them."""
    command = [str(python), str(SCRIPTS / script), *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)
    assert ran.returncode == 0, ran.stderr[-2_000:]
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    return [(event["event"], event["text"]) for event in found]


def expect_beckett(texts: list[str | None]) -> None:
    """Cut at every pause, a word may be heard otherwise."""
    assert wer([BECKETT], [" ".join(text or "" for text in texts)]).errors <= 2, texts


@pytest.mark.slow
@pytest.mark.parametrize("model", ALIASES)
def test_livekit(python, agents_server, beckett, model):
    """With the first model the server says when a turn is over; with the second the plugin's own Silero does."""
    events = told(python, "livekit_stt.py", f"{agents_server.url}/v1", beckett, model)
    expect_beckett([text for event, text in events if event == "final_transcript"])
    kinds = [event for event, _ in events]
    assert kinds.count("start_of_speech") == kinds.count("end_of_speech") >= 4
    assert "interim_transcript" in kinds
    agents_server.expect_empty()


@pytest.mark.slow
@pytest.mark.parametrize("turns", ["server", "local"])
def test_pipecat(python, agents_server, beckett, turns):
    url = agents_server.url.replace("http", "ws", 1)
    events = told(python, "pipecat_stt.py", f"{url}/v1/realtime", beckett, "gpt-realtime-whisper", turns)
    expect_beckett([text for event, text in events if event == "TranscriptionFrame"])
    kinds = [event for event, _ in events]
    assert "error" not in kinds
    assert "InterimTranscriptionFrame" in kinds
    proposed = kinds.count("ProposedUserStartedSpeakingFrame"), kinds.count("ProposedUserStoppedSpeakingFrame")
    assert proposed[0] == proposed[1]
    assert (proposed[0] >= 4) == (turns == "server")
    agents_server.expect_empty()
