"""A model cut by layers over the ranks, and micro-batches sent through it by a schedule."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..devices import device
from . import clock
from .schedules import Schedule

_DTYPES = [
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.bool),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex128),
]
_HEADER = 16  # int64: the sender's virtual time, dtype, dimensions, then up to thirteen sizes


def run_pipeline(
    stage: nn.Module,
    schedule: Schedule,
    microbatches: Sequence[Tensor] | None,
    targets: Sequence[Tensor] | None,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    group: dist.ProcessGroup | None = None,
) -> Tensor | None:
    """One step of a pipeline: every stage's gradients, and on the last rank the mean loss.

    stage is this rank's part of the model, schedule the schedule of all stages (one chunk each).
    The first rank reads microbatches, the last reads targets; loss_fn gives a micro-batch's loss.
    Gradients are added to `.grad` and equal those of the unsplit model on the mean of the
    micro-batches' losses. Sends never wait, so a stage that is ahead does not hold its neighbour.
    """
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    if len(schedule) != last + 1:
        raise ValueError(
            f"the schedule has {len(schedule)} stages, expected one a rank ({last + 1})"
        )
    num_microbatches = 1 + max(i for _, i, _ in schedule[rank])
    live: dict[int, tuple[Tensor, Tensor]] = {}  # micro-batch -> (input, output)
    sent: list[tuple[dist.Work, Tensor]] = []  # the tensors must outlive their transfer
    losses = []
    # Messages of a neighbour come in the order of ITS schedule; what is early waits in a box.
    inputs = Inbox(schedule, rank - 1, "F", lambda i: recv_activation(rank - 1, group))
    grads = Inbox(schedule, rank + 1, "B", lambda i: recv_gradient(live[i][1], rank + 1, group))

    for kind, i, _ in schedule[rank]:
        if kind == "F":
            x = microbatches[i] if rank == 0 else inputs.take(i)
            y = stage(x)
            if rank == last:
                y = loss_fn(y, targets[i]) / num_microbatches
                losses.append(y.detach())
            else:
                send_activation(y.detach(), rank + 1, group, sent)
            live[i] = x, y
        else:
            grad = None if rank == last else grads.take(i)
            x, y = live.pop(i)
            if y.requires_grad:  # not where everything up to here is frozen
                y.backward(grad)
            if rank > 0:
                send_gradient(x, rank - 1, group, sent)
        del x, y  # or the graph would outlive its backward by one operation
    for work, _ in sent:
        work.wait()
    return torch.stack(losses).sum() if rank == last else None


class Inbox:
    """Receives from a neighbour in the order it sends, hands out in the order we need."""

    def __init__(self, schedule: Schedule, peer: int, kind: str, receive: Callable[[int], Tensor]):
        order = schedule[peer] if 0 <= peer < len(schedule) else []
        self.coming = iter([i for k, i, _ in order if k == kind])
        self.receive, self.early = receive, {}

    def take(self, i: int) -> Tensor:
        while i not in self.early:
            j = next(self.coming)
            self.early[j] = self.receive(j)
        return self.early.pop(i)


def send_activation(y: Tensor, peer: int, group, sent: list) -> None:
    """Its shape first, since the next stage can't know it, then the activation itself."""
    if y.dtype not in _DTYPES or y.dim() > _HEADER - 3:
        raise ValueError(
            f"a stage gave {y.dtype} of {y.dim()} dimensions: a pipeline can announce up to "
            f"{_HEADER - 3} dimensions of {', '.join(str(d) for d in _DTYPES)}"
        )
    header = [clock.stamp(), _DTYPES.index(y.dtype), y.dim(), *y.shape]
    header += [0] * (_HEADER - len(header))
    send(torch.tensor(header, device=y.device), peer, group, sent)
    send(y, peer, group, sent)


def recv_activation(peer: int, group) -> Tensor:
    """The activation of the stage before, as a leaf that collects its gradient if it has one."""
    header = recv(torch.empty(_HEADER, dtype=torch.int64, device=device()), peer, group).tolist()
    time, dtype, dims, *sizes = header
    clock.read(time)
    x = torch.empty(sizes[:dims], dtype=_DTYPES[dtype], device=device())
    return as_input(recv(x, peer, group))


def as_input(x: Tensor) -> Tensor:
    """x as a leaf that collects its gradient; whole numbers have none."""
    return x.requires_grad_(_has_gradient(x))


def send_gradient(x: Tensor, peer: int, group, sent: list) -> None:
    """The gradient of x, to where x came from; zeros if nothing depended on it."""
    if _has_gradient(x):
        if clock.running():  # a gradient's shape is known: only the time needs a header
            send(torch.tensor([clock.stamp()], device=x.device), peer, group, sent)
        send(torch.zeros_like(x) if x.grad is None else x.grad, peer, group, sent)


def recv_gradient(y: Tensor, peer: int, group) -> Tensor | None:
    """The gradient of y from where y went; None for whole numbers, whose gradient nobody sends."""
    if not _has_gradient(y):
        return None
    if clock.running():
        clock.read(recv(torch.empty(1, dtype=torch.int64, device=y.device), peer, group).item())
    return recv(room(y), peer, group)


def _has_gradient(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def send(x: Tensor, peer: int, group, sent: list) -> None:
    """Start to send x, and keep it with its transfer in `sent`."""
    x = x.contiguous()
    sent.append((dist.isend(x, group=group, group_dst=peer), x))


def room(y: Tensor) -> Tensor:
    """Where y's gradient can arrive: contiguous, even if y is a transposed view."""
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def recv(x: Tensor, peer: int, group) -> Tensor:
    """Fill x with what the peer sent."""
    dist.recv(x, group=group, group_src=peer)
    return x


def sync_tied_embeddings_(
    first_weight: nn.Parameter | None,
    last_weight: nn.Parameter | None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Sum the gradients of an embedding that the first and the last stage both hold.

    Call it after backward. Ranks that hold neither pass None twice; where one rank holds one
    Parameter as both, autograd has summed it already.
    """
    if first_weight is not None and first_weight is last_weight:
        return
    held = [w for w in (first_weight, last_weight) if w is not None]
    for w in held:
        if w.grad is None:
            w.grad = torch.zeros_like(w)
    if len(held) == 2:  # two copies on one rank
        total = first_weight.grad + last_weight.grad
        first_weight.grad, last_weight.grad = total, total.clone()
        return
    owner = _owners(first_weight, last_weight, group)
    if not held or None in owner:
        return
    weight = held[0]
    peer = owner[1] if weight is first_weight else owner[0]
    mine = weight.grad.contiguous()
    theirs = torch.empty_like(mine)
    ops = [
        dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    weight.grad = mine + theirs


def _owners(first, last, group) -> tuple[int | None, int | None]:
    """The ranks of the group that hold the first and the last copy."""
    flags: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(flags, (first is not None, last is not None), group=group)
    firsts = [r for r, (f, _) in enumerate(flags) if f]
    lasts = [r for r, (_, la) in enumerate(flags) if la]
    return (firsts[0] if firsts else None), (lasts[0] if lasts else None)
