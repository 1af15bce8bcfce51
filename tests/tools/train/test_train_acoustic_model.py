"""What is read, how it is kept, and that a network learns from it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from asr_serve import devices
from asr_serve.cloning.acoustic_training import AcousticLearner, acoustic_item, collate, loudness
from asr_serve.cloning.voice_corpus import (
    HOP,
    RATE_HZ,
    CorpusUtterance,
    VoiceCorpus,
    normalize_level,
    open_voice_corpora,
)
from asr_serve.errors import OptionError, WeightsMissing
from asr_serve.models.checkpoints import store
from asr_serve.models.tts import fastpitch
from asr_serve.models.tts.fastpitch_network import FastPitchSizes
from asr_serve.types import PhonemeSpan, Sentence
from asr_serve_tools.train.run_folder import lock_run_folder
from asr_serve_tools.train.voice.acoustic_model import (
    AcousticTrainingOptions,
    learning_rate_factor,
    train_acoustic_model,
)
from asr_serve_tools.train.voice.requirements import check_requirements
from asr_serve_tools.train.voice.sentences import cut, held_out, random_template_sentence, reading_order, sentences
from asr_serve_tools.train.voice.synthesize_corpus import SynthesisJob, SynthesisProgress, synthesize_corpus
from asr_serve_tools.train.voice.teacher_voices import interpolate_f0

BOOK = (
    "It was a bright morning, and nobody was on the road. Mr. Brown had left at 4.30 already! Why did he go? "
    "The old bridge was closed, so the carts went round by the mill. She said nothing for a while. "
    "Then the rain came down over the hills. We waited under the trees until it was over. "
    "The dog ran ahead of us and barked at the gate. There were seven letters on the table. "
    "He opened the first of them slowly. It had come from the north, and it smelled of the sea. "
)
SMALL = {"width": 48, "inner": 96, "encoder_layers": 1, "decoder_layers": 1}


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "book.txt"
    more = [f"There were {number} more of them, he said." for number in range(2, 60)]
    path.write_text(BOOK + " ".join(more), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, book: Path) -> SynthesisJob:
    pytest.importorskip("hibari", reason="hibari-tts, whose voice reads, is not installed")
    folder = tmp_path_factory.mktemp("speech")
    found = SynthesisJob(texts=(book,), folder=folder, heart_minutes=3.0, voices=())
    synthesize_corpus(found, lambda _: None)
    return found


# --- what is read ----------------------------------------------------------------------------------------


def test_sentences_are_whole_and_plain() -> None:
    found = list(cut(BOOK))
    assert "Mr. Brown had left at 4.30 already!" in found
    assert "Why did he go?" in found
    assert all(12 <= len(each) <= 150 for each in found)
    assert not list(cut("What about \u65e5\u672c\u8a9e here?"))


def test_held_out_sentences_can_be_read_alone(book: Path) -> None:
    found = sentences([book])
    numbered = [f"Sentence {number} was read aloud by somebody." for number in range(400)]
    reading, testing = reading_order(numbered, 1), reading_order(numbered, 1, test=True)
    read, tested = {next(reading) for _ in range(2_000)}, {next(testing) for _ in range(200)}
    assert tested
    assert all(held_out(each) for each in tested)
    assert tested < read
    assert [next(reading_order(found, 3)) for _ in range(1)] == [next(reading_order(found, 3)) for _ in range(1)]


def test_templates_of_agents_are_filled_in() -> None:
    import random

    chance = random.Random(0)
    assert not any("{" in random_template_sentence(chance) for _ in range(300))


def test_texts_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="UTF-8"):
        sentences([tmp_path / "bad"])
    (tmp_path / "short").write_text("no")
    with pytest.raises(OptionError, match="no sentence"):
        sentences([tmp_path / "short"])


# --- how it is kept --------------------------------------------------------------------------------------


def test_half_a_line_is_cut_off(tmp_path: Path) -> None:
    voice = VoiceCorpus(tmp_path, "anna", write=True)
    pcm = np.linspace(-0.5, 0.5, 4 * HOP, dtype=np.float32)
    voice.append(CorpusUtterance("Hello.", "_h_", 4 * HOP, [1, 2, 1]), pcm, np.array([0, 100, 100, 0], np.float32))
    for kind, rest in (("i16", b"12345"), ("f0", b"1234567"), ("jsonl", b'{"text": "Wor')):
        with (tmp_path / f"anna.{kind}").open("ab") as file:
            file.write(rest)
    again = VoiceCorpus(tmp_path, "anna", write=True)
    again.append(CorpusUtterance("World.", "_w_", 4 * HOP, [2, 1, 1]), -pcm, np.array([0, 90, 0, 0], np.float32))
    first, second = VoiceCorpus(tmp_path, "anna")
    assert (first.line.text, second.line.text) == ("Hello.", "World.")
    assert np.abs(second.pcm / 32_767 + pcm).max() < 1e-4
    assert second.f0.tolist() == [0, 90, 0, 0]
    assert open_voice_corpora(tmp_path)[0].minutes == pytest.approx(8 * HOP / RATE_HZ / 60)
    with pytest.raises(OptionError, match="no speech"):
        open_voice_corpora(tmp_path / "nowhere")


def test_all_clips_have_the_same_loudness() -> None:
    chance = np.random.default_rng(0)
    speech = np.concatenate([chance.normal(0, 0.02, RATE_HZ), np.zeros(RATE_HZ)]).astype(np.float32)
    assert np.sqrt((normalize_level(speech)[:RATE_HZ] ** 2).mean()) == pytest.approx(0.1, rel=0.02)
    assert np.allclose(normalize_level(speech), normalize_level(3 * speech), atol=1e-6)
    assert not normalize_level(np.zeros(RATE_HZ, np.float32)).any()


# --- teachers --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_teachers_tell_when_and_how_high(job: SynthesisJob) -> None:
    (voice,) = open_voice_corpora(job.folder)
    assert voice.minutes >= 3
    for recording in voice:
        line = recording.line
        assert len(line.frames) == len(line.phonemes)
        assert len(recording.pcm) == line.samples == HOP * sum(line.frames)
        voiced = recording.f0[recording.f0 > 0]
        assert 100 < np.median(voiced) < 350  # heart is a woman
        ends = np.cumsum(line.frames) * HOP
        at = next(i for i, letter in enumerate(line.phonemes) if letter in "aɑæʌɛiIO")
        vowel = recording.pcm[ends[at - 1] : ends[at]].astype(np.float64)
        pause = recording.pcm[: ends[0] // 2].astype(np.float64)
        assert (vowel**2).mean() > 20 * (pause**2).mean()


@pytest.mark.slow
def test_a_stopped_run_continues(job: SynthesisJob) -> None:
    import msgspec

    before = open_voice_corpora(job.folder)[0].lines
    synthesize_corpus(msgspec.structs.replace(job, heart_minutes=3.2), lambda _: None)
    after = open_voice_corpora(job.folder)[0].lines
    assert after[: len(before)] == before
    assert len(after) > len(before)


def test_pitch_is_on_lines_and_stops_with_the_voice() -> None:
    f0 = np.array([0, 100, 200, 0, 10, 300], np.float32)
    found = interpolate_f0(f0, np.array([0.9, 1.2, 1.5, 2.0, 2.5, 2.9, 3.5, 5.5]))
    assert found.tolist() == [0, 100, 100, 150, 200, 200, 0, 300]


# --- learning --------------------------------------------------------------------------------------------


def options(job: SynthesisJob, out: Path, **more: object) -> AcousticTrainingOptions:
    vocabulary = {"_": 0}
    for recording in open_voice_corpora(job.folder)[0]:
        for letter in recording.line.phonemes:
            vocabulary.setdefault(letter, len(vocabulary))
    known: dict[str, object] = {
        "speech": job.folder,
        "out": out,
        "steps": 30,
        "speakers": ("heart", "alloy"),
        "phonemes": vocabulary,
        "frames": 1_500,
        "sizes": FastPitchSizes(phonemes=len(vocabulary), speakers=2, **SMALL),
        "device": "cpu",
    }
    return AcousticTrainingOptions(**{**known, **more})  # type: ignore[arg-type]


@pytest.mark.slow
def test_it_learns_and_speaks_what_it_learnt(job: SynthesisJob, tmp_path: Path) -> None:
    told: list[str] = []
    train_acoustic_model(options(job, tmp_path / "first"), told.append)
    found = train_acoustic_model(options(job, tmp_path / "second", start=tmp_path / "first", steps=60), told.append)
    first = next(line for line in told if line.startswith("held out"))
    assert found["mel"] < float(first.split("mel ")[1].split()[0])
    settings = json.loads((tmp_path / "second" / "config.json").read_text())
    assert settings["voices"] == ["heart", "alloy"]
    made = tmp_path / "second"
    assert {path.name: path.stat().st_mode & 0o777 for path in made.glob("*.safetensors")} == {
        "model.safetensors": 0o644
    }
    card = fastpitch.CARDS[0]
    model = fastpitch.load(tmp_path / "second", card, devices.make_device("cpu", "fp32"))
    line = open_voice_corpora(job.folder)[0].lines[0]
    encoded = model.encode([Sentence((PhonemeSpan(line.phonemes.strip("_")),), "heart")])[0]
    assert torch.isfinite(model.whole(encoded)).all()


@pytest.mark.slow
def test_speaking_is_what_was_learnt(job: SynthesisJob, tmp_path: Path) -> None:
    """The lines that learn and those that speak are the same: teacher-forced frames are equal."""
    chosen = options(job, tmp_path / "m", steps=2)
    train_acoustic_model(chosen, lambda _: None)
    model = fastpitch.load(chosen.out, fastpitch.CARDS[0], devices.make_device("cpu", "fp32"))
    learner = AcousticLearner(chosen.sizes)
    from safetensors.torch import load_file

    learner.load(load_file(chosen.out / "model.safetensors"))
    ids = torch.tensor([[1, 2, 3, 4, 2]])
    there = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        learnt = learner.network.encode(ids, there, learner.tables["speakers"][:1])
    spoken = model.network.encode(ids, there, model._voices["heart"].encoder[None])
    assert (learnt - spoken).abs().max() < 1e-4


@pytest.mark.slow
def test_items_add_up(job: SynthesisJob) -> None:
    recording = next(iter(open_voice_corpora(job.folder)[0]))
    vocabulary = {letter: at for at, letter in enumerate(dict.fromkeys(recording.line.phonemes))}
    found = acoustic_item(recording, 0, vocabulary)
    assert found.durations.sum() == len(found.mel) == len(found.f0)
    voiced = found.f0 > 0
    assert np.allclose(np.exp(found.f0[voiced]), recording.f0[voiced], rtol=1e-4)
    first = int(found.durations[0])
    assert found.energy[0] == pytest.approx(loudness(found.mel[:first]).mean(), abs=1e-2)
    with pytest.raises(KeyError):
        acoustic_item(recording, 0, {})
    norms = teach_norms([found])
    made = collate([found, found], norms, ["heart"], 16)
    assert made.mel.shape[1] % 16 == 0
    assert made.prosody.pitch[0][made.prosody.voiced[0] == 0].abs().sum() == 0


def teach_norms(items: list) -> object:  # type: ignore[type-arg]
    from asr_serve.cloning.acoustic_training import compute_norms

    return compute_norms(items, ["heart"])


def test_the_rate_falls_at_the_end() -> None:
    assert learning_rate_factor(0.2, 0.5) == learning_rate_factor(0.5, 0.5) == pytest.approx(1.0)
    assert learning_rate_factor(0.75, 0.5) == pytest.approx(0.505)
    assert learning_rate_factor(1.0, 0.5) == pytest.approx(0.01)
    assert learning_rate_factor(0.9, 0.0) == 1.0


def test_an_unknown_speaker_is_refused(tmp_path: Path) -> None:
    voice = VoiceCorpus(tmp_path, "xx_nobody", write=True)
    pcm = np.random.default_rng(0).normal(0, 0.1, 4 * HOP).astype(np.float32)
    voice.append(CorpusUtterance("Hello.", "_h_", 4 * HOP, [1, 2, 1]), pcm, np.zeros(4, np.float32))
    chosen = AcousticTrainingOptions(
        speech=tmp_path, out=tmp_path / "out", steps=1, speakers=("heart",), phonemes={"_": 0, "h": 1}, device="cpu"
    )
    with pytest.raises(OptionError, match="nobody"):
        train_acoustic_model(chosen)


# --- what a run needs --------------------------------------------------------------------------------------


def test_missing_parts_are_reported_before_synthesis(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hibari", reason="hibari-tts, whose voice reads, is not installed")
    read = SynthesisJob(texts=(book,), folder=tmp_path / "run" / "speech", voices=("af_alloy",))
    to = AcousticTrainingOptions(
        speech=read.folder, out=tmp_path / "run" / "model", speakers=("heart", "alloy"), phonemes={"_": 0}
    )
    with pytest.raises(OptionError, match=r"has no config\.json"):
        check_requirements(read, msgspec.structs.replace(to, start=tmp_path))
    with pytest.raises(OptionError, match="multiple of 4"):
        check_requirements(read, msgspec.structs.replace(to, sizes=FastPitchSizes(width=50)))
    (tmp_path / "empty").touch()
    with pytest.raises(OptionError, match="no sentence"):
        check_requirements(msgspec.structs.replace(read, texts=(tmp_path / "empty",)), to)
    with pytest.raises(NotADirectoryError):
        check_requirements(msgspec.structs.replace(read, folder=tmp_path / "empty" / "speech"), to)
    monkeypatch.setattr(store, "cache_dir", lambda: tmp_path / "nothing")
    with pytest.raises(WeightsMissing, match="asr-serve models fetch kokoro"):
        check_requirements(read, to)
    assert not list(read.folder.iterdir())


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with lock_run_folder(tmp_path), pytest.raises(OptionError, match="another run"), lock_run_folder(tmp_path):
        pass
    with lock_run_folder(tmp_path):
        pass


def test_progress_has_the_remaining_time(tmp_path: Path) -> None:
    said, now = list[str](), [0.0]
    files = [VoiceCorpus(tmp_path, name, write=True) for name in ("anna", "ben")]
    progress = SynthesisProgress(files, 1.0, said.append, lambda: now[0])
    for file, seconds, at_s in ((files[0], 30, 60.0), (files[1], 6, 80.0), (files[1], 60, 240.0)):
        frames = seconds * RATE_HZ // HOP
        file.append(
            CorpusUtterance("x", "_", frames * HOP, [frames]),
            np.zeros(frames * HOP, np.float32),
            np.zeros(frames, np.float32),
        )
        now[0] = at_s
        progress.report()
    progress.finish()
    assert said == [
        "2 voices: 0.5 of 2 minutes of speech, about 3 min left",
        "2 voices: 1.5 of 2 minutes of speech, about 1 min left",
        "2 voices: 1.6 minutes of speech",
    ]
