"""A speech LLM is trained: losses fall, a run goes on where it stopped, and the engine loads what it writes."""

from __future__ import annotations

import json
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_causal_lm import NAMES, reference
from torch import Tensor
from typer.testing import CliRunner

import asr_serve
from asr_serve import devices
from asr_serve.api.cli import app
from asr_serve.errors import EmptyAudio, OptionError, WeightsCorrupt
from asr_serve.models.asr.speech_llm.adaptors import Adaptor, AdaptorConfig
from asr_serve.models.asr.speech_llm.chat_prompt import BEGIN, END
from asr_serve.models.asr.speech_llm.sanm_encoder import EncoderTensors
from asr_serve.models.causal_lm import CausalConfig
from asr_serve.models.interfaces import PROMPT_EMBEDDING
from asr_serve.models.packing import pack_clips
from asr_serve_tools.label.label_store import LabelRow
from asr_serve_tools.train.run_folder import lock_run_folder
from asr_serve_tools.train.speech_llm.checkpoint import LanguageModelParts
from asr_serve_tools.train.speech_llm.encoded_speech import (
    EncodedClip,
    EncodedSpeech,
    FrozenEncoder,
    SpeechSources,
    encode_speech,
)
from asr_serve_tools.train.speech_llm.recipe import SpeechLlmTraining, SpeechLlmTrainingOptions, train_speech_llm
from asr_serve_tools.train.speech_llm.spoken_text import CtcPieces, spoken_form
from asr_serve_tools.train.speech_llm.trainable_adaptor import TrainableAdaptor
from asr_serve_tools.train.speech_llm.trainable_causal_lm import TrainableCausalLm

