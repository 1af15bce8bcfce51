"""Writes fixtures/u2pp.safetensors: what WeNet's U2++ makes of a signal, for a few tiny models of random weights.

WeNet is in no package index; masr is, and its conformer is WeNet's: `ConformerEncoder.forward` with a chunk mask,
`forward_chunk` with caches, `BiTransformerDecoder` and `attention_rescoring` have WeNet's maths and tensor names.
One difference is undone below: masr's decoder has its norms at 1e-12, WeNet's are at 1e-5. Features are
kaldi-native-fbank's, since WeNet's own (torchaudio's Kaldi) are the same.

    pip install --no-deps masr==3.0.3
    pip install torch==2.13.0 kaldi-native-fbank==1.23.0 safetensors numpy typeguard loguru tqdm
    python tests/models/generate_u2pp.py
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import kaldi_native_fbank as knf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

FIXTURE = Path(__file__).parent / "fixtures" / "u2pp.safetensors"
RATE_HZ = 16_000
SHARED = {
    "vocab": 23,
    "sos": 22,
    "eos": 22,
    "mels": 20,
    "width": 16,
    "heads": 2,
    "inner": 24,
    "layers": 2,
    "decoder_heads": 2,
    "decoder_inner": 24,
    "decoder_layers": 1,
    "chunk": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "conv2d": SHARED | {"kernel": 5, "reverse_layers": 2, "left_chunks": 2, "reverse_weight": 0.3},
    "conv2d6": SHARED
    | {"kernel": 4, "subsampling": 6, "left_chunks": 1, "conv_norm": "batch_norm", "reverse_layers": 1}
    | {"reverse_weight": 0.5, "ctc_weight": 0.5},
    "conv2d8": SHARED
    | {"kernel": 7, "subsampling": 8, "left_chunks": 3, "chunk": 2, "reverse_layers": 1, "reverse_weight": 0.0},
}
GUESSES = [[3, 1, 4, 1, 5], [9, 2, 6], [], [5, 3, 5, 8, 9, 7, 9, 3, 2]]
CTC_LOGPROBS = [-3.0, -30.0, -90.0, -2.5]
"""Of the guesses, as a search might have found them."""


class _Normalizer:
    """Stands in for masr's, which reads a file and imports a training toolbox to do so."""

    mean = istd = np.zeros(0, np.float32)

    def __init__(self, mean_istd_filepath: str) -> None: ...


STAND_INS: dict[str, dict[str, Any]] = {
    "masr.data_utils.normalizer": {"FeatureNormalizer": _Normalizer},
    "masr.utils.utils": {"DictObject": SimpleNamespace},
    "masr.model_utils.squeezeformer.model": {"SqueezeformerModel": None},  # does not import with today's torch
}


def upstream() -> ModuleType:
    """masr.model_utils.conformer.model, without what only training and other models need."""
    for name, held in STAND_INS.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(held)
    from masr.model_utils.conformer import model

    return model


