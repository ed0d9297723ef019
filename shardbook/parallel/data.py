"""Data parallel: every rank holds the whole model, computes its part of the batch, and the
gradients are averaged. Nothing is cut but the batch; all-reduce of the gradients pays for it.

PyTorch's own is `torch.nn.parallel.DistributedDataParallel` (Li et al., arXiv 2006.15704), whose
buckets, order and overlap are rebuilt here.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25_000_000


def by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors grouped by dtype, in their order: one collective carries one dtype."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def has_gradient(params: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> list[bool]:
    """Whether each parameter has a gradient on at least one rank: one small all-reduce.

    Ranks may run different branches of a model, but must agree on what they reduce. A rank that has
    all gradients takes part and does not read the sum, for which the host would have to wait.
    """
    mine = [p.grad is not None for p in params]
    if not params:
        return []
    flags = torch.tensor(mine, dtype=torch.int32).to(params[0].device)  # [params]
    dist.all_reduce(flags, group=group)
    return mine if all(mine) else (flags > 0).tolist()


def gradient_or_zeros(param: Tensor) -> Tensor:
    """The parameter's gradient; zeros where this rank did not use the parameter."""
    return torch.zeros_like(param) if param.grad is None else param.grad


@torch.no_grad()
def average_gradients_(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace every gradient of the model by its mean over the ranks.

    A parameter without gradient on some ranks counts as zero there; one without gradient on every
    rank keeps None, so that an optimizer goes on skipping it. Gradients of a dtype travel
    together, in at most ceil(bytes / 25e6) all-reduces: a message a parameter would pay the
    latency of a collective a hundred times for the same bytes.
    """
    params = list(model.parameters())
    used = [p for p, has in zip(params, has_gradient(params, group), strict=True) if has]
    for p in used:
        p.grad = gradient_or_zeros(p)
    for grads in by_dtype([p.grad for p in used]):
        flat = torch.cat([g.flatten() for g in grads])  # [numel of all of them]
        for bucket in flat.split(BUCKET_BYTES // flat.element_size()):
            dist.all_reduce(bucket, group=group)
        flat /= dist.get_world_size(group)
        for g, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(mean.view_as(g))


@dataclasses.dataclass(eq=False)
class Bucket:
    """Parameters whose gradients travel in one all-reduce."""

    params: list[nn.Parameter]
    missing: set[nn.Parameter] = dataclasses.field(default_factory=set)
    flat: Tensor | None = None  # the gradients on their way
    work: dist.Work | None = None

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.params)


def make_buckets(params: Sequence[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Cut the parameters, in their order, into buckets of one dtype and at most bucket_bytes.

    A parameter larger than that gets a bucket of its own.
    """
    buckets: list[Bucket] = []
    for p in params:
        last = buckets[-1] if buckets else None
        if last and last.params[0].dtype == p.dtype and last.nbytes + p.nbytes <= bucket_bytes:
            last.params.append(p)
        else:
            buckets.append(Bucket([p]))
    for bucket in buckets:
        bucket.missing = set(bucket.params)
    return buckets


class BucketedDataParallel(nn.Module):
    """Data parallel that averages gradients while backward is still computing others.

        model = BucketedDataParallel(model)
        loss(model(x)).backward()  # buckets leave as they fill, last layers first
        model.finish()             # wait for them: now every .grad is the mean over the ranks
        optimizer.step()

    Parameters and buffers are broadcast from the group's first rank at the start. Under `no_sync()`
    gradients only accumulate; the next backward outside it sends the accumulated sum. A parameter
    that a rank did not use counts as zero there; one that no rank used keeps its gradient (None).
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_bytes: int = BUCKET_BYTES,
        group: dist.ProcessGroup | None = None,
    ):
        super().__init__()
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {bucket_bytes}; a bucket needs at least one byte")
        self.module, self.group, self.syncing = module, group, True
        for tensor in [*module.parameters(), *module.buffers()]:
            whole = tensor.detach().contiguous()  # collectives take contiguous tensors only
            dist.broadcast(whole, group=group, group_src=0)
            tensor.detach().copy_(whole)
        # Backward reaches the last layers first, so their bucket is the first to fill.
        trained = [p for p in reversed(list(module.parameters())) if p.requires_grad]
        self.buckets = make_buckets(trained, bucket_bytes)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.started = 0  # how many buckets are on their way
        for p in trained:
            p.register_post_accumulate_grad_hook(self.gradient_arrived)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def gradient_arrived(self, param: nn.Parameter) -> None:
        """Called by autograd as soon as `param.grad` is complete."""
        if not self.syncing:
            return
        bucket = self.bucket_of[param]
        if bucket.work is not None:
            raise RuntimeError(
                "a second backward came before finish() had averaged the first: call finish() "
                "after each backward, or run all but the last one under no_sync()"
            )
        bucket.missing.discard(param)
        # In the order of the buckets, even if a later one fills first: collectives are matched by
        # their order, and ranks that run different branches fill their buckets in different orders.
        while self.started < len(self.buckets) and not self.buckets[self.started].missing:
            self.start(self.buckets[self.started])

    def start(self, bucket: Bucket) -> None:
        """Send a bucket on its way without waiting for it."""
        bucket.flat = torch.cat([gradient_or_zeros(p).flatten() for p in bucket.params])
        bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
        self.started += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until every `.grad` is the mean over the ranks. Every rank calls it, used or not."""
        for bucket in self.buckets[self.started :]:  # what this rank's backward did not reach
            self.start(bucket)
        params = list(self.bucket_of)
        used = dict(zip(params, has_gradient(params, self.group), strict=True))
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.flat /= dist.get_world_size(self.group)
            means = bucket.flat.split([p.numel() for p in bucket.params])
            for p, mean in zip(bucket.params, means, strict=True):
                if used[p]:
                    p.grad = gradient_or_zeros(p)
                    p.grad.copy_(mean.view_as(p))
            bucket.flat, bucket.work, bucket.missing = None, None, set(bucket.params)
        self.started = 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside the block accumulates gradients on this rank and sends nothing."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before
