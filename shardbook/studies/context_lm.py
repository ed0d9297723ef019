"""The small model with its sequence cut over the ranks: every parameter whole, tokens in parts.

Only attention looks at other tokens, so only `Attention.attend` changes. The rest is data
parallelism over tokens: gradients are sums over the ranks.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..basics.tiny import causal_attention
from ..parallel.context import shard_positions
from ..parallel.data import average_gradients_
from ..parallel.ring import Group, ring_attention, zigzag_ring_attention
from ..parallel.ulysses import ulysses_attention

ATTEND: dict[str, Callable] = {
    "ring": partial(ring_attention, causal=True),
    "zigzag": zigzag_ring_attention,
    "ulysses": partial(ulysses_attention, causal=True),
}


def context_parallel_(model: nn.Module, kind: str, group: Group = None) -> nn.Module:
    """In place: every block's attention runs over the whole sequence of which a rank has a part.

    kind is "ring", "zigzag", "ulysses", or "whole" for one process. The model has to be called
    with `held_positions`.
    """
    if kind not in (*ATTEND, "whole"):
        raise ValueError(f"unknown kind {kind!r}: take one of whole, {', '.join(ATTEND)}")
    for block in model.blocks:
        attend = causal_attention if kind == "whole" else partial(ATTEND[kind], group=group)
        block.attn.attend = attend
    return model


def held_positions(seq_len: int, kind: str, group: Group = None) -> Tensor:
    """The positions [S/P] of this rank, on the CPU; all of them for "whole"."""
    if kind == "whole":
        return torch.arange(seq_len)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    return shard_positions(seq_len, world, rank, zigzag=kind == "zigzag")


def context_parallel_step(
    model: nn.Module, kind: str, tokens: Tensor, targets: Tensor, group: Group = None
) -> float:
    """Forward and backward on this rank's part of tokens and targets [B, S]; the mean loss.

    The loss is a sum over this rank's tokens divided by the number of ALL tokens that count
    (targets of -100 don't), so that gradients and losses of the ranks are addends. A mean on each
    rank would weigh a rank with few counted tokens like one with many.
    """
    device = next(model.parameters()).device
    held = held_positions(tokens.shape[1], kind, group)
    logits = model(tokens[:, held].to(device), held.to(device))  # [B, S/P, V]
    mine = targets[:, held].to(device).flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), mine, reduction="sum") / (targets != -100).sum()
    total = loss.detach().clone()
    if kind == "whole":
        loss.backward()
        return total.item()
    (dist.get_world_size(group) * loss).backward()  # so that the ranks' mean is their sum
    average_gradients_(model, group)
    dist.all_reduce(total, group=group)
    return total.item()
