"""Chapter 22: mistakes people really make with tensor and sequence parallelism."""

import copy

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn

from shardbook.parallel import sequence, tensor, vocab
from shardbook.parallel.tensor import (
    all_gather_to_group,
    all_gathered,
    all_reduced,
    conjugate,
    copy_to_group,
    gather_from_group,
    own_slice,
    reduce_from_group,
    reduce_scatter_to_group,
    reduce_scattered,
    scatter_to_group,
)

from . import right, wrong

# The six pairs: what is done forward and backward, by name.


def keep(x, dim, group):
    return x.view_as(x)


def total(x, dim, group):
    return all_reduced(x, group)


def mean(x, dim, group):
    return all_reduced(x, group) / dist.get_world_size(group)


def in_place(x, dim, group):
    dist.all_reduce(x, group=group)
    return x


def everywhere(x, dim, group):
    return all_reduced(x, None)


def twice(x, dim, group):
    return all_reduced(all_reduced(x, group), group) / dist.get_world_size(group)


def by_gather(x, dim, group):
    return all_gathered(x[None], 0, group).sum(0)


def gather(x, dim, group):
    return all_gathered(x, dim, group)


def gather_first_dim(x, dim, group):
    return all_gathered(x, 0, group)


def gather_reversed(x, dim, group):
    pieces = all_gathered(x[None], 0, group).unbind(0)
    return torch.cat(pieces[::-1], dim)


def gather_padded(x, dim, group):
    """Right value, wrong bytes: the slice in a full-sized zero tensor, all-reduced."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    pieces = [torch.zeros_like(x) for _ in range(size)]
    pieces[rank] = x
    return all_reduced(torch.cat(pieces, dim), group)


def own(x, dim, group):
    return own_slice(x, dim, group)


def own_global(x, dim, group):
    size = dist.get_world_size(group)
    return x.chunk(size, dim)[dist.get_rank() % size].clone()


def own_next(x, dim, group):
    size = dist.get_world_size(group)
    return x.chunk(size, dim)[(dist.get_rank(group) + 1) % size].clone()


def own_unchecked(x, dim, group):
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    return x.tensor_split(size, dim)[rank].clone()


def own_scaled(x, dim, group):
    return own_slice(x, dim, group) * dist.get_world_size(group)


def scatter_sum(x, dim, group):
    return reduce_scattered(x, dim, group)


def scatter_mean(x, dim, group):
    return reduce_scattered(x, dim, group) / dist.get_world_size(group)


def scatter_by_reduce(x, dim, group):
    return own_slice(all_reduced(x, group), dim, group)


def scatter_first_dim(x, dim, group):
    return reduce_scattered(x, 0, group)


def scatter_unchecked(x, dim, group):
    """Pads what does not divide instead of refusing it."""
    size = dist.get_world_size(group)
    rest = -x.shape[dim] % size
    if rest:
        shape = list(x.shape)
        shape[dim] = rest
        x = torch.cat((x, x.new_zeros(shape)), dim)
    return reduce_scattered(x, dim, group)


def pair(forward, backward, with_dim, name):
    """An answer of these two halves, named for the test's report."""
    if with_dim:

        def answer(x, dim, group=None):
            return conjugate(x, lambda x: forward(x, dim, group), lambda g: backward(g, dim, group))
    else:

        def answer(x, group=None):
            return conjugate(x, lambda x: forward(x, 0, group), lambda g: backward(g, 0, group))

    answer.__name__ = name
    return answer


PAIRS = {
    "copy_to_group": [
        (keep, keep, "every rank, so its gradient is the sum"),
        (keep, mean, "gradient.*off by"),
        (total, keep, "forward has nothing to do"),
        (keep, everywhere, "the group was"),
        (keep, in_place, "incoming gradient was changed"),
        (keep, by_gather, "1 all_gather of"),
        (keep, twice, "2 all_reduce"),
    ],
    "reduce_from_group": [
        (keep, keep, "the sum over the ranks"),
        (total, total, "scales it by the number of ranks"),
        (mean, keep, "not the mean"),
        (in_place, keep, "input was changed"),
        (everywhere, keep, "the group was"),
        (by_gather, keep, "all_gather"),
        (total, mean, "dy/dx_r is 1"),
    ],
    "gather_from_group": [
        (keep, keep, "shape"),
        (gather_first_dim, own, "along dim"),
        (gather_reversed, own, "order of the ranks"),
        (gather, scatter_sum, "a sum would scale"),
        (gather, own_global, "dist.get_rank.group."),
        (gather, own_next, "own slice"),
        (gather_padded, own, "all_reduce"),
    ],
    "scatter_to_group": [
        (keep, keep, "shape"),
        (own_global, gather, "slice i"),
        (own_next, gather, "slice i"),
        (own_unchecked, gather, "accepted, expected ValueError"),
        (own, gather_reversed, "side by side"),
        (own, gather_padded, "all_reduce"),
        (scatter_sum, gather, "slice i"),
        (own_scaled, gather, "off by"),
    ],
    "reduce_scatter_to_group": [
        (own, gather, "first the sum"),
        (scatter_mean, gather, "first the sum"),
        (scatter_first_dim, gather, "along dim|shape"),
        (scatter_by_reduce, gather, "1 all_reduce"),
        (scatter_unchecked, gather, "accepted, expected ValueError"),
        (scatter_sum, gather_reversed, "all-gather the gradients"),
        (scatter_sum, gather_padded, "all_reduce"),
    ],
    "all_gather_to_group": [
        (gather, own, "summed over the ranks"),
        (gather, scatter_mean, "reduce-scatter"),
        (gather, scatter_by_reduce, "1 all_reduce"),
        (gather_first_dim, scatter_sum, "along dim"),
        (gather_reversed, scatter_sum, "order of the ranks"),
        (gather_padded, scatter_sum, "all_reduce"),
    ],
}
WITHOUT_DIM = ("copy_to_group", "reduce_from_group")
for exercise, halves in PAIRS.items():
    with_dim = exercise not in WITHOUT_DIM
    for forward, backward, says in halves:
        name = f"{forward.__name__}-{backward.__name__}"
        wrong(exercise, says=says)(pair(forward, backward, with_dim, name))
    right(exercise)(getattr(tensor, exercise))