RATE_HZ = 16_000
TEXTS = ("No. Yes!", "An old boat.", "In 1851.", "no one", "A sea, then.")
SPOKEN = {"0": "no yes", "1": "an old boat", "3": "no one", "4": "a sea then"}
WHISPER = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "num_mel_bins": 80}
WINDOW = 100
"""Positions of the encoder's window: two seconds."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small are slower on more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def clip(seed: int) -> np.ndarray:
    """A tone that jumps, another one in each clip."""
    rng = np.random.default_rng(seed)
    pitch = np.repeat(rng.uniform(150, 3_000, 8), RATE_HZ // 8)
    return (9_000 * np.sin(2 * np.pi * np.cumsum(pitch) / RATE_HZ)).astype(np.int16)


def whisper_tensors() -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(4)
    width, inner, at = WHISPER["d_model"], 24, "model.encoder.layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        "model.encoder.conv1.weight": (width, 80, 3),
        "model.encoder.conv1.bias": (width,),
        "model.encoder.conv2.weight": (width, width, 3),
        "model.encoder.conv2.bias": (width,),
        "model.encoder.embed_positions.weight": (WINDOW, width),
        **{f"{at}.self_attn.{name}_proj.weight": (width, width) for name in ("q", "k", "v", "out")},
        **{f"{at}.self_attn.{name}_proj.bias": (width,) for name in ("q", "v", "out")},
        f"{at}.fc1.weight": (inner, width),
        f"{at}.fc1.bias": (inner,),
        f"{at}.fc2.weight": (width, inner),
        f"{at}.fc2.bias": (width,),
    }
    norms = ("model.encoder.layer_norm", f"{at}.self_attn_layer_norm", f"{at}.final_layer_norm")
    shapes |= {f"{name}.{kind}": (width,) for name in norms for kind in ("weight", "bias")}
    tensors = {name: torch.randn(*shape, generator=chance) * 0.3 for name, shape in shapes.items()}
    tensors |= {name: torch.ones(width) for name in tensors if name.endswith("norm.weight")}
    tensors["model.encoder.embed_positions.weight"] *= 0.3  # clips differ by more than their positions do
    return tensors


def write_language_model(folder: Path) -> None:
    """A Gemma of random weights whose tokenizer spells words, and has no marks of a chat."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<unused0>", "<unused1>"]
    merges = [["\u2581", "n"], ["\u2581n", "o"], ["e", "n"], ["o", "B"], ["\u2581", "a"]]
    pieces = [*special, "\u2581", *"abcdefghijklmnopqrstuvwxyz'B", *("".join(merge) for merge in merges)]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": name, "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for i, name in enumerate(special)
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": merges,
        },
    }
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], {"type": "Fuse"}]}
    known = reference("gemma 3")
    chance, weights = torch.Generator().manual_seed(2), dict(known.weights)
    width = known.settings["hidden_size"]
    weights["model.embed_tokens.weight"] = torch.randn(len(pieces), width, generator=chance) * 0.4
    settings = {**known.settings, "vocab_size": len(pieces), "eos_token_id": 1, "bos_token_id": 2}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({name: tensor.clone() for name, tensor in weights.items()}, folder / "model.safetensors")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """labels/kept.jsonl of five segments and a file that is none, whisper/ and language_model/ of random weights."""
    here = tmp_path_factory.mktemp("speech_llm")
    (here / "labels").mkdir()
    rows = list[LabelRow]()
    for i, text in enumerate(TEXTS):
        with wave.open(str(here / f"{i}.wav"), "wb") as file:
            file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
            file.writeframes(np.concatenate([clip(i + 50)[:4_000], clip(i)]).tobytes())
        rows.append(LabelRow(str(here / f"{i}.wav"), 0.25, 1.0, text, 0.0, {}))
    (here / "broken.flac").write_bytes(b"fLaC and nothing else")
    rows.append(LabelRow(str(here / "broken.flac"), 0.0, 1.0, "no", 0.0, {}))
    (here / "labels" / "kept.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    (here / "whisper").mkdir()
    save_file(whisper_tensors(), here / "whisper" / "model.safetensors")
    (here / "whisper" / "config.json").write_text(json.dumps({"model_type": "whisper", **WHISPER}))
    (here / "whisper" / "tokenizer.json").write_text("{}")
    write_language_model(here / "language_model")
    return here


def options(place: Path, run: Path, **more: Any) -> SpeechLlmTrainingOptions:
    chosen = {
        "run": run,
        "sources": SpeechSources(labels=(place / "labels",)),
        "encoder": str(place / "whisper"),
        "language_model": str(place / "language_model"),
        "steps": 120,
        "ctc_steps": 40,
        "batch_s": 2.5,
        "lr": 1.5e-2,
        "rank": 16,
        "downsample_rate": 2,
        "ffn_dim": 48,
        "heads": 2,
        "blocks": 1,
        "device": "cpu",
        "dtype": "fp32",
        "log_every": 10,
        "save_every": 40,
    }
    return SpeechLlmTrainingOptions(**(chosen | more))


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def trained(place: Path, told: list[str]) -> Path:
    """A finished run."""
    run = place / "run"
    assert train_speech_llm(options(place, run), told.append) == run / "model"
    return run


def training(place: Path, trained: Path, run: Path, **more: Any) -> SpeechLlmTraining:
    """A run of its own over the frames of another."""
    chosen = options(place, run, **more)
    run.mkdir(exist_ok=True)
    parts = LanguageModelParts.load(chosen.language_model, run / "language_model")
    return SpeechLlmTraining(chosen, EncodedSpeech(trained / "speech"), parts)


def test_losses_fall_first_of_ctc_then_of_text(trained: Path, told: list[str]) -> None:
    log = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(10, 121, 10))
    assert all(("text_loss" in line) == (line["step"] > 40) for line in log)
    assert log[3]["ctc_loss"] < 0.5 * log[0]["ctc_loss"]
    assert log[-1]["text_loss"] < 0.2 * log[4]["text_loss"]
    assert [line["step"] for line in log if "held_out" in line] == [40, 80, 120]
    assert all(line["audio_s_per_s"] > 0 for line in log)
    assert json.loads(told[-1]) == log[-1]
    assert any("broken.flac" in line for line in told)


