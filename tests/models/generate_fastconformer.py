"""Writes fixtures/fastconformer_*: tiny models of random weights as NeMo saves them, and what NeMo makes of audio.

pip install torch==2.13.0 "lightning<=2.4.0" nemo_toolkit==3.0.0 and what `import nemo.collections.asr` asks for
python tests/models/generate_fastconformer.py

Of each case: the archive; of each of its contexts the encoder's output of whole utterances under the streaming
mask, and in steps with caches; of the first of them the log-probabilities of CTC, predictor and joint network, and
what greedy search finds.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from nemo.collections.asr import models
from nemo.collections.asr.modules import AudioToMelSpectrogramPreprocessor
from nemo.collections.asr.parts.submodules.subsampling import calc_length
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch import Tensor

RATE_HZ = 16_000
FIXTURES = Path(__file__).parent / "fixtures"
PIECES = ["<unk>", *(f"▁{chr(96 + i)}" if i % 3 == 1 else chr(96 + i) for i in range(1, 24))]
SAMPLES = (24_000, 17_399, 1_000, 12_960)
"""Whole blocks, not, less than a block, and a last mel frame that begins a new encoder frame."""
ENCODER: dict[str, Any] = {
    "_target_": "nemo.collections.asr.modules.ConformerEncoder",
    "feat_in": 16,
    "feat_out": -1,
    "n_layers": 2,
    "d_model": 32,
    "subsampling": "dw_striding",
    "subsampling_factor": 8,
    "subsampling_conv_channels": 8,
    "causal_downsampling": True,
    "ff_expansion_factor": 2,
    "self_attention_model": "rel_pos",
    "n_heads": 4,
    "att_context_style": "chunked_limited",
    "xscaling": True,
    "pos_emb_max_len": 500,
    "conv_kernel_size": 5,
    "conv_norm_type": "layer_norm",
    "conv_context_size": "causal",
    "dropout": 0.1,
    "dropout_pre_encoder": 0.1,
    "dropout_emb": 0.0,
    "dropout_att": 0.1,
}
CASES: dict[str, dict[str, Any]] = {
    "hybrid": {"encoder": {"att_context_size": [[8, 1], [8, 3], [9, 2], [8, 0]]}, "ctc": True, "joint": {}},
    "ctc": {
        "encoder": {
            "att_context_size": [6, 2],
            "subsampling_factor": 4,
            "subsampling_conv_channels": -1,
            "d_model": 16,
            "conv_kernel_size": 9,
            "conv_norm_type": "batch_norm",
            "use_bias": False,
            "untie_biases": False,
            "xscaling": False,
        },
        "ctc": True,
    },
    "rnnt": {
        "encoder": {
            "att_context_size": [[4, 1]],
            "feat_in": 20,
            "d_model": 24,
            "n_heads": 2,
            "conv_norm_type": "batch_norm",
        },
        "joint": {"activation": "tanh", "dropout": 0.0},
        "pred_rnn_layers": 2,
    },
    "tdt": {
        "encoder": {"att_context_size": [10, 1], "use_bias": False, "d_model": 16, "n_heads": 2},
        "joint": {},
        "durations": [0, 1, 2, 4],
    },
}


def settings(case: dict[str, Any]) -> dict[str, Any]:
    encoder = ENCODER | case["encoder"]
    width, durations = encoder["d_model"], case.get("durations", [])
    found: dict[str, Any] = {
        "sample_rate": RATE_HZ,
        "labels": PIECES,
        "preprocessor": {
            "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
            "sample_rate": RATE_HZ,
            "normalize": "NA",
            "window_size": 0.025,
            "window_stride": 0.01,
            "window": "hann",
            "features": encoder["feat_in"],
            "n_fft": 512,
            "frame_splicing": 1,
            "dither": 0.00001,
            "pad_to": 0,
        },
        "encoder": encoder,
        "optim": {"name": "adamw", "lr": 0.001},
    }
    ctc = {
        "_target_": "nemo.collections.asr.modules.ConvASRDecoder",
        "feat_in": width,
        "num_classes": len(PIECES),
        "vocabulary": PIECES,
    }
    if "joint" not in case:
        return found | {"decoder": ctc}
    found |= {
        "model_defaults": {"enc_hidden": width, "pred_hidden": 24, "joint_hidden": 20},
        "decoder": {
            "_target_": "nemo.collections.asr.modules.RNNTDecoder",
            "normalization_mode": None,
            "random_state_sampling": False,
            "blank_as_pad": True,
            "prednet": {
                "pred_hidden": 24,
                "pred_rnn_layers": case.get("pred_rnn_layers", 1),
                "t_max": None,
                "dropout": 0.2,
            },
        },
        "joint": {
            "_target_": "nemo.collections.asr.modules.RNNTJoint",
            "log_softmax": None,
            "preserve_memory": False,
            "fuse_loss_wer": False,
            "num_extra_outputs": len(durations),
            "jointnet": {"joint_hidden": 20, "activation": "relu", "dropout": 0.2} | case["joint"],
        },
        "decoding": {"strategy": "greedy_batch", "greedy": {"max_symbols": 5}},
        "loss": {"loss_name": "default"},
    }
    if durations:
        found["decoding"] |= {"durations": durations, "model_type": "tdt"}
        found["loss"] = {"loss_name": "tdt", "tdt_kwargs": {"durations": durations, "sigma": 0.02, "omega": 0.1}}
    if case.get("ctc"):
        found["aux_ctc"] = {"ctc_loss_weight": 0.3, "ctc_reduction": "mean_batch", "decoder": ctc}
    return found


def random(model: Any, seed: int) -> None:
    """Weights under which every part moves the result."""
    chance = torch.Generator().manual_seed(seed)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=chance)

    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.startswith("preprocessor.") or not value.is_floating_point():
                continue
            if name.endswith("running_var"):
                value.copy_(normal(value).abs() + 0.5)
            elif "norm" in name and name.endswith("weight"):
                value.copy_(1 + 0.3 * normal(value))
            elif value.dim() < 2 or "pos_bias" in name:
                value.copy_(0.3 * normal(value))
            else:
                value.copy_(normal(value) * 1.2 / math.sqrt(value[0].numel()))
        if hasattr(model, "joint"):
            out = model.joint.joint_net[-1]
            out.weight.mul_(3)
            out.bias[len(PIECES)] += 2.0
            # What was said counts as much as what is heard: the next token is another one.
            model.decoder.prediction.embed.weight.mul_(6)
            model.decoder.prediction.embed.weight[len(PIECES)] = 0.0
            model.joint.pred.weight.mul_(4)


def signal() -> list[Tensor]:
    """Chirps over a hiss, int16."""
    chance = torch.Generator().manual_seed(3)
    found = []
    for i, samples in enumerate(SAMPLES):
        time_s = torch.arange(samples) / RATE_HZ
        chirp = torch.sin(2 * math.pi * (200 + 150 * i + 900 * time_s) * time_s) * torch.sin(5 * time_s) ** 2
        hiss = torch.randn(samples, generator=chance) * 0.05
        found.append(((0.4 * chirp + hiss) * 32_767).clamp(-32_768, 32_767).to(torch.int16))
    return found


def stream(encoder: Any, mel: Tensor, first_caches: dict[str, Tensor], name: str) -> Tensor:
    """One utterance in steps with caches, cut as NeMo's buffer cuts it."""
    config, at = encoder.streaming_cfg, 0
    caches = encoder.get_initial_cache_state(batch_size=1)
    found = []
    while at < mel.shape[2]:
        later = int(at > 0)
        size, shift, kept = config.chunk_size[later], config.shift_size[later], config.pre_encode_cache_size[later]
        chunk = mel[:, :, max(0, at - kept) : at + size]
        assert at == 0 or at >= kept, "NeMo would put zeros before the audio: that is another result"
        encoded, length, *caches = encoder.cache_aware_stream_step(
            processed_signal=chunk,
            processed_signal_length=torch.tensor([chunk.shape[2]]),
            cache_last_channel=caches[0],
            cache_last_time=caches[1],
            cache_last_channel_len=caches[2],
            keep_all_outputs=at + size >= mel.shape[2],
            drop_extra_pre_encoded=config.drop_extra_pre_encoded if at else 0,
        )
        if not at:  # what the depthwise convolutions remember after the first step
            first_caches[f"{name}.conv"] = caches[1][:, 0].transpose(1, 2).contiguous()
        found.append(encoded[0, :, : int(length)].T)
        at += shift
    return torch.cat(found)


