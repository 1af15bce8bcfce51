"""FunASR's guide, section 4: its snippet as it is written, and streaming text in scripts without spaces."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
from sharp_folders import write_sharp

from asr_serve.api.stream import whole_words
from asr_serve.funasr import FunASRNanoStreamingVLLM

NAME = "FunAudioLLM/Fun-ASR-Nano-2512"


@pytest.fixture
def here(packaged_speech: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working folder with the model and the recording that the guide names."""
    write_sharp("nano", tmp_path / NAME)
    shutil.copy(packaged_speech / "beckett.wav", tmp_path / "audio.wav")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_guides_usage(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(
        """
from asr_serve.funasr import FunASRNanoStreamingVLLM

engine = FunASRNanoStreamingVLLM.from_pretrained(
    model="FunAudioLLM/Fun-ASR-Nano-2512",
    chunk_ms=720,
    rollback_chars=8,
)

for result in engine.streaming_generate("audio.wav", language="中文"):
    if result["is_final"]:
        print(f"Final: {result['text']}")
    else:
        print(f"[{result['audio_duration_ms']:.0f}ms] Confirmed: {result['fixed_text']}")
""",
        names,
    )
    printed = capsys.readouterr().out
    with names["engine"].model as library:
        wanted = list(library.stream("audio.wav", language="zh"))
    lines = [f"[{each.audio_duration_ms}ms] Confirmed: {each.fixed_text}" for each in wanted[:-1]]
    assert printed == "\n".join([*lines, f"Final: {wanted[-1].text}\n"])
    assert [each.audio_duration_ms for each in wanted[:3]] == [720, 1440, 2160]
    assert wanted[-1].text


def test_results_have_the_fields_of_the_guide(packaged_speech: Path) -> None:
    """Real speech: the fixed text grows, leaves eight characters, and ends as the whole."""
    engine = FunASRNanoStreamingVLLM("moonshine-tiny-en")
    with engine.model:
        results = list(engine.streaming_generate(packaged_speech / "beckett.wav"))
    names = {"text", "fixed_text", "is_final", "chunk_idx", "audio_duration_ms"}
    assert all(set(each) == names for each in results)
    assert [each["chunk_idx"] for each in results] == list(range(1, len(results) + 1))
    assert [each["is_final"] for each in results] == [False] * (len(results) - 1) + [True]
    for before, after in itertools.pairwise(results):
        assert after["fixed_text"].startswith(before["fixed_text"])
        assert after["text"].startswith(before["fixed_text"])
        assert not before["fixed_text"] or len(before["fixed_text"]) <= len(before["text"]) - 8
    assert (
        results[-1]["fixed_text"]
        == results[-1]["text"]
        == "".join(("Ever tried, ever failed, no matter, try again, ", "fail again, fail better."))
    )
    assert any(each["fixed_text"] for each in results[:-1])


@pytest.mark.parametrize(
    ("text", "end", "whole"),
    [
        ("今天天气很好", 4, 4),
        ("今天 weather 很好", 6, 2),
        ("今天 weather 很好", 10, 10),
        ("今天 weather很好", 10, 10),
        ("It is late", 4, 2),
        ("late", 3, 0),
        ("late", 4, 4),
        ("late", 0, 0),
    ],
)
def test_text_is_fixed_in_whole_words(text: str, end: int, whole: int) -> None:
    assert whole_words(text, end) == whole
