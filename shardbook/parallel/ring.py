"""Ring attention (arXiv 2310.01889): queries stay, keys and values travel round the ranks.

After P-1 steps every query has met every key. Only a rank's own keys are kept for backward; they
make the round again, and their gradients travel with them and end at home.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .context import block_attention, block_attention_backward, merge_attention
from .group import Group

Part = tuple[slice, slice, bool]  # these queries, those keys, causal among them
Plan = Callable[[int, int, int], list[Part]]  # (rank, owner of the keys, S) -> what to compute
ALL = slice(None)


def full_plan(rank: int, owner: int, size: int) -> list[Part]:
    """Every query sees every key."""
    return [(ALL, ALL, False)]


def causal_plan(rank: int, owner: int, size: int) -> list[Part]:
    """Contiguous shards: earlier ranks' keys are seen whole, later ones' not at all."""
    return [] if owner > rank else [(ALL, ALL, owner == rank)]


def zigzag_plan(rank: int, owner: int, size: int) -> list[Part]:
    """Zigzag shards: two of the four pairs of half shards from another rank, three from ours."""
    early, late = slice(0, size // 2), slice(size // 2, size)
    if owner == rank:
        return [(early, early, True), (late, ALL, True)]
    return [(ALL, early, False)] if owner < rank else [(late, ALL, False)]


def exchange(tensors: list[Tensor], group: Group) -> tuple[list[Tensor], list[dist.Work]]:
    """Start sending to the next rank and receiving as much from the one before."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    arriving = [torch.empty_like(t) for t in tensors]
    ops = []
    for t, into in zip(tensors, arriving, strict=True):
        ops.append(dist.P2POp(dist.isend, t, group=group, group_peer=(rank + 1) % world))
        ops.append(dist.P2POp(dist.irecv, into, group=group, group_peer=(rank - 1) % world))
    return arriving, dist.batch_isend_irecv(ops)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: Group) -> Tensor:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        size = q.shape[2]
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)  # [B, H, S, D]
        lse = torch.full(q.shape[:3], -torch.inf, device=q.device)  # [B, H, S]
        keys, values = k.contiguous(), v.contiguous()
        for step in range(world):
            if step < world - 1:  # the next block travels while this one is computed
                arriving, works = exchange([keys, values], group)
            for rows, cols, causal in plan(rank, (rank - step) % world, size):
                part = block_attention(q[:, :, rows], keys[:, :, cols], values[:, :, cols], causal)
                merged = merge_attention(out[:, :, rows], lse[:, :, rows], *part)
                out[:, :, rows], lse[:, :, rows] = merged
            if step < world - 1:
                for work in works:
                    work.wait()
                keys, values = arriving
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.group = plan, group
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        rank, world = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        delta = (grad.float() * out.float()).sum(-1)  # [B, H, S]
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
        dv = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
        keys, values, travelling = k.contiguous(), v.contiguous(), []
        for step in range(world):
            if step < world - 1:
                arriving, works = exchange([keys, values], ctx.group)
            add_k, add_v = torch.zeros_like(dk), torch.zeros_like(dv)
            for rows, cols, causal in ctx.plan(rank, (rank - step) % world, q.shape[2]):
                parts = block_attention_backward(
                    grad[:, :, rows], delta[:, :, rows], q[:, :, rows],
                    keys[:, :, cols], values[:, :, cols], lse[:, :, rows], causal,
                )  # fmt: skip
                dq[:, :, rows] += parts[0]
                add_k[:, :, cols] += parts[1]
                add_v[:, :, cols] += parts[2]
            for work in travelling:  # what earlier ranks added came while this was computed
                work.wait()
            dk, dv = dk.add_(add_k), dv.add_(add_v)
            if world > 1:  # the gradients follow their keys, and make one more step: home
                leaving = [dk, dv]  # a name keeps them alive until they have left
                (dk, dv), travelling = exchange(leaving, ctx.group)
            if step < world - 1:
                for work in works:
                    work.wait()
                keys, values = arriving
        for work in travelling:
            work.wait()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, group: Group = None
) -> Tensor:
    """Attention over the whole sequence from contiguous shards [B, H, S/P, D]; differentiable.

    Forward moves K and V P-1 times, 2(P-1) B S/P Hkv D elements sent by a rank. Causal work is
    uneven: rank r computes r+1 of P blocks. ValueError where heads don't divide by kv heads.
    """
    _grouped(q, k)
    return _Ring.apply(q, k, v, causal_plan if causal else full_plan, group)


def zigzag_ring_attention(q: Tensor, k: Tensor, v: Tensor, group: Group = None) -> Tensor:
    """Causal attention from zigzag shards: (2P+1)/(4P^2) of the full work on every rank."""
    _grouped(q, k)
    if q.shape[2] % 2:
        raise ValueError(f"a zigzag shard has two equal halves, got {q.shape[2]} positions")
    return _Ring.apply(q, k, v, zigzag_plan, group)


def _grouped(q: Tensor, k: Tensor) -> None:
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} heads do not divide by {k.shape[1]} kv heads")