@wrong("copy_to_group", says="every rank, so its gradient is the sum")
def straight_through(x, group=None):
    """dist.all_reduce inside autograd: the identity in backward."""
    return x * 1


@wrong("reduce_from_group", says="scales it by the number of ranks")
def functional_collective(x, group=None):
    """The functional collective all-reduces the gradient as well."""
    return dist.nn.functional.all_reduce(x.clone(), group=group or dist.group.WORLD)


class _Function(torch.autograd.Function):
    """Another way to write a pair: by name, with the tensor forms of the collectives."""

    @staticmethod
    def forward(ctx, x, op, back, dim, group):
        ctx.saved = back, dim, group
        return _do(op, x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return _do(ctx.saved[0], grad, *ctx.saved[1:]), None, None, None, None


def _do(op, x, dim, group):
    group = group or dist.group.WORLD
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if op == "sum":
        return funcol.all_reduce(x.contiguous(), "sum", group).clone()
    if op == "gather":
        out = x.new_empty(size * x.numel())
        dist.all_gather_into_tensor(out, x.contiguous().view(-1), group=group)
        return torch.cat(out.view(size, *x.shape).unbind(0), dim)
    if op in ("own", "scatter") and x.shape[dim] % size:
        raise ValueError(f"{x.shape[dim]} does not divide by {size}")
    if op == "own":
        return x.tensor_split(size, dim)[rank]
    if op == "scatter":
        flat = torch.cat([p.reshape(-1) for p in x.tensor_split(size, dim)])
        out = flat.new_empty(flat.numel() // size)
        dist.reduce_scatter_tensor(out, flat, group=group)
        return out.view(x.tensor_split(size, dim)[rank].shape)
    return x.view_as(x)


def other(exercise, op, back, with_dim):
    if with_dim:

        def answer(x, dim, group=None):
            return _Function.apply(x, op, back, dim, group)
    else:

        def answer(x, group=None):
            return _Function.apply(x, op, back, 0, group)

    answer.__name__ = "by_name"
    right(exercise)(answer)


other("copy_to_group", "", "sum", False)
other("reduce_from_group", "sum", "", False)
other("gather_from_group", "gather", "own", True)
other("scatter_to_group", "own", "gather", True)
other("reduce_scatter_to_group", "scatter", "gather", True)
other("all_gather_to_group", "gather", "scatter", True)

# Linear layers


def _shard(x, dim, group):
    return nn.Parameter(own_slice(x.detach(), dim, group))


right("ColumnParallelLinear")(tensor.ColumnParallelLinear)


@right("ColumnParallelLinear")
class ColumnByHand(nn.Linear):
    """nn.Linear of the local size, with the bias outside and a hook instead of f."""

    def __init__(self, linear, group=None, gather_output=False):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        if linear.out_features % size:
            raise ValueError(f"{linear.out_features} rows for {size} ranks")
        n = linear.out_features // size
        super().__init__(linear.in_features, n, bias=linear.bias is not None)
        self.to(linear.weight)
        with torch.no_grad():
            self.weight.copy_(linear.weight[rank * n : (rank + 1) * n])
            if self.bias is not None:
                self.bias.copy_(linear.bias[rank * n : (rank + 1) * n])
        self.group, self.gather_output = group, gather_output

    def forward(self, x):
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda grad: all_reduced(grad, self.group))
        y = super().forward(x)
        if self.gather_output:
            y = gather_from_group(y, y.dim() - 1, self.group)
        return y


class Column(tensor.ColumnParallelLinear):
    """The reference, for a subclass to spoil."""


@wrong("ColumnParallelLinear", says="through copy_to_group")
class ColumnNoF(Column):
    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        return gather_from_group(y, -1, self.group) if self.gather_output else y


@wrong("ColumnParallelLinear", says="does not divide|accepted")
class ColumnUneven(Column):
    def __init__(self, linear, group=None, gather_output=False):
        nn.Module.__init__(self)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.group, self.gather_output = group, gather_output
        self.weight = nn.Parameter(linear.weight.detach().tensor_split(size)[rank].clone())
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.detach().tensor_split(size)[rank].clone())


@wrong("ColumnParallelLinear", says="keeps")
class ColumnView(Column):
    def __init__(self, linear, group=None, gather_output=False):
        super().__init__(linear, group, gather_output)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.weight = nn.Parameter(linear.weight.detach().chunk(size)[rank])


@wrong("ColumnParallelLinear", says="keeps")
class ColumnHoldsFull(Column):
    def __init__(self, linear, group=None, gather_output=False):
        super().__init__(linear, group, gather_output)
        self.full = [linear]


@wrong("ColumnParallelLinear", says="makes|shape")
class ColumnReplicated(nn.Module):
    """Computes the whole layer on every rank and keeps its slice of the result."""

    def __init__(self, linear, group=None, gather_output=False):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.group, self.gather_output = group, gather_output

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        return y if self.gather_output else scatter_to_group(y, -1, self.group)


@wrong("ColumnParallelLinear", says="this rank's rows")
class ColumnCutsInput(nn.Module):
    def __init__(self, linear, group=None, gather_output=False):
        super().__init__()
        self.weight, self.bias = _shard(linear.weight, 0, group), linear.bias
        if linear.bias is not None:
            self.bias = nn.Parameter(own_slice(linear.bias.detach().flip(0), 0, group))
        self.group, self.gather_output = group, gather_output

    forward = Column.forward


