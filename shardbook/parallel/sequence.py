"""Sequence parallelism: what tensor parallelism leaves whole, cut along the sequence (2205.05198).

Norms, residuals and dropouts work on one token at a time, so a rank can do them for S/P of the
tokens. An all-reduce is a reduce-scatter and an all-gather: the same bytes, with the norm between.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from .tensor import (
    ColumnParallelLinear,
    Group,
    RowParallelLinear,
    all_gather_to_group,
    all_gathered,
    copy_to_group,
    reduce_scatter_to_group,
    reduce_scattered,
)


def on_shard(module: nn.Module, x: Tensor, group: Group = None) -> Tensor:
    """module(x) for this rank's tokens; the gradients of its whole parameters are summed.

    Each rank sees only S/P of the tokens, and the gradient of a norm's weight is a sum over all.
    """
    whole = {name: copy_to_group(p, group) for name, p in module.named_parameters()}
    return functional_call(module, whole, (x,))


class SequenceParallelBlock(nn.Module):
    """x + down(gelu(up(norm(x)))) for x [B, S/P, D], this rank's tokens, built from full layers."""

    def __init__(
        self, norm: nn.Module, mlp_up: nn.Linear, mlp_down: nn.Linear, group: Group = None
    ):
        super().__init__()
        self.group, self.norm = group, copy.deepcopy(norm)
        self.mlp_up = ColumnParallelLinear(mlp_up, group)
        self.mlp_down = RowParallelLinear(mlp_down, group)

    def forward(self, x: Tensor) -> Tensor:
        h = on_shard(self.norm, x, self.group)  # [B, S/P, D]
        h = all_gather_to_group(h, 1, self.group)  # [B, S, D]
        h = F.gelu(F.linear(h, self.mlp_up.weight, self.mlp_up.bias))  # [B, S, hidden/P]
        h = F.linear(h, self.mlp_down.weight)  # [B, S, D], partial
        y = x + reduce_scatter_to_group(h, 1, self.group)  # [B, S/P, D]
        if self.mlp_down.bias is None:
            return y
        return y + copy_to_group(self.mlp_down.bias, self.group)


class _Gathered(torch.autograd.Function):
    """Linear layers of the gathered x, of which only this rank's tokens are kept for backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.group = group
        whole = all_gathered(x, 1, group)  # [B, S, D]
        return tuple(F.linear(whole, w) for w in weights)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        x, *weights = ctx.saved_tensors
        whole = all_gathered(x, 1, ctx.group).flatten(0, 1)  # again: [B S, D]
        dx = sum(g @ w for g, w in zip(grads, weights, strict=True))  # [B, S, D], of these features
        dws = [g.flatten(0, 1).T @ whole for g in grads]
        return reduce_scattered(dx, 1, ctx.group), None, *dws


def gather_again(
    x: Tensor, *layers: tuple[Tensor, Tensor | None], group: Group = None
) -> list[Tensor]:
    """``F.linear(all tokens, weight, bias)`` for each layer, from this rank's x [B, S/P, D].

    As `all_gather_to_group` and then `F.linear`, but autograd keeps x, not the gathered [B, S, D]:
    backward gathers it again, as Megatron-LM does. Each result is [B, S, out/P].
    """
    results = _Gathered.apply(x, group, *[weight for weight, _ in layers])
    biases = [bias for _, bias in layers]
    return [y if b is None else y + b for y, b in zip(results, biases, strict=True)]