def test_only_spoken_segments_are_used_as_their_encoder_hears_them(place: Path, trained: Path) -> None:
    speech = EncodedSpeech(trained / "speech")
    assert {Path(clip.key.split(".wav")[0]).name: clip.text for clip in speech.clips} == SPOKEN
    encoder = FrozenEncoder(str(place / "whisper"), devices.make_device("cpu", "fp32"), lambda _: None)
    for found in speech.clips:
        index = int(Path(found.key.split(".wav")[0]).name)
        (frames,) = encoder([clip(index).astype(np.float32) / 32_768])
        assert found.samples == RATE_HZ
        np.testing.assert_allclose(speech.frames(found).numpy(), frames, atol=1e-2)
    kept, held = speech.split()
    assert kept
    assert held
    assert {each.key for each in kept}.isdisjoint(each.key for each in held)


def test_the_folder_transcribes_what_was_memorised(trained: Path) -> None:
    kept, _ = EncodedSpeech(trained / "speech").split()
    known = {Path(each.key.split(".wav")[0]).name: each.text for each in kept}
    with asr_serve.load(str(trained / "model"), device="cpu", dtype="fp32", turn_model="none") as model:
        assert model.card.name == "llm-asr"
        found = model.transcribe([clip(int(index)) for index in known], vad=False)
        assert [each.text for each in found] == list(known.values())
        declined = model.transcribe([clip(int(index)) for index in known], vad=False, language="en", itn=False)
        assert [each.text for each in declined] == list(known.values())


def test_an_interrupted_run_equals_an_uninterrupted_one(place: Path, trained: Path, tmp_path: Path) -> None:
    chosen = {"steps": 8, "ctc_steps": 2, "log_every": 3, "save_every": 4}
    whole = training(place, trained, tmp_path / "whole", **chosen)
    lines = list(whole.train())
    first = training(place, trained, tmp_path / "cut", **chosen)
    for line in first.train():
        if line["step"] == 6:  # two steps after the last save: they are done again
            break
    second = training(place, trained, tmp_path / "cut", **chosen)
    assert second.step == 4
    rest = list(second.train())
    timeless = [[{k: v for k, v in line.items() if k != "audio_s_per_s"} for line in log] for log in (lines, rest)]
    assert timeless[0][-2:] == timeless[1]
    for name, tensor in whole.adaptor.state_dict().items():
        assert torch.equal(tensor, second.adaptor.state_dict()[name]), name
    for one, other in zip(whole.second, second.second, strict=True):
        assert torch.equal(one, other)


def test_minutes_end_a_run_that_goes_on_later(place: Path, trained: Path, tmp_path: Path) -> None:
    run = training(place, trained, tmp_path / "run", steps=4, ctc_steps=2, minutes=1e-9)
    assert [line["step"] for line in run.train()] == [1]
    again = training(place, trained, tmp_path / "run", steps=4, ctc_steps=2)
    assert [line["step"] for line in again.train()] == [2, 4]


def test_frames_are_computed_once(place: Path, trained: Path, tmp_path: Path) -> None:
    sources = SpeechSources(labels=(place / "labels",))
    encoder = FrozenEncoder(str(place / "whisper"), devices.make_device("cpu", "fp32"), lambda _: None)
    made = encode_speech(sources, encoder, "tiny", tmp_path / "speech", lambda _: None)
    files = {name: (tmp_path / "speech" / name).read_bytes() for name in ("frames.f16", "clips.jsonl")}
    with (tmp_path / "speech" / "frames.f16").open("ab") as file:
        file.write(b"an interrupted clip")
    with (tmp_path / "speech" / "clips.jsonl").open("r+b") as file:
        file.truncate(len(files["clips.jsonl"]) - 3)  # the last clip is computed again
    encode_speech(sources, encoder, "tiny", tmp_path / "speech", lambda _: None)
    assert files == {name: (tmp_path / "speech" / name).read_bytes() for name in files}
    assert len(made.clips) == 4
    with pytest.raises(OptionError, match=r"encoder: other.*began with tiny"):
        encode_speech(sources, encoder, "other", tmp_path / "speech", lambda _: None)


