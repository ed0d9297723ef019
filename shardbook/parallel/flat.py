"""Many tensors as one flat tensor of equal parts, and the two collectives that cut and join it."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def flatten_padded(tensors: Sequence[Tensor], parts: int) -> Tensor:
    """One flat copy of the tensors, padded with zeros so that it divides into equal parts.

    Returns [parts * ceil(numel / parts)] in the dtype of the tensors.
    """
    flat = torch.cat([t.detach().flatten() for t in tensors])  # [numel]
    return nn.functional.pad(flat, (0, -flat.numel() % parts))


def shard_flat(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's part [n] of the tensors laid end to end, n = ceil(numel / P): a copy."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    return flatten_padded(tensors, world).chunk(world)[rank].clone()


def reduce_scatter_mean(full: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """[P * n] on every rank -> [n]: this rank's part of the mean."""
    world = dist.get_world_size(group)
    mine = full.new_empty(full.numel() // world)
    dist.reduce_scatter_single(mine, full, group=group)
    return mine.div_(world)


def all_gather_flat(mine: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """[n] on every rank -> [P * n], in rank order."""
    full = mine.new_empty(dist.get_world_size(group) * mine.numel())
    dist.all_gather_single(full, mine.contiguous(), group=group)
    return full
