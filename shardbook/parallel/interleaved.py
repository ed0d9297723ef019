"""Several blocks of a model on each rank: the pipeline of `pipeline.py` for any placement."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import clock
from .pipeline import as_input, recv_activation, recv_gradient, send_activation, send_gradient
from .schedules import Op, Schedule, by_block


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
    blocks = {c * p + rank: chunk for c, chunk in enumerate(chunks)}
    return run_blocks(blocks, by_block(schedule), microbatches, targets, loss_fn, group)


def run_blocks(
    blocks: Mapping[int, nn.Module],
    order: list[list[Op]],
    microbatches: Sequence[Tensor] | None,
    targets: Sequence[Tensor] | None,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    group: dist.ProcessGroup | None = None,
) -> Tensor | None:
    """One step by an order of (kind, microbatch, block) for each rank; `blocks` are this rank's.

    Kinds are "F", "B" and, for a backward in two parts, "I" and "W". The rank of the first block
    reads microbatches, that of the last reads targets and returns the mean loss.
    """
    rank = dist.get_rank(group)
    rank_of = {block: r for r, ops in enumerate(order) for _, _, block in ops}
    last = max(rank_of)
    num_microbatches = 1 + max(i for _, i, _ in order[rank])
    # A rank's activations and gradients for us may share one channel, so all that it sends is
    # taken in the order of its schedule; what is early waits in the box.
    coming = {r: _messages(order, r, rank, rank_of) for r in set(rank_of.values()) - {rank}}
    box: dict[Op, Tensor] = {}
    live: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    held: dict[tuple[int, int], Tensor | None] = {}  # the output's gradient, between I and W
    sent: list[tuple[dist.Work, Tensor]] = []
    losses = []

    def take(kind: str, i: int, block: int) -> Tensor:
        source = rank_of[block - 1 if kind == "F" else block + 1]
        while (kind, i, block) not in box:
            message = what, j, to = next(coming[source])
            if what == "F":
                box[message] = recv_activation(source, group)
            else:  # as large as what it is the gradient of
                box[message] = recv_gradient(live[j, to][1], source, group)
        return box.pop((kind, i, block))

    def hand_over(kind: str, i: int, block: int, x: Tensor) -> None:
        if rank_of[block] == rank:
            box[kind, i, block] = as_input(x) if kind == "F" else x.grad
        elif kind == "F":
            send_activation(x, rank_of[block], group, sent)
        else:
            send_gradient(x, rank_of[block], group, sent)

    for kind, i, block in order[rank]:
        if kind == "F":
            x = microbatches[i] if block == 0 else take("F", i, block)
            clock.kernel(kind, i, block)
            y = blocks[block](x)
            if block == last:
                y = loss_fn(y, targets[i]) / num_microbatches
                losses.append(y.detach())
            else:
                hand_over("F", i, block + 1, y.detach())
            live[i, block] = x, y
        elif kind == "W":
            clock.kernel(kind, i, block)
            x, y = live.pop((i, block))
            _backward(y, held.pop((i, block)), list(blocks[block].parameters()))
        else:
            grad = None if block == last else take("B", i, block)
            clock.kernel(kind, i, block)
            x, y = live.pop((i, block))
            if kind == "B":
                _backward(y, grad)
            else:
                held[i, block] = grad
                live[i, block] = x, y
                if block > 0:
                    _backward(y, grad, [x], retain=True)
            if block > 0:
                hand_over("B", i, block - 1, x)
        del x, y
    for work, _ in sent:
        work.wait()
    return torch.stack(losses).sum() if losses else None


def _backward(y: Tensor, grad: Tensor | None, inputs: list | None = None, retain=False) -> None:
    """Gradients of all that y depends on, or of `inputs` only.

    I and W apart walk the inside of the block twice; a framework keeps what W needs of the first.
    """
    inputs = None if inputs is None else [x for x in inputs if x.requires_grad]
    if y.requires_grad and inputs != []:  # not where everything up to here is frozen
        torch.autograd.backward(y, grad, retain_graph=retain, inputs=inputs)


def _messages(order: list[list[Op]], source: int, to: int, rank_of: dict) -> Iterator[Op]:
    """("F" or "B", microbatch, block it is for) of all that source sends to `to`, in order."""
    for kind, i, block in order[source]:
        after = block + (1 if kind == "F" else -1)
        if kind != "W" and rank_of.get(after) == to:
            yield "F" if kind == "F" else "B", i, after