@pytest.mark.parametrize("name", NAMES)
def test_the_trainable_language_model_is_the_one_that_is_served(name: str) -> None:
    known = reference(name)
    model = TrainableCausalLm(CausalConfig.of(known.settings), known.weights, 4, torch.float32)
    tokens = torch.tensor(known.tokens)
    x = model.embed(tokens.clamp(min=0))
    x[tokens == PROMPT_EMBEDDING] = known.embeddings
    with torch.no_grad():
        logits = model.logits(model(torch.stack([x, x])))
    torch.testing.assert_close(logits, torch.stack([known.logits] * 2), atol=1e-4, rtol=0)
    merged = model.merge(known.weights)
    assert all(torch.equal(merged[each], known.weights[each]) for each in known.weights)  # nothing was learnt


def test_merged_weights_compute_what_was_learnt() -> None:
    known = reference("qwen3")
    config = CausalConfig.of(known.settings)
    weights = {name: tensor.float() for name, tensor in known.weights.items()}
    model = TrainableCausalLm(config, weights, 4, torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(1))
    plain = TrainableCausalLm(config, model.merge(weights), 0, torch.float32)
    x = torch.randn(2, 9, config.hidden_size, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(plain(x), model(x), atol=1e-4, rtol=1e-4)
        assert not torch.allclose(TrainableCausalLm(config, weights, 0, torch.float32)(x), model(x), atol=1e-2)
    assert not list(plain.parameters())


def test_the_trainable_adaptor_is_the_one_that_is_served() -> None:
    config = AdaptorConfig(downsample_rate=4, encoder_dim=6, llm_dim=16, ffn_dim=20, n_layer=2, attention_heads=2)
    model, device = TrainableAdaptor(config, 3.0), devices.make_device("cpu", "fp32")
    served = Adaptor(EncoderTensors(dict(model.state_dict(prefix="a.")), device), "a.", "Transformer", config)
    counts = [9, 21]
    packing = pack_clips(counts, device.frame_block)
    clips = torch.randn(2, 24, 6, generator=torch.Generator().manual_seed(6))
    frames = torch.zeros(packing.total, 6)
    for i, (offset, count) in enumerate(zip(packing.offsets, counts, strict=True)):
        clips[i, count:] = 0
        frames[offset : offset + count] = clips[i, :count]
    with torch.no_grad():
        x, made = served(frames, packing)
        found = model(clips, torch.tensor([model.count(count) for count in counts]))
    for i, (offset, count) in enumerate(zip(made.offsets, made.frames, strict=True)):
        torch.testing.assert_close(found[i, :count], x[offset : offset + count], atol=1e-4, rtol=1e-4)


def test_pieces_are_tokens_of_the_language_model(place: Path) -> None:
    path = place / "language_model" / "tokenizer.json"
    pieces = CtcPieces(path, 100)
    vocabulary = json.loads(path.read_text())["model"]["vocab"]
    assert [vocabulary[name] for name in pieces.names] == pieces.tokens
    assert [pieces.names[piece] for piece in pieces.encode("no oxen")] == ["\u2581no", "\u2581", "o", "x", "en"]
    assert "oB" not in pieces.names
    assert pieces.decode(pieces.encode("an old boat isn't")) == "an old boat isn't"
    fewer = CtcPieces(path, 1)
    assert [fewer.names[piece] for piece in fewer.encode("no")] == ["\u2581n", "o"]


def test_marks_of_a_chat_are_made_of_reserved_tokens(place: Path, tmp_path: Path) -> None:
    parts = LanguageModelParts.load(str(place / "language_model"), tmp_path / "made")
    rows = parts.tensors["model.embed_tokens.weight"]
    assert torch.equal(rows[parts.tokenizer.special_token(BEGIN)], rows[2])
    assert torch.equal(rows[parts.tokenizer.special_token(END)], rows[1])
    assert parts.tokenizer.encode(f"{BEGIN}no{END}") == parts.tokenizer.encode("no")


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("Well-known, isn’t it?", "well known isn't it"),
        ('\'Tis -- "so" . . .', "'tis so"),
        ("In 1851.", None),
        ("naïve", None),
        (" . ' ", None),
    ],
)
def test_spoken_forms(text: str, spoken: str | None) -> None:
    assert spoken_form(text) == spoken


