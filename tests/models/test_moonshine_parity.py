"""The numbers are Moonshine's: transformers' on random weights, the vendor's graphs' on real speech."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import av
import numpy as np
import pytest
import torch

from asr_serve.errors import WeightsCorrupt
from asr_serve.models.asr.moonshine import moonshine
from asr_serve.models.checkpoints import store
from asr_serve.models.registry import asr_card

BENCH = Path(__file__).resolve().parents[2] / "bench"
TINY = asr_card("moonshine-tiny-en")
SECONDS = (0.4, 1.0, 2.37, 0.05)
"""Lengths in one batch; the last is shorter than the encoder's reach."""
TOLERANCE = 1e-4
SIZES = {
    "tiny's heads of 36": {
        "hidden_size": 144,
        "intermediate_size": 200,
        "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 3,
        "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 4,
        "partial_rotary_factor": 0.9,
    },
    "base's heads of 52": {
        "hidden_size": 104,
        "intermediate_size": 160,
        "encoder_num_hidden_layers": 3,
        "decoder_num_hidden_layers": 2,
        "encoder_num_attention_heads": 2,
        "decoder_num_attention_heads": 2,
        "partial_rotary_factor": 0.62,
    },
}


@pytest.fixture(scope="module")
def parity() -> Iterator[ModuleType]:
    """bench/parity.py, which knows how to drive the networks without an engine."""
    pytest.importorskip("onnxruntime")
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("parity")
    sys.path.remove(str(BENCH))


# --- transformers, random weights -------------------------------------------------------------------------


class Pair:
    """One checkpoint that transformers made, and both readings of it."""

    def __init__(self, folder: Path, theirs: Any, ours: Any) -> None:
        self.folder, self.theirs, self.ours = folder, theirs, ours
        rng = np.random.default_rng(7)
        shape = [int(16_000 * s) for s in SECONDS]
        self.clips = [(rng.standard_normal(n) * 0.1).astype(np.float32) for n in shape]

    def their_frames(self, clip: np.ndarray) -> torch.Tensor:
        padded = np.pad(clip, (0, max(0, moonshine.SHORTEST_SAMPLES - len(clip))))
        with torch.inference_mode():
            return self.theirs.model.encoder(torch.from_numpy(padded)[None]).last_hidden_state[0]

    def their_logits(self, frames: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        from transformers.models.moonshine.modeling_moonshine import MoonshineEncoderModelOutput

        with torch.inference_mode():
            heard = MoonshineEncoderModelOutput(last_hidden_state=frames[None])
            made = self.theirs(encoder_outputs=heard, decoder_input_ids=torch.tensor([tokens]))
        return made.logits[0]


@pytest.fixture(scope="module", params=SIZES)
def pair(request: pytest.FixtureRequest, parity: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    pytest.importorskip("transformers", reason="the oracle: pip install 'asr-serve[dev]'")
    from transformers import MoonshineConfig, MoonshineForConditionalGeneration

    torch.manual_seed(3)
    # Large weights: with the usual small ones every token looks the same and nothing would be tested.
    config = MoonshineConfig(vocab_size=211, max_position_embeddings=64, initializer_range=0.15, **SIZES[request.param])
    theirs = MoonshineForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if "norm" in name:  # else all ones and zeros, which hide a norm that is left out
                value.add_(0.2 * torch.randn_like(value))
    folder = tmp_path_factory.mktemp("checkpoint")
    theirs.save_pretrained(folder)
    return Pair(folder, theirs, parity.Ours.load(store.resolve(TINY, folder), "fp32"))


def test_config_reads_transformers_own(pair: Pair) -> None:
    ours, theirs = pair.ours.network.config, pair.theirs.config
    for name in set(moonshine.Config.__struct_fields__) - {"alignment_heads"}:
        expected = getattr(theirs, name, None)
        if expected is None:
            expected = theirs.rope_parameters[name]
        assert getattr(ours, name) == expected, name


def test_config_reads_the_old_style() -> None:
    flat = moonshine.Config.of({"partial_rotary_factor": 0.62, "rope_theta": 5_000.0, "hidden_size": 416})
    assert (flat.partial_rotary_factor, flat.rope_theta, flat.head_dim) == (0.62, 5_000.0, 52)


@pytest.mark.parametrize(
    "settings", [{"decoder_num_attention_heads": 8, "decoder_num_key_value_heads": 2}, {"attention_bias": True}]
)
def test_config_refuses_what_we_do_not_compute(settings: dict[str, Any]) -> None:
    with pytest.raises(WeightsCorrupt, match=[*settings][-1]):
        moonshine.Config.of(settings)


def test_encoder_frames(pair: Pair) -> None:
    frames = pair.ours.frames(pair.clips)
    for clip, mine in zip(pair.clips, frames, strict=True):
        assert len(mine) == pair.ours.network.count_frames(len(clip))
        torch.testing.assert_close(mine, pair.their_frames(clip), atol=TOLERANCE, rtol=0)


def test_a_clip_does_not_see_its_neighbours(pair: Pair) -> None:
    together = pair.ours.frames(pair.clips)
    for clip, mine in zip(pair.clips, together, strict=True):
        torch.testing.assert_close(mine, pair.ours.frames([clip])[0], atol=1e-5, rtol=0)


def test_teacher_forced_logits(pair: Pair, rng: np.random.Generator) -> None:
    tokens = [[1, *rng.integers(3, 211, n).tolist()] for n in (40, 17, 1, 30)]
    made = pair.ours.logits(pair.ours.frames(pair.clips), tokens)
    for clip, given, mine in zip(pair.clips, tokens, made, strict=True):
        theirs = pair.their_logits(pair.their_frames(clip), given)
        assert theirs.std() > 0.1, "the weights say nothing: this would prove nothing"
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)


def test_greedy_tokens(pair: Pair) -> None:
    most = 24
    found = pair.ours.greedy(pair.ours.frames(pair.clips), [most] * len(pair.clips))
    for clip, mine in zip(pair.clips, found, strict=True):
        frames, theirs = pair.their_frames(clip), [1]
        while len(theirs) <= most and theirs[-1] != 2:
            theirs.append(int(pair.their_logits(frames, theirs)[-1].argmax()))
        assert mine == theirs


def test_the_output_projection_may_be_its_own(pair: Pair) -> None:
    from safetensors.torch import load_file

    tensors = load_file(pair.folder / "model.safetensors")
    assert "proj_out.weight" not in tensors, "tied in the checkpoint"
    embedding = pair.ours.network.embedding.weight
    torch.testing.assert_close(pair.ours.network.head_weight, embedding)
    tensors["proj_out.weight"] = 2 * embedding
    loose = moonshine.Model(pair.ours.network.config, tensors, pair.ours.device)
    torch.testing.assert_close(loose.head_weight, 2 * embedding)


@pytest.mark.parametrize(
    "name",
    [
        "model.encoder.conv2.bias",
        "model.decoder.embed_tokens.weight",
        "model.decoder.layers.1.encoder_attn.k_proj.weight",
        "model.encoder.layers.0.mlp.fc1.bias",
        "model.decoder.layers.0.mlp.fc2.bias",
    ],
)
def test_a_missing_tensor_is_named(pair: Pair, name: str) -> None:
    from safetensors.torch import load_file

    tensors = load_file(pair.folder / "model.safetensors")
    del tensors[name]
    with pytest.raises(WeightsCorrupt, match=name.replace(".", r"\.")):
        moonshine.Model(pair.ours.network.config, tensors, pair.ours.device)


# --- the vendor's graphs, real speech ---------------------------------------------------------------------


def read(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        to_mono = av.AudioResampler(format="flt", layout="mono", rate=16_000)
        frames = [out for frame in container.decode(audio=0) for out in to_mono.resample(frame)]
        frames += to_mono.resample(None)
    return np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames]).astype(np.float32)


