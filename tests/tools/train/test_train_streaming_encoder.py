"""A streaming encoder is taught: the loss falls, a run goes on where it stopped, and what it ends in is served."""

from __future__ import annotations

import importlib
import json
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asr_serve import devices
from asr_serve.errors import EmptyAudio, OptionError
from asr_serve.models.asr.moonshine import moonshine, moonshine_streaming
from asr_serve.models.interfaces import UNBOUNDED_SAMPLES, StreamingChunk
from asr_serve_tools.train import streaming_encoder
from asr_serve_tools.train.audio_corpus import AudioCorpus
from asr_serve_tools.train.streaming_student import StreamingStudent, config_of

ENGINE_TESTS = Path(__file__).resolve().parents[2] / "engine"
"""They have a Moonshine of random weights."""
RATE_HZ = 16_000
WINDOWS = [(9, 3), (6, 2)]


def voice(seconds: float, seed: int) -> np.ndarray:
    """Something that changes as speech does: a buzz of a changing pitch through changing filters, with pauses."""
    rng = np.random.default_rng(seed)
    count = int(seconds * RATE_HZ)
    slow = np.interp(np.arange(count), np.arange(0, count, 1_600), rng.uniform(80, 250, -(-count // 1_600)))
    buzz = np.sign(np.sin(2 * np.pi * np.cumsum(slow) / RATE_HZ)) + 0.3 * rng.standard_normal(count)
    loud = np.interp(np.arange(count), np.arange(0, count, 2_400), rng.choice([0, 0.1, 0.3], -(-count // 2_400)))
    return (buzz * loud * 20_000).clip(-32_768, 32_767).astype(np.int16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """audio/ of four recordings and something that is none, teacher/ with random weights."""
    here = tmp_path_factory.mktemp("train")
    (here / "audio").mkdir()
    for i, seconds in enumerate((6.0, 3.0, 0.5, 4.0, 5.0)):
        with wave.open(str(here / "audio" / f"{i}.wav"), "wb") as file:
            file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
            file.writeframes(voice(seconds, i).tobytes())
    (here / "audio" / "broken.flac").write_bytes(b"fLaC and nothing else")
    (here / "teacher").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ENGINE_TESTS)
        importlib.import_module("tiny_moonshine").save(here / "teacher")
    return here


def learn(folder: Path, run: str, steps: int, *more: str) -> list[dict[str, float]]:
    """Through the command line. Returns the log."""
    words = [
        *("--audio", str(folder / "audio"), "--run", str(folder / run), "--teacher", str(folder / "teacher")),
        *("--windows", " ".join(f"{back},{ahead}" for back, ahead in WINDOWS), "--device", "cpu", "--dtype", "fp32"),
        *("--steps", str(steps), "--batch-s", "4", "--lr", "4e-3", "--log-every", "10", "--save-every", "20"),
    ]
    assert streaming_encoder.main([*words, *more]) == 0
    return [json.loads(line) for line in (folder / run / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def taught(folder: Path) -> Path:
    learn(folder, "whole", 60)
    return folder / "whole"


@pytest.mark.slow
def test_the_loss_falls_on_held_out_speech_too(taught: Path) -> None:
    log = [json.loads(line) for line in (taught / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [10, 20, 30, 40, 50, 60]
    for name in ("front_loss", "layer_loss", "end_loss"):
        assert log[-1][name] < 0.8 * log[0][name], name
    held = [line["held_out"] for line in log if "held_out" in line]
    assert len(held) == 3
    assert held[-1] < held[0]
    assert log[-1]["heard_h"] > 0


@pytest.mark.slow
def test_an_interrupted_run_equals_an_uninterrupted_one(
    folder: Path, taught: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cut(self: streaming_encoder.StreamingEncoderTraining, *every: int) -> object:
        for line in advance(self, *every):
            yield line
            if line["step"] == 50:  # ten steps after the last save: they are done again
                raise KeyboardInterrupt

    advance = streaming_encoder.StreamingEncoderTraining.train
    with monkeypatch.context() as patch:
        patch.setattr(streaming_encoder.StreamingEncoderTraining, "train", cut)
        with pytest.raises(AssertionError):
            learn(folder, "cut", 60)
    assert "goes on from the last save" in capsys.readouterr().err
    log = learn(folder, "cut", 60)
    assert [line["step"] for line in log] == [10, 20, 30, 40, 50, 50, 60]
    assert "step 40 of 60" in capsys.readouterr().err
    whole = [json.loads(line) for line in (taught / "log.jsonl").read_text().splitlines()]
    assert log[-1]["end_loss"] == pytest.approx(whole[-1]["end_loss"], rel=1e-3)
    assert log[-1]["heard_h"] == whole[-1]["heard_h"]


def test_the_result_is_a_model(folder: Path, taught: Path) -> None:
    """It hears what the student heard, at once or chunk by chunk, and speaks with its teacher's decoder."""
    tensors = load_file(taught / "checkpoint" / "model.safetensors")
    config = moonshine_streaming.Config.of(json.loads((taught / "checkpoint" / "config.json").read_text()))
    model = moonshine_streaming.Model(config, tensors, devices.make_device("cpu", "fp32"))
    assert model.encoder.frame_samples == moonshine.STEM_STRIDE
    student = StreamingStudent(config)
    student.load_state_dict({n.removeprefix("model."): tensors[n] for n in tensors if n[6:] in student.state_dict()})
    pcm = torch.from_numpy(voice(2.3, 9).astype(np.float32) / 32_768)
    with torch.inference_mode():
        whole, packing = model.encode([pcm])
        whole = whole[: packing.frames[0]]
        heard, frames = student(pcm[None], torch.tensor([len(pcm)]))
        assert frames.tolist() == packing.frames
        torch.testing.assert_close(whole, heard[-1][0], atol=1e-4, rtol=0)
        stepped = chunks(model.encoder, pcm, 7)
        torch.testing.assert_close(model.add_positions(stepped, torch.arange(len(stepped))), whole, atol=1e-5, rtol=0)
    teacher = load_file(folder / "teacher" / "model.safetensors")
    for name in ("model.decoder.layers.1.encoder_attn.k_proj.weight", "model.decoder.embed_tokens.weight"):
        assert torch.equal(tensors[name], teacher[name])
    assert (taught / "checkpoint" / "tokenizer.bin").is_file()


def chunks(encoder: moonshine_streaming.WindowEncoder, pcm: Tensor, frames: int) -> Tensor:
    """A session of its own, `frames` at a time."""
    state = {
        name: torch.full(
            (2, *spec.shape), torch.nan if spec.initial_value is None else spec.initial_value, dtype=spec.dtype
        )
        for name, spec in encoder.state_specs(frames).items()
    }
    window, total, found = encoder.audio_window(frames), encoder.count_frames(len(pcm)), []
    padded = torch.nn.functional.pad(pcm, (window.left_samples, window.samples))
    for seen in range(0, total, frames):
        begin = seen * encoder.frame_samples
        has = min(frames, total - seen)
        ends = len(pcm) if begin + window.samples > len(pcm) + window.left_samples else UNBOUNDED_SAMPLES
        part = padded[None, begin : begin + window.samples]
        found.append(
            encoder.step(StreamingChunk(part, *(torch.tensor([n]) for n in (0, seen, has, ends))), state)[0, :has]
        )
    return torch.cat(found)


def test_a_student_starts_from_layers_of_its_teacher(folder: Path) -> None:
    teacher = streaming_encoder.TeacherEncoder(folder / "teacher", devices.make_device("cpu", "fp32"))
    student = StreamingStudent(config_of(teacher.config, WINDOWS))
    student.start_from(teacher.tensors)
    for i, layer in enumerate(student.encoder.layers):
        mine, at = layer.state_dict(), f"model.encoder.layers.{i}"
        torch.testing.assert_close(mine["input_layernorm.gamma"] + 1, teacher.tensors[f"{at}.input_layernorm.weight"])
        torch.testing.assert_close(mine["self_attn.q_proj.weight"], teacher.tensors[f"{at}.self_attn.q_proj.weight"])
    torch.testing.assert_close(student.encoder.final_norm.gamma + 1, teacher.model.encoder_norm)


def test_its_convolutions_begin_with_the_best_of_what_is_before_them(folder: Path) -> None:
    """No other weights of the last one come nearer to what the teacher's convolutions make of that audio."""
    teacher = streaming_encoder.TeacherEncoder(folder / "teacher", devices.make_device("cpu", "fp32"))
    student = StreamingStudent(config_of(teacher.config, WINDOWS))
    batch = [voice(2.0, seed).astype(np.float32) / 32_768 for seed in (5, 6, 7)]

    def loss() -> float:
        with torch.no_grad():
            return float(streaming_encoder.losses(student, teacher, batch)["front"])

    before = loss()
    pcm, samples, targets = streaming_encoder.distillation_batch(student, teacher, batch)
    student.fit_convolutions([(pcm, samples, targets["front"])])
    best = loss()
    assert best < 0.7 * before
    mean = targets["front"].mean(0)
    assert best < float((targets["front"] - mean).square().mean() / targets["front"].square().mean())
    last = student.encoder.embedder.conv2
    for change in (0.9, 1.1):
        last.weight.data *= change
        assert loss() > best
        last.weight.data /= change


def test_a_run_keeps_its_settings(folder: Path, taught: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError):
        learn(folder, "whole", 80, "--seed", "1")
    assert "seed: 1" in capsys.readouterr().err
    assert json.loads((taught / "log.jsonl").read_text().splitlines()[-1])["step"] == 60


def test_windows_are_given_by_layer() -> None:
    assert streaming_encoder.windows_of("9,3 6,2", 2) == WINDOWS
    assert streaming_encoder.windows_of("9,3", 3) == [(9, 3)] * 3
    published = streaming_encoder.windows_of("", 6)
    assert sum(max(ahead - 1, 0) for _, ahead in published) == 12
    for wrong in ("9", "9,3 6,2", "nine,3"):
        with pytest.raises(OptionError, match="--windows"):
            streaming_encoder.windows_of(wrong, 3)


def test_the_rate_rises_and_falls() -> None:
    rates = [streaming_encoder.rate(step, 100) for step in range(100)]
    assert rates.index(max(rates)) == 4
    assert rates[0] < 0.25
    assert streaming_encoder.LEAST < rates[-1] < 0.03


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        streaming_encoder.main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for word in ("--audio speech/ --run runs/first", "log.jsonl", "held_out", "goes on", "--weights", "288 ms"):
        assert word in said


# --- the corpus -------------------------------------------------------------------------------------------


def test_a_corpus_is_what_was_recorded(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    corpus = AudioCorpus.build([str(folder / "audio")], tmp_path / "made", said.append)
    assert any("broken.flac" in line for line in said)
    lengths = [clip.samples / RATE_HZ for clip in corpus.index.clips]
    assert lengths == [6.0, 3.0, 4.0, 5.0]
    clip = corpus.index.clips[2]
    np.testing.assert_allclose(corpus.read(clip, 800, 1_600), voice(4.0, 3)[800:2_400] / 32_768, atol=2 / 32_768)
    assert len(corpus.read(clip, 3 * RATE_HZ, 5 * RATE_HZ)) == RATE_HZ, "not into the next one"
    said.clear()
    again = AudioCorpus.build([str(folder / "audio")], tmp_path / "made", said.append)
    assert again.index == corpus.index
    assert said == []
    with pytest.raises(OptionError, match="was made of"):
        AudioCorpus.build([str(folder / "other")], tmp_path / "made", said.append)


def test_some_is_held_out(folder: Path, tmp_path: Path) -> None:
    corpus = AudioCorpus.build([str(folder / "audio")], tmp_path, lambda _: None)
    for share, held in ((0.5, 2), (0.02, 1)):
        learning, out = corpus.split(share)
        assert len(out) == held
        assert not set(learning) & set(out)
        assert len(learning) + held == 4


def test_a_corpus_without_speech_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(EmptyAudio, match="1 s or more"):
        AudioCorpus.build([str(tmp_path / "empty")], tmp_path / "made", lambda _: None)