def test_what_is_missing_is_told_before_any_work(place: Path, tmp_path: Path) -> None:
    run, nothing = tmp_path / "run", lambda _: None
    with pytest.raises(OptionError, match="neither labels nor sentences"):
        train_speech_llm(options(place, run, sources=SpeechSources()))
    with pytest.raises(OptionError, match=r"nowhere.*kept\.jsonl of `asr-serve label`"):
        train_speech_llm(options(place, run, sources=SpeechSources(labels=(tmp_path / "nowhere",))))
    (tmp_path / "bad.jsonl").write_text('{"text": 3}\n')
    with pytest.raises(OptionError, match=r"bad\.jsonl"):
        train_speech_llm(options(place, run, sources=SpeechSources(labels=(tmp_path / "bad.jsonl",))))
    (tmp_path / "book.txt").write_text("It is not long enough.")
    with pytest.raises(OptionError, match="0 minutes of speech"):
        train_speech_llm(options(place, run, sources=SpeechSources(sentences=(tmp_path / "book.txt",))))
    assert not run.exists()
    with pytest.raises(OptionError, match=r"--encoder moonshine-tiny-en.*a Whisper"):
        FrozenEncoder("moonshine-tiny-en", devices.make_device("cpu", "fp32"), nothing)
    with pytest.raises(OptionError, match=r"--language-model gemma.*gemma3-270m"):
        LanguageModelParts.load("gemma", tmp_path / "parts")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsCorrupt, match="empty cannot be read"):
        LanguageModelParts.load(str(tmp_path / "empty"), tmp_path / "parts")
    (tmp_path / "kept.jsonl").write_bytes(msgspec.json.encode(LabelRow("a.wav", 0.0, 1.0, "In 1851.", 0.0, {})) + b"\n")
    with pytest.raises(EmptyAudio, match="no clip of speech"):
        train_speech_llm(options(place, run, sources=SpeechSources(labels=(tmp_path,))))


def test_another_run_and_other_options_are_refused(place: Path, trained: Path) -> None:
    with pytest.raises(OptionError, match=r"rank: 2.*began with 16"):
        train_speech_llm(options(place, trained, rank=2))
    with lock_run_folder(trained), pytest.raises(OptionError, match="another run writes"):
        train_speech_llm(options(place, trained))
    with pytest.raises(OptionError, match=r"heads 5.*a divisor"):
        training(place, trained, trained.parent / "heads", heads=5)


def test_a_tokenizer_that_spells_no_words_is_refused(place: Path, tmp_path: Path) -> None:
    tokenizer = json.loads((place / "language_model" / "tokenizer.json").read_text("utf-8"))
    del tokenizer["model"]["vocab"]["q"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    with pytest.raises(WeightsCorrupt, match="no token 'q'"):
        CtcPieces(tmp_path / "tokenizer.json", 10)


def test_the_command_names_what_is_wrong_and_explains_itself(place: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    told = runner.invoke(app, ["train", "speech-llm", "--help"])
    assert told.exit_code == 0
    assert "continues a run that stopped" in told.output
    failed = runner.invoke(app, ["train", "speech-llm", "--run", str(tmp_path / "run")])
    assert failed.exit_code != 0
    assert "neither labels nor sentences" in failed.output


@pytest.mark.slow
def test_our_voices_speak_sentences(place: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Call me now, if you will. The sea was calm that night. In 1851 it was not.")
    encoder = FrozenEncoder(str(place / "whisper"), devices.make_device("cpu", "fp32"), lambda _: None)

    def encode(minutes: float) -> list[EncodedClip]:
        sources = SpeechSources(sentences=(tmp_path / "book.txt",), speech_minutes=minutes)
        return encode_speech(sources, encoder, "tiny", tmp_path / "speech", lambda _: None).clips

    (first,) = encode(0.01)
    assert not first.labeled
    assert first.samples > RATE_HZ
    assert spoken_form(first.text) == first.text
    assert encode(0.01) == [first]
    more = encode(first.samples / RATE_HZ / 60 + 0.01)
    assert [each.key for each in more] == ["speech 0", "speech 1"]
    assert more[0] == first
    assert more[1].text != first.text
