"""The small language model, tensor parallel and sequence parallel, out of this chapter's layers."""

import torch.nn.functional as F
from torch import Tensor, nn

from ..basics.tiny import Block, TinyLM
from ..parallel.sequence import SequenceParallelBlock, gather_again, on_shard
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
        self.group, self.norm, self.keeps_shard = group, block.norm1, False
        self.attn = ParallelAttention(attn.qkv, attn.out, attn.num_heads, attn.num_kv_heads, group)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        h, q = on_shard(self.norm, x, self.group), self.attn.q  # [B, S/P, D]
        if self.keeps_shard:
            layers = (q.weight, q.bias), self.attn.kv_layer()
            y = self.attn.mix(*gather_again(h, *layers, group=self.group), positions)
        else:
            y = self.attn.partial(all_gather_to_group(h, 1, self.group), positions)
        y = reduce_scatter_to_group(y, 1, self.group)  # [B, S/P, D]
        bias = self.attn.out.bias
        return x + y if bias is None else x + y + copy_to_group(bias, self.group)


class ShardKeepingBlock(SequenceParallelBlock):
    """SequenceParallelBlock that keeps norm(x) [B, S/P, D] for backward, not all tokens' of it."""

    def forward(self, x: Tensor) -> Tensor:
        h = on_shard(self.norm, x, self.group)  # [B, S/P, D]
        up = self.mlp_up.weight, self.mlp_up.bias
        h = F.gelu(*gather_again(h, up, group=self.group))  # [B, S, hidden/P]
        h = F.linear(h, self.mlp_down.weight)  # [B, S, D], partial
        y = x + reduce_scatter_to_group(h, 1, self.group)  # [B, S/P, D]
        bias = self.mlp_down.bias
        return y if bias is None else y + copy_to_group(bias, self.group)


class SequenceParallelLM(nn.Module):
    """tokens [B, S] -> this rank's logits [B, S, V/P]; between the blocks x is [B, S/P, D].

    With `keeps_shard` the gathered input of each half is gathered again in backward and not kept.
    Takes the model apart: what is whole on every rank is the given model's own.
    """

    def __init__(self, model: TinyLM, group: Group = None, keeps_shard: bool = False):
        super().__init__()
        self.group, self.norm, self.keeps_shard = group, model.norm, keeps_shard
        self.embed = VocabParallelEmbedding(model.embed, group)
        self.attention = nn.ModuleList(SequenceParallelAttention(b, group) for b in model.blocks)
        for attention in self.attention:
            attention.keeps_shard = keeps_shard
        block = ShardKeepingBlock if keeps_shard else SequenceParallelBlock
        self.mlp = nn.ModuleList(block(b.norm2, b.mlp.up, b.mlp.down, group) for b in model.blocks)
        self.head = ColumnParallelLinear(model.head, group)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = scatter_to_group(self.embed(tokens), 1, self.group)  # [B, S/P, D]
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            x = mlp(attention(x, positions))
        h, head = on_shard(self.norm, x, self.group), (self.head.weight, self.head.bias)
        if self.keeps_shard:
            return gather_again(h, head, group=self.group)[0]  # [B, S, V/P]
        return F.linear(all_gather_to_group(h, 1, self.group), *head)  # [B, S, V/P]


def parallel_token_loss(logits: Tensor, targets: Tensor, group: Group = None) -> Tensor:
    """Mean cross-entropy over the tokens whose target is not -100, from logits [B, S, V/P].

    The same on every rank; targets [B, S].
    """
    losses = vocab_parallel_cross_entropy(logits, targets, group)  # [B, S]
    return losses.sum() / (targets != -100).sum()
