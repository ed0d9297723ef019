"""Several chunks of a model on each rank: the pipeline of `pipeline.py` with virtual stages."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .pipeline import as_input, recv_activation, recv_gradient, send_activation, send_gradient
from .schedules import Schedule


def run_interleaved(
    chunks: Sequence[nn.Module],
    schedule: Schedule,
    microbatches: Sequence[Tensor] | None,
    targets: Sequence[Tensor] | None,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    group: dist.ProcessGroup | None = None,
) -> Tensor | None:
    """One step of a pipeline whose rank s holds blocks s, p + s, 2p + s, … of the model.

    Like `run_pipeline`, which is the case of one chunk: gradients are added to `.grad`, the last
    rank returns the mean of the micro-batches' losses. Raises ValueError for a schedule that does
    not fit the ranks or the chunks.
    """
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    if len(schedule) != p:
        raise ValueError(f"the schedule has {len(schedule)} stages, expected one a rank ({p})")
    if {c for _, _, c in schedule[rank]} != set(range(len(chunks))):
        raise ValueError(f"the schedule does not use the {len(chunks)} chunks of rank {rank}")
    last = p * len(chunks) - 1
    num_microbatches = 1 + max(i for _, i, _ in schedule[rank])
    # With two ranks activations and gradients share one channel, so all that a rank sends us is
    # taken in the order of its schedule; what is early waits in the box.
    coming = {r: _messages(schedule, r, rank, last) for r in {(rank - 1) % p, (rank + 1) % p}}
    box: dict[tuple[str, int, int], Tensor] = {}
    live: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    sent: list[tuple[dist.Work, Tensor]] = []
    losses = []

    def take(kind: str, i: int, block: int) -> Tensor:
        source = (block - 1 if kind == "F" else block + 1) % p
        while (kind, i, block) not in box:
            message = what, j, to = next(coming[source])
            if what == "F":
                box[message] = recv_activation(source, group)
            else:  # as large as what it is the gradient of
                box[message] = recv_gradient(live[j, to // p][1], source, group)
        return box.pop((kind, i, block))

    def hand_over(kind: str, i: int, block: int, x: Tensor) -> None:
        if block % p == rank:  # one rank holds all blocks
            box[kind, i, block] = as_input(x) if kind == "F" else x.grad
        elif kind == "F":
            send_activation(x, block % p, group, sent)
        else:
            send_gradient(x, block % p, group, sent)

    for kind, i, chunk in schedule[rank]:
        block = chunk * p + rank
        if kind == "F":
            x = microbatches[i] if block == 0 else take("F", i, block)
            y = chunks[chunk](x)
            if block == last:
                y = loss_fn(y, targets[i]) / num_microbatches
                losses.append(y.detach())
            else:
                hand_over("F", i, block + 1, y.detach())
            live[i, chunk] = x, y
        else:
            grad = None if block == last else take("B", i, block)
            x, y = live.pop((i, chunk))
            if y.requires_grad:  # not where everything up to here is frozen
                y.backward(grad)
            if block > 0:
                hand_over("B", i, block - 1, x)
        del x, y
    for work, _ in sent:
        work.wait()
    return torch.stack(losses).sum() if losses else None


def _messages(schedule: Schedule, source: int, to: int, last: int) -> Iterator[tuple]:
    """(kind, microbatch, block it is for) of all that source sends to `to`, in order."""
    p = len(schedule)
    for kind, i, chunk in schedule[source]:
        block = chunk * p + source + (1 if kind == "F" else -1)
        if 0 <= block <= last and block % p == to != source:
            yield kind, i, block
