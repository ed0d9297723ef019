"""The paper's whole model around ``nn.Transformer``: what chapter 12's figure is matched with."""

import math

import torch
from torch import Tensor, nn

FIGURE = """
# Attention Is All You Need, arXiv 1706.03762, figure 1
input embedding: embedding, vocab -> d
positional encoding: position
encoder: stack
  encoder layer: block x N
    multi-head attention: attention, d -> d
    add & norm: norm
    feed forward: mlp, d -> f -> d
    add & norm: norm
output embedding: embedding, vocab -> d
positional encoding: position
decoder: stack
  decoder layer: block x N
    masked multi-head attention: attention, d -> d
    add & norm: norm
    multi-head attention: cross-attention, d -> d
    add & norm: norm
    feed forward: mlp, d -> f -> d
    add & norm: norm
linear: head, d -> vocab
softmax: head
"""
"""All boxes of the figure, those at its bottom first."""


class PositionalEncoding(nn.Module):
    """Adds sines and cosines of the position (section 3.5); it has no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None]
        waves = torch.arange(0, x.shape[-1], 2, device=x.device, dtype=x.dtype)
        angle = steps * torch.exp(waves * (-math.log(10_000.0) / x.shape[-1]))  # [S, D/2]
        return x + torch.stack((angle.sin(), angle.cos()), -1).flatten(1)  # [B, S, D]


class Translator(nn.Module):
    """Source and target tokens [B, S] and [B, T] -> probabilities of the next one [B, T, V].

    One matrix is both embeddings and the last linear layer, as in section 3.4 of the paper.
    """

    def __init__(self, vocabulary: int, dim: int, heads: int, hidden: int, layers: int):
        super().__init__()
        self.source, self.source_position = nn.Embedding(vocabulary, dim), PositionalEncoding()
        self.target, self.target_position = nn.Embedding(vocabulary, dim), PositionalEncoding()
        self.transformer = nn.Transformer(
            dim, heads, layers, layers, hidden, dropout=0.0, batch_first=True
        )
        self.linear = nn.Linear(dim, vocabulary, bias=False)
        self.linear.weight = self.target.weight = self.source.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        scale = self.source.embedding_dim**0.5
        x = self.source_position(self.source(source) * scale)
        y = self.target_position(self.target(target) * scale)
        ahead = torch.full((y.shape[1], y.shape[1]), -math.inf, device=y.device).triu(1)
        return self.linear(self.transformer(x, y, tgt_mask=ahead)).softmax(-1)
