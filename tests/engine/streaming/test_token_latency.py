"""How late words are known: what a card says is what its model does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import tiny_configs
import torch
from tiny_streaming import Silent, model

from asr_serve.engine.builder import AsrCheckpoint, card_of_loaded
from asr_serve.engine.executor import EngineComponents
from asr_serve.engine.streaming.model_runner import ChunkedModelRunner
from asr_serve.models.asr import deepspeech
from asr_serve.models.asr.moonshine import moonshine_streaming
from asr_serve.models.asr.moonshine.window_encoder import WindowEncoder, WindowEncoderConfig
from asr_serve.models.registry import AsrCard, asr_cards

STREAMING = {name: card for name, card in asr_cards().items() if card.streaming}


def timed_like(card: AsrCard) -> Any:
    """A tiny model that cuts time up as the published one does, or that itself where it is small."""
    if card.kind == "deepspeech":
        config = msgspec.structs.replace(
            tiny_configs.deepspeech_config(), context_frames=deepspeech.Config().context_frames
        )
        tensors = {name: torch.zeros(shape) for name, shape in config.shapes().items()}
        return deepspeech.Model(config, tensors, model("deepspeech").device)
    if card.kind == "kaldi_chain":
        return AsrCheckpoint.find(card.name, None).build("cpu", "fp32").model
    return model(f"fastconformer 70,{card.chunk - 1}" if card.kind == "fastconformer" else "u2pp 2")


def loaded_card(card: AsrCard, network: Any) -> Any:
    return card_of_loaded(card, EngineComponents(network, None, network.device, str))


@pytest.mark.parametrize("name", STREAMING)
def test_a_card_has_the_latency_that_an_engine_measures(name: str):
    card, network = STREAMING[name], timed_like(STREAMING[name])
    found = loaded_card(card, network)
    assert (found.chunk, found.frame_samples, found.lookahead_samples) == (
        card.chunk,
        card.frame_samples,
        card.lookahead_samples,
    )
    window = network.audio_window(card.chunk)
    assert card.lag_samples() == window.samples - window.left_samples + network.frame_samples
    assert card.lag_samples(2 * card.chunk) == card.lag_samples() + card.chunk * card.frame_samples


def test_cards_of_moonshine_streaming_have_the_look_ahead_of_its_encoder():
    config = WindowEncoderConfig()
    ahead = sum(ahead for _, ahead in config.reach)
    window = WindowEncoder.audio_window(SimpleNamespace(config=config, ahead=ahead, frame_samples=320), 8)  # type: ignore[arg-type]
    for card in moonshine_streaming.CARDS:
        assert card.lookahead_samples == window.samples - window.left_samples - 8 * 320
        assert card.lag_samples() == 16_000 * 405 // 1_000


def test_offline_models_have_no_latency():
    assert asr_cards()["moonshine-tiny-en"].lag_samples() == 0


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", STREAMING)
def test_no_word_is_later_than_on_the_card(name: str, chunks: int):
    """However much was heard, frames that hear all of what is older than the lag were taken: and no sooner."""
    network = timed_like(STREAMING[name])
    card, chunk = loaded_card(STREAMING[name], network), chunks * STREAMING[name].chunk
    wrapper = ChunkedModelRunner(network, Silent(network), network.device, slots=1, chunk=chunk)
    session, piece, late = wrapper.open_session(), 40, []
    for heard in range(piece, 3 * chunk * network.frame_samples, piece):
        wrapper.append_audio(session, np.zeros(piece, np.float32), 0.0)
        while running := wrapper.schedule(1e9):
            wrapper.step(running, 0.0)
        late.append(heard - (session.audio_buffer.seen_frames - 1) * network.frame_samples)
    assert card.lag_samples(chunk) - piece <= max(late) < card.lag_samples(chunk)


def test_a_chunk_of_a_card_is_made_of_whole_blocks():
    card, network = STREAMING["fastconformer-streaming-medium-en"], model("fastconformer 8,3")
    assert loaded_card(card, network).chunk == network.frame_block == 4
