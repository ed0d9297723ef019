"""Tensor parallelism: six conjugate pairs, two linear layers and attention (arXiv 1909.08053).

A tensor-parallel region is entered and left through a function that does one thing to the
activations going forward and the transposed thing to the gradients coming back. Everything else is
the ordinary layer on a shard of its weights.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..basics.tiny import causal_attention, rotate
from .group import Group

# What one rank does with a tensor; none of these is seen by autograd, none changes its input.


def all_reduced(x: Tensor, group: Group = None) -> Tensor:
    """The sum of every rank's x, in a new tensor."""
    x = x.clone(memory_format=torch.contiguous_format)  # all_reduce works in place
    dist.all_reduce(x, group=group)
    return x


def all_gathered(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """Every rank's x side by side along dim, in rank order."""
    x = x.contiguous()
    pieces = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, x, group=group)
    return torch.cat(pieces, dim)


def own_slice(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """This rank's equal part of x along dim, in memory of its own; ValueError if uneven."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    share = share_of(x.shape[dim], size, f"dimension {dim}")
    return x.narrow(dim, rank * share, share).clone(memory_format=torch.contiguous_format)


def reduce_scattered(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """This rank's equal part along dim of the sum over ranks; ValueError if uneven."""
    share = share_of(x.shape[dim], dist.get_world_size(group), f"dimension {dim}")
    pieces = [piece.contiguous() for piece in x.split(share, dim)]
    mine = torch.empty_like(pieces[0])
    dist.reduce_scatter(mine, pieces, group=group)
    return mine


def share_of(total: int, size: int, what: str) -> int:
    """total / size, or a ValueError that names what does not divide."""
    if total % size:
        raise ValueError(
            f"{what} is {total}, which {size} ranks cannot share equally; make it a multiple of "
            f"{size} or use fewer ranks"
        )
    return total // size


# The conjugate pairs. Megatron-LM calls the first two f and g, and their sequence-parallel versions
# (arXiv 2205.05198) g-bar, which is reduce_scatter_to_group, and its conjugate.


class _Conjugate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_fn = backward
        return forward(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.backward_fn(grad), None, None


def conjugate(x: Tensor, forward: Callable, backward: Callable) -> Tensor:
    """forward(x) to the activations; backward(grad) to the gradients on their way back."""
    return _Conjugate.apply(x, forward, backward)


def copy_to_group(x: Tensor, group: Group = None) -> Tensor:
    """f: x as it is; every rank uses it, so its gradient is the sum of what the ranks send back."""
    return conjugate(x, lambda x: x.view_as(x), lambda grad: all_reduced(grad, group))


def reduce_from_group(x: Tensor, group: Group = None) -> Tensor:
    """g: the sum of the ranks' partial x; each addend has the gradient of the sum."""
    return conjugate(x, lambda x: all_reduced(x, group), lambda grad: grad)


def gather_from_group(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """[.., n, ..] -> [.., P*n, ..], for a result that every rank then treats alike."""
    return conjugate(
        x, lambda x: all_gathered(x, dim, group), lambda grad: own_slice(grad, dim, group)
    )


def scatter_to_group(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """[.., P*n, ..], the same on every rank -> this rank's [.., n, ..]."""
    return conjugate(
        x, lambda x: own_slice(x, dim, group), lambda grad: all_gathered(grad, dim, group)
    )


def reduce_scatter_to_group(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """Partial [.., P*n, ..] -> this rank's part [.., n, ..] of the sum."""
    return conjugate(
        x, lambda x: reduce_scattered(x, dim, group), lambda grad: all_gathered(grad, dim, group)
    )


def all_gather_to_group(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """[.., n, ..] -> [.., P*n, ..], which each rank then uses for a different part of the work."""
    return conjugate(
        x, lambda x: all_gathered(x, dim, group), lambda grad: reduce_scattered(grad, dim, group)
    )


# Layers, each built from the full one, which is the same on every rank.


class ColumnParallelLinear(nn.Module):
    """[.., in] on every rank -> [.., out/P], or the full [.., out] with gather_output.

    weight [out/P, in] and bias [out/P] are this rank's rows of the full layer's.
    """

    def __init__(self, linear: nn.Linear, group: Group = None, gather_output: bool = False):
        super().__init__()
        self.group, self.gather_output = group, gather_output
        share_of(linear.out_features, dist.get_world_size(group), "out_features")
        w, b = linear.weight, linear.bias  # what is frozen in the full layer stays so
        self.weight = nn.Parameter(own_slice(w.detach(), 0, group), w.requires_grad)
        self.bias = None
        if b is not None:
            self.bias = nn.Parameter(own_slice(b.detach(), 0, group), b.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(copy_to_group(x, self.group), self.weight, self.bias)  # [.., out/P]
        return gather_from_group(y, -1, self.group) if self.gather_output else y


class RowParallelLinear(nn.Module):
    """[.., in/P], or the full [.., in] if not input_is_parallel -> [.., out] on every rank.

    weight [out, in/P] is this rank's columns of the full layer's; bias [out] is whole, and added
    once, after the sum.
    """

    def __init__(self, linear: nn.Linear, group: Group = None, input_is_parallel: bool = True):
        super().__init__()
        self.group, self.input_is_parallel = group, input_is_parallel
        share_of(linear.in_features, dist.get_world_size(group), "in_features")
        w, b = linear.weight, linear.bias
        self.weight = nn.Parameter(own_slice(w.detach(), 1, group), w.requires_grad)
        self.bias = None
        if b is not None:
            self.bias = nn.Parameter(b.detach().clone(), b.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = scatter_to_group(x, -1, self.group)  # [.., in/P]
        y = reduce_from_group(F.linear(x, self.weight), self.group)  # [.., out]
        return y if self.bias is None else y + self.bias


def take_rows(linear: nn.Linear, rows: Tensor) -> nn.Linear:
    """A linear layer of these output rows of the full one, in memory of its own."""
    mine = nn.Linear(linear.in_features, len(rows), linear.bias is not None, device="meta")
    for name, full in linear.named_parameters():
        setattr(mine, name, nn.Parameter(full.detach()[rows], full.requires_grad))
    return mine


class ParallelAttention(nn.Module):
    """Causal attention [B, S, D] -> [B, S, D] whose heads are split over the ranks.

    qkv's rows are q, then k, then v, each by head. Where there are more ranks than kv heads, P/Hkv
    consecutive ranks hold the same kv head, and the gradient of it is summed over them. q and k are
    rotated if the call gives positions [S].
    """

    def __init__(
        self,
        qkv: nn.Linear,
        out: nn.Linear,
        num_heads: int,
        num_kv_heads: int,
        group: Group = None,
    ):
        super().__init__()
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.group, self.heads = group, share_of(num_heads, size, "num_heads")
        if num_heads % num_kv_heads or (num_kv_heads % size and size % num_kv_heads):
            raise ValueError(
                f"{num_kv_heads} kv heads for {num_heads} heads can be neither split nor "
                f"replicated evenly over {size} ranks"
            )
        self.kv_heads, self.replicas = max(1, num_kv_heads // size), max(1, size // num_kv_heads)
        self.head_dim = qkv.out_features // (num_heads + 2 * num_kv_heads)

        q, k = rank * self.heads, num_heads + rank * num_kv_heads // size  # first heads of mine
        v = k + num_kv_heads
        rows = torch.arange(qkv.out_features, device=qkv.weight.device).view(-1, self.head_dim)
        self.q = take_rows(qkv, rows[q : q + self.heads].flatten())
        kv_rows = torch.cat((rows[k : k + self.kv_heads], rows[v : v + self.kv_heads]))
        self.kv = take_rows(qkv, kv_rows.flatten())
        self.out = RowParallelLinear(out, group)

    def _sum_replicas(self, grad: Tensor) -> Tensor:
        """The gradient of a kv head, summed over the ranks that hold the same one."""
        everyone = all_gathered(grad[None], 0, self.group)  # [P, ..]
        first = dist.get_rank(self.group) // self.replicas * self.replicas
        return everyone[first : first + self.replicas].sum(0)

    def kv_layer(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of this rank's k and v; gradients of shared heads are summed."""
        weight, bias = self.kv.weight, self.kv.bias
        if self.replicas > 1:
            weight = conjugate(weight, lambda w: w.view_as(w), self._sum_replicas)
            if bias is not None:
                bias = conjugate(bias, lambda b: b.view_as(b), self._sum_replicas)
        return weight, bias

    def _kv(self, x: Tensor) -> Tensor:
        return F.linear(x, *self.kv_layer())  # [B, S, 2 Hkv/P d]

    def mix(self, q: Tensor, kv: Tensor, positions: Tensor | None = None) -> Tensor:
        """q [B, S, H/P d] and kv [B, S, 2 Hkv/P d] -> this rank's addend of the output, no bias."""
        by_head = (-1, self.head_dim)
        q = q.unflatten(-1, by_head).transpose(1, 2)  # [B, H/P, S, d]
        k, v = kv.unflatten(-1, by_head).transpose(1, 2).chunk(2, dim=1)
        if positions is not None:
            q, k = rotate(q, positions), rotate(k, positions)
        y = causal_attention(q, k, v)  # [B, H/P, S, d]
        return F.linear(y.transpose(1, 2).flatten(2), self.out.weight)

    def partial(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """What this rank's heads add to the output, without the bias: [B, S, D] -> [B, S, D]."""
        return self.mix(self.q(x), self._kv(x), positions)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        y = reduce_from_group(self.partial(copy_to_group(x, self.group), positions), self.group)
        return y if self.out.bias is None else y + self.out.bias
