"""Cloned voices in the library: they speak beside the model's own, and belong to its weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from cloned_twin import NAME, twin

import asr_serve
from asr_serve.api.library import Model
from asr_serve.cloning.base_model import checkpoint_fingerprint
from asr_serve.config import EngineConfig
from asr_serve.errors import UnknownVoice
from asr_serve.models.checkpoints import store as weights
from asr_serve.models.registry import tts_card, vocoder_card
from asr_serve.voices.voice_store import VoiceStore

TEXT = "The last tomato can be dancing after half past four."


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
