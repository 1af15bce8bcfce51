"""Predictor and joint network of NeMo's transducers with an LSTM.

Source  Graves 2012 (arXiv:1211.3711); with durations Xu et al. 2023 (arXiv:2304.06795). Numbers match NeMo's
        RNNTDecoder and RNNTJoint; tests/models/test_fastconformer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from asr_serve.models.interfaces import StateSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}
"""Activations between the sum of the joint network's halves and its output."""

Tools = tuple[Callable[[str], Tensor], Callable[[Tensor, torch.dtype | None], Tensor], Callable[[Tensor, Tensor], Any]]


class LstmTransducer:
    """Predictor and joint network: `models.interfaces.Transducer`, whose blank is the last token.

    tools   three functions: get a checkpoint's float32 tensor by name (decoder.prediction.*, joint.*); move a
            tensor to the device, in a dtype or the device's own; make a linear layer of weight (out, in) and bias
    """

    def __init__(self, tools: Tools, layers: int, activation: str, vocab_size: int, durations: tuple[int, ...]) -> None:
        self.vocab_size, self.blank_id, self.durations = vocab_size, vocab_size - 1, durations
        get, put, linear = tools
        lstm = "decoder.prediction.dec_rnn.lstm"
        embedding = get("decoder.prediction.embed.weight").clone()
        embedding[-1] = 0.0  # blank, and the start of the sequence
        self.embedding = put(embedding, None)
        # Input and memory concatenated, so that a step is one product.
        self.cells = [
            linear(
                torch.cat([get(f"{lstm}.weight_ih_l{i}"), get(f"{lstm}.weight_hh_l{i}")], dim=1),
                get(f"{lstm}.bias_ih_l{i}") + get(f"{lstm}.bias_hh_l{i}"),
            )
            for i in range(layers)
        ]
        self.width = get(f"{lstm}.weight_hh_l0").shape[1]
        self.encoder_half, self.predictor_half = (
            linear(get(f"joint.{name}.weight"), get(f"joint.{name}.bias")) for name in ("enc", "pred")
        )
        self.activation = ACTIVATIONS[activation]
        self.out = linear(get("joint.out.weight"), get("joint.out.bias"))

    def predictor_state_specs(self) -> dict[str, StateSpec]:
        shape = (len(self.cells), self.width)
        return {"predictor.h": StateSpec(shape), "predictor.c": StateSpec(shape)}

    def predict(self, tokens: Tensor, memory: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Steps the predictor by one token of each row. Returns the predictor's half of the joint network (n, joint
        width), which the search adds to the encoder's half of frame after frame; and the memory after the step."""
        x = self.embedding[tokens]
        h, c = memory["predictor.h"].unbind(1), memory["predictor.c"].unbind(1)
        after_h, after_c = [], []
        for cell, h_before, c_before in zip(self.cells, h, c, strict=True):
            i, f, g, o = cell(torch.cat([x, h_before.to(x.dtype)], dim=1)).float().chunk(4, dim=1)
            after_c.append(f.sigmoid() * c_before + i.sigmoid() * g.tanh())
            after_h.append(o.sigmoid() * after_c[-1].tanh())
            x = after_h[-1].to(x.dtype)
        after = {"predictor.h": torch.stack(after_h, 1), "predictor.c": torch.stack(after_c, 1)}
        return self.predictor_half(x), after

    def project_encoder(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.encoder_half(hidden)
        return projected

    def joint(self, projected: Tensor, predicted: Tensor) -> Tensor:
        logits: Tensor = self.out(self.activation(projected + predicted))
        return logits.float()
