"""Trainable form of the adaptor in models/asr/speech_llm/adaptors.py, and the CTC output beside it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr_serve.models.asr.speech_llm.adaptors import NORM_EPS, AdaptorConfig

SHARPNESS = 20.0
"""Logit of a piece where an embedding is that piece's own: far above those of other pieces, whose directions differ."""


class TrainableAdaptor(nn.Module):
    """Adaptor of kind Transformer. Parameters have the names of a checkpoint, after `audio_adaptor.`."""

    def __init__(self, config: AdaptorConfig, scale: float) -> None:
        """`scale`: size of the embeddings that the language model reads; those of the adaptor begin as large."""
        super().__init__()
        self.config = config
        self.linear1 = nn.Linear(config.encoder_dim * config.downsample_rate, config.ffn_dim)
        self.linear2 = nn.Linear(config.ffn_dim, config.llm_dim)
        self.blocks = nn.ModuleList(_Block(config.llm_dim, config.attention_heads) for _ in range(config.n_layer))
        with torch.no_grad():
            self.linear2.weight.mul_(scale / config.llm_dim**0.5)
            self.linear2.bias.zero_()

    def count(self, frames: int) -> int:
        """Number of embeddings of encoder frames."""
        return -(-frames // self.config.downsample_rate)

    def forward(self, frames: Tensor, counts: Tensor) -> Tensor:
        """Embeddings (clips, n, llm_dim) of frames (clips, n * downsample_rate, encoder_dim), zeros past each clip.
        `counts` (clips,): embeddings of each clip; what follows them is not used."""
        x = frames.reshape(len(frames), -1, self.linear1.in_features)
        x = self.linear2(F.relu(self.linear1(x))).float()
        within = torch.arange(x.shape[1], device=x.device) < counts[:, None]
        for block in self.blocks:
            x = block(x, within[:, None, None])
        out: Tensor = x
        return out


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, NORM_EPS), nn.LayerNorm(width, NORM_EPS)
        self.self_attn = nn.ModuleDict({f"linear_{name}": nn.Linear(width, width) for name in ("q", "k", "v", "out")})
        self.feed_forward = nn.ModuleDict({"w_1": nn.Linear(width, width // 4), "w_2": nn.Linear(width // 4, width)})

    def forward(self, x: Tensor, within: Tensor) -> Tensor:
        clips, count, _ = x.shape
        normed = self.norm1(x)
        q, k, v = (
            self.self_attn[f"linear_{name}"](normed).view(clips, count, self.heads, -1).transpose(1, 2)
            for name in "qkv"
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=within).transpose(1, 2).reshape(x.shape)
        x = x + self.self_attn["linear_out"](mixed)
        out: Tensor = x + self.feed_forward["w_2"](F.relu(self.feed_forward["w_1"](self.norm2(x))))
        return out


class CtcOutput(nn.Module):
    """Log probabilities of pieces, by the direction of an embedding. Used in training only.

    The directions are those of the pieces' own embeddings in the language model, so that the adaptor learns to write
    what the language model can read. Only the direction of blank, and the biases, are trained.
    """

    directions: Tensor

    def __init__(self, embeddings: Tensor, scale: float) -> None:
        """`embeddings` (pieces, llm_dim): of the pieces, as the language model reads them."""
        super().__init__()
        centred = embeddings - embeddings.mean(0)
        self.register_buffer("directions", F.normalize(centred, dim=1), persistent=False)
        self.blank = nn.Parameter(torch.zeros(1, embeddings.shape[1]))
        self.bias = nn.Parameter(torch.zeros(len(embeddings) + 1))
        self.gain = SHARPNESS / scale

    def forward(self, x: Tensor) -> Tensor:
        """(clips, n, pieces + 1), of which 0 is blank."""
        directions = torch.cat([self.blank, self.directions])
        return F.log_softmax(self.gain * F.linear(x, directions) + self.bias, -1)


def ctc_loss(log_probs: Tensor, counts: Tensor, pieces: list[list[int]]) -> Tensor:
    """Mean over the pieces of all clips of their negative log probability. A clip that has too few embeddings for its
    pieces counts as 0."""
    lengths = torch.tensor([len(each) for each in pieces])
    targets = torch.tensor([piece + 1 for each in pieces for piece in each])
    total = F.ctc_loss(log_probs.float().transpose(0, 1), targets, counts, lengths, reduction="sum", zero_infinity=True)
    return total / lengths.sum()