@torch.no_grad()
def case(name: str, pcm: list[Tensor]) -> dict[str, Tensor]:
    asked = CASES[name]
    kinds = {
        (True, True): models.EncDecHybridRNNTCTCModel,
        (False, True): models.EncDecRNNTModel,
        (True, False): models.EncDecCTCModel,
    }
    torch.manual_seed(1)
    model = kinds["ctc" in asked, "joint" in asked](OmegaConf.create(settings(asked))).eval()
    random(model, 7)
    FIXTURES.mkdir(exist_ok=True)
    model.save_to(str(FIXTURES / f"fastconformer_{name}.nemo"))
    encoder, found = model.encoder, {}
    contexts = encoder.att_context_size_all
    for i, samples in enumerate(pcm):
        audio, length = samples[None].float() / 32_768, torch.tensor([len(samples)])
        mel, mel_length = model.preprocessor(input_signal=audio, length=length)
        for left, right in contexts:
            encoder.set_default_att_context_size([left, right])
            hidden, frames = encoder(audio_signal=mel, length=mel_length)
            hidden = hidden[:, :, : int(frames)]
            key = f"{i}.{right}"
            found[f"{key}.hidden"] = hidden[0].T.contiguous()
            if right and i < 2:
                found[f"{key}.stream"] = stream(encoder, mel[:, :, : int(mel_length)], found, key)
            if (left, right) != tuple(contexts[0]):
                continue
            if "ctc" in asked:
                decoder = model.ctc_decoder if "joint" in asked else model.decoder
                found[f"{key}.ctc"] = decoder(encoder_output=hidden)[0].contiguous()
            if "joint" in asked:
                best = model.decoding.rnnt_decoder_predictions_tensor(hidden, frames, return_hypotheses=True)[0]
                found[f"{key}.tokens"] = torch.as_tensor(best.y_sequence, dtype=torch.int64)
                if i == 0:
                    found |= transducer(model, hidden)
    return found