def signal() -> np.ndarray:
    """Chirps that come and go, over noise: int16, 2.1 s."""
    rng = np.random.default_rng(3)
    time = np.arange(RATE_HZ * 21 // 10) / RATE_HZ
    chirp = 6_000 * np.sin(2 * np.pi * (150 * time + 900 * time**2)) * (np.sin(9 * time) > 0)
    return np.clip(np.round(chirp + rng.standard_normal(len(time)) * 900), -32_768, 32_767).astype(np.int16)


def features(pcm: np.ndarray, mels: int) -> Tensor:
    options = knf.FbankOptions()
    options.frame_opts.dither = 0.0
    options.mel_opts.num_bins = mels
    fbank = knf.OnlineFbank(options)
    fbank.accept_waveform(RATE_HZ, pcm.astype(np.float32).tolist())
    fbank.input_finished()
    return torch.from_numpy(np.stack([fbank.get_frame(i) for i in range(fbank.num_frames_ready)]))


def build(module: ModuleType, config: dict[str, Any], spread: Tensor, name: str) -> Any:
    _Normalizer.mean, _Normalizer.istd = spread.mean(0).numpy(), (1 / spread.std(0)).numpy()
    encoder = {
        "output_size": config["width"],
        "attention_heads": config["heads"],
        "linear_units": config["inner"],
        "num_blocks": config["layers"],
        "cnn_module_kernel": config["kernel"],
        "cnn_module_norm": config.get("conv_norm", "layer_norm"),
        "input_layer": name,
    }
    decoder = {
        "attention_heads": config["decoder_heads"],
        "linear_units": config["decoder_inner"],
        "num_blocks": config["decoder_layers"],
        "r_num_blocks": config["reverse_layers"],
    }
    model = module.ConformerModel(
        config["mels"],
        config["vocab"],
        "",
        config["eos"],
        encoder_conf=SimpleNamespace(encoder_name="ConformerEncoder", encoder_args=encoder),
        decoder_conf=SimpleNamespace(decoder_name="BiTransformerDecoder", decoder_args=decoder),
        reverse_weight=config["reverse_weight"],
    ).eval()
    for tensor in model.state_dict().values():
        if tensor.dim() == 1 and tensor.dtype == torch.float32 and len(tensor) != config["mels"]:
            tensor.add_(torch.randn_like(tensor).abs() * 0.3)  # variances stay above zero
        elif tensor.dim() > 1:
            tensor.mul_(1.5)
    for part in model.decoder.modules():
        if isinstance(part, torch.nn.LayerNorm):
            part.eps = 1e-5
    return model


def by_chunks(model: Any, config: dict[str, Any], found: Tensor) -> Tensor:
    """As WeNet's forward_chunk_by_chunk: windows of features that overlap, caches handed on."""
    embed = model.encoder.embed
    stride, ahead = embed.subsampling_rate * config["chunk"], embed.right_context + 1
    window = embed.subsampling_rate * (config["chunk"] - 1) + ahead
    attention, convolution = torch.zeros(0, 0, 0, 0), torch.zeros(0, 0, 0, 0)
    offset, heard = 0, []
    for at in range(0, len(found) - ahead + 1, stride):
        chunk, attention, convolution = model.encoder.forward_chunk(
            found[None, at : at + window], offset, config["chunk"] * config["left_chunks"], attention, convolution
        )
        heard.append(chunk)
        offset += chunk.shape[1]
    return torch.cat(heard, dim=1)


def scores(model: Any, config: dict[str, Any], hidden: Tensor) -> Tensor:
    """What attention_rescoring adds up for each guess, but for CTC's share."""
    eos = config["eos"]
    lengths = torch.tensor([len(guess) + 1 for guess in GUESSES])
    read = torch.full((len(GUESSES), int(lengths.max())), eos)
    for row, guess in zip(read, GUESSES, strict=True):
        row[: len(guess) + 1] = torch.tensor([config["sos"], *guess])
    left, right = model.get_decoder_out(read, lengths, hidden, config["reverse_weight"])
    found = []
    for i, guess in enumerate(GUESSES):
        score = sum(float(left[i, j, token]) for j, token in enumerate([*guess, eos]))
        if config["reverse_weight"] > 0:
            back = sum(float(right[i, j, token]) for j, token in enumerate([*guess[::-1], eos]))
            score = score * (1 - config["reverse_weight"]) + back * config["reverse_weight"]
        found.append(score)
    return torch.tensor(found)


def best(model: Any, config: dict[str, Any], hidden: Tensor) -> int:
    """Which guess attention_rescoring itself chooses."""
    from masr.decoders import attention_rescoring as rescoring

    nbest = [(tuple(guess), logprob) for guess, logprob in zip(GUESSES, CTC_LOGPROBS, strict=True)]
    rescoring.ctc_prefix_beam_search = lambda **_: ([], [nbest])
    lengths = torch.tensor([hidden.shape[1]])
    weights = {"ctc_weight": config.get("ctc_weight", 0.3), "reverse_weight": config["reverse_weight"]}
    chosen = rescoring.attention_rescoring(model, hidden, lengths, hidden, lengths, beam_size=len(nbest), **weights)
    return GUESSES.index(chosen[0])


@torch.inference_mode()
def main() -> None:
    module = upstream()
    pcm = signal()
    held: dict[str, Tensor] = {"pcm": torch.from_numpy(pcm)}
    chosen = {}
    for seed, (name, config) in enumerate(CONFIGS.items()):
        torch.manual_seed(seed)
        found = features(pcm, config["mels"])
        model = build(module, config, found, name)
        lengths = torch.tensor([len(found)])
        hidden, _ = model.encoder(found[None], lengths, config["chunk"], config["left_chunks"])
        held |= {f"{name}/weights/{key}": tensor.clone() for key, tensor in model.state_dict().items()}
        held |= {
            f"{name}/masked": hidden,
            f"{name}/chunks": by_chunks(model, config, found),
            f"{name}/ctc": model.ctc.log_softmax(hidden),
            f"{name}/scores": scores(model, config, hidden),
        }
        chosen[name] = best(model, config, hidden)
    versions = {name: importlib.metadata.version(name) for name in ("masr", "kaldi-native-fbank", "torch")}
    facts = {"configs": CONFIGS, "guesses": GUESSES, "ctc_logprobs": CTC_LOGPROBS, "best": chosen}
    FIXTURE.parent.mkdir(exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in held.items()},
        FIXTURE,
        metadata=versions | {name: json.dumps(fact) for name, fact in facts.items()},
    )


if __name__ == "__main__":
    main()
