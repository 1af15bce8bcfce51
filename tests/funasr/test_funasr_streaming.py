"""FunASR's guide, section 4: its snippet as it is written, and streaming text in scripts without spaces."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_clients import NEMO
from sharp_folders import write_sharp

from asr_serve.api.stream import whole_words
from asr_serve.audio.reader import read_audio
from asr_serve.errors import OptionError, UnsupportedAudio, UnsupportedOption
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


def test_results_have_the_fields_of_the_guide(engine: FunASRNanoStreamingVLLM, packaged_speech: Path) -> None:
    """Real speech: the fixed text grows, leaves eight characters, and ends as the whole."""
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


@pytest.fixture(scope="module")
def engine() -> Iterator[FunASRNanoStreamingVLLM]:
    made = FunASRNanoStreamingVLLM("moonshine-tiny-en")
    yield made
    made.close()


def test_decoding_options_of_a_stream(engine: FunASRNanoStreamingVLLM, packaged_speech: Path) -> None:
    source = packaged_speech / "beckett.wav"

    def results(**options: Any) -> list[dict[str, Any]]:
        return list(engine.streaming_generate(source, **options))

    plain = results()
    assert results(temperature=0, repetition_penalty=1.0, max_new_tokens=400) == plain
    assert results(temperature=1.0, top_k=1)[-1] == plain[-1]
    assert results(repetition_penalty=2.0)[-1]["text"] != plain[-1]["text"]
    limited = list(engine.model.stream(source, max_new_tokens=6))
    assert [len(segment.tokens) for segment in limited[-1].segments] == [6] * len(limited[-1].segments)
    found = results(max_new_tokens=6)
    assert [each["text"] for each in found] == [each.text for each in limited]
    for before, after in itertools.pairwise(found):  # also the last word, which the limit cuts
        assert after["fixed_text"].startswith(before["fixed_text"])
    assert found[-1]["text"] != plain[-1]["text"]


def test_tokens_are_sampled_from_the_likeliest(engine: FunASRNanoStreamingVLLM, packaged_speech: Path) -> None:
    def text(temperature: float, **options: Any) -> str:
        return str(engine.generate(packaged_speech / "beckett.wav", temperature=temperature, **options)[0]["text"])

    greedy, sampled = text(0), text(1)
    assert text(1, top_k=1) == text(1, top_p=1e-6) == greedy
    assert sampled == text(1, top_k=0, top_p=1.0), "the seed is the same"
    assert sampled not in (greedy, text(1, top_k=2), text(1, top_p=0.5))


def test_chunks_of_every_kind(engine: FunASRNanoStreamingVLLM, packaged_speech: Path) -> None:
    pcm = read_audio(packaged_speech / "beckett.wav")[: 5 * 16_000]
    whole = np.round(pcm * 32_767).astype(np.int16)
    cuts = [whole[at : at + 4_000] for at in range(0, len(whole), 4_000)]
    wanted = list(engine.streaming_generate(iter(cuts)))
    assert wanted[-1]["text"]
    for kind in (torch.from_numpy, np.ndarray.tolist, np.ndarray.tobytes):
        assert list(engine.streaming_generate(map(kind, cuts))) == wanted
    floats = [cut.astype(np.float32) / 32_768 for cut in cuts]
    for kind in (torch.from_numpy, np.ndarray.tolist, lambda cut: tuple(cut.tolist())):
        assert list(engine.streaming_generate(map(kind, floats)))[-1] == wanted[-1]
    halves = list(engine.streaming_generate(torch.from_numpy(cut).bfloat16() for cut in floats))
    assert halves[-1]["audio_duration_ms"] == 5_000
    assert not list(engine.streaming_generate([[]]))[-1]["text"]
    for wrong in ([[40_000]], [["a"]], [[[0.0], [0.0, 0.0]]], [torch.zeros(1, 9)], [None], [0.5]):
        with pytest.raises(UnsupportedAudio):
            list(engine.streaming_generate(wrong))


def test_streaming_arguments_are_checked_before_loading(engine: FunASRNanoStreamingVLLM) -> None:
    for wrong in ({"chunk_ms": 50}, {"chunk_ms": "x"}, {"rollback_chars": -1}, {"rollback_chars": True}):
        [name] = wrong
        with pytest.raises(OptionError, match=rf"^{name}=") as refused:
            FunASRNanoStreamingVLLM("no-such-model", **wrong)
        assert refused.value.param == name
    for wrong in ({"temperature": 3}, {"max_new_tokens": 0}, {"repetition_penalty": 9}, {"itn": "no"}):
        [name] = wrong
        with pytest.raises(OptionError, match=rf"^{name}="):
            list(engine.streaming_generate(np.zeros(16_000, np.float32), **wrong))


def test_a_model_without_a_decoder_refuses_its_options(tmp_path: Path) -> None:
    shutil.copy(NEMO, tmp_path)
    streaming = FunASRNanoStreamingVLLM(str(tmp_path))
    with streaming.model:
        for options in ({"max_new_tokens": 9}, {"repetition_penalty": 1.5}, {"temperature": 0.5}, {"top_k": 3}):
            [(name, value)] = options.items()
            with pytest.raises(UnsupportedOption, match=f"{name}={value}"):
                list(streaming.streaming_generate(np.zeros(16_000, np.float32), **options))
        assert list(streaming.streaming_generate(np.zeros(16_000, np.float32), temperature=0))


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