def pieces(pcm: np.ndarray) -> list[np.ndarray]:
    """Cut below 16 s, in the quietest 200 ms after the tenth second: a cut word is a coin toss."""
    found = []
    while len(pcm) > 16 * 16_000:
        loud = np.square(pcm[10 * 16_000 : 16 * 16_000].reshape(-1, 3_200)).mean(axis=1)
        cut = 10 * 16_000 + int(loud.argmin()) * 3_200 + 1_600
        found.append(pcm[:cut].copy())
        pcm = pcm[cut:]
    return [*found, pcm.copy()]


@pytest.fixture(scope="module")
def graphs(parity: ModuleType, packaged_speech: Path) -> Any:
    return parity.Graphs("cpu", 2)


@pytest.fixture(scope="module")
def packaged(parity: ModuleType, graphs: Any, packaged_speech: Path) -> Any:
    pcm = [read(packaged_speech / name) for name in ("beckett.wav", "two_cities.wav")]
    return parity.Measured([piece for clip in pcm for piece in pieces(clip)], graphs)


@pytest.fixture(scope="module")
def librispeech(parity: ModuleType, graphs: Any, speech_data: Path) -> Any:
    files = sorted((speech_data / "librispeech-test-other").rglob("*.flac"))[::5]
    if not files:
        pytest.skip("no librispeech-test-other among the evaluation speech")
    return parity.Measured([read(file) for file in files], graphs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("speech", ["packaged", "librispeech"])
def test_the_vendors_graphs(parity: ModuleType, request: pytest.FixtureRequest, speech: str, dtype: str) -> None:
    measured = request.getfixturevalue(speech)
    ours = parity.Ours.load(store.resolve(TINY), dtype)
    numbers, _ = measured.against(ours)
    assert numbers["tokens"] > 100
    assert numbers["cosine_mean"] >= 0.999
    assert numbers["agreement_on_theirs"] >= 99
    assert numbers["agreement_on_ours"] >= 98.5
