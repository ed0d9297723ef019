"""Hiding tensor parallelism's messages: real messages and products, kernels and links paced.

Two cores cannot run four fast devices, so each kernel and each transfer takes a known time
(`sb.pace`); what is sent and what comes out is real.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from ..tracing import pace


def on_link(link: ThreadPoolExecutor, send: Callable[[], Tensor], ms: float) -> Future:
    """The result of `send`, which the link, one transfer at a time, takes at least ms for."""

    def transfer() -> Tensor:
        start = time.monotonic()
        result = send()
        time.sleep(max(0.0, ms / 1e3 - (time.monotonic() - start)))
        return result

    return link.submit(transfer)


def pass_on(x: Tensor) -> Tensor:
    """x to the next rank of the ring; what the rank before sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    came = torch.empty_like(x)
    work = dist.isend(x, (rank + 1) % size)
    dist.recv(came, (rank - 1) % size)
    work.wait()
    return came


def gathered_product(x: Tensor, weight: Tensor, in_pieces: bool, ms: float) -> Tensor:
    """All tokens' x @ weight.T from this rank's x [S/P, D]: [S, out/P].

    A product of one rank's tokens and a message of them take ms each. In pieces, the tokens at hand
    are multiplied while they travel on and the next ones come.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    results: list = [None] * size
    with ThreadPoolExecutor(1) as link:
        pieces = [x]
        for step in range(size):
            sent = on_link(link, lambda: pass_on(pieces[-1]), ms) if step < size - 1 else None
            if in_pieces:
                pace(ms, f"product {step}")
                results[(rank - step) % size] = pieces[-1] @ weight.T  # [S/P, out/P]
            if sent:
                pieces.append(sent.result())
        if not in_pieces:
            pace(ms * size, "product of all")
            for step, piece in enumerate(pieces):
                results[(rank - step) % size] = piece @ weight.T
    return torch.cat(results)


def backward_of_layers(
    x: Tensor, grad: Tensor, weights: list[Tensor], behind: bool, ms: float
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of column-parallel layers y = x @ w.T, last first: (of the input, of the weights).

    Each has two products: for its input's gradient, the sum of which takes ms, and its weight's.
    With `behind` the second runs while the first one's sum travels. To keep it short every layer
    sees the same x [S, D] and its weight is square.
    """
    found = []
    with ThreadPoolExecutor(1) as link:
        for w in reversed(weights):
            pace(ms, "gradient of input")
            partial = grad @ w  # [S, D], this rank's addend

            def summed(partial: Tensor = partial) -> Tensor:
                dist.all_reduce(partial)
                return partial

            sent = on_link(link, summed, ms)
            if not behind:
                sent.result()
            pace(ms, "gradient of weight")
            found.append(grad.T @ x)  # [D, D]
            grad = sent.result()
    return grad, found[::-1]


def timed(run: Callable, *args) -> tuple[float, Tensor]:
    """Seconds of run(*args) after all ranks have arrived, and what it returned."""
    dist.barrier()
    start = time.monotonic()
    result = run(*args)
    return time.monotonic() - start, result
