"""Writes fixtures/rnnt.safetensors: what NeMo's batched greedy searches say with random weights, RNN-T and TDT.

pip install nemo_toolkit==3.0.0 torch==2.13.0 msgspec, and what the import of NeMo asks for
PYTHONPATH=src python tests/decoding/generate_rnnt.py
"""

from __future__ import annotations

import json
from pathlib import Path

import nemo
import torch
from nemo.collections.asr.modules.rnnt import RNNTDecoder, RNNTJoint
from nemo.collections.asr.parts.submodules.rnnt_greedy_decoding import GreedyBatchedRNNTInfer, GreedyBatchedTDTInfer
from safetensors.torch import save_file
from tiny_transducer import TinyTransducer, noise

FIXTURE = Path(__file__).parent / "fixtures" / "rnnt.safetensors"
SIZES = {"vocab": 9, "width": 6, "hidden": 8, "joint": 10, "layers": 2}
MODELS = {
    "rnnt": {"seed": 24, "eager": -4.0, "durations": ()},
    "tdt": {"seed": 58, "eager": -1.0, "durations": (0, 1, 2, 3, 4)},
}
"""They say now one token at a frame, now several."""
LENGTHS = [100, 1, 47, 90, 2, 63]
MAX_SYMBOLS = 4


def upstream(model: TinyTransducer) -> tuple[RNNTDecoder, RNNTJoint]:
    """NeMo's modules with the same weights."""
    decoder = RNNTDecoder(
        prednet={"pred_hidden": SIZES["hidden"], "pred_rnn_layers": SIZES["layers"], "dropout": 0.0},
        vocab_size=SIZES["vocab"] - 1,
        blank_as_pad=True,
    )
    joint = RNNTJoint(
        jointnet={
            "encoder_hidden": SIZES["width"],
            "pred_hidden": SIZES["hidden"],
            "joint_hidden": SIZES["joint"],
            "activation": "relu",
            "dropout": 0.0,
        },
        num_classes=SIZES["vocab"] - 1,
        num_extra_outputs=len(model.durations),
    )
    parts = model.parts
    decoder.prediction["embed"].load_state_dict(parts["embedding"].state_dict())
    decoder.prediction["dec_rnn"].lstm.load_state_dict(parts["lstm"].state_dict())
    joint.enc.load_state_dict(parts["encoded"].state_dict())
    joint.pred.load_state_dict(parts["predicted"].state_dict())
    joint.joint_net[-1].load_state_dict(parts["out"].state_dict())
    return decoder.eval(), joint.eval()


@torch.inference_mode()
def said(model: TinyTransducer, encoded: torch.Tensor) -> list[list[list[int]]]:
    """Of each session: token and frame."""
    decoder, joint = upstream(model)
    asked = {
        "decoder_model": decoder,
        "joint_model": joint,
        "blank_index": model.blank_id,
        "max_symbols_per_step": MAX_SYMBOLS,
        "use_cuda_graph_decoder": False,
    }
    if model.durations:
        search = GreedyBatchedTDTInfer(durations=list(model.durations), **asked)
    else:
        search = GreedyBatchedRNNTInfer(**asked)
    (found,) = search(encoder_output=encoded.transpose(1, 2), encoded_lengths=torch.tensor(LENGTHS))
    return [
        [[int(token), int(frame)] for token, frame in zip(each.y_sequence, each.timestamp, strict=True)]
        for each in found
    ]


def main() -> None:
    encoded = torch.nn.utils.rnn.pad_sequence(noise(1, LENGTHS, SIZES["width"]), batch_first=True)
    about = {"nemo_toolkit": nemo.__version__, "torch": torch.__version__}
    about |= {"sizes": SIZES, "lengths": LENGTHS, "max_symbols": MAX_SYMBOLS}
    tensors = {"encoded": encoded}
    for kind, made in MODELS.items():
        model = TinyTransducer.random(**made, **SIZES)
        with torch.no_grad():
            model.parts["embedding"].weight[model.blank_id] = 0.0
        tensors |= {f"{kind}.{name}": each.contiguous() for name, each in model.parts.state_dict().items()}
        about[kind] = {"durations": model.durations, "said": said(model, encoded)}
    FIXTURE.parent.mkdir(exist_ok=True)
    save_file(tensors, FIXTURE, {"about": json.dumps(about)})


if __name__ == "__main__":
    main()
