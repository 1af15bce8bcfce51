"""OpenAI Realtime and Deepgram through the plugins of voice-agent frameworks and Deepgram's SDK, as they are published:
`make clients` installs them. Words arrive through each one's own interface."""

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


@pytest.mark.slow
def test_livekit_with_deepgram(python, agents_server, beckett):
    events = told(python, "livekit_stt.py", f"{agents_server.url}/v1", beckett, "nova-3")
    expect_beckett([text for event, text in events if event == "final_transcript"])
    kinds = [event for event, _ in events]
    assert kinds.count("start_of_speech") == kinds.count("end_of_speech") >= 4
    assert "interim_transcript" in kinds
    agents_server.expect_empty()


@pytest.mark.slow
def test_pipecat_with_deepgram(python, agents_server, beckett):
    events = told(python, "pipecat_stt.py", agents_server.url, beckett, "nova-3-general", "deepgram")
    expect_beckett([text for event, text in events if event == "TranscriptionFrame"])
    kinds = [event for event, _ in events]
    assert "error" not in kinds
    assert "InterimTranscriptionFrame" in kinds
    agents_server.expect_empty()


def test_deepgrams_sdk_hears(python, agents_server, beckett):
    """A recording, then the same live: with interim results and UtteranceEnd."""
    events = told(python, "deepgram_sdk.py", agents_server.url, "listen", beckett)
    texts = {kind: [text for event, text in events if event == kind] for kind, _ in events}
    expect_beckett(texts["file"])
    expect_beckett(texts["final"])
    assert texts["interim"]
    assert {"SpeechStarted", "UtteranceEnd", "Metadata"} <= set(texts)
    assert texts["refused"] == ["400 unsupported_option"]
    agents_server.expect_empty()


def test_deepgrams_sdk_speaks(python, speaker):
    """A text, then the same in parts: the same samples, but for the last ones of the resampler."""
    [file, *live] = told(python, "deepgram_sdk.py", speaker.url, "speak", "Ever tried. Ever failed.")
    assert file[0] == "file"
    assert int(file[1] or 0) > 30_000
    kinds = [event for event, _ in live]
    assert kinds == ["Metadata", "Flushed", "audio"]
    assert abs(int(live[-1][1] or 0) - int(file[1] or 0)) < 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "ways"),
    [
        ("livekit_tts.py", ()),
        ("pipecat_tts.py", ("socket",)),
        ("pipecat_tts.py", ("http",)),
        ("pipecat_tts.py", ("interrupted",)),
    ],
)
def test_deepgrams_voice_in_agents(python, speaker, tmp_path, script, ways):
    """Over HTTP and over the WebSocket, word by word: the text is in what the agent would play. `interrupted`: nothing
    of the sentence that the caller interrupted is left."""
    text = "Ever tried. Ever failed. No matter. Try again."
    events = told(python, script, *([f"{speaker.url}/v1"] if not ways else [speaker.url]), tmp_path, text, *ways)
    assert "error" not in dict(events), events
    written = {event: Path(path) for event, path in events if path}
    assert set(written) == (set(ways) or {"http", "socket", "socket-again"})
    for path in written.values():
        answer = speaker.http.post("/v1/audio/transcriptions", files={"file": path.read_bytes()})
        assert wer([text], [answer.json()["text"]]).errors <= 1, answer.text
    speaker.expect_empty()
