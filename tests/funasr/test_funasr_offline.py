"""FunASR's guide, sections 3 and 7: its snippets as they are written, over a folder of its form with random weights."""

from __future__ import annotations

import io
import json
import logging
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import msgspec
import numpy as np
import pytest
import soundfile
import torch
from engine_clients import NEMO
from hub_speech_llm_folders import write_folder as write_hub_folder
from huggingface_hub.errors import LocalEntryNotFoundError
from sharp_folders import require_speakers, write_sharp

from asr_serve.api.library import Model
from asr_serve.audio.reader import read_audio
from asr_serve.config import EngineConfig
from asr_serve.errors import (
    AsrServeError,
    EngineClosed,
    MissingOption,
    OptionError,
    SourceNotFound,
    UnknownModel,
    UnsupportedOption,
)
from asr_serve.funasr import AutoModelVLLM, FunASRNanoStreamingVLLM, FunASRNanoVLLM, GLMASRVLLMEngine, loading
from asr_serve.funasr.option_names import ARGUMENTS, renamed_options
from asr_serve.pipelines.offline.transcribe import MAX_OPEN_FILES

NAME = "FunAudioLLM/Fun-ASR-Nano-2512"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sharp("nano", tmp_path_factory.mktemp("hub") / NAME)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[AutoModelVLLM]:
    made = AutoModelVLLM(model=str(folder))
    yield made
    made.close()


