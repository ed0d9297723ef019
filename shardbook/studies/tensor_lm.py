"""The small language model, tensor parallel and sequence parallel, out of this chapter's layers."""

import torch.nn.functional as F
from torch import Tensor, nn

from ..basics.tiny import Block, TinyLM
from ..parallel.sequence import SequenceParallelBlock, on_shard
from ..parallel.tensor import (
    ColumnParallelLinear,
    Group,
    ParallelAttention,
    RowParallelLinear,
    all_gather_to_group,
    copy_to_group,
    reduce_scatter_to_group,
    scatter_to_group,
)
from ..parallel.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy


def tensor_parallel_(model: TinyLM, group: Group = None) -> TinyLM:
    """Replace every layer that has a tensor-parallel form by it; the norms stay whole.

    The model then maps tokens [B, S] to this rank's logits [B, S, V/P].
    """
    model.embed = VocabParallelEmbedding(model.embed, group)
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        block.attn = ParallelAttention(attn.qkv, attn.out, attn.num_heads, attn.num_kv_heads, group)
        mlp.up = ColumnParallelLinear(mlp.up, group)
        mlp.down = RowParallelLinear(mlp.down, group)
    model.head = ColumnParallelLinear(model.head, group)
    return model


class SequenceParallelAttention(nn.Module):
    """x + out(attention(norm(x))) for x [B, S/P, D]; the heads see the whole sequence."""

    def __init__(self, block: Block, group: Group = None):
        super().__init__()
        attn = block.attn
        self.group, self.norm = group, block.norm1
        self.attn = ParallelAttention(attn.qkv, attn.out, attn.num_heads, attn.num_kv_heads, group)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        h = all_gather_to_group(on_shard(self.norm, x, self.group), 1, self.group)  # [B, S, D]
        y = self.attn.partial(h, positions)  # [B, S, D], this rank's heads
        y = reduce_scatter_to_group(y, 1, self.group)  # [B, S/P, D]
        bias = self.attn.out.bias
        return x + y if bias is None else x + y + copy_to_group(bias, self.group)


class SequenceParallelLM(nn.Module):
    """tokens [B, S] -> this rank's logits [B, S, V/P]; between the blocks x is [B, S/P, D].

    Takes the model apart: what is whole on every rank is the given model's own.
    """

    def __init__(self, model: TinyLM, group: Group = None):
        super().__init__()
        self.group, self.norm = group, model.norm
        self.embed = VocabParallelEmbedding(model.embed, group)
        self.attention = nn.ModuleList(SequenceParallelAttention(b, group) for b in model.blocks)
        self.mlp = nn.ModuleList(
            SequenceParallelBlock(b.norm2, b.mlp.up, b.mlp.down, group) for b in model.blocks
        )
        self.head = ColumnParallelLinear(model.head, group)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = scatter_to_group(self.embed(tokens), 1, self.group)  # [B, S/P, D]
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            x = mlp(attention(x, positions))
        h = all_gather_to_group(on_shard(self.norm, x, self.group), 1, self.group)  # [B, S, D]
        return F.linear(h, self.head.weight, self.head.bias)  # [B, S, V/P]


def parallel_token_loss(logits: Tensor, targets: Tensor, group: Group = None) -> Tensor:
    """Mean cross-entropy over the tokens whose target is not -100, from logits [B, S, V/P].

    The same on every rank; targets [B, S].
    """
    losses = vocab_parallel_cross_entropy(logits, targets, group)  # [B, S]
    return losses.sum() / (targets != -100).sum()