def transducer(model: Any, hidden: Tensor) -> dict[str, Tensor]:
    """Predictor and joint network along some tokens, from the start on: row t with encoder frame t."""
    tokens = torch.tensor([[3, 0, 17, 17, 22]])
    model.joint.log_softmax = False  # by itself NeMo takes it on a CPU, and not on a GPU
    predicted, _ = model.decoder.predict(tokens, state=None, add_sos=True)
    logits = model.joint.joint(hidden.transpose(1, 2)[:, : predicted.shape[1]], predicted)[0]
    steps = torch.arange(predicted.shape[1])
    return {"tokens": tokens[0], "joint": logits[steps, steps].contiguous()}


@torch.no_grad()
def spectrograms(pcm: list[Tensor]) -> dict[str, Tensor]:
    """Of 5000 samples and of 1000, which are no whole hops, for both numbers of bands that are published."""
    found = {}
    for mels in (80, 128):
        preprocessor = AudioToMelSpectrogramPreprocessor(normalize="NA", window_size=0.025, features=mels, pad_to=0)
        for i, samples in enumerate((pcm[1][:5_000], pcm[2])):
            audio, length = samples[None].float() / 32_768, torch.tensor([len(samples)])
            mel, frames = preprocessor.eval()(input_signal=audio, length=length)
            found[f"mel.{mels}.{i}"] = mel[0, :, : int(frames)].T.contiguous()
    return found


def counts() -> dict[str, Tensor]:
    """Encoder frames of 0, 1, 2 ... mel frames, subsampled by 8 and by 4."""
    mels = torch.arange(200)
    return {
        f"counts.{factor}": calc_length(
            mels, all_paddings=3, kernel_size=3, stride=2, ceil_mode=False, repeat_num=int(math.log2(factor))
        ).long()
        for factor in (8, 4)
    }


def main() -> None:
    pcm = signal()
    found: dict[str, Tensor] = {f"pcm.{i}": samples for i, samples in enumerate(pcm)}
    found |= spectrograms(pcm) | counts()
    for name in CASES:
        found |= {f"{name}.{key}": value for key, value in case(name, pcm).items()}
    made_by = {name: importlib.metadata.version(name) for name in ("nemo_toolkit", "torch")}
    made_by["python"] = sys.version.split()[0]
    path = FIXTURES / "fastconformer.safetensors"
    save_file(found, path, {"made_by": json.dumps(made_by)})
    for name in sorted(FIXTURES.glob("fastconformer*")):
        print(name.name, name.stat().st_size)


if __name__ == "__main__":
    main()