@pytest.fixture
def here(folder: Path, packaged_speech: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working folder with the model and the recordings that the guide names."""
    (tmp_path / "FunAudioLLM").symlink_to(folder.parent)
    for name in ("audio.wav", "audio1.wav"):
        shutil.copy(packaged_speech / "beckett.wav", tmp_path / name)
    soundfile.write(tmp_path / "audio2.wav", read_audio(packaged_speech / "two_cities.wav")[: 5 * 16_000], 16_000)
    (tmp_path / "wav.scp").write_text("first audio1.wav\nsecond audio2.wav\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def texts(model: Model, paths: list[Any], **options: Any) -> list[str]:
    """Texts of the library, decoded greedily."""
    return [found.text for found in model.transcribe(paths, temperatures=(0.0,), **options)]


def run(snippet: str, **names: Any) -> dict[str, Any]:
    exec(snippet, names)
    return names


# --- the guide's snippets -------------------------------------------------------------------------------------


def test_the_universal_interface(here: Path, capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    names = run(
        """
from asr_serve.funasr import AutoModelVLLM

model = AutoModelVLLM(
    model="FunAudioLLM/Fun-ASR-Nano-2512",
    hub="ms",                    # or "hf"
    tensor_parallel_size=2,      # multi-GPU parallel
    gpu_memory_utilization=0.8,
)

results = model.generate(
    ["audio1.wav", "audio2.wav"],
    language="中文",
    hotwords=["张三", "北京"],
)
for r in results:
    print(f"[{r['key']}] {r['text']}")
"""
    )
    with names["model"].model as library:
        wanted = texts(library, ["audio1.wav", "audio2.wav"], language="zh", hotwords=("张三", "北京"))
    assert all(wanted)
    assert capsys.readouterr().out == f"[audio1] {wanted[0]}\n[audio2] {wanted[1]}\n"
    if torch.cuda.device_count() < 2:
        assert "tensor_parallel_size=2, and" in caplog.text


def test_the_direct_interface(here: Path) -> None:
    names = run(
        """
from asr_serve.funasr import FunASRNanoVLLM

engine = FunASRNanoVLLM.from_pretrained(
    model="FunAudioLLM/Fun-ASR-Nano-2512",
    tensor_parallel_size=4,
)

results = engine.generate(
    inputs="wav.scp",  # supports scp/jsonl/file lists
    hotwords=["开放时间"],
    language="中文",
    max_new_tokens=512,
)
"""
    )
    with names["engine"].model as library:
        wanted = texts(library, ["audio1.wav", "audio2.wav"], language="zh", hotwords=("开放时间",))
    assert [(found["key"], found["text"]) for found in names["results"]] == list(
        zip(("first", "second"), wanted, strict=True)
    )


def test_a_silence_schedule(model: AutoModelVLLM, packaged_speech: Path, here: Path) -> None:
    """Pauses of section 7: the segments are those of the library's schedule, and not those of the default."""
    shutil.copy(packaged_speech / "two_cities.wav", "audio.wav")
    names = run(
        """
results = model.generate(input="audio.wav", silence_schedule=[(5000,1500), (20000,800), (float('inf'),300)])
""",
        model=model,
    )
    schedule = [(5000, 1500), (20000, 800), (float("inf"), 300)]
    [wanted] = model.model.transcribe("audio.wav", temperatures=(0.0,), silence_schedule=schedule)
    assert [(s["start"], s["end"], s["text"]) for s in names["results"][0]["sentence_info"]] == [
        (round(s.start_s * 1000), round(s.end_s * 1000), s.text) for s in wanted.segments
    ]
    assert len(wanted.segments) > len(model.generate("audio.wav")[0]["sentence_info"])


def test_a_fixed_silence(model: AutoModelVLLM, packaged_speech: Path) -> None:
    path = packaged_speech / "two_cities.wav"
    fixed = model.generate(path, dynamic_silence=False)
    assert fixed == model.generate(path, silence_schedule=[(float("inf"), 800)])
    assert len(fixed[0]["sentence_info"]) > len(model.generate(path)[0]["sentence_info"])
    with pytest.raises(OptionError, match="dynamic_silence"):
        model.generate(path, dynamic_silence=False, silence_schedule=[(float("inf"), 800)])


# --- inputs and results ---------------------------------------------------------------------------------------


def test_inputs_of_every_kind(model: AutoModelVLLM, here: Path) -> None:
    pcm = read_audio("audio1.wav")
    tensor = torch.from_numpy(pcm)
    (here / "list.jsonl").write_text('{"key": "named", "source": "audio1.wav"}\n{"wav": "audio1.wav"}\n')
    [wanted] = model.generate("audio1.wav")
    same = [
        *model.generate([pcm, tensor, (pcm, 16_000), (tensor, 16_000), Path("audio1.wav").read_bytes()]),
        *model.generate(tensor),
        *model.generate((pcm, 16_000)),
        *model.generate((tensor, 16_000)),
        *model.generate((pcm, tensor)),
        *model.generate(Path("audio1.wav").read_bytes()),
        *model.generate(Path("audio1.wav")),
        *model.generate("list.jsonl"),
        *model.generate(inputs=["audio1.wav", "audio1.wav"]),
    ]
    assert [found["key"] for found in same] == (
        [
            *(f"sample_{number}" for number in (*range(5), 0, 0, 0, 0, 1, 0)),
            "audio1",
            "named",
            "audio1.wav",
            "audio1",
            "audio1#2",
        ]
    )
    assert {found["text"] for found in same} == {wanted["text"]}
    assert model.generate([]) == []
    twice = np.repeat(pcm, 2)  # the rate of a pair counts
    [slow] = model.model.transcribe((twice, 32_000), temperatures=(0.0,))
    assert model.generate((torch.from_numpy(twice), 32_000))[0]["text"] == slow.text
    assert slow.duration_samples == len(pcm)


def test_results_are_written_as_they_come(model: AutoModelVLLM, here: Path) -> None:
    found = model.generate("wav.scp", output="results.jsonl")
    assert [json.loads(line) for line in Path("results.jsonl").read_text("utf-8").splitlines()] == found
    assert [set(each) for each in found] == [{"key", "text", "sentence_info"}] * 2


def test_a_mistake_leaves_files_as_they_are(model: AutoModelVLLM, here: Path) -> None:
    Path("in.jsonl").write_text('{"source": "audio1.wav"}\n')
    for given, output, match in (
        ("in.jsonl", "in.jsonl", "is an input"),
        ("missing.wav", "in.jsonl", "missing.wav"),
        ("", "in.jsonl", "an empty path"),
    ):
        with pytest.raises(AsrServeError, match=match):
            model.generate(given, output=output)
        assert Path("in.jsonl").read_text() == '{"source": "audio1.wav"}\n'
    for options in ({"silence_schedule": 5}, {"temperature": "x"}, {"hotwords": 5}):
        with pytest.raises(OptionError, match=f"{next(iter(options))}.*(5|x)"):
            model.generate("audio1.wav", **options)


def test_a_recording_that_fails_is_recorded(model: AutoModelVLLM, here: Path) -> None:
    """One bad recording ends `generate` unless its error is asked for in the place of its result."""
    Path("empty.wav").touch()
    Path("text.wav").write_text("no audio at all" * 99)
    wrong = [None, np.zeros((9, 9), np.float32), "", "text.wav", "gone.wav", "empty.wav"]
    inputs = ["audio1.wav", *wrong, "audio2.wav"]
    with pytest.raises(AsrServeError) as first:
        model.generate(inputs[:1] + wrong[:1])
    found = model.generate(inputs, on_error="record", output="results.jsonl")
    alone = model.generate(["audio1.wav", "audio2.wav"])
    assert [found[0], found[-1]] == alone
    failed = found[1:-1]
    assert failed[0] == {"key": "sample_1", "error": str(first.value), "error_code": first.value.code}
    assert [(each["key"], each["error_code"]) for each in failed] == [
        ("sample_1", "unsupported_audio"),
        ("sample_2", "unsupported_audio"),
        ("sample_3", "source_not_found"),
        ("text", "not_audio"),
        ("gone", "source_not_found"),
        ("empty", "empty_audio"),
    ]
    assert all(set(each) == {"key", "error", "error_code"} for each in failed)
    assert [json.loads(line) for line in Path("results.jsonl").read_text("utf-8").splitlines()] == found
    assert model.generate(["gone.wav"], on_error="record")[0]["key"] == "gone"
    Path("bad.scp").write_text("first\n")
    with pytest.raises(OptionError, match="line 1"):
        model.generate("bad.scp", on_error="record")
    with pytest.raises(OptionError, match="on_error='skip'") as refused:
        model.generate("audio1.wav", on_error="skip")  # type: ignore[arg-type]
    assert refused.value.param == "on_error"


def test_an_engine_that_has_ended_is_no_error_of_a_recording(folder: Path, here: Path) -> None:
    closed = AutoModelVLLM(str(folder))
    closed.close()
    with pytest.raises(EngineClosed):
        closed.generate(["audio1.wav", "audio2.wav"], on_error="record")


def test_results_are_in_the_file_before_the_last_input(model: AutoModelVLLM, here: Path) -> None:
    """The last of more inputs than are open at once is not drawn before there are results, which others can read."""
    written, seen = Path("results.jsonl"), []

    def inputs() -> Iterator[np.ndarray]:
        for _ in range(MAX_OPEN_FILES + 6):
            seen.append(written.read_bytes().count(b"\n") if written.exists() else 0)
            yield np.zeros(1_600, np.float32)

    found = model.generate(inputs(), output=written)
    assert written.stat().st_size < io.DEFAULT_BUFFER_SIZE, "else a full buffer would be written"
    assert [json.loads(line) for line in written.read_text("utf-8").splitlines()] == found
    assert seen[0] == 0 < seen[-1]


def test_words_and_speakers_where_the_model_has_them(packaged_speech: Path) -> None:
    """A model with times of words tells them, and speakers; one without labels whole segments."""
    whole = AutoModelVLLM("moonshine-tiny-en", spk_model="cam++")
    require_speakers(whole.model)
    [found] = whole.generate(packaged_speech / "beckett.wav")
    [wanted] = whole.model.transcribe(packaged_speech / "beckett.wav", words=True, temperatures=(0.0,))
    whole.close()
    assert found["text"] == wanted.text
    assert found["timestamps"] == [
        {"token": word.text, "start_time": word.start_s, "end_time": word.end_s}
        for segment in wanted.segments
        for word in segment.words
    ]
    assert found["spk"] == [0] * len(wanted.segments) == [each["spk"] for each in found["sentence_info"]]


def test_times_of_the_ctc_head(tmp_path: Path, here: Path) -> None:
    """Forced alignment: a model with a CTC head tells when each word was spoken, of text that the head can spell."""
    timed = AutoModelVLLM(str(write_sharp("ctc", tmp_path / "ctc")))
    [found] = timed.generate("audio1.wav", max_new_tokens=2)
    [untimed] = timed.generate("audio1.wav", max_new_tokens=2, words=False)
    [wanted] = timed.model.transcribe("audio1.wav", temperatures=(0.0,), max_new_tokens=2, words=True)
    timed.close()
    words = [word for segment in wanted.segments for word in segment.words]
    assert words
    assert found.pop("timestamps") == [
        {"token": word.text, "start_time": word.start_s, "end_time": word.end_s} for word in words
    ]
    assert untimed == found


def test_speakers_of_whole_segments(model: AutoModelVLLM, packaged_speech: Path) -> None:
    require_speakers(model.model)
    [found] = model.generate(packaged_speech / "beckett.wav", spk=True)
    assert found["spk"] == [0] * len(found["sentence_info"])
    assert "timestamps" not in found


def test_the_answer_is_no_longer_than_asked(model: AutoModelVLLM, here: Path) -> None:
    [limited] = model.model.transcribe("audio1.wav", temperatures=(0.0,), max_new_tokens=5)
    assert [len(segment.tokens) for segment in limited.segments] == [5] * len(limited.segments)
    assert model.generate("audio1.wav", max_new_tokens=5)[0]["text"] == limited.text
    [whole] = model.model.transcribe("audio1.wav", temperatures=(0.0,))
    assert [s.tokens[:5] for s in whole.segments] == [s.tokens for s in limited.segments]


def test_errors_name_the_arguments_that_were_typed(model: AutoModelVLLM) -> None:
    for options in (
        {"temperature": 3},
        {"temperature": "x"},
        {"temperature": True},
        {"top_k": 1.5},
        {"top_p": 0},
        {"spk": "yes"},
        {"itn": None},
        {"dynamic_silence": 1},
        {"max_new_tokens": 0},
        {"repetition_penalty": 0.5},
    ):
        [name] = options
        with pytest.raises(OptionError, match=rf"^{name}=") as refused:
            model.generate("audio1.wav", **options)
        assert refused.value.param == name
    with pytest.raises(OptionError, match="num_speakers with spk=false"):
        model.generate("audio1.wav", spk=False, num_speakers=2)
    wrong = OptionError("max_decode_rows=0", "1 or more", "set max_decode_rows=1", param="max_decode_rows")
    with pytest.raises(OptionError) as renamed, renamed_options(ARGUMENTS):
        raise wrong
    assert str(renamed.value) == "max_num_seqs=0. 1 or more. set max_num_seqs=1."
    assert renamed.value.param == "max_num_seqs"


def test_a_model_without_a_decoder_has_no_limit_of_tokens(tmp_path: Path, packaged_speech: Path) -> None:
    """The default is for models with a decoder; a limit that another cannot keep is refused."""
    shutil.copy(NEMO, tmp_path)
    streaming = AutoModelVLLM(str(tmp_path))
    source = packaged_speech / "beckett.wav"
    [found] = streaming.generate(source)
    [wanted] = streaming.model.transcribe(source)
    for options in ({"max_new_tokens": 512}, {"top_k": 5}, {"top_p": 0.5}, {"temperature": 0.5}):
        [(name, value)] = options.items()
        with pytest.raises(UnsupportedOption, match=f"{name}={value}"):
            streaming.generate(source, **options)
    streaming.close()
    assert found["text"] == wanted.text


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({}, MissingOption),
        ({"input": "a.wav", "inputs": "b.wav"}, MissingOption),
        ({"input": "missing.wav"}, SourceNotFound),
        ({"input": "audio1.wav", "top_p": 1.5}, OptionError),
        ({"input": "audio1.wav", "top_k": -2}, OptionError),
        ({"input": "audio1.wav", "hotword": "北京"}, OptionError),
        ({"input": "audio1.wav", "max_new_tokens": 0}, OptionError),
        ({"input": "audio1.wav", "language": "xx"}, OptionError),
        ({"input": "audio1.wav", "words": True}, UnsupportedOption),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(
    model: AutoModelVLLM, here: Path, wrong: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        model.generate(**wrong)


# --- loading --------------------------------------------------------------------------------------------------


def test_families_are_found_by_their_config(folder: Path, tmp_path: Path) -> None:
    glm = write_hub_folder("glm", tmp_path / "glm")
    llmasr = write_sharp("llmasr", tmp_path / "llmasr")
    for path, card in ((folder, "fun-asr-nano"), (glm, "glm-asr-nano"), (llmasr, "llm-asr")):
        assert loading.find_model(str(path), "ms") == (card, path)
    with GLMASRVLLMEngine(str(glm)).model as library:
        assert library.card.name == "glm-asr-nano"
    with FunASRNanoVLLM(model_dir=str(folder)).model as library:
        assert library.card.name == "fun-asr-nano"


def test_each_class_has_its_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is that of the class, in from_pretrained too; the model has either name of FunASR's."""
    folders = {NAME: folder, "zai-org/GLM-ASR-Nano-2512": write_hub_folder("glm", tmp_path / "glm")}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(folders[name]))
    for made, card in (
        (GLMASRVLLMEngine.from_pretrained, "glm-asr-nano"),
        (GLMASRVLLMEngine, "glm-asr-nano"),
        (FunASRNanoVLLM.from_pretrained, "fun-asr-nano"),
        (partial(FunASRNanoVLLM.from_pretrained, model_dir=str(folder)), "fun-asr-nano"),
        (partial(FunASRNanoVLLM, model=str(folder)), "fun-asr-nano"),
        (partial(FunASRNanoStreamingVLLM.from_pretrained, model_dir=str(folder)), "fun-asr-nano"),
        (partial(AutoModelVLLM.from_pretrained, str(folder)), "fun-asr-nano"),
    ):
        with made().model as library:
            assert library.card.name == card
    with pytest.raises(OptionError, match="model and model_dir"):
        FunASRNanoVLLM(model=str(folder), model_dir=str(folder))


def test_names_of_hubs_and_of_models(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either hub's name is a repository in the cache of the hub's client, fetched where it is missing."""
    cached: dict[str, Path] = {}

    def download(name: str, *, local_files_only: bool = False, **_: Any) -> str:
        if local_files_only and name not in cached:
            raise LocalEntryNotFoundError(name)
        return str(cached.setdefault(name, folder))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    assert [loading.find_model(NAME, hub) for hub in ("ms", "hf")] == [("fun-asr-nano", folder)] * 2
    loading.find_model("ZhipuAI/GLM-ASR-Nano-2512", "ms")
    others = ["somebody/Fun-ASR-Nano-2512", "fun-audio-llm/GLM-ASR-Nano-2512"]
    for other in others:  # another's weights, or a folder that is misspelt: not those of a card
        loading.find_model(other, "ms")
    assert list(cached) == [NAME, "zai-org/GLM-ASR-Nano-2512", *others]
    with FunASRNanoVLLM.from_pretrained().model as library:
        assert library.card.name == "fun-asr-nano"
    assert loading.find_model("moonshine-tiny-en", "hf") == ("moonshine-tiny-en", None)
    with pytest.raises(UnknownModel):
        loading.find_model("moonshine-tinny-en", "ms")


@pytest.mark.parametrize(
    "wrong",
    [
        {"hub": "xx"},
        {"dtype": "int4"},
        {"gpu_memory_utilization": 1.5},
        {"max_model_len": 0},
        {"tensor_parallel_size": 0},
        {"max_num_seqs": 0},
        {"gpu_memory_utilisation": 0.5},
        {"device": "gpu"},
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused(folder: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        AutoModelVLLM(str(folder), **wrong)


def test_a_gpu_holds_what_its_share_leaves() -> None:
    gib = 1 << 30
    assert loading.cache_bytes(80 * gib, 0.5, 2 * gib) == 38 * gib
    with pytest.raises(OptionError, match=r"gpu_memory_utilization=0\.1"):
        loading.cache_bytes(8 * gib, 0.1, 2 * gib)


def test_a_model_is_split_where_there_are_gpus(caplog: pytest.LogCaptureFixture) -> None:
    gpus = loading.Gpu(1 << 30, devices=2)
    with caplog.at_level(logging.WARNING):
        assert [loading.parallel_size(size, "auto", gpus) for size in (1, 2)] == [1, 2]
        assert loading.parallel_size(2, "cpu", None) == 2
        assert not caplog.records
        assert loading.parallel_size(4, "auto", gpus) == 1
    assert "tensor_parallel_size=4, and 2 GPUs" in caplog.text


def test_what_needs_a_gpu_is_said_without_one(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = loading.LoadOptions(device="cpu", gpu_memory_utilization=0.5, max_model_len=8_192, max_num_seqs=7)
    with caplog.at_level(logging.WARNING):
        made = loading.engine_config("fun-asr-nano", folder, options)
    assert made == msgspec.structs.replace(EngineConfig(), max_decode_rows=7)
    assert "gpu_memory_utilization=0.5 has no effect" in caplog.text
    assert "max_model_len=8192" in caplog.text


def test_vllm_itself_may_decode(folder: Path) -> None:
    options = loading.LoadOptions(device="cpu", vllm_python="python-of-vllm")
    made = loading.engine_config("fun-asr-nano", folder, options)
    assert (made.backend, made.vllm_python) == ("vllm", "python-of-vllm")
    assert loading.engine_config("fun-asr-nano", folder, loading.LoadOptions(device="cpu")).backend == "native"
