"""A cloned voice that is one of the model's own, in every number: what it says is known."""

from __future__ import annotations

import hashlib
import json

import torch
from safetensors.torch import load_file, save

from asr_serve.models.checkpoints import store as weights
from asr_serve.models.registry import tts_card
from asr_serve.models.tts.fastpitch import Config
from asr_serve.voices.cloned_voice import EXAMPLE, ClonedVoiceCard, validated_consent
from asr_serve.voices.voice_store import VoiceStore

NAME = "fastpitch-en"


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
