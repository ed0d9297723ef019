"""A case on groups of 1 to 4 of four ranks: what the checks of parallel layers are made of.

The ranks of a group are not 0, 1, 2, so that a global rank taken for a rank in the group shows; and
all four ranks are in some group at any time, so that a collective on the wrong group gives a wrong
value rather than a hang.
"""

import gc
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..calls import record
from .compare import expect, refuses
from .wrong import Wrong

ROUNDS = ([[0, 1, 2, 3]], [[1, 3], [0, 2]], [[0, 2, 3], [1]])


# On a rank


def in_groups(case: Callable, answer: Any, *args) -> dict[int, dict]:
    """{group size: case(answer, group, place, size, *args)} with this rank's place in the group."""
    me, results = dist.get_rank(), {}
    for parts in ROUNDS:
        groups = [dist.new_group(p) if len(p) < 4 else None for p in parts]
        members, group = next((p, g) for p, g in zip(parts, groups, strict=True) if me in p)
        with record() as log:
            result = case(answer, group, members.index(me), len(members), *args)
        for call in log:
            expect(
                set(call.group) <= set(members),
                f"{call.op} ran on ranks {list(call.group)}, the group was {members}",
            )
        results[len(members)] = result | {"place": members.index(me)}
    return results


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


# In the parent


def each(values: list[dict], *sizes: int) -> Iterator[tuple[int, int, dict]]:
    """(size, place in the group, what that rank found), for the group sizes asked for."""
    for size in sizes or (1, 2, 3, 4):
        for found in values:
            if size in found:
                yield size, found[size]["place"], found[size]


def only_call(actual: dict, op: str, nbytes: int, where: str) -> None:
    """Exactly one call of op about nbytes, or none at all where op is ""."""
    said = ", ".join(f"{n} {o} of {b} bytes" for o, (n, b) in actual.items()) or "no collective"
    wanted = {op: (1, nbytes)} if op else {}
    asked = f"one {op} of {nbytes} bytes" if op else "no collective"
    expect(actual == wanted, f"{where} makes {said}; expected {asked}")
