"""Ulysses attention (arXiv 2309.14509): trade the sequence for heads, attend, trade back."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .group import Group


class _AllToAll(torch.autograd.Function):
    """Split dim `cut` over the ranks, gather dim `join`; backward is the same the other way."""

    @staticmethod
    def forward(ctx, x: Tensor, cut: int, join: int, group: Group) -> Tensor:
        ctx.cut, ctx.join, ctx.group = cut, join, group
        world = dist.get_world_size(group)
        pieces = torch.stack(x.chunk(world, dim=cut))  # [P, …]: piece i goes to rank i
        arrived = torch.empty_like(pieces)
        dist.all_to_all_single(arrived, pieces, group=group)
        return torch.cat(arrived.unbind(0), dim=join)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _AllToAll.apply(grad, ctx.join, ctx.cut, ctx.group), None, None, None


def heads_for_sequence(x: Tensor, group: Group = None) -> Tensor:
    """[B, H, S/P, D] -> [B, H/P, S, D]: all positions of some heads."""
    return _AllToAll.apply(x, 1, 2, group)


def sequence_for_heads(x: Tensor, group: Group = None) -> Tensor:
    """[B, H/P, S, D] -> [B, H, S/P, D]: the inverse."""
    return _AllToAll.apply(x, 2, 1, group)


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, group: Group = None
) -> Tensor:
    """Attention over the whole sequence from contiguous shards [B, H, S/P, D]; differentiable.

    Four all-to-alls forward (q, k, v and the output), each sending (P-1)/P of a shard.
    ValueError where the heads do not divide by the ranks; kv heads that don't are replicated
    until they do, which costs their share of the traffic.
    """
    world = dist.get_world_size(group)
    if q.shape[1] % world:
        raise ValueError(f"{q.shape[1]} heads do not divide by {world} ranks: use ring attention")
    copies = math.lcm(k.shape[1], world) // k.shape[1]
    if copies > 1:
        k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
    q, k, v = (heads_for_sequence(x, group) for x in (q, k, v))  # [B, H/P, S, D]
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    return sequence_for_heads(out, group)  # [B, H, S/P, D]