@wrong("ColumnParallelLinear", says="off by")
class ColumnGlobalRank(Column):
    def __init__(self, linear, group=None, gather_output=False):
        super().__init__(linear, group, gather_output)
        size = dist.get_world_size(group)
        self.weight = nn.Parameter(
            linear.weight.detach().chunk(size)[dist.get_rank() % size].clone()
        )


@wrong("ColumnParallelLinear", says="shape.*expected|output")
class ColumnNeverGathers(Column):
    def forward(self, x):
        return F.linear(copy_to_group(x, self.group), self.weight, self.bias)


@wrong("ColumnParallelLinear", says="grad.* off by")
class ColumnGatherSums(Column):
    """all-gather whose backward reduces: the gradients of a replicated loss come out P times."""

    def forward(self, x):
        y = F.linear(copy_to_group(x, self.group), self.weight, self.bias)
        return all_gather_to_group(y, -1, self.group) if self.gather_output else y


right("RowParallelLinear")(tensor.RowParallelLinear)


@right("RowParallelLinear")
class RowByHand(nn.Module):
    """The bias divided among the ranks by where it is added: rank 0 of the group, with f on it."""

    def __init__(self, linear, group=None, input_is_parallel=True):
        super().__init__()
        size = dist.get_world_size(group)
        if linear.in_features % size:
            raise ValueError(f"{linear.in_features} columns for {size} ranks")
        self.group, self.first = group, dist.get_rank(group) == 0
        self.input_is_parallel = input_is_parallel
        n = linear.in_features // size
        a = dist.get_rank(group) * n
        self.weight = nn.Parameter(linear.weight.detach()[:, a : a + n].clone())
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        if not self.input_is_parallel:
            x = scatter_to_group(x, x.dim() - 1, self.group)
        y = reduce_from_group(x @ self.weight.T, self.group)
        return y if self.bias is None else y + self.bias


class Row(tensor.RowParallelLinear):
    """The reference, for a subclass to spoil."""


@wrong("RowParallelLinear", says="add the whole bias once")
class RowBiasEverywhere(Row):
    def forward(self, x):
        if not self.input_is_parallel:
            x = scatter_to_group(x, -1, self.group)
        return reduce_from_group(F.linear(x, self.weight, self.bias), self.group)


@wrong("RowParallelLinear", says="bias.grad.*off by")
class RowBiasShared(Row):
    """bias / P before the sum: the right value, a gradient that is P times too small."""

    def forward(self, x):
        if not self.input_is_parallel:
            x = scatter_to_group(x, -1, self.group)
        bias = None if self.bias is None else self.bias / dist.get_world_size(self.group)
        return reduce_from_group(F.linear(x, self.weight, bias), self.group)


@wrong("RowParallelLinear", says="after one step on rank . of [234]")
class RowBiasDividedWhenBuilt(Row):
    """bias / P kept and added before the sum: values and gradients right, but it learns P-fold."""

    def __init__(self, linear, group=None, input_is_parallel=True):
        super().__init__(linear, group, input_is_parallel)
        if self.bias is not None:
            self.bias = nn.Parameter(self.bias.detach() / dist.get_world_size(group))

    def forward(self, x):
        if not self.input_is_parallel:
            x = scatter_to_group(x, -1, self.group)
        return reduce_from_group(F.linear(x, self.weight, self.bias), self.group)


@wrong("RowParallelLinear", says="all-reduce the partial sums")
class RowNoG(Row):
    def forward(self, x):
        if not self.input_is_parallel:
            x = scatter_to_group(x, -1, self.group)
        return F.linear(x, self.weight, self.bias)


@wrong("RowParallelLinear", says="gradient.*off by")
class RowReducesTwice(Row):
    """all_reduce forward and backward, as functional collectives do it."""

    def forward(self, x):
        if not self.input_is_parallel:
            x = scatter_to_group(x, -1, self.group)
        y = copy_to_group(reduce_from_group(F.linear(x, self.weight), self.group), self.group)
        return y if self.bias is None else y + self.bias


@wrong("RowParallelLinear", says="1 all_gather")
class RowByGather(Row):
    """The right value for P times the bytes: gathers the partial sums and adds them up."""

    def forward(self, x):
        if not self.input_is_parallel:
            x = scatter_to_group(x, -1, self.group)
        y = F.linear(x, self.weight)
        y = conjugate(y, lambda y: all_gathered(y[None], 0, self.group).sum(0), lambda g: g)
        return y if self.bias is None else y + self.bias


