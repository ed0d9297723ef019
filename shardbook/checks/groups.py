"""On a rank: groups in turn, what an object holds, what is wrong with a refusal."""

import gc
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .compare import refuses
from .wrong import Wrong


def last_ranks(sizes: tuple[int, ...] = (4, 3, 2, 1)) -> Iterator[tuple[int, Any, int]]:
    """(size, group, place in it) on the last `size` of all ranks, every size in turn, the world
    first: what is wrong with the algorithm shows before what is wrong with groups.

    Yields only on the ranks that are in the group, whose first is not global rank 0.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    for size in sizes:
        group = dist.new_group(list(range(world - size, world)))
        if rank >= world - size:
            yield size, group, rank - (world - size)


def tensors_of(root: Any) -> list[Tensor]:
    """Every tensor that an object holds: parameters, attributes, lists, what closures captured."""
    seen, todo, found = set(), [root], []
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, (type, types.ModuleType, dist.ProcessGroup)):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found.append(thing)
        elif isinstance(thing, types.FunctionType):
            todo += thing.__closure__ or ()
        else:
            todo += gc.get_referents(thing)
    return found


def held(module: Any) -> int:
    """Bytes of all the memory that a module or other object keeps alive, each storage once."""
    storages = [t.untyped_storage() for t in tensors_of(module)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def refusal(fn: Callable, *args, what: str, **kwargs) -> str:
    """What is wrong with how fn refuses these arguments; "" for a ValueError that says why."""
    try:
        refuses(fn, *args, what=what, **kwargs)
    except Wrong as wrong:
        return str(wrong)
    return ""


def cut(x: Tensor, dim: int, size: int, place: int) -> Tensor:
    """Equal part number place of size along dim."""
    share = x.shape[dim] // size
    return x.narrow(dim, place * share, share)
