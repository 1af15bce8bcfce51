"""Cloned voices in the library: they speak beside the model's own, and belong to its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

import asr_serve
from asr_serve.api.library import Model
from asr_serve.cloning.base_model import checkpoint_fingerprint
from asr_serve.config import EngineConfig
from asr_serve.errors import UnknownVoice
from asr_serve.models.checkpoints import store as weights
from asr_serve.models.registry import tts_card, vocoder_card
from asr_serve.models.tts.fastpitch import Config
from asr_serve.voices.cloned_voice import EXAMPLE, ClonedVoiceCard, validated_consent
from asr_serve.voices.voice_store import VoiceStore

NAME, TEXT = "fastpitch-en", "The last tomato can be dancing after half past four."


def twin(store: VoiceStore, name: str, marks: dict[str, str]) -> None:
    """A voice that is heart's, in every number."""
    folder = weights.verified_published_folder(tts_card(NAME))
    config = Config.of(json.loads((folder / "config.json").read_text("utf-8")))
    tables, at = load_file(folder / "model.safetensors"), config.voices.index("heart")
    tensors = save(
        {
            "speaker": tables["speakers"][at].float(),
            "speaker_decoder": tables["speakers_decoder"][at].float(),
            "pitch": torch.tensor(config.norms.pitch["heart"]),
        },
        marks,
    )
    card = ClonedVoiceCard(
        name=name, created=1, model=NAME, fingerprint="", consent=validated_consent(EXAMPLE, "tester"), clips=20,
        seconds=60.0, start="heart", similarity=None, ceiling=1.0, steps=1, seed=0,
        sha256=hashlib.sha256(tensors).hexdigest(), release="0.1.0",
    )  # fmt: skip
    store.add(card, tensors)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    card = tts_card(NAME)
    if weights.locate(card) is None or weights.locate(vocoder_card(card.vocoder)) is None:
        pytest.skip(f"the weights of {NAME} are not on this machine")
    store = VoiceStore(tmp_path_factory.mktemp("voices"))
    own = {"fingerprint": checkpoint_fingerprint(weights.verified_published_folder(card))}
    twin(store, "twin", own)
    twin(store, "stale", {"fingerprint": "0" * 64})
    with asr_serve.load(NAME, device="cpu", engine=EngineConfig(voices_dir=str(store.folder))) as model:
        yield model


def said(model: Model, voice: str) -> np.ndarray:
    return model.speak(TEXT, voice=voice, seed=1).read()


def test_a_clone_speaks_as_what_it_was_taught(model: Model) -> None:
    assert np.array_equal(said(model, "twin"), said(model, "heart"))


def test_a_clone_of_other_weights_is_refused(model: Model) -> None:
    with pytest.raises(UnknownVoice, match="other weights of fastpitch-en"):
        said(model, "stale")
    assert len(said(model, "heart")), "the engine goes on"
