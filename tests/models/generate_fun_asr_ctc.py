"""What the CTC head of Fun-ASR-Nano computes with random weights, for test_fun_asr_ctc.py.

    python tests/models/generate_fun_asr_ctc.py

(with the packages of generate_fun_asr.py, tiktoken and msgspec, and src on PYTHONPATH) loads the tiny model of
fixtures/fun_asr.safetensors into funasr's class, with a CTC decoder and head of its own, and writes
fixtures/fun_asr_ctc.safetensors: their weights in half precision, with which the reference ran too, frames and
log-probabilities of each clip; and in the metadata the vocabulary, its tokens of some texts, and funasr's alignment of
these with each clip.
"""

from __future__ import annotations

import base64
import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from fun_asr_folders import clips, facts, weights
from funasr.frontends.wav_frontend import WavFrontend
from funasr.models.fun_asr_nano.model import FunASRNano
from funasr.models.sense_voice import model as sense_voice  # registers the encoder
from funasr.models.sense_voice.utils.ctc_alignment import ctc_forced_align
from safetensors.torch import save_file

assert sense_voice
FIXTURE = Path(__file__).parent / "fixtures" / "fun_asr_ctc.safetensors"
JOINED = ["he", "ll", "llo", "hello", " w", "or", " wor", "ld", " world", "ow", " n", " now", "now", "开", "放", "开放"]
"""Pieces beside the single bytes, and what they are joined from, in the order of their ranks."""
TEXTS = ["hello world", "开放 now", "now, now", "Ada 开", "é", "aa aa", "hello world, now, now, hello world again"]
SETTINGS: dict[str, Any] = {
    "ctc_decoder": "Transformer",
    "ctc_decoder_conf": {
        "downsample_rate": 1,
        "encoder_dim": 16,
        "llm_dim": 16,
        "ffn_dim": 24,
        "n_layer": 2,
        "attention_heads": 2,
    },
    "ctc_vocab_size": 300,
}


def pieces() -> list[bytes]:
    made = [bytes([byte]) for byte in reversed(range(256))]  # not in the order of the letters that stand for them
    for text in JOINED:
        whole = text.encode()
        made += [whole[:end] for end in range(2, len(whole) + 1) if len(text) == 1 and whole[:end] not in made]
        made += [whole] if whole not in made else []
    return made


def main() -> None:
    vocabulary = "".join(f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces()))
    known = facts()["models"]["nano"]
    with tempfile.TemporaryDirectory() as place:
        stored, made = reference(known, vocabulary, Path(place))
    save_file(stored, FIXTURE, {"facts": json.dumps({"settings": SETTINGS, "vocabulary": vocabulary, **made})})
    print(FIXTURE, FIXTURE.stat().st_size)


def reference(known: dict[str, Any], vocabulary: str, place: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    (place / "multilingual.tiktoken").write_text(vocabulary)
    (place / "config.json").write_text(json.dumps(known["language_model"]))
    settings = json.loads(json.dumps({**known["settings"], **SETTINGS}))
    settings["llm_conf"]["init_param_path"] = str(place)
    tokenizer_conf = {"is_multilingual": True, "vocab_path": str(place / "multilingual.tiktoken")}
    settings["dataset_conf"] |= {"ctc_tokenizer": "SenseVoiceTokenizer", "ctc_tokenizer_conf": tokenizer_conf}
    frontend = WavFrontend(**settings["frontend_conf"])
    torch.manual_seed(11)
    model = FunASRNano(input_size=frontend.output_size(), **settings).eval()
    state = model.state_dict()
    head = {name: value for name, value in state.items() if name.startswith(("ctc_decoder.", "ctc."))}
    for name, value in head.items():
        deviation = 1.5 * value[0].numel() ** -0.5 if value.dim() > 1 else 0.2
        centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        head[name] = (torch.randn_like(value) * deviation + centre).half()
    missing, _ = model.load_state_dict(
        {**weights("nano"), **{name: value.float() for name, value in head.items()}}, strict=False
    )
    assert missing == ["llm.lm_head.weight"], missing
    stored, alignments = dict(head), []
    targets = [list(model.ctc_tokenizer.encode(text)) for text in TEXTS]
    for index, pcm in enumerate(clips()):
        features, lengths = frontend(torch.from_numpy(pcm)[None], torch.tensor([len(pcm)]))
        with torch.no_grad():
            frames, counts = model.ctc_decoder(*model.encode(features, lengths))
            logprobs = model.ctc.log_softmax(frames)
        assert int(counts[0]) == frames.shape[1]
        stored[f"frames.{index}"], stored[f"logprobs.{index}"] = frames[0].clone(), logprobs[0].clone()
        alignments.append([aligned(logprobs, target, model.blank_id) for target in targets])
    return stored, {"blank": model.blank_id, "texts": TEXTS, "tokens": targets, "alignments": alignments}


def aligned(logprobs: torch.Tensor, target: list[int], blank: int) -> list[int]:
    """Label of each frame; empty where there are too few frames."""
    repeated = sum(left == right for left, right in pairwise(target))
    frames = logprobs.shape[1]
    if len(target) + repeated > frames:
        return []
    lengths = torch.tensor([frames]), torch.tensor([len(target)])
    path: list[int] = ctc_forced_align(logprobs, torch.tensor([target]), *lengths, blank)[0].tolist()
    return path


if __name__ == "__main__":
    main()
