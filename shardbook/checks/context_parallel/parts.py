"""Chapter 24, in one process: merging partial attentions, and who holds which positions."""

import functools

import torch
from torch import Tensor

from ...devices import device
from ..compare import close, random
from ..functions import called
from ..report import check
from ..wrong import hints
from .whole import SIZES, positions


def _part(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return torch.softmax(scores, dim=-1) @ values, torch.logsumexp(scores, dim=-1)


def _merged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.stack([lse_a, lse_b]).double()  # [2, B, H, S]
    lse = both.logsumexp(0)
    share = (both - lse).exp().nan_to_num(0.0)[..., None]
    return (share[0] * out_a + share[1] * out_b).float(), lse.float()


@check("merge_attention")
def merge_attention(answer, report):
    """Two partial softmaxes."""
    scores, values = random(2, 3, 4, 11, seed=1), random(2, 3, 11, 5, seed=2)

    def sides(cut: int) -> tuple[Tensor, ...]:
        a, b = (
            _part(scores[..., :cut], values[:, :, :cut]),
            _part(scores[..., cut:], values[:, :, cut:]),
        )
        return (*a, *b)

    def drawn(seed: int) -> tuple[Tensor, ...]:
        shapes = [(2, 3, 4, 5), (2, 3, 4)] * 2
        return tuple(random(*shape, seed=seed + i) for i, shape in enumerate(shapes))

    it = report.function(answer, _merged, names=("out", "lse"))
    it.value(
        "two sets of keys merge to attention over both",
        *map(sides, (1, 4, 10)),
        oracle=lambda *_: _part(scores, values),
        hint="each side's output counts with exp(lse_side - lse of both); the lse of both is "
        "log(exp(lse_a) + exp(lse_b))",
    )
    a, _, b, _ = drawn(3)
    full = functools.partial(torch.full, (2, 3, 4))
    it.value(
        "scores of any size: nothing overflows, nothing becomes nan",
        *(
            called(f"where the lse are {one:g} and {two:g}", a, full(one), b, full(two))
            for one, two in ((300.0, 299.0), (-300.0, -301.0), (1e4, -1e4), (-1e4, 1e4))
        ),
        hint="exp of a difference that is at most 0 can't overflow; exp(lse) can",
    )
    out, lse, *_ = drawn(5)
    zero, nothing = torch.zeros(2, 3, 4, 5), full(-torch.inf)
    it.value(
        "a side that saw no key (lse -inf) changes nothing, two of them give 0 and -inf",
        called("where one side saw no key", out, lse, zero, nothing),
        called("where one side saw no key", zero, nothing, out, lse),
        called("where no side saw a key", zero, nothing, zero, nothing),
        called("where no side saw a key", out, nothing, zero, nothing),  # what it holds is nothing
        hint="-inf minus -inf is nan: treat the case where both saw nothing",
    )
    it.gradient(
        "gradients reach all four inputs",
        drawn(11),
        hint="merge with torch operations, outside no_grad",
    )
    with report.property(
        "the lse of bf16 outputs stays fp32",
        hint="bf16 has 8 bits: an lse of 100 in it is off by up to 0.25, its exp by a quarter",
    ):
        out_a, lse_a, out_b, lse_b = (x.to(device()) for x in sides(4))
        out, lse = answer(out_a.bfloat16(), lse_a + 100, out_b.bfloat16(), lse_b + 100)
        want, want_lse = _part(scores, values)
        close(lse, want_lse + 100, "lse")
        close(out.float(), want, "out of bf16 sides", 0.02)
    a, lse_a, b, lse_b = drawn(7)
    lse_a[0], lse_a[:, 1] = lse_a[0] + 500, -torch.inf
    lse_b[0], lse_b[..., 2] = lse_b[0] + 500, -torch.inf
    it.value(
        "each query by itself: rows of any size, and rows without keys, side by side",
        called("where rows differ", a, lse_a, b, lse_b),
        # around 500 numbers of fp32 lie 3e-5 apart, and so do the weights that come of them
        tolerance=1e-4,
        hint="take the larger lse of each row, not of the tensor, and choose with torch.where, "
        "not with an if",
    )


ALONG = ((0, (48, 3)), (1, (2, 24, 3)), (2, (2, 5, 48, 7)), (-1, (3, 24)))  # dimension, shape
GRADIENTS = "gradients go back to where the values came from"
DIFFERENTIABLE = "chunk and cat are differentiable"


def _zigzag(x: Tensor, world: int, rank: int, dim: int) -> Tensor:
    return x.index_select(dim, positions(x.shape[dim], world, rank, True))


@check("zigzag_shard")
def zigzag_shard(answer, report):
    """Chunks r and 2P-1-r."""
    it = report.function(answer, _zigzag)
    it.value(
        "rank r holds chunks r and 2P-1-r of 2P, in this order, along any dimension",
        *(
            called(f"of rank {rank} of {n} along dimension {dim}", random(*shape), n, rank, dim)
            for n in SIZES
            for dim, shape in ALONG
            for rank in range(n)
        ),
        tolerance=0.0,
        hint="2P chunks, not P; the early one first",
    )
    it.refuses(
        "ValueError where the length does not divide by twice the ranks",
        ((random(10, 3), 2, 0, 0), "10 positions over 2 ranks"),
        ((random(9, 3), 3, 1, 0), "9 positions over 3 ranks"),
        hint="unequal chunks would give ranks unequal work",
    )
    it.gradient(GRADIENTS, (random(3, 24), 3, 1, 1), hint=DIFFERENTIABLE)


@check("zigzag_unshard")
def zigzag_unshard(answer, report):
    """The inverse."""

    def whole(shards: list[Tensor], dim: int) -> Tensor:
        world, joined = len(shards), torch.cat(shards, dim)
        order = [positions(joined.shape[dim], world, r, True) for r in range(world)]
        return joined.index_select(dim, torch.cat(order).argsort())

    it = report.function(answer, whole)
    it.value(
        "the whole tensor from all ranks' shards, along any dimension",
        *(
            called(
                f"of {n} shards along dimension {dim}",
                [_zigzag(random(*shape, seed=n), n, r, dim) for r in range(n)],
                dim,
            )
            for n in SIZES
            for dim, shape in ALONG
        ),
        tolerance=0.0,
        hint="first halves in rank order, then second halves in the opposite order",
    )
    shards = [random(3, 8, seed=r) for r in range(3)]
    it.gradient(GRADIENTS, (shards, 1), hint=DIFFERENTIABLE)


@check("shard_positions")
def shard_positions(answer, report):
    """Positions for the rotary embedding."""

    def asked(*zigzag: bool) -> list:
        every = [(n, rank) for n in SIZES for rank in range(n)]
        return [called(f"of rank {r} of {n}", 48, n, r, *zigzag) for n, r in every]

    it = report.function(answer, positions, what="the positions")
    dtype = "positions look rows up in a table: their dtype is int64"
    it.value(
        "contiguous shards: rank r holds positions r S/P up to (r+1) S/P",
        *asked(),
        hint=hints("the positions count from the start of the WHOLE sequence", dtype=dtype),
    )
    it.value(
        "zigzag shards: the positions of chunks r and 2P-1-r",
        *asked(True),
        hint=hints("in the order in which zigzag_shard holds them", dtype=dtype),
    )
    it.refuses(
        "ValueError where the length does not divide",
        ((10, 4, 0), "10 positions over 4 ranks"),
        ((12, 4, 0, True), "12 positions over 4 ranks in a zigzag"),
        hint="by P, or by 2P for zigzag",
    )
