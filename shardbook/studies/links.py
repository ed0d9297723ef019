"""What a link costs: messages between two ranks, collectives, and two numbers that fit them."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..devices import device

MOVED = {  # bytes over a rank's busiest link for S bytes of the full tensor, as nccl-tests has them
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "all_gather": lambda p: (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "broadcast": lambda p: 1.0,
}


def _done(x: Tensor) -> None:
    x[:1].sum().item()  # a device is asynchronous: wait for it


def ping_pong(sizes: Sequence[int]) -> list[float]:
    """Seconds of one message of each size in bytes between ranks 0 and 1, the best of some."""
    rank, best = dist.get_rank(), []
    for size in sizes:
        x = torch.zeros(size, dtype=torch.uint8, device=device())
        times = []
        for _ in range(40 if size < 100_000 else 8):
            start = time.perf_counter()
            for sender in (0, 1):
                (dist.send if rank == sender else dist.recv)(x, 1 - rank)
            _done(x)
            times.append((time.perf_counter() - start) / 2)  # there and back
        best.append(min(times))
    return best


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """alpha in s and beta in bytes/s of s = alpha + size / beta, by relative least squares."""
    n, t = np.array(sizes, float), np.array(seconds)
    (alpha, per_byte), *_ = np.linalg.lstsq(
        np.stack([1 / t, n / t], 1), np.ones_like(t), rcond=None
    )
    return max(alpha, 1e-7), 1 / max(per_byte, 1e-15)


def seconds_of(collective: Callable[[Tensor], object], nbytes: int, runs: int = 6) -> float:
    """Seconds of collective(x) on fp32 x of nbytes, of the slowest rank, the best of some runs."""
    best = float("inf")
    for _ in range(runs):
        x = torch.ones(nbytes // 4, device=device())
        dist.barrier()
        start = time.perf_counter()
        collective(x)
        _done(x)
        taken = torch.tensor([time.perf_counter() - start], device=x.device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        best = min(best, taken.item())
    return best


def by_name(op: str) -> Callable[[Tensor], object]:
    """torch.distributed's collective as a function of the full tensor."""

    def run(x: Tensor) -> None:
        part = x.chunk(dist.get_world_size())[dist.get_rank()]
        if op == "all_gather":
            dist.all_gather_single(x, part.clone())
        elif op == "reduce_scatter":
            dist.reduce_scatter_single(part.clone(), x)
        elif op == "broadcast":
            dist.broadcast(x, src=0)
        else:
            dist.all_reduce(x)

    return run


def bandwidths(ops: Sequence[str], sizes: Sequence[int]) -> dict[str, list[tuple[float, float]]]:
    """(algorithm, bus) bandwidth in bytes/s of each collective at each size, as in nccl-tests.

    algorithm: S bytes of the full tensor over the time. bus: that times the share of S which a
    rank's link must carry, so that it compares with the link's own rate.
    """
    world, found = dist.get_world_size(), {}
    for op in ops:
        rates = [size / seconds_of(by_name(op), size) for size in sizes]
        found[op] = [(rate, rate * MOVED[op](world)) for rate in rates]
    return found