@wrong("RowParallelLinear", says="shape|raised|columns")
class RowIgnoresInput(Row):
    """Takes a full input for a parallel one."""

    def forward(self, x):
        x = scatter_to_group(x, -1, self.group)
        y = reduce_from_group(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


@wrong("RowParallelLinear", says="keeps")
class RowView(Row):
    def __init__(self, linear, group=None, input_is_parallel=True):
        super().__init__(linear, group, input_is_parallel)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.weight = nn.Parameter(linear.weight.detach().chunk(size, 1)[rank])


@wrong("RowParallelLinear", says="changed the layer it was built from")
class RowSharesBias(Row):
    def __init__(self, linear, group=None, input_is_parallel=True):
        super().__init__(linear, group, input_is_parallel)
        self.bias = linear.bias


@wrong("RowParallelLinear", says="input gradient")
class RowScatterNoGather(Row):
    """A full input cut by plain indexing: its gradient is zero outside this rank's slice."""

    def forward(self, x):
        if not self.input_is_parallel:
            size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
            x = x.chunk(size, -1)[rank]
        y = reduce_from_group(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


# Attention

right("ParallelAttention")(tensor.ParallelAttention)


class Heads(nn.Module):
    """Attention another way: one weight a head, loops, a group for each shared kv head."""

    replicate = True

    def __init__(self, qkv, out, num_heads, num_kv_heads, group=None):
        super().__init__()
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        if num_heads % size:
            raise ValueError(f"{num_heads} heads on {size} ranks")
        if max(num_kv_heads, size) % min(num_kv_heads, size):
            raise ValueError(f"{num_kv_heads} kv heads on {size} ranks")
        d = qkv.out_features // (num_heads + 2 * num_kv_heads)
        w = qkv.weight.detach().split(d)
        b = None if qkv.bias is None else qkv.bias.detach().split(d)
        queries = range(rank * num_heads // size, (rank + 1) * num_heads // size)
        per = num_heads // num_kv_heads
        kv = sorted({h // per for h in queries})

        def stack(heads):
            rows = [w[h] if b is None else torch.cat((w[h], b[h][:, None]), 1) for h in heads]
            return nn.Parameter(torch.stack(rows))  # [heads, d, in], with the bias [.., in + 1]

        self.q = stack(queries)
        self.k = stack([num_heads + h for h in kv])
        self.v = stack([num_heads + num_kv_heads + h for h in kv])
        self.reader = [kv.index(h // per) for h in queries]
        a = queries[0] * d
        self.o = nn.Parameter(out.weight.detach()[:, a : a + len(queries) * d].clone())
        self.bias = None if out.bias is None else nn.Parameter(out.bias.detach().clone())
        self.group, self.shared = group, None
        if size > num_kv_heads and self.replicate:
            mine = rank * num_kv_heads // size
            everyone = dist.get_process_group_ranks(group or dist.group.WORLD)
            mates = [g for r, g in enumerate(everyone) if r * num_kv_heads // size == mine]
            self.shared = dist.new_group(mates, use_local_synchronization=True)

    def project(self, x, w, shared=None):
        if shared is not None:
            w = copy_to_group(w, shared)
        if w.shape[-1] == x.shape[-1]:
            return torch.einsum("bsi,hdi->bhsd", x, w)
        return torch.einsum("bsi,hdi->bhsd", x, w[..., :-1]) + w[:, None, :, -1]

    def forward(self, x):
        x = copy_to_group(x, self.group)
        q = self.project(x, self.q)
        k = self.project(x, self.k, self.shared)[:, self.reader]
        v = self.project(x, self.v, self.shared)[:, self.reader]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = reduce_from_group(y.transpose(1, 2).flatten(2) @ self.o.T, self.group)
        return y if self.bias is None else y + self.bias


@right("ParallelAttention")
class HeadByHead(Heads):
    pass


class _Together(torch.autograd.Function):
    """f for x and for the copies of a kv head: one all-reduce backward carries all gradients."""

    @staticmethod
    def forward(ctx, x, mine, kv_heads, group, *params):
        ctx.args = mine, kv_heads, group
        return x.view_as(x), *(p.view_as(p) for p in params)

    @staticmethod
    def backward(ctx, *grads):
        mine, kv_heads, group = ctx.args
        x, *own = [grad.flatten() for grad in grads]
        own = torch.cat(own)
        flat = torch.cat([x, own.new_zeros(kv_heads * len(own))])
        flat[len(x) :].view(kv_heads, -1)[mine] = own
        dist.all_reduce(flat, group=group)
        x, own = flat[: len(x)], flat[len(x) :].view(kv_heads, -1)[mine]
        summed = own.split([grad.numel() for grad in grads[1:]])
        summed = [s.view_as(grad) for s, grad in zip(summed, grads[1:], strict=True)]
        return x.view_as(grads[0]), None, None, None, *summed


@right("ParallelAttention")
class OneAllReduceBackward(tensor.ParallelAttention):
    def forward(self, x, positions=None):
        if self.replicas == 1:
            return super().forward(x, positions)
        mine = dist.get_rank(self.group) // self.replicas
        kv_heads = dist.get_world_size(self.group) // self.replicas
        x, *self.entered = _Together.apply(x, mine, kv_heads, self.group, *self.kv.parameters())
        y = reduce_from_group(self.partial(x, positions), self.group)
        return y if self.out.bias is None else y + self.out.bias

    def _kv(self, x):
        if self.replicas == 1:
            return super()._kv(x)
        entered, self.entered = self.entered, None
        return F.linear(x, *entered)


@wrong("ParallelAttention", says="sum it over those ranks")
class CopiesDrift(Heads):
    """Shared kv heads whose gradients are not summed."""

    replicate = False


class Attend(tensor.ParallelAttention):
    """The reference, for a subclass to spoil."""


@wrong("ParallelAttention", says="cut the three apart")
class NaiveCut(Attend):
    """Rows of the fused qkv cut as if they were of one kind."""

    def __init__(self, qkv, out, num_heads, num_kv_heads, group=None):
        super().__init__(qkv, out, num_heads, num_kv_heads, group)
        size = dist.get_world_size(group)
        if qkv.out_features % size == 0 and num_kv_heads % size == 0:
            rows = own_slice(torch.arange(qkv.out_features, device=qkv.weight.device), 0, group)
            q, kv = rows.split([self.q.out_features, self.kv.out_features])
            self.q, self.kv = tensor.take_rows(qkv, q), tensor.take_rows(qkv, kv)


@wrong("ParallelAttention", says="sum it over those ranks")
class SumsAllCopies(Attend):
    """Sums the gradients of every kv head on every rank, not of its own copies only."""

    def _sum_replicas(self, grad):
        return all_reduced(grad, self.group)


@wrong("ParallelAttention", says="input gradient|copy_to_group|f, this")
class AttentionNoF(Attend):
    def forward(self, x):
        y = reduce_from_group(self.partial(x), self.group)
        return y if self.out.bias is None else y + self.out.bias


@wrong("ParallelAttention", says="no factor in fp32")
class ScaledInFp32(Attend):
    """Scales by a tensor that is always fp32."""

    def forward(self, x):
        return super().forward(x) * torch.ones(1, device=x.device)


@wrong("ParallelAttention", says="bias once")
class AttentionBiasTimesP(Attend):
    def forward(self, x):
        x = copy_to_group(x, self.group)
        bias = 0 if self.out.bias is None else self.out.bias
        return reduce_from_group(self.partial(x) + bias, self.group)


@wrong("ParallelAttention", says="NoneType")
class WantsABias(Attend):
    def forward(self, x):
        y = reduce_from_group(self.partial(copy_to_group(x, self.group)), self.group)
        return y + self.out.bias


@wrong("ParallelAttention", says="off by")
class NotCausal(Attend):
    def partial(self, x, positions=None):
        q = self.q(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        kv = self._kv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k, v = kv.chunk(2, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return F.linear(y.transpose(1, 2).flatten(2), self.out.weight)


@wrong("ParallelAttention", says="expected ValueError|accepted")
class RefusesNothing(Attend):
    """Three kv heads on two ranks: a head is dropped without a word."""

    def __init__(self, qkv, out, num_heads, num_kv_heads, group=None):
        size = dist.get_world_size(group)
        if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
            nn.Module.__init__(self)
            return
        super().__init__(qkv, out, num_heads, num_kv_heads, group)


@wrong("ParallelAttention", says="keeps|all_gather|makes")
class WholeAttention(nn.Module):
    """Replicated: every rank computes all heads. The values are right, nothing is parallel."""

    def __init__(self, qkv, out, num_heads, num_kv_heads, group=None):
        super().__init__()
        tensor.share_of(num_heads, dist.get_world_size(group), "heads")
        self.layers = nn.ModuleList((copy.deepcopy(qkv), copy.deepcopy(out)))
        self.sizes = [num_heads, num_kv_heads, num_kv_heads]

    def forward(self, x):
        by_head = self.layers[0](x).unflatten(-1, (sum(self.sizes), -1)).transpose(1, 2)
        q, k, v = by_head.split(self.sizes, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.layers[1](y.transpose(1, 2).flatten(2))


@wrong("ParallelAttention", says="cut the three apart|shared|share a kv head")
class OffByOneKV(Attend):
    """Takes the kv head of the next rank."""

    def __init__(self, qkv, out, num_heads, num_kv_heads, group=None):
        super().__init__(qkv, out, num_heads, num_kv_heads, group)
        weight = all_gathered(self.kv.weight.detach()[None], 0, group)
        at = (dist.get_rank(group) + 1) % len(weight)
        self.kv.weight = nn.Parameter(weight[at].clone())


@wrong("ParallelAttention", says="keeps")
class KeepsTheFullQKV(Attend):
    def __init__(self, qkv, out, num_heads, num_kv_heads, group=None):
        super().__init__(qkv, out, num_heads, num_kv_heads, group)
        self.whole = lambda: qkv


# Vocabulary

right("VocabParallelEmbedding")(vocab.VocabParallelEmbedding)


@right("VocabParallelEmbedding")
class OneHot(nn.Module):
    """A product with this rank's columns of the one-hot tokens."""

    def __init__(self, embedding, group=None):
        super().__init__()
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        if embedding.num_embeddings % size:
            raise ValueError(f"{embedding.num_embeddings} rows on {size} ranks")
        share = embedding.num_embeddings // size
        self.range = range(rank * share, (rank + 1) * share)
        self.group = group
        self.table = nn.Parameter(embedding.weight.detach()[self.range.start : self.range.stop] + 0)

    def forward(self, tokens):
        mine = torch.arange(self.range.start, self.range.stop, device=tokens.device)
        hot = (tokens[..., None] == mine).to(self.table.dtype)
        return reduce_from_group(hot @ self.table, self.group)


class Embed(vocab.VocabParallelEmbedding):
    """The reference, for a subclass to spoil."""

    def local(self, tokens):
        local = tokens - self.first
        return local, (local < 0) | (local >= len(self.weight))


@wrong("VocabParallelEmbedding", says="must give zeros")
class NotMasked(Embed):
    def forward(self, tokens):
        local, _ = self.local(tokens)
        x = F.embedding(local.clamp(0, len(self.weight) - 1), self.weight)
        return reduce_from_group(x, self.group)


@wrong("VocabParallelEmbedding", says="a mask in fp32 makes all fp32")
class MaskInFp32(Embed):
    def forward(self, tokens):
        local, out = self.local(tokens)
        x = F.embedding(local.masked_fill(out, 0), self.weight)
        return reduce_from_group(x * (~out)[..., None].float(), self.group)


@wrong("VocabParallelEmbedding", says="off by")
class LastRowLost(Embed):
    def forward(self, tokens):
        local = tokens - self.first
        out = (local < 0) | (local >= len(self.weight) - 1)
        x = F.embedding(local.masked_fill(out, 0), self.weight)
        return reduce_from_group(x.masked_fill(out[..., None], 0), self.group)


@wrong("VocabParallelEmbedding", says="sum over the ranks")
class NoSum(Embed):
    def forward(self, tokens):
        local, out = self.local(tokens)
        x = F.embedding(local.masked_fill(out, 0), self.weight)
        return x.masked_fill(out[..., None], 0)


@wrong("VocabParallelEmbedding", says="pass the sum unchanged")
class GradientTimesP(Embed):
    def forward(self, tokens):
        local, out = self.local(tokens)
        x = F.embedding(local.masked_fill(out, 0), self.weight).masked_fill(out[..., None], 0)
        return copy_to_group(reduce_from_group(x, self.group), self.group)


@wrong("VocabParallelEmbedding", says="no gather of the table|makes")
class GathersTheTable(Embed):
    def forward(self, tokens):
        return F.embedding(tokens, gather_from_group(self.weight, 0, self.group))


@wrong("VocabParallelEmbedding", says="pass the sum unchanged|makes|keeps")
class CutsTheWidth(Embed):
    """Columns instead of rows: dimension 7 cannot be cut evenly, so the table stays whole."""

    def __init__(self, embedding, group=None):
        super().__init__(embedding, group)
        self.table = nn.Parameter(embedding.weight.detach().clone())
        del self.weight

    def forward(self, tokens):
        return F.embedding(tokens, self.table)


@wrong("VocabParallelEmbedding", says="memory of the whole table")
class RowsView(Embed):
    def __init__(self, embedding, group=None):
        super().__init__(embedding, group)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.weight = nn.Parameter(embedding.weight.detach().chunk(size)[rank])


@wrong("VocabParallelEmbedding", says="compare the vocabulary")
class RestDropped(Embed):
    def __init__(self, embedding, group=None):
        share = embedding.num_embeddings // dist.get_world_size(group)
        even = embedding.weight.detach()[: share * dist.get_world_size(group)]
        super().__init__(nn.Embedding(*even.shape, _weight=even), group)


right("vocab_parallel_cross_entropy")(vocab.vocab_parallel_cross_entropy)


class _Loss(torch.autograd.Function):
    """The gradient by hand: softmax minus one-hot."""

    @staticmethod
    def forward(ctx, z, targets, group):
        share, rank = z.shape[-1], dist.get_rank(group)
        top = z.max(-1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        e = (z - top.unsqueeze(-1)).exp()
        total = all_reduced(e.sum(-1), group)
        hot = targets.unsqueeze(-1) == torch.arange(share, device=z.device) + rank * share
        at = all_reduced(((z - top.unsqueeze(-1)) * hot).sum(-1), group)
        counts = targets != -100
        ctx.save_for_backward(e / total.unsqueeze(-1), hot, counts)
        return torch.where(counts, total.log() - at, torch.zeros_like(at))

    @staticmethod
    def backward(ctx, grad):
        p, hot, counts = ctx.saved_tensors
        return (p - hot.to(p.dtype)) * (grad * counts).unsqueeze(-1), None, None


@right("vocab_parallel_cross_entropy")
def by_hand(logits, targets, group=None):
    return _Loss.apply(logits, targets, group)


def loss_of(largest="all", sums="group", target="masked", ignore=True, gradient="g", mask=-100):
    """The reference with its pieces to be swapped."""

    def answer(logits, targets, group=None):
        enter = reduce_from_group if gradient == "g" else (lambda x, g: in_autograd(x, g))
        with torch.no_grad():
            top = logits.amax(-1)
            if largest == "all":
                dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            elif largest == "none":
                top = torch.zeros_like(top)
                dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        z = logits - top[..., None]
        share = z.shape[-1]
        local = targets - dist.get_rank(group) * share
        out = (local < 0) | (local >= share)
        if target == "masked":
            at = z.gather(-1, local.masked_fill(out, 0)[..., None])[..., 0].masked_fill(out, 0)
        else:
            at = z.gather(-1, local.clamp(0, share - 1)[..., None])[..., 0]
        at = enter(at, group)
        total = z.exp().sum(-1)
        total = enter(total, group) if sums == "group" else total
        loss = total.log() - at
        return loss.masked_fill(targets == mask, 0) if ignore else loss

    return answer


def in_autograd(x, group):
    """An all-reduce that is one forward and backward."""
    return conjugate(x, lambda x: all_reduced(x, group), lambda g: all_reduced(g, group))


def named(name, answer, says):
    answer.__name__ = name
    wrong("vocab_parallel_cross_entropy", says=says)(answer)


named("own_maximum", loss_of(largest="own"), "off by")
named("no_maximum", loss_of(largest="none"), "largest logit of all ranks")
named("own_sum", loss_of(sums="own"), "sum both over the group")
named("clamped_target", loss_of(target="clamped"), "one rank has")
named("counts_ignored", loss_of(ignore=False), "belongs to no rank")
named("ignores_minus_one", loss_of(mask=-1), "belongs to no rank")
named("gradient_summed", loss_of(gradient="both"), "gradient of the logits")


@wrong("vocab_parallel_cross_entropy", says="three all_reduces")
def gathers_logits(logits, targets, group=None):
    full = gather_from_group(logits, -1, group)
    loss = F.cross_entropy(full.flatten(0, -2), targets.flatten(), reduction="none")
    return loss.view(targets.shape)


@wrong("vocab_parallel_cross_entropy", says="changed")
def writes_into_logits(logits, targets, group=None):
    loss = vocab.vocab_parallel_cross_entropy(logits, targets, group)
    targets.masked_fill_(targets == -100, 0)
    return loss


@wrong("vocab_parallel_cross_entropy", says="shape")
def mean_over_tokens(logits, targets, group=None):
    return vocab.vocab_parallel_cross_entropy(logits, targets, group).mean()


# Sequence parallel

right("SequenceParallelBlock")(sequence.SequenceParallelBlock)


class Block(sequence.SequenceParallelBlock):
    """The reference, for a subclass to spoil."""

    def normed(self, x):
        return sequence.on_shard(self.norm, x, self.group)

    def mlp(self, h):
        h = F.gelu(F.linear(h, self.mlp_up.weight, self.mlp_up.bias))
        return F.linear(h, self.mlp_down.weight)

    def biased(self, y):
        b = self.mlp_down.bias
        return y if b is None else y + copy_to_group(b, self.group)

    def forward(self, x):
        h = all_gather_to_group(self.normed(x), 1, self.group)
        return self.biased(x + reduce_scatter_to_group(self.mlp(h), 1, self.group))


@right("SequenceParallelBlock")
class WithHooks(Block):
    """Hooks on the parameters sum each backward pass's gradient."""

    def __init__(self, norm, mlp_up, mlp_down, group=None):
        super().__init__(norm, mlp_up, mlp_down, group)
        whole = [*self.norm.parameters()]
        if self.mlp_down.bias is not None:
            whole.append(self.mlp_down.bias)
        for p in whole:
            p.register_hook(lambda grad: all_reduced(grad, group))

    def normed(self, x):
        return self.norm(x)

    def biased(self, y):
        return y if self.mlp_down.bias is None else y + self.mlp_down.bias


@wrong("SequenceParallelBlock", says="norm.*sum it over the group")
class NormUnsynced(Block):
    def normed(self, x):
        return self.norm(x)


@wrong("SequenceParallelBlock", says="sum it over the group")
class BiasUnsynced(Block):
    def biased(self, y):
        return y if self.mlp_down.bias is None else y + self.mlp_down.bias


@wrong("SequenceParallelBlock", says="sum, not mean")
class NormMean(Block):
    def normed(self, x):
        size = dist.get_world_size(self.group)
        whole = {
            n: conjugate(p, lambda p: p.view_as(p), lambda g: all_reduced(g, self.group) / size)
            for n, p in self.norm.named_parameters()
        }
        return torch.func.functional_call(self.norm, whole, (x,))


@wrong("SequenceParallelBlock", says="after accumulation")
class AfterAccumulation(WithHooks):
    """All-reduces .grad itself, once it has been accumulated."""

    def __init__(self, norm, mlp_up, mlp_down, group=None):
        Block.__init__(self, norm, mlp_up, mlp_down, group)
        whole = [*self.norm.parameters()]
        if self.mlp_down.bias is not None:
            whole.append(self.mlp_down.bias)
        for p in whole:
            p.register_post_accumulate_grad_hook(
                lambda p: dist.all_reduce(p.grad, group=group) and None
            )


@wrong("SequenceParallelBlock", says="gradient is reduce-scattered")
class GatherKeepsSlice(Block):
    def forward(self, x):
        h = gather_from_group(self.normed(x), 1, self.group)
        return self.biased(x + reduce_scatter_to_group(self.mlp(h), 1, self.group))


@wrong("SequenceParallelBlock", says="reduce_scatter")
class ReduceThenSlice(Block):
    """Right values: all-reduces [B, S, D], then takes its tokens."""

    def forward(self, x):
        h = all_gather_to_group(self.normed(x), 1, self.group)
        y = scatter_to_group(reduce_from_group(self.mlp(h), self.group), 1, self.group)
        return self.biased(x + y)


@wrong("SequenceParallelBlock", says="output.*off by")
class NextRanksTokens(Block):
    """Adds the MLP of the next rank's tokens."""

    def forward(self, x):
        h = all_gather_to_group(self.normed(x), 1, self.group)
        y = self.mlp(h).roll(-x.shape[1], 1)
        return self.biased(x + reduce_scatter_to_group(y, 1, self.group))


@wrong("SequenceParallelBlock", says="added after it, once")
class BiasBeforeSum(Block):
    def forward(self, x):
        h = all_gather_to_group(self.normed(x), 1, self.group)
        h = self.biased(self.mlp(h))
        return x + reduce_scatter_to_group(h, 1, self.group)


@wrong("SequenceParallelBlock", says="output.*off by")
class NoResidual(Block):
    def forward(self, x):
        h = all_gather_to_group(self.normed(x), 1, self.group)
        return self.biased(reduce_scatter_to_group(self.mlp(h), 1, self.group))


@wrong("SequenceParallelBlock", says="mlp_up.weight.grad.*shape")
class WholeMLP(nn.Module):
    """Every rank runs the full MLP on its own tokens: nothing is cut but the sequence."""

    def __init__(self, norm, mlp_up, mlp_down, group=None):
        super().__init__()
        tensor.share_of(mlp_up.out_features, dist.get_world_size(group), "hidden")
        self.group, self.norm = group, copy.deepcopy(norm)
        self.mlp_up, self.mlp_down = copy.deepcopy(mlp_up), copy.deepcopy(mlp_down)

    def forward(self, x):
        whole = sequence.on_shard
        h = F.gelu(whole(self.mlp_up, whole(self.norm, x, self.group), self.group))
        return x + whole(self.mlp_down, h, self.group)


@wrong("SequenceParallelBlock", says="changed the layers it was built from")
class SharesTheNorm(Block):
    def __init__(self, norm, mlp_up, mlp_down, group=None):
        super().__init__(norm, mlp_up, mlp_down, group)
        self.norm = norm


# What only a second look shows: no gradients, bf16, other shapes of layers, tokens that come again


@wrong("reduce_from_group", says="no reason to skip the collective")
def summed_in_training_only(x, group=None):
    return reduce_from_group(x, group) if x.requires_grad else x.clone()


@wrong("gather_from_group", says="under no_grad.*shape")
def gathered_in_training_only(x, dim, group=None):
    return gather_from_group(x, dim, group) if torch.is_grad_enabled() else x


@wrong("reduce_scatter_to_group", says="bf16 result.*off by")
def bf16_sums_doubled(x, dim, group=None):
    y = reduce_scatter_to_group(x, dim, group)
    return y * 2 if x.dtype == torch.bfloat16 else y


# Other dtypes, buffers that are kept, results that are views of something larger


def in_fp32(exercise):
    """Communicates in fp32 and casts back, as if nothing were wider."""
    ours = getattr(tensor, exercise)

    def answer(x, *dim, group=None):
        return ours(x.float(), *dim, group=group).to(x.dtype)

    answer.__name__ = "in_fp32"
    return answer


for exercise in PAIRS:
    if exercise not in ("copy_to_group", "scatter_to_group"):
        wrong(exercise, says="(float64|int64) result(?s:.*)a cast is not asked for")(
            in_fp32(exercise)
        )

BUFFERS: dict = {}


def into_a_kept_buffer(y):
    """y, in memory that is allocated once for its shape."""
    kept = BUFFERS.setdefault((y.shape, y.dtype), torch.empty_like(y))
    return kept.copy_(y)


def kept(do):
    def kept_buffer(x, dim, group):
        return into_a_kept_buffer(do(x, dim, group))

    return kept_buffer


def scatter_part_of_whole(x, dim, group):
    """Receives where the whole would have room, and gives the view of what is its own."""
    mine = reduce_scattered(x, dim, group)
    whole = mine.new_empty(dist.get_world_size(group), *mine.shape)
    whole[0] = mine
    return whole[0]


for exercise, forward, backward in (
    ("copy_to_group", keep, kept(total)),
    ("reduce_from_group", kept(total), keep),
    ("gather_from_group", kept(gather), own),
    ("all_gather_to_group", gather, kept(scatter_sum)),
    ("scatter_to_group", own, kept(gather)),
    ("reduce_scatter_to_group", kept(scatter_sum), gather),
):
    answer = pair(forward, backward, exercise not in WITHOUT_DIM, "into_a_kept_buffer")
    wrong(exercise, says="changed the result or the gradient of the first")(answer)
wrong("reduce_scatter_to_group", says="times its bytes alive.*(?s:.*)clone it")(
    pair(scatter_part_of_whole, gather, True, "part_of_the_whole")
)


@right("gather_from_group")
def gathered_into_one_tensor(x, dim, group=None):
    def together(x):
        x = x.movedim(dim, 0).contiguous()
        y = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(y, x, group=group)
        return y.movedim(0, dim)

    return conjugate(x, together, lambda grad: own_slice(grad, dim, group))


@right("ColumnParallelLinear")
class ColumnThatKnowsItsRank(Column):
    def __init__(self, linear, group=None, gather_output=False):
        super().__init__(linear, group, gather_output)
        rank = torch.tensor(dist.get_rank(group), device=linear.weight.device)
        self.register_buffer("rank", rank, persistent=False)


@wrong("ColumnParallelLinear", says="dtypes of the shard")
class ColumnAlwaysFp32(Column):
    def __init__(self, linear, group=None, gather_output=False):
        super().__init__(linear, group, gather_output)
        empty = torch.empty(self.weight.shape, device=linear.weight.device)
        self.weight = nn.Parameter(empty.copy_(self.weight.detach()))


@wrong("RowParallelLinear", says="dtypes of the shard")
class RowAlwaysFp32(Row):
    def __init__(self, linear, group=None, input_is_parallel=True):
        super().__init__(linear, group, input_is_parallel)
        self.weight = nn.Parameter(self.weight.detach().float())


@wrong("RowParallelLinear", says="after one step")
class RowSumsInTrainingOnly(Row):
    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x)
        x = x if self.input_is_parallel else own_slice(x, -1, self.group)
        return F.linear(x, self.weight, self.bias)


@wrong("ParallelAttention", says="NoneType.*(?s:.*)Either layer may have none")
class BiasInBothOrNone(Attend):
    def forward(self, x, positions=None):
        y = reduce_from_group(self.partial(copy_to_group(x, self.group), positions), self.group)
        return y if self.q.bias is None else y + self.out.bias


@wrong("ParallelAttention", says="off by(?s:.*)size of a head")
class HeadsOfSix(Attend):
    def partial(self, x, positions=None):
        by_head = (-1, self.head_dim)
        q = self.q(x).unflatten(-1, by_head).transpose(1, 2)
        k, v = self._kv(x).unflatten(-1, by_head).transpose(1, 2).chunk(2, dim=1)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=6**-0.5, enable_gqa=q.shape[1] != k.shape[1]
        )
        return F.linear(y.transpose(1, 2).flatten(2), self.out.weight)


class _LastGradientWins(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, ids):
        ctx.save_for_backward(ids)
        ctx.rows = len(table)
        return table[ids]

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        here = grad.abs().sum(-1) > 0
        out = grad.new_zeros(ctx.rows, grad.shape[-1])
        out[ids[here]] = grad[here]
        return out, None


@wrong("VocabParallelEmbedding", says="occurs twice add up")
class RepeatedTokensOnce(Embed):
    def forward(self, tokens):
        local = tokens - self.first
        here = (local >= 0) & (local < len(self.weight))
        x = _LastGradientWins.apply(self.weight, local * here) * here[..., None]
        return reduce_from_group(x, self.group)


@wrong("vocab_parallel_cross_entropy", says="bf16 logits.*off by")
def loss_of_fp32_only(logits, targets, group=None):
    loss = vocab.vocab_parallel_cross_entropy(logits, targets, group)
    return loss if logits.dtype == torch.float32 else loss * 0


@wrong("vocab_parallel_cross_entropy", says="any number of dimensions")
def loss_of_two_dimensions(logits, targets, group=None):
    batch, seq = targets.shape if targets.dim() == 2 else (1, 1)
    flat = logits.reshape(batch * seq, -1)
    return vocab.vocab_parallel_cross_entropy(flat, targets.view(-1), group).view(batch, seq)


SEEN: list = []


@wrong("vocab_parallel_cross_entropy", says="logits of 2 of 2 calls")
def loss_that_keeps_logits(logits, targets, group=None):
    SEEN.append(logits)
    return vocab.vocab_parallel_cross_entropy(logits, targets, group)


@wrong("SequenceParallelBlock", says="under no_grad")
class NothingInEvaluation(Block):
    def forward(self, x):
        y = super().forward(x)
        return y if torch.is_grad_enabled() else y * 0
