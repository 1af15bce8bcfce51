"""From recordings to a voice, by the command: real speech, a real recogniser, and a model that is only small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tiny_fastpitch
from children import Child
from spoken_by_heart import TEXTS, spoken
from typer.testing import CliRunner

from asr_serve import devices
from asr_serve.api.cli import app
from asr_serve.cloning.clone import clone_voice
from asr_serve.errors import Cancelled, OptionError
from asr_serve.models.auxiliary import ge2e
from asr_serve.models.checkpoints import store as weights
from asr_serve.models.registry import tts_card
from asr_serve.models.tts import fastpitch
from asr_serve.types import PhonemeSpan, Sentence
from asr_serve.voices.cloned_voice import EXAMPLE, validated_consent
from asr_serve.voices.cloning_messages import (
    STAGES,
    CloneFailed,
    CloneMessage,
    CloneProgress,
    CloneReport,
    CloneRequest,
)
from asr_serve.voices.voice_store import VoiceStore

NAMES = [f"{number}.wav" for number in range(len(TEXTS))]
SAID = [f"{text} {TEXTS[at - 1]}" for at, text in enumerate(TEXTS)]
"""Two sentences each."""


def write(path: Path, pcm: np.ndarray, rate_hz: int = 22_050) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate_hz, 0, "NONE", ""))
        file.writeframes((pcm * 32_767).clip(-32_768, 32_767).astype(np.int16).tobytes())


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight clips of a voice, one of noise, and the texts of the first half."""
    if weights.published_folder(ge2e.CARDS[0]) is None:
        pytest.skip("resemblyzer is not installed: pip install --no-deps resemblyzer==0.1.4")
    folder = tmp_path_factory.mktemp("recordings")
    said = spoken(0.9)
    for at, name in enumerate(NAMES):
        write(folder / name, np.concatenate([said[at].pcm, said[at - 1].pcm]))
    rng = np.random.default_rng(0)
    write(folder / "noise.wav", 0.1 * rng.standard_normal(3 * 22_050))
    (folder / "texts.csv").write_text("".join(f"{n}|{t}\n" for n, t in list(zip(NAMES, SAID, strict=True))[:4]))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from asr_serve_tools.train.voice.teacher_voices import TeacherPhonemizer

    letters = "".join(sorted(set("_ ,.?!;:" + "".join(TeacherPhonemizer()._hibari.vocab))))
    return tiny_fastpitch.save(tmp_path_factory.mktemp("tiny"), letters="_" + letters.replace("_", ""))


@pytest.fixture
def order(recordings: Path, checkpoint: Path, tmp_path: Path) -> Callable[..., CloneRequest]:
    def made(**more: Any) -> CloneRequest:
        return CloneRequest(
            **{
                "name": "ada",
                "audio": [str(recordings)],
                "texts": dict(zip(["0", "1", "2", "3"], SAID, strict=False)),
                "consent": validated_consent(EXAMPLE, "tester"),
                "model": "fastpitch-en",
                "weights": str(checkpoint),
                "voices_dir": str(tmp_path / "voices"),
                "minutes": 0.02,
                **more,
            }
        )

    return made


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_command_makes_a_voice(recordings, tmp_path):
    """With the model that is shipped, which knows this very voice."""
    shipped = tts_card("fastpitch-en")
    if weights.published_folder(shipped) is None:
        pytest.skip("the weights of fastpitch-en are not here")
    made = CliRunner().invoke(
        app,
        [
            *("clone", "--name", "ada", "--audio", str(recordings), "--texts", str(recordings / "texts.csv")),
            *("--consent", EXAMPLE, "--minutes", "0.3"),
            *("--voices-dir", str(tmp_path / "voices"), "--json"),
        ],
    )
    assert made.exit_code == 0, made.output
    report = json.loads(made.stdout)
    assert "learning the voice" in made.stderr
    out = {Path(clip["clip"]).name: clip["left_out"] for clip in report["clips"] if clip["left_out"]}
    assert set(out) == {"noise.wav"}
    used = {Path(clip["clip"]).name: clip["text"] for clip in report["clips"] if not clip["left_out"]}
    assert {name.partition("#")[0] for name in used} == set(NAMES)
    assert used["0.wav"] == SAID[0]
    heard = " ".join(text for name, text in used.items() if name.startswith("7")).lower()
    assert "four hours" in heard or "4 hours" in heard, "whose text nobody told was heard"
    store = VoiceStore(tmp_path / "voices")
    card = store.card("ada")
    assert card.clips == len(used)
    assert card.consent.statement == EXAMPLE
    assert card.start in shipped.voices
    assert card.ceiling > 0.85
    assert report["after"] < report["before"]
    assert card.similarity is None or card.similarity > 0.6

    model = fastpitch.load(weights.verified_published_folder(shipped), shipped, devices.make_device("cpu", "fp32"))
    model.register_voice("ada", store.path("ada"))
    (said,) = model.encode([Sentence((PhonemeSpan("hˈW ɑɹ ju"),), "ada")])
    assert model.whole(said).shape[1] == said.frames


@pytest.mark.slow
def test_progress_and_the_same_again(order):
    told: list[CloneProgress] = []
    report = clone_voice(order(), told.append)
    assert isinstance(report, CloneReport)
    shares = [each.share for each in told]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert [stage for stage in STAGES if stage in {each.stage for each in told}] == list(STAGES)[1:]
    assert {each.held_out is not None for each in told if each.stage == "learning"} <= {True, False}
    with pytest.raises(OptionError, match="already"):
        clone_voice(order())


def test_stopping_leaves_nothing(order):
    asked = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 4

    with pytest.raises(Cancelled):
        clone_voice(order(), stop=stop)
    assert VoiceStore(Path(order().voices_dir)).names() == []


def test_a_voice_of_the_models_own_is_not_replaced(order):
    with pytest.raises(OptionError, match="own"):
        clone_voice(order(name="heart"))


def worker(order: CloneRequest, *, hang_up: bool) -> tuple[list[CloneMessage], int]:
    """The process that a server starts: all that it says."""
    process = Child(
        [sys.executable, "-m", "asr_serve.cloning.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()
        if hang_up:
            process.stdin.close()
        said = [msgspec.json.decode(line, type=CloneMessage) for line in process.stdout]
        if not hang_up:
            process.stdin.close()
    return said, process.returncode


@pytest.mark.slow
def test_the_worker_reports_its_progress(order):
    said, code = worker(order(), hang_up=False)
    assert code == 0
    assert isinstance(said[-1], CloneReport)
    assert all(isinstance(each, CloneProgress) for each in said[:-1])
    assert VoiceStore(Path(order().voices_dir)).names() == ["ada"]
    said, code = worker(order(), hang_up=False)
    assert isinstance(said[-1], CloneFailed)
    assert (said[-1].code, code) == ("option_error", 0)
    assert "already" in said[-1].message


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_worker_stops_when_its_connection_closes(order):
    said, code = worker(order(minutes=30.0), hang_up=True)
    assert isinstance(said[-1], CloneFailed)
    assert (said[-1].code, code) == ("cancelled", 0)
    assert VoiceStore(Path(order().voices_dir)).names() == []
