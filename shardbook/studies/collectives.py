"""The ten operations, run: which piece of which rank is where before and after each.

A rank's data are P pieces; piece j of rank r is a row [P] with j + 1 at place r and 0 elsewhere.
Whatever an operation does to rows, copy, move, add up or take the maximum, a row says afterwards
which ranks it came from and which piece of theirs it was.
"""

import dataclasses
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .. import calls
from ..devices import device


@dataclasses.dataclass(frozen=True)
class Operation:
    """Its name, what each rank holds before, the call, and what undoes it."""

    name: str
    call: str
    given: Callable[[Tensor, int], Tensor]  # (a rank's pieces [P, P], rank) -> what it starts with
    run: Callable[[Tensor, int, int], Tensor | None]  # (that, rank, size) -> what it has after
    inverse: str


def _everything(pieces: Tensor, rank: int) -> Tensor:
    return pieces


def _of_the_first(pieces: Tensor, rank: int) -> Tensor:
    return pieces if rank == 0 else pieces[:0]


def _own(pieces: Tensor, rank: int) -> Tensor:
    return pieces[rank : rank + 1]


def _send(x: Tensor, rank: int, size: int) -> Tensor | None:
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x := x.new_zeros(size, size), 0)
    return x


def _broadcast(x: Tensor, rank: int, size: int) -> Tensor:
    x = x if rank == 0 else x.new_zeros(size, size)
    dist.broadcast(x, src=0)
    return x


def _reduce(x: Tensor, rank: int, size: int) -> Tensor:
    result = x.clone()
    dist.reduce(result, dst=0, op=dist.ReduceOp.MAX)
    return result if rank == 0 else x  # what reduce leaves on the others means nothing


def _scatter(x: Tensor, rank: int, size: int) -> Tensor:
    mine = x.new_zeros(1, size)
    dist.scatter(mine, list(x.split(1)) if rank == 0 else None, src=0)
    return mine


def _gather(x: Tensor, rank: int, size: int) -> Tensor:
    parts = [torch.zeros_like(x) for _ in range(size)] if rank == 0 else None
    dist.gather(x, parts, dst=0)
    return torch.cat(parts) if parts else x


def _all_gather(x: Tensor, rank: int, size: int) -> Tensor:
    whole = x.new_zeros(size, size)
    dist.all_gather_single(whole, x)
    return whole


def _reduce_scatter(x: Tensor, rank: int, size: int) -> Tensor:
    mine = x.new_zeros(1, size)
    dist.reduce_scatter_single(mine, x)
    return mine


def _all_reduce(x: Tensor, rank: int, size: int) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def _all_to_all(x: Tensor, rank: int, size: int) -> Tensor:
    result = torch.zeros_like(x)
    dist.all_to_all_single(result, x)
    return result


def _barrier(x: Tensor, rank: int, size: int) -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # an accelerator's: it takes the current one
        dist.barrier()
    return x


OPERATIONS = (
    Operation("send and recv", "send(x, 1), recv(x, 0)", _of_the_first, _send, "send back"),
    Operation("broadcast", "broadcast(x, src=0)", _of_the_first, _broadcast, "reduce"),
    Operation("reduce (MAX)", "reduce(x, dst=0, op=MAX)", _everything, _reduce, "broadcast"),
    Operation("all-reduce", "all_reduce(x)", _everything, _all_reduce, "all-reduce"),
    Operation("scatter", "scatter(mine, pieces, src=0)", _of_the_first, _scatter, "gather"),
    Operation("gather", "gather(mine, pieces, dst=0)", _own, _gather, "scatter"),
    Operation("all-gather", "all_gather_single(x, mine)", _own, _all_gather, "reduce-scatter"),
    Operation(
        "reduce-scatter", "reduce_scatter_single(mine, x)", _everything, _reduce_scatter,
        "all-gather",
    ),
    Operation("all-to-all", "all_to_all_single(y, x)", _everything, _all_to_all, "all-to-all"),
    Operation("barrier", "barrier()", _everything, _barrier, "nothing moves"),
)  # fmt: skip


def before_and_after() -> list[tuple[Tensor, Tensor, int]]:
    """On each rank, of each operation: rows it had, rows it has, bytes it handed to the call."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pieces = torch.zeros(size, size, device=device())
    pieces[:, rank] = torch.arange(1, size + 1, device=device())
    found = []
    for operation in OPERATIONS:
        given = operation.given(pieces, rank)
        with calls.record() as log:
            result = operation.run(given.clone(), rank, size)
        found.append((given.cpu(), result.cpu(), sum(c.nbytes for c in log)))
    return found
